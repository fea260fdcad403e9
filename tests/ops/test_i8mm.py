"""The 8-bit matrix products of ARM (i8mm.c) give the bits of the dot products (neon.c): on a CPU that has them, or under qemu-user."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kvant.ops.cpu import library

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "kvant/ops/cpu/native"
FLAGS = "-std=gnu11 -O1 -fno-math-errno -fno-trapping-math -ffp-contract=off -Wno-psabi"
HAS = "NEON with matrix products" in library.kinds()
EMULATOR = shutil.which("qemu-aarch64")

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("aarch64", "arm64"), reason="not an ARM machine"),
    pytest.mark.skipif(not HAS and EMULATOR is None, reason="no 8-bit matrix products and no qemu-aarch64 here"),
]


@pytest.mark.slow
def test_matrix_products_give_the_bits_of_dot_products(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "i8mm"
    sources = [str(Path(__file__).with_name("i8mm.c")), *(str(NATIVE / name) for name in ("neon.c", "i8mm.c"))]
    command = [compiler, *FLAGS.split(), f"-I{NATIVE}", *sources, "-o", str(program), "-lm"]
    subprocess.run(command, check=True)
    run = [str(program)] if HAS else [str(EMULATOR), "-cpu", "max", str(program)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "the same bits"
