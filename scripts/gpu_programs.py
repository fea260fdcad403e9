#!/usr/bin/env python3
"""Compiles the CUDA programs of tests marked gpu where there is no GPU, so that a GPU that is lent by the minute need not.

    scripts/gpu_programs.py --out DIR [--arch sm_90] [--nvrtc FILE] [--processes N] [-- pytest arguments]

The tests run as on a GPU of the architecture whose kernels do nothing: every program that they ask for is kept, and compiled into
DIR/kvant/kernels. On the other machine XDG_CACHE_HOME=DIR finds it, if the directory belongs to the user and NVRTC has the same
version (--nvrtc: libnvrtc.so of another one, as of `pip download --no-deps nvidia-cuda-nvrtc==13.0.88`). A program that does not
compile is named, and the script fails.

Results of the tests mean nothing here and are not shown: nothing is computed, assertions are off. A test that needs a number of a
GPU ends early; what it would ask for behind that, the other machine compiles.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.progress import Progress
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvant.ops import reference
from kvant.ops.cuda import nvrtc
from scripts.kernel_resources import GPUS, Gpu
from tests.fitted import made_up_tensors

ROOT = Path(__file__).parent.parent
ASKED = ("KVANT_GPU_PROGRAMS", "KVANT_GPU_ARCH")  # where pytest's processes leave programs, and of which GPU
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MULTIPROCESSORS = 132


# --- tests on a GPU that is not there -----------------------------------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """Tensors lie on the CPU and say that they lie on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU
        if func is torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if getattr(func, "__name__", "") == "device":  # a device is made, not used
            return func(*args, **(kwargs or {}))
        named = {name: _on_cpu(x) for name, x in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_on_cpu, args), **named)


def _on_cpu(x: Any) -> Any:
    if isinstance(x, torch.device):
        return CPU if x.type == "cuda" else x
    return "cpu" if isinstance(x, str) and x.startswith("cuda") else x


class Program:
    """In place of `nvrtc.Kernel`: keeps its text, launches nothing."""

    blocks_per_processor, blocks, device = 2, 2 * MULTIPROCESSORS, GPU
    kept: ClassVar[set[str]] = set()

    def __init__(self, text: str, name: str, device: torch.device, threads: int, shared: int = 0) -> None:
        self.threads, self.shared = threads, shared
        if text in self.kept:
            return
        self.kept.add(text)
        path = Path(os.environ[ASKED[0]], hashlib.sha256(text.encode()).hexdigest())
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        os.replace(temporary, path)

    def launch(self, *args: Any) -> None:
        pass


