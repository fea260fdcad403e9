from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.cache import PagePool, PoolFull


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "grow"]), st.integers(0, 5)), max_size=60))
def test_references_and_free_pages_always_add_up(steps: list[tuple[str, int]]) -> None:
    pool = PagePool(4)
    held: list[int] = []
    for step, count in steps:
        if step == "take":
            if count > pool.free:
                with pytest.raises(PoolFull):
                    pool.take(count)
            else:
                pages = pool.take(count)
                assert not set(pages) & set(held)
                held += pages
        elif step == "share" and held:
            pool.share(held[:count])
            held += held[:count]
        elif step == "release":
            gone, held = held[:count], held[count:]
            pool.release(gone)
        elif step == "grow":
            pool.grow(pool.total + count)
        for page in range(pool.total):
            assert pool.references(page) == held.count(page)
        assert pool.used == len(set(held))
        assert pool.free + pool.used == pool.total
    pool.release(held)
    assert pool.free == pool.total


def test_a_full_pool_says_what_is_used_and_what_was_asked() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(PoolFull, match=r"2 more pages were asked for, 1 of 3 are free \(2 in use\)") as error:
        pool.take(2)
    assert (error.value.asked, error.value.used, error.value.total) == (2, 2, 3)
    assert pool.free == 1


def test_a_page_is_not_released_twice() -> None:
    pool = PagePool(1)
    page = pool.take(1)
    pool.release(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(page)
