"""Medians of repeated runs: CUDA events around replays of a graph, or a clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

L2_FACTOR = 4  # buffers that are used in turn are this many times the L2 cache


def buffer_bytes(device: torch.device) -> int:
    """Bytes that calls in turn have to touch before one comes back to what it has read."""
    if device.type != "cuda":
        return 0
    return L2_FACTOR * int(torch.cuda.get_device_properties(device).L2_cache_size)


def median_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, repeat: int = 20, graph: bool = True
) -> float:
    """Seconds of one call. `calls` do the same work on different memory and are run one after another.

    On a GPU all of them are captured in one graph, so that the time between launches is the GPU's own; what cannot be
    captured raises. Without `graph` they are launched one by one, which does for long ones.
    """
    if device.type != "cuda":
        calls[0]()
        times = []
        for i in range(max(3, min(repeat, 5))):
            start = time.perf_counter()
            calls[i % len(calls)]()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    calls = list(calls) * max(1, -(-8 // len(calls)))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)

    def each() -> None:
        for call in calls:
            call()

    replay: Callable[[], object] = each
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            each()
        replay = captured.replay
    for _ in range(3):
        replay()
    times = []
    for _ in range(repeat):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / len(calls))
    return statistics.median(times)
