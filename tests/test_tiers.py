"""What the quick tier runs of a test."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import covering


def cases(few: int | None = None, **parameters: list[Any]) -> list[Any]:
    """Those of a test with a `parametrize` for each name; "a,b" are given together."""
    marks = [SimpleNamespace(args=(names, values)) for names, values in parameters.items()]
    out = []
    for values in itertools.product(*parameters.values()):
        params = {}
        for names, value in zip(parameters, values, strict=True):
            parts = names.split("_and_")
            params |= dict(zip(parts, value if len(parts) > 1 else [value], strict=True))
        own = [SimpleNamespace(args=(mark.args[0].replace("_and_", ","), mark.args[1])) for mark in marks]
        item = SimpleNamespace(callspec=SimpleNamespace(params=params), iter_markers=lambda name, own=own: own)
        item.get_closest_marker = lambda name: None if few is None else SimpleNamespace(args=(few,))
        out.append(item)
    return out


def ran(found: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(item.callspec.params.values()) for item in found]


def test_every_value_of_every_parameter_occurs() -> None:
    found = ran(covering(cases(a=[1, 2, 3], b=["x", "y"], c=[True, False])))
    assert len(found) == 3
    assert [set(column) for column in zip(*found, strict=True)] == [{1, 2, 3}, {"x", "y"}, {True, False}]


def test_values_that_are_given_together_stay_together() -> None:
    pairs = [(None, 40), (5.0, None), (5.0, 40)]
    assert ran(covering(cases(cap_and_window=pairs))) == pairs
    found = ran(covering(cases(cap_and_window=pairs, page=[16, 32])))
    assert sorted({row[:2] for row in found}, key=str) == sorted(pairs, key=str) and {row[2] for row in found} == {
        16,
        32,
    }
    assert len(found) == 3


@pytest.mark.parametrize(("few", "expected"), [(1, [0]), (3, [0, 3, 6]), (20, list(range(10)))])
def test_few_are_spread_over_the_list(few: int, expected: list[int]) -> None:
    assert [row[0] for row in ran(covering(cases(few, a=list(range(10)))))] == expected


def test_cases_with_model_runner_v2_are_counted_by_its_own_mark() -> None:
    made = cases(2, a=list(range(4)))
    for item in made:
        item.get_closest_marker = lambda name: SimpleNamespace(args=(1 if name == "runner_v2" else 2,))
    assert [row[0] for row in ran(covering(made, "runner_v2"))] == [0]
    assert [row[0] for row in ran(covering(made))] == [0, 2]


def test_a_test_without_parameters_runs() -> None:
    (item,) = cases()
    assert covering([item]) == [item]
