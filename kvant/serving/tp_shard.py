"""The KV heads of one rank of a tensor-parallel model, and their part of a calibration artifact."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensor = torch.Tensor


def shard_heads(total: int, world: int, rank: int) -> range:
    """KV heads of a rank. Where there are more ranks than heads, several ranks hold the same one."""
    if total >= world:
        if total % world:
            raise ValueError(f"{total} KV heads cannot be shared by {world} ranks")
        return range(rank * total // world, (rank + 1) * total // world)
    if world % total:
        raise ValueError(f"{world} ranks cannot share {total} KV heads")
    return range(rank * total // world, rank * total // world + 1)


def shard_tensors(tensors: Mapping[str, Tensor], total: int, heads: range) -> dict[str, Tensor]:
    """A layer's calibrated tensors for some of its heads. A tensor is a scalar or vector for all heads, or has one row for all of
    them, or one row for each: [heads, ...]."""
    out = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or len(tensor) == 1:
            out[name] = tensor
        elif len(tensor) == total:
            out[name] = tensor[heads.start : heads.stop]
        else:
            raise ValueError(
                f"{name} of the artifact has {len(tensor)} rows, expected 1 or one for each of {total} heads"
            )
    return out
