"""The stored form of a stream, as its codec describes it: all that a kernel needs to read a page. Kernels do not see codecs.

A decoded element of channel c is

    x[c] = scale * level(code[c]) + offset (+ centroid[c])       level(code) = step * code + lowest, or a table's entry

with `code` in the band of channel c, `scale` and `offset` of the token (and its group of channels) or of the channel (and its
group of tokens). A stream of product quantization has no codes and no scales: sub-vectors are centroids. A raw stream has
neither.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

import torch

Tensor = torch.Tensor


class ScaleKind(enum.Enum):
    """How the offset of a decoded element is computed from the stored scales."""

    MIN = "min"  # x = scale * code + min
    ZERO = "zero"  # x = scale * (code - zero), zero an integer
    ALONE = "alone"  # x = scale * level(code)


@dataclasses.dataclass(frozen=True)
class Scales:
    """The 16-bit floats beside the codes of a stream."""

    kind: ScaleKind
    fields: tuple[str, ...]  # names of their fields: the scale, then the minimum or the zero point
    dtype: str  # bfloat16 or float16
    axis: Literal["token", "channel"]  # a scale belongs to a token or to a channel
    groups: int = 1  # token: groups of channels, each with a scale; channel: sets of scales of a group of tokens
    tokens: int = 1  # tokens that share a scale; 1 on the token axis


@dataclasses.dataclass(frozen=True)
class Band:
    """Neighbouring channels whose codes have the same width. A band of 0 bits is not stored and decodes to 0."""

    field: str  # name of the field of its codes; empty where it has none
    first: int  # channel
    width: int  # channels
    bits: int  # of a code
    step: float = 1.0  # between neighbouring levels, over the scale; 0 where levels are a table
    lowest: float = 0.0  # level of code 0, over the scale
    levels: tuple[float, ...] = ()  # ascending, over the scale; empty where they are uniform, step * code + lowest

    @property
    def end(self) -> int:
        """Channel after the last one."""
        return self.first + self.width


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Centroids that indices of a stream name: of sub-vectors (product quantization), or of whole head vectors (a residual
    is then coded beside the index)."""

    field: str  # name of the field of indices; empty where one centroid needs none
    dim: int  # channels of a centroid
    vectors: int  # centroids of a head vector: head_dim / dim
    bits: int  # of an index; 0 where one centroid needs none
    centroids: int  # of one codebook
    per: Literal[
        "layer", "head", "space"
    ]  # one codebook per layer, per head, or per sub-space (a sub-vector's place) of every head

    def heads(self, heads: int) -> int:
        """Codebooks along the heads of a layer: one for each, or one for all."""
        return 1 if self.per == "layer" else heads


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How codes are chosen. Decoding does not depend on it."""

    scale: Literal["range", "rms", "norm"] = (
        "range"  # computed from the smallest and largest value, the root mean square, or the norm
    )
    clip: bool = False  # a token's values are clipped at a quantile of their magnitudes first (LayerTensors.clip)
    search: int = 1  # ranges or scales that are tried for a group of channels; the one with the least error is used
    weighted: bool = False  # squared errors are weighted per channel (LayerTensors.weights)
    unbiased: bool = False  # the stored scale is stretched until <x, decoded x> = <x, x>, in the weighted product


@dataclasses.dataclass(frozen=True)
class StreamFormat:
    """The stored form of one stream at one head dim. Two codecs with the same format have the same bytes in a page and are
    read by the same kernels."""

    codec: str  # name of the codec, only for messages
    head_dim: int
    bands: tuple[Band, ...] = ()  # of codes, in the order of channels, covering all; none where elements have no codes
    scales: Scales | None = None  # None where there are none: raw elements, product quantization
    group_tokens: int = 1  # tokens that are coded together
    mean_flag: bool = False  # a negative scale marks a token from which LayerTensors.mean was subtracted before coding
    boosted: int = 0  # channels of a group of tokens whose codes have two more bits, in fields "high" and "index"
    codebook: Codebook | None = None
    raw_dtype: str = ""  # dtype of unquantized elements; empty where elements are coded
    extras: tuple[str, ...] = ()  # further fields that decoding needs, which nothing here describes
    encoding: Encoding = Encoding()

    @property
    def stored_bands(self) -> tuple[Band, ...]:
        """Bands that have codes."""
        return tuple(band for band in self.bands if band.bits)

    @property
    def widths(self) -> frozenset[int]:
        """Widths in bits of the codes."""
        return frozenset(band.bits for band in self.stored_bands)

    @property
    def uniform(self) -> bool:
        """Whether the levels of all bands are evenly spaced."""
        return not any(band.levels for band in self.bands)

    @property
    def is_raw(self) -> bool:
        return bool(self.raw_dtype)

    @property
    def is_pq(self) -> bool:
        """Product quantization: only indices of centroids are stored."""
        return self.codebook is not None and not self.bands and not self.extras

    @property
    def is_residual(self) -> bool:
        """An index of a centroid of the whole head vector, and codes of the residual."""
        return self.codebook is not None and bool(self.bands) and not self.extras

    @property
    def is_tokenwise(self) -> bool:
        """Only codes with scales per token are stored."""
        return self._coded and self.scales is not None and self.scales.axis == "token"

    @property
    def is_channelwise(self) -> bool:
        """Codes with one scale per channel of a group of tokens; of boosted channels, high bits beside them."""
        scales = self.scales
        if not self._coded or scales is None:
            return False
        return scales.axis == "channel" and (scales.groups, scales.tokens) == (1, self.group_tokens)

    @property
    def _coded(self) -> bool:
        return bool(self.bands) and self.codebook is None and not self.extras

    @property
    def scale_groups(self) -> int:
        """Groups of channels of a token that have a scale each; 1 where a token has one scale or none."""
        return self.scales.groups if self.scales is not None and self.scales.axis == "token" else 1


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """Tensors of one layer that go with a format. Kernels get them as arguments; they are not compiled in."""

    clip: float = 1.0  # quantile of a token's magnitudes at which its values are clipped; 1 clips nothing
    weights: Tensor | None = None  # float32 [heads, head_dim]: weight of a squared error in a channel
    mean: Tensor | None = None  # float32 [heads, head_dim]: subtracted from tokens whose scale is negative
    codebooks: Tensor | None = None  # [heads or 1, subvectors or 1, centroids, dim]
