"""The cache of a group of layers that see the same tokens: pages, sequences, and the operations on them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvant.cache.pool import PagePool
from kvant.layout import Layout, StreamName
from kvant.ops import OPS, LayerStore, PagedBatch, choose
from kvant.ops.reference import refill
from kvant.ops.replay import replay
from kvant.rope import Rope

Tensor = torch.Tensor
SLID_OUT = -1  # stands in a sequence's pages for one that a sliding window has left behind


@dataclasses.dataclass(eq=False)
class Entry:
    """A sequence: its length, its pages in order, its row of the overlays and what that row really holds."""

    owner: int
    length: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    sinks: int = 0  # sink tokens held in full precision
    exact: dict[StreamName, int] = dataclasses.field(default_factory=lambda: {"key": 0, "value": 0})
    # the ring of a stream holds no token before this one
    visible: int | None = None  # tokens that the sliding window last seen keeps; None where nothing has slid out


class PagedCache:
    """Packed pages of several layers behind one set of block tables.

    `pages` fixes the pool's size, and a request for more raises PoolFull; without it the pool grows as needed.
    """

    def __init__(
        self,
        layout: Layout,
        layers: int,
        pages: int | None = None,
        device: torch.device | str = "cpu",
        tensors: Mapping[int, Mapping[str, Tensor]] | None = None,
        implementation: str | None = None,
        ropes: Sequence[Rope] | None = None,
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.growing = pages is None
        self.pool = PagePool(pages or 0)
        self._free_owners: list[int] = []
        self._owners = 0
        self.sequences: list[Entry] = []
        self.ops = {op: choose(op, layout, self.device, implementation) for op in OPS}
        self.stores = [
            LayerStore.allocate(
                layout, self.pool.total, 0, self.device, (tensors or {}).get(layer), ropes[layer] if ropes else None
            )
            for layer in range(layers)
        ]

    # --- sizes -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """What torch allocated."""
        return sum(store.nbytes for store in self.stores)

    @property
    def predicted_nbytes(self) -> int:
        """What the layout says that the allocated pages and windows take."""
        return len(self.stores) * (self.pool.total * self.layout.page_bytes + self._owners * self.layout.overlay_bytes)

    @property
    def nbytes_used(self) -> int:
        """The part of it that sequences use: their pages (shared ones once) and windows."""
        per_layer = self.pool.used * self.layout.page_bytes + len(self.sequences) * self.layout.overlay_bytes
        return len(self.stores) * per_layer

    # --- sequences -------------------------------------------------------------------------------------------------

    def new(self) -> Entry:
        """An empty sequence."""
        entry = Entry(self._take_owner())
        self.sequences.append(entry)
        return entry

    def fork(self, entry: Entry) -> Entry:
        """A second sequence with the same tokens: pages are shared, windows and what correctors remember are copied."""
        twin = dataclasses.replace(entry, owner=self._take_owner(), pages=list(entry.pages), exact=dict(entry.exact))
        self.pool.share([page for page in twin.pages if page != SLID_OUT])
        for store in self.stores:
            for owned in store.owned:
                owned[twin.owner] = owned[entry.owner]
        self.sequences.append(twin)
        return twin

    def free(self, entry: Entry) -> None:
        """Gives a sequence's pages and windows back."""
        self.sequences.remove(entry)
        self.pool.release([page for page in entry.pages if page != SLID_OUT])
        self._free_owners.append(entry.owner)
        entry.pages, entry.length = [], 0

    def crop(self, entry: Entry, length: int) -> None:
        """Forgets the tokens from `length` on.

        Tokens that come back into a recent window and whose full-precision form is gone are read from their pages.
        Tokens that come back into the tail of a group are decoded into the window, unless it still holds them: the
        group is coded again when it is complete again. What a corrector has learnt stays.
        """
        if not 0 <= length <= entry.length:
            raise ValueError(f"length must be between 0 and {entry.length}, got {length}")
        if length == entry.length:
            return
        self._check_slid(entry, length)
        for name, stream in self.layout.recipe.streams.items():
            window = stream.window
            held = max(entry.exact[name], entry.length - window.ring)
            tail = window.packed_end(length)  # a group-wise stream needs every token from here on
            if stream.groupwise and tail < min(held, length):
                for store in self.stores:
                    pages = torch.tensor(entry.pages, device=self.device)
                    refill(store, name, pages, entry.owner, tail, min(held, length))
            entry.exact[name] = min(held, tail if stream.groupwise else length)
        self.retract(entry, length)

    def retract(self, entry: Entry, length: int) -> None:
        """Takes back an `extend` whose tokens were never written."""
        keep = self.layout.pages_for(length)
        gone = [page for page in entry.pages[keep:] if page != SLID_OUT]
        entry.sinks = min(entry.sinks, length)
        entry.length = length
        del entry.pages[keep:]
        self.pool.release(gone)

    def _check_slid(self, entry: Entry, length: int) -> None:
        """Refuses to crop to where a sliding window, or the tail of a group, would need tokens that have slid out."""
        slid = entry.pages.count(SLID_OUT)
        if slid and length:
            assert entry.visible is not None
            tails = [s.window.packed_end(length) for s in self.layout.recipe.streams.values() if s.groupwise]
            if min([length + 1 - entry.visible, *tails]) < self.layout.recipe.origin + slid * self.layout.page_tokens:
                raise ValueError(
                    f"cannot crop to {length} tokens: the sliding window has already dropped tokens that are needed"
                )

    def slide(self, entry: Entry, window: int) -> None:
        """Gives back the pages that lie wholly before the last `window` tokens, and that no group has yet to be coded
        into."""
        ends = [s.window.packed_end(entry.length) for s in self.layout.recipe.streams.values() if s.groupwise]
        seen = min([entry.length - window, *ends]) - self.layout.recipe.origin
        first = min(max(0, seen) // self.layout.page_tokens, len(entry.pages))
        gone = [page for page in entry.pages[:first] if page != SLID_OUT]
        entry.pages[:first] = [SLID_OUT] * first
        entry.visible = window
        self.pool.release(gone)

    def extend(self, entries: Sequence[Entry], counts: Sequence[int]) -> PagedBatch:
        """Makes room for new tokens at the end of sequences and says where they go: all of them, or PoolFull and none.

        The tokens themselves are written layer by layer with `append`. A page that another sequence reads too is copied
        before it is written.
        """
        layout, size = self.layout, self.layout.page_tokens
        fresh = [layout.pages_for(e.length + c) - len(e.pages) for e, c in zip(entries, counts, strict=True)]
        copied = self._to_copy(entries, counts)
        self._reserve(sum(fresh) + len(copied))
        for entry, place in copied:
            self._copy_page(entry, place)
        slots: list[Tensor] = []
        for entry, count, more in zip(entries, counts, fresh, strict=True):
            entry.pages += self.pool.take(more)
            at = torch.arange(entry.length, entry.length + count) - layout.recipe.origin
            at = at.clamp_min(0)  # tokens before the first page have no place in one
            pages = torch.tensor(entry.pages or [0])
            slots.append(pages[at // size] * size + at % size)
            if entry.sinks == min(entry.length, layout.recipe.key.window.sink):
                entry.sinks = min(entry.length + count, layout.recipe.key.window.sink)
            entry.length += count
        return self._batch(entries, counts, slots)

    def batch(self, entries: Sequence[Entry]) -> PagedBatch:
        """Sequences as they are, with no new tokens."""
        return self._batch(entries, [0] * len(entries), [])

    def _batch(self, entries: Sequence[Entry], counts: Sequence[int], slots: Sequence[Tensor]) -> PagedBatch:
        table = torch.zeros(len(entries), max(1, *(len(e.pages) for e in entries)), dtype=torch.int64)
        for row, entry in enumerate(entries):
            table[row, : len(entry.pages)] = torch.tensor(entry.pages, dtype=torch.int64)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        return PagedBatch(
            block_table=table.to(self.device),
            lengths=column([e.length for e in entries]),
            slots=(torch.cat(list(slots)) if slots else torch.zeros(0, dtype=torch.int64)).to(self.device),
            starts=column(starts),
            owners=column([e.owner for e in entries]),
            sinks=column([e.sinks for e in entries]),
            exact={
                "key": column([e.exact["key"] for e in entries]),
                "value": column([e.exact["value"] for e in entries]),
            },
        )

    # --- operations on one layer -------------------------------------------------------------------------------------

    def append(self, layer: int, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
        """Writes the tokens that `extend` made room for. Recipes that learn from queries need `query`, the same
        tokens'."""
        options = {"query": query} if self.layout.recipe.wants_queries else {}
        self.ops["append"].run(self.stores[layer], key, value, batch, **options)

    def decode(self, layer: int, query: Tensor, batch: PagedBatch, **options: Any) -> Tensor:
        return self.ops["decode"].run(self.stores[layer], query, batch, **options)

    def prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, **options: Any
    ) -> Tensor:
        return self.ops["prefill"].run(self.stores[layer], query, key, value, batch, **options)

    def replay(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, **options: Any
    ) -> Tensor:
        """Appends new tokens and attends from each as one-by-one decode would have."""
        store = self.stores[layer]
        return replay(store, query, key, value, batch, lambda: self.append(layer, key, value, batch, query), **options)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _to_copy(self, entries: Sequence[Entry], counts: Sequence[int]) -> list[tuple[Entry, int]]:
        """Places in sequences' pages that new tokens will write to and that another sequence reads too.

        A new token goes to the page after the last token; a group that it completes may lie in older pages.
        """
        layout = self.layout
        out: list[tuple[Entry, int]] = []
        left: Counter[int] = Counter()  # references that the copies so far give up
        for entry, count in zip(entries, counts, strict=True):
            starts = []
            for stream in layout.recipe.streams.values():
                end = stream.window.packed_end(entry.length) if stream.groupwise else entry.length
                if count and (not stream.groupwise or stream.window.packed_end(entry.length + count) > end):
                    starts.append(end)
            if not starts:
                continue
            first = max(0, min(starts) - layout.recipe.origin) // layout.page_tokens
            for place, page in enumerate(entry.pages[first:], first):
                assert page != SLID_OUT, "a page is to be written that has slid out"
                if self.pool.references(page) - left[page] > 1:
                    out.append((entry, place))
                    left[page] += 1
        return out

    def _copy_page(self, entry: Entry, place: int) -> None:
        (copy,) = self.pool.take(1)
        for store in self.stores:
            store.pages[copy] = store.pages[entry.pages[place]]
        self.pool.release([entry.pages[place]])
        entry.pages[place] = copy

    def _reserve(self, count: int) -> None:
        """Grows the pool, if it may grow, so that `count` pages are free."""
        missing = count - self.pool.free
        if missing <= 0 or not self.growing:
            if missing > 0:
                self.pool.take(count)  # says what is used and what was asked for
            return
        total = self.pool.total + max(missing, self.pool.total // 4)
        for store in self.stores:
            store.pages = _grown(store.pages, total)
        self.pool.grow(total)

    def _take_owner(self) -> int:
        if not self._free_owners:
            more = 1 + self._owners // 4
            for store in self.stores:
                for rows in (store.overlays, store.states):
                    for name, tensor in rows.items():
                        rows[name] = _grown(tensor, self._owners + more)
            self._free_owners = list(range(self._owners + more - 1, self._owners - 1, -1))
            self._owners += more
        return self._free_owners.pop()


def _grown(tensor: Tensor, rows: int) -> Tensor:
    out = tensor.new_empty(rows, *tensor.shape[1:])
    out[: len(tensor)] = tensor
    return out
