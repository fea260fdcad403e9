"""Operations that are done whole or not at all, whatever ends them: an error of ours, memory that runs out, an interrupt (Ctrl-C).

An operation notes a value in its journal before it changes it, and is done by one assignment, `Journal.done = True`. Where it is not
done, what was noted is put back. That can be repeated: where an interrupt ends it, the next operation does it again.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

R = TypeVar("R")


class Journaled(Protocol):
    """What has operations that are done whole or not at all: a PagedCache."""

    journal: Journal

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def begin(self, journal: Journal) -> None:
        """An operation begins: notes what any operation may change."""

    def recount(self) -> None:
        """Computes again what follows from the rest: after an operation that was taken back."""


class Journal:
    """What one operation has changed, in one or several caches."""

    def __init__(self, caches: Sequence[Journaled] = ()) -> None:
        self.done = False
        self._caches = caches
        self._values: list[tuple[Any, str, Any]] = []
        self._rows: list[tuple[MutableMapping[Any, torch.Tensor], Any, Any, torch.Tensor]] = []

    def note(self, holder: Any, *names: str) -> None:
        """Attributes that are about to be set. Lists and dictionaries are replaced, not changed in place."""
        if self.done:  # no operation is under way
            return
        self._values += [(holder, name, getattr(holder, name)) for name in names]

    def note_rows(self, tensors: MutableMapping[Any, torch.Tensor], at: Any) -> None:
        """Rows of tensors that are about to be written."""
        if self.done:
            return
        self._rows += [(tensors, name, at, tensor[at].clone()) for name, tensor in tensors.items()]

    def take_back(self) -> None:
        """Puts back what was noted, unless the operation is done."""
        if self.done:
            return
        for holder, attribute, value in reversed(self._values):
            setattr(holder, attribute, value)
        for tensors, name, at, rows in reversed(self._rows):
            tensors[name][at] = rows
        for cache in self._caches:
            cache.recount()
        self.done = True


def nothing() -> Journal:
    """The journal of no operation: there is nothing to be taken back."""
    journal = Journal()
    journal.done = True
    return journal


def whole(caches: Sequence[Journaled], operation: Callable[[Journal], R]) -> R:
    """Runs an operation on caches, whose locks it holds, whole or not at all. Operations on one of them within it are part of it."""
    return _locked(caches, lambda: _run(caches, operation))


def _locked(caches: Sequence[Journaled], operation: Callable[[], R]) -> R:
    if not caches:
        return operation()
    with caches[0].lock:
        return _locked(caches[1:], operation)


def _run(caches: Sequence[Journaled], operation: Callable[[Journal], R]) -> R:
    for cache in caches:
        cache.journal.take_back()  # an operation whose end was interrupted twice
    journal = Journal(caches)
    try:
        for cache in caches:
            cache.journal = journal
            cache.begin(journal)
        result = operation(journal)
        journal.done = True
    except BaseException:
        journal.take_back()
        raise
    return result
