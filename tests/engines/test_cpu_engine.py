"""The transformers engine on a CPU takes the compiled operations, and what the model says with them is what it says with the
reference."""

from __future__ import annotations

import pytest
import torch

import kvant
from kvant.ops.cpu import library
from tests.conftest import relative_error
from tests.engines.test_hf import make_model, prompt

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"nothing compiled: {library.missing()}")

RECIPES = ["full", "int8", "int4", "saw-int4:sink=3,recent=20", "quarot-int2-win", "kivi-k2v2", "kitty", "squat"]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_are_those_of_the_reference(recipe: str, kind: str) -> None:
    model = make_model(kind)
    ids = prompt(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    said = []
    for implementation in (None, "reference"):
        cache = kvant.Cache(model, recipe, implementation=implementation)
        with torch.inference_mode():
            parts = [model(ids[:, :100], attention_mask=mask[:, :100], past_key_values=cache).logits[:, 40:]]
            for at in range(100, 110):
                parts.append(model(ids[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=cache).logits)
            parts.append(model(ids[:, 110:], attention_mask=mask, past_key_values=cache).logits)
        said.append(torch.cat(parts, 1))
        assert {g.paged.ops["decode"].name for g in cache.groups} == {implementation or "cpu"}
    # 2e-3 at most of each attention, and the codes that this turns over in the next layers
    assert relative_error(said[0], said[1]) < 2e-2


def test_pages_are_in_the_order_of_lanes() -> None:
    model = make_model("llama")
    assert kvant.Cache(model, "int4").layout.order == "lanes"
    assert kvant.Cache(model, "int4", order="fragment").layout.order == "fragment"
