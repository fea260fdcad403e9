"""Finding a calibrated recipe's artifact, or making it: for commands that serve or measure recipes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.common import read_text, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvant.artifact import Artifact
    from kvant.recipe import Recipe


def add_artifact_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--artifact",
        action="append",
        default=[],
        metavar="DIR",
        help="what kvant calibrate wrote; may be repeated (default: a kept one, or one is made and kept)",
    )
    parser.add_argument(
        "--calibration-text", metavar="FILE", help="text for an artifact that has to be made (default: the model's own)"
    )


def artifacts_for(
    model: Any, tokenizer: Any, chosen: Sequence[Recipe], args: argparse.Namespace
) -> Mapping[str, Artifact | None]:
    """An artifact for every recipe, by name; None where it needs none. One that was given and fits is taken, then one that was
    kept; what is still missing is calibrated, said aloud, and kept."""
    from kvant.artifact import Artifact
    from kvant.calibrate.kept import kept, kept_at
    from kvant.calibrate.run import calibrate_all
    from kvant.cli.calibrate import stages
    from kvant.engines.fingerprint import fingerprint
    from kvant.engines.hf import ModelShape

    given = [Artifact.load(path) for path in args.artifact]
    shape = ModelShape.of(model)
    found: dict[str, Artifact | None] = {}
    missing: dict[Path, Recipe] = {}
    named = fingerprint(model) if any(recipe.calibrated for recipe in chosen) else ""
    for recipe in chosen:
        if not recipe.calibrated:
            found[recipe.name] = None
            continue
        fitting = _first_that_fits(given, recipe, shape, named)
        path = kept_at(named, recipe)
        if fitting is not None:
            found[recipe.name] = fitting
        elif args.calibration_text is None and (old := kept(named, recipe)) is not None:
            found[recipe.name] = old
        else:
            missing.setdefault(path, recipe)
    if missing:
        text = None if args.calibration_text is None else read_text(args.calibration_text, "--calibration-text")
        source = "text that the model writes itself" if text is None else args.calibration_text
        say(f"no artifact for {', '.join(recipe.name for recipe in missing.values())}: calibrating on {source}")
        with stages() as progress:
            made = calibrate_all(model, tokenizer, list(missing.values()), text, progress=progress)
        for path, artifact in zip(missing, made, strict=True):
            artifact.save(path)
        say(f"kept in {next(iter(missing)).parent}")
        for recipe in chosen:
            if recipe.name not in found:
                found[recipe.name] = made[list(missing).index(kept_at(named, recipe))]
    return found


def _first_that_fits(given: Sequence[Artifact], recipe: Recipe, shape: Any, named: str) -> Artifact | None:
    """The first of the given artifacts that a recipe can use; if there is but one recipe's worth, its refusal is the user's."""
    refusals = []
    for artifact in given:
        try:
            artifact.check(recipe, len(shape.layers), shape.heads, shape.head_dim, named)
        except ValueError as error:
            refusals.append(str(error))
        else:
            return artifact
    if refusals:
        raise ValueError(f"--artifact: none fits recipe {recipe.name}: {'; '.join(refusals)}")
    return None
