"""Prefill over a packed history. Histories are unpacked into a workspace of at most JOINED_TOKENS tokens; what it holds at once does
not grow with the history.

It has three ways, `Way`. The layout and the device decide when a cache is made whether this implementation serves at all (`refuse`).
Which way a call takes depends on what only the call knows, its store's RoPE, its queries' type, soft cap, sliding window and lengths;
`way_of` alone decides that, and `kvant doctor` prints the rule (ABOUT).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvant.layout import Layout, StreamName
from kvant.ops import blocked, flash
from kvant.ops.blocked import Part, attend_fused, attend_plain, over_spans, sink_share
from kvant.ops.cuda import full
from kvant.ops.cuda.convert_rows import convert_rows, converted
from kvant.ops.cuda.device import shared_memory
from kvant.ops.cuda.merge_parts import merge_parts
from kvant.ops.cuda.refusals import refuse_machine
from kvant.ops.cuda.unpack import joined, refuse_layout, rotated_pairs, shared_bytes, unpack
from kvant.ops.cuda.unpack_full import gather
from kvant.ops.cuda.unpack_spans import STREAMS, Span
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch, prefill_each, some_sequences

Tensor = torch.Tensor
JOINED_TOKENS = 65536 + 4096  # tokens of the workspace, in which histories and new tokens of sequences are attended to
MASKED_TOKENS = 4096  # of a history, unpacked at a time where scores are held


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why a layout's history cannot be unpacked on a device, or None."""
    if full.refuse_layout(layout) is None:
        return refuse_machine(device, None)
    reason = refuse_machine(device, refuse_layout(layout))
    if reason is None:
        needed = max(shared_bytes(layout, name) for name in STREAMS)
        if needed > shared_memory(device)[0]:
            reason = f"a matrix and a codebook of {needed} bytes are more than this GPU's shared memory holds"
    return reason


