"""Merges attention over two parts of the keys by their log-sum-exps, by kernels/merge_parts.cu, in one launch."""

from __future__ import annotations

import functools

import torch

from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES

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
def _kernel(head_dim: int, in_type: str, out_type: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(text(head_dim, in_type, out_type), "kvant_merge_parts", device, THREADS)


def merge_parts(out: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """out [rows of all sequences, query heads, head_dim], of any 16-bit type: attention over the keys of both parts. `out_a` and
    `out_b` [sequences, rows of each, query heads, head_dim] are of one 16-bit type, `lse_a` and `lse_b` float32, of the same shape
    without channels. Every row has a key in one of the parts at least."""
    sequences, rows, heads, dim = out_a.shape
    assert out.shape == (sequences * rows, heads, dim) and out_b.shape == out_a.shape, (
        out.shape,
        out_a.shape,
        out_b.shape,
    )
    assert lse_a.shape == lse_b.shape == out_a.shape[:3], (lse_a.shape, lse_b.shape)
    assert lse_a.dtype == lse_b.dtype == torch.float32, (lse_a.dtype, lse_b.dtype)
    assert out_a.dtype == out_b.dtype and out.element_size() == out_a.element_size() == 2, (out_a.dtype, out_b.dtype)
    assert out.is_contiguous() and dim % VECTOR == 0, (out.stride(), dim)
    for x in (out_a, out_b):
        assert x.stride(3) == 1 and not any(n % VECTOR for n in x.stride()[:3]), x.stride()
    assert all(x.data_ptr() % 16 == 0 for x in (out, out_a, out_b))
    count = out.numel() // VECTOR
    assert count < 1 << 31, count
    if not count:
        return
    strides = {
        f"{name}_{axis}": stride
        for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
        for axis, stride in zip(("sequence", "row", "head"), x.stride(), strict=False)
    }
    arguments = MergePartsArguments.fill(
        out=out,
        out_a=out_a,
        out_b=out_b,
        lse_a=lse_a,
        lse_b=lse_b,
        **strides,
        sequences=sequences,
        rows=rows,
        heads=heads,
    )
    kernel = _kernel(dim, _type(out_a), _type(out), out.device)
    kernel.launch((max(1, min(-(-count // THREADS), kernel.blocks)), 1), arguments)


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
