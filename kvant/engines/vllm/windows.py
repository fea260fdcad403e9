"""Full-precision windows of sequences that nobody names: they are found again by the physical blocks they lie in.

vLLM tells an attention backend of lengths and block tables, not of requests. A sequence's sinks and recent tokens lie in a row
of the windows, as everywhere in kvant; here a row is found by the physical block that holds the sequence's last token.
Only the sequence that wrote a block that is not yet full can have it at the end of its table, and whoever shares a full one
shares all tokens before it, so whoever finds a row this way may have it. That holds through chunks, preemption, other places in
the batch, and prefix sharing.

It holds only while the block's bytes are those that the row's sequence wrote. vLLM recycles blocks, and a sequence may share
a block in the very step in which another one writes it. Hence three rules:

1. What is known of a block ends where this step begins to write it: who wrote it last, and who begins with it.
2. A block names a lease of a row, not the row. A row that is given to another sequence has a new lease.
3. Who shares a block of a sequence that has gone on since does not take its row.

A sequence that is not found (it is new, was preempted, or begins behind a shared prefix) gets the row that was used least
recently. Its tokens from there on are kept in full precision, those before are read from their pages, except the sinks: they
are copied from a row whose sequence begins with the same physical block.

Speculation takes tokens back: a step begins before the last one's end, but after its first token. The ring of recent tokens then
has as many places more than recent tokens as there are drafts (`Window.rollback`), so that no draft overwrites a token that is
needed when it is rejected.

Nothing here waits for the device: every step is the same few operations on tensors, whatever they hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.copy_rows import copy_rows
from kvant.recipe import Recipe, Window

Tensor = torch.Tensor
COPIES = (
    16  # sequences of a step that get another's sinks, on a GPU; where there are more, the rest get them a step later
)


def without_windows(recipe: Recipe) -> Recipe:
    """The recipe with the same pages and no windows."""
    return _with_windows(recipe, {"key": Window(), "value": Window()})


def with_rollback(recipe: Recipe, drafts: int) -> Recipe:
    """The recipe with windows that are still exact when so many tokens are taken back."""
    windows = {name: dataclasses.replace(stream.window, rollback=drafts) for name, stream in recipe.streams.items()}
    return _with_windows(recipe, windows)


def _with_windows(recipe: Recipe, windows: Mapping[StreamName, Window]) -> Recipe:
    key = dataclasses.replace(recipe.key, window=windows["key"])
    return dataclasses.replace(recipe, key=key, value=dataclasses.replace(recipe.value, window=windows["value"]))


class Found(NamedTuple):
    """Rows of a step's sequences: int64 [sequences] each."""

    overlay_rows: Tensor  # row of the windows; padding gets the last one, which nobody reads
    sinks: Tensor  # sink tokens that the row holds once this step is written
    since: Tensor  # the row holds no recent token before this one
    source: Tensor  # [copies]: rows that write, in this very step, sinks ...
    target: Tensor  # [copies]: ... that these rows need


