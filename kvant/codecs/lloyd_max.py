"""Scalar quantization of randomly rotated vectors: one norm per vector, and Lloyd-Max levels for its direction."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Literal

import torch

from kvant.codecs.base import DTYPES, Codec, Field, Parts, Tensor
from kvant.codecs.format import Band, Encoding, ScaleKind, Scales, StreamFormat

_GAUSS = (  # nodes and weights of the eight-point Gauss-Legendre rule on [-1, 1], one of each pair
    (0.1834346424956498, 0.3626837833783620),
    (0.5255324099163290, 0.3137066458778873),
    (0.7966664774136267, 0.2223810344533745),
    (0.9602898564975363, 0.1012285362903763),
)
_PANEL = 0.75  # longest interval that the rule is applied to, in standard deviations
_CONVERGED = 1e-12


def _power(base: float, exponent: int) -> float:
    """base ** exponent by multiplications, which round the same on every machine; pow() does not."""
    out = 1.0
    while exponent:
        if exponent & 1:
            out *= base
        base *= base
        exponent >>= 1
    return out


def _half_power(base: float, exponent2: int) -> float:
    """base ** (exponent2 / 2)."""
    return _power(base, exponent2 // 2) * (math.sqrt(base) if exponent2 % 2 else 1.0)


def sphere_density(t: float, dim: int) -> float:
    """Density of a coordinate of a random unit vector, up to a constant factor: (1 - t^2)^((dim - 3) / 2)."""
    return _half_power(max(0.0, 1.0 - t * t), dim - 3)


def _cell(low: float, high: float, dim: int) -> tuple[float, float]:
    """Mass and first moment of the density between two points: a Gauss-Legendre sum, and in closed form."""
    panels = 1 + int((high - low) * math.sqrt(dim) / _PANEL)
    half = (high - low) / (2 * panels)
    mass = 0.0
    for panel in range(panels):
        middle = low + (2 * panel + 1) * half
        for node, weight in _GAUSS:
            mass += weight * (sphere_density(middle - half * node, dim) + sphere_density(middle + half * node, dim))
    below = _half_power(max(0.0, 1.0 - low * low), dim - 1)
    above = _half_power(max(0.0, 1.0 - high * high), dim - 1)
    return mass * half, (below - above) / (dim - 1)


@functools.lru_cache(maxsize=64)
def lloyd_max_levels(bits: int, dim: int) -> tuple[float, ...]:
    """The 2^bits levels with the least mean squared error for a coordinate of a random unit vector in `dim` dimensions.

    Lloyd's iteration: each level is the mean of the density over the points nearest to it. The density is symmetric, so
    the negative half mirrors the positive. With growing dim the levels times sqrt(dim) become those of a normal number.
    """
    assert dim >= 4, dim
    half = 1 << (bits - 1)
    end = min(1.0, 9.0 / math.sqrt(dim))  # the mass beyond nine standard deviations is negligible
    levels = [(i + 0.5) / half * min(end, 3.0 / math.sqrt(dim)) for i in range(half)]
    while True:
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), end]
        cells = [_cell(low, high, dim) for low, high in itertools.pairwise(edges)]
        moved = [moment / mass for mass, moment in cells]
        change = max(abs(a - b) for a, b in zip(levels, moved, strict=True))
        levels = moved
        if change < _CONVERGED:
            break
    return tuple([-level for level in reversed(levels)] + levels)


@dataclasses.dataclass(frozen=True)
class LloydMax(Codec):
    """x ~ norm * level[code], with code the nearest level to x / norm in each channel.

    bits  width of a code.
    meta  16-bit type of the norm. Codes are computed from the rounded norm.
    """

    bits: Literal[4, 3, 2, 1] = 4
    meta: Literal["bfloat16", "float16"] = "float16"

    def __post_init__(self) -> None:
        if self.bits not in (4, 3, 2, 1):
            raise ValueError(f"bits must be 4, 3, 2 or 1, got {self.bits}")

    def levels(self, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
        """float32 [2^bits], ascending."""
        return torch.tensor(lloyd_max_levels(self.bits, head_dim), dtype=torch.float32, device=device)

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        if head_dim < 4:
            raise ValueError(f"head_dim must be at least 4, got {head_dim}")
        return Field("codes", "code", self.bits, head_dim), Field("norm", "meta", 16, 1, dtype=self.meta)

    def format(self, head_dim: int) -> StreamFormat:
        levels = lloyd_max_levels(self.bits, head_dim)
        return StreamFormat(
            type(self).__name__,
            head_dim,
            bands=(Band("codes", 0, head_dim, self.bits, 0.0, levels[0], levels),),
            scales=Scales(ScaleKind.ALONE, ("norm",), self.meta, "token"),
            encoding=Encoding("norm"),
        )

    def encode(self, x: Tensor) -> Parts:
        dtype = DTYPES[self.meta]
        norm = x.double().square().sum(-1, keepdim=True).sqrt().clamp_max(torch.finfo(dtype).max).to(dtype)
        levels = self.levels(x.shape[-1], x.device)
        edges = (levels[1:] + levels[:-1]) / 2
        unit = x.float() / norm.float().clamp_min(torch.finfo(dtype).tiny)
        return {"codes": torch.bucketize(unit, edges).to(torch.uint8), "norm": norm}

    def decode(self, parts: Parts) -> Tensor:
        levels = self.levels(parts["codes"].shape[-1], parts["codes"].device)
        return levels[parts["codes"].long()] * parts["norm"].float()
