"""Kept prefixes: found by their tokens, by their tenant alone, given up oldest first. The state machine does the rest."""

from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.cache import PagedCache, PoolFull, PrefixCache, swap_in, swap_out
from kvant.cache.sequence import SLID_OUT
from tests.cache.test_machine import append, look
from tests.families import make


def cache_of(
    name: str = "int4:sink=3,recent=5", pages: int | None = 12, **options: int
) -> tuple[PagedCache, PrefixCache]:
    cache = make(name, pages, page_tokens=16)
    return cache, PrefixCache(cache, **options)


def stored(cache: PagedCache, ids: list[int], keep: bool = True) -> None:
    """A request that comes, is kept, and goes."""
    seq = cache.new()
    append(cache, [seq], [ids])
    if keep:
        cache.prefix.keep(seq, ids)
    cache.free(seq)


@pytest.mark.parametrize("name", [name for name in recipes.names() if not recipes.get(name).calibrated])
def test_what_is_not_prefix_safe_is_refused_with_its_reason(name: str) -> None:
    recipe = recipes.get(name)
    cache = make(name)
    if recipe.not_prefix_safe is None:
        PrefixCache(cache)
    else:
        with pytest.raises(ValueError, match=f"recipe {name} cannot share pages between requests: .*prompt"):
            PrefixCache(cache)


def test_a_shared_partial_page_is_copied_when_it_is_written() -> None:
    cache, prefix = cache_of()
    ids = [1, 2, 3, 4] * 10
    stored(cache, ids)
    assert (cache.pool.used, len(prefix)) == (3, 3)
    one, two = prefix.take([*ids, 5]), prefix.take([*ids[:37], 7])
    assert (one.length, two.length) == (40, 37)
    assert one.pages == two.pages
    before = cache.stores[0].pages[one.pages[2]].clone()
    append(cache, [two], [[7, 7]])
    assert two.pages[:2] == one.pages[:2]
    assert two.pages[2] != one.pages[2]
    append(cache, [one], [[5]])
    assert cache.pool.used == 5
    kept = prefix.nodes[0]
    assert torch.equal(cache.stores[0].pages[kept.page], before), "what is kept was not written to"
    assert prefix.find(ids) == 40


def test_sinks_come_back_in_full_precision_and_the_recent_window_does_not() -> None:
    cache, prefix = cache_of()
    ids = [1, 2, 3] * 10
    seq = cache.new()
    append(cache, [seq], [ids])
    whole = look(cache, [seq])[0][0]
    prefix.keep(seq, ids)
    again = prefix.take(ids)
    assert (again.sinks, again.ring_start) == (3, {"key": 30, "value": 30})
    found = look(cache, [again])[0][0]
    assert torch.equal(found[:25], whole[:25])
    assert not torch.equal(found[25:], whole[25:]), "read from its pages"
    append(cache, [seq, again], [[4] * 5, [4] * 5])
    for one, two in zip(look(cache, [seq]), look(cache, [again]), strict=True):
        assert torch.equal(one, two), "and five tokens later there is no difference"
    assert cache.nbytes == cache.predicted_nbytes


def test_tenants_find_their_own_pages_only() -> None:
    cache, prefix = cache_of()
    ids = list(range(9)) * 4
    seq = cache.new()
    append(cache, [seq], [ids])
    prefix.keep(seq, ids, "a")
    assert [prefix.find(ids, salt) for salt in ("a", "b", "")] == [36, 0, 0]
    prefix.keep(seq, ids, "b")
    assert [prefix.find(ids, salt) for salt in ("a", "b", "")] == [36, 36, 0]
    assert cache.pool.used == 3
    cache.free(seq)
    assert prefix.evictable == 3
    assert prefix.evict(3)
    assert [prefix.find(ids, salt) for salt in ("a", "b", "")] == [0, 0, 0]
    assert cache.pool.used == 0
    other = make("int4:sink=3,recent=6", page_tokens=16)
    assert PrefixCache(other).root("a") != prefix.root("a"), "another digest names other pages"


def test_the_least_recently_used_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    cache, prefix = cache_of()
    for word in (1, 2, 3):
        stored(cache, [word] * 48)
    assert cache.pool.used == 9
    cache.free(prefix.take([1] * 48))  # 2 is now the oldest
    prefix.evict(2)
    assert [prefix.find([word] * 48) for word in (1, 2, 3)] == [48, 16, 48]
    prefix.evict(2)
    assert [prefix.find([word] * 48) for word in (1, 2, 3)] == [48, 0, 32]


def test_pages_in_use_are_not_given_up() -> None:
    cache, prefix = cache_of(pages=6)
    stored(cache, [1] * 48)
    reader = prefix.take([1] * 33)
    assert prefix.evictable == 0
    assert not prefix.evict(1)
    stored(cache, [2] * 40, keep=False)
    with pytest.raises(PoolFull) as full:
        append(cache, [cache.new()], [[3] * 49])
    assert (full.value.asked, full.value.evictable, full.value.frees) == (4, 0, (3, 0))
    cache.free(reader)
    append(cache, [cache.sequences[0]], [[3] * 49])
    assert prefix.find([1] * 48) == 32, "the last page of it made room"


