"""Whatever runs out in the middle of an operation (pages, rows of the overlays, memory), the cache is as it was before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvant.cache import PagedCache, PagePool, PoolFull, PrefixCache, StaticBatch, growth, paged, swap_in, swap_out
from tests.grouped import Tokens, fill, make_cache

RECIPES = [
    "int4:sink=2,recent=9",
    "kitty:k.group=16,k.flush=16,v.recent=5,sink=9",
    "squat:k.group=16,k.flush=16,v.recent=5",
]
# what may run out during an operation, by the function that takes it
WANTED: dict[str, tuple[Any, str]] = {
    "memory to grow": (growth, "resized"),
    "rows": (PagedCache, "_take_row"),
    "pages": (PagePool, "take"),
    "memory for overlays": (PagedCache, "copy_row"),
    "memory for a batch": (paged, "batch_of"),
}


def held(cache: PagedCache) -> Any:
    """Everything that an operation which fails must leave alone."""
    sizes = [[len(store.pages), *map(len, store.owned)] for store in cache.stores]
    sequences = [
        (e.overlay_row, e.length, list(e.pages), e.sinks, dict(e.ring_start), e.visible, e.requantized_from)
        for e in cache.sequences
    ]
    references = [cache.pool.references(page) for page in range(cache.pool.total)]
    kept = None if cache.prefix is None else [(n.key, n.page) for n in cache.prefix.nodes]
    return sizes, sequences, references, len(cache._free_rows), cache.nbytes, kept


def nothing_leaks(cache: PagedCache) -> None:
    """Every reference and every row has its sequence or kept prefix; all layers have the same size."""
    references = Counter(page for seq in cache.sequences for page in seq.held)
    references.update(node.page for node in (cache.prefix.nodes if cache.prefix is not None else ()))
    assert [cache.pool.references(page) for page in range(cache.pool.total)] == [
        references[page] for page in range(cache.pool.total)
    ]
    assert cache.pool.used == len(references)
    rows = [seq.overlay_row for seq in cache.sequences] + cache._free_rows
    assert sorted(rows) == list(range(cache._rows))
    assert cache.nbytes == cache.predicted_nbytes
    assert {len(store.pages) for store in cache.stores} == {cache.pool.total}


def failing(patch: pytest.MonkeyPatch, what: str, number: int, later: bool = False) -> Callable[[], bool]:
    """One call (with `later`, all from it on) raises as torch does where memory runs out. Says whether it has."""
    owner, name = WANTED[what]
    run, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number or (later and calls > number):
            raise torch.OutOfMemoryError("out of memory")
        return run(*args, **kwargs)

    patch.setattr(owner, name, counted)
    return lambda: calls >= number


def filled(name: str, pages: int | None = None) -> PagedCache:
    """Two sequences that share pages, a third, and a kept prefix."""
    cache = make_cache(name, layers=2, pages=pages, page_tokens=16)
    if cache.layout.recipe.not_prefix_safe is None:
        PrefixCache(cache)
    for seed, length in ((1, 40), (2, 21)):
        seq = cache.new()
        fill(cache, seq, Tokens.random(length, 2, 1, 64, seed), [length])
        if cache.prefix is not None:
            cache.prefix.keep(seq, [seed] * length)
    cache.fork(cache.sequences[0])
    return cache


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "new": lambda cache: cache.new(),
    "fork": lambda cache: cache.fork(cache.sequences[1]),
    "extend": lambda cache: cache.extend(cache.sequences, [70, 1, 33]),
    "take": lambda cache: cache.prefix.take([1] * 40),
    "static": lambda cache: StaticBatch(cache, cache.sequences, 40),
    "reserve": lambda cache: cache.reserve(50, 9),
}


def every_failure(what: str, later: bool = False) -> Iterator[Callable[[Callable[[], Any]], bool]]:
    """Runs of an operation that fail at the first, second, ... call of what it waits for, until one does not fail."""
    for number in range(1, 100):
        over = False

        def run(operation: Callable[[], Any], number: int = number) -> bool:
            nonlocal over
            with pytest.MonkeyPatch.context() as patch:
                reached = failing(patch, what, number, later)
                try:
                    operation()
                except torch.OutOfMemoryError:
                    return True
                assert not reached(), "what failed was passed over in silence"
            over = True
            return False

        yield run
        if over:
            return
    raise AssertionError("an operation that never ends")


@pytest.mark.parametrize("what", WANTED)
@pytest.mark.parametrize(
    ("recipe", "name"),
    [(r, name) for r in RECIPES for name in OPERATIONS if "squat" not in r or name not in ("take", "static")],
)
def test_an_operation_that_fails_anywhere_leaves_everything_as_it_was(recipe: str, name: str, what: str) -> None:
    for attempt in every_failure(what):
        cache = filled(recipe)
        before, seen = held(cache), [store.pages.clone() for store in cache.stores]
        if not attempt(lambda cache=cache: OPERATIONS[name](cache)):
            break
        after = held(cache)
        nothing_leaks(cache)
        if name in ("extend", "static"):  # a shared page that would be written to has its copy already
            assert [(e.length, len(e.pages), e.sinks, e.ring_start) for e in cache.sequences] == [
                (length, len(pages), sinks, exact) for _, length, pages, sinks, exact, _, _ in before[1]
            ]
        else:
            assert (after[1], after[-1]) == (before[1], before[-1])
        if what == "memory to grow" and name != "static":
            assert after == before
        for store, pages in zip(cache.stores, seen, strict=True):
            for seq, (_, _, numbers, *_) in zip(cache.sequences, before[1], strict=True):
                assert torch.equal(store.pages[seq.pages], pages[numbers])
        OPERATIONS[name](cache)  # and what it failed for is there the next time
        nothing_leaks(cache)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pool_that_can_neither_grow_nor_shrink_again_goes_on(recipe: str) -> None:
    """Layers may then have rows that nobody uses; none has too few, and the next growth makes them equal."""
    for attempt in every_failure("memory to grow", later=True):
        cache = filled(recipe)
        before = held(cache)
        if not attempt(lambda cache=cache: cache.reserve(50, 9)):
            break
        assert held(cache)[1:4] == before[1:4]
        cache.extend(cache.sequences, [5, 5, 5])
        cache.reserve(50, 9)
        nothing_leaks(cache)


@pytest.mark.parametrize("what", WANTED)
@pytest.mark.parametrize("recipe", RECIPES)
def test_swapping_in_is_done_whole_or_not_at_all(recipe: str, what: str) -> None:
    cache = filled(recipe)
    swapped = swap_out(cache, cache.sequences[:])
    if cache.prefix is not None:
        cache.prefix.clear()
    for attempt in every_failure(what):
        empty = make_cache(recipe, layers=2, page_tokens=16)
        if not attempt(lambda empty=empty: swap_in(empty, swapped)):
            break
        assert not empty.sequences and not empty.pool.used and len(empty._free_rows) == empty._rows
        sequences = swap_in(empty, swapped)
        assert [seq.length for seq in sequences] == [40, 21, 40]
        nothing_leaks(empty)


def test_a_full_cache_gives_nothing_to_sequences_that_do_not_all_fit() -> None:
    swapped = swap_out(cache := filled("int4"), cache.sequences[:])
    small = PagedCache(cache.layout, 2, 20, max_sequences=2)
    with pytest.raises(PoolFull, match="all 2 overlay rows are in use"):
        swap_in(small, swapped)
    assert (small.pool.used, len(small._free_rows), small.sequences) == (0, 2, [])


def test_one_sequence_becomes_the_twin_of_another() -> None:
    """`mirror` in a cache without a free row: the windows and pages of a fork."""
    for name in RECIPES:
        cache = filled(name)
        expected = cache.fork(cache.sequences[0])
        target = cache.sequences[1]
        cache.mirror(target, cache.sequences[0])
        cache.mirror(target, target)
        assert (target.length, target.pages, target.ring_start) == (
            expected.length,
            expected.pages,
            expected.ring_start,
        )
        for store in cache.stores:
            for owned in store.owned:
                one, two = (
                    owned[row].contiguous().view(torch.uint8) for row in (target.overlay_row, expected.overlay_row)
                )
                assert torch.equal(one, two)
        nothing_leaks(cache)


@pytest.mark.parametrize("name", RECIPES)
def test_batches_of_nothing_are_refused_and_counts_of_nothing_are_not(name: str) -> None:
    cache = filled(name)
    first, second, _ = cache.sequences
    for call in (lambda: cache.extend([], []), lambda: cache.batch([])):
        with pytest.raises(ValueError, match="sequences must name at least one sequence, got none"):
            call()
    if "squat" not in name:
        with pytest.raises(ValueError, match="sequences must name at least one sequence, got none"):
            StaticBatch(cache, [], 3)
    with pytest.raises(ValueError, match=r"counts must be a number of new tokens for each of 1 sequences, got \[-1\]"):
        cache.extend([first], [-1])
    with pytest.raises(ValueError, match="got one of them twice"):
        cache.extend([first, first], [1, 1])
    before = held(cache)
    batch = cache.extend([first, second], [0, 0])
    nothing = torch.zeros(0, 2, 64)
    for layer in range(2):
        cache.append(layer, nothing, nothing, batch, nothing)
        assert cache.prefill(layer, nothing, nothing, nothing, batch, scale=0.1).shape == (0, 2, 64)
        assert cache.replay(layer, nothing, nothing, nothing, batch, scale=0.1).shape == (0, 2, 64)
    assert held(cache) == before


def test_room_is_given_back_where_memory_runs_out_after_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled("int4:sink=2,recent=9")
    before = [(seq.length, len(seq.pages), seq.sinks) for seq in cache.sequences]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "minimum", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            StaticBatch(cache, cache.sequences[1:2], 40)
    nothing_leaks(cache)
    assert [(seq.length, len(seq.pages), seq.sinks) for seq in cache.sequences] == before
    swapped = swap_out(cache, cache.sequences[:])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            swap_in(cache, swapped)
    nothing_leaks(cache)
    assert not cache.sequences
    assert [seq.length for seq in swap_in(cache, swapped)] == [40, 21, 40]
