"""Copies of rows that the device itself has chosen, by the kernel in copy_rows.cu: nobody waits to know whether there are any."""

from __future__ import annotations

import ctypes
import functools

import torch

from kvant.ops.cuda import nvrtc

Tensor = torch.Tensor
THREADS = 256
WORD = 16  # bytes that a thread copies at a time


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "source", "target")),
        *((name, ctypes.c_int64) for name in ("layer", "row", "words")),
        ("nobody", ctypes.c_int),
    ]


@functools.lru_cache(maxsize=16)
def _kernel(device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(text(), "kvant_copy_rows", device, THREADS)


def text() -> str:
    return nvrtc.program({"THREADS": THREADS}, "kernels/copy_rows.cu")


def copy_rows(x: Tensor, source: Tensor, target: Tensor, tokens: int | None = None) -> None:
    """x[:, target, :tokens] = x[:, source, :tokens] for x [layers, rows, tokens, ...] and int64 rows, but where the target is the
    last row, which is nobody's. No source may be another's target, unless both hold the same."""
    layers, rows = x.shape[:2]
    size = x.element_size()
    row, layer = x.stride(1) * size, x.stride(0) * size
    count = min(x.shape[2] if tokens is None else tokens, x.shape[2]) * x.stride(2) * size
    if not (len(source) and x.numel() and count):
        return
    assert x[0].is_contiguous() and not any(n % WORD for n in (row, layer, count)), (x.shape, x.stride(), x.dtype)
    places = (source.contiguous(), target.contiguous())
    arguments = _Arguments(*nvrtc.addresses(x, *places), layer // WORD, row // WORD, count // WORD, rows - 1)
    _kernel(x.device).launch((len(source), layers), arguments)
