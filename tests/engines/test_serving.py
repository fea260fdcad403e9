"""What a server does with a kvant.Cache: chats that go on, shared prefixes, samples of one prompt, swapping, snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvant
from tests.conftest import relative_error
from tests.engines.test_hf import make_model, prompt

RECIPES = ["full", "int4:sink=2,recent=9", "kivi-k2v2:k.group=16,k.flush=16,v.recent=5"]


def count_columns(cache: kvant.Cache, model: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """cache.generate, and how many columns each forward pass had."""
    columns: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, inputs, named: columns.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        return cache.generate(model, *args, do_sample=options.pop("do_sample", False), **options), columns
    finally:
        hook.remove()


def used(cache: kvant.Cache) -> list[int]:
    return [group.paged.pool.used for group in cache.groups]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("share", [False, True])
def test_a_chat_that_goes_on_computes_only_what_is_new(family: str, share: bool) -> None:
    model = make_model(family)
    cache = kvant.Cache(model, "full", share=share)
    model.set_attn_implementation("sdpa")
    ids = prompt(1, 50)
    expected = [ids]
    for turn in range(3):
        whole = expected[-1]
        expected.append(model.generate(whole, attention_mask=torch.ones_like(whole), do_sample=False, max_new_tokens=9))
        expected[-1] = torch.cat((expected[-1], prompt(1, 12 + turn)), 1)
    model.set_attn_implementation("kvant")
    text = ids
    for turn in range(3):
        out, columns = count_columns(cache, model, text, max_new_tokens=9)
        assert columns[0] == (50 if turn == 0 else 13 + turn - 1), "the answer's last token was not stored"
        text = torch.cat((out, prompt(1, 12 + turn)), 1)
        assert text.tolist() == expected[turn + 1].tolist()
    # another answer was given in the meantime: what agrees is taken up
    other = text.clone()
    other[0, 70:] = 3
    if family == "llama":
        _, columns = count_columns(cache, model, other, max_new_tokens=1)
        assert columns == [other.shape[1] - 70]


@pytest.mark.parametrize("how", ["lookup", "model", "config"])
@pytest.mark.parametrize("share", [False, True])
def test_a_chat_goes_on_with_assisted_generation(how: str, share: bool) -> None:
    """transformers feeds the whole prompt to assisted generation, whatever its cache holds: nothing is taken up for it."""
    model = make_model("llama")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    lookup: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    assisted: dict[str, Any] = {
        "lookup": options | lookup,
        "model": options | {"assistant_model": make_model("llama", num_hidden_layers=1)},
        "config": {"generation_config": transformers.GenerationConfig(**options, **lookup, pad_token_id=0)},
    }[how]
    cache = kvant.Cache(model, "full", share=share)
    first = cache.generate(model, prompt(1, 20), **options)
    longer = torch.cat((first, prompt(1, 9)), 1)
    expected = kvant.Cache(model, "full").generate(model, longer, **options)
    for reused, asked in ((0, assisted), (40, options)):
        assert cache.generate(model, longer, **asked).tolist() == expected.tolist()
        assert cache.reused == reused


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_request_takes_up_the_prefix_of_the_first(recipe: str) -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, recipe, share=True)
    system = prompt(1, 100)
    first, second = (torch.cat((system, prompt(1, n) - 1), 1) for n in (11, 7))
    second[0, 100:] += 1
    cache.generate(model, first, do_sample=False, max_new_tokens=5)
    cache.reset()
    assert used(cache) == [2], "pages that are kept stay"
    out, columns = count_columns(cache, model, second, max_new_tokens=5)
    # token-wise: all 100 tokens, the last 36 in a page that is copied; groups of 16: the 96 that are whole
    assert columns[0] == (7 if "kivi" not in recipe else 11)
    if recipe == "full":
        alone = kvant.Cache(model, recipe).generate(model, second, do_sample=False, max_new_tokens=5)
        assert out.tolist() == alone.tolist()
    cache.start(second, salt="someone else")
    assert cache.get_seq_length() == 0, "another tenant finds nothing"
    assert cache.start(second) == (106 if "kivi" not in recipe else 96)
    cache.reset()
    for group in cache.groups:
        group.paged.prefix.clear()
    assert used(cache) == [0]


def test_rows_with_padding_share_what_all_of_them_can() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "full", share=True)
    texts = [prompt(1, 90)[0], prompt(1, 40)[0] + 1 - 1, prompt(1, 70)[0]]
    texts[1] = texts[1].flip(0)
    ids, mask = torch.zeros(3, 90, dtype=torch.int64), torch.zeros(3, 90, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, 90 - len(text) :], mask[row, 90 - len(text) :] = text, 1
    expected = cache.generate(model, ids, mask, do_sample=False, max_new_tokens=6)
    cache.reset()
    found, columns = count_columns(cache, model, ids, mask, max_new_tokens=6)
    assert columns[0] == 1
    assert found.tolist() == expected.tolist()
    longer = torch.cat((ids, torch.full((3, 4), 7)), 1)
    more = torch.cat((mask, torch.ones(3, 4, dtype=torch.int64)), 1)
    cache.reset()
    _, columns = count_columns(cache, model, longer, more, max_new_tokens=1)
    assert columns == [4]
    assert [seq.length for seq in cache.groups[0].sequences] == [94, 44, 74]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("recipe", [*RECIPES, "kitty:k.group=16,k.flush=16,v.recent=5,sink=9"])
def test_samples_of_one_prompt_store_it_once(recipe: str, wrapped: bool) -> None:
    model = make_model("llama")
    ids = prompt(2, 130)
    cache = kvant.Cache(model, recipe)
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 0,
        "max_new_tokens": 6,
        "num_return_sequences": 5,
    }
    torch.manual_seed(1)
    if wrapped:
        out = cache.generate(model, ids, **options)
    else:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    (group,) = cache.groups
    pages = [seq.pages for seq in group.sequences]
    whole = (130 - cache.recipe.origin) // 64
    for row in range(10):
        assert pages[row][:whole] == pages[row // 5 * 5][:whole]
    assert len({tuple(row) for row in out.tolist()}) > 2
    assert group.paged.pool.used == len({page for each in pages for page in each})
    # each goes on as if it had been alone
    last = torch.randint(2, 200, (10, 1))
    with torch.inference_mode():
        found = model(last, past_key_values=cache).logits
        for row in (0, 3, 9):
            alone = kvant.Cache(model, recipe)
            model(ids[row // 5 : row // 5 + 1], past_key_values=alone)
            for i in range(130, out.shape[1] - 1):
                model(out[row : row + 1, i : i + 1], past_key_values=alone)
            expected = model(last[row : row + 1], past_key_values=alone).logits
            assert relative_error(found[row], expected[0]) < (1e-5 if recipe == "full" else 0.05)


def test_rows_that_only_look_alike_are_not_shared() -> None:
    """The same second chunk after different first ones, and the same text with other padding."""
    model = make_model("llama")
    first, chunk = prompt(2, 40), prompt(1, 30).expand(2, 30)
    for recipe in RECIPES:
        cache = kvant.Cache(model, recipe)
        with torch.inference_mode():
            model(first, past_key_values=cache)
            model(chunk, past_key_values=cache)
        one, two = cache.groups[0].sequences
        assert not set(one.pages) & set(two.pages)
        assert one.length == two.length == 70


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loaded_or_swapped_cache_goes_on_with_the_same_logits(family: str, recipe: str, tmp_path: Path) -> None:
    model = make_model(family)
    ids = prompt(3, 90)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    cache = kvant.Cache(model, recipe, share=True, page_tokens=32)
    with torch.inference_mode():
        model(ids[:, :77], attention_mask=mask[:, :77], position_ids=position[:, :77], past_key_values=cache)
        cache.finish(ids[:, :77], mask[:, :77])
        path = cache.save(tmp_path / "chat.kvant")
        loaded = kvant.Cache.load(path, model)
        swapped = cache.swap_out()
        assert [len(group.paged.sequences) for group in cache.groups] == [0] * len(cache.groups)
        model(ids[:1, :30], past_key_values=cache)  # someone else
        with pytest.raises(ValueError, match="holds 1 sequences: reset it or swap them out first"):
            cache.swap_in(swapped)
        cache.reset()
        cache.swap_in(swapped)
        expected = kvant.Cache(model, recipe, page_tokens=32)
        model(ids[:, :77], attention_mask=mask[:, :77], position_ids=position[:, :77], past_key_values=expected)
        for start, stop in ((77, 78), (78, 88), (88, 90)):
            options = {"attention_mask": mask[:, :stop], "position_ids": position[:, start:stop]}
            logits = [
                model(ids[:, start:stop], past_key_values=each, **options).logits for each in (expected, cache, loaded)
            ]
            assert torch.equal(logits[0], logits[1])
            assert torch.equal(logits[0], logits[2])
    assert (loaded.get_seq_length(), loaded.batch_size) == (90, 3)
    assert loaded.nbytes == loaded.predicted_nbytes
    if family == "llama" and "kivi" not in recipe:
        assert loaded.start(torch.cat((ids[:, :77], ids[:, :5]), 1), torch.cat((mask[:, :77], mask[:, 80:85]), 1)) == 77


def test_what_a_snapshot_was_made_with_is_needed_again(tmp_path: Path) -> None:
    model, other = make_model("llama"), make_model("llama", num_hidden_layers=2)
    cache = kvant.Cache(model, "int4")
    with pytest.raises(ValueError, match="nothing to save"):
        cache.save(tmp_path / "x")
    with torch.inference_mode():
        model(prompt(1, 20), past_key_values=cache)
    path = cache.save(tmp_path / "x")
    with pytest.raises(ValueError, match="is of another cache: its digest is .* recipe, layout, artifact and model"):
        kvant.Cache.load(path, other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    with pytest.raises(ValueError, match="is of another cache"):
        kvant.Cache.load(path, model)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        kvant.Cache.load(tmp_path / "y", model)
    with pytest.raises(ValueError, match="there is no directory"):
        cache.save(tmp_path / "no" / "x")
    with pytest.raises(ValueError, match="recipe squat cannot share pages between requests: key Subspace"):
        kvant.Cache(model, "squat", share=True)


def test_a_full_pool_gives_up_prefixes_first_and_then_says_what_could_be_freed() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4", share=True, max_tokens=5 * 64)
    for n in range(4):
        cache.generate(model, (prompt(1, 100) + n) % 190 + 2, do_sample=False, max_new_tokens=2)
        cache.reset()
    assert used(cache) == [5], "the oldest prefix made room"
    with pytest.raises(kvant.PoolFull, match="6 more pages were asked for, .* more are held by the prefix cache alone"):
        cache.generate(model, prompt(1, 330), do_sample=False, max_new_tokens=2)
    cache.generate(model, prompt(1, 300), do_sample=False, max_new_tokens=2)
    assert cache.get_seq_length() == 301


def test_a_pass_that_breaks_off_between_layers_is_taken_back() -> None:
    model = make_model("llama")
    cache, expected = kvant.Cache(model, "int4:recent=5"), kvant.Cache(model, "int4:recent=5")
    ids = prompt(1, 40)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.inference_mode():
        for each in (cache, expected):
            model(ids[:, :30], past_key_values=each)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 30:40], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="broke off between layers: it has been taken back; call again"):
            model(ids[:, 30:40], past_key_values=cache)
        assert cache.get_seq_length() == 30
        model(ids[:, 30:40], past_key_values=expected)
        expected.crop(-10)  # the recent window is as short
        for start, end in ((30, 31), (31, 40)):
            found = model(ids[:, start:end], past_key_values=cache).logits
            assert torch.equal(found, model(ids[:, start:end], past_key_values=expected).logits)
