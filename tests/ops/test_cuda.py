"""The CUDA kernels against the reference on the same bytes: float64, poisoned memory, odd shapes. What needs no GPU runs anywhere."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.bench import attention
from kvant.bench.append import difference
from kvant.bench.synthetic import Shape, fitted, vectors
from kvant.cache import PagedCache, Sequence
from kvant.codecs.product_vq import ProductVQ
from kvant.layout import Layout
from kvant.ops import OPS, PagedBatch, choose, flash, implementations, reference
from kvant.ops.blocked import attend_plain
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import (
    append_groups,
    append_pq,
    copy_rows,
    fragments,
    geometry,
    levels,
    nearest_centroids,
    nvrtc,
    plan,
    refusals,
    transform_kv,
    unpack,
)
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import prefill as cuda_prefill
from kvant.ops.cuda.merge_parts import merge_parts
from kvant.ops.fused import HADAMARD, MATRIX, NONE, fuse
from kvant.ops.types import BoundStream, one_query_each
from kvant.rope import Rope
from kvant.transforms.hadamard import Hadamard
from kvant.transforms.random_rotation import RandomRotation
from tests.calibrate.synthetic import rope_of
from tests.conftest import make_layout, relative_error
from tests.fitted import made_up_tensors
from tests.ops.scores import head_errors, log_sum_exp, some_sinks, with_sinks

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTHS = [1, 63, 64, 129, 700, 2000]
ROTATED: list[tuple[str, int, int, dict[str, float]]] = [  # recipe, query heads a KV head, head_dim, options
    ("kvant-2", 4, 64, {}),
    ("kvant-2:rope_block=100", 5, 64, {"softcap": 5.0, "first": 1000}),
    ("kvant-2", 2, 64, {"sliding_window": 150}),
    ("kvant-2:rope_block=64,sink=70,recent=130", 3, 128, {"first": 30}),
    ("kvant-2", 1, 128, {"sliding_window": 270, "first": 200}),
    ("kvant-2:rope_block=64", 16, 128, {"softcap": 5.0, "first": 3}),
    ("kvant-2:k.bits=4/4/0,rope_block=128", 8, 128, {}),
    ("kvant-2:rope_block=64,sink=0,recent=0", 12, 64, {}),
    ("kvant-2:rope_block=100,sink=4,recent=64", 17, 64, {"rotated": 24}),
    ("kvant-2:rope_block=128", 9, 256, {"first": 77}),
]
# recipe, query heads a KV head and query, head_dim, queries a sequence, options
SEVERAL_QUERIES: list[tuple[str, int, int, int, dict[str, float]]] = [
    ("saw-int4", 4, 128, 4, {}),
    ("kvant-2:rollback=3", 4, 128, 4, {}),
    ("oscar:sink=3,recent=20,rollback=2", 2, 64, 3, {"sliding_window": 70}),
    ("int4", 1, 64, 2, {"sliding_window": 3, "softcap": 5.0}),
    ("int4:sink=4,recent=3,rollback=7", 3, 64, 8, {}),
    ("quarot-int2-win:sink=5,recent=70,rollback=4", 5, 64, 5, {}),
    ("kvant-2:rope_block=64,sink=70,recent=130,rollback=7", 4, 64, 8, {"first": 30, "sliding_window": 150}),
    ("kvant-2:rope_block=100,sink=4,recent=64,rollback=4", 3, 64, 5, {"first": 1000, "softcap": 5.0}),
    ("kvant-2:rope=post,rollback=1", 8, 64, 2, {}),
    ("int4:v.group=32,k.group=32", 4, 64, 4, {}),
    ("saw-int4-kmeans", 4, 64, 2, {}),
    ("vecinfer-2:rollback=3", 4, 64, 4, {}),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20,rollback=2", 4, 64, 3, {"first": 30}),
    ("kivi-k2v2:rollback=3", 4, 64, 4, {}),  # groups of tokens: every query is a sequence
    ("saw-int4", 2, 256, 4, {}),
]
HALVED: list[tuple[str, int, int, dict[str, float]]] = [  # bands of which a lane has one byte of a token
    ("kvant-3", 4, 64, {"first": 30}),
    ("kvant-3:rope=post", 9, 64, {"softcap": 5.0}),
    ("kvant-2:rope=post,k.bits=3/2/0,v.bits=3", 5, 128, {}),
    ("kvant-2:rope_block=64,k.bits=0/4/2", 3, 64, {}),
]
ROTATED_HIGH_BATCH: list[tuple[str, int, int, dict[str, float]]] = [  # more, where there are many blocks of positions
    ("million-2:rope=block,rope_block=64,k.bits=10,v.bits=9", 6, 96, {"first": 5}),
    ("kvant-2:rope_block=64", 8, 128, {"sliding_window": 100, "softcap": 5.0}),
    ("kvant-2:rope_block=64,k.bits=2", 4, 64, {}),
    ("kvant-3:rope_block=64", 4, 128, {"first": 5}),
    ("kvant-3:rope_block=64", 9, 64, {}),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 4, 64, {"first": 30}),
    ("million-2:rope=block,rope_block=100", 9, 128, {"softcap": 5.0}),
]
ROTATED_INSIDE: list[tuple[str, int, int, dict[str, float]]] = [  # where decode rotates 16-bit queries itself
    ("kvant-2", 4, 128, {}),
    ("kvant-2:rope_block=100", 5, 64, {"softcap": 5.0, "first": 1000}),
    ("kvant-2", 2, 64, {"sliding_window": 150}),
    ("kvant-2:rope_block=64,sink=70,recent=130", 3, 128, {"first": 30}),
    ("kvant-2", 1, 128, {"sliding_window": 270, "first": 200}),
    ("kvant-2:rope_block=64", 16, 128, {"softcap": 5.0, "first": 3}),
    ("kvant-2:k.bits=4/4/0,rope_block=128", 8, 64, {}),
    ("kvant-2:k.bits=0/2/4,rope_block=64", 4, 128, {"first": 5}),
    ("kvant-2:k.bits=4,rope_block=64", 6, 96, {}),
    ("kvant-2:k.bits=3,rope_block=64", 7, 64, {}),
    ("kvant-3:rope_block=64", 4, 64, {"first": 5}),
    ("kvant-2:rope_block=64,sink=0,recent=0", 12, 64, {}),
    ("kvant-2:rope_block=64,k.bits=2", 17, 64, {"first": 77}),
]
SCALES: list[tuple[str, int, int, dict[str, float]]] = [  # several scales a token
    ("int4:group=32", 4, 128, {}),
    ("oscar:group=64,sink=3,recent=20", 4, 128, {"sliding_window": 150}),
    ("oscar:group=32", 2, 64, {"softcap": 5.0}),
    ("int4:group=32,zero=integer,meta=float16", 5, 64, {}),
    ("saw-int4:group=64", 9, 128, {"softcap": 5.0}),
    ("int2:k.group=32,v.group=16", 16, 64, {}),
    ("int8:k.group=64,v.group=32", 1, 128, {}),
    ("int4:v.group=32", 8, 96, {}),
    ("int4:k.group=32", 3, 96, {}),
    ("int2:group=64,sink=2,recent=5", 4, 256, {}),
]
RESIDUAL: list[tuple[str, int, int, dict[str, float]]] = [  # centroids of whole head vectors, and codes of residuals
    ("saw-int4-kmeans", 4, 128, {}),
    ("saw-int4-kmeans-rot:centroids=16,sink=3,recent=20", 5, 64, {"sliding_window": 150}),
    ("saw-int4-kmeans:centroids=40,books=layer,zero=float,meta=float16", 1, 64, {"softcap": 5.0}),
    ("saw-int4-kmeans-rot:bits=2,group=32", 16, 64, {}),
    ("saw-int4-kmeans:centroids=1", 8, 96, {}),
    ("saw-int4-kmeans:k.centroids=30,v.centroids=70,sink=3,recent=20", 7, 64, {"sliding_window": 150}),
    ("saw-int4-kmeans:k.centroids=1,v.centroids=33,group=64,recent=5", 3, 128, {"softcap": 5.0}),
]
LEVELS: list[tuple[str, int, int, dict[str, float]]] = [  # codes that are places in a table of levels
    ("turboquant-4", 4, 64, {}),
    ("turboquant-3:sink=3,recent=20", 9, 128, {"softcap": 5.0}),
    ("turboquant-2", 1, 128, {"sliding_window": 150}),
    ("turboquant-4:k.bits=2,v.bits=3", 16, 64, {}),
    ("turboquant-4:meta=bfloat16", 5, 96, {}),
    ("turboquant-3:v.bits=4", 8, 256, {}),
]
SPACES: list[tuple[str, int, int, dict[str, float]]] = [  # a codebook for every sub-vector's place
    ("million-2:books=space", 4, 64, {}),
    ("million-2:k.books=space,bits=6", 9, 64, {"softcap": 5.0}),
    ("million-4:bits=4,books=space", 3, 96, {}),
    ("vecinfer-2:bits=8,v.books=space,dim=8", 1, 128, {"sliding_window": 150}),
]
ROTATED_KEYS: list[tuple[str, int, int, dict[str, float]]] = [  # where decode rotates keys that are stored before RoPE
    ("squat-pre", 4, 64, {"first": 1000}),
    ("squat-pre:sink=3,k.bits=4,k.flush=64,v.recent=5", 9, 64, {"softcap": 5.0, "first": 77}),
    ("squat-pre:v.group=0,k.bits=3", 2, 128, {"sliding_window": 150}),
    ("squat-pre:k.group=16,k.flush=48,k.recent=7,v.recent=70,k.bits=8", 5, 32, {"first": 5}),
    ("squat-pre:v.bits=4", 1, 96, {}),
    ("squat-pre", 4, 128, {"first": 3}),
]
SINK_LOGITS: list[tuple[str, int, int, dict[str, float]]] = [  # of every way that outputs are finished
    ("saw-int4", 4, 128, {}),
    ("saw-int4-kv", 8, 64, {"sliding_window": 128}),
    ("oscar:sink=3,recent=20", 5, 64, {"sliding_window": 150}),
    ("kvant-2", 4, 64, {}),
    ("kvant-2:rope_block=64,sink=5", 8, 128, {"sliding_window": 100}),
    ("kvant-2:rope=post", 3, 64, {}),
    ("kvant-2:rope=post", 4, 128, {"softcap": 5.0}),
    ("kvant-4-fast", 9, 64, {}),
    ("int4:group=32", 4, 64, {"softcap": 5.0}),
    ("saw-int4-kmeans-rot:centroids=40,sink=3,recent=20", 4, 64, {}),
    ("kivi-k2v2", 4, 64, {}),
    ("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", 9, 64, {"sliding_window": 150}),
    ("squat-pre:sink=3", 4, 64, {}),
    ("vecinfer-2", 4, 64, {}),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 4, 64, {}),
]
ROTATED_BEFORE = (("QUERY_TRANSFORM", 2),)  # by a kernel before decode
ROTATED_BY_DECODE = (("QUERY_TRANSFORM", 4),)  # at a high batch
H200 = (232448, 233472)  # shared memory of a block and of a multiprocessor


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


def parts_of_one(*rows: torch.Tensor) -> list[torch.Tensor]:
    """The same rows [tokens, heads, head_dim] as parts of one tensor [tokens, ...], as a model's product gives them."""
    one = torch.cat([x.flatten(1) for x in rows], 1)
    return [part.view_as(x) for part, x in zip(one.split([x[0].numel() for x in rows], 1), rows, strict=True)]


