"""A static batch is told, step by step on the device, what `extend` tells on the host."""

from __future__ import annotations

import pytest
import torch

from kvant.cache import NotFinite, PagedCache, PoolFull, StaticBatch
from tests.conftest import make_layout


def prompts(recipe: str, lengths: list[int], pages: int | None = None) -> PagedCache:
    """Sequences of these lengths."""
    cache = PagedCache(make_layout(recipe, page_tokens=16), 2, pages, implementation="reference")
    sequences = [cache.new() for _ in lengths]
    batch = cache.extend(sequences, lengths)
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        key, value, query = torch.randn(3, sum(lengths), 2, 64, generator=generator)
        cache.append(layer, key, value, batch, query)
    return cache


@pytest.mark.parametrize(
    "recipe",
    [
        "int4",
        "int2:sink=5,recent=9",
        "kivi-k2v2:k.group=16,k.flush=16,v.recent=16",
        "kivi-k4v4:k.group=16,k.flush=32,k.recent=7,v.recent=9,sink=5",
        "kitty:k.group=16,k.flush=16,sink=3",
        "squat:k.group=16,k.flush=16,v.recent=16,weight=0.1",
    ],
)
def test_steps_say_what_extending_one_by_one_says(recipe: str) -> None:
    static, plain = (prompts(recipe, [40, 3, 16]) for _ in range(2))
    batch = StaticBatch(static, static.sequences, 30)
    addresses = [x.data_ptr() for x in (*batch.batch[:6], *batch.batch.ring_start.values())]
    for step in range(20):
        batch.advance()
        expected = plain.extend(plain.sequences, [1, 1, 1])
        for name in ("seq_lens", "query_start_loc", "overlay_rows", "sinks", "ring_start"):
            assert str(getattr(batch.batch, name)) == str(getattr(expected, name)), name
        width = expected.block_table.shape[1]
        for cache, here in ((static, batch.batch), (plain, expected)):  # pages are others, places in them the same
            at = (here.seq_lens - 1 - cache.layout.recipe.origin).clamp_min(
                0
            )  # a sink that no page holds has the first place
            place = here.block_table[:, :width].gather(1, at[:, None] // 16)[:, 0] * 16 + at % 16
            assert torch.equal(here.slot_mapping, place), cache
        for layer in range(2):
            key, value, query = torch.randn(3, 3, 2, 64, generator=torch.Generator().manual_seed(step))
            batch.append(layer, key, value, query)
            plain.append(layer, key, value, expected, query)
            found = batch.decode(layer, query, scale=0.1)
            torch.testing.assert_close(found, plain.decode(layer, query, expected, scale=0.1))
    assert addresses == [x.data_ptr() for x in (*batch.batch[:6], *batch.batch.ring_start.values())]
    batch.close(20)
    for mine, theirs in zip(static.sequences, plain.sequences, strict=True):
        assert (mine.length, mine.sinks, mine.ring_start) == (theirs.length, theirs.sinks, theirs.ring_start)
        for one, other in zip(static.stores, plain.stores, strict=True):
            assert torch.equal(one.pages[mine.pages], other.pages[theirs.pages])
    assert static.pool.used == plain.pool.used


def test_queries_that_are_not_finite_teach_a_corrector_nothing() -> None:
    """Their step is taken back, and the subspace is as it was, to rounding."""
    cache = prompts("squat:k.group=16,k.flush=16", [7, 3])
    before = [store.states["key"].clone() for store in cache.stores]
    batch = StaticBatch(cache, cache.sequences, 5)
    batch.advance()
    key, value, query = torch.full((3, 2, 2, 64), float("nan"))
    for layer in range(2):
        batch.append(layer, key, value, query)
    with pytest.raises(NotFinite):
        batch.check()
    batch.close(0, 1)
    for store, was in zip(cache.stores, before, strict=True):
        torch.testing.assert_close(store.states["key"], was, rtol=1e-5, atol=1e-4)


def test_room_is_taken_at_once_or_not_at_all() -> None:
    cache = prompts("int4", [40, 3], pages=6)
    with pytest.raises(PoolFull):
        StaticBatch(cache, cache.sequences, 30)
    assert cache.pool.used == 4 and [seq.length for seq in cache.sequences] == [40, 3]
    twin = cache.fork(cache.sequences[1])
    batch = StaticBatch(cache, [twin], 20)  # its page is shared: it gets one of its own
    assert cache.pool.used == 6 and twin.pages[0] != cache.sequences[1].pages[0]
    batch.close(0)
    assert twin.length == 3 and cache.pool.used == 5


def test_numbers_that_cannot_be_stored_are_named_and_taken_back() -> None:
    cache = prompts("int4:sink=2,recent=8", [40, 3])
    batch = StaticBatch(cache, cache.sequences, 5)
    key, value = torch.randn(2, 2, 2, 64)
    for bad in (False, True):
        batch.advance()
        batch.append(0, key, value)
        batch.append(1, key, value * torch.tensor([1.0, float("inf") if bad else 1.0])[:, None, None])
        if not bad:
            batch.check()
    with pytest.raises(NotFinite, match="layer 1: the key or value of token 4 of sequence 1 holds inf"):
        batch.check()
    batch.close(1, 2)
    assert [seq.length for seq in cache.sequences] == [41, 4]
    assert [seq.ring_start["key"] for seq in cache.sequences] == [34, 0], (
        "the ring let token 33 go for the one taken back"
    )


@pytest.mark.parametrize(
    "recipe", ["kivi-k2v2:k.group=16,k.flush=16,v.recent=16", "kitty:k.group=16,k.flush=16,sink=3"]
)
@pytest.mark.parametrize("good", [0, 7, 8, 9, 23, 24])
def test_a_step_that_is_taken_back_leaves_groups_as_they_were(recipe: str, good: int) -> None:
    """Also where it completed a group: what follows is what follows without it."""
    static, plain = (prompts(recipe, [40, 3, 16]) for _ in range(2))
    batch = StaticBatch(static, static.sequences, 40)
    for step in range(good + 1):
        batch.advance()
        expected = plain.extend(plain.sequences, [1] * 3) if step < good else None
        for layer in range(2):
            key, value = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(step * 2 + layer))
            batch.append(layer, key if step < good else torch.full_like(key, float("inf")), value)
            if expected is not None:
                plain.append(layer, key, value, expected)
    with pytest.raises(NotFinite):
        batch.check()
    batch.close(good, good + 1)
    for step in range(20):
        batches = [cache.extend(cache.sequences, [1] * 3) for cache in (static, plain)]
        for layer in range(2):
            key, value, query = torch.randn(3, 3, 2, 64, generator=torch.Generator().manual_seed(1000 + step))
            found = []
            for cache, each in zip((static, plain), batches, strict=True):
                cache.append(layer, key, value, each)
                found.append(cache.decode(layer, query, each, scale=0.1))
            torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("recipe", "steps", "message"),
    [("zipcache", 4, "recipe zipcache learns from queries on the host"), ("int4", 0, "steps must be positive, got 0")],
)
def test_what_it_cannot_do_is_refused(recipe: str, steps: int, message: str) -> None:
    cache = PagedCache(make_layout(recipe), 1)
    with pytest.raises(ValueError, match=message):
        StaticBatch(cache, [cache.new()], steps)
