"""Fitting a recipe: the calibrated parts of a stream are fitted in order, each on the statistics behind the parts before it.

A fitter is a function registered for the class of a part:

    @fits(Rotation, "attended")
    def fit_rotation(part, stats, stream) -> dict[str, Tensor]

The tensors that it returns are passed to the part's `bind` under the same names. In the artifact their names are
"{stream}.{place}.{name}", e.g. "key.transforms[0].matrix" or "value.codec.codebooks". Moments are always gathered; what else
the fitter reads it names: "sample" (also for `absmax`), "probes" or "attended". What no fitter reads is not gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from kvant.recipe import Recipe
from kvant.spec import Spec
from kvant.stats import LayerStats

Tensor = torch.Tensor
Fitter = Callable[[Any, LayerStats, str], dict[str, Tensor]]

Statistic = Literal["sample", "probes", "attended"]

# SHRINKAGE head_dim / tokens of its mean eigenvalue, at most MAX_SHRINKAGE of it, is added to the queries' second moment
SHRINKAGE, MAX_SHRINKAGE = 2.0, 0.1

_FITTERS: dict[type[Spec], Fitter] = {}
_READS: dict[type[Spec], tuple[Statistic, ...]] = {}


def fits(kind: type[Spec], *reads: Statistic) -> Callable[[Fitter], Fitter]:
    """Decorator that makes a function the fitter of a class of parts. `reads` are the statistics it needs besides moments."""

    def add(fitter: Fitter) -> Fitter:
        if kind in _FITTERS:
            raise TypeError(f"two fitters for {kind.__name__}")
        _FITTERS[kind], _READS[kind] = fitter, reads
        return fitter

    return add


def statistics_of(recipe: Recipe) -> frozenset[Statistic]:
    """What the fitters of a recipe read besides moments."""
    parts = [part for stream in recipe.streams.values() for part in stream.parts.values() if part.calibrated]
    return frozenset(name for part in parts for name in _READS.get(type(part), ()))


def fit_layer(recipe: Recipe, stats: LayerStats) -> dict[str, Tensor]:
    """The calibrated tensors of one layer. The queries' second moment is shrunk first: what few queries of a text ask for, those of
    another text may. It is the less known the fewer tokens there are for a channel."""
    dim = stats.queries.mean.shape[-1]
    shrinkage = min(MAX_SHRINKAGE, SHRINKAGE * dim / stats.keys.count)
    stats = dataclasses.replace(stats, queries=stats.queries.shrunk(shrinkage))
    out: dict[str, Tensor] = {}
    for name, stream in recipe.streams.items():
        seen = stats
        for place, part in stream.parts.items():
            tensors: dict[str, Tensor] = {}
            if part.calibrated:
                fitter = _FITTERS.get(type(part))
                if fitter is None:
                    raise TypeError(f"{type(part).__name__} is calibrated but has no fitter")
                tensors = fitter(part, seen, name)
                assert all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point()), (name, place)
                out.update({f"{name}.{place}.{key}": value for key, value in tensors.items()})
            if place.startswith("transforms["):
                mean = seen.keys.mean
                seen = _through(seen, name, part.bind(mean.shape[-1], tensors, mean.device))  # type: ignore[attr-defined]
    return out


def _through(stats: LayerStats, stream: str, transform: Any) -> LayerStats:
    """Statistics of the vectors behind a transform. Its matrix A and mean mu are computed from its values at zero and at the
    unit vectors, so that this works for every affine transform."""
    heads, dim = stats.keys.mean.shape
    device = stats.keys.mean.device
    zero = torch.zeros(1, heads, dim, dtype=torch.float32, device=device)
    eye = torch.eye(dim, dtype=torch.float32, device=device)[:, None, :].expand(dim, heads, dim)
    shift = transform.forward(zero)[0]  # [heads, dim]: -mu A
    matrix = (transform.forward(eye) - shift).permute(1, 0, 2).double()  # [heads, dim, dim]: A
    dual = transform.dual(eye[:, :, None, :])[:, :, 0].permute(1, 0, 2).double()  # A^-T
    offset = -(shift.double()[:, None, :] @ torch.linalg.inv(matrix))[:, 0]
    if stream == "value":
        attended, mean = stats.attended, stats.attended_mean
        if attended is not None and bool(offset.any()):
            assert mean is not None, "removing a mean from the values needs that of the attention outputs"
            attended, mean = attended - _outer(offset, mean), mean - offset  # p V - mu, where p sums to one
        attended = None if attended is None else matrix.mT @ attended @ matrix
        mean = None if mean is None else (mean[:, None, :] @ matrix)[:, 0]
        probes = tuple(e._replace(values=transform.forward(e.values)) for e in stats.probes)
        return dataclasses.replace(
            stats,
            values=stats.values.through(matrix, offset),
            attended=attended,
            attended_mean=mean,
            probes=probes,
            weighted_values=None if stats.weighted_values is None else stats.weighted_values.through(matrix, offset),
        )
    probes = tuple(e._replace(keys=transform.forward(e.keys), queries=transform.dual(e.queries)) for e in stats.probes)
    return dataclasses.replace(
        stats,
        keys=stats.keys.through(matrix, offset),
        queries=stats.queries.through(dual),
        probes=probes,
        weighted_keys=None if stats.weighted_keys is None else stats.weighted_keys.through(matrix, offset),
    )


def _outer(offset: Tensor, mean: Tensor) -> Tensor:
    """E[x^T x] - E[(x - offset)^T (x - offset)] for vectors x with this mean: [heads, d, d]."""
    cross = offset[:, :, None] * mean[:, None, :]
    return cross + cross.mT - offset[:, :, None] * offset[:, None, :]
