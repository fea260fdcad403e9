"""Fitters of means, and of bases in which keys are white and queries have sorted variances."""

from __future__ import annotations

import torch

from kvant.calibrate.fitting import fits
from kvant.stats import LayerStats
from kvant.transforms.affine_map import Balance, Mean, Spectral
from kvant.transforms.hadamard import walsh_hadamard

Tensor = torch.Tensor
FLOOR = 1e-4  # smallest eigenvalue as a share of the mean one: bounds the gain of directions without variance


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [heads, d], descending and floored, and eigenvectors of symmetric matrices [heads, d, d]."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    values, vectors = values.flip(-1), vectors.flip(-1)
    floor = (FLOOR * values.mean(-1, keepdim=True)).clamp_min(torch.finfo(torch.float32).tiny)
    return values.maximum(floor), vectors


def mixed(columns: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Columns [heads, d, d] times a Hadamard matrix within every band. It is block-diagonal where the width of a band is no
    power of two."""
    return torch.cat([walsh_hadamard(band, width & -width) for width, band in _bands(columns, widths)], -1)


def _bands(x: Tensor, widths: tuple[int, ...]) -> list[tuple[int, Tensor]]:
    return [(width, band) for width, band in zip(widths, x.split(widths, -1), strict=True) if width]


def balanced(covariance: Tensor, queries: Tensor, part: Balance) -> Tensor:
    """The matrix A of `Balance`: float64 [heads, d, d]. covariance is that of the keys, queries their second moment."""
    dim = covariance.shape[-1]
    values, vectors = eigen(covariance)
    root = (vectors * values.sqrt()[:, None, :]) @ vectors.mT
    back = (vectors * values.rsqrt()[:, None, :]) @ vectors.mT
    weights, rotated = eigen(root @ queries @ root)
    columns = back @ rotated
    widths = part.widths(dim)
    if part.hadamard:
        gains = torch.cat([_unit(band.pow(0.25)) for _, band in _bands(weights, widths)], -1)
        columns = mixed(columns * gains[:, None, :], widths)
    variance = torch.einsum("hdc,hde,hec->hc", columns, covariance, columns)
    # a floored direction keeps a variance below one: dividing by it would amplify noise
    return columns / variance.clamp_min(FLOOR).sqrt()[:, None, :]


def _unit(gains: Tensor) -> Tensor:
    return gains / gains.square().mean(-1, keepdim=True).sqrt()


@fits(Mean)
def fit_mean(part: Mean, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    return {"offset": stats.weighted_moments(stream, part.share).mean.float()}


@fits(Balance)
def fit_balance(part: Balance, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    if stream != "key":
        raise ValueError("Balance weighs keys against queries; values have none: use Spectral there")
    moments = stats.weighted_moments(stream, part.share)
    covariance = moments.covariance if part.mean else moments.second
    matrix = balanced(covariance, stats.queries.second, part)
    offset = moments.mean if part.mean else torch.zeros_like(moments.mean)
    return {"offset": offset.float(), "matrix": matrix.float()}


@fits(Spectral)
def fit_spectral(part: Spectral, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    values, vectors = eigen(stats.weighted_moments(stream, part.share).covariance)
    columns = vectors * values.pow(-part.power)[:, None, :]
    dim = columns.shape[-1]
    return {"matrix": walsh_hadamard(columns, dim & -dim).float()}
