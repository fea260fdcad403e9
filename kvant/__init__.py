"""kvant: serve large language models from a 2- to 4-bit KV cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvant.cache import NotFinite, PagedCache, PoolFull
from kvant.layout import Layout
from kvant.plan import plan
from kvant.recipe import Recipe, Span, Stream, Window, spans
from kvant.recipes import get as recipe
from kvant.recipes import names as recipe_names
from kvant.version import VERSION

if TYPE_CHECKING:
    from kvant.calibrate.kept import artifact_for
    from kvant.engines.hf import Cache

__version__ = VERSION
__all__ = [
    "Cache",
    "Layout",
    "NotFinite",
    "PagedCache",
    "PoolFull",
    "Recipe",
    "Span",
    "Stream",
    "Window",
    "artifact_for",
    "plan",
    "recipe",
    "recipe_names",
    "spans",
]


_NEED_TRANSFORMERS = {"Cache": "kvant.engines.hf", "artifact_for": "kvant.calibrate.kept"}


def __getattr__(name: str) -> Any:
    if name in _NEED_TRANSFORMERS:  # which the core does not
        try:
            return getattr(importlib.import_module(_NEED_TRANSFORMERS[name]), name)
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".")[0] == "transformers":
                raise ModuleNotFoundError(f"kvant.{name} needs transformers: pip install 'kvant[hf]'") from error
            raise
    raise AttributeError(f"module 'kvant' has no attribute {name!r}")
