"""Rows of windows are found by physical blocks alone, whatever a scheduler does: checked against a small scheduler that shares
prefixes (of blocks that are written in the same step, too), cuts prompts into chunks, preempts, evicts and takes drafts back."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch

from kvant.engines.vllm.windows import Found, Windows
from kvant.layout import Layout, StreamName
from kvant.ops import LayerStore, PagedBatch
from kvant.ops.reference import append, overlay_index
from kvant.ops.types import empty_overlay
from kvant.recipe import Recipe, Stream, Window
from kvant.recipes import get

PAGE, HEADS, DIM = 64, 1, 16


def recipe(sink: int, recent: int) -> Recipe:
    int4 = get("int4")
    stream = Stream(int4.key.codec, (), Window(sink, recent))
    return dataclasses.replace(int4, key=stream, value=stream)


@functools.cache
def vector(token: int, position: int) -> torch.Tensor:
    """A token's key: a bfloat16 number of its own."""
    return torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(token * 7919 + position)).bfloat16().float()


@dataclasses.dataclass
class Request:
    tokens: list[int]
    table: list[int] = dataclasses.field(default_factory=list)
    done: int = 0  # tokens in the cache
    hit: int = 0  # of these, the first ones that another request computed
    drafts: int = 0  # tokens of the last step that may be taken back


