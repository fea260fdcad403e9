"""Checkpoints of a calibration, so that a call that was interrupted continues where it stopped.

A checkpoint is one safetensors file in the user's cache directory. Its name is a hash of everything that decides its content.
It is written when the work is interrupted. Fitted layers, which are small, are also written every half minute, in case the
process is killed; sums over the text, which can take hundreds of megabytes, are not. It is removed when the work is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvant.files import cache_dir, directory_for, replacing

Tensor = torch.Tensor
EVERY = 30.0  # seconds between two writes


def directory() -> Path:
    return cache_dir() / "unfinished"


class Checkpoint:
    """One checkpoint file. `decides` is plain data that names it: different data, different file."""

    def __init__(self, kind: str, decides: Any) -> None:
        name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        self.path = directory() / f"{kind}-{name[:32]}.safetensors"
        self.written = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self.written >= EVERY

    def save(self, tensors: dict[str, Tensor]) -> bool:
        """Writes the file atomically. Where it cannot be written, warns and returns False."""
        self.written = time.monotonic()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            with directory_for(self.path.parent), replacing(self.path) as temporary:
                save_file(tensors, temporary, metadata={"digest": _digest(tensors)})
        except OSError as error:
            warnings.warn(f"an unfinished calibration could not be kept in {self.path.parent}: {error}", stacklevel=3)
            return False
        return True

    def load(self) -> dict[str, Tensor]:
        """The stored tensors; empty where there is no file. A damaged file is removed with a warning, and the work starts anew."""
        if not self.path.is_file():
            return {}
        try:
            with safe_open(self.path, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
                if (opened.metadata() or {}).get("digest") != _digest(tensors):
                    raise ValueError("its digest is not that of its tensors")
        except (SafetensorError, ValueError, OSError) as error:
            warnings.warn(
                f"the unfinished calibration in {self.path} cannot be read: {error}; starting anew", stacklevel=3
            )
            self.remove()
            return {}
        return tensors

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # a directory that cannot be written to has no checkpoint
            self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts a Ctrl-C off until the end of the block. It does nothing outside the main thread, which has the interrupts, and where
    another than Python handles them."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked and callable(before):
        before(*asked[0])


class Kept(Protocol):
    """Work that a checkpoint can hold; its str() says how much was done, for messages."""

    @property
    def tensors(self) -> dict[str, Tensor]: ...


class Unfinished:
    """The checkpoints of one calibration, as a context manager. An interrupt (Ctrl-C) writes them all and says what was kept;
    a normal end removes them. Where nothing of its own is held, the interrupt keeps its message."""

    def __init__(self, resume: bool) -> None:
        self.resume = resume
        self.all: list[Checkpoint] = []
        self.held: list[tuple[Checkpoint, Kept]] = []

    def open(self, kind: str, decides: Any) -> Checkpoint | None:
        if not self.resume:
            return None
        self.all.append(Checkpoint(kind, decides))
        return self.all[-1]

    def hold(self, checkpoint: Checkpoint, work: Kept) -> None:
        """Registers work that is written if the calibration is interrupted."""
        self.held.append((checkpoint, work))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            for checkpoint in self.all:
                checkpoint.remove()
        if kind is not KeyboardInterrupt:
            return
        told = []
        for checkpoint, work in self.held:
            tensors = work.tensors
            if tensors and checkpoint.save(tensors):
                told.append(str(work))
        if told:
            raise KeyboardInterrupt(f"kept {' and '.join(told)}; the same command goes on from there") from None


def _digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
