"""Sequences of recipes that code groups of tokens: forked, cropped, slid and freed with their tails."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.cache import PagedCache, PoolFull, Sequence
from kvant.cache.sequence import SLID_OUT
from kvant.ops.reference import read
from tests.conftest import dense_attention, relative_error
from tests.grouped import GROUPWISE, SMALL, Tokens, attended, fill, make_cache


def seen(cache: PagedCache, seq: Sequence) -> list[torch.Tensor]:
    """Keys and values as attention sees them now."""
    batch = cache.batch([seq])
    out = []
    for store in cache.stores:
        for side in store.overlays:
            out.append(read(store, side, batch, batch.seq_lens)[0, : seq.length])
    assert all(bool(x.isfinite().all()) for x in out)
    return out


def references_are_right(cache: PagedCache) -> None:
    held = Counter(page for seq in cache.sequences for page in seq.pages if page != SLID_OUT)
    assert all(cache.pool.references(page) == held[page] for page in range(cache.pool.total))
    assert cache.pool.used == len(held)


@dataclasses.dataclass
class Life:
    """A sequence and all that ever happened to it."""

    seq: Sequence
    events: list[Tokens | int]  # tokens appended, or the length cropped to

    def relived(self, name: str) -> tuple[PagedCache, Sequence]:
        """The same sequence in a cache of its own, which never forks."""
        cache = make_cache(name)
        seq = cache.new()
        for event in self.events:
            if isinstance(event, int):
                cache.crop(seq, event)
            else:
                fill(cache, seq, event, [len(event.k)])
        return cache, seq


@settings(max_examples=30)
@given(st.sampled_from(SMALL), st.integers(0, 2**31))
def test_whatever_happens_to_the_others_a_sequence_is_as_if_it_were_alone(name: str, seed: int) -> None:
    """Random lives of several sequences that fork from each other: none ever writes to what another reads."""
    chance = random.Random(seed)
    cache = make_cache(name)
    lives = [Life(cache.new(), [])]
    for step in range(12):
        life = chance.choice(lives)
        what = chance.choice(["append", "append", "append", "token", "fork", "crop", "free"])
        if what in ("append", "token"):
            tokens = Tokens.random(1 if what == "token" else chance.randint(1, 60), 2, 2, 64, seed + step)
            life.events.append(tokens)
            fill(cache, life.seq, tokens, [len(tokens.k)])
        elif what == "fork":
            lives.append(Life(cache.fork(life.seq), list(life.events)))
        elif what == "crop":
            length = chance.randint(0, life.seq.length)
            life.events.append(length)
            cache.crop(life.seq, length)
        elif len(lives) > 1:
            cache.free(life.seq)
            lives.remove(life)
        references_are_right(cache)
    for life in lives:
        alone, seq = life.relived(name)
        for found, expected in zip(seen(cache, life.seq), seen(alone, seq), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for life in lives:
        cache.free(life.seq)
    assert cache.pool.used == 0


def test_a_fork_copies_older_pages_that_its_group_is_coded_into() -> None:
    """KIVI codes 128 keys at once: at 127 tokens two pages hold values alone; the 128th token writes keys to both."""
    cache = make_cache("kivi-k2v2")
    tokens = Tokens.random(129, 2, 1, 64)
    first = cache.new()
    fill(cache, first, tokens[:127], [127])
    twin = cache.fork(first)
    assert first.pages == twin.pages
    before = cache.stores[0].pages[torch.tensor(first.pages)].clone()
    fill(cache, twin, tokens[127:], [2])
    assert not set(first.pages) & set(twin.pages), "both pages were copied before they were written"
    assert torch.equal(before, cache.stores[0].pages[torch.tensor(first.pages)])
    references_are_right(cache)
    third = cache.fork(first)
    fill(cache, third, tokens[127:128], [1])
    fill(cache, first, tokens[127:128], [1])
    assert cache.pool.used == 7, "whoever is alone with a page keeps it"


def test_two_forks_that_write_at_once_copy_once() -> None:
    cache = make_cache("kitty:k.group=16,k.flush=16,v.recent=5,sink=9", pages=4)
    tokens = Tokens.random(60, 2, 1, 64)
    first = cache.new()
    fill(cache, first, tokens, [60])
    second = cache.fork(first)
    cache.extend([first, second], [1, 1])  # one copy: the last one to write is alone with the page
    assert cache.pool.used == 2
    references_are_right(cache)


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 20, 30, 33, 39])
def test_a_crop_into_a_packed_group_brings_its_tokens_back(keep: int) -> None:
    """40 tokens in groups of 16: 32 are packed and the window holds 24 ... 39 as they were."""
    name = "kivi-k2v2:k.group=16,k.flush=16,v.recent=5"
    cache = make_cache(name)
    tokens = Tokens.random(80, 2, 1, 64)
    seq = cache.new()
    fill(cache, seq, tokens[:40], [40])
    packed = seen(cache, seq)[0][:32]
    cache.crop(seq, keep)
    if keep:
        found = seen(cache, seq)[0]
        whole = keep // 16 * 16
        assert torch.equal(found[:whole], packed[:whole])
        lost = slice(whole, max(whole, min(24, keep)))
        assert torch.equal(found[lost], packed[lost].bfloat16().float()), "what the window let go is read from its page"
        held = slice(lost.stop, keep)
        assert torch.equal(found[held], tokens.k[held].bfloat16().float()), "what it holds is as it was"
    # and the group is coded again from just these tokens
    mixture = torch.cat((seen(cache, seq)[0], tokens.k[keep:80])) if keep else tokens.k[:80]
    fill(cache, seq, tokens[keep:80], [80 - keep])
    expected = attended(cache.layout, "key", Tokens(mixture, tokens.v, tokens.q), 80, 80)
    start = keep // 16 * 16
    torch.testing.assert_close(seen(cache, seq)[0][start:], expected[start:], rtol=0, atol=0)
    assert torch.equal(seen(cache, seq)[0][:start], packed[:start])


@pytest.mark.parametrize("name", SMALL)
def test_a_crop_to_nothing_is_a_new_sequence(name: str) -> None:
    cache, fresh = make_cache(name, pages=4), make_cache(name, pages=4)
    tokens = Tokens.random(180, 2, 2, 64)
    seq = cache.new()
    fill(cache, seq, tokens[:90], [50, 40])
    cache.crop(seq, 0)
    assert cache.pool.used == 0
    for store in cache.stores:
        store.pages.fill_(0xFF)
        for owned in store.owned:
            owned.fill_(float("nan"))
    fill(cache, seq, tokens[90:], [60, 30])
    other = fresh.new()
    fill(fresh, other, tokens[90:], [60, 30])
    for found, expected in zip(seen(cache, seq), seen(fresh, other), strict=True):
        assert torch.equal(found, expected)
    for name, state in cache.stores[0].states.items():
        assert torch.equal(state[seq.overlay_row], fresh.stores[0].states[name][other.overlay_row])


def test_tokens_that_come_after_a_crop_are_read_in_full_where_they_are_recent() -> None:
    """The window lost 11 tokens to the crop, but holds all that came after it."""
    cache = make_cache("int4:recent=20")
    tokens = Tokens.random(100, 2, 1, 64)
    seq = cache.new()
    fill(cache, seq, tokens, [100])
    cache.crop(seq, 50)
    fill(cache, seq, tokens[:20], [20])
    assert torch.equal(seen(cache, seq)[0][50:], tokens.k[:20].bfloat16().float())


@pytest.mark.parametrize("name", GROUPWISE)
def test_allocated_bytes_are_what_the_layout_predicts(name: str) -> None:
    cache = make_cache(name, heads=3, layers=2)
    layout = cache.layout
    lengths = (1, 64, 200, 77)
    for n in lengths:
        fill(cache, cache.new(), Tokens.random(n, 3, 2, 64), [n])
    tensors = [t for store in cache.stores for t in (store.pages, *store.owned)]
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in tensors) == cache.predicted_nbytes
    assert cache.nbytes_used == sum(2 * layout.sequence_bytes(n) for n in lengths)


def test_what_a_corrector_remembers_is_counted() -> None:
    squat, kivi = make_cache("squat").layout, make_cache("kivi-k2v2:k.flush=32,v.recent=32").layout
    assert squat.page_bytes == kivi.page_bytes
    assert squat.overlay_bytes - kivi.overlay_bytes == 2 * 5 * 64 * 4  # heads, rank, head_dim, float32


@pytest.mark.parametrize("name", SMALL)
def test_a_full_pool_harms_nothing_and_a_retraction_leaves_no_trace(name: str) -> None:
    tokens = Tokens.random(150, 2, 1, 64)
    cache = make_cache(name, pages=2)
    first, second = cache.new(), cache.new()
    fill(cache, first, tokens[:100], [100])
    before = seen(cache, first)
    with pytest.raises(PoolFull):
        cache.extend([first, second], [200, 1])
    assert (first.length, second.length) == (100, 0)
    cache.extend([first], [25])
    cache.retract(first, 100)
    references_are_right(cache)
    for found, expected in zip(seen(cache, first), before, strict=True):
        assert torch.equal(found, expected)
    alone = make_cache(name, pages=2)
    fill(alone, alone.new(), tokens[:110], [100, 10])
    fill(cache, first, tokens[100:110], [10])
    for found, expected in zip(seen(cache, first), seen(alone, alone.sequences[0]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", SMALL)
def test_sliding_keeps_the_pages_that_a_group_is_still_to_be_coded_into(name: str) -> None:
    window, n, scale = 24, 150, 0.1
    tokens = Tokens.random(n, 2, 2, 64)
    cache = make_cache(name, page_tokens=32)
    seq = cache.new()
    first = prompt_of(cache)
    for at in (slice(0, first), *(slice(i, i + 1) for i in range(first, n))):
        fill(cache, seq, tokens[at], [at.stop - at.start])
        cache.slide(seq, window)
        references_are_right(cache)
    assert seq.pages.count(SLID_OUT) >= 2
    sides = [attended(cache.layout, side, tokens, n, first) for side in ("key", "value")]
    found = cache.decode(0, tokens.q[-1:], cache.batch([seq]), scale=scale, sliding_window=window)
    assert relative_error(found, dense_attention(tokens.q[-1:], *sides, scale, sliding_window=window)) < 1e-4
    twin = cache.fork(seq)
    with pytest.raises(ValueError, match="already dropped tokens that are needed"):
        cache.crop(twin, 40)
    assert twin.length == n
    cache.crop(twin, n - 1)
    cache.free(seq)
    cache.free(twin)
    assert cache.pool.used == 0


def prompt_of(cache: PagedCache) -> int:
    """The shortest prompt that completes a group."""
    window = cache.layout.recipe.key.window
    return window.sink + window.recent + window.flush


def test_a_crop_under_a_sliding_window_is_refused_where_it_would_read_what_is_gone() -> None:
    cache = make_cache("int4", page_tokens=16)
    seq = cache.new()
    fill(cache, seq, Tokens.random(200, 2, 1, 64), [200])
    cache.slide(seq, 40)  # tokens before 160 are gone
    with pytest.raises(ValueError, match="already dropped"):
        cache.crop(seq, 198)
    cache.crop(seq, 199)  # the next token sees 160 ... 199
    assert seq.length == 199
