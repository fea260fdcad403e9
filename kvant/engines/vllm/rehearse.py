"""Every operation once before the first request comes, on pages that are thrown away: kernels are compiled when they are first
used, which takes seconds, and vLLM's own rehearsals reach few of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kvant.ops import Implementation, LayerStore, PagedBatch
from kvant.ops.registry import Op
from kvant.ops.types import empty_overlay

Tensor = torch.Tensor
TOKENS = 8192  # of a prompt: many tokens are appended by another kernel than few
MANY = 160  # sequences: few are read by another kernel than many


def rehearse(
    ops: Mapping[Op, Implementation],
    store: LayerStore,
    query_heads: int,
    dtype: torch.dtype,
    softcap: float | None = None,
    tokens: int = TOKENS,
) -> None:
    """Appends a prompt and one more token, decodes, and reads some more behind them, in a copy of a layer's store."""
    layout, device = store.layout, store.pages.device
    pages = -(-(tokens + 2) // layout.page_tokens)
    scratch = dataclasses.replace(
        store,
        pages=torch.zeros(pages, layout.heads, layout.run_bytes, dtype=torch.uint8, device=device),
        overlays={name: empty_overlay(layout, name, 1, device).zero_() for name in layout.recipe.streams},
        prepared={name: kept for name, kept in store.prepared.items() if name == "flash"},
    )

    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def batch(first: int, last: int) -> PagedBatch:
        """One sequence whose tokens [first, last) are new."""
        slots = torch.arange(first, last, device=device)
        table = torch.arange(pages, device=device)[None]
        exact = dict.fromkeys(layout.recipe.streams, column(0))
        sinks = column(min(last, layout.recipe.key.window.sink))
        return PagedBatch(table, column(last), slots, column(0, last - first), column(0), sinks, exact)

    def rows(count: int, heads: int) -> Tensor:
        return torch.zeros(count, heads, layout.head_dim, dtype=dtype, device=device)

    options = {"scale": layout.head_dim**-0.5, "softcap": softcap}
    for first, last in ((0, tokens), (tokens, tokens + 1)):
        x = rows(last - first, layout.heads)
        ops["append"].run(scratch, x, x, batch(first, last))
    one = batch(tokens, tokens + 1)
    many = one._replace(
        block_table=one.block_table.expand(MANY, -1).contiguous(),
        **{name: getattr(one, name).expand(MANY).contiguous() for name in ("lengths", "slots", "owners", "sinks")},
        starts=torch.arange(MANY + 1, device=device),
        exact={name: exact.expand(MANY).contiguous() for name, exact in one.exact.items()},
    )
    for decodes in (one, many):
        ops["decode"].run(scratch, rows(len(decodes.lengths), query_heads), decodes, **options)
    more = batch(tokens - 1, tokens + 1)
    more = more._replace(lengths=more.lengths.cpu(), starts=more.starts.cpu())
    x = rows(2, layout.heads)
    ops["prefill"].run(scratch, rows(2, query_heads), x, x, more, **options)
