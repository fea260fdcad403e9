"""Decode on a GPU against the reference on the same bytes: float64, poisoned memory, odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import levels
from tests.needs import gpu, needs_gpu
from tests.ops.cuda.decode_cases import (
    FP8_WINDOWS,
    HALVED,
    INDEX_LAUNCHES,
    LENGTHS,
    LEVELS,
    RESIDUAL,
    SCALES,
    SEVERAL_QUERIES,
    SINK_LOGITS,
    SPACES,
)
from tests.ops.cuda.decode_checks import check_decode, check_several_queries, check_sink_logits
from tests.ops.cuda.filling import filled
from tests.ops.emulated import H200
from tests.ops.scores import some_sinks


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
    if tuned and cuda_decode.shared_memory(torch.device("cuda"))[0] < H200[0]:
        pytest.skip("these ways need codebooks with all copies in shared memory, which an H200 has room for")
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    lengths = [1, 63, 64, 65, 129, 700, 9000]
    check_decode("vecinfer-2", dtype=dtype, limit=limit, lengths=lengths, tuned=tuned, **options)
    check_decode("vecinfer-2:sink=0,recent=0", dtype=dtype, limit=limit, lengths=lengths, tuned=tuned, **options)


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "group", "dim", "options"), [*SCALES, *FP8_WINDOWS, *RESIDUAL, *LEVELS, *SPACES, *HALVED]
)
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
    """Sequences of all lengths, one that many CTAs share, and many."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 1 << 20 if low_batch else 0)
    for lengths in (LENGTHS, [20000, 3], list(range(1, 400, 9))):
        cache, seqs = filled(name, 2, group, dim, dtype, lengths)
        check_sink_logits(cache, seqs, group, options, limit, getattr(torch, dtype))


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
def test_decode_of_long_and_of_many_sequences() -> None:
    check_decode("kivi-k2v2", lengths=[40_000, 3])
    check_decode("kitty-pro", 8, lengths=list(range(1, 500, 7)))
    check_decode("int2", lengths=[40_000, 3])
    check_decode("quarot-int2-win", lengths=[40_000])
    check_decode("int2", 8, lengths=list(range(1, 200, 3)))
    for name in ("int2", "oscar", "kvant-2"):
        check_decode(name, lengths=list(range(1, 700, 3)))
    check_decode("vecinfer-2", lengths=[40_000, 3])
    check_decode("vecinfer-2", 8, lengths=list(range(1, 400, 6)))
