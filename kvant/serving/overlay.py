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
row holds its tokens from there on; those before are read from their pages, except the sinks.

Sinks live as long as the physical page that begins with them. They are in the row of a sequence that begins with the page
(`sink_row`), or, once the last such row was given to another sequence, in a *sink row* that the page owns (`sink_store`). A step
saves the sinks of rows that it gives away, and copies sinks to sequences that lack them. What is written to a page takes its later
sinks away. There are fewer sink rows than pages: where all are taken by pages that nothing else has sinks of, the one that was used
longest ago is given away and counted (`missed`).

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


def _bytes(x: Tensor) -> Tensor:
    """For torch's operations that have no fp8."""
    return x.view(torch.uint8)


class OverlayMatch(NamedTuple):
    """Overlay rows of a step's sequences: int64 [sequences] each."""

    overlay_rows: Tensor  # padding gets the last row, which is never read
    sinks: Tensor  # sink tokens that the row holds once this step is written
    ring_start: Tensor  # the ring holds no token before this one
    source: Tensor  # [copies]: rows to which this very step writes sinks ...
    target: Tensor  # [copies]: ... that these rows need; the row of padding where there is no copy


class SavedSinks(NamedTuple):
    """The sinks of a page in CPU memory."""

    held: Tensor  # int64 [1]: how many they are
    sinks: dict[StreamName, Tensor]  # [layers, sinks, heads, head_dim]


class Missed(NamedTuple):
    """What a server could not keep, in numbers since it began."""

    dropped: int  # pages whose sinks were given up because there are too few sink rows
    packed: int  # sequences that began to read sinks from their packed page


