"""Codebooks: the type of their centroids, and the nearest centroid of a vector."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
BOOK_DTYPE = torch.float16  # of centroids, as VecInfer counts them: 2^b x d x 2 bytes
SCORES = {"cpu": 1 << 19}  # scores that are computed at a time, so that they fit into a core's cache
SCORES_ELSEWHERE = 1 << 25


def nearest(x: Tensor, books: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Index of the centroid nearest to each vector, the lowest of equals: [b, n, d] and [b, count, d] -> int64 [b, n].

    The least |x - c|^2 is the largest x.c - |c|^2 / 2: a product of matrices, a chunk of vectors at a time. With
    float32 vectors and 16-bit centroids the terms are exact in float64 and their sum is off by a few units in the
    53rd bit, so that the index is that of the true nearest and does not depend on the batch.
    """
    batch, n, _ = x.shape
    count = books.shape[1]
    books = books.to(dtype)
    table = torch.cat((books, books.square().sum(-1, keepdim=True) / -2), -1).mT.contiguous()  # [b, d + 1, count]
    out = torch.empty(batch, n, dtype=torch.int64, device=x.device)
    rows = max(1, SCORES.get(x.device.type, SCORES_ELSEWHERE) // (batch * count))
    for first in range(0, n, rows):
        part = F.pad(x[:, first : first + rows].to(dtype), (0, 1), value=1.0)
        out[:, first : first + rows] = _first_largest(torch.bmm(part, table))
    return out


def _first_largest(scores: Tensor) -> Tensor:
    """The index of the first largest entry of the last dim. Long rows in two steps, which is faster on a CPU."""
    batch, n, count = scores.shape
    if count < 1024 or count % 64:
        return scores.max(-1).indices
    runs = scores.view(batch, n, count // 64, 64)
    run = runs.amax(-1).max(-1).indices
    inside = runs.gather(2, run[..., None, None].expand(batch, n, 1, 64))[:, :, 0]
    return run * 64 + inside.max(-1).indices