def _zeros(store: Any, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return torch.zeros_like(query)


def _sums(store: Any, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return torch.zeros(query.shape[:2], dtype=torch.float64)


def _fitted(recipe: Any, shape: Any, device: Any) -> dict[str, torch.Tensor]:
    """Numbers of an artifact do not decide a program."""
    return made_up_tensors(recipe, shape.kv_heads, shape.head_dim)


# What tests compare with, and fit: all of it takes longer than what is wanted of them.
STUBS: Mapping[str, Callable[..., Any]] = {
    "relative_error": lambda *args: 0.0,
    "head_errors": lambda *args: [0.0],
    "log_sum_exp": _sums,
    "with_sinks": lambda *args, **options: (_zeros(*args), _sums(*args)),
    "dense_attention": lambda query, *args, **options: torch.zeros_like(query),
    "fitted": _fitted,
}


def pretend(gpu: Gpu) -> None:
    """From here on, this process has such a GPU."""
    properties = SimpleNamespace(
        shared_memory_per_block_optin=gpu.shared[0],
        shared_memory_per_multiprocessor=gpu.shared[1],
        multi_processor_count=MULTIPROCESSORS,
        L2_cache_size=50 << 20,
        total_memory=80 << 30,
        name=gpu.name,
    )
    found: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "current_stream": SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": False,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (80 << 30, 80 << 30),
    }
    for name, value in found.items():
        setattr(torch.cuda, name, lambda *args, value=value: value)
    torch.cuda.device = lambda *args: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.testing.assert_close = lambda *args, **options: None
    nvrtc.Kernel = Program  # type: ignore[assignment,misc]
    nvrtc.missing = lambda: None
    reference.append = lambda *args, **options: None
    reference.decode = reference.prefill = _zeros
    for module in list(sys.modules.values()):  # each has the name of its own
        if module.__name__.startswith("kvant.") and hasattr(module, "stream_handle"):
            module.stream_handle = lambda device: 0  # type: ignore[attr-defined]


def pytest_configure() -> None:
    """This file is pytest's plugin, too."""
    pretend(GPUS[os.environ[ASKED[1]]])


def pytest_collection_finish() -> None:
    for module in list(sys.modules.values()):
        if module.__name__.startswith(("tests.", "kvant.bench.")):
            for name in STUBS.keys() & vars(module).keys():
                setattr(module, name, STUBS[name])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    with OnCpu():
        return (yield)


# --- programs -----------------------------------------------------------------------------------------------------------------


def collect(gpu: Gpu, directory: Path, processes: int, arguments: list[str]) -> None:
    """Runs the tests; the texts of their programs are files of the directory."""
    options = ["-p", "scripts.gpu_programs", "-p", "no:cacheprovider", "--assert=plain", "-m", "gpu", "--all"]
    options += [*(["-n", str(processes)] if processes > 1 else []), *arguments]
    environment = dict(zip(ASKED, (str(directory), gpu.arch), strict=True))
    environment |= {"PYTHONOPTIMIZE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as log, Progress() as progress:
        task = progress.add_task("running tests", total=None)
        command = [sys.executable, "-m", "pytest", *options]
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log) as child:
            while child.poll() is None:
                time.sleep(1)
                progress.update(task, description=f"running tests: {len(list(directory.iterdir()))} programs")
        if child.returncode not in (0, 1):  # 1: tests have failed, as those do that need a number
            log.seek(0)
            raise ValueError(f"pytest ended with {child.returncode}:\n{log.read()[-2000:]}")


def compile_program(path: Path, arch: str, out: Path, library: str | None) -> str | None:
    """Compiles a program, if it is not there yet; the compiler's complaint, or None."""
    if library is not None:
        nvrtc._candidates = lambda: [library]
    text = path.read_text()
    try:
        nvrtc.cached_code(text, nvrtc.architecture(text, GPUS[arch].capability), out)
    except RuntimeError as error:
        return f"{error}\n{text[:400]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="what XDG_CACHE_HOME is to be on the other machine")
    parser.add_argument("--arch", default="sm_90", choices=GPUS)
    parser.add_argument("--nvrtc", metavar="FILE", help="libnvrtc.so of the version that the other machine has")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("arguments", nargs="*", metavar="-- pytest arguments", help="default: all tests")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"--processes must be positive, got {args.processes}")
    if args.nvrtc and not Path(args.nvrtc).is_file():
        parser.error(f"--nvrtc: expected a file such as libnvrtc.so.13, got {args.nvrtc}")
    out, failed = Path(args.out).absolute() / "kvant" / "kernels", 0
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="kvant-programs-") as directory:
        try:
            collect(GPUS[args.arch], Path(directory), args.processes, args.arguments)
        except ValueError as error:
            print(f"gpu_programs: {error}", file=sys.stderr)
            return 2
        paths = sorted(Path(directory).iterdir())
        run = functools.partial(compile_program, arch=args.arch, out=out, library=args.nvrtc)
        with Progress() as progress, concurrent.futures.ProcessPoolExecutor(args.processes) as pool:
            for complaint in progress.track(pool.map(run, paths), len(paths), description="compiling"):
                failed += complaint is not None
                if complaint is not None:
                    progress.console.print(complaint, markup=False)
    print(f"{len(paths)} programs for {args.arch} in {out}, {failed} failed")
    return 1 if failed or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
