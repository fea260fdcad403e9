"""Prefill over a packed history whose blocks are decoded by native/rows.h."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch

from kvant.layout import StreamName
from kvant.ops.blocked import by_blocks
from kvant.ops.cpu import library, structures
from kvant.ops.cpu.plan import refuse, stream_of
from kvant.ops.registry import register
from kvant.ops.types import Derived, LayerStore, PagedBatch

Tensor = torch.Tensor


@dataclasses.dataclass
class CpuPrefill(Derived):
    """A layer's streams in the form that the compiled reader takes, and the tensors that they point to."""

    streams: dict[StreamName, tuple[structures.Stream, list[Tensor]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        return cls()


@register("prefill", "cpu", refuse, rank=10)
def prefill(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """As the reference's `prefill`."""
    return by_blocks(store, query, key, value, batch, scale, softcap, sliding_window, unpack, sink_logits)


def unpack(store: LayerStore, name: StreamName, pages: Tensor, first: int, last: int) -> Tensor:
    """Decodes tokens [first, last) of a sequence's pages, still transformed: float32 [tokens, heads, head_dim]. Tokens of a page
    that has left the sliding window are undefined."""
    layout = store.layout
    streams = store.derive(CpuPrefill).streams
    if name not in streams:
        streams[name] = stream_of(store, name)
    out = torch.empty(last - first, layout.heads, layout.head_dim, dtype=torch.float32, device="cpu")
    table = pages.clamp_min(0).contiguous()
    call = structures.Read(stream=streams[name][0], page_head_bytes=layout.page_head_bytes, heads=layout.heads)
    call.pages, call.block_table, call.out = store.pages.data_ptr(), table.data_ptr(), out.data_ptr()
    call.first, call.last, call.dim = first, last, layout.head_dim
    call.page_tokens, call.keys = layout.page_tokens, name == "key"
    touched = -(-last // layout.page_tokens) - first // layout.page_tokens
    library.run("read", call, touched * layout.heads, None, 0)
    return out
