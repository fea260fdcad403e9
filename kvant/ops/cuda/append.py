"""Appends any number of new tokens, in one launch. Token-wise codes are written by kernels/append.cu; for prompts by
kernels/append_tiles.cu; where rows have a matrix or are unrotated, and for few tokens, by kernels/append_step.cu. Rows of float32, of
other head dims than 64, 96 and 128 and with RoPE over some of their channels are multiplied by launches of transform_kv before
kernels/append.cu. Product quantization is written by append_pq, keys that are coded in groups of tokens by append_groups."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import Literal

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cuda import append_groups, append_plan, append_pq, fit_subspace, nearest_centroids, nvrtc, refusals
from kvant.ops.cuda.append_matrices import AppendTransforms, TileMatrix, step_matrix, tile_matrix
from kvant.ops.cuda.append_plan import (
    STEP_WARPS,
    WARPS,
    AppendArguments,
    AppendPlan,
    is_banded,
    steppable,
    tileable,
)
from kvant.ops.cuda.config import ELEMENT_TYPES
from kvant.ops.cuda.device import copies_in_bulk
from kvant.ops.cuda.transform_kv import transform_rows
from kvant.ops.fused import TransformKind, blocks_of, rope_table
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
TILE_ROWS = 8192  # tokens times heads from which on tiles of 16 tokens keep a GPU busy
TENSOR_CORE_TYPES = (torch.bfloat16, torch.float16)  # of rows that tensor cores multiply
EARLY_STEPS = True  # whether kernels/append_step.cu starts before the kernel before it has ended, where the GPU can
WARPGROUPS = (9, 0)  # the compute capability whose warpgroups multiply tiles
Way = Literal["rows", "step", "tiles"]  # kernels/append.cu, append_step.cu, append_tiles.cu
_PLANS: nvrtc.Numbered[AppendPlan] = nvrtc.Numbered()


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the kernels cannot append to a layout on a device, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    reason = refuse_layout(layout) or refusals.refuse(layout, device)
    if reason is not None:
        return reason
    if layout.recipe.key.corrector is not None:
        return fit_subspace.refuse_memory(layout, device)
    if nearest_centroids.serves(layout):
        return nearest_centroids.refuse_memory(layout, device)
    return append_pq.refuse_memory(layout, device) if append_pq.serves(layout) else None


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    if layout.recipe.key.groupwise:
        return append_groups.refuse_layout(layout)
    return refusals.refuse_layout(layout) if append_pq.serves(layout) else append_plan.refuse_layout(layout)


@functools.lru_cache(maxsize=256)
def _kernel(made: AppendPlan, device: torch.device, tiled: bool) -> nvrtc.Kernel:
    if made.step:
        return nvrtc.Kernel(made.text, "kvant_append_step", device, STEP_WARPS * 32)
    if tiled:
        return nvrtc.Kernel(made.text, "kvant_append_tiles", device, made.tile_warps * 32, made.shared)
    return nvrtc.Kernel(made.text, "kvant_append", device, WARPS * 32)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The new rows of a stream, and what a kernel does to them before they are coded: x = H diag(signs) x or x M, less the mean."""

    rows: Tensor  # [tokens, heads, head_dim]
    weights: Tensor | None  # float32 [heads, head_dim], of errors
    flag_mean: Tensor | None  # float32 [heads, head_dim], subtracted from rows whose scale is stored negative
    order: int = 1  # of the Hadamard; 1 where there is none
    signs: Tensor | None = None  # float32 [head_dim]
    mean: Tensor | None = None  # float32 [heads, head_dim]
    matrix: Tensor | None = None  # int32 [1 or heads, parts, ...], see append_matrices
    entry_step: float = 1.0  # of the matrix, see TileMatrix


