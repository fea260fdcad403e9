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


class BoundTransform:
    """A transform with its tensors. x is [..., heads, head_dim]; q and o are [..., heads, queries per head, head_dim]."""

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
