"""Appending to streams of product vector quantization by the kernel in nearest.cu: one launch for any number of new tokens."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from kvant.codecs.product_vq import ProductVQ
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.decode import codebooks
from kvant.ops.cuda.plan import TYPES, page_constants, shared_memory, window_constants
from kvant.ops.fused import HADAMARD, NONE, FusedTransform, fuse
from kvant.ops.types import LayerStore, PagedBatch
from kvant.transforms.smooth import BoundSmooth

Tensor = torch.Tensor
THREADS = 256
FEW = 4  # rows of a block where there are few new tokens
_PLANS: nvrtc.Numbered[NearestPlan] = nvrtc.Numbered()


class _Arguments(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("key", "value", "key_mean", "value_mean", "key_factors", "value_factors")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("key_signs", "value_signs", "key_books", "value_books", "pages", "slots")
        ),
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "owners", "window_key", "window_value")),
        *((name, ctypes.c_int) for name in ("tokens", "batch", "half_batch")),
    ]


@dataclasses.dataclass(frozen=True)
class NearestPlan:
    """A kernel for one layout and way to call it. Orders are those of Hadamard transforms, 1 where there is none."""

    layout: Layout
    types: tuple[str, str]  # of the keys and values as they come
    orders: tuple[int, int]
    rows: int  # that a block has at once

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory of a codebook, half of the squared norms of its centroids, rows and their indices."""
        dim = self.layout.head_dim
        return max(
            codec.centroids * (2 * codec.dim + 4) + self.rows * (4 * dim + 2 * codec.spaces(dim))
            for codec in _codecs(self.layout)
        )

    @functools.cached_property
    def text(self) -> str:
        layout = self.layout
        constants: dict[str, object] = {
            **page_constants(layout),
            **window_constants(layout),
            "ROWS": self.rows,
            "THREADS": THREADS,
        }
        for name, codec, kind, order in zip(
            layout.recipe.streams, _codecs(layout), self.types, self.orders, strict=True
        ):
            low, *high = (s for s in layout.sections if s.stream == name and s.kind == "index")
            bits, offset = (high[0].bits, high[0].offset) if high else (0, 0)
            constants |= {
                f"{name.upper()}_TYPE": TYPES[kind],
                f"{name.upper()}_HADAMARD": order,
                f"{name.upper()}_HADAMARD_SCALE": order**-0.5,
                f"{name.upper()}_BOOK": f"Book<{codec.dim}, {low.width}, {bits}, {low.offset}, {offset}>",
                f"{name.upper()}_BOOK_HEADS": layout.heads if codec.books == "head" else 1,
            }
        return nvrtc.program("kernels/append_pq.cu", defines=constants)


def _codecs(layout: Layout) -> list[ProductVQ]:
    return [stream.codec for stream in layout.recipe.streams.values() if isinstance(stream.codec, ProductVQ)]


def many(layout: Layout) -> int:
    """Rows of a block where there are many new tokens."""
    return 16 if layout.head_dim > 128 else 32


def refuse_memory(layout: Layout, device: torch.device) -> str | None:
    """Why a device's shared memory does not hold what the search needs, or None."""
    needed = NearestPlan(layout, ("float32", "float32"), (1, 1), many(layout)).dynamic_bytes
    if needed + 1024 > shared_memory(device)[0]:
        return f"a codebook and rows of {needed} bytes are more than this GPU's shared memory holds"
    return None


@functools.lru_cache(maxsize=256)
def _kernel(made: NearestPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, "kvant_append", device, THREADS, made.dynamic_bytes)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a stream's vectors are transformed: divided by factors, then as a space says."""

    space: FusedTransform
    factors: Tensor | None = None  # float32 [heads, head_dim]


def append(store: LayerStore, rows: dict[StreamName, Tensor], batch: PagedBatch) -> None:
    """As the reference's `append`. Transforms other than smoothing, a mean and a Hadamard are done before the kernel."""
    layout, ways = store.layout, list(_ways(store))
    for i, (name, x) in enumerate(rows.items()):
        if store.stream(name).rope is not None:  # unrotated and transformed already
            ways[i] = _Way(FusedTransform())
        elif ways[i].space.kind not in (NONE, HADAMARD):
            x, ways[i] = store.stream(name).forward(x.float()), _Way(FusedTransform())
        rows[name] = x.contiguous()
    key, value = rows["key"], rows["value"]
    types = tuple(str(x.dtype).removeprefix("torch.") for x in (key, value))
    orders = tuple(way.space.order for way in ways)
    plans = [
        _PLANS.number(NearestPlan(layout, types, orders, count))  # type: ignore[arg-type]
        for count in (FEW, many(layout))
    ]
    _nearest(
        store.pages,
        store.overlays["key"],
        store.overlays["value"],
        key,
        value,
        *(way.space.mean for way in ways),
        *(way.factors for way in ways),
        *(way.space.tensor for way in ways),
        *codebooks(store),  # type: ignore[arg-type]
        batch.slot_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        batch.overlay_rows,
        plans,
    )


def _ways(store: LayerStore) -> tuple[_Way, _Way]:
    """Made once for a store."""
    found = store.prepared.get("cuda.nearest")
    if found is None:
        found = tuple(_way(store, name) for name in store.layout.recipe.streams)
        store.prepared["cuda.nearest"] = found
    return found  # type: ignore[no-any-return]


def _way(store: LayerStore, name: StreamName) -> _Way:
    transforms, layout, device = store.stream(name).transforms, store.layout, store.pages.device
    if transforms and isinstance(transforms[0], BoundSmooth):
        space = fuse(transforms[1:], "forward", layout, device)
        if space.kind in (NONE, HADAMARD) and space.mean is None:
            factors = transforms[0].factors.float().expand(layout.heads, layout.head_dim)
            return _Way(space, factors.contiguous())
    return _Way(fuse(transforms, "forward", layout, device))


@torch.library.custom_op("kvant::append_nearest", mutates_args=("pages", "window_key", "window_value"))
def _nearest(
    pages: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    key: Tensor,
    value: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    key_factors: Tensor | None,
    value_factors: Tensor | None,
    key_signs: Tensor | None,
    value_signs: Tensor | None,
    key_books: Tensor,
    value_books: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    plans: list[int],
) -> None:
    if not len(key):
        return
    few, made = (_PLANS[plan] for plan in plans)
    heads, kernel = made.layout.heads, _kernel(made, key.device)
    if -(-len(key) // made.rows) * heads < kernel.blocks // 2:  # not enough work for all multiprocessors
        made, kernel = few, _kernel(few, key.device)
    inputs = [
        key,
        value,
        key_mean,
        value_mean,
        key_factors,
        value_factors,
        key_signs,
        value_signs,
        key_books,
        value_books,
    ]
    inputs += [pages, slot_mapping, query_start_loc, seq_lens, overlay_rows, window_key, window_value]
    arguments = _Arguments(
        *nvrtc.addresses(*inputs),
        len(key),
        len(seq_lens),
        nvrtc.half_of(len(seq_lens)),
    )
    kernel.launch((max(1, min(-(-len(key) // made.rows) * heads, kernel.blocks // 2)), 2), arguments)


@_nearest.register_fake
def _(*args: object) -> None:
    return None
