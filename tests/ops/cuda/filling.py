"""Caches of random tokens, for tests of the CUDA kernels."""

from __future__ import annotations

import warnings

import torch

from kvant import recipes
from kvant.bench.synthetic import Shape, fitted, vectors
from kvant.cache import PagedCache, Sequence
from kvant.codecs.product_vq import ProductVQ
from kvant.layout import Layout
from kvant.ops import PagedBatch, reference
from kvant.rope import Rope
from tests.calibrate.synthetic import rope_of
from tests.fitted import made_up_tensors


def filled(
    name: str,
    heads: int,
    group: int,
    dim: int,
    dtype: str,
    lengths: list[int],
    page: int | None = None,
    device: str = "cuda",
    first: int = 0,
    spare: int = 2,
    rotated: int | None = None,
) -> tuple[PagedCache, list[Sequence]]:
    """A cache on the GPU, poisoned, with sequences of random tokens appended by the reference. `rotated` is how many of the channels
    RoPE rotates."""
    recipe, shape = recipes.get(name), Shape(1, 1, heads * group, heads, dim, dtype)
    layout = Layout.of(recipe, heads, dim, page_tokens=page, dtype=dtype)
    pages = sum(layout.pages_for(n) for n in lengths) + spare
    ropes = [Rope(rope_of(rotated or dim).inv_freq.to(device), first)] if recipe.wants_rope else None
    large = any(_is_large(s.codec) for s in recipe.streams.values())
    tensors = {0: made_up_tensors(recipe, heads, dim) if large else fitted(recipe, shape, device)}  # k-means takes long
    by = None if device == "cuda" else "reference"
    with warnings.catch_warnings(action="ignore"):  # of an append that no kernel serves: none is called here
        cache = PagedCache(layout, 1, pages, device, tensors, ropes=ropes, implementation=by)
    seqs = [cache.new() for _ in lengths]
    store = cache.stores[0]
    store.pages.fill_(0xFF)
    for overlay in store.overlays.values():
        overlay.fill_(float("nan"))
    for seq, n in zip(seqs, lengths, strict=True):
        k, v = (vectors(n, heads, dim, device, shift).to(shape.torch_dtype) for shift in (0.0, 0.4))
        queries = vectors(n, heads * group, dim, device, 0.0).to(shape.torch_dtype) if recipe.wants_queries else None
        reference.append(store, k, v, cache.extend([seq], [n]), queries)
    return cache, seqs


def _is_large(codec: object) -> bool:
    """Whether k-means has more centroids than it fits fast, or than there are vectors for."""
    return isinstance(codec, ProductVQ) and codec.bits > (7 if codec.books == "space" else 10)


def widened(batch: PagedBatch, pages: int) -> PagedBatch:
    """With a table that is wider than the sequences are long, as a server's is; what it has there is no page."""
    table = batch.block_table
    none = torch.full((len(table), pages), 1 << 40, device=table.device)
    return batch._replace(block_table=torch.cat((table, none), 1).contiguous())


def parts_of_one(*rows: torch.Tensor) -> list[torch.Tensor]:
    """The same rows [tokens, heads, head_dim] as parts of one tensor [tokens, ...], as a model's product gives them."""
    one = torch.cat([x.flatten(1) for x in rows], 1)
    return [part.view_as(x) for part, x in zip(one.split([x[0].numel() for x in rows], 1), rows, strict=True)]
