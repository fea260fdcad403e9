"""Append in Triton: transforms by torch, codes and page bytes by the kernel, full-precision windows as the reference."""

from __future__ import annotations

import torch

from kvant.codecs import DTYPES
from kvant.codecs.affine import Affine
from kvant.layout import Layout, StreamName
from kvant.ops import reference
from kvant.ops.registry import register
from kvant.ops.triton.common import constants
from kvant.ops.triton.common import refuse as refuse_both
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the kernel cannot append to a layout on a device, or None."""
    reason = refuse_both(layout, device)
    if reason is not None:
        return reason
    for name, stream in layout.recipe.streams.items():
        assert isinstance(stream.codec, Affine)
        if stream.codec.clip != 1.0 or stream.codec.search != 1:
            return f"it takes a token's whole range, and that of the {name}s is clipped or searched"
    return None


@register("append", "triton", refuse, rank=-1)
def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """As the reference's `append`."""
    from kvant.ops.triton import kernels

    layout, device = store.layout, key.device
    sequence, position = batch.positions
    real = batch.slot_mapping >= 0
    new: dict[StreamName, Tensor] = {"key": key, "value": value}
    for name, x in new.items():
        stored = store.stream(name).stored(x.float(), position).contiguous()
        own = {field.partition("_")[2]: value for field, value in constants(layout, name).items()}
        nbytes = layout.head_dim * own["BITS"] // 8
        meta = next(s.dtype for s in layout.sections if s.stream == name and s.kind == "meta")
        if len(stored):
            kernels.append[(len(stored), layout.heads)](
                stored,
                store.pages,
                batch.slot_mapping,
                torch.finfo(DTYPES[meta]).tiny,
                HEADS=layout.heads,
                D=layout.head_dim,
                BLOCK_D=1 << (layout.head_dim - 1).bit_length(),
                PAGE=layout.page_tokens,
                RUN=layout.page_head_bytes,
                IS_KEY=name == "key",
                FRAGMENT=layout.order == "fragment",
                BYTES=nbytes,
                BLOCK_BYTES=1 << (nbytes - 1).bit_length(),
                **own,
            )
        reference._append_overlay(store, name, stored, batch, sequence, position, real)
    assert device == store.pages.device
