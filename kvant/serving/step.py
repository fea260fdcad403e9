"""One forward pass of a server: which of its tokens are written when, and which are decodes.

Sequences with one new token come first and are decodes; the others are prefills. With speculation, a sequence whose drafts
are verified is a decode of several queries, each of which attends as it would have without speculation. The order in which a
layer works on them follows from two facts. A prefill reads the history of its sequence as it was before its new tokens, which
overwrite the ring of recent tokens. And a server may let a sequence share a page that another one writes in this very step,
so all pages are written before anything is read. Hence the order: first pages and overlays of decodes and of prefills without
history, and the pages alone of the other prefills, with such sinks as are among their new tokens; then attention; then the
overlays of those other prefills. Each append is given a range of consecutive tokens, so that as few tokens as possible are packed
and not stored; or, where tokens are coded in groups and none of a sequence's can be left out, the tokens of some sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from kvant.ops import PagedBatch
from kvant.ops.types import ending_before
from kvant.serving.overlay import OverlayMatch, OverlayRows

Tensor = torch.Tensor
MOST_QUERIES = 8  # new tokens of a sequence, at most, that decode attends from; more are a prefill


def decode_queries(drafts: int) -> int:
    """New tokens of a sequence, at most, that are a decode where a step verifies so many drafts."""
    return drafts + 1 if drafts < MOST_QUERIES else 1


class Part(NamedTuple):
    """Some sequences of a step, and their new tokens: a range where the sequences are consecutive, otherwise indices, int64. Tokens
    with slot -1 are not written."""

    tokens: slice | Tensor
    batch: PagedBatch


@dataclasses.dataclass
class Step:
    """One forward pass. Tokens of decodes come first; the rest are those of prefills."""

    tokens: int
    batch: PagedBatch  # all sequences
    appends: list[Part]  # written before attention, pages and overlays
    decodes: int  # number of sequences that are decodes
    match: OverlayMatch | None
    overlay: OverlayRows | None
    prefill: PagedBatch | None = None  # the other sequences; their seq_lens and query_start_loc lie on the host
    history: bool = False  # whether any of the prefills has tokens from before this step
    last: Part | None = None  # prefills whose overlays are written after attention
    decoded: int | None = None  # tokens of decodes, where that is not one each
    counts: Tensor | None = None  # tokens of each decode, int64 on the host, where they differ

    @property
    def decode_tokens(self) -> int:
        """Tokens of decodes, which come first."""
        return self.decodes if self.decoded is None else self.decoded

    @functools.cached_property
    def decoding(self) -> PagedBatch:
        """The decodes alone; where they have different numbers of tokens, a sequence for every token."""
        b, n = self.batch, self.decodes
        if self.counts is not None:
            sequences = torch.repeat_interleave(torch.arange(n), self.counts)
            after = self.counts.cumsum(0)[sequences] - 1 - torch.arange(len(sequences))
            device = b.seq_lens.device
            return ending_before(b, sequences.to(device), after.to(device))
        ring_start = {name: ring_start[:n] for name, ring_start in b.ring_start.items()}
        return PagedBatch(
            b.block_table[:n],
            b.seq_lens[:n],
            b.slot_mapping[: self.decode_tokens],
            b.query_start_loc[: n + 1],
            b.overlay_rows[:n],
            b.sinks[:n],
            ring_start,
        )

    def split(
        self, host_starts: Tensor, host_lens: Tensor, ring: bool, groupwise: bool = False, room: int = 0, sink: int = 0
    ) -> None:
        """Fills in what concerns prefills. `host_starts` is query_start_loc of all sequences and `host_lens` seq_lens of the
        prefills, both int64 on the host. `ring`: the recipe keeps recent tokens in full precision. `groupwise`: it codes groups of
        tokens, of which an append may leave out none. `room`: new tokens of a sequence that overwrite nothing of its history. `sink`:
        so many first tokens of a sequence are in its row before attention, where another one of this step may need them."""
        batch, first, count = self.batch, self.decodes, len(host_starts) - 1
        query_start_loc = host_starts[first:] - host_starts[first]
        older = host_lens > query_start_loc.diff()
        self.history = bool(older.any())
        self.prefill = batch._replace(
            block_table=batch.block_table[first:],
            seq_lens=host_lens,
            slot_mapping=batch.slot_mapping[int(host_starts[first]) :],
            query_start_loc=query_start_loc,
            overlay_rows=batch.overlay_rows[first:],
            sinks=batch.sinks[first:],
            ring_start={name: ring_start[first:] for name, ring_start in batch.ring_start.items()},
        )
        places = (older & (query_start_loc.diff() > room)).nonzero()[:, 0] + first
        if not (len(places) and ring):
            return
        before = host_lens - query_start_loc.diff()
        first_tokens = places[before[places - first] < sink]
        low, high = int(places[0]), int(places[-1]) + 1
        part = part_of(batch, host_starts, low, high)
        around = ((0, low), (high, count))
        self.appends = [part_of(batch, host_starts, i, j) for i, j in around if host_starts[i] < host_starts[j]]
        self.last = part
        if len(places) < high - low and groupwise:
            others = torch.tensor(sorted({*range(low, high)} - {*places.tolist()}))
            self.appends.append(part_of_some(batch, host_starts, others))
            self.last = part_of_some(batch, host_starts, places)
        elif len(places) < high - low:  # prefills without history lie between those with one
            assert isinstance(part.tokens, slice)
            mask = torch.zeros(part.tokens.stop - part.tokens.start, dtype=torch.bool)
            for b in places.tolist():
                begin, end = int(host_starts[b]), int(host_starts[b + 1])
                mask[begin - part.tokens.start : end - part.tokens.start] = True
            mask = mask.to(batch.slot_mapping.device)
            both = (torch.where(here, part.batch.slot_mapping, -1) for here in (~mask, mask))
            between, last = (Part(part.tokens, part.batch._replace(slot_mapping=slots)) for slots in both)
            self.appends.append(between)
            self.last = last
        if len(first_tokens):  # a prompt that was cut among its sinks
            self.appends.append(part_of_some(batch, host_starts, first_tokens, sink - before[first_tokens - first]))


def part_of(batch: PagedBatch, host: Tensor, first: int, last: int) -> Part:
    """Sequences [first, last) of a batch; `host` is its query_start_loc on the host."""
    tokens, at = slice(int(host[first]), int(host[last])), slice(first, last)
    part = batch._replace(
        block_table=batch.block_table[at],
        seq_lens=batch.seq_lens[at],
        slot_mapping=batch.slot_mapping[tokens],
        query_start_loc=batch.query_start_loc[first : last + 1] - tokens.start,
        overlay_rows=batch.overlay_rows[at],
        sinks=batch.sinks[at],
        ring_start={name: ring_start[at] for name, ring_start in batch.ring_start.items()},
    )
    return Part(tokens, part)


def part_of_some(batch: PagedBatch, host: Tensor, places: Tensor, most: Tensor | None = None) -> Part:
    """The sequences of a batch at these places, int64 on the host; `host` is its query_start_loc on the host. `most`: only so many of
    the first new tokens of each, as if there were no others."""
    device = batch.slot_mapping.device
    counts = host.diff()[places]
    fewer = counts if most is None else torch.minimum(counts, most)
    tokens = torch.cat(
        [torch.arange(int(host[b]), int(host[b]) + n) for b, n in zip(places.tolist(), fewer.tolist(), strict=True)]
    )
    tokens, starts = tokens.to(device), torch.nn.functional.pad(fewer.cumsum(0), (1, 0)).to(device)
    at = places.to(device)
    part = batch._replace(
        block_table=batch.block_table[at],
        seq_lens=batch.seq_lens[at] - (counts - fewer).to(device),
        slot_mapping=batch.slot_mapping[tokens],
        query_start_loc=starts,
        overlay_rows=batch.overlay_rows[at],
        sinks=batch.sinks[at],
        ring_start={name: ring_start[at] for name, ring_start in batch.ring_start.items()},
    )
    return Part(tokens, part)
