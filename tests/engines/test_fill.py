"""Prompts that were prefilled elsewhere: a filled cache holds what its own prefill would have stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvant
from kvant.engines.attention import ATTENTION
from kvant.eval.asking import Prompts, Sampling, ask
from kvant.eval.prompt_states import PromptStates, padded
from kvant.eval.tasks import Question
from kvant.eval.tasks.own import OwnQuestions
from tests.engines.test_hf import make_model


def ragged(seed: int = 3) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 200, (n,), generator=draw).tolist() for n in (70, 9, 41, 70)]


def batch(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.mark.parametrize("family", ["qwen2", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("recipe", ["full", "int8:sink=2,recent=8", "kivi-k4v4:k.group=16,k.flush=16,v.recent=16"])
def test_a_filled_cache_decodes_as_one_that_prefilled(family: str, recipe: str) -> None:
    model = make_model(family)
    rows = ragged()
    rows[3] = rows[0]  # equal rows are stored once
    ids, mask = batch(rows)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = kvant.Cache(model, recipe).generate(model, ids, mask, **options)
    states = PromptStates(model, rows)
    found = [states.of(range(4))[i] for i in range(4)]
    cache = kvant.Cache(model, recipe)
    cache.fill(ids, mask, padded(found))
    assert cache.state.lengths == [70, 9, 41, 70]
    first = torch.stack([state.logits for state in found]).argmax(-1, keepdim=True)
    assert torch.equal(first, expected[:, 70:71])
    more = torch.nn.functional.pad(mask, (0, 1), value=1)
    got = cache.generate(model, torch.cat((ids, first), 1), more, **{**options, "max_new_tokens": 23})
    assert cache.reused == 70
    assert torch.equal(got, expected)


def test_what_cannot_be_filled_is_refused_and_leaves_nothing() -> None:
    model = make_model("llama")
    rows = ragged()
    ids, mask = batch(rows)
    layers = list(padded([PromptStates(model, rows).of([i])[i] for i in range(4)]))
    with pytest.raises(ValueError, match="squat needs the prompt's queries"):
        kvant.Cache(model, "squat").fill(ids, mask, layers)
    cache = kvant.Cache(model, "int8")
    with pytest.raises(ValueError, match="expected keys and values of 3 layers, got those of 2"):
        cache.fill(ids, mask, layers[:2])
    with pytest.raises(ValueError, match=r"tokens of shape \[4, 69\]"):
        cache.fill(ids[:, 1:], mask[:, 1:], layers)
    with pytest.raises(ValueError, match="for layer 3"):
        cache.fill(ids, mask, [*layers, layers[0]])
    assert cache.state.lengths == [] and cache.nbytes_used == 0
    cache.fill(ids, mask, layers)
    with pytest.raises(ValueError, match="the cache holds 4 sequences: reset it first"):
        cache.fill(ids, mask, layers)


class Words:
    """A tokenizer of numbers written in words of digits."""

    chat_template = None
    eos_token_id, pad_token_id = 7, 0

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split() if word.isdigit()]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("recipe", [None, "full", "kvant-like"])
def test_answers_do_not_depend_on_who_prefilled(recipe: str | None, tmp_path: Any) -> None:
    model = make_model("qwen2")
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}')
    questions = [Question(str(i), " ".join(map(str, row)), ("1",), 6 + i) for i, row in enumerate(ragged())]
    prompts, task = Prompts(Words(), questions), OwnQuestions(path=str(path))
    name = "int4:sink=2,recent=8,zero=float" if recipe == "kvant-like" else recipe
    make = None if name is None else lambda: kvant.Cache(model, name)
    counted = []
    heard: list[tuple[int, int]] = []
    for states in (None, PromptStates(model, prompts.ids), PromptStates(model, prompts.ids, budget=0)):
        found = ask(
            model,
            prompts,
            task,
            make,
            batch=3,
            sampling=Sampling(),
            states=states,
            progress=lambda *at: heard.append(at),
        )
        counted.append([(a.question, a.text, a.tokens, a.length) for a in found])
    assert counted[0] == counted[1] == counted[2]
    assert make is not None or model.config._attn_implementation == "sdpa"
    assert {total for _, total in heard} == {6 + 7 + 8 + 9}
    assert heard[0][0] == 0 and heard[-1][0] == 30 and any(0 < done < 21 for done, _ in heard), "within a batch, too"
    assert [length for *_, length in counted[0]] == [70, 9, 41, 70]


@pytest.mark.parametrize("family", ["qwen2", "mistral-sliding"])
def test_the_full_cache_of_a_padded_batch_is_not_repeated_for_every_query_head(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    ids, mask = batch(ragged())
    sdpa, outputs, key_heads = torch.nn.functional.scaled_dot_product_attention, {}, {}
    for attention in ("sdpa", ATTENTION):
        seen: set[int] = set()

        def recorded(query: Any, key: Any, *args: Any, seen: set[int] = seen, **options: Any) -> Any:
            seen.add(key.shape[1])
            return sdpa(query, key, *args, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
        model.set_attn_implementation(attention)
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            steps = [model(ids[:, :-2], attention_mask=mask[:, :-2], past_key_values=cache).logits[mask[:, :-2] > 0]]
            for end in (ids.shape[1] - 1, ids.shape[1]):
                new = ids[:, end - 1 : end]
                steps.append(model(new, attention_mask=mask[:, :end], past_key_values=cache).logits[:, 0])
        outputs[attention], key_heads[attention] = torch.cat(steps), seen
    torch.testing.assert_close(outputs[ATTENTION], outputs["sdpa"], rtol=1e-5, atol=1e-5)
    assert key_heads[ATTENTION] == {model.config.num_key_value_heads}
    assert model.config.num_attention_heads in key_heads["sdpa"]  # as transformers does, in some of its steps at least


def test_a_prompt_is_prefilled_once_within_the_budget() -> None:
    model = make_model("llama")
    rows, calls = ragged(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(1), with_kwargs=True)
    states = PromptStates(model, rows)
    one = states.of([0, 1, 2, 3])
    two = states.of([2, 0])
    assert len(calls) == 1 and two[2] is one[2]
    cache = DynamicCache()
    with torch.inference_mode():
        logits = model(torch.tensor([rows[2]]), past_key_values=cache).logits
    torch.testing.assert_close(one[2].logits, logits[0, -1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one[2].keys_values[1, 0], cache.layers[1].keys[0], rtol=1e-4, atol=1e-4)
    nothing = PromptStates(model, rows, budget=one[1].nbytes)  # room for the shortest prompt alone
    nothing.of([0, 1, 2, 3])
    before = len(calls)
    nothing.of([1])
    assert len(calls) == before
    nothing.of([0])
    assert len(calls) == before + 1
