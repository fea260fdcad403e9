"""Recipes, one file per paper. A recipe is found because a module here defines it as a constant."""

from __future__ import annotations

import importlib
import math
import pkgutil

from kvant.recipe import Recipe
from kvant.spec import split_names

DEFAULT = "kvant-2"  # of commands: the best there is at its bits; fitted to a model, once
PLAIN = "kivi-k4v4"  # of a cache that is given neither a recipe nor an artifact: it needs no fit, and no mean hurts it
LADDER = (DEFAULT, "kvant-4", PLAIN, "int8")  # what is tried where no recipe is named, fewest bits first


def _collect() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, Recipe) and found.setdefault(value.name, value) is not value:
                raise TypeError(f"two recipes are called {value.name}; one is in {module.__name__}")
    return found


_RECIPES = _collect()


def names() -> list[str]:
    """All recipes, in the order of their files."""
    return list(_RECIPES)


def get(text: str | Recipe) -> Recipe:
    """The recipe that a command line names: NAME or NAME:field=value,field=value."""
    if isinstance(text, Recipe):
        return text
    name, colon, rest = text.strip().partition(":")
    if name not in _RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(_RECIPES)}")
    fields: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        field, equals, value = (part.strip() for part in item.partition("="))
        if not (field and equals and value):
            raise ValueError(f"recipe {text!r}: expected NAME:field=value,field=value, got {item!r}")
        fields[field] = value
    return _RECIPES[name].with_fields(fields)


def plain(head_dim: int) -> Recipe:
    """The recipe of a cache that is given neither a recipe nor an artifact: PLAIN, whose groups of value channels divide a head."""
    recipe = get(PLAIN)
    group = recipe.value.codec.group  # type: ignore[attr-defined]
    fitting = math.gcd(group, head_dim)
    return recipe if fitting == group else get(f"{PLAIN}:v.group={fitting}")


def split(text: str) -> list[str]:
    """A comma-separated list of recipes, where the commas between one recipe's fields do not count; `all` is all."""
    if text.strip() == "all":
        return names()
    out = split_names(text)
    if not out:
        raise ValueError(f"expected one or more recipes, got {text!r}; known: {', '.join(_RECIPES)}")
    return out
