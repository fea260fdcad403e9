"""The layouts of all layers of a model: one for all of them, or several where layers have different recipes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from typing import Any

from kvant.layout import Layout, Order
from kvant.recipe import MixedRecipe, Recipe


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layout of every layer. Page size and bytes of a token differ where recipes differ; page_tokens, windows and heads are
    the same in all layers."""

    layers: tuple[Layout, ...]

    @staticmethod
    def of(recipe: Recipe, layers: int, heads: int, head_dim: int, **options: Any) -> Layouts:
        """The layouts of a recipe in a model with so many layers; `options` are those of `Layout.of`."""
        if isinstance(recipe, MixedRecipe):
            if len(recipe.layers) != layers:
                raise ValueError(f"recipe {recipe.name} is for {len(recipe.layers)} layers, the model has {layers}")
            each = [Layout.of(own, heads, head_dim, **options) for own in recipe.recipes]
            return Layouts(tuple(each[i] for i in recipe.layers))
        return Layouts((Layout.of(recipe, heads, head_dim, **options),) * layers)

    @property
    def distinct(self) -> tuple[Layout, ...]:
        """Every layout once."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def first(self) -> Layout:
        """The first layer's: for what all layers share, such as page_tokens and windows."""
        return self.layers[0]

    @property
    def only(self) -> Layout:
        """The layout of all layers; refuses where they differ."""
        if len(self.distinct) > 1:
            raise ValueError("layers have different recipes and so different layouts: see layouts.layers")
        return self.first

    @property
    def order(self) -> Order | None:
        """The order of codes in the pages of all layers; None where it differs."""
        return self.first.order if len({layout.order for layout in self.layers}) == 1 else None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return sum(layout.page_bytes for layout in self.layers)

    @property
    def overlay_bytes(self) -> int:
        """Bytes of a sequence's full-precision windows in all layers."""
        return sum(layout.overlay_bytes for layout in self.layers)

    def bits_per_element(self, tokens: int | None = None) -> float:
        """Bits per cached number, everything counted, mean over layers: of a full page, or of a sequence of that many tokens."""
        return statistics.mean(layout.bits_per_element(tokens) for layout in self.layers)  # exact: no rounding of a sum

    def digest(self, artifact: str = "", model: str = "") -> str:
        """Names what the stored bytes mean, as `Layout.digest`."""
        if len(self.distinct) == 1:
            return self.first.digest(artifact, model)
        each = [layout.digest(artifact, model) for layout in self.layers]
        return hashlib.sha256(json.dumps(each).encode()).hexdigest()
