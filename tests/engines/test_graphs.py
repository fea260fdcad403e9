"""Steps of a static batch: bookkeeping on the device gives what bookkeeping on the host gives. Here without graphs; with them
in test_gpu.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import kvant
from kvant import recipes
from kvant.artifact import Artifact
from kvant.engines import graphs
from tests.engines.test_hf import make_model, prompt
from tests.fitted import made_up_tensors

eagerly = functools.partial(graphs.sample, capture=False)
RECIPES = [
    "full",
    "saw-int4",
    "int8:sink=3,recent=10",
    "oscar",
    "oscar:sink=3,recent=10",
    "kvant-4-fast",
    "kvant-2",
    "kivi-k2v2:k.group=16,k.flush=16,v.recent=16",
    "kitty:k.group=16,k.flush=16,sink=3",
    "squat:k.group=16,k.flush=16,v.recent=5,weight=0.1",
    "squat-pre:k.group=16,k.flush=16,v.recent=5",
]


def made_up_artifact(model: Any, recipe: str) -> Artifact | None:
    """One for a recipe that needs one."""
    found, shape = recipes.get(recipe), kvant.Cache(model.config, "int4").shape
    if not found.calibrated:
        return None
    layers = range(len(shape.layers))
    tensors = {layer: made_up_tensors(found, shape.heads, shape.head_dim) for layer in layers}
    return Artifact(found, shape.heads, shape.head_dim, len(shape.layers), tensors)


def ragged(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded to the left."""
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.int64)
    for row, n in enumerate(lengths):
        ids[row, -n:], mask[row, -n:] = prompt(len(lengths), n)[row], 1
    return {"inputs": ids, "attention_mask": mask}


def assert_same_cache(found: kvant.Cache, expected: kvant.Cache) -> None:
    assert found.get_seq_length() == expected.get_seq_length()
    assert str(found.state.padding_mask) == str(expected.state.padding_mask)
    for mine, theirs in zip(found.groups, expected.groups, strict=True):
        assert mine.paged.pool.used == theirs.paged.pool.used
        for a, b in zip(mine.sequences, theirs.sequences, strict=True):
            assert (a.length, a.sinks, a.ring_start, len(a.pages)) == (b.length, b.sinks, b.ring_start, len(b.pages))
            for one, other in zip(mine.paged.stores, theirs.paged.stores, strict=True):
                if mine.sliding_window is None:  # of a sliding one, pages are used again and end in anything
                    assert torch.equal(one.pages[a.held], other.pages[b.held])
                for x, y in zip(one.owned, other.owned, strict=True):
                    rows = [owned[seq.overlay_row].float().nan_to_num(7) for owned, seq in ((x, a), (y, b))]
                    assert torch.equal(*rows)
    for layer in range(len(found.layers)):
        rows = [
            cache.keys_as_read(layer)[:, : max(e.length for e in found.groups[0].sequences)]
            for cache in (found, expected)
        ]
        assert torch.equal(*rows)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_tokens_and_pages_are_those_of_the_engine(family: str, recipe: str, implementation: str | None) -> None:
    """Ragged prompts, one of a single token; generation crosses pages, sinks and rings."""
    model = make_model(family)
    artifact = made_up_artifact(model, recipe)
    caches, said = [], []
    for options in ({}, {"custom_generate": eagerly}):
        cache = kvant.Cache(model, recipe, artifact=artifact, implementation=implementation, page_tokens=16)
        batch = ragged([40, 17, 1])
        said.append(model.generate(**batch, **options, past_key_values=cache, max_new_tokens=40, do_sample=False))
        caches.append(cache)
    assert torch.equal(*said)
    assert_same_cache(caches[1], caches[0])


def test_sampling_stopping_and_going_on_are_those_of_transformers() -> None:
    """Logits processors, an end of text that some sequences meet early, a streamer, scores, and a chat after it."""
    model = make_model("llama")
    ids = prompt(3, 30)
    greedy = model.generate(ids, past_key_values=kvant.Cache(model, "full"), max_new_tokens=12, do_sample=False)
    options = {"do_sample": True, "temperature": 1.3, "top_k": 9, "repetition_penalty": 1.1, "max_new_tokens": 50}
    options |= {"eos_token_id": sorted(set(greedy[:, 30:].flatten().tolist())), "output_scores": True}
    outputs, caches = [], []
    for method in (None, eagerly):
        cache = kvant.Cache(model, "int4:sink=3,recent=10", share=True)
        torch.manual_seed(8)
        out = model.generate(
            ids, past_key_values=cache, custom_generate=method, return_dict_in_generate=True, **options
        )
        assert out.sequences.shape[1] < 80, "all sequences met the end"
        outputs.append(out)
        cache.finish(out.sequences)
        longer = torch.cat((out.sequences, prompt(3, 20)), 1)
        caches.append((cache, cache.generate(model, longer, max_new_tokens=5, do_sample=False), cache.reused))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(outputs[0].scores, outputs[1].scores, strict=True))
    assert torch.equal(caches[0][1], caches[1][1]) and caches[0][2] == caches[1][2] > 0
    assert_same_cache(caches[1][0], caches[0][0])


