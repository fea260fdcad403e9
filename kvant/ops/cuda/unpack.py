"""Unpacks the stored tokens of a sequence, and rotates keys to their positions, by kernels/unpack.cu."""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvant.codecs import DTYPES
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, optional, pointer
from kvant.ops.cuda.bands import all_bands
from kvant.ops.cuda.config import ELEMENT_TYPES, overlay_config, page_config, scale_config
from kvant.ops.fused import rope_table
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
WARPS = 4
TILE = 16  # tokens of a warp
_PLANS: nvrtc.Numbered[UnpackPlan] = nvrtc.Numbered()


UnpackArguments = Arguments(
    "UnpackArguments",
    pages=pointer("const u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    block_table=pointer("const s64", "pages of the sequence"),
    overlay=pointer("const void", "[rows, OVERLAY_TOKENS, KV_HEADS, HEAD_DIM]"),
    overlay_row=pointer("const s64", "of the sequence"),
    sinks=pointer("const s64", "first tokens of the sequence that the overlay holds"),
    ring_start=pointer("const s64", "position from which on the overlay's ring holds the sequence"),
    mean=optional("const float", "[KV_HEADS, HEAD_DIM], subtracted from rows with a negative scale"),
    out=pointer("void", "[KV_HEADS, count, HEAD_DIM]"),
    first=int32("position of the first token, a multiple of 16"),
    count=int32("tokens"),
    seq_len=int32("tokens of the sequence"),
    packed_end=int32("position from which on tokens may be in the ring"),
)

RotateKeysArguments = Arguments(
    "RotateKeysArguments",
    keys=pointer("void", "[KV_HEADS, count, HEAD_DIM], in place"),
    cosine=pointer("const float", "[RoPE blocks, half]"),
    sine=pointer("const float", "[RoPE blocks, half]"),
    first=int32("position of the first token"),
    count=int32("tokens"),
    half=int32("rotated pairs of channels"),
    rope_block=int32("positions of a RoPE block"),
    rope_first=int32("RoPE position of the sequence's first token"),
)


@dataclasses.dataclass(frozen=True)
class UnpackPlan:
    """The kernels for one stream of a layout and the type of the rows that come out."""

    layout: Layout
    stream: StreamName
    dtype: str

    @functools.cached_property
    def text(self) -> str:
        layout, name = self.layout, self.stream
        config: dict[str, object] = {
            **page_config(layout),
            **overlay_config(layout, name),
            "VALUES": int(name == "value"),
            "OUT_TYPE": ELEMENT_TYPES[self.dtype],
            "WARPS": WARPS,
            "Stream": {
                **scale_config(layout, name),
                "AllBands": all_bands(layout, name),
                "FLAG": int(layout.format(name).mean_flag),
            },
        }
        return nvrtc.program("kernels/unpack.cu", config=config, arguments=[UnpackArguments, RotateKeysArguments])


@functools.lru_cache(maxsize=256)
def _kernel(made: UnpackPlan, name: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, name, device, WARPS * 32)


def unpack(
    store: LayerStore, name: StreamName, row: PagedBatch, n: int, first: int, last: int, dtype: torch.dtype
) -> Tensor:
    """Tokens [first, last) of a sequence of n as they are stored, from its pages and its overlay row: [heads, tokens, head_dim].
    `row` is a batch of that sequence alone; `first` is a multiple of 16."""
    assert first % TILE == 0 and first < last <= n
    window = store.stream(name).spec.window
    made = UnpackPlan(store.layout, name, str(dtype).removeprefix("torch."))
    return _unpack(
        store.pages,
        row.block_table,
        store.overlays[name],
        row.overlay_rows,
        row.sinks,
        row.ring_start[name],
        store.stream(name).codec.tensors.mean,
        first,
        last - first,
        n,
        max(window.packed_end(n), window.sink),
        _PLANS.number(made),
    )


@torch.library.custom_op("kvant::unpack", mutates_args=())
def _unpack(
    pages: Tensor,
    block_table: Tensor,
    overlay: Tensor,
    overlay_row: Tensor,
    sinks: Tensor,
    ring_start: Tensor,
    mean: Tensor | None,
    first: int,
    count: int,
    seq_len: int,
    packed_end: int,
    plan: int,
) -> Tensor:
    made = _PLANS[plan]
    layout = made.layout
    out = torch.empty(layout.heads, count, layout.head_dim, dtype=DTYPES[made.dtype], device=pages.device)
    arguments = UnpackArguments.fill(
        pages=pages,
        block_table=block_table,
        overlay=overlay,
        overlay_row=overlay_row,
        sinks=sinks,
        ring_start=ring_start,
        mean=mean,
        out=out,
        first=first,
        count=count,
        seq_len=seq_len,
        packed_end=packed_end,
    )
    kernel = _kernel(made, "kvant_unpack", pages.device)
    tiles = -(-count // TILE)
    kernel.launch((max(1, min(-(-tiles // WARPS), 4 * kernel.blocks // layout.heads)), layout.heads), arguments)
    return out


@_unpack.register_fake
def _(pages: Tensor, *args: object) -> Tensor:
    count, plan = args[-4], args[-1]
    assert isinstance(count, int) and isinstance(plan, int)
    made = _PLANS[plan]
    return pages.new_empty(made.layout.heads, count, made.layout.head_dim, dtype=DTYPES[made.dtype])


def rotate_keys(store: LayerStore, keys: Tensor, first: int, blocks: int) -> None:
    """Rotates unpacked keys [heads, tokens, head_dim] of a sequence, from its token `first` on, by the start of their RoPE block,
    in place: stored keys are rotated by their offset inside it alone. The tokens lie in the first `blocks` RoPE blocks."""
    rope = store.key.rope
    assert rope is not None and keys.is_contiguous()
    cosine, sine = rope_table(store, blocks)
    if cosine.shape[1] % 2:
        raise ValueError(f"RoPE must rotate an even number of pairs of channels, got {cosine.shape[1]}")
    made = UnpackPlan(store.layout, "key", str(keys.dtype).removeprefix("torch."))
    kernel = _kernel(made, "kvant_rotate_keys", keys.device)
    arguments = RotateKeysArguments.fill(
        keys=keys,
        cosine=cosine,
        sine=sine,
        first=first,
        count=keys.shape[1],
        half=cosine.shape[1],
        rope_block=store.key.spec.effective_rope_block,
        rope_first=rope.first,
    )
    items = keys.shape[0] * keys.shape[1] * (cosine.shape[1] // 2)
    kernel.launch((max(1, min(-(-items // (WARPS * 32)), 8 * kernel.blocks)), 1), arguments)
