"""Decode by lookup table: VecInfer's Algorithm 1, for keys that are stored as indices of centroids.

The products of the query's sub-vectors with all centroids are made once (line 4); a token's score is then a sum of entries of that
table, picked by the token's indices (line 11), and no key is decoded. Values are decoded a block at a time (line 16). Blocks are
merged by an online softmax (lines 12, 13 and 18), so memory does not grow with the sequence.

Tokens that the overlay holds are scored in full precision. Append and prefill are the reference's: a table does not help them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvant.layout import Layout, StreamName
from kvant.ops import reference
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch, one_query_each, queries_per_sequence

Tensor = torch.Tensor
BLOCK_PAGES = 16  # pages of every sequence that are scored at a time


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why a layout cannot be decoded by lookup table, or None."""
    key = layout.format("key")
    if not key.is_pq:
        return f"it looks scores up by the keys' indices of centroids, and {key.codec} stores none"
    if layout.format("value").group_tokens > 1:
        return "it reads values token by token, and they are coded in groups"
    if layout.recipe.key.rope != "post":
        return "it scores keys as they are stored, and they are stored unrotated"
    return None


register("append", "lookup", refuse, rank=-1)(reference.append)
register("prefill", "lookup", refuse, rank=-1)(reference.prefill)


def score_table(q: Tensor, codebooks: Tensor) -> Tensor:
    """table[b, h, g, m, c] = <sub-vector m of q[b, h, g], centroid c>: [b, heads, group, head_dim] and codebooks
    [heads or 1, subvectors or 1, centroids, dim] -> [b, heads, group, subvectors, centroids]."""
    parts = q.unflatten(-1, (-1, codebooks.shape[-1]))
    books = codebooks.to(q.dtype)
    books = books.expand(q.shape[1], parts.shape[-2], *books.shape[2:])
    return torch.einsum("bhgmd,hmcd->bhgmc", parts, books)


def look_up(table: Tensor, indices: Tensor) -> Tensor:
    """Scores of tokens, [b, heads, group, tokens], from the table and their indices [b, tokens, heads, subvectors]."""
    index = indices.permute(0, 2, 3, 1)[:, :, None].expand(-1, -1, table.shape[2], -1, -1)
    return table.gather(-1, index).sum(-2)


@register("decode", "lookup", refuse, rank=-1)
def decode(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """As the reference's `decode`."""
    batch = one_query_each(batch, queries_per_sequence(query, batch, store.layout))
    sequences, query_heads, dim = query.shape
    layout, codebooks = store.layout, store.key.codec.tensors.codebooks
    assert codebooks is not None
    accurate = query.dtype if query.dtype == torch.float64 else torch.float32
    q = query.to(accurate).view(sequences, layout.heads, -1, dim)
    mean_logit = reference.mean_logits(store, q, scale, softcap, sink_logits)
    q = store.key.dual(q)
    table = score_table(q, codebooks)
    out = torch.zeros_like(q)
    total = q.new_zeros(*q.shape[:3], 1)
    highest = q.new_full((*q.shape[:3], 1), torch.finfo(accurate).min)
    for first in range(0, batch.block_table.shape[1], BLOCK_PAGES):
        pages = batch.block_table[:, first : first + BLOCK_PAGES].clamp_min(0)
        page_heads = store.pages[pages.flatten()]  # [pages, heads, page_head_bytes]
        position = torch.arange(pages.shape[1] * layout.page_tokens, device=query.device) + first * layout.page_tokens
        rows = sequences, len(position), layout.heads
        scores = look_up(table, layout.unpack("key", page_heads)["indices"].long().reshape(*rows, -1))
        values = store.value.codec.decode(layout.unpack("value", page_heads)).to(accurate).reshape(*rows, dim)
        full = _match(store, "key", batch, position)
        if full is not None:
            exact = torch.einsum("bhgd,bnhd->bhgn", q, full.tokens.to(accurate))
            scores = torch.where(full.held[:, None, None], exact, scores)
        full = _match(store, "value", batch, position)
        if full is not None:
            values = torch.where(full.held[..., None, None], full.tokens.to(accurate), values)
        scores = scores * scale
        scores = scores if mean_logit is None else scores + mean_logit[..., None]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        keep = position < batch.seq_lens[:, None]
        values = torch.where(keep[..., None, None], values, 0.0)  # past its end a sequence's page is undefined
        if sliding_window is not None:
            keep = keep & (position >= batch.seq_lens[:, None] - sliding_window)
        scores = scores.masked_fill(~keep[:, None, None], float("-inf"))
        top = torch.maximum(highest, scores.amax(-1, keepdim=True))  # online softmax: m' = max(m, max S)
        weights, rescale = (scores - top).exp(), (highest - top).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        out = out * rescale + torch.einsum("bhgn,bnhd->bhgd", weights, values)  # O = exp(m - m') O + P V
        highest = top
    out = store.value.inverse(out / total.clamp_min(torch.finfo(accurate).tiny))
    if sink_logits is not None:
        sink = sink_logits.to(accurate).view(layout.heads, -1, 1)
        out = out * reference.token_share(highest + total.log(), sink)
    return out.reshape(sequences, query_heads, dim).to(query.dtype)


class OverlayMatch(NamedTuple):
    """Tokens of a block of positions that are read from the overlay."""

    held: Tensor  # bool [sequences, tokens]: read from the overlay
    tokens: Tensor  # [sequences, tokens, heads, head_dim]; undefined where not held


def _match(store: LayerStore, name: StreamName, batch: PagedBatch, position: Tensor) -> OverlayMatch | None:
    """The overlay of a stream at some positions; None where the recipe has none."""
    window, overlay = store.stream(name).spec.window, store.overlays[name]
    if not overlay.shape[1]:
        return None
    n, sinks, ring_start = batch.seq_lens[:, None], batch.sinks[:, None], batch.ring_start[name][:, None]
    held = reference.overlay_mask(window, position, n, sinks, ring_start)
    index = reference.overlay_index(window, position).clamp_max(overlay.shape[1] - 1)
    return OverlayMatch(held, overlay[batch.overlay_rows[:, None], index])
