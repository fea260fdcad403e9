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
import time
from pathlib import Path
from typing import Any

import torch

from kvant import models, recipes
from kvant.cli.common import say, write_json
from kvant.engines.hf import Cache
from kvant.eval.asking import Prompts, Sampling, ask
from kvant.eval.check import examine
from kvant.eval.tasks.gsm8k import GSM8K, last_number

RECIPES = [
    *("full", "int8", "kvant-4-fast", "kvant-2", "kivi-k4v4", "kvant-4-fast:k.bits=3", "kvant-4-fast:v.bits=2"),
    *("kvant-4-fast:bits=3", "kvant-2:recent=0", "kivi-k2v2", "kvant-2:sink=0,recent=0"),
    *("kvant-2:k.bits=2/2/0,recent=0", "int8:v.bits=2", "kvant-4-fast:k.bits=2", "kvant-4-fast:bits=2"),
    *("int8:k.bits=4", "saw-int4-kv", "int4", "saw-int4", "turboquant-4"),
]


def measure(model: Any, prompts: Prompts, task: GSM8K, name: str, args: Any) -> dict[str, Any]:
    """One row: the recipe's verdict and its score."""
    recipe = recipes.get(name)
    begin = time.perf_counter()
    checked = examine(model, prompts.tokenizer, [recipe], fit=True)
    (found,) = checked.verdicts
    checking = time.perf_counter() - begin
    begin = time.perf_counter()
    artifact = checked.artifacts[recipe.name]

    def make_cache() -> Cache:
        return Cache(model, recipe, artifact=artifact)

    found_answers = ask(
        model, prompts, task, make_cache, batch=args.batch, sampling=Sampling(), graph=args.graph, say=say
    )
    answers = [answer.text for answer in found_answers]
    numbers = [last_number(answer) for answer in answers]
    right = [answer.score == 1.0 for answer in found_answers]
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
    task = GSM8K(path=args.questions, new_tokens=args.max_new_tokens)
    questions = task.questions(args.limit, 0, len)
    model, tokenizer = models.load(args.model, args.dtype, args.device, say)
    prompts = Prompts(tokenizer, questions)
    data: dict[str, Any] = {"model": args.model, "max_new_tokens": args.max_new_tokens, "rows": []}
    if Path(args.out).exists():
        data = json.loads(Path(args.out).read_text())
    for name in names:
        if any(row["recipe"] == name and row["questions"] == len(questions) for row in data["rows"]):
            continue
        row = measure(model, prompts, task, name, args)
        data["rows"] = [old for old in data["rows"] if old["recipe"] != name] + [row]
        write_json(args.out, data)
        kl, top1, score = row["kl"], row["top1"], row["gsm8k"]
        say(f"{name}: KL {kl:.4f}, top-1 {top1:.1%}, GSM8K {score:.1%}, {row['check_seconds']} + {row['seconds']} s")
    print(table(data["rows"]))


if __name__ == "__main__":
    main()
