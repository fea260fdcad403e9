"""Block-diagonal Walsh-Hadamard rotation by a fast Walsh-Hadamard transform."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kvant.transforms.base import BoundTransform, Form, Tensor, Transform


def walsh_hadamard(x: Tensor, order: int) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of every block of `order` elements of the last dim.

    log2(order) passes of sums and differences. Every element is summed in the same order whatever the number of rows, so
    the result does not depend on how tokens are batched.
    """
    dim = x.shape[-1]
    assert order > 0 and order & (order - 1) == 0 and dim % order == 0, (order, dim)
    shape = x.shape
    half = 1
    while half < order:
        pairs = x.reshape(*shape[:-1], dim // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2)
        half *= 2
    return x.reshape(shape) * order**-0.5


def random_signs(dim: int, seed: int) -> Tensor:
    """+1 or -1 per channel, the same on every machine: from a 64-bit hash of the seed and the channel's index."""
    signs = []
    for channel in range(dim):
        z = (seed * 0x9E3779B97F4A7C15 + (channel + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        signs.append(1.0 if (z >> 63) else -1.0)
    return torch.tensor(signs, dtype=torch.float32)  # independent of torch's default dtype


class BoundHadamard(BoundTransform):
    def __init__(self, order: int, signs: Tensor | None) -> None:
        self.order, self.signs = order, signs

    @property
    def form(self) -> Form:
        return Form(order=self.order, signs=self.signs)

    def forward(self, x: Tensor) -> Tensor:
        return walsh_hadamard(x if self.signs is None else x * self.signs, self.order)

    def dual(self, q: Tensor) -> Tensor:
        return self.forward(q)  # orthogonal: A^-T = A

    def inverse(self, o: Tensor) -> Tensor:
        o = walsh_hadamard(o, self.order)
        return o if self.signs is None else o * self.signs


@dataclasses.dataclass(frozen=True)
class Hadamard(Transform):
    """x -> x diag(sign) diag(H_order, ..., H_order).

    order  size of a block, a power of two that divides the head dim; 0 is the largest such order up to 128.
    seed   seed of a random sign per channel, applied first; None: no signs.
    """

    order: int = 0
    seed: int | None = None

    def block(self, head_dim: int) -> int:
        if self.order == 0:
            return min(128, head_dim & -head_dim)
        if self.order < 0 or self.order & (self.order - 1) or head_dim % self.order:
            raise ValueError(
                f"order must be a power of two that divides head_dim {head_dim} (at most {head_dim & -head_dim}), "
                f"got {self.order}"
            )
        return self.order

    def check(self, head_dim: int) -> None:
        self.block(head_dim)

    def bind(
        self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> BoundHadamard:
        signs = None if self.seed is None else random_signs(head_dim, self.seed).to(device)
        return BoundHadamard(self.block(head_dim), signs)
