"""Appending by the kernels in append.cu and tiles.cu: one launch for any number of new tokens. Vector quantization has a kernel of
its own, nearest.cu, and groups of tokens two, append_groups.cu."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import struct
from typing import NamedTuple

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.banded import Banded
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import append_groups, nearest, nvrtc, plan
from kvant.ops.cuda.plan import TYPES
from kvant.ops.cuda.transform_kv import matrix_in, transform_rows
from kvant.ops.fused import HADAMARD, MATRIX, NONE, FusedTransform, blocks_of, fuse, matrix_of, rope_table
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch
from kvant.transforms.hadamard import walsh_hadamard

Tensor = torch.Tensor
WARPS = 8
TILE_ROWS = 8192  # tokens times heads from which on tiles of 16 tokens keep a GPU busy
TILE_WARPS = 4
TILE_DIMS = (64, 96, 128)  # more do not fit into registers
BAND_DIMS = (64, 128)  # of bands: a lane's share of each is whole bytes
PARTS = {torch.bfloat16: 3, torch.float16: 2}  # of a matrix in a type, so that its products are as good as float32's
_PLANS: nvrtc.Numbered[AppendPlan] = nvrtc.Numbered()


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the kernel cannot append to a layout on a device, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    reason = refuse_layout(layout) or plan.refuse(layout, device)
    return nearest.refuse_memory(layout, device) if reason is None and plan.is_indexed(layout) else reason


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    if layout.recipe.key.groupwise:
        return append_groups.refuse_layout(layout)
    for name, stream in () if plan.is_indexed(layout) else layout.recipe.streams.items():
        codec = stream.codec
        if not isinstance(codec, Affine | Banded):
            return f"it writes token-wise codes, and the {name}s are coded by {type(codec).__name__}"
        for bits in _widths(codec, layout.head_dim) - {0, 2, 3, 4, 8}:
            return f"it writes codes of 2, 3, 4 or 8 bits, and the {name}s have {bits}"
    return plan.refuse_layout(layout)


def _widths(codec: Affine | Banded, head_dim: int) -> set[int]:
    """Bits of a stream's codes."""
    return {bits for _, bits in codec.bands(head_dim)} if isinstance(codec, Banded) else {codec.bits}


def tileable(layout: Layout) -> bool:
    """Whether tiles of 16 tokens can be written, where they come in 16 bits: lanes then have whole words of codes."""
    dim, codecs = layout.head_dim, [stream.codec for stream in layout.recipe.streams.values()]
    if any(isinstance(codec, Affine | Banded) and 3 in _widths(codec, dim) for codec in codecs):
        return False  # two planes
    if all(isinstance(codec, Banded) for codec in codecs):
        return dim in BAND_DIMS
    return dim in TILE_DIMS and all(isinstance(codec, Affine) and dim * codec.bits % 128 == 0 for codec in codecs)


def turnable(store: LayerStore) -> bool:
    """Whether tiles can be unrotated where they are to be: all channels are, and what follows is a matrix."""
    rope, dim = store.key.rope, store.layout.head_dim
    return rope is None or (isinstance(store.layout.recipe.key.codec, Banded) and 2 * len(rope.inv_freq) == dim)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "key_mean", "value_mean", "key_signs", "value_signs")),
        *((name, ctypes.c_void_p) for name in ("key_weights", "value_weights", "key_taken", "value_taken")),
        *((name, ctypes.c_void_p) for name in ("key_matrix", "value_matrix")),
        *(
            (name, ctypes.c_void_p)
            for name in ("pages", "slots", "starts", "lengths", "owners", "window_key", "window_value")
        ),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
        *((name, ctypes.c_float) for name in ("key_unit", "value_unit", "key_share", "value_share")),
        *((name, ctypes.c_int) for name in ("key_drop", "value_drop", "key_stride", "value_stride")),
        *((name, ctypes.c_int) for name in ("rope_first", "blocks", "tokens", "batch", "half_batch")),
    ]