@register("append", "cuda", refuse, rank=10, capturable=True)
def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """As the reference's `append`."""
    rows: dict[StreamName, Tensor] = {"key": key, "value": value}
    for name, x in rows.items():
        if str(x.dtype).removeprefix("torch.") not in ELEMENT_TYPES:
            raise ValueError(f"{name}s must be {', '.join(ELEMENT_TYPES)}, got {x.dtype}")
    if store.layout.recipe.key.groupwise:
        append_groups.append(store, key, value, batch, query)
    elif append_pq.serves(store.layout):
        append_pq.append(store, rows, batch)
    else:
        _append_tokenwise(store, key, value, batch)


def _append_tokenwise(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch) -> None:
    way = _way(store, key, value)
    # An early start is safe only if an earlier call made the matrices: the kernel reads them before its wait.
    matrices_made = bool(store.derive(AppendTransforms).step)
    k, v = _rows(store, "key", key, batch, way), _rows(store, "value", value, batch, way)
    rope_block, rope_first, cosine, sine = 0, 0, None, None
    if way != "rows" and store.key.rope is not None:
        rope_block, rope_first = store.key.spec.effective_rope_block, store.key.rope.first
        tokens = batch.block_table.shape[1] * store.layout.page_tokens + store.layout.recipe.origin
        cosine, sine = rope_table(store, blocks_of(tokens, rope_first, rope_block))
    raw = readable_rows(key) if way == "rows" and store.key.spec.raw_window else None
    books = nearest_centroids.Centroids(None, None)
    indices: tuple[Tensor | None, Tensor | None] = (None, None)
    if nearest_centroids.serves(store.layout):
        books = store.derive(nearest_centroids.Centroids)
        indices = nearest_centroids.nearest_centroids(
            store, _searched(store, "key", k), _searched(store, "value", v), batch
        )
    made = AppendPlan(
        store.layout,
        (_type(k.rows), _type(v.rows)),
        (k.order, v.order),
        (k.mean is not None, v.mean is not None),
        (_parts(k.matrix), _parts(v.matrix)),
        rope_block,
        way == "step",
        way == "tiles" and torch.cuda.get_device_capability(key.device) == WARPGROUPS,
        EARLY_STEPS and way == "step" and copies_in_bulk(key.device),
        copies_in_bulk(key.device),
        _type(key) if raw is not None else "bfloat16",
    )
    _append(
        store.pages,
        store.overlays["key"],
        store.overlays["value"],
        k.rows,
        v.rows,
        raw,
        k.mean,
        v.mean,
        k.signs,
        v.signs,
        k.weights,
        v.weights,
        k.flag_mean,
        v.flag_mean,
        k.matrix,
        v.matrix,
        books.key,
        books.value,
        *indices,
        cosine,
        sine,
        batch.slot_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        batch.overlay_rows,
        [store.key.codec.tensors.clip, store.value.codec.tensors.clip],
        [k.entry_step, v.entry_step],
        rope_first,
        made.early and matrices_made,
        _PLANS.number(made),
    )


def _way(store: LayerStore, key: Tensor, value: Tensor) -> Way:
    """Which kernel appends these rows."""
    layout, rope = store.layout, store.key.rope
    if any(x.dtype not in TENSOR_CORE_TYPES for x in (key, value)):
        return "rows"
    forward = store.derive(AppendTransforms).forward
    if nearest_centroids.serves(layout) and any(fused.kind is TransformKind.MATRIX for fused in forward.values()):
        return "rows"  # the search for centroids takes rows that are multiplied already
    whole = rope is None or 2 * len(rope.inv_freq) == layout.head_dim  # RoPE rotates all channels
    tiled = tileable(layout) and (rope is None or is_banded(layout.format("key")))
    if whole and tiled and len(key) * layout.heads >= TILE_ROWS:
        return "tiles"
    multiplied = rope is not None or any(fused.kind is TransformKind.MATRIX for fused in forward.values())
    return "step" if multiplied and whole and steppable(layout) else "rows"


