"""Anything may happen to sequences, in any order, and each is as if it were alone in a fresh cache.

After every step the keys and values of every sequence, as attention sees them, are those of a cache of its own that never
forked, shared, evicted, swapped or saved anything, bit for bit; so is what attention makes of them. Where a recipe codes
every token alone, the bytes in its pages are also those of a fresh cache that was fed the same tokens at once.

2,000 examples, the same at every run; `--examples 50000` for more and others.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvant import recipes
from kvant.cache import PagedCache, PoolFull, PrefixCache, Sequence, Snapshot, Swapped, save, swap_in, swap_out
from kvant.ops.reference import read
from tests.families import families, make

HEADS, GROUP, DIM, PAGES = 2, 2, 64, 12
LONGEST = 150
FAMILIES = families()
GROUPWISE = [name for name in FAMILIES if any(s.groupwise for s in recipes.get(name).streams.values())]
_random = torch.Generator().manual_seed(7)
_directory = tempfile.TemporaryDirectory()
SNAPSHOT = Path(_directory.name) / "snapshot"
VOCABULARY = [torch.randn(9, heads, DIM, generator=_random) for heads in (HEADS, HEADS, HEADS * GROUP)]
PLACES = [torch.randn(LONGEST + 80, heads, DIM, generator=_random) for heads in (HEADS, HEADS, HEADS * GROUP)]


def tokens_at(ids: list[int], start: int) -> list[torch.Tensor]:
    """Keys, values and queries of tokens: what they are depends on the token and its position."""
    return [words[ids] + places[start : start + len(ids)] for words, places in zip(VOCABULARY, PLACES, strict=True)]


def append(cache: PagedCache, sequences: list[Sequence], ids: list[list[int]]) -> None:
    starts = [seq.length for seq in sequences]
    batch = cache.extend(sequences, [len(each) for each in ids])
    parts = [tokens_at(each, start) for each, start in zip(ids, starts, strict=True)]
    k, v, q = (torch.cat(side) for side in zip(*parts, strict=True))
    for layer in range(len(cache.stores)):
        cache.append(layer, k, v, batch, q)


@functools.cache
def page_tokens(name: str) -> int | None:
    small = all(stream.codec.group_tokens <= 16 for stream in recipes.get(name).streams.values())
    return 16 if small else None


@functools.lru_cache(maxsize=4096)
def fresh_parts(name: str, ids: tuple[int, ...]) -> list[torch.Tensor]:
    """What the pages of a fresh cache hold that was fed these tokens at once."""
    cache = make(name, page_tokens=page_tokens(name))
    seq = cache.new()
    append(cache, [seq], [list(ids)])
    return parts_of(cache, seq)


def parts_of(cache: PagedCache, seq: Sequence) -> list[torch.Tensor]:
    pages = cache.stores[0].pages[torch.tensor(seq.pages)]
    out = []
    for side in ("key", "value"):
        out += [part[: seq.length] for part in cache.layout.unpack(side, pages).values()]
    return out


class Life:
    """A sequence, its tokens, and a cache of its own in which the same happens to it."""

    def __init__(self, seq: Sequence, name: str) -> None:
        self.seq, self.name = seq, name
        self.ids: list[int] = []
        self.events: list[tuple[str, Any]] = []
        self.alone = make(name, page_tokens=page_tokens(name))
        self.twin = self.alone.new()
        self.seen: list[torch.Tensor] | None = None

    def happened(self, what: str, value: Any) -> None:
        self.events.append((what, value))
        self.seen = None
        if what == "append":
            append(self.alone, [self.twin], [value])
            self.ids += value
        elif what == "crop":
            self.alone.crop(self.twin, value)
            del self.ids[value:]
        else:  # a prefix was taken up: pages and sinks are there, windows are not
            more = [0] * (LONGEST + 60 - len(value))  # what comes after completes the groups
            append(self.alone, [self.twin], [value + more])
            self.alone.crop(self.twin, len(value))
            self.twin.ring_start = {"key": len(value), "value": len(value)}
            for state in self.alone.stores[0].states.values():
                state.zero_()  # nor has a corrector seen a query of the one who takes it
            self.ids = list(value)

    def forked(self, seq: Sequence) -> Life:
        other = Life(seq, self.name)
        for what, value in self.events:
            other.happened(what, value)
        return other

    def expected(self) -> list[torch.Tensor]:
        if self.seen is None:
            self.seen = look(self.alone, [self.twin])
        return self.seen


def look(cache: PagedCache, sequences: list[Sequence]) -> list[torch.Tensor]:
    """Keys and values of sequences as attention sees them, and what it makes of them."""
    batch = cache.batch(sequences)
    out = [read(cache.stores[0], side, batch, batch.seq_lens) for side in ("key", "value")]
    query = torch.linspace(-1, 1, DIM).expand(len(sequences), HEADS * GROUP, DIM)
    return [*out, cache.decode(0, query, batch, scale=0.1)]


class Machine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(FAMILIES + GROUPWISE), fixed=st.booleans())
    def begin(self, name: str, fixed: bool) -> None:
        self.name = name
        large = page_tokens(name) is None
        self.pages = None if large or not fixed else PAGES
        self.cache = make(name, self.pages, page_tokens=page_tokens(name))
        self.lives: list[Life] = []
        self.swapped: list[tuple[Swapped, list[Life]]] = []
        self.kept: list[tuple[str, list[int]]] = []  # what was asked to be kept
        self.sharing = recipes.get(name).not_prefix_safe is None
        if self.sharing:
            PrefixCache(self.cache)
        else:
            with pytest.raises(ValueError, match="cannot share pages between requests: .* fitted on the request"):
                PrefixCache(self.cache)
        self.tokenwise = not any(stream.groupwise for stream in recipes.get(name).streams.values())

    def pick(self, number: int) -> Life:
        return self.lives[number % len(self.lives)]

    def grow(self, lives: list[Life], ids: list[list[int]]) -> None:
        """Appends, or finds the pool full and everything as it was."""
        before = [(life.seq.length, list(life.seq.pages)) for life in lives]
        try:
            append(self.cache, [life.seq for life in lives], ids)
        except PoolFull as full:
            self.is_full(full)
            assert before == [(life.seq.length, list(life.seq.pages)) for life in lives]
            return
        for life, each in zip(lives, ids, strict=True):
            life.happened("append", each)

    def is_full(self, answer: PoolFull) -> None:
        """The answer says what was asked, what is used, and what could be freed."""
        pool = self.cache.pool
        assert self.pages is not None, "a pool that grows is never full"
        assert (answer.used, answer.total) == (pool.used, pool.total)
        assert answer.asked > pool.free + answer.evictable
        assert answer.frees == tuple(self.cache.gain(seq) for seq in self.cache.sequences)

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(first=st.integers(0, 8), count=st.integers(0, 70))
    @precondition(lambda self: len(self.lives) < 5)
    def new(self, first: int, count: int) -> None:
        life = Life(self.cache.new(), self.name)
        self.lives.append(life)
        if count:
            self.grow([life], [[(first + i * i) % 9 for i in range(count)]])

    @rule(
        which=st.integers(0, 9),
        word=st.integers(0, 8),
        count=st.integers(1, 50),
        chunk=st.sampled_from([1, 3, 7, 50, 50]),
    )
    @precondition(lambda self: self.lives)
    def append(self, which: int, word: int, count: int, chunk: int) -> None:
        life = self.pick(which)
        ids = [(word + i * i) % 9 for i in range(min(count, LONGEST - life.seq.length, 6 * chunk))]
        for first in range(0, len(ids), chunk):
            self.grow([life], [ids[first : first + chunk]])

    @rule(counts=st.lists(st.integers(1, 12), min_size=2, max_size=4), word=st.integers(0, 8))
    @precondition(lambda self: len(self.lives) > 1)
    def append_a_batch(self, counts: list[int], word: int) -> None:
        lives = [x for x in self.lives[: len(counts)] if x.seq.length + 12 <= LONGEST]
        if lives:
            self.grow(lives, [[(word + i) % 9] * n for i, n in enumerate(counts[: len(lives)])])

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: 0 < len(self.lives) < 5)
    def fork(self, which: int) -> None:
        life = self.pick(which)
        self.lives.append(life.forked(self.cache.fork(life.seq)))

    @rule(which=st.integers(0, 9), part=st.integers(0, 40), word=st.integers(0, 8), again=st.integers(0, 40))
    @precondition(lambda self: self.lives)
    def crop(self, which: int, part: int, word: int, again: int) -> None:
        """What speculation does: some tokens back, others in their place."""
        life = self.pick(which)
        length = life.seq.length * part // 40
        self.cache.crop(life.seq, length)
        life.happened("crop", length)
        if 0 < again <= LONGEST - length:
            self.grow([life], [[word] * again])

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.lives)
    def free(self, which: int) -> None:
        life = self.pick(which)
        self.lives.remove(life)
        self.cache.free(life.seq)
        with pytest.raises(ValueError, match="not in this cache"):
            self.cache.fork(life.seq)

    @rule(which=st.integers(0, 9), salt=st.sampled_from(["", "", "tenant"]))
    @precondition(lambda self: self.lives and self.sharing)
    def keep_for_later(self, which: int, salt: str) -> None:
        self.keep(which, salt)

    @rule(which=st.integers(0, 9), back=st.integers(1, 20), again=st.integers(0, 30), more=st.integers(0, 30))
    @precondition(lambda self: self.sharing and 0 < len(self.lives) < 5)
    def go_back_and_share(self, which: int, back: int, again: int, more: int) -> None:
        """An answer is given again, differently, and then someone asks the same."""
        life = self.pick(which)
        self.crop(which, 40 * max(0, life.seq.length - back) // max(1, life.seq.length), 8, again)
        self.share(self.lives.index(life), 0, 7, more, 1)

    def keep(self, which: int, salt: str) -> None:
        life = self.pick(which)
        prefix = self.cache.prefix
        kept = prefix.keep(life.seq, life.ids, salt)
        self.kept.append((salt, list(life.ids)))
        assert kept == life.seq.length or not self.tokenwise
        assert prefix.find(life.ids, salt) >= kept

    @rule(
        which=st.integers(0, 9),
        cut=st.integers(0, 20),
        word=st.integers(0, 8),
        more=st.integers(0, 40),
        own=st.integers(0, 5),
    )
    @precondition(lambda self: self.sharing and (self.kept or self.lives) and len(self.lives) < 5)
    def share(self, which: int, cut: int, word: int, more: int, own: int) -> None:
        """A request that begins as an earlier one did, and goes on."""
        if self.lives and (which < 6 or not self.kept):
            self.keep(which, "")
            which = -1
        salt, ids = self.kept[which % len(self.kept)]
        wanted = (ids[: len(ids) - len(ids) * cut // 30] + [word] * more)[:LONGEST]
        prefix = self.cache.prefix
        if not own:
            salt = "another tenant"
            assert prefix.find(wanted, salt) == 0
        found = prefix.find(wanted, salt)
        seq = prefix.take(wanted, salt)
        assert seq.length == found <= len(wanted)
        assert not found or any(wanted[:found] == text[:found] for kept_salt, text in self.kept if kept_salt == salt)
        life = Life(seq, self.name)
        if found:
            life.happened("take", wanted[:found])
        self.lives.append(life)
        if wanted[found:]:
            self.grow([life], [wanted[found:]])

    @rule(count=st.integers(1, 4))
    @precondition(lambda self: self.sharing)
    def evict(self, count: int) -> None:
        pool, prefix = self.cache.pool, self.cache.prefix
        free, evictable = pool.free, prefix.evictable
        done = prefix.evict(count)
        assert done == (count <= evictable)
        assert pool.free - free == (count if done else 0)

    @rule(first=st.integers(0, 4), count=st.integers(1, 3))
    @precondition(lambda self: self.lives and len(self.swapped) < 2)
    def swap(self, first: int, count: int) -> None:
        gone = self.lives[first % len(self.lives) :][:count]
        self.swapped.append((swap_out(self.cache, [life.seq for life in gone]), gone))
        for life in gone:
            self.lives.remove(life)

    @rule(which=st.integers(0, 1))
    @precondition(lambda self: self.swapped)
    def swap_back(self, which: int) -> None:
        swapped, lives = self.swapped[which % len(self.swapped)]
        if len(self.lives) + len(lives) > 6:
            return
        try:
            sequences = swap_in(self.cache, swapped)
        except PoolFull as full:
            self.is_full(full)
            return
        self.swapped.remove((swapped, lives))
        for life, seq in zip(lives, sequences, strict=True):
            life.seq = seq
            self.lives.append(life)

    @rule()
    @precondition(lambda self: len(self.cache.sequences) > 1)
    def save_and_load(self) -> None:
        path = save(SNAPSHOT, [self.cache])
        other = make(self.name, self.pages, page_tokens=page_tokens(self.name))
        if self.sharing:
            PrefixCache(other)
        with Snapshot(path) as snapshot:
            snapshot.load([other])
        order = [self.cache.sequences.index(life.seq) for life in self.lives]
        for life, place in zip(self.lives, order, strict=True):
            life.seq = other.sequences[place]
        if self.sharing:
            assert [n.key for n in other.prefix.nodes] == [n.key for n in self.cache.prefix.nodes]
        self.cache = other

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def every_sequence_is_as_if_it_were_alone(self) -> None:
        if not getattr(self, "lives", None):
            return
        found = look(self.cache, [life.seq for life in self.lives])
        for row, life in enumerate(self.lives):
            seq, twin = life.seq, life.twin
            assert (seq.length, seq.sinks, seq.ring_start) == (len(life.ids), twin.sinks, twin.ring_start)
            for mine, theirs in zip(found[:2], life.expected()[:2], strict=True):
                assert torch.equal(mine[row, : seq.length], theirs[0, : seq.length])
                assert bool(mine[row, : seq.length].isfinite().all())
            torch.testing.assert_close(found[2][row], life.expected()[2][0], rtol=1e-5, atol=1e-6)
            if self.tokenwise and seq.length:
                mine, theirs = parts_of(self.cache, seq), fresh_parts(self.name, tuple(life.ids))
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    @invariant()
    def references_and_lists_add_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, pool = self.cache, self.cache.pool
        nodes = cache.prefix.nodes if self.sharing else []
        held = Counter(page for seq in cache.sequences for page in seq.pages) + Counter(n.page for n in nodes)
        assert [pool.references(page) for page in range(pool.total)] == [held[page] for page in range(pool.total)]
        assert sorted(pool._free) == [page for page in range(pool.total) if not held[page]]
        owners = [seq.overlay_row for seq in cache.sequences] + cache._free_rows
        assert sorted(owners) == list(range(cache._rows))
        assert cache.nbytes == cache.predicted_nbytes

    def teardown(self) -> None:
        """At the end nothing leaks."""
        if not hasattr(self, "cache"):
            return
        for life in self.lives:
            self.cache.free(life.seq)
        if self.sharing:
            self.cache.prefix.clear()
            assert not self.cache.prefix._children and not self.cache.prefix._pages
        assert self.cache.pool.used == 0
        assert len(self.cache._free_rows) == self.cache._rows


def test_any_order_of_operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # nobody pulls the plug here
    asked = request.config.getoption("--examples")
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=asked or (2000 if request.config.getoption("--all") else 60),
            stateful_step_count=14,
            deadline=None,
            derandomize=asked is None,
            suppress_health_check=checks,
        ),
    )


def test_every_family_is_there() -> None:
    kinds = {type(stream.codec).__name__ for name in recipes.names() for stream in recipes.get(name).streams.values()}
    assert kinds == {type(s.codec).__name__ for name in FAMILIES for s in recipes.get(name).streams.values()}
