from __future__ import annotations

import pytest
import torch

from kvant.transforms.hadamard import Hadamard, random_signs, walsh_hadamard


def matrix(order: int) -> torch.Tensor:
    """Sylvester's construction, normalised."""
    out = torch.ones(1, 1, dtype=torch.float64)
    while len(out) < order:
        out = torch.cat((torch.cat((out, out), 1), torch.cat((out, -out), 1)))
    return out / order**0.5


@pytest.mark.parametrize("order", [1, 2, 4, 16, 64, 128])
@pytest.mark.parametrize("dim", [128, 256])
def test_fast_transform_is_the_block_matrix(order: int, dim: int) -> None:
    x = torch.randn(5, 3, dim, dtype=torch.float64)
    blocks = torch.block_diag(*[matrix(order)] * (dim // order))
    torch.testing.assert_close(walsh_hadamard(x, order), x @ blocks)


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (96, 32), (128, 128), (192, 64), (256, 128)])
@pytest.mark.parametrize("seed", [None, 3])
def test_transform_preserves_dot_products_and_inverts(dim: int, block: int, seed: int | None) -> None:
    spec = Hadamard(seed=seed)
    assert spec.block(dim) == block
    bound = spec.bind(dim)
    q, k = torch.randn(7, 2, 3, dim), torch.randn(7, 2, dim)
    before = torch.einsum("thgd,thd->thg", q.double(), k.double())  # float64: in any order the same
    after = torch.einsum("thgd,thd->thg", bound.dual(q).double(), bound.forward(k).double())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bound.inverse(bound.forward(k)), k, rtol=1e-5, atol=1e-5)


def test_outliers_are_spread() -> None:
    x = torch.randn(100, 1, 128)
    x[..., 5] += 50
    y = Hadamard().bind(128).forward(x)
    assert float(y.abs().amax(-1).mean()) < float(x.abs().amax(-1).mean()) / 5


def test_signs_are_the_same_everywhere_and_balanced() -> None:
    assert random_signs(16, 1).tolist() == random_signs(128, 1)[:16].tolist()
    assert random_signs(64, 1).tolist() != random_signs(64, 2).tolist()
    assert set(random_signs(64, 9).tolist()) == {-1.0, 1.0}
    assert abs(float(random_signs(4096, 0).mean())) < 0.1


def test_rows_do_not_depend_on_their_batch() -> None:
    x = torch.randn(33, 2, 128)
    whole = walsh_hadamard(x, 128)
    assert torch.equal(whole, torch.cat([walsh_hadamard(row[None], 128) for row in x]))


@pytest.mark.parametrize(("order", "dim"), [(128, 64), (3, 96), (-2, 64), (32, 80)])
def test_an_order_that_does_not_fit_is_refused(order: int, dim: int) -> None:
    with pytest.raises(ValueError, match=f"order must be a power of two that divides head_dim {dim}"):
        Hadamard(order=order).check(dim)
