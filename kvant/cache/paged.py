"""The cache of a group of layers that see the same tokens: pages, sequences, and the operations on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvant.cache.pool import PagePool
from kvant.layout import Layout, StreamName
from kvant.ops import OPS, LayerStore, PagedBatch, choose

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
            LayerStore.allocate(layout, self.pool.total, 0, self.device, (tensors or {}).get(layer))
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
        """A second sequence with the same tokens: pages are shared, windows copied."""
        twin = dataclasses.replace(entry, owner=self._take_owner(), pages=list(entry.pages), exact=dict(entry.exact))
        self.pool.share([page for page in twin.pages if page != SLID_OUT])
        for store in self.stores:
            for overlay in store.overlays.values():
                overlay[twin.owner] = overlay[entry.owner]
        self.sequences.append(twin)
        return twin

    def free(self, entry: Entry) -> None:
        """Gives a sequence's pages and windows back."""
        self.sequences.remove(entry)
        self.pool.release([page for page in entry.pages if page != SLID_OUT])
        self._free_owners.append(entry.owner)
        entry.pages, entry.length = [], 0

    def crop(self, entry: Entry, length: int) -> None:
        """Forgets the tokens from `length` on. Tokens that come back into a recent window and whose full-precision form is
        gone are read from their pages."""
        if not 0 <= length <= entry.length:
            raise ValueError(f"length must be between 0 and {entry.length}, got {length}")
        if length == entry.length:
            return
        keep = self.layout.pages_for(length)
        gone = [page for page in entry.pages[keep:] if page != SLID_OUT]
        if length and len(entry.pages[keep:]) > len(gone):
            raise ValueError(f"cannot crop to {length} tokens: the sliding window has already dropped tokens after them")
        for name, stream in self.layout.recipe.streams.items():
            entry.exact[name] = max(entry.exact[name], entry.length - stream.window.ring) if length else 0
        entry.sinks = min(entry.sinks, length)
        entry.length = length
        del entry.pages[keep:]
        self.pool.release(gone)

    def slide(self, entry: Entry, window: int) -> None:
        """Gives back the pages that lie wholly before the last `window` tokens."""
        first = max(0, entry.length - window - self.layout.recipe.origin) // self.layout.page_tokens
        gone = [page for page in entry.pages[:first] if page != SLID_OUT]
        entry.pages[:first] = [SLID_OUT] * min(first, len(entry.pages))
        self.pool.release(gone)

    def extend(self, entries: Sequence[Entry], counts: Sequence[int]) -> PagedBatch:
        """Makes room for new tokens at the end of sequences and says where they go: all of them, or PoolFull and none.

        The tokens themselves are written layer by layer with `append`. A page that another sequence reads too is copied
        before it is written.
        """
        layout, size = self.layout, self.layout.page_tokens
        fresh = [layout.pages_for(e.length + c) - len(e.pages) for e, c in zip(entries, counts, strict=True)]
        copied = [e for e, c in zip(entries, counts, strict=True) if c and self._shares_open_page(e)]
        self._reserve(sum(fresh) + len(copied))
        for entry in copied:
            self._copy_open_page(entry)
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
            exact={"key": column([e.exact["key"] for e in entries]), "value": column([e.exact["value"] for e in entries])},
        )

    # --- operations on one layer -------------------------------------------------------------------------------------

    def append(self, layer: int, key: Tensor, value: Tensor, batch: PagedBatch) -> None:
        self.ops["append"].run(self.stores[layer], key, value, batch)

    def decode(self, layer: int, query: Tensor, batch: PagedBatch, **options: Any) -> Tensor:
        return self.ops["decode"].run(self.stores[layer], query, batch, **options)

    def prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, **options: Any
    ) -> Tensor:
        return self.ops["prefill"].run(self.stores[layer], query, key, value, batch, **options)

    # --- memory --------------------------------------------------------------------------------------------------------

    def _shares_open_page(self, entry: Entry) -> bool:
        """Whether the page that the next token goes to is there already and read by another sequence."""
        at = max(0, entry.length - self.layout.recipe.origin)
        return bool(at % self.layout.page_tokens) and self.pool.references(entry.pages[-1]) > 1

    def _copy_open_page(self, entry: Entry) -> None:
        (copy,) = self.pool.take(1)
        for store in self.stores:
            store.pages[copy] = store.pages[entry.pages[-1]]
        self.pool.release([entry.pages[-1]])
        entry.pages[-1] = copy

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
                for name, overlay in store.overlays.items():
                    store.overlays[name] = _grown(overlay, self._owners + more)
            self._free_owners = list(range(self._owners + more - 1, self._owners - 1, -1))
            self._owners += more
        return self._free_owners.pop()


def _grown(tensor: Tensor, rows: int) -> Tensor:
    out = tensor.new_empty(rows, *tensor.shape[1:])
    out[: len(tensor)] = tensor
    return out
