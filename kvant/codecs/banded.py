"""Token-wise codes of several widths under one scale: channels that matter more have more bits, some have none."""

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

NORMAL = 1 << 20  # dimensions in which a coordinate of a random unit vector, times their root, is a normal number
STEPS = {1: 1.5957691, 2: 0.9956868, 3: 0.5860194, 4: 0.3352006}  # uniform levels of least squared error for one
STRETCH = (0.8, 1.6)  # of a scale, at most
SMALLEST, LARGEST = 0.6, 1.4  # multiples of the root mean square that the scale is searched in


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

    bits     of the first quarter of the channels, the next half and the last quarter: "4/2/0"; or one number for all.
    levels   "uniform", of the step with the least error for normal numbers, or "lloyd", the best levels there are.
    search   how many scales are tried for a token, as multiples 0.6 to 1.4 of its root mean square; the one with the least
             weighted squared error is kept. 1 keeps the root mean square itself.
    weighted whether an error counts by the variance of the queries in its channel, which calibration measures.
    unbiased whether the scale that is stored is then stretched until the token's weighted product with its own code is that
             with itself, channels without bits included. The nearest levels are too short on average, and queries that
             read a token look like it, so that their logits would all be too small.
    flag     whether a token may be coded with the mean of all tokens taken off: the sign of its scale then says so. It is
             chosen token by token, by the error. A share `share` of a token's weight in it is what attention reads of it.
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
        """(width, bits) of every band that is stored or left out, in order; neighbours of the same bits are one band."""
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
    """Banded codes with the weights of their channels and the mean of their tokens, whichever there are."""

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
        """What an error costs in every channel: [heads or 1, head_dim]."""
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
        """The best scale of every token [tokens, heads, 1], and the squared error it leaves."""
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
        reached = torch.zeros_like(scale)  # the weighted product of x and its code
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