@dataclasses.dataclass(frozen=True)
class AppendPlan:
    """A kernel for one layout and way to call it. Orders are those of Hadamard transforms, 1 where there is none."""

    layout: Layout
    types: tuple[str, str]  # of the keys and values as they come
    orders: tuple[int, int]
    means: tuple[bool, bool] = (False, False)  # whether they are taken off
    parts: tuple[int, int] = (0, 0)  # of a matrix that the kernel multiplies by, 0 where there is none
    rotated: int = 0  # positions of a block that the kernel rotates keys back to the start of, 0 where it does not

    @functools.cached_property
    def tiled(self) -> bool:
        """Whether there is a kernel for tiles of 16 tokens, too."""
        if not tileable(self.layout) or "float32" in self.types:
            return False
        return all(self.parts) or not isinstance(self.layout.recipe.key.codec, Banded)

    @property
    def _wide(self) -> bool:
        """Whether a tile needs more than 96 registers."""
        codecs = [stream.codec for stream in self.layout.recipe.streams.values()]
        more = any(getattr(codec, "clip", 1.0) != 1.0 or getattr(codec, "search", 1) > 1 for codec in codecs)
        return more or any(self.parts)

    @functools.cached_property
    def text(self) -> str:
        layout = self.layout
        constants: dict[str, object] = {
            **plan.page_constants(layout),
            **plan.window_constants(layout),
            "WARPS": WARPS,
            "TILE_WARPS": TILE_WARPS,
            "TILE_BLOCKS": (16 if self._wide else 20) // TILE_WARPS,  # of a multiprocessor, by registers
            "KEY_TURNED": self.rotated,
            "CLIP": int(any(getattr(stream.codec, "clip", 1.0) != 1.0 for stream in layout.recipe.streams.values())),
        }
        for name, kind, order, mean, parts in zip(
            layout.recipe.streams, self.types, self.orders, self.means, self.parts, strict=True
        ):
            codec = layout.recipe.streams[name].codec
            (meta,) = (s for s in layout.sections if s.stream == name and s.kind == "meta")
            bands = _bands(layout, name)
            constants |= {
                f"{name.upper()}_TYPE": TYPES[kind],
                f"{name.upper()}_HADAMARD": order,
                f"{name.upper()}_HADAMARD_SCALE": order**-0.5,
                f"{name.upper()}_MEAN": int(mean),
                f"{name.upper()}_PARTS": parts,
                f"{name.upper()}_BANDS": f"Bands<{', '.join(text for text, *_ in bands)}>",
                f"{name.upper()}_ALL_BANDS": f"Bands<{', '.join(_all_bands(layout, name))}>",
                f"{name.upper()}_BITS": bands[0][1],
                f"{name.upper()}_OFFSET": bands[0][2],
                f"{name.upper()}_HIGH": bands[0][3],
                f"{name.upper()}_BANDED": int(isinstance(codec, Banded)),
                f"{name.upper()}_UNBIASED": int(getattr(codec, "unbiased", False)),
                f"{name.upper()}_WEIGHTED": int(getattr(codec, "weighted", False)),
                f"{name.upper()}_FLAG": int(getattr(codec, "flag", False)),
                f"{name.upper()}_SEARCH": codec.search,  # type: ignore[attr-defined]
                f"{name.upper()}_META": plan.META_KINDS[meta.names],
                f"{name.upper()}_META_TYPE": TYPES[meta.dtype],
                f"{name.upper()}_META_OFFSET": meta.offset,
            }
        return nvrtc.program("kernels/append_tiles.cu" if self.tiled else "kernels/append.cu", defines=constants)


def _bands(layout: Layout, name: StreamName) -> list[tuple[str, int, int, int]]:
    """Bands of a stream in the kernel's words, their bits, and where their codes and the third bits of these lie."""
    found = []
    for band in plan.stored_bands(layout, name):
        low, *others = (s.offset for s in layout.sections if s.stream == name and s.names == (band.field,))
        (high,) = others or (0,)
        (step,) = struct.unpack("<I", struct.pack("<f", band.step))
        text = f"Band<{band.width}, {band.bits}, {low}, {band.first}, {step}u, {high}>"
        found.append((text, band.bits, low, high))
    return found


