"""The soak of `kvant serve`: what it asks for, what it would find, and a small run against SmolLM2."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engines import needs_vllm

SCRIPT = Path(__file__).parents[3] / "scripts" / "serve_soak.py"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("serve_soak")


def answered(soak: Any, count: int = 200) -> list[Any]:
    """Requests with the answers of a server that is right."""
    requests = soak.plan(count, seed=0)
    sent = set()
    for request in requests:
        key = (request.prefix.tenant, request.prefix.number)
        request.first, request.seen = key not in sent, request.tokens
        request.text, request.cached = f" {request.prefix.secret}.", 0 if request.first else 256
        sent.add(key)
    return requests


def test_the_plan_has_two_tenants_with_texts_in_common(soak: Any) -> None:
    requests = soak.plan(1000, seed=0)
    assert sum(request.leaves for request in requests) == 200
    texts = {tenant: {r.prefix.text for r in requests if r.prefix.tenant == tenant} for tenant in soak.TENANTS}
    assert len(texts["A"]) == len(texts["B"]) == soak.PREFIXES and len(texts["A"] & texts["B"]) == soak.PREFIXES // 2
    assert [r.prefix for r in soak.plan(1000, seed=0)] == [r.prefix for r in requests]


def test_nothing_is_wrong_with_right_answers(soak: Any) -> None:
    assert soak.faults(answered(soak)) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r, other: setattr(r, "text", other.prefix.secret), "a number of the other tenant's"),
        (lambda r, other: setattr(r, "seen", r.seen - 1), "1 answers are short"),
        (lambda r, other: setattr(r, "error", "HTTP/1.1 500"), "an error: HTTP/1.1 500"),
        (lambda r, other: (setattr(r, "first", True), setattr(r, "cached", 64)), "had never sent"),
        (lambda r, other: setattr(r, "cached", None), "does not say how many tokens were cached"),
    ],
)
def test_what_is_wrong_is_found(spoil: Any, message: str, soak: Any) -> None:
    requests = answered(soak)
    one = next(r for r in requests if r.prefix.tenant == "A" and not r.leaves)
    other = next(r for r in requests if r.prefix.tenant == "B" and not r.prefix.shared)
    spoil(one, other)
    (found,) = soak.faults(requests)
    assert message in found


def test_a_model_that_does_not_repeat_shows_nothing(soak: Any) -> None:
    requests = answered(soak)
    for request in requests:
        request.text = "."
    assert "the model does not repeat" in soak.faults(requests)[0]
    assert soak.faults(requests, repeats=False) == []


def test_memory_may_not_grow(soak: Any) -> None:
    assert soak.grown({"host": 100, "device": 1000}, {"host": 400, "device": 1010}, 256) == [
        "host memory grew from 100 to 400 MiB, by more than 256"
    ]


@pytest.mark.slow
@pytest.mark.model
@needs_vllm
def test_a_small_soak(smollm2: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    asked = "--requests 50 --concurrency 8 --recipe saw-int4:sink=4,recent=32 --json"
    options = "-- --enforce-eager --kv-cache-memory-bytes 200000000 --block-size 64 --max-num-seqs 8"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *asked.split(), str(report), *options.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["wrong"] == [] and found["hung_up"] == 10 and found["answered"] == 40 and found["cached_tokens"] > 0
