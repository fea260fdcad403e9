"""kvant: serve large language models from a 2- to 4-bit KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvant.cache import PagedCache, PoolFull
from kvant.layout import Layout
from kvant.recipe import Recipe, Span, Stream, Window, spans
from kvant.recipes import get as recipe
from kvant.recipes import names as recipe_names
from kvant.version import VERSION

if TYPE_CHECKING:
    from kvant.engines.hf import Cache

__version__ = VERSION
__all__ = [
    "Cache",
    "Layout",
    "PagedCache",
    "PoolFull",
    "Recipe",
    "Span",
    "Stream",
    "Window",
    "recipe",
    "recipe_names",
    "spans",
]


def __getattr__(name: str) -> Any:
    if name == "Cache":  # needs transformers, which the core does not
        try:
            from kvant.engines.hf import Cache
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".")[0] == "transformers":
                raise ModuleNotFoundError("kvant.Cache needs transformers: pip install 'kvant[hf]'") from error
            raise
        return Cache
    raise AttributeError(f"module 'kvant' has no attribute {name!r}")
