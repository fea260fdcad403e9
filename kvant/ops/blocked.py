"""Prefill over a packed history, a block of tokens at a time: its memory does not grow with the history.

Each block of the history is decoded, attended to by all new tokens, and merged with the blocks before it by the log-sum-exps; the
new tokens among themselves are one more block. Attention to a block is torch's fused attention: on a GPU in float16, whose 11 bits
hold codes times scales better than bfloat16's 8, on a CPU in float32. With a soft cap or a sliding window it is two matrix products
around a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.reference import mean_logits, overlay_index, overlay_mask, token_share
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch, prefill_each

Tensor = torch.Tensor
BLOCK_TOKENS = 4096  # of the history, decoded at a time
QUERY_BLOCK = 256  # rows of scores that are held at a time, where they are held


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why a layout is left to another implementation, or None."""
    if device.type == "cpu":
        return "it is for GPUs; on a CPU another reads blocks"
    for name, stream in layout.recipe.streams.items():
        if stream.groupwise:
            return f"it reads streams that are coded token by token, and the {name}s are coded in groups"
    return None


Unpack = Callable[[LayerStore, StreamName, Tensor, int, int], Tensor]
"""(store, stream, page ids, first, last) -> tokens [first, last) of those pages, as they are stored: float32 [tokens, heads,
head_dim]."""


def unpack(store: LayerStore, name: StreamName, pages: Tensor, first: int, last: int) -> Tensor:
    """An Unpack in torch. `first` is the first token of a page."""
    layout = store.layout
    here = pages[first // layout.page_tokens : -(-last // layout.page_tokens)].clamp_min(0)
    return store.stream(name).codec.decode(layout.unpack(name, store.pages[here]))[: last - first]


class Part(NamedTuple):
    """Attention over some of the keys: outputs [..., head_dim] and log-sum-exps [..., 1]."""

    out: Tensor
    lse: Tensor


def merge(a: Part | None, b: Part) -> Part:
    """Attention over the keys of both: O = sum_i exp(lse_i - lse) O_i with exp(lse) = sum_i exp(lse_i)."""
    if a is None:
        return b
    lse = torch.logaddexp(a.lse, b.lse)
    weights = [(part.lse - lse).exp().nan_to_num(0.0) for part in (a, b)]  # -inf - -inf: neither has a key for the row
    return Part(a.out * weights[0] + b.out * weights[1], lse)


def sink_share(lse: Tensor, sink_logits: Tensor) -> Tensor:
    """What outputs [heads, group, rows, head_dim] with log-sum-exps [heads, group, rows, 1] are multiplied by where a query head
    has a sink logit: [heads, group, rows, 1]."""
    return token_share(lse, sink_logits.float().view(*lse.shape[:2], 1, 1))


def over_spans(
    spans: Iterable[tuple[int, int]], attend: Callable[[int, int], Part], own: Callable[[], Part] | None
) -> Part:
    """The loop of every prefill by blocks: attention to tokens [first, last) of the history for each span, merged; then to the new
    tokens themselves, `own`, where the last span did not include them."""
    total: Part | None = None
    for first, last in spans:
        total = merge(total, attend(first, last))
    if own is not None:
        total = merge(total, own())
    assert total is not None
    return total


@register("prefill", "blocked", refuse, rank=5)
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
    sink_logits: Tensor | None = None,
) -> Tensor:
    """As the reference's `prefill`."""
    return by_blocks(store, query, key, value, batch, scale, softcap, sliding_window, unpack, sink_logits)


