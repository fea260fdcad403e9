"""Benchmark of decode with equal memory: the largest batch that each cache holds, and the tokens per second at that batch; or of
given batches, with the peak of the memory.

The model is a Qwen3 with random weights. By default prompts are not prefilled: one sequence of random keys and values is
appended to a cache, and its bytes are copied to all sequences and layers, so that pages, overlays and lengths are those of
prefilled prompts. On a GPU a step of the whole model is replayed from a CUDA graph; where it cannot be captured, steps run
eagerly and the result says why.

The baseline `full` is the fastest full cache that we could build: transformers' StaticCache, written in place, and the faster of
torch's fused kernels, with the query heads of a KV head as rows of one query, so that every key and value is read once. It has no
mask: the whole buffer is read, as in the last step. StaticCache and DynamicCache are also measured as transformers runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvant.bench import attention, generate
from kvant.bench.synthetic import Shape, fitted, vectors
from kvant.bench.timing import Times, all_times
from kvant.layout import Layout
from kvant.plan import plan
from kvant.recipe import Recipe

Tensor = torch.Tensor
VOCABULARY = 151_936  # Qwen3's
UNTIMED = 3  # first steps that are not timed: before the capture of a graph, and its first replay
PATIENCE = 10.0  # seconds after which no further step is timed
PREFILL_TOKENS = 16_384  # tokens of all sequences that are prefilled at a time
ROWS = "kvant_bench_rows"
BACKENDS = {"sdpa cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION}
Step = Callable[[Tensor], Tensor]  # tokens [batch] -> logits [batch, vocabulary]


@dataclasses.dataclass
class Result:
    cache: str  # a recipe; full; or a cache of transformers
    by: str  # implementation of attention
    graph: bool
    reason: str  # why there is no graph
    batch: int
    largest: bool  # True: the largest batch that fits; False: the batch of the full cache
    memory: int  # bytes that the cache may take
    cache_bytes: int  # bytes that the cache of this batch takes
    prompt: int
    new_tokens: int
    layers: int
    shape: dict[str, Any]
    filled: str  # how the cache was filled
    error: float = 0.0  # relative error of decode against the reference in float64
    step: float = 0.0  # seconds, median
    low: float = 0.0  # quartiles
    high: float = 0.0
    steps: int = 0  # number of timed steps
    tokens_per_second: float = 0.0
    times: float = 0.0  # tokens/s relative to the full cache, at its largest batch or at the same one
    peak_bytes: int = 0  # most bytes of the GPU that were allocated at once, weights included; 0 on a CPU
    failed: str = ""

    @property
    def out_of_memory(self) -> bool:
        return self.failed.startswith("OutOfMemoryError")


@dataclasses.dataclass(frozen=True)
class Work:
    """The work: `new_tokens` decode steps after `context` tokens, with a cache of at most `memory` bytes."""

    shape: Shape  # its `batch` is not used
    layers: int
    new_tokens: int
    memory: int
    prefill: bool
    implementation: str | None = None

    @property
    def tokens(self) -> int:
        return self.shape.context + self.new_tokens

    @property
    def full_request(self) -> int:
        """Bytes of one sequence in a full cache."""
        return self.layers * dataclasses.replace(self.shape, batch=1, context=self.tokens).full_bytes

    def check(self) -> None:
        if self.new_tokens <= UNTIMED:
            raise ValueError(f"--new-tokens must be more than {UNTIMED}, which are not timed; got {self.new_tokens}")
        if self.memory < self.full_request:
            raise ValueError(
                f"--memory {self.memory} holds no full cache of {self.tokens} tokens, which takes {self.full_request} bytes"
            )


def measure(
    model: Any, recipes: list[Recipe], work: Work, say: Callable[[str], None], done: Callable[[list[Result]], None]
) -> list[Result]:
    """Measures the full cache, transformers' caches, and every recipe. A failure is recorded in the result and the others still run.
    `done` is called after each measurement with all results so far."""
    work.check()
    device = model.device
    results: list[Result] = []
    most = work.memory // work.full_request
    by, error = _fastest(dataclasses.replace(work.shape, batch=most, context=work.tokens), device)
    how = "random, by the cache's own append, copied to all sequences and layers"
    blank = functools.partial(
        Result,
        memory=work.memory,
        prompt=work.shape.context,
        new_tokens=work.new_tokens,
        layers=work.layers,
        shape=dataclasses.asdict(work.shape),
        filled="read by the model" if work.prefill else how,
    )

    def full(name: str, rows: str | None = None, why: str = "") -> None:
        why = why or ("" if device.type == "cuda" else "CUDA graphs need a CUDA device")
        result = blank(name, rows or "transformers", not why, why, most, True, cache_bytes=most * work.full_request)
        result.error = error if rows else 0.0
        result.filled = result.filled if work.prefill else "random"
        job = functools.partial(_transformers, model, name, work, most, rows, result.graph)
        _run(result, job, device, say, results, done)

    full("full", by)
    for recipe in recipes:
        _recipe(model, recipe, work, most, blank, say, results, done)
    full("DynamicCache", why="its tensors grow with every step")
    full("StaticCache")
    return results


def sweep(
    model: Any,
    recipes: list[Recipe],
    work: Work,
    batches: list[int],
    say: Callable[[str], None],
    done: Callable[[list[Result]], None],
) -> list[Result]:
    """Measures the full cache and every recipe at these batches: tokens per second and peak memory. A batch that does not fit is
    recorded as such. `work.memory` is not used."""
    if work.new_tokens <= UNTIMED:
        raise ValueError(f"--new-tokens must be more than {UNTIMED}, which are not timed; got {work.new_tokens}")
    device, shape = model.device, work.shape
    results: list[Result] = []
    small = dataclasses.replace(shape, batch=min(batches))
    errors = {}
    for recipe in recipes:
        say(f"{recipe.name}: checking append and decode against the reference")
        errors[recipe] = generate.check(recipe, small, device, work.implementation)
    for batch in batches:
        blank = functools.partial(
            Result,
            batch=batch,
            largest=False,
            memory=0,
            prompt=shape.context,
            new_tokens=work.new_tokens,
            layers=work.layers,
            shape=dataclasses.asdict(shape),
            filled="read by the model" if work.prefill else "random",
        )
        by, error = _fastest(dataclasses.replace(shape, batch=batch, context=work.tokens), device)
        why = "" if device.type == "cuda" else "CUDA graphs need a CUDA device"
        full = blank("full", by, not why, why, cache_bytes=batch * work.full_request, error=error)
        job = functools.partial(_transformers, model, "full", work, batch, by, full.graph)
        _run(full, job, device, say, results, done)
        for recipe in recipes:
            result = blank(recipe.name, "", False, "", cache_bytes=0, error=errors[recipe])
            _run(result, functools.partial(_packed, model, recipe, work, batch, result), device, say, results, done)
    return results


def _run(
    result: Result,
    job: Callable[[], contextlib.AbstractContextManager[Step]],
    device: torch.device,
    say: Callable[[str], None],
    results: list[Result],
    done: Callable[[list[Result]], None],
) -> None:
    """Times the steps of one cache at one batch."""
    say(f"{result.cache}: {result.batch} x {result.prompt} + {result.new_tokens} tokens")
    started = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        found = _timed(job, result.batch, result.new_tokens, device)
        result.step, result.low, result.high, result.steps = found.median, found.low, found.high, found.runs
        result.tokens_per_second = result.batch / found.median
        full = next((r for r in results if r.cache == "full" and (r.largest or r.batch == result.batch)), result)
        result.times = result.tokens_per_second / full.tokens_per_second if full.tokens_per_second else 0.0
        said = f"{result.tokens_per_second:.1f} tokens/s, {result.step * 1e3:.2f} ms a step"
    except (RuntimeError, ValueError, MemoryError) as error:  # RuntimeError includes CUDA errors
        result.failed = said = f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"
    if device.type == "cuda":
        result.peak_bytes = torch.cuda.max_memory_allocated(device)
    say(f"{result.cache}: {said} ({time.perf_counter() - started:.1f} s in all)")
    gc.collect()  # caches and layers refer to each other
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    results.append(result)
    done(results)


def _timed(
    job: Callable[[], contextlib.AbstractContextManager[Step]], batch: int, count: int, device: torch.device
) -> Times:
    """A separate function, so that no local variable keeps the cache alive after it."""
    with torch.inference_mode(), job() as step:
        return steps_of(step, batch, count, device)


def steps_of(step: Step, batch: int, count: int, device: torch.device) -> Times:
    """Seconds of a greedy step; the first UNTIMED steps are not counted."""
    tokens = torch.randint(0, 1000, (batch,), device=device)
    marks: list[Any] = []
    begun = time.perf_counter()
    for at in range(count):
        tokens = step(tokens).argmax(-1)
        if at < UNTIMED - 1:
            continue
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
        if len(marks) > 1 and time.perf_counter() - begun > PATIENCE:
            break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        times = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    else:
        times = [b - a for a, b in itertools.pairwise(marks)]
    return Times.of(times)


# --- recipes ----------------------------------------------------------------------------------------------------------


def _recipe(
    model: Any,
    recipe: Recipe,
    work: Work,
    most: int,
    blank: Callable[..., Result],
    say: Callable[[str], None],
    results: list[Result],
    done: Callable[[list[Result]], None],
) -> None:
    """Measures a recipe at the largest batch that fits, and at the batch of the full cache."""
    device, shape = model.device, work.shape
    order = Layout.of(recipe, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device).order
    kind = plan(model, recipe, work.memory, work.tokens, order=order).recipe
    error, failed = 0.0, ""
    try:
        say(f"{recipe.name}: checking append and decode against the reference")
        error = generate.check(recipe, dataclasses.replace(shape, batch=most), device, work.implementation)
    except (RuntimeError, ValueError) as wrong:
        failed = f"{type(wrong).__name__}: {str(wrong).splitlines()[0]:.300}"
    for batch in dict.fromkeys((kind.requests, most)):
        result = blank(
            recipe.name, "", False, "", batch, batch == kind.requests, cache_bytes=batch * kind.request_bytes
        )
        result.error, result.failed = error, failed
        if failed or not batch:
            result.failed = failed or f"{kind.request_bytes} bytes per sequence do not fit"
            results.append(result)
            done(results)
            continue
        _run(result, functools.partial(_packed, model, recipe, work, batch, result), device, say, results, done)


@contextlib.contextmanager
def _packed(model: Any, recipe: Recipe, work: Work, batch: int, result: Result) -> Iterator[Step]:
    """A decode step with a recipe's cache. Fills in the fields of `result` that say how it runs."""
    from kvant.engines import graphs

    cache = filled(model, recipe, work, batch)
    result.by = cache.implementation("decode", model.device)
    result.cache_bytes = cache.nbytes
    reason = graphs.refuse(model, cache, graph=True)
    result.graph, result.reason = reason is None, reason or ""
    if reason is None or graphs.refuse(model, cache, graph=False) is None:
        with cache.decoder(model, work.new_tokens, graph=reason is None) as decoder:
            yield decoder
        return

    def step(tokens: Tensor) -> Tensor:
        return model(tokens[:, None], past_key_values=cache, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    yield step


def filled(model: Any, recipe: Recipe, work: Work, batch: int) -> Any:
    """A cache as after a prefill of the prompts, with room for new tokens. Pages are in random order."""
    from kvant.artifact import Artifact
    from kvant.engines.hf import Cache

    shape, device = work.shape, model.device
    artifact = None
    if recipe.calibrated:
        tensors = fitted(recipe, shape, "cpu")  # the same for all layers
        layers = dict.fromkeys(range(work.layers), tensors)
        artifact = Artifact(recipe, shape.kv_heads, shape.head_dim, work.layers, layers)
    cache = Cache(
        model,
        recipe,
        artifact=artifact,
        max_tokens=work.tokens,
        max_sequences=batch,
        check_finite=False,
        implementation=work.implementation,
    )
    if work.prefill:
        _read(model, cache, batch, shape.context)
        return cache
    cache._allocate(shape.dtype, device)
    (group,) = cache.groups
    paged = group.paged
    random.Random(0).shuffle(paged.pool._free)
    group.sequences = [paged.new() for _ in range(batch)]
    first, *others = group.sequences
    key, value = (vectors(shape.context, shape.kv_heads, shape.head_dim, device, at) for at in (0.0, 0.4))
    query = torch.randn(shape.context, shape.heads, shape.head_dim, device=device) if recipe.wants_queries else None
    made = paged.extend([first], [shape.context])
    paged.append(0, key.to(shape.torch_dtype), value.to(shape.torch_dtype), made, query)
    if others:
        paged.extend(others, [shape.context] * len(others))
    source = paged.stores[0]
    pages = source.pages[torch.tensor(first.pages, device=device)]
    rows = [owned[first.overlay_row].clone() for owned in source.owned]
    for store in paged.stores:
        for seq in group.sequences:
            store.pages[torch.tensor(seq.pages, device=device)] = pages
        for owned, row in zip(store.owned, rows, strict=True):
            owned[:] = row
    cache.state.restore(shape.context, None, None, "")
    return cache


def _read(model: Any, cache: Any, batch: int, context: int) -> None:
    """Prefills prompts of random tokens, some columns at a time."""
    tokens = torch.randint(0, 1000, (batch, context), device=model.device)
    for part in tokens.split(max(1, PREFILL_TOKENS // batch), 1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)


# --- full caches ------------------------------------------------------------------------------------------------------


def _fastest(shape: Shape, device: torch.device) -> tuple[str, float]:
    """The fastest of torch's kernels for attention over a full cache, as in `bench attention`, and its error."""
    if device.type != "cuda":
        return "sdpa", 0.0
    works = attention.full(shape, device, paged=False)
    times = all_times({work.result.name: work.calls for work in works}, device, repeat=5)
    best = min(works, key=lambda work: times[work.result.name].median).result
    return best.name, best.error


def _rows(by: str) -> Callable[..., tuple[Tensor, None]]:
    """Attention of one new token over all of a static cache, for transformers."""
    backend = BACKENDS.get(by)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        batch, heads, columns, dim = query.shape
        assert columns == 1
        rows = query.reshape(batch, key.shape[1], -1, dim)
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, scale=scaling)
        return out.reshape(batch, 1, heads, dim), None

    return attend


@contextlib.contextmanager
def _transformers(model: Any, name: str, work: Work, batch: int, rows: str | None, graph: bool) -> Iterator[Step]:
    """A decode step with a cache of transformers; `rows` names the kernel that replaces transformers' attention."""
    from transformers import DynamicCache, StaticCache
    from transformers.modeling_utils import AttentionInterface

    from kvant.engines.graphs import Replay

    shape, device, dtype = work.shape, model.device, work.shape.torch_dtype
    config, kv = model.config, (batch, work.shape.kv_heads)
    config._attn_implementation = "sdpa"
    cache: Any = DynamicCache(config=config) if name == "DynamicCache" else StaticCache(config, work.tokens)
    if work.prefill:
        _read(model, cache, batch, shape.context)
    elif name == "DynamicCache":
        for layer in range(work.layers):
            cache.update(*torch.randn(2, *kv, shape.context, shape.head_dim, device=device, dtype=dtype), layer)
    else:
        cache.early_initialization(batch, shape.kv_heads, shape.head_dim, dtype, device)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(shape.context)
    if rows is not None:
        AttentionInterface.register(ROWS, _rows(rows))  # this function takes no mask
        config._attn_implementation = ROWS
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    positions = torch.full_like(tokens, shape.context - 1)

    def once() -> Tensor:
        positions.add_(1)
        return model(tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    run = Replay(once, device, f"a step with {name}") if graph else once

    def step(new: Tensor) -> Tensor:
        tokens.copy_(new[:, None])
        return run()

    try:
        yield step
    finally:
        config._attn_implementation = "sdpa"
