"""How far long work is: bars where a person watches a terminal, lines every few seconds where none does.

rich is imported when a bar is first drawn. A `Progress` is called with (stage, done, total); stages come one after another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
EVERY = 5.0  # seconds between two lines


@contextmanager
def default_progress() -> Iterator[Progress]:
    """What shows progress on stderr: rich's bars on a terminal, plain lines elsewhere (a log, a notebook, a pipe)."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, completed=done)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance


class Lines:
    """A line now and then: what is being done, how much of it is done, and about how long the rest will take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, every: float | None = None) -> None:
        self.clock, self.every = clock, EVERY if every is None else every
        self.told = clock()
        self.began: dict[str, tuple[float, int]] = {}  # when a stage was first heard of, and how much was done by then

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self.clock()
        begin, before = self.began.setdefault(stage, (now, done))
        if now - self.told < self.every:
            return
        self.told = now
        left = ""
        if done > before:  # work taken up from an earlier start says nothing of this one's pace
            left = f", {duration((now - begin) / (done - before) * max(0, total - done))} left"
        print(f"kvant: {stage}: {done:,} of {total:,}{left}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """ "about 40 s", "about 3 min", "about 1.5 h"."""
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
