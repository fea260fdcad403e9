"""Benchmark of append: bytes read and written per second, compared with a plain copy in the same run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from kvant.bench.synthetic import Shape, make_cache, vectors
from kvant.bench.timing import Call, all_times, buffer_bytes
from kvant.layout import Layout
from kvant.ops import LayerStore, choose, reference
from kvant.recipe import Recipe

Tensor = torch.Tensor
LIMIT = 2e-3  # largest relative difference of decoded tokens from those that the reference wrote
CHECKED = 2048  # tokens that are compared with the reference


@dataclasses.dataclass
class Result:
    recipe: str
    implementation: str
    shape: dict[str, Any]
    error: float
    differing: float  # share of bytes that differ from the reference's
    moved_bytes: int  # read and written by one call
    seconds: float = 0.0
    low: float = 0.0  # quartiles of the seconds
    high: float = 0.0
    bandwidth: float = 0.0  # bytes a second
    copy_bandwidth: float = 0.0
    share: float = 0.0  # bandwidth relative to the copy's


def difference(found: LayerStore, expected: LayerStore, tokens: int) -> tuple[float, float]:
    """Relative difference of what the first tokens of two stores decode to, and the share of bytes that differ; both are 0 where
    no token is packed yet."""
    if not tokens:
        return 0.0, 0.0
    pages = -(-tokens // found.layout.page_tokens)
    errors = []
    for name in found.layout.recipe.streams:
        rows = [
            store.stream(name).codec.decode(store.layout.unpack(name, store.pages[:pages]))[:tokens].double()
            for store in (found, expected)
        ]
        errors.append(float((rows[0] - rows[1]).norm() / rows[1].norm()))
    return max(errors), float((found.pages[:pages] != expected.pages[:pages]).double().mean())


def check(recipe: Recipe, shape: Shape, device: torch.device, implementation: str | None) -> tuple[float, float]:
    """`difference` between an implementation's and the reference's append of one sequence. Raises where it is too large. Pages are
    filled with 0xFF before."""
    layout = Layout.of(recipe, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    tokens = min(CHECKED, shape.context * shape.batch)
    key, value = _tokens(shape, tokens, device)
    query = torch.randn(tokens, shape.heads, shape.head_dim, device=device) if recipe.wants_queries else None
    cache = make_cache(recipe, shape, device, [tokens])
    batch = cache.extend([cache.new()], [tokens])
    options = {"query": query} if recipe.wants_queries else {}
    stores = []
    chosen = choose("append", layout, device, implementation)
    for run in (chosen.run, reference.append):
        empty = cache.stores[0]
        overlays = {name: torch.zeros_like(x) for name, x in empty.overlays.items()}
        states = {name: torch.zeros_like(x) for name, x in empty.states.items()}
        pages = torch.full_like(empty.pages, 0xFF)
        stores.append(dataclasses.replace(empty, pages=pages, overlays=overlays, states=states))
        run(stores[-1], key, value, batch, **options)
    found = difference(stores[0], stores[1], max(0, recipe.key.window.packed_end(tokens) - layout.recipe.origin))
    if not found[0] <= LIMIT:
        raise ValueError(
            f"{chosen.name} appends recipe {recipe.name} with a relative difference of the decoded tokens of {found[0]:.2e} "
            f"from the reference, more than {LIMIT}: not timed"
        )
    return found


def _tokens(shape: Shape, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    key, value = (vectors(tokens, shape.kv_heads, shape.head_dim, device, shift) for shift in (0.0, 0.4))
    return key.to(shape.torch_dtype), value.to(shape.torch_dtype)


def prepare(
    recipe: Recipe, shape: Shape, device: torch.device, implementation: str | None = None
) -> tuple[Result, list[Call]]:
    """Checks append, and returns calls that append `context` tokens to each of `batch` empty sequences, each on other memory."""
    error, differing = check(recipe, shape, device, implementation)
    layout = Layout.of(recipe, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    chosen = choose("append", layout, device, implementation)
    cache = make_cache(recipe, shape, device, [shape.context] * shape.batch)
    seqs = [cache.new() for _ in range(shape.batch)]
    batch = cache.extend(seqs, [shape.context] * shape.batch)
    order = torch.randperm(cache.pool.total, device=device)  # pages in random order
    size = layout.page_tokens
    batch = batch._replace(
        block_table=order[batch.block_table],
        slot_mapping=order[batch.slot_mapping // size] * size + batch.slot_mapping % size,
    )
    tokens = shape.batch * shape.context
    written = tokens * layout.heads * sum(_token_bytes(layout))
    moved = shape.full_bytes + written
    count = min(64, max(1, -(-buffer_bytes(device) // moved)))
    inputs = [_tokens(shape, tokens, device) for _ in range(count)]
    query = torch.randn(tokens, shape.heads, shape.head_dim, device=device) if recipe.wants_queries else None
    options = {"query": query} if recipe.wants_queries else {}
    stores = [cache.stores[0]]
    for _ in range(count - 1):
        stores.append(dataclasses.replace(stores[0], pages=stores[0].pages.clone()))
    calls: list[Call] = [
        functools.partial(chosen.run, store, *pair, batch, **options)
        for store, pair in zip(stores, inputs, strict=True)
    ]
    return Result(recipe.name, chosen.name, dataclasses.asdict(shape), error, differing, moved), calls


def measure(
    recipes: Sequence[Recipe], shape: Shape, device: torch.device, implementation: str | None = None, repeat: int = 20
) -> list[Result]:
    """Times append of every recipe, and a large copy, in the same run."""
    works = [prepare(recipe, shape, device, implementation) for recipe in recipes]
    times = all_times({result.recipe: calls for result, calls in works}, device, repeat)
    copy = copy_bandwidth(device, repeat)
    out = []
    for result, _ in works:
        took = times[result.recipe]
        speed = result.moved_bytes / took.median
        timed = dataclasses.replace(result, seconds=took.median, low=took.low, high=took.high, bandwidth=speed)
        out.append(dataclasses.replace(timed, copy_bandwidth=copy, share=speed / copy))
    return out


def _token_bytes(layout: Layout) -> list[int]:
    return [section.nbytes // layout.page_tokens for section in layout.sections]


def copy_bandwidth(device: torch.device, repeat: int = 20) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = (1 << 30) if device.type == "cuda" else (1 << 26)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = all_times({"copy": [lambda: target.copy_(source)]}, device, repeat, graph=False)
    return 2 * size / times["copy"].median
