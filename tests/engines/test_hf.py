"""The transformers engine on tiny random models of every family that it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvant
from kvant.shape import ModelShape
from tests.conftest import relative_error

BASE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "qwen2": ("Qwen2", {"hidden_size": 384, "initializer_range": 0.08}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 24}),
    "gemma3": ("Gemma3", {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 64}),
}


def make_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    name, options = FAMILIES[family]
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**{**BASE, **options, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, 200, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
def test_full_gives_the_logits_of_transformers_own_cache(family: str) -> None:
    model = make_model(family)
    ids = prompt(2, 90)
    theirs, ours = DynamicCache(config=model.config), kvant.Cache(model, "full")
    with torch.inference_mode():
        for start, stop in ((0, 50), (50, 51), (51, 83), (83, 84), (84, 90)):
            expected = model(ids[:, start:stop], past_key_values=theirs).logits
            found = model(ids[:, start:stop], past_key_values=ours).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ours.get_seq_length() == theirs.get_seq_length() == 90
    assert ours.nbytes == ours.predicted_nbytes > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["greedy", "sample", "beams", "lookup", "chunked"])
def test_generate_from_the_full_cache_is_generate(family: str, mode: str) -> None:
    model = make_model(family)
    ids = prompt(1 if mode == "lookup" else 2, 40)
    options: dict[str, Any] = {
        "greedy": {},
        "sample": {"do_sample": True, "temperature": 1.5, "top_k": 0},
        "beams": {"num_beams": 3},
        "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
        "chunked": {"prefill_chunk_size": 17},
    }[mode]
    if "do_sample" not in options:
        options["do_sample"] = False
    options |= {"max_new_tokens": 16, "attention_mask": torch.ones_like(ids)}
    model.set_attn_implementation("sdpa")
    torch.manual_seed(3)
    expected = model.generate(ids, **options)
    cache = kvant.Cache(model, "full")
    torch.manual_seed(3)
    assert model.generate(ids, past_key_values=cache, **options).tolist() == expected.tolist()
    used = {page for group in cache.groups for seq in group.sequences for page in seq.pages if page >= 0}
    assert all(group.paged.pool.used <= len(used) * 2 for group in cache.groups)
    cache.reset()
    assert all(group.paged.pool.used == 0 for group in cache.groups), "nothing leaks"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(("recipe", "tolerance"), [("full", 1e-5), ("int8:sink=3,recent=10", 5e-3)])
def test_a_left_padded_batch_is_each_prompt_alone(family: str, recipe: str, tolerance: float) -> None:
    """A batch's matrix products differ from a row's in the last bit, which moves a code now and then: hence the tolerances,
    a fraction of a step; attention to padding would be off by all of the output."""
    model = make_model(family)
    lengths, new = [37, 9, 1, 20], 4
    ids, mask = torch.zeros(4, 37 + new, dtype=torch.int64), torch.zeros(4, 37 + new, dtype=torch.int64)
    for row, n in enumerate(lengths):
        ids[row, 37 - n :] = prompt(1, n + new)[0] - row
        mask[row, 37 - n :] = 1
    position = (mask.cumsum(1) - 1).clamp_min(0)

    def run(rows: slice, first: int) -> tuple[torch.Tensor, kvant.Cache]:
        cache, out = kvant.Cache(model, recipe), []
        with torch.inference_mode():
            for start, stop in ((first, 37), *((37 + i, 38 + i) for i in range(new))):
                part = slice(start, stop)
                out.append(
                    model(
                        ids[rows, part],
                        attention_mask=mask[rows, first:stop],
                        position_ids=position[rows, part],
                        past_key_values=cache,
                    ).logits[:, -1]
                )
        return torch.stack(out, 1), cache

    together, cache = run(slice(0, 4), 0)
    assert [seq.length for seq in cache.groups[0].sequences] == [n + new for n in lengths], "padding is not stored"
    for row, n in enumerate(lengths):
        alone, _ = run(slice(row, row + 1), 37 - n)
        assert relative_error(together[row], alone[0]) < tolerance


def test_beams_share_the_pages_of_their_prompt() -> None:
    model = make_model("llama")
    ids = prompt(1, 200)
    cache = kvant.Cache(model, "int4")
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, num_beams=4, do_sample=False, max_new_tokens=8
    )
    (group,) = cache.groups
    shared = set.intersection(*(set(seq.pages) for seq in group.sequences))
    assert len(shared) >= 3, "the beams come from one prompt and share its whole pages"
    assert group.paged.pool.used == len({page for seq in group.sequences for page in seq.pages})


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_sliding_layers_keep_their_window_only(family: str) -> None:
    model = make_model(family)
    ids = prompt(1, 300)
    cache = kvant.Cache(model, "int4", page_tokens=16)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    for group in cache.groups:
        assert group.paged.pool.used == (19 if group.sliding_window is None else 2)
    theirs = DynamicCache(config=model.config)
    ours = kvant.Cache(model, "full", page_tokens=16)
    with torch.inference_mode():
        for start, stop in ((0, 100), (100, 101), (101, 160), (160, 161)):
            expected = model(ids[:, start:stop], past_key_values=theirs).logits
            torch.testing.assert_close(
                model(ids[:, start:stop], past_key_values=ours).logits, expected, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("wrapped", [True, False])
def test_sliding_layers_keep_their_window_only_after_assisted_generation(wrapped: bool) -> None:
    model = make_model("mistral-sliding")
    cache = kvant.Cache(model, "full", page_tokens=16)
    ids = prompt(1, 200)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}

    def generate(**more: Any) -> None:
        if wrapped:
            cache.generate(model, ids, **options, **more)
        else:
            cache.reset()
            model.generate(ids, past_key_values=cache, **options, **more)

    generate(prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    assert all(layer.record_past for layer in cache.layers)
    generate()
    assert cache.groups[0].paged.pool.used <= 3


def test_crop_forgets_and_generation_goes_on() -> None:
    model = make_model("llama")
    ids = prompt(1, 100)
    cache, fresh = kvant.Cache(model, "int8"), kvant.Cache(model, "int8")
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        cache.crop(-30)
        assert cache.get_seq_length() == 70
        model(ids[:, :70], past_key_values=fresh)
        found = model(ids[:, 70:71], past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids[:, 70:71], past_key_values=fresh).logits, rtol=1e-5, atol=1e-5)
        cache.crop(50)
        assert cache.get_seq_length() == 50
    with pytest.raises(ValueError, match="cannot remove 51 of 50"):
        cache.crop(-51)


def test_batch_selection_and_repetition() -> None:
    model = make_model("llama")
    ids = prompt(3, 70)
    cache = kvant.Cache(model, "int4", implementation="reference")
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        found = model(prompt(1, 1).expand(4, 1), past_key_values=cache).logits
        for row, source in enumerate((2, 2, 0, 0)):
            alone = kvant.Cache(model, "int4", implementation="reference")
            model(ids[source : source + 1], past_key_values=alone)
            expected = model(prompt(1, 1), past_key_values=alone).logits
            torch.testing.assert_close(found[row], expected[0], rtol=1e-4, atol=1e-4)


def test_the_model_still_serves_other_caches_and_none() -> None:
    model = make_model("gemma3")
    ids = prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        kvant.Cache(model, "int4")
        found = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(found[1], expected[1])
        torch.testing.assert_close(found[0, 9:], expected[0, 9:])
        cached = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
        torch.testing.assert_close(cached[0, 9:], expected[0, 9:])


def test_a_full_pool_leaves_the_cache_usable() -> None:
    model = make_model("gemma3")
    cache = kvant.Cache(model, "int4", max_tokens=64)
    ids = prompt(1, 80)
    with torch.inference_mode():
        model(ids[:, :60], past_key_values=cache)
        size = cache.nbytes
        with pytest.raises(kvant.PoolFull, match="1 more pages were asked for, 0 of 1 are free"):
            model(ids[:, 60:70], past_key_values=cache)
        assert cache.get_seq_length() == 60
        fresh = kvant.Cache(model, "int4")
        model(ids[:, :60], past_key_values=fresh)
        found = model(ids[:, 60:64], past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids[:, 60:64], past_key_values=fresh).logits)
        assert cache.nbytes == size


def test_a_config_is_enough_and_the_batch_must_stay() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model.config, "int4")
    with torch.inference_mode():
        model(prompt(2, 5), past_key_values=cache)
        assert (cache.batch_size, cache.get_seq_length()) == (2, 5)
        with pytest.raises(ValueError, match="holds 2 sequences, the model was called with 3"):
            model(prompt(3, 1), past_key_values=cache)
        cache.reset()
        model(prompt(3, 1), past_key_values=cache)
        assert cache.batch_size == 3


def test_bfloat16_models_keep_their_type() -> None:
    model = make_model("llama").to(torch.bfloat16)
    cache = kvant.Cache(model, "int4:recent=4")
    with torch.inference_mode():
        logits = model(prompt(1, 20), past_key_values=cache).logits
        logits = model(prompt(1, 1), past_key_values=cache).logits
    assert logits.dtype == torch.bfloat16
    assert cache.groups[0].paged.stores[0].overlays["key"].dtype == torch.bfloat16
    assert cache.layout.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.DeepseekV3Config(), "latent attention"),
        (transformers.MambaConfig(), "cannot serve mamba"),
        (transformers.Qwen3NextConfig(), "linear_attention"),
        (3, "expected a transformers model or config, got int"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvant.Cache(config, "int4")


def test_masks_that_are_not_causal_are_refused() -> None:
    model = make_model("llama")
    kvant.Cache(model, "int4")
    ids = prompt(1, 10)
    mask = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    with torch.no_grad(), pytest.raises(ValueError, match="only causal attention with padded columns"):
        model(ids, attention_mask=mask, past_key_values=kvant.Cache(model, "int4"))
    with torch.no_grad(), pytest.raises(ValueError, match="expected a 2-D padding mask"):
        model(ids, attention_mask=mask.float(), past_key_values=kvant.Cache(model, "int4"))


def test_a_changed_attention_implementation_is_named() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    model.set_attn_implementation("sdpa")
    with pytest.raises(AttributeError, match="attention implementation 'kvant' alone"):
        model(prompt(1, 5), past_key_values=cache)


def test_shapes_are_read_from_configs() -> None:
    shape = ModelShape.of(make_model("gemma3"))
    assert shape.layers == (24, 24, 24, 24, 24, None, 24)
    assert (shape.heads, shape.head_dim, shape.dtype) == (2, 64, "float32")
    assert ModelShape.of(make_model("mistral").config).layers == (None, None, None)


@torch.no_grad()
def test_a_crop_by_a_tensor_is_one_by_a_number() -> None:
    """As assisted generation of older versions of transformers asks for it."""
    model, ids = make_model("llama"), torch.randint(3, 100, (1, 30))
    caches = [kvant.Cache(model, "int4") for _ in range(2)]
    for cache, amount in zip(caches, (-4, torch.tensor(-4)), strict=True):
        model(ids, past_key_values=cache)
        cache.crop(amount)
    first, second = (model(ids[:, 26:28], past_key_values=cache).logits for cache in caches)
    assert torch.equal(first, second) and caches[1].get_seq_length() == 28
