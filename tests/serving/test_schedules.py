"""Prefix hit, eviction and hit again, with speculation, chunked prefill, preemption and offload to CPU memory at once: whatever a scheduler does, a
sequence reads its own tokens, its sinks exactly, and its recent tokens from where its own steps began. There are as many sink rows
as pages, and often only one overlay row for each sequence of a step.

`pytest tests/serving/test_schedules.py --all` runs 1,000 schedules."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvant.serving.overlay import Missed
from tests.serving.schedules import AT_ONCE, PAGE, Schedule, check_from, draw_schedule, parametrize_first, reads
from tests.serving.test_tails import Simulation

SCHEDULES = 1000
MANY = 400  # rows: more than the steps of a schedule have sequences, so that no row is ever given away
GROUPED = ("kivi-k2v2-sink:k.flush=64", "kitty:k.group=64,k.flush=64,sink=9")


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: Schedule
    sink: int
    recent: int
    rows: int

    @staticmethod
    def draw(seed: int) -> Case:
        draw = random.Random(seed)
        blocks, most = draw.choice((draw.randrange(6, 14), draw.randrange(8, 61))), draw.randrange(2, 9)
        sink, recent = draw.choice(((1, 0), (4, 2), (4, 24), (4, 64), (9, 17), (64, 16), (64, 100)))
        drafts, offload = draw.choice((1, 2, 3, 8)), draw.random() < 0.5
        schedule = draw_schedule(seed, blocks, drafts, most, skipped=0, offload=offload)
        return Case(schedule, sink, recent, draw.choice((most, most, most + 2, MANY)))


def check(seed: int) -> dict[str, int]:
    case, missed = Case.draw(seed), []  # type: tuple[Case, list[Missed]]
    blocks = case.schedule.blocks
    found = reads(case.schedule, case.sink, case.recent, case.rows, sink_rows=blocks, missed=missed)
    for read in found:
        where = f"schedule {seed}: request {read.part.request} at {read.length}"
        assert read.right, f"{where} read another token"
        assert read.sinks >= min(case.sink, read.length), f"{where} has {read.sinks} sinks"
        assert case.rows < MANY or read.since <= read.part.hit, f"{where} lost recent tokens"
    assert missed == [Missed(0, 0)], f"schedule {seed}: {missed}"
    return {
        "reads": len(found),
        "behind a prefix": sum(read.part.hit > 0 for read in found),
        "hit again": _hit_again(case.schedule),
        "taken back": _taken_back(case.schedule),
        "chunks": sum(read.part.before > 0 and len(read.part.tokens) > read.length for read in found),
        "loaded": sum(each.loads for moves in case.schedule.moves for each in moves),
    }


def _hit_again(schedule: Schedule) -> int:
    """Requests behind a prefix whose first page was evicted and computed once more."""
    first: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    seen: set[int] = set()
    for part in (part for step in schedule.steps for part in step):
        pages = first.setdefault((part.tenant, part.tokens[:PAGE]), [])
        if part.table[0] not in pages:
            pages.append(part.table[0])
        if part.hit and len(pages) > 1:
            seen.add(part.request)
    return len(seen)


def _taken_back(schedule: Schedule) -> int:
    lengths: dict[int, int] = {}
    count = 0
    for part in (part for step in schedule.steps for part in step):
        count += 0 < part.before < lengths.get(part.request, 0)
        lengths[part.request] = len(part.tokens)
    return count


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_first(metafunc, SCHEDULES)


def test_nothing_differs(first: int) -> None:
    check_from(first, check)


def test_sink_rows_are_needed() -> None:
    short = 0
    for seed in range(0, AT_ONCE, 2):
        case = Case.draw(seed)
        found = reads(case.schedule, case.sink, case.recent, case.rows)
        short += sum(read.sinks < min(case.sink, read.length) for read in found)
    assert short


@pytest.mark.parametrize("recipe", GROUPED)
def test_sinks_beside_groups_of_tokens(recipe: str) -> None:
    """The recipe codes keys in groups; there is a row for each sequence, and none to spare."""
    without = 0
    for seed in range(6):
        schedule = draw_schedule(seed, 60, 3, 3, 60, skipped=0)
        rows = max(len(step) for step in schedule.steps)
        assert not Simulation(schedule, recipe, rows, sink_rows=60).short
        without += Simulation(schedule, recipe, rows).short
    assert without  # sink rows were needed


def test_sink_rows_that_run_out_are_counted() -> None:
    """One that is too few loses sinks, of which none is another's."""
    missed: list[Missed] = []
    lost = 0
    for seed in range(12):
        found = reads(draw_schedule(seed, 60, 3, 3, 60), 4, 24, 3, sink_rows=1, missed=missed)
        assert all(read.right for read in found)
        short = {read.part.request for read in found if read.sinks < min(4, read.length)}
        assert missed[-1].dropped or not short, (seed, missed[-1])
        lost += len(short)
    assert lost and sum(each.packed for each in missed) >= lost
