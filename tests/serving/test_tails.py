"""Where keys are coded in groups, the tail of a sequence is in its overlay row and nowhere else: it is there whenever it is needed, whatever
a scheduler does (tests/serving/schedules.py). Numbers stand for keys, and a page has a number only once its group is complete."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.layout import Layout
from kvant.ops.reference import overlay_index
from kvant.recipes import get
from kvant.serving.overlay import OverlayRows, from_first_token, with_rollback
from tests.serving.schedules import PAGE, Part, Schedule, draw_schedule, plain_number

Tensor = torch.Tensor


class Simulation:
    """Runs a schedule as the backend does, over one stream of numbers."""

    def __init__(self, schedule: Schedule, recipe: str, rows: int, sink_rows: int = 0) -> None:
        layout = Layout.of(with_rollback(from_first_token(get(recipe)), schedule.drafts), 1, 32, PAGE, dtype="bfloat16")
        self.window = layout.recipe.key.window
        assert layout.recipe.key.groupwise and self.window.first == 0
        shape = 1, rows + 1, self.window.sink + self.window.ring, 1, 1
        self.overlay = torch.full(shape, float("nan"), dtype=torch.float64)
        sinks = {"key": torch.full((1, sink_rows, self.window.sink, 1, 1), float("nan"), dtype=torch.float64)}
        self.rows = OverlayRows(
            layout, schedule.blocks, {"key": self.overlay}, schedule.drafts, sinks if sink_rows else None
        )
        self.short = 0  # reads of sinks from pages
        self.pages = torch.full((schedule.blocks * PAGE,), float("nan"), dtype=torch.float64)
        self.seen = {"reads": 0, "tails": 0, "hits": 0, "recoded": 0}
        for step in schedule.steps:
            self.step(step)

    def append(self, part: Part, row: Tensor, ring_start: int) -> None:
        """Codes the groups that new tokens complete, then writes the new tokens to an overlay row, [tokens]."""
        before, n, window = part.before, len(part.tokens), self.window
        first, last = max(window.packed_end(before), ring_start), window.packed_end(n)
        new = torch.tensor([plain_number(part.tenant, part.tokens[p], p) for p in range(before, n)]).double()
        if last > first:
            tail = row[overlay_index(window, torch.arange(first, max(first, before)))]
            at = torch.arange(first, last)
            slots = torch.tensor(part.table)[at // PAGE] * PAGE + at % PAGE
            self.seen["recoded"] += bool(self.pages[slots].isfinite().any())
            self.pages[slots] = torch.cat((tail, new[max(0, first - before) :]))[: last - first]
        position = torch.arange(before, n)
        kept = (position < window.sink) | (position >= n - window.ring)
        row[overlay_index(window, position[kept])] = new[kept]

    def read(self, part: Part, n: int, row: Tensor, sinks: int, ring_start: int) -> None:
        window, at = self.window, torch.arange(n)
        exact = (at < min(sinks, n)) | (at >= max(window.packed_end(n), ring_start, window.sink))
        numbers = self.pages[torch.tensor(part.table)[at // PAGE] * PAGE + at % PAGE]
        numbers[exact] = row[overlay_index(window, at[exact])]
        expected = [float(plain_number(part.tenant, part.tokens[p], p)) for p in range(n)]
        assert numbers.tolist() == expected, (part, n)
        self.seen["reads"] += 1
        self.short += sinks < min(window.sink, n)
        self.seen["tails"] += window.packed_end(n) < n
        self.seen["hits"] += part.hit > 0

    def step(self, step: list[Part]) -> None:
        width = max(len(part.table) for part in step)
        table = torch.tensor([[*part.table, *[0] * (width - len(part.table))] for part in step])
        lengths = torch.tensor([len(part.tokens) for part in step])
        counts = lengths - torch.tensor([part.before for part in step])
        slots = [part.table[p // PAGE] * PAGE + p % PAGE for part in step for p in range(part.before, len(part.tokens))]
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        match = self.rows.step(table, lengths, starts, torch.tensor(slots))
        rows = [self.overlay[0, row, :, 0, 0] for row in match.overlay_rows.tolist()]
        since = match.ring_start.tolist()
        continued = [part.before > 0 and len(part.tokens) - part.before > 1 for part in step]
        for part, row, start, last in zip(step, rows, since, continued, strict=True):
            if not last:
                self.append(part, row, start)
            elif part.before < self.window.sink:  # a prompt that was cut among its sinks
                self.append(part._replace(tokens=part.tokens[: self.window.sink]), row, start)
        self.rows.finish_sinks(0, match)
        copies = [row.clone() for row in rows]
        for part, copy, start, last in zip(step, copies, since, continued, strict=True):
            if last:
                self.append(part, copy, start)
        for b, (part, last) in enumerate(zip(step, continued, strict=True)):
            if last or part.before:
                self.read(part, part.before if last else len(part.tokens), rows[b], int(match.sinks[b]), since[b])
        for row, copy, last in zip(rows, copies, continued, strict=True):
            if last:
                row.copy_(copy)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    recipe=st.sampled_from(["kivi-k2v2-sink:k.flush=64", "kivi-k2v2:k.flush=32", "kitty:k.group=64,k.flush=64,sink=9"]),
    drafts=st.sampled_from([0, 1, 5]),
    blocks=st.sampled_from([8, 24, 60]),
)
def test_every_tail_is_found(seed: int, recipe: str, drafts: int, blocks: int) -> None:
    """There is a row for every sequence, and none to spare. Whoever is running is in the step, unless it is full."""
    Simulation(draw_schedule(seed, blocks, drafts, 6, skipped=0), recipe, rows=6)


def test_what_the_schedules_are_made_of() -> None:
    seen = [
        Simulation(draw_schedule(seed, 24, 3, 6, skipped=0), "kivi-k2v2-sink:k.flush=64", 6).seen for seed in range(3)
    ]
    assert all(min(each.values()) > 0 for each in seen), seen


def test_sequences_that_are_left_out_may_lose_their_tails_but_not_in_silence() -> None:
    lost: list[str] = []
    for seed in range(6):
        try:
            Simulation(draw_schedule(seed, 24, 0, 6, skipped=0.5), "kivi-k2v2-sink:k.flush=64", 6)
        except RuntimeError as error:
            lost.append(str(error))
    assert lost
    assert all("lost the full-precision tokens" in each for each in lost)


@pytest.mark.parametrize("recipe", ["kivi-k2v2:k.recent=16,k.flush=64", "kivi-k2v2-sink:k.flush=64"])
def test_windows_that_would_leave_blocks_unfinished_are_refused(recipe: str) -> None:
    layout = Layout.of(get(recipe), 1, 32, PAGE, dtype="bfloat16")
    with pytest.raises(AssertionError, match="whole groups of tokens"):
        OverlayRows(layout, 4, {"key": torch.zeros(1, 3, layout.overlay_tokens("key"), 1, 1)})
