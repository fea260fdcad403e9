"""One small version of every kind of recipe there is: found, not listed, and with calibrated tensors where it needs them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from kvant import recipes
from kvant.cache import PagedCache
from kvant.calibrate.fitting import fit_layer
from kvant.layout import Layout
from kvant.recipe import Recipe
from kvant.stats import WeightedMoments
from tests.conftest import make_layout
from tests.fitted import layer_stats
from tests.grouped import some_rope

SMALLER = [  # ways to give a recipe groups that a short test fills many times; the first that a recipe takes is used
    "k.group=16,k.flush=16",
    "group=16,flush=16",
    "block=16,k.group=8,flush=16",
]
WINDOWS = ["sink=3,recent=5", "sink=3,v.recent=5", "sink=3"]


def smaller(name: str) -> str:
    """A recipe with windows and groups of a few tokens."""
    recipe = recipes.get(name)
    if any(stream.groupwise for stream in recipe.streams.values()):
        for fields in SMALLER:
            for windows in ("", *(f",{w}" for w in WINDOWS)) if not recipe.key.window.sink else (f",{WINDOWS[1]}",):
                try:
                    small = recipes.get(f"{name}:{fields}{windows}")
                    make_layout(small, page_tokens=16)
                except ValueError:
                    continue
                if _short(small):
                    return small.name
        return name
    return name if _short(recipe) else f"{name}:{WINDOWS[0]}"


def _short(recipe: Recipe) -> bool:
    return all(s.window.ring <= 40 and s.codec.group_tokens <= 16 for s in recipe.streams.values())


def kind(recipe: Recipe) -> str:
    """What the code paths of a recipe depend on."""
    out: list[Any] = []
    for stream in recipe.streams.values():
        parts = [type(part).__name__ for part in stream.parts.values()]
        out += [parts, stream.groupwise, stream.rope, stream.window.ring > 0, stream.window.sink > 0]
    return str(out)


def families() -> list[str]:
    """One recipe of every kind, made small, and token-wise ones with windows too."""
    found: dict[str, str] = {}
    for name in recipes.names():
        found.setdefault(kind(recipes.get(name)), smaller(name))
    extra = ["int4:sink=3,recent=5", "saw-int4:sink=20,recent=3", "int3:k.recent=9,v.recent=4", "int8:recent=30"]
    extra += [
        "kivi-k2v2:k.group=16,k.flush=32,k.recent=7,v.recent=9,sink=5",
        "gear:block=16,k.group=8,flush=32,recent=4",
    ]
    return list(found.values()) + extra


@functools.cache
def tensors_of(name: str, heads: int, dim: int) -> dict[str, torch.Tensor]:
    """What an artifact would hold for one layer of a recipe: fitted to random numbers."""
    recipe = recipes.get(name)
    if not recipe.calibrated:
        return {}
    random = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(heads, 800, dim, generator=random) for _ in range(2))
    stats = layer_stats(keys, values)
    weighted_keys, weighted_values = (
        WeightedMoments(moments.mean, moments.second) for moments in (stats.keys, stats.values)
    )
    stats = dataclasses.replace(stats, weighted_keys=weighted_keys, weighted_values=weighted_values)
    return {key: value.clone() for key, value in fit_layer(recipe, stats).items()}


@functools.cache
def layout_of(name: str, heads: int, dim: int, page_tokens: int | None) -> Layout:
    return make_layout(name, heads, dim, dtype="float32", page_tokens=page_tokens, device="cpu")


def make(
    name: str, pages: int | None = None, layers: int = 1, heads: int = 2, dim: int = 64, **options: Any
) -> PagedCache:
    layout = layout_of(name, heads, dim, options.pop("page_tokens", None))
    tensors = {layer: tensors_of(name, heads, dim) for layer in range(layers)}
    return PagedCache(layout, layers, pages, tensors=tensors, ropes=[some_rope(dim)] * layers, **options)
