"""Sets a model's attention implementation to "kvant" while a cache needs it, and restores it afterwards.

Uses are counted per config: several caches may serve one model, and end in any order.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kvant.engines.attention import ATTENTION


@dataclasses.dataclass(eq=False)
class _Loan:
    config: weakref.ref[Any]
    before: str | None
    users: int = 0


_LOANS: dict[int, _Loan] = {}  # by id: configs have no hash
_GUARD = threading.RLock()  # reentrant: a finalizer may run inside a guarded section


def borrow(config: Any) -> Callable[[], None]:
    """Sets the attention implementation of a config, and of its text config, to "kvant". Returns a function that
    undoes this, to be called once. It restores the old one when no other user is left and no one has set another since."""
    parts = {id(part): part for part in (config, config.get_text_config(decoder=True))}
    with _GUARD:
        loans = [_borrow(part) for part in parts.values()]

    def give_back() -> None:
        with _GUARD:
            for loan in loans:
                _give_back(loan)

    return give_back


def _borrow(config: Any) -> _Loan:
    loan = _LOANS.get(id(config))
    if loan is None or loan.config() is not config:  # this id belonged to another config, which was freed
        loan = _LOANS[id(config)] = _Loan(weakref.ref(config), config._attn_implementation)
    if config._attn_implementation != ATTENTION:
        loan.before = config._attn_implementation  # it was set to another one while a cache existed
        _assign(config, ATTENTION)
    loan.users += 1
    return loan


def _give_back(loan: _Loan) -> None:
    loan.users -= 1
    config = loan.config()
    if loan.users:
        return
    for key, each in list(_LOANS.items()):
        if each is loan:
            del _LOANS[key]
    if config is not None and config._attn_implementation == ATTENTION:
        _assign(config, loan.before)


def _assign(config: Any, name: str | None) -> None:
    """Sets it on this config alone: transformers' setter also changes nested configs, which may have others."""
    inner = _nested(config)
    before = [each._attn_implementation for each in inner]
    config._attn_implementation = name
    for each, own in zip(inner, before, strict=True):
        each._attn_implementation = own


def _nested(config: Any) -> list[Any]:
    """Configs within a config, outer ones first."""
    own = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [each for part in own if part is not None for each in (part, *_nested(part))]
