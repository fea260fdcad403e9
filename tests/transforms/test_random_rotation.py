from __future__ import annotations

import hashlib

import pytest
import torch

from kvant.transforms.random_rotation import RandomRotation, random_orthogonal


@pytest.mark.parametrize("dim", [1, 2, 63, 64, 80, 128, 256])
def test_it_is_orthogonal(dim: int) -> None:
    matrix = random_orthogonal(dim, 5)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_dot_products_are_preserved_and_outputs_come_back(dim: int) -> None:
    bound = RandomRotation().bind(dim)
    q, k = torch.randn(7, 2, 3, dim), torch.randn(7, 2, dim)
    before = torch.einsum("thgd,thd->thg", q.double(), k.double())  # float64: in any order the same
    after = torch.einsum("thgd,thd->thg", bound.dual(q).double(), bound.forward(k).double())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bound.inverse(bound.forward(k)), k, rtol=1e-5, atol=1e-5)


def test_it_is_the_same_on_every_machine() -> None:
    """To the last bit: pages written on one machine are read on another."""
    matrix = random_orthogonal(64, 0)
    assert (
        hashlib.sha256(matrix.numpy().tobytes()).hexdigest()
        == "f6cdab90a87d291f54dbb4d96b3d0225045d8d858e930a634fbd0d1a39a40db5"
    )
    assert not torch.equal(random_orthogonal(64, 1), matrix)


def test_a_coordinate_of_any_direction_is_spread_as_that_of_a_random_unit_vector() -> None:
    """Kurtosis of a coordinate in d dimensions: 3 d / (d + 2)."""
    dim = 64
    for vector in (torch.eye(dim)[3], torch.ones(dim) / dim**0.5):
        moved = torch.stack([vector.double() @ random_orthogonal(dim, seed) for seed in range(20)])
        kurtosis = float(moved.pow(4).mean() * dim**2)
        assert abs(kurtosis - 3 * dim / (dim + 2)) < 0.6  # two standard errors of 1,280 coordinates


def test_rows_do_not_depend_on_their_batch() -> None:
    bound = RandomRotation(seed=3).bind(128)
    x = torch.randn(150, 2, 128) * 30
    assert torch.equal(bound.forward(x), torch.cat([bound.forward(row[None]) for row in x]))
