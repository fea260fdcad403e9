"""kvant: serve large language models from a 2- to 4-bit KV cache.

A tour, with a tiny model of random weights that needs no network; `kvant.models.load("smollm2")` gives a real one, and any
transformers model and tokenizer will do.

>>> import kvant
>>> from kvant.models import tiny
>>> model, tokenizer = tiny()

1. A cache. It goes where transformers takes one, and `model.generate` works as usual.

>>> cache = kvant.Cache(model, "int4")
>>> inputs = tokenizer("The capital of France is", return_tensors="pt")
>>> output = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
>>> cache.get_seq_length()  # the last new token has not been read yet
27

2. A recipe says how keys and values are stored. Any field can be changed by name.

>>> kvant.recipe("int4:sink=4,recent=64").value.codec.bits
4
>>> "kvant-2" in kvant.recipe_names()
True

3. Recipes such as kvant-2 are fitted to a model once; the artifact is kept in the user's cache directory.

>>> artifact = kvant.artifact_for(model, tokenizer, "kvant-4-fast")
>>> kvant.Cache(model, artifact=artifact).recipe.name
'kvant-4-fast'

4. Does a recipe fit the model, and what fits into memory?

>>> [verdict.word for verdict in kvant.check(model, tokenizer, "int8")]
['good']
>>> plan = kvant.plan("qwen3-8b", "kvant-2", memory="24GiB", context=32768)
>>> plan.recipe.requests, plan.bf16.requests
(38, 5)

The public names are those of `__all__`: Cache, artifact_for, check, plan, recipe, recipe_names; what they take and return,
Recipe and Verdict; what a full or damaged cache raises, PoolFull and NotFinite. `kvant.HybridCache` is for models some of whose
layers are not attention. Servers build on `kvant.cache.PagedCache`, new recipes on `kvant.recipe` and `kvant.codecs`. docs/ and
`kvant --help` lead on.

Nothing is imported before it is asked for: torch takes seconds, and a command line that prints its help needs none of it.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from kvant.version import VERSION

if TYPE_CHECKING:
    from kvant.cache import NotFinite, PoolFull
    from kvant.cache import PagedCache as PagedCache
    from kvant.calibrate.artifact_cache import artifact_for
    from kvant.engines.hf import Cache
    from kvant.engines.hybrid import HybridCache as HybridCache
    from kvant.eval.check import check
    from kvant.layout import Layout as Layout
    from kvant.plan import plan
    from kvant.recipe import Recipe
    from kvant.recipe import Span as Span
    from kvant.recipe import Stream as Stream
    from kvant.recipe import Window as Window
    from kvant.recipe import spans as spans
    from kvant.recipes import get as recipe
    from kvant.recipes import names as recipe_names
    from kvant.verdicts import Verdict

__version__ = VERSION
__all__ = [
    "Cache",
    "NotFinite",
    "PoolFull",
    "Recipe",
    "Verdict",
    "artifact_for",
    "check",
    "plan",
    "recipe",
    "recipe_names",
]

_HOMES = {  # name -> where it is defined, and under which name; those outside __all__ are parts to build with
    "Cache": ("kvant.engines.hf", "Cache"),
    "HybridCache": ("kvant.engines.hybrid", "HybridCache"),
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
    """The public names and what Python itself put here, without what this file imports."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


class _Package(types.ModuleType):
    """`plan` and `recipe` are functions here, and modules of the package too. Python makes an imported module an attribute
    of its package; that must not hide the functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
