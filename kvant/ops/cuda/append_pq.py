"""Appends to streams of product quantization by kernels/append_pq.cu: one launch for any number of new tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Self

import torch

from kvant.codecs.format import Codebook
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES, overlay_config, page_config, window_type
from kvant.ops.cuda.decode_matrices import Codebooks
from kvant.ops.cuda.device import shared_memory
from kvant.ops.cuda.transform_kv import transform_rows
from kvant.ops.fused import FusedTransform, TransformKind, fuse
from kvant.ops.types import Derived, LayerStore, PagedBatch

Tensor = torch.Tensor
THREADS = 256
SLICE_CHANNELS = 32  # channels of a row whose codebooks a CTA has, where each sub-vector has its own
LEAST_SLICE = 8  # sub-vectors of these, at least
_PLANS: nvrtc.Numbered[AppendPqPlan] = nvrtc.Numbered()

AppendPqArguments = Arguments(
    "AppendPqArguments",
    key=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM]"),
    value=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM]"),
    key_mean=optional("const float", "[KV_HEADS, HEAD_DIM], subtracted first"),
    value_mean=optional("const float", "[KV_HEADS, HEAD_DIM]"),
    key_factors=optional("const float", "[KV_HEADS, HEAD_DIM], divided by next"),
    value_factors=optional("const float", "[KV_HEADS, HEAD_DIM]"),
    key_signs=optional("const float", "[HEAD_DIM], multiplied by before the Hadamard"),
    value_signs=optional("const float", "[HEAD_DIM]"),
    key_books=pointer("const u8", "float16 [KV_HEADS or 1, centroids, channels of a sub-vector]"),
    value_books=pointer("const u8", "float16 [KV_HEADS or 1, centroids, channels of a sub-vector]"),
    pages=pointer("u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    slot_mapping=pointer("const s64", "[tokens], page * PAGE_TOKENS + place; -1 is padding"),
    query_start_loc=pointer("const s64", "[batch + 1], first new token of a sequence"),
    seq_lens=pointer("const s64", "[batch], tokens of a sequence with its new ones"),
    overlay_rows=pointer("const s64", "[batch], row of the overlays"),
    raw_key=optional(
        "const void", "[tokens, KV_HEADS, HEAD_DIM], keys as the model gave them, where the overlay holds these"
    ),
    overlay_key=pointer("void", "[rows, OVERLAY_TOKENS, KV_HEADS, HEAD_DIM]"),
    overlay_value=pointer("void", "[rows, OVERLAY_TOKENS, KV_HEADS, HEAD_DIM]"),
    raw_stride=int32("elements from a token's raw keys to the next token's"),
    tokens=int32("new tokens"),
    batch=int32("sequences"),
    half_batch=int32("largest power of two below the batch, or 0: where a binary search begins"),
)


def serves(layout: Layout) -> bool:
    """Whether both streams are product-quantized."""
    return all(stream.is_pq for stream in layout.formats.values())


@dataclasses.dataclass(frozen=True)
class AppendPqPlan:
    """The kernel for one layout and way to call it. Orders are those of Hadamard transforms, 1 where there is none."""

    layout: Layout
    types: tuple[str, str]  # of the keys and values that come in
    orders: tuple[int, int]
    rows: int  # of a CTA at a time
    raw: str = "bfloat16"  # type of the keys as the model gave them, where the overlay holds these

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory of codebooks, half of the squared norms of their centroids, their largest norms, rows and indices."""
        total = 0
        for book in _codebooks(self.layout).values():
            by_place = book.per == "space"
            books, tops = (slice_of(book), 1) if by_place else (1, THREADS // 32)
            held = books * ((book.centroids + by_place) * (2 * book.dim + 4) + 4 * tops)
            total = max(total, held + self.rows * (4 * self.layout.head_dim + 2 * slice_of(book)))
        return total

    @functools.cached_property
    def text(self) -> str:
        config: dict[str, object] = {
            **page_config(self.layout),
            **overlay_config(self.layout),
            "VALUE_WINDOW_TYPE": window_type(self.layout, "value"),
            "RAW_TYPE": ELEMENT_TYPES[self.raw],
            "ROWS": self.rows,
            "THREADS": THREADS,
            "Key": self._stream("key", 0),
            "Value": self._stream("value", 1),
        }
        return nvrtc.program("kernels/append_pq.cu", config=config, arguments=[AppendPqArguments])

    def _stream(self, name: StreamName, i: int) -> dict[str, object]:
        low, *high = (s for s in self.layout.sections if s.stream == name and s.kind == "index")
        bits, offset = (high[0].bits, high[0].offset) if high else (0, 0)
        book = _codebooks(self.layout)[name]
        by_place = str(book.per == "space").lower()
        return {
            "IN_TYPE": ELEMENT_TYPES[self.types[i]],
            "HADAMARD": self.orders[i],
            "HADAMARD_SCALE": self.orders[i] ** -0.5,
            "Codebook": f"Book<{book.dim}, {low.width}, {low.bits}, {bits}, {low.offset}, {offset}, {slice_of(book)}, {by_place}>",
            "BOOK_HEADS": book.heads(self.layout.heads),
        }


def _codebooks(layout: Layout) -> dict[StreamName, Codebook]:
    return {name: stream.codebook for name, stream in layout.formats.items() if stream.codebook is not None}


def slice_of(book: Codebook) -> int:
    """Sub-vectors of a row that a CTA looks for: all of them, or some where each has a codebook of its own. Their indices are whole
    bytes."""
    some = max(LEAST_SLICE, SLICE_CHANNELS // book.dim)
    return some if book.per == "space" and book.vectors % some == 0 else book.vectors


def slices(layout: Layout) -> int:
    """CTAs that a row takes, at least."""
    return min(book.vectors // slice_of(book) for book in _codebooks(layout).values())


def low_batch_rows(layout: Layout) -> int:
    """Rows of a CTA where there are few new tokens: more where codebooks take longer to copy."""
    return 16 if slices(layout) > 1 else 4


def high_batch_rows(layout: Layout) -> int:
    """Rows of a CTA where there are many new tokens."""
    return (16 if layout.head_dim > 128 else 32) * (2 if slices(layout) > 1 else 1)


def refuse_memory(layout: Layout, device: torch.device) -> str | None:
    """Why a device's shared memory does not hold what the search needs, or None."""
    needed = AppendPqPlan(layout, ("float32", "float32"), (1, 1), high_batch_rows(layout)).dynamic_bytes
    if needed + 1024 > shared_memory(device)[0]:
        return f"a codebook and rows of {needed} bytes are more than this GPU's shared memory holds"
    return None


@functools.lru_cache(maxsize=256)
def _kernel(made: AppendPqPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, "kvant_append_pq", device, THREADS, made.dynamic_bytes)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """How the kernel transforms the rows of a stream: (x - mean) / factors, then a Hadamard. A matrix is not the kernel's."""

    fused: FusedTransform
    factors: Tensor | None = None  # float32 [heads, head_dim]


@dataclasses.dataclass
class AppendPqTransforms(Derived):
    """The transforms of a store's streams."""

    forward: dict[StreamName, _Forward]

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        return cls({"key": _forward(store, "key"), "value": _forward(store, "value")})


def _forward(store: LayerStore, name: StreamName) -> _Forward:
    transforms, layout, device = store.stream(name).transforms, store.layout, store.pages.device
    factors = transforms[0].form.factors if transforms else None
    if factors is not None:
        fused = fuse(transforms[1:], "forward", layout, device)
        if fused.kind is not TransformKind.MATRIX and fused.mean is None:
            return _Forward(fused, factors.float().expand(layout.heads, layout.head_dim).contiguous())
    return _Forward(fuse(transforms, "forward", layout, device))


def append(store: LayerStore, rows: dict[StreamName, Tensor], batch: PagedBatch) -> None:
    """As the reference's `append`. Rows are unrotated by transform_kv, and matrices multiplied by in torch, before the kernel."""
    layout, ways = store.layout, dict(store.derive(AppendPqTransforms).forward)
    raw = rows["key"].contiguous() if store.key.spec.raw_window else None
    raw_type = "bfloat16" if raw is None else str(raw.dtype).removeprefix("torch.")
    for name, x in list(rows.items()):
        if store.stream(name).rope is not None:
            x, ways[name] = transform_rows(store, name, x, batch), _Forward(FusedTransform())
        elif ways[name].fused.kind is TransformKind.MATRIX:
            x, ways[name] = store.stream(name).forward(x.float()), _Forward(FusedTransform())
        rows[name] = x.contiguous()
    key, value, books = rows["key"], rows["value"], store.derive(Codebooks)
    assert books.key is not None and books.value is not None
    types = tuple(str(x.dtype).removeprefix("torch.") for x in (key, value))
    orders = tuple(way.fused.order for way in ways.values())
    plans = [
        _PLANS.number(AppendPqPlan(layout, types, orders, count, raw_type))  # type: ignore[arg-type]
        for count in (low_batch_rows(layout), high_batch_rows(layout))
    ]
    _append_pq(
        store.pages,
        store.overlays["key"],
        store.overlays["value"],
        key,
        value,
        raw,
        *(way.fused.mean for way in ways.values()),
        *(way.factors for way in ways.values()),
        *(way.fused.tensor for way in ways.values()),
        books.key,
        books.value,
        batch.slot_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        batch.overlay_rows,
        plans,
    )


@torch.library.custom_op("kvant::append_pq", mutates_args=("pages", "overlay_key", "overlay_value"))
def _append_pq(
    pages: Tensor,
    overlay_key: Tensor,
    overlay_value: Tensor,
    key: Tensor,
    value: Tensor,
    raw_key: Tensor | None,
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
    low_batch, made = (_PLANS[plan] for plan in plans)
    heads, kernel = made.layout.heads * slices(made.layout), _kernel(made, key.device)  # heads, and slices of them
    if -(-len(key) // made.rows) * heads < kernel.blocks // 2:  # not enough work for all multiprocessors
        made, kernel = low_batch, _kernel(low_batch, key.device)
    arguments = AppendPqArguments.fill(
        key=key,
        value=value,
        key_mean=key_mean,
        value_mean=value_mean,
        key_factors=key_factors,
        value_factors=value_factors,
        key_signs=key_signs,
        value_signs=value_signs,
        key_books=key_books,
        value_books=value_books,
        pages=pages,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        overlay_rows=overlay_rows,
        raw_key=raw_key,
        overlay_key=overlay_key,
        overlay_value=overlay_value,
        raw_stride=0 if raw_key is None else raw_key.stride(0),
        tokens=len(key),
        batch=len(seq_lens),
        half_batch=nvrtc.half_of(len(seq_lens)),
    )
    kernel.launch((max(1, min(-(-len(key) // made.rows) * heads, kernel.blocks // 2)), 2), arguments)


@_append_pq.register_fake
def _(*args: object) -> None:
    return None
