"""A cache of artifacts in the user's cache directory, so that a recipe is fitted to a model once."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from kvant import recipes
from kvant.artifact import Artifact
from kvant.calibrate.artifact_paths import artifact_path, cached
from kvant.calibrate.run import Source, calibrate
from kvant.engines.fingerprint import fingerprint
from kvant.progress import Progress, default_progress
from kvant.recipe import Recipe


def artifact_for(
    model: Any,
    tokenizer: Any,
    recipe: str | Recipe = recipes.DEFAULT,
    text: Source | None = None,
    *,
    progress: Progress | None = None,
) -> Artifact | None:
    """The artifact that a recipe needs for a model, or None where it needs none. It is taken from the cache, or fitted now and
    cached. `text` and `progress` are those of `calibrate`: without `text` the built-in one is read; without `progress`, bars or
    lines are printed on stderr. An artifact is found only by the text that it was fitted on.

    >>> import kvant
    >>> from kvant.models import tiny
    >>> model, tokenizer = tiny()
    >>> artifact = kvant.artifact_for(model, tokenizer, "kvant-4-fast")
    >>> kvant.Cache(model, artifact=artifact).recipe.name
    'kvant-4-fast'
    >>> kvant.artifact_for(model, tokenizer, "int4") is None  # it needs no fit
    True
    """
    recipe = recipes.get(recipe)
    if not recipe.calibrated:
        return None
    named = fingerprint(model)
    found = cached(named, recipe, text)
    if found is None:
        with default_progress() if progress is None else contextlib.nullcontext(progress) as shown:
            made = calibrate(model, tokenizer, recipes.as_fitted(recipe), text, progress=shown)
        path = artifact_path(named, recipe, text)
        try:
            made.save(path)
        except OSError as error:
            warnings.warn(f"the artifact is not cached and serves this process alone: {error}", stacklevel=2)
        found = made.serving(recipe)
    return found
