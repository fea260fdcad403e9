"""The metadata of a server's step and the overlay rows of its sequences in one launch, by kernels/overlay_step.cu.

The reference is the torch code of kvant/serving/overlay.py."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kvant.layout import StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, optional, pointer
from kvant.ops.cuda.device import shared_memory

Tensor = torch.Tensor
THREADS = 1024
COPY_CTAS = 128  # CTAs that copy metadata, and the overlay rows of a layer each
ROW_BITS = 20  # of a row and of a sequence in the kernel's keys
WORD = 16  # bytes that a thread copies at a time
MOST_SHARED = 224 * 1024  # bytes of dynamic shared memory: about 8,000 rows; 3,600 where a CTA may have 99 KiB
STATIC_SHARED = 2048  # bytes of the kernel's own, at most, with what CUDA reserves
SHARED_STEP = 16 * 1024  # dynamic shared memory is asked for in multiples of it, so that few kernels are compiled

OverlayStepArguments = Arguments(
    "OverlayStepArguments",
    table=pointer("const void", "[batch, table_width], pages"),
    seq_lens=pointer("const void", "[batch]"),
    query_start_loc=pointer("const void", "[batch + 1]"),
    slot_mapping=pointer("const void", "[tokens], -1 is padding"),
    out_table=pointer("s64", "[batch_room, ...], the table"),
    out_seq_lens=pointer("s64", "[batch_room], padded with 0"),
    out_query_start_loc=pointer("s64", "[batch_room], padded with its last number"),
    out_slot_mapping=pointer("s64", "[token_room], padded with -1"),
    out_rows=pointer("s64", "[batch_room], overlay rows, padded with 0"),
    out_sinks=pointer("s64", "[batch_room], sinks that the row holds once this step is written, padded with 0"),
    out_ring_start=pointer("s64", "[batch_room], the first token that the row's ring holds, padded with 0"),
    counters=pointer("int", "[3], zeros: CTAs that have started, found the rows, ended"),
    writer=optional("s64", "[pages + 1], OverlayRows.writer"),
    sink_row=optional("s64", "[pages + 1], OverlayRows.sink_row"),
    stored=optional("s64", "[pages + 1], OverlayRows.stored"),
    kept=optional("s64", "[pages + 1], OverlayRows.kept"),
    written=optional("s64", "[pages + 1], clock * PAGE_TOKENS + PAGE_TOKENS - 1 - first place that the step writes"),
    claimed=optional("s64", "[pages + 1], the sequence that names the page's sink row, with the step"),
    lease=optional("s64", "[rows + 1], OverlayRows.lease"),
    last=optional("s64", "[rows + 1], OverlayRows.last"),
    length=optional("s64", "[rows + 1], OverlayRows.length"),
    first=optional("s64", "[rows + 1], OverlayRows.first"),
    held=optional("s64", "[rows + 1], OverlayRows.held"),
    ring_start=optional("s64", "[rows + 1], OverlayRows.ring_start"),
    begun=optional("s64", "[rows + 1], OverlayRows.begun"),
    used=optional("s64", "[rows + 1], OverlayRows.used"),
    owner=optional("s64", "[sink_rows + 1], OverlayRows.owner"),
    sink_used=optional("s64", "[sink_rows + 1], OverlayRows.sink_used"),
    sink_keys=optional("s64", "[sink_rows], scratch"),
    sink_order=optional("s64", "[sink_rows], scratch"),
    counts=optional("int", "[4], pairs of the first four lists"),
    row_source=optional("s64", "[rows], rows that are copied whole"),
    row_target=optional("s64", "[rows], and where to"),
    save_source=optional("s64", "[rows], rows whose sinks are saved"),
    save_target=optional("s64", "[rows], and to which sink rows"),
    sink_source=optional("s64", "[rows], rows whose sinks are copied"),
    sink_target=optional("s64", "[rows], and where to"),
    take_source=optional("s64", "[rows], sink rows that are copied"),
    take_target=optional("s64", "[rows], and to which rows"),
    late_source=optional("s64", "[rows], rows to which this step writes sinks"),
    late_target=optional("s64", "[rows], rows that need them; `rows` for no copy"),
    lost=optional("int", "[1], on the host: set to 1 where a sequence goes on inside `unit` tokens without its row"),
    missing=optional("int", "[2], on the host: OverlayRows.missed"),
    key=optional("uint4", "[layers, rows + 1, ...], overlays of the keys"),
    value=optional("uint4", "[layers, rows + 1, ...], overlays of the values"),
    key_sinks=optional("uint4", "[layers, sink_rows, ...], sink rows of the keys"),
    value_sinks=optional("uint4", "[layers, sink_rows, ...], sink rows of the values"),
    key_layer_words=int64("16-byte words from a layer of the keys' overlays to the next"),
    key_row_words=int64("16-byte words from a row to the next"),
    key_words=int64("16-byte words of a row"),
    key_sink_words=int64("16-byte words of a row's sinks"),
    value_layer_words=int64("16-byte words from a layer of the values' overlays to the next"),
    value_row_words=int64("16-byte words from a row to the next"),
    value_words=int64("16-byte words of a row"),
    value_sink_words=int64("16-byte words of a row's sinks"),
    clock=int64("number of the step, from 1"),
    tokens=int64("new tokens, padding included"),
    token_room=int64("length of out_slot_mapping"),
    table_stride=int64("from a row of the table to the next"),
    out_table_stride=int64("from a row of out_table to the next"),
    table_width=int32("pages of a row of the table"),
    batch=int32("sequences, padding included"),
    half_batch=int32("largest power of two below batch, or 0"),
    batch_room=int32("length of the other outputs"),
    table_bytes=int32("bytes of a number of the table: 4 or 8"),
    seq_lens_bytes=int32("bytes of a number of seq_lens"),
    query_start_bytes=int32("bytes of a number of query_start_loc"),
    slot_bytes=int32("bytes of a number of slot_mapping"),
    rows=int32("overlay rows without the one of padding; 0 where nothing has an overlay"),
    layers=int32("layers of the overlays"),
    sink=int32("first tokens of a sequence that its row holds"),
    sink_rows=int32("sink rows; 0 where there are none"),
    early=int32("1 where all sinks of a step are written before attention"),
    drafts=int32("tokens that a step may write and the next one take back"),
    unit=int32("tokens that are coded together; 0 where a sequence may go on anywhere without its row"),
    late=int32("1 where late_source and late_target are wanted"),
    sliding_window=int32("tokens that a query attends to, itself included; 0 for all"),
)
PAGE_STATE = ("writer", "sink_row", "stored", "kept")  # [pages + 1]
ROW_STATE = ("lease", "last", "length", "first", "held", "ring_start", "begun", "used")  # [rows + 1]
SINK_STATE = ("owner", "sink_used")  # [sink rows + 1]
STATE = (*PAGE_STATE, *ROW_STATE, *SINK_STATE)
SCRATCH = ("written", "claimed", "sink_keys", "sink_order", "counts")
LISTS = tuple(f"{name}_{end}" for name in ("row", "save", "sink", "take", "late") for end in ("source", "target"))


class Inputs(NamedTuple):
    """A step as a server tells it; int32 or int64."""

    table: Tensor  # [sequences, pages]
    seq_lens: Tensor  # [sequences]
    query_start_loc: Tensor  # [sequences + 1]
    slot_mapping: Tensor  # [tokens]


class Outputs(NamedTuple):
    """The same as int64 tensors with room for the largest step, and the overlay rows."""

    table: Tensor  # [sequences, pages]
    seq_lens: Tensor  # [sequences]
    query_start_loc: Tensor  # [sequences]
    slot_mapping: Tensor  # [tokens]
    overlay_rows: Tensor  # [sequences]
    sinks: Tensor  # [sequences]
    ring_start: Tensor  # [sequences]
    counters: Tensor  # int32 [3], zeros between launches

    @staticmethod
    def allocate(sequences: int, pages: int, tokens: int, device: torch.device) -> Outputs:
        """Room for steps of so many sequences and tokens, and so many pages of a sequence."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        room = sequences + 1  # query_start_loc has one number more
        counters = torch.zeros(3, dtype=torch.int32, device=device)
        rows, sinks, ring_start = zeros(room), zeros(room), zeros(room)
        return Outputs(zeros(room, pages), zeros(room), zeros(room), zeros(tokens), rows, sinks, ring_start, counters)


