"""Recipes, one file per paper. Every constant of type Recipe in a module of this package is a recipe."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import pkgutil

from kvant.recipe import MixedRecipe, Recipe, Window
from kvant.spec import split_names

DEFAULT = "kvant-2"  # the first choice of commands: the best quality at its bits; it is fitted to a model once
PLAIN = "kivi-k4v4"  # default of kvant.Cache without recipe and artifact: it needs no fit and tolerates large key means
LADDER = (
    DEFAULT,
    "kvant-3",
    "kvant-4",
    "kvant-4-fast",
    PLAIN,
    "int8",
)  # candidates where no recipe is named, fewest bits first


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
    """All recipes, in the order of their files.

    >>> import kvant
    >>> {"kvant-2", "kvant-4", "oscar", "int4"} <= set(kvant.recipe_names())
    True
    """
    return list(_RECIPES)


def get(text: str | Recipe) -> Recipe:
    """The recipe that a command line names: NAME or NAME:field=value,field=value. A field with the prefix k. or v. is that
    of the keys or of the values alone.

    >>> import kvant
    >>> kvant.recipe("int4:sink=4,recent=64").key.window
    Window(sink=4, recent=64, flush=1, rollback=0, shift=True, window_dtype='model')
    >>> kvant.recipe("int4:v.bits=2").value.codec.bits
    2
    """
    if isinstance(text, Recipe):
        return text
    name, colon, rest = text.strip().partition(":")
    if name not in _RECIPES:
        close = difflib.get_close_matches(name, _RECIPES, 3)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ValueError(f"unknown recipe {name!r}{meant}; known: {', '.join(_RECIPES)}")
    fields: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        field, equals, value = (part.strip() for part in item.partition("="))
        if not (field and equals and value):
            raise ValueError(f"recipe {text!r}: expected NAME:field=value,field=value, got {item!r}")
        fields[field] = value
    return _RECIPES[name].with_fields(fields)


def as_fitted(recipe: Recipe) -> Recipe:
    """The recipe that a kept artifact of this one is fitted for: the same with the windows that its name has without fields. Windows
    decide which tokens calibration looks at, but not which artifact is found. So what is found does not depend on which windows
    were asked for first.

    >>> from kvant import recipes
    >>> recipes.as_fitted(recipes.get("oscar:sink=0,clip=1")).name
    'oscar:clip=1'
    """
    name, _, rest = recipe.name.partition(":")
    if name not in _RECIPES or isinstance(recipe, MixedRecipe):
        return recipe
    usual, windows = _RECIPES[name], {field.name for field in dataclasses.fields(Window)}
    kept = [item for item in rest.split(",") if item and item.partition("=")[0].rpartition(".")[2] not in windows]
    made = dataclasses.replace(
        recipe,
        name=":".join((name, ",".join(kept))) if kept else name,
        key=dataclasses.replace(recipe.key, window=usual.key.window),
        value=dataclasses.replace(recipe.value, window=usual.value.window),
    )
    assert made.fits == recipe.fits, (made.name, recipe.name)
    return made


def plain(head_dim: int) -> Recipe:
    """The recipe of a cache without recipe and artifact: PLAIN, with groups of value channels that divide the head dim."""
    recipe = get(PLAIN)
    group = recipe.value.codec.group  # type: ignore[attr-defined]
    fitting = math.gcd(group, head_dim)
    return recipe if fitting == group else get(f"{PLAIN}:v.group={fitting}")


def split(text: str) -> list[str]:
    """Splits a comma-separated list of recipes; commas between the fields of one recipe do not split. `all` means all recipes."""
    if text.strip() == "all":
        return names()
    out = split_names(text)
    if not out:
        raise ValueError(f"expected one or more recipes, got {text!r}; known: {', '.join(_RECIPES)}")
    return out
