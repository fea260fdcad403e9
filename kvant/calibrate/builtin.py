"""The text that recipes are fitted on where none is given: excerpts of kvant's own (kvant.passages), as the model serves them.

Every kind of text has the same share of the tokens, in equal parts of as many pieces as it takes. A chat is put through the
model's chat template. An excerpt begins at position 0 with what the template writes first. It is one piece; of some kinds all
pieces, one after another, are cut into excerpts, so that contexts are short and long, as they are in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvant import passages
from kvant.recipe import Recipe
from kvant.transforms.affine_map import Mean

Tensor = torch.Tensor
TOKENS = 8192  # that are read on a CPU
GPU_TOKENS = 65536  # that are read on a GPU, where they take seconds: all of the built-in text
MEAN_TOKENS = 1024  # tokens that are read to fit means alone
FEWEST_FOR_MEANS = 128
FEWEST_PER_CHANNEL = 8
LEAST = 96  # tokens of a kind: with fewer for each, fewer kinds are read
JOINED = ("code", "dialogue", "prose", "tools")  # kinds whose pieces are read as one long excerpt


def fits_in_seconds(recipe: Recipe) -> bool:
    """Whether a recipe learns only means, for which a few hundred tokens are enough."""
    parts = [part for stream in recipe.streams.values() for part in stream.parts.values() if part.calibrated]
    return bool(parts) and all(isinstance(part, Mean) for part in parts)


def most_tokens(device: torch.device) -> int:
    """How many tokens of a text are read where no number is given."""
    return TOKENS if device.type == "cpu" else GPU_TOKENS


def tokens_for(recipe: Recipe, device: torch.device) -> int:
    """How many tokens of the built-in text a recipe is fitted on, where it has so many."""
    return MEAN_TOKENS if fits_in_seconds(recipe) else most_tokens(device)


def fewest_tokens(recipe: Recipe, head_dim: int) -> int:
    """Tokens below which a recipe's fit is poor. The covariance of a head's d channels has full rank from d tokens on, and takes a
    few times as many to be that of other texts too; a mean takes fewer."""
    return FEWEST_FOR_MEANS if fits_in_seconds(recipe) else FEWEST_PER_CHANNEL * head_dim


def excerpts(tokenizer: Any, tokens: int, length: int, *, exactly: bool = False) -> list[Tensor]:
    """Excerpts int32 [n] of at most `length` tokens, together `tokens`, or all there is: `exactly` refuses a text that is too
    short."""
    encoded = {
        kind: [torch.tensor(passages.encode(tokenizer, piece)[:length], dtype=torch.int32) for piece in found]
        for kind, found in passages.pieces().items()
    }
    sizes = {kind: sum(map(len, found)) for kind, found in encoded.items()}
    if exactly and tokens > sum(sizes.values()):
        raise ValueError(
            f"the built-in text has {sum(sizes.values())} tokens in excerpts of at most {length}, expected at least {tokens}: "
            "give a longer text"
        )
    kinds = kinds_read(tokens, length)
    out: list[Tensor] = []
    for kind, share in zip(kinds, shares(tokens, [sizes[kind] for kind in kinds]), strict=True):
        lengths = list(map(len, encoded[kind]))
        count = 1  # pieces: as few as have so many tokens, so that contexts are long
        while sum(lengths[:count]) < share:
            count += 1
        cut = [ids[:n] for ids, n in zip(encoded[kind], shares(share, lengths[:count]), strict=False) if n]
        out += torch.cat(cut).split(length) if kind in JOINED else cut
    return out


def kinds_read(tokens: int, length: int) -> list[str]:
    """The kinds that excerpts of at most `length` tokens, together `tokens`, are of."""
    return list(passages.pieces())[: max(1, tokens // min(LEAST, length))]


def shares(total: int, sizes: Sequence[int]) -> list[int]:
    """Splits a total evenly; what one size cannot take goes to the others."""
    out = [0] * len(sizes)
    for taken, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        out[i] = min(sizes[i], (total - sum(out)) // (len(sizes) - taken))
    return out
