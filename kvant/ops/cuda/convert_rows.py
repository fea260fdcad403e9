"""Converts rows to the type that attention takes them in, and pads the rows of every sequence, by kernels/convert_rows.cu: one launch
for queries and the new keys and values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES
from kvant.ops.types import NAMES

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
NO_TENSORS: dict[str, Any] = {f"{field}_{letter}": None for field in ("in", "out") for letter in "abc"}
NO_TENSORS |= {f"{field}_{letter}": 0 for field in ("stride", "vectors") for letter in "abc"}


def text(in_type: str, out_type: str) -> str:
    config = {"THREADS": THREADS, "IN_TYPE": ELEMENT_TYPES[in_type], "OUT_TYPE": ELEMENT_TYPES[out_type]}
    return nvrtc.program("kernels/convert_rows.cu", config=config, arguments=[ConvertRowsArguments])


@functools.lru_cache(maxsize=16)
def _kernel(in_type: torch.dtype, out_type: torch.dtype, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(text(NAMES[in_type], NAMES[out_type]), "kvant_convert_rows", device, THREADS)


def convert_rows(xs: Sequence[Tensor], dtype: torch.dtype, rows: int, padded_rows: int) -> list[Tensor]:
    """Up to three tensors [sequences * rows, heads, head_dim] of 16-bit types as `dtype`, of 16 bits as well: [sequences,
    padded_rows, heads, head_dim]. Rows that are padding are zeros."""
    given, device, total = xs[0].dtype, xs[0].device, xs[0].shape[0]
    if any(x.dtype != given for x in xs):
        return [convert_rows([x], dtype, rows, padded_rows)[0] for x in xs]
    if given == dtype and rows == padded_rows:
        return [x.contiguous().unflatten(0, (-1, rows)) for x in xs]
    assert len(xs) <= 3 and given.itemsize == dtype.itemsize == 2, (len(xs), given, dtype)
    count, rest = divmod(total, rows)
    assert not rest, (total, rows)
    out, fields, vectors = list[Tensor](), dict(NO_TENSORS), 0
    for letter, x in zip("abc", xs, strict=False):
        here, heads, dim = x.shape
        assert here == total and heads * dim % VECTOR == 0, (x.shape, total)
        stride, *inside = x.stride()
        if inside != [dim, 1] or stride % VECTOR or x.data_ptr() % 16:
            x, stride = x.clone(memory_format=torch.contiguous_format), heads * dim
        out.append(torch.empty(count, padded_rows, heads, dim, dtype=dtype, device=device))
        fields[f"in_{letter}"], fields[f"out_{letter}"], fields[f"stride_{letter}"] = x, out[-1], stride
        fields[f"vectors_{letter}"] = heads * dim // VECTOR
        vectors += count * padded_rows * heads * dim // VECTOR
    assert vectors < 1 << 31, vectors
    arguments = ConvertRowsArguments.fill(**fields, sequences=count, rows=rows, padded_rows=padded_rows)
    kernel = _kernel(given, dtype, device)
    kernel.launch((max(1, min(-(-vectors // THREADS), kernel.blocks)), 1), arguments)
    return out


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [rows, heads, head_dim] of a 16-bit type as another one; `x` itself where it has that already."""
    return x if x.dtype == dtype else convert_rows([x], dtype, x.shape[0], x.shape[0])[0][0]
