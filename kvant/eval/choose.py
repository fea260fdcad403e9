"""Chooses a recipe where none is named, and refuses unfit ones: for commands that generate or serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvant import recipes
from kvant.artifact import Artifact
from kvant.calibrate.artifact_paths import cached
from kvant.calibrate.builtin import fits_in_seconds
from kvant.engines.fingerprint import fingerprint
from kvant.eval.check import examine
from kvant.progress import Progress
from kvant.recipe import Recipe
from kvant.verdicts import Unfit, Verdict, refuse_unfit, verdict

Say = Callable[[str], None]
Refusal = Callable[[Recipe], str | None]


def nothing_refused(recipe: Recipe) -> str | None:
    """No refusal: every recipe can be served."""
    return None


@dataclasses.dataclass(frozen=True)
class Choice:
    """The recipe that is used where none is named, its artifact, and the reason."""

    recipe: Recipe
    artifact: Artifact | None
    verdict: Verdict
    reason: str


def cached_choice(named: str, refusal: Refusal = nothing_refused) -> Choice | None:
    """As `choose_recipe`, from stored verdicts on a model with this fingerprint; None where something has to be measured."""
    tried: list[Verdict] = []
    later = ""
    for recipe in map(recipes.get, recipes.LADDER):
        if refusal(recipe) is not None:
            continue
        artifact = cached(named, recipe) if recipe.calibrated else None
        if recipe.calibrated and artifact is None:
            if fits_in_seconds(recipe):
                return None
            later = later or recipe.name
            continue
        found = verdict(named, recipe, "" if artifact is None else artifact.digest)
        if found is None:
            return None
        if found.word == "good":
            return Choice(recipe, artifact, found, _reason(found, tried, later))
        tried.append(found)
    return _least_bad(tried, lambda recipe: cached(named, recipe))


def choose_recipe(
    model: Any,
    tokenizer: Any,
    say: Say | None = None,
    *,
    refusal: Refusal = nothing_refused,
    progress: Progress | None = None,
) -> Choice:
    """The best recipe that is good for a model and needs no long fit: the first good one of `recipes.LADDER`, which has fewest
    bits first. One that needs a long fit is used only where its artifact is cached. A recipe without a verdict is checked now,
    and the verdict is stored. `refusal` says why a recipe cannot be served where it is wanted."""
    named = fingerprint(model)
    tried: list[Verdict] = []
    artifacts: dict[str, Artifact | None] = {}  # which may not be cached, where the disk is full
    later = ""
    for recipe in map(recipes.get, recipes.LADDER):
        if refusal(recipe) is not None:
            continue
        if recipe.calibrated and not fits_in_seconds(recipe) and cached(named, recipe) is None:
            later = later or recipe.name
            continue
        if say is not None and verdict_of(model, tokenizer, recipe, measure=False) is None:
            say(f"checking once whether {recipe.name} fits this model")
        checked = examine(model, tokenizer, [recipe], again=False, progress=progress)
        (found,) = checked.verdicts
        if found.word == "good":
            return Choice(recipe, checked.artifacts[recipe.name], found, _reason(found, tried, later))
        tried.append(found)
        artifacts |= checked.artifacts
    return _least_bad(tried, lambda recipe: artifacts[recipe.name])


def _least_bad(tried: Sequence[Verdict], artifact_of: Callable[[Recipe], Artifact | None]) -> Choice:
    """The choice where no recipe is good: the best usable one. Raises where there is none."""
    if not tried:
        raise ValueError(f"none of {', '.join(recipes.LADDER)} can be served here: name a recipe")
    best = min(tried, key=lambda each: each.kl if each.word == "usable" else float("inf"))
    refuse_unfit(best, "naming it with --recipe and --unfit-anyway", "none of those that were tried")
    recipe = recipes.get(best.recipe)
    return Choice(recipe, artifact_of(recipe) if recipe.calibrated else None, best, f"{best}; none is good")


def _reason(found: Verdict, before: Sequence[Verdict], fitted_later: str) -> str:
    text = f"{found}, {found.bpe:.2f} bits per number"
    if before:
        text += f"; better than {', '.join(f'{each.recipe} ({each.word}, KL {each.kl:.2f})' for each in before)}"
    if fitted_later:
        text += f"; {fitted_later} has fewer bits, once it is fitted: kvant check --recipe {fitted_later} --fit"
    return text


def verdict_of(
    model: Any, tokenizer: Any, recipe: Recipe, artifact: Artifact | None = None, *, measure: bool = True
) -> Verdict | None:
    """The verdict on a recipe with an artifact: a stored one, or one that is measured now and stored."""
    if recipe.calibrated and artifact is None:
        artifact = cached(fingerprint(model), recipe)
        if artifact is None and not measure:
            return None
    old = verdict(fingerprint(model), recipe, "" if artifact is None else artifact.digest)
    if old is not None or not measure:
        return old
    checked = examine(model, tokenizer, [recipe], artifacts=[] if artifact is None else [artifact])
    return checked.verdicts[0] if checked.verdicts else None


def require_fit(
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    artifact: Artifact | None,
    anyway: str,
    say: Say | None = None,
    *,
    refusal: Refusal = nothing_refused,
) -> Verdict:
    """Checks a recipe once, and raises `Unfit` where it is unfit, with the recipes that fit."""
    if say is not None and verdict_of(model, tokenizer, recipe, artifact, measure=False) is None:
        say(f"checking once whether {recipe.name} fits this model")
    found = verdict_of(model, tokenizer, recipe, artifact)
    assert found is not None, recipe.name
    if found.word == "unfit":
        try:
            fitting = str(choose_recipe(model, tokenizer, say, refusal=refusal).verdict)
        except Unfit:
            fitting = ""
        refuse_unfit(found, anyway, fitting)
    return found
