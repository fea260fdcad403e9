"""Decode attention over pages of 16-bit numbers by kernels/decode_full.cu: serves `full`, and packed pages are compared with it."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from kvant.layout import Layout
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, float32, int32, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES, page_config
from kvant.ops.cuda.counters import counters
from kvant.ops.cuda.device import copies_in_bulk, shared_memory
from kvant.ops.cuda.geometry import heads_at_once
from kvant.ops.cuda.refusals import MAX_HEAD_DIM, refuse_machine
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
WARPS, ALONE_WARPS = 4, 6  # of a CTA, and of one that has a multiprocessor for itself
STATIC_BYTES = 2048  # of static shared memory, at most
_PLANS: nvrtc.Numbered[FullPlan] = nvrtc.Numbered()


DecodeFullArguments = Arguments(
    "DecodeFullArguments",
    query=pointer("const void", "[batch, KV_HEADS * GROUP, HEAD_DIM]"),
    out=pointer("void", "as the queries"),
    lse=pointer("float", "[batch, KV_HEADS * GROUP]: log-sum-exps of the logits"),
    pages=pointer("const u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    block_table=pointer("const s64", "[batch, block_table_width]: page numbers"),
    seq_lens=pointer("const s64", "[batch]: tokens of a sequence"),
    sink_logits=optional("const float", "[KV_HEADS * GROUP]: logits in the softmax's denominator alone"),
    partial=pointer("float", "[parts, 2, PARTIAL]: partial results"),
    arrivals=pointer("int", "[batch, head tiles]: counters, zero before and after"),
    scale=float32("of logits, times log2(e); 2 log2(e) / cap times with a soft cap"),
    cap=float32("the soft cap times log2(e)"),
    batch=int32("sequences"),
    block_table_width=int32("pages of a row of the block table"),
    sliding_window=int32("tokens that are attended to; 0 for all"),
)


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the kernel cannot serve a layout on a device, or None."""
    reason = refuse_machine(device, refuse_layout(layout))
    if reason is not None:
        return reason
    if shared_memory(device)[0] < FullPlan(layout, 1, False, False, (0, 0)).warp_bytes + STATIC_BYTES:
        return f"tiles of head_dim {layout.head_dim} are more than this GPU's shared memory holds"
    return None


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    types = {section.dtype for section in layout.sections}
    for name, stream in layout.recipe.streams.items():
        if not layout.format(name).is_raw:
            return f"it reads numbers as they come, and the {name}s are coded by {layout.format(name).codec}"
        if stream.transforms or stream.rope != "post":
            return f"it reads numbers as they come, and the {name}s are transformed"
        if layout.overlay_tokens(name):
            return f"it reads pages alone, and some of the {name}s are in a window"
    if types not in ({"bfloat16"}, {"float16"}):
        return f"it reads keys and values of one 16-bit type, and they are {' and '.join(sorted(types))}"
    if layout.head_dim % 32 or layout.head_dim > MAX_HEAD_DIM:
        return f"it reads head dims that are multiples of 32 up to {MAX_HEAD_DIM}, and this one is {layout.head_dim}"
    return None


def value_offset(layout: Layout) -> int:
    """First byte of a head's values in its page."""
    return next(section.offset for section in layout.sections if section.stream == "value")


