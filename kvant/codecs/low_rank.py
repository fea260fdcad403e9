"""GEAR's codec: quantization, plus a low-rank estimate of its error, plus a few unquantized outliers."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from kvant.codecs.base import Codec, Field, Parts, Tensor
from kvant.codecs.channel import affine_codes, check_group
from kvant.codecs.format import Band, ScaleKind, Scales, StreamFormat


@dataclasses.dataclass(frozen=True)
class LowRank(Codec):
    """X ~ D + L + S over a block of tokens: D is affine quantization, S are the largest and smallest entries of every
    channel (or token), stored in float16 with their indices and excluded from D's ranges, and L = A B^T is a low-rank
    approximation of the error of D, by power iteration.

    axis      "channel": D has a scale per channel and group of tokens, S is taken per channel (keys); "token": D has a
              scale per token and group of channels, S is taken per token (values).
    bits      width of a code of D.
    group     tokens (or channels) that share a scale.
    block     tokens whose error shares one pair of factors: A has a row for each, B one for each channel.
    rank      of L.
    loops     power iterations.
    outliers  entries kept of each end of a channel's (or token's) range; 0 is GEAR-L.
    """

    axis: Literal["channel", "token"] = "channel"
    bits: Literal[4, 2] = 2
    group: int = 32
    block: int = 128
    rank: int = 2
    loops: int = 3
    outliers: int = 1

    def __post_init__(self) -> None:
        if self.axis not in ("channel", "token"):
            raise ValueError(f"axis must be channel or token, got {self.axis!r}")
        if self.bits not in (4, 2):
            raise ValueError(f"bits must be 4 or 2, got {self.bits}")
        check_group("block", self.block)
        if self.group < 1 or (self.axis == "channel" and self.block % self.group):
            raise ValueError(f"group must divide the block of {self.block} tokens, got {self.group}")
        for name, least in (("rank", 1), ("loops", 1), ("outliers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if 2 * self.outliers >= (self.group if self.axis == "channel" else self.block):
            raise ValueError(f"outliers must leave something to quantize, got {self.outliers} of each end")

    @property
    def group_tokens(self) -> int:
        return self.block

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        if self.axis == "token" and head_dim % self.group:
            raise ValueError(f"group must divide head_dim {head_dim}, got {self.group}")
        if head_dim > 256 or 2 * self.outliers >= head_dim:
            raise ValueError(f"head_dim must be more than twice the outliers and at most 256, got {head_dim}")
        if self.rank > min(head_dim, self.block):
            raise ValueError(f"rank must be at most {min(head_dim, self.block)}, got {self.rank}")
        if self.axis == "channel":
            scales, vectors, tokens = self.block // self.group * head_dim, head_dim, self.block
        else:
            scales, vectors, tokens = head_dim // self.group, 1, 1
        fields = [
            Field("codes", "code", self.bits, head_dim),
            Field("scale", "meta", 16, scales, tokens, "float16"),
            Field("min", "meta", 16, scales, tokens, "float16"),
            Field("left", "raw", 16, self.rank, dtype="float16"),
            Field("right", "raw", 16, self.rank * head_dim, self.block, "float16"),
        ]
        if self.outliers:
            fields.append(Field("outliers", "raw", 16, 2 * self.outliers * vectors, tokens, "float16"))
            fields.append(Field("places", "index", 8, 2 * self.outliers * vectors, tokens))
        return tuple(fields)

    def format(self, head_dim: int) -> StreamFormat:
        if self.axis == "channel":
            scales = Scales(ScaleKind.MIN, ("scale", "min"), "float16", "channel", tokens=self.group)
        else:
            scales = Scales(ScaleKind.MIN, ("scale", "min"), "float16", "token", head_dim // self.group)
        return StreamFormat(
            type(self).__name__,
            head_dim,
            bands=(Band("codes", 0, head_dim, self.bits),),
            scales=scales,
            group_tokens=self.block,
            extras=("left", "right", "outliers", "places") if self.outliers else ("left", "right"),
        )

    def encode(self, x: Tensor) -> Parts:
        tokens, heads, dim = x.shape
        assert tokens % self.block == 0, (tokens, self.block)
        x = x.float().reshape(-1, self.block, heads, dim).transpose(1, 2)  # [blocks, heads, tokens, channels]
        along = 2 if self.axis == "channel" else 3  # the dim along which outliers are taken
        places = x.argsort(dim=along, stable=True)
        count = x.shape[along]
        ends = torch.cat((torch.arange(self.outliers), torch.arange(count - self.outliers, count))).to(x.device)
        places = places.index_select(along, ends)
        kept = torch.zeros_like(x, dtype=torch.bool).scatter(along, places, True)
        codes, scale, low = self._quantize(x, kept)
        rest = torch.where(kept, 0.0, x - self._dequantize(codes, scale, low))
        left, right = self._factors(rest)
        parts = {
            "codes": self._rows(codes),
            "scale": self._shared(scale),
            "min": self._shared(low),
            "left": self._rows(left.to(torch.float16)),
            "right": right.to(torch.float16).flatten(2),
        }
        if self.outliers:
            limit = torch.finfo(torch.float16).max
            parts["outliers"] = self._shared(x.gather(along, places).clamp(-limit, limit).to(torch.float16))
            parts["places"] = self._shared(places.to(torch.uint8))
        return parts

    def decode(self, parts: Parts) -> Tensor:
        tokens, heads, dim = parts["codes"].shape
        codes, left = self._unrows(parts["codes"]), self._unrows(parts["left"]).float()
        groups = self.block // self.group if self.axis == "channel" else dim // self.group
        scale, low = (self._unshared(parts[name], groups, dim) for name in ("scale", "min"))
        x = self._dequantize(codes, scale, low)
        right = parts["right"].float().reshape(-1, heads, self.rank, dim)
        for r in range(self.rank):
            x = x + left[..., r : r + 1] * right[:, :, r : r + 1]
        if self.outliers:
            along = 2 if self.axis == "channel" else 3
            places = self._unshared(parts["places"], 2 * self.outliers, dim).long().clamp_max(x.shape[along] - 1)
            x = x.scatter(along, places, self._unshared(parts["outliers"], 2 * self.outliers, dim).float())
        return self._rows(x).reshape(tokens, heads, dim)

    def _quantize(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [blocks, heads, tokens, channels]; scale and minimum have one entry per group."""
        shape = x.shape
        x, kept, along = self._grouped(x), self._grouped(kept), 3 if self.axis == "channel" else 4
        low = x.masked_fill(kept, float("inf")).amin(along, keepdim=True)
        high = x.masked_fill(kept, float("-inf")).amax(along, keepdim=True)
        codes, scale, low = affine_codes(x, low, high, (1 << self.bits) - 1, "float16")
        return codes.reshape(shape), scale.squeeze(along), low.squeeze(along)

    def _dequantize(self, codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
        along = 3 if self.axis == "channel" else 4
        x = self._grouped(codes.float()) * scale.float().unsqueeze(along) + low.float().unsqueeze(along)
        return x.reshape(codes.shape)

    def _grouped(self, x: Tensor) -> Tensor:
        """[blocks, heads, tokens, channels] with the axis of the groups split in two."""
        along = 2 if self.axis == "channel" else 3
        return x.unflatten(along, (-1, self.group))

    def _factors(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """A [blocks, heads, tokens, rank] with orthonormal columns and B^T [blocks, heads, rank, channels]."""
        rest = rest.double()
        dim = rest.shape[-1]
        grid = torch.outer(torch.arange(1, dim + 1), torch.arange(1, self.rank + 1)).to(rest)
        right = torch.cos(1.618 * grid).expand(*rest.shape[:2], dim, self.rank)  # any fixed start works
        for _ in range(self.loops):
            left = torch.linalg.qr(rest @ right).Q
            right = rest.mT @ left
        return left.float(), right.mT.float()

    def _rows(self, x: Tensor) -> Tensor:
        """[blocks, heads, tokens, width] -> a row per token."""
        return x.transpose(1, 2).flatten(0, 1)

    def _unrows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.block, *x.shape[1:]).transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        """Numbers per channel, [blocks, heads, n, channels], or per token, [blocks, heads, tokens, n], as rows."""
        return x.flatten(2) if self.axis == "channel" else self._rows(x)

    def _unshared(self, x: Tensor, count: int, dim: int) -> Tensor:
        return x.unflatten(-1, (count, dim)) if self.axis == "channel" else self._unrows(x)