def check_several_queries(
    cache: PagedCache,
    seqs: list[Sequence],
    group: int,
    dim: int,
    queries: int,
    settings: dict[str, Any],
    limit: float,
    dtype: torch.dtype = torch.float32,
    tuned: tuple[tuple[str, int], ...] = (),
) -> None:
    """Decode of several queries a sequence, of which some sequences have no token more, against the reference."""
    batch, store = cache.batch(seqs), cache.stores[0]
    wide = torch.cat((batch.block_table, torch.full((len(seqs), 3), 1 << 40, device=store.pages.device)), 1)
    each = one_query_each(batch, queries)
    batch = batch._replace(block_table=wide.contiguous())  # wider than the sequences are long, as a server's table is
    q = torch.randn(len(seqs) * queries, 2 * group, dim, device=store.pages.device)
    sinks = settings.get("sink_logits") is not None
    # Logits are far apart. Not where they would be rounded: keys in groups round queries times the scales of a group, a query in 16
    # bits is rounded when it is rotated. With sink logits the tokens' share shows the error of logits, which grows with them.
    if dtype == torch.float32 and not cache.layout.recipe.key.groupwise and not sinks:
        q *= 4
    q = q.to(dtype)
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, tuned=tuned, **settings)
    assert found.shape == q.shape and lse.shape == q.shape[:2]
    expected = reference.decode(store, q.double(), each, **settings)
    assert relative_error(found, expected) < limit
    if sinks:  # where tokens have little of the softmax, it shows the error of logits, which the other heads hide
        assert max(head_errors(found, expected)) < 4 * limit
    exact = log_sum_exp(store, q, each, **settings)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-3, atol=2e-2)


def _is_large(codec: object) -> bool:
    """Whether k-means has more centroids than it fits fast, or than there are vectors for."""
    return isinstance(codec, ProductVQ) and codec.bits > (7 if codec.books == "space" else 10)


def check_decode(
    name: str,
    group: int = 4,
    dim: int = 128,
    dtype: str = "float32",
    softcap: float | None = None,
    sliding_window: int | None = None,
    page: int | None = None,
    lengths: list[int] | None = None,
    heads: int = 2,
    limit: float = 5e-4,
    first: int = 0,
    rotated: int | None = None,
    tuned: tuple[tuple[str, int], ...] = (),
) -> None:
    cache, seqs = filled(name, heads, group, dim, dtype, lengths or LENGTHS, page, first=first, rotated=rotated)
    assert cache.ops["decode"].name == "cuda"
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), heads * group, dim, device="cuda").to(getattr(torch, dtype))
    options = {"scale": dim**-0.5, "softcap": softcap, "sliding_window": sliding_window}
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, tuned=tuned, **options)  # type: ignore[arg-type]
    assert relative_error(found, reference.decode(store, q.double(), batch, **options)) < limit  # type: ignore[arg-type]
    expected = log_sum_exp(store, q, batch, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(lse.double(), expected, rtol=1e-3, atol=5e-3)


COPIED_INDICES = (("INDICES_IN_REGISTERS", 0),)
# How decode reads indices of product VQ: to registers, by the default and by other launches; from pages that are copied to shared memory.
INDEX_LAUNCHES: list[tuple[tuple[str, int], ...]] = [
    (),
    (("INDICES_IN_REGISTERS", 1), ("PAIRED_BOOKS", 0), ("TEAMS", 2), ("WARPS", 6)),
    (("INDICES_IN_REGISTERS", 1), ("CHUNK_TILES", 2)),
    COPIED_INDICES,
    (*COPIED_INDICES, ("PAIRED_BOOKS", 1), ("TEAMS", 3), ("WARPS", 4)),
]


@gpu
@needs_gpu
@pytest.mark.parametrize("tuned", INDEX_LAUNCHES)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-4), ("bfloat16", 2e-3)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 150, "softcap": 5.0}])
def test_indices_go_to_registers_or_to_shared_memory(
    options: dict[str, Any],
    dtype: str,
    limit: float,
    tuned: tuple[tuple[str, int], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    lengths = [1, 63, 64, 65, 129, 700, 9000]
    check_decode("vecinfer-2", dtype=dtype, limit=limit, lengths=lengths, tuned=tuned, **options)
    check_decode("vecinfer-2:sink=0,recent=0", dtype=dtype, limit=limit, lengths=lengths, tuned=tuned, **options)


@gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-4), ("bfloat16", 2e-3), ("float16", 5e-4)])
@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(("name", "group", "dim", "options"), SINK_LOGITS)
def test_sink_logits(
    name: str,
    group: int,
    dim: int,
    options: dict[str, float],
    low_batch: bool,
    dtype: str,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a float64 softmax with one more logit: sequences of all lengths, one that many CTAs share, and many."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 1 << 20 if low_batch else 0)
    for lengths in (LENGTHS, [20000, 3], list(range(1, 400, 9))):
        cache, seqs = filled(name, 2, group, dim, dtype, lengths)
        batch, store = cache.batch(seqs), cache.stores[0]
        q = torch.randn(len(seqs), 2 * group, dim, device="cuda").to(getattr(torch, dtype))
        sinks, settings = some_sinks(2 * group, "cuda"), {"scale": dim**-0.5, **options}
        with attention.poisoned():
            found, lse = cuda_decode.decode_with_lse(store, q, batch, sink_logits=sinks, **settings)  # type: ignore[arg-type]
        expected, sums = with_sinks(store, q, batch, sinks, **settings)  # type: ignore[arg-type]
        assert relative_error(found, expected) < limit
        assert max(head_errors(found, expected)) < max(
            2e-3, 2 * limit
        )  # with little of the softmax left: the error of logits
        torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=5e-3)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["saw-int4", "quarot-int2-win", "vecinfer-2", "kivi-k2v2", "kitty-pro"])
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 128), (2, 64), (3, 96), (4, 256), (5, 64), (8, 128), (12, 96), (16, 256), (40, 64)]
)
def test_decode_of_every_shape(name: str, group: int, dim: int) -> None:
    check_decode(name, group, dim)


@gpu
@needs_gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "name",
    [
        *("int8", "int3", "int2", "int4:zero=float", "int4:k.bits=8,v.bits=3", "saw-int4-kv:seed=3", "oscar"),
        *("int2:sink=5,recent=70", "int4:sink=0,recent=33", "int2:sink=7,recent=0"),
        *("kvant-4-fast", "kvant-2", "kvant-2:rope_block=100", "kvant-2:rope=post", "kvant-2:rope=post,k.bits=4/4/0"),
        *("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", "million-2:rope=block"),
        *("vecinfer-4", "vecinfer-2", "million-2:books=head", "million-1.5:bits=8", "million-2:k.bits=10,v.bits=9"),
        *("vecinfer-2:dim=2,bits=4", "vecinfer-2:dim=2,bits=3", "vecinfer-2:dim=4,bits=6"),
    ],
)
def test_decode_of_every_recipe(name: str, dim: int) -> None:
    check_decode(name, 4, dim)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith(("vecinfer", "million"))])
def test_decode_of_large_codebooks(name: str) -> None:
    check_decode(name, heads=4)
    check_decode(name, 8, heads=4, dtype="bfloat16", limit=2e-3, lengths=[5000, 300])


@gpu
@needs_gpu
@pytest.mark.parametrize(("name", "group", "dim", "options"), [*SCALES, *RESIDUAL, *LEVELS, *SPACES, *HALVED])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-4), ("bfloat16", 2e-3), ("float16", 5e-4)])
@pytest.mark.parametrize("few", [False, True])
def test_decode_of_several_scales_residuals_levels_and_spaces(
    name: str,
    group: int,
    dim: int,
    options: dict[str, float],
    dtype: str,
    limit: float,
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences of all lengths, one that many CTAs share, and many."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 1 << 20 if few else 0)
    if name.startswith("turboquant"):
        limit += levels.CLOSE  # that levels as bytes may be off
    for lengths in (LENGTHS, [20000, 3], list(range(1, 400, 6))):
        check_decode(name, group, dim, dtype, limit=limit, lengths=lengths, **options)  # type: ignore[arg-type]
    check_decode(name, group, dim, dtype, limit=limit, page=128, **options)  # type: ignore[arg-type]


@gpu
@needs_gpu
@pytest.mark.parametrize(("name", "group", "dim", "queries", "options"), SEVERAL_QUERIES)
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-4), ("bfloat16", 2e-3), ("float16", 5e-4)])
def test_decode_of_several_queries(
    name: str,
    group: int,
    dim: int,
    queries: int,
    options: dict[str, float],
    few: bool,
    dtype: str,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sees the tokens up to its own, from where decode at that length would read them."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if few else 0)
    options = dict(options)
    first = int(options.pop("first", 0))
    cache, seqs = filled(name, 2, group, dim, dtype, [queries, 64, 66, 131, 700, 2000], first=first)
    for sinks in (None, some_sinks(2 * group, "cuda")):
        settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None, "sink_logits": sinks, **options}
        check_several_queries(cache, seqs, group, dim, queries, settings, limit, getattr(torch, dtype))


@gpu
@needs_gpu
@pytest.mark.parametrize(("name", "group", "dim", "options"), ROTATED)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-4), ("bfloat16", 2e-3), ("float16", 5e-4)])
def test_decode_of_rotated_queries(
    name: str, group: int, dim: int, options: dict[str, float], dtype: str, limit: float
) -> None:
    check_decode(name, group, dim, dtype, limit=limit, tuned=ROTATED_BEFORE, **options)  # type: ignore[arg-type]


@gpu
@needs_gpu
@pytest.mark.parametrize(("name", "group", "dim", "options"), ROTATED_INSIDE)
@pytest.mark.parametrize(("dtype", "limit"), [("float16", 5e-4), ("bfloat16", 2e-3)])
def test_decode_that_rotates_its_queries(
    name: str,
    group: int,
    dim: int,
    options: dict[str, float],
    dtype: str,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By no kernel before it. Sequences that end inside a RoPE block and such that are shorter, and one that many CTAs share."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    monkeypatch.delattr(cuda_decode, "_rotate_queries")
    for lengths in ([1, 63, 64, 129, 255, 256, 257, 700, 2000], [20000, 3], [5000] * 40):
        check_decode(name, group, dim, dtype, limit=limit, lengths=lengths, tuned=ROTATED_BY_DECODE, **options)  # type: ignore[arg-type]


@gpu
@needs_gpu
@pytest.mark.parametrize("pipelined", [0, 1])
def test_queries_are_rotated_over_pages_in_random_order(pipelined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-8B's shape. The table is wider than the sequences are long."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    lengths = [1, 255, 513, 0, 4000, 9001]
    cache, seqs = filled("kvant-2", 8, 4, 128, "bfloat16", lengths, first=300)
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), 32, 128, device="cuda").bfloat16()
    expected = reference.decode(store, q.double(), batch, scale=128**-0.5)
    order = torch.randperm(len(store.pages), device="cuda")
    place = torch.argsort(order)
    table = torch.full((len(seqs), batch.block_table.shape[1] + 50), 1 << 40, device="cuda")
    for row, n in enumerate(lengths):
        count = cache.layout.pages_for(n)
        table[row, :count] = place[batch.block_table[row, :count]]
    store.pages.copy_(store.pages[order])
    batch = batch._replace(block_table=table)
    for tuned in ((*ROTATED_BY_DECODE, ("PIPELINED_ROPE", pipelined)), ROTATED_BEFORE):
        with attention.poisoned():
            found, _ = cuda_decode.decode_with_lse(store, q, batch, scale=128**-0.5, tuned=tuned)
        assert relative_error(found, expected) < 2e-3


