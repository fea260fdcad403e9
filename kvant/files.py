"""Files that are there whole or not at all, and where those that nobody asked for are kept."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """Where fetched models, kept artifacts and compiled kernels live."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvant"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes the target when all is written and on the disk; until then, and where anything
    fails, what was there before stays."""
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, target)
        _flush(target.resolve().parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    """Makes sure that a file, or a directory's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
