"""Task scores of recipes beside the full cache's, on the same questions.

The full cache is transformers' own, and runs twice with different batch sizes: a different batch adds numbers in another order,
and an answer that depends on a near tie changes. The difference between these two runs is noise of the arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvant.artifact import Artifact
from kvant.engines.fingerprint import fingerprint
from kvant.engines.hf import Cache
from kvant.engines.hybrid import HybridCache, cache_for
from kvant.eval.asking import Answer, Journal, Prompts, Sampling, ask
from kvant.eval.paired import Comparison, compare
from kvant.eval.prompt_states import PromptStates
from kvant.eval.tasks import Task, digest
from kvant.layouts import Layouts
from kvant.recipe import Recipe
from kvant.shape import ModelShape
from kvant.version import VERSION

FULL, AGAIN = "full cache", "full cache again"


@dataclasses.dataclass(frozen=True)
class Score:
    """What one cache scored in one task; field names are those of `kvant eval --task --json`."""

    task: str
    recipe: str
    batch: int
    score: float
    difference: float  # from the first run of the full cache
    half: float | None  # of the difference's 95 % interval
    wins: int
    losses: int
    questions: int
    tokens: int  # generated
    bits: float  # per element at the mean length of a sequence, windows included
    answers: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One cache that answers all questions: a recipe, or the full cache where `recipe` is None."""

    label: str
    recipe: Recipe | None
    batch: int


def runs_of(recipes: Sequence[Recipe], batch: int) -> list[Run]:
    """The full cache twice, then the recipes."""
    again = max(1, batch // 2) if batch > 1 else 2
    return [Run(FULL, None, batch), Run(AGAIN, None, again), *(Run(recipe.name, recipe, batch) for recipe in recipes)]


def score_task(
    model: Any,
    prompts: Prompts,
    task: Task,
    recipes: Sequence[Recipe],
    artifacts: Mapping[str, Artifact | None],
    *,
    batch: int = 8,
    sampling: Sampling,
    graph: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    say: Callable[[str], None] = lambda text: None,
    done: Callable[[Score], None] = lambda score: None,
) -> list[Score]:
    """A row for every run. `done` is called with each when it is complete. Stored answers of an interrupted call are
    used. A hybrid model reads prompts for every run anew, and decodes without graphs: its other layers have states."""
    out: list[Score] = []
    full: list[float] = []
    journals: list[Journal] = []
    hybrid = ModelShape.of(model, hybrid=True).hybrid
    graph = graph and not hybrid
    states = None if hybrid else PromptStates(model, prompts.ids)
    named, asked, read = fingerprint(model), digest(prompts.questions), prompts.digest
    for run in runs_of(recipes, batch):
        artifact = None if run.recipe is None else artifacts[run.recipe.name]
        decides = [
            *(
                VERSION,
                task.label,
                asked,
                read,
                named,
                str(model.dtype),
                model.device.type,
                run.label,
                run.batch,
                graph,
            ),
            "" if run.recipe is None else run.recipe.digest,
            "" if artifact is None else artifact.digest,
            dataclasses.asdict(sampling),
        ]
        journals.append(Journal(decides))
        answers = ask(
            model,
            prompts,
            task,
            None if run.recipe is None else _maker(model, run.recipe, artifact),
            batch=run.batch,
            sampling=sampling,
            states=None if run.recipe is not None and run.recipe.wants_queries else states,
            graph=graph,
            journal=journals[-1],
            progress=lambda n, total, stage=f"{task.label}, {run.label}": progress(stage, n, total),  # type: ignore[misc]
            say=say,
        )
        scores = by_question(answers, sampling.samples)
        full = full or scores
        out.append(_row(model, task, run, answers, compare(scores, full)))
        done(out[-1])
    for journal in journals:
        journal.remove()
    return out


def by_question(answers: Sequence[Answer], samples: int) -> list[float]:
    """The mean score of every question's samples. Answers come one sample of all questions after another."""
    count = len(answers) // samples
    return [sum(answers[i + s * count].score for s in range(samples)) / samples for i in range(count)]


def _maker(model: Any, recipe: Recipe, artifact: Artifact | None) -> Callable[[], Cache | HybridCache]:
    return lambda: cache_for(model, recipe, artifact=artifact)


def _row(model: Any, task: Task, run: Run, answers: Sequence[Answer], found: Comparison) -> Score:
    tokens = sum(answer.tokens for answer in answers)
    length = max(1, round(sum(answer.length + answer.tokens for answer in answers) / len(answers)))
    bits = 16.0
    if run.recipe is not None:
        shape = ModelShape.of(model, hybrid=True).packed
        layouts = Layouts.of(run.recipe, len(shape.layers), shape.heads, shape.head_dim, device=model.device)
        bits = layouts.bits_per_element(length)
    return Score(
        task.label,
        run.label,
        run.batch,
        found.score,
        found.difference,
        found.half,
        found.wins,
        found.losses,
        questions=len({answer.question for answer in answers}),
        tokens=tokens,
        bits=bits,
        answers=[dataclasses.asdict(answer) for answer in answers],
    )
