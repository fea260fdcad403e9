"""Attention of new tokens among themselves, where no sequence has a history: nothing packed is read."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kvant.ops import flash

Tensor = torch.Tensor


def attend_fresh(
    q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Causal attention within each sequence: [tokens, heads, head_dim] each; `starts` lie on the host."""
    counts = query_start_loc.diff()
    if q.is_cuda and q.dtype != torch.float32 and (run := _varlen()) is not None:
        at, most = query_start_loc.to(device=q.device, dtype=torch.int32, non_blocking=True), int(counts.max())
        return run(  # type: ignore[no-any-return]
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=at,
            cu_seqlens_k=at,
            max_seqlen_q=most,
            max_seqlen_k=most,
            softmax_scale=scale,
            causal=True,
            softcap=softcap or 0.0,
            fa_version=_version(),
        )
    out = torch.empty_like(q)
    for first, last in zip(query_start_loc.tolist(), query_start_loc[1:].tolist(), strict=False):
        out[first:last] = _one(q[first:last], k[first:last], v[first:last], scale, softcap)
    return out


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, head_dim]
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = softcap * torch.tanh(q.float() @ k.mT * scale / softcap)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)[0].transpose(0, 1).to(q.dtype)


@functools.cache
def _varlen() -> Any:
    """FlashAttention for sequences of different lengths as vLLM brings it, or None where it does not."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@functools.cache
def _version() -> int | None:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version()  # type: ignore[no-any-return]


def fused() -> flash.Flash | None:
    """vLLM's FlashAttention for prefill over a history, or None. It is asked for attention in the model's own type: builds of
    it need not have another."""
    return None if _varlen() is None else flash.Flash(_one_fused, None, softcap=True)


def _one_fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _varlen()(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=flash.bounds(q),
        cu_seqlens_k=flash.bounds(k),
        max_seqlen_q=len(q),
        max_seqlen_k=len(k),
        softmax_scale=scale,
        causal=causal,
        softcap=softcap or 0.0,
        return_softmax_lse=True,
        fa_version=_version(),
    )
    return out, flash.by_row(lse, len(q))
