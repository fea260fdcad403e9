"""An interrupt (Ctrl-C) at every place of an operation: KeyboardInterrupt from a trace function, before the n-th line, or before the
n-th instruction, that it runs in kvant's own modules.

None comes while a `with` statement is left: CPython raises what a signal asks for after calls, at the start of functions and at jumps
back, so never between the last call of the block and that of the lock's `__exit__`. The first place after that is tried.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import kvant
from kvant.cache.journal import Journal

PACKAGE = str(Path(kvant.__file__).parent)


@functools.cache
def leaving(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that leave a `with` statement without an error, up to the call of `__exit__`: they push None three
    times."""
    found: set[int] = set()
    instructions = list(dis.get_instructions(code))
    for i in range(len(instructions) - 3):
        if all((each.opname, each.argval) == ("LOAD_CONST", None) for each in instructions[i : i + 3]):
            end = next(j for j in range(i, len(instructions)) if instructions[j].opname == "CALL")
            start = i - (instructions[i - 1].opname == "SWAP")
            found.update(each.offset for each in instructions[start : end + 1])
    return frozenset(found)


class Interrupt:
    """As a context manager: KeyboardInterrupt before the `number`-th line (`instructions`: instruction), counted from 1. `again`: once
    more at the so many-th line of what takes the operation back. `places` says where it came."""

    def __init__(self, number: int, again: int | None = None, instructions: bool = False) -> None:
        self.left = [number] if again is None else [number, again]
        self.event = "opcode" if instructions else "line"
        self.count = 0
        self.places: list[str] = []

    def __enter__(self) -> Interrupt:
        self.patch = pytest.MonkeyPatch()
        if len(self.left) > 1:
            for owner, name in ((Journal, "take_back"), (kvant.Cache, "abort")):
                self.patch.setattr(owner, name, self._resuming(getattr(owner, name)))
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self.patch.undo()

    def _resuming(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that is traced, too, when it runs because of an interrupt: Python drops a trace function that raises."""

        def run(*args: Any) -> Any:
            sys.settrace(self._call)
            return method(*args)

        return run

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.event == "opcode", self.event == "line"
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == self.event and self.left and frame.f_lasti not in leaving(frame.f_code):
            self.count += 1
            if self.count == self.left[0]:
                self.left, self.count = self.left[1:], 0
                self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
                raise KeyboardInterrupt
        return self._step


def interrupted(
    make: Callable[[], Any], operation: Callable[[Any], Any], first: int = 1, stride: int = 1, **options: Any
) -> Iterator[tuple[Any, str]]:
    """What `make` makes, after an operation on it was interrupted: at its first line, its second, and so on to its last."""
    number = first
    while True:
        subject, interrupt = make(), Interrupt(number, **options)
        try:
            with interrupt:
                operation(subject)
        except KeyboardInterrupt:
            pass
        if not interrupt.places:
            return
        yield subject, f"{number}: {' and '.join(interrupt.places)}"
        number += stride


def is_free(lock: Any) -> bool:
    """Whether another thread gets a lock."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(timeout=1))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]
