"""Compiled kernels on disk: whose they are, whether they are what was written, and what happens where they cannot be kept."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest

from kvant.ops.cuda import nvrtc


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, in order, by a compiler that needs no NVRTC."""
    done: list[str] = []

    def compile_text(text: str, arch: str) -> bytes:
        done.append(text)
        return f"code of {text} for {arch}".encode()

    monkeypatch.setattr(nvrtc, "compile_text", compile_text)
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "_unkept", {})
    return done


def test_a_kernel_is_compiled_once_and_private(compiled: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    for _ in range(2):
        assert nvrtc.cached_code("a", "sm_90", directory) == b"code of a for sm_90"
    assert compiled == ["a"]
    (file,) = directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["flipped", "cut", "bare", "another's", "writable", "link", "fifo", "owner"])
def test_what_is_not_what_was_written_is_compiled_anew(
    what: str, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "kernels"
    nvrtc.cached_code("a", "sm_90", directory)
    (file,) = directory.iterdir()
    good = file.read_bytes()
    if what == "flipped":
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif what == "cut":
        file.write_bytes(good[:20])
    elif what == "bare":  # as older versions wrote it
        file.write_bytes(b"code of something else")
    elif what == "another's":  # whole, but of another text
        nvrtc.cached_code("b", "sm_90", directory)
        (other,) = set(directory.iterdir()) - {file}
        os.replace(other, file)
    elif what == "writable":
        file.chmod(0o666)
    elif what == "link":
        os.rename(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "fifo":
        file.unlink()
        os.mkfifo(file)
    else:
        monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
        with pytest.warns(UserWarning, match="belongs to another user"):
            assert nvrtc.cached_code("a", "sm_90", directory) == b"code of a for sm_90"
        assert compiled == ["a", "a"]
        return
    compiled.clear()
    assert nvrtc.cached_code("a", "sm_90", directory) == b"code of a for sm_90"
    assert compiled == ["a"]
    assert file.read_bytes() == good and stat.S_IMODE(file.lstat().st_mode) == 0o600
    nvrtc.cached_code("a", "sm_90", directory)
    assert compiled == ["a"]


def test_what_cannot_be_kept_serves_the_process_and_that_is_said_once(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = tmp_path / "file" / "kernels"
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept in"):
        assert nvrtc.cached_code("a", "sm_90", directory) == b"code of a for sm_90"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nvrtc.cached_code("a", "sm_90", directory)
        nvrtc.cached_code("b", "sm_90", directory)
    assert compiled == ["a", "b"]


def test_a_changed_header_leaves_code_that_does_not_include_it(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"one.cuh": '#pragma once\n#include "two.cuh"\n', "two.cuh": "int two;\n", "three.cuh": "int three;\n"}
    texts = ['#include "one.cuh"\n', '#include "three.cuh"\n', '#if 0\n  #  include "three.cuh"\n#endif\n']
    monkeypatch.setattr(nvrtc, "headers", lambda: found)
    monkeypatch.setattr(nvrtc, "_included", lambda name: nvrtc._INCLUDE.findall(found[name]))
    for header, again in ((None, texts), (None, []), ("two.cuh", texts[:1]), ("three.cuh", texts[1:])):
        if header is not None:
            found[header] += "int more;\n"
        compiled.clear()
        for text in texts:
            nvrtc.cached_code(text, "sm_90", tmp_path / "kernels")
        assert compiled == again


def test_every_include_is_a_header_of_ours() -> None:
    for name, text in nvrtc.headers().items():
        assert text.count("#include") == len(nvrtc._INCLUDE.findall(text)), name
        assert set(nvrtc._INCLUDE.findall(text)) <= set(nvrtc.headers()), name


def test_products_of_warpgroups_are_compiled_for_one_architecture() -> None:
    assert nvrtc.architecture(nvrtc.program("include/ptx.cuh"), (9, 0)) == "sm_90"
    assert nvrtc.architecture(nvrtc.program("include/ptx.cuh", defines={"WGMMA": 1}), (9, 0)) == "sm_90a"
