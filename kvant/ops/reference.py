"""The operations in plain torch. Every faster implementation is tested against these, on the same stored bytes.

append   writes new tokens into their pages and into the overlays, the full-precision tokens. A stream that codes groups of
         tokens keeps an unfinished group in its overlay, as its tail, and codes it when it is complete.
decode   attends from the last token of every sequence to the whole cached sequence, that token included; or from its last few
         tokens, each as decode would have at its own length.
prefill  attends from new tokens to the cached history and, in full precision, to each other; called before their
         append, it reads the history as decode would have read it at that length.

Attention happens in the basis of the stored tensors: queries are transformed once, outputs transformed back once. Keys that
are stored unrotated are the exception: they are brought back into the model's own basis when they are read.
"""

from __future__ import annotations

import torch

from kvant.codecs import DTYPES
from kvant.correctors import Progress
from kvant.layout import StreamName
from kvant.ops.registry import register
from kvant.ops.types import LayerStore, PagedBatch, as_held, one_query_each, prefill_each, queries_per_sequence
from kvant.recipe import Stream, Window

Tensor = torch.Tensor
QUERY_BLOCK = 256  # rows of scores that prefill holds at a time


def serves_everything(layout: object, device: torch.device) -> None:
    """The reference refuses nothing."""


# --- writing ----------------------------------------------------------------------------------------------------------


@register("append", "reference", serves_everything, rank=0)
def append(store: LayerStore, key: Tensor, value: Tensor, batch: PagedBatch, query: Tensor | None = None) -> None:
    """Stores new tokens: key and value are [new tokens, heads, head_dim]. A corrector also needs the tokens' queries, `query`
    [new tokens, query heads, head_dim]."""
    sequence, position = batch.positions
    has_slot = batch.slot_mapping >= 0
    if store.states and query is None:
        raise ValueError(f"recipe {store.layout.recipe.name} learns from queries: append needs the new tokens' queries")
    given: dict[StreamName, Tensor] = {"key": key, "value": value}
    stored: dict[StreamName, Tensor] = {}
    for name, x in given.items():
        stream = store.stream(name)
        stored[name] = stream.stored(x.float(), position)
        if stream.spec.groupwise:  # rounded as in the tail, so that a group that passed through it has the same bytes
            stored[name] = stored[name].to(DTYPES[store.layout.overlay_dtype]).float()
    for name in stored:
        if store.stream(name).spec.groupwise:
            assert bool(has_slot.all()), "a stream that codes groups of tokens cannot leave one out"
            _append_groups(store, name, stored, batch, query)
        else:
            write = has_slot & (position >= store.layout.recipe.origin)
            _append_tokens(store, name, stored[name], batch.slot_mapping, write)
    for name, x in given.items():
        kept = x.float() if store.stream(name).spec.raw_window else stored[name]
        _append_overlay(store, name, kept, batch, sequence, position, has_slot)


