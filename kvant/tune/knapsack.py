"""Choosing one option for every layer: the least total loss within a total cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Option(NamedTuple):
    """What a layer may have: its cost, a whole number, and its loss."""

    cost: int
    loss: float


def pareto(options: Sequence[Option]) -> list[int]:
    """Indices of the options that no other one beats in both cost and loss, cheapest first."""
    out: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].loss)):
        if not out or options[i].loss < options[out[-1]].loss:
            out.append(i)
    return out


def choose(layers: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """The option of every layer with the least sum of losses, exactly, among those whose costs sum to at most the budget.

    Dynamic programming over costs: best[c] is the least loss of the layers so far at total cost c. Costs are divided by their
    greatest common divisor after the cheapest option of every layer is paid.
    """
    kept = [pareto(options) for options in layers]
    least = [options[some[0]].cost for options, some in zip(layers, kept, strict=True)]
    left = budget - sum(least)
    if left < 0:
        raise ValueError(f"the cheapest options cost {sum(least)}, the budget is {budget}")
    extra = [[options[i].cost - first for i in some] for options, some, first in zip(layers, kept, least, strict=True)]
    unit = math.gcd(*(cost for costs in extra for cost in costs)) or 1
    room = min(left // unit, sum(costs[-1] for costs in extra) // unit)
    best = np.zeros(room + 1)
    taken: list[np.ndarray] = []
    for options, some, costs in zip(layers, kept, extra, strict=True):
        new = np.full(room + 1, np.inf)
        which = np.zeros(room + 1, dtype=np.int32)
        for place, cost in enumerate(costs):
            step = cost // unit
            if step > room:
                break
            found = best[: room + 1 - step] + options[some[place]].loss
            better = found < new[step:]
            new[step:][better] = found[better]
            which[step:][better] = place
        best = new
        taken.append(which)
    at = int(best.argmin())
    out: list[int] = []
    for which, some, costs in zip(reversed(taken), reversed(kept), reversed(extra), strict=True):
        place = int(which[at])
        out.append(some[place])
        at -= costs[place] // unit
    return out[::-1]


def choose_few(layers: Sequence[Sequence[Option]], budget: int, most: int) -> list[int]:
    """As `choose`, with at most so many different options over all layers. All layers have the same options, in the same order,
    which cost the same in each. Where the best choice has more of them, a set is grown one at a time, by what reduces the loss most,
    and after each step options are exchanged as long as that helps: not exact, and near it."""
    if most < 1:
        raise ValueError(f"expected a number of options from 1, got {most}")
    best = choose(layers, budget)
    if len(set(best)) <= most:
        return best
    count = len(layers[0])

    def solved(some: Sequence[int]) -> tuple[float, list[int]]:
        part = [[options[i] for i in some] for options in layers]
        if sum(min(option.cost for option in options) for options in part) > budget:
            return math.inf, []
        found = [some[place] for place in choose(part, budget)]
        return sum(options[i].loss for options, i in zip(layers, found, strict=True)), found

    chosen: list[int] = []
    least: tuple[float, list[int]] = (math.inf, [])
    while len(chosen) < most:
        more = [(solved([*chosen, i]), i) for i in range(count) if i not in chosen]
        least, added = min(more, key=lambda each: each[0][0])
        chosen.append(added)
        better = True
        while better:
            better = False
            for place in range(len(chosen)):
                for i in set(range(count)) - set(chosen):
                    other = [*chosen[:place], i, *chosen[place + 1 :]]
                    if (found := solved(other))[0] < least[0] - 1e-15:
                        chosen, least, better = other, found, True
    return least[1]
