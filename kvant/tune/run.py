"""From a model and a budget of bits to an artifact with a recipe for every layer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from kvant import passages, recipes
from kvant.artifact import Artifact
from kvant.calibrate import text as texts
from kvant.calibrate.artifact_paths import artifact_path, cached
from kvant.calibrate.checkpoint import Unfinished
from kvant.calibrate.run import Source, calibrate_all, source_ids
from kvant.engines.fingerprint import fingerprint
from kvant.engines.hf import Cache
from kvant.eval.segments import Segments, beginning
from kvant.eval.teacher import Result, evaluate
from kvant.layout import Layout
from kvant.layouts import Layouts
from kvant.progress import Progress
from kvant.recipe import MixedRecipe, Recipe, Window
from kvant.shape import ModelShape
from kvant.tune import candidates, knapsack
from kvant.tune.candidates import BASE, CANDIDATES, RECENT, Options
from kvant.tune.sensitivity import Choice, Sensed, Table, measure
from kvant.version import VERSION

Tensor = torch.Tensor
CONTEXT = 32768
EXCERPTS = 4  # of the text, on which sensitivity is measured
EXCERPT_TOKENS = 1024
HELD_OUT = 1, 4  # share of a given text that nothing is fitted to or chosen on
RECIPES = (
    6  # different ones that layers have, at most: servers prepare a step, and GPUs compile kernels, for each of them
)
SCORED = 2048  # tokens of the held-out text that are scored, at most


@dataclasses.dataclass(frozen=True)
class Layer:
    """What was chosen for a layer: its recipe, its bits at the context, and the KL that is predicted of its keys and values."""

    recipe: str
    bits: float
    key_kl: float
    value_kl: float


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A tuned recipe with its artifact. KLs are of the next token against the full cache, nats."""

    artifact: Artifact
    bits: float  # per cached number at `context` tokens, windows counted, mean over layers
    context: int
    window: Window
    layers: tuple[Layer, ...]
    predicted: float  # KL of the tuned recipe, the sum over layers and streams
    predicted_base: float | None  # of the uniform recipe in all layers; None where its streams are no candidates
    results: tuple[Result, ...]  # measured on held-out text: tuned, then the uniform recipe
    base_bits: float  # of the uniform recipe, at `context` tokens
    refused: dict[str, str]  # candidates that fast kernels do not serve, and why


@dataclasses.dataclass(frozen=True)
class Texts:
    """What is fitted on (None: the built-in text), what sensitivity is measured on, within the same text, and what the result is
    measured on."""

    fit: Source | None
    excerpts: list[Tensor]
    held_out: Segments


