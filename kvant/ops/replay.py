"""Decode of many tokens at once: what token-by-token decode computes, where all tokens are known beforehand.

A text that is scored, not generated, need not be fed token by token. Each new token's query attends exactly as decode would have at
that token's length: to codes where `spans` says packed, to full precision in the window. The codes are read from the pages; the
overlays, as they were at each length, are put together from the overlay before the append and the new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from kvant.layout import StreamName
from kvant.ops.reference import masked_logits, mean_logits, overlay_index, read, softmax, token_share
from kvant.ops.types import LayerStore, PagedBatch, as_held, some_sequences, without_overlay

Tensor = torch.Tensor
SCORES = 1 << 27  # attention scores that are held at a time; sequences beyond them come after


@dataclasses.dataclass(frozen=True)
class Overlay:
    """Every full-precision token that decode would have read at one of the lengths.

    tokens  [sequences, tokens, heads, head_dim], in the basis of attention; zero where `held` is false
    held    which positions there are: [sequences, tokens]
    """

    tokens: Tensor
    held: Tensor


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
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Calls `append`, which stores the new tokens, and attends from each of them: [new tokens, heads, head_dim] each."""
    if not len(query):
        append()
        return torch.empty_like(query)
    new: dict[StreamName, Tensor] = {"key": key, "value": value}
    overlays = {name: _overlay(store, name, x, batch) for name, x in new.items()}
    append()
    counts = batch.query_start_loc.diff()
    sequence, position = batch.positions
    column = position - (batch.seq_lens - counts)[sequence]
    width, longest = int(counts.max()), int(batch.seq_lens.max())
    padded = query.new_zeros(len(counts), width, *query.shape[1:])
    padded[sequence, column] = query
    together = max(1, SCORES // (query.shape[1] * width * longest))
    out = torch.cat(
        [
            _attend(store, padded[some], batch, some, overlays, scale, softcap, sliding_window, sink_logits)
            for some in (slice(first, first + together) for first in range(0, len(counts), together))
        ]
    )
    return out[sequence, column]


def _overlay(store: LayerStore, name: StreamName, x: Tensor, batch: PagedBatch) -> Overlay | None:
    """The overlay of a stream with its new tokens x, [new tokens, heads, head_dim]; None where a stream has none. Called before the
    append, which overwrites the ring."""
    stream, overlay = store.stream(name), store.overlays[name]
    spec = stream.spec.window
    if not overlay.shape[1]:
        return None
    sequence, position = batch.positions
    before = (batch.seq_lens - batch.query_start_loc.diff())[:, None]
    at = torch.arange(int(batch.seq_lens.max()), device=x.device)
    ring = (at >= spec.sink) & (at >= before - spec.ring) & (at >= batch.ring_start[name][:, None])
    held = (at < before) & ((at < batch.sinks[:, None]) | ring)
    index = overlay_index(spec, at).clamp_max(overlay.shape[1] - 1)
    tokens = overlay[batch.overlay_rows[:, None], index[None, :]].float()
    tokens = torch.where(held[..., None, None], tokens, 0.0)
    tokens[sequence, position] = as_held(stream.windowed(x.float(), position), overlay.dtype).float()
    held[sequence, position] = True
    return Overlay(stream.attended_window(tokens.transpose(0, 1), at).transpose(0, 1), held)


def _attend(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    some: slice,
    overlays: dict[StreamName, Overlay | None],
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Attention of `some` sequences from their new tokens, query [sequences, new tokens, query heads, head_dim], of which the last
    are padding where a sequence has fewer."""
    rows, new, query_heads, dim = query.shape
    total = int(batch.seq_lens.max())
    part = some_sequences(batch, some)
    counts = batch.query_start_loc.diff()[some]
    position = torch.arange(total, device=query.device)
    at = (part.seq_lens - counts)[:, None, None] + torch.arange(new, device=query.device)[:, None]  # of the queries
    keep = position <= at  # [sequences, new tokens, tokens]
    if sliding_window is not None:
        keep &= position > at - sliding_window
    asked = keep & (
        at < part.seq_lens[:, None, None]
    )  # by queries that are no padding: pages hold codes of these tokens
    packed: dict[StreamName, Tensor] = {}
    from_page: dict[StreamName, Tensor] = {}
    pages_only = without_overlay(part)
    for name, full in overlays.items():
        spec = store.stream(name).spec.window
        from_page[name] = (position >= spec.sink) & (position < spec.packed_end(at + 1))
        if full is not None:  # what the overlay does not hold is read from the page
            from_page[name] = from_page[name] | ~full.held[some, None]
        from_page[name] = from_page[name] & asked
        codes = read(store, name, pages_only, part.seq_lens)[:, :total]
        packed[name] = torch.where(from_page[name].any(1)[..., None, None], codes, 0.0)
    q = query.float().view(rows, new, store.layout.heads, -1, dim)
    mean_logit = mean_logits(store, q, scale, softcap, sink_logits)
    q = store.key.dual(q)
    scores = torch.einsum("bqhgd,bnhd->bhgqn", q, packed["key"])
    full = overlays["key"]
    if full is not None:
        exact = torch.einsum("bqhgd,bnhd->bhgqn", q, full.tokens[some])
        scores = torch.where(from_page["key"][:, None, None], scores, exact)
    mean_logit = None if mean_logit is None else mean_logit.permute(0, 2, 3, 1)
    logits = masked_logits(scores * scale, keep[:, None, None], softcap, mean_logit)
    weights = softmax(logits)
    full = overlays["value"]
    if full is None:
        out = torch.einsum("bhgqn,bnhd->bqhgd", weights, packed["value"])
    else:
        coded = from_page["value"][:, None, None]
        out = torch.einsum("bhgqn,bnhd->bqhgd", weights * coded, packed["value"])
        out += torch.einsum("bhgqn,bnhd->bqhgd", weights * ~coded, full.tokens[some])
    out = store.value.inverse(out)
    if sink_logits is not None:
        share = token_share(
            logits.logsumexp(-1), sink_logits.float().view(store.layout.heads, -1, 1)
        )  # [b, heads, group, new]
        out = out * share.permute(0, 3, 1, 2)[..., None]
    return out.reshape(rows, new, query_heads, dim).to(query.dtype)
