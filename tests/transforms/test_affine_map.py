from __future__ import annotations

import pytest
import torch

from kvant.bands import quarters
from kvant.transforms.affine_map import Balance, Mean, Spectral


def tensors(dim: int) -> dict[str, torch.Tensor]:
    return {"offset": torch.randn(3, dim), "matrix": torch.eye(dim) + 0.3 * torch.randn(3, dim, dim) / dim**0.5}


@pytest.mark.parametrize("part", [Mean(), Balance(), Spectral()])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_products_are_kept_and_outputs_come_back(part: Mean | Balance | Spectral, dim: int) -> None:
    bound = part.bind(dim, tensors(dim))
    q, k = torch.randn(9, 3, 2, dim), torch.randn(9, 3, dim)
    found = torch.einsum("nhgd,nhd->nhg", bound.dual(q), bound.forward(k))
    mean_logit = bound.mean_logit(q)
    assert (mean_logit is None) == isinstance(part, Spectral)
    wanted = torch.einsum("nhgd,nhd->nhg", q, k)
    torch.testing.assert_close(found if mean_logit is None else found + mean_logit, wanted, rtol=1e-4, atol=1e-4)
    back = bound.inverse(bound.forward(k)[:, :, None, :])[:, :, 0]
    torch.testing.assert_close(back, k, rtol=1e-5, atol=1e-5)


def test_a_token_is_mapped_alike_in_any_batch() -> None:
    bound = Balance().bind(64, tensors(64))
    x = torch.randn(50, 3, 64)
    assert torch.equal(bound.forward(x)[17:18], bound.forward(x[17:18]))


def test_quarters() -> None:
    assert quarters(128) == (32, 64, 32)
    with pytest.raises(ValueError, match="multiple of 4"):
        quarters(70)


@pytest.mark.parametrize("part", [Mean(), Balance(), Spectral()])
def test_refuses_missing_and_misshapen_tensors(part: Mean | Balance | Spectral) -> None:
    with pytest.raises(ValueError, match="that kvant calibrate fits"):
        part.bind(64, {})
    with pytest.raises(ValueError, match=r"must be \[heads, 64"):
        part.bind(64, tensors(32))


def test_refuses_shares_and_powers() -> None:
    for kind in (Mean, Balance, Spectral):
        with pytest.raises(ValueError, match="share must be between 0 and 1"):
            kind(share=1.5)
    with pytest.raises(ValueError, match="power must be between"):
        Spectral(power=0.7)
