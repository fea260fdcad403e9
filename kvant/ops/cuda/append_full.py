"""Appends new tokens to pages of 16-bit numbers by kernels/append_full.cu: serves `full`, in one launch."""

from __future__ import annotations

import functools

import torch

from kvant.layout import Layout
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES, page_config
from kvant.ops.cuda.full import refuse_layout
from kvant.ops.cuda.refusals import refuse_machine
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
THREADS = 256
CHANNELS = 4  # that a thread copies at a time
MOST_CTAS = 1024  # for keys, and for values: more would wait for a place on the GPU

AppendFullArguments = Arguments(
    "AppendFullArguments",
    key=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM], tokens key_stride elements apart"),
    value=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM], tokens value_stride elements apart"),
    pages=pointer("u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    slot_mapping=pointer("const s64", "[tokens], page * PAGE_TOKENS + place; -1 is padding"),
    key_stride=int64("elements from a token to the next"),
    value_stride=int64("the same of values"),
    tokens=int32("new tokens"),
)


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the kernel cannot serve a layout on a device, or None: it writes what kernels/decode_full.cu reads."""
    reason = refuse_layout(layout)
    return refuse_machine(device, None if reason is None else reason.replace("it reads", "it writes"))


@functools.lru_cache(maxsize=64)
def text(layout: Layout, key: str, value: str) -> str:
    """The program for keys and values of these types."""
    config: dict[str, object] = {
        **page_config(layout),
        "THREADS": THREADS,
        "ELEMENT_TYPE": ELEMENT_TYPES[layout.sections[0].dtype],
        "VALUE_OFFSET": layout.sections[1].offset,
        "Key": {"IN_TYPE": ELEMENT_TYPES[key]},
        "Value": {"IN_TYPE": ELEMENT_TYPES[value]},
    }
    return nvrtc.program("kernels/append_full.cu", config=config, arguments=[AppendFullArguments])


@functools.lru_cache(maxsize=64)
def _kernel(layout: Layout, key: str, value: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(text(layout, key, value), "kvant_append_full", device, THREADS)


def _aligned(name: str, x: Tensor) -> tuple[Tensor, str]:
    """Rows whose channels lie side by side and begin where a thread can read CHANNELS of them; the name of their type."""
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in ELEMENT_TYPES:
        raise ValueError(f"{name}s must be {', '.join(ELEMENT_TYPES)}, got {x.dtype}")
    width, size = x.shape[1] * x.shape[2], CHANNELS * x.element_size()
    side_by_side = x.stride(2) == 1 and x.stride(1) == x.shape[2] and (x.stride(0) >= width or len(x) < 2)
    whole = x.stride(0) % CHANNELS == 0 and x.data_ptr() % size == 0
    return (x if side_by_side and whole else x.clone(memory_format=torch.contiguous_format)), dtype


@register("append", "cuda-full", refuse, rank=9, capturable=True)
def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """As the reference's `append`."""
    if not len(key):
        return
    (k, key_type), (v, value_type) = _aligned("key", key), _aligned("value", value)
    slot_mapping = batch.slot_mapping.contiguous()
    arguments = AppendFullArguments.fill(
        key=k,
        value=v,
        pages=store.pages,
        slot_mapping=slot_mapping,
        key_stride=k.stride(0),
        value_stride=v.stride(0),
        tokens=len(k),
    )
    blocks = -(-k.numel() // (CHANNELS * THREADS))
    kernel = _kernel(store.layout, key_type, value_type, store.pages.device)
    kernel.launch((min(blocks, MOST_CTAS), 2), arguments)
