"""Full-precision windows of sequences that nobody names: they are found again by the physical blocks they lie in.

vLLM tells an attention backend of lengths and block tables, not of requests. A sequence's sinks and recent tokens lie in a row
of the windows, as everywhere in kvant; here a row is known by the physical block that holds its last token and by its length.
Only the sequence that wrote a block that is not yet full can have it at the end of its table, and whoever shares a full one
shares all tokens before it, so whoever finds a row this way may have it. That holds through chunks, preemption, other places in
the batch, and prefix sharing.

A sequence that is not found (it is new, was preempted, or begins behind a shared prefix) gets the row that was used least
recently. Its tokens from there on are kept in full precision, those before are read from their pages, except the sinks: they
are copied from a row whose sequence begins with the same physical block.

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
from kvant.ops.reference import overlay_index
from kvant.recipe import Recipe, Window

Tensor = torch.Tensor
COPIES = (
    16  # sequences of a step that get another's sinks, on a GPU; where there are more, the rest get them a step later
)


def without_windows(recipe: Recipe) -> Recipe:
    """The recipe with the same pages and no windows."""
    key, value = (dataclasses.replace(stream, window=Window()) for stream in (recipe.key, recipe.value))
    return dataclasses.replace(recipe, key=key, value=value)


class Found(NamedTuple):
    """Rows of a step's sequences: int64 [sequences] each."""

    owners: Tensor  # row of the windows; padding gets the last one, which nobody reads
    sinks: Tensor  # sink tokens that the row holds once this step is written
    since: Tensor  # the row holds no recent token before this one
    source: Tensor  # [copies]: rows that write, in this very step, sinks ...
    target: Tensor  # [copies]: ... that these rows need


