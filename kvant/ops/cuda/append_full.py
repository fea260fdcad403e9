"""Appends to pages of 16-bit numbers, the recipe `full`, in one launch of kernels/append_full.cu."""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvant.codecs import DTYPES
from kvant.layout import Layout
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int64, pointer
from kvant.ops.cuda.config import page_config
from kvant.ops.cuda.full import refuse_layout, value_offset
from kvant.ops.cuda.refusals import refuse_machine
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
THREADS = 128
WORD = 8  # numbers that a thread copies at a time
_PLANS: nvrtc.Numbered[AppendFullPlan] = nvrtc.Numbered()

AppendFullArguments = Arguments(
    "AppendFullArguments",
    key=pointer("const uint4", "[tokens, KV_HEADS, HEAD_DIM], tokens key_stride apart"),
    value=pointer("const uint4", "[tokens, KV_HEADS, HEAD_DIM], tokens value_stride apart"),
    pages=pointer("u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    slot_mapping=pointer("const s64", "[tokens]: place of a token among those of all pages; negative: not written"),
    key_stride=int64("16-byte words from a token to the next"),
    value_stride=int64("16-byte words from a token to the next"),
)


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the kernel cannot append to a layout on a device, or None."""
    return refuse_machine(device, refuse_layout(layout))


@dataclasses.dataclass(frozen=True)
class AppendFullPlan:
    """The kernel for one layout."""

    layout: Layout

    @functools.cached_property
    def text(self) -> str:
        config = {**page_config(self.layout), "VALUE_OFFSET": value_offset(self.layout), "THREADS": THREADS}
        return nvrtc.program("kernels/append_full.cu", config=config, arguments=[AppendFullArguments])


@functools.lru_cache(maxsize=64)
def _kernel(plan: AppendFullPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(plan.text, "kvant_append_full", device, THREADS)


@functools.lru_cache(maxsize=64)
def _plan(layout: Layout) -> int:
    return _PLANS.number(AppendFullPlan(layout))


@register("append", "cuda-full", refuse, rank=9, capturable=True)
def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """As the reference's `append`."""
    layout = store.layout
    key, value = (_rows(x, DTYPES[layout.sections[0].dtype]) for x in (key, value))
    _append(store.pages, key, value, batch.slot_mapping.contiguous(), _plan(layout))


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the pages' type that the kernel can read: heads one after another, tokens at addresses that 16 divides."""
    x = x.to(dtype)
    if x.stride()[1:] == (x.shape[2], 1) and not (x.stride(0) % WORD or x.data_ptr() % 16):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("kvant::append_full", mutates_args=("pages",))
def _append(pages: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, plan: int) -> None:
    if not len(key):
        return
    arguments = AppendFullArguments.fill(
        key=key,
        value=value,
        pages=pages,
        slot_mapping=slot_mapping,
        key_stride=key.stride(0) // WORD,
        value_stride=value.stride(0) // WORD,
    )
    _kernel(_PLANS[plan], key.device).launch((len(key), 2), arguments)


@_append.register_fake
def _(*args: object) -> None:
    return None
