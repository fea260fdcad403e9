"""Benchmark of prefill over a packed history: time and memory, compared with the fastest of torch's fused attentions over
unquantized tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kvant.bench.attention import LIMIT
from kvant.bench.synthetic import Shape, fill, vectors
from kvant.bench.timing import Call, all_times
from kvant.ops import choose, flash, reference
from kvant.ops.memory import allocated_by
from kvant.ops.types import one_sequence
from kvant.recipe import Recipe

Tensor = torch.Tensor


@dataclasses.dataclass
class Result:
    recipe: str
    implementation: str
    shape: dict[str, Any]
    new_tokens: int
    error: float
    seconds: float
    workspace: int  # peak bytes beyond inputs and outputs; 0 where it is not measured
    baseline_seconds: float
    times: float  # speed relative to the baseline
    baseline: str  # the fastest
    baselines: dict[str, float]  # seconds of each
    sliding_window: int | None = None


def measure(
    recipe: Recipe,
    shape: Shape,
    device: torch.device,
    implementation: str | None = None,
    repeat: int = 20,
    new_tokens: int = 512,
    sliding_window: int | None = None,
) -> Result:
    """Checks and times prefill of `new_tokens` tokens of every sequence, after `context` tokens."""
    filled = fill(recipe, shape, device)
    cache, tokens = filled.cache, shape.batch * new_tokens
    chosen = choose("prefill", cache.layout, device, implementation)
    ends = filled.batch.seq_lens.cpu() + new_tokens  # lengths on the host, as a server has them
    query_start_loc = torch.arange(shape.batch + 1) * new_tokens
    batch = filled.batch._replace(seq_lens=ends, query_start_loc=query_start_loc)
    query = torch.randn(tokens, shape.heads, shape.head_dim, device=device).to(shape.torch_dtype)
    key, value = (
        vectors(tokens, shape.kv_heads, shape.head_dim, device, shift).to(shape.torch_dtype) for shift in (0.0, 0.4)
    )
    options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "sliding_window": sliding_window}
    run = functools.partial(chosen.run, filled.store, query, key, value, batch, **options)
    found = run()
    last = slice(
        max(0, new_tokens - 8), new_tokens
    )  # only these rows of the first sequence are compared with the reference
    row = one_sequence(batch, 0)._replace(query_start_loc=torch.tensor([0, new_tokens]))
    part = slice(0, new_tokens)
    expected = reference.prefill(
        filled.store, query[part].double(), key[part].double(), value[part].double(), row, **options
    )
    error = float((found[last].double() - expected[last]).norm() / expected[last].norm())
    if not error <= LIMIT:
        raise ValueError(
            f"{chosen.name} prefills recipe {recipe.name} with a relative error of {error:.2e}, more than {LIMIT}: not timed"
        )
    workspace = allocated_by(run, device)
    calls: dict[str, list[Call]] = {
        "ours": [run],
        **{name: [call] for name, call in _baselines(shape, new_tokens, device, sliding_window).items()},
    }
    times = {name: found.median for name, found in all_times(calls, device, repeat, graph=False).items()}
    seconds = times.pop("ours")
    best = min(times, key=lambda name: times[name])
    name, size = chosen.name, dataclasses.asdict(shape)
    speed = times[best] / seconds
    return Result(
        recipe.name, name, size, new_tokens, error, seconds, workspace, times[best], speed, best, times, sliding_window
    )


def _baselines(
    shape: Shape, new_tokens: int, device: torch.device, sliding_window: int | None = None
) -> dict[str, Call]:
    """Torch's fused attentions over unquantized tokens. cuDNN's takes no causal mask that ends with the last token, and runs
    without one: it computes the few scores more that such a mask would hide. With a sliding window, FlashAttention's own on a GPU, a
    mask on a CPU."""
    total = shape.context + new_tokens
    query = torch.randn(shape.batch, shape.heads, new_tokens, shape.head_dim, device=device).to(shape.torch_dtype)
    kv = [
        torch.randn(shape.batch, shape.kv_heads, total, shape.head_dim, device=device, dtype=shape.torch_dtype)
        for _ in range(2)
    ]
    mask: Any = causal_lower_right(new_tokens, total)
    if sliding_window is not None and device.type == "cuda" and shape.torch_dtype != torch.float32:
        q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, *kv))
        rows, tokens = (
            torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * n for n in (new_tokens, total)
        )
        bounds = flash.Bounds(rows, tokens, new_tokens, total)
        scale = shape.head_dim**-0.5
        return {"flash": functools.partial(flash.attend, q, k, v, bounds, scale, True, None, sliding_window)}
    if sliding_window is not None:
        seen = torch.ones(new_tokens, total, dtype=torch.bool, device=device).tril(total - new_tokens)
        mask = seen.triu(total - new_tokens + 1 - sliding_window)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, query, kv[0], kv[1], enable_gqa=True)
    calls: dict[str, Call] = {"flash": functools.partial(attend, attn_mask=mask)}

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend()

    if device.type == "cuda" and shape.torch_dtype != torch.float32:
        try:
            cudnn()
        except RuntimeError:  # this build of torch, or this GPU, has none for these heads
            return calls
        calls["cudnn"] = cudnn
    return calls
