"""The Pareto front, and which points are labelled."""

from __future__ import annotations

import math
import random

import pytest

from kvant import recipes
from kvant.report import report_of
from kvant.report.points import LABEL_ALL, Point, by_bits, by_speed, front, marked
from kvant.report.read import Result, bench_of
from kvant.report.served import Request, memory_of
from tests.report import samples


def result(name: str, kl: float) -> Result:
    return Result(name, 4.0, kl, None, None, None, None, (), None)


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([], set()),
        ([(1, 1)], {0}),
        ([(1, 2), (2, 1)], {0, 1}),
        ([(1, 2), (2, 2)], {0}),
        ([(1, 2), (1, 1)], {1}),
        ([(1, 2), (1, 2)], {0, 1}),
        ([(2, 0), (3, 0), (1, 1), (2, 5)], {0, 2}),
    ],
)
def test_front(points: list[tuple[float, float]], best: set[int]) -> None:
    assert front(points) == best


def test_the_front_is_what_no_point_beats() -> None:
    random.seed()
    points = [(random.randrange(12), random.randrange(12)) for _ in range(60)]
    beaten = {
        i for i, p in enumerate(points) if any(q[0] <= p[0] and q[1] <= p[1] and q != p for j, q in enumerate(points))
    }
    assert front(points) == set(range(60)) - beaten


def test_many_points_label_the_front_and_ours() -> None:
    crowd = [Point(result(f"r{i}", 1.0 + i), 5.0 + i) for i in range(LABEL_ALL)]
    found = marked(
        [Point(result("best", 0.5), 4.0), *crowd, Point(result("kvant-2", 9.0), 9.0)], smaller_is_better=True
    )
    assert [point.name for point in found if point.labelled] == ["best", "kvant-2"]
    assert [point.name for point in found if point.front] == ["best"]
    few = marked(crowd[:3], smaller_is_better=True)
    assert all(point.labelled for point in few)


def test_what_is_not_finite_is_no_point() -> None:
    points = [Point(result("broken", math.nan), 2.0), Point(result("int4", 0.1), 4.0)]
    assert [point.name for point in marked(points, smaller_is_better=True)] == ["int4"]


def test_bits_are_those_at_the_users_context() -> None:
    report = report_of(samples.text_results(), "sample")
    assert report.shape is not None
    text = report.texts[0]
    evaluated = {point.name: point.x for point in by_bits(text, None)}
    short, _ = memory_of(report.recipes, report.shape, Request(2048))
    long, _ = memory_of(report.recipes, report.shape, Request(65536))
    for name in ("kvant-2", "oscar", "kivi-k2v2-sink"):  # windows weigh less the longer a request is
        at = [{point.name: point.x for point in by_bits(text, memory)}[name] for memory in (short, long)]
        assert evaluated[name] > at[0] > at[1] > 2
    assert len(by_bits(text, long)) == len(text.results) == len(recipes.names())
    zero = next(point for point in by_bits(text, long) if point.name == "full")
    assert (zero.kl, zero.x, zero.front) == (0.0, 16.0, True)


def test_speed_takes_a_folded_model_for_its_recipe() -> None:
    text = report_of(samples.text_results(), "sample").texts[0]
    speed = bench_of(samples.bench_results(), "bench")[0]
    found = {point.name: point for point in by_speed(text, speed)}
    assert {name: point.x for name, point in found.items()} == {"kvant-2": 4.5, "int4": 3.25, "full cache": 1.0}
    assert [name for name, point in found.items() if point.front] == ["kvant-2", "full cache"]
    assert found["full cache"].reference and found["full cache"].kl == 0
