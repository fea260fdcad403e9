"""Decode attention by native/splits.h: one call for any batch."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch

from kvant.layout import Layout
from kvant.ops.cpu import library, plan, structures
from kvant.ops.cpu.plan import stream_of
from kvant.ops.cpu.structures import DTYPES, TYPES
from kvant.ops.fused import blocks_of, matrix_of, mean_logit_vector, rope_table
from kvant.ops.registry import register
from kvant.ops.types import (
    Derived,
    LayerStore,
    PagedBatch,
    check_queries,
    check_sink_logits,
    one_query_each,
    queries_per_sequence,
)

Tensor = torch.Tensor
SPLIT_TOKENS, LONGEST_SPLIT = 512, 2048
CALL = structures.Decode.batch.offset  # offset of the fields that every call sets
WIDE_LIMIT = 32639  # of native/arm_matrix.h
CHUNK = 4  # queries of a KV head that native/splits.h computes together


@dataclasses.dataclass
class CpuDecode(Derived):
    """A layer's store in the form that the compiled decode reads, without the fields that every call sets."""

    call: structures.Decode
    kept: list[object]  # tensors that `call` points to, which must stay alive
    memory: library.Memory = dataclasses.field(default_factory=library.Memory)
    has_mean_logit: bool = False  # whether the keys' mean was removed
    block: int = (
        0  # positions of a RoPE block, for each of which queries are unrotated; 0 where keys are stored after RoPE
    )
    table_floats: int = 0  # floats of the table of products of one query with all centroids of the keys
    # what every call reads of `call` and the recipe, whose attributes take longer
    origin: int = 0
    rope_first: int = 0
    operand_stride: int = 0  # floats of a query operand
    rope_table: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        layout, device = store.layout, store.pages.device
        call = structures.Decode(heads=layout.heads, dim=layout.head_dim, page_tokens=layout.page_tokens)
        call.key, key_kept = stream_of(store, "key")
        call.value, value_kept = stream_of(store, "value")
        kept: list[object] = [*key_kept, *value_kept]
        origin = layout.recipe.origin
        call.page_head_bytes, call.origin = layout.page_head_bytes, origin
        call.overlay_type = TYPES[layout.overlay_dtype]
        # Transforms are applied as matrices: for one query a fast Hadamard transform would not be faster.
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
        made = cls(call, kept, has_mean_logit=mean_logit is not None, origin=origin)
        made.operand_stride = -(-(layout.head_dim + 2 + 2 * call.key.spans + layout.head_dim // 2) // 16) * 16
        book = layout.format("key").codebook
        made.table_floats = 0 if book is None else book.vectors * book.centroids
        if store.key.rope is not None:
            made.block, made.rope_first = store.key.spec.effective_rope_block, store.key.rope.first
            call.rope_block, call.rope_first = made.block, made.rope_first
            call.rope_half = len(store.key.rope.inv_freq)
            if dual.tensor is not None and layout.head_dim % 16 == 0 and library.is_arm():
                limbs, scales = matrix_limbs(dual.tensor)
                kept += [limbs, scales]
                call.dual_limbs, call.dual_scales = limbs.data_ptr(), scales.data_ptr()
        return made


def matrix_limbs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices [heads, dim, dim] as native/arm_matrix.h reads them: limbs of the integers V, and scales [heads, 2, dim] of rows and
    columns, with matrix = diag(row) V diag(column)."""
    heads, dim, _ = matrix.shape
    matrix = matrix.double()
    column = matrix.abs().amax(1).clamp_min(1e-30)
    row = (matrix / column[:, None]).abs().amax(2).clamp_min(1e-30)
    integers = (matrix / column[:, None] / row[:, :, None] * WIDE_LIMIT).round().int()
    high = (integers + 128) >> 8
    limbs = torch.stack([high, integers - 256 * high]).to(torch.int8)  # [2, heads, dim, dim]
    limbs = limbs.view(2, heads, dim // 4, 4, dim // 8, 8).permute(1, 4, 2, 0, 5, 3)
    return limbs.contiguous(), torch.stack([row, column / WIDE_LIMIT], 1).float()


def split_tokens(tokens: int) -> int:
    """Tokens of a split of a sequence. It depends only on the sequence's length, so that outputs do not depend on the batch."""
    size = SPLIT_TOKENS
    while size < LONGEST_SPLIT and tokens >= 16 * size:
        size *= 2
    return size


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why it cannot decode from a layout on a device, or None."""
    if layout.recipe.key.rope != "post" and layout.format("key").codebook is not None:
        return "it computes one table of products with centroids for all positions, and these keys are stored relative to RoPE blocks"
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
    sink_logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """As the reference's `decode`. lse: receives the log-sum-exp of every query's scores and its sink logit, float32
    [sequences, query heads].

    After one call has read the pages of a layer, nothing of Python and torch is in the caches for the next: what is called here
    takes four times as long as in a loop of its own."""
    layout, made = store.layout, store.derive(CpuDecode)
    check_queries(query, layout, TYPES)
    batch = one_query_each(batch, queries_per_sequence(query, batch, layout))
    sink_logits = check_sink_logits(sink_logits, query)
    sequences, query_heads, dim = query.shape
    query = query.contiguous()
    out = torch.empty_like(query)
    if not sequences:
        return out
    seq_lens, origin, stride = batch.seq_lens.tolist(), made.origin, made.operand_stride
    call, group = made.call, query_heads // layout.heads
    cosine, sine = 0, 0
    if made.block:
        made.rope_table = rope_table(store, blocks_of(max(seq_lens), made.rope_first, made.block))
        cosine, sine = made.rope_table[0].data_ptr(), made.rope_table[1].data_ptr()
    splits = 1
    for n in seq_lens:
        splits = max(splits, -(-(n - origin) // split_tokens(n - origin)))
    rows = sequences * query_heads
    tables = (
        sequences * layout.heads * -(-group // CHUNK) * CHUNK * made.table_floats
    )  # [chunks of queries, centroids, CHUNK]
    each = 64 + CHUNK * (LONGEST_SPLIT + origin + 128 + 2 * dim)
    shared = rows * stride  # query operands
    if made.block:  # a split computes the operands of its RoPE blocks
        shared, each = 0, each + ((LONGEST_SPLIT + origin) // made.block + 2) * group * stride
    scratch = torch.get_num_threads() * each
    work = library.workspace(scratch + shared + tables + rows * splits * (dim + 2))
    at = work.data_ptr() + 4 * scratch
    structures.DECODED.pack_into(
        call,
        CALL,
        library.batch_address(batch),
        query.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if sink_logits is None else sink_logits.data_ptr(),
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
        made.has_mean_logit and (bool(made.block) or softcap is not None or sink_logits is not None),
        scale,
        softcap or 0.0,
    )
    library.run("decode", call, 0, work, each)
    return out


def decode_with_lse(store: LayerStore, query: Tensor, batch: PagedBatch, **options: Any) -> tuple[Tensor, Tensor]:
    """As `decode`; also returns the log-sum-exps."""
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    return decode(store, query, batch, lse=lse, **options), lse
