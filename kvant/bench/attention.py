"""Decode attention over packed pages against the best unquantized attention at hand, in the same run.

First the error against the reference in float64 on the same bytes, with memory poisoned; a time is only given for what passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvant.bench.synthetic import Filled, Shape, copies, fill
from kvant.bench.timing import buffer_bytes, median_seconds
from kvant.ops import choose, reference
from kvant.ops.registry import Implementation
from kvant.ops.types import LayerStore, PagedBatch, one_sequence
from kvant.recipe import Recipe

Tensor = torch.Tensor
LIMIT = 2e-3  # relative error that an implementation may have
CHECKED = 4  # sequences that the reference is asked for


@dataclasses.dataclass
class Result:
    recipe: str
    implementation: str
    shape: dict[str, Any]
    bpe: float
    error: float
    seconds: float
    packed_bytes: int  # read by one call: whole pages, and windows
    bandwidth: float  # bytes a second
    baseline: str = ""
    baseline_seconds: float = 0.0
    times: float = 0.0  # faster than the baseline
    limit: float = 0.0  # times the baseline, if bytes alone counted
    share: float = 0.0  # of the limit


def read_bytes(filled: Filled) -> int:
    """Bytes that one decode has to read."""
    layout, total = filled.cache.layout, 0
    window = layout.recipe.key.window
    size = torch.finfo(getattr(torch, layout.overlay_dtype)).bits // 8
    for entry in filled.entries:
        n = entry.length
        first, last = min(n, window.sink), max(min(n, window.sink), window.packed_end(n))
        pages = -(-last // layout.page_tokens) - first // layout.page_tokens if last > first else 0
        total += pages * layout.page_bytes + 2 * (n - (last - first)) * layout.heads * layout.head_dim * size
    return total


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN in here: torch fills what it allocates while it is deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def error_of(run: Any, store: LayerStore, query: Tensor, batch: PagedBatch, **options: Any) -> float:
    """Relative error of an implementation against the reference in float64 on the same bytes."""
    with poisoned():
        found = run(store, query, batch, **options)
    count = len(query)
    rows = sorted({0, count // 3, 2 * count // 3, count - 1})[:CHECKED]
    expected = torch.cat(
        [reference.decode(store, query[b : b + 1].double(), one_sequence(batch, b), **options) for b in rows]
    )
    return float((found[rows].double() - expected).norm() / expected.norm())


def queries(shape: Shape, device: torch.device) -> Tensor:
    return torch.randn(shape.batch, shape.heads, shape.head_dim, device=device).to(shape.torch_dtype)


def checked(filled: Filled, query: Tensor, chosen: Implementation, options: dict[str, float]) -> float:
    """As `error_of`; refuses to go on where it is too large."""
    error = error_of(chosen.run, filled.store, query, filled.batch, **options)
    if not error <= LIMIT:
        name = filled.cache.layout.recipe.name
        raise ValueError(
            f"{chosen.name} decodes recipe {name} with a relative error of {error:.2e}, more than {LIMIT}: not timed"
        )
    return error


def measure(
    recipe: Recipe, shape: Shape, device: torch.device, implementation: str | None = None, repeat: int = 20
) -> Result:
    filled = fill(recipe, shape, device)
    layout = filled.cache.layout
    chosen = choose("decode", layout, device, implementation)
    query = queries(shape, device)
    options = {"scale": shape.head_dim**-0.5}
    error = checked(filled, query, chosen, options)
    stores = copies(filled, buffer_bytes(device))
    calls = [lambda store=store: chosen.run(store, query, filled.batch, **options) for store in stores]
    seconds = median_seconds(calls, device, repeat)
    nbytes = read_bytes(filled)
    return Result(
        recipe.name,
        chosen.name,
        dataclasses.asdict(shape),
        layout.bits_per_element(shape.context),
        error,
        seconds,
        nbytes,
        nbytes / seconds,
    )


def baseline(shape: Shape, device: torch.device, repeat: int = 20) -> dict[str, float]:
    """Seconds of attention over unquantized, contiguous keys and values, by backend of torch's SDPA. The query heads of a
    KV head are rows of one query, so that every backend reads keys and values once."""
    kv = shape.batch, shape.kv_heads, shape.context, shape.head_dim
    rows = shape.batch, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
    query = torch.randn(rows, device=device).to(shape.torch_dtype)
    count = min(64, max(1, -(-buffer_bytes(device) // shape.full_bytes)))
    pairs = [
        (
            torch.randn(kv, device=device, dtype=shape.torch_dtype),
            torch.randn(kv, device=device, dtype=shape.torch_dtype),
        )
        for _ in range(count)
    ]
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if device.type != "cuda":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    out = {}
    for name, backend in backends.items():

        def call(pair: tuple[Tensor, Tensor], backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(query, pair[0], pair[1])

        try:
            out[name] = median_seconds([functools.partial(call, pair) for pair in pairs], device, repeat)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
    if not out:
        raise ValueError(f"torch has no attention kernel for {shape.dtype} on {device}: nothing to compare with")
    return out


def compare(result: Result, shape: Shape, baselines: dict[str, float]) -> Result:
    """The result with what it is compared to."""
    name = min(baselines, key=baselines.__getitem__)
    seconds = baselines[name]
    times, limit = seconds / result.seconds, shape.full_bytes / result.packed_bytes
    return dataclasses.replace(
        result, baseline=f"sdpa {name}", baseline_seconds=seconds, times=times, limit=limit, share=times / limit
    )
