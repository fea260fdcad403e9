"""Rows of windows are found by physical blocks alone, whatever a scheduler does (tests/serving/schedules.py)."""

from __future__ import annotations

import pytest
import torch

from kvant.layout import Layout, StreamName
from kvant.ops.types import empty_overlay
from kvant.recipes import get
from kvant.serving.layer_group import layered_sinks
from kvant.serving.overlay import OverlayRows, from_first_token, with_rollback
from tests.serving.schedules import PAGE, Part, Read, Schedule, draw_schedule, reads, windowed

NAMES: tuple[StreamName, StreamName] = ("key", "value")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def missing(found: list[Read], sink: int) -> dict[str, int]:
    """Of reads that were all right, how many had less in full precision than a cache of one sequence would."""
    assert found and all(read.right for read in found)
    return {
        "reads": len(found),
        "sinks": sum(read.sinks < min(sink, read.length) for read in found),
        "recent": sum(read.since > read.part.hit for read in found),
        "hits": sum(read.part.hit > 0 for read in found),
    }


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("sink", "recent", "drafts"), [(4, 24, 0), (4, 24, 3), (64, 100, 0), (1, 0, 0), (0, 17, 5), (4, 3, 8)]
)
def test_whatever_a_scheduler_does(seed: int, sink: int, recent: int, drafts: int) -> None:
    """With rows to spare, no sequence that is in every step loses its window."""
    seen = missing(reads(draw_schedule(seed, 60, drafts, 12, skipped=0), sink, recent, rows=400), sink)
    assert seen["hits"] and not seen["recent"] and not seen["sinks"], seen


def test_sinks_of_the_same_step_may_wait_for_the_next() -> None:
    schedule = draw_schedule(1, 60, 0, 12, skipped=0)
    seen, waiting = (missing(reads(schedule, 64, 16, rows=400, late=late), 64) for late in (True, False))
    assert seen["sinks"] == 0 < waiting["sinks"] < waiting["reads"] // 5, (seen, waiting)
    assert not seen["recent"] and not waiting["recent"]


@pytest.mark.parametrize("seed", range(3))
def test_few_rows(seed: int) -> None:
    """With no more rows than sequences, windows may be lost, but none is ever another's."""
    seen = missing(reads(draw_schedule(seed, 24, 3, 5), 4, 24, rows=5), 4)
    assert seen["recent"] < seen["reads"] // 2, seen


def grouped(device: str, drafts: int = 0, rows: int = 2, recipe: str = "kivi-k2v2-sink:k.flush=64") -> OverlayRows:
    """Overlay rows for sequences whose keys are coded in groups, in pages of 64 tokens."""
    layout = Layout.of(with_rollback(from_first_token(get(recipe)), drafts), 1, 32, PAGE, dtype="bfloat16")
    overlays = {name: empty_overlay(layout, name, 2 * (rows + 1), device).unflatten(0, (2, rows + 1)) for name in NAMES}
    return OverlayRows(layout, 20, overlays, drafts)


