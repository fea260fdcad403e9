"""Which thread a cache belongs to, and for how long.

A generation is many calls (forward passes, crops, selections of beams) and a cache sees no end of it: whoever came in
between would go on with another's sequences. So a cache belongs to the thread that wrote the sequences at hand, until that
thread gives it up or ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Ownership:
    """Of one cache. `claim` takes it for the calling thread, or says whose it is."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None  # not its number, which another thread may get after it has ended
        self._generating = False  # inside of `cache.generate`, which holds the cache from start to finish

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that has the cache; None where any may take it."""
        thread = self._thread
        try:
            return thread if thread is not None and thread.is_alive() else None
        except RuntimeError:  # what Python 3.13 says of a thread that was not started by it, and has ended
            return None

    def claim(self) -> bool:
        """Takes the cache for this thread, and says whether it was free. RuntimeError where a living thread has it."""
        me = threading.current_thread()
        with self._guard:
            owner = self.thread
            if owner is me:
                return False
            if owner is not None:
                raise RuntimeError(
                    f"this cache is in use by another thread: it belongs to {owner.name!r}, which is alive, and its sequences "
                    "must not be continued or forgotten by others. Make a cache for every thread, or hand this one over: it "
                    "is free when cache.generate returns, after finish() or reset() in that thread, or when that thread ends"
                )
            self._thread, self._generating = me, False
            return True

    def release(self) -> None:
        """Gives up what this thread has: any may take the cache. Inside of `cache.generate` it stays where it is."""
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

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """A whole generation: the cache belongs to this thread until it ends, and to nobody afterwards."""
        with self.claimed(keep=True):
            self._generating = True
        try:
            yield
        finally:
            self._generating = False
            self.release()