def test_samples_of_one_prompt_share_its_pages() -> None:
    model = make_model("llama")
    said = []
    for method in (None, eagerly):
        cache = kvant.Cache(model, "int4")
        torch.manual_seed(2)
        said.append(
            model.generate(
                prompt(1, 100),
                past_key_values=cache,
                custom_generate=method,
                do_sample=True,
                num_return_sequences=3,
                max_new_tokens=40,
            )
        )
        (group,) = cache.groups
        assert group.paged.pool.used == 1 + 3 * 2, "of 139 tokens the first 64 are the prompt's alone"
    assert torch.equal(*said)


def read(model: Any, recipe: str = "int4", batch: int = 2, **options: Any) -> kvant.Cache:
    cache = kvant.Cache(model, recipe, **options)
    with torch.inference_mode():
        model(prompt(batch, 50), past_key_values=cache)
    return cache


def test_steps_are_taken_one_by_one() -> None:
    model = make_model("qwen3")
    cache, other = read(model), read(model)
    (group,) = cache.groups
    with torch.no_grad(), cache.decoder(model, 30, graph=False) as decode:
        assert group.paged.pool.used == 2 * 2, "room for all steps"
        for token in range(20):
            found = decode(torch.tensor([token, 7]))
            expected = model(torch.tensor([[token], [7]]), past_key_values=other).logits[:, -1]
            torch.testing.assert_close(found, expected)
            cache.crop(0)  # forgets nothing
            assert cache.get_seq_length() == 51 + token
        with pytest.raises(ValueError, match="one token for each of 2 sequences, got \\[3\\]"):
            decode(torch.zeros(3))
        with pytest.raises(RuntimeError, match="belongs to a decoder"):
            model(prompt(2, 3), past_key_values=cache)
    assert_same_cache(cache, other)
    with pytest.raises(ValueError, match="this decoder is closed"):
        decode(torch.tensor([1, 2]))
    decode = cache.decoder(model, 1, graph=False)
    decode(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="pages were taken for 1 steps"):
        decode(torch.tensor([1, 2]))
    cache.crop(-1)
    assert decode.closed, "any other use of the cache closes it"
    assert cache.get_seq_length() == cache.groups[0].sequences[0].length == 70


def test_room_is_taken_for_all_groups_or_for_none() -> None:
    model = make_model("gemma3")
    cache = read(model, max_tokens=64, batch=1)
    before = cache.nbytes_used
    with pytest.raises(kvant.PoolFull):
        cache.decoder(model, 30, graph=False)
    assert cache.nbytes_used == before
    with cache.decoder(model, 14, graph=False) as decode:
        decode(torch.tensor([3]))
    assert cache.get_seq_length() == 51


def test_a_decoder_that_cannot_be_made_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    cache = read(model)
    before = cache.nbytes_used, cache.groups[0].sequences[0].length
    with monkeypatch.context() as patch:
        patch.setattr(type(model.config), "get_text_config", lambda self, decoder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.decoder(model, 30, graph=False)
    assert (cache.nbytes_used, cache.groups[0].sequences[0].length) == before


def test_a_number_that_cannot_be_stored_takes_its_step_back() -> None:
    model = make_model("llama")
    cache, other = read(model, "int4:sink=3,recent=10"), read(model, "int4:sink=3,recent=10")
    decode = cache.decoder(model, 5, graph=False)
    decode(torch.tensor([4, 5]))
    with torch.no_grad():
        model(torch.tensor([[4], [5]]), past_key_values=other)
        weight = model.model.layers[1].self_attn.k_proj.weight
        kept = weight[0, 0].clone()
        weight[0, 0] = float("nan")
        with pytest.raises(kvant.NotFinite, match="layer 1: the key or value of token 51 of sequence 0 holds nan"):
            decode(torch.tensor([6, 7]))
        weight[0, 0] = kept
        assert decode.closed and cache.get_seq_length() == 51
        model(torch.tensor([[8], [9]]), past_key_values=other)
        other.crop(-1)  # windows have let a token go for what was taken back, here as there
        logits = [model(torch.tensor([[6], [7]]), past_key_values=each).logits for each in (cache, other)]
    assert torch.equal(*logits)
    assert_same_cache(cache, other)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("zipcache", "recipe zipcache learns from queries on the host"),
        ("saw-int4", "model and cache must lie on one CUDA device, and they lie on cpu"),
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_is_computed(recipe: str, message: str) -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, recipe)
    with pytest.raises(ValueError, match=f"cannot generate in a CUDA graph: .*{message}"):
        cache.generate(model, prompt(1, 20), graph=True, max_new_tokens=3)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="holds no sequences"):
        cache.decoder(model, 3)
    with pytest.raises(ValueError, match=f"cannot decode in a CUDA graph: .*{message}"):
        read(model, recipe).decoder(model, 3)


def test_beams_and_other_caches_are_refused() -> None:
    model = make_model("llama")
    ids = prompt(1, 20)
    with pytest.raises(ValueError, match="beam_search changes the batch between steps"):
        model.generate(
            ids, past_key_values=kvant.Cache(model, "int4"), custom_generate=eagerly, num_beams=2, max_new_tokens=2
        )
    with pytest.raises(ValueError, match="needs a kvant.Cache, got DynamicCache"):
        model.generate(ids, custom_generate=eagerly, max_new_tokens=2)