def _all_bands(layout: Layout, name: StreamName) -> list[str]:
    """As `_bands`, in words, with those that have no codes."""
    codec, found, first = layout.recipe.streams[name].codec, [], 0
    stored = iter(_bands(layout, name))
    if not isinstance(codec, Banded):
        return [text for text, *_ in stored]
    for width, bits in codec.bands(layout.head_dim):
        found.append(next(stored)[0] if bits else f"Band<{width}, 0, 0, {first}, 0u>")
        first += width
    return found


@functools.lru_cache(maxsize=256)
def _kernel(made: AppendPlan, device: torch.device, tiled: bool) -> nvrtc.Kernel:
    if tiled:
        return nvrtc.Kernel(made.text, "kvant_append_tiles", device, TILE_WARPS * 32)
    return nvrtc.Kernel(made.text, "kvant_append", device, WARPS * 32)


@register("append", "cuda", refuse, rank=10, capturable=True)
def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """As the reference's `append`. Where tokens are few or do not come in 16 bits, keys are unrotated and matrices multiplied
    before the kernel."""
    rows: dict[StreamName, Tensor] = {"key": key, "value": value}
    for name, x in rows.items():
        if str(x.dtype).removeprefix("torch.") not in TYPES:
            raise ValueError(f"{name}s must be {', '.join(TYPES)}, got {x.dtype}")
    if store.layout.recipe.key.groupwise:
        append_groups.append(store, key, value, batch)
        return
    tiled = len(key) * store.layout.heads >= TILE_ROWS and tileable(store.layout)
    tiled = tiled and all(x.dtype in PARTS for x in rows.values()) and turnable(store)
    for name in rows:
        if store.stream(name).rope is not None and not tiled:
            rows[name] = transform_rows(store, name, rows[name], batch)
    if plan.is_indexed(store.layout):
        nearest.append(store, rows, batch)
        return
    spaces = list(_spaces(store))
    matrices: list[Tensor | None] = [None, None]
    banded: list[_Bands | None] = [None, None]
    for i, (name, space) in enumerate(zip(rows, spaces, strict=True)):
        x, stream = rows[name], store.stream(name)
        if tiled and isinstance(stream.spec.codec, Banded):
            banded[i] = found = _band_fragments(store, name)
            matrices[i], spaces[i] = found.matrix, found.space
        elif stream.rope is not None:
            spaces[i] = FusedTransform()
        elif tiled and (space.kind == MATRIX or (space.kind == HADAMARD and store.layout.head_dim == 96)):
            matrices[i], spaces[i] = _fragments(store, name, x.dtype)
        elif space.kind == MATRIX:
            x = transform_rows(store, name, x, batch)
        rows[name] = x.contiguous()
    types = tuple(str(x.dtype).removeprefix("torch.") for x in rows.values())
    orders, means = zip(*((space.order, space.mean is not None) for space in spaces), strict=True)
    parts = tuple(0 if matrix is None else matrix.shape[1] for matrix in matrices)
    rotates = tiled and store.key.rope is not None
    first, cosine, sine = 0, None, None
    if rotates:
        first = store.key.rope.first  # type: ignore[union-attr]
        tokens = batch.block_table.shape[1] * store.layout.page_tokens + store.layout.recipe.origin
        cosine, sine = rope_table(store, blocks_of(tokens, first, store.key.spec.effective_rope_block))
    rotated = store.key.spec.effective_rope_block if rotates else 0
    made = AppendPlan(store.layout, types, orders, means, parts, rotated)  # type: ignore[arg-type]
    kept = [store.stream(name).codec if found is None else found for name, found in zip(rows, banded, strict=True)]
    _append(
        store.pages,
        store.overlays["key"],
        store.overlays["value"],
        rows["key"],
        rows["value"],
        *(space.mean for space in spaces),
        *(space.tensor if space.kind == HADAMARD else None for space in spaces),
        *(getattr(codec, "weights", None) for codec in kept),
        *(getattr(codec, "mean", None) for codec in kept),
        *matrices,
        cosine,
        sine,
        batch.slot_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        batch.overlay_rows,
        [getattr(store.stream(name).codec, "clip", 1.0) for name in rows],
        [1.0 if found is None else found.unit for found in banded],
        first,
        _PLANS.number(made),
    )


