from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.calibrate import fit_layer
from kvant.calibrate.spectral import eigenbasis, fit_rotation
from kvant.transforms.rotation import Rotation
from tests.calibrate.synthetic import layer_stats
from tests.transforms.test_hadamard import matrix
from tests.transforms.test_rotation import random_moment


def test_eigenvectors_are_sorted_and_have_canonical_signs() -> None:
    c = random_moment(3, 48)
    u = eigenbasis(c)
    values = (u.mT @ c @ u).diagonal(dim1=-2, dim2=-1)
    assert bool((values.diff(dim=-1) <= 1e-12).all())
    torch.testing.assert_close(u @ torch.diag_embed(values) @ u.mT, c)
    largest = u.gather(-2, u.abs().argmax(-2, keepdim=True))
    assert bool((largest > 0).all())


def test_damping_moves_no_eigenvector() -> None:
    c = random_moment(1, 32)
    torch.testing.assert_close(eigenbasis(c, 0.01), eigenbasis(c))


@pytest.mark.parametrize("target", ["queries", "keys", "values", "attended"])
@pytest.mark.parametrize("per_head", [False, True])
def test_targets_pooled_and_per_head(target: str, per_head: bool) -> None:
    """Pooled: the mean over the heads (OSCAR A.4's C_Q); a different moment for each target."""
    stats = layer_stats(tokens=200, heads=3, groups=2, dim=32)
    second = stats.attended if target == "attended" else getattr(stats, target).second
    basis = fit_rotation(Rotation(target=target, per_head=per_head), stats, "key")["basis"].double()  # type: ignore[arg-type]
    assert basis.shape == (3 if per_head else 1, 32, 32)
    wanted = second if per_head else second.mean(0, keepdim=True)
    rotated = basis.mT @ wanted @ basis
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert float(off.abs().max() / rotated.abs().max()) < 1e-6


def test_hessian_is_measured_before_the_hadamard() -> None:
    """One transform with both factors is H U. Fitted behind a Hadamard of its own, the basis would be H U and the
    product H (H U) = U: the Hadamard would do nothing."""
    stats = layer_stats(tokens=300, heads=1, groups=2, dim=64)
    recipe = recipes.get("saw-int4-hessian")
    basis = fit_layer(recipe, stats)["key.transforms[0].basis"].double()
    raw = eigenbasis(stats.queries.second)
    torch.testing.assert_close(basis, raw, rtol=0, atol=1e-6)
    spec = recipe.key.transforms[0]
    assert isinstance(spec, Rotation)
    torch.testing.assert_close(spec.compose(basis), matrix(64) @ raw, rtol=0, atol=1e-6)
    behind = eigenbasis(matrix(64).T @ stats.queries.second @ matrix(64))  # as if two transforms were fitted in turn
    cancelled = matrix(64) @ behind
    torch.testing.assert_close(cancelled.abs(), raw.abs(), rtol=0, atol=1e-6)