class Overlays:
    """What the kernel needs of overlay rows between steps, beside the tensors `STATE` that the caller owns."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        overlays: Mapping[StreamName, Tensor],
        sinks: Mapping[StreamName, Tensor],
        page_tokens: int,
        sink: int,
        drafts: int,
        unit: int,
        early: bool,
        lost: Tensor,
        missing: Tensor,
    ) -> None:
        assert set(state) == set(STATE), sorted(state)
        self.state, self.page_tokens = state, page_tokens
        self.rows, self.device = len(state["lease"]) - 1, state["lease"].device
        sink_rows = len(state["owner"]) - 1
        assert 0 < self.rows < 1 << ROW_BITS and sink_rows < 1 << ROW_BITS, (self.rows, sink_rows)
        scratch = {name: torch.zeros_like(state["writer"]) for name in ("written", "claimed")}
        scratch |= {name: torch.zeros_like(state["owner"]) for name in ("sink_keys", "sink_order")}
        scratch["counts"] = torch.zeros(4, dtype=torch.int32, device=self.device)
        lists = torch.full((len(LISTS), self.rows), self.rows, dtype=torch.int64, device=self.device)
        self.late = lists[-2], lists[-1]  # rows to which a step writes sinks, and rows that need them
        self.nothing = lists[-2, :0], lists[-1, :0]
        self.fixed: dict[str, object] = {
            **state,
            **scratch,
            **dict(zip(LISTS, lists, strict=True)),
            **_placed("key", overlays.get("key"), sink, sinks.get("key")),
            **_placed("value", overlays.get("value"), sink, sinks.get("value")),
            "rows": self.rows,
            "sink_rows": sink_rows,
            "early": int(early),
            "layers": next(iter(overlays.values())).shape[0],
            "sink": sink,
            "drafts": drafts,
            "unit": unit,
            "lost": lost,
            "missing": missing,
        }


def _placed(name: str, x: Tensor | None, sink: int, sinks: Tensor | None = None) -> dict[str, object]:
    """Where the overlays [layers, rows + 1, tokens, ...] of a stream and its sink rows [layers, sink rows, sink, ...] lie."""
    if x is None or not x.numel():
        found = dict.fromkeys(("layer_words", "row_words", "words", "sink_words"), 0)
    else:
        layer, row, token = (x.stride(i) * x.element_size() for i in range(3))
        tokens = x.shape[2]
        sizes = {
            "layer_words": layer,
            "row_words": row,
            "words": tokens * token,
            "sink_words": min(sink, tokens) * token,
        }
        assert x[0].is_contiguous(), (x.shape, x.stride())
        if any(n % WORD for n in sizes.values()):
            raise ValueError(
                f"a window of {name}s takes {sizes['words']} bytes a layer, and its sinks {sizes['sink_words']}; a server on a GPU "
                f"moves {WORD} bytes at a time, and expects multiples of that: choose other numbers of sinks and recent tokens"
            )
        found = {part: n // WORD for part, n in sizes.items()}
        assert sinks is None or (sinks.is_contiguous() and sinks[0, 0].nbytes == sizes["sink_words"]), (
            sinks.shape,
            sink,
        )
    return {name: x, f"{name}_sinks": sinks, **{f"{name}_{part}": n for part, n in found.items()}}


NO_OVERLAYS: dict[str, object] = {
    **dict.fromkeys((*STATE, *SCRATCH, *LISTS, "lost", "missing")),
    **_placed("key", None, 0),
    **_placed("value", None, 0),
    **dict.fromkeys(("rows", "layers", "sink", "sink_rows", "early", "drafts", "unit"), 0),
}


def text(page_tokens: int, items: int = 1, threads: int | None = None) -> str:
    config = {"THREADS": threads or THREADS, "PAGE_TOKENS": page_tokens, "ITEMS": items}
    return nvrtc.program("kernels/overlay_step.cu", config=config, arguments=[OverlayStepArguments])


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, page_tokens: int, items: int, shared: int) -> nvrtc.Kernel:
    return nvrtc.Kernel(text(page_tokens, items), "kvant_overlay_step", device, THREADS, shared)


def most_shared(device: torch.device) -> int:
    """Bytes of dynamic shared memory that the kernel may ask for on a device."""
    if device.type != "cuda":
        return MOST_SHARED
    return min(MOST_SHARED, shared_memory(device)[0] - STATIC_SHARED)


def _items(batch: int) -> int:
    """Sequences of a thread, a power of two."""
    return 1 << max(0, -(-batch // THREADS) - 1).bit_length()


def _shared_bytes(rows: int, items: int) -> int:
    return rows * (8 + 4 * 4) + items * THREADS * (8 + 4) if rows else 0


class Launcher:
    """Launches the kernel for steps with the same outputs and overlays; what does not change from step to step is filled in once."""

    def __init__(
        self, outputs: Outputs, overlays: Overlays | None, page_tokens: int, sliding_window: int | None = None
    ) -> None:
        self.outputs, self.overlays, self.page_tokens = outputs, overlays, page_tokens
        self.rows = 0 if overlays is None else overlays.rows
        self.room, self.tokens, self.width = len(outputs.seq_lens), len(outputs.slot_mapping), outputs.table.shape[1]
        self.most_shared, needed = most_shared(outputs.table.device), _shared_bytes(self.rows, _items(self.room))
        if needed > self.most_shared:
            raise ValueError(
                f"{self.rows} overlay rows with steps of {self.room - 1} sequences take {needed} bytes of shared memory, and this "
                f"GPU has {self.most_shared} for them: ask for fewer overlay rows"
            )
        self.arguments = OverlayStepArguments.fill(
            table=outputs.table,  # inputs: set by every call
            seq_lens=outputs.seq_lens,
            query_start_loc=outputs.query_start_loc,
            slot_mapping=outputs.slot_mapping,
            out_table=outputs.table,
            out_seq_lens=outputs.seq_lens,
            out_query_start_loc=outputs.query_start_loc,
            out_slot_mapping=outputs.slot_mapping,
            out_rows=outputs.overlay_rows,
            out_sinks=outputs.sinks,
            out_ring_start=outputs.ring_start,
            counters=outputs.counters,
            **(NO_OVERLAYS if overlays is None else overlays.fixed),
            token_room=self.tokens,
            out_table_stride=outputs.table.stride(0),
            batch_room=self.room,
            sliding_window=sliding_window or 0,
            **dict.fromkeys(("clock", "tokens", "table_stride", "table_width", "batch", "half_batch", "late"), 0),
            **dict.fromkeys(("table_bytes", "seq_lens_bytes", "query_start_bytes", "slot_bytes"), 8),
        )

    def __call__(self, inputs: Inputs, clock: int, late: bool) -> None:
        """Writes the outputs. With overlays, `clock` is the number of the step, from 1; the rows of `late` copies are then in
        `overlays.late`."""
        table, seq_lens, query_start_loc, slot_mapping = inputs
        batch, tokens, a = len(seq_lens), len(slot_mapping), self.arguments
        assert batch < min(self.room, 1 << ROW_BITS) and tokens <= self.tokens, (batch, self.room, tokens, self.tokens)
        a.table, a.table_bytes = table.data_ptr(), _bytes(table)
        a.seq_lens, a.seq_lens_bytes = seq_lens.data_ptr(), _bytes(seq_lens)
        a.query_start_loc, a.query_start_bytes = query_start_loc.data_ptr(), _bytes(query_start_loc)
        a.slot_mapping, a.slot_bytes = slot_mapping.data_ptr(), _bytes(slot_mapping)
        a.table_stride, a.table_width = table.stride(0), min(table.shape[1], self.width)
        a.batch, a.half_batch = batch, nvrtc.half_of(batch) if batch else 0
        a.clock, a.tokens, a.late = clock, tokens, int(late)
        items = _items(batch)
        shared = min(self.most_shared, -(-_shared_bytes(self.rows, items) // SHARED_STEP) * SHARED_STEP)
        _kernel(seq_lens.device, self.page_tokens, items, shared).launch(((1 if self.rows else 0) + COPY_CTAS, 1), a)


def _bytes(x: Tensor) -> int:
    """Bytes of an integer of an input."""
    assert x.dtype in (torch.int32, torch.int64) and x.stride(-1) == 1, (x.dtype, x.stride())
    return 8 if x.dtype == torch.int64 else 4
