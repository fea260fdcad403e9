"""The options that a user passes to kvant in vLLM's additional_config, and what cannot be served inside vLLM.

{"kvant": {"recipe": NAME, "artifact": DIR or [DIR, ...], "layers": {"0-1": NAME, "2-": NAME}, "spare_overlay_rows": N,
 "sink_rows": N, "implementation": NAME, "unfit_anyway": BOOL, "fold": BOOL, "sliding": NAME}}

`kvant check` measures whether a recipe fits a model and stores the verdict. An engine that is started without `kvant serve`
measures nothing: it refuses a recipe whose stored verdict is unfit, and warns of a recipe that has no verdict.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from kvant import recipes, verdicts
from kvant.artifact import Artifact
from kvant.recipe import MixedRecipe, Recipe

KEYS = (
    "recipe",
    "artifact",
    "layers",
    "spare_overlay_rows",
    "sink_rows",
    "implementation",
    "unfit_anyway",
    "fold",
    "sliding",
    "draft",
)
OLD_SPARE = "spare_windows"  # deprecated name of spare_overlay_rows
PAGE_TOKENS = 64
LARGEST_BLOCK = 128
CONNECTOR, SPEC = "OffloadingConnector", "CPUOffloadingSpec"  # vLLM's connector that is served, and how it keeps pages
# Values of kv_cache_dtype with which vLLM does not quantize the cache itself.
UNPACKED = ("auto", "float16", "bfloat16")
_RANGE = re.compile(r"\s*(\d+)\s*(-\s*(\d*)\s*)?")


@dataclasses.dataclass(frozen=True)
class Options:
    """A recipe for every layer of the model, and the artifacts that they need.

    spare_overlay_rows  overlay rows beyond one for each sequence that vLLM may run. They hold the sinks of finished sequences for
                        prefix hits (default: 4; a quarter of max_num_seqs where layers with sinks have no sink rows).
    sink_rows           first pages in the prefix cache whose sinks are kept in full precision beside those of the overlay rows, in
                        layers without a sliding window (default: kvant.plan.sink_rows; none without prefix caching).
    implementation      name of the kernels to use instead of the best ones, as in ops.choose.
    unfit_anyway        serve a recipe even if its verdict for this model is unfit.
    fold                True: fold value transforms into the loaded weights, or refuse to start. False: do not. None, the default:
                        fold them where that is possible.
    sliding             recipe of the layers with a sliding window; None: that of the other layers.
    draft               recipe of the layers of a draft; None: an attention of vLLM's own serves them.
    mixed               the artifact's recipe that has a recipe for every layer, where `layers` come from it.
    """

    layers: tuple[Recipe, ...]
    artifacts: tuple[Artifact, ...] = ()
    spare_overlay_rows: int | None = None
    implementation: str | None = None
    unfit_anyway: bool = False
    mixed: MixedRecipe | None = None
    fold: bool | None = None
    sink_rows: int | None = None
    sliding: Recipe | None = None
    draft: Recipe | None = None

    @staticmethod
    def of(additional: Any, layers: int, named: Callable[[], str | None] = lambda: None) -> Options:
        """Reads vLLM's additional_config for a model with this number of layers. `named` returns the model's fingerprint, or None
        where it is unknown; where no recipe is given, a recipe whose stored verdict for that model is good is used."""
        given = additional.get("kvant") if isinstance(additional, Mapping) else None
        if not isinstance(given, Mapping):
            raise ValueError(
                'attention backend CUSTOM is kvant: it needs additional_config={"kvant": {"recipe": NAME}}, '
                f"got {additional!r}"
            )
        unknown = sorted(set(given) - {*KEYS, OLD_SPARE})
        if unknown:
            raise ValueError(f"additional_config['kvant'] has {', '.join(unknown)}; known: {', '.join(KEYS)}")
        paths = given.get("artifact") or []
        spare = given.get("spare_overlay_rows")
        if OLD_SPARE in given:
            if "spare_overlay_rows" in given:
                raise ValueError(f"spare_overlay_rows and its old name {OLD_SPARE} are both given")
            warnings.warn(
                f"{OLD_SPARE} of additional_config is now called spare_overlay_rows", DeprecationWarning, stacklevel=2
            )
            spare = given[OLD_SPARE]
        if spare is not None and (type(spare) is not int or spare < 0):
            raise ValueError(f"spare_overlay_rows must be a number from 0, got {spare!r}")
        sinks = given.get("sink_rows")
        if sinks is not None and (type(sinks) is not int or sinks < 0):
            raise ValueError(f"sink_rows must be a number from 0, got {sinks!r}")
        anyway = given.get("unfit_anyway", False)
        if not isinstance(anyway, bool):
            raise ValueError(f"unfit_anyway must be true or false, got {anyway!r}")
        folds = given.get("fold")
        if folds is not None and not isinstance(folds, bool):
            raise ValueError(f"fold must be true or false, got {folds!r}")
        found = tuple(Artifact.load(path) for path in ([paths] if isinstance(paths, str) else paths))
        default: str | Recipe | None = given.get("recipe")
        if default is None and not given.get("layers"):
            default = default_recipe(found, named())
        chosen = per_layer(default, given.get("layers"), layers)
        mixed = default if isinstance(default, MixedRecipe) else None
        slides, drafts = _recipe(given.get("sliding"), "sliding"), draft_recipe(given)
        return Options(chosen, found, spare, given.get("implementation"), anyway, mixed, folds, sinks, slides, drafts)

    def recipe_of(self, layer: int, sliding_window: int | None) -> Recipe:
        """The recipe of a layer."""
        return self.layers[layer] if sliding_window is None or self.sliding is None else self.sliding

    @property
    def whole(self) -> Recipe | None:
        """The recipe of the whole model; None where layers have recipes that were named one by one. Layers with a sliding window may
        be in 16 bits."""
        if self.sliding not in (None, recipes.get("full")):
            return None
        if self.mixed is not None and self.layers == tuple(self.mixed):
            return self.mixed
        return self.layers[0] if len(set(self.layers)) == 1 else None

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of every layer: layers share block tables."""
        return max(map(page_tokens, self._all))

    @property
    def block_tokens(self) -> int:
        """A block of vLLM has a multiple of so many tokens."""
        return math.lcm(*map(block_tokens, self._all))

    @property
    def _all(self) -> tuple[Recipe, ...]:
        return self.layers if self.sliding is None else (*self.layers, self.sliding)

    def artifact(
        self, recipe: Recipe, layers: int, heads: int, head_dim: int, fingerprint: str | None = None
    ) -> Artifact | None:
        """The artifact that a recipe needs: the first of those given that fits the recipe, and the model with this fingerprint
        where that is known."""
        if not recipe.calibrated:
            return None
        if self.mixed is not None and recipe in self.mixed.recipes:
            recipe = self.mixed  # its artifact is one for all of its layers
        if not self.artifacts:
            raise ValueError(
                f"recipe {recipe.name} is fitted offline: it needs an artifact made by kvant calibrate, as "
                f'additional_config={{"kvant": {{"recipe": "{recipe.name}", "artifact": DIR}}}}; kvant serve finds or fits one'
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


def _recipe(name: Any, key: str) -> Recipe | None:
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{key} must be the name of a recipe, got {name!r}")
    return None if name is None else recipes.get(name)


def draft_recipe(given: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a draft's layers, from additional_config["kvant"]. A draft writes several tokens in a step, one forward pass
    each, and the next step writes them anew: only what is in pages alone is exact then."""
    recipe = _recipe(given.get("draft"), "draft")
    if recipe is None:
        return None
    reason = None
    if recipe.calibrated or recipe.wants_rope:
        reason = "artifacts and rotary embeddings are those of the model, not of its draft"
    elif any(stream.groupwise or stream.window.sink or stream.window.ring for stream in recipe.streams.values()):
        reason = "it keeps tokens outside of pages, in windows or unfinished groups, and a draft writes its tokens anew"
    if reason is not None:
        raise ValueError(f"recipe {recipe.name} cannot be given to the layers of a draft: {reason}")
    return recipe


def default_recipe(artifacts: tuple[Artifact, ...], named: str | None) -> str | Recipe:
    """The recipe to use where none is given: the artifact's, or one whose stored verdict for the model is good. There is no other
    default, since no recipe fits every model."""
    if len(artifacts) == 1:
        recipe = artifacts[0].recipe
        return recipe if isinstance(recipe, MixedRecipe) else recipe.name
    known = {"", *(artifact.digest for artifact in artifacts)}
    for each in [] if named is None else verdicts.verdicts(named):
        if each.recipe.split(":")[0] not in recipes.names():
            continue  # the verdict on a mixed recipe, which its artifact alone names
        recipe = recipes.get(each.recipe)
        if recipe.not_prefix_safe is not None or recipe.origin:
            continue  # it needs other settings of vLLM than the usual ones, or its groups begin at another token there
        if each.word == "good" and each.artifact in known and refusal(recipe) is None:
            return each.recipe
    raise ValueError(
        'additional_config["kvant"] has no recipe, and none is known to fit this model: name one as {"kvant": {"recipe": NAME}}; '
        "kvant check --model M says which fit, and kvant serve M takes the best"
    )


def judge(
    options: Options, recipe: Recipe, artifact: Artifact | None, named: str | None, warn: Callable[[str], None]
) -> None:
    """Refuses a recipe whose stored verdict for the model with this fingerprint is unfit, and warns of one that has no verdict. A
    recipe for only some of the layers is not judged: a verdict holds for a whole model. A layer's recipe of a mixed one is judged
    as the mixed one."""
    whole = options.whole
    if options.unfit_anyway or whole is None or recipe == recipes.get("full"):
        return
    recipe = whole
    found = None
    if named is not None:
        found = verdicts.verdict(named, recipe, "" if artifact is None else artifact.digest)
    if found is None:
        warn(
            f"recipe {recipe.name} has not been checked on this model: run kvant check --model M "
            f"{'--artifact DIR' if isinstance(recipe, MixedRecipe) else f'--recipe {recipe.name}'}; "
            "kvant serve runs this check itself"
        )
        return
    verdicts.refuse_unfit(found, 'additional_config={"kvant": {..., "unfit_anyway": true}}')


def per_layer(default: str | Recipe | None, ranges: Mapping[str, str] | None, layers: int) -> tuple[Recipe, ...]:
    """The recipe of every layer, from ranges of layers such as "3", "0-1" and "2-". Layers in no range have the default."""
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
            raise ValueError(f"layers: {text!r} is not a range of the model's layers 0 to {layers - 1}")
        for layer in range(first, last + 1):
            if found[layer] is not None:
                raise ValueError(f"layers: layer {layer} is named twice")
            found[layer] = recipes.get(name)
    missing = [layer for layer, recipe in enumerate(found) if recipe is None]
    if missing and default is None:
        raise ValueError(f"layers: layer {missing[0]} has no recipe, and there is no default recipe")
    rest = None if default is None else recipes.get(default)
    if isinstance(rest, MixedRecipe) and len(rest.layers) != layers:
        raise ValueError(f"recipe {rest.name} is for {len(rest.layers)} layers, the model has {layers}")
    return tuple(recipe or rest.at(layer) for layer, recipe in enumerate(found))  # type: ignore[union-attr]


def cache_dtype_refusal(given: str) -> str | None:
    """Why kvant is not served with a kv_cache_dtype, or None where it is."""
    if given in UNPACKED:
        return None
    return (
        f"kvant packs the cache itself: kv_cache_dtype must be auto, got {given}; if that comes from the checkpoint, name float16 or "
        "bfloat16 instead"
    )


def page_tokens(recipe: Recipe) -> int:
    """Tokens of a page inside vLLM: whole groups of tokens."""
    if isinstance(recipe, MixedRecipe):
        return max(map(page_tokens, recipe.recipes))
    return max(PAGE_TOKENS, *(stream.codec.group_tokens for stream in recipe.streams.values()))


def block_tokens(recipe: Recipe) -> int:
    """A block of vLLM has a multiple of so many tokens: whole pages, and all that are coded together. vLLM shares whole blocks."""
    if isinstance(recipe, MixedRecipe):
        return math.lcm(*map(block_tokens, recipe.recipes))
    return math.lcm(page_tokens(recipe), *(stream.window.flush for stream in recipe.streams.values()))


def refusal(recipe: Recipe) -> str | None:
    """Why a recipe cannot be served inside vLLM, or None where it can."""
    if isinstance(recipe, MixedRecipe):
        return next(filter(None, map(refusal, recipe.recipes)), None)
    size = block_tokens(recipe)
    for name, stream in recipe.streams.items():
        if not stream.groupwise:
            continue
        if stream.window.recent:
            return (
                f"its {name}s are coded in groups, and the last {stream.window.recent} are in none: a full block, which vLLM may "
                "share, would not be complete"
            )
        if size > LARGEST_BLOCK:
            return (
                f"its {name}s are coded {stream.window.flush} tokens at a time, and a block that ends where they do has {size} "
                f"tokens, more than {LARGEST_BLOCK}"
            )
        if getattr(stream.corrector, "shared", False):
            return f"its {name}s are coded with what the first sequence of a batch asks (shared), and vLLM's batches change"
    if recipe.key.window.sink > page_tokens(recipe):
        return f"its {recipe.key.window.sink} sink tokens do not fit into one page of {page_tokens(recipe)} tokens"
    return None


def check(recipe: Recipe) -> None:
    reason = refusal(recipe)
    if reason is not None:
        raise ValueError(f"recipe {recipe.name} cannot be served inside vLLM: {reason}")
