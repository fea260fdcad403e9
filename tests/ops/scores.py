"""What attention over a cache's pages should give beside its output."""

from __future__ import annotations

import torch

from kvant.ops import LayerStore, PagedBatch, reference


def log_sum_exp(
    store: LayerStore,
    q: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Of every query's scores, from the decoded keys in float64: [sequences, query heads]."""
    heads, dim = store.layout.heads, store.layout.head_dim
    grouped = q.double().view(len(q), heads, -1, dim)
    keys = reference.read(store, "key", batch, batch.seq_lens).double()
    scores = torch.einsum("bhgd,bnhd->bhgn", store.key.dual(grouped), keys) * scale
    if softcap is not None:
        mean_logit = store.key.mean_logit(grouped)
        scores = softcap * torch.tanh(
            (scores if mean_logit is None else scores + mean_logit[..., None] * scale) / softcap
        )
    at = torch.arange(keys.shape[1], device=q.device)
    keep = (at < batch.seq_lens[:, None]) & (at >= batch.seq_lens[:, None] - (sliding_window or keys.shape[1]))
    return torch.logsumexp(scores.masked_fill(~keep[:, None, None], float("-inf")), -1).flatten(1)
