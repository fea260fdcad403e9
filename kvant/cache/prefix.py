"""The prefix cache: pages that outlive their sequence, found again by the tokens that they hold.

A page is named by a chain of hashes: of the page before it, and of its own tokens. The chain starts from the cache's digest and
a salt. So a page is found only under the same salt, and only in a cache whose stored bytes mean the same. A page also serves
a sequence that agrees with the first of its tokens only: the sequence shares it, and copies it before it writes to it. Group-wise
recipes share whole groups.

Sinks of a prefix are kept in full precision beside its pages. Its recent tokens are not: a sequence that takes up a prefix reads
them from their pages, until newer tokens have filled the ring.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from array import array
from collections import OrderedDict, abc
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from kvant.cache.journal import Journal
from kvant.cache.pool import PagePool
from kvant.cache.sequence import SLID_OUT, Sequence
from kvant.layout import Layout, StreamName
from kvant.layouts import Layouts
from kvant.ops import LayerStore

Tensor = torch.Tensor
R = TypeVar("R")


class PageStorage(Protocol):
    """What a PrefixCache asks of the cache whose pages it keeps: a PagedCache."""

    layout: Layout
    layouts: Layouts
    digest: str
    pool: PagePool
    stores: list[LayerStore]
    prefix: PrefixCache | None

    journal: Journal

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def whole(self, operation: abc.Callable[[], R]) -> R: ...

    def new(self) -> Sequence: ...

    def free(self, seq: Sequence) -> None: ...

    def frontier(self, seq: Sequence, name: StreamName) -> int: ...


@dataclasses.dataclass(eq=False)
class Node:
    """A page in the prefix cache: the tokens that it holds, the position of the first one, and the sinks among them."""

    parent: bytes  # key of the page before it
    tokens: tuple[int, ...]
    start: int
    page: int
    sinks: list[dict[StreamName, Tensor]] = dataclasses.field(default_factory=list)
    # of every layer, sinks in full precision: [sink_rows, heads, head_dim]

    @property
    def key(self) -> bytes:
        return link(self.parent, self.tokens)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def sink_rows(self) -> int:
        return len(self.sinks[0]["key"]) if self.sinks else 0


def link(parent: bytes, tokens: abc.Sequence[int]) -> bytes:
    """Key of a page: SHA-256 of the key of the page before it and of its own tokens."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """The pages of one PagedCache that are kept for later sequences. Each has a reference in the pool. Where the pool needs pages,
    the least recently used are evicted, and the end of a text before its beginning.

    sliding_window  of the layers, if they have one: pages that it has left are not looked for.
    limit           number of pages that are kept at most.
    """

    def __init__(self, cache: PageStorage, sliding_window: int | None = None, limit: int | None = None) -> None:
        for recipe in dict.fromkeys(layout.recipe for layout in cache.layouts.layers):
            reason = recipe.not_prefix_safe
            if reason is None:
                continue
            raise ValueError(
                f"recipe {recipe.name} cannot share pages between requests: {reason}, "
                "so a page's bytes depend on more than the tokens before its end"
            )
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be a number of pages, got {limit}")
        assert cache.prefix is None, "a cache has one prefix cache"
        self.cache, self.sliding_window, self.limit = cache, sliding_window, limit
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()  # least recently used first
        self._children: dict[bytes, list[Node]] = {}
        self._pages: dict[int, list[Node]] = {}  # several where one sequence is kept under several salts
        groups = [s.codec.group_tokens for s in cache.layout.recipe.streams.values() if s.groupwise]
        self.unit = math.lcm(*groups) if groups else 1  # prefixes are shared in multiples of so many tokens
        cache.prefix = self

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def nodes(self) -> list[Node]:
        """All pages of the prefix cache, least recently used first."""
        return list(self._nodes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the sinks that are kept beside the pages."""
        return sum(t.nbytes for node in self._nodes.values() for layer in node.sinks for t in layer.values())

    @property
    def predicted_nbytes(self) -> int:
        layout = self.cache.layout
        row = sum(layout.window_token_bytes(name) for name in layout.recipe.streams)
        return len(self.cache.stores) * row * sum(node.sink_rows for node in self._nodes.values())

    def root(self, salt: str) -> bytes:
        """Parent of a text's first page."""
        text = f"kvant-prefix:{self.cache.digest}:{salt}"
        return hashlib.sha256(text.encode()).digest()

    def _bound(self, place: int) -> int:
        """Position of the first token of page number `place` of a sequence. Page 0 also stands for sinks that lie in no page."""
        return self.cache.layout.recipe.origin + place * self.cache.layout.page_tokens if place else 0

    def _whole(self, length: int) -> int:
        """`length` rounded down to tokens that can be shared: whole groups of a group-wise recipe."""
        if self.unit == 1:
            return length
        origin = self.cache.layout.recipe.origin
        return origin + (length - origin) // self.unit * self.unit if length >= origin + self.unit else 0

    # --- keeping ---------------------------------------------------------------------------------------------------

    def keep(self, seq: Sequence, tokens: abc.Sequence[int], salt: str = "") -> int:
        """Keeps a sequence's pages under its tokens; returns how many tokens can be found again. The sequence is unchanged, but it
        copies its last page, where that is not full, before it writes to it."""
        return self.cache.whole(lambda: self._keep(seq, tokens, salt))

    def _keep(self, seq: Sequence, tokens: abc.Sequence[int], salt: str) -> int:
        cache = self.cache
        if len(tokens) != seq.length:
            raise ValueError(f"the sequence holds {seq.length} tokens, got {len(tokens)} token ids")
        streams = cache.layout.recipe.streams
        coded = [cache.frontier(seq, name) for name, stream in streams.items() if stream.groupwise]
        end = self._whole(min([seq.length, *coded, *([] if seq.requantized_from is None else [seq.requantized_from])]))
        parent, chain = self.root(salt), []
        for place, page in enumerate(seq.pages):
            start, stop = self._bound(place), min(self._bound(place + 1), end)
            if start >= stop:
                break
            piece = tuple(tokens[start:stop])
            key = link(parent, piece)
            node = self._covering(parent, piece)
            if node is None and page != SLID_OUT:
                node = Node(parent, piece, start, page, self._sinks_of(seq, start, stop))
                shorter = self._shorter(parent, piece)
                self._add(node)  # first: it takes the place of the shorter ones
                for each in shorter:
                    self._drop(each)
            if node is not None:
                chain.append(node)
            parent = key
        self._touch(chain)
        while self.limit is not None and len(self._nodes) > self.limit:
            self._drop(next(iter(self._nodes.values())))
        return end

    def _sinks_of(self, seq: Sequence, start: int, stop: int) -> list[dict[StreamName, Tensor]]:
        held = slice(start, min(stop, seq.sinks))
        if held.start >= held.stop:
            return []
        stores = self.cache.stores
        return [
            {name: rows[seq.overlay_row, held].clone() for name, rows in store.overlays.items()} for store in stores
        ]

    def _covering(self, parent: bytes, piece: tuple[int, ...]) -> Node | None:
        """A page of the prefix cache that begins with these tokens."""
        exact = self._nodes.get(link(parent, piece))
        longer = (n for n in self._children.get(parent, ()) if n.tokens[: len(piece)] == piece)
        return exact or next(longer, None)

    def _shorter(self, parent: bytes, piece: tuple[int, ...]) -> list[Node]:
        """Pages that hold the beginning of these tokens only."""
        return [node for node in self._children.get(parent, ()) if node.tokens == piece[: len(node.tokens)]]

    def _add(self, node: Node, share: bool = True) -> None:
        assert node.key not in self._nodes
        if share:
            self.cache.pool.share([node.page])
        self._nodes[node.key] = node
        self._index(node)

    def _index(self, node: Node) -> None:
        self._children.setdefault(node.parent, []).append(node)
        self._pages.setdefault(node.page, []).append(node)

    def recount(self) -> None:
        """Indexes the nodes anew, after an operation that was taken back. The nodes are those of now: what was kept is kept, and what
        was given up is gone, since its page may have been written to."""
        self._children, self._pages = {}, {}
        for node in self._nodes.values():
            self._index(node)

    def restore(self, nodes: abc.Sequence[Node]) -> None:
        """Adds the nodes of a snapshot, least recently used first. The pool has counted their references already."""
        self.cache.journal.note(self, "_nodes")
        self._nodes = self._nodes.copy()
        for node in nodes:
            self._add(node, share=False)

    # --- finding ---------------------------------------------------------------------------------------------------

    def find(self, tokens: abc.Sequence[int], salt: str = "") -> int:
        """Length of the longest stored prefix of these tokens."""
        with self.cache.lock:
            return self._longest(*self._search(tokens, salt))

    def take(self, tokens: abc.Sequence[int], salt: str = "", length: int | None = None) -> Sequence:
        """A new sequence that shares the pages of the longest stored prefix of these tokens; `length` asks for exactly so many
        tokens. Where it fails (PoolFull, or torch's error where memory runs out), there is no new sequence."""
        return self.cache.whole(lambda: self._take(tokens, salt, length))

    def _take(self, tokens: abc.Sequence[int], salt: str, length: int | None) -> Sequence:
        chain, partial = self._search(tokens if length is None else tokens[:length], salt)
        found = self._longest(chain, partial)
        if length is not None and found != length:
            raise ValueError(f"{length} tokens were asked for, {found} are kept")
        seq = self.cache.new()
        if found:
            self._share(seq, found, chain, partial)
        return seq

    def _share(
        self, seq: Sequence, found: int, chain: abc.Sequence[Node | None], partial: tuple[Node, int] | None
    ) -> None:
        """Gives an empty sequence the first `found` tokens of the pages that `_search` found."""
        cache = self.cache
        nodes = self._pages_at(found, chain, partial)
        assert nodes is not None
        for store in cache.stores:  # the row may be that of a sequence which the same operation has freed
            cache.journal.note_rows(store.overlays, (seq.overlay_row, slice(0, cache.layout.recipe.key.window.sink)))
            cache.journal.note_rows(store.states, seq.overlay_row)
        sinks = 0
        for node in nodes:
            rows = 0 if node is None else min(node.sink_rows, found - node.start)
            if node is None or node.start != sinks or not rows:
                break
            for store, stored in zip(cache.stores, node.sinks, strict=True):
                for name, overlay in store.overlays.items():
                    overlay[seq.overlay_row, node.start : node.start + rows] = stored[name][:rows]
            sinks += rows
        for store in cache.stores:
            for state in store.states.values():
                state[seq.overlay_row].zero_()
        pages = [SLID_OUT if node is None else node.page for node in nodes]
        cache.pool.share([page for page in pages if page != SLID_OUT])
        seq.pages, seq.sinks = pages, sinks
        seq.length, seq.ring_start = found, {"key": found, "value": found}
        seq.visible = self.sliding_window if SLID_OUT in pages else None
        self._touch([node for node in nodes if node is not None])

    def _search(self, tokens: abc.Sequence[int], salt: str) -> tuple[list[Node | None], tuple[Node, int] | None]:
        """Pages whose tokens all occur in `tokens`, by their number in the sequence (None: not stored); and one more page whose first
        tokens do, with the length of the prefix that ends in it."""
        parent, place = self.root(salt), 0
        chain: list[Node | None] = []
        while self._bound(place + 1) <= len(tokens):
            piece = tuple(tokens[self._bound(place) : self._bound(place + 1)])
            chain.append(self._nodes.get(link(parent, piece)))
            if chain[-1] is None and self.sliding_window is None:
                chain.pop()
                break
            parent = link(parent, piece)
            place += 1
        start, best = self._bound(place), None
        for node in self._children.get(parent, ()):
            same = 0
            for mine, theirs in zip(tokens[start:], node.tokens, strict=False):
                if mine != theirs:
                    break
                same += 1
            end = self._whole(start + same)
            if end > start and (best is None or end > best[1]):
                best = (node, end)
        return chain, best

    def _longest(self, chain: abc.Sequence[Node | None], partial: tuple[Node, int] | None) -> int:
        ends = [self._bound(place + 1) for place, node in enumerate(chain) if node is not None]
        if partial is not None:
            ends.append(partial[1])
        return next((n for n in reversed(ends) if self._pages_at(n, chain, partial) is not None), 0)

    def _pages_at(
        self, length: int, chain: abc.Sequence[Node | None], partial: tuple[Node, int] | None
    ) -> list[Node | None] | None:
        """Pages of the first `length` tokens: None for a page that the sliding window has left. None as a whole where a page
        that is needed is not stored."""
        nodes = list(chain)
        if partial is not None and length == partial[1]:
            nodes.append(partial[0])
        count = self.cache.layout.pages_for(length)
        if count > len(nodes):
            return None
        needed = 0
        if self.sliding_window is not None:
            ends = [s.window.packed_end(length) for s in self.cache.layout.recipe.streams.values() if s.groupwise]
            seen = min([length - self.sliding_window, *ends]) - self.cache.layout.recipe.origin
            needed = max(0, seen) // self.cache.layout.page_tokens
        nodes[:needed] = [None for _ in range(needed)]
        return None if None in nodes[needed:count] else nodes[:count]

    # --- eviction ---------------------------------------------------------------------------------------------------

    def holds(self, page: int) -> int:
        """How many references to a page are the prefix cache's."""
        return len(self._pages.get(page, ()))

    @property
    def evictable(self) -> int:
        """How many pages no sequence reads."""
        return sum(self.cache.pool.references(page) == len(nodes) for page, nodes in self._pages.items())

    def evict(self, count: int) -> bool:
        """Evicts the `count` least recently used pages that no sequence reads. Where there are fewer, evicts none and returns
        False."""
        return self.cache.whole(lambda: self._evict(count))

    def _evict(self, count: int) -> bool:
        gone: dict[int, None] = {}
        for node in self._nodes.values():
            if len(gone) == count:
                break
            if self.cache.pool.references(node.page) == self.holds(node.page):
                gone[node.page] = None
        if len(gone) < count:
            return False
        for page in gone:
            self.forget(page)
        return True

    def forget(self, page: int) -> None:
        """Drops a page from the prefix cache."""
        for node in list(self._pages[page]):
            self._drop(node)

    def clear(self) -> None:
        """Drops all pages; those that a sequence reads stay with it."""

        def drop() -> None:
            for node in self.nodes:
                self._drop(node)

        self.cache.whole(drop)

    def _drop(self, node: Node) -> None:
        del self._nodes[node.key]
        for index, place in ((self._children, node.parent), (self._pages, node.page)):
            index[place].remove(node)  # type: ignore[index]
            if not index[place]:  # type: ignore[index]
                del index[place]  # type: ignore[arg-type]
        self.cache.pool.release([node.page])

    def _touch(self, chain: abc.Sequence[Node]) -> None:
        """Marks pages as used just now, the first page of a text last: a page is then evicted before those that lead to it."""
        for node in reversed(chain):
            if node.key in self._nodes:
                self._nodes.move_to_end(node.key)
