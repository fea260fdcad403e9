"""A kvant.Cache that is interrupted (Ctrl-C) at any line of a call: the call has happened whole, or not at all, or it is said that it
was taken back. What follows is what follows in a cache that was not interrupted, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import recipes
from kvant.artifact import Artifact
from tests.cache.test_interrupts import content
from tests.engines.test_faults import logits, sound
from tests.engines.test_hf import make_model, prompt
from tests.fitted import made_up_tensors
from tests.interrupts import interrupted, is_free

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}
WINDOWS = {**SMALL, "layer_types": ["sliding_attention", "full_attention"]}
RECIPES = ["kvant-2", "saw-int4", "kivi-k2v2", "kitty:k.group=16,k.flush=16,v.recent=5,sink=9", "kvant-2:recent=9"]
PROMPT = 37


@functools.cache
def model_of(family: str) -> Any:
    return make_model(family, **(WINDOWS if family == "gemma3" else SMALL))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up artifacts of recipes that need one."""
    directory = tmp_path_factory.mktemp("artifacts")
    for i, name in enumerate(RECIPES):
        recipe = recipes.get(name)
        if recipe.calibrated:
            torch.manual_seed(3)
            tensors = {layer: made_up_tensors(recipe, 1, 64) for layer in range(2)}
            Artifact(recipe, 1, 64, 2, tensors).save(directory / str(i))
    return directory


@pytest.fixture
def make(artifacts: Path) -> Callable[..., kvant.Cache]:
    def begin(recipe: str, family: str = "llama", rows: int = 0, length: int = PROMPT, **options: Any) -> kvant.Cache:
        """A cache that holds so many prompts."""
        calibrated = recipes.get(recipe).calibrated
        artifact = artifacts / str(RECIPES.index(recipe)) if calibrated else None
        model = model_of(family)
        cache = kvant.Cache(model, recipe, artifact=artifact, page_tokens=64 if "k2v2" in recipe else 16, **options)
        if rows:
            logits(model, cache, prompt(rows, length))
        return cache

    return begin


def state(cache: kvant.Cache) -> Any:
    """What a batch holds, wherever it lies."""
    of = cache.state
    mask = None if of.padding_mask is None else of.padding_mask.tolist()
    ids = of.token_ids, of.told_ids, of.salt
    return [content(group.paged) for group in cache.groups], of.batch_size, of.columns, of.columns_begun, mask, ids


def unharmed(cache: kvant.Cache, where: str) -> None:
    """Locks are free, nothing leaks, and nothing is under way."""
    for group in cache.groups:
        assert is_free(group.paged.lock), where
        group.paged.reserve(0)
    assert is_free(cache.ownership._guard), where
    cache.settle()
    sound(cache)
    assert not cache.state.unfinished and cache.state.decoder is None, where


def run_at_every_line(
    family: str,
    make: Callable[[], kvant.Cache],
    operation: Callable[[kvant.Cache], Any],
    first: int = 1,
    stride: int = 1,
    broken: Sequence[Any] = (),
    exact: bool = True,
    **options: Any,
) -> int:
    """`broken`: states in which a call may have been taken back, beside the one before it; `exact`: the same call after that gives what
    it gives in a cache that was not interrupted."""
    model = model_of(family)
    twin = make()
    before = state(twin)
    expected = operation(twin)
    after = state(twin)
    following = prompt(max(1, twin.batch_size), 2)
    then = logits(model, twin, following)
    count = 0
    for cache, where in interrupted(make, operation, first, stride, **options):
        count += 1
        unharmed(cache, where)
        found = state(cache)
        nothing = not cache.groups or (cache.batch_size == -1 and before[1] == -1)
        assert nothing or found in (before, after, *broken), where
        if found != after or before == after:
            again = operation(cache)
            if isinstance(again, torch.Tensor) and (exact or found == before):
                assert torch.equal(again, expected), where
        if exact or found not in broken:
            assert state(cache) == after, where
            assert torch.equal(logits(model, cache, following), then), where
        cache.reset()
        assert all(
            group.paged.pool.used == (len(group.paged.prefix) if group.paged.prefix else 0) for group in cache.groups
        )
    return count


