"""Calibrated tensors and statistics for tests: made up, but of the right shapes."""

from __future__ import annotations

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.banded import Banded
from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.recipe import Recipe
from kvant.stats import LayerStats, Moments
from kvant.transforms.affine_map import Balance, Mean, Spectral
from kvant.transforms.rotation import Rotation
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
            elif isinstance(part, Banded):
                made = {"weights": torch.rand(heads, head_dim) + 0.1, "mean": torch.randn(heads, head_dim)}
                wanted = [key for key, asked in (("weights", part.weighted), ("mean", part.flag)) if asked]
                out |= {f"{name}.{place}.{key}": made[key] for key in wanted}
            elif isinstance(part, Mean | Balance | Spectral):
                mixing = torch.eye(head_dim) + 0.3 * torch.randn(heads, head_dim, head_dim) / head_dim**0.5
                made = {"offset": torch.randn(heads, head_dim), "matrix": mixing}
                out |= {f"{name}.{place}.{key}": made[key] for key in part.names}
            elif isinstance(part, Rotation) and part.calibrated:
                basis = torch.linalg.qr(torch.randn(heads if part.per_head else 1, head_dim, head_dim)).Q
                out[f"{name}.{place}.basis"] = basis
            elif isinstance(part, Affine) and part.calibrated:
                out[f"{name}.{place}.clip"] = torch.tensor(0.9)
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
        probes=(),
        scale=dim**-0.5,
        attended_mean=values.double().mean(1),
    )
