"""Recipes as points, and which of them no other recipe beats on both axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kvant.report.read import Result, Speed, Text
from kvant.report.served import Memory

ZERO_KL = 1e-5  # a KL below it is shown as 0: tables have five digits, and a log axis has no place for 0
ALWAYS_LABELLED = ("kvant-2", "kvant-3", "kvant-4")
LABEL_ALL = 12  # so many recipes or fewer are all labelled


@dataclasses.dataclass(frozen=True)
class Point:
    result: Result
    x: float  # bits, or speed
    front: bool = False
    labelled: bool = False
    reference: bool = False  # the unquantized cache, which was not measured: its KL is 0 by definition

    @property
    def name(self) -> str:
        return self.result.recipe

    @property
    def kl(self) -> float:
        return 0.0 if self.result.kl < ZERO_KL else self.result.kl


def by_bits(text: Text, memory: dict[str, Memory] | None) -> list[Point]:
    """Points at the user's context where memory is known, else at the bits of the evaluation. A recipe that could not be
    counted is left out: its bits at another context would be misread."""
    found = []
    for result in text.results:
        if memory is None:
            found.append(Point(result, result.bits))
        elif result.recipe in memory:
            found.append(Point(result, memory[result.recipe].bits))
    if "full" not in {result.recipe for result in text.results}:
        found.append(reference("16-bit cache", 16.0))
    return marked(found, smaller_is_better=True)


def by_speed(text: Text, speed: Speed) -> list[Point]:
    """Points of the recipes that were timed. A folded model has the same cache, so that it has the same quality."""
    timed = {timing.name.removesuffix(", folded"): timing.times for timing in speed.timings}
    found = [Point(r, timed[r.recipe]) for r in text.results if r.recipe in timed]
    return marked([*found, reference("full cache", 1.0)], smaller_is_better=False) if found else []


def reference(name: str, x: float) -> Point:
    return Point(Result(name, x, 0.0, None, 1.0, None, 0.0, (), None), x, reference=True)


def marked(points: Sequence[Point], smaller_is_better: bool) -> list[Point]:
    """Finite points, with the front and with who is labelled."""
    points = [point for point in points if math.isfinite(point.kl) and math.isfinite(point.x) and point.x > 0]
    sign = 1.0 if smaller_is_better else -1.0
    best = front([(sign * point.x, point.kl) for point in points])
    return [
        dataclasses.replace(
            point,
            front=i in best,
            labelled=i in best or point.name in ALWAYS_LABELLED or len(points) <= LABEL_ALL,
        )
        for i, point in enumerate(points)
    ]


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """The Pareto front: points that no other is at least as good as in both numbers and better in one. Smaller is better. Of
    equal points all are in it."""
    best: set[int] = set()
    lowest = math.inf
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        equal = any(points[i] == points[j] for j in best)
        if points[i][1] < lowest or equal:
            best.add(i)
            lowest = min(lowest, points[i][1])
    return best
