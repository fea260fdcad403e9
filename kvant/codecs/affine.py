"""Token-wise affine quantization: a scale and a zero point for every token's head vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch

from kvant.codecs.base import DTYPES, Codec, Field, Parts, Tensor
from kvant.codecs.format import Band, Encoding, LayerTensors, ScaleKind, Scales, StreamFormat
from kvant.spec import Expected

LARGEST_ZERO = 2.0**15  # magnitude of an integer zero point
NARROWEST = 0.7  # smallest range that `search` tries, as a share of the group's range


def magnitude_quantile(x: Tensor, quantile: float) -> Tensor:
    """The quantile of |x| along the last dim, linear between neighbours; torch.quantile refuses long prompts."""
    ordered = x.abs().sort(dim=-1).values
    place = quantile * (x.shape[-1] - 1)
    below = int(place)
    above = min(below + 1, x.shape[-1] - 1)
    return torch.lerp(ordered[..., below : below + 1], ordered[..., above : above + 1], place - below)


@dataclasses.dataclass(frozen=True)
class Affine(Codec):
    """x ~ scale * code + min, or scale * (code - zero) with an integer zero point.

    bits   width of a code.
    group  channels that share a scale; 0 is the whole head.
    zero   "float" stores the minimum itself (OSCAR A.5: z = -a/s, not rounded); "integer" stores round(-min/s)
           (SAW-INT4 equations 3 and 4).
    clip   a token's values are clipped at this quantile of their magnitudes over the whole head (OSCAR A.5), before the
           groups are formed; 1 clips nothing, 0 takes the ratio that kvant calibrate finds for each layer.
    search number of ranges tried for a group, from its whole range down to 0.7 of it about its middle; the one with the
           least squared error is used. 1: the whole range.
    meta   16-bit type of scale and zero. Codes are computed from the rounded scale and zero, so that rounding them
           costs a clamp at the ends of the range and nothing in between.
    """

    bits: Literal[8, 4, 3, 2] = 4
    group: int = 0
    zero: Literal["float", "integer"] = "float"
    clip: float = 1.0
    search: int = 1
    meta: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 3, 2):
            raise ValueError(f"bits must be 8, 4, 3 or 2, got {self.bits}")
        if self.group < 0:
            raise ValueError(f"group must be a number of channels, or 0 for the whole head, got {self.group}")
        if self.search < 1:
            raise ValueError(f"search must be at least 1, got {self.search}")
        if not 0.0 <= self.clip <= 1.0:
            raise ValueError(f"clip must be a quantile in (0, 1], or 0 for the calibrated one, got {self.clip}")

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        return self.clip == 0.0

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        return {"clip": Expected((), "ratio")} if self.calibrated else {}

    def bind(self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, dtype: str = "bfloat16") -> Affine:
        """The codec with the layer's clip ratio."""
        self.fields(head_dim)
        if not self.calibrated or tensors is None:
            return self
        if "clip" not in tensors:
            raise ValueError("clip=0 needs the clip ratio that kvant calibrate fits")
        return dataclasses.replace(self, clip=float(tensors["clip"]))

    def groups(self, head_dim: int) -> int:
        if self.group and head_dim % self.group:
            raise ValueError(f"group must divide head_dim {head_dim}, got {self.group}")
        return head_dim // self.group if self.group else 1

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        groups = self.groups(head_dim)
        offset = "min" if self.zero == "float" else "zero"
        return (
            Field("codes", "code", self.bits, head_dim),
            Field("scale", "meta", 16, groups, dtype=self.meta),
            Field(offset, "meta", 16, groups, dtype=self.meta),
        )

    def format(self, head_dim: int) -> StreamFormat:
        kind = ScaleKind.MIN if self.zero == "float" else ScaleKind.ZERO
        return StreamFormat(
            type(self).__name__,
            head_dim,
            bands=(Band("codes", 0, head_dim, self.bits),),
            scales=Scales(kind, ("scale", kind.value), self.meta, "token", self.groups(head_dim)),
            encoding=Encoding(clip=self.clip != 1.0, search=self.search),
        )

    @property
    def tensors(self) -> LayerTensors:
        return LayerTensors(clip=self.clip)

    def encode(self, x: Tensor) -> Parts:
        assert self.clip > 0.0, "encode needs a bound codec: the clip ratio is calibrated"
        x = x.float()
        tokens, heads, dim = x.shape
        if self.clip < 1.0:
            limit = magnitude_quantile(x, self.clip)
            x = x.clamp(-limit, limit)
        x = x.reshape(tokens, heads, self.groups(dim), dim // self.groups(dim))
        low, high = x.amin(-1), x.amax(-1)
        best = self._coded(x, low, high)
        if self.search > 1:
            middle, half = (high + low) / 2, (high - low) / 2
            least = (self._value(*best) - x).square().sum(-1)
            for i in range(1, self.search):
                reach = half * (1.0 - (1.0 - NARROWEST) * i / (self.search - 1))
                found = self._coded(x, middle - reach, middle + reach)
                error = (self._value(*found) - x).square().sum(-1)
                better = error < least
                least = torch.where(better, error, least)
                codes = torch.where(better[..., None], found[0], best[0])
                best = codes, torch.where(better, found[1], best[1]), torch.where(better, found[2], best[2])
        codes, scale, offset = best
        dtype = DTYPES[self.meta]
        name = "min" if self.zero == "float" else "zero"
        codes = codes.to(torch.uint8).reshape(tokens, heads, dim)
        return {"codes": codes, "scale": scale.to(dtype), name: offset.to(dtype)}

    def _coded(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scale and minimum (or zero) of groups [..., channels] for the range [low, high]; scale and minimum are rounded to
        the stored type."""
        dtype = DTYPES[self.meta]
        top = (1 << self.bits) - 1
        if self.zero == "float":
            low = low.to(dtype).float()
        scale = (high - low) / top
        if (
            self.zero == "integer"
        ):  # scale * zero must reach numbers that are nearly equal, which are far from 0 in scales
            scale = torch.maximum(scale, low.abs() / LARGEST_ZERO)
        # A constant group would have scale 0; the smallest normal number keeps the division finite and the code 0.
        scale = scale.clamp_min(torch.finfo(dtype).tiny).to(dtype).float()
        if self.zero == "float":
            codes = ((x - low[..., None]) / scale[..., None]).round()
            return codes.clamp(0, top), scale, low
        zero = (-low / scale).round().clamp(-LARGEST_ZERO, LARGEST_ZERO).to(dtype).float()
        return ((x / scale[..., None]).round() + zero[..., None]).clamp(0, top), scale, zero

    def _value(self, codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        if self.zero == "float":
            return codes * scale[..., None] + offset[..., None]
        return (codes - offset[..., None]) * scale[..., None]

    def decode(self, parts: Parts) -> Tensor:
        codes, scale = parts["codes"], parts["scale"].float()
        tokens, heads, dim = codes.shape
        x = codes.reshape(tokens, heads, self.groups(dim), dim // self.groups(dim)).float()
        offset = parts["min" if self.zero == "float" else "zero"].float()
        return self._value(x, scale, offset).reshape(tokens, heads, dim)
