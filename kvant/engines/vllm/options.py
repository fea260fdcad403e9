"""What a user tells kvant through vLLM's additional_config, and what of it cannot be served.

{"kvant": {"recipe": NAME, "artifact": DIR or [DIR, ...], "layers": {"0-1": NAME, "2-": NAME}, "spare_windows": N,
 "implementation": NAME}}
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from kvant import recipes
from kvant.artifact import Artifact
from kvant.recipe import Recipe

KEYS = ("recipe", "artifact", "layers", "spare_windows", "implementation")
PAGE_TOKENS = 64
_RANGE = re.compile(r"\s*(\d+)\s*(-\s*(\d*)\s*)?")


@dataclasses.dataclass(frozen=True)
class Options:
    """A recipe for every layer of the model, and the artifacts that they need.

    spare_windows   how many windows are kept beyond one for each sequence that vLLM may run: for prefix hits on sequences that
                    are gone.
    implementation  as in ops.choose: kernels by their name, in place of the best ones.
    """

    layers: tuple[Recipe, ...]
    artifacts: tuple[Artifact, ...] = ()
    spare_windows: int | None = None
    implementation: str | None = None

    @staticmethod
    def of(additional: Any, layers: int) -> Options:
        """Reads vLLM's additional_config for a model of so many layers."""
        given = additional.get("kvant") if isinstance(additional, Mapping) else None
        if not isinstance(given, Mapping):
            raise ValueError(
                'attention backend CUSTOM is kvant: it needs additional_config={"kvant": {"recipe": NAME}}, '
                f"got {additional!r}"
            )
        unknown = sorted(set(given) - set(KEYS))
        if unknown:
            raise ValueError(f"additional_config['kvant'] has {', '.join(unknown)}; known: {', '.join(KEYS)}")
        paths = given.get("artifact") or []
        spare = given.get("spare_windows")
        if spare is not None and (type(spare) is not int or spare < 0):
            raise ValueError(f"spare_windows must be a number from 0, got {spare!r}")
        chosen = per_layer(given.get("recipe"), given.get("layers"), layers)
        found = tuple(Artifact.load(path) for path in ([paths] if isinstance(paths, str) else paths))
        return Options(chosen, found, spare, given.get("implementation"))

    def artifact(
        self, recipe: Recipe, layers: int, heads: int, head_dim: int, fingerprint: str | None = None
    ) -> Artifact | None:
        """The artifact that a recipe needs: the first given one that fits, and is of the model with this fingerprint where
        that is known."""
        if not recipe.calibrated:
            return None
        if not self.artifacts:
            raise ValueError(
                f"recipe {recipe.name} is fitted offline: it needs an artifact made by kvant calibrate, as "
                f'additional_config={{"kvant": {{"recipe": "{recipe.name}", "artifact": DIR}}}}; kvant serve finds or makes one'
            )
        refusals = []
        for artifact in self.artifacts:
            try:
                artifact.check(recipe, layers, heads, head_dim, fingerprint)
            except ValueError as error:
                refusals.append(str(error))
            else:
                return artifact
        raise ValueError(f"no artifact fits recipe {recipe.name}: {'; '.join(refusals)}")


def per_layer(default: str | None, ranges: Mapping[str, str] | None, layers: int) -> tuple[Recipe, ...]:
    """The recipe of every layer, from ranges of layers such as "3", "0-1" and "2-"; what they leave out has the default."""
    if default is None and not ranges:
        default = recipes.PLAIN
    found: list[Recipe | None] = [None] * layers
    for text, name in (ranges or {}).items():
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"layers: expected a range such as 3, 0-1 or 2-, got {text!r}")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else layers - 1
        if not first <= last < layers:
            raise ValueError(f"layers: {text!r} is no range of the model's layers 0 to {layers - 1}")
        for layer in range(first, last + 1):
            if found[layer] is not None:
                raise ValueError(f"layers: layer {layer} is named twice")
            found[layer] = recipes.get(name)
    missing = [layer for layer, recipe in enumerate(found) if recipe is None]
    if missing and default is None:
        raise ValueError(f"layers: layer {missing[0]} has no recipe, and there is no default recipe")
    rest = None if default is None else recipes.get(default)
    return tuple(recipe or rest for recipe in found)  # type: ignore[misc]


def refusal(recipe: Recipe) -> str | None:
    """Why a recipe cannot be served inside vLLM, or None where it can."""
    for name, stream in recipe.streams.items():
        if stream.groupwise:
            return (
                f"its {name}s are coded in groups of {stream.codec.group_tokens} tokens, and an unfinished group belongs to a "
                "sequence, which vLLM's blocks do not know; kvant generate and kvant.Cache serve it"
            )
    if recipe.key.window.sink > PAGE_TOKENS:
        return f"its {recipe.key.window.sink} sink tokens do not lie in one block of {PAGE_TOKENS} tokens"
    return None


def check(recipe: Recipe) -> None:
    reason = refusal(recipe)
    if reason is not None:
        raise ValueError(f"recipe {recipe.name} cannot be served inside vLLM: {reason}")
