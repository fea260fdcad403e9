"""A model with the value transforms in its weights is the same model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kvant
from kvant import recipes
from kvant.artifact import Artifact
from kvant.calibrate.run import calibrate
from kvant.engines.fold import fold, folded
from tests.conftest import relative_error
from tests.engines.test_hf import FAMILIES, make_model, prompt

SMALL = "oscar:sink=4,recent=16"


def calibrated(model: Any, recipe: str = SMALL) -> Artifact:
    ids = torch.randint(2, 200, (200,), generator=torch.Generator().manual_seed(3))
    return calibrate(model, None, recipe, ids, excerpt_tokens=100)


def chunks(model: Any, cache: Any) -> torch.Tensor:
    ids = prompt(2, 90)
    with torch.inference_mode():
        return torch.cat(
            [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 50), (50, 51), (51, 83), (83, 90))], 1
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per_head", [False, True])
def test_folded_and_unfolded_model_give_the_same_logits(family: str, per_head: bool) -> None:
    """Through the packed cache, where both store the same values, and without any; biases and GQA included."""
    model = make_model(family)
    if family == "qwen2":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.bias.normal_()
    name = f"{SMALL},per_head={per_head}".lower()
    artifact = calibrated(model, name)
    ids = prompt(2, 90)
    with torch.inference_mode():
        plain = model(ids).logits
    before = kvant.Cache(model, name, artifact=artifact)
    expected = chunks(model, before)
    fold(model, name, artifact)
    after = kvant.Cache(model, name, artifact=artifact)
    assert after.recipe.value.transforms == ()
    assert after.recipe.key == before.recipe.key
    assert after.digest != before.digest
    found = chunks(model, after)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-3, atol=1e-3)
    # a value that lies on the edge between two codes may be rounded the other way: one in very many
    assert relative_error(found, expected) < 1e-2
    assert relative_error(expected, plain) > 5e-2  # two bits do change the logits: the tolerance is not idle
    pages, again = (cache.state.group_of[0].paged.stores[0].pages for cache in (before, after))  # of the first layer
    assert float((pages == again).float().mean()) > 0.999


@pytest.mark.parametrize("name", ["quarot-int2", "saw-int4-kv"])
def test_fixed_rotations_fold_too(name: str) -> None:
    model = make_model("qwen3")
    expected = chunks(model, kvant.Cache(model, name))
    fold(model, name)
    assert relative_error(chunks(model, kvant.Cache(model, name)), expected) < 1e-2


def test_maps_that_are_not_orthogonal_fold_too() -> None:
    """kvant-2's values: part of the way to white, with a mean that its codes take off and put back."""
    model = make_model("qwen3")
    name = "kvant-2:recent=16"
    artifact = calibrated(model, name)
    ids = prompt(2, 90)
    with torch.inference_mode():
        plain = model(ids).logits
    expected = chunks(model, kvant.Cache(model, name, artifact=artifact))
    fold(model, name, artifact)
    after = kvant.Cache(model, name, artifact=artifact)
    assert after.recipe.value.transforms == ()
    assert relative_error(chunks(model, after), expected) < 1e-2
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-3, atol=1e-3)
    assert relative_error(expected, plain) > 5e-2


def test_a_folded_model_serves_other_recipes_but_no_other_fit_of_the_values() -> None:
    model = make_model("llama")
    full = chunks(model, kvant.Cache(model, "full"))
    artifact, keys = calibrated(model), calibrated(model, "saw-int4-hessian")
    other = calibrated(model, f"{SMALL},v.target=values")
    fold(model, SMALL, artifact)
    torch.testing.assert_close(chunks(model, kvant.Cache(model, "full")), full, rtol=1e-3, atol=1e-3)
    assert kvant.Cache(model, "int4").recipe.name == "int4"
    assert kvant.Cache(model, "saw-int4-hessian", artifact=keys).recipe.name == "saw-int4-hessian"
    with pytest.raises(ValueError, match="folded in"):
        kvant.Cache(model, f"{SMALL},v.target=values", artifact=other)
    with pytest.raises(ValueError, match="folded into it already"):
        fold(model, SMALL, artifact)


def test_the_mark_survives_saving(tmp_path: Any) -> None:
    model = make_model("llama")
    fold(model, "quarot-int2")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert folded(again.config) == folded(model.config) is not None
    assert kvant.Cache(again, "quarot-int2").recipe.value.transforms == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [("int4", "no value transforms"), ("oscar", "needs an artifact"), ("saw-int4", "no value transforms")],
)
def test_what_cannot_be_folded_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold(make_model("llama"), name)


def test_refuses_projections_that_are_not_linear() -> None:
    class Other(torch.nn.Linear):
        pass

    model = make_model("llama")
    layer = model.model.layers[1].self_attn
    layer.v_proj = Other(96, 128, bias=False)
    with pytest.raises(ValueError, match="layer 1 needs a linear v_proj of its own, it has a Other"):
        fold(model, "quarot-int2")


def test_a_model_that_does_more_with_its_values_is_refused_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.model.layers[2].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0].relu(),))
    with pytest.raises(ValueError, match="not linear"):
        fold(model, "quarot-int2")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert folded(model.config) is None


def test_refuses_transforms_that_remove_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant.transforms.hadamard import BoundHadamard

    forward = BoundHadamard.forward
    monkeypatch.setattr(BoundHadamard, "forward", lambda self, x: forward(self, x - 1))
    with pytest.raises(ValueError, match="remove a mean"):
        fold(make_model("llama"), "quarot-int2")


def test_windows_do_not_matter() -> None:
    """The mark names transforms and tensors: the same fold serves every window."""
    model = make_model("llama")
    artifact = calibrated(model)
    fold(model, SMALL, artifact)
    wide = recipes.get("oscar:sink=8,recent=32")
    cache = kvant.Cache(model, wide, artifact=artifact)
    assert cache.recipe == dataclasses.replace(wide, value=dataclasses.replace(wide.value, transforms=()))
