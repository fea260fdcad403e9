"""Kitty's keys: per-channel quantization at two bits in which the strongest channels have four."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from kvant.codecs.base import Codec, Field, Parts, Tensor
from kvant.codecs.channel import affine_codes, check_group
from kvant.codecs.format import Band, ScaleKind, Scales, StreamFormat


@dataclasses.dataclass(frozen=True)
class Boosted(Codec):
    """Per-channel INT2 over a group of tokens; of every group, a share of the channels in INT4.

    The page of the paper's section 4.1: the low two bits of all channels are one dense tensor, the high two bits of the
    boosted channels another. One index byte per channel is the channel's row in the second tensor, or says that it has
    none. Both tensors have two bits per element and are read from end to end, without a mask per element.

    boost  share of the channels that are boosted, rounded up to a multiple of 4 so that a token owns whole bytes.
    group  tokens that share a channel's scale and minimum, and the choice of boosted channels: those with the largest
           mean magnitude over the group (equation 2).
    meta   16-bit type of scale and minimum.
    """

    boost: float = 0.125
    group: int = 128
    meta: Literal["bfloat16", "float16"] = "float16"

    def __post_init__(self) -> None:
        if not 0.0 < self.boost <= 1.0:
            raise ValueError(f"boost must be a share of the channels in (0, 1], got {self.boost}")
        check_group("group", self.group)

    @property
    def group_tokens(self) -> int:
        return self.group

    def boosted(self, head_dim: int) -> int:
        """Channels with four bits."""
        if head_dim % 4 or head_dim > 256:
            raise ValueError(f"head_dim must be a multiple of 4 and at most 256, got {head_dim}")
        return min(head_dim, max(1, -(-round(self.boost * head_dim) // 4)) * 4)

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return (
            Field("codes", "code", 2, head_dim),
            Field("scale", "meta", 16, head_dim, self.group, self.meta),
            Field("min", "meta", 16, head_dim, self.group, self.meta),
            Field("high", "index", 2, self.boosted(head_dim)),
            Field("index", "index", 8, head_dim, self.group),
        )

    def format(self, head_dim: int) -> StreamFormat:
        return StreamFormat(
            type(self).__name__,
            head_dim,
            bands=(Band("codes", 0, head_dim, 2),),
            scales=Scales(ScaleKind.MIN, ("scale", "min"), self.meta, "channel", tokens=self.group),
            group_tokens=self.group,
            boosted=self.boosted(head_dim),
        )

    def choose(self, x: Tensor) -> Tensor:
        """Which channels of every group are boosted: bool [groups, heads, head_dim] for [groups, tokens, heads,
        head_dim]."""
        strength = x.double().abs().sum(1)  # exact for 16-bit inputs, so that the order of summation does not matter
        chosen = strength.argsort(dim=-1, descending=True, stable=True)[..., : self.boosted(x.shape[-1])]
        return torch.zeros_like(strength, dtype=torch.bool).scatter(-1, chosen, True)

    def encode(self, x: Tensor) -> Parts:
        tokens, heads, dim = x.shape
        assert tokens % self.group == 0, (tokens, self.group)
        x = x.float().reshape(-1, self.group, heads, dim)
        chosen = self.choose(x)
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        top = torch.where(chosen, 15.0, 3.0)[:, None]
        codes, scale, low = affine_codes(x, low, high, top, self.meta)
        count = self.boosted(dim)
        rows = chosen.nonzero()[:, -1].reshape(-1, heads, count)  # boosted channels, in order
        index = torch.where(chosen, chosen.cumsum(-1) - 1, min(count, 255))
        return {
            "codes": (codes & 3).reshape(tokens, heads, dim),
            "high": (codes >> 2).gather(-1, rows[:, None].expand(-1, self.group, -1, -1)).reshape(tokens, heads, count),
            "index": index.to(torch.uint8),
            "scale": scale[:, 0],
            "min": low[:, 0],
        }

    def decode(self, parts: Parts) -> Tensor:
        tokens, heads, dim = parts["codes"].shape
        high = parts["high"].reshape(-1, self.group, heads, parts["high"].shape[-1])
        count = high.shape[-1]
        # an index past the boosted channels reads the zeros that are appended to them
        high = torch.cat((high, torch.zeros_like(high[..., :1])), -1)
        index = parts["index"].long().clamp_max(count)[:, None].expand(-1, self.group, -1, -1)
        codes = parts["codes"].reshape(-1, self.group, heads, dim) | high.gather(-1, index) << 2
        x = codes.float() * parts["scale"].float()[:, None] + parts["min"].float()[:, None]
        return x.reshape(tokens, heads, dim)
