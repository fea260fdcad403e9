"""Decode attention by kernels/decode.cu: one launch for any batch, or with a kernel before it that transforms the queries and one
after it that transforms the outputs (Plan says which). No host synchronisation, safe in a CUDA graph."""

from __future__ import annotations

import functools
import math
from typing import Any

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
from kvant.ops.cuda.decode_matrices import ChunkAngles, Codebooks, DecodeTransforms
from kvant.ops.cuda.device import copies_in_bulk, shared_memory
from kvant.ops.cuda.geometry import LOW_BATCH
from kvant.ops.cuda.plan import Plan
from kvant.ops.cuda.refusals import refuse
from kvant.ops.fused import MATRIX, blocks_of, rope_table
from kvant.ops.registry import register_decode
from kvant.ops.types import (
    LayerStore,
    PagedBatch,
    check_queries,
    check_sink_logits,
    one_query_each,
    queries_per_sequence,
)

Tensor = torch.Tensor
OUTPUT_ROWS = 4  # rows of a CTA of kvant_transform_outputs
QUERY_CTAS = 128  # CTAs that kvant_transform_queries is to have, if there are sequences enough
# Products of 16 rows for each warp that a GPU holds, from which on kvant_rotate_queries_high_batch is faster: at 0.8 of them (64 x
# 3072, H200) decode takes 67 us with it and 71 without, at 0.3 (64 x 1024) 54 and 46.
HIGH_BATCH_PASSES = 0.6
_PLANS: nvrtc.Numbered[Plan] = nvrtc.Numbered()


