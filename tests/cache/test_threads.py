"""One pool and many threads: a PagedCache is safe, a kvant.Cache refuses the second one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvant
from kvant.cache import Entry, PoolFull, PrefixCache
from kvant.ops.reference import read
from tests.cache.test_groups import references_are_right
from tests.engines.test_hf import make_model, prompt
from tests.grouped import Tokens, fill, make_cache


@pytest.mark.parametrize("name", ["int4:sink=2,recent=9", "kitty:k.group=16,k.flush=16,v.recent=5,sink=9"])
@pytest.mark.parametrize("pages", [None, 24])
def test_threads_with_sequences_of_their_own_do_not_harm_each_other(name: str, pages: int | None) -> None:
    """They grow the pool, share, fork, crop and free at the same time; each finds its own tokens again."""
    cache = make_cache(name, layers=2, pages=pages)
    prefix = PrefixCache(cache)
    start = threading.Barrier(6)

    def live(seed: int) -> tuple[Entry, Tokens]:
        tokens = Tokens.random(120, 2, 1, 64, seed)
        start.wait()
        for _ in range(6):
            entry = cache.new()
            try:
                fill(cache, entry, tokens[:100], [33, 1, 66])
                twin = cache.fork(entry)
                prefix.keep(entry, [seed] * 100)
                cache.free(entry)
                fill(cache, twin, tokens[100:], [20])
                cache.crop(twin, 110)
                fill(cache, twin, tokens[110:], [10])
                cache.free(twin)
            except PoolFull:
                for each in (entry,):
                    cache.free(each)
        while True:
            entry = cache.new()
            try:
                fill(cache, entry, tokens, [50, 70])
            except PoolFull:
                cache.free(entry)
                continue
            return entry, tokens

    with ThreadPoolExecutor(6) as threads:
        lives = [future.result() for future in [threads.submit(live, seed) for seed in range(6)]]
    for entry, tokens in lives:
        alone = make_cache(name, layers=2)
        other = alone.new()
        fill(alone, other, tokens, [50, 70])
        for mine, theirs in zip(cache.stores, alone.stores, strict=True):
            for side in ("key", "value"):
                found = read(mine, side, cache.batch([entry]), torch.tensor([120]))
                assert torch.equal(
                    found[:, :120], read(theirs, side, alone.batch([other]), torch.tensor([120]))[:, :120]
                )
    for entry, _ in lives:
        cache.free(entry)
    prefix.clear()
    references_are_right(cache)
    assert cache.pool.used == 0


def test_a_second_thread_in_the_middle_of_a_pass_is_refused() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    ids = prompt(1, 20)
    inside, leave = threading.Event(), threading.Event()

    def wait(layer: int, *_: object) -> None:
        if layer == 1 and not inside.is_set():
            inside.set()
            assert leave.wait(30)

    cache.on_attend = wait
    with ThreadPoolExecutor(1) as other, torch.inference_mode():
        first = other.submit(lambda: model(ids, past_key_values=cache).logits)
        assert inside.wait(30)
        with pytest.raises(RuntimeError, match="in use by another thread"):
            model(ids, past_key_values=cache)
        leave.set()
        found = first.result()
        assert cache.get_seq_length() == 20
        torch.testing.assert_close(found, model(ids, past_key_values=kvant.Cache(model, "int4")).logits)
        model(ids[:, :1], past_key_values=cache)  # and now it is this thread's turn
    assert cache.get_seq_length() == 21
