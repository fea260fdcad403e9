"""The throughput script runs, at a size that a CPU bears."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.engines import needs_vllm

SCRIPT = Path(__file__).parents[3] / "scripts" / "vllm_bench.py"


@pytest.mark.slow
@needs_vllm
def test_tiny(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--tiny",
        "--recipe",
        "oscar:recent=16",
        "--against",
        "cpu",
        "--json",
        str(report),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    plain, packed = json.loads(report.read_text())["results"]
    assert packed["tokens_that_fit"] > 10 * plain["tokens_that_fit"]  # 2.5 bits against 32, less the windows
    rates = packed["output_tokens_per_second"]
    assert len(rates) == 2 and min(rates.values()) > 0 and "| oscar:recent=16 |" in done.stdout
