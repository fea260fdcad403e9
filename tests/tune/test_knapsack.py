from __future__ import annotations

import itertools
import random

import pytest

from kvant.tune.knapsack import Option, choose, pareto


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    layers = [[Option(16 * draw.randint(3, 20), draw.random()) for _ in range(4)] for _ in range(5)]
    budget = draw.randint(sum(min(o.cost for o in options) for options in layers), 5 * 320)
    found = choose(layers, budget)
    assert sum(options[i].cost for options, i in zip(layers, found, strict=True)) <= budget
    losses = [sum(o.loss for o in some) for some in itertools.product(*layers) if sum(o.cost for o in some) <= budget]
    assert sum(options[i].loss for options, i in zip(layers, found, strict=True)) == pytest.approx(min(losses))


def test_options_that_are_beaten_are_left_out() -> None:
    assert pareto([Option(4, 1.0), Option(2, 2.0), Option(3, 2.5), Option(4, 0.5), Option(9, 0.5)]) == [1, 3]


def test_a_budget_below_the_cheapest_is_refused() -> None:
    with pytest.raises(ValueError, match="the cheapest options cost 6, the budget is 5"):
        choose([[Option(3, 0.0)], [Option(3, 0.0), Option(4, 0.0)]], 5)
    assert choose([[Option(3, 0.0)], [Option(3, 1.0), Option(4, 0.0)]], 6) == [0, 0]
