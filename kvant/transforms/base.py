"""Base of transforms: an invertible affine map of a head vector, and the maps of queries and outputs that go with it.

forward(x) = (x - mu) A is applied to keys and values before they are coded; dual(q) = q A^-T to queries, so that
<dual(q), forward(k)> = <q, k> up to a constant per query that the softmax cancels; inverse(o) = o A^-1 + mu to outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kvant.spec import Spec

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Form:
    """A transform that a kernel can apply without a matrix: at most one of mean, factors and order is set. Empty: it needs a
    matrix."""

    mean: Tensor | None = None  # x -> x - mean, [heads, head_dim]
    factors: Tensor | None = None  # x -> x / factors, [heads, head_dim]
    order: int = (
        0  # x -> x diag(signs) diag(H, ..., H), with H the Walsh-Hadamard matrix of this order; 0 where there is none
    )
    signs: Tensor | None = None  # [head_dim], before a Hadamard; None are all +1


class BoundTransform:
    """A transform with its tensors. x is [..., heads, head_dim]; q and o are [..., heads, queries per head, head_dim]."""

    @property
    def form(self) -> Form:
        """How a kernel can apply this transform without a matrix; an empty Form where it cannot."""
        return Form()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must map keys and values")

    def dual(self, q: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must map queries")

    def inverse(self, o: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must map outputs back")

    def mean_logit(self, q: Tensor) -> Tensor | None:
        """q . mu = <q, k> - <dual(q), forward(k)> of every query: [..., heads, queries per head]; None where no mean is removed. It
        is the same for all keys and cancels in the softmax; it matters only where logits are capped before the softmax."""
        return None


@dataclasses.dataclass(frozen=True)
class Transform(Spec):
    """Base of all transform specs."""

    def check(self, head_dim: int) -> None:
        """Raises ValueError for a head dim that the transform does not support."""

    def bind(
        self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> BoundTransform:
        """The transform for one layer, with its calibrated tensors if it has any."""
        raise NotImplementedError(f"{type(self).__name__} must bind")