@dataclasses.dataclass(frozen=True)
class FullPlan:
    """A kernel for one layout, number of query heads a KV head, and way to call it."""

    layout: Layout
    group: int
    softcap: bool
    bulk: bool  # whether the GPU copies in bulk (sm_90 on)
    shared: tuple[int, int]  # as `shared_memory`
    tuned: tuple[tuple[str, int], ...] = ()  # constants to override, for measuring
    sink_logits: bool = False

    @property
    def dtype(self) -> str:
        return self.layout.sections[0].dtype

    @property
    def tile_heads(self) -> int:
        return heads_at_once(self.group, self.layout.head_dim)

    @property
    def stages(self) -> int:
        """Keys or values of a tile that a warp has in flight: 16 KiB, and at least those of two tiles."""
        return dict(self.tuned).get("STAGES", max(4, (16 << 10) // self.tile_bytes))

    @property
    def tile_bytes(self) -> int:
        """Keys or values of 16 tokens."""
        return 32 * self.layout.head_dim

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: its tiles in flight, then its outputs."""
        return max(self.stages * self.tile_bytes, 4 * self.tile_heads * self.layout.head_dim)

    @property
    def warps(self) -> int:
        two = 2 * (WARPS * self.warp_bytes + STATIC_BYTES) <= self.shared[1]
        fit = (self.shared[0] - STATIC_BYTES) // self.warp_bytes
        return dict(self.tuned).get("WARPS", max(1, min(WARPS if two else ALONE_WARPS, fit)))

    @property
    def blocks(self) -> int:
        """CTAs that a multiprocessor is to hold."""
        enough = 12 if self.layout.head_dim * -(-self.tile_heads // 8) <= 128 else 8  # warps that its registers are for
        return max(1, min(enough // self.warps, self.shared[1] // (self.dynamic_bytes + STATIC_BYTES)))

    @property
    def dynamic_bytes(self) -> int:
        return self.warps * self.warp_bytes

    @property
    def constants(self) -> dict[str, object]:
        layout = self.layout
        return {
            **page_config(layout),
            "TILE_BYTES": self.tile_bytes,
            "VALUE_OFFSET": value_offset(layout),
            "ELEMENT_TYPE": ELEMENT_TYPES[self.dtype],
            "GROUP": self.group,
            "TILE_HEADS": self.tile_heads,
            "QUERY_TILES": -(-self.group // self.tile_heads),
            "SOFTCAP": int(self.softcap),
            "SINK_LOGITS": int(self.sink_logits),
            "STAGES": self.stages,
            "WARPS": self.warps,
            "WARP_BYTES": self.warp_bytes,
            "MIN_CTAS": self.blocks,
            **dict(self.tuned),
        }

    @functools.cached_property
    def text(self) -> str:
        return nvrtc.program(
            "kernels/decode_full.cu",
            config=self.constants,
            arguments=[DecodeFullArguments],
            defines={"BULK": int(self.bulk)},
        )


@functools.lru_cache(maxsize=64)
def _kernel(plan: FullPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(plan.text, "kvant_decode_full", device, plan.warps * 32, plan.dynamic_bytes)


def decode_with_lse(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    tuned: tuple[tuple[str, int], ...] = (),
) -> tuple[Tensor, Tensor]:
    """As the reference's `decode`, and the logarithm of the sum of exponentials of every query's scores and its sink logit, float32
    [sequences, query heads]. Queries are of the pages' type."""
    layout = store.layout
    check_queries(query, layout, [layout.sections[0].dtype])
    batch = one_query_each(batch, queries_per_sequence(query, batch, layout))
    sink_logits = check_sink_logits(sink_logits, query)
    group = query.shape[1] // layout.heads
    plan = _plan(layout, group, softcap is not None, query.device, tuned, sink_logits is not None)
    return _decode(
        query.contiguous(),
        store.pages,
        batch.block_table,
        batch.seq_lens,
        sink_logits,
        plan,
        scale,
        softcap or 0.0,
        sliding_window or 0,
    )


decode = register_decode("cuda-full", refuse, rank=9, capturable=True)(decode_with_lse)


@functools.lru_cache(maxsize=64)
def _plan(
    layout: Layout,
    group: int,
    softcap: bool,
    device: torch.device,
    tuned: tuple[tuple[str, int], ...],
    sink_logits: bool,
) -> int:
    bulk = copies_in_bulk(device)
    return _PLANS.number(FullPlan(layout, group, softcap, bulk, shared_memory(device), tuned, sink_logits))


@torch.library.custom_op("kvant::decode_full", mutates_args=())
def _decode(
    query: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sink_logits: Tensor | None,
    plan: int,
    scale: float,
    softcap: float,
    sliding_window: int,
) -> tuple[Tensor, Tensor]:
    made = _PLANS[plan]
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    if not len(query):
        return out, lse
    kernel, heads = _kernel(made, query.device), -(-made.group // made.tile_heads) * made.layout.heads
    parts = 2 * (kernel.blocks + kernel.blocks // 3)  # a CTA has at most two; a few more where work is cut per head
    size = parts * made.tile_heads * (made.layout.head_dim + 4)
    partial = torch.empty(size, dtype=torch.float32, device=query.device)
    arrivals = counters(query.device, len(query) * heads)
    log2e = math.log2(math.e)
    arguments = DecodeFullArguments.fill(
        query=query,
        out=out,
        lse=lse,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
        sink_logits=sink_logits,
        partial=partial,
        arrivals=arrivals,
        scale=2.0 * log2e * scale / softcap if softcap else scale * log2e,
        cap=softcap * log2e,
        batch=len(query),
        block_table_width=block_table.shape[1],
        sliding_window=sliding_window,
    )
    kernel.launch((kernel.blocks, 1), arguments)
    return out, lse


@_decode.register_fake
def _(query: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
