"""Arrival counters: by them the last CTA that works on a (sequence, head tile) knows that it merges the partial results. They are
zero before and after every launch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

Tensor = torch.Tensor
POOL = 1 << 20  # counters for calls that are captured in graphs
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
_POOLS: dict[torch.device, _Pool] = {}
_SHARED: list[Tensor] = []  # counters of the graph that is being captured, if it brings its own


@dataclasses.dataclass
class _Pool:
    zeros: Tensor
    taken: int = 0


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros, int32 [at least `count`], that the kernel leaves zero. Each CUDA stream has its own, since kernels of two streams may
    run at once. A call that is captured in a graph gets a part of the pool for itself, which is never given back: zeroing
    counters in the graph would take as long as a short attention."""
    pool = _POOLS.get(device)
    if torch.cuda.is_current_stream_capturing():
        if _SHARED and len(_SHARED[-1]) >= count and _SHARED[-1].device == device:
            return _SHARED[-1][:count]
        if pool is None or pool.taken + count > len(pool.zeros):
            return torch.zeros(count, dtype=torch.int32, device=device)  # zeroed by a launch in the graph
        pool.taken += count
        return pool.zeros[pool.taken - count : pool.taken]
    if pool is None:
        _POOLS[device] = _Pool(torch.zeros(POOL, dtype=torch.int32, device=device))
    key = device, torch.cuda.current_stream(device).cuda_stream
    found = _COUNTERS.get(key)
    if found is None or len(found) < count:
        found = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        _COUNTERS[key] = found
    return found


@contextlib.contextmanager
def sharing_counters(zeros: Tensor) -> Iterator[None]:
    """Calls that are captured in here, one after another in one graph, use these zeros, which must live as long as it does."""
    _SHARED.append(zeros)
    try:
        yield
    finally:
        _SHARED.pop()
