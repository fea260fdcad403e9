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
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of every query's scores, from the decoded keys in float64: [sequences, query heads]. With sink logits they are of the model's own logits,
    which no mean is taken off."""
    if sink_logits is not None:
        return with_sinks(store, q, batch, sink_logits, scale=scale, softcap=softcap, sliding_window=sliding_window)[1]
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


def some_sinks(query_heads: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Sink logits of every kind: about as large as a row's log-sum-exp, far above, far below, none at all."""
    kinds = torch.tensor([0.5, 4.0, 40.0, -30.0, float("-inf"), 7.0])
    return kinds.repeat(-(-query_heads // len(kinds)))[:query_heads].to(device)


def head_errors(found: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Relative error of every query head of outputs [rows, query heads, head_dim]; that of a head whose tokens have next to no share is
    its absolute error."""
    norms = expected.norm(dim=(0, 2))
    return ((found.double() - expected).norm(dim=(0, 2)) / torch.where(norms > 1e-6, norms, 1.0)).tolist()


def with_sinks(
    store: LayerStore,
    q: torch.Tensor,
    batch: PagedBatch,
    sink_logits: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What decode gives where the model has sink logits, written out: outputs [sequences, query heads, head_dim] and log-sum-exps
    [sequences, query heads], float64. Keys and values are decoded into the model's own space."""
    keys, values = (reference.restored(store, name, batch) for name in ("key", "value"))  # type: ignore[arg-type]
    outs, sums = [], []
    for b, n in enumerate(batch.seq_lens.tolist()):
        first = 0 if sliding_window is None else max(0, n - sliding_window)
        out, lse = extra_logit(
            q[b : b + 1],
            keys[b, first:n],
            values[b, first:n],
            sink_logits,
            scale,
            softcap,
            torch.ones(1, n - first) > 0,
        )
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs), torch.cat(sums)


def extra_logit(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sink_logits: torch.Tensor,
    scale: float,
    softcap: float | None,
    keep: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the logits of a row and one more, whose probability is dropped, in float64: q [rows, query heads, head_dim], keys
    and values [tokens, heads, head_dim], keep [rows, tokens] -> [rows, query heads, head_dim], [rows, query heads]."""
    rows, query_heads, _ = q.shape
    k, v = (x.double().repeat_interleave(query_heads // x.shape[1], 1) for x in (keys, values))
    logits = torch.einsum("qhd,nhd->qhn", q.double(), k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~keep.to(q.device)[:, None], float("-inf"))
    both = torch.cat((logits, sink_logits.double()[None, :, None].expand(rows, -1, 1)), -1)
    return torch.einsum("qhn,nhd->qhd", both.softmax(-1)[..., :-1], v), both.logsumexp(-1)
