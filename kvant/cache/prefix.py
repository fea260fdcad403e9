"""Pages that outlive their sequence, found again by the tokens that they hold.

A page is named by a chain of hashes: of the page before it, and of its own tokens. The chain starts from the cache's
digest and the tenant's salt, so nothing is found by someone who asked not to share, or by a cache in which the bytes
mean something else. A stored page also serves a sequence that agrees with its first tokens only: it is then shared, and
copied when the sequence writes to it. Group-wise recipes share whole groups.

A prefix that was found brings its sinks in full precision, which are kept beside its pages, but no recent window: those
tokens are read from their pages until newer ones have taken their place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from array import array
from collections import OrderedDict, abc
from typing import TYPE_CHECKING

import torch

from kvant.cache.sequence import SLID_OUT, Sequence
from kvant.codecs import DTYPES
from kvant.layout import StreamName

if TYPE_CHECKING:
    from kvant.cache.paged import PagedCache

Tensor = torch.Tensor


@dataclasses.dataclass(eq=False)
class Node:
    """A kept page: the tokens that it holds, which start at `start`, and the sinks among them."""

    parent: bytes
    tokens: tuple[int, ...]
    start: int
    page: int
    sinks: list[dict[StreamName, Tensor]] = dataclasses.field(
        default_factory=list
    )  # of every layer: [rows, heads, dim]

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
    """Names a page by the page before it and its own tokens."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """The kept pages of one PagedCache. Every one has a reference; the least recently used are given up when the pool
    needs room, the end of a text before its beginning.

    window  the sliding window of the layers, if they have one: what has left it is not looked for.
    limit   pages that are kept at most.
    """

    def __init__(self, cache: PagedCache, sliding_window: int | None = None, limit: int | None = None) -> None:
        reason = cache.layout.recipe.not_prefix_safe
        if reason is not None:
            raise ValueError(
                f"recipe {cache.layout.recipe.name} cannot share pages between requests: {reason}, "
                "so a page's bytes depend on more than the tokens before its end"
            )
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be a number of pages, got {limit}")
        assert cache.prefix is None, "a cache has one prefix cache"
        self.cache, self.window, self.limit = cache, sliding_window, limit
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()  # least recently used first
        self._children: dict[bytes, list[Node]] = {}
        self._pages: dict[int, list[Node]] = {}  # several where tenants keep the same sequence
        groups = [s.codec.group_tokens for s in cache.layout.recipe.streams.values() if s.groupwise]
        self.unit = math.lcm(*groups) if groups else 1  # tokens that are shared together
        cache.prefix = self

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def nodes(self) -> list[Node]:
        """Kept pages, least recently used first."""
        return list(self._nodes.values())

    @property
    def nbytes(self) -> int:
        """Of the sinks that are kept beside pages."""
        return sum(t.nbytes for node in self._nodes.values() for layer in node.sinks for t in layer.values())

    @property
    def predicted_nbytes(self) -> int:
        layout = self.cache.layout
        row = 2 * layout.heads * layout.head_dim * DTYPES[layout.overlay_dtype].itemsize
        return len(self.cache.stores) * row * sum(node.sink_rows for node in self._nodes.values())

    def root(self, salt: str) -> bytes:
        text = f"kvant-prefix:{self.cache.digest}:{salt}"
        return hashlib.sha256(text.encode()).digest()

    def _bound(self, place: int) -> int:
        """Position of the first token of a page; the first page also answers for sinks that lie in none."""
        return self.cache.layout.recipe.origin + place * self.cache.layout.page_tokens if place else 0

    def _whole(self, length: int) -> int:
        """The longest part of so many tokens that can be shared."""
        if self.unit == 1:
            return length
        origin = self.cache.layout.recipe.origin
        return origin + (length - origin) // self.unit * self.unit if length >= origin + self.unit else 0

    # --- keeping ---------------------------------------------------------------------------------------------------

    def keep(self, seq: Sequence, tokens: abc.Sequence[int], salt: str = "") -> int:
        """Keeps a sequence's pages under its tokens, and says how many tokens can be found again. The sequence goes on
        as before; a page of its that is not full yet is copied when it writes to it."""
        cache = self.cache
        with cache.lock:
            if len(tokens) != seq.length:
                raise ValueError(f"the sequence holds {seq.length} tokens, got {len(tokens)} token ids")
            streams = cache.layout.recipe.streams
            coded = [cache.frontier(seq, name) for name, stream in streams.items() if stream.groupwise]
            end = self._whole(
                min([seq.length, *coded, *([] if seq.requantized_from is None else [seq.requantized_from])])
            )
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
                    self._drop_shorter(parent, piece)
                    self._add(node)
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
        """A page that holds these tokens, and perhaps more."""
        exact = self._nodes.get(link(parent, piece))
        longer = (n for n in self._children.get(parent, ()) if n.tokens[: len(piece)] == piece)
        return exact or next(longer, None)

    def _drop_shorter(self, parent: bytes, piece: tuple[int, ...]) -> None:
        """A page that holds more of the same text takes the place of one that holds less."""
        for node in list(self._children.get(parent, ())):
            if node.tokens == piece[: len(node.tokens)]:
                self._drop(node)

    def _add(self, node: Node, share: bool = True) -> None:
        assert node.key not in self._nodes
        if share:
            self.cache.pool.share([node.page])
        self._nodes[node.key] = node
        self._children.setdefault(node.parent, []).append(node)
        self._pages.setdefault(node.page, []).append(node)

    def restore(self, nodes: abc.Sequence[Node]) -> None:
        """Takes up nodes that a snapshot kept, least recently used first. Their references have been counted."""
        for node in nodes:
            self._add(node, share=False)

    # --- finding ---------------------------------------------------------------------------------------------------

    def find(self, tokens: abc.Sequence[int], salt: str = "") -> int:
        """How many of the tokens could be taken up."""
        with self.cache.lock:
            return self._longest(*self._search(tokens, salt))

    def take(self, tokens: abc.Sequence[int], salt: str = "", length: int | None = None) -> Sequence:
        """A new sequence that shares the longest kept prefix of some tokens; its length says how many. `length` asks for
        that many of them and no more. Where it cannot be had (PoolFull, or torch's error where memory runs out), there is
        no new sequence."""
        cache = self.cache
        with cache.lock:
            chain, partial = self._search(tokens if length is None else tokens[:length], salt)
            found = self._longest(chain, partial)
            if length is not None and found != length:
                raise ValueError(f"{length} tokens were asked for, {found} are kept")
            seq = cache.new()
            try:
                if found:
                    self._share(seq, found, chain, partial)
            except BaseException:
                cache.free(seq)
                raise
            return seq

    def _share(
        self, seq: Sequence, found: int, chain: abc.Sequence[Node | None], partial: tuple[Node, int] | None
    ) -> None:
        """Gives an empty sequence the first `found` kept tokens."""
        cache = self.cache
        nodes = self._pages_at(found, chain, partial)
        assert nodes is not None
        sinks = 0
        for node in nodes:
            rows = 0 if node is None else min(node.sink_rows, found - node.start)
            if node is None or node.start != sinks or not rows:
                break
            for store, kept in zip(cache.stores, node.sinks, strict=True):
                for name, overlay in store.overlays.items():
                    overlay[seq.overlay_row, node.start : node.start + rows] = kept[name][:rows]
            sinks += rows
        for store in cache.stores:
            for state in store.states.values():
                state[seq.overlay_row].zero_()
        pages = [SLID_OUT if node is None else node.page for node in nodes]
        cache.pool.share([page for page in pages if page != SLID_OUT])
        seq.pages, seq.sinks = pages, sinks
        seq.length, seq.ring_start = found, {"key": found, "value": found}
        seq.visible = self.window if SLID_OUT in pages else None
        self._touch([node for node in nodes if node is not None])

    def _search(self, tokens: abc.Sequence[int], salt: str) -> tuple[list[Node | None], tuple[Node, int] | None]:
        """The kept pages whose tokens are all wanted, by place (None: not kept), and one of which the first tokens are,
        with the length that it leads to."""
        parent, place = self.root(salt), 0
        chain: list[Node | None] = []
        while self._bound(place + 1) <= len(tokens):
            piece = tuple(tokens[self._bound(place) : self._bound(place + 1)])
            chain.append(self._nodes.get(link(parent, piece)))
            if chain[-1] is None and self.window is None:
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
        """The kept pages of the first `length` tokens, None for those that no window sees any more; None as a whole where one
        that is needed is missing."""
        nodes = list(chain)
        if partial is not None and length == partial[1]:
            nodes.append(partial[0])
        count = self.cache.layout.pages_for(length)
        if count > len(nodes):
            return None
        needed = 0
        if self.window is not None:
            ends = [s.window.packed_end(length) for s in self.cache.layout.recipe.streams.values() if s.groupwise]
            seen = min([length - self.window, *ends]) - self.cache.layout.recipe.origin
            needed = max(0, seen) // self.cache.layout.page_tokens
        nodes[:needed] = [None for _ in range(needed)]
        return None if None in nodes[needed:count] else nodes[:count]

    # --- giving up -------------------------------------------------------------------------------------------------

    def holds(self, page: int) -> int:
        """References that kept prefixes have to a page."""
        return len(self._pages.get(page, ()))

    @property
    def evictable(self) -> int:
        """Pages that nobody else reads."""
        return sum(self.cache.pool.references(page) == len(nodes) for page, nodes in self._pages.items())

    def evict(self, count: int) -> bool:
        """Gives up the `count` least recently used of the pages that nobody else reads; none where there are not as
        many."""
        with self.cache.lock:
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
        """Keeps a page no longer."""
        for node in list(self._pages[page]):
            self._drop(node)

    def clear(self) -> None:
        """Forgets everything; pages that a sequence reads stay its own."""
        with self.cache.lock:
            for node in self.nodes:
                self._drop(node)

    def _drop(self, node: Node) -> None:
        del self._nodes[node.key]
        for index, place in ((self._children, node.parent), (self._pages, node.page)):
            index[place].remove(node)  # type: ignore[index]
            if not index[place]:  # type: ignore[index]
                del index[place]  # type: ignore[arg-type]
        self.cache.pool.release([node.page])

    def _touch(self, chain: abc.Sequence[Node]) -> None:
        """The end of a text is older than its beginning, so that nothing is kept that cannot be reached."""
        for node in reversed(chain):
            if node.key in self._nodes:
                self._nodes.move_to_end(node.key)
