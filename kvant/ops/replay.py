"""Decode of many tokens at once: what token-by-token decode computes, where all tokens are known beforehand.

A text that is scored, not generated, need not be fed token by token. Each new token's query attends exactly as decode would have at
that token's length: to codes where `spans` says packed, to full precision in the window. The codes are read from the pages; the
overlays, as they were at each length, are put together from the overlay before the append and the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvant.codecs import DTYPES
from kvant.layout import StreamName
from kvant.ops.reference import mean_logits, overlay_index, read, softmax
from kvant.ops.types import LayerStore, PagedBatch, one_sequence

Tensor = torch.Tensor


def replay(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    append: Callable[[], None],
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Calls `append`, which stores the new tokens, and attends from each of them: [new tokens, heads, head_dim] each."""
    rows = [one_sequence(batch, b) for b in range(len(batch.seq_lens))]
    parts = [slice(int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1])) for b in range(len(rows))]
    new: dict[StreamName, Tensor] = {"key": key, "value": value}
    some = [
        (part, row) for part, row in zip(parts, rows, strict=True) if part.stop > part.start
    ]  # that have new tokens
    overlays = [{name: _overlay(store, name, x[part], row) for name, x in new.items()} for part, row in some]
    append()
    out = torch.empty_like(query)
    for (part, row), full in zip(some, overlays, strict=True):
        out[part] = _attend(store, query[part], row, full, scale, softcap, sliding_window)
    return out


def _overlay(store: LayerStore, name: StreamName, x: Tensor, row: PagedBatch) -> tuple[Tensor, Tensor] | None:
    """Every full-precision token that decode would have read at one of the lengths, [tokens, heads, head_dim], and which positions
    there are, [tokens]; None where a stream has no overlay. Called before the append, which overwrites the ring."""
    stream, overlay = store.stream(name), store.overlays[name]
    spec = stream.spec.window
    if not overlay.shape[1]:
        return None
    total = int(row.seq_lens[0])
    before = total - len(x)
    position = torch.arange(total, device=x.device)
    old = position[:before]
    held = (old < row.sinks[0]) | ((old >= spec.sink) & (old >= before - spec.ring) & (old >= row.ring_start[name][0]))
    index = overlay_index(spec, old).clamp_max(overlay.shape[1] - 1)
    history = torch.where(held[:, None, None], overlay[int(row.overlay_rows[0])][index].float(), 0.0)
    new = stream.stored(x.float(), position[before:]).to(DTYPES[store.layout.overlay_dtype]).float()
    held = torch.cat((held, held.new_ones(len(new))))
    return stream.attended(torch.cat((history, new)), position), held


def _attend(
    store: LayerStore,
    query: Tensor,
    row: PagedBatch,
    overlays: dict[StreamName, tuple[Tensor, Tensor] | None],
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> Tensor:
    new, query_heads, dim = query.shape
    total = int(row.seq_lens[0])
    position = torch.arange(total, device=query.device)
    at = position[total - new :, None]
    keep = position <= at
    if sliding_window is not None:
        keep &= position > at - sliding_window
    packed: dict[StreamName, Tensor] = {}
    from_page: dict[StreamName, Tensor] = {}
    nothing = row._replace(sinks=torch.zeros_like(row.sinks), ring_start=dict.fromkeys(row.ring_start, row.seq_lens))
    for name, full in overlays.items():
        spec = store.stream(name).spec.window
        from_page[name] = (position >= spec.sink) & (position < spec.packed_end(at + 1))  # [new tokens, tokens]
        if full is not None:  # what the overlay does not hold is read from the page
            from_page[name] = from_page[name] | ~full[1]
        codes = read(store, name, nothing, row.seq_lens)[0, :total]
        packed[name] = torch.where(from_page[name].any(0)[:, None, None], codes, 0.0)
    q = query.float().view(new, store.layout.heads, -1, dim)
    mean_logit = mean_logits(store, q, scale, softcap)
    q = store.key.dual(q)
    scores = torch.einsum("qhgd,nhd->hgqn", q, packed["key"])
    full = overlays["key"]
    if full is not None:
        scores = torch.where(from_page["key"], scores, torch.einsum("qhgd,nhd->hgqn", q, full[0]))
    weights = softmax(scores * scale, keep, softcap, None if mean_logit is None else mean_logit.permute(1, 2, 0))
    full = overlays["value"]
    if full is None:
        out = torch.einsum("hgqn,nhd->qhgd", weights, packed["value"])
    else:
        out = torch.einsum("hgqn,nhd->qhgd", weights * from_page["value"], packed["value"])
        out += torch.einsum("hgqn,nhd->qhgd", weights * ~from_page["value"], full[0])
    return store.value.inverse(out).reshape(new, query_heads, dim).to(query.dtype)
