"""Checks whether recipes fit a model: reads a built-in text through the packed cache and compares with the full cache.

It takes seconds on a GPU and a minute or two on two cores for a small model. A recipe that learns only means is fitted first, on
the built-in calibration text. For other calibrated recipes an artifact is needed; without one the recipe is left out and reported.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvant import passages, recipes
from kvant.artifact import Artifact
from kvant.calibrate.artifact_cache import artifact_for
from kvant.calibrate.artifact_paths import cached
from kvant.calibrate.builtin import fits_in_seconds
from kvant.calibrate.capture import keys_of
from kvant.calibrate.run import model_name
from kvant.engines.fingerprint import fingerprint
from kvant.engines.hybrid import cache_for
from kvant.eval.teacher import Result, Segments, evaluate
from kvant.eval.why import explained
from kvant.layout import Layout
from kvant.layouts import Layouts
from kvant.ops import OPS, explain
from kvant.progress import Progress
from kvant.recipe import Recipe, spans
from kvant.shape import ModelShape
from kvant.verdicts import Verdict, keep, verdict, word_for

Tensor = torch.Tensor
TOKENS = 1024  # most tokens of the text that are read
LEAST = 16  # fewest tokens that can be judged
PROMPT = 3, 8  # the share of it that is prefilled and not scored
AT_ONCE = 8  # recipes that are measured with one pass of the full cache: a short text's keys take little memory


@dataclasses.dataclass(frozen=True)
class Checked:
    """Verdicts, in the order that was asked for; recipes that were left out, with the reason; the artifacts by recipe name."""

    verdicts: list[Verdict]
    left_out: dict[str, str]
    artifacts: dict[str, Artifact | None]


def check(
    model: Any,
    tokenizer: Any,
    recipe: str | Recipe | Sequence[str | Recipe] | None = None,
    **options: Any,
) -> list[Verdict]:
    """Whether recipes fit a model: a verdict (good, usable, unfit) on each, measured on a built-in text and stored.

    model, tokenizer  of transformers, loaded.
    recipe            one or several; without it, all that have fast kernels on the model's device and need no long fit.
    options           artifacts, fit, tokens, again, progress: those of `examine`.

    >>> import kvant
    >>> from kvant.models import tiny
    >>> [verdict] = kvant.check(*tiny(), "int8", tokens=256)
    >>> verdict.word, verdict.top1 > 0.8
    ('good', True)
    """
    asked = None if recipe is None else [recipe] if isinstance(recipe, str | Recipe) else list(recipe)
    found = examine(model, tokenizer, asked, **options)
    if asked is not None and found.left_out:
        raise ValueError("; ".join(f"recipe {name}: {reason}" for name, reason in found.left_out.items()))
    return found.verdicts


def examine(
    model: Any,
    tokenizer: Any,
    asked: Sequence[str | Recipe] | None = None,
    *,
    artifacts: Sequence[Artifact] = (),
    fit: bool = False,
    tokens: int = TOKENS,
    again: bool = True,
    progress: Progress | None = None,
) -> Checked:
    """As `check`; also says what was left out and why.

    artifacts  for calibrated recipes: the first that fits is used, else a cached one.
    fit        also fit recipes that learn more than means, on the built-in calibration text.
    tokens     of the built-in text that are read (default 1024, or all of it where it is shorter): more than the windows of
               every recipe, so that most of what is read is packed.
    again      measure even where a verdict is stored.
    """
    if tokens < LEAST:
        raise ValueError(f"tokens must be at least {LEAST}, got {tokens}")
    shape, named = ModelShape.of(model, hybrid=True), fingerprint(model)
    chosen = fast_recipes(model, shape) if asked is None else list(dict.fromkeys(recipes.get(each) for each in asked))
    found, left_out = _artifacts(model, tokenizer, chosen, artifacts, shape, named, fit, progress)
    chosen = [each for each in chosen if each.name not in left_out]
    digests = {each.name: "" if (a := found[each.name]) is None else a.digest for each in chosen}
    old = {} if again else {each.name: verdict(named, each, digests[each.name]) for each in chosen}
    todo = [each for each in chosen if old.get(each.name) is None]
    measured = _measure(model, tokenizer, todo, found, tokens, progress) if todo else {}
    dtype, name = str(model.dtype).removeprefix("torch."), model_name(model.config)
    out = []
    for each in chosen:
        if each.name not in measured:
            out.append(old[each.name])
            continue
        result, packed, noise, scored, why = measured[each.name]
        new = Verdict(
            recipe=each.name,
            fingerprint=named,
            recipe_digest=each.digest,
            artifact=digests[each.name],
            kl=result.kl,
            kl_se=result.kl_se,
            top1=result.top1,
            bpe=result.bpe,
            packed=packed,
            tokens=scored,
            dtype=dtype,
            noise=noise,
            why=why,
            model=name,
            seconds=round(result.seconds, 2),
        )
        out.append(new)
        if tokens >= TOKENS:  # verdicts on less text are not stored
            _keep(new)
    return Checked([each for each in out if each is not None], left_out, found)


def _keep(found: Verdict) -> None:
    try:
        keep(found)
    except OSError as error:
        warnings.warn(f"the verdict on {found.recipe} could not be stored: {error}", stacklevel=3)


def fast_recipes(model: Any, shape: ModelShape | None = None) -> list[Recipe]:
    """Recipes that have an implementation faster than the reference on the model's device, without the unquantized one."""
    shape = shape or ModelShape.of(model, hybrid=True)
    out = []
    for name in recipes.names():
        recipe = recipes.get(name)
        try:
            layout = Layout.of(recipe, shape.heads, shape.head_dim, dtype=shape.dtype, device=model.device)
        except ValueError:
            continue  # the recipe does not support the model's head dim
        fast = all(explain(op, layout, model.device)[0] not in (None, "reference") for op in OPS)
        if fast and name != "full":
            out.append(recipe)
    return out


