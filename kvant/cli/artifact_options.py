"""Finds the artifact of a calibrated recipe, or fits it: for commands that serve or measure recipes."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.common import read_source, say

if TYPE_CHECKING:
    from kvant.artifact import Artifact
    from kvant.chats import Chats
    from kvant.recipe import Recipe


def add_artifact_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--artifact",
        action="append",
        default=[],
        metavar="DIR",
        help="of kvant calibrate or tune (default: a cached one, or it is fitted now)",
    )
    parser.add_argument(
        "--calibration-text",
        metavar="FILE",
        help="text, or chats (.jsonl), to fit on (default: the built-in text)",
    )


def asked_recipes(args: argparse.Namespace) -> list[Recipe]:
    """The recipes that --recipe names, and those of --artifact that have a recipe for every layer: nothing else names these. Without
    --recipe, the recipes of all artifacts."""
    from kvant import recipes
    from kvant.artifact import Artifact
    from kvant.recipe import MixedRecipe

    found = [Artifact.load(path).recipe for path in args.artifact]
    if args.recipe is None:
        if not found:
            raise ValueError("give --recipe R, or --artifact DIR to take the artifact's recipe")
        chosen = found
    else:
        chosen = [recipes.get(name) for name in recipes.split(args.recipe)]
        chosen += [recipe for recipe in found if isinstance(recipe, MixedRecipe)]
    twice = next((name for name, count in Counter(recipe.name for recipe in chosen).items() if count > 1), None)
    if twice is not None and args.artifact:
        raise ValueError(f"two recipes are called {twice}: give one of their artifacts at a time")
    return chosen


def check_template(model: str, text: Any) -> None:
    """Refuses chats where the tokenizer of a model has no template for them, before the model is loaded."""
    from kvant.chats import Chats

    if isinstance(text, Chats):
        from kvant import models

        text.check(models.tokenizer_of(model, say))


def warn_of_few_tokens(made: Sequence[Artifact]) -> None:
    """Says in one line where artifacts that were just fitted had too little text."""
    import torch

    from kvant.calibrate.builtin import fewest_tokens, tokens_for

    cpu = torch.device("cpu")
    fewest = {artifact.recipe.name: fewest_tokens(artifact.recipe, artifact.head_dim) for artifact in made}
    poor = [each for each in made if each.source.get("tokens", math.inf) < fewest[each.recipe.name]]
    if poor:
        say(
            f"warning: {', '.join(each.recipe.name for each in poor)} had {min(each.source['tokens'] for each in poor)} tokens to be "
            f"fitted to; fewer than {max(fewest[each.recipe.name] for each in poor)} make a poor fit, "
            f"{max(tokens_for(each.recipe, cpu) for each in poor)} are recommended: give a longer text, or more --tokens of it"
        )


@dataclasses.dataclass(frozen=True)
class LocatedArtifact:
    """An artifact and its directory, which is None where the artifact could not be written to disk."""

    artifact: Artifact
    path: Path | None


def artifacts_for(
    model: Any, tokenizer: Any, chosen: Sequence[Recipe], args: argparse.Namespace
) -> Mapping[str, Artifact | None]:
    """An artifact for every recipe, by the recipe's name; None for a recipe that is not calibrated. In this order: an artifact
    given by --artifact that fits, a cached one, one that is fitted now (with a message on stderr) and cached."""
    from kvant.engines.fingerprint import fingerprint
    from kvant.engines.hf import ModelShape
    from kvant.recipe import MixedRecipe

    fitted = [recipe for recipe in chosen if recipe.calibrated]
    if args.artifact and not fitted and not any(isinstance(recipe, MixedRecipe) for recipe in chosen):
        raise ValueError(f"--artifact: {', '.join(recipe.name for recipe in chosen)} take no artifact")
    named = fingerprint(model) if fitted else ""
    found = find_or_make(named, ModelShape.of(model, hybrid=True), fitted, args, lambda: (model, tokenizer))
    return {recipe.name: found[recipe.name].artifact if recipe.calibrated else None for recipe in chosen}


def find_or_make(
    named: str, shape: Any, chosen: Sequence[Recipe], args: argparse.Namespace, load: Callable[[], tuple[Any, Any]]
) -> dict[str, LocatedArtifact]:
    """An artifact for every recipe, by the recipe's name. All recipes are calibrated. `named` is the model's fingerprint; `load`
    returns model and tokenizer, and is called only where something has to be fitted."""
    from kvant.artifact import Artifact
    from kvant.calibrate.artifact_paths import artifact_path, cached

    given = [(Artifact.load(path), Path(path)) for path in args.artifact]
    text = None if args.calibration_text is None else read_source(args.calibration_text, "--calibration-text")
    found: dict[str, LocatedArtifact] = {}
    missing: dict[Path, list[Recipe]] = {}
    for recipe in chosen:
        fitting = _first_that_fits(given, recipe, shape, named)
        path = artifact_path(named, recipe, text)
        if fitting is not None:
            found[recipe.name] = fitting
        elif (old := cached(named, recipe, text)) is not None:
            found[recipe.name] = LocatedArtifact(old, path)
        else:
            missing.setdefault(path, []).append(recipe)
    if missing:
        found |= _make(missing, text, args.calibration_text, load)
    return found


def _make(
    missing: Mapping[Path, list[Recipe]],
    text: str | Chats | None,
    source: str | None,
    load: Callable[[], tuple[Any, Any]],
) -> dict[str, LocatedArtifact]:
    """Fits the missing artifacts, by the directory in which they are cached. Recipes with the same directory share one fit."""
    from kvant import recipes
    from kvant.calibrate.run import calibrate_all
    from kvant.cli.common import stages

    names = ", ".join(recipe.name for alike in missing.values() for recipe in alike)
    say(f"no artifact for {names}: calibrating on {source or 'the built-in text'}")
    model, tokenizer = load()
    with stages() as progress:
        wanted = [recipes.as_fitted(alike[0]) for alike in missing.values()]
        made = calibrate_all(model, tokenizer, wanted, text, progress=progress)
    warn_of_few_tokens(made)
    found: dict[str, LocatedArtifact] = {}
    refused: OSError | None = None
    for (path, alike), artifact in zip(missing.items(), made, strict=True):
        place: Path | None = path
        try:
            artifact.save(path)
        except OSError as error:
            place, refused = None, error
        found |= {recipe.name: LocatedArtifact(artifact.serving(recipe), place) for recipe in alike}
    say(f"cached in {next(iter(missing)).parent}" if refused is None else f"not cached: {refused}")
    return found


def _first_that_fits(
    given: Sequence[tuple[Artifact, Path]], recipe: Recipe, shape: Any, named: str
) -> LocatedArtifact | None:
    """The first of the given artifacts that a recipe can use, or None where none was given. Raises where none of them fits."""
    from kvant.recipe import MixedRecipe

    refusals = []
    for artifact, path in given:
        if isinstance(artifact.recipe, MixedRecipe) != isinstance(recipe, MixedRecipe):
            continue  # an artifact with a recipe for every layer serves that alone
        try:
            artifact.check(recipe, len(shape.layers), shape.heads, shape.head_dim, named)
        except ValueError as error:
            refusals.append(str(error))
        else:
            return LocatedArtifact(artifact, path)
    if refusals:
        raise ValueError(f"--artifact: none fits recipe {recipe.name}: {'; '.join(refusals)}")
    return None
