"""Artifacts that were made without being asked for: kept in the user's cache directory, so that a model is measured once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from kvant import models, recipes
from kvant.artifact import FILE, Artifact
from kvant.calibrate.run import calibrate, text_digest
from kvant.engines.fingerprint import fingerprint
from kvant.progress import Progress, default_progress
from kvant.recipe import Recipe
from kvant.version import VERSION


def root() -> Path:
    """The directory of all kept artifacts."""
    return models.cache_dir() / "artifacts"


def artifact_path(named: str, recipe: Recipe, text: str | torch.Tensor | None = None) -> Path:
    """Where an artifact is kept: by the model's fingerprint, by what decides the fit, by the version that fitted it, and by the
    text that it was fitted on, where one was given."""
    fits = hashlib.sha256(json.dumps([VERSION, recipe.fits], sort_keys=True).encode()).hexdigest()
    own = "" if text is None else f"-{text_digest(text)[:16]}"
    return root() / named[:16] / f"{fits[:16]}{own}"


def cached(named: str, recipe: Recipe, text: str | torch.Tensor | None = None) -> Artifact | None:
    """The artifact that was kept, as one of the recipe that is asked for."""
    path = artifact_path(named, recipe, text)
    return Artifact.load(path).serving(recipe) if (path / FILE).exists() else None


def artifact_for(
    model: Any,
    tokenizer: Any,
    recipe: str | Recipe = recipes.DEFAULT,
    text: str | torch.Tensor | None = None,
    *,
    progress: Progress | None = None,
) -> Artifact | None:
    """The artifact that a recipe needs for a model, or None where it needs none: one that was kept, or one that is made now and
    kept. That takes minutes, and seconds where a recipe learns only means (kvant-4), which a built-in text gives. `text` and
    `progress` are those of `calibrate`; without `progress`, it is shown on stderr. What was fitted on a text of one's own is kept
    apart, and found by the same text only."""
    recipe = recipes.get(recipe)
    if not recipe.calibrated:
        return None
    named = fingerprint(model)
    found = cached(named, recipe, text)
    if found is None and text is None:
        from kvant.calibrate import builtin  # which keeps its fits by this module

        found = builtin.cached_builtin(named, recipe)
        if found is None and builtin.fits_in_seconds(recipe):
            return builtin.fit_builtin(model, tokenizer, recipe, progress)
    if found is None:
        with default_progress() if progress is None else contextlib.nullcontext(progress) as shown:
            found = calibrate(model, tokenizer, recipe, text, progress=shown)
        path = artifact_path(named, recipe, text)
        try:
            found.save(path)
        except OSError as error:
            warnings.warn(
                f"the artifact could not be kept in {path} and serves this process alone: {error}", stacklevel=2
            )
    return found
