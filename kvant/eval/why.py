"""Why a recipe fails on a model, as far as its keys and the errors of its layers show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kvant.artifact import Artifact
from kvant.eval.teacher import Result
from kvant.recipe import MixedRecipe, Recipe

Tensor = torch.Tensor
BIASED = 3.0  # a mean of so many times the spread is worth a word
COARSE = 0.5  # so is a step of so many times the spread


@dataclasses.dataclass(frozen=True)
class KeyStats:
    """Of one head's keys, as a recipe is about to code them, in the head where it is worst."""

    mean: float  # norm of the mean over tokens, in terms of the spread
    largest: float  # root mean square of the largest channel, in terms of the typical one
    reach: float  # what one token's codes have to span, in terms of the spread of one channel over tokens


def key_stats(keys: Tensor) -> KeyStats:
    """keys [tokens, heads, head_dim]. The spread of a head is the root mean square over channels of the standard deviation over
    tokens: what tells one token from another."""
    x = keys.double()
    spread = x.var(0).mean(-1).sqrt().clamp_min(1e-30)  # [heads]
    mean = x.mean(0).square().mean(-1).sqrt()
    size = x.square().mean(0).sqrt()  # [heads, head_dim]
    largest = size.amax(-1) / size.median(-1).values.clamp_min(1e-30)
    reach = (x.amax(-1) - x.amin(-1)).median(0).values
    return KeyStats(float((mean / spread).max()), float(largest.max()), float((reach / spread).max()))


def explained(recipe: Recipe, artifact: Artifact | None, result: Result, keys: Mapping[int, Tensor]) -> str:
    """What can be seen of why a recipe fails: one sentence. keys are those of the layers with attention, by number."""
    layers = torch.tensor(result.layers, dtype=torch.float64).nan_to_num(float("inf"))
    place = int(layers.argmax())
    worst = list(keys)[place]
    error = f"layer {worst} is worst: its attention is off by {result.layers[place]:.0%} of its energy"
    bits = getattr(recipe.key.codec, "bits", None)
    if (
        isinstance(recipe, MixedRecipe)
        or recipe.key.groupwise
        or recipe.key.rope != "post"
        or not isinstance(bits, int)
    ):
        return error
    biased = max(keys, key=lambda layer: key_stats(keys[layer]).mean)
    raw = key_stats(keys[biased])
    coded = key_stats(_transformed(recipe, artifact, biased, keys[biased]))
    steps = coded.reach / (2**bits - 1)
    if coded.mean >= BIASED and steps > COARSE:
        how = (
            "the rotation spreads it over all channels"
            if recipe.key.transforms
            else f"its largest channel is {raw.largest:.0f} times the typical one"
        )
        return (
            f"layer {biased}'s keys have a mean {raw.mean:.0f} times their spread and {how}: one step of {bits}-bit codes is "
            f"{steps:.1f} times the spread that tells tokens apart; {error}"
        )
    if bits <= 3 and not recipe.key.window.recent:
        return f"{bits} bits have {2**bits} levels for a key, with no full-precision window beside them; {error}"
    return error


def _transformed(recipe: Recipe, artifact: Artifact | None, layer: int, keys: Tensor) -> Tensor:
    """Keys as the recipe's codec gets them."""
    x = keys.float()
    for place, part in enumerate(recipe.key.transforms):
        prefix = f"key.transforms[{place}]."
        stored = {} if artifact is None else artifact.tensors[layer]
        tensors = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
        x = part.bind(x.shape[-1], tensors, x.device).forward(x)
    return x
