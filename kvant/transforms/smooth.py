"""Channel-wise smoothing: every channel of a key is divided by a factor, and that of the query multiplied by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch

from kvant.spec import Expected
from kvant.transforms.base import BoundTransform, Form, Tensor, Transform


class BoundSmooth(BoundTransform):
    def __init__(self, factors: Tensor) -> None:
        self.factors = factors  # [heads, head_dim]

    @property
    def form(self) -> Form:
        return Form(factors=self.factors)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.factors.to(x.dtype)

    def dual(self, q: Tensor) -> Tensor:
        return q * self.factors.to(q.dtype)[:, None, :]  # not orthogonal: A^-T = A^-1

    def inverse(self, o: Tensor) -> Tensor:
        return o * self.factors.to(o.dtype)[:, None, :]


@dataclasses.dataclass(frozen=True)
class Smooth(Transform):
    """x -> x diag(factor)^-1, q -> q diag(factor), with factor_i = max(|x_i|)^power over the calibration text.

    power  VecInfer equation 4 has 0.5, the square root; 1 makes every channel's largest value one, 0 changes nothing.
    """

    calibrated: ClassVar[bool] = True

    power: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.power <= 1.0:
            raise ValueError(f"power must be between 0 and 1, got {self.power}")

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        return {"factors": Expected((heads, head_dim), "positive")}

    def bind(
        self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> BoundSmooth:
        factors = (tensors or {}).get("factors")
        if factors is None:
            raise ValueError("smoothing needs the factors that kvant calibrate fits; the artifact has none for it")
        if factors.ndim != 2 or factors.shape[1] != head_dim:
            raise ValueError(f"smoothing factors must be [heads, {head_dim}], got {list(factors.shape)}")
        return BoundSmooth(factors.to(device))
