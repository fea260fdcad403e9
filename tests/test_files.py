"""Files that are replaced: their permissions, what killed writers leave behind, and what is no file at all."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from kvant.files import STALE, collect, open_regular, replacing


def test_a_new_file_has_the_permissions_of_the_one_it_replaces(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for mode in (0o600, 0o640, 0o666):
        target.write_text("old")
        target.chmod(mode)
        with replacing(target) as temporary:
            temporary.write_text("new")
        assert target.read_text() == "new" and stat.S_IMODE(target.stat().st_mode) == mode


def test_a_file_that_is_new_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
            os.umask(umask)
            with replacing(tmp_path / str(umask)) as temporary:
                temporary.write_text("new")
                temporary.chmod(0o600)  # as safetensors writes
            assert stat.S_IMODE((tmp_path / str(umask)).stat().st_mode) == mode
    finally:
        os.umask(before)


def test_what_a_killed_writer_left_is_removed_after_a_day(tmp_path: Path) -> None:
    mine, other = ".x-0123456789abcdef", ".y-0123456789abcdef"
    names = [mine, other, ".x-0123456789abcde", "x-0123456789abcdef", ".x-fedcba9876543210"]
    for name in names:
        (tmp_path / name).write_text("half")
        old = time.time() - STALE - 60
        os.utime(tmp_path / name, (old, old))
    os.utime(tmp_path / names[-1])  # its writer may be at work
    with replacing(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert {entry.name for entry in tmp_path.iterdir()} == {"x", *names[1:]}
    collect(tmp_path)  # a directory of kvant's own: of any name
    assert {entry.name for entry in tmp_path.iterdir()} == {"x", *names[2:]}


def test_only_regular_files_are_read_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, words in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a directory"), (Path("/dev/null"), "a device")):
        with pytest.raises(ValueError, match=f"expected a file, got {words}"):
            open_regular(path)
        with pytest.raises(ValueError, match=f"output .*: expected a file, got {words}"), replacing(path):
            pytest.fail("there is nothing to write to")