def described(parts: list[tuple[list[int], int, int]], device: str, written: bool = True) -> list[torch.Tensor]:
    """Sequences as (block table, tokens before, tokens after): table, seq_lens, query_start_loc, slot_mapping."""
    width = max(len(table) for table, _, _ in parts)
    slots = [table[p // PAGE] * PAGE + p % PAGE if written else -1 for table, a, b in parts for p in range(a, b)]
    counts = torch.tensor([0] + [b - a for _, a, b in parts])
    tables = torch.tensor([table + [0] * (width - len(table)) for table, _, _ in parts])
    return [x.to(device) for x in (tables, torch.tensor([b for *_, b in parts]), counts.cumsum(0), torch.tensor(slots))]


def check_lost(device: str) -> None:
    """A sequence that goes on inside a block finds its row, or an error tells; at the end of a block it needs none."""

    def step(rows: OverlayRows, *parts: tuple[list[int], int, int], written: bool = True) -> None:
        rows.step(*described(list(parts), device, written))
        if device == "cuda":
            torch.cuda.synchronize()
        rows.check()  # by a kernel, the next step would find it

    rows = grouped(device)
    step(rows, ([1, 2], 0, 70))
    step(rows, ([1, 2], 70, 71), ([1, 3], 64, 90))  # the second behind a prefix hit
    step(rows, ([4], 0, 10))  # takes the row of the first
    step(rows, ([1, 3], 90, 91))
    step(rows, ([1, 2], 71, 72), written=False)  # one that a server invents to measure a step
    step(rows, ([0, 0], 71, 72))  # and one in its first page
    with pytest.raises(RuntimeError, match="lost the full-precision tokens of a running sequence"):
        step(rows, ([1, 2], 71, 72))
    rows = grouped(device, recipe="squat:k.flush=64")  # what it has learnt is nowhere else, whatever the length
    step(rows, ([1], 0, 64))
    step(rows, ([1, 2], 64, 65))
    with pytest.raises(RuntimeError, match="lost"):
        step(rows, ([5, 6], 64, 65))


def test_a_tail_that_is_lost_is_an_error() -> None:
    check_lost("cpu")


@pytest.mark.gpu
@needs_gpu
def test_a_tail_that_is_lost_is_an_error_on_a_gpu() -> None:
    check_lost("cuda")


# --- single cases, each of which was once read wrong ---------------------------------------------------------------


def run(
    steps: list[list[tuple[str, int, int, list[int]]]],
    sink: int,
    recent: int,
    drafts: int = 0,
    sliding_window: int | None = None,
) -> list[Read]:
    """Steps of (text, tokens before, tokens after, block table). A text's tokens are its own; texts that begin with the same
    letter have the same first 64 tokens. The last token of a text with ! is a draft that will be rejected."""

    def tokens(text: str, count: int) -> tuple[int, ...]:
        name = text.removesuffix("!")
        found = [ord(name[0] if p < PAGE else name[-1]) * 1000 + p for p in range(count)]
        return (*found[:-1], -1) if text != name else tuple(found)

    parts = [
        [Part(0, text, tokens(text, after), tuple(table), before, 0) for text, before, after, table in step]
        for step in steps
    ]
    schedule = Schedule(8, drafts, parts, sliding_window)
    return reads(schedule, sink, recent, rows=6, number=lambda tenant, token, position: token)


def own(read: Read) -> bool:
    return read.numbers[read.low :] == tuple(map(float, read.part.tokens[read.low : read.length]))


@pytest.mark.parametrize(("sink", "recent"), [(0, 24), (4, 0)])
def test_a_recycled_block_is_not_matched_in_the_step_that_writes_it(sink: int, recent: int) -> None:
    """p ends with block 1. q begins to write the block, and r shares it with q, all in one step."""
    found = run([[("p", 0, 64, [1])], [("q", 0, 64, [1]), ("qr", 64, 65, [1, 2])]], sink, recent)
    assert [read.part.tenant for read in found] == ["qr"] and all(map(own, found))


def test_as_many_drafts_as_recent_tokens() -> None:
    """Two drafts are rejected; the recent window of two tokens is still that of the tokens before."""
    found = run([[("p", 0, 10, [1])], [("p", 10, 13, [1])], [("p", 11, 12, [1])]], 0, 2, drafts=2)
    assert all(map(own, found))
    assert found[-1].exact[-2:] == (True, True), "the window is exact"


def test_a_row_of_another_sequence_is_not_found_through_a_block_of_its_last_one() -> None:
    """p and then z have the same row. Block 1 still names it when r shares the block and is given z's last one."""
    steps = [[("p", 0, 64, [1])]]
    steps += [[(text, 0, 64, [block])] for text, block in (("a", 3), ("b", 4), ("c", 5), ("d", 6), ("e", 7))]
    steps += [[("z", 0, 63, [2])], [("z", 63, 66, [2, 3])]]  # row of p
    found = run([*steps, [("pr", 64, 65, [1, 3])]], 0, 24, drafts=2)
    assert all(map(own, found))


def test_sinks_of_a_chunk_are_there_before_attention() -> None:
    """q continues its prompt among its sinks, and r shares the block that this chunk completes."""
    found = run([[("p", 0, 64, [3])], [("q", 0, 57, [1])], [("q", 57, 64, [1]), ("qr", 64, 65, [1, 2])]], 64, 8)
    assert all(map(own, found)) and found[-1].sinks == 64


def test_a_rejected_draft_is_not_read_by_who_shares_its_block() -> None:
    """p's token 63 was a draft. It is written anew in the step in which r shares the block."""
    steps = [[("p", 0, 62, [1])], [("p!", 62, 64, [1])], [("p", 63, 64, [1]), ("pr", 64, 65, [1, 2])]]
    found = run(steps, 0, 8, drafts=1)
    assert own(found[-1]) and own(found[-2])


def test_sinks_do_not_come_through_a_block_that_a_sliding_window_has_left() -> None:
    """p's window has left block 1, which its table still names. q has the block then, and r shares it with q."""
    steps = [[("p", 0, 150, [1, 2, 3])], [("q", 0, 64, [1])], [("q", 64, 70, [1, 5])]]
    steps += [[("p", 150, 151, [1, 2, 3])], [("qr", 64, 65, [1, 4])]]
    found = run(steps, 4, 8, sliding_window=64)
    assert all(map(own, found)) and found[-1].low == 1
    assert found[-1].sinks == 4, "q's row still has them"


def test_sinks_are_found_after_their_own_sequence_has_left_them() -> None:
    """p goes on beyond its first block; r begins with the same block, which nobody has written since."""
    steps = [[("p", 0, 150, [1, 2, 3])], [("p", 150, 151, [1, 2, 3])], [("pr", 64, 65, [1, 4])]]
    found = run(steps, 4, 8, sliding_window=64)
    assert all(map(own, found)) and found[-1].sinks == 4


def test_a_sequence_that_begins_again_does_not_take_back_more_than_drafts() -> None:
    """Twice two drafts are rejected; then the sequence is preempted and begins again behind its full block."""
    steps = [[("p", 0, 64, [1])], [("p", 64, 67, [1, 2])], [("p", 65, 66, [1, 2])], [("p", 64, 66, [1, 2])]]
    assert all(map(own, run(steps, 0, 2, drafts=2)))


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_on_a_gpu(drafts: int) -> None:
    """The same, without waiting for the device."""
    seen = missing(reads(draw_schedule(0, 60, drafts, 12, skipped=0), 4, 24, rows=400, device="cuda"), 4)
    assert seen["hits"] and not seen["recent"] and not seen["sinks"], seen
    few = missing(reads(draw_schedule(0, 60, drafts, 12, skipped=0), 4, 24, rows=12, device="cuda", sink_rows=60), 4)
    assert few["hits"] and not few["sinks"], few


@pytest.mark.gpu
@needs_gpu
def test_a_step_does_not_wait_for_the_gpu() -> None:
    layout = Layout.of(with_rollback(windowed(4, 24), 2), 1, 16, PAGE, dtype="bfloat16")
    windows = OverlayRows(layout, 8, {name: empty_overlay(layout, name, 9, "cuda")[None] for name in NAMES}, drafts=2)
    table, lengths = torch.tensor([[1, 2], [3, 4]], device="cuda"), torch.tensor([70, 3], device="cuda")
    starts, slots = torch.tensor([0, 70, 73], device="cuda"), torch.arange(64, 137, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        windows.step(table, lengths, starts, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
def test_offload_on_a_gpu() -> None:
    """Random schedules with blocks that are moved to CPU memory and back, by the kernel."""
    for seed in range(6):
        schedule = draw_schedule(seed, 14, 3, 6, skipped=0, offload=True)
        seen = missing(reads(schedule, 4, 24, rows=6, device="cuda", sink_rows=14), 4)
        assert not seen["sinks"], (seed, seen)


def test_sinks_of_fp8_values_come_back() -> None:
    """Through CPU memory, from an overlay row to a sink row, for which torch's own operations have no fp8."""
    layout = Layout.of(get("int4:sink=4,recent=24,v.window_dtype=fp8"), 1, 16, PAGE, dtype="bfloat16")
    overlays = {name: empty_overlay(layout, name, 9, "cpu")[None] for name in NAMES}
    for overlay in overlays.values():
        overlay.view(torch.uint8).random_()
    rows = OverlayRows(layout, 8, overlays, sinks=layered_sinks(layout, 1, 5, torch.device("cpu")))
    found = rows.step(*described([([1, 2], 0, 70)], "cpu"))
    rows.finish_sinks(0, found)
    saved = rows.save_sinks(1)
    assert saved is not None and int(saved.held) == 4
    rows.restore_sinks(3, saved)
    row, kept = int(found.overlay_rows[0]), int(rows.stored[3])
    for name, overlay in overlays.items():
        assert saved.sinks[name].dtype == rows.sink_store[name].dtype == layout.window_dtype(name)  # type: ignore[index]
        here = overlay[:, row, :4].view(torch.uint8)
        assert torch.equal(saved.sinks[name].view(torch.uint8), here)  # type: ignore[index]
        assert torch.equal(rows.sink_store[name][:, kept].view(torch.uint8), here)


@pytest.mark.gpu
@needs_gpu
def test_moving_sinks_does_not_wait_for_the_gpu() -> None:
    layout = Layout.of(windowed(4, 24), 1, 16, PAGE, dtype="bfloat16")
    overlays = {name: empty_overlay(layout, name, 9, "cuda")[None] for name in NAMES}
    sinks = {name: torch.zeros(1, 5, 4, 1, 16, dtype=torch.bfloat16, device="cuda") for name in NAMES}
    rows = OverlayRows(layout, 8, overlays, sinks=sinks)
    rows.step(*described([([1, 2], 0, 70)], "cuda"))
    torch.cuda.synchronize()
    for _ in range(2):  # the first time allocates pinned memory
        saved = rows.save_sinks(1)
        rows.restore_sinks(3, saved)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        saved = rows.save_sinks(1)
        rows.restore_sinks(4, saved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert saved.held.tolist() == [4] and rows.kept[[1, 3, 4]].tolist() == [0, 4, 4]
