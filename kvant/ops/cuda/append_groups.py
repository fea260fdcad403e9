"""Appending by the kernels in append_groups.cu, where keys are coded per channel over groups of tokens. What is launched depends on
the shapes alone: a step whose tokens complete no group launches the same grid, which then finds nothing to do."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.boosted import Boosted
from kvant.codecs.channel import Channel
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc, plan
from kvant.ops.cuda.plan import TYPES
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
WARPS = 8
_PLANS: nvrtc.Numbered[GroupPlan] = nvrtc.Numbered()


def refuse_layout(layout: Layout) -> str | None:
    """Why the kernels cannot append to a layout whose keys are coded in groups, or None."""
    key, value, dim = layout.recipe.key, layout.recipe.value, layout.head_dim
    if not isinstance(key.codec, Channel | Boosted):
        return f"it writes token-wise codes and keys per channel, and the keys are coded by {type(key.codec).__name__}"
    if not isinstance(value.codec, Affine):
        return f"beside keys per channel it writes affine values, and they are coded by {type(value.codec).__name__}"
    for name, stream in layout.recipe.streams.items():
        if stream.corrector is not None:
            return f"it writes codes as they are, and those of the {name}s are corrected by {type(stream.corrector).__name__}"
    if value.codec.zero != "float" or value.codec.clip != 1.0 or value.codec.search != 1:
        return "it writes values by their whole range and minimum, and they are clipped, searched or have integer zero points"
    groups = value.codec.groups(dim)
    if dim // groups != 16 and dim // groups % 32:
        return f"it writes scales of 16 or a multiple of 32 channels, and those of the values have {dim // groups}"
    return plan.refuse_layout(layout)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "pages", "table", "starts", "lengths", "owners")),
        *((name, ctypes.c_void_p) for name in ("exact_key", "window_key", "window_value")),
        *((name, ctypes.c_int) for name in ("tokens", "batch", "half_batch", "table_width")),
    ]


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """The kernels for one layout and types of keys and values."""

    layout: Layout
    types: tuple[str, str]

    @property
    def group(self) -> int:
        return self.layout.recipe.key.codec.group_tokens

    @property
    def spare(self) -> int:
        """Groups that the tail of a sequence may complete beside those that new tokens fill alone, and room for rounding."""
        return self.layout.recipe.key.window.flush // self.group + 2

    @property
    def dynamic_bytes(self) -> int:
        return self.group * self.layout.head_dim * 2

    @functools.cached_property
    def text(self) -> str:
        layout, key, value = self.layout, self.layout.recipe.key, self.layout.recipe.value
        sections = {(s.stream, s.names[0]): s for s in layout.sections}
        meta = sections["value", "scale"]
        high, index = sections.get(("key", "high")), sections.get(("key", "index"))
        constants: dict[str, object] = {
            **plan.page_constants(layout),
            "WARPS": WARPS,
            "WINDOW_TYPE": TYPES[layout.overlay_dtype],
            "ORIGIN": layout.recipe.origin,
            "SINK": key.window.sink,
            "KEY_GROUP": self.group,
            "SPARE": self.spare,
            "KEY_RECENT": key.window.recent,
            "KEY_FLUSH": key.window.flush,
            "KEY_META_OFFSET": sections["key", "scale"].offset,
            "BOOSTED": high.width if high else 0,
            "HIGH_OFFSET": high.offset if high else 0,
            "INDEX_OFFSET": index.offset if index else 0,
            "VALUE_GROUPS": meta.width,
            "VALUE_ORDER_GROUPS": layout.scale_groups("value"),
            "VALUE_META_TYPE": TYPES[meta.dtype],
            "VALUE_META_OFFSET": meta.offset,
            "VALUE_RING_TOKENS": value.window.ring,
        }
        for name, kind in zip(layout.recipe.streams, self.types, strict=True):
            stream = name.upper()
            planes = [s for s in layout.sections if s.stream == name and s.kind == "code"]
            constants[f"{stream}_PLANES"] = (
                f"Planes<{', '.join(f'Plane<{s.bits}, {s.shift}, {s.offset}>' for s in planes)}>"
            )
            constants[f"{stream}_BITS"] = sum(s.bits for s in planes)
            constants[f"{stream}_TYPE"] = TYPES[kind]
            constants[f"{stream}_RING"] = max(1, layout.recipe.streams[name].window.ring)
            constants[f"{stream}_WINDOW"] = layout.overlay_tokens(name)
        return nvrtc.program("kernels/append_groups.cu", defines=constants)


@functools.lru_cache(maxsize=256)
def _kernel(made: GroupPlan, name: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, name, device, WARPS * 32, made.dynamic_bytes if name == "kvant_append_groups" else 0)


def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch) -> None:
    """As the reference's `append`, for layouts that `refuse_layout` lets through. Transforms are done in torch before."""
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
        _PLANS.number(GroupPlan(store.layout, types)),  # type: ignore[arg-type]
    )


@torch.library.custom_op("kvant::append_groups", mutates_args=("pages", "window_key", "window_value"))
def _append_groups(
    pages: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    exact_key: Tensor,
    plan: int,
) -> None:
    made = _PLANS[plan]
    tokens, batch, heads = len(key), len(seq_lens), made.layout.heads
    if not tokens:
        return
    tensors = (key, value, pages, table, query_start_loc, seq_lens, overlay_rows, exact_key, window_key, window_value)
    arguments = _Arguments(*nvrtc.addresses(*tensors), tokens, batch, nvrtc.half_of(batch), table.shape[1])
    units = tokens // made.group + batch * made.spare
    _kernel(made, "kvant_append_groups", key.device).launch(
        (units, heads), arguments
    )  # tails are read before they change
    _kernel(made, "kvant_append_tokens", key.device).launch((-(-tokens * heads // WARPS), 1), arguments)


@_append_groups.register_fake
def _(*args: object) -> None:
    return None
