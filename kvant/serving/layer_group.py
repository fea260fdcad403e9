"""Layers that a server serves alike."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from kvant.layout import Layout, StreamName
from kvant.ops import Implementation, LayerStore
from kvant.ops.registry import Op
from kvant.ops.types import PagedBatch, empty_overlay, empty_states
from kvant.serving.overlay import OverlayRows, without_windows
from kvant.serving.step import Part, decode_queries

Tensor = torch.Tensor


@dataclasses.dataclass
class LayerGroup:
    """Layers of a server with the same recipe, layout and sliding window: their stores, overlays and operations."""

    layout: Layout
    names: list[str]
    stores: list[LayerStore]
    pages_only: list[LayerStore]  # the same pages, without overlays; or with rows of their own, see `append_pages`
    overlays: dict[StreamName, Tensor]  # [layers, rows + 1, tokens, heads, head_dim]
    ops: dict[Op, Implementation]
    drafts: int  # tokens that a step may write and the next one take back
    block_tokens: int  # the server shares multiples of so many tokens
    workspace: int = 0  # bytes that operations allocate while they run
    sinks: dict[StreamName, Tensor] = dataclasses.field(
        default_factory=dict
    )  # [layers, sink rows, sinks, heads, head_dim]
    rows: OverlayRows | None = (
        None  # overlay rows of the running engine; None before its first step, and without overlays
    )
    counters: Tensor | None = None  # zeros that the decode kernels of all graphs share: graphs run one after another
    sliding_window: int | None = None  # tokens that a query attends to, itself included; None: all
    whole: LayerGroup | None = None  # the group that this one is a part of, see `part`
    parts: dict[tuple[str, ...], LayerGroup] = dataclasses.field(default_factory=dict)

    def part(self, names: list[str]) -> LayerGroup:
        """Some of these layers, which share a block table of the server. A server may have several block tables for layers that are
        alike: a model with five sliding-window layers for each full one has as many layers in each group. Their overlay rows are
        found separately, so that the layers of a part have their overlays side by side. Called before anything is stored; a call
        that names other parts than before makes the earlier ones void."""
        whole = self.whole or self
        if sorted(names) == sorted(whole.names):
            if whole.parts:
                whole.parts.clear()
                whole._place_overlays()
            return whole
        if (known := whole.parts.get(tuple(names))) is not None:
            return known
        taken = {name for part in whole.parts for name in part}
        if taken & set(names):
            whole.parts.clear()
            taken.clear()
        places = [whole.names.index(name) for name in names]
        at = slice(len(taken), len(taken) + len(names))
        part = dataclasses.replace(
            whole,
            names=list(names),
            stores=[whole.stores[place] for place in places],
            pages_only=[whole.pages_only[place] for place in places],
            overlays={name: overlay[at] for name, overlay in whole.overlays.items()},
            sinks={name: sinks[at] for name, sinks in whole.sinks.items()},
            rows=None,
            whole=whole,
            parts={},
        )
        part._place_overlays()
        whole.parts[tuple(names)] = part
        return part

    def _place_overlays(self) -> None:
        for index, store in enumerate(self.stores):
            store.overlays = {name: overlay[index] for name, overlay in self.overlays.items()}

    def decode(
        self, store: LayerStore, query: Tensor, batch: PagedBatch, out: Tensor, *, after_append: bool, **options: Any
    ) -> None:
        """The operation decode, into `out`. `after_append`: see `kvant.ops.cuda.decode.decode_with_lse`."""
        operation = self.ops["decode"]
        if operation.in_place:
            late = after_append and self._new_tokens_stay_recent and not self._append_allocates(store, query.dtype)
            options |= {"out": out, "after_append": late}
        with self._sharing_counters():
            found = operation.run(store, query, batch, **options)
        if not operation.in_place:
            out.copy_(found)

    @property
    def _new_tokens_stay_recent(self) -> bool:
        """Whether no query of a decode reads a token of its own step packed, however many of them a sequence has."""
        most = decode_queries(self.drafts)
        return all(stream.window.recent >= most for stream in self.layout.recipe.streams.values())

    def _sharing_counters(self) -> contextlib.AbstractContextManager[None]:
        if self.counters is None:
            return contextlib.nullcontext()
        from kvant.ops.cuda.counters import sharing_counters

        return sharing_counters(self.counters)

    def _append_allocates(self, store: LayerStore, dtype: torch.dtype) -> bool:
        """Whether append takes memory that decode may be given while append runs, see `kvant.ops.cuda.append.allocates`."""
        if self.ops["append"].name != "cuda":
            return True
        from kvant.ops.cuda.append import allocates

        return allocates(store, dtype)

    def readable(self, x: Tensor) -> Tensor:
        """Rows of new tokens as append reads them: a copy, where it would make one."""
        if self.ops["append"].name != "cuda":
            return x
        from kvant.ops.cuda.append import readable_rows

        return readable_rows(x)

    def append(self, store: LayerStore, query: Tensor, key: Tensor, value: Tensor, part: Part) -> None:
        """The operation append, of a part of a step's new tokens. Correctors also learn from the queries."""
        options = {"query": query[part.tokens]} if self.layout.recipe.wants_queries else {}
        self.ops["append"].run(store, key[part.tokens], value[part.tokens], part.batch, **options)

    def append_pages(self, place: int, query: Tensor, key: Tensor, value: Tensor, part: Part) -> None:
        """Writes the pages of a layer, and leaves its overlay rows as they are until `append_overlays`: attention reads them first.

        Groups of tokens are coded from the tail, which is in the overlay row, and the new tokens. So the rows are copied, and the
        tokens are appended to the copies."""
        if self.groupwise:
            count, rows = len(part.batch.overlay_rows), part.batch.overlay_rows
            for mine, theirs in zip(self.pages_only[place].owned, self.stores[place].owned, strict=True):
                torch.index_select(theirs, 0, rows, out=mine[:count])
            part = part._replace(batch=part.batch._replace(overlay_rows=torch.arange(count, device=rows.device)))
        self.append(self.pages_only[place], query, key, value, part)

    def append_overlays(self, place: int, query: Tensor, key: Tensor, value: Tensor, part: Part) -> None:
        """Writes the overlay rows of a part whose pages `append_pages` has written, in the same layer and step."""
        if not self.groupwise:
            self.append(self.stores[place], query, key, value, part)
            return
        rows = part.batch.overlay_rows
        for mine, theirs in zip(self.pages_only[place].owned, self.stores[place].owned, strict=True):
            theirs.index_copy_(0, rows, mine[: len(rows)])

    @property
    def room(self) -> int:
        """New tokens of a sequence that its rings take up beside all that is read without them. Where groups of tokens are coded, so
        many are written before attention: nothing is copied in the steps of speculative decoding."""
        return min(stream.window.rollback for stream in self.layout.recipe.streams.values()) if self.groupwise else 0

    @property
    def groupwise(self) -> bool:
        """Whether a stream codes groups of tokens."""
        return any(stream.groupwise for stream in self.layout.recipe.streams.values())

    @property
    def has_overlay(self) -> bool:
        """Whether any token is kept in full precision."""
        return any(overlay.shape[2] for overlay in self.overlays.values())

    @property
    def ring(self) -> bool:
        """Whether recent tokens are."""
        return any(stream.window.ring for stream in self.layout.recipe.streams.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and head in a page."""
        assert self.layout.page_head_bytes % self.layout.page_tokens == 0
        return self.layout.page_head_bytes // self.layout.page_tokens


def layered_overlay(layout: Layout, name: StreamName, layers: int, rows: int, device: torch.device) -> Tensor:
    one = empty_overlay(layout, name, 1, device)
    return one.new_zeros(layers, rows, *one.shape[1:])


def layered_sinks(layout: Layout, layers: int, rows: int, device: torch.device) -> dict[StreamName, Tensor]:
    """Sink rows of every stream, [layers, rows, sinks, heads, head_dim]; {} where there are none."""
    sink = layout.recipe.key.window.sink
    if not (sink and rows):
        return {}
    overlays = {name: empty_overlay(layout, name, 1, device) for name in layout.recipe.streams}
    return {name: one.new_zeros(layers, rows, sink, *one.shape[2:]) for name, one in overlays.items()}


def layered_states(layout: Layout, layers: int, rows: int, device: torch.device) -> dict[StreamName, Tensor]:
    """What correctors remember: [layers, rows, heads, ...]."""
    return {name: x.new_zeros(layers, rows, *x.shape[1:]) for name, x in empty_states(layout, 1, device).items()}


def copied_rows(layout: Layout, rows: int, device: torch.device) -> tuple[dict[StreamName, Tensor], ...]:
    """Rows for `LayerGroup.append_pages`, which layers share: overlays and what correctors remember."""
    overlays = {name: layered_overlay(layout, name, 1, rows, device)[0] for name in layout.recipe.streams}
    return overlays, {name: states[0] for name, states in layered_states(layout, 1, rows, device).items()}


def with_rows(store: LayerStore, overlays: dict[StreamName, Tensor], states: dict[StreamName, Tensor]) -> LayerStore:
    """The same pages with other overlay rows."""
    return dataclasses.replace(store, overlays=overlays, states=states, derived={})


def pages_only(store: LayerStore) -> LayerStore:
    recipe = without_windows(store.layout.recipe)
    layout = dataclasses.replace(store.layout, recipe=recipe)
    assert layout.sections == store.layout.sections
    return LayerStore(
        layout,
        dataclasses.replace(store.key, spec=recipe.key),
        dataclasses.replace(store.value, spec=recipe.value),
        store.pages,
        {name: empty_overlay(layout, name, 1, store.pages.device) for name in recipe.streams},
        {},
    )