# --- artifacts ----------------------------------------------------------------------------------------------------------


def _artifacts(
    model: Any,
    tokenizer: Any,
    chosen: Sequence[Recipe],
    given: Sequence[Artifact],
    shape: ModelShape,
    named: str,
    fit: bool,
    progress: Progress | None,
) -> tuple[dict[str, Artifact | None], dict[str, str]]:
    """An artifact for every recipe that needs one, by name, and why a recipe has none."""
    found: dict[str, Artifact | None] = {}
    left_out: dict[str, str] = {}
    for recipe in chosen:
        if not recipe.calibrated:
            found[recipe.name] = None
            continue
        fitting = _first_that_fits(given, recipe, shape, named) or cached(named, recipe)
        if fitting is not None:
            found[recipe.name] = fitting
        elif fit or fits_in_seconds(recipe):
            found[recipe.name] = artifact_for(model, tokenizer, recipe, progress=progress)
        else:
            left_out[recipe.name] = "needs a fit: --fit (fit=True) makes one on a built-in text and keeps it"
    return found, left_out


def _first_that_fits(given: Sequence[Artifact], recipe: Recipe, shape: ModelShape, named: str) -> Artifact | None:
    for artifact in given:
        if artifact.recipe.fits.items() >= recipe.fits.items():
            artifact.check(recipe, len(shape.layers), shape.heads, shape.head_dim, named)
            return artifact
    return None


# --- measuring ----------------------------------------------------------------------------------------------------------


def _measure(
    model: Any,
    tokenizer: Any,
    chosen: Sequence[Recipe],
    artifacts: Mapping[str, Artifact | None],
    tokens: int,
    progress: Progress | None,
) -> dict[str, tuple[Result, float, float | None, int, str]]:
    """By name: the result, how many packed tokens a scored one reads, the noise, how many were scored, and why."""
    segments = check_segment(model, tokenizer, tokens)
    asked = list(chosen)
    full = recipes.get("full")
    noisy = model.dtype != torch.float32  # in 16 bits another order of summation is visible
    if noisy and full not in asked:
        asked.append(full)

    def advance(done: int, total: int) -> None:
        if progress is not None:
            progress("checking", done, total)

    results: list[Result] = []
    each = segments.tokens
    for first in range(0, len(asked), AT_ONCE):
        some = asked[first : first + AT_ONCE]
        results += evaluate(
            model,
            some,
            segments,
            make_cache=lambda recipe: cache_for(model, recipe, artifact=artifacts.get(recipe.name)),
            progress=lambda done, _, before=first: advance(before * each + done, len(asked) * each),  # type: ignore[misc]
            together=AT_ONCE,
        )
    by_name = {result.recipe: result for result in results}
    noise = by_name["full"].kl if noisy else None
    keys: dict[int, Tensor] | None = None
    out: dict[str, tuple[Result, float, float | None, int, str]] = {}
    for recipe in chosen:
        result = by_name[recipe.name]
        packed = packed_read(recipe, segments)
        shape = ModelShape.of(model, hybrid=True).packed
        layouts = Layouts.of(
            recipe, len(shape.layers), shape.heads, shape.head_dim, dtype=shape.dtype, device=model.device
        )
        result = dataclasses.replace(result, bpe=layouts.bits_per_element())
        why = ""
        if packed >= 1 and word_for(result.kl, result.top1) != "good":
            if keys is None:
                keys = keys_of(model, segments.ids[0, : segments.prompt])
            why = explained(recipe, artifacts.get(recipe.name), result, keys)
        out[recipe.name] = (result, packed, noise, segments.tokens, why)
    return out


def check_segment(model: Any, tokenizer: Any, tokens: int = TOKENS) -> Segments:
    """The built-in text as one segment, cut to the model's context."""
    ids = passages.encode(tokenizer, passages.conversation())
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
    ids = ids[: min(tokens, longest)]
    return Segments(torch.tensor([ids]), max(1, len(ids) * PROMPT[0] // PROMPT[1]))


def packed_read(recipe: Recipe, segments: Segments) -> float:
    """How many packed tokens a scored token reads, on average over the scored ones."""
    lengths = range(segments.prompt + 1, segments.ids.shape[1])
    total = 0
    for n in lengths:
        total += sum(s.stop - s.start for s in spans(recipe, n) if "packed" in (s.key, s.value))
    return total / max(1, len(lengths))
