"""Merges attention over two parts of the keys by their log-sum-exps, by kernels/merge_parts.cu, in one launch."""

from __future__ import annotations

import functools

import torch

from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES
from kvant.ops.types import NAMES

Tensor = torch.Tensor
THREADS = 256
VECTOR = 8  # channels that a thread merges at a time

MergePartsArguments = Arguments(
    "MergePartsArguments",
    out=pointer("void", "[sequences * rows, heads, HEAD_DIM], of OUT_TYPE"),
    out_a=pointer("const void", "[sequences, rows, heads, HEAD_DIM] by strides, of IN_TYPE"),
    out_b=pointer("const void", "the same of part b"),
    lse_a=pointer("const float", "[sequences, rows, heads] by strides"),
    lse_b=pointer("const float", "the same of part b"),
    out_a_sequence=int64("numbers from a sequence of part a to the next"),
    out_a_row=int64("from a row"),
    out_a_head=int64("from a head"),
    lse_a_sequence=int64("the same of its log-sum-exps"),
    lse_a_row=int64("from a row"),
    lse_a_head=int64("from a head"),
    out_b_sequence=int64("the same of part b"),
    out_b_row=int64("from a row"),
    out_b_head=int64("from a head"),
    lse_b_sequence=int64("and of its log-sum-exps"),
    lse_b_row=int64("from a row"),
    lse_b_head=int64("from a head"),
    sequences=int32("sequences"),
    rows=int32("rows of each"),
    heads=int32("query heads"),
)


def text(head_dim: int, in_type: str, out_type: str) -> str:
    types = {"IN_TYPE": ELEMENT_TYPES[in_type], "OUT_TYPE": ELEMENT_TYPES[out_type]}
    config = {"HEAD_DIM": head_dim, "THREADS": THREADS, **types}
    return nvrtc.program("kernels/merge_parts.cu", config=config, arguments=[MergePartsArguments])


@functools.lru_cache(maxsize=16)
def _kernel(head_dim: int, in_type: torch.dtype, out_type: torch.dtype, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(text(head_dim, NAMES[in_type], NAMES[out_type]), "kvant_merge_parts", device, THREADS)


def merge_parts(out: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """out [rows of all sequences, query heads, head_dim], of any 16-bit type: attention over the keys of both parts. `out_a` and
    `out_b` [sequences, rows of each, query heads, head_dim] are of one 16-bit type, `lse_a` and `lse_b` float32, of the same shape
    without channels. Every row has a key in one of the parts at least."""
    shape = sequences, rows, heads, dim = tuple(out_a.shape)
    count = sequences * rows * heads * dim // VECTOR
    assert out.shape == (sequences * rows, heads, dim) and out_b.shape == shape, (out.shape, shape, out_b.shape)
    assert lse_a.shape == lse_b.shape == shape[:3], (lse_a.shape, lse_b.shape)
    assert lse_a.dtype == lse_b.dtype == torch.float32, (lse_a.dtype, lse_b.dtype)
    assert out_a.dtype == out_b.dtype and out.element_size() == out_a.element_size() == 2, (out_a.dtype, out_b.dtype)
    assert out.is_contiguous() and dim % VECTOR == 0 and count < 1 << 31, (out.stride(), shape)
    a, b, lse_strides_a, lse_strides_b = out_a.stride(), out_b.stride(), lse_a.stride(), lse_b.stride()
    assert a[3] == b[3] == 1 and (a[0] | a[1] | a[2] | b[0] | b[1] | b[2]) % VECTOR == 0, (a, b)
    assert (out.data_ptr() | out_a.data_ptr() | out_b.data_ptr()) % 16 == 0
    if not count:
        return
    arguments = MergePartsArguments.fill(
        out=out,
        out_a=out_a,
        out_b=out_b,
        lse_a=lse_a,
        lse_b=lse_b,
        out_a_sequence=a[0],
        out_a_row=a[1],
        out_a_head=a[2],
        lse_a_sequence=lse_strides_a[0],
        lse_a_row=lse_strides_a[1],
        lse_a_head=lse_strides_a[2],
        out_b_sequence=b[0],
        out_b_row=b[1],
        out_b_head=b[2],
        lse_b_sequence=lse_strides_b[0],
        lse_b_row=lse_strides_b[1],
        lse_b_head=lse_strides_b[2],
        sequences=sequences,
        rows=rows,
        heads=heads,
    )
    kernel = _kernel(dim, out_a.dtype, out.dtype, out.device)
    kernel.launch((max(1, min(-(-count // THREADS), kernel.blocks)), 1), arguments)
