"""Atomic writes, and the directory of kvant's cached files."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

STALE = 24 * 3600  # seconds after which a temporary file is assumed to be abandoned
_TEMPORARY = re.compile(r"\.(?P<name>.+)-[0-9a-f]{16}")
_RUST = re.compile(r"\(os error (\d+)\)")  # how libraries written in Rust end the message of an I/O error


def cache_dir() -> Path:
    """The directory of downloaded models, cached artifacts and compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvant"


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """What fails while a file or directory is written, such as a full disk, becomes one OSError that names it. safetensors and
    tokenizers raise errors of their own, which are none."""
    try:
        yield
    except Exception as error:
        from safetensors import SafetensorError  # late, so that --help is fast

        rust = _RUST.search(str(error))
        if not rust and not isinstance(error, (OSError, SafetensorError)):
            raise
        number = int(rust[1]) if rust else getattr(error, "errno", None)
        failed = OSError(f"cannot write {str(target)!r}: {os.strerror(number) if number else error}")
        failed.errno = number
        raise failed from error


@contextlib.contextmanager
def replacing(target: Path, private: bool = False) -> Iterator[Path]:
    """A temporary path to write to, which is renamed to the target when everything is written and synced. Until then, and
    if anything fails, the target is unchanged; the temporary file is removed, and the error is that of `writing`. The new file has
    the permissions of the one that it replaces, or those that the umask leaves; a private one is its owner's alone. A directory, a
    FIFO or a device is not replaced."""
    check_replaceable(target, "output")
    collect(target.parent, target.name)
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        with writing(target):
            yield temporary
            try:
                mode = stat.S_IMODE(os.stat(target).st_mode)
            except FileNotFoundError:
                mode = 0o666 & ~_umask()  # safetensors writes files that nobody else may read
            os.chmod(temporary, 0o600 if private else mode)
            _flush(temporary)
            os.replace(temporary, target)
            _flush(target.resolve().parent)
    except BaseException:
        with contextlib.suppress(OSError):  # there may be no directory to remove it from
            temporary.unlink()
        raise


@contextlib.contextmanager
def directory_for(path: Path) -> Iterator[None]:
    """Makes a directory and its parents for files that are written to it. If anything fails, an interruption included, those that
    were made here are removed again unless there is something in them."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in missing:  # the innermost first; one that is not empty ends it
                each.rmdir()
        raise


@contextlib.contextmanager
def making_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside the target, which is renamed to the target when everything in it is written and synced. If
    anything fails it is removed. A target that exists is refused, unless it is an empty directory."""
    check_vacant(target, "output")
    with directory_for(target.parent):
        _collect_directories(target)
        temporary = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
        try:
            with writing(target):
                temporary.mkdir()
                yield temporary
                for path in sorted(temporary.rglob("*")):
                    _flush(path)
                _flush(temporary)
                os.rename(temporary, target)
                _flush(target.resolve().parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _umask() -> int:
    """The process's umask: from /proc, or where there is none by setting it, which other threads could notice."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("Umask:")).split()[1], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found


def check_vacant(target: Path, what: str) -> None:
    """Refuses a target for a new directory that is something already."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(target).st_mode
        if not stat.S_ISDIR(mode):
            raise ValueError(f"{what} {str(target)!r}: expected a new directory, got {kind(mode)}")
        if any(os.scandir(target)):
            raise ValueError(f"{what} {str(target)!r}: expected a new or an empty directory; there are files in it")


def _collect_directories(target: Path) -> None:
    """Removes temporary directories of a target that killed processes have left."""
    for path in target.parent.glob(f".{glob.escape(target.name)}-*"):
        found = _TEMPORARY.fullmatch(path.name)
        with contextlib.suppress(OSError):
            about = path.stat(follow_symlinks=False)
            if found is not None and stat.S_ISDIR(about.st_mode) and time.time() - about.st_mtime > STALE:
                shutil.rmtree(path, ignore_errors=True)


def collect(directory: Path, name: str | None = None) -> None:
    """Removes temporary files that killed processes have left in a directory: those of one target, or without a name
    those of all targets, for directories that only kvant writes to."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            found = _TEMPORARY.fullmatch(entry.name)
            if found is None or name not in (None, found["name"]):
                continue
            with contextlib.suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode) and time.time() - about.st_mtime > STALE:
                    os.unlink(entry.path)


def kind(mode: int) -> str:
    """What a path is, in words."""
    for test, words in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return words
    return "a file"


def check_replaceable(target: Path, what: str) -> None:
    """Refuses a target that exists and is not a regular file: a FIFO or a device is not replaced by a file."""
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return  # it does not exist; or it cannot be examined, and then writing will raise the error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{what} {str(target)!r}: expected a file, got {kind(mode)}")


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor of a regular file, to read from. Anything else raises ValueError and never blocks: a FIFO would wait for a
    writer."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | flags)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise ValueError(f"expected a file, got {kind(mode)}")
    return handle


def _flush(path: Path) -> None:
    """fsync of a file or of a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
