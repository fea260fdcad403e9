"""An interrupt (Ctrl-C) at every place of an operation where Python could raise it.

`Interrupt` raises KeyboardInterrupt from a trace function, before the n-th line, or before the n-th instruction, that an operation
runs in kvant's own modules. It never raises while a `with` statement is left: CPython handles signals after calls, at the start of
functions and at jumps back, so between the last call of the block and that of the lock's `__exit__` it never does. The first place
after that is one of those that are tried.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvant

PACKAGE = str(Path(kvant.__file__).parent)


@functools.cache
def leaving(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that leave a `with` block without an error, up to the call of `__exit__`."""
    found: set[int] = set()
    instructions = list(dis.get_instructions(code))
    for i, each in enumerate(instructions):
        after = instructions[i : i + 5]
        if [(e.opname, e.argval) for e in after[:3]] != [("LOAD_CONST", None)] * 3:
            continue
        if not all(e.opname in ("PRECALL", "CALL") for e in after[3 : 3 + sum(e.opname == "PRECALL" for e in after) + 1]):
            continue
        found.update(e.offset for e in after if e.opname in ("LOAD_CONST", "PRECALL", "CALL"))
        if i and instructions[i - 1].opname == "SWAP":
            found.add(instructions[i - 1].offset)
    return frozenset(found)


class Interrupt:
    """As a context manager: KeyboardInterrupt before the `number`-th line (with `instructions`: before the n-th instruction), counted
    from 1; with `again`, once more so many lines after the first. `count` are those that were reached; `places` where it came."""

    def __init__(self, number: int, instructions: bool = False, again: int | None = None) -> None:
        self.number, self.instructions, self.again = number, instructions, again
        self.count = 0
        self.places: list[str] = []

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    @property
    def raised(self) -> bool:
        return bool(self.places)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.instructions, not self.instructions
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != ("opcode" if self.instructions else "line") or frame.f_lasti in leaving(frame.f_code):
            return self._line
        self.count += 1
        if self.count in (self.number, self.number + (self.again or 0)):
            self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
            # a trace function that raises is removed
            if self.again and len(self.places) == 1:
                self._resume(frame)
            raise KeyboardInterrupt
        return self._line

    def _resume(self, frame: FrameType) -> None: ...


def interrupts(
    operation: Callable[[Any], Any], make: Callable[[], Any], stride: int = 1, first: int = 1, **options: Any
) -> Iterator[tuple[Any, Interrupt]]:
    """What `make` makes, after an operation on it was interrupted at the first line, the second, and so on to the last."""
    number = first
    while True:
        subject = make()
        interrupt = Interrupt(number, **options)
        try:
            with interrupt:
                operation(subject)
        except KeyboardInterrupt:
            pass
        if not interrupt.raised:
            return
        yield subject, interrupt
        number += stride
