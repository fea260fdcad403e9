"""Append by native/append.h: one call for any number of new tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Self

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cpu import library, plan, structures
from kvant.ops.cpu.plan import stream_of
from kvant.ops.cpu.structures import DTYPES, TYPES
from kvant.ops.fused import TransformKind, blocks_of, fuse, rope_table
from kvant.ops.registry import register
from kvant.ops.types import Derived, LayerStore, PagedBatch

Tensor = torch.Tensor
CALL = structures.Append.batch.offset  # offset of the fields that every call sets
TILE_MAX = 128  # floats of scratch that native/search.h needs, at least: maxima of 8 vectors x 16 lanes
SHORT_ROPE_TABLE = 2  # Append.refused: nothing was written, since the RoPE table ends before the last position
ALONE, ALONE_SEARCH = (
    64,
    2,
)  # tokens * heads below which one thread is faster than several; the second where codebooks are searched
EXACT = 2.0**-45  # largest relative rounding with which a float64 matrix may be passed as float32


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why it cannot append to a layout on a device, or None."""
    for name, stream in layout.recipe.streams.items():
        if stream.corrector is not None:
            return (
                f"it reads only keys and values, and the {name}s' {type(stream.corrector).__name__} learns from queries"
            )
    return plan.refuse(layout, device)


@dataclasses.dataclass
class CpuAppend(Derived):
    """A layer's store in the form that the compiled append reads, without the fields that every call sets."""

    call: structures.Append
    kept: list[object]  # tensors that `call` points to, which must stay alive
    rope_table: tuple[Tensor, Tensor] | None = None
    scratch: int = 0  # floats of scratch memory per thread
    memory: library.Memory = dataclasses.field(default_factory=library.Memory)
    alone: int = ALONE  # tokens * heads below which one thread runs
    heads: int = 0

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        layout, rope = store.layout, store.key.rope
        call = structures.Append(heads=layout.heads, dim=layout.head_dim, page_tokens=layout.page_tokens)
        call.page_head_bytes, call.origin = layout.page_head_bytes, layout.recipe.origin
        call.key, key_kept = stream_of(store, "key")
        call.value, value_kept = stream_of(store, "value")
        call.key_transform, key_more = _transform(store, "key")
        call.value_transform, value_more = _transform(store, "value")
        made = cls(call, [*key_kept, *value_kept, *key_more, *value_more], heads=layout.heads)
        if rope is not None:
            call.key_transform.rope_block, call.key_transform.rope_first = (
                store.key.spec.effective_rope_block,
                rope.first,
            )
            call.key_transform.rope_half = len(rope.inv_freq)
        formats = layout.formats.values()
        made.scratch = max(
            form.group_tokens * layout.head_dim if form.codebook is None else max(form.codebook.centroids, TILE_MAX)
            for form in formats
        )
        if any(form.codebook is not None for form in formats):
            made.alone = ALONE_SEARCH
        return made

    def extend_rope_table(self, store: LayerStore, tokens: int) -> None:
        """Extends the RoPE table to the positions of a sequence of `tokens` tokens."""
        transform = self.call.key_transform
        self.rope_table = rope_table(store, blocks_of(tokens, transform.rope_first, transform.rope_block))
        transform.cosine, transform.sine = (x.data_ptr() for x in self.rope_table)
        transform.rope_blocks = len(self.rope_table[0])


def _transform(store: LayerStore, name: StreamName) -> tuple[structures.FusedTransform, list[Tensor]]:
    """How a stream's vectors are transformed and coded, and the tensors that the structure points to."""
    layout, stream = store.layout, store.stream(name)
    fused = fuse(stream.transforms, "forward", layout, store.pages.device, torch.float64)
    out = structures.FusedTransform(order=1, clip_rank=-1, search=1)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> int:
        kept.append(tensor.contiguous())
        return kept[-1].data_ptr()

    if fused.mean is not None:
        out.mean = keep(fused.mean)
    if fused.kind is TransformKind.HADAMARD:
        out.order = fused.order
        if fused.tensor is not None:
            out.signs = keep(fused.tensor)
    if fused.kind is TransformKind.MATRIX:
        assert fused.tensor is not None
        single = fused.tensor.float()
        # The entries of a fitted matrix are float32 numbers, up to rounding in `fuse`: as float32 it is half as large to read.
        out.single = bool((single.double() - fused.tensor).abs().max() <= EXACT * fused.tensor.abs().max())
        out.matrix, out.matrix_heads = keep(single if out.single else fused.tensor), len(single)
        if fused.offset is not None:
            out.offset, out.offset_heads = keep(fused.offset), len(fused.offset)
    form, tensors = layout.format(name), stream.codec.tensors
    out.search, out.unbiased = form.encoding.search, form.encoding.unbiased
    if tensors.clip < 1.0:
        place = tensors.clip * (layout.head_dim - 1)
        out.clip_rank, out.clip_share = int(place), place - int(place)
    if tensors.weights is not None:
        out.weights = keep(tensors.weights.float())
    if tensors.mean is not None:
        out.flag_mean = keep(tensors.mean.float())
    if tensors.codebooks is not None:
        _search(out, tensors.codebooks.double(), keep)
    if not form.uniform:
        (band,) = form.bands
        levels = torch.tensor(band.levels, dtype=torch.float32)
        out.edges = keep((levels[1:] + levels[:-1]) / 2)
    return out, kept


def _search(out: structures.FusedTransform, books: Tensor, keep: Callable[[Tensor], int]) -> None:
    """Sets the tables in which native/search.h looks for the largest x . c - |c|^2 / 2: transposed centroids, then -|c|^2 / 2,
    [..., dim + 1, centroids], in float64 and in float32."""
    columns = torch.cat((books, books.square().sum(-1, keepdim=True) / -2), -1).mT
    out.columns_f64, out.columns_f32 = keep(columns), keep(columns.float())


def _type_of(name: StreamName, x: Tensor) -> int:
    found = DTYPES.get(x.dtype)
    if found is None:
        raise ValueError(f"{name}s must be {', '.join(TYPES)}, got {x.dtype}")
    return found


@register("append", "cpu", refuse, rank=10, checks=True)
def append(
    store: LayerStore,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    query: Tensor | None = None,
    limit: float = math.inf,
) -> bool:
    """As the reference's `append`. Returns False, and writes nothing, where a number is NaN or beyond the limit."""
    tokens = key.shape[0]  # `len` of a tensor takes four times as long
    if not tokens:
        return True
    made = store.derive(CpuAppend)
    call = made.call
    types = _type_of("key", key), _type_of("value", value)
    key_strides, value_strides = key.stride(), value.stride()
    if key_strides[-1] != 1 or value_strides[-1] != 1:
        key, value = key.contiguous(), value.contiguous()
        key_strides, value_strides = key.stride(), value.stride()
    structures.APPENDED.pack_into(
        call,
        CALL,
        library.batch_address(batch),
        *made.memory.of(store),
        key.data_ptr(),
        value.data_ptr(),
        key_strides[0],
        value_strides[0],
        key_strides[1],
        value_strides[1],
        tokens,
        *types,
        limit,
    )
    tasks = tokens * made.heads
    threads = 1 if tasks < made.alone else torch.get_num_threads()
    library.run("append", call, 2 * tasks, library.workspace(threads * made.scratch), made.scratch, threads=threads)
    refused = call.refused
    if refused == SHORT_ROPE_TABLE:
        made.extend_rope_table(store, max(batch.seq_lens.tolist()))
        return append(store, key, value, batch, query, limit)
    return not refused
