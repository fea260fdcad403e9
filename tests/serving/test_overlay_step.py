"""The kernel that prepares a server's step (kernels/overlay_step.cu) against the torch code, bit for bit, on the same histories: run on a
CPU (tests/ops/emulated), and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvant.layout import Layout
from kvant.ops.cuda import copy_rows, nvrtc, overlay_step
from kvant.ops.cuda.overlay_step import Inputs, Outputs
from kvant.serving import overlay as overlays
from kvant.serving import step_tensors
from kvant.serving.overlay import OverlayRows, with_rollback
from kvant.serving.step_tensors import StepTensors
from tests.ops import emulated
from tests.serving import test_overlay
from tests.serving.schedules import PAGE, Schedule, draw_schedule, reads, windowed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")
POISON = 0x5A5A5A5A5A5A


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Kernels run on this machine, in CTAs of two warps, so that a thread has several sequences."""
    monkeypatch.setattr(nvrtc, "Kernel", emulated.Kernel)
    monkeypatch.setattr(overlays, "fused", lambda device: True)
    monkeypatch.setattr(step_tensors, "fused", lambda device: True)
    monkeypatch.setattr(overlay_step, "THREADS", 64)
    monkeypatch.setattr(overlay_step, "COPY_CTAS", 3)
    for cache in (overlay_step._kernel, copy_rows._kernel):
        cache.cache_clear()
    yield monkeypatch
    for cache in (overlay_step._kernel, copy_rows._kernel):
        cache.cache_clear()


class Twins:
    """The same overlay rows twice: one in torch, one by the kernel. Every step compares all that they return and hold."""

    def __init__(
        self,
        pages: int,
        sink: int,
        recent: int,
        drafts: int,
        rows: int,
        device: str = "cpu",
        sink_rows: int = 0,
        sliding_window: int | None = None,
    ) -> None:
        recipe = with_rollback(windowed(sink, recent), drafts)
        layout, window = Layout.of(recipe, 1, 16, PAGE, dtype="bfloat16"), recipe.key.window
        torch.manual_seed(0)
        held, sinks = {}, {}
        for name, shape in (("key", (1, 16)), ("value", (1, 32))):  # bytes of a token; those of the streams may differ
            held[name] = torch.randint(256, (2, rows + 1, sink + window.ring, *shape), dtype=torch.uint8).to(device)
            if sink_rows:
                sinks[name] = torch.randint(256, (2, sink_rows, sink, *shape), dtype=torch.uint8).to(device)
        self.layout, self.pages, self.rows, self.device = layout, pages, rows, device

        def twin() -> OverlayRows:
            copies = ({name: x.clone() for name, x in each.items()} for each in (held, sinks))
            return OverlayRows(layout, pages, next(copies), drafts, next(copies), sliding_window)  # type: ignore[arg-type]

        self.kernel, self.torch = twin(), twin()
        assert self.kernel.kernel is not None
        self.torch.kernel = None
        self.seen: dict[str, int] = {"copied": 0, "late": 0, "matched": 0, "saved": 0, "dropped": 0, "packed": 0}

    def step(self, inputs: Inputs, late: bool, tensors: StepTensors | None = None) -> None:
        inputs = Inputs(*(x.to(self.device) for x in inputs))
        before = {name: x.clone() for name, x in self.torch.overlays.items()}
        wanted = self.torch.reference_step(*(x.long() for x in inputs), late)
        self.seen["copied"] += any(not torch.equal(x, before[name]) for name, x in self.torch.overlays.items())
        self.seen["late"] += bool(len(wanted.target))
        self.seen["saved"] += bool((self.torch.sink_used == self.torch.clock).any())
        self.seen |= self.torch.missed._asdict()
        self.seen["matched"] += int((wanted.ring_start[wanted.overlay_rows < self.rows] == 0).sum())
        if tensors is None:
            found = self.kernel.step(*inputs, late)
        else:
            _, match = tensors.prepare(inputs, self.kernel, late)
            assert match is not None
            found = match
        there = found.target < self.rows
        found = found._replace(source=found.source[there], target=found.target[there])
        for name, a, b in zip(wanted._fields, wanted, found, strict=True):
            assert torch.equal(a, b), (name, a, b)
        assert self.kernel.clock == self.torch.clock
        if self.device == "cuda":
            torch.cuda.synchronize()
        assert self.kernel.missed == self.torch.missed
        counts = {"PAGE_STATE": self.pages, "ROW_STATE": self.rows, "SINK_STATE": self.torch.sink_rows}
        for name, count in ((name, count) for kind, count in counts.items() for name in getattr(overlay_step, kind)):
            # the last place stands for none
            a, b = (getattr(twin, name)[:count] for twin in (self.torch, self.kernel))
            assert torch.equal(a, b), (name, (a != b).nonzero()[:, 0].tolist(), a, b)
        for name, x in self.torch.overlays.items():
            assert torch.equal(x, self.kernel.overlays[name]), name
        for name, x in self.torch.sink_store.items():
            assert torch.equal(x, self.kernel.sink_store[name]), name


