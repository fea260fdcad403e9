"""Prefill over a packed history, a block of tokens at a time: what it holds at once does not grow with the history.

Two ways, both of this implementation; a call's arguments decide, and `fused_serves` says how:

  fused   pages are unpacked by kernels/unpack.cu into the model's own space, where nothing has to be done to queries, new keys and
          values and outputs: stored rows x come back as x M + offset. Fused attention reads them beside the new tokens. Blocks are
          merged by their log-sum-exps; a history that fits one block is attended to together with the new tokens, in one call.
  masked  a sliding window that ends inside a sequence, a soft cap that the fused attention lacks, and float32 queries go through the
          loop of kvant.ops.blocked, which holds scores to mask or cap them; pages are unpacked in torch.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import torch

from kvant.layout import Layout, StreamName
from kvant.ops import blocked, flash
from kvant.ops.blocked import Part, merge
from kvant.ops.cuda import refusals
from kvant.ops.cuda.unpack import rotate_keys, unpack
from kvant.ops.fused import FusedTransform, TransformKind, blocks_of, matrix_of
from kvant.ops.registry import register
from kvant.ops.types import Derived, LayerStore, PagedBatch, one_sequence

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
    return None


def fused_serves(
    fused: flash.Flash, dtype: torch.dtype, longest: int, softcap: float | None, sliding_window: int | None
) -> bool:
    """Whether fused attention can serve queries of a type and sequences of at most `longest` tokens: it takes 16-bit queries, has no
    sliding window, and caps logits where its `softcap` says so."""
    if dtype == torch.float32 or (softcap is not None and not fused.softcap):
        return False
    return sliding_window is None or sliding_window >= longest


@register("prefill", "cuda", refuse, rank=10)
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
    """As the reference's `prefill`, fused where `fused_serves`, else masked."""
    query_start_loc, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    fused = store.flash
    if not fused_serves(fused, query.dtype, max(seq_lens, default=0), softcap, sliding_window):
        return blocked.by_blocks(store, query, key, value, batch, scale, softcap, sliding_window, blocked.unpack)
    out = torch.empty_like(query)
    for b, length in enumerate(seq_lens):
        part = slice(query_start_loc[b], query_start_loc[b + 1])
        history = length - (part.stop - part.start)
        q, k, v = query[part], key[part], value[part]
        if not len(q):
            continue
        if not history:
            out[part] = fused.run(q, k, v, scale, True, softcap)[0]
            continue
        out[part] = _one(store, q, k, v, one_sequence(batch, b), history, scale, softcap, fused)
    return out


def _one(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PagedBatch,
    history: int,
    scale: float,
    softcap: float | None,
    fused: flash.Flash,
) -> Tensor:
    dtype = fused.dtype or query.dtype
    q, fresh = query.to(dtype), {"key": key, "value": value}
    total: Part | None = None
    for first in range(0, history, BLOCK_TOKENS):
        last = min(history, first + BLOCK_TOKENS)
        new = len(query) if last == history and last - first + len(query) <= BLOCK_TOKENS else 0
        both = []
        for name in fresh:
            x = read(store, name, row, history, first, last, dtype, new)  # type: ignore[arg-type]
            if new:
                x[:, last - first :] = fresh[name].transpose(0, 1)
            both.append(x.transpose(0, 1))
        total = merge(total, _part(fused.run(q, both[0], both[1], scale, bool(new), softcap)))
    if not new:
        total = merge(total, _part(fused.run(q, key.to(dtype), value.to(dtype), scale, True, softcap)))
    assert total is not None
    return total.out.to(query.dtype)


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
