"""Fitter of banded codes: the weight of an error in every channel, and the mean that may be removed from a token."""

from __future__ import annotations

import torch

from kvant.calibrate.fitting import fits
from kvant.codecs.banded import Banded
from kvant.stats import LayerStats

Tensor = torch.Tensor


@fits(Banded)
def fit_banded(part: Banded, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if part.weighted:
        if stream != "key":
            raise ValueError("values have no queries to weigh their errors by: use weighted=false")
        second = stats.queries.second.diagonal(dim1=-2, dim2=-1)
        found["weights"] = (second.clamp_min(0.0) / second.mean(-1, keepdim=True).clamp_min(1e-30)).float()
    if part.flag:
        found["mean"] = stats.weighted_moments(stream, part.share).mean.float()
    return found
