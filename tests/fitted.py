"""Calibrated tensors and statistics for tests: made up, but of the right shapes."""

from __future__ import annotations

import torch

from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.recipe import Recipe
from kvant.stats import LayerStats, Moments
from kvant.transforms.smooth import Smooth


def made_up_tensors(recipe: Recipe, heads: int, head_dim: int) -> dict[str, torch.Tensor]:
    """What an artifact would hold for one layer, drawn at random."""
    out = {}
    for name, stream in recipe.streams.items():
        for place, part in stream.parts.items():
            if isinstance(part, ProductVQ):
                out[f"{name}.{place}.codebooks"] = torch.randn(part.book_shape(head_dim, heads)).half()
            elif isinstance(part, ResidualKMeans):
                own = heads if part.books == "head" else 1
                out[f"{name}.{place}.centroids"] = torch.randn(own, part.centroids, head_dim).half()
            elif isinstance(part, Smooth):
                out[f"{name}.{place}.factors"] = torch.rand(heads, head_dim) * 3 + 0.2
            else:
                assert not part.calibrated, part
    return out


def moments(x: torch.Tensor) -> Moments:
    """Moments of vectors [heads, n, head_dim], with all of them as the sample."""
    x = x.double()
    return Moments(x.shape[1], x.mean(1), x.mT @ x / x.shape[1], x.abs().amax(1), x.float())


def layer_stats(keys: torch.Tensor, values: torch.Tensor | None = None) -> LayerStats:
    """Statistics of keys and values [heads, n, head_dim]."""
    values = torch.randn_like(keys) if values is None else values
    heads, _, dim = keys.shape
    return LayerStats(
        queries=moments(torch.randn(heads, 50, dim)),
        keys=moments(keys),
        values=moments(values),
        attended=torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim),
        excerpts=(),
        scale=dim**-0.5,
        attended_mean=values.double().mean(1),
    )
