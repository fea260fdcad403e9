"""Smoothing factors from the channels' largest magnitudes (VecInfer equation 4)."""

from __future__ import annotations

import torch

from kvant.calibrate.fitting import fits
from kvant.stats import LayerStats
from kvant.transforms.smooth import Smooth

Tensor = torch.Tensor
SMALLEST = 1e-4  # smallest magnitude as a share of the head's largest: bounds the gain of channels that were zero


@fits(Smooth, "sample")
def fit_smooth(part: Smooth, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    """max(|x_i|)^power for every channel i of every head."""
    largest = stats.of(stream).absmax.double()  # [heads, head_dim]
    floor = largest.amax(-1, keepdim=True) * SMALLEST
    largest = torch.where(floor > 0, largest.maximum(floor), 1.0)
    return {"factors": largest.pow(part.power).float()}
