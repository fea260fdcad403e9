"""The FlashAttention that is part of vLLM: for prompts without a history, and for prefill over a history."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from kvant.ops import flash
from kvant.serving.varlen_prefill import VarlenAttention

Tensor = torch.Tensor


@functools.cache
def _varlen() -> Any:
    """vLLM's FlashAttention for sequences of different lengths, or None where this vLLM has none."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@functools.cache
def _version(head_size: int, softcap: bool) -> int | None:
    """The version of FlashAttention that vLLM takes. Not every version has every head size: on a B200, FlashAttention 4 has few above
    128."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    options = {"head_size": head_size, "requires_softcap": softcap}
    known = inspect.signature(get_flash_attn_version).parameters  # they differ between versions of vLLM
    return get_flash_attn_version(**{name: options[name] for name in options if name in known})  # type: ignore[no-any-return]


def varlen() -> VarlenAttention | None:
    """vLLM's FlashAttention for prompts without a history, or None where this vLLM has none."""
    return None if _varlen() is None else _causal


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    sliding_window: int | None = None,
) -> Tensor:
    options: dict[str, Any] = {} if sliding_window is None else {"window_size": [*flash.window_size(sliding_window)]}
    if sink_logits is not None:  # FlashAttention 2 has none: its outputs are corrected by their log-sum-exps
        options["return_softmax_lse"] = True
    found = _varlen()(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=True,
        softcap=softcap or 0.0,
        fa_version=_version(q.shape[-1], bool(softcap)),
        **options,
    )
    if sink_logits is None:
        return found  # type: ignore[no-any-return]
    out, lse, *_ = found
    bounds = flash.Bounds(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash.with_sink_logits(out, flash.by_row(lse, bounds, len(q)), sink_logits)


def with_lse() -> flash.Flash | None:
    """vLLM's FlashAttention with log-sum-exp, for prefill over a history; None where this vLLM has none. It is called in the
    model's dtype, since a build may lack kernels for others."""
    return None if _varlen() is None else flash.Flash(_attend_with_lse, None, softcap=True)


def _attend_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: flash.Bounds,
    scale: float,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor]:
    assert causal or sliding_window is None
    options: dict[str, Any] = {} if sliding_window is None else {"window_size": [*flash.window_size(sliding_window)]}
    out, lse, *_ = _varlen()(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=bounds.queries,
        cu_seqlens_k=bounds.keys,
        max_seqlen_q=bounds.most_queries,
        max_seqlen_k=bounds.most_keys,
        softmax_scale=scale,
        causal=causal,
        softcap=softcap or 0.0,
        return_softmax_lse=True,
        fa_version=_version(q.shape[-1], bool(softcap)),
        **options,
    )
    return out, flash.by_row(lse, bounds, len(q))
