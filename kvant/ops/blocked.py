"""Prefill over a packed history a block of pages at a time: what it holds at once does not grow with the history.

Each block is decoded, attended to by all new tokens, and merged with what came before by the log-sum-exps; the new tokens among
themselves are one more block. On a GPU a block is torch's fused attention in float16, which holds codes times scales better
than bfloat16 does; with a soft cap or a sliding window, and on a CPU, it is two matrix products in float32 around a softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.reference import lost_logits, overlay_index
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch, one_sequence

Tensor = torch.Tensor
BLOCK_TOKENS = 4096  # of the history, decoded at a time
QUERY_BLOCK = 256  # rows of scores that are held at a time, where they are held


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why a layout is better served by another, or None."""
    if device.type == "cpu":
        return "it is for GPUs; on a CPU the reference does the same"
    for name, stream in layout.recipe.streams.items():
        if stream.groupwise:
            return f"it reads streams that are coded token by token, and the {name}s are coded in groups"
    return None


class Part(NamedTuple):
    """Attention over some of the keys: outputs [heads, group, rows, head_dim] and log-sum-exps [heads, group, rows, 1]."""

    out: Tensor
    lse: Tensor


def merge(a: Part | None, b: Part) -> Part:
    """Attention over the keys of both."""
    if a is None:
        return b
    lse = torch.logaddexp(a.lse, b.lse)
    weights = [(part.lse - lse).exp().nan_to_num(0.0) for part in (a, b)]  # rows that see nothing have -inf in both
    return Part(a.out * weights[0] + b.out * weights[1], lse)


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
    window: int | None = None,
) -> Tensor:
    """As the reference's `prefill`."""
    out = torch.empty_like(query)
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for b, length in enumerate(lengths):
        part = slice(starts[b], starts[b + 1])
        row, history = one_sequence(batch, b), length - (part.stop - part.start)
        out[part] = _one(store, query[part], key[part], value[part], row, history, scale, softcap, window)
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
    window: int | None,
) -> Tensor:
    fresh, query_heads, dim = query.shape
    heads, size = store.layout.heads, store.layout.page_tokens
    if not fresh:
        return query
    q, k, v = query.float().view(fresh, heads, -1, dim), key.float(), value.float()
    lost: Tensor | None = None
    if history:
        lost = lost_logits(store, q, scale, softcap)
        lost = None if lost is None else lost.permute(1, 2, 0)
        q, k, v = store.key.dual(q), store.key.forward(k), store.value.forward(v)
    q = q.permute(1, 2, 0, 3)  # [heads, group, rows, head_dim]
    fused = query.is_cuda and softcap is None and window is None
    total: Part | None = None
    low = 0 if window is None else max(0, history + 1 - window)
    for first in range(low // size * size, history, BLOCK_TOKENS):
        last = min(history, first + BLOCK_TOKENS)
        keys, values = (read_block(store, name, row, history, first, last) for name in ("key", "value"))  # type: ignore[arg-type]
        if fused:
            total = merge(total, _fused(q, keys, values, scale, causal=False))
        else:
            total = merge(total, _plain(q, keys, values, scale, softcap, window, history - first, lost))
    own = _fused(q, k, v, scale, causal=True) if fused else _plain(q, k, v, scale, softcap, window, 0, lost)
    out = merge(total, own).out.permute(2, 0, 1, 3)  # [rows, heads, group, head_dim]
    if history:
        out = store.value.inverse(out)
    return out.reshape(fresh, query_heads, dim).to(query.dtype)


def read_block(store: LayerStore, name: StreamName, row: PagedBatch, n: int, first: int, last: int) -> Tensor:
    """Tokens [first, last) of one sequence of n as attention sees them: float32 [tokens, heads, head_dim]. `first` is the
    first token of a page."""
    layout, stream, overlay = store.layout, store.stream(name), store.overlays[name]
    window, size = stream.spec.window, layout.page_tokens
    pages = row.block_table[0, first // size : -(-last // size)].clamp_min(0)
    packed = stream.codec.decode(layout.unpack(name, store.pages[pages]))[: last - first]
    position = torch.arange(first, last, device=packed.device)
    if overlay.shape[1]:
        frontier = max(window.packed_end(n), window.sink)
        full = (position < row.sinks[0].clamp_max(n)) | ((position >= frontier) & (position >= row.exact[name][0]))
        index = overlay_index(window, position).clamp_max(overlay.shape[1] - 1)
        packed = torch.where(full[:, None, None], overlay[row.owners[0]][index].float(), packed)
    return stream.attended(packed, position)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Part:
    """Torch's fused attention; the query heads of a KV head are further rows, unless every row sees other keys."""
    heads, group, rows, dim = q.shape
    k, v = (x.transpose(0, 1).half()[None] for x in (k, v))  # [1, heads, tokens, head_dim]
    if causal:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        wide = q.reshape(1, heads * group, rows, dim)
    else:
        wide = q.reshape(1, heads, group * rows, dim)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        wide.half(), k, v, 0.0, causal, False, scale=scale
    )
    return Part(out.float().reshape(heads, group, rows, dim), lse.reshape(heads, group, rows, 1))


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    ahead: int,
    lost: Tensor | None,
) -> Part:
    """Attention of rows to keys of which the first lies `ahead` tokens before the first row. `lost` is what all scores of
    a row [heads, group, rows] are short of before the cap."""
    rows = q.shape[2]
    place = torch.arange(len(k), device=q.device)
    parts = []
    for first in range(0, rows, QUERY_BLOCK):
        block = slice(first, min(rows, first + QUERY_BLOCK))
        at = torch.arange(block.start, block.stop, device=q.device)[:, None] + ahead
        keep = place <= at
        if window is not None:
            keep &= place > at - window
        scores = torch.einsum("hgqd,nhd->hgqn", q[:, :, block], k) * scale
        if softcap is not None:
            scores = scores if lost is None else scores + lost[:, :, block, None]
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~keep, float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse).exp().nan_to_num(0.0)
        parts.append(Part(torch.einsum("hgqn,nhd->hgqd", weights, v), lse))
    return Part(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
