"""Fits recipes on a text that comes with kvant. For a recipe that learns only means this takes seconds.

For other recipes a text of the kind that will be served gives a better fit; `kvant calibrate --text` takes one.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch

from kvant import passages
from kvant.artifact import Artifact
from kvant.calibrate.artifact_paths import artifact_path, cached
from kvant.calibrate.capture import Progress
from kvant.calibrate.run import calibrate
from kvant.engines.fingerprint import fingerprint
from kvant.recipe import Recipe
from kvant.transforms.affine_map import Mean

MEAN_TOKENS = 512  # tokens read to fit means; 256 give the same KL


def fits_in_seconds(recipe: Recipe) -> bool:
    """Whether a recipe learns only means, for which a few hundred tokens are enough."""
    parts = [part for stream in recipe.streams.values() for part in stream.parts.values() if part.calibrated]
    return bool(parts) and all(isinstance(part, Mean) for part in parts)


def cached_artifact(named: str, recipe: Recipe) -> Artifact | None:
    """A cached artifact, fitted on a text that the model wrote or on the built-in text; None where there is none."""
    return cached(named, recipe) or cached_builtin(named, recipe)


def cached_builtin(named: str, recipe: Recipe) -> Artifact | None:
    return cached(named, recipe, passages.source("fit"))


def builtin_path(named: str, recipe: Recipe) -> Path:
    """The directory of the artifact that was fitted on the built-in text."""
    return artifact_path(named, recipe, passages.source("fit"))


def fit_builtin(model: Any, tokenizer: Any, recipe: Recipe, progress: Progress | None = None) -> Artifact:
    """Fits a recipe on the built-in text, or on its first tokens where only means are learnt, and caches the artifact."""
    ids = torch.tensor(passages.encode(tokenizer, "fit"), dtype=torch.int32)
    ids = ids[:MEAN_TOKENS] if fits_in_seconds(recipe) else ids
    made = calibrate(model, tokenizer, recipe, ids, progress=progress)
    made = dataclasses.replace(made, source=made.source | {"text": "built in"})
    path = builtin_path(fingerprint(model), recipe)
    try:
        made.save(path)
    except OSError as error:
        warnings.warn(f"the artifact could not be cached in {path}: {error}", stacklevel=2)
    return made
