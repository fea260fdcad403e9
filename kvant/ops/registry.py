"""Implementations of the operations: each registers itself, one is chosen when a cache is made, none is taken in silence."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from kvant.layout import Layout

Op = Literal["append", "decode", "prefill"]
OPS: tuple[Op, ...] = ("append", "decode", "prefill")
NOT_BUILT = "its compiled part"  # in a refusal: something is wrong with the installation, not with the layout
Refusal = Callable[[Layout, torch.device], str | None]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operation, chosen when a cache is made."""

    op: Op
    name: str
    run: Callable[..., Any]
    refuse: Refusal  # why it cannot serve a layout on a device, or None
    rank: int  # higher is tried first
    checks: bool = False  # whether an append takes `limit`, and says False where a number is beyond it
    capturable: bool = (
        False  # whether it can run in a CUDA graph: shapes and addresses alone decide, nothing waits for the GPU
    )
    about: str = ""  # what a user should know of it, such as which of its ways a call takes
    in_place: bool = False  # whether a decode takes `out` and `after_append`


class SlowReference(UserWarning):
    """A recipe's operation is done by the plain reference. `short` is the same for all operations of a recipe, for those who
    show it once."""

    def __init__(self, text: str, recipe: str = "", device: str = "") -> None:
        super().__init__(text)
        self.short = (
            f"recipe {recipe} runs on the slow reference on {device}: kvant doctor --recipe {recipe} says why, kvant recipes "
            "lists what is fast"
        )


class IncompleteInstallation(SlowReference, RuntimeWarning):
    """The reference is taken because something is missing that an installation should have."""

    def __init__(self, text: str, recipe: str = "", device: str = "") -> None:
        super().__init__(text, recipe, device)
        self.short = (
            "the compiled operations are missing, so that everything is slow: kvant doctor says how to get them"
        )


_FOUND: dict[tuple[Op, str], Implementation] = {}


def register(
    op: Op,
    name: str,
    refuse: Refusal,
    rank: int,
    checks: bool = False,
    capturable: bool = False,
    about: str = "",
    in_place: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that offers a function as an implementation of an operation."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        if (op, name) in _FOUND:
            raise TypeError(f"two implementations of {op} are called {name}")
        _FOUND[op, name] = Implementation(op, name, run, refuse, rank, checks, capturable, about, in_place)
        return run

    return add


def register_decode(
    name: str, refuse: Refusal, rank: int, capturable: bool = False, in_place: bool = False
) -> Callable[[Callable[..., tuple[torch.Tensor, torch.Tensor]]], Callable[..., torch.Tensor]]:
    """Offers a function that returns the outputs and the log-sum-exp of every query's logits, float32 [sequences, query heads],
    as an implementation of decode: `decode = register_decode(...)(decode_with_lse)` is the operation, which returns the
    outputs alone."""

    def add(run: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        @functools.wraps(run)
        def decode(*args: Any, **options: Any) -> torch.Tensor:
            return run(*args, **options)[0]

        register("decode", name, refuse, rank, capturable=capturable, in_place=in_place)(decode)
        return decode

    return add


def implementations(op: Op) -> list[Implementation]:
    """All implementations of an operation, best first."""
    return sorted((i for i in _FOUND.values() if i.op == op), key=lambda i: -i.rank)


def choose(op: Op, layout: Layout, device: torch.device | str, name: str | None = None) -> Implementation:
    """The best implementation that serves a layout on a device, or the one of that name; refusals are listed. On a GPU,
    and on a CPU where an installation lacks what it should have, the plain reference is not taken without a word."""
    device = torch.device(device)
    candidates = [i for i in implementations(op) if name in (None, i.name)]
    if not candidates:
        known = ", ".join(i.name for i in implementations(op))
        raise ValueError(f"unknown implementation {name!r} of {op}; known: {known}")
    refusals: list[str] = []
    for candidate in candidates:
        reason = candidate.refuse(layout, device)
        if reason is None:
            incomplete = any(NOT_BUILT in refusal for refusal in refusals)
            if name is None and candidate.rank == 0 and refusals and (device.type != "cpu" or incomplete):
                text = (
                    f"{op} of recipe {layout.recipe.name} on {device} is the plain torch reference, which is slow: "
                    f"{'; '.join(_telling(refusals, device))} (implementation='{candidate.name}' takes it in silence)"
                )
                told = SlowReference(text, layout.recipe.name, str(device))
                warnings.warn(IncompleteInstallation(text) if incomplete else told, stacklevel=2)
            return candidate
        refusals.append(f"{candidate.name}: {reason}")
    raise ValueError(f"nothing can {op} recipe {layout.recipe.name} on {device}: {'; '.join(refusals)}")


def _telling(refusals: list[str], device: torch.device) -> list[str]:
    """Of the reasons, those that are not about the kind of device; all where there are no others."""
    other = "CUDA devices" if device.type == "cpu" else "CPU"
    return [reason for reason in refusals if other not in reason] or refusals


def explain(op: Op, layout: Layout, device: torch.device | str) -> tuple[str | None, dict[str, str]]:
    """The implementation that is taken where none is named, or None; and why each better one, by name, cannot serve."""
    refusals: dict[str, str] = {}
    for candidate in implementations(op):
        reason = candidate.refuse(layout, torch.device(device))
        if reason is None:
            return candidate.name, refusals
        refusals[candidate.name] = reason
    return None, refusals
