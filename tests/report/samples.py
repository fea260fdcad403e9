"""Results as `kvant eval --json` and `kvant bench attention --json` write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvant import recipes

SHAPE = {"layers": [None] * 30, "heads": 3, "head_dim": 64, "dtype": "float32"}
QUALITY = Path(__file__).parent.parent.parent / "results" / "smollm2-135m.json"
LAYERS, HEADS = 30, 3


def text_results() -> dict[str, Any]:
    """Every recipe on a text: the figures of docs/results.md."""
    measured = json.loads(QUALITY.read_text())["texts"]["prose"]
    known = set(recipes.names())
    entry = {"text": "wikitext2.test.txt", "kind": "text", "text_sha256": measured["sha256"]}
    entry |= {key: measured[key] for key in ("context", "prompt", "tokens")}
    entry["results"] = [each for each in measured["results"] if each["recipe"] in known]
    return {"model": "smollm2", "shape": SHAPE, "dtype": "float32", "chunk": 1, "offset": 0, "texts": [entry]}


def profile(scale: float) -> dict[str, Any]:
    heads = [[scale * (1 + layer + HEADS * head) / 100 for head in range(HEADS)] for layer in range(LAYERS)]
    by_length = [[scale * (1 + layer) / 50 for layer in range(LAYERS)] for _ in (512, 1024)]
    return {
        "heads": {"attention_kl": heads, "key_error": [[0.5 * e for e in row] for row in heads]},
        "layers": {},
        "lengths": [512, 1024],
        "by_length": {"attention_kl": by_length},
    }


def chat_results() -> dict[str, Any]:
    """Two texts, the second a chat with a profile of two recipes and a recipe that broke the model."""
    data = text_results()
    chat = {
        "text": "chats.jsonl",
        "kind": "chat",
        "text_sha256": "c" * 64,
        "chats": 20,
        "mean_length": 412,
        "tokens": 999,
    }
    results = [dict(each) for each in data["texts"][0]["results"] if each["recipe"] in ("kvant-2", "int4", "int2")]
    for each in results:
        if each["recipe"] == "int2":
            each["kl"] = float("nan")
        else:
            each["profile"] = profile(each["kl"])
    data["texts"].append({**chat, "results": results})
    return data


def score(
    task: str, recipe: str, points: float, difference: float, half: float | None = 0.02, **more: Any
) -> dict[str, Any]:
    row = {"task": task, "recipe": recipe, "batch": 8, "score": points, "difference": difference, "half": half}
    row |= {"wins": 1, "losses": 3, "questions": 100, "tokens": 12345, "bits": 4.5, "answers": []}
    return row | more


def task_results() -> dict[str, Any]:
    rows = [
        score("gsm8k", "full cache", 0.70, 0.0, 0.0, bits=16.0),
        score("gsm8k", "full cache again", 0.71, 0.01, 0.015, bits=16.0, batch=4),
        score("gsm8k", "kvant-2", 0.67, -0.03),
        score("gsm8k", "int4", 0.69, -0.01),
        score("needle:length=4096", "full cache", 1.0, 0.0, None, bits=16.0, questions=1),
        score("needle:length=4096", "full cache again", 1.0, 0.0, None, bits=16.0, questions=1),
        score("needle:length=4096", "kvant-2", 0.0, -1.0, None, questions=1),
    ]
    sampling = {"samples": 1, "temperature": 0.0, "seed": 0}
    return {
        "model": "smollm2",
        "shape": SHAPE,
        "dtype": "float32",
        "device": "cpu",
        "sampling": sampling,
        "scores": rows,
    }


def bench_results() -> dict[str, Any]:
    rows = []
    for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 128)):
        shape = {
            "batch": 1,
            "context": 4096,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": "float32",
        }
        for name, times in (("torch, flash", 1.0), ("kvant-2, folded", 4.5), ("int4", 3.25)):
            rows.append(
                {"name": name, "implementation": "cpu", "shape": shape, "seconds": 1e-3 / times, "times": times}
            )
    return {"work": "attention", "device": "a processor", "results": rows}
