"""Decode attention by native/attend.h: one call for any batch."""

from __future__ import annotations

import dataclasses

import torch

from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.layout import Layout
from kvant.ops.cpu import library, plan, structures
from kvant.ops.cpu.plan import stream_of
from kvant.ops.cpu.structures import DTYPES, TYPES
from kvant.ops.fused import blocks_of, matrix_of, mean_logit_vector, rope_table
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch, check_queries

Tensor = torch.Tensor
SPLIT_TOKENS, LONGEST_SPLIT = 512, 2048
CALL = structures.Decode.batch.offset  # of what is another at every call
CHUNK = 4  # queries that native/attend.h attends from at once


@dataclasses.dataclass
class Prepared:
    """What a store's layer looks like to the compiled operation, but for what changes from call to call."""

    call: structures.Decode
    kept: list[object]  # that the call points to
    memory: library.Memory = dataclasses.field(default_factory=library.Memory)
    has_lost: bool = False  # whether logits are short of something
    block: int = 0  # positions that share a rotation of the queries; 0 where none rotates
    rope_table: tuple[Tensor, Tensor] | None = None


def split_tokens(tokens: int) -> int:
    """Tokens of a split of so many: it is the sequence's own length that decides, so that nothing depends on the others."""
    size = SPLIT_TOKENS
    while size < LONGEST_SPLIT and tokens >= 16 * size:
        size *= 2
    return size


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
    call.page_head_bytes, call.origin = layout.page_head_bytes, layout.recipe.origin
    call.window_type = TYPES[layout.overlay_dtype]
    # of one query, a Hadamard transform is as quick as a matrix
    dual = matrix_of(store.key.transforms, "dual", layout, device)
    inverse = matrix_of(store.value.transforms, "inverse", layout, device)
    kept += [dual, inverse]
    if dual.tensor is not None:
        call.dual, call.dual_heads = dual.tensor.data_ptr(), len(dual.tensor)
    if inverse.tensor is not None:
        call.inverse, call.inverse_heads = inverse.tensor.data_ptr(), len(inverse.tensor)
    if inverse.offset is not None:
        call.inverse_offset, call.offset_heads = inverse.offset.data_ptr(), len(inverse.offset)
    mean_logit = mean_logit_vector(store)
    if mean_logit is not None:
        kept.append(mean_logit)
        call.mean_logit = mean_logit.data_ptr()
    call.split_tokens, call.longest_split = SPLIT_TOKENS, LONGEST_SPLIT
    found = Prepared(call, kept, has_lost=mean_logit is not None)
    if store.key.rope is not None:
        found.block = store.key.spec.effective_rope_block
        call.block, call.first, call.half = found.block, store.key.rope.first, len(store.key.rope.inv_freq)
    store.prepared["cpu.decode"] = found
    return found


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why it cannot decode from a layout on a device, or None."""
    key = layout.recipe.key
    if key.rope != "post" and isinstance(key.codec, ProductVQ | ResidualKMeans):
        return "it has one table of products with centroids for all positions, and the keys are unrotated by blocks of them"
    return plan.refuse(layout, device)


@register("decode", "cpu", refuse, rank=10)
def decode(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """As the reference's `decode`."""
    return decode_with_lse(store, query, batch, scale=scale, softcap=softcap, sliding_window=sliding_window)[0]


def decode_with_lse(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
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
    seq_lens, origin = batch.seq_lens.tolist(), layout.recipe.origin
    call, group = made.call, query_heads // layout.heads
    cosine, sine = 0, 0
    if made.block:
        made.rope_table = rope_table(store, blocks_of(max(seq_lens), call.first, made.block))
        cosine, sine = (x.data_ptr() for x in made.rope_table)
    splits = max(1, *(-(-(n - origin) // split_tokens(n - origin)) for n in seq_lens))
    stride = -(-(dim + 2 + 2 * call.key.spans + dim // 2) // 16) * 16
    rows, codec = sequences * query_heads, store.key.spec.codec
    tables = 0  # products of queries with centroids, of several queries side by side
    if isinstance(codec, ResidualKMeans):
        tables = sequences * layout.heads * -(-group // CHUNK) * CHUNK * codec.centroids
    elif isinstance(codec, ProductVQ):
        tables = sequences * layout.heads * -(-group // CHUNK) * CHUNK * codec.spaces(dim) * codec.centroids
    each = 64 + CHUNK * (LONGEST_SPLIT + origin + 128 + 2 * dim)
    shared = (
        rows * stride
    )  # prepared queries; where they are rotated, a split prepares those of its blocks of positions
    if made.block:
        shared, each = 0, each + ((LONGEST_SPLIT + origin) // made.block + 2) * group * stride
    lasting = shared + tables + rows * splits * (dim + 2)
    work = library.workspace(lasting + torch.get_num_threads() * each)
    at = work.data_ptr()
    structures.DECODED.pack_into(
        call,
        CALL,
        library.batch_address(batch),
        query.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        *made.memory.of(store),
        cosine,
        sine,
        at,
        at + 4 * shared,
        at + 4 * (shared + tables),
        stride,
        group,
        DTYPES[query.dtype],
        splits,
        sliding_window or 0,
        made.has_lost and (bool(made.block) or softcap is not None),
        scale,
        softcap or 0.0,
    )
    library.run("decode", call, 0, work[lasting:], each)
    return out, lse