def by_blocks(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    read: Unpack,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Prefill by blocks; `read` unpacks tokens."""

    def attend(q: Tensor, k: Tensor, v: Tensor, row: PagedBatch, history: int) -> Tensor:
        return _one(store, q, k, v, row, history, scale, softcap, sliding_window, read, sink_logits)

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
    sliding_window: int | None,
    read: Unpack,
    sink_logits: Tensor | None,
) -> Tensor:
    new, query_heads, dim = query.shape
    heads, size = store.layout.heads, store.layout.page_tokens
    q, k, v = query.float().view(new, heads, -1, dim), key.float(), value.float()
    mean_logit: Tensor | None = None
    if history:
        mean_logit = mean_logits(store, q, scale, softcap, sink_logits)
        mean_logit = None if mean_logit is None else mean_logit.permute(1, 2, 0)
        q, k, v = store.key.dual(q), store.key.forward(k), store.value.forward(v)
    q = q.permute(1, 2, 0, 3)  # [heads, group, rows, head_dim]
    fused = softcap is None and (sliding_window is None or sliding_window >= history + new)
    origin = store.layout.recipe.origin
    low = 0 if sliding_window is None else max(0, history + 1 - sliding_window)
    places = range(max(0, low - origin) // size * size, max(1, history - origin), BLOCK_TOKENS) if history else ()
    spans = [(origin + at if at else 0, min(history, origin + at + BLOCK_TOKENS)) for at in places]

    def attend(first: int, last: int) -> Part:
        keys, values = (read_block(store, name, row, history, first, last, read) for name in ("key", "value"))  # type: ignore[arg-type]
        if fused:
            return attend_fused(q, keys, values, scale, causal=False)
        return attend_plain(q, keys, values, scale, softcap, sliding_window, history - first, mean_logit)

    def own() -> Part:
        if fused:
            return attend_fused(q, k, v, scale, causal=True)
        return attend_plain(q, k, v, scale, softcap, sliding_window, 0, mean_logit)

    found = over_spans(spans, attend, own)
    out = found.out.permute(2, 0, 1, 3)  # [rows, heads, group, head_dim]
    if history:
        out = store.value.inverse(out)
    if sink_logits is not None:
        lse = found.lse if mean_logit is None or softcap is not None else found.lse + mean_logit[..., None]
        out = out * sink_share(lse, sink_logits).permute(2, 0, 1, 3)
    return out.reshape(new, query_heads, dim).to(query.dtype)


def read_block(
    store: LayerStore, name: StreamName, row: PagedBatch, n: int, first: int, last: int, read: Unpack
) -> Tensor:
    """Tokens [first, last) of one sequence of n as attention reads them: float32 [tokens, heads, head_dim]. `first` is the first
    token of a page, or 0."""
    stream, overlay = store.stream(name), store.overlays[name]
    window = stream.spec.window
    origin = store.layout.recipe.origin
    before = max(0, min(last, origin) - first)  # tokens that lie before the first page
    packed = read(store, name, row.block_table[0], max(0, first - origin), max(0, last - origin))
    if before:
        packed = torch.cat((packed.new_zeros(before, *packed.shape[1:]), packed))
    position = torch.arange(first, last, device=packed.device)
    packed = stream.attended(packed, position)
    if overlay.shape[1]:
        full = overlay_mask(window, position, torch.full_like(row.sinks, n), row.sinks, row.ring_start[name])
        index = overlay_index(window, position).clamp_max(overlay.shape[1] - 1)
        held = stream.attended_window(overlay[row.overlay_rows[0]][index].float(), position)
        packed = torch.where(full[:, None, None], held, packed)
    return packed


def attend_fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Part:
    """Torch's fused attention. The query heads of a KV head become rows of one problem; with a causal mask, in which the row
    decides, keys and values are repeated instead."""
    heads, group, rows, dim = q.shape
    k, v = (x.transpose(0, 1)[None] for x in (k, v))  # [1, heads, tokens, head_dim]
    if causal:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        wide = q.reshape(1, heads * group, rows, dim)
    else:
        wide = q.reshape(1, heads, group * rows, dim)
    if q.is_cuda:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = attend(wide.half(), k.half(), v.half(), 0.0, causal, False, scale=scale)
    else:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(wide, k.contiguous(), v.contiguous(), 0.0, causal, scale=scale)
    return Part(out.float().reshape(heads, group, rows, dim), lse.reshape(heads, group, rows, 1))


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    ahead: int,
    mean_logit: Tensor | None,
) -> Part:
    """Attention of rows q to keys of which the first is `ahead` tokens before the first row. `mean_logit` [heads, group, rows] is
    added to the logits of a row before the cap."""
    rows = q.shape[2]
    place = torch.arange(len(k), device=q.device)
    parts = []
    for first in range(0, rows, QUERY_BLOCK):
        block = slice(first, min(rows, first + QUERY_BLOCK))
        at = torch.arange(block.start, block.stop, device=q.device)[:, None] + ahead
        keep = place <= at
        if sliding_window is not None:
            keep &= place > at - sliding_window
        scores = torch.einsum("hgqd,nhd->hgqn", q[:, :, block], k) * scale
        if softcap is not None:
            scores = scores if mean_logit is None else scores + mean_logit[:, :, block, None]
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~keep, float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse).exp().nan_to_num(0.0)
        parts.append(Part(torch.einsum("hgqn,nhd->hgqd", weights, v), lse))
    return Part(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
