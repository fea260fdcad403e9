"""Appends by kernels/append_groups.cu, where keys are coded per channel over groups of tokens; SQuat's with their correction.
What is launched depends on the shapes alone: one launch for a step, in which a CTA appends a head of a sequence and codes a group
where one is complete; two for prompts. Where keys are corrected, fit_subspace is launched before."""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvant.codecs.format import ScaleKind
from kvant.correctors.subspace import Subspace
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import fit_subspace, nvrtc, refusals
from kvant.ops.cuda.arguments import UNROTATE_FIELDS, Arguments, int32, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES, page_config
from kvant.ops.fused import blocks_of, rope_table
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
WARPS = 8
STEP_SPARE = 32  # new tokens beside one of every sequence, at most, for a CTA to append all of a sequence's: one may have them all
_PLANS: nvrtc.Numbered[GroupPlan] = nvrtc.Numbered()


def refuse_layout(layout: Layout) -> str | None:
    """Why the kernels cannot append to a layout whose keys are coded in groups, or None."""
    key, value, dim = layout.format("key"), layout.format("value"), layout.head_dim
    if not key.is_channelwise:
        return f"it writes token-wise codes and keys per channel, and the keys are coded by {key.codec}"
    if not value.is_tokenwise or value.scales is None or value.scales.kind is ScaleKind.ALONE:
        return f"beside keys per channel it writes affine values, and they are coded by {value.codec}"
    for name, stream in layout.recipe.streams.items():
        if stream.corrector is not None and (name == "value" or not isinstance(stream.corrector, Subspace)):
            return f"it writes codes as they are, and those of the {name}s are corrected by {type(stream.corrector).__name__}"
    reason = fit_subspace.refuse_layout(layout) if layout.recipe.key.corrector is not None else None
    if reason is not None:
        return reason
    if value.scales.kind is not ScaleKind.MIN or value.encoding.clip or value.encoding.search != 1:
        return "it writes values by their whole range and minimum, and they are clipped, searched or have integer zero points"
    width = dim // value.scale_groups
    if width != 16 and width % 32:
        return f"it writes scales of 16 or a multiple of 32 channels, and those of the values have {width}"
    return refusals.refuse_layout(layout)


