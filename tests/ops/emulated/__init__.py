"""Runs the text of CUDA kernels on a CPU: the host's C++ compiler, and other forms of include/ptx.cuh and include/copies.cuh for what a GPU has."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.ops.cuda import nvrtc

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
H200 = (227 * 1024, 228 * 1024)  # shared memory of a block and of a multiprocessor


@functools.cache
def directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvant-emulated-")


@functools.cache
def compiled(text: str, name: str) -> Any:
    """What launches one kernel of a text, compiled for this machine."""
    assert COMPILER is not None
    everything = "".join([text, *nvrtc.headers().values()])
    (kind,) = set(re.findall(rf"\b{name}\(const (\w+) a\)", everything))
    launcher = (
        'extern "C" __attribute__((visibility("default"))) void emulated(int x, int y, int threads, int dynamic_bytes, const void* arguments) {\n'
        f"  launch([](const void* p) {{ {name}(*(const {kind}*)p); }}, x, y, threads, dynamic_bytes, arguments);\n}}\n"
    )
    source = f"{text}\n{launcher}"
    stem = Path(directory().name) / hashlib.sha256(source.encode()).hexdigest()[:16]
    stem.with_suffix(".cpp").write_text(source)
    options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"]
    # a block's memory in one library is not that of a kernel of the same name in another
    options += [
        "-fvisibility=hidden",
        *(["-fno-gnu-unique"] if "g++" in Path(COMPILER).name and "clang" not in COMPILER else []),
    ]
    include = [
        f"-I{HERE}",
        f"-I{Path(nvrtc.__file__).parent}",
    ]  # HERE has other forms of include/ptx.cuh and include/copies.cuh
    command = [COMPILER, *options, *include, str(stem.with_suffix(".cpp")), "-o", str(stem.with_suffix(".so"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(stem.with_suffix(".so"))).emulated


class Kernel:
    """As `nvrtc.Kernel`, of a GPU with so many blocks at once."""

    blocks = 6
    blocks_per_processor = 1

    def __init__(self, text: str, name: str, device: torch.device, threads: int, shared: int = 0) -> None:
        self.threads, self.shared = threads, shared
        self.run = compiled(text, name)

    def launch(self, blocks: tuple[int, int], arguments: ctypes.Structure, dependent: bool = False) -> None:
        self.run(*blocks, self.threads, self.shared, ctypes.byref(arguments))


class Stream:
    """As `torch.cuda.Stream`: all that launches read of one."""

    cuda_stream = 0


@contextlib.contextmanager
def on_this_machine(monkeypatch: pytest.MonkeyPatch, *caches: Any) -> Iterator[None]:
    """Kernels are compiled for and run on this machine; `caches` of compiled kernels hold none of another's."""
    monkeypatch.setattr(nvrtc, "Kernel", Kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