@gpu
@needs_gpu
@pytest.mark.parametrize(("name", "group", "dim", "options"), [*ROTATED, *ROTATED_HIGH_BATCH])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-4), ("bfloat16", 2e-3), ("float16", 5e-4)])
def test_decode_of_rotated_queries_of_a_high_batch(
    name: str,
    group: int,
    dim: int,
    options: dict[str, float],
    dtype: str,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where there are many blocks of positions."""
    monkeypatch.setattr(cuda_decode, "HIGH_BATCH_PASSES", 0)
    check_decode(name, group, dim, dtype, limit=limit, tuned=ROTATED_BEFORE, **options)  # type: ignore[arg-type]


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "tuned"),
    [
        *(("kvant-2", tuned) for tuned in (ROTATED_BEFORE, ROTATED_BY_DECODE)),
        *(("kvant-4", tuned) for tuned in (ROTATED_BEFORE, ())),
        *((name, ()) for name in ("oscar", "oscar:recent=1", "quarot-int2-win", "saw-int4")),
    ],
)
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_decode_beside_append(
    name: str, tuned: tuple[tuple[str, int], ...], few: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are launched without a wait of the host give what steps give that wait. Queries look for the newest token."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 1 << 20 if few else 0)
    lengths, heads, group, steps = [3, 64, 200, 700] * 8, 8, 4, 16
    cache, seqs = filled(name, heads, group, 128, "bfloat16", lengths, first=300, spare=2 + len(lengths))
    store = cache.stores[0]
    batches = [cache.extend(seqs, [1] * len(seqs)) for _ in range(steps)]
    before = [store.pages.clone(), *(overlay.clone() for overlay in store.overlays.values())]
    k, v = (torch.randn(steps, len(seqs), heads, 128, device="cuda").bfloat16() for _ in range(2))
    q = (4 * k.float()).bfloat16().repeat_interleave(group, 2)
    assert not cuda_append.allocates(store, torch.bfloat16)

    def run(after_append: bool) -> torch.Tensor:
        for mine, kept in zip((store.pages, *store.overlays.values()), before, strict=True):
            mine.copy_(kept)
        out = torch.empty_like(q)

        def step(i: int) -> None:
            queries = q[i].clone()  # by a kernel before append
            cuda_append.append(store, k[i], v[i], batches[i])
            cuda_decode.decode_with_lse(
                store, queries, batches[i], scale=128**-0.5, out=out[i], after_append=after_append, tuned=tuned
            )

        for i in range(steps):
            if not after_append:
                step(i), torch.cuda.synchronize()
            elif not captured:
                step(i)
        if after_append and captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(steps):
                    step(i)
            graph.replay()
        torch.cuda.synchronize()
        return out

    expected = run(False)
    close = torch.nn.functional.cosine_similarity(expected.float(), v.repeat_interleave(group, 2).float(), dim=-1)
    assert close.median() > 0.9  # what is appended last decides
    for _ in range(3):
        torch.testing.assert_close(run(True), expected, rtol=0, atol=0)


@gpu
@needs_gpu
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
def test_queries_are_rotated_alike_by_all_kernels(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the two before decode and by decode itself. More sequences than a warp has lanes, of all lengths, beside a table that is wider than they are long."""
    cache, seqs = filled("kvant-2:rope_block=64", 2, group, 128, "bfloat16", [1, 63, 64, 700, 2000], first=7)
    batch, store = cache.batch(seqs * 9), cache.stores[0]
    wide = torch.cat((batch.block_table, torch.full((len(batch.block_table), 30), 1 << 40, device="cuda")), 1)
    batch = batch._replace(block_table=wide.contiguous())
    q = torch.randn(len(wide), 2 * group, 128, device="cuda").bfloat16()
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    found = []
    for least, tuned in ((0, ROTATED_BEFORE), (1 << 30, ROTATED_BEFORE), (0, ROTATED_BY_DECODE)):
        monkeypatch.setattr(cuda_decode, "HIGH_BATCH_PASSES", least)
        with attention.poisoned():
            found.append(cuda_decode.decode_with_lse(store, q, batch, scale=128**-0.5, tuned=tuned)[1])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=2e-3)


@gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-3), ("float16", 5e-4)])
def test_decode_in_16_bits(dtype: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    check_decode("saw-int4-kv", dtype=dtype, limit=limit)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)  # by the kernel for many sequences
    check_decode("saw-int4-kv", dtype=dtype, limit=limit)
    check_decode("quarot-int2-win", dtype=dtype, limit=limit)
    check_decode("vecinfer-2", dtype=dtype, limit=limit)


@gpu
@needs_gpu
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype"),
    [
        ("oscar", 4, 128, "bfloat16"),
        ("oscar:per_head=true", 5, 64, "float16"),
        ("oscar:sink=3,recent=20", 9, 96, "bfloat16"),
        ("kvant-2", 4, 128, "bfloat16"),
        ("kvant-2:rope=post", 17, 64, "float16"),
    ],
)
def test_decode_by_matrices(
    name: str, group: int, dim: int, dtype: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sequences are few, of outputs and of queries; in kernels of their own where they are many."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if few else 0)
    if few:
        monkeypatch.delattr(cuda_decode, "_transform_outputs")
    limit = 2e-3 if dtype == "bfloat16" else 5e-4
    check_decode(name, group, dim, dtype, limit=limit)
    check_decode(name, group, dim, dtype, limit=limit, sliding_window=300)
    check_decode(name, group, dim, dtype, limit=limit, lengths=[20000, 3, 700], heads=3)


@gpu
@needs_gpu
@pytest.mark.parametrize(("softcap", "sliding_window"), [(5.0, None), (None, 100), (30.0, 300), (None, 1)])
@pytest.mark.parametrize("name", ["saw-int4", "quarot-int2-win", "vecinfer-2"])
def test_decode_with_soft_cap_and_sliding_window(name: str, softcap: float | None, sliding_window: int | None) -> None:
    check_decode(name, softcap=softcap, sliding_window=sliding_window)
    check_decode("kvant-4-fast", 5, 64, softcap=softcap, sliding_window=sliding_window)


@gpu
@needs_gpu
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("name", ["saw-int4", "quarot-int2-win", "vecinfer-2"])
def test_decode_of_other_pages(name: str, page: int) -> None:
    check_decode(name, page=page)
    check_decode(name, 2, 64, sliding_window=77, page=page)


@gpu
@needs_gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "kivi-k4v4",
            "kivi-k2v4-sink",
            "kivi-k4v2-sink",
            "kitty",
            "squat",
            "kivi-k2v2:k.bits=3,v.bits=8",
            "kivi-k4v4:k.bits=8,v.bits=3",
        ),
        *(
            "kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5",
            "kivi-k2v2:v.group=0",
            "kivi-k2v2:v.group=16,v.recent=0",
        ),
        *("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", "kitty:boost=0.3", "kitty-pro:v.group=32"),
        *("kivi-k2v2-sink:shift=false", "kitty-pro:shift=false"),
    ],
)
def test_decode_of_every_group_wise_recipe(name: str, dim: int) -> None:
    check_decode(name, 4, dim)
    check_decode(name, 4, dim, softcap=5.0, sliding_window=300)
    for dtype, limit in (("bfloat16", 2e-3), ("float16", 5e-4)):
        check_decode(name, 4, dim, dtype, limit=limit)


@gpu
@needs_gpu
@pytest.mark.parametrize(("name", "group", "dim", "options"), ROTATED_KEYS)
@pytest.mark.parametrize("few", [False, True])
def test_decode_of_keys_before_rope(
    name: str, group: int, dim: int, options: dict[str, float], few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are rotated when they are read, from pages, tails and sinks."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 1 << 20 if few else 0)
    for dtype, limit in (("float32", 5e-4), ("bfloat16", 2e-3), ("float16", 5e-4)):
        check_decode(name, group, dim, dtype, limit=limit, **options)  # type: ignore[arg-type]
    for lengths in ([40_000, 3], list(range(1, 500, 7))):
        check_decode(name, group, dim, "bfloat16", limit=2e-3, lengths=lengths, **options)  # type: ignore[arg-type]


@gpu
@needs_gpu
def test_decode_of_groups_after_a_cut() -> None:
    """Keys that came back into a tail beside values that are read from pages."""
    for name in ("kivi-k2v2", "kitty-pro"):
        cache, seqs = filled(name, 2, 4, 128, "float32", LENGTHS)
        q = torch.randn(len(seqs), 8, 128, device="cuda")
        for cut in (13, 111, 129):
            for seq in seqs:
                cache.crop(seq, max(1, seq.length - cut))
            found = cuda_decode.decode(cache.stores[0], q, cache.batch(seqs), scale=0.1)
            assert (
                relative_error(found, reference.decode(cache.stores[0], q.double(), cache.batch(seqs), scale=0.1))
                < 5e-4
            )


def check_padded_step(name: str, device: str) -> None:
    """A decode step of three sequences, as it is and with two sequences and two tokens of padding: the same bytes, the same outputs."""
    heads, group, dim, lengths = 2, 4, 64, [1, 127, 300]
    stores, outputs = [], []
    for padding in (0, 2):
        torch.manual_seed(1)
        cache, seqs = filled(name, heads, group, dim, "bfloat16", lengths, 128, device)
        batch = cache.extend(seqs, [1] * len(seqs))
        count = len(seqs) + padding
        k, v, q = (torch.randn(5, n, dim, device=device).bfloat16()[:count] for n in (heads, heads, heads * group))

        def padded(x: torch.Tensor, value: int, padding: int = padding) -> torch.Tensor:
            return torch.cat((x, torch.full_like(x[:1], value).expand(padding, *x.shape[1:])))

        batch = PagedBatch(
            padded(batch.block_table, 0),
            padded(batch.seq_lens, 0),
            padded(batch.slot_mapping, -1),
            padded(batch.query_start_loc, len(seqs)),
            padded(batch.overlay_rows, 0),
            padded(batch.sinks, 0),
            {side: padded(x, 0) for side, x in batch.ring_start.items()},
        )
        cuda_append.append(cache.stores[0], k, v, batch)
        outputs.append(cuda_decode.decode(cache.stores[0], q, batch, scale=0.1)[: len(seqs)])
        stores.append(cache.stores[0])
    one, two = stores
    assert torch.equal(one.pages, two.pages)
    for side, overlay in one.overlays.items():
        assert torch.equal(overlay.view(torch.uint8), two.overlays[side].view(torch.uint8))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-2, atol=1e-3)  # splits of a sequence may differ


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["kivi-k2v2-sink:shift=false", "kitty-pro:shift=false", "kitty-pro"])
def test_a_step_of_groups_may_be_padded(name: str) -> None:
    check_padded_step(name, "cuda")