def _fragments(store: LayerStore, name: StreamName, dtype: torch.dtype) -> tuple[Tensor, FusedTransform]:
    """A stream's matrix as parts of a 16-bit type, largest last, in the order of tiles.cu's registers:
    int32 [1 or heads, parts, ...]; and what is left to do after it."""
    found = store.prepared.get(f"cuda.{name}.{dtype}")
    if found is None:
        space = _spaces(store)[0 if name == "key" else 1]
        parts, dim, device = list[Tensor](), store.layout.head_dim, store.pages.device
        if space.kind == HADAMARD:  # whose blocks do not end where lanes do; all ones, to be scaled afterwards
            dual = matrix_of(
                store.stream(name).transforms, "dual", store.layout, device
            )  # as the way in, without a mean
            rest = dual.tensor.sign()  # type: ignore[union-attr]
        else:
            rest = space.tensor  # type: ignore[assignment]
        rest = rest.double().to(device)
        for _ in range(1 if space.kind == HADAMARD else PARTS[dtype]):
            parts.insert(0, rest.to(dtype))
            rest = rest - parts[0].double()
        count = dim // 16
        m, q, lane, i, j, e = torch.meshgrid(*map(torch.arange, (count, count, 32, 2, 2, 2)), indexing="ij")
        g, t = lane // 4, lane % 4
        if name == "key":  # i: which of two products; j: which register
            rows, columns = t * (dim // 4) + 4 * m + 2 * j + e, g // 2 * (dim // 4) + 4 * q + 2 * i + g % 2
        else:  # i: which columns; j: which rows of the product
            rows, columns = t * (dim // 4) + i * (dim // 8) + 2 * m + e, g * (dim // 8) + 2 * q + j
        made = torch.stack(parts, 1)[:, :, rows.to(device), columns.to(device)].contiguous().view(torch.int32)
        mean = space.mean if space.offset is None else -space.offset.expand(store.layout.heads, dim).contiguous()
        found = made, FusedTransform(order=space.order, mean=mean)
        store.prepared[f"cuda.{name}.{dtype}"] = found
    return found  # type: ignore[no-any-return]


class _Bands(NamedTuple):
    """What tiles of a stream's bands are made with; keys' channels are in the order in which lanes have them."""

    matrix: Tensor  # int32 [1 or heads, 2, ...]: fp16, the larger part last, in the order of tiles.cu's registers
    unit: float  # that it is a multiple of, a power of two
    space: FusedTransform  # what is left to do after it
    weights: Tensor | None
    mean: Tensor | None


def _band_fragments(store: LayerStore, name: StreamName) -> _Bands:
    found = store.prepared.get(f"cuda.bands.{name}")
    if found is None:
        stream, dim, device = store.stream(name), store.layout.head_dim, store.pages.device
        space, count = matrix_in(store, name), store.layout.head_dim // 16
        assert space.tensor is not None
        matrix = space.tensor.double().to(device)
        unit = 2.0 ** (math.frexp(float(matrix.abs().max()) or 1.0)[1] - 8)  # the largest number is close to 2^8
        high = (matrix / unit).half()
        parts = torch.stack(((matrix / unit - high.double()).half(), high), 1)
        m, q, lane, i, j, e = torch.meshgrid(*map(torch.arange, (count, count, 32, 2, 2, 2)), indexing="ij")
        g, t = lane // 4, lane % 4
        order = _lane_order(store.layout) if name == "key" else torch.arange(dim)
        if name == "key":  # i: which of two products; j: which register
            apart, share = (dim // 2, dim // 8) if stream.rope is not None else (dim // 8, dim // 4)
            rows, columns = t * share + j * apart + 2 * m + e, order[g // 2 * (dim // 4) + 4 * q + 2 * i + g % 2]
        else:  # i: which columns; j: which rows of the product
            rows, columns = t * (dim // 4) + i * (dim // 8) + 2 * m + e, g * (dim // 8) + 2 * q + j
        made = parts[:, :, rows.to(device), columns.to(device)].contiguous().view(torch.int32)
        off = None if space.offset is None else -space.offset.expand(store.layout.heads, dim)
        mean, weights, taken = (
            None if x is None else x.to(device)[:, order.to(device)].contiguous()
            for x in (off, getattr(stream.codec, "weights", None), getattr(stream.codec, "mean", None))
        )
        found = _Bands(made, unit, FusedTransform(mean=mean), weights, taken)
        store.prepared[f"cuda.bands.{name}"] = found
    return found  # type: ignore[no-any-return]


def _lane_order(layout: Layout) -> Tensor:
    """Channels of the keys as four lanes have them: each its quarter of every band, band after band."""
    first, quarters = 0, list[Tensor]()
    for width, _ in layout.recipe.key.codec.bands(layout.head_dim):  # type: ignore[attr-defined]
        quarters.append(torch.arange(first, first + width).view(4, width // 4))
        first += width
    return torch.cat(quarters, 1).flatten()


def _spaces(store: LayerStore) -> tuple[FusedTransform, FusedTransform]:
    found = store.prepared.get("cuda.forward")
    if found is None:
        found = tuple(
            _mean_after(fuse(stream.transforms, "forward", store.layout, store.pages.device))
            for stream in (store.key, store.value)
        )
        store.prepared["cuda.forward"] = found
    return found  # type: ignore[no-any-return]


def _mean_after(space: FusedTransform) -> FusedTransform:
    """The same with its mean to be taken off after the Hadamard."""
    if space.mean is None or space.kind == NONE:
        return space
    mean = space.mean.double() if space.tensor is None else space.mean.double() * space.tensor
    return dataclasses.replace(space, mean=walsh_hadamard(mean, space.order).float().contiguous())


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
    key_matrix: Tensor | None,
    value_matrix: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    clips: list[float],
    units: list[float],
    first: int,
    plan: int,
) -> None:
    made = _PLANS[plan]
    if not len(key):
        return
    places = [clip * (made.layout.head_dim - 1) for clip in clips]
    tiled = made.tiled and len(key) * made.layout.heads >= TILE_ROWS
    kernel = _kernel(made, key.device, tiled)
    arguments = _Arguments(
        key.data_ptr(),
        value.data_ptr(),
        *nvrtc.addresses(key_mean, value_mean, key_signs, value_signs),
        *nvrtc.addresses(key_weights, value_weights, key_taken, value_taken),
        *nvrtc.addresses(key_matrix, value_matrix),
        pages.data_ptr(),
        slot_mapping.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        overlay_rows.data_ptr(),
        window_key.data_ptr(),
        window_value.data_ptr(),
        *nvrtc.addresses(cosine, sine),
        *units,
        *(place - int(place) for place in places),
        *(made.layout.head_dim - 1 - int(place) for place in places),
        *(0 if x is None or len(x) == 1 else x.stride(0) // 4 for x in (key_matrix, value_matrix)),
        first,
        1 if cosine is None else len(cosine),
        len(key),
        len(seq_lens),
        nvrtc.half_of(len(seq_lens)),
    )
    if tiled:  # blocks of keys and blocks of values
        tiles, heads = -(-len(key) // 16), made.layout.heads
        whole = isinstance(made.layout.recipe.key.codec, Banded)  # whose blocks have one head each
        blocks = 2 * (heads * -(-tiles // TILE_WARPS) if whole else -(-tiles * heads // TILE_WARPS))
    else:
        blocks = -(-(-(-len(key) // 2) * made.layout.heads) // WARPS)
    kernel.launch((blocks, 1), arguments)


@_append.register_fake
def _(*args: object) -> None:
    return None
