"""A kvant.Cache after something went wrong: as it was before, and as good as new after reset()."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import kvant
from kvant.cache import StaticBatch
from kvant.engines import serving
from kvant.ops import LayerStore
from tests.cache.test_faults import WANTED, every_failure, failing, nothing_leaks
from tests.engines.test_hf import make_model, prompt

TWO_GROUPS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
RECIPES = ["int4:sink=2,recent=9", "kitty:k.group=16,k.flush=16,v.recent=5,sink=9"]


def sound(cache: kvant.Cache) -> None:
    """Nothing leaks, and the groups hold the sequences that the cache says."""
    for group in cache.groups:
        nothing_leaks(group.paged)
        assert len(group.sequences) == len(group.paged.sequences) == max(0, cache.batch_size)
        assert all(
            mine is theirs
            for mine, theirs in zip(sorted(group.sequences, key=id), sorted(group.paged.sequences, key=id), strict=True)
        )
        assert [e.length for e in group.sequences] == [e.length for e in cache.groups[0].sequences]
    if cache.state.padding_mask is None and cache.groups and cache.groups[0].sequences:
        assert {e.length for e in cache.groups[0].sequences} == {cache.get_seq_length()}


def logits(model: Any, cache: kvant.Cache, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, past_key_values=cache, **options).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_batch_that_is_too_large_does_no_harm(family: str) -> None:
    model = make_model(family)
    cache = kvant.Cache(model, "int4:sink=2,recent=9", max_tokens=128, max_sequences=4)
    for _ in range(3):
        for call in (
            lambda: logits(model, cache, prompt(6, 20)),
            lambda: cache.generate(model, prompt(5, 20), max_new_tokens=2),
            lambda: logits(model, cache, prompt(2, 500)),
        ):
            with pytest.raises(kvant.PoolFull):
                call()
            assert cache.batch_size == -1 and cache.get_seq_length() == 0
            sound(cache)
    found = logits(model, cache, prompt(4, 128))
    assert torch.equal(found, logits(model, kvant.Cache(model, "int4:sink=2,recent=9"), prompt(4, 128)))
    cache.reset()
    logits(model, cache, prompt(3, 20))


@pytest.mark.parametrize("recipe", ["full", *RECIPES])
def test_beams_need_no_more_sequences_than_there_are_beams(recipe: str) -> None:
    model = make_model("llama")
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 12}
    ids = prompt(1, 40)
    cache = kvant.Cache(model, recipe, max_tokens=128, max_sequences=4)
    found = model.generate(ids, past_key_values=cache, **options)
    assert found.tolist() == model.generate(ids, past_key_values=kvant.Cache(model, recipe), **options).tolist()
    sound(cache)


def test_selections_in_any_order_are_forks() -> None:
    """Permutations with repeats, longer and shorter batches: each sequence is the one that was chosen."""
    model = make_model("gemma3", **TWO_GROUPS)
    chance = random.Random(3)
    for most in (None, 5):
        cache = kvant.Cache(model, "int4:sink=2,recent=9", max_tokens=None if most is None else 64, max_sequences=most)
        ids = prompt(3, 30)
        logits(model, cache, ids)
        texts = [row.tolist() for row in ids]
        for _ in range(12):
            order = [chance.randrange(len(texts)) for _ in range(chance.randint(1, 5))]
            cache._select(order)
            texts = [texts[i] for i in order]
            sound(cache)
        assert cache.batch_size == len(texts)
        found = logits(model, cache, prompt(1, 1).expand(len(texts), 1))
        for row, text in enumerate(texts):
            alone = kvant.Cache(model, "int4:sink=2,recent=9")
            logits(model, alone, torch.tensor([text]))
            torch.testing.assert_close(found[row], logits(model, alone, prompt(1, 1))[0], rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"indices must name at least one of . sequences, got \[\]"):
            cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
        with pytest.raises(ValueError, match="indices must name"):
            cache._select([0, 9])
        if most is not None:
            with pytest.raises(kvant.PoolFull):
                cache._select([0] * 6)
        sound(cache)
        assert torch.equal(
            logits(model, cache, prompt(1, 1).expand(len(texts), 1)).isfinite().all(), torch.tensor(True)
        )


STEPS: dict[str, Callable[[Any, kvant.Cache], Any]] = {
    "a pass": lambda model, cache: logits(model, cache, prompt(3, 40)),
    "samples": lambda model, cache: logits(model, cache, prompt(1, 40).expand(3, 40)),
    "selection": lambda model, cache: cache._select([1, 1, 0, 0, 0]),
    "decoder": lambda model, cache: cache.decoder(model, 60, graph=False).close(),
    "swap in": lambda model, cache: cache.swap_in(cache.swap_out()),
    "start": lambda model, cache: cache.start(torch.cat((prompt(2, 70), prompt(2, 70)), 0)),
}


@pytest.mark.parametrize("what", WANTED)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_fails_in_any_group_leaves_all_of_them_as_they_were(name: str, what: str) -> None:
    """Two groups of layers; pages, rows or memory run out at every place where they can."""
    model = make_model("gemma3", **TWO_GROUPS)
    for attempt in every_failure(what):
        cache = kvant.Cache(model, "int4:sink=2,recent=9", share=True, page_tokens=16)
        fresh = name in ("a pass", "samples")
        logits(model, cache, prompt(2, 70))
        cache.finish(prompt(2, 70))
        if fresh:
            cache.reset()
        before = (cache.batch_size, cache.get_seq_length())
        run: Callable[[], Any] = lambda cache=cache: STEPS[name](model, cache)  # noqa: E731
        if name == "swap in":
            swapped = cache.swap_out()
            before = (-1, 0)
            run = lambda cache=cache, swapped=swapped: cache.swap_in(swapped)  # noqa: E731
        if not attempt(run):
            break
        sound(cache)
        assert (cache.batch_size, cache.get_seq_length()) in (before, (-1, 0) if name == "start" else before)
        run()
        sound(cache)
        cache.reset()
        expected = kvant.Cache(model, "int4:sink=2,recent=9", page_tokens=16)
        assert torch.equal(logits(model, cache, prompt(2, 50)), logits(model, expected, prompt(2, 50)))


def test_a_cache_that_cannot_be_allocated_is_allocated_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gemma3", **TWO_GROUPS)
    expected = logits(model, kvant.Cache(model, "int4"), prompt(2, 20))
    for number in (1, 2):
        cache, calls = kvant.Cache(model, "int4"), 0
        allocate = LayerStore.allocate

        def fail(*args: Any, number: int = number, allocate: Any = allocate) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise torch.OutOfMemoryError("out of memory")
            return allocate(*args)

        with monkeypatch.context() as patch:
            patch.setattr(LayerStore, "allocate", staticmethod(fail))
            with pytest.raises(torch.OutOfMemoryError):
                logits(model, cache, prompt(2, 20))
        assert (cache.groups, cache.get_seq_length()) == ([], 0)
        assert torch.equal(logits(model, cache, prompt(2, 20)), expected)


def test_swapping_out_is_done_by_all_groups_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gemma3", **TWO_GROUPS)
    cache, expected = kvant.Cache(model, "int4"), kvant.Cache(model, "int4")
    for each in (cache, expected):
        logits(model, each, prompt(2, 20))
    copied = serving.copied

    def fail(paged: Any, sequences: Any) -> Any:
        if paged is cache.groups[1].paged:
            raise MemoryError
        return copied(paged, sequences)

    with monkeypatch.context() as patch:
        patch.setattr(serving, "copied", fail)
        with pytest.raises(MemoryError):
            cache.swap_out()
    sound(cache)
    assert torch.equal(*(logits(model, each, prompt(2, 3)) for each in (cache, expected)))


def test_a_pass_that_breaks_off_needs_the_pages_that_its_window_would_leave() -> None:
    """The layers with a sliding window are done when the others fail: their pages may not be gone by then."""
    model = make_model("gemma3", **TWO_GROUPS)
    ids = prompt(1, 140)
    cache, expected = (kvant.Cache(model, "int4", page_tokens=16) for _ in range(2))
    for each in (cache, expected):
        logits(model, each, ids[:, :40])

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        logits(model, cache, ids[:, 40:])
    hook.remove()
    with pytest.raises(RuntimeError, match="broke off between layers"):
        logits(model, cache, ids[:, 40:41])
    sound(cache)
    assert torch.equal(logits(model, cache, ids[:, 40:41]), logits(model, expected, ids[:, 40:41]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_follows_a_pass_that_broke_off_does_not_see_it(recipe: str, tmp_path: Any) -> None:
    """Not only another pass: a crop, a snapshot, a swap, a chat that goes on."""
    model = make_model("llama")
    ids = prompt(1, 60)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def saved(cache: kvant.Cache) -> kvant.Cache:
        return kvant.Cache.load(cache.save(tmp_path / "x"), model)

    def swapped(cache: kvant.Cache) -> kvant.Cache:
        cache.swap_in(cache.swap_out())
        return cache

    def cropped(cache: kvant.Cache) -> kvant.Cache:
        cache.crop(-3)
        return cache

    def finished(cache: kvant.Cache) -> kvant.Cache:
        cache.finish(ids[:, :40])
        assert cache.start(ids[:, :41]) == 40
        return cache

    for action in (saved, swapped, cropped, finished):
        caches = [kvant.Cache(model, recipe) for _ in range(2)]
        for cache in caches:
            logits(model, cache, ids[:, :40])
            hook = model.model.layers[1].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                logits(model, cache, ids[:, 40:])
            hook.remove()
        with pytest.raises(RuntimeError, match="broke off between layers: it has been taken back"):
            logits(model, caches[1], ids[:, 40:])
        caches = [action(cache) for cache in caches]
        sound(caches[0])
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == (37 if action is cropped else 40)
        assert torch.equal(*(logits(model, cache, ids[:, 40:41]) for cache in caches))


@pytest.mark.parametrize("first", ["sliding", "full"])
def test_a_crop_that_one_group_cannot_do_is_done_by_none(first: str) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = make_model("gemma3", num_hidden_layers=2, layer_types=kinds if first == "sliding" else kinds[::-1])
    cache, expected = (kvant.Cache(model, "int4", page_tokens=16) for _ in range(2))
    for each in (cache, expected):
        logits(model, each, prompt(1, 140))
    with pytest.raises(ValueError, match="the sliding window has already dropped tokens"):
        cache.crop(-60)
    sound(cache)
    assert cache.get_seq_length() == 140
    assert torch.equal(logits(model, cache, prompt(1, 1)), logits(model, expected, prompt(1, 1)))


def test_a_decoder_that_cannot_be_closed_does_not_keep_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    logits(model, cache, prompt(2, 30))
    decode = cache.decoder(model, 5, graph=False)
    decode(torch.tensor([3, 4]))
    with monkeypatch.context() as patch:
        patch.setattr(StaticBatch, "close", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.crop(-1)
    sound(cache)
    logits(model, cache, prompt(3, 20))


def test_whatever_fails_reset_leads_back() -> None:
    """Operations in any order; what they need runs out now and then. Then reset(), and a batch of full size."""
    model = make_model("gemma3", **TWO_GROUPS)
    chance = random.Random(11)
    swapped: list[Any] = []
    actions: list[Callable[[kvant.Cache, int, int], Any]] = [
        lambda cache, rows, columns: logits(model, cache, prompt(rows, columns)),
        lambda cache, rows, columns: logits(model, cache, prompt(max(1, cache.batch_size), columns)),
        lambda cache, rows, columns: cache.generate(model, prompt(rows, columns), max_new_tokens=2, do_sample=False),
        lambda cache, rows, columns: cache.crop(-columns),
        lambda cache, rows, columns: cache._select([chance.randrange(rows) for _ in range(rows + 1)]),
        lambda cache, rows, columns: cache.decoder(model, columns, graph=False)(torch.zeros(rows)),
        lambda cache, rows, columns: swapped.append(cache.swap_out()),
        lambda cache, rows, columns: cache.swap_in(swapped.pop()),
        lambda cache, rows, columns: cache.finish(prompt(rows, 100)),
    ]
    raised = 0
    for round_ in range(24):
        share = bool(round_ % 2)
        cache = kvant.Cache(
            model, RECIPES[round_ // 2 % 2], share=share, page_tokens=16, max_tokens=96, max_sequences=4
        )
        swapped.clear()
        for _ in range(chance.randint(2, 7)):
            action = functools.partial(
                chance.choice(actions), cache, chance.randint(1, 5), chance.choice([1, 7, 30, 100])
            )
            with pytest.MonkeyPatch.context() as patch:
                if chance.random() < 0.4:
                    failing(patch, chance.choice(list(WANTED)), chance.randint(1, 12))
                try:
                    action()
                except (kvant.PoolFull, ValueError, IndexError, torch.OutOfMemoryError):
                    raised += 1
                except RuntimeError as error:
                    if "this cache belongs to a decoder: close it" not in str(error):
                        raise
            if cache.state.decoder is None:
                sound(cache)
        cache.reset()
        sound(cache)
        assert logits(model, cache, prompt(4, 96)).isfinite().all()
    assert raised > 24, "or nothing was tried"


@pytest.mark.parametrize("shape", [(1, 0), (0, 5), (0, 0)])
def test_prompts_of_nothing_are_refused_in_our_words(shape: tuple[int, int]) -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    ids = torch.zeros(shape, dtype=torch.int64)
    message = "the model was called with no (new tokens|sequences): input_ids must have at least one (column|row)"
    for call in (
        lambda: logits(model, cache, ids),
        lambda: model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call in (lambda: cache.generate(model, ids), lambda: cache.start(ids), lambda: cache.finish(ids)):
        with pytest.raises(ValueError, match=r"_ids must be \[sequences, columns\] with at least one of each, got"):
            call()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    cache.generate(model, prompt(1, 5), max_new_tokens=2)
    with pytest.raises(ValueError, match="no (new tokens|sequences)"):
        logits(model, cache, ids)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("as_decoded", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_are_all_padding(recipe: str, as_decoded: bool) -> None:
    """In a chunk of a prompt they may be; in a whole prompt they are named."""
    model = make_model("llama")
    ids, mask = prompt(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[1, :25] = 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    found = []
    for chunks in ([(0, 40)], [(0, 20), (20, 40)]):
        cache = kvant.Cache(model, recipe, as_decoded=as_decoded)
        for start, stop in chunks:
            options = {"attention_mask": mask[:, :stop], "position_ids": position[:, start:stop]}
            last = logits(model, cache, ids[:, start:stop], **options)
        assert [seq.length for seq in cache.groups[0].sequences] == [40, 15]
        found.append(last[1, -1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
    mask[1] = 0
    for call in (lambda: cache.generate(model, ids, mask), lambda: cache.start(ids, mask)):
        with pytest.raises(
            ValueError, match="row 1 of attention_mask is all padding: every sequence needs at least one"
        ):
            call()
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of input_ids, \[2, 40\], got \[2, 39\]"):
        cache.start(ids, mask[:, 1:])
    logits(model, kvant.Cache(model, recipe, as_decoded=as_decoded), ids, attention_mask=mask)


def test_padding_between_tokens_is_counted_where_it_lies() -> None:
    """A second turn after answers of different lengths: rows have padding in the middle."""
    model = make_model("llama")
    cache = kvant.Cache(model, "full", share=True)
    ids, mask = prompt(2, 30), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :4], mask[1, 20:24] = 0, 0
    other = ids.clone()
    other[0, 15:] = 3
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = [kvant.Cache(model, "full").generate(model, each, mask, **options).tolist() for each in (ids, other)]
    for forget in (False, True):
        assert cache.generate(model, ids, mask, **options).tolist() == expected[0]
        if forget:
            cache.reset()
        assert cache.generate(model, other, mask, **options).tolist() == expected[1]
        assert cache.reused == 15 or forget
        assert [seq.length for seq in cache.groups[0].sequences] == [31, 31]


def test_settings_that_come_in_a_generation_config_count() -> None:
    model = make_model("llama")
    ids = prompt(1, 20)
    for options in ({"num_return_sequences": 3, "do_sample": True}, {"num_beams": 3}):
        config = GenerationConfig(max_new_tokens=3, pad_token_id=0, **options)
        cache = kvant.Cache(model, "int4", share=True)
        out = cache.generate(model, ids, generation_config=config, return_dict_in_generate=True)
        assert cache.batch_size == 3 and out.sequences.shape[1] == 23
