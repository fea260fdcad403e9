"""What `kvant tune` chooses from: the streams of a few recipes, which layers may combine freely, and windows for the whole model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from kvant import recipes
from kvant.layout import Layout
from kvant.ops import OPS, explain
from kvant.recipe import Recipe, Window
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
RECENT = (64, 128, 256)  # windows that are tried: recent tokens in full precision, in all layers


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
    kept = {name: value for name, value in fields.items() if name.split(".")[-1] not in ("sink", "recent")}
    own = bare.key.window, bare.value.window
    if own != (window, window):
        kept |= {"sink": str(window.sink), "recent": str(window.recent)}
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
    """What a layer may have: pairs of a key and a value choice, and the recipe that each pair makes."""

    keys: tuple[Choice, ...]
    values: tuple[Choice, ...]
    refused: dict[str, str]  # pairs that fast kernels do not serve, and why

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self.keys + self.values


def options(chosen: Sequence[Recipe], shape: ModelShape) -> Options:
    """The streams of some recipes, each once, without those that fast kernels do not serve on a CPU or on a GPU."""
    refused: dict[str, str] = {}
    found: dict[str, dict[object, Choice]] = {"key": {}, "value": {}}
    for recipe in chosen:
        reason = slow(recipe, shape)
        if reason is not None:
            refused[recipe.name] = reason
        names: tuple[Choice, ...] = (Choice("key", recipe), Choice("value", recipe))
        for choice in names:
            if reason is None:
                found[choice.stream].setdefault(choice.spec, choice)
    for recipe in chosen:  # a stream may be fast beside another one than its own recipe's
        if recipe.name not in refused:
            continue
        for stream, others in (("key", found["value"]), ("value", found["key"])):
            own = Choice(stream, recipe)  # type: ignore[arg-type]
            if own.spec in found[stream]:
                continue
            for other in others.values():
                pair = (recipe, other.recipe) if stream == "key" else (other.recipe, recipe)
                made = combined(*pair)
                if slow(made, shape) is None:
                    found[stream][own.spec] = Choice(stream, made)  # type: ignore[arg-type]
                    break
    return Options(tuple(found["key"].values()), tuple(found["value"].values()), refused)


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