class Windows:
    """Rows for the sequences of one group of layers.

    layout    of a recipe `with_rollback` of as many tokens as `drafts`.
    overlays  every stream's windows of all layers: [layers, rows + 1, tokens, heads, head_dim].
    drafts    tokens that a step may write and the next one take back, as speculation does.
    """

    def __init__(self, layout: Layout, blocks: int, overlays: Mapping[StreamName, Tensor], drafts: int = 0) -> None:
        self.layout, self.overlays, self.drafts = layout, overlays, drafts
        some = next(iter(overlays.values()))
        self.rows, self.device = some.shape[1] - 1, some.device
        self.sink = layout.recipe.key.window.sink
        assert self.sink <= layout.page_tokens, "sinks must lie in a sequence's first block"
        for stream in layout.recipe.streams.values():
            spare = stream.window.ring - stream.window.recent
            assert spare >= drafts or not stream.window.recent, (stream.window, drafts)

        def column(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=self.device)

        self.blocks = blocks
        self.writer = column(blocks + 1, -1)  # of every block: the lease of the sequence that wrote to it last
        self.sinker = column(blocks + 1, -1)  # of every block: a row of a sequence that begins with it
        self.lease = column(self.rows + 1, -1)  # of every row: a number that no other sequence's row ever has ...
        self.last = column(self.rows + 1, -1)  # of every row: the block of its last token ...
        self.length = column(self.rows + 1, -1)  # ... the tokens of its sequence ...
        self.first = column(self.rows + 1, -1)  # ... the first block of its sequence ...
        self.held = column(self.rows + 1, 0)  # ... the sinks it holds ...
        self.since = column(self.rows + 1, 0)  # ... its first token that is not in pages alone ...
        self.begun = column(self.rows + 1, 0)  # ... the first token that its last step wrote ...
        self.used = column(self.rows + 1, 0)  # ... and the step that used it last
        self.clock = 0

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.overlays.values())

    def step(
        self, table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor, late: bool = True
    ) -> Found:
        """Finds the rows of a step's sequences, and brings them to where the step begins. Arguments as in a PagedBatch.
        `late`: `finish_sinks` will be called; otherwise sinks that are written in this very step are copied in the next."""
        size, sink = self.layout.page_tokens, self.sink
        counts = query_start_loc.diff()
        before = seq_lens - counts
        real = counts > 0
        self.clock += 1
        low = self._first_written(slot_mapping)
        self.sinker.masked_fill_(low == 0, -1)
        found, matched, tied = self._match(table, before, real, low)
        overlay_rows = torch.where(matched, found, self._oldest(found, matched, real))
        first = table[:, 0]
        # a row that is given away may be that of an earlier sequence with the same sinks
        same = matched | ((self.first[overlay_rows] == first) & (self.sinker[first] == overlay_rows))
        held = torch.where(same, torch.minimum(self.held[overlay_rows], before), 0)
        tied = self._taken(tied)
        self._copy(*self._chosen(tied, found, overlay_rows))
        held = torch.where(tied, torch.minimum(self.held[found], before), held)
        since = torch.where(matched | tied, self.since[found], before)
        wanted = before.clamp_max(sink)
        whole = real & (held == wanted)
        after = torch.where(whole, seq_lens.clamp_max(sink), held)
        # a chunk that continues a prompt writes its windows after attention: too late for others of this step
        soon_written = (before == 0) | (counts == 1)
        held_before = self._scattered(self.held, overlay_rows, held)
        held_after = self._scattered(self.held, overlay_rows, torch.where(soon_written, after, held))
        self.first = self._scattered(self.first, overlay_rows, first)
        self.sinker[torch.where(whole, first, self.blocks)] = overlay_rows
        source = target = overlay_rows[:0]
        if sink:
            needy = real & (held < wanted)
            giver = self.sinker[first]
            known = needy & (giver >= 0) & (self.first[giver] == first)
            ready = torch.minimum(held_before[giver], before).clamp_max(sink)
            now = known & (ready > held)
            self._copy(*self._chosen(now, giver, overlay_rows), sink)
            held = torch.where(self._taken(now), ready, held)
            if late:
                soon = torch.minimum(held_after[giver], before).clamp_max(sink)
                then = known & (soon > held)
                source, target = self._chosen(then, giver, overlay_rows)
                held = torch.where(self._taken(then), soon, held)
            whole = real & (held == wanted)
            after = torch.where(whole, seq_lens.clamp_max(sink), held)
            self.sinker[torch.where(whole, first, self.blocks)] = overlay_rows
        lease = torch.where(matched, self.lease[overlay_rows], self.clock * (self.rows + 1) + overlay_rows)
        token = torch.arange(len(slot_mapping), device=self.device)
        sequence = torch.searchsorted(query_start_loc, token, right=True).sub_(1).clamp_max_(len(seq_lens) - 1)
        self.writer[torch.where(slot_mapping >= 0, slot_mapping // size, self.blocks)] = lease[sequence]
        end = ((seq_lens - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)
        for state, value in (
            (self.lease, lease),
            (self.last, table.gather(1, end[:, None])[:, 0]),
            (self.length, seq_lens),
            (self.held, after),
            (self.since, since),
            (self.begun, before),
            (self.used, torch.full_like(seq_lens, self.clock)),
        ):
            state[overlay_rows] = value
        self.length[self.rows :].fill_(
            -1
        )  # the row of padding is nobody's; a number that is assigned would be waited for
        return Found(overlay_rows, after, since, source, target)

    def finish_sinks(self, layer: int, found: Found) -> None:
        """Copies the sinks that were written in this very step, in one layer."""
        for overlay in self.overlays.values():
            self._copied(overlay[layer : layer + 1], found.source, found.target, self.sink)

    def _first_written(self, slot_mapping: Tensor) -> Tensor:
        """Of every block, the first place that a step writes: int64 [blocks + 1], a page's tokens where it writes none."""
        size = self.layout.page_tokens
        written = slot_mapping >= 0
        low = torch.full_like(self.writer, size)
        block = torch.where(written, slot_mapping // size, self.blocks)
        return low.scatter_reduce_(0, block, torch.where(written, slot_mapping % size, size), "amin")

    def _match(self, table: Tensor, before: Tensor, real: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For every sequence: a row, whether it may have it, and whether it may have a copy because another one has it."""
        size = self.layout.page_tokens
        newest = (before - 1).clamp_min(0)
        tail = table.gather(1, (newest // size)[:, None])[:, 0]
        lease = self.writer[tail]
        row = lease.clamp_min(0) % (self.rows + 1)
        written = self.length[row]
        end = ((written - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)
        there = table.gather(1, end[:, None])[:, 0] == self.last[row]
        kept = (lease >= 0) & (self.lease[row] == lease) & (low[tail] > newest % size)
        ahead = written - before
        # a step keeps at least the first of its tokens; a sequence that begins earlier was given up and has come again
        back = (ahead > 0) & (ahead <= self.drafts) & (before > self.begun[row])
        matched = real & (before > 0) & kept & there & ((ahead == 0) | back)
        # who has just come to share a full block finds the row of the one that wrote it
        place = torch.arange(len(before), device=self.device)
        leader = torch.full((self.rows + 1,), len(before), dtype=torch.int64, device=self.device)
        leader.scatter_reduce_(0, torch.where(matched, row, self.rows), place, "amin")
        leads = leader[row] == place
        return row, matched & leads, matched & ~leads

    def _oldest(self, row: Tensor, matched: Tensor, real: Tensor) -> Tensor:
        """For those that have no row: one each of those that were used least recently."""
        taken = torch.zeros(self.rows + 1, dtype=torch.bool, device=self.device)
        taken.index_fill_(0, torch.where(matched, row, self.rows), True)  # an assignment would wait for the device
        order = torch.where(taken[: self.rows], self.clock + 1, self.used[: self.rows]).argsort(stable=True)
        fresh = real & ~matched
        place = (fresh.cumsum(0) - 1).clamp(0, self.rows - 1)
        return torch.where(fresh, order[place], self.rows)

    def _scattered(self, state: Tensor, overlay_rows: Tensor, value: Tensor) -> Tensor:
        out = state.clone()
        out[overlay_rows] = value
        return out

    def _taken(self, wanted: Tensor) -> Tensor:
        """Of those that want a copy: the ones that get it in this step."""
        return wanted if self.device.type == "cpu" else wanted & (wanted.cumsum(0) <= COPIES)

    def _chosen(self, wanted: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Rows to copy from and to; a fixed number of them on a GPU, which nobody waits for."""
        if self.device.type == "cpu":
            return source[wanted], target[wanted]
        count = min(COPIES, len(wanted))
        place = wanted.to(torch.int8).argsort(descending=True, stable=True)[:count]
        return torch.where(wanted[place], source[place], self.rows), torch.where(
            wanted[place], target[place], self.rows
        )

    def _copy(self, source: Tensor, target: Tensor, tokens: int | None = None) -> None:
        """Copies the first tokens of rows, or whole rows, in all layers."""
        for overlay in self.overlays.values():
            self._copied(overlay, source, target, tokens)

    def _copied(self, overlay: Tensor, source: Tensor, target: Tensor, tokens: int | None) -> None:
        if (
            self.device.type == "cuda" and nvrtc.missing() is None
        ):  # most steps copy nothing, which only the device knows
            copy_rows(overlay, source, target, tokens)
        elif len(source):
            overlay[:, target, :tokens] = overlay[:, source, :tokens]
