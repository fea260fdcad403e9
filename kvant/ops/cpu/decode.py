"""Decode attention by native/attend.h: one call for any batch."""

from __future__ import annotations

import dataclasses

import torch

from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.ops.cpu import library, structures
from kvant.ops.cpu.plan import refuse, stream_of, turns
from kvant.ops.cpu.structures import DTYPES, TYPES
from kvant.ops.registry import register
from kvant.ops.spaces import as_matrix, space_of
from kvant.ops.types import LayerStore, PagedBatch, check_queries

Tensor = torch.Tensor
SPLIT_TOKENS = 512
CHUNK = 4  # queries that native/attend.h attends from at once


@dataclasses.dataclass
class Prepared:
    """What a store's layer looks like to the compiled operation, but for what changes from call to call."""

    call: structures.Decode
    kept: list[object]  # that the call points to
    block: int = 0  # positions that share a turn of the queries; 0 where none turns
    turns: tuple[Tensor, Tensor] | None = None


def prepared(store: LayerStore) -> Prepared:
    """Made once for a store."""
    found = store.prepared.get("cpu.decode")
    if found is not None:
        return found  # type: ignore[no-any-return]
    layout, device = store.layout, store.pages.device
    call = structures.Decode(heads=layout.heads, dim=layout.head_dim, page_tokens=layout.page_tokens)
    call.key, key_kept = stream_of(store, "key")
    call.value, value_kept = stream_of(store, "value")
    kept: list[object] = [*key_kept, *value_kept]
    call.run_bytes, call.origin = layout.run_bytes, layout.recipe.origin
    call.window_type = TYPES[layout.overlay_dtype]
    # of one query, a Hadamard transform is as quick as a matrix
    dual = as_matrix(space_of(store.key.transforms, "dual", layout, device), layout.head_dim)
    inverse = as_matrix(space_of(store.value.transforms, "inverse", layout, device), layout.head_dim)
    kept += [dual, inverse]
    if dual.tensor is not None:
        call.dual, call.dual_heads = dual.tensor.data_ptr(), len(dual.tensor)
    if inverse.tensor is not None:
        call.inverse, call.inverse_heads = inverse.tensor.data_ptr(), len(inverse.tensor)
    if inverse.offset is not None:
        call.inverse_offset, call.offset_heads = inverse.offset.data_ptr(), len(inverse.offset)
    lost = _lost(store)
    if lost is not None:
        kept.append(lost)
        call.lost = lost.data_ptr()
    found = Prepared(call, kept)
    if store.key.rope is not None:
        found.block = store.key.spec.turned_back
        call.block, call.first, call.half = found.block, store.key.rope.first, len(store.key.rope.inv_freq)
        call.use_lost = lost is not None
    store.prepared["cpu.decode"] = found
    return found


def _lost(store: LayerStore) -> Tensor | None:
    """What the logit of a query with each unit vector is short of, once the keys' mean is taken off: [heads, head_dim]."""
    layout = store.layout
    unit = torch.eye(layout.head_dim, dtype=torch.float64).expand(layout.heads, -1, -1)
    found: Tensor | None = None
    for transform in store.key.transforms:
        here = transform.lost(unit)
        found = here if found is None else found if here is None else found + here
        unit = transform.dual(unit)
    return None if found is None else found.float().contiguous()


@register("decode", "cpu", refuse, rank=10)
def decode(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """As the reference's `decode`."""
    return decode_with_lse(store, query, batch, scale=scale, softcap=softcap, window=window)[0]


def decode_with_lse(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference's `decode`, and the logarithm of the sum of exponentials of every query's scores, float32
    [sequences, query heads]."""
    layout, made = store.layout, prepared(store)
    check_queries(query, layout, TYPES)
    sequences, query_heads, dim = query.shape
    query = query.contiguous()
    out, lse = torch.empty_like(query), torch.empty(sequences, query_heads, dtype=torch.float32)
    if not sequences:
        return out, lse
    call, group, longest = made.call, query_heads // layout.heads, int(batch.lengths.max())
    call.blocks = 1
    if made.block:
        assert store.key.rope is not None
        call.blocks = max(0, longest - 1 + call.first) // made.block - call.first // made.block + 1
        made.turns = turns(store, call.blocks)
        call.cosine, call.sine = (x.data_ptr() for x in made.turns)
    call.splits = max(1, -(-(longest - layout.recipe.origin) // SPLIT_TOKENS))
    call.split_tokens, call.visible = SPLIT_TOKENS, window or 0
    call.batch, call.group, call.type = sequences, group, DTYPES[query.dtype]
    call.scale, call.cap = scale, softcap or 0.0
    if not made.block:
        call.use_lost = softcap is not None and bool(call.lost)
    call.query, call.out, call.lse = query.data_ptr(), out.data_ptr(), lse.data_ptr()
    call.pages, call.table, call.table_width = (
        store.pages.data_ptr(),
        batch.block_table.data_ptr(),
        batch.block_table.shape[1],
    )
    call.lengths, call.owners, call.sinks = batch.lengths.data_ptr(), batch.owners.data_ptr(), batch.sinks.data_ptr()
    call.key.exact, call.value.exact = batch.exact["key"].data_ptr(), batch.exact["value"].data_ptr()
    call.key.window, call.value.window = store.overlays["key"].data_ptr(), store.overlays["value"].data_ptr()
    call.prepared_stride = -(-(dim + 2 + 2 * call.key.spans + dim // 2) // 16) * 16
    rows, codec = sequences * query_heads, store.key.spec.codec
    tables = 0  # products of queries with centroids, of several queries side by side
    if isinstance(codec, ResidualKMeans):
        tables = sequences * layout.heads * -(-group // CHUNK) * CHUNK * codec.centroids
    elif isinstance(codec, ProductVQ):
        tables = sequences * layout.heads * -(-group // CHUNK) * CHUNK * codec.spaces(dim) * codec.centroids
    each = 64 + CHUNK * (SPLIT_TOKENS + layout.recipe.origin + 128 + 2 * dim)
    threads = torch.get_num_threads()
    lasting = rows * call.blocks * call.prepared_stride + tables + rows * call.splits * (dim + 2)
    work = library.workspace(lasting + threads * each)
    call.prepared = work.data_ptr()
    call.tables = call.prepared + 4 * rows * call.blocks * call.prepared_stride
    call.partial = call.tables + 4 * tables
    library.run("decode", call, 0, work[lasting:], each)
    return out, lse
