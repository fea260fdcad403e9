"""Stored tokens of a sequence by the kernel in unpack.cu, and keys rotated to their positions."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from kvant.codecs import DTYPES
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.plan import META_KINDS, ONE, TYPES, page_constants, stored_bands, window_constants
from kvant.ops.fused import rope_table
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
WARPS = 4
TILE = 16  # tokens of a warp; the first token of a stretch is a tile's first
_PLANS: nvrtc.Numbered[UnpackPlan] = nvrtc.Numbered()


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "table", "window", "owner", "sinks", "exact", "mean", "out")),
        *((name, ctypes.c_int) for name in ("first", "count", "n", "frontier")),
    ]


class _ForthArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "cosine", "sine")),
        *((name, ctypes.c_int) for name in ("first", "count", "half", "size", "offset")),
    ]


@dataclasses.dataclass(frozen=True)
class UnpackPlan:
    """A kernel for one stream of a layout and type of what comes out."""

    layout: Layout
    stream: StreamName
    dtype: str

    @functools.cached_property
    def text(self) -> str:
        layout, name = self.layout, self.stream
        (meta,) = (s for s in layout.sections if s.stream == name and s.kind == "meta")
        constants: dict[str, object] = {
            **page_constants(layout),
            "VALUES": int(name == "value"),
            "BANDS": f"AllBands<{', '.join(self._bands())}>",
            "META": META_KINDS[meta.names],
            "META_TYPE": TYPES[meta.dtype],
            "META_OFFSET": meta.offset,
            "FLAG": int(getattr(layout.recipe.streams[name].codec, "flag", False)),
            **window_constants(layout, name),
            "OUT_TYPE": TYPES[self.dtype],
            "WARPS": WARPS,
        }
        return nvrtc.program("kernels/unpack.cu", defines=constants)

    def _bands(self) -> list[str]:
        """Bands of the stream in the kernel's words, those without codes included, wherever they lie."""
        out, end, dim = [], 0, self.layout.head_dim
        for band in [*stored_bands(self.layout, self.stream), None]:
            first = dim if band is None else band.first
            if end < first:
                out.append(f"Band<{first - end}, 0, 0, 0, {end}, 0>")
            if band is None:
                break
            planes = [s for s in self.layout.sections if s.stream == self.stream and s.names == (band.field,)]
            low, high = planes[0].offset, planes[1].offset if len(planes) > 1 else 0
            out.append(f"Band<{band.width}, {band.bits}, {low}, {high}, {band.first}, {round(ONE * band.step)}>")
            end = band.first + band.width
        return out


@functools.lru_cache(maxsize=256)
def _kernel(made: UnpackPlan, name: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, name, device, WARPS * 32)


def unpack(
    store: LayerStore, name: StreamName, row: PagedBatch, n: int, first: int, last: int, dtype: torch.dtype
) -> Tensor:
    """Tokens [first, last) of a sequence of n as they are stored, from its pages and windows: [heads, tokens, head_dim].
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
        getattr(store.stream(name).codec, "mean", None),
        first,
        last - first,
        n,
        max(window.packed_end(n), window.sink),
        _PLANS.number(made),
    )


@torch.library.custom_op("kvant::unpack", mutates_args=())
def _unpack(
    pages: Tensor,
    table: Tensor,
    window: Tensor,
    overlay_row: Tensor,
    sinks: Tensor,
    ring_start: Tensor,
    mean: Tensor | None,
    first: int,
    count: int,
    n: int,
    frontier: int,
    plan: int,
) -> Tensor:
    made = _PLANS[plan]
    layout = made.layout
    out = torch.empty(layout.heads, count, layout.head_dim, dtype=DTYPES[made.dtype], device=pages.device)
    tensors = (pages, table, window, overlay_row, sinks, ring_start, mean, out)
    arguments = _Arguments(*nvrtc.addresses(*tensors), first, count, n, frontier)
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


def turn_forth(store: LayerStore, keys: Tensor, first: int, blocks: int) -> None:
    """Turns keys [heads, tokens, head_dim] of a sequence, from its token `first` on, from the start of their blocks of
    positions to where they belong, in place."""
    rope = store.key.rope
    assert rope is not None and keys.is_contiguous()
    cosine, sine = rope_table(store, blocks)
    if cosine.shape[1] % 2:
        raise ValueError(f"RoPE must rotate an even number of pairs of channels, got {cosine.shape[1]}")
    made = UnpackPlan(store.layout, "key", str(keys.dtype).removeprefix("torch."))
    kernel = _kernel(made, "kvant_turn_forth", keys.device)
    arguments = _ForthArguments(
        keys.data_ptr(),
        cosine.data_ptr(),
        sine.data_ptr(),
        first,
        keys.shape[1],
        cosine.shape[1],
        store.key.spec.effective_rope_block,
        rope.first,
    )
    items = keys.shape[0] * keys.shape[1] * (cosine.shape[1] // 2)
    kernel.launch((max(1, min(-(-items // (WARPS * 32)), 8 * kernel.blocks)), 1), arguments)
