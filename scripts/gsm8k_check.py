"""What a verdict of kvant check is worth: for every recipe its KL and top-1 on the built-in text, and its score on GSM8K.

    python scripts/gsm8k_check.py --model DIR --questions gsm8k.test.jsonl --device cuda --limit 300 --out rows.json
    python scripts/gsm8k_check.py --table rows.json            the rows as a Markdown table, by KL

A question is asked once, in the model's chat template, zero-shot, greedy, through kvant.Cache; an answer is right if its last
number is that of the solution. Recipes that are fitted offline are fitted on kvant's own built-in text. The output is written
after every recipe, and rows that it has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import torch

from kvant import models, recipes
from kvant.cli.common import say, write_json
from kvant.engines import graphs
from kvant.engines.hf import Cache
from kvant.eval.check import examine

RECIPES = [
    *("full", "int8", "kvant-4", "kvant-2", "kivi-k4v4", "kvant-4:k.bits=3", "kvant-4:v.bits=2", "kvant-4:bits=3"),
    *("kvant-2:recent=0", "kivi-k2v2", "kvant-2:sink=0,recent=0", "kvant-2:k.bits=2/2/0,recent=0", "int8:v.bits=2"),
    *("kvant-4:k.bits=2", "kvant-4:bits=2", "int8:k.bits=4", "saw-int4-kv", "int4", "saw-int4", "turboquant-4"),
]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def read_questions(path: str, limit: int | None) -> list[tuple[str, float]]:
    """Questions and the numbers that answer them."""
    out = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.strip():
            row = json.loads(line)
            number = last_number(row["answer"].split("####")[-1])
            if number is None:
                raise ValueError(f"--questions {path!r}: a solution has no number: {row['answer'][-60:]!r}")
            out.append((row["question"], number))
    return out[:limit]


def encode(tokenizer: Any, questions: list[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of prompts, padded on the left."""
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in questions
    ]
    width = max(map(len, rows))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@torch.inference_mode()
def ask(
    model: Any, tokenizer: Any, recipe: Any, artifact: Any, questions: list[str], args: argparse.Namespace
) -> list[str]:
    """Answers to all questions, as many at a time as there is memory for."""
    answers: list[str] = []
    batch = args.batch
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    while len(answers) < len(questions):
        ids, mask = encode(tokenizer, questions[len(answers) : len(answers) + batch], model.device)
        try:
            cache = Cache(model, recipe, artifact=artifact)
            if args.graph and graphs.refuse(model, cache) is None:
                out = cache.generate(model, ids, mask, graph=True, **options)
            else:
                out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
            torch.cuda.empty_cache()
            say(f"out of memory: {batch} questions at a time")
            continue
        answers += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        del cache
    return answers


def measure(model: Any, tokenizer: Any, name: str, questions: list[tuple[str, float]], args: Any) -> dict[str, Any]:
    """One row: the recipe's verdict and its score."""
    recipe = recipes.get(name)
    begin = time.perf_counter()
    checked = examine(model, tokenizer, [recipe], fit=True)
    (found,) = checked.verdicts
    checking = time.perf_counter() - begin
    begin = time.perf_counter()
    answers = ask(model, tokenizer, recipe, checked.artifacts[recipe.name], [q for q, _ in questions], args)
    numbers = [last_number(answer) for answer in answers]
    right = [number == expected for number, (_, expected) in zip(numbers, questions, strict=True)]
    share = sum(right) / len(right)
    return {
        "recipe": name,
        "bpe": found.bpe,
        "kl": found.kl,
        "kl_se": found.kl_se,
        "top1": found.top1,
        "packed": found.packed,
        "noise": found.noise,
        "verdict": found.word,
        "why": found.why,
        "gsm8k": share,
        "gsm8k_se": math.sqrt(share * (1 - share) / len(right)),
        "questions": len(right),
        "dtype": found.dtype,
        "check_seconds": round(checking, 1),
        "seconds": round(time.perf_counter() - begin, 1),
        "answers": numbers,
        "right": [int(each) for each in right],
        "first_answer": answers[0][:400],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| recipe | bits | KL | top-1 | verdict | GSM8K, % |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row["kl"] if row["kl"] is not None else math.inf):
        kl = "-" if row["kl"] is None else f"{max(row['kl'], 0.0):.4f}"
        score = f"{100 * row['gsm8k']:.1f} ± {100 * row['gsm8k_se']:.1f}"
        lines.append(
            f"| `{row['recipe']}` | {row['bpe']:.2f} | {kl} | {row['top1']:.1%} | {row['verdict']} | {score} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--questions", metavar="FILE", help="lines of JSON with question and answer")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--recipe", default=",".join(RECIPES))
    parser.add_argument("--batch", type=int, default=300, help="questions at a time; halved where memory is short")
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--graph", action="store_true", help="decode in a CUDA graph where the recipe can")
    parser.add_argument("--out", metavar="FILE", default="gsm8k_check.json")
    parser.add_argument("--table", metavar="FILE", help="only print the rows of this file")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(Path(args.table).read_text())["rows"]))
        return
    if args.questions is None:
        parser.error("--questions is missing")
    names = recipes.split(args.recipe)
    for name in names:
        recipes.get(name)  # a mistake shows before the work starts
    questions = read_questions(args.questions, args.limit)
    model, tokenizer = models.load(args.model, args.dtype, args.device, say)
    data: dict[str, Any] = {"model": args.model, "max_new_tokens": args.max_new_tokens, "rows": []}
    if Path(args.out).exists():
        data = json.loads(Path(args.out).read_text())
    for name in names:
        if any(row["recipe"] == name and row["questions"] == len(questions) for row in data["rows"]):
            continue
        row = measure(model, tokenizer, name, questions, args)
        data["rows"] = [old for old in data["rows"] if old["recipe"] != name] + [row]
        write_json(args.out, data)
        kl, top1, score = row["kl"], row["top1"], row["gsm8k"]
        say(f"{name}: KL {kl:.4f}, top-1 {top1:.1%}, GSM8K {score:.1%}, {row['check_seconds']} + {row['seconds']} s")
    print(table(data["rows"]))


if __name__ == "__main__":
    main()