class Windows:
    """Rows for the sequences of one group of layers.

    overlays  every stream's windows of all layers: [layers, rows + 1, tokens, heads, head_dim].
    drafts    tokens that a step may write and the next one take back, as speculation does: what they overwrite in the ring of
              recent tokens is put aside.
    """

    def __init__(self, layout: Layout, blocks: int, overlays: Mapping[StreamName, Tensor], drafts: int = 0) -> None:
        self.layout, self.overlays, self.drafts = layout, overlays, drafts
        some = next(iter(overlays.values()))
        self.rows, self.device = some.shape[1] - 1, some.device
        self.sink = layout.recipe.key.window.sink
        assert self.sink <= layout.page_tokens, "sinks must lie in a sequence's first block"
        assert drafts <= layout.page_tokens, "drafts must lie in two blocks"

        def column(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=self.device)

        self.blocks = blocks
        self.writer = column(blocks + 1, -1)  # of every block: the row of the sequence that wrote to it last
        self.sinker = column(blocks + 1, -1)  # of every block: a row of a sequence that begins with it
        self.last = column(self.rows + 1, -1)  # of every row: the block of its last token ...
        self.length = column(self.rows + 1, -1)  # ... the tokens of its sequence ...
        self.first = column(self.rows + 1, -1)  # ... the first block of its sequence ...
        self.held = column(self.rows + 1, 0)  # ... the sinks it holds ...
        self.since = column(self.rows + 1, 0)  # ... its first token that is not in pages alone ...
        self.used = column(self.rows + 1, 0)  # ... the step that used it last ...
        self.aside = column(self.rows + 1, 0)  # ... and the first token whose place in the ring was put aside
        self.clock = 0
        self.put_aside = {
            name: x.new_empty(x.shape[0], x.shape[1], drafts, *x.shape[3:]) for name, x in overlays.items() if drafts
        }

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.overlays.values(), *self.put_aside.values()))

    def step(self, table: Tensor, lengths: Tensor, starts: Tensor, slots: Tensor, late: bool = True) -> Found:
        """Finds the rows of a step's sequences, and brings them to where the step begins. Arguments as in a PagedBatch.
        `late`: `finish_sinks` will be called; otherwise sinks that are written in this very step are copied in the next."""
        size, sink = self.layout.page_tokens, self.sink
        counts = starts.diff()
        before = lengths - counts
        real = counts > 0
        self.clock += 1
        found, matched, tied = self._match(table, before, real)
        owners = torch.where(matched, found, self._oldest(found, matched, real))
        first = table[:, 0]
        # a row that is given away may be that of an earlier sequence with the same sinks
        same = matched | ((self.first[owners] == first) & (self.sinker[first] == owners))
        held = torch.where(same, torch.minimum(self.held[owners], before), 0)
        if self.drafts:
            self._take_back(owners, before, matched)
        tied = self._taken(tied)
        self._copy(*self._chosen(tied, found, owners))
        held = torch.where(tied, torch.minimum(self.held[found], before), held)
        since = torch.where(matched | tied, self.since[found], before)
        if self.drafts:
            self._put_aside(owners, before, counts)
        wanted = before.clamp_max(sink)
        whole = real & (held == wanted)
        after = torch.where(whole, lengths.clamp_max(sink), held)
        held_before = self._scattered(self.held, owners, held)
        held_after = self._scattered(self.held, owners, after)
        self.first = self._scattered(self.first, owners, first)
        self.sinker[torch.where(whole, first, self.blocks)] = owners
        source = target = owners[:0]
        if sink:
            needy = real & (held < wanted)
            giver = self.sinker[first]
            known = needy & (giver >= 0) & (self.first[giver] == first)
            ready = torch.minimum(held_before[giver], before).clamp_max(sink)
            now = known & (ready > held)
            self._copy(*self._chosen(now, giver, owners), sink)
            held = torch.where(self._taken(now), ready, held)
            if late:
                soon = torch.minimum(held_after[giver], before).clamp_max(sink)
                then = known & (soon > held)
                source, target = self._chosen(then, giver, owners)
                held = torch.where(self._taken(then), soon, held)
            whole = real & (held == wanted)
            after = torch.where(whole, lengths.clamp_max(sink), held)
        token = torch.arange(len(slots), device=self.device)
        sequence = torch.searchsorted(starts, token, right=True).sub_(1).clamp_max_(len(lengths) - 1)
        self.writer[torch.where(slots >= 0, slots // size, self.blocks)] = owners[sequence]
        end = ((lengths - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)
        for state, value in (
            (self.last, table.gather(1, end[:, None])[:, 0]),
            (self.length, lengths),
            (self.held, after),
            (self.since, since),
            (self.used, torch.full_like(lengths, self.clock)),
        ):
            state[owners] = value
        self.length[self.rows :].fill_(
            -1
        )  # the row of padding is nobody's; a number that is assigned would be waited for
        return Found(owners, after, since, source, target)

    def finish_sinks(self, layer: int, found: Found) -> None:
        """Copies the sinks that were written in this very step, in one layer."""
        for overlay in self.overlays.values():
            self._copied(overlay[layer : layer + 1], found.source, found.target, self.sink)

    def _match(self, table: Tensor, before: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For every sequence: a row, whether it may have it, and whether it may have a copy because another one has it."""
        size = self.layout.page_tokens
        tail = table.gather(1, ((before - 1).clamp_min(0) // size)[:, None])[:, 0]
        row = self.writer[tail].clamp_min(0)
        written = self.length[row]
        end = ((written - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)
        there = table.gather(1, end[:, None])[:, 0] == self.last[row]
        matched = real & (before > 0) & (self.writer[tail] >= 0) & there
        ahead = written - before
        matched &= (ahead == 0) | ((ahead > 0) & (ahead <= self.drafts) & (before >= self.aside[row]))
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

    def _scattered(self, state: Tensor, owners: Tensor, value: Tensor) -> Tensor:
        out = state.clone()
        out[owners] = value
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

    def _ring_places(self, position: Tensor) -> dict[StreamName, Tensor]:
        windows = {name: self.layout.recipe.streams[name].window for name in self.overlays}
        return {name: overlay_index(window, position) for name, window in windows.items() if window.ring}

    def _take_back(self, owners: Tensor, before: Tensor, matched: Tensor) -> None:
        """Restores what drafts that were not accepted have overwritten."""
        place = torch.arange(self.drafts, device=self.device)
        position = self.aside[owners][:, None] + place  # [sequences, drafts]
        gone = (position >= before[:, None]) & (position < self.length[owners][:, None]) & (position >= self.sink)
        row = torch.where(matched[:, None] & gone, owners[:, None], self.rows)
        for name, index in self._ring_places(position.clamp_min(self.sink)).items():
            self.overlays[name][:, row, index] = self.put_aside[name][:, row, place.expand_as(row)]

    def _put_aside(self, owners: Tensor, before: Tensor, counts: Tensor) -> None:
        """Keeps what the drafts of this step will overwrite: all new tokens but the first, which is no draft."""
        place = torch.arange(self.drafts, device=self.device)
        position = before[:, None] + 1 + place
        row = torch.where(place + 1 < counts[:, None], owners[:, None], self.rows)
        for name, index in self._ring_places(position.clamp_min(self.sink)).items():
            self.put_aside[name][:, row, place.expand_as(row)] = self.overlays[name][:, row, index]
        # a longer step is a prompt's: nobody takes it back
        self.aside[owners] = torch.where(counts <= 1 + self.drafts, before + 1, before + counts)
