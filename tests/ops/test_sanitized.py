"""The C of the CPU's operations reads and writes nothing but what it was given, and does nothing that C leaves undefined."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvant.ops.cpu import library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="the sanitizer is preloaded as on Linux"),
    pytest.mark.skipif(library.missing() is not None, reason=f"nothing compiled: {library.missing()}"),
]
ROOT = Path(__file__).parents[2]
FLAGS = "-std=gnu11 -g1 -O0 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -ffp-contract=off"


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The compiled module with the sanitizers in it, and what must be loaded before Python."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    preload = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        preload.append(found.stdout.strip())
        if not os.path.isabs(preload[-1]):
            pytest.skip(f"gcc brings no {name}")
    out = tmp_path_factory.mktemp("sanitized") / "_native.abi3.so"
    native = ROOT / "kvant/ops/cpu/native"
    module = library.module()
    assert not isinstance(module, str)
    command = [
        compiler,
        *FLAGS.split(),
        "-fno-math-errno",
        "-fno-trapping-math",
        "-shared",
        "-fPIC",
        "-pthread",
        "-Wno-psabi",
    ]
    command += [f'-DKVANT_SOURCES="{module.sources()}"', f"-I{sysconfig.get_path('include')}", "-o", str(out)]
    subprocess.run([*command, *map(str, sorted(native.glob("*.c")))], check=True)
    return out, ":".join(preload)


def run(sanitized: tuple[Path, str], plant: str) -> subprocess.CompletedProcess[str]:
    path, preload = sanitized
    env = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=86",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=86",
        "PYTHONMALLOC": "malloc",  # the structures too have exactly their size
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.ops.sanitized", str(path), plant]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_nothing_is_found(sanitized: tuple[Path, str]) -> None:
    done = run(sanitized, "nothing")
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert done.stdout.splitlines()[-1] == "nothing found"
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-1]] == library.kinds()


@pytest.mark.parametrize("plant", ["key", "value", "query", "lengths", "sink logits", "misaligned"])
def test_a_planted_fault_is_found(sanitized: tuple[Path, str], plant: str) -> None:
    done = run(sanitized, plant)
    assert done.returncode == 86, done.stdout + done.stderr[-8000:]
    assert ("misaligned address" if plant == "misaligned" else "heap-buffer-overflow") in done.stderr
    assert "ops/cpu/native/" in done.stderr, "found in the code that is tested"
