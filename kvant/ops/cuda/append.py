"""Appending by the kernel in append.cu: one launch for any number of new tokens."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.banded import Banded
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import append_groups, nvrtc, plan
from kvant.ops.cuda.plan import TYPES
from kvant.ops.registry import register
from kvant.ops.spaces import HADAMARD, NONE, Space, space_of
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
WARPS = 8
_PLANS: list[AppendPlan] = []


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the kernel cannot append to a layout on a device, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    return refuse_layout(layout) or plan.refuse(layout, device)


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    if layout.recipe.key.groupwise:
        return append_groups.refuse_layout(layout)
    for name, stream in layout.recipe.streams.items():
        codec = stream.codec
        if not isinstance(codec, Affine | Banded):
            return f"it writes token-wise codes, and the {name}s are coded by {type(codec).__name__}"
        widths = {bits for _, bits in codec.bands(layout.head_dim)} if isinstance(codec, Banded) else {codec.bits}
        for bits in widths - {0, 2, 4, 8}:
            return f"it writes codes of 2, 4 or 8 bits, and the {name}s have {bits}"
    return plan.refuse_layout(layout)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "key_mean", "value_mean", "key_signs", "value_signs")),
        *((name, ctypes.c_void_p) for name in ("key_weights", "value_weights", "key_taken", "value_taken")),
        *(
            (name, ctypes.c_void_p)
            for name in ("pages", "slots", "starts", "lengths", "owners", "window_key", "window_value")
        ),
        *((name, ctypes.c_float) for name in ("key_share", "value_share")),
        *((name, ctypes.c_int) for name in ("key_drop", "value_drop", "tokens", "batch", "half_batch")),
    ]


@dataclasses.dataclass(frozen=True)
class AppendPlan:
    """A kernel for one layout and way to call it. Orders are those of Hadamard transforms, 1 where there is none."""

    layout: Layout
    types: tuple[str, str]  # of the keys and values as they come
    orders: tuple[int, int]

    @functools.cached_property
    def text(self) -> str:
        layout, window = self.layout, self.layout.recipe.key.window
        constants: dict[str, object] = {
            "HEAD_DIM": layout.head_dim,
            "PAGE": layout.page_tokens,
            "RUN": layout.run_bytes,
            "KV_HEADS": layout.heads,
            "SINK": window.sink,
            "RING": max(1, window.ring),
            "RING_TOKENS": window.ring,
            "WINDOW_TOKENS": layout.overlay_tokens("key"),
            "WINDOW_TYPE": TYPES[layout.overlay_dtype],
            "WARPS": WARPS,
            "CLIP": int(any(getattr(stream.codec, "clip", 1.0) != 1.0 for stream in layout.recipe.streams.values())),
        }
        for name, kind, order in zip(layout.recipe.streams, self.types, self.orders, strict=True):
            codec = layout.recipe.streams[name].codec
            (meta,) = (s for s in layout.sections if s.stream == name and s.kind == "meta")
            bands = _bands(layout, name)
            constants |= {
                f"{name.upper()}_TYPE": TYPES[kind],
                f"{name.upper()}_HADAMARD": order,
                f"{name.upper()}_HADAMARD_SCALE": order**-0.5,
                f"{name.upper()}_BANDS": f"Bands<{', '.join(text for text, *_ in bands)}>",
                f"{name.upper()}_BITS": bands[0][1],
                f"{name.upper()}_OFFSET": bands[0][2],
                f"{name.upper()}_BANDED": int(isinstance(codec, Banded)),
                f"{name.upper()}_UNBIASED": int(getattr(codec, "unbiased", False)),
                f"{name.upper()}_FLAG": int(getattr(codec, "flag", False)),
                f"{name.upper()}_SEARCH": codec.search,  # type: ignore[attr-defined]
                f"{name.upper()}_META": plan.META_KINDS[meta.names],
                f"{name.upper()}_META_TYPE": TYPES[meta.dtype],
                f"{name.upper()}_META_OFFSET": meta.offset,
            }
        return nvrtc.with_constants(nvrtc.source("ptx.cu", "common.cu", "append.cu"), constants)


def _bands(layout: Layout, name: StreamName) -> list[tuple[str, int, int]]:
    """Bands of a stream in the kernel's words, their bits and where their codes lie."""
    found = []
    for band in plan.stored_bands(layout, name):
        (section,) = (s for s in layout.sections if s.stream == name and s.names == (band.field,))
        (step,) = struct.unpack("<I", struct.pack("<f", band.step))
        text = f"Band<{band.width}, {band.bits}, {section.offset}, {band.first}, {step}u>"
        found.append((text, band.bits, section.offset))
    return found