class Scheduler:
    """As little of vLLM's as makes trouble: blocks are shared as soon as somebody is to write them."""

    def __init__(self, blocks: int, draw: random.Random) -> None:
        self.free = list(range(blocks - 1, 0, -1))  # block 0 is nobody's
        self.known: dict[tuple[int, ...], int] = {}  # all tokens up to the end of a full block -> the block
        self.users: dict[int, int] = {}
        self.draw = draw

    def take(self) -> int | None:
        idle = [block for block in self.known.values() if not self.users.get(block)]
        if not self.free and idle:
            block = self.draw.choice(idle)  # evicted
            self.known = {key: other for key, other in self.known.items() if other != block}
            self.free.append(block)
        return self.free.pop() if self.free else None

    def begin(self, request: Request) -> None:
        """Shares the blocks of a prefix; at least one token is computed."""
        assert not request.table and not request.done
        for end in range(PAGE, len(request.tokens), PAGE):
            block = self.known.get(tuple(request.tokens[:end]))
            if block is None:
                break
            request.table.append(block)
            self.users[block] = self.users.get(block, 0) + 1
        request.done = request.hit = PAGE * len(request.table)

    def grow(self, request: Request, length: int) -> bool:
        while len(request.table) * PAGE < length:
            block = self.take()
            if block is None:
                return False
            request.table.append(block)
            self.users[block] = 1
        return True

    def publish(self, request: Request, length: int) -> None:
        for end in range(PAGE, length + 1, PAGE):
            self.known.setdefault(tuple(request.tokens[:end]), request.table[end // PAGE - 1])

    def drop(self, request: Request) -> None:
        for block in request.table:
            self.users[block] -= 1
            if not self.users[block] and block not in self.known.values():
                self.free.append(block)
        request.table, request.done, request.hit, request.drafts = [], 0, 0, 0


def run(
    seed: int,
    sink: int,
    recent: int,
    drafts: int,
    rows: int,
    blocks: int,
    most: int,
    at_once: bool = True,
    device: str = "cpu",
) -> dict[str, int]:
    draw = random.Random(seed)
    layout = Layout.of(recipe(sink, recent), HEADS, DIM, PAGE, dtype="bfloat16")
    names: tuple[StreamName, StreamName] = ("key", "value")
    overlays = {name: torch.full_like(empty_overlay(layout, name, rows + 1, device), float("nan")) for name in names}
    windows = Windows(layout, blocks, {name: overlay[None] for name, overlay in overlays.items()}, drafts)
    store = LayerStore.allocate(layout, blocks, 0, device)
    store.overlays = overlays
    scheduler = Scheduler(blocks, draw)
    prefixes = [[draw.randrange(1000) for _ in range(draw.randrange(40, 200))] for _ in range(3)]
    running: list[Request] = []
    waiting: list[Request] = []
    seen = {"checked": 0, "sinks": 0, "sinks missing": 0, "recent": 0, "recent lost": 0, "hits": 0, "preempted": 0}
    for _ in range(90):
        while len(running) + len(waiting) < most and draw.random() < 0.6:
            tail = [draw.randrange(1000) for _ in range(draw.randrange(1, 90))]
            waiting.append(Request(draw.choice(prefixes) + tail))
        if running and draw.random() < 0.08:  # preempted: begins again
            request = running.pop(draw.randrange(len(running)))
            scheduler.drop(request)
            waiting.append(request)
            seen["preempted"] += 1
        if running and draw.random() < 0.15:  # finished
            scheduler.drop(running.pop(draw.randrange(len(running))))
        while waiting and len(running) < most:
            running.append(waiting.pop(0))
        batch: list[tuple[Request, int, int]] = []
        budget = 500
        draw.shuffle(running)
        for request in list(running):
            if draw.random() < 0.1 or budget <= 0:  # not in this step
                continue
            if not request.table:  # may share what others of this step are to write
                scheduler.begin(request)
                seen["hits"] += bool(request.hit)
            if request.drafts:  # some drafts are taken back; other tokens come instead
                back = draw.randrange(request.drafts + 1)
                request.done -= back
                del request.tokens[request.done :]
            request.drafts = 0
            before = request.done
            if before < len(request.tokens):
                count = min(len(request.tokens) - before, budget, draw.choice((1, 7, 64, 150)))
            else:
                request.drafts = draw.randrange(drafts + 1) if drafts else 0
                count = 1 + request.drafts
                request.tokens += [draw.randrange(1000) for _ in range(count)]
            if not scheduler.grow(request, before + count):
                scheduler.drop(request)
                running.remove(request)
                waiting.append(request)
                continue
            budget -= count
            scheduler.publish(request, before + count - request.drafts)
            request.done = before + count
            batch.append((request, before, count))
        if not batch:
            continue
        width = max(len(r.table) for r, _, _ in batch)
        table = torch.tensor([r.table + [0] * (width - len(r.table)) for r, _, _ in batch])
        lengths = torch.tensor([before + count for _, before, count in batch])
        starts = torch.tensor([0, *(count for _, _, count in batch)]).cumsum(0)
        slots = torch.tensor(
            [r.table[p // PAGE] * PAGE + p % PAGE for r, before, count in batch for p in range(before, before + count)]
        )
        table, lengths, starts, slots = (x.to(device) for x in (table, lengths, starts, slots))
        found = windows.step(table, lengths, starts, slots, at_once)
        assert len(set(found.owners.tolist())) == len(batch), "two sequences have one row"
        assert int(found.owners.max()) < rows
        x = torch.stack(
            [vector(r.tokens[p], p) for r, before, count in batch for p in range(before, before + count)]
        ).to(device)
        history = [_read(store, found, b, before) for b, (_, before, _) in enumerate(batch)]
        exact: dict[StreamName, torch.Tensor] = dict.fromkeys(names, found.since)
        append(store, x, -x, PagedBatch(table, lengths, slots, starts, found.owners, found.sinks, exact))
        windows.finish_sinks(0, found)
        for b, (request, before, count) in enumerate(batch):
            after = _read(store, found, b, before + count)
            late = sink if int(found.owners[b]) in found.target.tolist() else 0  # copied only after the append
            for n, (positions, held) in ((before, history[b]), (before + count, after)):
                there = [i for i, p in enumerate(positions) if n > before or p >= late]
                if there:
                    wanted = torch.stack([vector(request.tokens[positions[i]], positions[i]) for i in there])
                    assert torch.equal(held[0][there], wanted) and torch.equal(held[1][there], -wanted), (n, before)
                    seen["checked"] += len(there)
            seen["sinks"] += int(found.sinks[b]) == min(sink, before + count)
            seen["sinks missing"] += int(found.sinks[b]) < min(sink, before + count)
            seen["recent"] += int(found.since[b]) <= request.hit
            seen["recent lost"] += int(found.since[b]) > request.hit
    return seen


def _read(store: LayerStore, found: Found, b: int, n: int) -> tuple[list[int], tuple[torch.Tensor, torch.Tensor]]:
    """Which positions of a sequence its windows hold at length n, and what: as the operations would read it."""
    owner, sinks, since = int(found.owners[b]), int(found.sinks[b]), int(found.since[b])
    window = store.layout.recipe.key.window
    positions = [p for p in range(n) if p < min(sinks, n) or p >= max(window.sink, since, n - window.recent)]
    index = overlay_index(window, torch.tensor(positions, dtype=torch.int64)).to(store.pages.device)
    return positions, (
        store.overlays["key"][owner][index].float().cpu(),
        store.overlays["value"][owner][index].float().cpu(),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("sink", "recent", "drafts"), [(4, 24, 0), (4, 24, 3), (64, 100, 0), (1, 0, 0), (0, 17, 5)])
def test_whatever_a_scheduler_does(seed: int, sink: int, recent: int, drafts: int) -> None:
    """With rows to spare, no window is lost, and every sink is there."""
    seen = run(seed, sink, recent, drafts, rows=64, blocks=60, most=12)
    assert seen["checked"] > 100 and seen["hits"] and seen["preempted"], seen
    assert not seen["recent lost"], seen
    assert not seen["sinks missing"], seen


def test_sinks_of_the_same_step_may_wait_for_the_next() -> None:
    seen = run(1, 64, 16, 0, rows=64, blocks=60, most=12, at_once=False)
    assert seen["sinks missing"] and seen["sinks"] > 10 * seen["sinks missing"] and not seen["recent lost"], seen


@pytest.mark.parametrize("seed", range(3))
def test_few_rows(seed: int) -> None:
    """With hardly more rows than sequences, windows may be lost, but none is ever another's."""
    seen = run(seed, 4, 24, 3, rows=6, blocks=24, most=5)
    assert seen["checked"] > 100 and seen["recent"] > seen["recent lost"], seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drafts", [0, 3])
def test_on_a_gpu(drafts: int) -> None:
    """The same, without waiting for the device: there, a fixed number of sinks is copied in a step."""
    seen = run(0, 4, 24, drafts, rows=64, blocks=60, most=12, device="cuda")
    assert seen["checked"] > 100 and seen["hits"], seen
    assert not seen["recent lost"] and not seen["sinks missing"], seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_gpu() -> None:
    layout = Layout.of(recipe(4, 24), HEADS, DIM, PAGE, dtype="bfloat16")
    names: tuple[StreamName, StreamName] = ("key", "value")
    windows = Windows(layout, 8, {name: empty_overlay(layout, name, 9, "cuda")[None] for name in names}, drafts=2)
    table, lengths = torch.tensor([[1, 2], [3, 4]], device="cuda"), torch.tensor([70, 3], device="cuda")
    starts, slots = torch.tensor([0, 70, 73], device="cuda"), torch.arange(64, 137, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        windows.step(table, lengths, starts, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
