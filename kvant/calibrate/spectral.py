"""Eigenbases of second moments, for rotations."""

from __future__ import annotations

import torch

from kvant.calibrate.fitting import fits
from kvant.stats import LayerStats
from kvant.transforms.rotation import Rotation

Tensor = torch.Tensor


def eigenbasis(second: Tensor, damping: float = 0.0) -> Tensor:
    """Eigenvectors as columns by descending eigenvalue: [..., d, d] symmetric -> the same shape, float64.

    An eigenvector's sign is free: its largest entry is made positive, so that the basis does not depend on the machine.
    """
    second = second.double()
    level = second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(second.shape[-1], dtype=torch.float64, device=second.device)
    vectors = torch.linalg.eigh(second + damping * level * eye).eigenvectors.flip(-1)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * largest.sign()


def target_moment(stats: LayerStats, target: str) -> Tensor:
    """The second moment that a rotation's target names: [heads, d, d]."""
    if target == "attended":
        assert stats.attended is not None
        return stats.attended
    return {"queries": stats.queries, "keys": stats.keys, "values": stats.values}[target].second


@fits(Rotation, "attended")
def fit_rotation(part: Rotation, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    """U: one for the layer from the mean of its heads' moments (OSCAR A.4), or one per head."""
    second = target_moment(stats, part.target)
    if not part.per_head:
        second = second.mean(0, keepdim=True)
    return {"basis": eigenbasis(second, part.damping).float()}
