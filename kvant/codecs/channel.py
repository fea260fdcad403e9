"""Per-channel affine quantization over a group of tokens: KIVI's keys."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch

from kvant.codecs.base import DTYPES, Codec, Field, Parts, Tensor
from kvant.codecs.format import Band, ScaleKind, Scales, StreamFormat


def affine_codes(x: Tensor, low: Tensor, high: Tensor, top: Tensor | int, meta: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 ... top of x between low and high, with the scale and the minimum that they are decoded with.

    Scale and minimum are rounded to 16 bits first and codes are computed from the rounded ones, so that rounding them
    costs a clamp at the ends of the range and nothing in between.
    """
    dtype = DTYPES[meta]
    info = torch.finfo(dtype)
    low = low.clamp(-info.max, info.max).to(dtype)
    scale = ((high - low.float()) / top).clamp(info.tiny, info.max).to(dtype)
    codes = ((x - low.float()) / scale.float()).round()
    codes = torch.minimum(codes.clamp_min(0), torch.as_tensor(top, dtype=codes.dtype, device=codes.device))
    return codes.to(torch.uint8), scale, low


def check_group(name: str, tokens: int) -> None:
    """Refuses a number of tokens that does not divide a page."""
    if tokens not in (2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"{name} must be a power of two from 2 to 128 tokens, got {tokens}")


@dataclasses.dataclass(frozen=True)
class Channel(Codec):
    """x ~ scale * code + min, with a scale and a minimum for every channel of a group of tokens.

    bits   width of a code.
    group  tokens that share a channel's scale and minimum.
    meta   16-bit type of scale and minimum.
    """

    bits: Literal[8, 4, 3, 2] = 2
    group: int = 32
    meta: Literal["bfloat16", "float16"] = "float16"

    channelwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 3, 2):
            raise ValueError(f"bits must be 8, 4, 3 or 2, got {self.bits}")
        check_group("group", self.group)

    @property
    def group_tokens(self) -> int:
        return self.group

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return (
            Field("codes", "code", self.bits, head_dim),
            Field("scale", "meta", 16, head_dim, self.group, self.meta),
            Field("min", "meta", 16, head_dim, self.group, self.meta),
        )

    def format(self, head_dim: int) -> StreamFormat:
        return StreamFormat(
            type(self).__name__,
            head_dim,
            bands=(Band("codes", 0, head_dim, self.bits),),
            scales=Scales(ScaleKind.MIN, ("scale", "min"), self.meta, "channel", tokens=self.group),
            group_tokens=self.group,
        )

    def encode(self, x: Tensor) -> Parts:
        tokens, heads, dim = x.shape
        assert tokens % self.group == 0, (tokens, self.group)
        x = x.float().reshape(-1, self.group, heads, dim)
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        codes, scale, low = affine_codes(x, low, high, (1 << self.bits) - 1, self.meta)
        return {"codes": codes.reshape(tokens, heads, dim), "scale": scale[:, 0], "min": low[:, 0]}

    def decode(self, parts: Parts) -> Tensor:
        codes = parts["codes"]
        tokens, heads, dim = codes.shape
        x = codes.reshape(-1, self.group, heads, dim).float()
        x = x * parts["scale"].float()[:, None] + parts["min"].float()[:, None]
        return x.reshape(tokens, heads, dim)
