"""Scores of two caches on the same questions, compared question by question."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

Z95 = 1.959964  # of the normal distribution: 95 % lie within so many standard deviations


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A score, and its difference from that of the full cache.

    difference  mean over the questions.
    half        half of the 95 % interval of the difference: questions are a sample, paired by the question. None for fewer than
                two questions.
    wins        questions that score higher than with the full cache; losses: lower.
    """

    score: float
    difference: float
    half: float | None
    wins: int
    losses: int


def compare(scores: Sequence[float], full: Sequence[float]) -> Comparison:
    """Scores of the same questions, in the same order."""
    if len(scores) != len(full) or not scores:
        raise ValueError(
            f"expected as many scores as the full cache has, at least one, got {len(scores)} and {len(full)}"
        )
    differences = [a - b for a, b in zip(scores, full, strict=True)]
    n = len(scores)
    mean = sum(differences) / n
    half = None
    if n > 1:
        variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
        half = Z95 * math.sqrt(variance / n)
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Comparison(sum(scores) / n, mean, half, wins, losses)
