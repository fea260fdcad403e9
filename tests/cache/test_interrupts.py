"""An operation on a PagedCache that is interrupted at any of its lines has happened whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvant.cache import PagedCache, PrefixCache, StaticBatch, save, swap_in, swap_out
from kvant.cache.snapshot import Snapshot
from kvant.ops.reference import read
from tests.cache.test_faults import filled, nothing_leaks
from tests.grouped import Tokens, fill, make_cache
from tests.interrupts import interrupted, is_free

RECIPES = ["int4:sink=2,recent=9", "kitty:k.group=16,k.flush=16,v.recent=5,sink=9"]
STRIDE = 7  # of the quick tier


def content(cache: PagedCache) -> list[Any]:
    """What sequences hold, wherever it lies, as attention reads it."""
    out = []
    for seq in cache.sequences:
        rings = {name: stream.window.ring for name, stream in cache.layout.recipe.streams.items()}
        held = [max(seq.ring_start[name], seq.length - ring) for name, ring in rings.items()]
        state = seq.length, seq.sinks, held, seq.visible, seq.requantized_from, len(seq.pages)
        batch = cache.batch([seq])
        streams = [read(store, name, batch, batch.seq_lens) for store in cache.stores for name in store.overlays]
        out.append((state, [x.contiguous().view(torch.uint8).numpy().tobytes() for x in streams]))
    return out


def kept(cache: PagedCache) -> set[bytes]:
    return set() if cache.prefix is None else {node.key for node in cache.prefix.nodes}


def full(name: str) -> PagedCache:
    """As `filled`, in a pool whose free pages are few: the next ones come from the prefix cache."""
    cache = filled(name, pages=10)
    assert cache.prefix is not None
    seq = cache.new()
    fill(cache, seq, Tokens.random(40, 2, 1, 64, 5), [40])
    cache.prefix.keep(seq, [5] * 40)
    cache.free(seq)
    return cache


def static(cache: PagedCache) -> StaticBatch:
    return StaticBatch(cache, cache.sequences[1:2], 20)


def write(cache: PagedCache) -> None:
    """One more token of every sequence, in all layers."""
    if not cache.sequences:  # an operation that was done whole before the interrupt may have left none
        return
    tokens = Tokens.random(len(cache.sequences), 2, 1, 64, 8)
    batch = cache.extend(cache.sequences, [1] * len(cache.sequences))
    for layer in range(len(cache.stores)):
        cache.append(layer, tokens.k, tokens.v, batch, tokens.q)


# an operation on a cache, and on what was prepared for it
OPERATIONS: dict[str, tuple[Callable[[PagedCache], Any], Callable[[PagedCache, Any], Any]]] = {
    "new": (lambda cache: None, lambda cache, _: cache.new()),
    "fork": (lambda cache: None, lambda cache, _: cache.fork(cache.sequences[1])),
    "mirror": (lambda cache: None, lambda cache, _: cache.mirror(cache.sequences[1], cache.sequences[0])),
    "free": (lambda cache: None, lambda cache, _: cache.free(cache.sequences[0])),
    "crop": (lambda cache: None, lambda cache, _: cache.crop(cache.sequences[0], 29)),
    "slide": (lambda cache: None, lambda cache, _: cache.slide(cache.sequences[0], 5)),
    "extend": (lambda cache: None, lambda cache, _: cache.extend(cache.sequences, [70, 1, 33])),
    "separate": (lambda cache: None, lambda cache, _: cache.separate(cache.sequences, [30, 9, 30])),
    "take": (lambda cache: None, lambda cache, _: cache.prefix.take([1] * 40)),  # type: ignore[union-attr]
    "keep": (lambda cache: None, lambda cache, _: cache.prefix.keep(cache.sequences[0], [7] * 40)),  # type: ignore[union-attr]
    "evict": (lambda cache: cache.free(cache.sequences[1]), lambda cache, _: cache.prefix.evict(1)),  # type: ignore[union-attr]
    "reserve": (lambda cache: None, lambda cache, _: cache.reserve(50, 9)),
    "clear": (lambda cache: None, lambda cache, _: cache.clear()),
    "static": (lambda cache: None, lambda cache, _: static(cache)),
    "close": (static, lambda cache, batch: batch.close(0, 3)),
    "swap out": (lambda cache: None, lambda cache, _: swap_out(cache, cache.sequences[:2])),
    "swap in": (lambda cache: swap_out(cache, cache.sequences[:2]), lambda cache, swapped: swap_in(cache, swapped)),
}


def run_at_every_line(
    make: Callable[[], PagedCache], name: str, first: int = 1, stride: int = 1, **options: Any
) -> int:
    prepare, operation = OPERATIONS[name]

    def prepared() -> tuple[PagedCache, Any]:
        cache = make()
        return cache, prepare(cache)

    twin, given = prepared()
    before, there = content(twin), kept(twin)
    operation(twin, given)
    after, later = content(twin), kept(twin)
    count = 0
    for (cache, prepared_for), where in interrupted(prepared, lambda both: operation(*both), first, stride, **options):
        count += 1
        assert is_free(cache.lock), where
        cache.reserve(0)  # the next operation takes back what an interrupt kept from being taken back
        found = content(cache)
        assert found in (before, after), where
        nothing_leaks(cache)
        if name != "extend":  # which gives up kept pages first, where it needs them
            assert there & later <= kept(cache) <= there | later, where
        if found == before:
            operation(cache, prepared_for)
            assert content(cache) == after, where
            nothing_leaks(cache)
        write(cache)  # into memory that belongs to these sequences alone
        nothing_leaks(cache)
    return count


def cases() -> list[tuple[str, str]]:
    return [(recipe, name) for recipe in RECIPES for name in OPERATIONS]


@pytest.mark.parametrize(("recipe", "name"), cases())
def test_an_operation_that_is_interrupted_at_some_lines(recipe: str, name: str) -> None:
    assert run_at_every_line(lambda: filled(recipe), name, first=1 + len(name) % STRIDE, stride=STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name"), cases())
def test_an_operation_that_is_interrupted_at_every_line(recipe: str, name: str) -> None:
    assert run_at_every_line(lambda: filled(recipe), name) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name"), cases())
def test_an_operation_that_is_interrupted_between_any_two_instructions(recipe: str, name: str) -> None:
    assert run_at_every_line(lambda: filled(recipe), name, stride=3, instructions=True) > 20


@pytest.mark.parametrize("again", [1, 4, 9, 16])
@pytest.mark.parametrize("name", ["extend", "crop", "swap in", "take", "close"])
def test_taking_back_that_is_interrupted_is_done_by_the_next_operation(name: str, again: int) -> None:
    assert run_at_every_line(lambda: filled(RECIPES[1]), name, first=again, stride=11, again=again)


@pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=pytest.mark.slow)])
def test_pages_of_the_prefix_cache_that_an_interrupted_operation_gave_up(stride: int) -> None:
    count = 0

    def operation(cache: PagedCache) -> None:
        cache.extend(cache.sequences, [20, 1, 20])

    twin = full(RECIPES[0])
    before = content(twin)
    operation(twin)
    assert len(kept(twin)) < len(kept(full(RECIPES[0]))), "or nothing is given up"
    for cache, where in interrupted(lambda: full(RECIPES[0]), operation, stride=stride):
        count += 1
        found = content(cache)
        nothing_leaks(cache)
        assert found in (before, content(twin)), where
    assert count > 10


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_snapshot_whose_loading_is_interrupted_leaves_the_cache_empty_or_full(tmp_path: Any, stride: int) -> None:
    saved = filled(RECIPES[0])
    path = save(tmp_path / "x", [saved])

    def make() -> PagedCache:
        cache = make_cache(RECIPES[0], layers=2, page_tokens=16)
        PrefixCache(cache)
        return cache

    def load(cache: PagedCache) -> None:
        with Snapshot(path) as snapshot:
            snapshot.load([cache])

    for cache, where in interrupted(make, load, stride=stride):
        if not content(cache):
            assert not kept(cache) and not cache.pool.used, where
            load(cache)
        assert content(cache) == content(saved) and kept(cache) == kept(saved), where
        nothing_leaks(cache)