def strides(quick: int) -> list[Any]:
    return [quick, pytest.param(1, marks=pytest.mark.slow)]


def taken_back(make: Callable[[], kvant.Cache], call: Callable[[kvant.Cache], Any]) -> list[Any]:
    """States after a forward pass failed behind the attention of its first layer, its second, and so on. Where windows had let tokens
    go for new ones, their packed form serves."""
    found = []
    for last in range(2):
        cache = make()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "on_attend", lambda layer, *_, last=last: 1 / (layer != last))
            with pytest.raises(ZeroDivisionError):
                call(cache)
        found.append(state(cache))
    return found


@pytest.mark.parametrize("stride", strides(211))
@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_a_prompt(make: Any, recipe: str, stride: int) -> None:
    """Into a cache that is allocated meanwhile."""
    call = lambda cache: logits(model_of("llama"), cache, prompt(2, PROMPT))  # noqa: E731
    assert run_at_every_line("llama", lambda: make(recipe), call, 1 + stride // 2, stride) > 10


@pytest.mark.parametrize("stride", strides(29))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_decode_step(make: Any, recipe: str, stride: int) -> None:
    new = prompt(2, 1)
    call = lambda cache: logits(model_of("llama"), cache, new)  # noqa: E731
    broken = taken_back(lambda: make(recipe, rows=2), call)
    assert run_at_every_line("llama", lambda: make(recipe, rows=2), call, 1 + stride // 2, stride, broken) > 10


@pytest.mark.parametrize("stride", strides(41))
@pytest.mark.parametrize("recipe", RECIPES[3:])
def test_a_chunk_that_takes_the_place_of_what_windows_hold(make: Any, recipe: str, stride: int) -> None:
    chunk = prompt(2, 23)
    call = lambda cache: logits(model_of("llama"), cache, chunk)  # noqa: E731
    broken = taken_back(lambda: make(recipe, rows=2), call)
    run_at_every_line("llama", lambda: make(recipe, rows=2), call, 1 + stride // 2, stride, broken, exact=False)


def steps(model: Any, cache: kvant.Cache) -> torch.Tensor:
    """Steps of a decoder; its logits are valid until the next one."""
    with cache.decoder(model, 4, graph=False) as decode:
        return torch.stack([decode(prompt(1, 3 + i)[0, -3:]).clone() for i in range(2)])


OPERATIONS: dict[str, Callable[[Any, kvant.Cache], Any]] = {
    "samples": lambda model, cache: logits(model, cache, prompt(1, 9).expand(3, 9)),
    "beams": lambda model, cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
    "selection": lambda model, cache: cache._select([1, 1, 0, 0, 0]),
    "crop": lambda model, cache: cache.crop(-5),
    "decoder": lambda model, cache: cache.decoder(model, 30, graph=False).close(),
    "finish": lambda model, cache: cache.finish(prompt(3, PROMPT)),
    "start": lambda model, cache: cache.start(prompt(3, PROMPT)[:, :30]),
    "reset": lambda model, cache: cache.reset(),
}


@pytest.mark.parametrize("stride", strides(31))
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_operations_on_a_batch(make: Any, name: str, family: str, stride: int) -> None:
    """Of one group of layers, and of two."""
    operation = functools.partial(OPERATIONS[name], model_of(family))

    def begin() -> kvant.Cache:
        cache = make(RECIPES[3], family, rows=3, share=True)
        if name == "start":
            cache.finish(prompt(3, PROMPT))
        return cache

    broken = taken_back(begin, operation) if name == "samples" else []
    run_at_every_line(family, begin, operation, 1 + stride // 2, stride, broken, exact=not broken)


@pytest.mark.parametrize("stride", strides(31))
def test_a_batch_that_takes_up_kept_pages(make: Any, stride: int) -> None:
    def begin() -> kvant.Cache:
        cache = make(RECIPES[3], "gemma3", rows=3, share=True)
        cache.finish(prompt(3, PROMPT))
        cache.start(prompt(2, 9) + 1)
        return cache

    start = lambda cache: cache.start(prompt(3, PROMPT)[[1, 2]])  # noqa: E731
    assert run_at_every_line("gemma3", begin, start, 1 + stride // 2, stride) > 2


@pytest.mark.parametrize("stride", strides(97))
@pytest.mark.parametrize("direction", ["out", "in"])
def test_swapping(make: Any, direction: str, stride: int) -> None:
    made = make(RECIPES[3], "gemma3", rows=3)
    swapped = make(RECIPES[3], "gemma3", rows=3).swap_out()
    empty = make(RECIPES[3], "gemma3", rows=3)
    empty.swap_out()
    operation = (lambda cache: cache.swap_in(swapped)) if direction == "in" else (lambda cache: cache.swap_out())
    full, none = state(made), state(empty)
    for cache, where in (
        interrupted(lambda: make(RECIPES[3], "gemma3", rows=3), lambda cache: cache.swap_out(), 1 + stride // 2, stride)
        if direction == "out"
        else interrupted(lambda: swapped_out(make), operation, 1 + stride // 2, stride)
    ):
        unharmed(cache, where)
        assert state(cache) in (full, none), where
        if (state(cache) == none) == (direction == "in"):
            operation(cache)
        assert state(cache) == (full if direction == "in" else none), where


def swapped_out(make: Any) -> kvant.Cache:
    cache: kvant.Cache = make(RECIPES[3], "gemma3", rows=3)
    cache.swap_out()
    return cache


@pytest.mark.parametrize("stride", strides(53))
def test_steps_of_a_decoder(make: Any, stride: int) -> None:
    """They belong to the decoder until it is closed: as many of them have happened as it says."""
    model = model_of("llama")
    for cache, where in interrupted(
        lambda: make(RECIPES[4], rows=3), lambda cache: steps(model, cache), 1 + stride // 2, stride
    ):
        unharmed(cache, where)
        done = cache.get_seq_length() - PROMPT
        expected = make(RECIPES[4], rows=3)
        for i in range(done):
            logits(model, expected, prompt(1, 3 + i)[0, -3:, None])
        assert state(cache) == state(expected) or done < 2, (
            where
        )  # what a step that was taken back let go is read from pages
        found = logits(model, cache, prompt(3, 1))
        assert torch.equal(found, logits(model, expected, prompt(3, 1))), where


@pytest.mark.parametrize("stride", strides(499))
@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_a_generation(make: Any, recipe: str, stride: int) -> None:
    """Whatever was interrupted, the next generation from this cache is that of a new one."""
    model, options = model_of("llama"), {"max_new_tokens": 3, "do_sample": False}
    expected = make(recipe).generate(model, prompt(2, PROMPT), **options)
    call = lambda cache: cache.generate(model, prompt(2, PROMPT), **options)  # noqa: E731
    for cache, where in interrupted(lambda: make(recipe, share=True), call, 1 + stride // 2, stride):
        unharmed(cache, where)
        cache.reset()
        assert torch.equal(call(cache), expected), where


@pytest.mark.parametrize("again", [2, 7, 23, 61, 140])
@pytest.mark.parametrize("recipe", RECIPES[3:])
def test_taking_back_that_is_interrupted(make: Any, recipe: str, again: int) -> None:
    new = prompt(2, 1)
    call = lambda cache: logits(model_of("llama"), cache, new)  # noqa: E731
    broken = taken_back(lambda: make(recipe, rows=2), call)
    assert run_at_every_line("llama", lambda: make(recipe, rows=2), call, again, 37, broken, again=again) > 5
