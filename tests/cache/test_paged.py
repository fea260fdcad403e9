from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant import recipes
from kvant.cache import PagedCache, PoolFull, Sequence
from tests.conftest import make_layout, poison

FREE = [
    name
    for name in recipes.names()
    if not recipes.get(name).calibrated and not any(s.groupwise for s in recipes.get(name).streams.values())
]


def fill(cache: PagedCache, seq: Sequence, k: torch.Tensor, v: torch.Tensor, chunks: list[int]) -> None:
    at = 0
    for count in chunks:
        batch = cache.extend([seq], [count])
        for layer in range(len(cache.stores)):
            cache.append(layer, k[at : at + count], v[at : at + count], batch)
        at += count


def contents(cache: PagedCache, seq: Sequence) -> list[torch.Tensor]:
    """A sequence's bytes: its pages up to its length, and what its windows hold for it."""
    layout, out = cache.layout, []
    for store in cache.stores:
        for side in ("key", "value"):
            parts = layout.unpack(side, store.pages[torch.tensor(seq.pages)])
            out += [part[: seq.length] for part in parts.values()]
            window = layout.recipe.streams[side].window
            held = [p for p in range(seq.length) if p < window.sink or p >= seq.length - window.ring]
            rows = [p if p < window.sink else window.sink + (p - window.sink) % window.ring for p in held]
            out.append(store.overlays[side][seq.overlay_row][rows])
    return out


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[int, list[int]]:
    n = draw(st.integers(1, 200))
    chunks, left = [], n
    while left:
        chunks.append(draw(st.integers(1, left)))
        left -= chunks[-1]
    return n, chunks


