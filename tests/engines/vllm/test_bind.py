"""Overlay rows that an engine allocates."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.engines.vllm.options import Options
from kvant.recipes import get
from tests.engines.vllm.engines import needs_vllm


@needs_vllm
@pytest.mark.parametrize(
    ("recipe", "sliding_window", "prefix_caching", "sink_rows", "asked", "spare"),
    [
        ("kvant-2", None, True, 100, None, 4),
        ("kvant-2", None, True, 0, None, 64),  # a hit finds sinks in rows of ended sequences alone
        ("kvant-2", None, False, 0, None, 4),
        ("kvant-2", 1024, True, 100, None, 64),
        ("kvant-2:sink=0", 1024, True, 100, None, 4),
        ("saw-int4", None, True, 0, None, 4),
        ("kvant-2", 1024, True, 100, 9, 9),
    ],
)
def test_ended_sequences_keep_rows_where_hits_need_them(
    recipe: str, sliding_window: int | None, prefix_caching: bool, sink_rows: int, asked: int | None, spare: int
) -> None:
    from kvant.engines.vllm.bind import _spare_rows

    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
    )
    groups = {(get(recipe), 32, 128, sliding_window): ["layer"]}
    assert _spare_rows(config, Options((), spare_overlay_rows=asked), groups, sink_rows) == spare


@needs_vllm
def test_a_version_that_was_not_run_on_a_gpu_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvant.engines.vllm import bind, versions

    monkeypatch.setattr(bind.logger, "propagate", True)
    monkeypatch.setattr(versions, "ON_GPU", {"0.26": "without torch.compile"})
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with caplog.at_level(logging.WARNING, "vllm.kvant"):
        for version, device, rank in (("0.26.0", gpu, 0), ("0.29.1", cpu, 0), ("0.29.1", gpu, 1)):
            bind._tell_version(version, device, rank)
        assert not caplog.records
        for _ in range(2):
            bind._tell_version("0.29.1", gpu, 0)
    (record,) = caplog.records
    assert "inside vLLM 0.29.1 on a CPU, and has not been run on a GPU" in record.getMessage()