def _append_tokens(store: LayerStore, name: StreamName, stored: Tensor, slot_mapping: Tensor, write: Tensor) -> None:
    """Writes tokens of a token-wise stream: every token owns its bytes, so it is a scatter."""
    slot_mapping = slot_mapping[write]
    if not len(slot_mapping):
        return
    parts = store.stream(name).codec.encode(stored[write])
    data, places = store.layout.pack_tokens(name, parts, slot_mapping % store.layout.page_tokens)
    _scatter(store.pages, slot_mapping // store.layout.page_tokens, places, data)


def _append_groups(
    store: LayerStore, name: StreamName, stored: dict[StreamName, Tensor], batch: PagedBatch, query: Tensor | None
) -> None:
    """Codes the groups that the new tokens complete; their older tokens come from the tail."""
    layout, stream, window = store.layout, store.stream(name), store.stream(name).spec.window
    size, group = layout.page_tokens, stream.codec.group_tokens
    for b in range(len(batch.seq_lens)):
        progress = _progress(name, stream.spec, batch, b)
        last = window.packed_end(progress.total)
        tokens = max(0, last - progress.first)
        known = None
        if stream.spec.corrector is not None:
            assert query is not None
            known = _observe(store, name, stored["key"], query, batch, b)
        if not tokens:
            continue
        x = _unpacked(store, name, stored[name], batch, b, progress)[:tokens]
        if stream.spec.corrector is None:
            parts = stream.codec.encode(x)
        else:
            assert known is not None
            parts = stream.spec.corrector.encode(x, stream.codec, known)
        at = torch.arange(progress.first, last, device=batch.block_table.device) - layout.recipe.origin
        pages = batch.block_table[b][at // size]
        data, places = layout.pack_tokens(name, parts, at % size)
        _scatter(store.pages, pages, places, data)
        data, places = layout.pack_shared(name, parts, at[::group] % size // group)
        _scatter(store.pages, pages[::group], places, data)


def _progress(name: StreamName, stream: Stream, batch: PagedBatch, b: int) -> Progress:
    """Which tokens of sequence b are coded, before its new tokens are. Tokens that its ring does not hold are in pages
    already."""
    window, group = stream.window, stream.codec.group_tokens
    total = int(batch.seq_lens[b])
    before = total - int(batch.query_start_loc[b + 1] - batch.query_start_loc[b])
    first = max(window.first, window.packed_end(before), int(batch.ring_start[name][b]))
    return Progress(first, before, total, window.first, window.ring, group)


def _unpacked(
    store: LayerStore, name: StreamName, stored: Tensor, batch: PagedBatch, b: int, progress: Progress
) -> Tensor:
    """The tokens of sequence b from `progress.first` on: its tail, then the new ones."""
    first, before = progress.first, progress.before
    tail = torch.arange(first, max(first, before), device=stored.device)
    held = store.overlays[name][int(batch.overlay_rows[b])][overlay_index(store.stream(name).spec.window, tail)]
    start, stop = int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1])
    return torch.cat((held.float(), stored[min(stop, start + max(0, first - before)) : stop]))


def _observe(store: LayerStore, name: StreamName, keys: Tensor, query: Tensor, batch: PagedBatch, b: int) -> Tensor:
    """Shows the new tokens of sequence b to a stream's corrector."""
    spec, state = store.stream(name).spec, store.states[name]
    corrector = spec.corrector
    assert corrector is not None
    progress, source = _progress(name, spec, batch, b), corrector.source(b)
    own = state[int(batch.overlay_rows[b])]  # a view: what is learnt stays
    if progress.before == 0:
        own.zero_()
    if source != b:
        if progress.first == progress.sink:  # until the first group is coded
            own.copy_(state[int(batch.overlay_rows[source])])
        return own
    part = slice(int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1]))
    if part.start == part.stop:
        return own
    at = torch.arange(progress.before, progress.total, device=query.device)
    probes = store.key.probes(query[part].float().unflatten(1, (store.layout.heads, -1)), at)
    # the keys' tail: a value stream with a corrector has the same windows as its keys
    return corrector.observe(own, probes, _unpacked(store, "key", keys, batch, b, progress), progress)


def _append_overlay(
    store: LayerStore,
    name: StreamName,
    kept: Tensor,
    batch: PagedBatch,
    sequence: Tensor,
    position: Tensor,
    has_slot: Tensor,
) -> None:
    """Writes the sinks and the last `ring` tokens of every sequence into its overlay row."""
    window = store.stream(name).spec.window
    overlay = store.overlays[name]
    if not overlay.shape[1]:
        return
    keep = has_slot & ((position < window.sink) | (position >= batch.seq_lens[sequence] - window.ring))
    rows = overlay_index(window, position[keep])
    overlay[batch.overlay_rows[sequence[keep]], rows] = as_held(kept[keep], overlay.dtype)


def overlay_index(window: Window, position: Tensor) -> Tensor:
    """Token of an overlay row that holds the token at a position: the sinks in order, then the ring."""
    if not window.ring:
        return position
    return torch.where(position < window.sink, position, window.sink + (position - window.sink) % window.ring)


def overlay_mask(window: Window, position: Tensor, n: Tensor, sinks: Tensor, ring_start: Tensor) -> Tensor:
    """Which positions are read from the overlay, in sequences of n tokens: the sinks that it holds, and what is not packed and in
    the ring. All arguments broadcast, such as position [tokens] and n, sinks and ring_start [sequences, 1]."""
    recent = (position >= window.packed_end(n)) & (position >= ring_start) & (position >= window.sink)
    return (position < torch.minimum(sinks, n)) | recent


def _scatter(pages: Tensor, page: Tensor, places: Tensor, data: Tensor) -> None:
    """pages[page, :, places] = data for [n], [n, m] and [n, heads, m]."""
    heads = torch.arange(pages.shape[1], device=pages.device)
    pages[page[:, None, None], heads[None, :, None], places[:, None, :]] = data


