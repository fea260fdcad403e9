"""kvant: serve large language models from a 2- to 4-bit KV cache.

Nothing is imported before it is asked for: torch takes seconds, and a command line that prints its help needs none of it.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from kvant.version import VERSION

if TYPE_CHECKING:
    from kvant.cache import NotFinite, PagedCache, PoolFull
    from kvant.calibrate.artifact_cache import artifact_for
    from kvant.engines.hf import Cache
    from kvant.eval.check import check
    from kvant.layout import Layout
    from kvant.plan import plan
    from kvant.recipe import Recipe, Span, Stream, Window, spans
    from kvant.recipes import get as recipe
    from kvant.recipes import names as recipe_names
    from kvant.verdicts import Verdict

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
    "Verdict",
    "Window",
    "artifact_for",
    "check",
    "plan",
    "recipe",
    "recipe_names",
    "spans",
]

_HOMES = {  # public name -> where it is defined, and under which name
    "Cache": ("kvant.engines.hf", "Cache"),
    "Layout": ("kvant.layout", "Layout"),
    "NotFinite": ("kvant.cache", "NotFinite"),
    "PagedCache": ("kvant.cache", "PagedCache"),
    "PoolFull": ("kvant.cache", "PoolFull"),
    "Recipe": ("kvant.recipe", "Recipe"),
    "Span": ("kvant.recipe", "Span"),
    "Stream": ("kvant.recipe", "Stream"),
    "Verdict": ("kvant.verdicts", "Verdict"),
    "Window": ("kvant.recipe", "Window"),
    "artifact_for": ("kvant.calibrate.artifact_cache", "artifact_for"),
    "check": ("kvant.eval.check", "check"),
    "plan": ("kvant.plan", "plan"),
    "recipe": ("kvant.recipes", "get"),
    "recipe_names": ("kvant.recipes", "names"),
    "spans": ("kvant.recipe", "spans"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, original = _HOMES[name]
        try:
            found = getattr(importlib.import_module(module), original)
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".")[0] == "transformers":  # which the core does not need
                raise ModuleNotFoundError(f"kvant.{name} needs transformers: pip install 'kvant[hf]'") from error
            raise
        globals()[name] = found
        return found
    if not name.startswith("_"):  # a module of the package, as in kvant.recipes.get("oscar")
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """`plan` and `recipe` are functions here, and modules of the package too. Python makes an imported module an attribute
    of its package; that must not hide the functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
