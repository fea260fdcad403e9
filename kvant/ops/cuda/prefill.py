"""Prefill over a packed history, a block of tokens at a time: what it holds at once does not grow with the history.

It has two ways, `Way`. The layout and the device decide when a cache is made whether this implementation serves at all (`refuse`).
Which way a call takes depends on what only the call knows, its queries' type, soft cap, sliding window and lengths; `way_of` alone
decides that, and `kvant doctor` prints the rule (ABOUT). Both ways are the loop `blocked.over_spans`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Self

import torch

from kvant.layout import Layout, StreamName
from kvant.ops import blocked, flash
from kvant.ops.blocked import Part, over_spans
from kvant.ops.cuda import refusals
from kvant.ops.cuda.unpack import rotate_keys, unpack
from kvant.ops.fused import FusedTransform, TransformKind, blocks_of, matrix_of
from kvant.ops.registry import register
from kvant.ops.types import Derived, LayerStore, PagedBatch, prefill_each

Tensor = torch.Tensor
BLOCK_TOKENS = 16384  # of a history, unpacked at a time


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why a layout's history cannot be unpacked on a device, or None."""
    return refusals.refuse(layout, device) or refuse_layout(layout)


def refuse_layout(layout: Layout) -> str | None:
    """Why unpack.cu does not read what the decode kernel does, or None."""
    for name, stream in layout.formats.items():
        if not stream.is_tokenwise:
            return f"it unpacks token-wise affine codes, and the {name}s are coded by {stream.codec}"
        if stream.scale_groups > 1:
            return f"it unpacks one scale a token, and the {name}s have {stream.scale_groups}"
    return None


class Way(enum.Enum):
    """How a call is served.

    FUSED   kernels/unpack.cu unpacks pages into the model's own space, so that nothing has to be done to queries, new keys and
            values, and outputs: stored rows x come back as x M + offset. Fused attention (`store.flash`) reads them beside the new
            tokens.
    MASKED  pages are unpacked in torch, and scores are held to mask or cap them (kvant.ops.blocked). Slower.
    """

    FUSED = "fused"
    MASKED = "masked"


ABOUT = (
    "fused for 16-bit queries; slower, with scores in memory, for float32 queries, a sliding window shorter than a sequence, "
    "and a soft cap that the engine's fused attention lacks"
)


def way_of(
    fused: flash.Flash, dtype: torch.dtype, seq_lens: Tensor, softcap: float | None, sliding_window: int | None
) -> Way:
    """The way of a call whose queries are of a type and whose sequences have `seq_lens` tokens. `fused` takes 16-bit queries, has no
    sliding window, and caps logits where its `softcap` says so."""
    if dtype == torch.float32 or (softcap is not None and not fused.softcap):
        return Way.MASKED
    if sliding_window is not None and bool((seq_lens > sliding_window).any()):
        return Way.MASKED
    return Way.FUSED


@register("prefill", "cuda", refuse, rank=10, about=ABOUT)
def prefill(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """As the reference's `prefill`, by the `Way` that `way_of` gives."""
    way = way_of(store.flash, query.dtype, batch.seq_lens, softcap, sliding_window)
    if way is Way.MASKED:
        return blocked.by_blocks(store, query, key, value, batch, scale, softcap, sliding_window, blocked.unpack)

    def attend(q: Tensor, k: Tensor, v: Tensor, row: PagedBatch, history: int) -> Tensor:
        return _one(store, q, k, v, row, history, scale, softcap)

    return prefill_each(query, key, value, batch, attend)


def _one(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PagedBatch,
    history: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One sequence by Way.FUSED. Where they fit into the last block of the history, the new tokens are attended to with it, in one
    call."""
    fused = store.flash
    if not history:
        return fused.run(query, key, value, scale, True, softcap)[0]
    dtype = fused.dtype or query.dtype
    q, new = query.to(dtype), {"key": key, "value": value}
    spans = [(first, min(history, first + BLOCK_TOKENS)) for first in range(0, history, BLOCK_TOKENS)]
    joined = history - spans[-1][0] + len(query) <= BLOCK_TOKENS

    def attend(first: int, last: int) -> Part:
        more = len(query) if joined and last == history else 0
        both = []
        for name in new:
            x = read(store, name, row, history, first, last, dtype, more)  # type: ignore[arg-type]
            if more:
                x[:, last - first :] = new[name].transpose(0, 1)
            both.append(x.transpose(0, 1))
        return _part(fused.run(q, both[0], both[1], scale, bool(more), softcap))

    def own() -> Part:
        return _part(fused.run(q, key.to(dtype), value.to(dtype), scale, True, softcap))

    return over_spans(spans, attend, None if joined else own).out.to(query.dtype)


def _part(found: tuple[Tensor, Tensor]) -> Part:
    return Part(found[0], found[1][..., None])


def read(
    store: LayerStore, name: StreamName, row: PagedBatch, n: int, first: int, last: int, dtype: torch.dtype, more: int
) -> Tensor:
    """Tokens [first, last) of a sequence of n in the model's space: [heads, tokens + more, head_dim], where what is `more` is
    left to be written."""
    x = unpack(store, name, row, n, first, last, dtype)
    inverse = _inverse(store, name, dtype)
    if inverse.kind is not TransformKind.NONE:
        assert inverse.tensor is not None
        x = (
            x @ inverse.tensor
            if inverse.offset is None
            else torch.baddbmm(inverse.offset[:, None], x, inverse.tensor.expand(len(x), -1, -1))
        )
    if store.stream(name).rope is not None:
        size = store.stream(name).spec.effective_rope_block
        rope = store.stream(name).rope
        assert rope is not None
        rotate_keys(store, x, first, blocks_of(last, rope.first, size))
    if not more:
        return x
    out = x.new_empty(x.shape[0], x.shape[1] + more, x.shape[2])
    out[:, : x.shape[1]] = x
    return out


@dataclasses.dataclass
class StoredInverses(Derived):
    """How stored tokens come back into the model's space, by stream and type of the rows."""

    inverse: dict[tuple[StreamName, torch.dtype], FusedTransform] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        return cls()


def _inverse(store: LayerStore, name: StreamName, dtype: torch.dtype) -> FusedTransform:
    """x M + offset of stored tokens x in the model's space; made once for a store."""
    made = store.derive(StoredInverses).inverse
    if (name, dtype) not in made:
        found = matrix_of(store.stream(name).transforms, "inverse", store.layout, store.pages.device)
        matrix, offset = (None if x is None else x.to(dtype) for x in (found.tensor, found.offset))
        made[name, dtype] = FusedTransform(found.kind, 1, matrix, offset)
    return made[name, dtype]
