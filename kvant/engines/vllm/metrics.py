"""What kvant counts in a worker, for Prometheus, and what it logs once.

The counters are in the registry of the worker's process. vLLM's /metrics has them where PROMETHEUS_MULTIPROC_DIR names a directory
that its processes share, or where the engine runs in the process that is asked."""

from __future__ import annotations

import functools

from prometheus_client import Counter
from vllm.logger import init_logger

from kvant.serving.overlay import Missed, OverlayRows

logger = init_logger("vllm.kvant")
COUNTERS = {
    "dropped": (
        "kvant_sinks_dropped",
        "Cached first pages whose exact sinks were given up because there are too few sink rows",
    ),
    "packed": ("kvant_sinks_packed", "Sequences that began to read their sinks from their packed page"),
}


@functools.cache
def counter(field: str) -> Counter:
    """The counter of a field of Missed, one in a process."""
    return Counter(*COUNTERS[field])


class MissedSinks:
    """Passes on what a group of layers could not keep."""

    def __init__(self) -> None:
        self.last = Missed(0, 0)
        for field in Missed._fields:
            counter(field)

    def report(self, overlay: OverlayRows) -> None:
        """Counts and logs what is new since the last call. On a GPU, that is what an earlier step has found: nothing waits."""
        now = overlay.missed
        if now == self.last:
            return
        for field, new, old in zip(Missed._fields, now, self.last, strict=True):
            if new > old:
                counter(field).inc(new - old)
        if not self.last.dropped and now.dropped:
            logger.warning_once(
                "kvant has run out of the %d sink rows of recipe %s: sinks of cached first pages are given up, and a later prefix "
                "hit there reads them packed. Give more (sink_rows of additional_config); %s counts them.",
                overlay.sink_rows,
                overlay.layout.recipe.name,
                COUNTERS["dropped"][0],
            )
        if not self.last.packed and now.packed:
            logger.warning_once(
                "kvant reads the first tokens of a sequence of recipe %s packed, not exactly: its prefix is cached, and its sinks "
                "were not kept; %s counts such sequences.",
                overlay.layout.recipe.name,
                COUNTERS["packed"][0],
            )
        self.last = now