AppendGroupsArguments = Arguments(
    "AppendGroupsArguments",
    key=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM], transformed"),
    value=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM], transformed"),
    pages=pointer("u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    block_table=pointer("const s64", "[batch, table_width], pages of a sequence"),
    query_start_loc=pointer("const s64", "[batch + 1], first new token of a sequence"),
    seq_lens=pointer("const s64", "[batch], tokens of a sequence with its new ones"),
    overlay_rows=pointer("const s64", "[batch], row of the overlays"),
    key_ring_start=pointer("const s64", "[batch], position before which the ring of keys holds nothing"),
    overlay_key=pointer("void", "[rows, OVERLAY_TOKENS of keys, KV_HEADS, HEAD_DIM]"),
    overlay_value=pointer("void", "[rows, OVERLAY_TOKENS of values, KV_HEADS, HEAD_DIM]"),
    subspace=optional("const float", "[rows, KV_HEADS, RANK, HEAD_DIM], where keys are corrected"),
    **UNROTATE_FIELDS,
    tokens=int32("new tokens"),
    batch=int32("sequences"),
    half_batch=int32("largest power of two below the batch, or 0: where a binary search begins"),
    table_width=int32("pages of a row of the block table"),
)


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """The kernels for one layout and types of keys and values."""

    layout: Layout
    types: tuple[str, str]

    @property
    def rank(self) -> int:
        corrector = self.layout.recipe.key.corrector
        return corrector.rank if isinstance(corrector, Subspace) else 0

    @property
    def group(self) -> int:
        return self.layout.recipe.key.codec.group_tokens

    @property
    def spare(self) -> int:
        """Groups that the tail of a sequence may complete beside those that new tokens fill alone, and room for rounding."""
        return self.layout.recipe.key.window.flush // self.group + 2

    @property
    def dynamic_bytes(self) -> int:
        """Of a group: 16-bit numbers, then codes; where they are corrected, what SubspaceShared holds."""
        group, dim, rank = self.group, self.layout.head_dim, self.rank
        if not rank:
            return group * dim * 2
        rows = -(-group * (dim + 1) * 4 // 16) * 16
        return rows + 2 * group * rank * 8 + rank * rank * 8 + rank * dim * 4 + group * dim * 2

    @functools.cached_property
    def text(self) -> str:
        layout, window = self.layout, self.layout.recipe.key.window
        sections = {(s.stream, s.names[0]): s for s in layout.sections}
        high, index = sections.get(("key", "high")), sections.get(("key", "index"))
        corrector = layout.recipe.key.corrector
        assert corrector is None or isinstance(corrector, Subspace)
        config: dict[str, object] = {
            **page_config(layout),
            "WARPS": WARPS,
            "OVERLAY_TYPE": ELEMENT_TYPES[layout.overlay_dtype],
            "VALUE_WINDOW_TYPE": ELEMENT_TYPES[layout.overlay_dtype],
            "ORIGIN": layout.recipe.origin,
            "SINK": window.sink,
            "KEY_GROUP": self.group,
            "SPARE_GROUPS": self.spare,
            "KEY_RECENT": window.recent,
            "KEY_FLUSH": window.flush,
            "BOOSTED": high.width if high else 0,
            "HIGH_OFFSET": high.offset if high else 0,
            "INDEX_OFFSET": index.offset if index else 0,
            "ROPE_BLOCK": layout.recipe.key.effective_rope_block,
            "RANK": self.rank,
            "BLOCK_CHANNELS": (corrector.block if corrector else 0) or layout.head_dim // 2,
            "SUBSPACE_WEIGHT": corrector.weight if corrector else 0.0,
            "VALUE_GROUPS": layout.format("value").scale_groups,
            "VALUE_ORDER_GROUPS": layout.scale_groups("value"),
            "Key": self._stream("key", 0),
            "Value": self._stream("value", 1),
        }
        return nvrtc.program("kernels/append_groups.cu", config=config, arguments=[AppendGroupsArguments])

    def _stream(self, name: StreamName, i: int) -> dict[str, object]:
        layout, ring = self.layout, self.layout.recipe.streams[name].window.ring
        planes = [s for s in layout.sections if s.stream == name and s.kind == "code"]
        (scales,) = (s for s in layout.sections if s.stream == name and s.names[0] == "scale")
        return {
            "IN_TYPE": ELEMENT_TYPES[self.types[i]],
            "CodePlanes": f"Planes<{', '.join(f'Plane<{s.bits}, {s.shift}, {s.offset}>' for s in planes)}>",
            "BITS": sum(s.bits for s in planes),
            "SCALE_TYPE": ELEMENT_TYPES[scales.dtype],
            "SCALE_OFFSET": scales.offset,
            "RING": max(1, ring),
            "RING_TOKENS": ring,
            "OVERLAY_TOKENS": layout.overlay_tokens(name),
        }


@functools.lru_cache(maxsize=256)
def _kernel(made: GroupPlan, name: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, name, device, WARPS * 32, 0 if name == "kvant_append_tokens" else made.dynamic_bytes)


def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """As the reference's `append`, for layouts that `refuse_layout` lets through. Transforms are done in torch before."""
    cosine, sine, first = None, None, 0
    if store.key.rope is not None:
        first, layout = store.key.rope.first, store.layout
        tokens = batch.block_table.shape[1] * layout.page_tokens + layout.recipe.origin
        cosine, sine = rope_table(store, blocks_of(tokens, first, store.key.spec.effective_rope_block))
    if store.states:
        if query is None:
            raise ValueError(
                f"recipe {store.layout.recipe.name} learns from queries: append needs the new tokens' queries"
            )
        fit_subspace.fit(store, query, batch, cosine, sine)
    rows: dict[StreamName, Tensor] = {"key": key, "value": value}
    for name, x in rows.items():
        stream = store.stream(name)
        x = stream.forward(x.float()) if stream.transforms else x
        rows[name] = x.contiguous()
    types = tuple(str(x.dtype).removeprefix("torch.") for x in rows.values())
    _append_groups(
        store.pages,
        store.overlays["key"],
        store.overlays["value"],
        rows["key"],
        rows["value"],
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.overlay_rows,
        batch.ring_start["key"],
        store.states.get("key"),
        cosine,
        sine,
        first,
        _PLANS.number(GroupPlan(store.layout, types)),  # type: ignore[arg-type]
    )


@torch.library.custom_op("kvant::append_groups", mutates_args=("pages", "overlay_key", "overlay_value"))
def _append_groups(
    pages: Tensor,
    overlay_key: Tensor,
    overlay_value: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    key_ring_start: Tensor,
    subspace: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    rope_first: int,
    plan: int,
) -> None:
    made = _PLANS[plan]
    tokens, batch, heads = len(key), len(seq_lens), made.layout.heads
    if not tokens:
        return
    arguments = AppendGroupsArguments.fill(
        key=key,
        value=value,
        pages=pages,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        overlay_rows=overlay_rows,
        key_ring_start=key_ring_start,
        overlay_key=overlay_key,
        overlay_value=overlay_value,
        subspace=subspace,
        cosine=cosine,
        sine=sine,
        rope_first=rope_first,
        rope_blocks=1 if cosine is None else len(cosine),
        rope_half=0 if cosine is None else cosine.shape[1],
        tokens=tokens,
        batch=batch,
        half_batch=nvrtc.half_of(batch),
        table_width=block_table.shape[1],
    )
    if tokens <= batch + STEP_SPARE:
        _kernel(made, "kvant_append_sequences", key.device).launch((batch, heads), arguments)
        return
    units = tokens // made.group + batch * made.spare
    # groups first: they read the ring, which the second kernel overwrites
    _kernel(made, "kvant_append_groups", key.device).launch((units, heads), arguments)
    _kernel(made, "kvant_append_tokens", key.device).launch((-(-tokens * heads // WARPS), 1), arguments)


@_append_groups.register_fake
def _(*args: object) -> None:
    return None
