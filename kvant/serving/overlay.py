"""Overlay rows of a server's sequences, found again by the pages that the sequences lie in.

A server such as vLLM tells an attention backend of lengths and block tables, not of requests. (Its block is kvant's page.) The
full-precision tokens of a sequence, its sinks and its most recent tokens, lie in a row of the overlays. The key of a row is the
physical page that holds its sequence's last token. A page that is not full is at the end of one block table only, that of the
sequence that writes it; sequences that share a full page have all tokens before its end in common. So whoever finds a row under
this key may use it. That holds through chunked prefill, preemption, reordering of the batch, and prefix sharing.

It holds only while the page's bytes are those that the row's sequence wrote. A server recycles pages, and a sequence may share a
page in the very step in which another one writes it. Hence three rules:

1. What is recorded of a page (who wrote it last, who begins with it) is void from where this step begins to write the page.
2. A page names a lease of a row, not the row. A row that is given to another sequence gets a new lease.
3. A sequence that shares a page of another one, which has since written more tokens, does not take the other's row.

A sequence that is not found (it is new, was preempted, or begins behind a shared prefix) gets the least recently used row. The
row holds its tokens from there on; those before are read from their pages, except the sinks, which are copied from a row whose
sequence begins with the same physical page.

Where a stream codes groups of tokens, the row also holds the tail, the tokens of the unfinished group, which are nowhere else; and
what a corrector remembers. A server's blocks, which are one or several pages, end where groups end, and so do prefix hits: a
sequence that begins behind one needs no tail. A sequence that goes on inside a block has to find its row. Where it does not,
`check` raises an error: its next group would be wrong.

Speculative decoding takes tokens back: a step begins before the end of the step before, but after its first token. The ring then has
as many places more than recent tokens as there are drafts (`Window.rollback`), so that no draft overwrites a token that is needed
when the draft is rejected.

Nothing here waits for the device. On a GPU a step is one kernel (kvant/ops/cuda/overlay_step.py), whatever the tensors hold; the
torch code here is that of CPUs, and what the kernel is tested against.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc, overlay_step
from kvant.ops.cuda.copy_rows import copy_rows
from kvant.recipe import Recipe, Window

Tensor = torch.Tensor
NO_UNIT = 1 << 30  # more tokens than a sequence has


def fused(device: torch.device) -> bool:
    """Whether a step on this device is one kernel."""
    return device.type == "cuda" and nvrtc.missing() is None


def without_windows(recipe: Recipe) -> Recipe:
    """The recipe with the same pages and no overlay."""
    return _with_windows(recipe, {"key": Window(), "value": Window()})


def with_rollback(recipe: Recipe, drafts: int) -> Recipe:
    """The recipe with rings that still hold all recent tokens when so many drafts are taken back."""
    windows = {name: dataclasses.replace(stream.window, rollback=drafts) for name, stream in recipe.streams.items()}
    return _with_windows(recipe, windows)


def from_first_token(recipe: Recipe) -> Recipe:
    """The recipe with groups of tokens that begin at the first token, as a server's blocks do; sinks are coded with the others."""
    if not any(stream.groupwise for stream in recipe.streams.values()):
        return recipe
    windows = {name: dataclasses.replace(stream.window, shift=False) for name, stream in recipe.streams.items()}
    return _with_windows(recipe, windows)


def _with_windows(recipe: Recipe, windows: Mapping[StreamName, Window]) -> Recipe:
    key = dataclasses.replace(recipe.key, window=windows["key"])
    return dataclasses.replace(recipe, key=key, value=dataclasses.replace(recipe.value, window=windows["value"]))


class OverlayMatch(NamedTuple):
    """Overlay rows of a step's sequences: int64 [sequences] each."""

    overlay_rows: Tensor  # padding gets the last row, which is never read
    sinks: Tensor  # sink tokens that the row holds once this step is written
    ring_start: Tensor  # the ring holds no token before this one
    source: Tensor  # [copies]: rows to which this very step writes sinks ...
    target: Tensor  # [copies]: ... that these rows need


