"""A real model: SmolLM2-135M through the packed cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import kvant
from kvant.eval import Segments, evaluate

pytestmark = pytest.mark.model

PROMPTS = [
    "Why is the sky blue?",
    "Recite the days of the week and the months of the year.",
    "Write a Python function that returns the factorial of a number.",
    "What is photosynthesis?",
    "Who wrote Romeo and Juliet, and what is it about?",
]
WEEK = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, "
CERTAIN = [
    "Recite the days of the week and the months of the year.",
    "Count from 1 to 100.",
    "Count from 10 to 60.",
    "Count from 1 to 30 and write the square of each number.",
    f"Continue the list: {WEEK}{WEEK}Monday,",
]


def ask(tokenizer: Any, text: str) -> torch.Tensor:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


class Answer(NamedTuple):
    """64 greedy tokens after a prompt, from transformers' own cache."""

    prompt: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor  # [64, words]
    margins: torch.Tensor  # how far the token lies before the next best, in nats


def answer(model: Any, tokenizer: Any, text: str, cache: object = None) -> Answer:
    ids = ask(tokenizer, text)
    options = {} if cache is None else {"past_key_values": cache}
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=64,
        min_new_tokens=64,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    best = torch.cat(found.scores).topk(2).values
    return Answer(ids, found.sequences[0, ids.shape[1] :], torch.cat(found.logits), best[:, 0] - best[:, 1])


def test_full_gives_the_logits_of_transformers_own_cache(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = ask(tokenizer, " ".join(PROMPTS))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        cache = kvant.Cache(model, "full")
        parts = [
            model(ids[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 30), (30, 31), (31, 50), (50, ids.shape[1]))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_int8_answers_as_the_full_cache_does(smollm2: tuple[Any, Any]) -> None:
    """Where the full cache's answer is no matter of luck: 8-bit codes move these logits by 0.05 nats or so, and which way
    they move them hangs on the last bit of what is coded. So the prompts are those whose 64 tokens all have a wide margin."""
    equal = 0
    for text in CERTAIN:
        expected = answer(*smollm2, text)
        assert expected.margins.min() > 0.3
        equal += answer(*smollm2, text, kvant.Cache(smollm2[0], "int8")).tokens.equal(expected.tokens)
    assert equal >= 4


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", None])
def test_int8_parts_from_the_full_cache_at_near_ties_alone(
    smollm2: tuple[Any, Any], implementation: str | None
) -> None:
    """By whatever the operations are done. The tokens are the full cache's own, one at a time."""
    model, tokenizer = smollm2
    distances, parted = [], []
    for text in PROMPTS:
        expected = answer(model, tokenizer, text)
        cache = kvant.Cache(model, "int8", implementation=implementation)
        with torch.inference_mode():
            found = [model(expected.prompt, past_key_values=cache).logits[0, -1:]]
            found += [model(token[None, None], past_key_values=cache).logits[0] for token in expected.tokens[:-1]]
        here, there = expected.logits.log_softmax(-1), torch.cat(found).log_softmax(-1)
        distances.append((here.exp() * (here - there)).sum(-1))
        best = here.topk(2).values
        parted.append((best[:, 0] - best[:, 1])[here.argmax(-1) != there.argmax(-1)])
    assert torch.cat(distances).mean() < 1e-3
    assert len(torch.cat(parted)) <= 0.03 * 64 * len(PROMPTS)
    assert bool((torch.cat(parted) < 0.3).all())


@pytest.mark.slow
def test_the_order_of_the_recipes(smollm2: tuple[Any, Any]) -> None:
    """On this repository's own prose; docs/results.md has the figures on a real text."""
    model, tokenizer = smollm2
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    segments = Segments.over(tokenizer(text, verbose=False)["input_ids"], context=384, tokens=256, prompt=256)
    names = ["int8", "saw-int4", "int4", "int2:sink=4,recent=64", "int2"]
    results = evaluate(model, [kvant.recipe(name) for name in names], segments, chunk=16)
    kl = [result.kl for result in results]
    assert kl == sorted(kl), dict(zip(names, kl, strict=True))
    assert kl[0] < 0.01
    assert kl[-1] > 0.5
