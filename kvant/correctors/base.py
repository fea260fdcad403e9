"""What a corrector is: it codes groups of tokens with an eye on the queries that will read them.

Decoding never knows of it. What it has learnt from a request's queries is its state: float32 numbers of each head that
belong to a sequence, are copied when it is forked, and go when it is freed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from kvant.codecs import BoundCodec, Codec, Parts
from kvant.spec import Spec

Tensor = torch.Tensor


class Progress(NamedTuple):
    """How far a sequence has come when new tokens arrive."""

    first: int  # the first token of the groups that is not packed yet
    before: int  # tokens before the new ones
    total: int  # tokens with the new ones
    sink: int  # the first token of the first group: the number of sinks, unless groups begin before their end
    ring: int  # tokens after the sinks that are held in full precision
    group: int  # tokens that are coded together


@dataclasses.dataclass(frozen=True)
class Corrector(Spec):
    """Base of all correctors."""

    def check(self, codec: Codec) -> None:
        """Refuses a codec that it cannot drive."""

    def check_dim(self, head_dim: int) -> None:
        """Refuses a head dim that it cannot take."""

    def state_shape(self, head_dim: int, ring: int) -> tuple[int, ...]:
        """Shape of the float32 numbers that a head of a sequence holds."""
        raise NotImplementedError(f"{type(self).__name__} must say what it remembers")

    def source(self, sequence: int) -> int:
        """Which sequence of a batch a sequence learns from: itself."""
        return sequence

    def observe(self, state: Tensor, queries: Tensor, keys: Tensor, progress: Progress) -> Tensor:
        """Learns from new tokens and says what `encode` has to know to code the tokens from `progress.first` on.

        state is [heads, *state_shape] and is changed in place; it is zero before the first token. queries are those of
        the new tokens, [new, heads, queries per head, head_dim]; keys are those of the tokens from `progress.first` to
        the last new one, [tokens, heads, head_dim]: both in the space of the stored keys.
        """
        raise NotImplementedError(f"{type(self).__name__} must learn from queries")

    def encode(self, x: Tensor, codec: BoundCodec, known: Tensor) -> Parts:
        """Parts of whole groups, [tokens, heads, head_dim], the first of which starts at `progress.first`."""
        raise NotImplementedError(f"{type(self).__name__} must encode")
