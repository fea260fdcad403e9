"""Statistics that calibration gathers of one layer, and their images under a transform.

Everything is per KV head; the queries of all query heads of a KV head are pooled. Vectors are row vectors, after RoPE, over
the positions that will be served.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Probe(NamedTuple):
    """The first tokens of an excerpt, for searches that compute real attention: some of its queries [rows, heads, queries per
    head, head_dim], and all of its keys and values [tokens, heads, head_dim]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: Tensor  # int64 [rows]: token of each query


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of keys, values or queries, all [heads, ...] in float64."""

    count: int
    mean: Tensor  # [heads, head_dim]
    second: Tensor  # [heads, head_dim, head_dim]: mean of x^T x, not centred
    absmax: Tensor  # [heads, head_dim]; NaN where there is no sample
    sample: Tensor  # [heads, n, head_dim] float32: a uniform sample of the vectors

    def through(self, matrix: Tensor, offset: Tensor | None = None) -> Moments:
        """Moments of (x - offset) @ matrix; matrix [heads, d, d] or [d, d]. absmax is computed from the sample, and is NaN
        where there is none."""
        matrix = matrix.to(torch.float64).expand(len(self.mean), *matrix.shape[-2:])
        second, mean, sample = self.second, self.mean, self.sample.to(torch.float64)
        if offset is not None:
            offset = offset.to(torch.float64).expand_as(mean)
            cross = offset[:, :, None] * mean[:, None, :]
            second = second - cross - cross.mT + offset[:, :, None] * offset[:, None, :]
            mean, sample = mean - offset, sample - offset[:, None, :]
        sample = sample @ matrix
        return Moments(
            self.count,
            (mean[:, None, :] @ matrix)[:, 0],
            matrix.mT @ second @ matrix,
            sample.abs().amax(1) if sample.shape[1] else torch.full_like(mean, torch.nan),
            sample.float(),
        )

    def shrunk(self, amount: float) -> Moments:
        """With `amount` times the mean second moment of a channel added to every channel's. Eigenvectors stay as they are."""
        level = amount * self.second.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        eye = torch.eye(self.second.shape[-1], dtype=self.second.dtype, device=self.second.device)
        return dataclasses.replace(self, second=self.second + level * eye)

    def pooled(self) -> Moments:
        """One set of moments for all heads together, as [1, ...]."""
        dim = self.mean.shape[-1]
        return Moments(
            self.count * len(self.mean),
            self.mean.mean(0, keepdim=True),
            self.second.mean(0, keepdim=True),
            self.absmax.amax(0, keepdim=True),
            self.sample.reshape(1, -1, dim),
        )


class WeightedMoments(NamedTuple):
    """Mean and second moment of vectors, weighted by how much an error in a token changes attention outputs; float64."""

    mean: Tensor  # [heads, head_dim]
    second: Tensor  # [heads, head_dim, head_dim], not centred

    @property
    def covariance(self) -> Tensor:
        return self.second - self.mean[:, :, None] * self.mean[:, None, :]

    def mixed(self, other: WeightedMoments | None, share: float) -> WeightedMoments:
        """(1 - share) * self + share * other."""
        if not share:
            return self
        assert other is not None, "a part with share > 0 must be `attention_weighted`"
        return WeightedMoments(*(torch.lerp(a, b, share) for a, b in zip(self, other, strict=True)))

    def through(self, matrix: Tensor, offset: Tensor) -> WeightedMoments:
        """Moments of (x - offset) @ matrix; matrix [heads, d, d], offset [heads, d]."""
        mean = self.mean - offset
        second = self.covariance + mean[:, :, None] * mean[:, None, :]
        return WeightedMoments((mean[:, None, :] @ matrix)[:, 0], matrix.mT @ second @ matrix)


@dataclasses.dataclass(frozen=True)
class LayerStats:
    """Statistics of one layer, the input of a fitter. `attended` is OSCAR's C_S: the mean of (p V)^T (p V) over queries, per
    head.

    The recipe's sink tokens are never coded, so moments and samples leave them out; probes contain them. Where tokens are
    weighted by attention, the first 16 are left out: they would outweigh all others.
    """

    queries: Moments
    keys: Moments
    values: Moments
    attended: Tensor | None  # [heads, head_dim, head_dim] float64; None where no part needs it
    probes: tuple[Probe, ...]
    scale: float  # of the softmax
    sink: int = 0  # tokens at the start of a probe that are never coded
    recent: int = 0  # tokens before a query, itself included, that it reads in full precision
    sliding_window: int | None = None  # tokens of the layer that a query sees, itself included; None: all
    softcap: float | None = None  # of the logits
    sink_logits: Tensor | None = None  # [query heads], in the softmax's denominator alone
    attended_mean: Tensor | None = None  # [heads, head_dim]: the mean of p V, for what removes a mean from the values
    weighted_keys: WeightedMoments | None = None  # only where a part is `attention_weighted`
    weighted_values: WeightedMoments | None = None

    def of(self, stream: str) -> Moments:
        return self.keys if stream == "key" else self.values

    def weighted_moments(self, stream: str, share: float) -> WeightedMoments:
        """Mean and second moment of a stream. They are (1 - share) times the plain moments plus share times the
        attention-weighted ones."""
        moments = self.of(stream)
        plain = WeightedMoments(moments.mean, moments.second)
        return plain.mixed(self.weighted_keys if stream == "key" else self.weighted_values, share)
