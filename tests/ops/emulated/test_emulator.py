"""What the emulator of CUDA kernels stops at."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs_compiler

pytestmark = needs_compiler

ROOT = Path(__file__).parents[3]
APART = (
    """
import ctypes, torch
from kvant.ops.cuda import nvrtc
from tests.ops import emulated

text = nvrtc.program("include/ptx.cuh") + """
    + repr(
        'struct Nothing { int x; };\nextern "C" __global__ void __launch_bounds__(32) apart(const Nothing a) {'
        " if (threadIdx.x < 7) __syncwarp(); }\n"
    )
    + """
emulated.Kernel(text, "apart", torch.device("cpu"), 32).launch((1, 1), ctypes.c_int(0))
"""
)


@pytest.mark.slow
def test_a_kernel_whose_lanes_part_is_stopped() -> None:
    """Where some lanes wait for others that never come, the process ends; on a GPU it would hang."""
    done = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "some lanes wait for others that never come" in done.stderr
