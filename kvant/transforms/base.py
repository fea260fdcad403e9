"""What a transform is: an invertible affine map of a head vector, and what it does to queries and outputs.

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
    """A transform that a kernel can apply without a matrix. One of these is there, or none, where it takes a matrix."""

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
        """How a kernel can apply it without a matrix; an empty form where it cannot."""
        return Form()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must map keys and values")

    def dual(self, q: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must map queries")

    def inverse(self, o: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must map outputs back")

    def mean_logit(self, q: Tensor) -> Tensor | None:
        """What <dual(q), forward(k)> is short of <q, k>, for every query [..., heads, queries per head]: q mu; None where
        nothing is removed. It is the same for all keys, so only what comes between it and the softmax has to know."""
        return None


@dataclasses.dataclass(frozen=True)
class Transform(Spec):
    """Base of all transform specs."""

    def check(self, head_dim: int) -> None:
        """Refuses a head dim that the transform cannot take."""

    def bind(
        self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> BoundTransform:
        """The transform for one layer, with its calibrated tensors if it has any."""
        raise NotImplementedError(f"{type(self).__name__} must bind")
