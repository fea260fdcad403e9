"""Emulated decode of several queries a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import plan
from tests.conftest import make_layout
from tests.needs import needs_compiler
from tests.ops import emulated
from tests.ops.cuda.decode_cases import ROTATED_BY_DECODE, SEVERAL_QUERIES
from tests.ops.cuda.decode_checks import check_several_queries
from tests.ops.emulated.checks import filled
from tests.ops.scores import some_sinks

pytestmark = needs_compiler


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "group", "dim", "queries", "options"), SEVERAL_QUERIES)
def test_decode_of_several_queries(name: str, group: int, dim: int, queries: int, options: dict[str, float]) -> None:
    """Each sees the tokens up to its own, from where decode at that length would read them."""
    options = dict(options)
    first, rotated = (int(options.pop(key, 0)) for key in ("first", "rotated"))
    cache, seqs = filled(name, 2, group, dim, [queries, 66, 131, 300], first=first, rotated=rotated)
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options}
    check_several_queries(cache, seqs, group, dim, queries, settings, 5e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "group", "dim", "queries", "dtype", "limit"),
    [
        ("kvant-2:rollback=3", 4, 128, 4, "bfloat16", 2e-3),
        ("kvant-2:rope_block=64,sink=70,recent=130,rollback=7", 4, 64, 8, "float16", 5e-4),
        ("kvant-2:rope_block=64,recent=20,rollback=1", 2, 64, 2, "float16", 5e-4),
        ("oscar:sink=3,recent=20,rollback=3", 4, 128, 4, "bfloat16", 2e-3),
        ("saw-int4", 4, 64, 4, "float16", 5e-4),
    ],
)
def test_several_queries_of_a_low_batch(
    name: str, group: int, dim: int, queries: int, dtype: str, limit: float, few: None
) -> None:
    cache, seqs = filled(name, 2, group, dim, [queries, 66, 131, 300], first=7, dtype=dtype)
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None}
    check_several_queries(cache, seqs, group, dim, queries, settings, limit, getattr(torch, dtype))


@pytest.mark.few(3)
@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(
    ("name", "group", "dim", "queries", "options"),
    [
        ("saw-int4", 4, 64, 4, {}),
        ("kvant-4-fast", 3, 64, 2, {}),  # keys without their mean, whose logits a sink's is compared with
        ("kvant-4-fast", 4, 64, 3, {"softcap": 5.0}),
        ("kvant-2:rope_block=64,recent=40,rollback=3", 4, 64, 4, {"sliding_window": 100}),
        ("oscar:sink=3,recent=20,rollback=3", 2, 64, 4, {}),
        ("oscar:per_head=true,sink=3,recent=20,rollback=1", 5, 64, 2, {"sliding_window": 100}),
        ("vecinfer-2:rollback=2", 4, 64, 3, {}),
        ("kivi-k2v2:rollback=3", 2, 64, 4, {}),
    ],
)
def test_sink_logits_of_several_queries(
    name: str,
    group: int,
    dim: int,
    queries: int,
    options: dict[str, float],
    low_batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    cache, seqs = filled(name, 2, group, dim, [queries, 66, 131, 300])
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None, "sink_logits": some_sinks(2 * group)}
    check_several_queries(cache, seqs, group, dim, queries, {**settings, **options}, 5e-4)
    check_several_queries(cache, seqs[-1:], group, dim, queries, {**settings, **options}, 5e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "dim", "queries"),
    [
        ("kvant-2:rope_block=64,recent=40,rollback=3", 64, 4),
        ("kvant-2:rope_block=100,recent=20,rollback=7", 128, 8),
        ("kvant-3:rope_block=64,recent=20,rollback=3", 128, 4),
    ],
)
def test_several_queries_whose_operands_are_copied_to_shared_memory(
    name: str, dim: int, queries: int, many: list[str]
) -> None:
    """One for every RoPE block: warps go from one to the next, and begin with any."""
    cache, seqs = filled(name, 2, 4, dim, [queries, 66, 131, 700], first=7)
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None}
    check_several_queries(cache, seqs, 4, dim, queries, settings, 2e-3, torch.bfloat16)
    assert many == ["_high_batch_kernel"]


def test_operands_of_several_queries_are_copied_to_shared_memory_where_as_many_ctas_fit() -> None:
    def made(name: str, queries: int, shared: tuple[int, int] = emulated.H200, **options: Any) -> plan.Plan:
        layout = make_layout(name, 8, 128)
        options = {"dual": (2, 1), "low_batch": False, **options}
        dual, group = options.pop("dual"), 4 * queries
        return plan.Plan(layout, group, "bfloat16", dual, (0, 1), False, True, shared, queries=queries, **options)

    for queries in (1, 2, 4, 8):
        found = made("kvant-2", queries)
        assert found.shared_operand == found.constants["SHARED_OPERAND"] == (queries >= 4)
    assert not made("kvant-2", 4, low_batch=True).shared_operand
    assert not made("kvant-2", 4, (101376, 102400)).shared_operand
    assert not made("kvant-4", 4).shared_operand  # its pages leave no room
    assert not made("oscar", 4).shared_operand
    assert not made("kvant-2", 4, tuned=ROTATED_BY_DECODE).shared_operand
