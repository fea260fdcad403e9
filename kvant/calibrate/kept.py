"""Artifacts that were made without being asked for: kept in the user's cache directory, so that a model is measured once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvant import models, recipes
from kvant.artifact import FILE, Artifact
from kvant.calibrate.capture import Progress
from kvant.calibrate.run import calibrate
from kvant.engines.fingerprint import fingerprint
from kvant.recipe import Recipe
from kvant.version import VERSION


def kept_at(named: str, recipe: Recipe) -> Path:
    """Where an artifact is kept: by the model's fingerprint, by what decides the fit, and by the version that fitted it."""
    fits = hashlib.sha256(json.dumps([VERSION, recipe.fits], sort_keys=True).encode()).hexdigest()
    return models.cache_dir() / "artifacts" / named[:16] / fits[:16]


def kept(named: str, recipe: Recipe) -> Artifact | None:
    path = kept_at(named, recipe)
    return Artifact.load(path) if (path / FILE).exists() else None


def artifact_for(
    model: Any,
    tokenizer: Any,
    recipe: str | Recipe = recipes.DEFAULT,
    text: str | None = None,
    *,
    progress: Progress | None = None,
) -> Artifact | None:
    """The artifact that a recipe needs for a model, or None where it needs none: one that was kept, or one that is made now,
    which takes minutes, and kept. `text` and `progress` are those of `calibrate`; with a text, one is always made."""
    recipe = recipes.get(recipe)
    if not recipe.calibrated:
        return None
    named = fingerprint(model)
    found = kept(named, recipe) if text is None else None
    if found is None:
        found = calibrate(model, tokenizer, recipe, text, progress=progress)
        found.save(kept_at(named, recipe))
    return found
