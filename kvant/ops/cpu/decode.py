"""Decode attention by native/splits.h: one call for any batch."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import Any, NamedTuple, Self

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
ALONE = 256  # tokens * heads below which one thread is faster than several
LENGTH_BYTES = 8  # of a number of batch.seq_lens, int64
KEPT_PLANS = 4  # of a thread


class Sizes(NamedTuple):
    """What of a layer decides how large the memory of a call is."""

    heads: int
    origin: int
    operand_stride: int  # floats of a query operand
    table_floats: int  # floats of the table of products of one query with all centroids of the keys
    block: int  # positions of a RoPE block, for each of which queries are unrotated; 0 where keys are stored after RoPE
    rope_first: int
    head_dim: int


@dataclasses.dataclass
class CpuDecode(Derived):
    """A layer's store in the form that the compiled decode reads, without the fields that every call sets."""

    call: structures.Decode
    kept: list[object]  # tensors that `call` points to, which must stay alive
    sizes: Sizes
    has_mean_logit: bool  # whether the keys' mean was removed
    memory: library.Memory = dataclasses.field(default_factory=library.Memory)
    rope_table: tuple[Tensor, Tensor] | None = None
    rope_blocks: int = 0  # of the table
    angles: tuple[int, int] = 0, 0  # addresses of its cosines and sines

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        layout, device = store.layout, store.pages.device
        call = structures.Decode(heads=layout.heads, dim=layout.head_dim, page_tokens=layout.page_tokens)
        call.key, key_kept = stream_of(store, "key")
        call.value, value_kept = stream_of(store, "value")
        kept: list[object] = [*key_kept, *value_kept]
        origin = layout.recipe.origin
        call.page_head_bytes, call.origin = layout.page_head_bytes, origin
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
        stride = -(-(layout.head_dim + 2 + 2 * call.key.spans + layout.head_dim // 2) // 16) * 16
        book, rope = layout.format("key").codebook, store.key.rope
        block, rope_first = (0, 0) if rope is None else (store.key.spec.effective_rope_block, rope.first)
        table_floats = 0 if book is None else book.vectors * book.centroids
        sizes = Sizes(layout.heads, origin, stride, table_floats, block, rope_first, layout.head_dim)
        if rope is not None:
            call.rope_block, call.rope_first, call.rope_half = block, rope_first, len(rope.inv_freq)
            if dual.tensor is not None and layout.head_dim % 16 == 0 and library.is_arm():
                limbs, scales = matrix_limbs(dual.tensor)
                kept += [limbs, scales]
                call.dual_limbs, call.dual_scales = limbs.data_ptr(), scales.data_ptr()
        return cls(call, kept, sizes, mean_logit is not None)

    def extend_rope_table(self, store: LayerStore, blocks: int) -> None:
        """Extends the RoPE table to at least so many blocks."""
        self.rope_table = cosine, sine = rope_table(store, blocks)
        self.rope_blocks, self.angles = len(cosine), (cosine.data_ptr(), sine.data_ptr())


@dataclasses.dataclass(slots=True)
class Plan:
    """What decode computes from a batch and the shape of the queries: the same for all layers of a step that have the same sizes."""

    batch: PagedBatch
    key: tuple[object, ...]  # sizes of the layer, shape and type of the queries, threads
    structure: structures.Batch
    lengths: int  # address of batch.seq_lens,
    seen: bytes  # and what it held: a batch may be changed in place
    threads: int
    work: Tensor  # [threads, each], then what `fixed` points to
    each: int  # floats of scratch per thread
    fixed: tuple[int, ...]  # fields of Decode: addresses of operands, tables and partial, then those up to `splits`
    rope_blocks: int  # RoPE blocks of the longest sequence

    @classmethod
    def of(cls, batch: PagedBatch, sizes: Sizes, shape: torch.Size, dtype: torch.dtype, threads: int) -> Self:
        heads, origin, stride, table_floats, block, rope_first, _ = sizes
        sequences, query_heads, dim = shape
        seq_lens, group, splits = batch.seq_lens.tolist(), query_heads // heads, 1
        for n in seq_lens:
            splits = max(splits, -(-(n - origin) // split_tokens(n - origin)))
        key, threads = (sizes, shape, dtype, threads), 1 if sum(seq_lens) * heads < ALONE else threads
        rows = sequences * query_heads
        tables = sequences * heads * -(-group // CHUNK) * CHUNK * table_floats  # [chunks of queries, centroids, CHUNK]
        each = 64 + CHUNK * (LONGEST_SPLIT + origin + 128 + 2 * dim)
        shared = rows * stride  # query operands
        if block:  # a split computes the operands of its RoPE blocks
            shared, each = 0, each + ((LONGEST_SPLIT + origin) // block + 2) * group * stride
        work = library.workspace(threads * each + shared + tables + rows * splits * (dim + 2))
        at = work.data_ptr() + 4 * threads * each
        fixed = at, at + 4 * shared, at + 4 * (shared + tables), stride, group, DTYPES[dtype], splits
        blocks = blocks_of(max(seq_lens, default=0), rope_first, block) if block else 0
        structure = library.batch_structure(batch)
        lengths = structure.seq_lens or 0
        seen = library.bytes_at(lengths, LENGTH_BYTES * sequences)
        return cls(batch, key, structure, lengths, seen, threads, work, each, fixed, blocks)


class _Plans(threading.local):
    """The last plans of a thread, newest first. Layers with a sliding window have another batch than those without."""

    plans: tuple[Plan, ...] = ()

    def find(self, batch: PagedBatch, key: tuple[object, ...]) -> Plan | None:
        for kept in self.plans:
            if kept.batch is batch and kept.key == key and library.bytes_at(kept.lengths, len(kept.seen)) == kept.seen:
                return kept
        return None

    def keep(self, plan: Plan) -> Plan:
        others = tuple(other for other in self.plans if other.batch is not plan.batch or other.key != plan.key)
        self.plans = plan, *others[: KEPT_PLANS - 1]
        return plan


_PLANS = _Plans()


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
    made, shape, dtype = store.derive(CpuDecode), query.shape, query.dtype
    threads = torch.get_num_threads()
    plan = _PLANS.find(batch, (made.sizes, shape, dtype, threads))
    if plan is None:
        check_queries(query, store.layout, TYPES)
        batch = one_query_each(batch, queries_per_sequence(query, batch, store.layout))
        plan = _PLANS.keep(Plan.of(batch, made.sizes, shape, dtype, threads))
    if sink_logits is not None:
        sink_logits = check_sink_logits(sink_logits, query)
    query = query.contiguous()
    out = torch.empty_like(query)
    if not shape[0]:
        return out
    if plan.rope_blocks > made.rope_blocks:
        made.extend_rope_table(store, plan.rope_blocks)
    structures.DECODED.pack_into(
        made.call,
        CALL,
        ctypes.addressof(plan.structure),
        query.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if sink_logits is None else sink_logits.data_ptr(),
        *made.memory.of(store),
        *made.angles,
        *plan.fixed,
        sliding_window or 0,
        made.has_mean_logit and (plan.rope_blocks > 0 or softcap is not None or sink_logits is not None),
        scale,
        softcap or 0.0,
    )
    library.run("decode", made.call, 0, plan.work, plan.each, plan.threads)
    return out


def decode_with_lse(store: LayerStore, query: Tensor, batch: PagedBatch, **options: Any) -> tuple[Tensor, Tensor]:
    """As `decode`; also returns the log-sum-exps."""
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    return decode(store, query, batch, lse=lse, **options), lse
