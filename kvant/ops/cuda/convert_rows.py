"""Converts rows to the type that attention takes them in, and pads the rows of every sequence, by kernels/convert_rows.cu: one launch
for queries and the new keys and values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES

Tensor = torch.Tensor
THREADS = 256
VECTOR = 8  # numbers that a thread converts at a time

ConvertRowsArguments = Arguments(
    "ConvertRowsArguments",
    in_a=pointer("const void", "[sequences * rows, 8 * vectors_a], rows stride_a numbers apart, of IN_TYPE"),
    in_b=optional("const void", "the same of a second tensor"),
    in_c=optional("const void", "and of a third one"),
    out_a=pointer("void", "[sequences, padded_rows, 8 * vectors_a], of OUT_TYPE"),
    out_b=optional("void", "the same of the second tensor"),
    out_c=optional("void", "and of the third one"),
    stride_a=int64("numbers from a row to the next"),
    stride_b=int64("the same of the second tensor"),
    stride_c=int64("and of the third one"),
    vectors_a=int32("16-byte vectors of a row"),
    vectors_b=int32("the same of the second tensor; 0 where there is none"),
    vectors_c=int32("and of the third one"),
    sequences=int32("sequences"),
    rows=int32("rows of each that are converted"),
    padded_rows=int32("rows of each in the result"),
)


def text(in_type: str, out_type: str) -> str:
    config = {"THREADS": THREADS, "IN_TYPE": ELEMENT_TYPES[in_type], "OUT_TYPE": ELEMENT_TYPES[out_type]}
    return nvrtc.program("kernels/convert_rows.cu", config=config, arguments=[ConvertRowsArguments])


@functools.lru_cache(maxsize=16)
def _kernel(in_type: torch.dtype, out_type: torch.dtype, device: torch.device) -> nvrtc.Kernel:
    names = (str(dtype).removeprefix("torch.") for dtype in (in_type, out_type))
    return nvrtc.Kernel(text(*names), "kvant_convert_rows", device, THREADS)


def convert_rows(xs: Sequence[Tensor], dtype: torch.dtype, rows: int, padded_rows: int) -> list[Tensor]:
    """Up to three tensors [sequences * rows, heads, head_dim] of 16-bit types as `dtype`, of 16 bits as well: [sequences,
    padded_rows, heads, head_dim]. Rows that are padding are zeros."""
    first = xs[0]
    if any(x.dtype != first.dtype for x in xs):
        return [convert_rows([x], dtype, rows, padded_rows)[0] for x in xs]
    if first.dtype == dtype and rows == padded_rows:
        return [x.contiguous().unflatten(0, (-1, rows)) for x in xs]
    assert len(xs) <= 3 and first.element_size() == dtype.itemsize == 2, (len(xs), first.dtype, dtype)
    count, rest = divmod(first.shape[0], rows)
    assert not rest and all(x.shape[0] == first.shape[0] for x in xs), ([x.shape for x in xs], rows)
    xs = [x if _readable(x) else x.clone(memory_format=torch.contiguous_format) for x in xs]
    out = [torch.empty(count, padded_rows, *x.shape[1:], dtype=dtype, device=x.device) for x in xs]
    total = sum(x.numel() for x in out) // VECTOR
    assert total < 1 << 31, total
    fields: dict[str, Any] = {}
    for letter, x, y in itertools.zip_longest("abc", xs, out):
        fields |= {f"in_{letter}": x, f"out_{letter}": y, f"stride_{letter}": 0 if x is None else x.stride(0)}
        fields[f"vectors_{letter}"] = 0 if x is None else x.shape[1] * x.shape[2] // VECTOR
    arguments = ConvertRowsArguments.fill(**fields, sequences=count, rows=rows, padded_rows=padded_rows)
    kernel = _kernel(first.dtype, dtype, first.device)
    kernel.launch((max(1, min(-(-total // THREADS), kernel.blocks)), 1), arguments)
    return out


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [rows, heads, head_dim] of a 16-bit type as another one; `x` itself where it has that already."""
    return x if x.dtype == dtype else convert_rows([x], dtype, x.shape[0], x.shape[0])[0][0]


def _readable(x: Tensor) -> bool:
    """Whether rows lie as the kernel reads them: without gaps inside, each at a multiple of 16 bytes."""
    assert x.shape[1] * x.shape[2] % VECTOR == 0, x.shape
    return x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % VECTOR == 0 and x.data_ptr() % 16 == 0
