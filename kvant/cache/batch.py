"""Describes a batch of sequences for operations: a PagedBatch of tensors on the device."""

from __future__ import annotations

from collections import abc

import torch

from kvant.cache.sequence import Sequence
from kvant.ops import PagedBatch

Tensor = torch.Tensor


def batch_of(
    sequences: abc.Sequence[Sequence],
    counts: abc.Sequence[int],
    slot_mapping: abc.Sequence[Tensor],
    device: torch.device,
) -> PagedBatch:
    """Sequences whose last `counts` tokens are new, and the slots of each one's new tokens: int64 [count]."""
    table = torch.zeros(len(sequences), max(1, max(len(seq.pages) for seq in sequences)), dtype=torch.int64)
    for row, seq in enumerate(sequences):
        table[row, : len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int64)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    query_start_loc = [0]
    for count in counts:
        query_start_loc.append(query_start_loc[-1] + count)
    slots = torch.cat(list(slot_mapping)) if slot_mapping else torch.zeros(0, dtype=torch.int64)
    return PagedBatch(
        block_table=table.to(device),
        seq_lens=column([seq.length for seq in sequences]),
        slot_mapping=slots.to(device),
        query_start_loc=column(query_start_loc),
        overlay_rows=column([seq.overlay_row for seq in sequences]),
        sinks=column([seq.sinks for seq in sequences]),
        ring_start={
            "key": column([seq.ring_start["key"] for seq in sequences]),
            "value": column([seq.ring_start["value"] for seq in sequences]),
        },
    )
