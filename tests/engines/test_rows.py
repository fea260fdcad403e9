"""Equal rows of a batch are stored once, as long as they are equal in every layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvant
from tests.conftest import relative_error
from tests.engines.test_hf import make_model, prompt

CLOSE = 0.02  # a batch of one adds in another order, which may move a code to the next
RECIPES = ["full", "int8", "int4:sink=2,recent=8", "kivi-k4v4:k.group=16,k.flush=16,v.recent=16"]


def steer(model: Any, rows: list[int], layer: int = 0) -> Any:
    """Changes what some rows of a batch hold behind a layer, as steering vectors and adapters do. What the hook is given decides the
    rows by their number in a batch of four, or by `rows` alone in a batch of one."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        hidden = (out[0] if isinstance(out, tuple) else out).clone()
        for row in rows if len(hidden) > 1 else [0] if hook.alone else []:  # type: ignore[attr-defined]
            hidden[row] = hidden[row].flip(-1) * 2.0 + 1.0
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    hook.alone = False  # type: ignore[attr-defined]
    model.model.layers[layer].register_forward_hook(hook)
    return hook


def logits(model: Any, cache: kvant.Cache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
    return out


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_that_differ_from_some_layer_on_are_stored_apart(family: str, recipe: str, layer: int) -> None:
    """Prompt, then a longer step, then decode: every row as it is alone."""
    model = make_model(family)
    hook = steer(model, [1, 3], layer)
    steps = [prompt(1, 45), prompt(1, 70)[:, 45:], prompt(1, 71)[:, 70:]]
    together = kvant.Cache(model, recipe)
    found = [logits(model, together, ids.expand(4, -1)) for ids in steps]
    for row in range(4):
        hook.alone = row in (1, 3)
        alone = kvant.Cache(model, recipe)
        for ids, got in zip(steps, found, strict=True):
            assert relative_error(got[row : row + 1], logits(model, alone, ids)) < CLOSE, row
    assert relative_error(found[0][0], found[0][1]) > 10 * CLOSE


@pytest.mark.parametrize("recipe", RECIPES)
def test_padded_rows_that_differ_later_are_stored_apart(recipe: str) -> None:
    model = make_model("llama")
    hook = steer(model, [2])
    ids = prompt(1, 50).repeat(4, 1)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    found = logits(model, kvant.Cache(model, recipe), ids, mask)
    for row in range(4):
        hook.alone = row == 2
        expected = logits(model, kvant.Cache(model, recipe), ids[:1], mask[:1])
        assert relative_error(found[row : row + 1], expected) < CLOSE, row


def test_equal_rows_share_their_pages_and_others_do_not() -> None:
    model = make_model("llama")
    ids = prompt(1, 200).repeat(4, 1)
    cache = kvant.Cache(model, "int8")
    logits(model, cache, ids)
    pages = [tuple(seq.pages) for seq in cache.state.groups[0].sequences]
    assert len(set(pages)) == 1
    cache.reset()
    steer(model, [1])
    logits(model, cache, ids)
    (group,) = cache.state.groups
    assert len({page for seq in group.sequences for page in seq.pages}) == sum(
        len(seq.pages) for seq in group.sequences
    )
    cache.reset()
    assert group.paged.pool.free == group.paged.pool.total


def test_where_no_pages_are_left_to_part_the_pass_is_taken_back() -> None:
    model = make_model("llama")
    hook = steer(model, [1])
    ids = prompt(1, 200).repeat(2, 1)
    cache = kvant.Cache(model, "int8", max_tokens=128, max_sequences=2)  # 256 tokens in all: one row of 200, not two
    with pytest.raises(kvant.PoolFull):
        logits(model, cache, ids)
    assert cache.state.lengths == []
    hook.alone = True
    found = logits(model, cache, ids[:1])
    assert torch.equal(found, logits(model, kvant.Cache(model, "int8"), ids[:1]))


def test_a_filled_cache_holds_what_each_row_was_given() -> None:
    model = make_model("llama")
    draw = torch.Generator().manual_seed(0)
    shape = model.config.num_key_value_heads, 20, model.config.head_dim
    first = torch.randn(1, *shape, generator=draw).repeat(2, 1, 1, 1)
    layers = [(first, first), *((torch.randn(2, *shape, generator=draw),) * 2 for _ in range(2))]
    cache = kvant.Cache(model, "full")
    cache.fill(torch.zeros(2, 20, dtype=torch.long), None, layers)
    for layer, (key, _) in enumerate(layers):
        assert torch.equal(cache.keys_as_read(layer)[:, :20], key.transpose(1, 2))


def test_a_cache_is_not_copied() -> None:
    """`copy.deepcopy` of a prompt's cache is transformers' way to reuse it; pages of two caches would be one another's."""
    cache = kvant.Cache(make_model("llama"), "int8")
    with pytest.raises(TypeError, match="share=True keeps prompts"):
        copy.deepcopy(cache)
