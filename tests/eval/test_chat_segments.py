"""Chats are scored as decode sees them: a ragged batch, one chat at a time, and a loop over tokens all give the same."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

import kvant
from kvant import recipes
from kvant.chats import Chats, Encoded
from kvant.eval import ChatSegments, evaluate
from tests.chatting import make_tokenizer, says
from tests.engines.test_hf import make_model

CHATS = [
    says("Where is the lamp?", "On a step.", "Who lit it?", "The keeper, at seven."),
    says("Hi.", "Good evening to you."),
    says("x" * 70, "y", "More?", "No."),
    [{"role": "system", "content": "Be brief."}, *says("Why?", "Because.")],
]


def segments(tokens: int | None = None) -> ChatSegments:
    chats = Chats.parse("\n".join(map(json.dumps, CHATS)), "some.jsonl")
    return ChatSegments.of(chats.encode(make_tokenizer()), tokens)


def encoded(answer: str) -> Encoded:
    """A chat of tokens 10, 11, ...: an 'a' is a token of an answer."""
    return Encoded(list(range(10, 10 + len(answer))), [x == "a" for x in answer], "some.jsonl, line 1")


def test_prompts_are_prefilled_but_for_their_last_token_and_answers_are_scored() -> None:
    found = ChatSegments.of([encoded("....aa..aa."), encoded("..a")])
    first, second = found.rows
    assert (first.ids, first.prompt) == (list(range(10, 20)), 3), "nothing is read after the last scored token"
    assert [at for at, scored in enumerate(first.scored) if scored] == [4, 5, 8, 9]
    assert (second.ids, second.prompt, second.scored) == ([10, 11, 12], 1, [False, False, True])
    assert (found.tokens, found.length, found.ragged) == (5, 6, True)  # (9 + 2) / 2 tokens are read
    assert found.lengths == Counter([4, 5, 8, 9, 2])


def test_a_batch_is_padded_on_both_sides_of_one_column() -> None:
    (batch,) = ChatSegments.of([encoded("....aa..aa."), encoded("..a")]).batches(2)
    assert batch.prompt == 3
    assert batch.ids.tolist() == [[10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [0, 0, 10, 11, 12, 0, 0, 0, 0, 0]]
    assert batch.real is not None
    assert batch.real.int().tolist() == [[1] * 10, [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.positions(3, 6).tolist() == [[3, 4, 5], [1, 2, 2]]
    assert batch.targets(3, 9).int().tolist() == [[1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]]
    (alone,) = ChatSegments.of([encoded("....aa")]).batches(1)
    assert alone.real is None


def test_tokens_are_a_limit_of_what_is_scored() -> None:
    whole = segments()
    assert whole.tokens == sum(len(m["content"]) + 1 for chat in CHATS for m in chat if m["role"] == "assistant")
    assert segments(whole.tokens + 9).tokens == whole.tokens
    some = segments(25)
    assert (some.tokens, len(some.rows)) == (25, 1)
    assert segments(34).rows[0] == whole.rows[0], "11 + 22 tokens, and one of the next chat"
    assert [sum(row.scored) for row in segments(34).rows] == [33, 1]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="some.jsonl, line 1: the chat has no answer of the assistant"):
        ChatSegments.of([encoded("....")])
    with pytest.raises(ValueError, match="line 1: the chat has 6 tokens, and the model's context is 5"):
        ChatSegments.of([encoded("....aa")], longest=5)
    with pytest.raises(ValueError, match="tokens must be positive"):
        ChatSegments.of([encoded("....aa")], 0)
    with pytest.raises(ValueError, match="no token to score"):
        ChatSegments.of([encoded(".a")])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "full"),
        ("llama", "int4"),
        ("mistral-sliding", "int8:sink=3,recent=5"),
        ("llama", "kivi-k2v2:k.group=16,k.flush=32,k.recent=7,v.recent=9,sink=5"),
    ],
)
def test_a_batch_is_each_chat_alone_and_a_loop_over_tokens(family: str, name: str) -> None:
    model = make_model(family, vocab_size=262, initializer_range=0.1)  # larger weights make flips of codes grow
    text = segments()
    recipe = recipes.get(name)
    kl, nll, equal = [], [], []
    with torch.inference_mode():
        for row in text.rows:
            ids = torch.tensor([row.ids])
            exact = model(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
            cache = kvant.Cache(model, recipe)
            model(ids[:, : row.prompt], past_key_values=cache)
            for at in range(row.prompt, len(row.ids) - 1):  # decode, token by token
                found = model(ids[:, at : at + 1], past_key_values=cache).logits[0, 0].log_softmax(-1)
                if row.scored[at + 1]:
                    kl.append(float((exact[at].exp() * (exact[at] - found)).sum()))
                    nll.append(-float(found[row.ids[at + 1]]))
                    equal.append(float(found.argmax() == exact[at].argmax()))
    assert len(kl) == text.tokens
    runs = {
        "one batch": evaluate(model, [recipe], text, profile=True),
        "several batches": evaluate(model, [recipe], text, batch=2, profile=True),
        "one by one": evaluate(model, [recipe], text, batch=1, profile=True),
        "stepwise": evaluate(model, [recipe], text, stepwise=True),
    }
    for how, (result,) in runs.items():
        # sums in another order flip a code now and then
        assert result.kl == pytest.approx(sum(kl) / len(kl), rel=0.02, abs=1e-6), how
        assert result.ppl == pytest.approx(math.exp(sum(nll) / len(nll)), rel=0.002), how
        assert result.top1 == pytest.approx(sum(equal) / len(equal), abs=0.03), how
        assert result.bpe == cache.layout.bits_per_element(text.length), how
    profiles = [result.profile for how, (result,) in runs.items() if how != "stepwise"]
    for other in profiles[1:]:
        assert other is not None and profiles[0] is not None
        assert other.lengths == profiles[0].lengths
        for metric, layers in profiles[0].layers.items():
            assert other.layers[metric] == pytest.approx(layers, rel=0.05, abs=1e-6), metric


def test_only_queries_of_answers_are_profiled() -> None:
    """Answers stand at 10 to 12 and from 40 on: no query between them is compared."""
    model = make_model("llama")
    text = ChatSegments.of([encoded("." * 10 + "aa" + "." * 28 + "aaa"), encoded("...aa")])
    (result,) = evaluate(model, [recipes.get("int4")], text, profile=True)
    assert result.profile is not None
    assert result.profile.lengths == [4, 16, 64]
    assert result.profile.heads["attention_kl"][0][0] > 0


def test_chats_are_fed_in_chunks_too() -> None:
    model = make_model("llama", vocab_size=262)
    together, alone = (evaluate(model, [recipes.get("int4")], segments(), chunk=5, batch=n)[0] for n in (5, 1))
    assert together.kl == pytest.approx(alone.kl, rel=0.05)
    (decoded,) = evaluate(model, [recipes.get("int4")], segments())
    assert decoded.kl > alone.kl > 0, "tokens of a chunk see each other unpacked"


def test_a_chat_that_comes_twice_in_a_batch_counts_twice() -> None:
    """Equal rows of a batch are stored once."""
    model = make_model("llama", initializer_range=0.1)
    chat, other = encoded("." * 30 + "aaaa" + "..aa"), encoded("....aaa")
    one, twice = (ChatSegments.of(chats) for chats in ([chat, other], [chat, chat, other, other]))
    (alone,), (both,) = (evaluate(model, [recipes.get("int4")], text, profile=True) for text in (one, twice))
    assert twice.tokens == 2 * one.tokens
    assert both.kl == pytest.approx(alone.kl, rel=0.02)
    assert both.profile is not None and alone.profile is not None
    assert both.profile.layers["key_error"] == pytest.approx(alone.profile.layers["key_error"], rel=0.02)
