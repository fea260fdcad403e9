"""Where artifacts are cached on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvant import models
from kvant.artifact import FILE, Artifact
from kvant.calibrate.run import Source, text_digest
from kvant.recipe import Recipe
from kvant.version import VERSION


def root() -> Path:
    """The directory of all cached artifacts."""
    return models.cache_dir() / "artifacts"


def artifact_path(named: str, recipe: Recipe, text: Source | None = None) -> Path:
    """The directory of a cached artifact. `named` is the model's fingerprint. The path also depends on the version of kvant, on
    the fields of the recipe that decide the fit, and on the text: a given one, or the built-in one."""
    fits = hashlib.sha256(json.dumps([VERSION, recipe.fits], sort_keys=True).encode()).hexdigest()
    return root() / named[:16] / f"{fits[:16]}-{text_digest(text)[:16]}"


def cached(named: str, recipe: Recipe, text: Source | None = None) -> Artifact | None:
    """The cached artifact of a recipe, or None. It may have been fitted for a recipe that differs only in windows."""
    path = artifact_path(named, recipe, text)
    return Artifact.load(path).serving(recipe) if (path / FILE).exists() else None
