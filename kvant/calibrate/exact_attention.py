"""Attention in the model's own numbers, as calibration computes it: a block of queries at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvant.ops.reference import token_share

Tensor = torch.Tensor

SCORE_BYTES = 32 << 20  # bytes of attention scores that are materialized at a time


def causal(tokens: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Causal mask, bool [queries, tokens]: True where the query sees the token."""
    at = torch.arange(tokens, device=device)
    keep = at <= at[:, None]
    return keep if sliding_window is None else keep & (at > at[:, None] - sliding_window)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Causal attention of an excerpt over itself, [1, heads, tokens, head_dim]. With a softcap or sink logits [heads], scores are
    formed for a block of queries at a time, since SDPA has neither."""
    tokens, device = q.shape[2], q.device
    if softcap is None and sink_logits is None:
        if sliding_window is None or sliding_window >= tokens:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        keep = causal(tokens, sliding_window, device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    grouped = q.unflatten(1, (-1, groups))
    block = max(1, SCORE_BYTES // (4 * q.shape[1] * tokens))
    out = []
    for first in range(0, tokens, block):
        last = min(tokens, first + block)
        scores = torch.einsum("bhgqd,bhnd->bhgqn", grouped[..., first:last, :], k[:, :, :last]).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~causal(last, sliding_window, device)[first:], float("-inf"))
        p = softmax_with_sink_logits(scores, sink_logits)
        out.append(torch.einsum("bhgqn,bhnd->bhgqd", p.to(v.dtype), v[:, :, :last]))
    return torch.cat(out, 3).flatten(1, 2)


def softmax_with_sink_logits(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """softmax(S) over tokens, [..., heads, queries per head, queries, tokens], with the sink logit of a query head, [query heads], in
    its denominator where there are any."""
    p = scores.softmax(-1)
    if sink_logits is None:
        return p
    sinks = sink_logits.to(scores).view(*scores.shape[-4:-2], 1)
    return p * token_share(scores.logsumexp(-1), sinks)[..., None]