def steps_of(schedule: Schedule, draw: random.Random, types: tuple[torch.dtype, ...]) -> Iterator[Inputs]:
    """The steps as a server tells them: with padding sequences and tokens, and with garbage past the ends of tables."""
    for step in schedule.steps:
        width = max(len(part.table) for part in step) + draw.randrange(3)
        padding = draw.choice((0, 0, 1, 5))
        table = [
            [*part.table, *(draw.randrange(schedule.blocks) for _ in range(width - len(part.table)))] for part in step
        ]
        table += [[0] * width for _ in range(padding)]
        lengths = [len(part.tokens) for part in step] + [0] * padding
        counts = [len(part.tokens) - part.before for part in step] + [0] * padding
        slots = [part.table[p // PAGE] * PAGE + p % PAGE for part in step for p in range(part.before, len(part.tokens))]
        slots += [-1] * draw.choice((0, padding))
        starts = torch.tensor([0, *counts]).cumsum(0)
        yield Inputs(
            *(
                x.to(kind)
                for x, kind in zip(
                    (torch.tensor(table), torch.tensor(lengths), starts, torch.tensor(slots)), types, strict=True
                )
            )
        )


def check_history(
    seed: int,
    sink: int,
    recent: int,
    drafts: int,
    most: int,
    rows: int,
    blocks: int,
    device: str = "cpu",
    steps: int = 12,
    sink_rows: int = 0,
) -> dict[str, int]:
    draw = random.Random(seed)
    sliding = draw.choice((None, 30, 64, 100))
    schedule = draw_schedule(seed, blocks, drafts, most, steps, sliding_window=sliding)
    rows = max(rows, max(len(step) for step in schedule.steps))
    own_sinks = sink_rows if sink and sliding is None else 0
    twins = Twins(blocks, sink, recent, drafts, rows, device, own_sinks, sliding)
    types = tuple(draw.choice((torch.int32, torch.int64)) for _ in range(4))
    for inputs in steps_of(schedule, draw, types):
        twins.step(inputs, draw.random() < 0.5)
    return twins.seen


@needs_compiler
def test_a_tail_that_is_lost_is_an_error(emulator: pytest.MonkeyPatch) -> None:
    test_overlay.check_lost("cpu")


def check_invented(device: str) -> None:
    """Groups of tokens are written by the table: a sequence that writes nothing, and padding, get the first page."""
    rows, tensors = test_overlay.grouped(device), StepTensors(4, 3, 300, PAGE, torch.device(device))
    step = test_overlay.described([([1, 2], 0, 70), ([3, 4, 5], 129, 130)], device)
    step[3][70:] = -1
    batch, _ = tensors.prepare(Inputs(*step), rows, True)
    assert batch.block_table[0, :2].tolist() == [1, 2] and batch.block_table[1].tolist() == [0, 0, 0]
    if device == "cuda":
        torch.cuda.synchronize()
    rows.check()


@needs_compiler
def test_a_sequence_that_writes_nothing_has_the_first_page(emulator: pytest.MonkeyPatch) -> None:
    check_invented("cpu")
    emulator.setattr(step_tensors, "fused", lambda device: False)
    check_invented("cpu")


@pytest.mark.gpu
@needs_gpu
def test_a_sequence_that_writes_nothing_has_the_first_page_on_a_gpu() -> None:
    check_invented("cuda")


# --- on a CPU -----------------------------------------------------------------------------------------------------------


@needs_compiler
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    window=st.sampled_from([(4, 24), (0, 17), (1, 0), (4, 2), (64, 16)]),
    drafts=st.sampled_from([0, 1, 3]),
    most=st.integers(1, 12),
    spare=st.sampled_from([0, 2, 60]),
    blocks=st.integers(6, 60),
    sink_rows=st.sampled_from([0, 1, 3, 60]),
)
def test_any_history(
    emulator: pytest.MonkeyPatch,
    seed: int,
    window: tuple[int, int],
    drafts: int,
    most: int,
    spare: int,
    blocks: int,
    sink_rows: int,
) -> None:
    check_history(seed, *window, drafts, most, most + spare, blocks, sink_rows=sink_rows)


@needs_compiler
def test_copies_of_rows_and_sinks_are_among_the_histories(emulator: pytest.MonkeyPatch) -> None:
    """Sink rows that run out, and as many as there are pages."""
    for sink_rows in (2, 60):
        seen = [check_history(seed, 4, 24, 3, 12, 12, 60, steps=25, sink_rows=sink_rows) for seed in range(3)]
        assert all(sum(one[what] for one in seen) for what in ("copied", "late", "matched", "saved")), seen
        assert any(one["dropped"] for one in seen) == (sink_rows == 2), seen


def decodes(count: int, draw: random.Random, blocks: int) -> tuple[list[int], torch.Tensor]:
    """Lengths and tables of so many sequences, in pages of their own."""
    lengths = [draw.randrange(1, 5 * PAGE) for _ in range(count)]
    pages = list(range(1, blocks))
    draw.shuffle(pages)
    table = torch.tensor(pages[: 6 * count]).view(count, 6)
    return lengths, table


def check_large(count: int, steps: int, device: str, spare: int = 30) -> None:
    """Steps of so many sequences at once: prompts, then single tokens, with sequences that end and others that begin."""
    draw, blocks = random.Random(count), 7 * count + 8
    twins = Twins(blocks, 4, 8, 0, count + spare, device)
    tensors = StepTensors(count + 3, 6, 5 * PAGE * count, PAGE, torch.device(device))
    lengths, table = decodes(count, draw, blocks)
    before = [0] * count
    for _ in range(steps):
        starts = torch.tensor([0, *(n - m for n, m in zip(lengths, before, strict=True))]).cumsum(0)
        slots = [int(table[b, p // PAGE]) * PAGE + p % PAGE for b in range(count) for p in range(before[b], lengths[b])]
        inputs = Inputs(table.int(), torch.tensor(lengths).int(), starts.int(), torch.tensor(slots))
        twins.step(inputs, False, tensors)
        check_tensors(tensors, inputs)
        before = list(lengths)
        lengths = [n + 1 for n in lengths]
        for b in draw.sample(
            range(count), min(count, 5)
        ):  # another sequence in the same pages, or in those of a neighbour
            before[b], lengths[b] = 0, draw.randrange(1, 3 * PAGE)
        order = list(range(count))
        draw.shuffle(order)
        before, lengths, table = [before[b] for b in order], [lengths[b] for b in order], table[order]
    assert twins.seen["matched"] > count


def check_tensors(tensors: StepTensors, inputs: Inputs) -> None:
    """The tensors hold the inputs, and padding without effect."""
    out, count = tensors.out, len(inputs.seq_lens)
    inputs = Inputs(*(x.cpu().long() for x in inputs))
    out = Outputs(*(x.cpu() for x in out))
    for b, length in enumerate(inputs.seq_lens.tolist()):
        pages = -(-length // PAGE)
        assert torch.equal(out.table[b, :pages], inputs.table[b, :pages])
    assert torch.equal(out.seq_lens[:count], inputs.seq_lens) and not out.seq_lens[count:].any()
    assert torch.equal(out.query_start_loc[: count + 1], inputs.query_start_loc)
    assert bool((out.query_start_loc[count + 1 :] == inputs.query_start_loc[-1]).all())
    tokens = len(inputs.slot_mapping)
    assert torch.equal(out.slot_mapping[:tokens], inputs.slot_mapping) and bool((out.slot_mapping[tokens:] == -1).all())
    assert not any(x[count:].any() for x in (out.overlay_rows, out.sinks, out.ring_start))
    assert not out.counters.any()


@needs_compiler
@pytest.mark.parametrize("by_kernel", [True, False])
def test_pages_that_a_sliding_window_has_left_are_not_in_the_table(
    emulator: pytest.MonkeyPatch, by_kernel: bool
) -> None:
    check_left("cpu", by_kernel)


def check_left(device: str, by_kernel: bool) -> None:
    """The first query of a step sees the fewest pages: token n - w + 1 and those after it, where n is its place."""
    tensors = StepTensors(5, 4, 200, PAGE, torch.device(device), sliding_window=70)
    tensors.fused = by_kernel
    lengths, counts = [133, 134, 250, 60], [1, 1, 117, 1]
    starts = torch.tensor([0, *counts]).cumsum(0)
    table = torch.arange(1, 17).view(4, 4)
    inputs = Inputs(*(x.to(device) for x in (table, torch.tensor(lengths), starts, torch.zeros(120).long())))
    batch, _ = tensors.prepare(inputs, None, True)
    # the first attended token of each: 63, 64, 64, 0
    assert batch.block_table[0, :3].tolist() == [1, 2, 3] and batch.block_table[1, :3].tolist() == [-1, 6, 7]
    assert batch.block_table[2].tolist() == [-1, 10, 11, 12] and batch.block_table[3, 0].tolist() == 13


@needs_compiler
@pytest.mark.parametrize("count", [1, 64, 100])
def test_many_sequences(emulator: pytest.MonkeyPatch, count: int) -> None:
    check_large(count, 4, "cpu")


@pytest.mark.slow
@needs_compiler
def test_as_many_sequences_as_threads(emulator: pytest.MonkeyPatch) -> None:
    emulator.setattr(overlay_step, "THREADS", 1024)
    overlay_step._kernel.cache_clear()
    check_large(1024, 3, "cpu")


@needs_compiler
@pytest.mark.parametrize("by_kernel", [True, False])
def test_padding_has_no_effect_and_what_a_larger_step_left_is_overwritten(
    emulator: pytest.MonkeyPatch, by_kernel: bool
) -> None:
    """Without overlays. The torch code does the same."""
    tensors = StepTensors(5, 3, 200, PAGE, torch.device("cpu"))
    tensors.fused = by_kernel
    for x in tensors.out[:-1]:
        x.fill_(POISON)
    for lengths, wide in (([3, 70, 129, 1], True), ([4, 71], False), ([1], True)):
        kind = torch.int64 if wide else torch.int32
        starts = torch.tensor([0, *([1] * len(lengths))]).cumsum(0)
        table = torch.arange(1, 1 + 4 * len(lengths)).view(-1, 4)  # wider than there is room for
        inputs = Inputs(
            table.to(kind), torch.tensor(lengths).to(kind), starts.to(kind), torch.tensor([7] * len(lengths))
        )
        batch, match = tensors.prepare(inputs, None, True)
        assert match is None and not batch.overlay_rows.any() and not batch.ring_start["value"].any()
        assert batch.seq_lens.tolist() == lengths and batch.slot_mapping.tolist() == [7] * len(lengths)
        assert batch.block_table.data_ptr() == tensors.out.table.data_ptr()
        check_tensors(tensors, inputs)


@needs_compiler
def test_what_attention_reads_through_the_kernel(emulator: pytest.MonkeyPatch) -> None:
    for rows, sink_rows in ((100, 0), (8, 60)):
        found = reads(draw_schedule(3, 60, 2, 8, 20, skipped=0), 4, 24, rows, sink_rows=sink_rows)
        assert found and all(read.right and read.sinks >= min(4, read.length) for read in found)


@needs_compiler
@pytest.mark.parametrize(
    "directed",
    [
        lambda: test_overlay.test_a_recycled_block_is_not_matched_in_the_step_that_writes_it(0, 24),
        lambda: test_overlay.test_a_recycled_block_is_not_matched_in_the_step_that_writes_it(4, 0),
        test_overlay.test_as_many_drafts_as_recent_tokens,
        test_overlay.test_a_row_of_another_sequence_is_not_found_through_a_block_of_its_last_one,
        test_overlay.test_sinks_of_a_chunk_are_there_before_attention,
        test_overlay.test_a_rejected_draft_is_not_read_by_who_shares_its_block,
        test_overlay.test_a_sequence_that_begins_again_does_not_take_back_more_than_drafts,
        test_overlay.test_sinks_do_not_come_through_a_block_that_a_sliding_window_has_left,
        test_overlay.test_sinks_are_found_after_their_own_sequence_has_left_them,
    ],
)
def test_histories_of_the_torch_code(emulator: pytest.MonkeyPatch, directed: Callable[[], None]) -> None:
    directed()


# --- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_pages_that_a_sliding_window_has_left_are_not_in_the_table_on_a_gpu() -> None:
    check_left("cuda", True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", range(12))
def test_any_history_on_a_gpu(seed: int) -> None:
    draw = random.Random(seed)
    sink, recent = draw.choice(((4, 24), (0, 17), (1, 0), (4, 2), (64, 16)))
    most, blocks = draw.randrange(1, 40), draw.randrange(6, 100)
    rows, sink_rows = most + draw.choice((0, 2, 60)), draw.choice((0, 1, 5, blocks))
    check_history(seed, sink, recent, draw.choice((0, 3)), most, rows, blocks, "cuda", 40, sink_rows)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("count", [1, 31, 1024, 1500, 3000])
def test_many_sequences_on_a_gpu(count: int) -> None:
    """More than threads, too."""
    check_large(count, 6, "cuda")


def captured_nodes(graph: torch.cuda.CUDAGraph) -> int:
    count = ctypes.c_size_t()
    status = nvrtc.driver().cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    assert status == 0
    return count.value


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("windows", [True, False])
def test_a_step_is_one_launch(windows: bool) -> None:
    """Counted as nodes of a graph; the step's metadata are part of it."""
    count, device = 64, torch.device("cuda")
    twins = Twins(8 * count, 4, 24, 0, 2 * count, "cuda") if windows else None
    tensors = StepTensors(count, 6, 4096, PAGE, device)
    table = torch.arange(6 * count, device=device, dtype=torch.int32).view(count, 6)
    lengths = torch.full((count,), 70, device=device, dtype=torch.int32)
    starts = torch.arange(count + 1, device=device, dtype=torch.int32)
    inputs = Inputs(table, lengths, starts, table[:, 1].long() * PAGE + 5)
    overlay = None if twins is None else twins.kernel
    tensors.prepare(inputs, overlay, False)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        tensors.prepare(inputs, overlay, False)
    assert captured_nodes(graph) == 1
