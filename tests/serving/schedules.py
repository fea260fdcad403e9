"""Random schedules of a paged server with two tenants, and what attention reads while one runs.

A `Schedule` is drawn once: which sequences a step has, their tokens, block tables and new tokens. The scheduler does as
little of what vLLM's does as makes trouble: prefixes of full blocks are shared within a tenant as soon as somebody is to write
them, prompts come in chunks, sequences are preempted, finished and begun again, blocks are recycled at random, drafts are
rejected, and a sequence may have a block before it needs it, as with asynchronous scheduling. With `offload`, every full block is
stored in CPU memory a step later, and comes back into another block when a prefix hit needs it.

`reads` then runs `OverlayRows` over a schedule. Pages and overlays hold a number in place of a vector: the token's own, made of
tenant, token and position. So a read is right if and only if the number is.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from kvant.layout import Layout
from kvant.ops.reference import overlay_index
from kvant.recipe import Recipe, Stream, Window
from kvant.recipes import get
from kvant.serving.overlay import Missed, OverlayRows, SavedSinks, with_rollback
from kvant.serving.step import decode_queries

PAGE = 64
AT_ONCE = 20  # schedules of one test
Number = Callable[[str, int, int], int]  # of tenant, token and position


class Part(NamedTuple):
    """One sequence of one step."""

    request: int
    tenant: str
    tokens: tuple[int, ...]  # all, the new ones included
    table: tuple[int, ...]
    before: int  # tokens that the step finds in the cache
    hit: int  # of these, the first ones that another request computed, or this one before it was preempted


class Move(NamedTuple):
    """A block that is moved to CPU memory before a step, or from there."""

    loads: bool
    prefix: tuple[str, tuple[int, ...]]  # tenant, all tokens to its end
    block: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    blocks: int
    drafts: int
    steps: list[list[Part]]
    sliding_window: int | None = None  # the server takes back the pages that it has left; tables still name them
    moves: list[list[Move]] = dataclasses.field(default_factory=list)  # before each step; [] where nothing is moved

    def only(self, tenant: str) -> Schedule:
        """The same steps for one tenant's sequences, at the same places in memory, as if the others had never come."""
        steps = [[part for part in step if part.tenant == tenant] for step in self.steps]
        return dataclasses.replace(self, steps=[step for step in steps if step])


@dataclasses.dataclass(eq=False)
class Request:
    number: int
    tenant: str
    tokens: list[int]
    table: list[int] = dataclasses.field(default_factory=list)
    done: int = 0  # tokens in the cache
    drafts: int = 0  # of these, the last ones that may be rejected
    hit: int = 0  # of these, the first ones that came from blocks that were known
    left: int = 0  # first blocks that it had, and gave back