@functools.lru_cache(maxsize=256)
def _plan_number(made: AppendPlan) -> int:
    _PLANS.append(made)
    return len(_PLANS) - 1


@functools.lru_cache(maxsize=256)
def _kernel(made: AppendPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, "kvant_append", device, WARPS * 32)


@register("append", "cuda", refuse, rank=10)
def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """As the reference's `append`. Transforms other than a mean and a Hadamard are matrix products before the kernel."""
    if store.layout.recipe.key.groupwise:
        append_groups.append(store, key, value, batch)
        return
    spaces = list(_spaces(store))
    rows: dict[StreamName, Tensor] = {"key": key, "value": value}
    for i, (name, space) in enumerate(zip(rows, spaces, strict=True)):
        x, stream = rows[name], store.stream(name)
        if stream.rope is not None:
            x, spaces[i] = stream.stored(x.float(), _positions(batch, len(x))), Space()
        elif space.kind not in (NONE, HADAMARD):
            x = stream.forward(x.float())
        if str(x.dtype).removeprefix("torch.") not in TYPES:
            raise ValueError(f"{name}s must be {', '.join(TYPES)}, got {x.dtype}")
        rows[name] = x.contiguous()
    types = tuple(str(x.dtype).removeprefix("torch.") for x in rows.values())
    made = AppendPlan(store.layout, types, tuple(space.order for space in spaces))  # type: ignore[arg-type]
    _append(
        store.pages,
        store.overlays["key"],
        store.overlays["value"],
        rows["key"],
        rows["value"],
        *(space.mean for space in spaces),
        *(space.tensor if space.kind == HADAMARD else None for space in spaces),
        *(getattr(store.stream(name).codec, "weights", None) for name in rows),
        *(getattr(store.stream(name).codec, "mean", None) for name in rows),
        batch.slots,
        batch.starts,
        batch.lengths,
        batch.owners,
        [getattr(store.stream(name).codec, "clip", 1.0) for name in rows],
        _plan_number(made),
    )


def _positions(batch: PagedBatch, tokens: int) -> Tensor:
    """Of new tokens in their sequences: int64 [tokens]. Nothing waits for the GPU, and padding gets anything."""
    at = torch.arange(tokens, device=batch.starts.device)
    sequence = torch.searchsorted(batch.starts[1:], at, right=True).clamp_max(len(batch.lengths) - 1)
    return (batch.lengths[sequence] - batch.starts[1:][sequence] + at).clamp_min(0)


def _spaces(store: LayerStore) -> tuple[Space, Space]:
    found = store.prepared.get("cuda.forward")
    if found is None:
        found = tuple(
            space_of(stream.transforms, "forward", store.layout, store.pages.device)
            for stream in (store.key, store.value)
        )
        store.prepared["cuda.forward"] = found
    return found  # type: ignore[no-any-return]


@torch.library.custom_op("kvant::append", mutates_args=("pages", "window_key", "window_value"))
def _append(
    pages: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    key: Tensor,
    value: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    key_signs: Tensor | None,
    value_signs: Tensor | None,
    key_weights: Tensor | None,
    value_weights: Tensor | None,
    key_taken: Tensor | None,
    value_taken: Tensor | None,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    owners: Tensor,
    clips: list[float],
    plan: int,
) -> None:
    made = _PLANS[plan]
    if not len(key):
        return
    places = [clip * (made.layout.head_dim - 1) for clip in clips]
    kernel = _kernel(made, key.device)
    arguments = _Arguments(
        key.data_ptr(),
        value.data_ptr(),
        *(None if x is None else x.data_ptr() for x in (key_mean, value_mean, key_signs, value_signs)),
        *(None if x is None else x.data_ptr() for x in (key_weights, value_weights, key_taken, value_taken)),
        pages.data_ptr(),
        slots.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        owners.data_ptr(),
        window_key.data_ptr(),
        window_value.data_ptr(),
        *(place - int(place) for place in places),
        *(made.layout.head_dim - 1 - int(place) for place in places),
        len(key),
        len(lengths),
        1 << (len(lengths) - 1).bit_length() >> 1,
    )
    jobs = -(-len(key) // 2) * made.layout.heads
    kernel.launch((-(-jobs // WARPS), 1), arguments)


@_append.register_fake
def _(*args: object) -> None:
    return None
