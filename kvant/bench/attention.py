"""Benchmark of decode attention over packed pages, compared with the fastest unquantized attention in the same run.

The error is first measured against the reference in float64 on the same bytes, with poisoned memory. Only what passes is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvant import recipes as known
from kvant.bench.synthetic import Filled, Shape, copies, fill
from kvant.bench.timing import Call, Times, all_times, buffer_bytes, hopeless
from kvant.layout import Layout
from kvant.ops import choose, explain, reference
from kvant.ops.registry import Implementation
from kvant.ops.types import LayerStore, PagedBatch, one_sequence
from kvant.recipe import Recipe
from kvant.serving.overlay import with_rollback

Tensor = torch.Tensor
LIMIT = 2e-3  # largest relative error of an implementation
OWN = "kvant full, paged"  # the recipe `full`, by our own kernel
CHECKED = 4  # sequences that are compared with the reference
Attend = Callable[[Shape, torch.device], tuple[Call, float]]  # attention over a full cache, and its error
sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclasses.dataclass
class Result:
    name: str  # a recipe, or an attention over a full cache
    implementation: str
    shape: dict[str, Any]
    error: float
    packed_bytes: int  # bytes that one call reads: whole pages and overlay; or unquantized keys and values
    bpe: float = 0.0
    seconds: float = 0.0
    low: float = 0.0  # quartiles of the seconds
    high: float = 0.0
    disturbed: int = 0  # runs during which other processes took a core
    bandwidth: float = 0.0  # bytes a second
    baseline: str = ""  # the fastest attention over a full cache
    times: float = 0.0  # speed relative to the baseline
    limit: float = 0.0  # bytes of the baseline / bytes of this
    share: float = 0.0  # times / limit


@dataclasses.dataclass
class Work:
    """Checked work that can be timed: its calls do the same on different memory."""

    result: Result
    calls: list[Call]
    full: bool = False  # attention over a full cache: a baseline


def read_bytes(filled: Filled) -> int:
    """Bytes that one decode has to read: whole pages, and the overlay tokens of each stream."""
    layout, total = filled.cache.layout, 0
    windows = {name: stream.window for name, stream in layout.recipe.streams.items()}
    for seq in filled.seqs:
        n = seq.length
        first = min(n, layout.recipe.key.window.sink)
        ends = {name: window.packed_end(n) for name, window in windows.items()}
        last, origin = max(first, *ends.values()), layout.recipe.origin
        pages = (
            -(-(last - origin) // layout.page_tokens) - (first - origin) // layout.page_tokens if last > first else 0
        )
        full = sum((n - max(0, end - first)) * layout.window_token_bytes(name) for name, end in ends.items())
        total += pages * layout.page_bytes + full
    return total


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Context in which newly allocated memory is NaN: torch fills it in deterministic mode."""
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
    count = len(batch.seq_lens)
    rows = sorted({0, count // 3, 2 * count // 3, count - 1})[:CHECKED]
    found, query = (x.unflatten(0, (count, -1)) for x in (found, query))
    expected = torch.stack(
        [reference.decode(store, query[b].double(), one_sequence(batch, b), **options) for b in rows]
    )
    return float((found[rows].double() - expected).norm() / expected.norm())


def queries(shape: Shape, device: torch.device, each: int = 1) -> Tensor:
    """Random queries, `each` of every sequence."""
    return torch.randn(shape.batch * each, shape.heads, shape.head_dim, device=device).to(shape.torch_dtype)


def checked(filled: Filled, query: Tensor, chosen: Implementation, options: dict[str, float]) -> float:
    """`error_of`. Raises where the error is above LIMIT."""
    error = error_of(chosen.run, filled.store, query, filled.batch, **options)
    return within_limit(error, chosen, filled.cache.layout)


def within_limit(error: float, chosen: Implementation, layout: Layout) -> float:
    if not error <= LIMIT:
        name = layout.recipe.name
        raise ValueError(
            f"{chosen.name} decodes recipe {name} with a relative error of {error:.2e}, more than {LIMIT}: not timed"
        )
    return error


def packed(recipe: Recipe, shape: Shape, device: torch.device, implementation: str | None = None) -> Work:
    """Checked decode from a recipe's pages."""
    filled = fill(recipe, shape, device)
    layout = filled.cache.layout
    chosen = choose("decode", layout, device, implementation)
    query = queries(shape, device)
    options = {"scale": shape.head_dim**-0.5}
    error = checked(filled, query, chosen, options)
    calls: list[Call] = [
        functools.partial(chosen.run, store, query, filled.batch, **options)
        for store in copies(filled, buffer_bytes(device))
    ]
    bits = layout.bits_per_element(shape.context)
    size = dataclasses.asdict(shape)
    return Work(Result(recipe.name, chosen.name, size, error, read_bytes(filled), bits), calls)


def full(shape: Shape, device: torch.device, paged: bool = True) -> list[Work]:
    """The baselines: attention over unquantized keys and values, contiguous, by torch. On a GPU with `paged` also over pages, by
    our kernel for the recipe `full` and by vLLM's FlashAttention where vLLM is installed.

    On a GPU: every backend of torch's SDPA, in the model's dtype. The query heads of a KV head are rows of one query, so that
    every backend reads keys and values once. On a CPU, in every dtype: the same; with grouped heads (enable_gqa); with keys and
    values repeated for every query head beforehand; and two matrix products.
    """
    kinds: dict[str, tuple[str, Attend]] = {}
    others: dict[str, str] = {}  # implementations that are not torch's, by name
    if device.type == "cuda":
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            kinds[f"sdpa {name}"] = shape.dtype, functools.partial(_rows, backend=backend)
        if paged and (chosen := own(shape, device)) is not None:
            kinds[OWN] = shape.dtype, functools.partial(_own, chosen=chosen)
            others[OWN] = chosen.name
        fits = paged and shape.dtype != "float32" and shape.head_dim <= 256
        if fits and (run := vllm_flash()) is not None:
            name = f"vllm flash {run.keywords['fa_version']}, paged"
            kinds[name], others[name] = (shape.dtype, functools.partial(_paged, run=run)), "vllm"
    else:
        for dtype in ("float32", "bfloat16", "float16"):
            kinds[f"sdpa {dtype}, rows"] = dtype, _rows
            kinds[f"sdpa {dtype}, grouped"] = dtype, _grouped
            kinds[f"sdpa {dtype}, repeated"] = dtype, _repeated
            kinds[f"matmul {dtype}"] = dtype, _matmul
    out = []
    for name, (dtype, attend) in kinds.items():
        here = dataclasses.replace(shape, dtype=dtype)
        count = min(64, max(1, -(-buffer_bytes(device) // here.full_bytes)))
        try:
            made = [attend(here, device) for _ in range(count)]
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            continue
        result = Result(
            name,
            others.get(name, "torch"),
            dataclasses.asdict(here),
            made[0][1],
            here.full_bytes,
            8.0 * here.torch_dtype.itemsize,
        )
        out.append(Work(result, [call for call, _ in made], full=not name.startswith("matmul")))
    if not out:
        raise ValueError(f"torch has no attention kernel for {shape.dtype} on {device}: nothing to compare with")
    return out


def _tensors(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [batch, KV heads, query heads of each, head_dim], keys and values [batch, KV heads, tokens, head_dim]."""
    kv = shape.batch, shape.kv_heads
    query = torch.randn(*kv, shape.heads // shape.kv_heads, shape.head_dim, device=device).to(shape.torch_dtype)
    key, value = (
        torch.randn(*kv, shape.context, shape.head_dim, device=device).to(shape.torch_dtype) for _ in range(2)
    )
    return query, key, value


def _error(found: Tensor, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Relative error of the first sequence against float64."""
    q, k, v = (x[:1].double() for x in (query, key, value))
    expected = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return float((found[:1].reshape(expected.shape).double() - expected).norm() / expected.norm())


def _rows(shape: Shape, device: torch.device, backend: SDPBackend | None = None) -> tuple[Call, float]:
    query, key, value = _tensors(shape, device)

    def call() -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return sdpa(query, key, value)

    return call, _error(call(), query, key, value)


def vllm_flash() -> functools.partial[Any] | None:
    """vLLM's FlashAttention over pages, or None where there is none."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError:
        return None
    version = get_flash_attn_version()
    return None if version is None else functools.partial(flash_attn_varlen_func, fa_version=version)


def _paged(shape: Shape, device: torch.device, run: Callable[..., Tensor], page: int = 64) -> tuple[Call, float]:
    """FlashAttention over pages in random order."""
    query, *both = _tensors(shape, device)
    pages = -(-shape.context // page)
    table = torch.randperm(shape.batch * pages, device=device).view(shape.batch, pages)
    caches = []
    for x in both:
        padded = torch.nn.functional.pad(x, (0, 0, 0, pages * page - shape.context))
        blocks = padded.transpose(1, 2).reshape(-1, page, shape.kv_heads, shape.head_dim)
        cache = torch.empty_like(blocks)
        cache[table.flatten()] = blocks
        caches.append(cache)
    seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    call = functools.partial(
        run,
        q=query.reshape(shape.batch, shape.heads, shape.head_dim),
        k=caches[0],
        v=caches[1],
        cu_seqlens_q=torch.arange(shape.batch + 1, dtype=torch.int32, device=device),
        max_seqlen_q=1,
        seqused_k=seq_lens,
        max_seqlen_k=shape.context,
        softmax_scale=shape.head_dim**-0.5,
        causal=True,
        block_table=table.int(),
    )
    return call, _error(call(), query, *both)


def full_layout(shape: Shape, device: torch.device) -> Layout:
    return Layout.of(known.get("full"), shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)


def own(shape: Shape, device: torch.device) -> Implementation | None:
    """The implementation, other than the reference, that decodes the recipe `full`; None where there is none."""
    layout = full_layout(shape, device)
    name, _ = explain("decode", layout, device)
    return None if name in (None, "reference") else choose("decode", layout, device, name)


def _own(shape: Shape, device: torch.device, chosen: Implementation) -> tuple[Call, float]:
    """Decode of the recipe `full`, pages in random order."""
    query, key, value = _tensors(shape, device)
    layout, at = full_layout(shape, device), torch.arange(shape.context, device=device)
    pages, size = layout.pages_for(shape.context), layout.page_tokens
    table = torch.randperm(shape.batch * pages, device=device).view(shape.batch, pages)
    store = LayerStore.allocate(layout, table.numel(), 1, device)
    zeros, query_start_loc = table.new_zeros(shape.batch), table.new_zeros(shape.batch + 1)
    seq_lens, ring_start = zeros + shape.context, {"key": zeros, "value": zeros}
    batch = PagedBatch(table, seq_lens, table.new_zeros(0), query_start_loc, zeros, zeros, ring_start)  # type: ignore[arg-type]
    for b in range(shape.batch):
        slot_mapping = table[b, at // size] * size + at % size
        one = one_sequence(batch, b)._replace(
            slot_mapping=slot_mapping, query_start_loc=query_start_loc.new_tensor([0, shape.context])
        )
        reference.append(store, key[b].transpose(0, 1), value[b].transpose(0, 1), one)
    rows = query.reshape(shape.batch, shape.heads, shape.head_dim)
    call = functools.partial(chosen.run, store, rows, batch, scale=shape.head_dim**-0.5)
    with poisoned():
        found = call()
    return call, within_limit(_error(found, query, key, value), chosen, layout)


def _grouped(shape: Shape, device: torch.device) -> tuple[Call, float]:
    query, key, value = _tensors(shape, device)
    heads = query.reshape(shape.batch, shape.heads, 1, shape.head_dim)
    call = functools.partial(sdpa, heads, key, value, enable_gqa=True)
    return call, _error(call(), query, key, value)


def _repeated(shape: Shape, device: torch.device) -> tuple[Call, float]:
    query, key, value = _tensors(shape, device)
    heads = query.reshape(shape.batch, shape.heads, 1, shape.head_dim)
    keys, values = (x.repeat_interleave(query.shape[2], 1) for x in (key, value))
    call = functools.partial(sdpa, heads, keys, values)
    return call, _error(call(), query, key, value)


def _matmul(shape: Shape, device: torch.device) -> tuple[Call, float]:
    query, key, value = _tensors(shape, device)

    def call() -> Tensor:
        return (query * shape.head_dim**-0.5 @ key.mT).softmax(-1) @ value

    return call, _error(call(), query, key, value)


def measure(
    recipes: Sequence[Recipe],
    shape: Shape,
    device: torch.device,
    implementation: str | None = None,
    repeat: int = 20,
    say: Callable[[str], None] | None = None,
) -> list[Result]:
    """Times decode from every recipe's pages, and attention over full caches, in the same run. On a CPU a baseline is tried once
    first; those that are ten times slower than the fastest are left out, which `say` is told: some of torch's products of 16-bit
    numbers take a hundred times as long as others there."""
    works = [packed(recipe, shape, device, implementation) for recipe in recipes]
    baselines = full(shape, device)
    with torch.inference_mode():
        if device.type == "cpu":
            slow = hopeless({work.result.name: work.calls[0] for work in baselines})
            baselines = [work for work in baselines if work.result.name not in slow]
            if slow and say is not None:
                told = ", ".join(f"{name} ({times:.0f}x)" for name, times in slow.items())
                say(f"left out, since they are at least ten times slower than the fastest baseline: {told}")
        works += baselines
        times = all_times({work.result.name: work.calls for work in works}, device, repeat)
    return compared(works, times)


@dataclasses.dataclass
class Verified:
    """Decode of several queries a sequence, as when speculation verifies drafts."""

    name: str
    implementation: str
    shape: dict[str, Any]
    queries: int  # of a sequence
    error: float
    seconds: float = 0.0
    low: float = 0.0  # quartiles of the seconds
    high: float = 0.0
    times_one: float = 0.0  # time relative to the fewest queries that were asked for


def verify(
    recipe: Recipe,
    shape: Shape,
    device: torch.device,
    counts: Sequence[int],
    implementation: str | None = None,
    repeat: int = 20,
) -> list[Verified]:
    """Checks and times decode of so many queries a sequence. The ring has room for tokens that are taken back, as in a server."""
    counts = sorted(counts)
    filled = fill(with_rollback(recipe, counts[-1] - 1), shape, device)
    chosen = choose("decode", filled.cache.layout, device, implementation)
    stores, options = copies(filled, buffer_bytes(device)), {"scale": shape.head_dim**-0.5}
    out, calls = [], {}
    for count in counts:
        query = queries(shape, device, count)
        error = checked(filled, query, chosen, options)
        out.append(Verified(recipe.name, chosen.name, dataclasses.asdict(shape), count, error))
        calls[str(count)] = [functools.partial(chosen.run, store, query, filled.batch, **options) for store in stores]
    with torch.inference_mode():
        times = all_times(calls, device, repeat)
    least = times[str(counts[0])].median
    for found in out:
        took = times[str(found.queries)]
        found.seconds, found.low, found.high, found.times_one = took.median, took.low, took.high, took.median / least
    return out


def compared(works: Sequence[Work], times: Mapping[str, Times]) -> list[Result]:
    """Fills in the times of the results and compares them with the fastest baseline."""
    best = min((work.result for work in works if work.full), key=lambda result: times[result.name].median)
    out = []
    for work in works:
        result, took = work.result, times[work.result.name]
        faster, limit = times[best.name].median / took.median, best.packed_bytes / result.packed_bytes
        timed = dataclasses.replace(result, seconds=took.median, low=took.low, high=took.high, disturbed=took.disturbed)
        timed.bandwidth = result.packed_bytes / took.median
        out.append(dataclasses.replace(timed, baseline=best.name, times=faster, limit=limit, share=faster / limit))
    return out
