"""Copies of overlay rows that an earlier kernel has chosen, by kernels/copy_rows.cu: the host does not wait to learn which."""

from __future__ import annotations

import functools

import torch

from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, pointer

Tensor = torch.Tensor
THREADS = 256
WORD = 16  # bytes that a thread copies at a time

CopyRowsArguments = Arguments(
    "CopyRowsArguments",
    x=pointer("uint4", "[layers, rows, ...]"),
    source=pointer("const s64", "[pairs], rows"),
    target=pointer("const s64", "[pairs], rows"),
    layer_stride=int64("16-byte words from a layer to the next"),
    row_stride=int64("16-byte words from a row to the next"),
    words=int64("16-byte words of a row that are copied"),
    padding_row=int32("the row that stands for none: nothing is copied to it"),
)


@functools.lru_cache(maxsize=16)
def _kernel(device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(text(), "kvant_copy_rows", device, THREADS)


def text() -> str:
    return nvrtc.program("kernels/copy_rows.cu", config={"THREADS": THREADS}, arguments=[CopyRowsArguments])


def copy_rows(x: Tensor, source: Tensor, target: Tensor, tokens: int | None = None) -> None:
    """x[:, target, :tokens] = x[:, source, :tokens] for x [layers, rows, tokens, ...] and int64 rows [pairs]. A pair whose target is
    the last row, which stands for none, copies nothing. No source may be another pair's target, unless both rows are equal."""
    layers, rows = x.shape[:2]
    size = x.element_size()
    row, layer = x.stride(1) * size, x.stride(0) * size
    count = min(x.shape[2] if tokens is None else tokens, x.shape[2]) * x.stride(2) * size
    if not (len(source) and x.numel() and count):
        return
    assert x[0].is_contiguous() and not any(n % WORD for n in (row, layer, count)), (x.shape, x.stride(), x.dtype)
    source, target = source.contiguous(), target.contiguous()
    arguments = CopyRowsArguments.fill(
        x=x,
        source=source,
        target=target,
        layer_stride=layer // WORD,
        row_stride=row // WORD,
        words=count // WORD,
        padding_row=rows - 1,
    )
    _kernel(x.device).launch((len(source), layers), arguments)
