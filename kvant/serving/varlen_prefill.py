"""Prefill of prompts without a history: causal attention of new tokens among themselves. Nothing packed is read."""

from __future__ import annotations

from typing import Protocol

import torch

Tensor = torch.Tensor


class VarlenAttention(Protocol):
    """A fused kernel for sequences of different lengths, such as FlashAttention's flash_attn_varlen_func."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        softcap: float | None,
        sliding_window: int | None = None,
    ) -> Tensor: ...


def varlen_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    scale: float,
    softcap: float | None,
    fused: VarlenAttention | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence: q, k and v are [tokens, heads, head_dim]; `query_start_loc` lies on the host. On a GPU
    in 16 bits `fused` is used where it is given; otherwise torch's SDPA, a sequence at a time. With `sliding_window`, a query attends
    to itself and the sliding_window - 1 tokens before it."""
    if fused is not None and q.is_cuda and q.dtype != torch.float32:
        cu_seqlens = query_start_loc.to(device=q.device, dtype=torch.int32, non_blocking=True)
        return fused(q, k, v, cu_seqlens, int(query_start_loc.diff().max()), scale, softcap, sliding_window)
    out = torch.empty_like(q)
    for first, last in zip(query_start_loc.tolist(), query_start_loc[1:].tolist(), strict=False):
        out[first:last] = _one_sequence(q[first:last], k[first:last], v[first:last], scale, softcap, sliding_window)
    return out


def _one_sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sliding_window: int | None
) -> Tensor:
    count = len(q)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, head_dim]
    slides = sliding_window is not None and sliding_window < count
    if softcap is None and not slides:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    seen = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
    if sliding_window is not None and slides:
        seen = seen.triu(1 - sliding_window)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = softcap * torch.tanh(q.float() @ k.mT * scale / softcap)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)[0].transpose(0, 1).to(q.dtype)
