"""Ownership of a cache by a thread.

A generation is many calls (forward passes, crops, selections of beams) and the cache does not see where it
ends: another thread that called it in between would continue the first one's sequences. So a cache belongs to the thread that
wrote its current sequences, until that thread releases it or ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

R = TypeVar("R")


class Ownership:
    """Ownership of one cache. `claim` takes it for the calling thread, or raises with the owner's name."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None  # not its id, which may be reused after the thread has ended
        # of `generation`, which holds the cache from start to finish. Whether it runs is asked of the thread's stack: a flag would
        # stay set where an interrupt ends it
        self._frame: FrameType | None = None

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that owns the cache; None where it is free."""
        thread = self._thread
        try:
            return thread if thread is not None and thread.is_alive() else None
        except RuntimeError:  # Python 3.13 raises this for a foreign thread that has ended
            return None

    def claim(self) -> bool:
        """Takes the cache for this thread; returns whether it was free. RuntimeError where another living thread owns it."""
        me = threading.current_thread()
        if self._thread is me:  # no other thread changes this while its owner lives
            return False
        with self._guard:
            owner = self.thread
            if owner is not None:
                raise RuntimeError(
                    f"this cache is in use by another thread: it belongs to {owner.name!r}, which is alive, and its sequences "
                    "must not be continued or forgotten by others. Make a cache for every thread, or hand this one over: it "
                    "is free when cache.generate returns, after finish() or reset() in that thread, or when that thread ends"
                )
            self._thread, self._frame = me, None
            return True

    @property
    def _generating(self) -> bool:
        """Whether this thread, which owns the cache, is inside of `generation`."""
        frame = None if self._frame is None else sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def release(self) -> None:
        """Releases the cache if this thread owns it. Inside `cache.generate` it has no effect."""
        with self._guard:
            if self._thread is threading.current_thread() and not self._generating:
                self._thread = None

    @contextlib.contextmanager
    def claimed(self, keep: bool = False, within: bool = False) -> Iterator[None]:
        """One operation on the cache. A cache that was free is free again afterwards, unless `keep`: then it belongs to this
        thread where the operation succeeded. `within`: transformers does this as part of a generation."""
        fresh = self.claim()
        if self._generating and not within:
            raise RuntimeError(
                "a generation from this cache is under way (cache.generate): it has the cache until it returns; "
                "use another cache"
            )
        try:
            yield
        except BaseException:
            if fresh:
                self.release()
            raise
        if fresh and not keep:
            self.release()

    def generation(self, run: Callable[[], R]) -> R:
        """Runs a whole generation: the cache belongs to this thread until it ends, and is free afterwards."""
        try:
            with self.claimed(keep=True):
                self._frame = sys._getframe()
            return run()
        finally:
            if self._frame is sys._getframe():
                self._frame = None
                self.release()