def allocates(store: LayerStore, dtype: torch.dtype) -> bool:
    """Whether an append of a decode step, of readable rows, takes memory that is free again as soon as its kernel is launched. A
    kernel that starts before that one has ended may be given this memory."""
    layout = store.layout
    if layout.recipe.key.groupwise or append_pq.serves(layout) or nearest_centroids.serves(layout):
        return True
    row = torch.empty(1, layout.heads, layout.head_dim, dtype=dtype, device="meta")
    forward = store.derive(AppendTransforms).forward
    multiplied = store.key.rope is not None or any(fused.kind is TransformKind.MATRIX for fused in forward.values())
    return multiplied and _way(store, row, row) == "rows"


def _searched(store: LayerStore, name: StreamName, given: _Rows) -> nearest_centroids.SearchedRows:
    """The rows of a stream for the search for centroids. Those that a launch before has transformed are searched as they are."""
    forward = store.derive(AppendTransforms).forward[name]
    if forward.kind is TransformKind.MATRIX:
        return nearest_centroids.SearchedRows(given.rows, 1, None, None)
    signs = forward.tensor if forward.kind is TransformKind.HADAMARD else None
    return nearest_centroids.SearchedRows(given.rows, forward.order, signs, forward.mean)


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _parts(matrix: Tensor | None) -> int:
    return 0 if matrix is None else matrix.shape[1]


def _rows(store: LayerStore, name: StreamName, x: Tensor, batch: PagedBatch, way: Way) -> _Rows:
    """What the kernel is given of a stream."""
    layout, stream, tensors = store.layout, store.stream(name), store.stream(name).codec.tensors
    forward = store.derive(AppendTransforms).forward[name]
    multiplied = stream.rope is not None or forward.kind is TransformKind.MATRIX
    hadamard = forward.kind is TransformKind.HADAMARD
    if way == "rows" and multiplied:
        return _Rows(transform_rows(store, name, x, batch).contiguous(), tensors.weights, tensors.mean)
    rows = x.contiguous() if nearest_centroids.serves(layout) else readable_rows(x)
    made: TileMatrix | None = None
    if way == "step" and multiplied:
        made = step_matrix(store, name)
        made = made._replace(weights=tensors.weights, flag_mean=tensors.mean)
    # at head_dim 96, or of groups with a scale each, the blocks of a Hadamard do not end where the shares of lanes do
    apart = layout.head_dim == 96 or layout.format(name).scale_groups > 1
    if way == "tiles" and (multiplied or is_banded(layout.format(name)) or (hadamard and apart)):
        made = tile_matrix(store, name, x.dtype)
    if made is not None:
        return _Rows(
            rows,
            made.weights,
            made.flag_mean,
            made.order,
            mean=made.mean,
            matrix=made.matrix,
            entry_step=made.entry_step,
        )
    signs = forward.tensor if hadamard else None
    return _Rows(rows, tensors.weights, tensors.mean, forward.order, signs, forward.mean)


def readable_rows(x: Tensor) -> Tensor:
    """Rows [tokens, heads, head_dim] as the kernels can read them: those of a token lie together, tokens may be apart, as where
    keys and values are parts of one product. Otherwise a copy."""
    together = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    words = 16 // x.element_size()  # elements of what a lane loads at once, at most
    aligned = x.stride(0) % words == 0 and x.storage_offset() % words == 0
    return x if together and aligned and x.stride(0) < 1 << 31 else x.contiguous()


