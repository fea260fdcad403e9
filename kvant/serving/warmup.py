"""Warm-up: runs every operation once before the first request, on pages that are thrown away.

Kernels are compiled when they are first used, which takes seconds, and a server's own warm-up reaches few of them. Warm-up also
measures the memory that operations allocate while they run, which a server has to leave free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from kvant.ops import Implementation, LayerStore, PagedBatch
from kvant.ops.cuda.geometry import LOW_BATCH
from kvant.ops.cuda.prefill import JOINED_TOKENS
from kvant.ops.memory import allocated_by
from kvant.ops.registry import Op
from kvant.ops.types import empty_overlay, empty_states

Tensor = torch.Tensor
HISTORY = 16384 + 64  # tokens that are appended: appends of many tokens use another kernel than those of few


class LargestStep(NamedTuple):
    """Bounds of a server's steps: sequences, tokens of one sequence, new tokens of a step."""

    sequences: int
    tokens: int
    new: int


def warm_up(
    ops: Mapping[Op, Implementation],
    store: LayerStore,
    query_heads: int,
    dtype: torch.dtype,
    largest: LargestStep,
    softcap: float | None = None,
    history: int = HISTORY,
    reads: bool = True,
    queries: int = 1,
    sink_logits: bool = False,
    sliding_window: int | None = None,
) -> int:
    """In a copy of a layer's store: appends a prompt and one more token; with `reads` also decodes, with one and with `queries`
    queries a sequence, and prefills new tokens after that history; with `sink_logits` as where the model has attention sinks of its
    own. Returns the bytes that operations allocate, 0 on a CPU."""
    layout, device, history = store.layout, store.pages.device, max(history, largest.new)
    pages = -(-(history + largest.new) // layout.page_tokens)
    # what prefill unpacks at a time is bounded, and many short sequences reach the bound as a long one does
    unpacks = reads and device.type == "cuda" and ops["prefill"].name == "cuda"
    longest = max(history, JOINED_TOKENS + layout.page_tokens) if unpacks else history
    width = max(-(-max(longest + largest.new, largest.tokens) // layout.page_tokens), pages)
    scratch = dataclasses.replace(
        store,
        pages=torch.zeros(pages, layout.heads, layout.page_head_bytes, dtype=torch.uint8, device=device),
        overlays={name: empty_overlay(layout, name, 1, device).zero_() for name in layout.recipe.streams},
        states={name: state.zero_() for name, state in empty_states(layout, 1, device).items()},
        derived={},
    )

    def batch(first: int, last: int, count: int = 1) -> PagedBatch:
        """Sequences in the same pages, whose tokens [first, last) are new."""
        slot_mapping = torch.arange(first, last, device=device).repeat(count)
        table = (torch.arange(width, device=device) % pages).repeat(
            count, 1
        )  # of a history that is longer, pages come again
        seq_lens, overlay_rows = (
            torch.full((count,), last, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
        )
        query_start_loc = torch.arange(count + 1, device=device) * (last - first)
        ring_start = {name: overlay_rows.clone() for name in layout.recipe.streams}
        sinks = torch.full_like(seq_lens, min(last, layout.recipe.key.window.sink))
        return PagedBatch(table, seq_lens, slot_mapping, query_start_loc, overlay_rows, sinks, ring_start)

    def rows(count: int, heads: int) -> Tensor:
        return torch.zeros(count, heads, layout.head_dim, dtype=dtype, device=device)

    options: dict[str, float | Tensor | None] = {"scale": layout.head_dim**-0.5, "softcap": softcap}
    options["sliding_window"] = sliding_window
    if sink_logits:
        options["sink_logits"] = torch.zeros(query_heads, dtype=torch.float32, device=device)
    needed = [0]
    for first, last in ((0, history), (history, history + 1)):
        x = rows(last - first, layout.heads)
        more_options = {"query": rows(last - first, query_heads)} if layout.recipe.wants_queries else {}
        append = partial(ops["append"].run, scratch, x, x, batch(first, last), **more_options)
        needed.append(allocated_by(append, device))
    if not reads:
        return max(needed)
    counts = {1, min(largest.sequences, max(1, LOW_BATCH // layout.heads)), largest.sequences}
    for count in sorted(counts):  # a low batch may use other kernels than a high one, and allocate more
        decodes = batch(history, history + 1, count)
        for each in sorted({1, queries}):
            decode = partial(ops["decode"].run, scratch, rows(count * each, query_heads), decodes, **options)
            needed.append(allocated_by(decode, device))
    x, q, more = rows(largest.new, layout.heads), rows(largest.new, query_heads), batch(longest, longest + largest.new)
    more = more._replace(seq_lens=more.seq_lens.cpu(), query_start_loc=more.query_start_loc.cpu())
    for window in dict.fromkeys((sliding_window, None)):  # sequences that a window covers use other kernels
        options["sliding_window"] = window
        needed.append(allocated_by(partial(ops["prefill"].run, scratch, q, x, x, more, **options), device))
    return max(needed)
