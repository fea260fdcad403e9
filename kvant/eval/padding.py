"""Rows of token ids of different lengths as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Tensor = torch.Tensor


def pad_rows(
    rows: Sequence[Sequence[int]], pad: int, side: Literal["left", "right"], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows as int64 [rows, columns], and which columns are tokens, bool [rows, columns]."""
    columns = max(map(len, rows))
    ids = torch.full((len(rows), columns), pad, dtype=torch.int64)
    mask = torch.zeros(len(rows), columns, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        part = slice(columns - len(tokens), columns) if side == "left" else slice(len(tokens))
        ids[row, part], mask[row, part] = torch.tensor(tokens, dtype=torch.int64), True
    return ids.to(device), mask.to(device)
