"""A seeded random rotation, the same to the last bit on every machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch

from kvant.transforms.base import BoundTransform, Tensor, Transform

_MASK = 0xFFFFFFFFFFFFFFFF


def _mixed(seed: int, count: int) -> list[int]:
    """`count` 64-bit numbers: hashes of the seed and their index."""
    out = []
    for place in range(1, count + 1):
        z = (seed * 0xD1B54A32D192ED03 + place * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        out.append(z ^ (z >> 31))
    return out


def _sum(x: Tensor) -> Tensor:
    """Pairwise sum over the last dim, in a fixed order; the order of torch's sum differs between machines."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((folded, x[..., 2 * half :]), -1)
    return x[..., 0]


@functools.lru_cache(maxsize=16)
def random_orthogonal(dim: int, seed: int) -> Tensor:
    """A random orthogonal matrix, float64 [dim, dim].

    Rows of nearly normal numbers (sums of the 16 four-bit digits of 64 random bits, which need no logarithm), made
    orthonormal one after another by the modified Gram-Schmidt process. Only sums, products, quotients and roots of
    float64 in a fixed order are used, so that the result depends only on dim and seed. Every row keeps its direction, so
    that signs need no convention.
    """
    digits = [sum((z >> shift) & 15 for shift in range(0, 64, 4)) for z in _mixed(seed, dim * dim)]
    rows = torch.tensor(digits, dtype=torch.float64).reshape(dim, dim) - 120.0  # 16 digits of mean 7.5
    for i in range(dim):
        rows[i] = rows[i] / _sum(rows[i] * rows[i]).sqrt()
        rest = rows[i + 1 :]
        rows[i + 1 :] = rest - _sum(rest * rows[i])[:, None] * rows[i]
    return rows


class BoundRandomRotation(BoundTransform):
    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix  # float64 [head_dim, head_dim]

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() @ self.matrix).to(x.dtype)  # float64, so that the result does not depend on the batch

    def dual(self, q: Tensor) -> Tensor:
        return self.forward(q)  # orthogonal: A^-T = A

    def inverse(self, o: Tensor) -> Tensor:
        return (o.double() @ self.matrix.mT).to(o.dtype)


@dataclasses.dataclass(frozen=True)
class RandomRotation(Transform):
    """x -> x R with a random orthogonal R, the same for all heads and layers.

    seed  seed of the rotation.
    """

    seed: int = 0

    def bind(
        self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> BoundRandomRotation:
        return BoundRandomRotation(random_orthogonal(head_dim, self.seed).to(device))