class OverlayRows:
    """Overlay rows for the sequences of one group of layers.

    layout    of a recipe `with_rollback` of as many tokens as `drafts`.
    pages     number of pages of the server.
    overlays  of every stream, all layers: [layers, rows + 1, tokens, heads, head_dim].
    drafts    tokens that a step may write and the next one take back.
    sliding_window  tokens that a query attends to, itself included; None: all. A server takes back the pages that it has left and
                    gives them to others. The table still names them.
    """

    def __init__(
        self,
        layout: Layout,
        pages: int,
        overlays: Mapping[StreamName, Tensor],
        drafts: int = 0,
        sliding_window: int | None = None,
    ) -> None:
        self.layout, self.overlays, self.drafts, self.sliding_window = layout, overlays, drafts, sliding_window
        some = next(iter(overlays.values()))
        self.rows, self.device = some.shape[1] - 1, some.device
        self.sink = layout.recipe.key.window.sink
        assert self.sink <= layout.page_tokens, "sinks must lie in a sequence's first page"
        for stream in layout.recipe.streams.values():
            spare = stream.window.ring - stream.window.recent
            assert spare >= drafts or not stream.window.recent, (stream.window, drafts)
            whole = not stream.window.first and not stream.window.recent
            assert whole or not stream.groupwise, "what a server shares must be whole groups of tokens"
        # Without its row, a sequence may go on at multiples of so many tokens only; 0: anywhere.
        grouped = [stream.window.flush for stream in layout.recipe.streams.values() if stream.groupwise]
        self.unit = math.lcm(layout.page_tokens, *grouped) if grouped else 0
        if grouped and layout.recipe.not_prefix_safe is not None:
            self.unit = NO_UNIT

        def column(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=self.device)

        self.pages = pages
        # Of every page; the last place stands for no page.
        self.writer = column(pages + 1, -1)  # lease of the sequence that wrote to it last
        self.sink_row = column(pages + 1, -1)  # a row of a sequence that begins with it
        # Of every row; the last one is that of padding.
        self.lease = column(self.rows + 1, -1)  # a number that no other sequence's row ever has
        self.last = column(self.rows + 1, -1)  # page of its sequence's last token: the key of the row
        self.length = column(self.rows + 1, -1)  # tokens of its sequence
        self.first = column(self.rows + 1, -1)  # first page of its sequence
        self.held = column(self.rows + 1, 0)  # sinks that it holds
        self.ring_start = column(self.rows + 1, 0)  # its ring holds no token before this one
        self.begun = column(self.rows + 1, 0)  # first token that its last step wrote
        self.used = column(self.rows + 1, 0)  # step that used it last
        self.clock = 0
        # on the host: 1 from the step on in which a sequence did not find the row with its tail
        self.lost = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        # copies of a step: on a GPU at most so many, so that the host need not know how many
        self.copies = None if self.device.type == "cpu" else overlay_step.COPIES
        self.kernel: overlay_step.Overlays | None = None
        if fused(self.device):
            state = {name: getattr(self, name) for name in overlay_step.STATE}
            self.kernel = overlay_step.Overlays(
                state, overlays, layout.page_tokens, self.sink, drafts, self.unit, self.lost
            )

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.overlays.values())

    def step(
        self, table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor, late: bool = True
    ) -> OverlayMatch:
        """Finds the rows of a step's sequences, and records the step. Arguments are those of a PagedBatch. `late`: the caller will
        call `finish_sinks`; otherwise sinks that this very step writes are copied in the next step."""
        self.check()
        if self.kernel is not None:
            inputs = overlay_step.Inputs(table, seq_lens, query_start_loc, slot_mapping)
            out = overlay_step.Outputs.allocate(len(seq_lens), table.shape[1], len(slot_mapping), self.device)
            launch = overlay_step.Launcher(out, self.kernel, self.layout.page_tokens, self.sliding_window)
            return self.step_by(launch, inputs, late)
        return self.reference_step(table, seq_lens, query_start_loc, slot_mapping, late)

    def step_by(self, launch: overlay_step.Launcher, inputs: overlay_step.Inputs, late: bool) -> OverlayMatch:
        """As `step`, by the kernel, into the tensors of a launcher; these get the step's metadata, too."""
        self.check()
        assert self.kernel is not None and launch.overlays is self.kernel
        self.clock += 1
        launch(inputs, self.clock, late)
        count, out = len(inputs.seq_lens), launch.outputs
        source, target = self.kernel.late if late and self.sink else self.kernel.nothing
        if count < len(source):
            source, target = source[:count], target[:count]
        return OverlayMatch(out.overlay_rows[:count], out.sinks[:count], out.ring_start[:count], source, target)

    def reference_step(
        self, table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor, late: bool
    ) -> OverlayMatch:
        """`step` in torch."""
        size, sink = self.layout.page_tokens, self.sink
        counts = query_start_loc.diff()
        before = seq_lens - counts
        real = counts > 0
        self.clock += 1
        written_from = self._first_written(slot_mapping)
        self.sink_row.masked_fill_(written_from == 0, -1)
        found, matched, tied = self._match(table, before, real, written_from)
        overlay_rows = torch.where(matched, found, self._oldest(found, matched, real))
        first = table[:, 0]
        if self.sliding_window is not None:  # a page that it has left is another's: no sequence begins with it
            first = first.masked_fill(before + 1 + self.drafts - self.sliding_window >= size, 0)
        # the least recently used row may be that of an earlier sequence with the same sinks
        same = matched | (real & (self.first[overlay_rows] == first) & (self.sink_row[first] == overlay_rows))
        held = torch.where(same, torch.minimum(self.held[overlay_rows], before), 0)
        tied = self._taken(tied)
        self._copy(*self._chosen(tied, found, overlay_rows))
        held = torch.where(tied, torch.minimum(self.held[found], before), held)
        ring_start = torch.where(matched | tied, self.ring_start[found], before)
        if self.unit:
            # a server that captures a step invents sequences: they write nothing, or lie in its first page, which is nobody's
            new = slot_mapping[query_start_loc[:-1].clamp_max(len(slot_mapping) - 1)] >= 0
            newest = table.gather(1, ((seq_lens - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)[:, None])[:, 0]
            self._check_tails(real & new & (newest > 0) & (ring_start > before - before % self.unit))
        wanted = before.clamp_max(sink)
        whole = real & (held == wanted)
        after = torch.where(whole, seq_lens.clamp_max(sink), held)
        # a chunk that continues a prompt writes its overlay row after attention: too late for others of this step
        soon_written = (before == 0) | (counts == 1)
        held_before = self._scattered(self.held, overlay_rows, held)
        held_after = self._scattered(self.held, overlay_rows, torch.where(soon_written, after, held))
        # page 0 stands for one that the sliding window has left: the row still has the sinks of the page that was there
        left = matched & (first == 0)
        self.first[overlay_rows] = torch.where(left, self.first[overlay_rows], first)
        self._name_sink_rows(whole, first, overlay_rows)
        source = target = overlay_rows[:0]
        if sink:
            needy = real & (held < wanted)
            giver = self.sink_row[first]
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
            self._name_sink_rows(whole, first, overlay_rows)
        lease = torch.where(matched, self.lease[overlay_rows], self.clock * (self.rows + 1) + overlay_rows)
        token = torch.arange(len(slot_mapping), device=self.device)
        sequence = torch.searchsorted(query_start_loc, token, right=True).sub_(1).clamp_max_(len(seq_lens) - 1)
        self.writer[torch.where(slot_mapping >= 0, slot_mapping // size, self.pages)] = lease[sequence]
        end = ((seq_lens - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)
        for state, value in (
            (self.lease, lease),
            (self.last, table.gather(1, end[:, None])[:, 0]),
            (self.length, seq_lens),
            (self.held, after),
            (self.ring_start, ring_start),
            (self.begun, before),
            (self.used, torch.full_like(seq_lens, self.clock)),
        ):
            state[overlay_rows] = value
        self.length[self.rows :].fill_(
            -1
        )  # the row of padding is no sequence's; assigning a number would wait for the device
        return OverlayMatch(overlay_rows, after, ring_start, source, target)

    def check(self) -> None:
        """Raises an error where a sequence of an earlier step, or on a CPU of this one, did not find the row with its tail."""
        if self.lost.item():
            raise RuntimeError(
                "kvant lost the full-precision tokens of a running sequence: its unfinished group of tokens cannot be coded. There "
                f"are {self.rows} overlay rows; give more (spare_overlay_rows), or a recipe that codes tokens one by one"
            )

    def _check_tails(self, lost: Tensor) -> None:
        """Notes sequences without their tails. On a GPU nothing waits: a later step finds the note."""
        self.lost.copy_((self.lost.to(lost.device) | lost.any()).int(), non_blocking=True)
        if self.device.type == "cpu":
            self.check()

    def finish_sinks(self, layer: int, match: OverlayMatch) -> None:
        """Copies the sinks that this very step has written, in one layer."""
        for overlay in self.overlays.values():
            self._copied(overlay[layer : layer + 1], match.source, match.target, self.sink)

    def _first_written(self, slot_mapping: Tensor) -> Tensor:
        """Of every page, the first place that a step writes: int64 [pages + 1], `page_tokens` where it writes none."""
        size = self.layout.page_tokens
        written = slot_mapping >= 0
        first = torch.full_like(self.writer, size)
        page = torch.where(written, slot_mapping // size, self.pages)
        return first.scatter_reduce_(0, page, torch.where(written, slot_mapping % size, size), "amin")

    def _match(
        self, table: Tensor, before: Tensor, real: Tensor, written_from: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For every sequence: a row; whether it takes that row; whether another one takes it, and this one gets a copy."""
        size = self.layout.page_tokens
        newest = (before - 1).clamp_min(0)
        tail = table.gather(1, (newest // size)[:, None])[:, 0]
        lease = self.writer[tail]
        row = lease.clamp_min(0) % (self.rows + 1)
        written = self.length[row]
        end = ((written - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)
        there = table.gather(1, end[:, None])[:, 0] == self.last[row]
        kept = (lease >= 0) & (self.lease[row] == lease) & (written_from[tail] > newest % size)
        ahead = written - before
        # A step keeps at least the first of its tokens. A sequence that begins before it was preempted, and has come again.
        back = (ahead > 0) & (ahead <= self.drafts) & (before > self.begun[row])
        matched = real & (before > 0) & kept & there & ((ahead == 0) | back)
        # Several sequences that share a full page find the same row: the first of them takes it.
        place = torch.arange(len(before), device=self.device)
        leader = torch.full((self.rows + 1,), len(before), dtype=torch.int64, device=self.device)
        leader.scatter_reduce_(0, torch.where(matched, row, self.rows), place, "amin")
        leads = leader[row] == place
        return row, matched & leads, matched & ~leads

    def _oldest(self, row: Tensor, matched: Tensor, real: Tensor) -> Tensor:
        """For each sequence without a row: one of the least recently used."""
        taken = torch.zeros(self.rows + 1, dtype=torch.bool, device=self.device)
        taken.index_fill_(0, torch.where(matched, row, self.rows), True)  # indexed assignment would wait for the device
        order = torch.where(taken[: self.rows], self.clock + 1, self.used[: self.rows]).argsort(stable=True)
        fresh = real & ~matched
        place = (fresh.cumsum(0) - 1).clamp(0, self.rows - 1)
        return torch.where(fresh, order[place], self.rows)

    def _scattered(self, state: Tensor, overlay_rows: Tensor, value: Tensor) -> Tensor:
        out = state.clone()
        out[overlay_rows] = value
        return out

    def _name_sink_rows(self, whole: Tensor, first: Tensor, overlay_rows: Tensor) -> None:
        """sink_row[first] = row of the last of the sequences that begin with the page and hold all of their sinks. The server's
        first page is nobody's: it stands for a first page that the sliding window has left."""
        whole = whole & (first > 0)
        place = torch.arange(len(first), device=self.device)
        last = torch.full_like(self.sink_row, -1)
        last.scatter_reduce_(0, torch.where(whole, first, self.pages), place, "amax")
        last[self.pages :].fill_(-1)
        torch.where(last >= 0, overlay_rows[last.clamp_min(0)], self.sink_row, out=self.sink_row)

    def _taken(self, wanted: Tensor) -> Tensor:
        """Of those that need a copy: the ones that get it in this step."""
        return wanted if self.copies is None else wanted & (wanted.cumsum(0) <= self.copies)

    def _chosen(self, wanted: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Rows to copy from and to. On a GPU a fixed number of them, so that the host need not know how many."""
        if self.copies is None:
            return source[wanted], target[wanted]
        count = min(self.copies, len(wanted))
        place = wanted.to(torch.int8).argsort(descending=True, stable=True)[:count]
        return torch.where(wanted[place], source[place], self.rows), torch.where(
            wanted[place], target[place], self.rows
        )

    def _copy(self, source: Tensor, target: Tensor, tokens: int | None = None) -> None:
        """Copies the first tokens of rows, or whole rows, in all layers."""
        for overlay in self.overlays.values():
            self._copied(overlay, source, target, tokens)

    def _copied(self, overlay: Tensor, source: Tensor, target: Tensor, tokens: int | None) -> None:
        if self.kernel is not None:  # most steps copy nothing, which only the device knows
            copy_rows(overlay, source, target, tokens)
        elif len(source):
            overlay[:, target, :tokens] = overlay[:, source, :tokens]
