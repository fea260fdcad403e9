"""How fused attention is called: by torch's operator, on meta tensors, and by vLLM's function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvant.engines.vllm import flash as vllm_flash
from kvant.ops import flash
from tests.ops.plain_flash import plain


class Calls(TorchDispatchMode):
    """Keyword arguments of torch's flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._flash_attention_forward.default:
            self.found.append(kwargs)
        return func(*args, **kwargs)


def test_torchs_operator_takes_a_window() -> None:
    starts = torch.tensor([0, 5, 9], dtype=torch.int32, device="meta")
    q, k = (torch.empty(9, heads, 64, dtype=torch.float16, device="meta") for heads in (4, 2))
    with Calls() as calls:
        for window in (None, 3):
            out, lse = flash.attend(q, k, k, flash.Bounds(starts, starts, 5, 5), 0.1, True, None, window)
            assert out.shape == q.shape and lse.shape == q.shape[:2]
    assert calls.found == [{"scale": 0.1}, {"scale": 0.1, "window_size_left": 2, "window_size_right": 0}]


@pytest.mark.parametrize("window", [None, 1, 7])
def test_vllms_function_takes_a_window(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tokens = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 12], [0, 20, 29]))
    q, k, v = (torch.randn(n, heads, 64) for n, heads in ((12, 4), (29, 2), (29, 2)))
    seen: list[dict[str, Any]] = []

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        seen.append(options)
        bounds = flash.Bounds(
            options["cu_seqlens_q"], options["cu_seqlens_k"], options["max_seqlen_q"], options["max_seqlen_k"]
        )
        left, right = options.get("window_size", [-1, 0])
        assert options["causal"] and right == 0 and options["return_softmax_lse"]
        width = None if left < 0 else left + 1
        out, lse = plain(q, k, v, bounds, options["softmax_scale"], True, None, width)
        return out, lse.T

    monkeypatch.setattr(vllm_flash, "_varlen", lambda: varlen)
    monkeypatch.setattr(vllm_flash, "_version", lambda head_size, softcap: 3)
    made = vllm_flash.with_lse()
    assert made is not None
    bounds = flash.Bounds(rows, tokens, 9, 20)
    out, lse = made.run(q, k, v, bounds, 0.1, True, None, window)
    for found, expected in zip((out, lse), plain(q, k, v, bounds, 0.1, True, None, window), strict=True):
        torch.testing.assert_close(found, expected)
    assert [options.get("window_size") for options in seen] == [None if window is None else [window - 1, 0]]
