"""One pool and many threads: a PagedCache is safe, a kvant.Cache refuses the second one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant.cache import PoolFull, PrefixCache, Sequence
from kvant.engines import graphs
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

    def live(seed: int) -> tuple[Sequence, Tokens]:
        tokens = Tokens.random(120, 2, 1, 64, seed)
        start.wait()
        for _ in range(6):
            seq = cache.new()
            try:
                fill(cache, seq, tokens[:100], [33, 1, 66])
                twin = cache.fork(seq)
                prefix.keep(seq, [seed] * 100)
                cache.free(seq)
                fill(cache, twin, tokens[100:], [20])
                cache.crop(twin, 110)
                fill(cache, twin, tokens[110:], [10])
                cache.free(twin)
            except PoolFull:
                for each in (seq,):
                    cache.free(each)
        while True:
            seq = cache.new()
            try:
                fill(cache, seq, tokens, [50, 70])
            except PoolFull:
                cache.free(seq)
                continue
            return seq, tokens

    with ThreadPoolExecutor(6) as threads:
        lives = [future.result() for future in [threads.submit(live, seed) for seed in range(6)]]
    for seq, tokens in lives:
        alone = make_cache(name, layers=2)
        other = alone.new()
        fill(alone, other, tokens, [50, 70])
        for mine, theirs in zip(cache.stores, alone.stores, strict=True):
            for side in ("key", "value"):
                found = read(mine, side, cache.batch([seq]), torch.tensor([120]))
                assert torch.equal(
                    found[:, :120], read(theirs, side, alone.batch([other]), torch.tensor([120]))[:, :120]
                )
    for seq, _ in lives:
        cache.free(seq)
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
        first = other.submit(torch.no_grad()(lambda: model(ids, past_key_values=cache).logits))
        assert inside.wait(30)
        with pytest.raises(RuntimeError, match="in use by another thread"):
            model(ids, past_key_values=cache)
        leave.set()
        found = first.result()
        assert cache.get_seq_length() == 20
        torch.testing.assert_close(found, model(ids, past_key_values=kvant.Cache(model, "int4")).logits)
        with pytest.raises(RuntimeError, match="in use by another thread"):
            model(ids[:, :1], past_key_values=cache)  # they are still the other one's sequences
        assert cache.get_seq_length() == 20
    with torch.inference_mode():
        model(ids[:, :1], past_key_values=cache)  # it has ended, and now it is this thread's turn
    assert cache.get_seq_length() == 21


class Meanwhile:
    """A logits processor: after the first steps of a generation, something else is done."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.left, self.action = step, action

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.action()
        return scores


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}


def test_a_generation_has_its_cache_from_start_to_finish() -> None:
    """A second one between two steps of the first is refused; the first's pages are filed under its own tokens."""
    model = make_model("llama")
    ids, theirs = prompt(1, 40), prompt(1, 40).flip(1)
    expected = kvant.Cache(model, "int4").generate(model, ids, **GREEDY)
    cache = kvant.Cache(model, "int4", share=True)
    with ThreadPoolExecutor(1) as other:

        def intrude() -> None:
            with pytest.raises(RuntimeError, match="in use by another thread: it belongs to 'MainThread'"):
                other.submit(cache.generate, model, theirs, salt="b", **GREEDY).result()

        found = cache.generate(model, ids, salt="a", logits_processor=[Meanwhile(3, intrude)], **GREEDY)
        assert found.tolist() == expected.tolist()
        (prefix,) = (group.paged.prefix for group in cache.groups)
        assert prefix is not None and prefix.find(found[0].tolist(), "a") == 47
        assert prefix.find(theirs[0].tolist(), "a") == prefix.find(theirs[0].tolist(), "b") == 0
        # this thread lives on, but its generation is over
        out = other.submit(cache.generate, model, theirs, salt="b", **GREEDY).result()
        assert out.tolist() == kvant.Cache(model, "int4").generate(model, theirs, **GREEDY).tolist()


