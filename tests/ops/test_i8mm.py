"""The 8-bit matrix products of ARM (i8mm.c) give the bits of the dot products (neon.c), and these exact attention: on an ARM CPU, or
under qemu-user, on other machines with a cross compiler."""

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
ON_ARM = platform.machine() in ("aarch64", "arm64")
COMPILER = (shutil.which("gcc") or shutil.which("clang")) if ON_ARM else shutil.which("aarch64-linux-gnu-gcc")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler for ARM here"),
    pytest.mark.skipif(not HAS and EMULATOR is None, reason="no 8-bit matrix products and no qemu-aarch64 here"),
]


@pytest.mark.slow
def test_matrix_products_give_the_bits_of_dot_products(tmp_path: Path) -> None:
    program = tmp_path / "i8mm"
    sources = [
        str(Path(__file__).with_name("i8mm.c")),
        *(str(NATIVE / f"{name}.c") for name in ("neon", "i8mm", "generic")),
    ]
    command = [str(COMPILER), *FLAGS.split(), "-static", f"-I{NATIVE}", *sources, "-o", str(program), "-lm"]
    subprocess.run(command, check=True)
    run = [str(program)] if HAS else [str(EMULATOR), "-cpu", "max", str(program)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "the same bits"