@gpu
@needs_gpu
def test_decode_of_long_and_of_many_sequences() -> None:
    check_decode("kivi-k2v2", lengths=[40_000, 3])
    check_decode("kitty-pro", 8, lengths=list(range(1, 500, 7)))
    check_decode("int2", lengths=[40_000, 3])
    check_decode("quarot-int2-win", lengths=[40_000])
    check_decode("int2", 8, lengths=list(range(1, 200, 3)))
    check_decode("vecinfer-2", lengths=[40_000, 3])
    check_decode("vecinfer-2", 8, lengths=list(range(1, 400, 6)))


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["quarot-int2-win", "vecinfer-2"])
def test_decode_in_a_cuda_graph_follows_its_inputs(name: str) -> None:
    cache, seqs = filled(name, 2, 4, 128, "bfloat16", [900, 400])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    run = cache.ops["decode"].run
    run(store, q, batch, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(store, q, batch, scale=0.1)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        batch.seq_lens.sub_(3)
        graph.replay()
        assert relative_error(out, reference.decode(store, q.double(), batch, scale=0.1)) < 2e-3


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["saw-int4", "kvant-2:rollback=9", "kivi-k2v2:rollback=9", "full"])
def test_decode_of_several_queries_in_a_cuda_graph(name: str) -> None:
    """As in a server's graph of steps that verify drafts: some are taken back, and a sequence of padding has no token."""
    queries = 4
    cache, seqs = filled(name, 2, 4, 128, "bfloat16", [900, 400, 77])
    batch, store = cache.batch(seqs), cache.stores[0]
    batch.seq_lens[2] = 0
    q = torch.randn(3 * queries, 8, 128, device="cuda", dtype=torch.bfloat16)
    run = cache.ops["decode"].run
    run(store, q, batch, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(store, q, batch, scale=0.1)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        batch.seq_lens[:2].sub_(3)
        graph.replay()
        each = one_query_each(batch, queries)
        expected = reference.decode(store, q.double(), each, scale=0.1)
        assert relative_error(out[: 2 * queries], expected[: 2 * queries]) < 2e-3
        assert bool((out[2 * queries :] == 0).all())


HISTORIES = [
    "int4",
    "saw-int4",
    "oscar:sink=3,recent=20",
    "kvant-2",
    "kvant-2:rope_block=100",
    "kvant-3",
    "kvant-4-fast",
    "int3",
    "oscar:group=32,sink=3,recent=20",
    "kivi-k2v2",
    "kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5",
    "kitty-pro",
    "kitty:sink=3",
    "kivi-k2v2-sink:shift=false",
    "squat",
    "squat-pre",
    "kvant-2:rope_block=24",
    "vecinfer-2",
    "vecinfer-4",
    "million-2:k.bits=10,v.bits=9",
    "million-1.5:bits=8,books=head",
    "turboquant-2",
    "turboquant-3",
    "million-2:books=space",
    "saw-int4-kmeans:centroids=64",
    "saw-int4-kmeans-rot:k.books=layer,k.centroids=300,v.centroids=1,v.group=64",
]


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("room", [96, 400, 1 << 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", HISTORIES)
def test_prefill_over_a_history(name: str, dtype: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all sequences at once, for some of them, and not for the longest; lengths on the device and on the host."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", room)
    cache, seqs = filled(name, 2, 4, 128, dtype, [1, 63, 700])
    store, counts = cache.stores[0], [3, 1, 60, 5]
    k, v = (vectors(sum(counts), 2, 128, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 8, 128, device="cuda").to(getattr(torch, dtype))
    batch = cache.extend([*seqs, cache.new()], counts)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    sinks = some_sinks(8, "cuda")
    for softcap, window, own in (
        (None, None, None),
        (3.0, None, None),
        (None, 200, None),
        (None, None, sinks),
        (None, 200, sinks),
    ):
        options = {"scale": 128**-0.5, "softcap": softcap, "sliding_window": window, "sink_logits": own}
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
        for given in (batch, host):
            with attention.poisoned():
                found = cuda_prefill.prefill(store, q, k, v, given, **options)  # type: ignore[arg-type]
            assert relative_error(found, expected) < 2e-3, (softcap, window, own is not None)


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("window", [1, 100, 257, 1000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["saw-int4", "kvant-2", "kivi-k2v2"])
def test_prefill_with_a_sliding_window(
    name: str, dim: int, dtype: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention's window over histories longer and shorter than it, and over new tokens in pieces, with and without the model's
    sinks."""
    layout = make_layout(name, 2, dim)
    if (reason := cuda_prefill.refuse(layout, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", max(400, 2 * window))
    monkeypatch.setattr(cuda_prefill, "_masked", lambda *args: pytest.fail("scores were held"))
    cache, seqs = filled(name, 2, 4, dim, dtype, [1, 63, 700, 1300], spare=20)
    store, counts = cache.stores[0], [3, 1, 600, 60, 5]
    k, v = (vectors(sum(counts), 2, dim, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 8, dim, device="cuda").to(getattr(torch, dtype))
    batch = cache.extend([*seqs, cache.new()], counts)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    for sinks in (None, some_sinks(8, "cuda")):
        options = {"scale": dim**-0.5, "sliding_window": window, "sink_logits": sinks}
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
        with attention.poisoned():
            found = cuda_prefill.prefill(store, q, k, v, host, **options)  # type: ignore[arg-type]
        assert relative_error(found, expected) < 2e-3, sinks is not None


@gpu
@needs_gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_torchs_flash_attention_has_windows(dim: int) -> None:
    """Sequences of more keys than rows, and of as many; a window of one, inside, and beyond all."""
    rows, tokens = (0, 1, 40, 300), (0, 500, 539, 1100)
    bounds = flash.Bounds(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (rows, tokens)), 260, 561)
    q = torch.randn(300, 8, dim, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1100, 2, dim, device="cuda", dtype=torch.float16) for _ in range(2))
    for window in (1, 33, 128, 2000):
        out, lse = flash.attend(q, k, v, bounds, dim**-0.5, True, None, window)
        for b in range(3):
            mine, theirs = (slice(*x[b : b + 2]) for x in (rows, tokens))
            part = attend_plain(
                q[mine].double().unflatten(1, (2, 4)).permute(1, 2, 0, 3),
                k[theirs].double(),
                v[theirs].double(),
                dim**-0.5,
                None,
                window,
                (tokens[b + 1] - tokens[b]) - (rows[b + 1] - rows[b]),
                None,
            )
            expected = part.out.permute(2, 0, 1, 3).flatten(1, 2)
            assert relative_error(out[mine], expected) < 2e-3, (window, b)
            torch.testing.assert_close(
                lse[mine].double(), part.lse[..., 0].permute(2, 0, 1).flatten(1, 2), rtol=1e-3, atol=1e-3
            )


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("room", [3000, 9000, 1 << 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["int4", "oscar", "kvant-2", "kivi-k2v2"])
def test_cudnn_attends_to_long_histories(
    name: str, dim: int, dtype: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN over the first tokens of long histories, FlashAttention-2 over the rest, merged: in one call for neighbours of like
    lengths, beside sequences that FlashAttention-2 serves alone; with room for all, for some, and not for the longest."""
    reason = flash.refuse_cudnn(torch.device("cuda"), dim)
    if reason is not None:
        pytest.skip(reason)
    for constant, n in {"JOINED_TOKENS": room, "UNMASKED_TOKENS": 1024, "UNMASKED_TILES": 8}.items():
        monkeypatch.setattr(cuda_prefill, constant, n)
    cache, seqs = filled(name, 2, 4, dim, dtype, [1100, 1024, 700, 4500, 2000], spare=20)
    store, counts = cache.stores[0], [130, 130, 50, 300, 0]
    k, v = (vectors(sum(counts), 2, dim, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 8, dim, device="cuda").to(getattr(torch, dtype))
    batch = cache.extend(seqs, counts)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    calls = list[tuple[int, ...]]()

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((len(q), q.shape[1], k.shape[1]))
        return flash.attend_cudnn(q, k, v, scale)

    store.flash = dataclasses.replace(flash.TORCH, unmasked=flash.Unmasked(recorded, flash.refuse_cudnn))
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=dim**-0.5)
    with attention.poisoned():
        found = cuda_prefill.prefill(store, q, k, v, host, scale=dim**-0.5)
    assert relative_error(found, expected) < 2e-3
    longest = {3000: [(1, 384, 2816), (1, 384, 1664)], 9000: [(1, 384, 4096)], 1 << 16: [(1, 384, 4096)]}[room]
    assert calls == [(2, 256, 1024), *longest]
    monkeypatch.setattr(cuda_prefill, "UNMASKED_TOKENS", 1 << 30)  # and without cuDNN
    with attention.poisoned():
        alone = cuda_prefill.prefill(store, q, k, v, host, scale=dim**-0.5)
    assert len(calls) == 1 + len(longest) and relative_error(alone, expected) < 2e-3
    assert relative_error(found, alone.double()) < (4e-3 if dtype == "bfloat16" else 1e-3)


@gpu
@needs_gpu
@pytest.mark.parametrize("types", list(itertools.product(["bfloat16", "float16"], repeat=2)))
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_parts_of_attention_are_merged(dim: int, types: tuple[str, str]) -> None:
    """By their log-sum-exps, which may be far apart; parts are strided as cuDNN and FlashAttention-2 leave them."""
    sequences, rows, heads = 3, 37, 6
    in_type, out_type = (getattr(torch, name) for name in types)
    a = torch.randn(sequences, heads, rows + 27, dim, device="cuda").to(in_type).transpose(1, 2)[:, :rows]
    b = torch.randn(sequences * rows, heads, dim, device="cuda").to(in_type)
    lse_a = torch.randn(sequences, heads, rows + 27, device="cuda").transpose(1, 2)[:, :rows] * 30
    lse_b = torch.randn(heads, sequences * rows, device="cuda").transpose(0, 1) * 30
    with attention.poisoned():
        out = torch.empty(b.shape, dtype=out_type, device="cuda")
        merge_parts(out, a, lse_a, b, lse_b)
    w = torch.sigmoid(lse_a.reshape(-1, heads, 1).double() - lse_b[..., None].double())
    expected = w * a.reshape(b.shape).double() + (1 - w) * b.double()
    tolerance = 2.0**-8 if out_type == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", HISTORIES)
def test_unpack_gives_what_the_reference_reads(name: str, dim: int, dtype: torch.dtype) -> None:
    lengths = [1, 63, 1500, 200, 129]
    if dim == 96 and "group=64" in name:
        pytest.skip("groups of 64 do not divide 96 channels")
    layout = Layout.of(recipes.get(name), 2, dim)
    if (reason := cuda_prefill.refuse(layout, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    cache, seqs = filled(name, 2, 1, dim, "bfloat16", lengths, first=30 if recipes.get(name).wants_rope else 0)
    batch, store = cache.batch(seqs), cache.stores[0]
    counts = [70, 0, 33, 1, 16]
    begins = [sum(counts[:b]) for b in range(len(counts))]
    whole = tuple(unpack.Span(0, n, n, begins[b], counts[b]) for b, n in enumerate(lengths))
    parts = tuple(unpack.Span(n // 3, n - n // 5, n) for n in lengths)
    new = vectors(sum(counts), 2, dim, "cuda", 0.4).bfloat16()
    for stream in unpack.STREAMS:
        expected = reference.restored(store, stream, batch)
        for spans in (whole, parts):
            with attention.poisoned():
                found = unpack.unpack(store, stream, batch, spans, new, dtype)
            rows = torch.cat(
                [
                    part
                    for b, span in enumerate(spans)
                    for part in (
                        expected[b, span.first : span.last],
                        new[span.new_first : span.new_first + span.new].float(),
                    )
                ]
            )
            assert relative_error(found.float(), rows) < (4e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")  # of group-wise recipes, prefill is
@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "name",
    [
        "int4",
        "saw-int4",
        "saw-int4-kv:seed=3",
        "int8",
        "int2:sink=5,recent=70",
        "quarot-int2-win",
        "int4:k.bits=2",
        "int3",
        "saw-int4-kv:bits=3,sink=1,recent=20",
        "int4:k.bits=3,search=3,zero=float",
        "kvant-2:rope=post,k.bits=3/2/0,v.bits=3",
        "saw-int4-kv:order=16",
        "kvant-4-fast",
        "saw-hessian",
        "oscar:sink=3,recent=20",
        "int4:k.clip=0.6",
        "kvant-2",
        "kvant-2:rope=post,sink=0,recent=0",
        "kvant-2:rope_block=70,k.bits=4/4/0,v.bits=4",
        "kvant-3",
        "vecinfer-2",
        "vecinfer-4:k.bits=10",
        "million-2:books=head",
        "vecinfer-2:dim=2,bits=4",
        "vecinfer-2:dim=2,k.bits=3,v.bits=4",
        "vecinfer-2:dim=4,bits=6",
        "kivi-k2v2",
        "kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5",
        "kitty-pro:sink=3",
        "kitty-pro:shift=false",
        "kivi-k2v2-sink:shift=false",
        "int4:group=32",
        "int2:group=64,sink=2,recent=5",
        "oscar:group=32,sink=3,recent=20",
        "saw-int4-kv:group=32",
        "int8:k.group=32,v.group=16,search=3",
        "saw-int4-kmeans",
        "saw-int4-kmeans-rot:sink=5,recent=70",
        "saw-int4-kmeans-rot:centroids=16,books=layer,zero=float,bits=2,group=32",
        "turboquant-4",
        "turboquant-3:sink=3,recent=20",
        "turboquant-2:v.bits=4",
        "million-2:books=space,bits=6",
        "vecinfer-4:v.books=space,v.bits=4",
    ],
)
@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
def test_append_writes_what_the_reference_writes(
    name: str, dim: int, dtype: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs on the CPU: on a GPU, torch divides by a number through its reciprocal."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    if name == "saw-hessian":
        name = next(n for n in recipes.names() if n.startswith("saw") and "hessian" in n)
    recipe, heads = recipes.get(name), 3
    if dim == 96 and "group=64" in name:
        with pytest.raises(ValueError, match="group must divide head_dim"):
            Layout.of(recipe, heads, dim, dtype=dtype)
        return
    layout = Layout.of(recipe, heads, dim, dtype=dtype)
    if dim == 256 and "v.group=16" in name:
        assert "16" in (cuda_append.refuse_layout(layout) or "")  # scales a token
        return
    three_bits = ("bits=3" in name and not layout.format("key").is_pq) or name.startswith(("int3", "turboquant-3"))
    if (
        (dim == 96 and (name.startswith("kvant-2") or three_bits))
        or (dim < 128 and "3/2/0" in name)
        or (dim == 96 and name == "kvant-3")
    ):
        assert cuda_append.refuse_layout(layout) is not None  # bands are no whole tiles, or lanes would share bytes
        return
    if dim % 64 and any(stream.scale_groups > 1 for stream in layout.formats.values()) and "kivi" not in name:
        assert cuda_append.refuse_layout(layout) is not None  # three or six scales
        return
    if dim == 64 and "group=64" in name:
        assert layout.format("key").scale_groups == 1
    tensors = fitted(recipe, Shape(1, 1, heads, heads, dim, dtype), "cpu")
    ropes = {device: [Rope(rope_of(dim).inv_freq.to(device), 1013)] for device in ("cuda", "cpu")}
    caches = [
        PagedCache(layout, 1, 40, device, {0: tensors}, ropes=ropes[device] if recipe.wants_rope else None)
        for device in ("cuda", "cpu")
    ]
    assert caches[0].ops["append"].name == "cuda"
    seqs = [[cache.new() for _ in range(3)] for cache in caches]
    stores = [cache.stores[0] for cache in caches]
    for store in stores:
        store.pages.fill_(0xFF)
        for overlay in store.overlays.values():
            overlay.fill_(7.0)
    for counts in ([130, 1, 64], [1, 1, 1], [5, 700, 2]):
        k, v = (vectors(sum(counts), heads, dim, "cpu", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
        cuda_append.append(stores[0], *parts_of_one(k.cuda(), v.cuda()), caches[0].extend(seqs[0], counts))
        reference.append(stores[1], k, v, caches[1].extend(seqs[1], counts))
    written = dataclasses.replace(stores[1], pages=stores[0].pages.cpu())
    assert float((written.pages != stores[1].pages).double().mean()) < 1e-4
    assert seqs[0][0].pages[0] == seqs[1][0].pages[0] == 0
    error, _ = difference(written, stores[1], layout.page_tokens)  # of a page that is full
    coarse = name.startswith(("kvant-2", "kvant-3", "turboquant"))  # one code of 2 bits is 0.01 of a page
    assert error < (2e-2 if coarse else 1e-3)
    for side in ("key", "value"):
        found, expected = (store.overlays[side].cpu() for store in stores)  # type: ignore[index]
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


STEPS = [  # recipe, head_dim, type and tokens of a page of rows that kernels/append_step.cu appends
    ("oscar:sink=3,recent=20", 128, "bfloat16", None),
    ("oscar", 96, "float16", None),
    ("oscar:per_head=true,sink=0,recent=0", 64, "bfloat16", 16),
    ("oscar:v.target=none,v.hadamard=none,v.bitrev=false,clip=1", 128, "float16", None),  # values have no matrix
    ("oscar:bits=3,k.clip=0.6", 128, "bfloat16", None),
    ("oscar:group=64,sink=3,recent=20", 128, "bfloat16", None),
    ("oscar:group=32", 64, "float16", 16),
    ("saw-int4-hessian", 96, "bfloat16", None),
    ("saw-int4-hessian-kv:sink=2,recent=5", 64, "float16", None),
    ("kvant-2", 128, "bfloat16", None),
    ("kvant-2:rope_block=70,sink=3,recent=20", 64, "float16", 16),
    ("kvant-2:rope=post,sink=0,recent=0", 128, "float16", 32),
    ("kvant-2:k.bits=4,v.bits=4", 128, "bfloat16", None),
    ("kvant-3", 128, "bfloat16", None),
    ("kvant-2:search=9,k.bits=0/4/2,v.unbiased=true", 128, "bfloat16", 128),
    ("kvant-4:k.rope=block,rope_block=64", 96, "bfloat16", None),  # values have a Hadamard
    ("kvant-3", 64, "bfloat16", None),  # bands of which a lane has one byte of a token
    ("turboquant-4", 128, "bfloat16", None),
    ("turboquant-3:sink=3,recent=20", 64, "float16", 16),
    ("turboquant-2:v.bits=4", 96, "bfloat16", None),
]


def check_step(
    name: str,
    dim: int,
    dtype: str,
    page: int | None,
    sequences: int,
    monkeypatch: pytest.MonkeyPatch,
    device: str = "cuda",
    limit: float = 1e-4,
) -> None:
    """Steps of one token a sequence and of several, some of them padding: sequences are in the sinks, in the ring, beyond both. One launch,
    and the bytes of the reference, which runs on the CPU."""
    torch.manual_seed(0)
    ran: list[bool] = []
    kernel = cuda_append._kernel
    monkeypatch.setattr(cuda_append, "_kernel", lambda *args: ran.append(args[0].step) or kernel(*args))
    monkeypatch.setattr(cuda_append, "transform_rows", None)
    recipe, heads = recipes.get(name), 2
    layout = Layout.of(recipe, heads, dim, page_tokens=page, dtype=dtype)
    lengths = [(1 + 37 * i) % 151 for i in range(sequences)]
    pages = sum(layout.pages_for(n + 8) for n in lengths) + 1
    tensors = fitted(recipe, Shape(1, 1, heads, heads, dim, dtype), "cpu")
    caches = []
    for where in (device, "cpu"):
        ropes = [Rope(rope_of(dim).inv_freq.to(where), 1013)] if recipe.wants_rope else None
        with warnings.catch_warnings(action="ignore"):  # of the reference
            by = "reference" if where == "cpu" else None
            caches.append(PagedCache(layout, 1, pages, where, {0: tensors}, ropes=ropes, implementation=by))
    seqs = [[cache.new() for _ in lengths] for cache in caches]
    stores = [cache.stores[0] for cache in caches]
    for store in stores:
        store.pages.fill_(0xFF)
        for overlay in store.overlays.values():
            overlay.fill_(7.0)
    for step, counts in enumerate((lengths, [1] * sequences, [i % 3 for i in range(1, sequences + 1)])):
        k, v = (vectors(sum(counts), heads, dim, "cpu", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
        batches = [cache.extend(own, counts) for cache, own in zip(caches, seqs, strict=True)]
        for batch in batches:
            batch.slot_mapping[5::7] = -1
        reference.append(stores[1], k, v, batches[1])
        if step:
            cuda_append.append(stores[0], k.to(device), v.to(device), batches[0])
        else:
            stores[0].pages.copy_(stores[1].pages)
            for side, overlay in stores[0].overlays.items():
                overlay.copy_(stores[1].overlays[side])
    assert ran == [True, True]
    assert bool((stores[1].pages != 0xFF).any())
    assert float((stores[0].pages.cpu() != stores[1].pages).double().mean()) < limit
    for side in ("key", "value"):
        found, expected = (store.overlays[side].cpu() for store in stores)  # type: ignore[index]
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("oscar:sink=3,recent=20", 128),
        ("oscar:per_head=true", 64),
        ("oscar:group=32,sink=3,recent=20", 128),
        ("saw-int4-hessian-kv", 96),
        ("kvant-4", 96),
        ("kvant-2", 128),
        ("kvant-2:rope_block=70", 64),
        ("kvant-2:rope=post,v.bits=4", 128),
        ("kvant-3", 128),
    ],
)
def test_tiles_are_multiplied_by_warpgroups_as_by_warps(
    name: str, dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tiles, so that every CTA has several; the last ones are not full."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", 1)
    cache, seqs = filled(name, 4, 1, dim, dtype, [1, 40, 63], first=1013, spare=1200)
    store, counts = cache.stores[0], [20000, 7, 30001]
    k, v = (vectors(sum(counts), 4, dim, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    batch = cache.extend(seqs, counts)
    written = []
    for capability in (torch.cuda.get_device_capability(), (0, 0)):
        monkeypatch.setattr(cuda_append, "WARPGROUPS", capability)
        if capability != (0, 0) and capability != (9, 0):
            pytest.skip("only sm_90 multiplies by warpgroups")
        store.pages.fill_(0xFF)
        cuda_append.append(store, k, v, batch)
        written.append([store.pages.clone(), *(overlay.clone() for overlay in store.overlays.values())])
    assert bool((written[0][0] != 0xFF).any())
    assert float((written[0][0] != written[1][0]).double().mean()) < 2e-5
    for one, two in zip(written[0][1:], written[1][1:], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-2, equal_nan=True)


@gpu
@needs_gpu
@pytest.mark.parametrize("sequences", [1, 15, 16, 17, 128])
@pytest.mark.parametrize(("name", "dim", "dtype", "page"), STEPS)
def test_a_step_is_appended_in_one_launch(
    name: str, dim: int, dtype: str, page: int | None, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_step(name, dim, dtype, page, sequences, monkeypatch)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["oscar:sink=3,recent=20", "kvant-2:rope_block=70,sink=3,recent=20"])
def test_steps_are_appended_in_a_cuda_graph(name: str) -> None:
    """Steps of one graph, whose sequences leave the sinks, fill the ring, enter another RoPE block and another page."""
    lengths, heads, dim, steps = [0, 2, 61], 2, 128, 80
    recipe = recipes.get(name)
    layout = make_layout(name, heads, dim, dtype="bfloat16")
    tensors = fitted(recipe, Shape(1, 1, heads, heads, dim, "bfloat16"), "cpu")
    caches = []
    for where in ("cuda", "cpu"):
        ropes = [Rope(rope_of(dim).inv_freq.to(where), 1013)] if recipe.wants_rope else None
        with warnings.catch_warnings(action="ignore"):  # of the reference
            by = "reference" if where == "cpu" else None
            caches.append(PagedCache(layout, 1, 20, where, {0: tensors}, ropes=ropes, implementation=by))
    seqs = [[cache.new() for _ in lengths] for cache in caches]
    stores = [cache.stores[0] for cache in caches]
    for store in stores:
        store.pages.fill_(0xFF)
        for overlay in store.overlays.values():
            overlay.fill_(7.0)
    new = torch.empty(2, len(lengths), heads, dim, dtype=torch.bfloat16, device="cuda")
    graph, still = torch.cuda.CUDAGraph(), None
    for step in range(-1, steps):
        counts = lengths if step < 0 else [1] * len(lengths)
        k, v = (vectors(sum(counts), heads, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        batches = [cache.extend(own, counts) for cache, own in zip(caches, seqs, strict=True)]
        reference.append(stores[1], k, v, batches[1])
        if step < 0:
            cuda_append.append(stores[0], k.cuda(), v.cuda(), batches[0])
            continue
        table = torch.zeros(len(lengths), 8, dtype=torch.int64, device="cuda")
        table[:, : batches[0].block_table.shape[1]] = batches[0].block_table
        batch = batches[0]._replace(block_table=table)
        new[0].copy_(k), new[1].copy_(v)
        if still is None:
            still = batch
            cuda_append.append(stores[0], new[0], new[1], still)  # the same again writes the same
            with torch.cuda.graph(graph):
                cuda_append.append(stores[0], new[0], new[1], still)
        for name_, tensor in batch._asdict().items():
            for into, out in zip(_tensors(getattr(still, name_)), _tensors(tensor), strict=True):
                into.copy_(out)
        graph.replay()
    assert float((stores[0].pages.cpu() != stores[1].pages).double().mean()) < 1e-4
    for side in ("key", "value"):
        found, expected = (store.overlays[side].cpu() for store in stores)  # type: ignore[index]
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


SQUAT = [  # recipe, query heads a KV head, head_dim, rounds of new tokens after 1, 63 and 0
    ("squat", 2, 32, ([40, 1, 0], [1, 1, 1], [1, 1, 1], [0, 30, 40])),  # rows and Gram matrices
    ("squat:k.group=16,k.flush=16,v.recent=5,rank=12,block=8", 1, 32, ([3, 1, 6], [1, 1, 1], [20, 30, 4])),
    ("squat:sink=5,k.recent=3,weight=0.01", 1, 64, ([1, 1, 1], [40, 2, 9])),
    ("squat", 2, 64, ([40, 1, 2],)),
    ("squat-pre:weight=0.05", 2, 32, ([7, 1, 0], [1, 1, 1], [60, 30, 2])),
    ("squat-pre:sink=3,k.group=16,k.flush=32,k.bits=4", 1, 64, ([5, 1, 2], [1, 1, 1], [30, 2, 9])),
]


def check_squat(
    name: str, group: int, dim: int, rounds: tuple[list[int], ...], device: str = "cuda", dtype: str = "bfloat16"
) -> None:
    """Pages, overlays and subspaces are those of the reference, which runs on the CPU. Subspaces are compared as Q^T Q: vectors of equal
    singular values are not determined."""
    torch.manual_seed(0)
    first = 1013 if "pre" in name else 0
    spare = 9 + sum(map(sum, rounds)) // 64
    made = [
        filled(name, 2, group, dim, dtype, [1, 63, 0], device=where, first=first, spare=spare)
        for where in (device, "cpu")
    ]
    mine, theirs = (cache.stores[0] for cache, _ in made)
    mine.pages.copy_(theirs.pages)
    for one, two in zip(mine.owned, theirs.owned, strict=True):
        one.copy_(two)
    for counts in rounds:
        k, v, q = (
            vectors(sum(counts), heads, dim, "cpu", shift).to(getattr(torch, dtype))
            for heads, shift in ((2, 0.0), (2, 0.4), (2 * group, 0.2))
        )
        for (cache, seqs), run in zip(made, (cuda_append.append, reference.append), strict=True):
            where = cache.stores[0].pages.device
            run(cache.stores[0], k.to(where), v.to(where), cache.extend(seqs, counts), q.to(where))
    assert bool((theirs.pages != 0xFF).any())
    assert float((mine.pages.cpu() != theirs.pages).double().mean()) < 1e-3
    for side, overlay in theirs.overlays.items():
        torch.testing.assert_close(mine.overlays[side].cpu(), overlay, rtol=1e-2, atol=1e-2, equal_nan=True)
    rows = torch.tensor([seq.overlay_row for seq in made[1][1]])
    found, expected = (store.states["key"].cpu()[rows].double() for store in (mine, theirs))
    assert bool(expected.any())
    assert relative_error(found.mT @ found, expected.mT @ expected) < 1e-6


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "group", "dim", "rounds"),
    [
        *SQUAT,
        ("squat", 4, 128, ([1000, 1, 40], [1, 1, 1], [1, 700, 1])),
        ("squat:rank=60,weight=0.0005", 4, 128, ([300, 1, 40], [1, 1, 1])),
        ("squat-pre", 4, 128, ([400, 1, 40], [1, 1, 1], [1, 1, 1])),
        ("squat", 3, 96, ([70, 1, 40], [1, 1, 1])),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_append_of_corrected_keys(name: str, group: int, dim: int, rounds: tuple[list[int], ...], dtype: str) -> None:
    check_squat(name, group, dim, rounds, dtype=dtype)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["squat", "squat-pre"])
def test_corrected_keys_are_appended_in_a_cuda_graph(name: str) -> None:
    """Steps of one graph: sequences whose subspace is still fitted, which complete their first group and later ones, and such that
    have one."""
    lengths, heads, dim, steps = [0, 20, 90], 2, 64, 80
    caches = [filled(name, heads, 2, dim, "bfloat16", lengths, device=where, spare=9) for where in ("cuda", "cpu")]
    stores = [cache.stores[0] for cache, _ in caches]
    stores[0].pages.copy_(stores[1].pages)
    for one, two in zip(stores[0].owned, stores[1].owned, strict=True):
        one.copy_(two)
    new = torch.empty(2, len(lengths), heads, dim, dtype=torch.bfloat16, device="cuda")
    queries = torch.empty(len(lengths), 2 * heads, dim, dtype=torch.bfloat16, device="cuda")
    graph, still = torch.cuda.CUDAGraph(), None
    for _ in range(steps):
        k, v = (vectors(len(lengths), heads, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        q = vectors(len(lengths), 2 * heads, dim, "cpu", 0.2).bfloat16()
        batches = [cache.extend(own, [1] * len(lengths)) for cache, own in caches]
        reference.append(stores[1], k, v, batches[1], q)
        table = torch.zeros(len(lengths), 8, dtype=torch.int64, device="cuda")
        table[:, : batches[0].block_table.shape[1]] = batches[0].block_table
        batch = batches[0]._replace(block_table=table)
        new[0].copy_(k), new[1].copy_(v), queries.copy_(q)
        if still is None:
            still = batch
            kept = [x.clone() for x in (stores[0].pages, *stores[0].owned)]
            cuda_append.append(
                stores[0], new[0], new[1], still, queries
            )  # kernels are compiled; what it learnt is forgotten
            for into, out in zip((stores[0].pages, *stores[0].owned), kept, strict=True):
                into.copy_(out)
            with torch.cuda.graph(graph):
                cuda_append.append(stores[0], new[0], new[1], still, queries)
        for name_, tensor in batch._asdict().items():
            for into, out in zip(_tensors(getattr(still, name_)), _tensors(tensor), strict=True):
                into.copy_(out)
        graph.replay()
    assert float((stores[0].pages.cpu() != stores[1].pages).double().mean()) < 1e-3
    for side, overlay in stores[1].overlays.items():
        torch.testing.assert_close(stores[0].overlays[side].cpu(), overlay, rtol=1e-2, atol=1e-2, equal_nan=True)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["kivi-k2v2:k.flush=32,v.recent=32", "kitty:k.group=32,k.flush=32,sink=3"])
def test_groups_are_appended_in_a_cuda_graph(name: str) -> None:
    """One token a sequence; some steps complete a group and some do not, in the same graph."""
    lengths, heads, dim, steps = [90, 17], 2, 64, 40
    layout = make_layout(name, heads, dim, dtype="bfloat16")
    with warnings.catch_warnings(action="ignore"):  # of a prefill by the reference, which is not called
        caches = [PagedCache(layout, 1, 12, "cuda"), PagedCache(layout, 1, 12, "cpu", implementation="reference")]
    assert caches[0].ops["append"].name == "cuda"
    seqs = [[cache.new() for _ in lengths] for cache in caches]
    rows = [vectors(sum(lengths) + steps * len(lengths), heads, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4)]
    stores = [cache.stores[0] for cache in caches]
    for store in stores:
        store.pages.fill_(0xFF)
        for overlay in store.overlays.values():
            overlay.fill_(7.0)
    graph, still, new = (
        torch.cuda.CUDAGraph(),
        None,
        torch.empty(2, len(lengths), heads, dim, dtype=torch.bfloat16, device="cuda"),
    )
    for step in range(-1, steps):
        counts = lengths if step < 0 else [1] * len(lengths)
        at = 0 if step < 0 else sum(lengths) + step * len(lengths)
        k, v = (x[at : at + sum(counts)] for x in rows)
        batches = [cache.extend(own, counts) for cache, own in zip(caches, seqs, strict=True)]
        reference.append(stores[1], k, v, batches[1])
        if step < 0:
            cuda_append.append(stores[0], k.cuda(), v.cuda(), batches[0])
            continue
        table = torch.zeros(len(lengths), 8, dtype=torch.int64, device="cuda")
        table[:, : batches[0].block_table.shape[1]] = batches[0].block_table
        batch = batches[0]._replace(block_table=table)
        new[0].copy_(k), new[1].copy_(v)
        if still is None:
            still = batch
            cuda_append.append(stores[0], new[0], new[1], still)  # the same again writes the same
            with torch.cuda.graph(graph):
                cuda_append.append(stores[0], new[0], new[1], still)
        for name_, tensor in batch._asdict().items():
            for into, out in zip(_tensors(getattr(still, name_)), _tensors(tensor), strict=True):
                into.copy_(out)
        graph.replay()
    assert float((stores[0].pages.cpu() != stores[1].pages).double().mean()) < 1e-4
    for side in ("key", "value"):
        assert torch.equal(stores[0].overlays[side].cpu(), stores[1].overlays[side])  # type: ignore[index]


def _tensors(x: object) -> list[torch.Tensor]:
    return list(x.values()) if isinstance(x, dict) else [x]  # type: ignore[list-item]


@gpu
@needs_gpu
@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
def test_padding_slots_write_nothing(tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    cache = PagedCache(make_layout("int2:sink=2,recent=3", 2, 64, dtype="bfloat16"), 1, 4, "cuda")
    batch = cache.extend([cache.new()], [5])
    batch = batch._replace(slot_mapping=torch.full_like(batch.slot_mapping, -1))
    store = cache.stores[0]
    store.pages.fill_(0xFF)
    for overlay in store.overlays.values():
        overlay.fill_(float("nan"))
    cuda_append.append(store, *torch.randn(2, 5, 2, 64, device="cuda", dtype=torch.bfloat16), batch)
    assert bool((store.pages == 0xFF).all())
    assert bool(store.overlays["key"].isnan().all())


# --- without a GPU ------------------------------------------------------------------------------------------------------


@gpu
@needs_gpu
def test_rows_of_windows_are_copied_where_somebody_wants_them() -> None:
    x = torch.randn(5, 9, 68, 2, 128, device="cuda").bfloat16()
    expected = x.clone()
    expected[:, 5], expected[2, 6, :4] = x[:, 3], x[2, 1, :4]
    copy_rows.copy_rows(x, *torch.tensor([[3, 7], [5, 8]], device="cuda"))  # the last row is nobody's
    copy_rows.copy_rows(x[2:3], *torch.tensor([[1], [6]], device="cuda"), 4)
    assert torch.equal(x, expected)


def test_nothing_is_offered_on_a_cpu() -> None:
    layout = make_layout("saw-int4")
    for op in OPS:
        names = {i.name: i.refuse(layout, torch.device("cpu")) for i in implementations(op)}
        if "cuda" in names:
            assert names["cuda"] == "it runs on CUDA devices, not on cpu"
    assert choose("decode", layout, "cpu").name == "reference"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kivi-k2v2", None),
        ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", None),
        ("kitty-pro", None),
        ("squat", None),
        ("squat-pre", None),
        (
            "squat-pre:rope=block",
            "it rotates keys that are coded per channel one by one, and they are stored unrotated by blocks",
        ),
        ("kivi-k2v2:k.group=8", "it reads groups of at least 16 tokens, and those of the keys have 8"),
        ("kivi-k2v2:k.meta=bfloat16", "it reads the scales of channels as float16, and they are bfloat16"),
        (
            "kivi-k2v2:v.meta=bfloat16",
            "of values with several scales it reads scales and minima as float16, and theirs are others",
        ),
        (
            "kivi-k2v2:v.group=8",
            "it reads at most 8 scales a token, each of a multiple of 16 channels, and the values have 8",
        ),
        ("kvant-2:k.flag=true", "it reads keys that keep their mean, and theirs may be taken off token by token"),
        ("full", "it reads token-wise affine codes and keys coded per channel, and the keys are coded by Raw"),
        ("int4:group=32", None),
        ("oscar:group=32", None),
        (
            "int4:group=16",
            "it reads scales of a multiple of 32 channels of 2, 4 or 8 bits, and the keys have 4 others a token",
        ),
        ("int4:k.group=32,v.group=16", None),
        (
            "int3:group=32",
            "it reads scales of a multiple of 32 channels of 2, 4 or 8 bits, and the keys have 2 others a token",
        ),
        (
            "int4:k.group=0,v.group=8",
            "it reads scales of a multiple of 16 channels of 2, 4 or 8 bits, and the values have 8 others a token",
        ),
        (
            "int4:group=32,k.rope=block",
            "it reads one scale a token of keys that are unrotated by RoPE blocks, and they have 2",
        ),
        ("saw-int4-kmeans", None),
        ("saw-int4-kmeans-rot:centroids=1", None),
        (
            "saw-int4-kmeans:centroids=2048",
            "it holds at most 256 centroids a head in shared memory, and the keys have 2048",
        ),
        (
            "saw-int4-kmeans:k.rope=block",
            "it reads residuals of centroids beside keys that are stored rotated, and theirs are unrotated by RoPE blocks",
        ),
        ("int2:k.recent=3", "keys and values have different windows"),
        ("saw-int4", None),
        ("oscar", None),
        ("kvant-2", None),
        ("vecinfer-2", None),
        ("million-2:bits=6", None),
        ("million-2:bits=5", "it reads indices of 3, 4, 6, 8, 9, 10 or 12 bits, and those of the keys have 5"),
        ("vecinfer-2:dim=2,bits=3", None),
        (
            "vecinfer-2:dim=8,bits=16",
            "it holds a codebook of a head in shared memory, and one of the keys takes 1048576 bytes",
        ),
        ("million-2:books=space", None),
        (
            "million-3:v.books=space",
            "it holds the codebooks of a head in shared memory, and those of the values take 524288 bytes",
        ),
        ("turboquant-4:k.bits=3,v.bits=2", None),
        ("turboquant-4:v.bits=1", "it reads tables of 4, 8 or 16 levels, and that of the values has 2"),
        (
            "turboquant-2:rope=block",
            "it reads evenly spaced levels of keys that are unrotated by RoPE blocks, and theirs are not",
        ),
        (
            "kvant-2:rope=pre",
            "it rotates queries for blocks of positions, and the keys are stored unrotated one by one",
        ),
    ],
)
def test_layouts_are_refused_with_a_reason(name: str, reason: str | None) -> None:
    assert refusals.refuse_layout(make_layout(name)) == reason
    assert refusals.refuse_layout(Layout.of(recipes.get("int4"), 2, 64, order="plain")) is not None


def test_boosted_channels_that_a_word_does_not_hold_are_refused() -> None:
    assert refusals.refuse_layout(make_layout("kitty:k.boost=0.5", 2, 128)) is None
    reason = "it reads the high bits of at most 64 channels, and 68 are boosted"
    assert refusals.refuse_layout(make_layout("kitty:k.boost=0.53", 2, 128)) == reason
    assert cuda_append.refuse_layout(make_layout("kitty:k.boost=0.53", 2, 128)) == reason


def test_prefill_refuses_what_it_cannot_unpack() -> None:
    served = ("saw-int4-kv", "oscar", "oscar:group=32", "kvant-2", "kvant-3", "int3", "vecinfer-2", "million-1.5")
    served += "turboquant-3", "saw-int4-kmeans-rot", "million-2:books=space"
    for name in (*served, "kivi-k2v2-sink", "kitty-pro", "squat", "squat-pre"):
        assert cuda_prefill.refuse_layout(make_layout(name, 2, 128)) is None, name
    for name, reason in (
        ("gear", "the keys are coded by LowRank"),
        ("zipcache", "the keys are coded by Salient"),
    ):
        assert reason in (cuda_prefill.refuse_layout(make_layout(name, 2, 128)) or ""), name
    assert "fragment order" in (cuda_prefill.refuse_layout(make_layout("int2", 2, 80)) or "")


def test_append_refuses_what_it_cannot_write() -> None:
    assert "all of a batch share one" in (cuda_append.refuse_layout(make_layout("squat:shared=true")) or "")
    assert "the head dim is 256" in (cuda_append.refuse_layout(make_layout("squat", 2, 256)) or "")
    assert "the rank is 65" in (cuda_append.refuse_layout(make_layout("squat:rank=65", 2, 128)) or "")
    assert "coded by Salient" in (cuda_append.refuse_layout(make_layout("zipcache")) or "")
    assert "clipped, searched" in (cuda_append.refuse_layout(make_layout("kivi-k2v2:v.search=3")) or "")
    assert "of 16 or a multiple of 32" in (cuda_append.refuse_layout(make_layout("kivi-k2v2:v.group=48", 2, 96)) or "")
    assert "2, 3, 4 or 8 bits, and the keys have 1" in (
        cuda_append.refuse_layout(make_layout("kvant-2:k.bits=4/1/0")) or ""
    )
    for name in ("int3", "kvant-2:k.bits=3/2/0"):
        assert cuda_append.refuse_layout(make_layout(name, 2, 256)) is None and not cuda_append.tileable(
            make_layout(name, 2, 64 if name == "int3" else 128)
        )
    assert "fragment order" in (cuda_append.refuse_layout(make_layout("int3", 2, 96)) or "")
    assert "1, 2, 4 or 8 scales" in (cuda_append.refuse_layout(make_layout("int4:group=32", 2, 96)) or "")
    uneven = "the 12 sub-vectors of the values cannot be shared evenly by 8 lanes"
    assert cuda_append.refuse_layout(make_layout("million-1.5", 2, 96)) == uneven
    names = "saw-int4-kv", "oscar", "kvant-2", "vecinfer-2", "million-1.5", "kivi-k2v2", "kitty-pro"
    for name in (
        *names,
        "squat",
        "squat-pre",
        "oscar:group=32",
        "int4:group=32",
        "saw-int4-kmeans",
        "saw-int4-kmeans-rot",
        "turboquant-4",
        "turboquant-2:k.bits=3",
        "million-2:books=space",
    ):
        assert cuda_append.refuse_layout(make_layout(name)) is None


@pytest.mark.parametrize("there", [99 * 1024, 163 * 1024, 227 * 1024])  # of GPUs of compute capability 8.9, 8.0 and 9.0
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("saw-int4-kmeans", 256),
        ("saw-int4-kmeans", 128),
        ("saw-int4-kmeans:centroids=64", 256),
        ("saw-int4-kmeans:bits=8,group=64", 128),
        ("million-2:books=space", 128),
        ("million-4:books=space", 128),
        ("vecinfer-3", 128),
        ("turboquant-4", 256),
        ("kivi-k4v4", 256),
        ("int8:page=128", 256),
    ],
)
def test_what_is_not_refused_fits_into_shared_memory(
    name: str, dim: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every number of query heads; what is refused does not fit for some."""
    monkeypatch.setattr(refusals, "refuse_machine", lambda device, reason: reason)
    monkeypatch.setattr(refusals, "shared_memory", lambda device: (there, there + 1024))
    name, _, page = name.partition(":page=")
    layout = Layout.of(recipes.get(name), 2, dim, page_tokens=int(page) if page else None, dtype="bfloat16")
    needed = []
    for group in range(1, 34):
        for low_batch in (False, True):
            way = layout, group, "bfloat16", (0, 1), (0, 1), True, True, (there, there + 1024), (), low_batch
            made = plan.Plan(*way)
            needed.append(made.dynamic_bytes + (made._static_bytes if made.residual else 8192))
            assert made.dynamic_bytes >= made.least_bytes - made._static_bytes
    reason = refusals.refuse(layout, torch.device("cuda"))
    if reason is None:
        assert max(needed) <= there
    else:
        assert str(geometry.least_shared_bytes(layout)) in reason and geometry.least_shared_bytes(layout) > there
    if there == 227 * 1024:
        assert reason is None
    if there == 99 * 1024 and (name, dim) in {("saw-int4-kmeans", 128), ("million-4:books=space", 128)}:
        assert reason is not None


@pytest.mark.parametrize("dim", [64, 128])
def test_every_recipe_has_kernels_but_those_that_keep_the_reference(dim: int) -> None:
    """The part that does not look at the machine. `full` has kernels of its own (test_cuda_full.py)."""
    refused = {op: set[str]() for op in ("append", "decode", "prefill")}
    for name in recipes.names():
        layout = Layout.of(recipes.get(name), 8, dim, dtype="bfloat16", device="cuda")
        checks = cuda_append.refuse_layout, refusals.refuse_layout, cuda_prefill.refuse_layout
        for found, refuse in zip(refused.values(), checks, strict=True):
            if refuse(layout) is not None:
                found.add(name)
    kept = {"full", "gear", "gear-l", "zipcache"}
    assert all(found == kept for found in refused.values()), refused


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 11, 16, 17, 64])
def test_query_heads_are_tiled(group: int) -> None:
    made = plan.Plan(make_layout("int4", 2, 128), group, "bfloat16", (0, 1), (0, 1), False, True, H200)
    tiles = int(str(made.constants["QUERY_TILES"]))
    assert made.tile_heads <= 16
    assert (tiles - 1) * made.tile_heads < group <= tiles * made.tile_heads
    assert 4 * made.lane_heads >= made.tile_heads
    assert made.dynamic_bytes <= H200[0]


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *((name, H200) for name in ("vecinfer-4", "vecinfer-3", "vecinfer-2", "vecinfer-2-mixed", "vecinfer-1.5")),
        ("vecinfer-2-mixed", (166912, 167936)),
        ("vecinfer-2", (101376, 102400)),
    ],
)
def test_codebooks_fit_beside_the_pages(name: str, shared: tuple[int, int]) -> None:
    made = plan.Plan(make_layout(name, 2, 128), 4, "bfloat16", (2, 1), (0, 1), False, True, shared)
    assert made.dynamic_bytes + geometry.STATIC_BYTES <= shared[0]
    assert made.constants["MIN_CTAS"] == 1 and made.warps >= 1
    if shared == H200 and name in ("vecinfer-2", "vecinfer-4"):  # no lane waits for another
        assert made.book_bytes == [256 * geometry.ROW] * 2


def test_constants_are_the_layouts() -> None:
    layout = make_layout("int3:k.bits=8", 2, 64)
    constants = plan.Plan(layout, 4, "float16", (1, 64), (2, 1), True, True, H200).constants
    offsets = {(s.stream, s.kind, s.bits): s.offset for s in layout.sections}
    assert constants["PAGE_HEAD_BYTES"] == layout.page_head_bytes
    key, value = constants["Key"], constants["Value"]
    assert isinstance(key, dict) and isinstance(value, dict)
    assert key["Operand"] == f"KeyPlanes<KeyPlane<64, 8, {offsets['key', 'code', 8]}, 0, {1 << 20}, 0>>"
    low, high = offsets["value", "code", 2], offsets["value", "code", 1]
    assert value["Codes"] == f"ValueCodes<64, 3, {low}, {high}, {1 << 20}, false>"
    assert value["SCALE_OFFSET"] == offsets["value", "meta", 16]


def test_spaces_are_the_transforms() -> None:
    layout = make_layout("int4", 2, 64)
    stream = BoundStream.of(recipes.get("saw-int4").key, 64, "bfloat16", "cpu")
    assert fuse((), "dual", layout, torch.device("cpu")).kind == NONE
    found = fuse(stream.transforms, "dual", layout, torch.device("cpu"))
    assert (found.kind, found.order, found.tensor) == (HADAMARD, 64, None)
    two = (Hadamard(seed=1).bind(64), RandomRotation().bind(64))
    q = torch.randn(3, 2, 5, 64, dtype=torch.float64)
    for way in ("dual", "inverse"):
        found = fuse(two, way, layout, torch.device("cpu"))
        assert found.kind == MATRIX and found.tensor is not None and len(found.tensor) == 1 and found.offset is None
        expected = q
        for transform in two if way == "dual" else reversed(two):
            expected = getattr(transform, way)(expected)
        torch.testing.assert_close(q @ found.tensor[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("query", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name",
    [
        *("saw-int4", "quarot-int2-win", "int3:k.bits=8", "int3", "kvant-2", "kvant-3", "oscar"),
        *("vecinfer-2", "vecinfer-2-mixed", "vecinfer-2:rope=block", "kivi-k4v4", "kitty"),
    ],
)
def test_kernels_compile(name: str, query: str, tmp_path: Path) -> None:
    try:
        nvrtc.compiler()
    except OSError as error:
        pytest.skip(str(error))
    nvrtc.compile_text(copy_rows.text(), "sm_80")
    layout = make_layout(name, 2, 128)
    made = plan.Plan(layout, 6, query, (2, 1), (1, 128), True, True, H200)
    for arch in ("sm_80", "sm_90"):
        nvrtc.compile_text(dataclasses.replace(made, bulk=arch == "sm_90").text, arch)
    nvrtc.compile_text(
        transform_kv.TransformPlan(layout, "bfloat16", layout.recipe.key.effective_rope_block).text, "sm_90"
    )
    for stream in unpack.STREAMS:
        rotated = 0 if layout.recipe.streams[stream].rope == "post" else 64
        nvrtc.compile_text(unpack.UnpackPlan(layout, stream, "bfloat16", "float16", rotated).text, "sm_80")
    if layout.format("key").is_pq:
        for rows in (append_pq.LOW_BATCH_ROWS, append_pq.high_batch_rows(layout)):
            nvrtc.compile_text(append_pq.AppendPqPlan(layout, ("bfloat16", "float32"), (128, 1), rows).text, "sm_80")
        return
    if layout.recipe.key.groupwise:
        for arch in ("sm_80", "sm_90"):
            nvrtc.compile_text(append_groups.GroupPlan(layout, ("bfloat16", "float32")).text, arch)
        return
    if cuda_append.refuse_layout(layout) is None:
        pairs = cuda_append.AppendPlan(layout, ("bfloat16", "float32"), (128, 1))
        code = nvrtc.cached_code(pairs.text, "sm_90", tmp_path)
        assert [path.read_bytes().endswith(code) for path in tmp_path.iterdir()] == [True]
        banded, types = name in ("kvant-2", "kvant-3"), ("bfloat16", "float16")  # bands always have a matrix
        tiles = cuda_append.AppendPlan(layout, types, (128, 1), (True, False), (0, 2))
        assert not pairs.tiled and tiles.tiled == (
            not banded and not name.startswith("int3")
        )  # nor two planes of codes
        if banded:
            tiles = cuda_append.AppendPlan(layout, types, (1, 1), (True, False), (2, 3), 256)
            assert tiles.tiled
        step = cuda_append.AppendPlan(layout, types, (1, 128), (True, False), (2, 0), 256 if banded else 0, step=True)
        for arch in ("sm_80", "sm_90"):
            nvrtc.compile_text(tiles.text, arch)
            nvrtc.compile_text(step.text, arch)
        warpgroups = dataclasses.replace(tiles, wgmma=True)
        if tiles.tiled:
            assert nvrtc.architecture(warpgroups.text, (9, 0)) == "sm_90a"
        nvrtc.compile_text(warpgroups.text, nvrtc.architecture(warpgroups.text, (9, 0)))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["oscar:group=64", "int4:group=32", "saw-int4-kmeans-rot"])
def test_kernels_of_several_scales_and_of_residuals_compile(name: str) -> None:
    try:
        nvrtc.compiler()
    except OSError as error:
        pytest.skip(str(error))
    layout, types = make_layout(name, 2, 128), ("bfloat16", "float16")
    made = plan.Plan(layout, 6, "bfloat16", (2, 1), (1, 128), True, True, H200)
    parts = (2, 2) if name.startswith("oscar") else (0, 0)
    tiles = cuda_append.AppendPlan(layout, types, (1, 1), (False, False), parts)
    assert tiles.tiled
    for arch in ("sm_80", "sm_90"):
        nvrtc.compile_text(dataclasses.replace(made, bulk=arch == "sm_90").text, arch)
        nvrtc.compile_text(tiles.text, arch)
        if nearest_centroids.serves(layout):
            for order in (1, 128):
                found = nearest_centroids.NearestPlan(layout, types, (order, 1), (False, False))
                nvrtc.compile_text(found.text, arch)


def test_centroids_fit_beside_the_pages() -> None:
    for group, dim in ((4, 128), (16, 128), (1, 64), (8, 256)):
        made = plan.Plan(make_layout("saw-int4-kmeans", 2, dim), group, "bfloat16", (0, 1), (0, 1), False, True, H200)
        assert made.constants["MIN_CTAS"] == 1 and made.warps >= 2
        assert made.dynamic_bytes + made._static_bytes <= H200[0]


def test_a_matrix_that_does_not_fit_beside_the_pages_has_a_kernel_of_its_own() -> None:
    def made(name: str, shared: tuple[int, int], page: int = 64, query: str = "bfloat16") -> plan.Plan:
        layout = Layout.of(recipes.get(name), 2, 128, dtype="bfloat16", page_tokens=page)
        return plan.Plan(layout, 4, query, (2, 1), (0, 1), False, True, shared, (), low_batch=True)

    small = 101376, 102400
    assert made("oscar", H200).fused_queries and not made("oscar", H200).query_kernel
    assert not made("oscar", H200, query="float32").fused_queries
    big = made("oscar:k.bits=4,v.bits=4", small, page=128)
    assert big.query_kernel and not big.fused_queries and big.dynamic_bytes <= small[0]
    assert made("oscar", small).dynamic_bytes <= small[0]


def test_matrices_of_any_magnitude_are_multiplied_by() -> None:
    """float16 holds up to 65504, and nothing below 6e-5 in full."""
    matrix = torch.randn(2, 64, 64)
    one, two = (
        fragments.fused_fragments(matrix),
        fragments.fused_fragments(matrix * torch.tensor([2.0**20, 2.0**-20])[:, None, None]),
    )
    assert torch.equal(one[:-2], two[:-2])
    powers = two[-2:].view(torch.float32) / one[-2:].view(torch.float32)
    assert powers.tolist() == [2.0**20, 2.0**-20]
    largest = one[:-2].view(torch.float16).abs().max()
    assert 0.5 <= float(largest) <= 1.0


def ptx_of(text: str, arch: str) -> str:
    compiler, program, size = nvrtc.compiler(), nvrtc.create_program(text), ctypes.c_size_t()
    options = [option.encode() for option in (*nvrtc.OPTIONS, f"--gpu-architecture={arch}")]
    assert not compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    assert not compiler.nvrtcGetPTXSize(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    assert not compiler.nvrtcGetPTX(program, found)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return found.value.decode()


@pytest.mark.few(2)
@pytest.mark.parametrize(("group", "dim"), [(3, 128), (5, 64), (6, 64), (7, 128), (9, 256)])
def test_numbers_that_may_be_negative_keep_their_sign(group: int, dim: int) -> None:
    """In the addresses of queries that are rotated: NVVM took a constant out of `row % TILE_HEADS` and widened what was left as if
    it had no sign, so that half of the rows for the windows went 2^40 bytes astray. The emulated kernels cannot show that."""
    try:
        nvrtc.compiler()
    except OSError as error:
        pytest.skip(str(error))
    layout = make_layout("kvant-2:rope_block=64", 2, dim)
    made = plan.Plan(layout, group, "bfloat16", (2, 1), (2, 1), False, True, H200, ROTATED_BEFORE)
    inside = dataclasses.replace(made, tuned=ROTATED_BY_DECODE if dim <= 128 else ())
    assert inside.rotated_queries == (dim <= 128)
    text = ptx_of(made.text, "compute_90")
    less: set[str] = set()  # registers that a constant was taken off
    assert made.high_batch_warps and ".entry kvant_rotate_queries_high_batch" in text
    for line in [*text.splitlines(), *ptx_of(inside.text, "compute_90").splitlines()]:
        if ".entry" in line:
            less.clear()
        if taken := re.match(r"\s+(?:add\.s32\s+(%r\d+), %r\d+, -\d+|sub\.s32\s+(%r\d+), (%r\d+), %r\d+);", line):
            constant, difference, whole = taken.groups()
            if constant or whole in less:
                less.add(constant or difference)
        widened = re.match(r"\s+(?:mul\.wide\.u32|mad\.wide\.u32|cvt\.u64\.u32)\s+%rd\d+, (%r\d+)", line)
        assert not widened or widened[1] not in less, line


def test_a_text_that_does_not_compile_says_so() -> None:
    try:
        nvrtc.compiler()
    except OSError as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeError, match="does not compile for sm_90"):
        nvrtc.compile_text("nonsense", "sm_90")
