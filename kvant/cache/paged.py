"""The paged cache of a group of layers that see the same tokens: pages, sequences, and the operations on them.

A page is what vLLM calls a block: the packed keys and values of `page_tokens` consecutive tokens of one sequence."""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
from collections import Counter, abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from kvant.cache.batch import batch_of
from kvant.cache.finite import check_finite, largest
from kvant.cache.growth import grow
from kvant.cache.journal import Journal, nothing, whole
from kvant.cache.pool import PagePool, PoolFull
from kvant.cache.prefix import PrefixCache
from kvant.cache.sequence import FIELDS, FREED, SLID_OUT, Sequence
from kvant.layout import Layout, StreamName
from kvant.layouts import Layouts
from kvant.ops import OPS, LayerStore, PagedBatch, choose
from kvant.ops.reference import refill
from kvant.ops.replay import replay
from kvant.rope import Rope

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")


def locked(
    method: Callable[Concatenate[PagedCache, P], R],
) -> Callable[Concatenate[PagedCache, P], R]:
    """Decorator: holds the cache's lock for the whole call. A pool that grows copies its pages, and would lose what another thread
    writes meanwhile."""

    @functools.wraps(method)
    def run(self: PagedCache, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return run


def whole_or_none(
    method: Callable[Concatenate[PagedCache, P], R],
) -> Callable[Concatenate[PagedCache, P], R]:
    """Decorator: as `locked`, and the call is done whole or not at all (`PagedCache.whole`)."""

    @functools.wraps(method)
    def run(self: PagedCache, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.whole(lambda: method(self, *args, **kwargs))

    return run


class PagedCache:
    """Packed pages of several layers behind one set of block tables.

    layout         of all layers, or one for each of them. Layouts may differ in codecs and transforms, and so in the size of a page;
                   page_tokens, windows, groups of tokens and heads must be the same: block tables and overlay rows are shared.
                   `self.layout` is the first layer's, for what they share.
    pages          size of the pool; more raises PoolFull. None: the pool grows as needed.
    max_sequences  number of sequences, whose overlay rows are allocated at once; more raises PoolFull. None: they grow as needed.
    digest         names what the stored bytes mean; by default recipe, layout and calibrated tensors, but no model.
    check          refuse keys and values that are not finite. On a GPU this waits for them.
    numbers        numbers of the layers in the model, for messages.
    owners         deprecated name of max_sequences.

    Several threads may use one cache, each with sequences of its own: every operation holds the cache's lock. Two threads must
    not write to the same sequence at once.

    An operation is done whole or not at all, even if an interrupt (Ctrl-C) ends it: it notes in its journal what it changes. What
    sequences and the prefix cache refer to decides which pages and overlay rows are in use, and is counted again where an operation
    was taken back.
    """

    def __init__(
        self,
        layout: Layout | Layouts,
        layers: int,
        pages: int | None = None,
        device: torch.device | str = "cpu",
        tensors: Mapping[int, Mapping[str, Tensor]] | None = None,
        implementation: str | None = None,
        ropes: abc.Sequence[Rope] | None = None,
        *,
        max_sequences: int | None = None,
        digest: str | None = None,
        check: bool = True,
        numbers: abc.Sequence[int] | None = None,
        owners: int | None = None,
    ) -> None:
        if owners is not None:
            warnings.warn("PagedCache(owners=) is now called max_sequences", DeprecationWarning, stacklevel=2)
            max_sequences = owners
        self.layouts = Layouts((layout,) * layers) if isinstance(layout, Layout) else layout
        _check_alike(self.layouts.layers, layers)
        self.layout = self.layouts.first
        self.wants_queries = self.layout.recipe.wants_queries
        self.device = torch.device(device)
        self.lock = threading.RLock()
        self.check, self.largest = check, min(map(largest, self.layouts.distinct))
        self.numbers = list(range(layers)) if numbers is None else list(numbers)
        self.digest = self.layouts.digest(_digest_of(tensors or {})) if digest is None else digest
        self.growing = pages is None
        self.pool = PagePool(pages or 0)
        self.max_sequences = max_sequences
        self._rows = max_sequences or 0
        self._grown = self.pool.total, self._rows  # sizes to which all layers were to grow last
        self._free_rows: list[int] = list(range(self._rows - 1, -1, -1))
        self.sequences: list[Sequence] = []
        self.prefix: PrefixCache | None = None
        self.journal = nothing()  # of the operation under way, or of the last one
        by_layout = {
            each: {op: choose(op, each, self.device, implementation) for op in OPS} for each in self.layouts.distinct
        }
        self.ops_of = [by_layout[each] for each in self.layouts.layers]  # operations of every layer
        self.ops = self.ops_of[0]
        with torch.inference_mode(False):  # tensors that are made in inference mode can be written in it alone
            self.stores = [
                LayerStore.allocate(
                    self.layouts.layers[layer],
                    self.pool.total,
                    self._rows,
                    self.device,
                    (tensors or {}).get(layer),
                    ropes[layer] if ropes else None,
                )
                for layer in range(layers)
            ]

    # --- sizes -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that torch allocated."""
        return sum(store.nbytes for store in self.stores) + (self.prefix.nbytes if self.prefix is not None else 0)

    @property
    def predicted_nbytes(self) -> int:
        """Bytes of the allocated pages and overlay rows by the layout."""
        allocated = self.pool.total * self.layouts.page_bytes + self._rows * self.layouts.overlay_bytes
        return allocated + (self.prefix.predicted_nbytes if self.prefix is not None else 0)

    @property
    def nbytes_used(self) -> int:
        """Bytes in use: pages of sequences and of the prefix cache (shared ones once), and overlay rows of sequences."""
        pages, rows = self.pool.used, len(self.sequences)
        used = pages * self.layouts.page_bytes + rows * self.layouts.overlay_bytes
        return used + (self.prefix.nbytes if self.prefix is not None else 0)

    # --- operations that are done whole or not at all ----------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an operation of this thread is under way: another one within it is part of it."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def whole(self, operation: Callable[[], R]) -> R:
        """Runs an operation under the lock, whole or not at all."""
        if self.busy:
            return operation()
        return whole([self], lambda journal: operation())

    def begin(self, journal: Journal) -> None:
        journal.note(self, "sequences")

    def recount(self) -> None:
        if self.prefix is not None:
            self.prefix.recount()
        references = Counter(page for seq in self.sequences for page in seq.held)
        references.update(node.page for node in (self.prefix.nodes if self.prefix is not None else ()))
        total, rows = self._grown
        if all(len(store.pages) == total and all(len(owned) == rows for owned in store.owned) for store in self.stores):
            self._rows = rows  # growing was interrupted when all had been allocated
        else:
            total = self.pool.total
        self.pool.recount(references, total)
        used = {seq.overlay_row for seq in self.sequences}
        self._free_rows = [row for row in range(self._rows - 1, -1, -1) if row not in used]

    def _note(self, *sequences: Sequence) -> None:
        """These sequences are about to be changed."""
        for seq in sequences:
            self.journal.note(seq, *FIELDS)

    def _note_row(self, store: LayerStore, at: Any) -> None:
        """A row of the overlays and of corrector states, or a part of it, is about to be written."""
        for tensors in (store.overlays, store.states):
            self.journal.note_rows(tensors, at)

    # --- sequences -------------------------------------------------------------------------------------------------

    @whole_or_none
    def new(self) -> Sequence:
        """An empty sequence."""
        seq = Sequence(self._take_row())
        self.sequences = [*self.sequences, seq]
        return seq

    @whole_or_none
    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same tokens. Pages are shared; its row of the overlays and corrector states is copied."""
        self.check_ours(seq)
        twin = self.new()
        self.mirror(twin, seq)
        return twin

    @whole_or_none
    def mirror(self, seq: Sequence, source: Sequence) -> None:
        """As `fork`, into an existing sequence: its tokens are forgotten, its row is overwritten. Nothing is allocated, so this
        cannot run out of pages or rows."""
        self.check_ours(seq)
        self.check_ours(source)
        if seq is source:
            return
        self._note(seq)
        for layer in range(len(self.stores)):
            if seq.length:
                self._note_row(self.stores[layer], seq.overlay_row)
            self.copy_row(layer, source, seq)
        self.pool.share(source.held)
        self.pool.release(seq.held)
        seq.length, seq.sinks, seq.visible, seq.requantized_from = (
            source.length,
            source.sinks,
            source.visible,
            source.requantized_from,
        )
        seq.pages, seq.ring_start = list(source.pages), dict(source.ring_start)

    @locked
    def copy_row(self, layer: int, source: Sequence, target: Sequence) -> None:
        """Copies a sequence's row of the overlays and of corrector states to that of another, in one layer."""
        for owned in self.stores[layer].owned:
            owned[target.overlay_row] = owned[source.overlay_row]

    @whole_or_none
    def free(self, seq: Sequence) -> None:
        """Gives a sequence's pages and overlay row back."""
        self.check_ours(seq)
        self._note(seq)
        self.sequences = [each for each in self.sequences if each is not seq]
        self.pool.release(seq.held)
        self._free_rows.append(seq.overlay_row)
        seq.pages, seq.length, seq.overlay_row = [], 0, FREED

    @whole_or_none
    def clear(self) -> None:
        """Forgets all sequences and the prefix cache; memory stays allocated."""
        self._note(*self.sequences)
        if self.prefix is not None:
            self.prefix.clear()
        for seq in self.sequences:
            seq.pages, seq.length, seq.overlay_row = [], 0, FREED
        self.sequences = []
        self.pool = PagePool(self.pool.total)
        self._free_rows = list(range(self._rows - 1, -1, -1))

    @whole_or_none
    def crop(self, seq: Sequence, length: int) -> None:
        """Forgets the tokens from `length` on.

        A token that is among the recent ones again, and whose full-precision form has been overwritten in the ring, is read from
        its page. In a group-wise stream the tail may end inside a group that was already packed: the group's tokens that the ring no
        longer holds are decoded into it, and the group is quantized again when it is complete (`Sequence.requantized_from`). The
        state of a corrector stays as it is.
        """
        self.check_crop(seq, length)
        if length < seq.length:
            self._forget(seq, length, range(len(self.stores)), whole=True)

    @whole_or_none
    def rollback(self, seq: Sequence, length: int, layers: Iterable[int], torn: bool = False) -> None:
        """Takes back an `extend` whose tokens were written in these layers alone, as after an append that failed. `torn`: they may
        have been written in part in one more layer, where no group's tail has lost a token to them."""
        self.check_ours(seq)
        layers = list(layers)
        if layers or torn:
            self._forget(seq, length, layers, whole=False)
        else:
            self.retract(seq, length)

    def _forget(self, seq: Sequence, length: int, layers: Iterable[int], whole: bool) -> None:
        """Shortens a sequence, and restores the rings of some layers. `whole`: pages of all layers hold every group that is
        complete at the present length."""
        self._note(seq)
        ring_start = dict(seq.ring_start)
        for name, stream in self.layout.recipe.streams.items():
            window, group = stream.window, stream.codec.group_tokens
            held = max(seq.ring_start[name], seq.length - window.ring)
            if not stream.groupwise:
                ring_start[name] = min(held, length)
                continue

            def aligned(position: int, start: int = window.first, group: int = group) -> int:
                return start + max(0, position - start) // group * group

            stop = min(held, length)
            first = max(window.packed_end(length), min(length, aligned(min(seq.ring_start[name], length))))
            if whole and stop > first:
                first = aligned(stop)
            # A group that is decoded and quantized again has other codes; so has one that a corrector codes with another state.
            if first < (stop if stream.corrector is None else length):
                seq.requantized_from = first if seq.requantized_from is None else min(seq.requantized_from, first)
            if first < stop:
                pages = torch.tensor(seq.pages, device=self.device)
                here = max(first, min(seq.sinks, stop))  # sinks that are held stay as they are
                for layer in layers if here < stop else ():
                    store = self.stores[layer]
                    self.journal.note_rows({name: store.overlays[name]}, seq.overlay_row)
                    refill(store, name, pages, seq.overlay_row, here, stop)
            ring_start[name] = min(held, first)
        seq.ring_start = ring_start
        self.retract(seq, length)

    def saved_rows(self, layer: int, sequences: abc.Sequence[Sequence]) -> list[Tensor]:
        """Copies of the rows of these sequences, of the overlays and of corrector states in one layer."""
        rows = torch.tensor([seq.overlay_row for seq in sequences], device=self.device)
        return [owned[rows] for owned in self.stores[layer].owned]

    @whole_or_none
    def restore_rows(self, layer: int, sequences: abc.Sequence[Sequence], saved: abc.Sequence[Tensor]) -> None:
        """Puts back what `saved_rows` returned."""
        rows = torch.tensor([seq.overlay_row for seq in sequences], device=self.device)
        for owned, each in zip(self.stores[layer].owned, saved, strict=True):
            owned[rows] = each

    @whole_or_none
    def retract(self, seq: Sequence, length: int) -> None:
        """Takes back an `extend` whose tokens were never written."""
        self._note(seq)
        keep = self.layout.pages_for(length)
        gone = [page for page in seq.pages[keep:] if page != SLID_OUT]
        seq.sinks = min(seq.sinks, length)
        if seq.requantized_from is not None and length <= seq.requantized_from:
            seq.requantized_from = None  # the groups that were quantized again are gone
        seq.length = length
        seq.pages = seq.pages[:keep]
        self.pool.release(gone)

    def check_ours(self, seq: Sequence) -> None:
        if seq.overlay_row == FREED or not any(seq is each for each in self.sequences):
            raise ValueError("this sequence is not in this cache: it was freed or swapped out, or is another cache's")

    def frontier(self, seq: Sequence, name: StreamName) -> int:
        """The first token of a group-wise stream that is not in a page."""
        window = self.layout.recipe.streams[name].window
        return max(window.packed_end(seq.length), seq.ring_start[name])

    def check_crop(self, seq: Sequence, length: int) -> None:
        """Refuses a length beyond the sequence's, and one at which tokens are needed whose pages the sliding window has left."""
        self.check_ours(seq)
        if not 0 <= length <= seq.length:
            raise ValueError(f"length must be between 0 and {seq.length}, got {length}")
        slid = seq.pages.count(SLID_OUT)
        if slid and 0 < length < seq.length:
            assert seq.visible is not None
            tails = [s.window.packed_end(length) for s in self.layout.recipe.streams.values() if s.groupwise]
            if min([length + 1 - seq.visible, *tails]) < self.layout.recipe.origin + slid * self.layout.page_tokens:
                raise ValueError(
                    f"cannot crop to {length} tokens: the sliding window has already dropped tokens that are needed"
                )

    @whole_or_none
    def slide(self, seq: Sequence, sliding_window: int) -> None:
        """Gives back the pages that lie wholly before the last `sliding_window` tokens, except those that groups in the tail will
        be packed into."""
        ends = [s.window.packed_end(seq.length) for s in self.layout.recipe.streams.values() if s.groupwise]
        seen = min([seq.length - sliding_window, *ends]) - self.layout.recipe.origin
        first = min(max(0, seen) // self.layout.page_tokens, len(seq.pages))
        gone = [page for page in seq.pages[:first] if page != SLID_OUT]
        if not gone and seq.visible == sliding_window:
            return
        self._note(seq)
        seq.pages = [SLID_OUT] * first + seq.pages[first:]
        seq.visible = sliding_window
        self.pool.release(gone)

    @whole_or_none
    def extend(self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]) -> PagedBatch:
        """Takes pages for new tokens at the end of sequences, and returns where they go. Where pages or memory run out (PoolFull, or
        torch's error) no sequence is longer.

        The tokens themselves are written layer by layer with `append`. A page that another sequence reads too is copied
        first. A count may be 0.
        """
        self._check_batch(sequences)
        if len(counts) != len(sequences) or any(count < 0 for count in counts):
            raise ValueError(
                f"counts must be a number of new tokens for each of {len(sequences)} sequences, got {counts}"
            )
        layout = self.layout
        more_pages = [
            layout.pages_for(seq.length + count) - len(seq.pages) for seq, count in zip(sequences, counts, strict=True)
        ]
        copied = self._to_copy(sequences, counts)
        try:
            self.reserve(sum(more_pages) + len(copied))
        except PoolFull:  # pages of the prefix cache go before a request is refused
            if not self._give_way(sum(more_pages), [seq.pages[place] for seq, place in copied]):
                raise
            copied = self._to_copy(sequences, counts)
            self.reserve(sum(more_pages) + len(copied))
        self._note(*sequences)
        for seq, place in copied:
            self._copy_page(seq, place)
        return batch_of(sequences, counts, self._extended(sequences, counts, more_pages), self.device)

    def _extended(
        self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], more_pages: abc.Sequence[int]
    ) -> list[Tensor]:
        """Makes sequences longer by free pages. Returns the slots of each sequence's new tokens: int64 [count]."""
        sink = self.layout.recipe.key.window.sink
        slot_mapping: list[Tensor] = []
        for seq, count, more in zip(sequences, counts, more_pages, strict=True):
            if more:
                seq.pages = seq.pages + self.pool.take(more)
            if seq.sinks == min(seq.length, sink):
                seq.sinks = min(seq.length + count, sink)
            seq.length += count
            slot_mapping.append(self._slots(seq, seq.length - count))
        return slot_mapping

    def _slots(self, seq: Sequence, first: int) -> Tensor:
        """Slots of the tokens of a sequence from `first` on: int64 [tokens]."""
        size = self.layout.page_tokens
        at = torch.arange(first, seq.length) - self.layout.recipe.origin
        at = at.clamp_min(0)  # sinks before the first page have no slot; append does not write it
        return torch.tensor(seq.pages or [0])[at // size] * size + at % size

    @whole_or_none
    def separate(self, sequences: abc.Sequence[Sequence], before: abc.Sequence[int]) -> PagedBatch:
        """Takes apart sequences that `mirror` made equal while their tokens from `before` on are written: each gets pages of its own
        for these tokens, as they are so far in every layer, and its row of the overlays stays. Returns the batch as `extend` of all
        of them would have. Where pages run out (PoolFull), no sequence has changed."""
        self._check_batch(sequences)
        copied: list[tuple[Sequence, int]] = []
        left: Counter[int] = Counter()  # references that copies so far will release
        for seq, length in zip(sequences, before, strict=True):
            copied += self._shared_pages(seq, length, left)
        self.reserve(len(copied))
        self._note(*sequences)
        for seq, place in copied:
            self._copy_page(seq, place)
        counts = [seq.length - length for seq, length in zip(sequences, before, strict=True)]
        slots = [self._slots(seq, length) for seq, length in zip(sequences, before, strict=True)]
        return batch_of(sequences, counts, slots, self.device)

    @whole_or_none
    def batch(self, sequences: abc.Sequence[Sequence]) -> PagedBatch:
        """Sequences as they are, with no new tokens. One may be named several times: nothing is written."""
        self._check_ours(sequences)
        return batch_of(sequences, [0] * len(sequences), [], self.device)

    def _check_ours(self, sequences: abc.Sequence[Sequence]) -> None:
        if not sequences:
            raise ValueError("sequences must name at least one sequence, got none")
        for seq in sequences:
            self.check_ours(seq)

    def _check_batch(self, sequences: abc.Sequence[Sequence]) -> None:
        self._check_ours(sequences)
        if len({id(seq) for seq in sequences}) != len(sequences):
            raise ValueError("sequences must name every sequence once, got one of them twice: fork it")

    # --- operations on one layer -------------------------------------------------------------------------------------

    # append and decode take the lock themselves: once a layer and step, a decorator's call is felt

    def append(self, layer: int, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
        """Writes the tokens that `extend` took pages for: key and value [tokens, heads, head_dim]. Correctors that weigh errors by
        queries need `query` of the same tokens, [tokens, query heads, head_dim]."""
        query = query if self.wants_queries else None
        with self.lock:
            chosen = self.ops_of[layer]["append"]
            if self.check and chosen.checks:
                if chosen.run(self.stores[layer], key, value, batch, query, self.largest):
                    return
                check_finite(self.numbers[layer], key, value, batch, self.largest)  # says which number
                raise RuntimeError(f"{chosen.name} refused keys or values of layer {layer} that are finite")
            if self.check:
                check_finite(self.numbers[layer], key, value, batch, self.largest)
            chosen.run(self.stores[layer], key, value, batch, query)

    def decode(self, layer: int, query: Tensor, batch: PagedBatch, **options: Any) -> Tensor:
        with self.lock:
            return self.ops_of[layer]["decode"].run(self.stores[layer], query, batch, **options)

    @locked
    def prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, **options: Any
    ) -> Tensor:
        return self.ops_of[layer]["prefill"].run(self.stores[layer], query, key, value, batch, **options)

    @locked
    def replay(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, **options: Any
    ) -> Tensor:
        """Appends new tokens and attends from each as decoding them one by one would have."""
        store = self.stores[layer]
        return replay(store, query, key, value, batch, lambda: self.append(layer, key, value, batch, query), **options)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _to_copy(self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]) -> list[tuple[Sequence, int]]:
        """Pages that new tokens will write to and that another sequence reads too: (sequence, number of the page in it).

        A new token goes to the page after the last token; a group that it completes may lie in older pages.
        """
        layout = self.layout
        out: list[tuple[Sequence, int]] = []
        left: Counter[int] = Counter()  # references that copies so far will release
        for seq, count in zip(sequences, counts, strict=True):
            starts = []
            for name, stream in layout.recipe.streams.items():
                end = self.frontier(seq, name) if stream.groupwise else seq.length
                if count and (not stream.groupwise or stream.window.packed_end(seq.length + count) > end):
                    starts.append(end)
            if starts:
                out += self._shared_pages(seq, min(starts), left)
        return out

    def _shared_pages(self, seq: Sequence, first: int, left: Counter[int]) -> list[tuple[Sequence, int]]:
        """Pages of a sequence, from its token `first` on, that another sequence reads too, when `left` references are gone."""
        out = []
        start = max(0, first - self.layout.recipe.origin) // self.layout.page_tokens
        for place, page in enumerate(seq.pages[start:], start):
            assert page != SLID_OUT, "a page is to be written that the sliding window has left"
            if self.pool.references(page) - left[page] > 1:
                out.append((seq, place))
                left[page] += 1
        return out

    def _copy_page(self, seq: Sequence, place: int) -> None:
        (copy,) = self.pool.take(1)
        for store in self.stores:
            store.pages[copy] = store.pages[seq.pages[place]]
        self.pool.release([seq.pages[place]])
        seq.pages = [*seq.pages[:place], copy, *seq.pages[place + 1 :]]

    @whole_or_none
    def reserve(self, count: int, sequences: int = 0) -> None:
        """Makes sure that `count` pages and the overlay rows of `sequences` sequences are free: evicts pages of the prefix cache, or
        grows the pool, if it may. Where that is not enough: PoolFull, or torch's error where memory runs out, and nothing has
        changed."""
        missing, more_rows = count - self.pool.free, sequences - len(self._free_rows)
        if self.max_sequences is not None and more_rows > 0:
            raise self._full(count, self._rows)
        if missing > 0 and not self.growing:
            if self.prefix is None or not self.prefix.evict(missing):
                raise self._full(count)
            missing = 0
        pages, overlay_rows = self.pool.total, self._rows
        if missing > 0:
            pages += max(missing, pages // 4)
        if more_rows > 0:
            overlay_rows += max(more_rows, 1 + overlay_rows // 4)
        if (pages, overlay_rows) != (self.pool.total, self._rows):
            self._grow(pages, overlay_rows)

    def _grow(self, pages: int, overlay_rows: int) -> None:
        """Grows every layer to so many pages and overlay rows; where memory runs out, no layer."""
        self._grown = pages, overlay_rows
        grow(self.stores, (self.pool.total, self._rows), self._grown)
        self.pool.grow(pages)
        self._free_rows[:0] = range(overlay_rows - 1, self._rows - 1, -1)
        self._rows = overlay_rows

    def _full(self, asked: int, sequences: int | None = None) -> PoolFull:
        evictable = self.prefix.evictable if self.prefix is not None else 0
        gains = [self.gain(seq) for seq in self.sequences]
        return PoolFull(asked, self.pool.used, self.pool.total, evictable, gains, sequences)

    def gain(self, seq: Sequence) -> int:
        """How many pages freeing a sequence would give back: those that no other sequence reads."""
        kept = self.prefix.holds if self.prefix is not None else lambda page: 0
        return sum(self.pool.references(page) - kept(page) == 1 for page in seq.held)

    def _give_way(self, more_pages: int, copied: abc.Sequence[int]) -> bool:
        """Drops pages of the prefix cache that would be copied only because it holds them, if that makes enough room."""
        if self.prefix is None:
            return False
        alone = [page for page in copied if 0 < self.prefix.holds(page) == self.pool.references(page) - 1]
        if more_pages + len(copied) - len(alone) > self.pool.free + self.prefix.evictable:
            return False
        for page in alone:
            self.prefix.forget(page)
        return True

    def _take_row(self) -> int:
        self.reserve(0, 1)
        return self._free_rows.pop()


def _check_alike(layouts: abc.Sequence[Layout], layers: int) -> None:
    """Refuses layouts of layers that cannot share block tables and overlay rows."""
    if len(layouts) != layers:
        raise ValueError(f"expected a layout for each of {layers} layers, got {len(layouts)}")
    shared = {(each.page_tokens, each.heads, each.head_dim, each.dtype, each.recipe.geometry) for each in layouts}
    if len(shared) > 1:
        raise ValueError(
            "layers of one cache must have the same page_tokens, heads, head_dim, type, windows, groups of tokens and correctors, "
            f"got {sorted(map(str, shared))}"
        )


def _digest_of(tensors: Mapping[int, Mapping[str, Tensor]]) -> str:
    """SHA-256 of calibrated tensors; empty where there are none."""
    found = hashlib.sha256()
    for layer, own in sorted(tensors.items()):
        for name, tensor in sorted(own.items()):
            found.update(f"{layer}.{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest() if any(tensors.values()) else ""
