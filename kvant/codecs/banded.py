"""Token-wise codes with one scale per token and bands of channels of different width; a band may have no bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from kvant.bands import quarters
from kvant.codecs.base import DTYPES, BoundCodec, Codec, Field, Parts, Tensor
from kvant.codecs.format import Band, Encoding, LayerTensors, ScaleKind, Scales, StreamFormat
from kvant.codecs.lloyd_max import lloyd_max_levels
from kvant.spec import Expected

NORMAL = 1 << 20  # dimensions at which sqrt(dim) times a coordinate of a random unit vector is nearly a normal number
# bits -> step of the uniform levels with the least squared error for a normal number
STEPS = {1: 1.5957691, 2: 0.9956868, 3: 0.5860194, 4: 0.3352006}
STRETCH = (0.8, 1.6)  # smallest and largest factor by which `unbiased` changes a scale
SMALLEST, LARGEST = 0.6, 1.4  # range of the scale search, as multiples of the root mean square


@functools.lru_cache(maxsize=16)
def normal_levels(bits: int, kind: str) -> tuple[float, ...]:
    """Levels for normal numbers of unit variance, ascending."""
    count = 1 << bits
    if kind == "uniform":
        return tuple(STEPS[bits] * (i - (count - 1) / 2) for i in range(count))
    return tuple(level * NORMAL**0.5 for level in lloyd_max_levels(bits, NORMAL))


@dataclasses.dataclass(frozen=True)
class Banded(Codec):
    """x_c ~ scale * level_b[code_c] with b the bits of channel c's band; channels without bits are read as zero.

    bits     width of a code in the first quarter of the channels, the next half and the last quarter: "4/2/0"; or one number
             for all channels.
    levels   "uniform": the step with the least error for normal numbers; "lloyd": Lloyd-Max levels of normal numbers.
    search   number of scales tried for a token, as multiples 0.6 to 1.4 of its root mean square; the one with the least
             weighted squared error is used. 1: the root mean square itself.
    weighted whether a squared error is weighted by the queries' variance in its channel, which calibration measures.
    unbiased whether the stored scale is then stretched so that <x, decoded x> = <x, x> in the weighted product, channels
             without bits included. Rounding to the nearest level shrinks a vector on average, and a query that attends to a
             token resembles its key: without the correction all large logits would be too small.
    flag     whether the mean of all tokens may be removed from a token before coding; a negative scale marks this. It is
             chosen for every token by the error. `share`: share of a token's weight in that mean that depends on the
             attention to it.
    meta     16-bit type of the scale.
    """

    fit_free: ClassVar[tuple[str, ...]] = ("bits", "levels", "search", "unbiased", "meta")

    bits: str = "4/2/0"
    levels: Literal["uniform", "lloyd"] = "uniform"
    search: int = 9
    weighted: bool = True
    unbiased: bool = True
    flag: bool = False
    share: float = 0.5
    meta: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        widths = self.bits.split("/")
        if len(widths) not in (1, 3) or any(w not in ("0", "1", "2", "3", "4") for w in widths) or {*widths} == {"0"}:
            raise ValueError(f"bits must be one width or three from 0 to 4, such as 2 or 4/2/0, got {self.bits!r}")
        if self.search < 1:
            raise ValueError(f"search must be at least 1, got {self.search}")

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        return self.weighted or self.flag

    @property
    def attention_weighted(self) -> bool:
        return self.flag and self.share > 0

    def bands(self, head_dim: int) -> tuple[tuple[int, int], ...]:
        """(channels, bits) of every band in order, those with 0 bits included; neighbours with the same bits are one band."""
        bits = [int(width) for width in self.bits.split("/")]
        if len(bits) == 1:
            return ((head_dim, bits[0]),)
        pairs = zip(quarters(head_dim), bits, strict=True)
        return tuple(
            (sum(width for width, _ in run), same) for same, run in itertools.groupby(pairs, key=lambda pair: pair[1])
        )

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        stored = self.format(head_dim).stored_bands
        codes = [Field(band.field, "code", band.bits, band.width) for band in stored]
        return *codes, Field("scale", "meta", 16, 1, dtype=self.meta)

    def format(self, head_dim: int) -> StreamFormat:
        bands: list[Band] = []
        first = 0
        for i, (width, bits) in enumerate(self.bands(head_dim)):
            if not bits:
                bands.append(Band("", first, width, 0))
            elif self.levels == "uniform":  # level(code) = step * (code - (2^bits - 1) / 2)
                step = STEPS[bits]
                bands.append(Band(f"codes{i}", first, width, bits, step, -step * ((1 << bits) - 1) / 2))
            else:
                levels = normal_levels(bits, self.levels)
                bands.append(Band(f"codes{i}", first, width, bits, 0.0, levels[0], levels))
            first += width
        return StreamFormat(
            type(self).__name__,
            head_dim,
            bands=tuple(bands),
            scales=Scales(ScaleKind.ALONE, ("scale",), self.meta, "token"),
            mean_flag=self.flag,
            encoding=Encoding("rms", search=self.search, weighted=self.weighted, unbiased=self.unbiased),
        )

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        shape = heads, head_dim
        found = {"weights": Expected(shape, "weights"), "mean": Expected(shape)}
        return {name: found[name] for name, wanted in (("weights", self.weighted), ("mean", self.flag)) if wanted}

    def bind(self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, dtype: str = "bfloat16") -> BoundCodec:
        self.fields(head_dim)
        if tensors is None:
            return self
        found: dict[str, Tensor | None] = {"weights": None, "mean": None}
        for name, wanted in (("weights", self.weighted), ("mean", self.flag)):
            if not wanted:
                continue
            tensor = tensors.get(name)
            if tensor is None or tensor.ndim != 2 or tensor.shape[1] != head_dim:
                shape = "none" if tensor is None else list(tensor.shape)
                raise ValueError(f"banded codes need {name} [heads, {head_dim}] that kvant calibrate fits, got {shape}")
            found[name] = tensor.float()
        return BoundBanded(self, head_dim, found["weights"], found["mean"])


class BoundBanded(BoundCodec):
    """Banded codes with the channels' weights and the tokens' mean, either of which may be None."""

    def __init__(self, spec: Banded, head_dim: int, weights: Tensor | None, mean: Tensor | None) -> None:
        self.spec, self.head_dim = spec, head_dim
        self.weights, self.mean = weights, mean  # [heads, head_dim] each
        stored = spec.format(head_dim).stored_bands
        self.bands = [(band.field, slice(band.first, band.end), band.bits) for band in stored]
        self.factors = (
            [1.0]
            if spec.search == 1
            else [SMALLEST + (LARGEST - SMALLEST) * i / (spec.search - 1) for i in range(spec.search)]
        )

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return self.spec.fields(head_dim)

    def format(self, head_dim: int) -> StreamFormat:
        return self.spec.format(head_dim)

    @property
    def tensors(self) -> LayerTensors:
        return LayerTensors(weights=self.weights, mean=self.mean)

    def _levels(self, bits: int, device: torch.device) -> Tensor:
        return torch.tensor(normal_levels(bits, self.spec.levels), dtype=torch.float32, device=device)

    def _weights(self, device: torch.device) -> Tensor:
        """Weight of a squared error in every channel: [heads or 1, head_dim]."""
        if self.weights is not None:
            return self.weights.to(device)
        return torch.ones(1, self.head_dim, dtype=torch.float32, device=device)

    def _codes(self, band: Tensor, scale: Tensor, bits: int) -> Tensor:
        """Nearest levels of a band's channels: int64."""
        unit = band / scale
        if self.spec.levels == "uniform":
            top = (1 << bits) - 1
            return (unit / STEPS[bits] + top / 2).round().clamp(0, top).long()
        levels = self._levels(bits, band.device)
        return torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The best scale of every token, [tokens, heads, 1], and its weighted squared error."""
        limits = torch.finfo(DTYPES[self.spec.meta])
        stored = torch.cat([x[..., at] for _, at, _ in self.bands], -1)
        rms = stored.square().mean(-1, keepdim=True).sqrt()
        best = torch.full_like(rms, float("inf"))
        chosen = torch.ones_like(rms)
        weights = self._weights(x.device)
        for factor in self.factors:
            scale = (rms * factor).clamp(limits.tiny, limits.max).to(DTYPES[self.spec.meta]).float()
            error = torch.zeros_like(rms)
            for _, at, bits in self.bands:
                levels = self._levels(bits, x.device)
                missed = (x[..., at] - scale * levels[self._codes(x[..., at], scale, bits)]).square()
                error += (missed * weights[:, at]).sum(-1, keepdim=True)
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, scale, chosen)
        return chosen, best

    def encode(self, x: Tensor) -> Parts:
        x = x.float()
        scale, error = self._scaled(x)
        sign = torch.ones_like(scale)
        if self.mean is not None:
            centred = x - self.mean.to(x.device)
            other, less = self._scaled(centred)
            taken = less < error
            x = torch.where(taken, centred, x)
            scale, sign = torch.where(taken, other, scale), torch.where(taken, -1.0, 1.0)
        parts: Parts = {}
        reached = torch.zeros_like(scale)  # weighted product <x, decoded x> / scale
        weights = self._weights(x.device)
        for name, at, bits in self.bands:
            codes = self._codes(x[..., at], scale, bits)
            parts[name] = codes.to(torch.uint8)
            levels = self._levels(bits, x.device)[codes]
            reached += (weights[:, at] * x[..., at] * levels).sum(-1, keepdim=True)
        if self.spec.unbiased:
            wanted = (weights * x.square()).sum(-1, keepdim=True)
            stretch = wanted / (reached * scale).clamp_min(torch.finfo(torch.float32).tiny)
            scale = scale * stretch.clamp(*STRETCH)
        limits = torch.finfo(DTYPES[self.spec.meta])
        parts["scale"] = (scale.clamp(limits.tiny, limits.max) * sign).to(DTYPES[self.spec.meta])
        return parts

    def decode(self, parts: Parts) -> Tensor:
        signed = parts["scale"].float()
        scale = signed.abs()
        out = scale.new_zeros(*scale.shape[:-1], self.head_dim)
        for name, at, bits in self.bands:
            out[..., at] = scale * self._levels(bits, scale.device)[parts[name].long()]
        if self.mean is not None:
            out = torch.where(signed < 0, out + self.mean.to(out.device), out)
        return out
