"""as_decoded=True: one forward pass over a text gives the logits of tokens that come one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvant
from kvant.ops import LayerStore
from tests.conftest import relative_error
from tests.engines.test_hf import make_model, prompt

# A product of many rows may differ from that of one in its last bit, which moves a code now and then. In one layer that is all
# it does; through several, 2 bits and random weights would make much of it.
ONE_LAYER, SAME = {"num_hidden_layers": 1}, 0.01


def read(model: object, ids: torch.Tensor, chunks: list[int], recipe: str, **options: object) -> torch.Tensor:
    """Logits of a text that is fed in chunks."""
    cache, out, at = kvant.Cache(model, recipe, **options), [], 0
    with torch.inference_mode():
        for chunk in chunks:
            out.append(model(ids[:, at : at + chunk], past_key_values=cache).logits)  # type: ignore[operator]
            at += chunk
    return torch.cat(out, 1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("recipe", ["int2", "int2:sink=3,recent=10", "kivi-k2v2:k.group=16,k.flush=16,v.recent=5"])
def test_a_text_in_one_pass_scores_as_it_would_decode(family: str, recipe: str) -> None:
    model = make_model(family, **ONE_LAYER)
    ids = prompt(2, 80)
    stepwise = read(model, ids, [1] * 80, recipe)
    for chunks in ([80], [30, 1, 49]):
        assert relative_error(read(model, ids, chunks, recipe, as_decoded=True), stepwise) < SAME
    with torch.inference_mode():
        full = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    flattered = read(model, ids, [80], recipe)
    assert relative_error(flattered, full) < 1e-4, "new tokens see each other unpacked"
    assert relative_error(stepwise, full) > 0.05, "what decode really costs"


@pytest.mark.parametrize("recipe", ["int2:sink=3,recent=10", "kitty:k.group=16,k.flush=16,v.recent=5,sink=9"])
def test_rows_of_a_padded_batch_score_as_they_do_alone(recipe: str) -> None:
    model = make_model("llama", **ONE_LAYER)
    ids, mask = prompt(3, 60), torch.ones(3, 60, dtype=torch.int64)
    mask[1, :33], mask[2, :59] = 0, 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    cache = kvant.Cache(model, recipe, as_decoded=True)
    with torch.inference_mode():
        found = model(ids, attention_mask=mask, position_ids=position, past_key_values=cache).logits
    for row, n in enumerate((60, 27, 1)):
        alone = read(model, ids[row : row + 1, 60 - n :], [1] * n, recipe)
        assert relative_error(found[row, 60 - n :], alone[0]) < SAME


def test_padding_asks_for_no_codes_that_pages_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has ended: its padding is longer than a group, and pages hold NaN where nothing was written."""
    allocate = LayerStore.allocate

    def poisoned(*args: Any) -> LayerStore:
        store = allocate(*args)
        store.pages.fill_(255)  # NaN as float16
        return store

    monkeypatch.setattr(LayerStore, "allocate", poisoned)
    model, recipe = make_model("llama", **ONE_LAYER), "gear-l"  # groups of 128 tokens
    ids, mask = prompt(2, 160), torch.ones(2, 160, dtype=torch.int64)
    mask[1, 27:] = 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    cache, found = kvant.Cache(model, recipe, as_decoded=True, max_tokens=256, max_sequences=2), []
    with torch.inference_mode():
        for begin, end in ((0, 20), (20, 160)):
            options = {"attention_mask": mask[:, :end], "position_ids": position[:, begin:end]}
            found.append(model(ids[:, begin:end], past_key_values=cache, **options).logits)
    for row, n in enumerate((160, 27)):
        alone = read(model, ids[row : row + 1, :n], [1] * n, recipe)
        assert relative_error(torch.cat(found, 1)[row, :n], alone[0]) < SAME


def test_samples_of_one_text_and_the_old_name() -> None:
    model = make_model("llama", **ONE_LAYER)
    ids = prompt(1, 40).expand(3, 40)
    found = read(model, ids, [40], "int2", as_decoded=True)
    assert relative_error(found, read(model, ids, [1] * 40, "int2")) < SAME
    cache = kvant.Cache(model, "int2")
    with pytest.warns(DeprecationWarning, match="now called Cache.as_decoded"):
        cache.one_by_one = True
    with pytest.warns(DeprecationWarning, match="now called Cache.as_decoded"):
        assert cache.one_by_one
    assert cache.as_decoded
