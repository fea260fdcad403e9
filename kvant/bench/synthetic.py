"""Synthetic work for benchmarks: random keys and values of a model's shape, in a real cache with pages in random order."""

from __future__ import annotations

import dataclasses
from collections import abc

import torch

import kvant.calibrate  # noqa: F401  registers the fitters
from kvant.cache import PagedCache, Sequence
from kvant.calibrate.fitting import fit_layer
from kvant.layout import Layout
from kvant.ops import LayerStore, PagedBatch
from kvant.recipe import Recipe
from kvant.rope import Rope
from kvant.stats import LayerStats, Moments, Probe, WeightedMoments

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of one layer's attention: heads, batch and context."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch", "context", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} x {self.head_dim}, {self.batch} x {self.context} tokens"

    @property
    def full_bytes(self) -> int:
        """Bytes of the unquantized keys and values."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * self.torch_dtype.itemsize


def vectors(tokens: int, heads: int, dim: int, device: torch.device | str, shift: float = 0.0) -> Tensor:
    """Random keys or values whose channels differ in scale, as in models: float32 [tokens, heads, head_dim]."""
    widths = torch.linspace(0.3, 2.0, dim, device=device)
    return torch.randn(tokens, heads, dim, device=device) * widths + shift


def fitted(recipe: Recipe, shape: Shape, device: torch.device | str) -> dict[str, Tensor]:
    """Calibrated tensors of a recipe, fitted on such vectors; empty for a recipe that needs none."""
    if not recipe.calibrated:
        return {}
    heads, dim = shape.kv_heads, shape.head_dim
    formats = (stream.codec.bind(dim, dtype=shape.dtype).format(dim) for stream in recipe.streams.values())
    books = [(stream.is_residual, stream.codebook) for stream in formats if stream.codebook is not None]
    alone = [book.centroids for residual, book in books if residual or book.per == "space"]
    tokens = max([512, *(4 * count for count in alone)])  # k-means has a vector a token, and needs more than centroids
    keys, values = (vectors(tokens, heads, dim, "cpu", shift) for shift in (0.0, 0.3))
    queries = torch.randn(tokens, heads, shape.heads // heads, dim)
    rows = torch.arange(tokens - 64, tokens)
    attended = moments(values[:256].transpose(0, 1))
    of_keys, of_values = (moments(x.transpose(0, 1)) for x in (keys, values))
    stats = LayerStats(
        queries=moments(queries.permute(1, 0, 2, 3).flatten(1, 2)),
        keys=of_keys,
        values=of_values,
        attended=attended.second,
        probes=(Probe(queries[rows], keys, values, rows),),
        scale=dim**-0.5,
        attended_mean=attended.mean,
        weighted_keys=WeightedMoments(of_keys.mean, of_keys.second),
        weighted_values=WeightedMoments(of_values.mean, of_values.second),
    )
    return {name: tensor.to(device) for name, tensor in fit_layer(recipe, stats).items()}


def moments(x: Tensor) -> Moments:
    """Moments of vectors [heads, n, head_dim]."""
    wide = x.double()
    return Moments(x.shape[1], wide.mean(1), wide.mT @ wide / x.shape[1], wide.abs().amax(1), x.float())


def make_cache(recipe: Recipe, shape: Shape, device: torch.device | str, tokens: abc.Sequence[int]) -> PagedCache:
    """An empty cache of one layer with room for sequences of `tokens` tokens each."""
    layout = Layout.of(recipe, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    pages = sum(max(1, layout.pages_for(n)) for n in tokens)
    rope = Rope(10_000.0 ** -(torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim))
    return PagedCache(
        layout, 1, pages, device, {0: fitted(recipe, shape, device)}, None, [rope] if recipe.wants_rope else None
    )


@dataclasses.dataclass
class Filled:
    """A cache of one layer with sequences in it."""

    cache: PagedCache
    seqs: list[Sequence]
    batch: PagedBatch

    @property
    def store(self) -> LayerStore:
        return self.cache.stores[0]


def fill(recipe: Recipe, shape: Shape, device: torch.device | str, lengths: list[int] | None = None) -> Filled:
    """A cache with sequences of random tokens, whose pages are then shuffled."""
    lengths = lengths or [shape.context] * shape.batch
    cache = make_cache(recipe, shape, device, lengths)
    seqs = [cache.new() for _ in lengths]
    for seq, n in zip(seqs, lengths, strict=True):
        key, value = (vectors(n, shape.kv_heads, shape.head_dim, device, shift) for shift in (0.0, 0.4))
        key, value = key.to(shape.torch_dtype), value.to(shape.torch_dtype)
        query = torch.randn(n, shape.heads, shape.head_dim, device=device) if recipe.wants_queries else None
        cache.append(0, key, value, cache.extend([seq], [n]), query)
    batch = cache.batch(seqs)
    order = torch.randperm(cache.pool.total, device=device)
    cache.stores[0].pages = cache.stores[0].pages[order]
    batch = batch._replace(block_table=order.argsort()[batch.block_table])
    return Filled(cache, seqs, batch)


def copies(filled: Filled, total: int) -> list[LayerStore]:
    """The store and copies of it, `total` bytes together, so that they do not all fit into the L2 cache."""
    store = filled.store
    count = min(64, max(1, -(-total // max(1, store.nbytes))))
    out = [store]
    for _ in range(count - 1):
        overlays = {name: overlay.clone() for name, overlay in store.overlays.items()}
        out.append(dataclasses.replace(store, pages=store.pages.clone(), overlays=overlays))
    return out
