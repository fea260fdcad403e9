"""What `kvant tune` chooses from: the streams of a few recipes, which layers may combine freely, and windows for the whole model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from kvant import recipes
from kvant.layout import Layout
from kvant.ops import OPS, explain
from kvant.recipe import Recipe, Stream, Window
from kvant.shape import ModelShape
from kvant.tune.sensitivity import Choice

BASE = recipes.DEFAULT  # what the tuned recipe is compared with, and whose sinks it has
CANDIDATES = (  # keys and values of any two of these may meet in a layer
    f"{BASE}:k.bits=2/2/0,v.bits=1",
    BASE,
    f"{BASE}:k.bits=4/2/2,v.bits=3",
    f"{BASE}:k.bits=4/4/0,v.bits=4",
    f"{BASE}:k.bits=4/3/2",
    f"{BASE}:k.bits=4/4/2",
    f"{BASE}:k.bits=3",
    f"{BASE}:k.bits=4",
)
RECENT = (64, 128, 192, 256)  # windows that are tried: recent tokens in full precision, in all layers


def parse(names: Sequence[str]) -> list[Recipe]:
    """The recipes that candidates name; refuses those that layers of one model cannot mix."""
    out = [recipes.get(name) for name in names]
    for recipe in out:
        for name, stream in recipe.streams.items():
            if stream.groupwise:
                raise ValueError(
                    f"candidate {recipe.name}: its {name}s are coded in groups of {stream.codec.group_tokens} tokens; candidates "
                    "code every token alone"
                )
    if not out:
        raise ValueError("expected one or more candidates, got none")
    return list(dict.fromkeys(out))


def windowed(recipe: Recipe, window: Window) -> Recipe:
    """The recipe with this window in both streams."""
    if recipe.key.window == recipe.value.window == window:
        return recipe
    bare, fields = _parts(recipe)
    kept = {
        name: value for name, value in fields.items() if name.split(".")[-1] not in ("sink", "recent", "window_dtype")
    }
    own = bare.key.window, bare.value.window
    if {each.in_model_dtype for each in own} != {window}:
        kept |= {"sink": str(window.sink), "recent": str(window.recent)}
    if own[1].window_dtype != window.window_dtype:
        kept |= {"v.window_dtype": window.window_dtype}
    return bare.with_fields(kept)


def combined(key: Recipe, value: Recipe) -> Recipe:
    """The recipe with the keys of one and the values of another, under a name that `recipes.get` reads where there is one."""
    if key.value == value.value:
        return key
    if key.key == value.key:
        return value
    (bare, of_key), (other, of_value) = _parts(key), _parts(value)
    if bare == other:
        fields = {name: text for name, text in of_key.items() if of_value.get(name) == text and "." not in name}
        for side, own in (("k", of_key), ("v", of_value)):
            for name, text in own.items():
                prefix, _, field = name.rpartition(".")
                if name not in fields and prefix in ("", side):
                    fields[f"{side}.{field}"] = text
        # windows last, as people write them
        ordered = sorted(fields.items(), key=lambda item: "." not in item[0])
        made = bare.with_fields(dict(ordered))
        if (made.key, made.value) == (key.key, value.value):
            return made
    return Recipe(f"{key.name}|{value.name}", key.key, value.value, summary="keys of the first, values of the second")


def _parts(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """The named recipe that a recipe with fields was made from, and the fields."""
    name, _, rest = recipe.name.partition(":")
    items = (item.partition("=") for item in rest.split(",") if item)
    return recipes.get(name), {field: value for field, _, value in items}


@dataclasses.dataclass(frozen=True)
class Options:
    """What layers may choose from: key and value streams, and the recipes that fast kernels do not serve."""

    keys: tuple[Choice, ...]
    values: tuple[Choice, ...]
    refused: dict[str, str]  # recipe: why

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self.keys + self.values


def options(chosen: Sequence[Recipe], shape: ModelShape) -> Options:
    """The streams of some recipes, each once, without those that fast kernels do not serve on a CPU or on a GPU."""
    refused = {recipe.name: reason for recipe in chosen if (reason := slow(recipe, shape)) is not None}
    fast = [recipe for recipe in chosen if recipe.name not in refused]
    keys, values = dict[Stream, Choice](), dict[Stream, Choice]()
    for recipe in fast:
        keys.setdefault(recipe.key, Choice("key", recipe))
        values.setdefault(recipe.value, Choice("value", recipe))
    for recipe in chosen:  # a stream may be fast beside another one than its own recipe's
        if recipe.key not in keys and (made := _beside(recipe, values, shape, combined)) is not None:
            keys[recipe.key] = Choice("key", made)
        if (
            recipe.value not in values
            and (made := _beside(recipe, keys, shape, lambda v, k: combined(k, v))) is not None
        ):
            values[recipe.value] = Choice("value", made)
    return Options(tuple(keys.values()), tuple(values.values()), refused)


def _beside(
    recipe: Recipe,
    others: dict[Stream, Choice],
    shape: ModelShape,
    combine: Callable[[Recipe, Recipe], Recipe],
) -> Recipe | None:
    """A stream of a recipe with the first of the other recipes' streams beside which fast kernels serve it."""
    made = (combine(recipe, other.recipe) for other in others.values())
    return next((each for each in made if slow(each, shape) is None), None)


def slow(recipe: Recipe, shape: ModelShape) -> str | None:
    """Why fast kernels do not serve a recipe on a CPU or on a GPU; None where they do. A kind of device on which they do not serve
    the base recipe either, with the head dim of this model, is not asked for."""
    return _slow(recipe, shape, fast_devices(shape))


@functools.cache
def fast_devices(shape: ModelShape) -> tuple[str, ...]:
    """The kinds of devices on which fast kernels serve the base recipe."""
    return tuple(device for device in ("cpu", "cuda") if _slow(recipes.get(BASE), shape, (device,)) is None)


def _slow(recipe: Recipe, shape: ModelShape, devices: Sequence[str]) -> str | None:
    """As `slow`. Without a GPU here, the order of pages says whether kernels there would read them."""
    for device in devices:
        layout = Layout.of(recipe, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        if device == "cuda" and layout.order == "plain":
            return f"{device}: {layout.order_reason}"
        if device == "cuda" and not torch.cuda.is_available():
            continue
        for op in OPS:
            name, refusals = explain(op, layout, device)
            if name in (None, "reference"):
                return f"{device} {op}: {'; '.join(f'{by}: {why}' for by, why in refusals.items())}"
    return None


def pairs(found: Options, shape: ModelShape) -> Iterator[tuple[Choice, Choice, Recipe]]:
    """All pairs of a key and a value choice that fast kernels serve."""
    for key in found.keys:
        for value in found.values:
            made = combined(key.recipe, value.recipe)
            if slow(made, shape) is None:
                yield key, value, made
