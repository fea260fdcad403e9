"""Log-likelihoods from a packed cache: those of teacher-forced evaluation, whatever shares a batch."""

from __future__ import annotations

import math

import pytest
import torch

import kvant
from kvant.eval import Segments, evaluate
from kvant.eval import loglikelihood as module
from kvant.eval.loglikelihood import Continuation, first_batch, in_order, score
from tests.engines.test_hf import make_model, prompt

# A product of many rows may differ from that of one in its last bit, which moves a code now and then; 2 bits and random weights
# would make much of it.
ONE_LAYER, SAME = {"num_hidden_layers": 1}, 0.02  # nats a token


def plain(model: object, one: Continuation) -> float:
    """The log-likelihood from one exact forward pass."""
    ids = torch.tensor([[*one.prompt, *one.decoded]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(one.prompt) :]  # type: ignore[operator]
    return float(logits.log_softmax(-1)[range(len(one.targets)), list(one.targets)].sum())


def drawn(*sizes: tuple[int, int]) -> list[Continuation]:
    """Random continuations of random contexts."""
    rows = prompt(len(sizes), 200).tolist()
    return [Continuation.of(row[:a], row[a : a + b], 512) for row, (a, b) in zip(rows, sizes, strict=True)]


def test_what_is_prefilled_decoded_and_scored() -> None:
    assert Continuation.of([1, 2, 3], [4, 5], 10) == Continuation((1, 2), (3, 4), (4, 5))
    assert Continuation.of([1], [4], 10) == Continuation((), (1,), (4,))
    assert Continuation.of([1, 2, 3], [4, 5], 3) == Continuation((2,), (3, 4), (4, 5)), "the first tokens are dropped"
    assert Continuation.of([1, 2, 3], [4, 5], 2) == Continuation((), (3, 4), (4, 5))
    with pytest.raises(ValueError, match="the continuation has 2 tokens, and the model's context is 1"):
        Continuation.of([1], [4, 5], 1)
    with pytest.raises(ValueError, match="at least one token each, got 0 and 1"):
        Continuation.of([], [4], 5)


@pytest.mark.parametrize("recipe", ["int2", "int2:sink=3,recent=10", "kivi-k2v2:k.group=16,k.flush=16,v.recent=5"])
@pytest.mark.parametrize("tokens", [1, 90])
def test_it_is_the_teacher_forced_evaluation(recipe: str, tokens: int) -> None:
    model = make_model("llama", **ONE_LAYER)
    ids = prompt(2, 60 + tokens + 1)
    (expected,) = evaluate(model, [kvant.recipe(recipe)], Segments(ids, 60))
    whole = [Continuation.of(row[:61], row[61:], 512) for row in ids.tolist()]
    found = score(model, kvant.Cache(model, recipe), whole)
    assert sum(len(one.targets) for one in whole) == 2 * tokens
    assert -sum(each for each, _ in found) / (2 * tokens) == pytest.approx(math.log(expected.ppl), abs=SAME)
    exact = sum(plain(model, one) for one in whole) / (2 * tokens)
    assert abs(math.log(expected.ppl) + exact) > 2 * SAME, "the recipe matters, also for one token"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("recipe", ["full", "int2:sink=3,recent=10"])
def test_rows_of_a_batch_score_as_they_do_alone(family: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 7)  # several blocks, some of them without a token of some rows
    model = make_model(family, **ONE_LAYER)
    whole = drawn((60, 9), (41, 20), (41, 1), (3, 15), (2, 2))
    whole += [Continuation(one.prompt, one.decoded, (*one.targets[:-1], 7)) for one in whole[:2]]  # another last token
    whole += [Continuation.of((*whole[0].prompt, whole[0].decoded[0]), (8, 9, 10), 512)]  # of the same context
    cache = kvant.Cache(model, recipe)
    found = score(model, cache, whole, pad=5)
    for one, (value, greedy) in zip(whole, found, strict=True):
        ((alone, alone_greedy),) = score(model, cache, [one])
        assert value == pytest.approx(alone, abs=SAME * len(one.targets))
        assert greedy == alone_greedy
        if recipe == "full":
            assert value == pytest.approx(plain(model, one), abs=1e-3 * len(one.targets))
    assert not cache.as_decoded
    assert cache.batch_size == -1, "the cache is left empty"


def test_a_text_without_a_prompt_is_decoded_from_its_first_token() -> None:
    model = make_model("llama", **ONE_LAYER)
    ids = prompt(1, 50)
    cache = kvant.Cache(model, "int2", as_decoded=True)
    with torch.no_grad():
        logits = model(ids[:, :-1], past_key_values=cache).logits[0].log_softmax(-1)
    ((found, _),) = score(
        model, kvant.Cache(model, "int2"), [Continuation.of(ids[0, :1].tolist(), ids[0, 1:].tolist(), 512)]
    )
    assert found == pytest.approx(float(logits[range(49), ids[0, 1:]].sum()), abs=SAME * 49)


def test_what_greedy_decoding_would_have_written() -> None:
    model = make_model("llama", **ONE_LAYER)
    ids = prompt(1, 30)
    written = model.generate(
        ids,
        past_key_values=kvant.Cache(model, "int4"),
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=6,
    )[0, 30:].tolist()
    # The first token that generate writes comes from the prefill. Given that token, the others come from decode.
    context = [*ids[0].tolist(), written[0]]
    right = Continuation.of(context, written[1:], 512)
    wrong = Continuation.of(context, [*written[1:-1], (written[-1] + 1) % 200], 512)
    (_, yes), (_, no) = score(model, kvant.Cache(model, "int4"), [right, wrong])
    assert yes
    assert not no


def test_batches_share_prompts_and_hold_so_many_rows() -> None:
    a, b, c = drawn((30, 3), (20, 5), (1, 4))
    again = Continuation(a.prompt, a.decoded, (*a.targets[:-1], 3))
    other = Continuation.of((*a.prompt, a.decoded[0]), (9,), 512)
    whole = [c, again, b, other, a]
    order = in_order(whole)
    assert [whole[i].prompt for i in order] == [a.prompt, a.prompt, a.prompt, b.prompt, c.prompt]
    sorted_ = [whole[i] for i in order]
    assert first_batch(sorted_, 1) == 2, "the same inputs are one row"
    assert first_batch(sorted_, 2) == 3
    assert first_batch(sorted_, 3) == 4
    assert first_batch(sorted_, 9) == 4, "an empty prompt is in no batch with others"
    assert first_batch(sorted_[4:], 9) == 1


def test_a_failure_leaves_the_cache_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", **ONE_LAYER)
    cache = kvant.Cache(model, "int4")
    whole = drawn((20, 4), (9, 3))
    expected = score(model, cache, whole)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "log_softmax", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            score(model, cache, whole)
    assert not cache.as_decoded
    for (found, _), (wanted, _) in zip(score(model, cache, whole), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-3)
