"""Growing the tensors of all layers, or of none."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from kvant.ops import LayerStore

Tensor = torch.Tensor


def grow(stores: Sequence[LayerStore], before: tuple[int, int], after: tuple[int, int]) -> None:
    """Grows the stores from `before` to `after`, each (pages, overlay rows). Where memory runs out, all are as they were.

    Tensors grow one after another, so that at most one of them is there twice at a time. Where one cannot grow, those before it
    shrink again. There is memory for that: each of them grew while its old tensor was still there.
    """
    parts: list[
        tuple[dict[Any, Any], str, int, int]
    ] = []  # (holder, name in it) of a tensor, its rows before and after
    for store in stores:
        parts.append((vars(store), "pages", before[0], after[0]))
        for tensors in (store.overlays, store.states):
            parts += [(tensors, name, before[1], after[1]) for name in tensors]
    try:
        for holder, name, _, rows in parts:
            if len(holder[name]) < rows:
                holder[name] = resized(holder[name], rows)
    except BaseException:
        for holder, name, rows, _ in parts:
            if len(holder[name]) > rows:
                # a tensor that cannot shrink keeps unused rows until the next growth
                with contextlib.suppress(RuntimeError, MemoryError):
                    holder[name] = resized(holder[name], rows)
        raise


@torch.inference_mode(False)
def resized(tensor: Tensor, rows: int) -> Tensor:
    """A copy with so many rows, more or fewer."""
    out = tensor.new_empty(rows, *tensor.shape[1:])
    kept = min(rows, len(tensor))
    out[:kept] = tensor[:kept]
    return out
