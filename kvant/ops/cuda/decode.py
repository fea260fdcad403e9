"""Decode attention by the kernel in decode.cu: one launch for any batch, no host synchronisation, safe in a CUDA graph."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from kvant.layout import Layout
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.config import ELEMENT_TYPES
from kvant.ops.cuda.counters import counters
from kvant.ops.cuda.decode_arguments import (
    DecodeArguments,
    RotateQueriesArguments,
    TransformOutputsArguments,
    TransformQueriesArguments,
)
from kvant.ops.cuda.fragments import fused_fragments, high_batch_fragments, matrix_fragments, rotate_fragments
from kvant.ops.cuda.plan import LOW_BATCH, Plan, shared_memory
from kvant.ops.cuda.refusals import refuse
from kvant.ops.fused import MATRIX, FusedTransform, blocks_of, fuse, matrix_of, mean_logit_vector, rope_table
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch, check_queries

Tensor = torch.Tensor
ROWS_A_BLOCK = 4  # of outputs that are multiplied by a matrix
_PLANS: nvrtc.Numbered[Plan] = nvrtc.Numbered()
QUERY_BLOCKS = 128  # of the kernel that multiplies queries by a matrix, if their sequences are enough
HIGH_BATCH_PASSES = (
    2  # products of 16 rows for each warp that a GPU holds, from which on kvant_rotate_queries_high_batch is faster
)


@functools.lru_cache(maxsize=256)
def _kernel(plan: Plan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(plan.text, "kvant_decode", device, plan.warps * 32, plan.dynamic_bytes)


@functools.lru_cache(maxsize=256)
def _transform_kernel(plan: Plan, name: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(plan.text, name, device, (4 if name == "kvant_transform_outputs" else 2) * plan.layout.head_dim)


@functools.lru_cache(maxsize=256)
def _high_batch_kernel(plan: Plan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(
        plan.text, "kvant_rotate_queries_high_batch", device, 32 * plan.high_batch_warps, plan.high_batch_bytes
    )


@functools.lru_cache(maxsize=256)
def _rotate_kernel(plan: Plan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(plan.text, "kvant_rotate_queries", device, 32 * plan.rotate_warps)


def _transform_outputs(
    plan: Plan,
    x: Tensor,
    matrix: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
    early: bool,
) -> Tensor:
    """Outputs [sequences, query heads, head_dim] times the matrix of their head, or of all heads."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    heads, rows = len(matrix), x.shape[1] // len(matrix)
    arguments = TransformOutputsArguments.fill(
        rows=x, out=out, matrix=matrix, offset=offset, batch=len(x), heads=heads, head_rows=rows
    )
    kernel = _transform_kernel(plan, "kvant_transform_outputs", x.device)
    blocks = max(1, min(-(-len(x) * rows // ROWS_A_BLOCK), kernel.blocks // heads))
    kernel.launch((blocks, heads), arguments, early)
    return out


@register("decode", "cuda", refuse, rank=10, capturable=True)
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
    tuned: tuple[tuple[str, int], ...] = (),
) -> tuple[Tensor, Tensor]:
    """As the reference's `decode`, and the logarithm of the sum of exponentials of every query's scores, float32
    [sequences, query heads]."""
    layout = store.layout
    check_queries(query, layout, ELEMENT_TYPES)
    dtype = str(query.dtype).removeprefix("torch.")
    # kernels read matrices before they wait for the one before, which may have made them
    early = "cuda.spaces" in store.prepared
    spaces = _spaces(store)
    group = query.shape[1] // layout.heads
    kinds = [(space.kind, space.order) for space in spaces[:2]]
    mean_logit, cosine, sine, first = None, None, None, 0
    if layout.recipe.key.effective_rope_block:
        assert store.key.rope is not None
        first = store.key.rope.first
        cosine, sine = rope_table(store, _blocks(layout, batch.block_table.shape[1], first))
    elif softcap is not None:
        mean_logit = store.key.mean_logit(query.float().view(len(query), layout.heads, group, layout.head_dim))
        mean_logit = None if mean_logit is None else mean_logit.float().contiguous()
    low_batch = len(query) * layout.heads <= LOW_BATCH
    plan = _plan(layout, group, dtype, kinds[0], kinds[1], softcap is not None, query.device, tuned, low_batch)
    return _decode(
        query.contiguous(),
        store.pages,
        batch.block_table,
        batch.seq_lens,
        batch.overlay_rows,
        batch.sinks,
        batch.ring_start["key"],
        batch.ring_start["value"],
        store.overlays["key"],
        store.overlays["value"],
        spaces[0].tensor,
        spaces[1].tensor,
        spaces[1].offset,
        spaces[3],
        getattr(store.value.codec, "mean", None),
        mean_logit,
        *codebooks(store),
        spaces[2],
        cosine,
        sine,
        first,
        plan,
        scale,
        softcap or 0.0,
        sliding_window or 0,
        early,
    )


def _spaces(store: LayerStore) -> tuple[FusedTransform, FusedTransform, Tensor | None, Tensor | None]:
    """How queries enter the space of attention and outputs leave it, and the other form of the queries' matrix: for many rotated
    queries, or for few sequences; and that of the outputs', for decode itself. Made once for a store."""
    found = store.prepared.get("cuda.spaces")
    if found is None:
        layout, device, many = store.layout, store.pages.device, None
        if layout.recipe.key.effective_rope_block:  # queries are rotated, then multiplied
            assert store.key.rope is not None
            if len(store.key.rope.inv_freq) % 2:
                raise ValueError(
                    f"the CUDA kernel rotates channels in twos, and rope rotates {len(store.key.rope.inv_freq)} pairs of them"
                )
            matrix = matrix_of(store.key.transforms, "dual", layout, device).tensor
            if matrix is None:
                matrix = torch.eye(layout.head_dim, dtype=torch.float32, device=device)[None]
            dual = FusedTransform(MATRIX, 1, rotate_fragments(layout, matrix, mean_logit_vector(store)))
            if layout.head_dim % 32 == 0:
                many = high_batch_fragments(layout, matrix, mean_logit_vector(store))
        else:
            dual = fuse(store.key.transforms, "dual", layout, device)
            if dual.kind == MATRIX:
                assert dual.tensor is not None
                many = fused_fragments(dual.tensor)
                dual = dataclasses.replace(dual, tensor=matrix_fragments(dual.tensor))
        inverse, fragments = fuse(store.value.transforms, "inverse", layout, device), None
        if inverse.kind == MATRIX and layout.head_dim <= 128:
            assert inverse.tensor is not None
            fragments = fused_fragments(inverse.tensor)
        found = dual, inverse, many, fragments
        store.prepared["cuda.spaces"] = found
    return found  # type: ignore[no-any-return]


def codebooks(store: LayerStore) -> tuple[Tensor | None, Tensor | None]:
    """Codebooks of the keys and of the values, where they are indices of centroids; made once for a store."""
    if "cuda.books" not in store.prepared:
        books = [getattr(stream.codec, "codebooks", None) for stream in (store.key, store.value)]
        store.prepared["cuda.books"] = tuple(
            None if book is None else book.clone(memory_format=torch.contiguous_format) for book in books
        )
    return store.prepared["cuda.books"]  # type: ignore[no-any-return]


def _blocks(layout: Layout, pages: int, first: int) -> int:
    """Blocks of positions that a table of so many pages may reach into."""
    return blocks_of(pages * layout.page_tokens + layout.recipe.origin, first, layout.recipe.key.effective_rope_block)


@functools.lru_cache(maxsize=256)
def _plan(
    layout: Layout,
    group: int,
    dtype: str,
    dual: tuple[int, int],
    inverse: tuple[int, int],
    softcap: bool,
    device: torch.device,
    tuned: tuple[tuple[str, int], ...],
    low_batch: bool,
) -> int:
    bulk = torch.cuda.get_device_capability(device) >= (9, 0)
    made = Plan(layout, group, dtype, dual, inverse, softcap, bulk, shared_memory(device), tuned, low_batch)
    return _PLANS.number(made)


@torch.library.custom_op("kvant::decode", mutates_args=())
def _decode(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    sinks: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    dual: Tensor | None,
    inverse: Tensor | None,
    inverse_offset: Tensor | None,
    inverse_fragments: Tensor | None,
    mean: Tensor | None,
    mean_logit: Tensor | None,
    key_books: Tensor | None,
    value_books: Tensor | None,
    many: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    first: int,
    plan: int,
    scale: float,
    softcap: float,
    sliding_window: int,
    early: bool,
) -> tuple[Tensor, Tensor]:
    made = _PLANS[plan]
    early = early and made.bulk
    constants = made.constants
    kernel = _kernel(made, query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if not len(query):
        return torch.empty_like(query), lse
    by_matrix = made.inverse[0] == MATRIX and not made.fused_outputs
    out = torch.empty(query.shape, dtype=torch.float32 if by_matrix else query.dtype, device=query.device)
    heads = int(str(constants["QUERY_TILES"])) * made.layout.heads
    parts = 2 * (kernel.blocks + kernel.blocks // 3)  # a block has at most two; a few more where work is cut per head
    size = parts * made.tile_heads * (made.layout.head_dim + 4)
    partial = torch.empty(size, dtype=torch.float32, device=query.device)
    # now: nothing may come between what makes queries and what waits for it
    arrived = counters(query.device, len(query) * heads * min(made.warps, made.tile_heads))
    q, signs = query, dual
    log2e = math.log2(math.e)
    scales = (2.0 * log2e * scale / softcap if softcap else scale * log2e, softcap * log2e)
    rotated: Tensor | None = None
    rows: Tensor | None = None
    blocks = 0
    if made.fused_queries:
        signs = None
    elif cosine is not None:
        assert dual is not None and sine is not None
        blocks, signs = _blocks(made.layout, table.shape[1], first), None
        rotated = torch.empty(len(query) * heads * blocks * made.operand_words, dtype=torch.int32, device=query.device)
        rows = torch.empty(
            len(query) * heads * made.overlay_slots * made.tile_heads * made.layout.head_dim,
            dtype=torch.float32,
            device=query.device,
        )
        rotate, matrix = _rotate_kernel(made, query.device), dual
        passes = -(-len(query) * blocks // (16 // made.tile_heads))
        if many is not None and made.high_batch_warps and 2 * cosine.shape[1] == made.layout.head_dim:
            other = _high_batch_kernel(made, query.device)
            if passes * heads >= HIGH_BATCH_PASSES * other.blocks * made.high_batch_warps:
                rotate, matrix, passes = other, many, -(-passes // made.high_batch_warps)
        rotate.launch(
            (max(1, min(passes, rotate.blocks // heads)), heads),
            RotateQueriesArguments.fill(
                query=query,
                matrix=matrix,
                cosine=cosine,
                sine=sine,
                operands=rotated,
                rows=rows,
                seq_lens=seq_lens,
                sinks=sinks,
                key_ring_start=exact_key,
                value_ring_start=exact_value,
                scale=scales[0],
                batch=len(query),
                rope_blocks=blocks,
                first_position=first,
                half=cosine.shape[1],
                matrix_heads=len(matrix),
                sliding_window=sliding_window,
            ),
            early,
        )
    elif made.dual[0] == MATRIX:
        assert dual is not None
        q, blocks, signs = _rows(query, made), 1, None
        rotated = torch.empty(len(query) * heads * made.operand_words, dtype=torch.int32, device=query.device)
        by_matrix_in = _transform_kernel(made, "kvant_transform_queries", query.device)
        each = min(16 // made.tile_heads, max(1, len(query) * heads // QUERY_BLOCKS))  # sequences of a block
        by_matrix_in.launch(
            (max(1, min(-(-len(query) // each), by_matrix_in.blocks // heads)), heads),
            TransformQueriesArguments.fill(
                query=query,
                matrix=dual,
                mean_logit=mean_logit,
                operands=rotated,
                rows=q,
                scale=scales[0],
                batch=len(query),
                matrix_heads=len(dual),
                at_once=each,
            ),
            early,
        )
        rows = q
    arguments = DecodeArguments.fill(
        query=q,
        out=out,
        lse=lse,
        pages=pages,
        block_table=table,
        seq_lens=seq_lens,
        overlay_rows=overlay_rows,
        sinks=sinks,
        key_ring_start=exact_key,
        value_ring_start=exact_value,
        overlay_key=window_key,
        overlay_value=window_value,
        query_signs=signs,
        output_signs=None if made.inverse[0] == MATRIX else inverse,
        value_mean=mean,
        mean_logit=mean_logit,
        query_matrix=many if made.fused_queries else None,
        output_matrix=inverse_fragments if made.fused_outputs else None,
        output_offset=inverse_offset if made.fused_outputs else None,
        partial=partial,
        arrivals=arrived,
        key_codebooks=key_books,
        value_codebooks=value_books,
        operands=rotated,
        query_rows=rows,
        scale=scales[0],
        cap=scales[1],
        batch=len(query),
        block_table_width=table.shape[1],
        sliding_window=sliding_window,
        rope_blocks=blocks,
        first_position=first,
        matrix_heads=_matrices(many, made) if made.fused_queries else 0,
        output_matrix_heads=_matrices(inverse_fragments, made) if made.fused_outputs else 0,
    )
    kernel.launch((kernel.blocks, 1), arguments, early)
    if by_matrix:
        assert inverse is not None
        out = _transform_outputs(made, out, inverse, inverse_offset, query.dtype, early)
    return out, lse


def _matrices(fragments: Tensor | None, plan: Plan) -> int:
    """How many matrices `fused_fragments` made these of."""
    assert fragments is not None
    return fragments.numel() // (plan.layout.head_dim**2 // 2 + 1)


def _rows(query: Tensor, plan: Plan) -> Tensor:
    """Room for queries in the space of the keys. Kernels look at whole tiles of heads, the last of which may be short."""
    room = torch.empty(query.numel() + plan.tile_heads * query.shape[2], dtype=torch.float32, device=query.device)
    return room[: query.numel()].view(query.shape)


@_decode.register_fake
def _(query: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
