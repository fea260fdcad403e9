"""Fused attention of the new tokens of sequences, by torch's own kernel. An engine that brings a faster one sets
`LayerStore.flash`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Bounds(NamedTuple):
    """Where sequences lie in concatenated rows: int32 [sequences + 1] on the device, the first row of each; and their largest
    numbers of rows."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclasses.dataclass(frozen=True)
class Flash:
    """run(q [rows, query heads, head_dim], k and v [tokens, heads, head_dim], bounds, scale, causal, softcap) gives the outputs, and
    the logarithms of the sums of exponentials, float32 [rows, query heads]. Causal: the last row of a sequence sees its last token.

    dtype    what it takes keys in that were decoded from pages: a number type, or None for that of the queries.
    softcap  whether it can cap logits.
    """

    run: Callable[[Tensor, Tensor, Tensor, Bounds, float, bool, float | None], tuple[Tensor, Tensor]]
    dtype: torch.dtype | None = None
    softcap: bool = False


def attend(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as torch brings it."""
    assert softcap is None
    run = torch.ops.aten._flash_attention_forward
    out, lse, *_ = run(q, k, v, *bounds, 0.0, causal, False, scale=scale)
    return out, by_row(lse, bounds, len(q))


def row_starts(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """First rows of sequences on a device. What was made is kept: the layers of a model ask for the same."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _row_starts(starts, device, stream)


@functools.lru_cache(maxsize=64)
def _row_starts(starts: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)


def by_row(lse: Tensor, bounds: Bounds, rows: int) -> Tensor:
    """Log-sum-exps as [rows, query heads], of [query heads, rows] with or without padding after them, or of [sequences, query heads,
    rows of the longest]."""
    if lse.ndim == 2:
        return lse[:, :rows].transpose(0, 1)
    if len(lse) == 1:
        return lse[0, :, :rows].transpose(0, 1)
    row = torch.arange(rows, device=lse.device)
    sequence = torch.searchsorted(bounds.queries[1:].contiguous(), row, right=True, out_int32=True).long()
    return lse[sequence, :, row - bounds.queries[sequence]]


def with_sink_logits(out: Tensor, lse: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Outputs [rows, query heads, head_dim] whose log-sum-exps are [rows, query heads], as they are where every query head has a sink
    logit [query heads]: times the share that tokens have of the softmax. In float32, rounded to the type of the outputs."""
    if sink_logits is None:
        return out
    share = torch.sigmoid(lse.float() - sink_logits.float()).nan_to_num(0.0)
    return (out * share[..., None]).to(out.dtype)


TORCH = Flash(attend, torch.float16)  # which holds codes times scales better than bfloat16 does
