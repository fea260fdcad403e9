"""Histories in pages of 16-bit numbers, the recipe `full`, gathered by torch for fused attention: as kvant.ops.cuda.unpack of packed
ones."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kvant.codecs import DTYPES
from kvant.layout import StreamName
from kvant.ops.cuda.unpack_spans import Span
from kvant.ops.streams import stream_handle
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor


class Places(NamedTuple):
    """Where the tokens of spans come from, and the rows that they go to; int64, on the device."""

    sequence: Tensor  # of a token of a history
    page: Tensor  # of its sequence
    token: Tensor  # of the page
    rows: Tensor
    new: Tensor  # of all new tokens
    new_rows: Tensor


def places_of(spans: tuple[Span, ...], page_tokens: int, device: torch.device) -> Places:
    """What it made is kept: the layers of a model ask for the same."""
    stream = stream_handle(device)
    return _places(spans, page_tokens, device, stream)


@functools.lru_cache(maxsize=8)  # of up to 2 MB each
def _places(spans: tuple[Span, ...], page_tokens: int, device: torch.device, stream: int) -> Places:
    at, columns = 0, list[Tensor]()
    new, new_rows = list[Tensor](), list[Tensor]()
    for b, span in enumerate(spans):
        position, count = torch.arange(span.first, span.last), max(0, span.last - span.first)
        page, token = position // page_tokens, position % page_tokens
        columns.append(torch.stack((torch.full_like(position, b), page, token, at + torch.arange(count))))
        new.append(torch.arange(span.new_first, span.new_first + span.new))
        new_rows.append(at + count + torch.arange(span.new))
        at += span.tokens
    own = torch.stack((torch.cat(new), torch.cat(new_rows)))
    history = torch.cat(columns, 1).to(device, non_blocking=True)
    return Places(*history, *own.to(device, non_blocking=True))


def gather(
    store: LayerStore,
    name: StreamName,
    batch: PagedBatch,
    spans: tuple[Span, ...],
    new: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Spans of the sequences of a batch, one after another: [tokens, heads, head_dim]. As `unpack` of kvant.ops.cuda.unpack."""
    layout, pages = store.layout, store.pages
    section = next(section for section in layout.sections if section.stream == name)
    size, dim = layout.page_tokens, layout.head_dim
    # [pages, heads, tokens, head_dim]
    stored = pages[..., section.offset : section.offset + 2 * size * dim].view(DTYPES[section.dtype])
    stored = stored.unflatten(-1, (size, dim))
    where = places_of(spans, size, pages.device)
    out = torch.empty(sum(span.tokens for span in spans), layout.heads, dim, dtype=dtype, device=pages.device)
    if len(where.rows):
        page = batch.block_table[where.sequence, where.page]
        out[where.rows] = stored[page, :, where.token].to(dtype)
    if len(where.new):
        assert new is not None
        out[where.new_rows] = new[where.new].to(dtype)
    return out