@settings(max_examples=60)
@given(
    st.sampled_from([*FREE, "int2:sink=3,recent=17", "saw-int4:sink=64,recent=1", "int3:k.recent=9,v.recent=40"]),
    chunkings(),
    st.sampled_from([16, 64, 128]),
    st.sampled_from([64, 80]),
    st.integers(0, 2**31),
)
def test_every_way_to_append_leaves_the_same_bytes(
    name: str, chunking: tuple[int, list[int]], page_tokens: int, head_dim: int, seed: int
) -> None:
    n, chunks = chunking
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(n, 2, head_dim, generator=random) for _ in range(2))
    layout = make_layout(name, 2, head_dim, page_tokens=page_tokens, dtype="float32")
    seen = []
    for ways in ([n], chunks, [1] * n):
        cache = PagedCache(layout, layers=1, pages=layout.pages_for(n))
        poison(cache.stores[0])
        seq = cache.new()
        fill(cache, seq, k, v, ways)
        seen.append(contents(cache, seq))
    for other in seen[1:]:
        for first, second in zip(seen[0], other, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("name", FREE)
def test_allocated_bytes_are_what_the_layout_predicts(name: str) -> None:
    layout = make_layout(name, 3, 64, dtype="float32")
    cache = PagedCache(layout, layers=2)
    for n in (1, 64, 200, 77):
        seq = cache.new()
        fill(cache, seq, torch.randn(n, 3, 64), torch.randn(n, 3, 64), [n])
    allocated = sum(s.pages.untyped_storage().nbytes() for s in cache.stores)
    allocated += sum(o.untyped_storage().nbytes() for s in cache.stores for o in s.overlays.values())
    assert cache.nbytes == allocated == cache.predicted_nbytes
    used = sum(2 * layout.sequence_bytes(n) for n in (1, 64, 200, 77))
    assert cache.nbytes_used == used


def test_fork_shares_pages_and_copies_on_write() -> None:
    cache = PagedCache(make_layout("int2:sink=2,recent=10"), layers=2)
    k, v = torch.randn(150, 2, 64), torch.randn(150, 2, 64)
    seq = cache.new()
    fill(cache, seq, k[:100], v[:100], [100])
    twin = cache.fork(seq)
    assert cache.pool.used == 2
    before = [c.clone() for c in contents(cache, seq)]
    fill(cache, twin, k[100:], v[100:], [50])
    assert twin.pages[0] == seq.pages[0]
    assert twin.pages[1] != seq.pages[1]
    assert cache.pool.used == 4
    for first, second in zip(before, contents(cache, seq), strict=True):
        assert torch.equal(first, second)
    alone = PagedCache(cache.layout, layers=2)
    fresh = alone.new()
    fill(alone, fresh, k, v, [150])
    for first, second in zip(contents(alone, fresh), contents(cache, twin), strict=True):
        assert torch.equal(first, second)
    cache.free(seq)
    cache.free(twin)
    assert cache.pool.used == 0


@pytest.mark.parametrize("keep", [0, 1, 63, 64, 65, 100, 130])
def test_crop_then_append_is_as_if_nothing_had_been(keep: int) -> None:
    """Once the recent window has moved past the crop, the sequence is that of a fresh cache, byte for byte."""
    cache = PagedCache(make_layout("saw-int4:sink=2,recent=20", dtype="float32"), layers=1)
    k, v = torch.randn(260, 2, 64), torch.randn(260, 2, 64)
    seq = cache.new()
    fill(cache, seq, k[:130], v[:130], [130])
    cache.crop(seq, keep)
    assert (seq.length, len(seq.pages)) == (keep, -(-keep // 64))
    fill(cache, seq, k[keep : keep + 60], v[keep : keep + 60], [60])
    alone = PagedCache(cache.layout, layers=1)
    fresh = alone.new()
    fill(alone, fresh, k[: keep + 60], v[: keep + 60], [keep + 60])
    for first, second in zip(contents(alone, fresh), contents(cache, seq), strict=True):
        assert torch.equal(first, second)


def test_a_token_whose_full_form_is_gone_is_read_from_its_page() -> None:
    cache = PagedCache(make_layout("int4:recent=20", dtype="float32"), layers=1)
    plain = PagedCache(make_layout("int4:recent=5", dtype="float32"), layers=1)
    k, v, q = torch.randn(100, 2, 64), torch.randn(100, 2, 64), torch.randn(1, 2, 64)
    seq, other = cache.new(), plain.new()
    fill(cache, seq, k, v, [100])
    cache.crop(seq, 85)  # the ring holds 80 ... 99, so 65 ... 79 are in their pages alone
    fill(plain, other, k[:85], v[:85], [85])
    found = cache.decode(0, q, cache.batch([seq]), scale=0.1)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, plain.decode(0, q, plain.batch([other]), scale=0.1))


def test_crop_refuses_lengths_that_are_not_there() -> None:
    cache = PagedCache(make_layout("int4"), layers=1)
    seq = cache.new()
    fill(cache, seq, torch.randn(5, 2, 64), torch.randn(5, 2, 64), [5])
    for length in (-1, 6):
        with pytest.raises(ValueError, match="length must be between 0 and 5"):
            cache.crop(seq, length)


def test_a_full_pool_harms_nothing_and_can_be_retried() -> None:
    cache = PagedCache(make_layout("int4"), layers=1, pages=3)
    first, second = cache.new(), cache.new()
    fill(cache, first, torch.randn(128, 2, 64), torch.randn(128, 2, 64), [128])
    before = [c.clone() for c in contents(cache, first)]
    with pytest.raises(PoolFull, match="2 more pages were asked for, 1 of 3 are free"):
        cache.extend([first, second], [1, 1])
    assert (first.length, second.length, len(first.pages), second.pages, cache.pool.free) == (128, 0, 2, [], 1)
    for one, two in zip(before, contents(cache, first), strict=True):
        assert torch.equal(one, two)
    cache.free(first)
    fill(cache, second, torch.randn(192, 2, 64), torch.randn(192, 2, 64), [192])
    assert second.length == 192


def test_sliding_gives_pages_back_and_keeps_what_the_window_sees() -> None:
    cache = PagedCache(make_layout("int8", dtype="float32"), layers=1)
    k, v, q = torch.randn(200, 2, 64), torch.randn(200, 2, 64), torch.randn(1, 2, 64)
    seq = cache.new()
    fill(cache, seq, k, v, [200])
    before = cache.decode(0, q, cache.batch([seq]), scale=0.1, sliding_window=50)
    cache.slide(seq, 50)
    assert (seq.pages[:2], cache.pool.used) == ([-1, -1], 2)
    assert torch.equal(before, cache.decode(0, q, cache.batch([seq]), scale=0.1, sliding_window=50))
    twin = cache.fork(seq)
    cache.free(seq)
    assert cache.pool.used == 2
    with pytest.raises(ValueError, match="already dropped"):
        cache.crop(twin, 64)
    cache.free(twin)
    assert cache.pool.used == 0


def test_the_old_name_of_max_sequences_still_works() -> None:
    layout = make_layout("int4")
    with pytest.warns(DeprecationWarning, match="max_sequences"):
        cache = PagedCache(layout, 1, pages=4, owners=2)
    assert cache.max_sequences == 2
    cache.new(), cache.new()
    with pytest.raises(PoolFull, match="all 2 overlay rows are in use"):
        cache.new()
