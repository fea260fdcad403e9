"""Rotations fitted to second moments: an eigenbasis composed with a Hadamard matrix and a permutation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from kvant.spec import Expected
from kvant.transforms.base import BoundTransform, Tensor, Transform
from kvant.transforms.hadamard import walsh_hadamard

Target = Literal["queries", "keys", "values", "attended", "none"]


def bit_reversal(size: int) -> Tensor:
    """The bit-reversed number of every number below a power of two: int64 [size]. It is its own inverse."""
    assert size.bit_count() == 1, size
    out = torch.zeros(1, dtype=torch.int64)
    while len(out) < size:
        out = torch.cat((2 * out, 2 * out + 1))
    return out


def interleave(dim: int, block: int) -> Tensor:
    """Permutation that assigns sorted directions to blocks in turn (round robin): int64 [dim], place -> direction.

    Every block so gets its share of the most important directions. With a single block it is the identity.
    """
    return torch.arange(dim).reshape(block, dim // block).T.flatten()


class BoundRotation(BoundTransform):
    """x -> x R for an orthogonal R, shared by all heads or per head."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix  # float64 [1 or heads, head_dim, head_dim]

    def forward(self, x: Tensor) -> Tensor:
        return _times(x[..., None, :], self.matrix)[..., 0, :]

    def dual(self, q: Tensor) -> Tensor:
        return _times(q, self.matrix)  # orthogonal: R^-T = R

    def inverse(self, o: Tensor) -> Tensor:
        return _times(o, self.matrix.mT)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix in float64, rounded to the dtype of x: the rounding absorbs differences in the order of summation, so that a
    token's bytes do not depend on its batch."""
    if len(matrix) == 1:
        return (x.double() @ matrix[0]).to(x.dtype)
    return torch.einsum("...hgd,hde->...hge", x.double(), matrix).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class Rotation(Transform):
    """x -> x R with R = U H P (`hadamard` = after) or H U P (before).

    U holds the eigenvectors of a second moment by descending eigenvalue, H is a block Hadamard matrix, and P puts the
    k-th column at the bit reversal of k, so that for every power of two G the first d/G columns fall into different
    groups of G.

    target    whose second moment: queries (OSCAR's C_Q, pooled over the query heads of a KV head), attended (OSCAR's
              C_S, that of the attention outputs before the output projection), keys, values; none is no U, and needs no
              calibration. It is always the moment of the vectors that enter this transform, before H: the basis measured
              after a Hadamard is H U', H (H U') = U', and the two would cancel.
    per_head  one basis for each KV head, or one for the layer from the moments pooled over its heads.
    hadamard  after U, before U, or none.
    order     size of a Hadamard block, a power of two that divides the head dim; 0 is the largest. Where H comes after
              U and has several blocks (head dim 96 is 3 blocks of 32), the eigenvectors are assigned to the blocks in
              turn, so that Lemma 1 of OSCAR still holds within a block and nearly between blocks.
    bitrev    whether to apply P, within each Hadamard block.
    damping   SAW-INT4's alpha: adds alpha times the mean of the diagonal to the diagonal before the decomposition. It
              shifts every eigenvalue by the same amount and changes no eigenvector; the field exists because the paper has it.
    """

    target: Target = "queries"
    per_head: bool = False
    hadamard: Literal["after", "before", "none"] = "after"
    order: int = 0
    bitrev: bool = True
    damping: float = 0.0

    fit_free: ClassVar[tuple[str, ...]] = ("hadamard", "order", "bitrev")  # the artifact holds U alone

    def __post_init__(self) -> None:
        if not self.damping >= 0.0:
            raise ValueError(f"damping must not be negative, got {self.damping}")

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        return self.target != "none"

    def block(self, head_dim: int) -> int:
        largest = head_dim & -head_dim
        if self.order < 0 or self.order & (self.order - 1) or (self.order and head_dim % self.order):
            raise ValueError(
                f"order must be a power of two that divides head_dim {head_dim} (or 0: {largest}), got {self.order}"
            )
        return self.order or largest

    def check(self, head_dim: int) -> None:
        self.block(head_dim)

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        shape = heads if self.per_head else 1, head_dim, head_dim
        return {"basis": Expected(shape, "orthogonal")} if self.calibrated else {}

    def compose(self, basis: Tensor) -> Tensor:
        """R from U: float64 [..., head_dim, head_dim]."""
        dim = basis.shape[-1]
        block = self.block(dim)
        u = basis.double()
        if self.hadamard == "before":
            r = walsh_hadamard(u.mT, block).mT  # H U: H is symmetric
        else:
            r = u[..., interleave(dim, block).to(u.device)] if self.calibrated else u
            if self.hadamard == "after":
                r = walsh_hadamard(r, block)
        if self.bitrev:
            first = torch.arange(0, dim, block)[:, None]
            r = r[..., (first + bit_reversal(block)).flatten().to(u.device)]
        return r

    def bind(
        self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> BoundRotation:
        self.check(head_dim)
        if not self.calibrated:
            basis = torch.eye(head_dim, dtype=torch.float64, device=device)[None]
        elif tensors is None or "basis" not in tensors:
            raise ValueError("this rotation needs the basis that kvant calibrate fits; the artifact has none for it")
        else:
            basis = tensors["basis"].to(device)
        if basis.shape[-2:] != (head_dim, head_dim):
            raise ValueError(f"the rotation's basis is {tuple(basis.shape)}, expected head_dim {head_dim}")
        return BoundRotation(self.compose(basis))
