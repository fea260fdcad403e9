"""Appending by native/append.h: one call for any number of new tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.banded import Banded
from kvant.codecs.lloyd_max import LloydMax
from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.layout import Layout, StreamName
from kvant.ops.cpu import library, plan, structures
from kvant.ops.cpu.plan import stream_of
from kvant.ops.cpu.structures import DTYPES, TYPES
from kvant.ops.fused import HADAMARD, MATRIX, blocks_of, fuse, rope_table
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
CALL = structures.Append.batch.offset  # of what is another at every call
TOPS = 128  # floats that native/append.h keeps of a stretch of centroids, at most
MISSING_TURNS = 2  # why nothing was written


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why it cannot append to a layout on a device, or None."""
    for name, stream in layout.recipe.streams.items():
        if stream.corrector is not None:
            return f"it looks at keys and values alone, and the {name}s' {type(stream.corrector).__name__} learns from queries"
    return plan.refuse(layout, device)


@dataclasses.dataclass
class Prepared:
    """What a store's layer looks like to the compiled operation, but for what changes from call to call."""

    call: structures.Append
    kept: list[object]  # that the call points to
    rope_table: tuple[Tensor, Tensor] | None = None
    scratch: int = 0  # floats that a thread needs
    memory: library.Memory = dataclasses.field(default_factory=library.Memory)
    alone: int = 64  # tokens and heads below which a second thread costs more than it gives

    def extend_rope_table(self, store: LayerStore, tokens: int) -> None:
        """Makes the RoPE table that keys of so many tokens need."""
        space = self.call.key_transform
        self.rope_table = rope_table(store, blocks_of(tokens, space.first, space.block))
        space.cosine, space.sine = (x.data_ptr() for x in self.rope_table)
        space.rope_blocks = len(self.rope_table[0])


def prepared(store: LayerStore) -> Prepared:
    """Made once for a store."""
    found = store.prepared.get("cpu.append")
    if found is not None:
        return found  # type: ignore[no-any-return]
    layout = store.layout
    call = structures.Append(heads=layout.heads, dim=layout.head_dim, page_tokens=layout.page_tokens)
    call.page_head_bytes, call.origin = layout.page_head_bytes, layout.recipe.origin
    call.window_type = TYPES[layout.overlay_dtype]
    found = Prepared(call, [])
    call.key, kept = stream_of(store, "key")
    found.kept += kept
    call.value, kept = stream_of(store, "value")
    found.kept += kept
    call.key_transform, kept = _space(store, "key")
    found.kept += kept
    call.value_transform, kept = _space(store, "value")
    found.kept += kept
    if store.key.rope is not None:
        call.key_transform.block, call.key_transform.first = store.key.spec.effective_rope_block, store.key.rope.first
        call.key_transform.half = len(store.key.rope.inv_freq)
    codecs = [stream.codec for stream in layout.recipe.streams.values()]
    found.scratch = max(
        max(codec.centroids, TOPS)
        if isinstance(codec, ProductVQ | ResidualKMeans)
        else codec.group_tokens * layout.head_dim
        for codec in codecs
    )
    if any(isinstance(codec, ProductVQ | ResidualKMeans) for codec in codecs):
        found.alone = 2
    store.prepared["cpu.append"] = found
    return found


def _space(store: LayerStore, name: StreamName) -> tuple[structures.FusedTransform, list[Tensor]]:
    """How a stream's vectors are transformed and coded; and the tensors that it points to."""
    layout, stream = store.layout, store.stream(name)
    space = fuse(stream.transforms, "forward", layout, store.pages.device, torch.float64)
    out = structures.FusedTransform(order=1, clip_rank=-1, search=1)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> int:
        kept.append(tensor.contiguous())
        return kept[-1].data_ptr()

    if space.mean is not None:
        out.mean = keep(space.mean)
    if space.kind == HADAMARD:
        out.order = space.order
        if space.tensor is not None:
            out.signs = keep(space.tensor)
    if space.kind == MATRIX:
        assert space.tensor is not None
        single = space.tensor.float()
        # a fitted matrix has single numbers, but for what the mean's way through it leaves; they are half of the bytes to read
        out.single = bool((single.double() - space.tensor).abs().max() <= 2.0**-45 * space.tensor.abs().max())
        out.matrix, out.matrix_heads = keep(single if out.single else space.tensor), len(single)
        if space.offset is not None:
            out.offset, out.offset_heads = keep(space.offset), len(space.offset)
    codec = stream.codec
    spec = stream.spec.codec
    if isinstance(spec, Affine):
        assert isinstance(codec, Affine)
        out.search = spec.search
        if codec.clip < 1.0:
            place = codec.clip * (layout.head_dim - 1)
            out.clip_rank, out.clip_share = int(place), place - int(place)
    elif isinstance(spec, Banded):
        out.search, out.unbiased = spec.search, spec.unbiased
        for field, tensor in (("weights", codec.weights), ("taken", codec.mean)):  # type: ignore[attr-defined]
            if tensor is not None:
                setattr(out, field, keep(tensor.float()))
    elif isinstance(spec, ProductVQ):
        books = codec.codebooks.double()  # type: ignore[attr-defined]
        _search(out, books, keep)
    elif isinstance(spec, ResidualKMeans):
        _search(out, codec.book.double(), keep)  # type: ignore[attr-defined]
    elif isinstance(spec, LloydMax):
        levels = spec.levels(layout.head_dim, torch.device("cpu"))
        out.edges = keep((levels[1:] + levels[:-1]) / 2)
    return out, kept


def _search(space: structures.FusedTransform, books: Tensor, keep: Callable[[Tensor], int]) -> None:
    """What a search for the nearest centroid reads: channels, then minus half of the squares, [..., length + 1, count]."""
    columns = torch.cat((books, books.square().sum(-1, keepdim=True) / -2), -1).mT
    space.columns, space.quick = keep(columns), keep(columns.float())


def _readable(name: StreamName, x: Tensor) -> Tensor:
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}s must be {', '.join(TYPES)}, got {x.dtype}")
    return x if x.stride(-1) == 1 else x.contiguous()


@register("append", "cpu", refuse, rank=10, checks=True)
def append(
    store: LayerStore,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    query: Tensor | None = None,
    limit: float = math.inf,
) -> bool:
    """As the reference's `append`. False where a number is beyond the limit, and nothing was written."""
    if not len(key):
        return True
    made = prepared(store)
    call = made.call
    key, value = _readable("key", key), _readable("value", value)
    tokens, heads = len(key), store.layout.heads
    strides = key.stride(), value.stride()
    structures.APPENDED.pack_into(
        call,
        CALL,
        library.batch_address(batch),
        *made.memory.of(store),
        key.data_ptr(),
        value.data_ptr(),
        strides[0][0],
        strides[1][0],
        strides[0][1],
        strides[1][1],
        tokens,
        DTYPES[key.dtype],
        DTYPES[value.dtype],
        limit,
    )
    tasks = tokens * heads
    threads = 1 if tasks < made.alone else torch.get_num_threads()
    library.run("append", call, 2 * tasks, library.workspace(threads * made.scratch), made.scratch, threads=threads)
    if call.refused == MISSING_TURNS:
        made.extend_rope_table(store, max(batch.seq_lens.tolist()))
        return append(store, key, value, batch, query, limit)
    return not call.refused