def _read(
    store: LayerStore,
    name: StreamName,
    batch: PagedBatch,
    spans: tuple[Span, ...],
    new: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Spans of the sequences of a batch in the model's space, as `unpack` gives them; of pages of 16-bit numbers, gathered."""
    gathered = store.layout.format(name).is_raw
    return (gather if gathered else unpack)(store, name, batch, spans, new, dtype)


class Way(enum.Enum):
    """How a call is served.

    FUSED   kernels/unpack.cu unpacks the histories of all sequences into the model's own space, with the new tokens behind each:
            one launch for keys, one for values (torch gathers pages of 16-bit numbers). Fused attention (`store.flash`) for sequences
            of different lengths reads them. Where there is a faster one for those of one length, it reads the first tokens of long
            histories without a mask (`runs_of`), and new tokens with one where nothing else is left. Of a layer with a sliding
            window, the tokens that the window of the first new one covers are unpacked, and no others.
    MASKED  sequence by sequence; scores are held to mask or cap them (kvant.ops.blocked). Slower.
    TORCH   sequence by sequence; histories are unpacked by torch (kvant.ops.blocked), where kernels/unpack.cu cannot rotate keys. The
            slowest.
    """

    FUSED = "fused"
    MASKED = "masked"
    TORCH = "torch"


ABOUT = (
    "all sequences unpacked at once for fused attention, for 16-bit queries; on an H100 or H200, outside vLLM, cuDNN attends to long "
    "histories, for head dims up to 128; slower, with scores in memory, for float32 queries, a sliding window above "
    f"{JOINED_TOKENS // 2}, and a soft cap that the engine's fused attention lacks; unpacked by torch where keys are stored before "
    "RoPE, and RoPE rotates a number of pairs of channels that 8 does not divide"
)
UNMASKED_TOKENS = 4096  # of a history, at least, that fused attention without a mask reads
UNMASKED_BITS = 3  # 2^3 lengths of such histories lie between two powers of two
UNMASKED_ROWS = 128  # of a tile of it
UNMASKED_TILES = 128  # of rows and query heads, at least: a GPU has about as many multiprocessors
ROTATED_AT_ONCE = 8  # pairs of channels that kernels/unpack.cu rotates


def way_of(
    fused: flash.Flash,
    dtype: torch.dtype,
    softcap: float | None,
    sliding_window: int | None,
    rotated: int = 0,
) -> Way:
    """The way of a call whose queries are of a type. `fused` takes 16-bit queries, and caps logits where its `softcap` says so.
    `sliding_window`: that of `narrowed`, of which the workspace has to hold two. `rotated`: pairs of channels that are rotated when
    keys are read."""
    if rotated % ROTATED_AT_ONCE:
        return Way.TORCH
    if dtype == torch.float32 or (softcap is not None and not fused.softcap):
        return Way.MASKED
    if sliding_window is not None and sliding_window > JOINED_TOKENS // 2:
        return Way.MASKED
    return Way.FUSED


def narrowed(sliding_window: int | None, seq_lens: Tensor) -> int | None:
    """A sliding window, or None where no sequence is longer than it."""
    return sliding_window if sliding_window is not None and bool((seq_lens > sliding_window).any()) else None


@register("prefill", "cuda", refuse, rank=10, about=ABOUT)
def prefill(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """As the reference's `prefill`, by the `Way` that `way_of` gives. Where seq_lens and query_start_loc lie on the host, it does not
    wait for the device."""
    sliding_window = narrowed(sliding_window, batch.seq_lens)
    way = way_of(store.flash, query.dtype, softcap, sliding_window, rotated_pairs(store, "key"))
    if way is Way.TORCH:
        return blocked.by_blocks(
            store, query, key, value, batch, scale, softcap, sliding_window, blocked.unpack, sink_logits
        )
    if way is Way.MASKED:

        def attend(q: Tensor, k: Tensor, v: Tensor, row: PagedBatch, history: int) -> Tensor:
            return _masked(store, q, k, v, row, history, scale, softcap, sliding_window, sink_logits)

        return prefill_each(query, key, value, batch, attend)
    return _fused(store, query, {"key": key, "value": value}, batch, scale, softcap, sliding_window, sink_logits)


# --- fused ------------------------------------------------------------------------------------------------------------


def spans_of(starts: list[int], seq_lens: list[int], sliding_window: int | None = None) -> list[Span]:
    """All that each sequence attends to: nothing where it has no new tokens."""
    out = []
    for b, length in enumerate(seq_lens):
        new = starts[b + 1] - starts[b]
        history = length - new
        first = 0 if sliding_window is None or not new else max(0, history + 1 - sliding_window)
        out.append(Span(first, history if new else 0, history, starts[b], new))
    return out


def pieces_of(whole: Span, sliding_window: int) -> Iterator[tuple[slice, Span]]:
    """New tokens of a sequence, so many at a time that the workspace holds all that they attend to: rows of the new tokens, and their
    span, whose last token is that of the last row."""
    rows = JOINED_TOKENS - (sliding_window - 1)
    for at in range(0, whole.new, rows):
        stop = min(whole.new, at + rows)
        first = (
            whole.history + at + 1 - sliding_window
        )  # the first position that row `at` sees, which may be one of a new token
        unseen = max(0, first - whole.history)
        before = min(max(0, first), whole.history)
        yield slice(at, stop), Span(before, whole.history, whole.history, whole.new_first + unseen, stop - unseen)


def workspaces(spans: list[Span]) -> Iterator[slice]:
    """Neighbouring sequences that fit into the workspace together. A sequence that does not fit is alone."""
    first = tokens = 0
    for b, span in enumerate(spans):
        if first < b and tokens + span.tokens > JOINED_TOKENS:
            yield slice(first, b)
            first, tokens = b, 0
        tokens += span.tokens
    if first < len(spans):
        yield slice(first, len(spans))


def _fused(
    store: LayerStore,
    query: Tensor,
    new: dict[StreamName, Tensor],
    batch: PagedBatch,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """All sequences by Way.FUSED."""
    fused = store.flash
    starts = batch.query_start_loc.tolist()
    spans = spans_of(starts, batch.seq_lens.tolist(), sliding_window)
    if not any(span.last for span in spans):  # nothing was stored before
        if not any(span.new for span in spans):
            return torch.empty_like(query)
        key, value = new["key"], new["value"]
        own = _varlen_self_attention(store, query, key, value, tuple(starts), scale, softcap, sliding_window)
        return flash.with_sink_logits(own.out, own.lse[..., 0], sink_logits)
    # numbers of 16 bits are attended to as they are
    dtype = query.dtype if store.layout.format("key").is_raw else fused.dtype or query.dtype
    out: Tensor | None = None
    for part in workspaces(spans):
        here = spans[part]
        rows = slice(starts[part.start], starts[part.stop])
        if rows.start == rows.stop:
            continue
        sequences, q = some_sequences(batch, part), query[rows]
        # outputs are corrected for sink logits by their log-sum-exps, which the merge of runs does not give
        runs = runs_of(fused, here, q, softcap) if sink_logits is None and sliding_window is None else []
        long = len(here) == 1 and here[0].tokens > JOINED_TOKENS
        if runs and not long:
            found = _split(store, q, new, sequences, here, dtype, scale, runs)
        else:
            q = converted(q, dtype)
            if long and sliding_window is not None:
                attended = _in_pieces(store, q, new, sequences, here[0], dtype, scale, softcap, sliding_window)
            elif long:
                attended = _long(store, q, new, sequences, here[0], dtype, scale, softcap, bool(runs))
            else:
                attended = _attend(store, q, new, sequences, here, dtype, scale, softcap, True, sliding_window)
            found = flash.with_sink_logits(attended.out, attended.lse[..., 0], sink_logits)
        if rows.stop - rows.start == len(query):
            return found.to(query.dtype)
        out = torch.empty_like(query) if out is None else out
        out[rows] = found
    assert out is not None
    return out


def _attend(
    store: LayerStore,
    q: Tensor,
    new: dict[StreamName, Tensor],
    batch: PagedBatch,
    spans: list[Span],
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
    causal: bool,
    sliding_window: int | None = None,
) -> Part:
    """Attention of rows q to the spans of their sequences, in one call. Rows are the new tokens of the spans; of a single span, they
    may be its last tokens."""
    keys, values = (_read(store, name, batch, tuple(spans), new[name], dtype) for name in STREAMS)
    where = joined(store, tuple(spans))
    counts = [span.new for span in spans] if len(spans) > 1 else [len(q)]
    starts = (0, *itertools.accumulate(counts))
    bounds = flash.Bounds(flash.row_starts(starts, q.device), where.starts, max(counts), where.longest)
    out, lse = store.flash.run(q, keys, values, bounds, scale, causal, softcap, sliding_window)
    return Part(out, lse[..., None])


class Run(NamedTuple):
    """Neighbouring sequences of which fused attention without a mask reads the first `tokens`, in one call."""

    first: int  # of the sequences
    sequences: int
    tokens: int
    new: int  # new tokens of each


def unmasked_tokens(history: int) -> int:
    """How many of a history's first tokens are attended to without a mask: as many as have UNMASKED_BITS binary digits behind the
    first, and so more than 7/8 of them. Of each length cuDNN has to build a graph."""
    unit = 1 << max(0, history.bit_length() - 1 - UNMASKED_BITS)
    return 0 if history < UNMASKED_TOKENS else history // unit * unit


def padded_rows(rows: int) -> int:
    """Rows of a sequence that are passed: whole tiles, and of many rows as few numbers as of tokens."""
    unit = max(UNMASKED_ROWS, 1 << max(0, (rows - 1).bit_length() - 1 - UNMASKED_BITS))
    return -(-rows // unit) * unit


def runs_of(fused: flash.Flash, spans: list[Span], q: Tensor, softcap: float | None) -> list[Run]:
    """The sequences of a workspace whose histories are attended to without a mask: where `fused` has such an attention, histories
    are long, and rows are enough for a GPU."""
    _, heads, dim = q.shape
    if fused.fixed_length is None or softcap is not None or fused.fixed_length.refuse(q.device, dim) is not None:
        return []
    out, first = [], 0
    for (tokens, new), same in itertools.groupby(spans, lambda span: (unmasked_tokens(span.last), span.new)):
        count = len(list(same))
        if tokens and count * heads * -(-new // UNMASKED_ROWS) >= UNMASKED_TILES:
            out.append(Run(first, count, tokens, new))
        first += count
    return out


def _unmasked(
    store: LayerStore, q: Tensor, batch: PagedBatch, spans: list[Span], dtype: torch.dtype, scale: float
) -> Part:
    """Attention of rows q [sequences, rows, query heads, head_dim] to spans of one length: outputs of that shape, and log-sum-exps of
    that shape without channels."""
    assert store.flash.fixed_length is not None
    keys, values = (_read(store, name, batch, tuple(spans), None, dtype) for name in STREAMS)
    keys, values = (x.view(len(spans), -1, *x.shape[1:]) for x in (keys, values))
    return Part(*store.flash.fixed_length.run(q, keys, values, scale, False))


def _self_attention(store: LayerStore, q: Tensor, key: Tensor, value: Tensor, scale: float) -> Part:
    """Causal attention of the new tokens of sequences to themselves, all of them [sequences, rows, ...], which no padding behind them
    changes: shapes as those of `_unmasked`."""
    assert store.flash.fixed_length is not None
    return Part(*store.flash.fixed_length.run(q, key, value, scale, True))


def _varlen_self_attention(
    store: LayerStore,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[int, ...],
    scale: float,
    softcap: float | None,
    sliding_window: int | None = None,
) -> Part:
    """The same of sequences of any lengths, which begin at rows `starts`, all of them [rows of all sequences, ...]: shapes as those
    of `_attend`."""
    rows, most = flash.row_starts(starts, q.device), max(b - a for a, b in itertools.pairwise(starts))
    bounds = flash.Bounds(rows, rows, most, most)
    out, lse = store.flash.run(q, key, value, bounds, scale, True, softcap, sliding_window)
    return Part(out, lse[..., None])


class BehindRuns(NamedTuple):
    """What the new tokens of a workspace attend to behind the runs, and the queries in the type of attention: all three [rows of all
    sequences, ...], or, where `rows` is not 0, [sequences with new tokens, padded rows, ...] of which each has so many."""

    q: Tensor
    out: Tensor
    lse: Tensor
    rows: int = 0

    def of(self, first: int, run: Run) -> BehindRuns:
        """That of a run, whose first row is `first`: queries [sequences, padded rows, ...], the others [sequences, rows, ...]."""
        count, rows = run.sequences, run.new
        if self.rows:
            part = slice(first // rows, first // rows + count)
            return BehindRuns(self.q[part], self.out[part, :rows], self.lse[part, :rows], rows)
        part = slice(first, first + count * rows)
        (q,) = convert_rows([self.q[part]], self.q.dtype, rows, padded_rows(rows))
        out, lse = (x[part].unflatten(0, (count, rows)) for x in (self.out, self.lse))
        return BehindRuns(q, out, lse, rows)


def _behind_runs(
    store: LayerStore,
    query: Tensor,
    new: dict[StreamName, Tensor],
    batch: PagedBatch,
    rest: list[Span],
    dtype: torch.dtype,
    scale: float,
) -> BehindRuns:
    """Attention of the new tokens to spans `rest` of their sequences. Where none of them has history, nothing is unpacked; where all
    have as many new tokens, too, it is one call of the faster attention."""
    starts = (0, *itertools.accumulate(span.new for span in rest))
    if any(span.first < span.last for span in rest):
        q = converted(query, dtype)
        part = _attend(store, q, new, batch, rest, dtype, scale, None, True)
        return BehindRuns(q, part.out, part.lse[..., 0])
    own = slice(rest[0].new_first, rest[0].new_first + len(query))
    xs = [query, *(new[name][own] for name in STREAMS)]
    counts = {span.new for span in rest} - {0}
    if len(counts) == 1:
        (rows,) = counts
        q, key, value = convert_rows(xs, dtype, rows, padded_rows(rows))
        found = _self_attention(store, q, key, value, scale)
        return BehindRuns(q, found.out, found.lse, rows)
    q, key, value = (x[0] for x in convert_rows(xs, dtype, len(query), len(query)))
    part = _varlen_self_attention(store, q, key, value, starts, scale, None)
    return BehindRuns(q, part.out, part.lse[..., 0])


def _split(
    store: LayerStore,
    query: Tensor,
    new: dict[StreamName, Tensor],
    batch: PagedBatch,
    spans: list[Span],
    dtype: torch.dtype,
    scale: float,
    runs: list[Run],
) -> Tensor:
    """As `_attend`, causal: the first tokens of the sequences of `runs` without a mask, what is left of every sequence with its new
    tokens, merged by the log-sum-exps. Outputs are of the type of the queries."""
    rest, starts = list(spans), [0, *itertools.accumulate(span.new for span in spans)]
    for run in runs:
        for b in range(run.first, run.first + run.sequences):
            rest[b] = rest[b]._replace(first=run.tokens)
    behind = _behind_runs(store, query, new, batch, rest, dtype, scale)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if sum(run.sequences * run.new for run in runs) < len(query):
        if behind.rows:
            out.view(-1, behind.rows, *out.shape[1:]).copy_(behind.out[:, : behind.rows])
        else:
            out.copy_(behind.out)
    for run in runs:
        first, own = starts[run.first], behind.of(starts[run.first], run)
        part = slice(run.first, run.first + run.sequences)
        before = [Span(0, run.tokens, span.history) for span in spans[part]]
        found = _unmasked(store, own.q, some_sequences(batch, part), before, dtype, scale)
        rows = out[first : first + run.sequences * run.new]
        merge_parts(rows, found.out[:, : run.new], found.lse[:, : run.new], own.out, own.lse)
    return out


def _long(
    store: LayerStore,
    q: Tensor,
    new: dict[StreamName, Tensor],
    row: PagedBatch,
    whole: Span,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
    unmasked: bool,
) -> Part:
    """One sequence that does not fit into the workspace: spans of its history, merged by their log-sum-exps. Where they fit, the
    new tokens are attended to with the last span. `unmasked`: spans before the last by fused attention without a mask."""
    spans = long_spans(whole.last, unmasked)
    last_tokens = whole.last - spans[-1][0]
    with_new = last_tokens + whole.new <= JOINED_TOKENS and not (
        unmasked and unmasked_tokens(last_tokens) == last_tokens
    )

    padded = convert_rows([q], dtype, whole.new, padded_rows(whole.new))[0] if unmasked else None
    own_rows = slice(whole.new_first, whole.new_first + whole.new)

    def attend(first: int, last: int) -> Part:
        if with_new and last == whole.last:
            return _attend(store, q, new, row, [whole._replace(first=first)], dtype, scale, softcap, True)
        span = Span(first, last, whole.history)
        if padded is not None and unmasked_tokens(last - first) == last - first:
            found = _unmasked(store, padded, row, [span], dtype, scale)
            return Part(found.out[0, : whole.new], found.lse[0, : whole.new, :, None])
        return _attend(store, q, new, row, [span], dtype, scale, softcap, False)

    def own() -> Part:
        key_value = [new[name][own_rows] for name in STREAMS]
        if padded is not None:
            key, value = convert_rows(key_value, dtype, whole.new, padded.shape[1])
            found = _self_attention(store, padded, key, value, scale)
            return Part(found.out[0, : whole.new], found.lse[0, : whole.new, :, None])
        key, value = (converted(x, dtype) for x in key_value)
        return _varlen_self_attention(store, q, key, value, (0, whole.new), scale, softcap)

    return over_spans(spans, attend, None if with_new else own)


def _in_pieces(
    store: LayerStore,
    q: Tensor,
    new: dict[StreamName, Tensor],
    row: PagedBatch,
    whole: Span,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
    sliding_window: int,
) -> Part:
    """One sequence with a sliding window, of which the workspace does not hold all that its new tokens attend to."""
    found = [
        _attend(store, q[rows], new, row, [span], dtype, scale, softcap, True, sliding_window)
        for rows, span in pieces_of(whole, sliding_window)
    ]
    return Part(torch.cat([part.out for part in found]), torch.cat([part.lse for part in found]))


def long_spans(history: int, unmasked: bool) -> list[tuple[int, int]]:
    """Spans of a history, none longer than the workspace; with `unmasked`, of lengths that are attended to without a mask, and what
    is left."""
    spans, first = list[tuple[int, int]](), 0
    while first < history:
        tokens = min(JOINED_TOKENS, history - first)
        tokens = (unmasked_tokens(tokens) if unmasked else 0) or tokens
        spans.append((first, first + tokens))
        first += tokens
    return spans


# --- masked -----------------------------------------------------------------------------------------------------------


def _masked(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PagedBatch,
    history: int,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """One sequence by Way.MASKED, in the model's space."""
    new, query_heads, dim = query.shape
    q = query.float().view(new, store.layout.heads, -1, dim).permute(1, 2, 0, 3)  # [heads, group, rows, head_dim]
    k, v = key.float(), value.float()
    plain = softcap is not None or (sliding_window is not None and sliding_window < history + new)
    low = 0 if sliding_window is None else max(0, history + 1 - sliding_window)
    spans = [(first, min(history, first + MASKED_TOKENS)) for first in range(low, history, MASKED_TOKENS)]

    def part(k: Tensor, v: Tensor, ahead: int, causal: bool) -> Part:
        if plain:
            return attend_plain(q, k, v, scale, softcap, sliding_window, ahead, None)
        return attend_fused(q, k, v, scale, causal)

    def attend(first: int, last: int) -> Part:
        span = (Span(first, last, history),)
        keys, values = (_read(store, name, row, span, None, torch.float32) for name in STREAMS)
        return part(keys, values, history - first, False)

    found = over_spans(spans, attend, lambda: part(k, v, 0, True))
    out = found.out if sink_logits is None else found.out * sink_share(found.lse, sink_logits)
    out = out.permute(2, 0, 1, 3)
    return out.reshape(new, query_heads, dim).to(query.dtype)
