"""Calibration from a model to an artifact."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvant import passages, recipes
from kvant.artifact import SCHEME, Artifact
from kvant.calibrate import builtin
from kvant.calibrate import text as texts
from kvant.calibrate.capture import Measured, gather
from kvant.calibrate.checkpoint import Unfinished
from kvant.calibrate.fitting import Statistic, fit_layer, statistics_of
from kvant.calibrate.gatherer import Plan
from kvant.chats import Chats
from kvant.codecs.affine import Affine
from kvant.engines.fingerprint import fingerprint
from kvant.engines.fold import folded
from kvant.engines.hf import ModelShape
from kvant.progress import Progress
from kvant.recipe import MixedRecipe, Recipe
from kvant.version import VERSION

Tensor = torch.Tensor
Source = str | Tensor | Chats  # of what is read: a text, its token ids, or chats
EXCERPT_TOKENS = 1024


def calibrate(
    model: Any,
    tokenizer: Any,
    recipe: str | Recipe,
    text: Source | None = None,
    *,
    tokens: int | None = None,
    max_position: int | None = None,
    seed: int = 0,
    excerpt_tokens: int = EXCERPT_TOKENS,
    progress: Progress | None = None,
    resume: bool = True,
    run: int | None = None,
) -> Artifact:
    """Fits a recipe to a model.

    model, tokenizer  a transformers model that the engine serves, and its tokenizer (None where `text` is token ids).
    text              what the model reads while it is measured: a string, token ids [n], or `kvant.chats.Chats`, which go
                      through the tokenizer's chat template; without it, the built-in text (kvant.calibrate.builtin).
    tokens            number of tokens to read (default 8192, on a GPU 65536, or all of a shorter text), spread evenly over
                      the text. Of the built-in text, a recipe that learns only means reads 1024 by default.
    max_position      positions [0, max_position) will be served; statistics cover all of them (default: as many as the
                      model allows).
    excerpt_tokens    tokens of an excerpt: the text is cut into excerpts, each read from position 0.
    progress          called with (stage, done, total); stages are measuring and fitting.
    resume            write checkpoints to the user's cache directory, and continue from one that is there.
    run               deprecated name of `excerpt_tokens`.
    """
    if run is not None:
        warnings.warn("run= of calibrate is now called excerpt_tokens=", DeprecationWarning, stacklevel=2)
        excerpt_tokens = run
    (artifact,) = calibrate_all(
        model,
        tokenizer,
        [recipes.get(recipe)],
        text,
        tokens=tokens,
        max_position=max_position,
        seed=seed,
        excerpt_tokens=excerpt_tokens,
        progress=progress,
        resume=resume,
    )
    return artifact


def calibrate_all(
    model: Any,
    tokenizer: Any,
    chosen: Sequence[Recipe],
    text: Source | None = None,
    *,
    tokens: int | None = None,
    max_position: int | None = None,
    seed: int = 0,
    excerpt_tokens: int = EXCERPT_TOKENS,
    progress: Progress | None = None,
    resume: bool = True,
) -> list[Artifact]:
    """As `calibrate`, for several recipes. Recipes that need the same statistics (`_look`) share one pass over the text."""
    for recipe in chosen:
        _check(recipe)
    if folded(model.config) is not None:
        raise ValueError("cannot calibrate this model: its weights have value transforms folded in; load it anew")
    shape = ModelShape.of(model, hybrid=True)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_position is None:
        if longest is None:
            raise ValueError("max_position must be given: the model's config does not say how many positions it serves")
        max_position = longest
    for name, value in (("tokens", tokens), ("max_position", max_position), ("excerpt_tokens", excerpt_tokens)):
        if value is not None and value < 2:  # a token alone is read by no other
            raise ValueError(f"{name} must be at least 2, got {value}")
    tensors: list[dict[int, dict[str, Tensor]]] = [{} for _ in chosen]
    sources: list[dict[str, Any]] = [{} for _ in chosen]
    read: dict[tuple[int, int], tuple[list[Tensor], dict[str, Any]]] = {}  # excerpts and their source
    named = fingerprint(model)
    unfinished = Unfinished(resume)
    with unfinished:
        device = model.get_input_embeddings().weight.device
        wanted = [tokens or _default_tokens(recipe, text, device) for recipe in chosen]
        for look, some in dict.fromkeys(zip(map(_look, chosen), wanted, strict=True)):
            mine = [i for i, recipe in enumerate(chosen) if (_look(recipe), wanted[i]) == (look, some)]
            sink, recent, attention_weighted, block = look
            length = min(max(excerpt_tokens, 2 * sink), max_position, longest or max_position)
            if (length, some) not in read:
                read[length, some] = _excerpts(tokenizer, text, some, length, exactly=tokens is not None)
            excerpts, source = read[length, some]
            count = sum(map(len, excerpts))
            plan = Plan(len(excerpts), count, max_position, sink, recent, seed, attention_weighted, block)
            plan = plan.reduced(frozenset[Statistic]().union(*(statistics_of(chosen[i]) for i in mine)))
            decides = [VERSION, named, texts.digest(excerpts), dataclasses.asdict(plan), [chosen[i].fits for i in mine]]
            checkpoint = unfinished.open("fit", decides)
            fitted = Fitted(len(mine), {} if checkpoint is None else checkpoint.load())
            sums = unfinished.open("measured", decides)
            measured = Measured(excerpts, {} if sums is None else sums.load())
            if checkpoint is not None and sums is not None:
                unfinished.hold(checkpoint, fitted)
                unfinished.hold(sums, measured)
            for layer, stats in gather(model, excerpts, plan, progress, skip=fitted.layers, measured=measured):
                fitted.layers[layer] = [
                    {name: tensor.cpu() for name, tensor in fit_layer(chosen[i], stats).items()} for i in mine
                ]
                if checkpoint is not None and checkpoint.due:
                    checkpoint.save(fitted.tensors)
                if progress is not None:
                    progress("fitting", len(fitted.layers), len(shape.attention_layers))
            for at, i in enumerate(mine):
                tensors[i] = {layer: fitted.layers[layer][at] for layer in sorted(fitted.layers)}
                sources[i] = source | {
                    "fingerprint": named,
                    "fingerprint_scheme": SCHEME,
                    "model_name": model_name(model.config),
                    "model_type": model.config.model_type,
                    "tokens": count,
                    "max_position": max_position,
                    "seed": seed,
                    "version": VERSION,
                }
    layers = len(shape.layers)
    return [
        Artifact(recipe, shape.heads, shape.head_dim, layers, found, source)
        for recipe, found, source in zip(chosen, tensors, sources, strict=True)
    ]


class Fitted:
    """Fitted tensors so far, by layer and recipe. A checkpoint holds them."""

    def __init__(self, recipes: int, kept: dict[str, Tensor]) -> None:
        """`kept` is the content of a checkpoint, in the form of `tensors`."""
        self.layers: dict[int, list[dict[str, Tensor]]] = {}
        for key, tensor in kept.items():
            layer, recipe, name = key.split(".", 2)
            self.layers.setdefault(int(layer), [{} for _ in range(recipes)])[int(recipe)][name] = tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{layer}.{recipe}.{name}": tensor
            for layer, found in self.layers.items()
            for recipe, named in enumerate(found)
            for name, tensor in named.items()
        }

    def __str__(self) -> str:
        return f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"


def _look(recipe: Recipe) -> tuple[int, int, bool, int]:
    """(sink, recent, attention_weighted, RoPE block): what decides which statistics are gathered."""
    window = recipe.key.window
    return window.sink, window.recent, recipe.attention_weighted, recipe.key.effective_rope_block


def _check(recipe: Recipe) -> None:
    if isinstance(recipe, MixedRecipe):
        raise ValueError(
            f"recipe {recipe.name} has a recipe for every layer, which kvant tune chooses and fits together"
        )
    if not recipe.calibrated:
        raise ValueError(f"recipe {recipe.name} has nothing to calibrate")
    if recipe.wants_rope and recipe.key.codec.calibrated and isinstance(recipe.key.codec, Affine):
        raise ValueError(
            f"cannot calibrate recipe {recipe.name}: its clip is searched on keys after RoPE, it stores them unrotated"
        )


def _default_tokens(recipe: Recipe, text: Source | None, device: torch.device) -> int:
    return builtin.tokens_for(recipe, device) if text is None else builtin.most_tokens(device)


def _excerpts(
    tokenizer: Any, text: Source | None, tokens: int, length: int, *, exactly: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """The excerpts to measure on, and the description of their source that the artifact stores. `exactly` refuses a text with
    fewer tokens."""
    source: dict[str, Any] = {"text_sha256": text_digest(text)}
    if tokenizer is None and not isinstance(text, Tensor):
        what = "a string" if isinstance(text, str) else "chats" if isinstance(text, Chats) else "not given"
        raise ValueError(f"text is {what}: a tokenizer is needed, or token ids in its place")
    if text is None:
        source |= {"text": "built in", "kinds": builtin.kinds_read(tokens, length)}
        return builtin.excerpts(tokenizer, tokens, length, exactly=exactly), source
    ids = source_ids(tokenizer, text)
    least = max(2, tokens if exactly else 0)
    if len(ids) < least:
        raise ValueError(f"the text has {len(ids)} tokens, expected at least {least}")
    excerpts = texts.cut(ids, min(len(ids), tokens), length)
    return excerpts, source | {"text": "chats" if isinstance(text, Chats) else "given"}


def source_ids(tokenizer: Any, text: Source) -> Tensor:
    """Token ids of a given text: int32 [n]."""
    if isinstance(text, str):
        return texts.encode(tokenizer, text)
    if isinstance(text, Chats):
        return torch.tensor(text.ids(tokenizer), dtype=torch.int32)
    return text.cpu().flatten().to(torch.int32)


def text_digest(text: Source | None) -> str:
    """SHA-256 of a given text, or of the built-in one."""
    if text is None:
        return passages.digest("fit")
    if isinstance(text, Chats):
        return text.digest
    return hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else texts.digest([text.cpu().flatten()])


def model_name(config: Any) -> str:
    """A model's name for messages: its id, also where it is a directory in the hub's cache, or the last part of its path."""
    named = str(getattr(config, "_name_or_path", "") or "")
    hub = re.search(r"models--([^/]+)--([^/]+)/snapshots/", named)
    if hub is not None:
        return f"{hub[1]}/{hub[2]}"
    return Path(named).name if Path(named).is_dir() else named
