"""Overlay rows that an engine allocates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
