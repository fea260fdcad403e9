"""The tensors of a server's steps at fixed addresses: a CUDA graph reads them where they lay when it was captured.

A server prepares every step on the host and then replays a graph. What depends on the step's lengths is computed by the device,
from the server's own tensors: on a GPU by one kernel (kvant/ops/cuda/overlay_step.py), which finds the overlay rows, too.
"""

from __future__ import annotations

import torch

from kvant.layout import StreamName
from kvant.ops import PagedBatch
from kvant.ops.cuda.overlay_step import Inputs, Launcher, Outputs
from kvant.serving.overlay import OverlayMatch, OverlayRows, fused

Tensor = torch.Tensor
STREAMS: tuple[StreamName, ...] = ("key", "value")


def left_pages(pages: int, seq_lens: Tensor, query_start_loc: Tensor, sliding_window: int, page_tokens: int) -> Tensor:
    """Whether the sliding window of a step's first query has left a page of its sequence: bool [sequences, pages]. A server gives
    such pages to others."""
    low = seq_lens - query_start_loc.diff() + 1 - sliding_window  # first token that is attended to
    return torch.arange(1, pages + 1, device=seq_lens.device) * page_tokens <= low[:, None]


class StepTensors:
    """Room for steps of so many sequences, pages of a sequence and new tokens."""

    def __init__(
        self,
        sequences: int,
        pages: int,
        tokens: int,
        page_tokens: int,
        device: torch.device,
        sliding_window: int | None = None,
    ) -> None:
        self.page_tokens, self.sliding_window = page_tokens, sliding_window
        self.out = Outputs.allocate(sequences, pages, tokens, device)
        self.fused = fused(device)
        self.launch: Launcher | None = None

    def prepare(
        self, inputs: Inputs, overlay: OverlayRows | None, late: bool
    ) -> tuple[PagedBatch, OverlayMatch | None]:
        """The batch of a step, and the match of its overlay rows where there are overlays. The rest of the tensors is padding
        without effect, since a graph reads as many sequences and tokens as it was captured with."""
        match = None
        if self.fused:
            state = None if overlay is None else overlay.kernel
            if self.launch is None or self.launch.overlays is not state:
                self.launch = Launcher(self.out, state, self.page_tokens, self.sliding_window)
            if overlay is not None:
                match = overlay.step_by(self.launch, inputs, late)
            else:
                self.launch(inputs, 0, late)
        else:
            match = self._copied(inputs, overlay, late)
        count, tokens, out = len(inputs.seq_lens), len(inputs.slot_mapping), self.out
        rows, sinks, ring_start = match[:3] if self.fused and match else (x[:count] for x in out[4:7])
        batch = PagedBatch(
            out.table[:count],
            out.seq_lens[:count],
            out.slot_mapping[:tokens],
            out.query_start_loc[: count + 1],
            rows,
            sinks,
            dict.fromkeys(STREAMS, ring_start),
        )
        return batch, match

    def _copied(self, inputs: Inputs, overlay: OverlayRows | None, late: bool) -> OverlayMatch | None:
        """The same in torch; the reference."""
        out, (table, seq_lens, query_start_loc, slot_mapping) = self.out, inputs
        table = table[:, : out.table.shape[1]]
        out.table[: len(table), : table.shape[1]] = table
        if overlay is not None and overlay.unit and len(slot_mapping):
            # groups of tokens are written by the table: who writes nothing gets the server's first page, which is nobody's
            first = query_start_loc[:-1].long()
            invented = (first < len(slot_mapping)) & (slot_mapping[first.clamp_max(len(slot_mapping) - 1)] < 0)
            out.table[: len(table)].masked_fill_(invented[:, None], 0)
        if self.sliding_window is not None:
            left = left_pages(table.shape[1], seq_lens, query_start_loc, self.sliding_window, self.page_tokens)
            out.table[: len(table), : table.shape[1]].masked_fill_(left, -1)
        for to, x, padding in (
            (out.seq_lens, seq_lens, 0),
            (out.query_start_loc, query_start_loc, None),
            (out.slot_mapping, slot_mapping, -1),
        ):
            to[: len(x)] = x
            to[len(x) :].copy_(x[-1]) if padding is None else to[len(x) :].fill_(padding)
        match = None
        if overlay is not None:
            match = overlay.reference_step(
                table.long(), seq_lens.long(), query_start_loc.long(), slot_mapping.long(), late
            )
        for i, to in enumerate((out.overlay_rows, out.sinks, out.ring_start)):
            to.fill_(0)
            if match is not None:
                to[: len(seq_lens)] = match[i]
        return match