def test_a_kept_page_gives_way_to_the_sequence_that_wrote_it() -> None:
    """Three pages, all the sequence's own; the last is kept, and would have to be copied: there is no room for that."""
    cache, prefix = cache_of(pages=3)
    seq = cache.new()
    append(cache, [seq], [[1] * 40])
    prefix.keep(seq, [1] * 40)
    append(cache, [seq], [[1] * 8])
    assert prefix.find([1] * 40) == 32
    with pytest.raises(PoolFull, match="1 more pages were asked for, 0 of 3 are free"):
        append(cache, [seq], [[1]])
    assert prefix.find([1] * 40) == 32


def test_no_more_pages_are_kept_than_allowed() -> None:
    cache, prefix = cache_of(limit=4)
    for word in (1, 2, 3):
        stored(cache, [word] * 48)
        assert len(prefix) <= 4
    assert cache.pool.used == 4
    assert prefix.find([3] * 48) == 48


def test_a_group_that_was_cut_and_coded_again_is_not_kept() -> None:
    """Its bytes depend on more than its tokens."""
    cache, prefix = cache_of("kivi-k2v2:k.group=16,k.flush=16,v.recent=5")
    seq = cache.new()
    append(cache, [seq], [[1, 2] * 32])
    cache.crop(seq, 40)  # the ring holds 48 ... 63: 32 ... 39 come back from their page
    append(cache, [seq], [[3] * 40])
    assert prefix.keep(seq, [1, 2] * 20 + [3] * 40) == 32
    cache.crop(seq, 30)
    append(cache, [seq], [[4] * 50])
    assert prefix.keep(seq, [1, 2] * 15 + [4] * 50) == 16, "17 ... 29 were cut again"
    cache.crop(seq, 16)
    append(cache, [seq], [[5] * 20])
    assert prefix.keep(seq, [1, 2] * 8 + [5] * 20) == 32, "now nothing of it was ever cut"
    straight = cache.new()
    append(cache, [straight], [[1, 2] * 20 + [3] * 40])
    assert prefix.keep(straight, [1, 2] * 20 + [3] * 40) == 80


def test_a_group_whose_saliency_has_seen_other_queries_is_not_kept() -> None:
    """The window still holds the tokens that come back, but their weights include those of a query that is gone."""
    cache, prefix = cache_of("zipcache:group=16,flush=16")
    seq = cache.new()
    append(cache, [seq], [[1, 2] * 16])
    cache.crop(seq, 31)
    append(cache, [seq], [[8, 8]])
    assert prefix.keep(seq, [*[1, 2] * 15, 1, 8, 8]) == 16


def test_under_a_sliding_window_only_what_it_sees_is_needed() -> None:
    cache, prefix = cache_of("int4", sliding_window=20)
    ids = list(range(9)) * 10
    seq = cache.new()
    append(cache, [seq], [ids])
    cache.slide(seq, 20)
    assert seq.pages[:4] == [SLID_OUT] * 4
    prefix.keep(seq, ids)
    assert prefix.find(ids) == 90
    assert prefix.find(ids[:80]) == 0, "of the 20 tokens before it, some have slid out"
    again = prefix.take([*ids, 1])
    assert again.pages[:4] == [SLID_OUT] * 4
    for each in (seq, again):
        append(cache, [each], [[1] * 30])
        cache.slide(each, 20)
    query = torch.randn(2, 4, 64)
    found = cache.decode(0, query[:1].expand(2, 4, 64), cache.batch([seq, again]), scale=0.1, sliding_window=20)
    assert torch.equal(found[0], found[1])
    cache.free(seq)
    cache.free(again)
    prefix.clear()
    assert cache.pool.used == 0


def test_the_wrong_number_of_tokens_is_refused() -> None:
    cache, prefix = cache_of()
    seq = cache.new()
    append(cache, [seq], [[1] * 20])
    with pytest.raises(ValueError, match="holds 20 tokens, got 19 token ids"):
        prefix.keep(seq, [1] * 19)
    prefix.keep(seq, [1] * 20)
    with pytest.raises(ValueError, match="30 tokens were asked for, 20 are kept"):
        prefix.take([1] * 30, length=30)


def test_sequences_that_are_swapped_out_together_share_again() -> None:
    cache, _ = cache_of(pages=12)
    first = cache.new()
    append(cache, [first], [[1] * 60])
    sequences = [first, *(cache.fork(first) for _ in range(3))]
    append(cache, sequences, [[2], [3], [4], [5]])
    before = look(cache, sequences)
    used = cache.pool.used
    swapped = swap_out(cache, sequences)
    assert cache.pool.used == 0
    assert swapped.nbytes == used * cache.layout.page_bytes + 4 * cache.layout.overlay_bytes
    append(cache, [cache.new()], [[7] * 150])
    with pytest.raises(
        PoolFull, match="7 more pages were asked for, 2 of 12 are free .* freeing a sequence gives back 10"
    ):
        swap_in(cache, swapped)
    assert cache.pool.used == 10
    cache.free(cache.sequences[0])
    again = swap_in(cache, swapped)
    assert cache.pool.used == used
    for one, two in zip(before, look(cache, again), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match="come from a cache with the digest"):
        swap_in(make("int4", page_tokens=16), swapped)
    with pytest.raises(ValueError, match="not in this cache"):
        swap_out(cache, [first])
