"""The sequences and the prefix cache of one PagedCache as JSON, for snapshots.

A file may come from anywhere: every number of it is checked against the layout before it is used. The names of the JSON's
fields are part of the file format: "exact" is `ring_start`, "pure" is `requantized_from`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvant.cache.paged import PagedCache
from kvant.cache.prefix import Node
from kvant.cache.sequence import SLID_OUT, Sequence
from kvant.cache.swap import gathered
from kvant.layout import StreamName

INT64 = range(-(2**63), 2**63)
STREAMS: tuple[StreamName, StreamName] = ("key", "value")


class Wrong(ValueError):
    """JSON that describes no cache of this layout."""


@dataclasses.dataclass
class Saved:
    """Sequences and nodes of the prefix cache over pages 0 ... pages - 1. The overlay row of a sequence is its index."""

    pages: int
    sequences: list[Sequence]
    nodes: list[Node] | None  # None: no prefix cache
    sinks: list[int]  # of every node: its sinks in full precision

    def to_dict(self) -> dict[str, Any]:
        sequences = [
            {
                "length": seq.length,
                "pages": seq.pages,
                "sinks": seq.sinks,
                "exact": [seq.ring_start[name] for name in STREAMS],
                "visible": seq.visible,
                "pure": seq.requantized_from,
            }
            for seq in self.sequences
        ]
        nodes = [
            {"parent": n.parent.hex(), "tokens": list(n.tokens), "start": n.start, "page": n.page, "sinks": rows}
            for n, rows in zip(self.nodes or (), self.sinks, strict=True)
        ]
        return {"pages": self.pages, "sequences": sequences, "prefix": None if self.nodes is None else nodes}

    @property
    def references(self) -> list[int]:
        """How many sequences and nodes refer to each page."""
        out = [0] * self.pages
        for page in [page for seq in self.sequences for page in seq.held] + [n.page for n in self.nodes or ()]:
            out[page] += 1
        return out


def write_group(cache: PagedCache) -> tuple[Saved, list[int]]:
    """A cache's state, and the cache's own id of each page in it."""
    pages, sequences = gathered(cache.sequences)
    kept = cache.prefix.nodes if cache.prefix is not None else None
    place = {page: i for i, page in enumerate(pages)}
    for node in kept or ():
        place.setdefault(node.page, len(place))
    nodes = None if kept is None else [dataclasses.replace(n, page=place[n.page], sinks=[]) for n in kept]
    return Saved(len(place), sequences, nodes, [n.sink_rows for n in kept or ()]), list(place)


def read_group(data: Any, cache: PagedCache, limit: int) -> Saved:
    """The state that JSON describes, for a cache of that layout; a file of its size holds at most `limit` pages."""
    pages = _number(data, "pages", range(limit + 1))
    sequences = [_sequence(item, row, cache, pages) for row, item in enumerate(_list(data, "sequences"))]
    nodes, sinks = None, []
    if _get(data, "prefix") is not None:
        nodes = []
        for item in _list(data, "prefix"):
            node, rows = _node(item, cache, pages)
            nodes.append(node)
            sinks.append(rows)
        if len({node.key for node in nodes}) != len(nodes):
            raise Wrong("a prefix is kept twice")
    saved = Saved(pages, sequences, nodes, sinks)
    if not all(saved.references):
        raise Wrong("a page belongs to no sequence and no prefix")
    return saved


def _sequence(item: Any, row: int, cache: PagedCache, count: int) -> Sequence:
    layout = cache.layout
    length = _number(item, "length", INT64)
    pages = _list(item, "pages")
    if length < 0 or layout.pages_for(length) != len(pages):
        raise Wrong(f"a sequence of {length} tokens has {len(pages)} pages")
    slid = pages.count(SLID_OUT)
    if any(type(page) is not int for page in pages) or pages[:slid] != [SLID_OUT] * slid:
        raise Wrong("the pages of a sequence are no numbers, or not in order")
    if any(page not in range(count) for page in pages[slid:]) or len(set(pages[slid:])) != len(pages) - slid:
        raise Wrong("a sequence has a page twice, or one that is not there")
    visible = None if _get(item, "visible") is None else _number(item, "visible", range(1, 2**62))
    if slid and visible is None:
        raise Wrong("pages of a sequence were left by no sliding window")
    again = None if _get(item, "pure") is None else _number(item, "pure", range(length + 1))
    sinks = _number(item, "sinks", range(min(length, layout.recipe.key.window.sink) + 1))
    found = _list(item, "exact")
    if len(found) != 2 or any(type(n) is not int or n not in range(length + 1) for n in found):
        raise Wrong("rings of a sequence start at no token of it")
    ring_start: dict[StreamName, int] = dict(zip(STREAMS, found, strict=True))
    for name, stream in layout.recipe.streams.items():
        window, group = stream.window, stream.codec.group_tokens
        first = ring_start[name]
        if stream.groupwise and first > window.packed_end(length) and (first - window.first) % group:
            raise Wrong("the ring of a sequence starts inside a group")
    if layout.recipe.origin and not slid and sinks != min(length, layout.recipe.origin):
        raise Wrong("sinks of a sequence are in no page and in no overlay")
    return Sequence(row, length, list(pages), sinks, ring_start, visible, again)


def _node(item: Any, cache: PagedCache, count: int) -> tuple[Node, int]:
    layout = cache.layout
    tokens, parent = _list(item, "tokens"), _get(item, "parent")
    start = _number(item, "start", range(2**62))
    at = start and start - layout.recipe.origin
    room = layout.page_tokens + (0 if start else layout.recipe.origin)
    if at < 0 or at % layout.page_tokens or not 0 < len(tokens) <= room:
        raise Wrong("a kept page holds too many tokens, or lies between others")
    if any(type(token) is not int or token not in INT64 for token in tokens):
        raise Wrong("tokens of a kept page are no numbers")
    try:
        named = bytes.fromhex(parent)
    except (TypeError, ValueError) as error:
        raise Wrong(f"a kept page comes after {parent!r:.80}") from error
    if len(named) != 32:
        raise Wrong(f"a kept page comes after {parent!r:.80}")
    stop = min(start + len(tokens), layout.recipe.key.window.sink)
    rows = _number(item, "sinks", range(max(0, stop - start) + 1))
    if not start and layout.recipe.origin and (rows != layout.recipe.origin or len(tokens) <= rows):
        raise Wrong("sinks of a kept page are in no page and in no overlay")
    return Node(named, tuple(tokens), start, _number(item, "page", range(count))), rows


def _get(data: Any, name: str) -> Any:
    if not isinstance(data, dict) or name not in data:
        raise Wrong(f"{name} is missing")
    return data[name]


def _list(data: Any, name: str) -> list[Any]:
    found = _get(data, name)
    if not isinstance(found, list):
        raise Wrong(f"{name} is no list")
    return found


def _number(data: Any, name: str, allowed: range) -> int:
    found = _get(data, name)
    if type(found) is not int or found not in allowed:
        raise Wrong(f"{name} must be between {allowed.start} and {allowed.stop - 1}, got {found!r:.80}")
    return found