@pytest.mark.parametrize("graph", [False, True])
def test_a_generation_within_a_generation_is_refused(
    graph: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_model("llama")
    if graph:  # the same steps, without a GPU
        monkeypatch.setattr(graphs, "refuse", lambda model, cache, graph=True: None)
        monkeypatch.setattr(graphs, "sample", functools.partial(graphs.sample, capture=False))
    ids = prompt(2, 20)
    cache = kvant.Cache(model, "int4")
    expected = kvant.Cache(model, "int4").generate(model, ids, **GREEDY)
    calls: list[Callable[[], object]] = [
        lambda: cache.generate(model, ids, **GREEDY),
        lambda: cache.start(ids),
        lambda: cache.finish(ids),
        cache.reset,
        cache.swap_out,
        lambda: cache.save(tmp_path / "x"),
    ]

    def again() -> None:
        for call in calls:
            with pytest.raises(RuntimeError, match="a generation from this cache is under way"):
                call()

    found = cache.generate(model, ids, graph=graph, logits_processor=[Meanwhile(4, again)], **GREEDY)
    assert found.tolist() == expected.tolist()


def test_a_generation_that_fails_gives_its_cache_back() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4", share=True)
    ids = prompt(1, 30)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.generate(model, ids, logits_processor=[Meanwhile(3, fail)], **GREEDY)
    with ThreadPoolExecutor(1) as other:
        out = other.submit(cache.generate, model, ids, **GREEDY).result()
    assert out.tolist() == kvant.Cache(model, "int4").generate(model, ids, **GREEDY).tolist()


def test_sequences_of_a_living_thread_are_its_own(tmp_path: Path) -> None:
    """model.generate tells nobody that it is over: another thread would go on with its sequences."""
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    ids = prompt(1, 20)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(model.generate, ids, past_key_values=cache, **GREEDY).result()
        calls: list[Callable[[], object]] = [
            lambda: model.generate(ids, past_key_values=cache, **GREEDY),
            lambda: cache.generate(model, ids, **GREEDY),
            lambda: cache.start(ids),
            lambda: cache.finish(first),
            cache.reset,
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            cache.swap_out,
            lambda: cache.save(tmp_path / "x"),
            lambda: cache.decoder(model, 3, graph=False),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="in use by another thread: .*Make a cache for every thread"):
                call()
        assert cache.get_seq_length() == 27
        other.submit(cache.finish, first).result()
        longer = torch.cat((first, ids), 1)
        cache.generate(model, longer, **GREEDY)
        assert cache.reused == 27, "it was handed over, sequences and all"
        # a decoder is its thread's too
        other.submit(cache.start, longer).result()
        other.submit(torch.no_grad()(model), longer[:, cache.reused :], past_key_values=cache).result()
        decode = other.submit(cache.decoder, model, 3, graph=False).result()
        for call in (lambda: decode(torch.tensor([3])), decode.close, cache.settle):
            with pytest.raises(RuntimeError, match="in use by another thread"):
                call()
        other.submit(cache.reset).result()
        assert decode.closed
        assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == first.tolist()


def test_a_thread_that_fails_to_begin_owns_nothing() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4", max_tokens=64, max_sequences=1)
    with ThreadPoolExecutor(1) as other:
        for call in (
            lambda: other.submit(torch.no_grad()(model), prompt(2, 20), past_key_values=cache).result(),
            lambda: other.submit(torch.no_grad()(model), prompt(1, 70), past_key_values=cache).result(),
        ):
            with pytest.raises(kvant.PoolFull):
                call()
        with pytest.raises(ValueError, match="at least one of each"):
            other.submit(cache.start, prompt(1, 0)).result()
        cache.generate(model, prompt(1, 20), **GREEDY)


def test_finish_refuses_tokens_and_salts_of_others() -> None:
    """Pages kept under the tokens of another request would be found by whoever asks for these."""
    model = make_model("llama")
    cache = kvant.Cache(model, "full", share=True)
    ids, theirs = prompt(2, 30), prompt(2, 30).flip(1)
    cache.start(ids, salt="a")
    out = model.generate(ids, past_key_values=cache, **GREEDY)
    wrong = torch.cat((theirs, out[:, 30:]), 1)
    with pytest.raises(
        ValueError, match="output_ids are not those of the sequences at hand: row 0 has token .* at position 0"
    ):
        cache.finish(wrong, salt="a")
    with pytest.raises(ValueError, match="salt must be the one that these sequences were started"):
        cache.finish(out)
    with pytest.raises(ValueError, match="a sequence holds 37 tokens, got 36 token ids"):
        cache.finish(out[:, :36], salt="a")
    with pytest.raises(ValueError, match="the cache holds 2 sequences, got the tokens of 1"):
        cache.finish(out[:1], salt="a")
    with pytest.raises(
        ValueError, match=r"attention_mask must be that of the prompt of output_ids, \[2, 38\], got \[1, 30\]"
    ):
        cache.finish(out, torch.ones(1, 30), salt="a")
    (group,) = cache.groups
    assert group.paged.prefix is not None and not len(group.paged.prefix), "nothing was kept"
    cache.finish(out, salt="a")
    changed = out.clone()
    changed[1, 33] += 1
    with pytest.raises(ValueError, match="row 1 has token .* at position 33, the cache was told"):
        cache.finish(changed, salt="a")
    cache.finish(out, salt="a")
