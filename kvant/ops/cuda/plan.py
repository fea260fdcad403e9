"""What a kernel has to know of a layout, as constants of its text; and what the kernels cannot serve, with the reason."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.banded import STEPS, Banded
from kvant.codecs.boosted import Boosted
from kvant.codecs.channel import Channel
from kvant.layout import Layout, Section, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.spaces import refuse_turns

TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}  # as the kernels number them
WARPS, STAGES = 4, 2
SOURCES = ("ptx.cu", "copies.cu", "common.cu", "softmax.cu", "queries.cu", "groups.cu", "attend.cu", "decode.cu")
STATIC_BYTES = 20 * 1024  # of shared memory beside the pages in flight, at most
MAX_HEAD_DIM = 256
META_KINDS = {("scale", "min"): 0, ("scale", "zero"): 1, ("scale",): 2}  # as the kernels number them
ONE = 1 << 20  # what a code counts, as the kernels write fractions


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the CUDA kernels cannot serve a layout on a device, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    reason = refuse_layout(layout) or nvrtc.missing()
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if STAGES * layout.run_bytes + STATIC_BYTES > shared_memory(device)[0]:
        return f"two pages of {layout.run_bytes} bytes a head are more than this GPU's shared memory holds"
    return None


def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory that a block may have, and that a multiprocessor has."""
    found = torch.cuda.get_device_properties(device)
    return found.shared_memory_per_block_optin, found.shared_memory_per_multiprocessor  # type: ignore[attr-defined]


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    recipe, dim = layout.recipe, layout.head_dim
    grouped = isinstance(recipe.key.codec, Channel | Boosted)
    for name, stream in recipe.streams.items():
        codec = stream.codec
        if isinstance(codec, Affine):
            groups = codec.groups(dim)
            if groups > 1 and not (grouped and name == "value"):
                return f"it reads one scale a token, and the {name}s have {groups}"
        elif isinstance(codec, Banded):
            if codec.levels != "uniform":
                return f"it reads evenly spaced levels, and those of the {name}s are not"
            if name == "value" and len(codec.bands(dim)) > 1:
                return "it reads values of one width, and they have bands"
        elif not (grouped and name == "key"):
            return f"it reads token-wise affine codes and keys coded per channel, and the {name}s are coded by {type(codec).__name__}"
    if layout.order != "fragment":
        return f"it reads pages in fragment order: {layout.order_reason or 'the layout is plain'}"
    if not grouped and recipe.key.window != recipe.value.window:
        return "keys and values have different windows"
    if dim > MAX_HEAD_DIM:
        return f"head_dim {dim} is more than {MAX_HEAD_DIM}"
    return refuse_turns(layout) or (refuse_groups(layout) if grouped else None)


def refuse_groups(layout: Layout) -> str | None:
    """Why keys that are coded per channel, or the values beside them, cannot be read; None where they can."""
    key, value, dim = layout.recipe.key, layout.recipe.value, layout.head_dim
    if key.rope != "post":
        return "it reads keys that are coded per channel as they come, and they are stored turned back"
    if key.codec.group_tokens < 16:
        return f"it reads groups of at least 16 tokens, and those of the keys have {key.codec.group_tokens}"
    if dim % 32:
        return f"it reads keys that are coded per channel in tiles of 32 channels, and the head dim is {dim}"
    if key.codec.meta != "float16":  # type: ignore[attr-defined]
        return f"it reads the scales of channels as float16, and they are {key.codec.meta}"  # type: ignore[attr-defined]
    for name, stream in layout.recipe.streams.items():
        if getattr(stream.codec, "bits", 2) == 3 and dim % 64:
            return f"it reads codes of 3 bits of a multiple of 64 channels, and the {name}s have {dim}"
    if not isinstance(value.codec, Affine):
        return None
    groups = value.codec.groups(dim)
    if groups > 1 and (value.codec.meta != "float16" or value.codec.zero != "float"):
        return "of values with several scales it reads scales and minima as float16, and theirs are others"
    if groups > 8 or (groups > 1 and layout.scale_groups("value") != groups):
        return f"it reads at most 8 scales a token, each of a multiple of 16 channels, and the values have {groups}"
    return None