@torch.library.custom_op("kvant::append", mutates_args=("pages", "overlay_key", "overlay_value"))
def _append(
    pages: Tensor,
    overlay_key: Tensor,
    overlay_value: Tensor,
    key: Tensor,
    value: Tensor,
    raw_key: Tensor | None,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    key_signs: Tensor | None,
    value_signs: Tensor | None,
    key_weights: Tensor | None,
    value_weights: Tensor | None,
    key_flag_mean: Tensor | None,
    value_flag_mean: Tensor | None,
    key_matrix: Tensor | None,
    value_matrix: Tensor | None,
    key_books: Tensor | None,
    value_books: Tensor | None,
    key_indices: Tensor | None,
    value_indices: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    clips: list[float],
    units: list[float],
    rope_first: int,
    early: bool,
    plan: int,
) -> None:
    made = _PLANS[plan]
    if not len(key):
        return
    heads, last = made.layout.heads, made.layout.head_dim - 1
    places = [clip * last for clip in clips]  # of the clip among the magnitudes of a row in rising order
    tiled = made.tiled and len(key) * heads >= TILE_ROWS
    arguments = AppendArguments.fill(
        key=key,
        value=value,
        key_mean=key_mean,
        value_mean=value_mean,
        key_signs=key_signs,
        value_signs=value_signs,
        key_weights=key_weights,
        value_weights=value_weights,
        key_flag_mean=key_flag_mean,
        value_flag_mean=value_flag_mean,
        key_matrix=key_matrix,
        value_matrix=value_matrix,
        key_books=key_books,
        value_books=value_books,
        key_indices=key_indices,
        value_indices=value_indices,
        pages=pages,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        overlay_rows=overlay_rows,
        raw_key=raw_key,
        overlay_key=overlay_key,
        overlay_value=overlay_value,
        cosine=cosine,
        sine=sine,
        key_matrix_unit=units[0],
        value_matrix_unit=units[1],
        key_clip_share=places[0] - int(places[0]),
        value_clip_share=places[1] - int(places[1]),
        key_clip_start=_normal_clip(clips[0], last)[0],
        value_clip_start=_normal_clip(clips[1], last)[0],
        key_clip_gap=_normal_clip(clips[0], last)[1],
        value_clip_gap=_normal_clip(clips[1], last)[1],
        key_clip_drop=last - int(places[0]),
        value_clip_drop=last - int(places[1]),
        key_matrix_stride=_matrix_stride(key_matrix),
        value_matrix_stride=_matrix_stride(value_matrix),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        raw_stride=0 if raw_key is None else raw_key.stride(0),
        rope_first=rope_first,
        rope_blocks=1 if cosine is None else len(cosine),
        tokens=len(key),
        batch=len(seq_lens),
        sequence_rate=len(seq_lens) / len(key),
        half_batch=nvrtc.half_of(len(seq_lens)),
    )
    kernel = _kernel(made, key.device, tiled)
    if made.step:  # CTAs of a head and stream each, as many as the GPU holds: each keeps its matrix in registers
        across = max(1, min(-(-len(key) // STEP_WARPS), kernel.blocks // (2 * heads)))
        kernel.launch((across, 2 * heads), arguments, early)
        return
    tiles = -(-len(key) // 16)
    if tiled and any(made.parts):  # CTAs of a head each, which keep its matrices in shared memory
        ctas = heads * max(1, min(-(-tiles // made.tile_warps), kernel.blocks // heads))
    elif tiled:  # CTAs of keys and CTAs of values
        ctas = 2 * -(-tiles * heads // made.tile_warps)
    else:
        ctas = -(-(-(-len(key) // 2) * heads) // WARPS)
    kernel.launch((ctas, 1), arguments)


@functools.lru_cache(maxsize=1024)
def _normal_clip(clip: float, count: int) -> tuple[float, float]:
    """For `count` normal numbers, in units of their mean magnitude: this quantile of the magnitudes, and how far apart they are
    there."""
    mean, z = math.sqrt(2 / math.pi), statistics.NormalDist().inv_cdf(0.5 + 0.5 * min(clip, 1 - 0.5 / count))
    return z / mean, 1 / (count * 2 * statistics.NormalDist().pdf(z) * mean)


def _matrix_stride(matrix: Tensor | None) -> int:
    return 0 if matrix is None or len(matrix) == 1 else matrix.stride(0) // 4


@_append.register_fake
def _(*args: object) -> None:
    return None
