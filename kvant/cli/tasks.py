"""kvant eval --task: task scores of recipes and of the full cache, on the same questions."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvant.cli.artifact_options import artifacts_for, asked_recipes
from kvant.cli.common import (
    check_writable,
    load_model,
    nothing_packed,
    packed_tokens,
    print_table,
    say,
    stages,
    write_json,
)
from kvant.cli.html import shape_of, target_of

if TYPE_CHECKING:
    from kvant.eval.scoring import Score
    from kvant.recipe import Recipe


def add_task_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task",
        metavar="T[,...]",
        help="gsm8k, needle, needle-multikey, needle-multivalue, needle-multiquery, tracking, words, passage, passage-count, or your "
        "FILE.jsonl; options as in needle:length=8192",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="questions per task (default: all; 20 of a generated task)"
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per question (default 1)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0 is greedy (default)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of generated questions and of sampling")
    parser.add_argument("--no-graph", action="store_true", help="on a GPU: decode without CUDA graphs (slower)")


def run_tasks(args: argparse.Namespace) -> int:
    from kvant import models
    from kvant.eval import tasks
    from kvant.eval.asking import Prompts, Sampling
    from kvant.shape import context_of

    chosen = asked_recipes(args)
    wanted = [tasks.get(name) for name in tasks.split(args.task)]
    check_writable(args.json, "--json")
    page = target_of(args)
    if args.batch < 1 or (args.limit is not None and args.limit < 1):
        raise ValueError(f"--batch and --limit must be positive, got {args.batch} and {args.limit}")
    sampling = Sampling(args.samples, args.temperature, args.seed)
    config, tokenizer = models.config_of(args.model, say), models.tokenizer_of(args.model, say)
    limit = context_of(config)
    for task in wanted:
        if limit is not None and task.length > limit:
            raise ValueError(
                f"task {task.label}: its prompts take {task.length} tokens, and the model's context is {limit}"
            )

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    prompts = {}
    for task in wanted:
        prompts[task.label] = Prompts(tokenizer, task.questions(args.limit, args.seed, count))
        prompts[task.label].check(limit, task.label)
    model, tokenizer = load_model(args)
    from kvant.engines.hf import ModelShape
    from kvant.eval.scoring import score_task
    from kvant.layouts import Layouts

    shape = ModelShape.of(model, hybrid=True).packed
    for recipe in chosen:
        # refuses what the model cannot take, before the work starts
        Layouts.of(recipe, len(shape.layers), shape.heads, shape.head_dim)
    artifacts = artifacts_for(model, tokenizer, chosen, args)
    report: dict[str, Any] = {
        "model": args.model,
        "shape": shape_of(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "sampling": dataclasses.asdict(sampling),
        "scores": [],
    }

    def done(score: Score) -> None:
        report["scores"].append(dataclasses.asdict(score))
        if args.json:
            write_json(args.json, report)

    for task in wanted:
        with stages() as advance:
            found = score_task(
                model,
                prompts[task.label],
                task,
                chosen,
                artifacts,
                batch=args.batch,
                sampling=sampling,
                graph=model.device.type == "cuda" and not args.no_graph,
                progress=advance,
                say=say,
                done=done,
            )
        print_scores(found)
        print_lost(found, args.json)
        tell_what_is_not_packed(chosen, found)
        if page is not None:  # after every task: an interrupted run leaves a page of those that are complete
            page.write(report)
    return 0


def print_lost(scores: Sequence[Score], report: str | None, most: int = 20) -> None:
    """Names the questions that a recipe answered worse than the full cache did."""

    def sums(score: Score) -> Counter[str]:
        found: Counter[str] = Counter()
        for answer in score.answers:
            found[answer["question"]] += answer["score"]
        return found

    full = sums(scores[0])
    where = f"their answers are in {report}" if report else "--json FILE writes their answers"
    for score in scores[2:]:
        got = sums(score)
        lost = [
            name for name in dict.fromkeys(answer["question"] for answer in score.answers) if got[name] < full[name]
        ]
        if lost:
            more = f" and {len(lost) - most} more" if len(lost) > most else ""
            print(f"{score.recipe} lost questions {', '.join(lost[:most])}{more}; {where}")


def tell_what_is_not_packed(chosen: Sequence[Recipe], scores: Sequence[Score]) -> None:
    """Says so where no answer read anything packed: the recipe then has the full cache's score, and a window's bits."""
    by_name = {score.recipe: score for score in scores}
    for recipe in chosen:
        longest = max(answer["length"] + answer["tokens"] for answer in by_name[recipe.name].answers)
        if not packed_tokens(recipe, longest):
            say(f"{recipe.name}: {nothing_packed(recipe, longest)}; its score says nothing, use longer questions")


def print_scores(scores: list[Score]) -> None:
    """Prints the table of one task. Differences are in percentage points."""
    columns = [("recipe", "left"), ("bits", "right"), ("score, %", "right"), ("against full", "right")]
    columns += [("95 % interval", "right"), ("wins", "right"), ("losses", "right"), ("tokens", "right")]
    rows = []
    for i, s in enumerate(scores):
        interval = (
            "" if s.half is None else f"{100 * (s.difference - s.half):+.1f} to {100 * (s.difference + s.half):+.1f}"
        )
        compared = [f"{100 * s.difference:+.1f}", interval, str(s.wins), str(s.losses)] if i else [""] * 4
        rows.append([s.recipe, f"{s.bits:.2f}", f"{100 * s.score:.1f}", *compared, f"{s.tokens:,}"])
    notes = (
        f"the full cache runs twice, {scores[0].batch} and {scores[1].batch} questions at a time: their difference is noise\n"
        "bits with windows and partly filled pages at the mean length"
    )
    print_table(f"{scores[0].task}: {scores[0].questions} questions", columns, rows, notes)