@functools.lru_cache(maxsize=256)
def _kernel(plan: Plan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(plan.text, "kvant_decode", device, plan.teams * plan.warps * 32, plan.dynamic_bytes)


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
    out: Tensor,
    matrix: Tensor,
    offset: Tensor | None,
    early: bool,
    lse: Tensor,
    sink_logits: Tensor | None,
) -> None:
    """out [sequences, query heads, head_dim] = x times the matrix of its head, or of all heads."""
    heads, rows = len(matrix), x.shape[1] // len(matrix)
    arguments = TransformOutputsArguments.fill(
        rows=x,
        out=out,
        matrix=matrix,
        offset=offset,
        lse=lse,
        sink_logits=sink_logits,
        batch=len(x),
        heads=heads,
        head_rows=rows,
        sink_rows=0 if sink_logits is None else len(sink_logits),
    )
    kernel = _transform_kernel(plan, "kvant_transform_outputs", x.device)
    blocks = max(1, min(-(-len(x) * rows // OUTPUT_ROWS), kernel.blocks // heads))
    kernel.launch((blocks, heads), arguments, early)


def decode_with_lse(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    out: Tensor | None = None,
    after_append: bool = False,
    tuned: tuple[tuple[str, int], ...] = (),
) -> tuple[Tensor, Tensor]:
    """As the reference's `decode`, and the logarithm of the sum of exponentials of every query's scores and its sink logit, float32
    [sequences, query heads].

    Several queries of a sequence are rows of the same product: their query heads are those of a larger group, of which each sees
    tokens up to its own. Where groups of tokens are coded, the overlay begins elsewhere for every query, and each is a sequence.

    Outputs are written to `out`, where it is given. `after_append` says that this step's tokens were appended after the queries had
    been made, and that nothing was freed since. Decode then runs while append still does: where a window holds the new tokens, they
    are read from the overlay alone, and only its reads wait. A batch in which every query is a sequence does not show how many new
    tokens a sequence has: the caller sees to it that the recent tokens are no fewer."""
    layout = store.layout
    check_queries(query, layout, ELEMENT_TYPES)
    sink_logits = check_sink_logits(sink_logits, query)
    queries = queries_per_sequence(query, batch, layout)
    after_append = after_append and new_tokens_in_overlay(layout, queries)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sliding_window": sliding_window, "tuned": tuned}
    options |= {"out": out, "after_append": after_append}
    if queries == 1:
        return _decode_rows(store, query, batch, 1, sink_logits=sink_logits, **options)
    if any(stream.groupwise for stream in layout.recipe.streams.values()):
        return decode_with_lse(store, query, one_query_each(batch, queries), sink_logits=sink_logits, **options)
    rows = query.unflatten(1, (layout.heads, -1)).unflatten(0, (-1, queries)).transpose(1, 2)
    return _decode_rows(store, rows.flatten(1, 3), batch, queries, sink_logits=sink_logits, **options)


def new_tokens_in_overlay(layout: Layout, new: int) -> bool:
    """Whether the `new` tokens that a sequence has in this step are read from the overlay by all of its queries, never from pages.
    The last query reads what lies before its own recent tokens packed."""
    streams = layout.recipe.streams.values()
    return not any(stream.groupwise for stream in streams) and all(stream.window.recent >= new for stream in streams)


decode = register_decode("cuda", refuse, rank=10, capturable=True, in_place=True)(decode_with_lse)


def _decode_rows(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    queries: int,
    *,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: Tensor | None,
    out: Tensor | None,
    after_append: bool,
    tuned: tuple[tuple[str, int], ...],
) -> tuple[Tensor, Tensor]:
    """Decode of queries [sequences, heads * queries * query heads of a KV head and query, head_dim]; outputs and log-sum-exps are
    [sequences * queries, query heads, ...]."""
    layout = store.layout
    dtype = str(query.dtype).removeprefix("torch.")
    # An early start is safe only if an earlier call made the matrices: kernels read them before their wait.
    early = DecodeTransforms in store.derived
    transforms, books, angles = store.derive(DecodeTransforms), store.derive(Codebooks), store.derive(ChunkAngles)
    dual, inverse = transforms.dual, transforms.inverse
    group = query.shape[1] // layout.heads
    mean_logit, cosine, sine, first, partial_rope = None, None, None, 0, False
    if layout.recipe.key.effective_rope_block:
        assert store.key.rope is not None
        first = store.key.rope.first
        cosine, sine = rope_table(store, _blocks(layout, batch.block_table.shape[1], first))
        partial_rope = 2 * cosine.shape[1] != layout.head_dim
    elif softcap is not None or sink_logits is not None:
        mean_logit = store.key.mean_logit(query.float().view(len(query), layout.heads, group, layout.head_dim))
        mean_logit = None if mean_logit is None else mean_logit.float().contiguous()
    removed: Tensor | None = None  # scale * q . mu, where scores lack it
    if sink_logits is not None:
        sink_logits = sink_logits[None]
        if mean_logit is not None and softcap is None:
            by_query = mean_logit.unflatten(-1, (queries, -1)).transpose(1, 2)  # in the order of outputs
            removed, mean_logit = scale * by_query.reshape(len(query) * queries, -1), None
            sink_logits = sink_logits - removed
    low_batch = len(query) * layout.heads <= LOW_BATCH
    ways = (dual.kind, dual.order), (inverse.kind, inverse.order)
    capped, has_sinks = softcap is not None, sink_logits is not None
    plan = _plan(layout, group, dtype, *ways, capped, query.device, tuned, low_batch, partial_rope, queries, has_sinks)
    if out is None:
        out = query.new_empty(_output_shape(query, queries))
    assert out.is_contiguous() and out.dtype == query.dtype and out.shape == _output_shape(query, queries), out.shape
    lse = _decode(
        out,
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
        dual.tensor,
        transforms.high_batch,
        transforms.fused_dual,
        inverse.tensor,
        inverse.offset,
        transforms.fused_inverse,
        transforms.value_mean,
        mean_logit,
        sink_logits,
        books.key,
        books.value_fragments if _PLANS[plan].centroid_sums else books.value,
        cosine,
        sine,
        angles.table,
        first,
        plan,
        scale,
        softcap or 0.0,
        sliding_window or 0,
        early,
        after_append,
    )
    return out, lse if removed is None else lse + removed


def _blocks(layout: Layout, pages: int, first: int) -> int:
    """RoPE blocks that a block table of so many pages may reach into; `first` is the RoPE position of the first token."""
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
    partial_rope: bool,
    queries: int,
    sink_logits: bool,
) -> int:
    bulk, shared = copies_in_bulk(device), shared_memory(device)
    ways = dual, inverse, softcap, bulk, shared, tuned, low_batch, partial_rope, queries, sink_logits
    return _PLANS.number(Plan(layout, group, dtype, *ways))


@torch.library.custom_op("kvant::decode", mutates_args=("out",))
def _decode(
    out: Tensor,
    query: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    sinks: Tensor,
    key_ring_start: Tensor,
    value_ring_start: Tensor,
    overlay_key: Tensor,
    overlay_value: Tensor,
    dual: Tensor | None,
    high_batch: Tensor | None,
    fused_dual: Tensor | None,
    inverse: Tensor | None,
    inverse_offset: Tensor | None,
    fused_inverse: Tensor | None,
    value_mean: Tensor | None,
    mean_logit: Tensor | None,
    sink_logits: Tensor | None,
    key_codebooks: Tensor | None,
    value_codebooks: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    angles: Tensor | None,
    first: int,
    plan: int,
    scale: float,
    softcap: float,
    sliding_window: int,
    early: bool,
    after_append: bool,
) -> Tensor:
    made = _PLANS[plan]
    early = early and made.bulk
    after_append = after_append and early
    kernel = _kernel(made, query.device)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=query.device)
    if not len(query):
        return lse
    by_matrix = made.inverse[0] == MATRIX and not made.fused_outputs
    found = torch.empty_like(out, dtype=torch.float32) if by_matrix else out
    partial = _partial(made, kernel, query.device)
    # Taken now: in a captured graph it may be a launch, and none may come between the kernel that makes the query operands and
    # the kernel that waits for it.
    arrivals = counters(query.device, len(query) * made.head_tiles * min(made.warps, made.tile_heads))
    log2e = math.log2(math.e)
    logit_scale = 2.0 * log2e * scale / softcap if softcap else scale * log2e
    operands: Tensor | None = None
    rows: Tensor | None = None
    blocks = 0  # query operands of a (sequence, head tile); none where the decode kernel makes its own of one query
    if made.rotated_queries or made.rotated_keys:
        blocks = _blocks(made.layout, block_table.shape[1], first)
    elif cosine is not None:
        assert dual is not None and sine is not None
        blocks = _blocks(made.layout, block_table.shape[1], first)
        table, bounds = (cosine, sine), (seq_lens, sliding_window)
        operands = _rotate_queries(
            made, query, dual, high_batch, table, bounds, blocks, first, logit_scale, early, after_append
        )
    elif made.dual[0] == MATRIX and not made.fused_queries:
        assert dual is not None
        blocks = 1
        operands, rows = _transform_queries(made, query, dual, mean_logit, logit_scale, early, after_append)
        query = rows
    own_matrix = made.fused_queries or made.rotated_queries
    arguments = DecodeArguments.fill(
        query=query,
        out=found,
        lse=lse,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
        overlay_rows=overlay_rows,
        sinks=sinks,
        key_ring_start=key_ring_start,
        value_ring_start=value_ring_start,
        overlay_key=overlay_key,
        overlay_value=overlay_value,
        query_signs=None if operands is not None or own_matrix else dual,
        output_signs=None if made.inverse[0] == MATRIX else inverse,
        value_mean=value_mean,
        mean_logit=mean_logit,
        sink_logits=sink_logits,
        query_matrix=fused_dual if own_matrix else None,
        cosine=cosine if made.rotated_queries or made.rotated_keys else None,
        sine=sine if made.rotated_queries or made.rotated_keys else None,
        angles=angles,
        output_matrix=fused_inverse if made.fused_outputs else None,
        output_offset=inverse_offset if made.fused_outputs else None,
        partial=partial,
        arrivals=arrivals,
        key_codebooks=key_codebooks,
        value_codebooks=value_codebooks,
        operands=operands,
        query_rows=rows,
        scale=logit_scale,
        cap=softcap * log2e,
        batch=len(query),
        block_table_width=block_table.shape[1],
        sliding_window=sliding_window,
        rope_blocks=blocks,
        first_position=first,
        after_append=int(after_append),
        matrix_heads=_query_matrices(fused_dual, made) if own_matrix else 0,
        output_matrix_heads=_matrices(fused_inverse, made) if made.fused_outputs else 0,
        sink_rows=0 if sink_logits is None else len(sink_logits),
    )
    kernel.launch((kernel.blocks, 1), arguments, early)
    if by_matrix:
        assert inverse is not None
        _transform_outputs(made, found, out, inverse, inverse_offset, early, lse, sink_logits)
    return lse


def _partial(plan: Plan, kernel: nvrtc.Kernel, device: torch.device) -> Tensor:
    """Memory for partial results, two slots a part. There are as many parts as CTAs have teams; where work tiles are split, every
    (sequence, head tile) has one part at least, which adds up to a third (TileScheduler::split)."""
    teams = plan.teams * kernel.blocks
    slots = 2 * (teams + teams // 3)
    return torch.empty(slots * plan.tile_heads * (plan.layout.head_dim + 4), dtype=torch.float32, device=device)


def _rotate_queries(
    plan: Plan,
    query: Tensor,
    matrix: Tensor,
    high_batch: Tensor | None,
    table: tuple[Tensor, Tensor],
    bounds: tuple[Tensor, int],
    blocks: int,
    first: int,
    scale: float,
    early: bool,
    after_append: bool,
) -> Tensor:
    """Query operands of every RoPE block, int32 [batch, head tiles, blocks, operand_words] flat. `table` are the cosines and sines
    of the blocks' starts, `bounds` seq_lens and the sliding window."""
    cosine, sine = table
    seq_lens, sliding_window = bounds
    heads, dim, device = plan.head_tiles, plan.layout.head_dim, query.device
    operands = torch.empty(len(query) * heads * blocks * plan.operand_words, dtype=torch.int32, device=device)
    kernel = _rotate_kernel(plan, device)
    passes = -(-len(query) * blocks // (16 // plan.tile_heads))  # products of 16 rows, of a head tile
    if high_batch is not None and plan.high_batch_warps and 2 * cosine.shape[1] == dim:
        other = _high_batch_kernel(plan, device)
        if passes * heads >= HIGH_BATCH_PASSES * other.blocks * plan.high_batch_warps:
            kernel, matrix, passes = other, high_batch, -(-passes // plan.high_batch_warps)
    arguments = RotateQueriesArguments.fill(
        query=query,
        matrix=matrix,
        cosine=cosine,
        sine=sine,
        operands=operands,
        seq_lens=seq_lens,
        scale=scale,
        batch=len(query),
        rope_blocks=blocks,
        first_position=first,
        half=cosine.shape[1],
        matrix_heads=len(matrix),
        sliding_window=sliding_window,
        after_append=int(after_append),
    )
    kernel.launch((max(1, min(passes, kernel.blocks // heads)), heads), arguments, early)
    return operands


def _transform_queries(
    plan: Plan,
    query: Tensor,
    matrix: Tensor,
    mean_logit: Tensor | None,
    scale: float,
    early: bool,
    after_append: bool,
) -> tuple[Tensor, Tensor]:
    """Queries times their matrix: as query operands, int32 [batch, head tiles, operand_words] flat, and as float32 rows of the
    queries' shape."""
    heads, device = plan.head_tiles, query.device
    rows = _rows(query, plan)
    operands = torch.empty(len(query) * heads * plan.operand_words, dtype=torch.int32, device=device)
    kernel = _transform_kernel(plan, "kvant_transform_queries", device)
    at_once = min(16 // plan.tile_heads, max(1, len(query) * heads // QUERY_CTAS))  # sequences of a CTA
    arguments = TransformQueriesArguments.fill(
        query=query,
        matrix=matrix,
        mean_logit=mean_logit,
        operands=operands,
        rows=rows,
        scale=scale,
        batch=len(query),
        matrix_heads=len(matrix),
        at_once=at_once,
        after_append=int(after_append),
    )
    kernel.launch((max(1, min(-(-len(query) // at_once), kernel.blocks // heads)), heads), arguments, early)
    return operands, rows


def _matrices(fragments: Tensor | None, plan: Plan) -> int:
    """How many matrices `fused_fragments` made these of."""
    assert fragments is not None
    return fragments.numel() // (plan.layout.head_dim**2 // 2 + 1)


def _query_matrices(fragments: Tensor | None, plan: Plan) -> int:
    """How many matrices the queries' fragments for the decode kernel are of."""
    assert fragments is not None
    return len(fragments) if plan.rotated_queries else _matrices(fragments, plan)


def _rows(query: Tensor, plan: Plan) -> Tensor:
    """Memory for transformed queries, float32 of the queries' shape. Kernels read whole tiles of heads, of which the last may be
    short, so there is room for one more tile behind."""
    room = torch.empty(query.numel() + plan.tile_heads * query.shape[2], dtype=torch.float32, device=query.device)
    return room[: query.numel()].view(query.shape)


def _output_shape(query: Tensor, queries: int) -> tuple[int, int, int]:
    """Of outputs: a row for every query, where the query heads of all queries of a sequence are rows of one product."""
    return len(query) * queries, query.shape[1] // queries, query.shape[2]


@_decode.register_fake
def _(out: Tensor, *args: Any) -> Tensor:
    return out.new_empty(out.shape[:2], dtype=torch.float32)
