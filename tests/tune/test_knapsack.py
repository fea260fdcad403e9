from __future__ import annotations

import itertools
import random

import pytest

from kvant.tune.knapsack import Option, choose, choose_few, pareto


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


@pytest.mark.parametrize("seed", range(10))
def test_few_options_are_nearly_as_good_as_the_best_few(seed: int) -> None:
    draw = random.Random(seed)
    costs = [16 * cost for cost in draw.sample(range(3, 30), 6)]
    layers = []
    for _ in range(6):
        weight = draw.expovariate(1.0)
        layers.append([Option(cost, weight * 2.0 ** (-cost / 40) * draw.uniform(0.8, 1.2)) for cost in costs])
    budget = 6 * sum(costs) // 6

    def loss(found: list[int]) -> float:
        assert sum(options[i].cost for options, i in zip(layers, found, strict=True)) <= budget
        return sum(options[i].loss for options, i in zip(layers, found, strict=True))

    for most in (1, 2, 3):
        found = choose_few(layers, budget, most)
        assert len(set(found)) <= most
        sets = [some for some in itertools.combinations(range(6), most) if 6 * min(costs[i] for i in some) <= budget]
        restricted = [choose([[options[i] for i in some] for options in layers], budget) for some in sets]
        best = min(loss([some[place] for place in places]) for some, places in zip(sets, restricted, strict=True))
        assert best - 1e-12 <= loss(found) <= 1.25 * best
    assert choose_few(layers, budget, 6) == choose(layers, budget)
    with pytest.raises(ValueError, match="from 1, got 0"):
        choose_few(layers, budget, 0)
