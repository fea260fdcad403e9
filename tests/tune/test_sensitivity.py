"""Sensitivity is that of the model's output: predictions agree with what is measured through the packed cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvant
from kvant import recipes
from kvant.artifact import Artifact
from kvant.eval import Segments, evaluate
from kvant.recipe import MixedRecipe, Window
from kvant.tune.sensitivity import Choice, Sensed, gradients, measure, tapped
from tests.engines.test_hf import make_model, prompt
from tests.fitted import made_up_tensors

WINDOW = Window(3, 8)
INT = "int{}:sink=3,recent=8"


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_gradients_are_those_of_the_outputs(family: str) -> None:
    """Against a small change of one layer's output, and the model is afterwards as it was."""
    model = make_model(family).double()
    ids = prompt(1, 40)[0]
    before = model.config._attn_implementation
    with tapped(model) as taps:
        torch.manual_seed(0)
        (found,) = gradients(model, taps, ids, 1, torch.Generator().manual_seed(3))
        with torch.no_grad():
            exact = model(ids[None], use_cache=False).logits[0]
            p = exact.float().log_softmax(-1).exp()
            drawn = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(3))
            attend, change = taps.attend, torch.randn_like(found[1]) * 1e-4

            def changed(layer: int, *args: object) -> torch.Tensor:
                out = attend(layer, *args)  # type: ignore[arg-type]
                return out + change[None] if layer == 1 else out

            taps.attend = changed  # type: ignore[method-assign]
            other = model(ids[None], use_cache=False).logits[0]
        moved = (other.log_softmax(-1) - exact.log_softmax(-1)).gather(-1, drawn).sum()
        assert float(moved) == pytest.approx(float((found[1] * change).sum()), rel=2e-2)
    assert model.config._attn_implementation == before
    assert all(parameter.requires_grad for parameter in model.parameters()) and not model.training


def test_the_prediction_is_what_the_packed_cache_shows() -> None:
    """One stream of one layer is coded: the measured KL is the predicted one, within what sampling successors leaves open."""
    model = make_model("llama", initializer_range=0.1)
    fine, coarse, full = (recipes.get(INT.format(bits)) for bits in (8, 3, 8))
    ids = prompt(4, 161)
    choices = [Choice("key", coarse), Choice("value", coarse), Choice("value", fine)]
    table = measure(model, list(ids[:, :160]), choices, {coarse: {}, fine: {}}, [WINDOW], draws=8, queries=120)
    assert table.tokens == 4 * 120
    for layer in range(3):
        for choice, stream in ((choices[0], "key"), (choices[1], "value")):
            own = {"key": full.key, "value": full.value, stream: choice.spec}
            one = kvant.Recipe("one", own["key"], own["value"])
            mixed = MixedRecipe.of("m", full, [one if i == layer else full for i in range(3)])
            (found,) = evaluate(model, [mixed], Segments(ids, 40))
            assert table.kl[WINDOW, layer, choice] == pytest.approx(found.kl, rel=0.5), (layer, stream, found.kl)
        assert table.kl[WINDOW, layer, choices[2]] < 0.01 * table.kl[WINDOW, layer, choices[1]]


def test_a_window_over_everything_leaves_no_error() -> None:
    model = make_model("llama")
    recipe = recipes.get(INT.format(2))
    wide = Window(3, 64)
    choices = [Choice("key", recipe), Choice("value", recipe)]
    table = measure(model, [prompt(1, 60)[0]], choices, {recipe: {}}, [WINDOW, wide])
    for layer in range(3):
        for choice in choices:
            assert table.kl[wide, layer, choice] == pytest.approx(0.0, abs=1e-12)
            assert table.kl[WINDOW, layer, choice] > 0.0


def test_keys_that_are_stored_unrotated_and_calibrated() -> None:
    """More bits, less KL, in every layer."""
    model = make_model("llama")
    names = [f"kvant-2:k.bits={bits},v.bits={bits},sink=3,recent=8" for bits in (1, 2, 4)]
    some = [recipes.get(name) for name in names]
    torch.manual_seed(0)
    tensors = {layer: made_up_tensors(some[0], 2, 64) for layer in range(3)}
    Artifact(some[0], 2, 64, 3, tensors).check_tensors()
    choices = [Choice(stream, recipe) for recipe in some for stream in ("key", "value")]  # type: ignore[arg-type]
    table = measure(model, [prompt(1, 120)[0]], choices, dict.fromkeys(some, tensors), [WINDOW], draws=2)
    for layer in range(3):
        for stream in ("key", "value"):
            found = [table.kl[WINDOW, layer, c] for c in choices if c.stream == stream]
            assert found[0] > found[2] > 0.0, (layer, stream, found)


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_what_was_measured_before_an_interrupt_is_not_measured_again(steps: int) -> None:
    """In the midst of an excerpt, and between two: the same successors are drawn."""
    model, recipe = make_model("llama"), recipes.get(INT.format(2))
    choices = [Choice("key", recipe), Choice("value", recipe)]
    given: tuple[Any, ...] = (model, list(prompt(3, 60)), choices, {recipe: {}}, [WINDOW, Window(3, 16)])
    expected = measure(*given, queries=20)

    def interrupt(stage: str, done: int, total: int) -> None:
        assert (stage, total) == ("sensitivity", 9)
        if done == steps:
            raise KeyboardInterrupt

    sensed, seen = Sensed(), []
    with pytest.raises(KeyboardInterrupt):
        measure(*given, queries=20, progress=interrupt, sensed=sensed)
    kept = Sensed(sensed.tensors)
    assert str(kept) == str(sensed) == f"{steps} measured sensitivities"
    found = measure(*given, queries=20, progress=lambda stage, done, total: seen.append(done), sensed=kept)
    assert seen == list(range(steps + 1, 10))
    assert found == expected
