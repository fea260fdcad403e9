"""What a user tells kvant through vLLM's additional_config, and what of it cannot be served.

{"kvant": {"recipe": NAME, "artifact": DIR or [DIR, ...], "layers": {"0-1": NAME, "2-": NAME}, "spare_windows": N,
 "implementation": NAME, "unfit_anyway": BOOL}}

Whether a recipe fits the model is what `kvant check` measures and keeps. An engine that is started by itself measures nothing: it
refuses a recipe that is known to be unfit, and warns of one that nobody has checked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvant import recipes, verdicts
from kvant.artifact import Artifact
from kvant.recipe import Recipe

KEYS = ("recipe", "artifact", "layers", "spare_windows", "implementation", "unfit_anyway")
PAGE_TOKENS = 64
_RANGE = re.compile(r"\s*(\d+)\s*(-\s*(\d*)\s*)?")


@dataclasses.dataclass(frozen=True)
class Options:
    """A recipe for every layer of the model, and the artifacts that they need.

    spare_windows   how many windows are kept beyond one for each sequence that vLLM may run: for prefix hits on sequences that
                    are gone.
    implementation  as in ops.choose: kernels by their name, in place of the best ones.
    unfit_anyway    serve a recipe also where a verdict says that it makes the model useless.
    """

    layers: tuple[Recipe, ...]
    artifacts: tuple[Artifact, ...] = ()
    spare_windows: int | None = None
    implementation: str | None = None
    unfit_anyway: bool = False

    @staticmethod
    def of(additional: Any, layers: int, named: Callable[[], str | None] = lambda: None) -> Options:
        """Reads vLLM's additional_config for a model of so many layers. `named` gives the model's fingerprint where it is known:
        without a recipe, one that is kept as good for the model is taken."""
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
        anyway = given.get("unfit_anyway", False)
        if not isinstance(anyway, bool):
            raise ValueError(f"unfit_anyway must be true or false, got {anyway!r}")
        found = tuple(Artifact.load(path) for path in ([paths] if isinstance(paths, str) else paths))
        default = given.get("recipe")
        if default is None and not given.get("layers"):
            default = default_recipe(found, named())
        chosen = per_layer(default, given.get("layers"), layers)
        return Options(chosen, found, spare, given.get("implementation"), anyway)

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


def default_recipe(artifacts: tuple[Artifact, ...], named: str | None) -> str:
    """The recipe where none is named: the artifact's, or one that is kept as good for the model. No recipe fits every model, so
    that there is no other default."""
    if len(artifacts) == 1:
        return artifacts[0].recipe.name
    known = {"", *(artifact.digest for artifact in artifacts)}
    for each in [] if named is None else verdicts.verdicts(named):
        if each.word == "good" and each.artifact in known and refusal(recipes.get(each.recipe)) is None:
            return each.recipe
    raise ValueError(
        'additional_config["kvant"] has no recipe, and none is known to fit this model: name one as {"kvant": {"recipe": NAME}}; '
        "kvant check --model M says which fit, and kvant serve M takes the best"
    )


def judge(
    options: Options, recipe: Recipe, artifact: Artifact | None, named: str | None, warn: Callable[[str], None]
) -> None:
    """Refuses a recipe that is kept as unfit for the model with this fingerprint, and warns of one that was never checked. One that
    serves only some of the layers is not judged: a verdict is of a whole model."""
    if options.unfit_anyway or len(set(options.layers)) > 1 or recipe == recipes.get("full"):
        return
    found = None
    if named is not None:
        found = verdicts.verdict(named, recipe, "" if artifact is None else artifact.digest)
    if found is None:
        warn(
            f"nobody has checked whether recipe {recipe.name} fits this model: kvant check --model M --recipe {recipe.name} does, "
            "and kvant serve does it by itself"
        )
        return
    verdicts.refuse_unfit(found, 'additional_config={"kvant": {..., "unfit_anyway": true}}')


def per_layer(default: str | None, ranges: Mapping[str, str] | None, layers: int) -> tuple[Recipe, ...]:
    """The recipe of every layer, from ranges of layers such as "3", "0-1" and "2-"; what they leave out has the default."""
    if default is None and not ranges:
        raise ValueError("a recipe is needed, for all layers or for ranges of them")
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
