"""Fused attention of the new tokens of sequences, by torch's own kernel. An engine that brings a faster one sets
`LayerStore.flash`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvant.ops.streams import stream_handle

Tensor = torch.Tensor


class Bounds(NamedTuple):
    """Where sequences lie in concatenated rows: int32 [sequences + 1] on the device, the first row of each; and their largest
    numbers of rows."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclasses.dataclass(frozen=True)
class FixedLength:
    """Fused attention of sequences of one length that is faster than Flash.run where `refuse` gives no reason.

    run     (q [sequences, rows, query heads, head_dim], k and v [sequences, tokens, heads, head_dim], scale, causal) gives the
            outputs, as q, and the log-sum-exps, float32 [sequences, rows, query heads]. Causal: there are as many tokens as rows, and
            row i sees tokens up to i.
    refuse  (device, head_dim): why it is not to be used, or None.
    """

    run: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    refuse: Callable[[torch.device, int], str | None]


@dataclasses.dataclass(frozen=True)
class Flash:
    """run(q [rows, query heads, head_dim], k and v [tokens, heads, head_dim], bounds, scale, causal, softcap, sliding_window) gives
    the outputs, and the logarithms of the sums of exponentials, float32 [rows, query heads]. Causal: the last row of a sequence sees
    its last token. A sliding window, with a causal mask only: a row sees its last token and the sliding_window - 1 before it.

    dtype         what it takes keys in that were decoded from pages: a number type, or None for that of the queries.
    softcap       whether it can cap logits.
    fixed_length  what attends faster to long histories, and to new tokens that are as many in every sequence, if there is such.
    """

    run: Callable[[Tensor, Tensor, Tensor, Bounds, float, bool, float | None, int | None], tuple[Tensor, Tensor]]
    dtype: torch.dtype | None = None
    softcap: bool = False
    fixed_length: FixedLength | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as torch brings it."""
    assert softcap is None and (causal or sliding_window is None)
    run = torch.ops.aten._flash_attention_forward
    options: dict[str, Any] = {"scale": scale}
    if sliding_window is not None:
        left, right = window_size(sliding_window)
        options |= {"window_size_left": left, "window_size_right": right}
    # With at most one row a sequence it would take q as [sequences, ...]: wrong where a sequence has none.
    bounds = bounds._replace(most_queries=max(2, bounds.most_queries))
    out, lse, *_ = run(q, k, v, *bounds, 0.0, causal, False, **options)
    return out, by_row(lse, bounds, len(q))


def window_size(sliding_window: int) -> tuple[int, int]:
    """A sliding window as FlashAttention counts it: tokens before and after a query's own."""
    return sliding_window - 1, 0


CUDNN_CAPABILITY = (9, 0)  # of the GPUs on which it was measured: about twice as fast as FlashAttention-2 there
CUDNN_VERSION = 90000
CUDNN_HEAD_DIM = 128  # at most; a multiple of 8


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's attention as torch brings it. cuDNN builds a graph for every new shape, which takes the host about 0.1 s; torch keeps
    it for the process. So callers keep to few shapes."""
    assert not causal or q.shape[1] == k.shape[1], (q.shape, k.shape)
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = run(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse.reshape(out.shape[:3]).transpose(1, 2)


def refuse_cudnn(device: torch.device, head_dim: int) -> str | None:
    """Why cuDNN's attention is not used, or None. `torch.backends.cuda.enable_cudnn_sdp(False)` turns it off."""
    if device.type != "cuda":
        return f"cuDNN runs on CUDA devices, not on {device.type}"
    if torch.cuda.get_device_capability(device) != CUDNN_CAPABILITY:
        return "cuDNN's attention was not measured on this GPU"
    if not (torch.backends.cudnn.is_available() and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION):
        return "torch has no cuDNN of version 9"
    if not (torch.backends.cudnn.enabled and torch.backends.cuda.cudnn_sdp_enabled()):
        return "cuDNN's attention is turned off in torch"
    if head_dim % 8 or head_dim > CUDNN_HEAD_DIM:
        return (
            f"cuDNN is asked for head dims that are multiples of 8 up to {CUDNN_HEAD_DIM}, and this one is {head_dim}"
        )
    return None


def row_starts(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """First rows of sequences on a device. What was made is kept: the layers of a model ask for the same."""
    stream = stream_handle(device)
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


CUDNN = FixedLength(attend_cudnn, refuse_cudnn)
TORCH = Flash(
    attend, torch.float16, fixed_length=CUDNN
)  # float16, which holds codes times scales better than bfloat16 does
