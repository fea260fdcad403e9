from __future__ import annotations

import pytest
import torch

from kvant.transforms.smooth import Smooth


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_dot_products_are_preserved_and_outputs_come_back(dim: int) -> None:
    bound = Smooth().bind(dim, {"factors": torch.logspace(-2, 2, 2 * dim).reshape(2, dim)})
    q, k = torch.randn(7, 2, 3, dim), torch.randn(7, 2, dim)
    before = torch.einsum("thgd,thd->thg", q.double(), k.double())  # float64: in any order the same
    after = torch.einsum("thgd,thd->thg", bound.dual(q).double(), bound.forward(k).double())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    outputs = torch.randn(7, 2, 3, dim)
    through = bound.forward(outputs.transpose(1, 2)).transpose(1, 2)  # [tokens, heads, group] as heads of their own
    torch.testing.assert_close(bound.inverse(through), outputs, rtol=1e-5, atol=1e-6)


def test_keys_are_divided_and_queries_multiplied() -> None:
    factors = torch.rand(3, 64) + 0.5
    bound = Smooth().bind(64, {"factors": factors})
    k, q = torch.randn(5, 3, 64), torch.randn(5, 3, 4, 64)
    for head in range(3):
        assert torch.equal(bound.forward(k)[:, head], k[:, head] / factors[head])
        assert torch.equal(bound.dual(q)[:, head], q[:, head] * factors[head])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="power must be between 0 and 1, got -1"):
        Smooth(power=-1.0)
    with pytest.raises(ValueError, match="needs the factors that kvant calibrate fits"):
        Smooth().bind(64, {})
    with pytest.raises(ValueError, match=r"factors must be \[heads, 64\], got \[2, 32\]"):
        Smooth().bind(64, {"factors": torch.ones(2, 32)})