class OverlayRows:
    """Overlay rows for the sequences of one group of layers.

    layout    of a recipe `with_rollback` of as many tokens as `drafts`.
    pages     number of pages of the server.
    overlays  of every stream, all layers: [layers, rows + 1, tokens, heads, head_dim].
    drafts    tokens that a step may write and the next one take back.
    sinks     sink rows of the same streams and layers: [layers, sink rows, sinks, heads, head_dim]. Without them the sinks of a
              page are kept only in rows of sequences.
    sliding_window  tokens that a query attends to, itself included; None: all. A server takes back the pages that it has left and
                    gives them to others. The table still names them.
    """

    def __init__(
        self,
        layout: Layout,
        pages: int,
        overlays: Mapping[StreamName, Tensor],
        drafts: int = 0,
        sinks: Mapping[StreamName, Tensor] | None = None,
        sliding_window: int | None = None,
    ) -> None:
        self.layout, self.overlays, self.drafts, self.sliding_window = layout, overlays, drafts, sliding_window
        assert sliding_window is None or not sinks, "a sliding window leaves the first page"
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
        self.stored = column(pages + 1, -1)  # its sink row ...
        self.kept = column(pages + 1, 0)  # ... and how many sinks that holds
        # Of every row; the last one is that of padding.
        self.lease = column(self.rows + 1, -1)  # a number that no other sequence's row ever has
        self.last = column(self.rows + 1, -1)  # page of its sequence's last token: the key of the row
        self.length = column(self.rows + 1, -1)  # tokens of its sequence
        self.first = column(self.rows + 1, -1)  # first page of its sequence
        self.held = column(self.rows + 1, 0)  # sinks that it holds
        self.ring_start = column(self.rows + 1, 0)  # its ring holds no token before this one
        self.begun = column(self.rows + 1, 0)  # first token that its last step wrote
        self.used = column(self.rows + 1, 0)  # step that used it last
        # Of every sink row; the last one stands for none.
        self.sink_store = dict(sinks) if sinks and self.sink else {}
        self.sink_rows = next(iter(self.sink_store.values())).shape[1] if self.sink_store else 0
        self.owner = column(self.sink_rows + 1, -1)  # page whose sinks it holds
        self.sink_used = column(self.sink_rows + 1, 0)  # step that used it last
        self.clock = 0
        # on the host: 1 from the step on in which a sequence did not find the row with its tail
        self.lost = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.missing = torch.zeros(2, dtype=torch.int32, pin_memory=self.device.type == "cuda")  # on the host: `missed`
        self.loads_dropped = torch.zeros(
            1, dtype=torch.int32, device=self.device
        )  # `missed.dropped` by restore_sinks ...
        self.loads_missing = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")  # ... on the host
        # Whether the sinks of a step are in their rows before attention. Queries must not be learnt from twice, see Step.split.
        self.early = not layout.recipe.wants_queries
        self.kernel: overlay_step.Overlays | None = None
        if fused(self.device):
            state = {name: getattr(self, name) for name in overlay_step.STATE}
            self.kernel = overlay_step.Overlays(
                state,
                overlays,
                self.sink_store,
                layout.page_tokens,
                self.sink,
                drafts,
                self.unit,
                self.early,
                self.lost,
                self.missing,
            )

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.overlays.values(), *self.sink_store.values()))

    @property
    def missed(self) -> Missed:
        """Counts of an earlier step, or on a CPU of the last one."""
        dropped, packed = self.missing.tolist()
        return Missed(dropped + int(self.loads_missing), packed)

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

    def forget(self, pages: list[int]) -> None:
        """To be called when other bytes than those of a step are written to pages: what is recorded of them is void."""
        at = torch.tensor(pages)
        if self.device.type != "cpu":  # from pinned memory, so that nothing waits
            at = at.pin_memory().to(self.device, non_blocking=True)
        for state, value in ((self.writer, -1), (self.sink_row, -1), (self.kept, 0)):
            state.index_fill_(0, at, value)

    def save_sinks(self, page: int) -> SavedSinks | None:
        """The sinks of a page that is complete, in CPU memory. On a GPU they arrive there later, before what the stream does next."""
        if not self.sink:
            return None
        at = slice(page, page + 1)  # tensors of one number: a number would wait for the device
        row, kept = self.sink_row[at].clamp_min(0), self.kept[at]
        named = (self.sink_row[at] >= 0) & (self.first[row] == page)
        held = torch.where(named, self.held[row], 0)
        in_row = held >= kept
        found = {}
        for name, overlay in self.overlays.items():
            sinks = _bytes(overlay).index_select(1, row)[:, 0, : self.sink]
            if self.sink_rows:
                stored = _bytes(self.sink_store[name]).index_select(1, self.stored[at].clamp_min(0))[:, 0]
                sinks = torch.where(in_row, sinks, stored)
            found[name] = self._to_host(sinks).view(overlay.dtype)
        return SavedSinks(self._to_host(torch.where(in_row, held, kept)), found)

    def restore_sinks(self, page: int, saved: SavedSinks) -> None:
        """Puts sinks of a page, whose bytes are loaded anew, into a sink row. Called after `forget`."""
        if not self.sink_rows:
            return
        busy, owned = self._busy(self.held)
        row = torch.where(busy, self.sink_used[: self.sink_rows], 0).argmin()[None]
        old = torch.where(owned[row], self.owner[row], self.pages)
        self.kept.index_fill_(0, old, 0)
        at = torch.full((1,), page, device=self.device)  # a tensor of a list would wait for the device
        held = saved.held.to(self.device, non_blocking=True)
        for state, index, value in (
            (self.owner, row, at),
            (self.sink_used, row, torch.full_like(at, self.clock)),
            (self.stored, at, row),
            (self.kept, at, held),
        ):
            state.index_copy_(0, index, value)
        for name, sinks in saved.sinks.items():
            _bytes(self.sink_store[name]).index_copy_(1, row, _bytes(sinks[:, None].to(self.device, non_blocking=True)))
        self.loads_dropped += busy[row]
        self.loads_missing.copy_(self.loads_dropped, non_blocking=True)

    def _to_host(self, x: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return x.clone()
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

    def _busy(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Of every sink row, bool [sink rows]: whether it is the only place where its page's sinks are, and whether they are in it.
        `held`: sinks of overlay rows."""
        owner = self.owner[: self.sink_rows]
        row = self.sink_row[owner]
        twice = (row >= 0) & (self.first[row] == owner) & (held[row] >= self.kept[owner])
        mine = self.stored[owner] == torch.arange(self.sink_rows, device=self.device)
        owned = (owner >= 0) & (self.kept[owner] > 0) & mine
        return owned & ~twice, owned

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
        self.kept.copy_(torch.minimum(self.kept, written_from))
        found, matched, tied = self._match(table, before, real, written_from)
        overlay_rows = torch.where(matched, found, self._oldest(found, matched, real))
        first = table[:, 0]
        if self.sliding_window is not None:  # a page that it has left is another's: no sequence begins with it
            first = first.masked_fill(before + 1 + self.drafts - self.sliding_window >= size, 0)
        # the least recently used row may be that of an earlier sequence with the same sinks
        same = matched | (real & (self.first[overlay_rows] == first) & (self.sink_row[first] == overlay_rows))
        pending = self._give_up(overlay_rows, real & ~same, written_from)
        held = torch.where(same, torch.minimum(self.held[overlay_rows], before), 0)
        held = torch.where(tied, torch.minimum(self.held[found], before), held)
        ring_start = torch.where(matched | tied, self.ring_start[found], before)
        # a server that captures a step invents sequences: they write nothing, or lie in its first page, which is nobody's
        written = torch.nn.functional.pad(slot_mapping, (0, 1), value=-1) >= 0
        new = written[query_start_loc[:-1].clamp_max(len(slot_mapping))]
        asked = real & (first > 0) & new
        if self.unit:
            newest = table.gather(1, ((seq_lens - 1).clamp_min(0) // size).clamp_max(table.shape[1] - 1)[:, None])[:, 0]
            self._check_tails(real & new & (newest > 0) & (ring_start > before - before % self.unit))
        wanted = before.clamp_max(sink)
        whole = real & (held == wanted)
        after = torch.where(whole, seq_lens.clamp_max(sink), held)
        # where sinks are not written early, a chunk that continues a prompt writes them after attention
        soon_written = (before == 0) | (counts == 1) | self.early
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
            held = torch.where(now, ready, held)
            asks = needy & (torch.minimum(self.kept[first], wanted) > held)
            self._save(pending, overlay_rows, first[asks], held_before)
            self._copy_rows(found[tied], overlay_rows[tied])
            self._copy_rows(giver[now], overlay_rows[now], sink)
            kept = torch.minimum(self.kept[first], wanted)
            asks = asks & (kept > held)
            for name, overlay in self.overlays.items():
                if self.sink_rows:
                    overlay[:, overlay_rows[asks], :sink] = self.sink_store[name][:, self.stored[first[asks]]]
            held = torch.where(asks, kept, held)
            if late:
                soon = torch.minimum(held_after[giver], before).clamp_max(sink)
                then = known & (soon > held)
                source, target = giver[then], overlay_rows[then]
                held = torch.where(then, soon, held)
            whole = real & (held == wanted)
            after = torch.where(whole, seq_lens.clamp_max(sink), held)
            self._name_sink_rows(whole, first, overlay_rows)
            self.missing[1] += int((asked & ~matched & ~whole).sum())
        else:
            self._copy_rows(found[tied], overlay_rows[tied])
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
            if self.kernel is not None:  # most steps copy nothing, which only the device knows
                copy_rows(overlay[layer : layer + 1], match.source, match.target, self.sink)
            else:
                overlay[layer, match.target, : self.sink] = overlay[layer, match.source, : self.sink]

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

    def _give_up(self, overlay_rows: Tensor, given: Tensor, written_from: Tensor) -> Tensor:
        """Rows that sequences get whose first page is another one; of these, bool [sequences], the ones whose sinks have to be saved.
        Their pages keep as many sinks from here on, and have no sink row where they had none."""
        page = self.first[overlay_rows]
        held = torch.minimum(self.held[overlay_rows], written_from[page])
        named = (page > 0) & (self.sink_row[page] == overlay_rows)
        pending = given & named & (held > self.kept[page]) if self.sink_rows else torch.zeros_like(given)
        page, held = page[pending], held[pending]
        self.stored[page] = torch.where(self.kept[page] > 0, self.stored[page], -1)
        self.kept[page] = held
        self.saved = page  # pages of `pending`, in its order
        return pending

    def _save(self, pending: Tensor, overlay_rows: Tensor, asked: Tensor, held: Tensor) -> None:
        """Copies the sinks of rows that are given away to sink rows; sink rows of the pages `asked` are not given away. `held`: sinks
        of rows before this step's tokens are written."""
        if not self.sink_rows:
            return
        page = self.saved
        used = torch.cat((asked, page))
        used = self.stored[used]
        self.sink_used[torch.where(used >= 0, used, self.sink_rows)] = self.clock
        new = page[self.stored[page] < 0]
        if len(new):
            busy, owned = self._busy(held)
            last = self.sink_used[: self.sink_rows]
            order = torch.where(busy, last, 0).argsort(stable=True)
            order = order[~(busy & (last == self.clock))[order]]  # not those of this step
            chosen = order[: len(new)]
            given = self.owner[chosen]
            self.missing[0] += int(busy[chosen].sum()) + len(new) - len(chosen)
            self.kept[given[owned[chosen]]] = 0
            self.kept[new[len(chosen) :]] = 0
            new = new[: len(chosen)]
            self.owner[chosen], self.stored[new], self.sink_used[chosen] = new, chosen, self.clock
        there = self.kept[page] > 0
        source, target = overlay_rows[pending][there], self.stored[page[there]]
        for name, overlay in self.overlays.items():
            self.sink_store[name][:, target] = overlay[:, source, : self.sink]

    def _copy_rows(self, source: Tensor, target: Tensor, tokens: int | None = None) -> None:
        """Copies the first tokens of rows, or whole rows, in all layers."""
        for overlay in self.overlays.values():
            overlay[:, target, :tokens] = overlay[:, source, :tokens]
