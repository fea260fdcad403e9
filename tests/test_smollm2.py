"""A real model: SmolLM2-135M through the packed cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant.eval import Windows, evaluate

pytestmark = pytest.mark.model

PROMPTS = [
    "Why is the sky blue?",
    "Recite the days of the week and the months of the year.",
    "Write a Python function that returns the factorial of a number.",
    "What is photosynthesis?",
    "Who wrote Romeo and Juliet, and what is it about?",
]


def ask(tokenizer: Any, text: str) -> torch.Tensor:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


@pytest.fixture(scope="module")
def answers(smollm2: tuple[Any, Any]) -> list[list[int]]:
    """64 greedy tokens of each prompt from transformers' own cache."""
    model, tokenizer = smollm2
    out = []
    for text in PROMPTS:
        ids = ask(tokenizer, text)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64)
        out.append(found[0, ids.shape[1] :].tolist())
    return out


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


def test_int8_answers_as_the_full_cache_does(smollm2: tuple[Any, Any], answers: list[list[int]]) -> None:
    model, tokenizer = smollm2
    equal = 0
    for text, expected in zip(PROMPTS, answers, strict=True):
        ids = ask(tokenizer, text)
        cache = kvant.Cache(model, "int8")
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=64,
            min_new_tokens=64,
            past_key_values=cache,
        )
        equal += found[0, ids.shape[1] :].tolist() == expected
    assert equal >= 4


def test_the_order_of_the_recipes(smollm2: tuple[Any, Any]) -> None:
    """On this repository's own prose; docs/results.md has the figures on a real text."""
    model, tokenizer = smollm2
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    windows = Windows.over(tokenizer(text, verbose=False)["input_ids"], context=384, tokens=256, prompt=256)
    names = ["int8", "saw-int4", "int4", "int2:sink=4,recent=64", "int2"]
    results = evaluate(model, [kvant.recipe(name) for name in names], windows, chunk=16)
    kl = [result.kl for result in results]
    assert kl == sorted(kl), dict(zip(names, kl, strict=True))
    assert kl[0] < 0.01
    assert kl[-1] > 0.5
