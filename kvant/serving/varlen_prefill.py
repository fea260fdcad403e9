"""Prefill of prompts without a history: causal attention of new tokens among themselves. Nothing packed is read."""

from __future__ import annotations

from typing import Protocol

import torch

from kvant.ops.blocked import attend_fused, attend_plain, sink_share

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
        sink_logits: Tensor | None,
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
    sink_logits: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence: q, k and v are [tokens, heads, head_dim]; `query_start_loc` lies on the host. On a GPU
    in 16 bits `fused` is used where it is given; otherwise torch's SDPA, a sequence at a time. With `sliding_window`, a query attends
    to itself and the sliding_window - 1 tokens before it."""
    if fused is not None and q.is_cuda and q.dtype != torch.float32:
        cu_seqlens = query_start_loc.to(device=q.device, dtype=torch.int32, non_blocking=True)
        longest = int(query_start_loc.diff().max())
        return fused(q, k, v, cu_seqlens, longest, scale, softcap, sink_logits, sliding_window)
    out = torch.empty_like(q)
    options = scale, softcap, sink_logits, sliding_window
    for first, last in zip(query_start_loc.tolist(), query_start_loc[1:].tolist(), strict=False):
        out[first:last] = _one_sequence(q[first:last], k[first:last], v[first:last], *options)
    return out


def _one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    sliding_window: int | None,
) -> Tensor:
    if sink_logits is not None:
        return _with_sink_logits(q, k, v, scale, softcap, sink_logits, sliding_window)
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


def _with_sink_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor,
    sliding_window: int | None,
) -> Tensor:
    """Outputs times the share that tokens have of the softmax, which their log-sum-exps tell."""
    grouped = q.float().unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)  # [heads, group, rows, head_dim]
    k, v = k.float(), v.float()
    if softcap is None and (sliding_window is None or sliding_window >= len(q)):
        part = attend_fused(grouped, k, v, scale, causal=True)
    else:
        part = attend_plain(grouped, k, v, scale, softcap, sliding_window, 0, None)
    out = part.out * sink_share(part.lse, sink_logits)
    return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)
