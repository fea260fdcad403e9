"""The batch that a `kvant.Cache` holds: its sequences in every group of layers, its columns, and the forward pass under way.

A batch is a matrix of columns, as transformers has it; columns may be padding. Pages hold a sequence's tokens alone, so sequences
of one batch have different lengths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from kvant import cache as paging
from kvant.cache import PagedCache
from kvant.cache.journal import Journal, nothing, whole
from kvant.engines.attention import Handle, padding_of
from kvant.engines.layers import PackedLayer
from kvant.ops import PagedBatch

Tensor = torch.Tensor
R = TypeVar("R")
# of a BatchState: what operations on the batch change, and take back where they fail
FIELDS = (
    "batch_size",
    "columns",
    "columns_begun",
    "padding_mask",
    "token_ids",
    "told_ids",
    "salt",
    "created",
    "passes",
    "decoder",
)


@dataclasses.dataclass
class Step:
    """One forward pass through the layers of a group."""

    batch: PagedBatch
    padding_mask: Tensor | None  # bool [batch, columns], True is a token; None where every column is one
    columns: int
    before: list[int]  # lengths of the sequences before it
    same: list[int] | None  # for every row of the batch, the first row with the same text; None where all differ
    written: int = 0  # layers of the group whose new tokens are stored
    begun: int = 0  # as `written`, with the layer whose tokens are being stored
    saved: list[Tensor] | None = None  # rows of that layer as they were, if a group's tail loses tokens

    @functools.cached_property
    def host_lengths(self) -> PagedBatch:
        """The batch with its lengths on the host, where prefill decides by them: they are copied once for all layers."""
        batch = self.batch
        return batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())


@dataclasses.dataclass
class Group:
    """Layers with the same sliding window. They see the same tokens, and share block tables."""

    sliding_window: int | None
    layers: list[int]
    paged: PagedCache
    sequences: list[paging.Sequence] = dataclasses.field(default_factory=list)  # of every row of the batch
    step: Step | None = None  # the forward pass under way


class StepDecoder(Protocol):
    """A decoder of fixed steps: the batch belongs to it from when it is opened until it is closed."""

    done: int  # steps
    closed: bool

    def attend(
        self,
        handle: Handle,
        query: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor: ...

    def close(self) -> None: ...


class BatchState:
    """The sequences of one batch, the same in all groups.

    layers        the cache's layers, each of which counts its columns
    groups        empty until storage has been allocated; `group_of` has the group of every layer, `index_of` its index in it
    batch_size    rows; -1 while there are none
    columns       columns that all layers have; `columns_begun` also counts those of the forward pass under way
    padding_mask  bool [batch_size, columns_begun], True where a column is a token; None while no column is padding
    token_ids     tokens of every sequence, where the caller passed them
    told_ids      tokens that were passed to `Cache.start`; some of them may not be in the sequences yet
    salt          of the tenant whose tokens they are
    created       whether the forward pass under way has made the sequences
    passes        forward passes that have reached all layers
    decoder       decoder of fixed steps that owns the batch; None where there is none
    """

    def __init__(self, layers: list[PackedLayer]) -> None:
        self.layers = layers
        self.groups: list[Group] = []
        self.group_of: list[Group] = []
        self.index_of: list[int] = []
        self.batch_size = -1
        self.columns = self.columns_begun = 0
        self.padding_mask: Tensor | None = None
        self.token_ids: list[list[int]] | None = None
        self.told_ids: list[list[int]] | None = None
        self.salt = ""
        self.created = False
        self.passes = 0
        self.decoder: StepDecoder | None = None
        self.journal = nothing()

    def set_groups(self, groups: list[Group]) -> None:
        by_layer = {layer: group for group in groups for layer in group.layers}
        self.group_of = [by_layer[i] for i in range(len(self.layers))]
        self.index_of = [group.layers.index(i) for i, group in enumerate(self.group_of)]
        self.groups = groups  # last: where there are groups, the rest is known

    def whole(self, operation: Callable[[], R]) -> R:
        """Runs an operation on the batch in all groups, whole or not at all; one within another is part of it."""
        caches = [group.paged for group in self.groups]
        if caches and caches[0].busy:
            return operation()
        self.recover()

        def run(journal: Journal) -> R:
            self.journal = journal
            journal.note(self, *FIELDS)
            for layer in self.layers:
                journal.note(layer, "columns")
            for group in self.groups:
                journal.note(group, "sequences", "step")
            return operation()

        return whole(caches, run)

    def recover(self) -> None:
        """Takes back an operation whose taking back was interrupted."""
        self.journal.take_back()

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [seq.length for seq in self.groups[0].sequences] if self.groups else []

    @property
    def unfinished(self) -> bool:
        """Whether a forward pass has begun and not ended."""
        return self.columns_begun != self.columns or any(layer.columns != self.columns for layer in self.layers)

    def set_columns(self, columns: int) -> None:
        """All layers have so many columns, and no forward pass is under way."""
        self.columns = self.columns_begun = columns
        for layer in self.layers:
            layer.columns = columns

    def restore(self, columns: int, padding_mask: Tensor | None, token_ids: list[list[int]] | None, salt: str) -> None:
        """Describes sequences that have been put into the groups: from host memory, or from a file."""
        self.batch_size = len(self.groups[0].sequences) or -1
        self.padding_mask, self.token_ids, self.salt = padding_mask, token_ids, salt
        self.set_columns(columns)

    def forget(self) -> None:
        """Frees all sequences, whatever state they are in."""
        self.whole(self._forget)

    def _forget(self) -> None:
        if self.decoder is not None:  # its sequences are gone, and their pages with them
            self.journal.note(self.decoder, "closed")
            self.decoder.closed, self.decoder = True, None
        for group in self.groups:
            group.step = None
            for seq in group.sequences:
                group.paged.free(seq)
            group.sequences = []
        self.batch_size, self.padding_mask, self.created = -1, None, False
        self.token_ids = self.told_ids = None
        self.set_columns(0)

    def expect_no_crop(self) -> None:
        """From here on pages that a sliding window leaves behind are given back: an assisted generation asks to keep them, and does
        not say when it is over."""
        for layer in self.layers:
            layer.record_past = False

    # --- a forward pass ----------------------------------------------------------------------------------------------

    def begin(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: PackedLayer) -> None:
        """Makes room for a forward pass's tokens in every group, from what its first layer is given. Where it fails, `abort`
        leaves all groups as they were.

        mask  attention mask of SDPA, bool [batch, 1, columns, all columns], or the padding mask of the new columns alone,
              bool [batch, columns]; None where every column is a token.
        """
        self.whole(lambda: self._begin(query, key, value, mask, layer))

    def _begin(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: PackedLayer) -> None:
        batch_size, _, columns, _ = query.shape
        if self.batch_size == -1:
            self.created = True
            for group in self.groups:
                group.paged.reserve(0, batch_size)
                group.sequences = [group.paged.new() for _ in range(batch_size)]
            self.batch_size = batch_size
        if batch_size != self.batch_size:
            raise ValueError(f"the cache holds {self.batch_size} sequences, the model was called with {batch_size}")
        new = mask
        if mask is not None and mask.ndim != 2:
            new = padding_of(mask, columns, self.columns_begun, self.padding_mask, layer.sliding_window)
        same = self._same_rows(query, key, value, new) if columns > 1 and batch_size > 1 else None
        rows = range(batch_size) if same is None else sorted(set(same))
        counts = [columns if new is None else int(new[row].sum()) for row in rows]
        for group in self.groups:
            before = [seq.length for seq in group.sequences]
            batch = group.paged.extend([group.sequences[row] for row in rows], counts)
            part = new if same is None or new is None else new[list(rows)]
            group.step = Step(batch, part, columns, before, same)
        for group in self.groups:
            for row, source in enumerate(same or ()):
                if source != row:
                    group.paged.mirror(group.sequences[row], group.sequences[source])
        if new is not None or self.padding_mask is not None:
            past = self.padding_mask
            if past is None:
                past = torch.ones(batch_size, self.columns_begun, dtype=torch.bool)
            new = torch.ones(batch_size, columns, dtype=torch.bool) if new is None else new.cpu()
            self.padding_mask = torch.cat((past, new), 1)
        self.columns_begun += columns

    def _same_rows(self, query: Tensor, key: Tensor, value: Tensor, padding_mask: Tensor | None) -> list[int] | None:
        """For every row of the batch the first row with the same text, as the first layer shows it; None where all differ.

        Samples of one prompt come as equal rows: they are stored, and attended from, once, as long as they stay equal
        (`separate_rows`).
        """
        found: dict[Any, int] = {}
        same: list[int] = []
        streams = self.groups[0].paged.layout.recipe.streams.values()
        if any(stream.groupwise for stream in streams) and self.columns_begun:
            return None  # the tail of an unfinished group may differ where pages are the same
        ends = key[:, 0, -1, :4].tolist()
        for row in range(len(key)):
            pages = tuple(tuple(group.sequences[row].pages) for group in self.groups)
            state = tuple((group.sequences[row].length, str(group.sequences[row].ring_start)) for group in self.groups)
            padding = None if padding_mask is None else tuple(padding_mask[row].tolist())
            first = found.setdefault((tuple(ends[row]), pages, state, padding), row)
            equal = first == row or all(torch.equal(x[first], x[row]) for x in (query, key, value))
            same.append(first if equal else row)
        return same if len(set(same)) < len(same) else None

    def separate_rows(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Where rows that were equal in the layers before differ in this one, all rows are stored on their own from here on: a hook
        or an adapter may change some rows between layers, and `Cache.fill` is given any keys."""
        same = self.groups[0].step.same if self.groups[0].step is not None else None
        if same is None:
            return
        rows = [row for row, source in enumerate(same) if source != row]
        sources = [same[row] for row in rows]
        if bool(torch.stack([(x[rows] == x[sources]).all() for x in (query, key, value)]).all()):
            return
        new = None if self.padding_mask is None else self.padding_mask[:, self.columns :].to(key.device)

        def separate() -> None:
            for group in self.groups:
                step = group.step
                assert step is not None
                batch = group.paged.separate(group.sequences, step.before)
                mask = None if step.padding_mask is None else new
                group.step = dataclasses.replace(step, batch=batch, padding_mask=mask, same=None)

        self.whole(separate)

    def commit(self) -> None:
        """A forward pass has reached all layers."""
        self.whole(self._commit)

    def _commit(self) -> None:
        self.passes += 1
        self.columns, self.created = self.columns_begun, False
        for group in self.groups:
            group.step = None
            self._slide(group)  # not before: a pass that is taken back needs the pages that its window would leave

    def abort(self) -> None:
        """Takes back a forward pass that failed: no sequence has grown, and none that it made is left. Where an interrupt ends this,
        the pass is still under way."""
        try:
            self.whole(self._abort)
        except Exception:  # it would fail again
            self.forget()
            raise

    def _abort(self) -> None:
        for group in self.groups:
            step, group.step = group.step, None
            if step is None:
                continue
            torn = step.begun > step.written
            if torn and step.saved is not None:
                group.paged.restore_rows(step.written, group.sequences, step.saved)
                torn = False
            for seq, length in zip(group.sequences, step.before, strict=True):
                group.paged.rollback(seq, length, range(step.written), torn)
        if self.created:
            self.forget()
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[:, : self.columns]
        self.set_columns(self.columns)

    def decoded(self, columns: int) -> None:
        """Takes the batch back from a decoder that has added so many tokens to every sequence, as a part of closing it."""
        self.decoder = None
        if self.padding_mask is not None:
            self.padding_mask = torch.nn.functional.pad(self.padding_mask, (0, columns), value=True)
        self.set_columns(self.columns_begun + columns)
        for group in self.groups:
            self._slide(group)

    def _slide(self, group: Group) -> None:
        """Gives back pages that a sliding window has left behind, unless a crop may still come."""
        if group.sliding_window is None or any(self.layers[i].record_past for i in group.layers):
            return
        for seq in group.sequences:
            group.paged.slide(seq, group.sliding_window)

    # --- crop and selection ------------------------------------------------------------------------------------------

    def crop(self, columns: int) -> None:
        """Keeps so many columns of all sequences; where one cannot be cropped, an error, and all are as they were."""
        self.whole(lambda: self._crop(columns))

    def _crop(self, columns: int) -> None:
        removed = [self.columns_begun - columns] * max(0, self.batch_size)
        if self.padding_mask is not None:
            removed = [int(count) for count in self.padding_mask[:, columns:].sum(1)]
        for group in self.groups:
            for seq, count in zip(group.sequences, removed, strict=True):
                group.paged.check_crop(seq, seq.length - count)
        if any(removed):
            self.token_ids = None
        for group in self.groups:
            for seq, count in zip(group.sequences, removed, strict=True):
                group.paged.crop(seq, seq.length - count)
                if group.sliding_window is not None:
                    group.paged.slide(seq, group.sliding_window)
        if self.told_ids is not None and self.groups and len(self.told_ids) == self.batch_size:
            self.told_ids = [told[:length] for told, length in zip(self.told_ids, self.lengths, strict=True)]
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[:, :columns]
        self.set_columns(columns)

    def select(self, order: Sequence[int]) -> None:
        """The batch becomes the sequences at these indices; where memory runs out, an error, and it is as it was.

        A sequence that is named again is forked, and shares its pages. Its copy gets the overlay row of a sequence that is not
        named, if there is one.
        """
        self.whole(lambda: self._select(order))

    def _select(self, order: Sequence[int]) -> None:
        if not order or min(order) < 0 or max(order) >= self.batch_size:
            raise ValueError(
                f"indices must name at least one of {self.batch_size} sequences, got {list(order)}; "
                "reset() forgets all of them"
            )
        first = {source: place for place, source in reversed(list(enumerate(order)))}
        again = [place for place, source in enumerate(order) if first[source] != place]
        unused = [i for i in range(self.batch_size) if i not in first]
        more = max(0, len(again) - len(unused))
        for group in self.groups:
            group.paged.reserve(0, more)
            copies = {place: group.paged.fork(group.sequences[order[place]]) for place in again[:more]}
            for place, i in zip(again[more:], unused, strict=False):
                copies[place] = group.sequences[i]
                group.paged.mirror(group.sequences[i], group.sequences[order[place]])
            for i in unused[len(again) - more :]:
                group.paged.free(group.sequences[i])
            group.sequences = [copies.get(place, group.sequences[source]) for place, source in enumerate(order)]
        self.token_ids = None
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[list(order)]
        if self.told_ids is not None:
            whole = len(self.told_ids) == self.batch_size
            self.told_ids = [self.told_ids[i] for i in order] if whole else None
        self.batch_size = len(order)
