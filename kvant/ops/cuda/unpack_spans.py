"""Spans of sequences that are unpacked, one after another: their rows, and what work units of kernels/unpack.cu they have."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from kvant.layout import StreamName
from kvant.recipe import Window

Tensor = torch.Tensor
STREAMS: tuple[StreamName, StreamName] = ("key", "value")


class Span(NamedTuple):
    """What is unpacked of one sequence: positions [first, last) of its history of `history` tokens, and then its new tokens, rows
    [new_first, new_first + new) of all new tokens."""

    first: int
    last: int
    history: int
    new_first: int = 0
    new: int = 0

    @property
    def tokens(self) -> int:
        return self.last - self.first + self.new


class Joined(NamedTuple):
    """Where the spans of a batch lie, one after another."""

    tokens: int
    longest: int
    last: int  # tokens of the longest history, up to where it is unpacked
    starts: Tensor  # int32 [sequences + 1], on the device: first row of every span
    sequences: dict[StreamName, Tensor]  # int32 [sequences, 8]: struct Sequence
    units: dict[StreamName, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """What decides the work units of spans. Equal ones are one object (`grid_of`), so that it is hashed by its address."""

    origin: int  # position of the first token of the first page
    windows: dict[StreamName, Window]
    units: dict[StreamName, int]  # tokens of a work unit


@functools.lru_cache(maxsize=64)
def join_spans(grid: Grid, spans: tuple[Span, ...], device: torch.device, stream: int) -> Joined:
    """The rows of spans. `stream`: the one that they are copied to the device on, and are read on."""
    origin, starts = grid.origin, [0]
    for span in spans:
        starts.append(starts[-1] + span.tokens)
    rows: list[int] = []
    units: dict[StreamName, int] = {}
    for name in STREAMS:
        window, unit = grid.windows[name], grid.units[name]
        before = 0
        for span, start in zip(spans, starts, strict=False):
            packed_end = max(window.packed_end(span.history), window.sink)
            rows += [before, start, span.first, span.last, packed_end, span.new_first, span.new, 0]
            if span.last > span.first:
                before += -(-(span.last - origin) // unit) - (span.first - origin) // unit
            before += -(-span.new // unit)
        units[name] = before
    packed = torch.tensor(rows + starts, dtype=torch.int32).to(device, non_blocking=True)  # one copy
    half = 8 * len(spans)
    both = {"key": packed[:half].view(-1, 8), "value": packed[half : 2 * half].view(-1, 8)}
    longest, last = max((span.tokens for span in spans), default=0), max((span.last for span in spans), default=0)
    return Joined(starts[-1], longest, last, packed[2 * half :], both, units)  # type: ignore[arg-type]
