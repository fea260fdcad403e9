"""Fused attention of one sequence's new tokens, by torch's own kernel. An engine that brings a faster one sets
`LayerStore.flash`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Flash:
    """run(q [rows, query heads, head_dim], k and v [tokens, heads, head_dim], scale, causal, softcap) gives the outputs and
    the logarithms of the sums of exponentials, float32 [rows, query heads]. Causal: the last row sees the last token.

    dtype    what it takes keys in that were decoded from pages: a number type, or None for that of the queries.
    softcap  whether it can cap logits.
    """

    run: Callable[[Tensor, Tensor, Tensor, float, bool, float | None], tuple[Tensor, Tensor]]
    dtype: torch.dtype | None = None
    softcap: bool = False


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as torch brings it."""
    assert softcap is None
    run = torch.ops.aten._flash_attention_forward
    out, lse, *_ = run(q, k, v, bounds(q), bounds(k), len(q), len(k), 0.0, causal, False, scale=scale)
    return out, by_row(lse, len(q))


def bounds(x: Tensor) -> Tensor:
    """0 and the number of rows, on the device of x; nothing is copied there, which would wait for it."""
    return torch.arange(0, 2 * len(x), len(x), dtype=torch.int32, device=x.device)


def by_row(lse: Tensor, rows: int) -> Tensor:
    """Log-sum-exps [query heads, rows], with or without a batch of one before and padding after, as [rows, query heads]."""
    return (lse[0] if lse.ndim == 3 else lse)[:, :rows].transpose(0, 1)


TORCH = Flash(attend, torch.float16)  # which holds codes times scales better than bfloat16 does
