from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.calibrate.spectral import eigenbasis
from kvant.transforms.rotation import Rotation, bit_reversal, interleave
from tests.transforms.test_hadamard import matrix


def random_moment(heads: int, dim: int) -> torch.Tensor:
    """A second moment with a steep spectrum: float64 [heads, dim, dim]."""
    x = torch.randn(heads, 4 * dim, dim, dtype=torch.float64) * torch.logspace(0, -2, dim, dtype=torch.float64)
    x = x @ torch.linalg.qr(torch.randn(heads, dim, dim, dtype=torch.float64)).Q
    return x.mT @ x / x.shape[1]


def permutation(places: torch.Tensor) -> torch.Tensor:
    """The matrix that moves column k to places[k]."""
    out = torch.zeros(len(places), len(places), dtype=torch.float64)
    out[torch.arange(len(places)), places] = 1
    return out


def test_bit_reversal_places_of_the_paper() -> None:
    """OSCAR A.4: the top-1..8 of 128 go to these places."""
    assert bit_reversal(128)[:8].tolist() == [0, 64, 32, 96, 16, 80, 48, 112]


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128, 256])
def test_bit_reversal_is_the_reversed_binary_number_and_its_own_inverse(size: int) -> None:
    bits = size.bit_length() - 1
    expected = [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(size)]
    assert bit_reversal(size).tolist() == expected
    assert bit_reversal(size)[bit_reversal(size)].tolist() == list(range(size))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_top_eigenvectors_fall_into_different_groups_for_every_power_of_two(dim: int) -> None:
    """U P without H: the places of the first d/G eigenvectors lie in d/G different groups of G."""
    basis = torch.eye(dim, dtype=torch.float64)  # column k stands for the k-th largest
    r = Rotation(hadamard="none").compose(basis)
    place = r.argmax(1)  # of every eigenvector
    group = 1
    while group <= dim:
        top = place[: dim // group] // group
        assert len(set(top.tolist())) == dim // group
        group *= 2


@given(heads=st.sampled_from([1, 3]), dim=st.sampled_from([16, 64, 128]), seed=st.integers(0, 1000))
def test_oscars_rotation_is_u_times_h_times_p(heads: int, dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    u = eigenbasis(random_moment(heads, dim))
    expected = u @ matrix(dim) @ permutation(bit_reversal(dim))
    torch.testing.assert_close(Rotation().compose(u), expected)
    torch.testing.assert_close(Rotation(bitrev=False).compose(u), u @ matrix(dim))
    torch.testing.assert_close(Rotation(bitrev=False, hadamard="none").compose(u), u)


def test_hessian_rotation_is_h_times_u() -> None:
    """SAW-INT4 equation 11: (q H_b) R."""
    u = eigenbasis(random_moment(1, 64))
    blocks = torch.block_diag(*[matrix(16)] * 4)
    found = Rotation(hadamard="before", bitrev=False, order=16).compose(u)
    torch.testing.assert_close(found, blocks @ u)


@pytest.mark.parametrize("dim", [64, 128])
def test_lemma_1_the_importance_metric_has_a_constant_diagonal(dim: int) -> None:
    """OSCAR lemma 1: the diagonal of R^T C R is tr(C) / d, for the C that U diagonalises."""
    c = random_moment(2, dim)
    r = Rotation().compose(eigenbasis(c))
    diagonal = (r.mT @ c @ r).diagonal(dim1=-2, dim2=-1)
    trace = c.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    torch.testing.assert_close(diagonal, (trace / dim).expand_as(diagonal))
    plain = Rotation(target="none").compose(torch.eye(dim, dtype=torch.float64))
    spread = (plain.mT @ c @ plain).diagonal(dim1=-2, dim2=-1)
    assert float((spread / (trace / dim) - 1).abs().max()) > 0.05  # the Hadamard alone does not equalise


@pytest.mark.parametrize(("dim", "blocks"), [(96, 3), (80, 5), (192, 3)])
def test_other_head_dims_deal_the_eigenvectors_to_blocks(dim: int, blocks: int) -> None:
    block = dim // blocks
    assert interleave(dim, block)[:4].tolist() == [0, blocks, 2 * blocks, 3 * blocks]
    assert sorted(interleave(dim, block).tolist()) == list(range(dim))
    c = random_moment(1, dim)
    r = Rotation().compose(eigenbasis(c))
    torch.testing.assert_close(r.mT @ r, torch.eye(dim, dtype=torch.float64)[None])
    diagonal = (r.mT @ c @ r).diagonal(dim1=-2, dim2=-1)[0].reshape(blocks, block)
    torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))  # lemma 1 within a block
    contiguous = torch.linalg.eigvalsh(c).flip(-1).reshape(blocks, block).mean(1)
    assert float(diagonal.max() / diagonal.min()) < float(contiguous[0] / contiguous[-1]) / 2  # and nearer between them


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(
    "fields", [{}, {"hadamard": "before", "bitrev": False}, {"hadamard": "none"}, {"target": "none"}]
)
@pytest.mark.parametrize("per_head", [False, True])
def test_dot_products_are_preserved_and_values_come_back(dim: int, fields: dict[str, Any], per_head: bool) -> None:
    heads, groups = 3, 4
    spec = Rotation(per_head=per_head, **fields)
    basis = eigenbasis(random_moment(heads if per_head else 1, dim)).float()
    bound = spec.bind(dim, {"basis": basis})
    q, k = torch.randn(7, heads, groups, dim), torch.randn(7, heads, dim)
    before = torch.einsum("thgd,thd->thg", q.double(), k.double())  # float64: in any order the same
    after = torch.einsum("thgd,thd->thg", bound.dual(q).double(), bound.forward(k).double())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bound.inverse(bound.forward(k)[:, :, None])[:, :, 0], k, rtol=1e-5, atol=1e-5)
    assert bound.forward(k).dtype == k.dtype
    assert bound.dual(q.double()).dtype == torch.float64


@pytest.mark.parametrize("per_head", [False, True])
def test_a_token_does_not_depend_on_its_batch(per_head: bool) -> None:
    heads, dim = 3, 64
    basis = eigenbasis(random_moment(heads if per_head else 1, dim)).float()
    bound = Rotation(per_head=per_head).bind(dim, {"basis": basis})
    x = torch.randn(129, heads, dim)
    whole = bound.forward(x)
    one_by_one = torch.cat([bound.forward(x[i : i + 1]) for i in range(len(x))])
    assert torch.equal(whole, one_by_one)
    assert torch.equal(whole[7:70], bound.forward(x[7:70]))


def test_what_needs_an_artifact() -> None:
    assert Rotation().calibrated
    assert not Rotation(target="none").calibrated
    with pytest.raises(ValueError, match="kvant calibrate"):
        Rotation().bind(64, {})
    with pytest.raises(ValueError, match="head_dim 128"):
        Rotation().bind(128, {"basis": torch.eye(64)[None]})


def test_refuses_orders_and_dampings() -> None:
    for order in (3, 48, -2, 128):
        with pytest.raises(ValueError, match="order must be a power of two"):
            Rotation(order=order).check(64)
    with pytest.raises(ValueError, match="damping"):
        Rotation(damping=-0.1)
