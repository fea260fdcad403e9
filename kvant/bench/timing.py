"""Medians of repeated runs: CUDA events around replays of a graph, or a clock on a CPU.

On a CPU the runs of everything that is compared alternate, so that other load on the machine affects all of it alike. A run is
disturbed if a thread of ours waited for a core that another process had. Disturbed runs are repeated, up to PATIENCE times the
wanted number of runs. They are left out if everything that is compared has enough undisturbed runs.
"""

from __future__ import annotations

import dataclasses
import glob
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]
L2_FACTOR = 4  # the buffers that calls cycle through are together this many times the L2 cache
PATIENCE = 4  # at most this many times the wanted runs are made to get undisturbed ones
HOPELESS = 10.0  # a baseline that is so many times slower than the fastest one is not measured
DISTURBED = 0.02  # a run is disturbed if threads waited for a core for more than this share of it


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call: the median of the runs that count, and the quartiles around it."""

    median: float
    low: float
    high: float
    runs: int = 0  # runs that are counted
    disturbed: int = 0  # disturbed runs, counted or not

    @staticmethod
    def of(runs: Sequence[float], disturbed: int = 0) -> Times:
        if len(runs) == 1:
            return Times(runs[0], runs[0], runs[0], 1, disturbed)
        low, median, high = statistics.quantiles(runs, n=4, method="inclusive")
        return Times(median, low, high, len(runs), disturbed)


Run = tuple[float, float]  # seconds, and seconds that threads waited for a core during it


def quiet(runs: Sequence[Run]) -> list[float]:
    """The runs that were not disturbed."""
    return [seconds for seconds, waited in runs if waited <= DISTURBED * seconds]


def compared(runs: Mapping[str, Sequence[Run]]) -> dict[str, Times]:
    """Times of calls whose runs alternated: from undisturbed runs if every call has some, otherwise from all runs, so that all
    calls are treated alike."""
    enough = all(len(quiet(found)) >= min(3, len(found)) for found in runs.values())
    return {
        name: Times.of(quiet(found) if enough else [s for s, _ in found], len(found) - len(quiet(found)))
        for name, found in runs.items()
    }


def waiting() -> float:
    """Seconds that the threads of this process have waited for a core, summed (Linux schedstat); 0 where it is not available."""
    total = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        try:
            with open(path) as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):  # the thread has just ended
            continue
    return total / 1e9


def timed(call: Call) -> Run:
    """Seconds of one run on a CPU, and seconds that threads waited for a core during it."""
    before = waiting()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, waiting() - before


def hopeless(calls: Mapping[str, Call], times: float = HOPELESS) -> dict[str, float]:
    """Calls that are so many times slower than the fastest, on a CPU, and by how much. Each has run before and is tried once, the
    fastest three times: a slow run of it would let others pass. What seems slow is tried a second time if the first was disturbed:
    another process had the core. The time that threads waited for it does not count then: on a busy machine no fast baseline may
    be left out."""
    runs = {name: timed(call) for name, call in calls.items()}
    seconds = {name: took for name, (took, _) in runs.items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    best = min(seconds[fastest], *(timed(calls[fastest])[0] for _ in range(2)))
    for name in [name for name, took in seconds.items() if took >= times * best and not quiet([runs[name]])]:
        seconds[name] = min(took - waited for took, waited in (runs[name], timed(calls[name])))
    return {name: took / best for name, took in seconds.items() if took >= times * best}


def in_turn(calls: Mapping[str, Call], repeat: int) -> dict[str, Times]:
    """Times on a CPU of several calls, whose runs alternate, after one untimed run of each."""
    for call in calls.values():
        call()
    runs: dict[str, list[Run]] = {name: [] for name in calls}
    rounds = 0
    while rounds < repeat or (
        rounds < PATIENCE * repeat and any(len(quiet(found)) < repeat for found in runs.values())
    ):
        for name, call in calls.items():
            runs[name].append(timed(call))
        rounds += 1
    return compared(runs)


def all_times(
    calls: Mapping[str, Sequence[Call]], device: torch.device, repeat: int = 20, graph: bool = True
) -> dict[str, Times]:
    """Times of several things, each given as calls that do the same work on different memory. On a CPU their runs alternate; on a
    GPU, which no other process uses, they are timed one after another."""
    if device.type == "cuda":
        return {name: cuda_times(each, device, repeat, graph) for name, each in calls.items()}
    return in_turn({name: each[0] for name, each in calls.items()}, repeat)


def buffer_bytes(device: torch.device) -> int:
    """Bytes that calls have to read before the first memory is read again, so that it is no longer in the L2 cache."""
    if device.type != "cuda":
        return 0
    return L2_FACTOR * int(torch.cuda.get_device_properties(device).L2_cache_size)


def cuda_times(calls: Sequence[Call], device: torch.device, repeat: int = 20, graph: bool = True) -> Times:
    """Seconds of one call on a GPU. All calls are captured in one CUDA graph, so that launches cost no time of the host; a call
    that cannot be captured raises. Without `graph` calls are launched one by one, which is accurate enough for long ones."""
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

    replay: Call = each
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
    return Times.of(times)
