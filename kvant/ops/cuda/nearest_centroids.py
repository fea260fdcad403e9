"""The nearest centroids of new rows, for streams that code the residual of a centroid of the whole head vector
(kernels/nearest_centroids.cu)."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Self

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES, page_config
from kvant.ops.cuda.device import shared_memory
from kvant.ops.types import Derived, LayerStore, PagedBatch

Tensor = torch.Tensor
WARPS = 8  # of a CTA
ROWS = 32  # rows of a CTA at a time
_PLANS: nvrtc.Numbered[NearestPlan] = nvrtc.Numbered()

NearestArguments = Arguments(
    "NearestArguments",
    key=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM]"),
    value=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM]"),
    key_mean=optional("const float", "[KV_HEADS, HEAD_DIM], subtracted after the Hadamard"),
    value_mean=optional("const float", "[KV_HEADS, HEAD_DIM]"),
    key_signs=optional("const float", "[HEAD_DIM], multiplied by before the Hadamard"),
    value_signs=optional("const float", "[HEAD_DIM]"),
    key_books=optional("const u8", "float16 [KV_HEADS or 1, centroids, HEAD_DIM]"),
    value_books=optional("const u8", "float16 [KV_HEADS or 1, centroids, HEAD_DIM]"),
    key_indices=pointer("u8", "[tokens, KV_HEADS], out"),
    value_indices=pointer("u8", "[tokens, KV_HEADS], out"),
    pages=pointer("u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    slot_mapping=pointer("const s64", "[tokens], page * PAGE_TOKENS + place; -1 is padding"),
    tokens=int32("new tokens"),
)


class SearchedRows(NamedTuple):
    """New rows of a stream, and what is done to them before the search: x = H diag(signs) x - mean."""

    rows: Tensor  # [tokens, heads, head_dim]
    order: int  # of the Hadamard; 1 where there is none
    signs: Tensor | None  # float32 [head_dim]
    mean: Tensor | None  # float32 [heads, head_dim]


@dataclasses.dataclass(frozen=True)
class Centroids(Derived):
    """Centroids of whole head vectors: fp16 [heads or 1, centroids, head_dim], or None."""

    key: Tensor | None
    value: Tensor | None

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        books = (
            store.stream(name).codec.tensors.codebooks if _centroids(store.layout, name) else None for name in _NAMES
        )
        return cls(*(None if book is None else book[:, 0].half().contiguous() for book in books))


_NAMES: tuple[StreamName, StreamName] = ("key", "value")


def _centroids(layout: Layout, name: StreamName) -> int:
    """Centroids of whole head vectors of a stream; 0 without."""
    stream = layout.format(name)
    return stream.codebook.centroids if stream.is_residual and stream.codebook is not None else 0


def serves(layout: Layout) -> bool:
    """Whether a stream codes residuals of centroids."""
    return any(_centroids(layout, name) for name in _NAMES)


@dataclasses.dataclass(frozen=True)
class NearestPlan:
    """The kernel for one layout and way to call it."""

    layout: Layout
    types: tuple[str, str]  # of the keys and values that come in
    orders: tuple[int, int]  # of Hadamard transforms, 1 where there is none
    means: tuple[bool, bool]

    def _parts(self, i: int) -> int:
        return 2 if self.types[i] == "float32" or self.orders[i] > 1 or self.means[i] else 1

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory: `struct NearestShared`."""
        dim, sizes = self.layout.head_dim, []
        for i, name in enumerate(_NAMES):
            count = -(-_centroids(self.layout, name) // 8) * 8
            sizes.append(
                (dim + 8) * 2 * (count + self._parts(i) * ROWS)
                + 4 * count
                + ROWS * (4 * dim + 8 + 12 * WARPS)
                + 4 * WARPS
            )
        return -(-max(sizes) // 16) * 16

    @functools.cached_property
    def text(self) -> str:
        config: dict[str, object] = {
            **page_config(self.layout),
            "SINK": 0,
            "RING": 1,
            "RING_TOKENS": 0,
            "OVERLAY_TOKENS": 0,
            "OVERLAY_TYPE": ELEMENT_TYPES["bfloat16"],
            "VALUE_WINDOW_TYPE": ELEMENT_TYPES["bfloat16"],
            "WARPS": WARPS,
            "Key": self._stream("key", 0),
            "Value": self._stream("value", 1),
        }
        return nvrtc.program("kernels/nearest_centroids.cu", config=config, arguments=[NearestArguments])

    def _stream(self, name: StreamName, i: int) -> dict[str, object]:
        book = self.layout.format(name).codebook
        index = [s for s in self.layout.sections if s.stream == name and s.kind == "index"]
        return {
            "IN_TYPE": ELEMENT_TYPES[self.types[i]],
            "HADAMARD": self.orders[i],
            "HADAMARD_SCALE": self.orders[i] ** -0.5,
            "MEAN": int(self.means[i]),
            "CENTROIDS": _centroids(self.layout, name),
            "INDEX_OFFSET": index[0].offset if index else -1,
            "BOOK_HEADS": 1 if book is None else book.heads(self.layout.heads),
        }


def refuse_memory(layout: Layout, device: torch.device) -> str | None:
    """Why a device's shared memory does not hold what the search needs, or None."""
    needed = NearestPlan(layout, ("float32", "float32"), (1, 1), (False, False)).dynamic_bytes
    if needed + 1024 > shared_memory(device)[0]:
        return f"centroids and rows of {needed} bytes are more than this GPU's shared memory holds"
    return None


@functools.lru_cache(maxsize=256)
def _kernel(made: NearestPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, "kvant_nearest_centroids", device, WARPS * 32, made.dynamic_bytes)


def nearest_centroids(
    store: LayerStore, key: SearchedRows, value: SearchedRows, batch: PagedBatch
) -> tuple[Tensor, Tensor]:
    """Indices of the nearest centroids of new keys and values, uint8 [tokens, heads], which are also written to their pages. Those of
    a stream with one centroid, or without, are undefined."""
    books = store.derive(Centroids)
    types = tuple(str(x.rows.dtype).removeprefix("torch.") for x in (key, value))
    made = NearestPlan(
        store.layout,
        types,  # type: ignore[arg-type]
        (key.order, value.order),
        (key.mean is not None, value.mean is not None),
    )
    return _nearest(
        store.pages,
        key.rows,
        value.rows,
        key.mean,
        value.mean,
        key.signs,
        value.signs,
        books.key,
        books.value,
        batch.slot_mapping,
        _PLANS.number(made),
    )


@torch.library.custom_op("kvant::nearest_centroids", mutates_args=("pages",))
def _nearest(
    pages: Tensor,
    key: Tensor,
    value: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    key_signs: Tensor | None,
    value_signs: Tensor | None,
    key_books: Tensor | None,
    value_books: Tensor | None,
    slot_mapping: Tensor,
    plan: int,
) -> tuple[Tensor, Tensor]:
    made = _PLANS[plan]
    found = [torch.empty(key.shape[:2], dtype=torch.uint8, device=key.device) for _ in range(2)]
    if len(key) and max(_centroids(made.layout, name) for name in _NAMES) > 1:
        arguments = NearestArguments.fill(
            key=key,
            value=value,
            key_mean=key_mean,
            value_mean=value_mean,
            key_signs=key_signs,
            value_signs=value_signs,
            key_books=key_books,
            value_books=value_books,
            key_indices=found[0],
            value_indices=found[1],
            pages=pages,
            slot_mapping=slot_mapping,
            tokens=len(key),
        )
        kernel = _kernel(made, key.device)
        heads = made.layout.heads
        kernel.launch((max(1, min(-(-len(key) // ROWS), kernel.blocks // (2 * heads))), 2 * heads), arguments)
    return found[0], found[1]


@_nearest.register_fake
def _(pages: Tensor, key: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return key.new_empty(key.shape[:2], dtype=torch.uint8), key.new_empty(key.shape[:2], dtype=torch.uint8)