def refill(store: LayerStore, name: StreamName, pages: Tensor, overlay_row: int, first: int, last: int) -> None:
    """Writes tokens [first, last) of a sequence into its overlay row, decoded from its pages: tokens that a crop brings back into
    the tail of a group, after the ring had let them go."""
    layout, stream, window = store.layout, store.stream(name), store.stream(name).spec.window
    position = torch.arange(first, last, device=store.pages.device)
    at = position - layout.recipe.origin
    start = int(at[0]) // layout.page_tokens
    runs = store.pages[pages[start : int(at[-1]) // layout.page_tokens + 1]]
    decoded = stream.codec.decode(layout.unpack(name, runs))[at - start * layout.page_tokens]
    overlay = store.overlays[name]
    overlay[overlay_row, overlay_index(window, position)] = decoded.to(overlay.dtype)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(store: LayerStore, name: StreamName, batch: PagedBatch, seq_lens: Tensor) -> Tensor:
    """A stream of every sequence as attention reads it at these lengths: float32 [sequences, tokens, heads, head_dim], in the
    basis of attention; zero past the end."""
    layout, stream, window = store.layout, store.stream(name), store.stream(name).spec.window
    sequences, pages = batch.block_table.shape
    origin = layout.recipe.origin
    table = batch.block_table.clamp_min(0).flatten()
    # where every token so far is a sink, there may be no page at all
    runs = store.pages[table] if len(store.pages) else store.pages.new_zeros(len(table), *store.pages.shape[1:])
    packed = stream.codec.decode(layout.unpack(name, runs))
    packed = packed.reshape(sequences, pages * layout.page_tokens, layout.heads, layout.head_dim)
    if origin:
        packed = torch.cat((packed.new_zeros(sequences, origin, layout.heads, layout.head_dim), packed), 1)
    position = torch.arange(packed.shape[1], device=packed.device)
    n = seq_lens[:, None]
    packed = stream.attended(packed.transpose(0, 1), position).transpose(0, 1)
    overlay = store.overlays[name]
    if overlay.shape[1]:
        from_overlay = overlay_mask(window, position, n, batch.sinks[:, None], batch.ring_start[name][:, None])
        index = overlay_index(window, position).clamp_max(overlay.shape[1] - 1)
        full = overlay[batch.overlay_rows[:, None], index[None, :]].float()
        full = stream.attended_window(full.transpose(0, 1), position).transpose(0, 1)
        packed = torch.where(from_overlay[..., None, None], full, packed)
    there = (batch.block_table >= 0).repeat_interleave(layout.page_tokens, 1)
    there = torch.nn.functional.pad(there, (origin, 0), value=True)  # a page that slid out may hold anything
    return torch.where((there & (position < n))[..., None, None], packed, 0.0)


def restored(store: LayerStore, name: StreamName, batch: PagedBatch) -> Tensor:
    """A stream of every sequence as attention reads it, in the model's own basis: float32 [sequences, tokens, heads, head_dim];
    undefined past the end."""
    return store.stream(name).inverse(read(store, name, batch, batch.seq_lens)[..., None, :])[..., 0, :]


def masked_logits(scores: Tensor, keep: Tensor, softcap: float | None, mean_logit: Tensor | None = None) -> Tensor:
    """softcap(S + mean_logit) where `keep`, else -inf. The softmax cancels mean_logit, which is the same for a whole row; the cap
    before it and a sink logit beside it do not."""
    scores = scores if mean_logit is None else scores + mean_logit[..., None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~keep, float("-inf"))


def softmax(logits: Tensor) -> Tensor:
    """P = softmax(S) over the last dim; a row that keeps nothing is zero."""
    return torch.softmax(logits, -1).nan_to_num(0.0)


def mean_logits(
    store: LayerStore, q: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None = None
) -> Tensor | None:
    """scale * q . mu, which removing the key mean took off the logits of queries [..., heads, queries per head, head_dim]; None
    where logits are neither capped nor compared with a sink logit, since the softmax cancels it."""
    mean_logit = None if softcap is None and sink_logits is None else store.key.mean_logit(q)
    return None if mean_logit is None else mean_logit * scale


def token_share(lse: Tensor, sink_logit: Tensor) -> Tensor:
    """The share of the softmax that tokens have where a sink logit s is in its denominator:
    sum_n exp(S_n) / (exp(s) + sum_n exp(S_n)) = sigmoid(lse - s). Outputs are multiplied by it last, after the inverse
    transform, whose mean belongs to weights that sum to one. A row that attends to nothing has none."""
    return torch.sigmoid(lse - sink_logit).nan_to_num(0.0)


@register("decode", "reference", serves_everything, rank=0)
def decode(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of one query per sequence, [sequences, query heads, head_dim], over its cached tokens. With several,
    [sequences * queries, query heads, head_dim], each is attended as a sequence that ends with the query's token.

    S = Q K^T, O = softmax(scale * S) V. With `sliding_window`, a query attends to itself and the sliding_window - 1 tokens before
    it. `sink_logits` [query heads] are the model's own attention sinks: a logit per query head that is in the softmax's denominator
    alone, neither scaled nor capped.
    """
    batch = one_query_each(batch, queries_per_sequence(query, batch, store.layout))
    sequences, query_heads, dim = query.shape
    accurate = query.dtype if query.dtype == torch.float64 else torch.float32
    keys = read(store, "key", batch, batch.seq_lens).to(accurate)
    values = read(store, "value", batch, batch.seq_lens).to(accurate)
    q = query.to(accurate).view(sequences, store.layout.heads, query_heads // store.layout.heads, dim)
    mean_logit = mean_logits(store, q, scale, softcap, sink_logits)
    q = store.key.dual(q)
    scores = torch.einsum("bhgd,bnhd->bhgn", q, keys) * scale
    position = torch.arange(keys.shape[1], device=query.device)
    keep = position < batch.seq_lens[:, None]
    if sliding_window is not None:
        keep &= position >= batch.seq_lens[:, None] - sliding_window
    logits = masked_logits(scores, keep[:, None, None, :], softcap, mean_logit)
    out = store.value.inverse(torch.einsum("bhgn,bnhd->bhgd", softmax(logits), values))
    if sink_logits is not None:
        out = out * token_share(logits.logsumexp(-1), sink_logits.to(accurate).view(store.layout.heads, -1))[..., None]
    return out.reshape(sequences, query_heads, dim).to(query.dtype)


@register("prefill", "reference", serves_everything, rank=0)
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
    """Attention of new tokens, [new tokens, heads, head_dim] each, over cached history and each other. Called before
    `append`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, row: PagedBatch, history: int) -> Tensor:
        return _prefill_one(store, q, k, v, row, history, scale, softcap, sliding_window, sink_logits)

    return prefill_each(query, key, value, batch, attend)


def _prefill_one(
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
    new, query_heads, dim = query.shape
    accurate = query.dtype if query.dtype == torch.float64 else torch.float32
    keys, values = key.to(accurate), value.to(accurate)
    q = query.to(accurate).view(new, store.layout.heads, -1, dim)
    mean_logit: Tensor | None = None
    if history:
        n = torch.tensor([history], device=query.device)
        mean_logit = mean_logits(store, q, scale, softcap, sink_logits)
        keys = torch.cat((read(store, "key", row, n)[0, :history].to(accurate), store.key.forward(keys)))
        values = torch.cat((read(store, "value", row, n)[0, :history].to(accurate), store.value.forward(values)))
        q = store.key.dual(q)
    position = torch.arange(len(keys), device=query.device)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for first in range(0, new, QUERY_BLOCK):
        block = slice(first, min(new, first + QUERY_BLOCK))
        at = position[history + first : history + block.stop, None]  # the queries' own positions
        keep = position <= at
        if sliding_window is not None:
            keep &= position > at - sliding_window
        scores = torch.einsum("qhgd,nhd->hgqn", q[block], keys) * scale
        removed = None if mean_logit is None else mean_logit[block].permute(1, 2, 0)
        logits = masked_logits(scores, keep, softcap, removed)
        out[block] = torch.einsum("hgqn,nhd->qhgd", softmax(logits), values)
        if sink_logits is not None:
            lse[block] = logits.logsumexp(-1).permute(2, 0, 1)
    if history:
        out = store.value.inverse(out)
    if sink_logits is not None:
        out = out * token_share(lse, sink_logits.to(accurate).view(store.layout.heads, -1))[..., None]
    return out.reshape(new, query_heads, dim).to(query.dtype)