def texts_of(tokenizer: Any, text: Source | None, longest: int | None) -> Texts:
    """Parts of a given text, of which the last quarter is held out; or the built-in texts."""
    length, bos = min(EXCERPT_TOKENS, longest or EXCERPT_TOKENS), getattr(tokenizer, "bos_token_id", None)
    if text is None:
        rest = passages.encode(tokenizer, passages.conversation())
        return Texts(None, longest_pieces(tokenizer, length), _segments(rest, length, bos))
    ids = source_ids(tokenizer, text)
    cut = len(ids) - len(ids) * HELD_OUT[0] // HELD_OUT[1]
    fit, rest = ids[:cut], ids[cut:].tolist()
    if len(rest) < 64:
        raise ValueError(f"the text has {len(ids)} tokens, too few to fit, choose and measure on: give 256 or more")
    count = min(EXCERPTS, max(1, len(fit) // length))
    held_out = _segments([*beginning(ids.tolist(), bos), *rest], length, bos)
    return Texts(fit, texts.cut(fit, min(len(fit), count * length), length), held_out)


def longest_pieces(tokenizer: Any, length: int) -> list[Tensor]:
    """The longest pieces of the built-in text, of a kind each, cut to a length: in short ones little is beyond the windows."""
    found = [
        max((passages.encode(tokenizer, piece)[:length] for piece in pieces), key=len)
        for pieces in passages.pieces().values()
    ]
    return [torch.tensor(ids, dtype=torch.int32) for ids in sorted(found, key=len, reverse=True)[:EXCERPTS]]


def _segments(ids: list[int], length: int, bos: int | None) -> Segments:
    """What the result is measured on: segments of at most `length` tokens, a quarter of each prefilled. As in `kvant eval`, each
    begins as the text does."""
    context = min(length, len(ids) - 1)
    prompt = max(1, context // 4)
    return Segments.over(ids, context, min(SCORED, max(1, len(ids) // context) * (context - prompt)), prompt, bos)


def limits(shape: ModelShape, chosen: Sequence[Recipe], windows: Sequence[Window], context: int) -> tuple[float, float]:
    """The fewest and the most bits per number that candidates can make at a context."""
    found = []
    for window in windows:
        own = candidates.options([candidates.windowed(recipe, window) for recipe in chosen], shape)
        for _, _, made in candidates.pairs(own, shape):
            layout = Layout.of(made, shape.heads, shape.head_dim, dtype=shape.dtype)
            found.append(layout.bits_per_element(context))
    if not found:
        raise ValueError(f"fast kernels serve none of the candidates {', '.join(recipe.name for recipe in chosen)}")
    return min(found), max(found)


def check(
    shape: ModelShape, bits: float, context: int, chosen: Sequence[Recipe], windows: Sequence[Window]
) -> tuple[float, float]:
    """Refuses a budget that candidates cannot meet, from the model's shape alone; returns the fewest and the most bits."""
    if context < 1:
        raise ValueError(f"context must be positive, got {context}")
    least, most = limits(shape, chosen, windows, context)
    if not math.isfinite(bits) or bits < least:
        raise ValueError(
            f"bits must be at least {least:.3f}, which the smallest candidates take at {context} tokens, got {bits:g}"
        )
    if bits > most:
        raise ValueError(
            f"bits must be at most {most:.3f}, which the largest candidates take at {context} tokens, got {bits:g}: there is "
            "nothing to choose, name a recipe"
        )
    return least, most


def windows_of(recent: Sequence[int]) -> list[Window]:
    """Windows with the sinks of the base recipe, keys and values in full precision."""
    sink = recipes.get(BASE).key.window.sink
    return [Window(sink, each) for each in dict.fromkeys(recent)]


@dataclasses.dataclass(frozen=True)
class Study:
    """A model's candidates, fitted, and its sensitivity to each of them: what does not depend on the budget."""

    model: Any
    shape: ModelShape
    texts: Texts
    candidates: Sequence[Recipe]
    windows: Sequence[Window]
    options: Options
    artifacts: dict[Recipe, Artifact | None]
    table: Table

    def tune(self, bits: float, context: int = CONTEXT, most: int = RECIPES, progress: Progress | None = None) -> Tuned:
        """Chooses a recipe for every layer under a budget, and measures it on the held-out text."""
        shape, table = self.shape, self.table
        check(shape, bits, context, self.candidates, self.windows)
        window, picked = _pick(shape, bits, context, self.options, self.windows, table, most)
        layers = [candidates.windowed(made, window) for _, _, made in picked]
        own = recipes.get(BASE)
        mixed = MixedRecipe.of(f"tuned-{bits:g}", candidates.windowed(own, window), layers)
        artifact = _artifact(mixed, picked, self.artifacts, shape, {"bits": bits, "context": context})
        fitted = next(each for each in self.artifacts.values() if each is not None and each.recipe.fits == own.fits)
        by_name = {mixed.name: artifact, own.name: fitted.serving(own)}
        results = evaluate(
            self.model,
            [mixed, own],
            self.texts.held_out,
            make_cache=lambda recipe: Cache(self.model, recipe, artifact=by_name[recipe.name]),
            progress=None if progress is None else lambda done, total: progress("measuring the result", done, total),
        )
        size = len(shape.layers), shape.heads, shape.head_dim
        layouts = Layouts.of(mixed, *size, dtype=shape.dtype)
        chosen = [
            Layer(
                recipe.name,
                layouts.layers[i].bits_per_element(context),
                table.kl[window, i, picked[i][0]],
                table.kl[window, i, picked[i][1]],
            )
            for i, recipe in enumerate(layers)
        ]
        return Tuned(
            artifact=artifact,
            bits=layouts.bits_per_element(context),
            context=context,
            window=window,
            layers=tuple(chosen),
            predicted=sum(layer.key_kl + layer.value_kl for layer in chosen),
            predicted_base=_predicted(own, self.options, table, len(shape.layers)),
            results=tuple(results),
            base_bits=Layouts.of(own, *size, dtype=shape.dtype).bits_per_element(context),
            refused=self.options.refused,
        )


def study(
    model: Any,
    tokenizer: Any,
    text: Source | None = None,
    *,
    chosen: Sequence[str | Recipe] = CANDIDATES,
    recent: Sequence[int] = RECENT,
    tokens: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    unfinished: Unfinished | None = None,
) -> Study:
    """Fits the candidates and measures how much the model's output depends on each of them in every layer. `unfinished` keeps
    what was measured where it is interrupted."""
    shape = ModelShape.of(model)
    named = candidates.parse([each.name if isinstance(each, Recipe) else each for each in chosen])
    windows = windows_of(recent)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    found = texts_of(tokenizer, text, longest)
    options = candidates.options([candidates.windowed(recipe, windows[0]) for recipe in named], shape)
    sources = dict.fromkeys(choice.recipe for choice in options.choices)
    base = candidates.windowed(recipes.get(BASE), windows[0])
    artifacts = _fit(model, tokenizer, [base, *sources], found.fit, tokens, seed, progress)
    tensors = {recipe: {} if (made := artifacts[recipe]) is None else made.tensors for recipe in sources}
    decides = [
        *(VERSION, fingerprint(model), texts.digest(found.excerpts), seed, len(shape.layers)),
        [(choice.stream, choice.recipe.digest) for choice in options.choices],
        [None if made is None else made.digest for made in artifacts.values()],
        [dataclasses.asdict(window) for window in windows],
    ]
    checkpoint = None if unfinished is None else unfinished.open("sensitivity", decides)
    sensed = Sensed(None if checkpoint is None else checkpoint.load())
    if unfinished is not None and checkpoint is not None:
        unfinished.hold(checkpoint, sensed)
    more: dict[str, Any] = {"seed": seed, "progress": progress, "sensed": sensed}
    table = measure(model, found.excerpts, options.choices, tensors, windows, **more)
    return Study(model, shape, found, named, windows, options, artifacts, table)


def tune(
    model: Any,
    tokenizer: Any,
    bits: float,
    text: Source | None = None,
    *,
    context: int = CONTEXT,
    chosen: Sequence[str | Recipe] = CANDIDATES,
    recent: Sequence[int] = RECENT,
    most: int = RECIPES,
    tokens: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuned:
    """Chooses a recipe for every layer, under a budget of bits per cached number, and fits it. For several budgets, make one
    `study` and call its `tune`.

    bits      per cached number of a sequence of `context` tokens, windows counted, mean over layers.
    text      what the recipes are fitted to and chosen on: a string, token ids, or chats. Its last quarter is held out, to measure
              on. Default: the built-in texts.
    chosen    candidates: recipes whose key and value streams layers may combine.
    recent    windows that are tried, in recent tokens; one is taken for all layers.
    most      different recipes that layers have, at most.
    tokens    that the recipes are fitted to, as in `calibrate`.
    """
    named = candidates.parse([each.name if isinstance(each, Recipe) else each for each in chosen])
    check(ModelShape.of(model), bits, context, named, windows_of(recent))
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    options: dict[str, Any] = {"chosen": named, "recent": recent, "tokens": tokens, "seed": seed, "progress": progress}
    unfinished = Unfinished(resume=True)
    with unfinished:
        return study(model, tokenizer, text, **options, unfinished=unfinished).tune(bits, context, most, progress)


def _fit(
    model: Any,
    tokenizer: Any,
    wanted: Sequence[Recipe],
    text: Source | None,
    tokens: int | None,
    seed: int,
    progress: Progress | None,
) -> dict[Recipe, Artifact | None]:
    """An artifact for each of the recipes, None where it needs none. Recipes whose fit is the same are fitted once. Fits on the
    built-in text are those that other commands cache and take."""

    def kind_of(recipe: Recipe | MixedRecipe) -> str:
        return str(sorted(recipe.fits.items()))

    named, shared = fingerprint(model), text is None and tokens is None and seed == 0
    kinds: dict[str, Recipe] = {}
    for recipe in wanted:
        if recipe.calibrated:
            kinds.setdefault(kind_of(recipe), recipe)
    found = {kind: cached(named, recipe) if shared else None for kind, recipe in kinds.items()}
    missing = [recipes.as_fitted(recipe) for kind, recipe in kinds.items() if found[kind] is None]
    made = (
        calibrate_all(model, tokenizer, missing, text, tokens=tokens, seed=seed, progress=progress) if missing else []
    )
    for artifact in made:
        found[kind_of(artifact.recipe)] = artifact
        if shared:
            with contextlib.suppress(OSError):  # the artifact that is written in the end has all that is needed
                artifact.save(artifact_path(named, artifact.recipe))
    out: dict[Recipe, Artifact | None] = dict.fromkeys(wanted)
    for recipe in wanted:
        if recipe.calibrated:
            fitted = found[kind_of(recipe)]
            assert fitted is not None
            out[recipe] = fitted.serving(recipe)
    return out


def _pick(
    shape: ModelShape,
    bits: float,
    context: int,
    found: Options,
    windows: Sequence[Window],
    table: Table,
    most: int,
) -> tuple[Window, list[tuple[Choice, Choice, Recipe]]]:
    """The window and the pair of every layer with the least predicted KL within the budget."""
    layers = len(shape.layers)
    pairs = list(candidates.pairs(found, shape))
    total = bits * 2 * context * shape.heads * shape.head_dim * layers / 8  # bytes of a sequence
    best: tuple[float, Window, list[int]] | None = None
    for window in windows:
        layouts = [
            Layout.of(candidates.windowed(made, window), shape.heads, shape.head_dim, dtype=shape.dtype)
            for _, _, made in pairs
        ]
        pages, overlay = layouts[0].pages_for(context), layouts[0].overlay_bytes
        budget = math.floor((total + 1e-6 - layers * overlay) / pages)
        if budget < layers * min(layout.page_bytes for layout in layouts):
            continue
        options = [
            [
                knapsack.Option(layout.page_bytes, table.kl[window, layer, key] + table.kl[window, layer, value])
                for (key, value, _), layout in zip(pairs, layouts, strict=True)
            ]
            for layer in range(layers)
        ]
        chosen = knapsack.choose_few(options, budget, most)
        loss = sum(options[layer][i].loss for layer, i in enumerate(chosen))
        if best is None or loss < best[0]:
            best = loss, window, chosen
    assert best is not None, "the budget was checked against the smallest window"
    return best[1], [pairs[i] for i in best[2]]


def _artifact(
    mixed: MixedRecipe,
    picked: Sequence[tuple[Choice, Choice, Recipe]],
    artifacts: dict[Recipe, Artifact | None],
    shape: ModelShape,
    tuned: dict[str, Any],
) -> Artifact:
    """The calibrated tensors of every layer, keys' and values' each from the fit of the recipe that they come from."""
    tensors: dict[int, dict[str, Tensor]] = {}
    source: dict[str, Any] = {}
    for layer, (key, value, _) in enumerate(picked):
        tensors[layer] = {}
        for choice in (key, value):
            fitted = artifacts[choice.recipe]
            if fitted is None:
                continue
            source = source or fitted.source
            own = fitted.tensors[layer]
            tensors[layer] |= {name: t for name, t in own.items() if name.startswith(f"{choice.stream}.")}
    return Artifact(mixed, shape.heads, shape.head_dim, len(shape.layers), tensors, source | {"tuned": tuned})


def _predicted(recipe: Recipe, found: Options, table: Table, layers: int) -> float | None:
    """The predicted KL of one recipe in all layers; None where its streams or its window were not measured."""
    window = recipe.key.window
    choices = []
    for stream, own in (("key", recipe.key), ("value", recipe.value)):
        bare = dataclasses.replace(own, window=Window())
        fitting = [
            c for c in found.choices if c.stream == stream and dataclasses.replace(c.spec, window=Window()) == bare
        ]
        choices += fitting[:1]
    if len(choices) < 2 or (window, 0, choices[0]) not in table.kl:
        return None
    return sum(table.kl[window, layer, choice] for layer in range(layers) for choice in choices)
