"""A batch that grows by one token a step, described by tensors at fixed addresses: a CUDA graph can replay its steps."""

from __future__ import annotations

from collections import abc
from typing import Any

import torch

from kvant.cache.finite import NotFinite
from kvant.cache.paged import PagedCache
from kvant.cache.sequence import Sequence
from kvant.layout import Layout

Tensor = torch.Tensor


def refuse(layout: Layout) -> str | None:
    """Why sequences of a layout cannot grow on the device alone, or None."""
    if any(stream.codec.ranked for stream in layout.recipe.streams.values()):
        return f"recipe {layout.recipe.name} learns from queries on the host"
    return None


class StaticBatch:
    """Some sequences of a cache, extended by a number of steps at once. Where pages or memory run out (PoolFull, or torch's error),
    none is extended.

    The tensors of `batch` stay at their addresses; `advance` updates them for one more token of every sequence, by operations
    on the device alone. Until `close` is called with the number of steps that were done, the sequences are as long as after all
    steps, and nothing else may be done with the cache: a pool that grows would move the pages.
    """

    def __init__(self, cache: PagedCache, sequences: abc.Sequence[Sequence], steps: int) -> None:
        reason = refuse(cache.layout)
        if reason is not None:
            raise ValueError(reason)
        if steps < 1:
            raise ValueError(f"steps must be positive, got {steps}")
        self.cache, self.sequences, self.steps = cache, list(sequences), steps
        self.before = [seq.length for seq in self.sequences]
        count = len(self.sequences)
        cache.whole(lambda: self._open(count))

    @torch.inference_mode(False)
    def _open(self, count: int) -> None:
        cache, steps = self.cache, self.steps
        room = cache.extend(self.sequences, [steps] * count)
        self._slots = room.slot_mapping.view(count, steps).T.contiguous()  # [steps, sequences]
        self._sinks = room.sinks.clone()  # sinks of every sequence after all steps
        self._step = torch.full((1,), -1, dtype=torch.int64, device=cache.device)
        seq_lens = torch.tensor(self.before, dtype=torch.int64, device=cache.device)
        query_start_loc = torch.arange(count + 1, device=cache.device)
        slot_mapping, sinks = torch.zeros_like(seq_lens), torch.minimum(room.sinks, seq_lens)
        self.batch = room._replace(
            seq_lens=seq_lens, slot_mapping=slot_mapping, query_start_loc=query_start_loc, sinks=sinks
        )
        shape = len(cache.stores), count
        # largest magnitude that the last step appended, [layers, sequences]
        self.worst = torch.zeros(shape, dtype=torch.float32, device=cache.device)

    def advance(self) -> None:
        """Moves `batch` on by one token of every sequence."""
        self._step.add_(1)
        self.batch.seq_lens.add_(1)
        self.batch.slot_mapping.copy_(self._slots.index_select(0, self._step)[0])
        torch.minimum(self._sinks, self.batch.seq_lens, out=self.batch.sinks)

    def append(self, layer: int, key: Tensor, value: Tensor, query: Tensor | None = None) -> None:
        """Writes the new token of every sequence: key and value [sequences, heads, head_dim], query [sequences, query heads,
        head_dim] where the recipe learns from queries."""
        if self.cache.check:
            torch.maximum(key.abs().amax((1, 2)), value.abs().amax((1, 2)), out=self.worst[layer])
        options = {}
        if self.cache.wants_queries:
            assert query is not None
            # a step may be taken back; what a corrector has learnt is not
            options["query"] = torch.nan_to_num(query, 0.0, 0.0, 0.0) if self.cache.check else query
        self.cache.ops_of[layer]["append"].run(self.cache.stores[layer], key, value, self.batch, **options)

    def decode(self, layer: int, query: Tensor, **options: Any) -> Tensor:
        return self.cache.ops_of[layer]["decode"].run(self.cache.stores[layer], query, self.batch, **options)

    def check(self) -> None:
        """Raises NotFinite where the last step appended a number beyond the limit. Waits for the device."""
        limit = self.cache.largest
        if not self.cache.check or bool((self.worst <= limit).all()):  # false for NaN too
            return
        layer, row = (~(self.worst <= limit)).nonzero()[0].tolist()
        token, number = int(self.batch.seq_lens[row]) - 1, float(self.worst[layer, row])
        raise NotFinite(self.cache.numbers[layer], "key or value", row, token, number, limit)

    def close(self, kept: int, written: int | None = None) -> None:
        """Ends the batch: the sequences have `kept` new tokens. `written` (by default as many) steps have written to the overlays;
        what those beyond `kept` wrote is rolled back."""
        self.cache.whole(lambda: self._close(kept, kept if written is None else written))

    def _close(self, kept: int, written: int) -> None:
        for seq, before in zip(self.sequences, self.before, strict=True):
            self.cache.retract(seq, before + written)
            if written > kept:
                self.cache.rollback(seq, before + kept, range(len(self.cache.stores)))
