"""No tenant sees another: what B's sequences read does not depend on what A's hold, nor on whether A is there.

Run `pytest tests/serving/test_tenants.py --schedules 5000` for a soak."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.serving.schedules import Read, Schedule, check_from, draw_schedule, parametrize_first, plain_number, reads

MANY = 400  # rows: more than the steps of a schedule have sequences, so that no row is ever given away


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: Schedule
    sink: int
    recent: int
    rows: int
    late: bool
    sink_rows: int

    @staticmethod
    def draw(seed: int) -> Case:
        """Pools of 4 to 60 blocks, small ones more often; rows for the sequences of a step alone, for some more, for all;
        no sink rows, a few, one for each page; drafts from none to more than the window holds."""
        draw = random.Random(seed)
        blocks, most = draw.choice((draw.randrange(4, 12), draw.randrange(4, 61))), draw.randrange(2, 9)
        sink, recent = draw.choice(((0, 3), (0, 17), (1, 0), (4, 2), (4, 24), (4, 64), (64, 16), (64, 100)))
        drafts = draw.choice((0, 0, 1, 2, 3, 8, 64))
        rows = draw.choice((most, most + 2, 60, MANY))
        late, window = draw.random() < 0.8, draw.choice((None, None, 30, 64, 100, 150))
        sink_rows = draw.choice((0, 1, 3, blocks)) if sink and window is None else 0
        schedule = draw_schedule(seed, blocks, drafts, most, sliding_window=window)
        return Case(schedule, sink, recent, rows, late, sink_rows)

    def reads(self, schedule: Schedule, number=plain_number) -> list[Read]:  # type: ignore[no-untyped-def]
        return reads(schedule, self.sink, self.recent, self.rows, number, self.late, sink_rows=self.sink_rows)


def other_number(tenant: str, token: int, position: int) -> int:
    """As if tenant A's tokens were others, and B's the same."""
    return plain_number(tenant, token, position) + (10**9 if tenant == "A" else 0)


def of_b(found: list[Read]) -> list[Read]:
    return [read for read in found if read.part.tenant == "B"]


def check(seed: int) -> dict[str, int]:
    case = Case.draw(seed)
    found = case.reads(case.schedule)
    for read in found:
        assert read.right, f"schedule {seed}: request {read.part.request} read another token at {read.length}"
    assert of_b(case.reads(case.schedule, other_number)) == of_b(found), (
        f"schedule {seed}: B's reads depend on A's tokens"
    )
    if case.rows == MANY:
        alone = case.reads(case.schedule.only("B"))
        assert alone == of_b(found), f"schedule {seed}: B reads something else when it is alone"
    both = {read.part.request for read in of_b(found)}, {read.part.request for read in found}
    return {
        "reads": len(found),
        "exact": sum(any(read.exact) for read in found),
        "packed": sum(not all(read.exact) for read in found),
        "B": len(both[0]),
        "A": len(both[1]) - len(both[0]),
        "taken back": _taken_back(case.schedule),
        "recycled": _recycled(case.schedule),
        "shared at once": _shared_at_once(case.schedule),
        "left": sum(read.low >= 64 for read in found),
    }


def _taken_back(schedule: Schedule) -> int:
    lengths: dict[int, int] = {}
    count = 0
    for part in (part for step in schedule.steps for part in step):
        count += 0 < part.before < lengths.get(part.request, 0)
        lengths[part.request] = len(part.tokens)
    return count


def _begun(step: list) -> set[int]:  # type: ignore[type-arg]
    """Blocks whose first token a step writes."""
    return {part.table[i] for part in step for i in range(-(-part.before // 64), -(-len(part.tokens) // 64))}


def _recycled(schedule: Schedule) -> int:
    seen: set[int] = set()
    count = 0
    for begun in map(_begun, schedule.steps):
        count += len(begun & seen)
        seen |= begun
    return count


def _shared_at_once(schedule: Schedule) -> int:
    """Sequences behind a block that another one begins to write in the same step."""
    return sum(
        part.before > 0 and part.table[(part.before - 1) // 64] in begun
        for step in schedule.steps
        for begun in (_begun(step),)
        for part in step
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_first(metafunc, metafunc.config.getoption("--schedules"))


def test_no_tenant_sees_another(first: int) -> None:
    check_from(first, check)