class StoredBand(NamedTuple):
    """Channels of a stream whose codes have the same width."""

    field: str  # of their codes
    first: int
    width: int
    bits: int
    step: float  # between levels, over the scale


def stored_bands(layout: Layout, stream: StreamName) -> list[StoredBand]:
    """The bands of a stream that are stored; one of all channels where it has none."""
    codec, dim = layout.recipe.streams[stream].codec, layout.head_dim
    if isinstance(codec, Affine | Channel):
        return [StoredBand("codes", 0, dim, codec.bits, 1.0)]
    if isinstance(codec, Boosted):  # the low bits; the high ones of some channels are no codes
        return [StoredBand("codes", 0, dim, 2, 1.0)]
    assert isinstance(codec, Banded)
    out, first = [], 0
    for i, (width, bits) in enumerate(codec.bands(dim)):
        if bits:
            out.append(StoredBand(f"codes{i}", first, width, bits, STEPS[bits]))
        first += width
    return out


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for one layout, number of query heads a KV head, and way to call it."""

    layout: Layout
    group: int
    query: str  # type of the queries
    dual: tuple[int, int]  # kind and order of the transform of queries: 0 none, 1 Hadamard, 2 matrix
    inverse: tuple[int, int]
    softcap: bool
    bulk: bool  # whether the GPU copies in bulk (sm_90 on)
    shared: tuple[int, int]  # as `shared_memory`
    tuned: tuple[tuple[str, int], ...] = ()  # constants to override, for measuring

    @property
    def tile_heads(self) -> int:
        """Query heads that a block serves at once."""
        tiles = -(-self.group // (8 if self.layout.head_dim > 128 else 16))
        return -(-self.group // tiles)

    @property
    def warps(self) -> int:
        fit = (self.shared[0] - STATIC_BYTES) // self.warp_bytes
        count = WARPS if fit >= WARPS else 2 if fit >= 2 else 1
        if self.layout.recipe.key.groupwise and fit > WARPS and self._blocks(WARPS) < self._most_blocks:
            count = max(
                (WARPS, WARPS + 1), key=lambda warps: warps * self._blocks(warps)
            )  # long pages: more warps fit like this
        return dict(self.tuned).get("WARPS", count)

    @property
    def _most_blocks(self) -> int:
        """Blocks that the registers of a multiprocessor are enough for."""
        return 3 if self.layout.head_dim * -(-self.tile_heads // 8) <= 128 else 2

    def _blocks(self, warps: int) -> int:
        """Blocks that a multiprocessor is to hold."""
        grouped = self.layout.recipe.key.groupwise
        most = min(self._most_blocks, 12 // warps) if grouped else self._most_blocks
        return max(1, min(most, self.shared[1] // (warps * self.warp_bytes + (8192 if grouped else 4096))))

    @property
    def stages(self) -> int:
        return dict(self.tuned).get("STAGES", STAGES)

    @property
    def own_heads(self) -> int:
        """Query heads of a lane."""
        return {1: 1, 2: 2, 3: 4, 4: 4}[-(-self.tile_heads // 4)]

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: its pages in flight, then its outputs."""
        return max(self.stages * self.layout.run_bytes, 16 * self.own_heads * self.layout.head_dim)

    @property
    def dynamic_bytes(self) -> int:
        return self.warps * self.warp_bytes

    @functools.cached_property
    def constants(self) -> dict[str, object]:
        layout, window = self.layout, self.layout.recipe.key.window
        grouped = layout.recipe.key.groupwise
        heads = self.tile_heads
        unit = (
            (32 if self.own_heads == 1 else 16) * layout.head_dim * 4
        )  # bytes of the windows that are attended to at once
        constants: dict[str, object] = {
            "HEAD_DIM": layout.head_dim,
            "PAGE": layout.page_tokens,
            "RUN": layout.run_bytes,
            "KV_HEADS": layout.heads,
            "GROUP": self.group,
            "TILE_HEADS": heads,
            "QUERY_TILES": -(-self.group // heads),
            "ORIGIN": layout.recipe.origin,
            "KEY_GROUP": layout.recipe.key.codec.group_tokens if grouped else 0,
            "KEY_PLANES": "Planes<>" if grouped else self._key_planes(),
            "VALUE_CODES": self._codes("value", layout.scale_groups("value") > 1),
            "VALUE_GROUPS": layout.scale_groups("value"),
            "VALUE_FLAG": int(getattr(layout.recipe.value.codec, "flag", False)),
            "SINK": window.sink,
            "RECENT": window.recent,
            "WINDOW_TOKENS": layout.overlay_tokens("key"),
            "WINDOW_TYPE": TYPES[layout.overlay_dtype],
            "UNIT": max(1, round(unit / layout.run_bytes)),
            "MIXED": 4 if grouped else 1,
            "QUERY_TYPE": TYPES[self.query],
            "DUAL": self.dual[0],
            "DUAL_ORDER": self.dual[1],
            "INVERSE": self.inverse[0],
            "INVERSE_ORDER": self.inverse[1],
            "TURNED": layout.recipe.key.turned_back,
            "SOFTCAP": int(self.softcap),
            "STAGES": self.stages,
            "WARPS": self.warps,
            "WARP_BYTES": self.warp_bytes,
            "MIN_BLOCKS": self._blocks(self.warps),
            "BULK": int(self.bulk),
        }
        for name, stream in layout.recipe.streams.items():
            (section,) = self._sections(name, "meta")
            constants[f"{name.upper()}_RECENT"] = stream.window.recent
            constants[f"{name.upper()}_FLUSH"] = stream.window.flush
            constants[f"{name.upper()}_RING"] = max(1, stream.window.ring)
            constants[f"{name.upper()}_WINDOW"] = layout.overlay_tokens(name)
            constants[f"{name.upper()}_META"] = META_KINDS[section.names]
            constants[f"{name.upper()}_META_TYPE"] = TYPES[section.dtype]
            constants[f"{name.upper()}_META_OFFSET"] = section.offset
        if grouped:
            constants["KEY_CODES"] = self._codes("key", bare=True)
            found = {section.names[0]: section for section in self._sections("key", "index")}
            constants["BOOSTED"] = found["high"].width if found else 0
            constants["HIGH_OFFSET"] = found["high"].offset if found else 0
            constants["INDEX_OFFSET"] = found["index"].offset if found else 0
        return constants | dict(self.tuned)

    @functools.cached_property
    def text(self) -> str:
        return nvrtc.with_constants(nvrtc.source(*SOURCES), self.constants)

    def _sections(self, stream: StreamName, kind: str) -> list[Section]:
        return [s for s in self.layout.sections if s.stream == stream and s.kind == kind]

    def _key_planes(self) -> str:
        """Planes of the keys' codes in the kernel's words."""
        return f"Planes<{', '.join(self._planes()[0])}>"

    @property
    def turned_slots(self) -> int:
        """Blocks of positions that a sequence's windows may reach into, where keys are turned back to blocks."""
        window, size = self.layout.recipe.key.window, self.layout.recipe.key.turned_back
        first = (window.sink + size - 2) // size + 1 if window.sink else 0
        return first + (window.recent + size - 2) // size + 1

    @property
    def key_registers(self) -> int:
        """Registers of a lane that hold what keys are multiplied by, of each of its query heads."""
        return self._planes()[1]

    def _planes(self) -> tuple[list[str], int]:
        planes, before = [], 0
        for name, first, _, _, step in stored_bands(self.layout, "key"):
            for plane in self._sections("key", "code"):
                if plane.names != (name,):
                    continue
                weight = round(ONE * step * (1 << plane.shift))
                planes.append(f"KeyPlane<{plane.width}, {plane.bits}, {plane.offset}, {first}, {weight}, {before}>")
                row_words = -(-plane.width * plane.bits // 64 // 2)
                before += -(-row_words * 8 // plane.bits // 2) * 2
        return planes, before

    def _codes(self, stream: StreamName, bare: bool = False) -> str:
        """Codes of one width as fp16 numbers, in the kernel's words."""
        (band,) = stored_bands(self.layout, stream)
        low, *high = self._sections(stream, "code")
        bits = low.bits + sum(plane.bits for plane in high)
        text = (
            f"ValueCodes<{low.width}, {bits}, {low.offset}, {high[0].offset if high else 0}, {round(ONE * band.step)}"
        )
        return f"{text}, true>" if bare else f"{text}>"