class Pool:
    """Blocks, and which of them hold which tokens of which tenant."""

    def __init__(self, blocks: int, draw: random.Random) -> None:
        self.free = list(range(blocks - 1, 0, -1))  # block 0 is nobody's
        self.known: dict[
            tuple[str, tuple[int, ...]], int
        ] = {}  # tenant, all tokens to the end of a full block -> the block
        self.users: Counter[int] = Counter()
        self.draw = draw
        self.offloaded: set[tuple[str, tuple[int, ...]]] | None = None  # what is in CPU memory, where there is any
        self.moves: list[Move] = []  # before the next step
        self.unsaved: list[Move] = []  # of blocks that the step completes

    def take(self) -> int | None:
        idle = [key for key, block in self.known.items() if not self.users[block]]
        often = 0.2 if self.offloaded is None else 0.6
        if idle and (not self.free or self.draw.random() < often):
            self.free.append(self.known.pop(self.draw.choice(idle)))  # evicted
        return self.free.pop() if self.free else None

    def share(self, request: Request) -> None:
        """Takes up the blocks of a prefix that is known; at least one token is left to compute."""
        for end in range(PAGE, len(request.tokens), PAGE):
            key = request.tenant, tuple(request.tokens[:end])
            block = self.known.get(key)
            if block is None and self.offloaded and key in self.offloaded:
                block = self.take()
                if block is not None:
                    self.known[key] = block
                    self.moves.append(Move(True, key, block))
            if block is None:
                break
            request.table.append(block)
            self.users[block] += 1
        request.done = request.hit = PAGE * len(request.table)

    def grow(self, request: Request, length: int) -> bool:
        while len(request.table) * PAGE < length:
            block = self.take()
            if block is None:
                return False
            request.table.append(block)
            self.users[block] += 1
        return True

    def leave(self, request: Request, tokens: int) -> None:
        """Takes back the blocks that lie before so many tokens of a sequence."""
        first, request.left = request.left, max(request.left, tokens // PAGE)
        for block in request.table[first : request.left]:
            self._release(block)

    def _release(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block] and block not in set(self.known.values()):
            self.free.append(block)

    def publish(self, request: Request, length: int) -> None:
        for end in range(PAGE * (request.left + 1), length + 1, PAGE):
            key = request.tenant, tuple(request.tokens[:end])
            if self.known.setdefault(key, request.table[end // PAGE - 1]) == request.table[end // PAGE - 1]:
                self.unsaved.append(Move(False, key, request.table[end // PAGE - 1]))

    def store(self) -> None:
        """Moves what the last step completed to CPU memory. Blocks that were loaded are there already."""
        if self.offloaded is not None:
            self.moves += [move for move in self.unsaved if move.prefix not in self.offloaded]
            self.offloaded |= {move.prefix for move in self.unsaved}
        self.unsaved = []

    def drop(self, request: Request) -> None:
        for block in reversed(request.table[request.left :]):
            self._release(block)
        request.table, request.done, request.drafts, request.left = [], 0, 0, 0


def draw_schedule(
    seed: int,
    blocks: int,
    drafts: int,
    most: int,
    steps: int = 40,
    skipped: float = 0.1,
    offload: bool = False,
    sliding_window: int | None = None,
) -> Schedule:
    """At most `most` sequences in a step, of which each is left out with probability `skipped`. Prompts are multiples of a page
    more often than chance would have it."""
    draw = random.Random(seed)
    pool = Pool(blocks, draw)
    room = (blocks - 1) * PAGE
    longest = min(200, room - 1 - drafts)
    prefixes = [
        (tenant, [draw.randrange(1000) for _ in range(draw.choice((PAGE, 2 * PAGE, draw.randrange(1, longest))))])
        for tenant in ("A", "B", "A", "B")
    ]
    running: list[Request] = []
    waiting: list[Request] = []
    out: list[list[Part]] = []
    moves: list[list[Move]] = []
    pool.offloaded = set() if offload else None
    count = 0
    while len(out) < steps:
        pool.store()
        while len(running) + len(waiting) < most and draw.random() < 0.6:
            tenant, prefix = draw.choice(prefixes)
            if draw.random() < 0.5:
                prefix = [draw.randrange(1000) for _ in prefix]  # one that nobody has computed yet ...
            for _ in range(draw.choice((1, 2, 3))):  # ... for several, who share it while it is written
                tail = [draw.randrange(1000) for _ in range(draw.choice((1, PAGE, draw.randrange(1, 90))))]
                waiting.append(Request(count, tenant, (prefix + tail)[:longest]))
                count += 1
        for end in ("preempted", "finished"):
            if running and draw.random() < (0.08 if end == "preempted" else 0.25):
                request = running.pop(draw.randrange(len(running)))
                pool.drop(request)
                if end == "preempted":
                    waiting.append(request)
        while waiting and len(running) < most:
            running.append(waiting.pop(0))
        draw.shuffle(running)
        budget = draw.choice((70, 300, 500))
        step: list[Part] = []
        for request in sorted(running, key=lambda request: not request.table):  # who is new comes last, as in vLLM
            if budget <= 0 or draw.random() < skipped:
                continue
            if not request.table:
                pool.share(request)
            if request.drafts:  # some are rejected; other tokens come in their place
                request.done -= draw.randrange(request.drafts + 1)
                del request.tokens[request.done :]
            request.drafts = 0
            before = request.done
            if sliding_window is not None:
                pool.leave(request, before + 1 - sliding_window)
            if before < len(request.tokens):
                new = min(len(request.tokens) - before, budget, draw.choice((1, 7, PAGE, 150)))
            else:
                request.drafts = draw.randrange(drafts + 1) if draw.random() < 0.7 else 0
                new = 1 + request.drafts
                request.tokens += [draw.randrange(1000) for _ in range(new)]
            if len(request.tokens) > room or not pool.grow(request, before + new):
                del request.tokens[max(before, 1) :]
                pool.drop(request)
                running.remove(request)
                if len(request.tokens) < room:
                    waiting.append(request)
                continue
            if draw.random() < 0.1:
                pool.grow(request, len(request.table) * PAGE + 1)  # ahead of time
            budget -= new
            pool.publish(request, before + new - request.drafts)
            request.done = before + new
            tokens, table = tuple(request.tokens[: before + new]), tuple(request.table)
            step.append(Part(request.number, request.tenant, tokens, table, before, request.hit))
        if step:
            draw.shuffle(step)
            out.append(step)
            moves.append(pool.moves)
            pool.moves = []
    return Schedule(blocks, drafts, out, sliding_window, moves if offload else [])


def windowed(sink: int, recent: int) -> Recipe:
    int4 = get("int4")
    stream = Stream(int4.key.codec, (), Window(sink, recent))
    return dataclasses.replace(int4, key=stream, value=stream)


class Read(NamedTuple):
    """What one sequence of one step read of its tokens."""

    part: Part
    length: int
    numbers: tuple[float, ...]  # of its first `length` tokens
    exact: tuple[bool, ...]  # which came from the overlay
    sinks: int  # that its row holds
    since: int  # the first token that the ring of its row has ever held
    low: int = 0  # the first token that it attends to; nothing is said of those before

    @property
    def right(self) -> bool:
        """Whether it read its own tokens, and no others'."""
        tenant, tokens = self.part.tenant, self.part.tokens
        return self.numbers == tuple(
            float(plain_number(tenant, tokens[p], p)) if p >= self.low else 0.0 for p in range(self.length)
        )


def plain_number(tenant: str, token: int, position: int) -> int:
    return (position * 1000 + token) * 2 + (tenant == "B")


def reads(
    schedule: Schedule,
    sink: int,
    recent: int,
    rows: int,
    number: Number = plain_number,
    late: bool = True,
    device: str = "cpu",
    sink_rows: int = 0,
    missed: list[Missed] | None = None,
) -> list[Read]:
    """Runs the steps as the backend does: pages first, with the windows of decodes and of prompts that begin, and the sinks of
    chunks that continue a prompt; then late sinks; then attention; then the windows of those chunks. A step that verifies drafts is a
    decode, which reads at the length of every one of its tokens, after all of them are written. `missed` gets what could not be
    kept."""
    recipe = with_rollback(windowed(sink, recent), schedule.drafts)
    layout, window = Layout.of(recipe, 1, 16, PAGE, dtype="bfloat16"), recipe.key.window
    shape = 1, rows + 1, max(1, sink + window.ring), 1, 2  # two numbers: a GPU copies rows of 16 bytes
    overlay = torch.full(shape, float("nan"), dtype=torch.float64, device=device)
    store = torch.full((1, sink_rows, sink, 1, 2), float("nan"), dtype=torch.float64, device=device)
    windows = OverlayRows(
        layout,
        schedule.blocks,
        {"key": overlay},
        schedule.drafts,
        {"key": store} if sink_rows else None,
        schedule.sliding_window,
    )
    pages = torch.full((schedule.blocks * PAGE,), float("nan"), dtype=torch.float64)
    out: list[Read] = []
    most = decode_queries(schedule.drafts)  # tokens of a decode

    def write(part: Part, row: int, numbers: torch.Tensor, sinks_only: bool = False) -> None:
        n = len(part.tokens)
        position = torch.arange(part.before, n)
        kept = (position < sink) | ((position >= n - window.ring) & (not sinks_only))
        overlay[0, row, overlay_index(window, position[kept]).to(device), 0] = numbers[kept, None].to(device)

    def read(part: Part, b: int, length: int) -> None:
        held, since = int(found.sinks[b]), int(found.ring_start[b])
        at = torch.arange(length)
        exact = (at < min(held, length)) | (at >= max(sink, since, length - recent))
        numbers = pages[torch.tensor(part.table)[at // PAGE] * PAGE + at % PAGE]
        numbers[exact] = overlay[0, int(found.overlay_rows[b]), overlay_index(window, at[exact]).to(device), 0, 0].cpu()
        low = 0 if schedule.sliding_window is None else max(0, part.before + 1 - schedule.sliding_window)
        numbers[:low], exact[:low] = 0.0, False
        out.append(Read(part, length, tuple(numbers.tolist()), tuple(exact.tolist()), held, since, low))

    offloaded: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, SavedSinks | None]] = {}

    def move(loads: bool, prefix: tuple[str, tuple[int, ...]], block: int) -> None:
        slots, first = slice(block * PAGE, (block + 1) * PAGE), len(prefix[1]) == PAGE
        if not loads:
            offloaded[prefix] = pages[slots].clone(), windows.save_sinks(block) if first else None
            return
        pages[slots], saved = offloaded[prefix]
        windows.forget([block])
        if saved is not None:
            windows.restore_sinks(block, saved)

    for at, step in enumerate(schedule.steps):
        for each in schedule.moves[at] if schedule.moves else []:
            move(*each)
        width = max(len(part.table) for part in step)
        table = torch.tensor([[*part.table, *[0] * (width - len(part.table))] for part in step])
        lengths = torch.tensor([len(part.tokens) for part in step])
        counts = lengths - torch.tensor([part.before for part in step])
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        fresh = [
            torch.tensor(
                [number(part.tenant, part.tokens[p], p) for p in range(part.before, len(part.tokens))]
            ).double()
            for part in step
        ]
        slots = torch.cat(
            [
                torch.tensor(part.table)[p // PAGE] * PAGE + p % PAGE
                for part in step
                for p in (torch.arange(part.before, len(part.tokens)),)
            ]
        )
        found = windows.step(*(x.to(device) for x in (table, lengths, starts, slots)), late)
        assert len(set(found.overlay_rows.tolist())) == len(step), "two sequences have one row"
        assert int(found.overlay_rows.max()) < rows
        pages[slots] = torch.cat(fresh)
        continued = [part.before > 0 and len(part.tokens) - part.before > most for part in step]
        for part, row, numbers, last in zip(step, found.overlay_rows.tolist(), fresh, continued, strict=True):
            write(part, row, numbers, sinks_only=last)
        windows.finish_sinks(0, found)
        for b, (part, last) in enumerate(zip(step, continued, strict=True)):
            if last:
                read(part, b, part.before)
            elif len(part.tokens) - part.before <= most:
                for length in range(part.before + 1, len(part.tokens) + 1):
                    read(part, b, length)
        for part, row, numbers, last in zip(step, found.overlay_rows.tolist(), fresh, continued, strict=True):
            if last:
                write(part, row, numbers)
    if missed is not None:
        if device == "cuda":
            torch.cuda.synchronize()
        missed.append(windows.missed)
    return out


def parametrize_first(metafunc: pytest.Metafunc, count: int) -> None:
    """A test of `first` is of AT_ONCE schedules, of `count` in all; those beyond the first two tests are slow."""
    if "first" in metafunc.fixturenames:
        slow = [pytest.param(first, marks=pytest.mark.slow) for first in range(AT_ONCE * 2, count, AT_ONCE)]
        metafunc.parametrize("first", [0, AT_ONCE, *slow])


def check_from(first: int, check: Callable[[int], dict[str, int]]) -> None:
    """Checks AT_ONCE schedules; of everything that makes trouble, which `check` counts, there was some."""
    total: dict[str, int] = {}
    for seed in range(first, first + AT_ONCE):
        for name, count in check(seed).items():
            total[name] = total.get(name, 0) + count
    assert min(total.values()) > 0, total
