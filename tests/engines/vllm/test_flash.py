"""How vLLM's FlashAttention is called. It runs on GPUs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvant.ops.flash import Bounds
from tests.engines.vllm.engines import needs_vllm

pytestmark = needs_vllm


def newer(requires_alibi: bool = False, head_size: int | None = None, requires_softcap: bool = False) -> int:
    """As vLLM 0.32 chooses on a B200."""
    return 2 if head_size is None or head_size > 128 or requires_softcap else 4


def older(requires_alibi: bool = False) -> int:
    return 3


@pytest.mark.parametrize(
    ("choose", "head_dim", "softcap", "expected"),
    [(newer, 128, None, 4), (newer, 192, None, 2), (newer, 128, 30.0, 2), (older, 256, None, 3)],
)
def test_the_version_is_that_of_the_head_size(
    choose: Callable[..., int], head_dim: int, softcap: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import fa_utils

    from kvant.engines.vllm import flash

    versions: list[int] = []

    def attend(q: torch.Tensor, fa_version: int, return_softmax_lse: bool = False, **rest: Any) -> Any:
        versions.append(fa_version)
        return (q, torch.zeros(q.shape[1], len(q))) if return_softmax_lse else q

    monkeypatch.setattr(flash, "_varlen", lambda: attend)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", choose)
    flash._version.cache_clear()
    q, bounds = torch.zeros(5, 2, head_dim), torch.tensor([0, 5], dtype=torch.int32)
    try:
        flash._causal(q, q, q, bounds, 5, 1.0, softcap, None)
        flash._attend_with_lse(q, q, q, Bounds(bounds, bounds, 5, 5), 1.0, True, softcap, None)
    finally:
        flash._version.cache_clear()
    assert versions == [expected, expected]
