"""Emulated append against the bytes of the reference: pairs of tokens, steps, tiles; and copies of rows."""

from __future__ import annotations

import pytest
import torch

from kvant.bench.synthetic import vectors
from kvant.cache import PagedCache, Sequence
from kvant.ops import reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import copy_rows, transform_kv
from tests.needs import needs_compiler
from tests.ops import emulated
from tests.ops.cuda.append_checks import STEPS, check_fp8_windows, check_step
from tests.ops.emulated.checks import check_append, filled

pytestmark = needs_compiler


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("saw-int4", 64),
        ("quarot-int2-win:sink=5,recent=70", 64),
        ("kvant-4-fast", 96),
        ("int8", 64),
        ("int4:sink=3,recent=20,v.window_dtype=fp8", 80),
        ("kvant-2:v.window_dtype=model", 64),
        ("int2:group=32,sink=3,recent=20,v.window_dtype=fp8", 64),
        ("oscar:sink=3,recent=20", 64),
        ("int4:k.clip=0.6", 64),
        ("kvant-2", 64),
        ("kvant-2:search=9,rope_block=70,v.bits=4", 128),
        ("int3", 64),
        ("int3", 192),
        ("saw-int4-kv:bits=3,sink=3,recent=20", 128),
        ("int4:k.bits=3,search=3,zero=float", 64),
        ("int8:v.bits=3", 128),
        ("saw-int4-kmeans", 128),
        ("saw-int4-kmeans-rot:centroids=16,sink=3,recent=20,bits=2", 64),
        ("saw-int4-kmeans-rot:centroids=20,books=layer,zero=float", 96),
        ("saw-int4-kmeans:k.centroids=1,v.centroids=33,group=32,sink=2", 64),
        ("int4:group=32", 128),
        ("saw-int4:group=64", 128),
        ("int2:k.group=32,v.group=16", 64),
        ("int8:k.group=32,v.bits=3,v.group=32,search=3", 64),
        ("int2:k.group=0,v.group=32,sink=3,recent=20", 64),
        ("kvant-2:rope=post,k.bits=3/2/0,v.bits=3", 256),
        ("kvant-3", 64),
        ("kvant-2:rope=post,k.bits=3/2/0,v.bits=3", 128),
        ("kvant-2:rope_block=70,k.bits=0/4/2", 64),
        ("turboquant-4", 64),
        ("turboquant-2:sink=3,recent=20,meta=bfloat16", 96),
        ("turboquant-4:k.bits=2,v.bits=3", 64),
        ("turboquant-3", 256),
        ("kivi-k2v2:k.flush=64", 64),
        ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", 96),
        ("kivi-k2v2:k.bits=3,k.flush=32,v.bits=3,v.group=16", 64),
        ("kitty-pro:k.group=32,k.flush=64,v.recent=40,sink=2", 64),
        ("kitty:k.group=64,k.flush=64,sink=0", 128),
        ("kitty-pro:k.group=64,k.flush=64,v.recent=40,sink=9,shift=false", 64),
    ],
)
def test_append(name: str, dim: int) -> None:
    check_append(name, dim, ([5, 1, 0], [1, 1, 1], [0, 30, 2]))


@pytest.mark.few(2)
@pytest.mark.parametrize("sequences", [1, 15, 16, 17])
@pytest.mark.parametrize(("name", "dim", "dtype", "page"), STEPS)
def test_append_of_a_step(
    name: str, dim: int, dtype: str, page: int | None, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows have a matrix or are unrotated: by one kernel, whose CTAs take one tile of 16 tokens or several."""
    monkeypatch.setattr(emulated.Kernel, "blocks", 8 if sequences == 17 else 4)
    check_step(name, dim, dtype, page, sequences, monkeypatch, "cpu", 1e-3)


@pytest.mark.parametrize("name", ["oscar:sink=3,recent=20", "kvant-2:rope_block=70"])
def test_a_step_starts_early_once_its_matrices_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    early: list[bool] = []
    launch = emulated.Kernel.launch
    monkeypatch.setattr(emulated.Kernel, "launch", lambda self, *args: (early.append(args[-1]), launch(self, *args))[1])
    check_step(name, 64, "bfloat16", 16, 17, monkeypatch, "cpu", 1e-3)
    assert early == [False, True]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "dim", "dtype", "page"),
    [
        ("int4", 128, "bfloat16", None),
        ("saw-int4", 128, "bfloat16", None),
        ("saw-int4-kv:seed=3", 64, "float16", 16),
        ("saw-int4-kv:order=64", 128, "bfloat16", 32),
        ("saw-int4-kv:order=16,seed=1", 128, "bfloat16", 128),
        ("saw-int4-kv:order=2", 64, "float16", None),
        ("quarot-int2-win:sink=5,recent=70", 128, "bfloat16", None),
        ("int2:sink=70,recent=3", 64, "float16", None),
        ("int4:sink=2,recent=9,v.window_dtype=fp8", 96, "float16", None),
        ("oscar:group=64,sink=3,recent=20,v.window_dtype=fp8", 128, "bfloat16", None),
        ("kvant-2:v.window_dtype=model", 128, "bfloat16", None),
        ("int4:k.bits=8,v.bits=2", 64, "bfloat16", None),
        ("kvant-4-fast", 128, "bfloat16", None),
        ("int4:zero=float,search=3", 64, "float16", None),
        ("int4:k.clip=0.6", 64, "bfloat16", None),
        ("oscar:sink=3,recent=20", 128, "bfloat16", None),
        ("oscar", 64, "float16", None),
        ("saw-int4-kmeans", 128, "bfloat16", None),
        ("saw-int4-kmeans-rot:centroids=16,sink=3,recent=20,bits=2", 64, "float16", 16),
        ("saw-int4-kmeans-rot:centroids=20,books=layer,zero=float", 96, "bfloat16", None),
        ("saw-int4-kmeans-rot:k.centroids=1,v.centroids=33,group=32,sink=2", 64, "bfloat16", None),
        ("int4:group=32", 128, "bfloat16", None),
        ("int4:group=64,zero=integer,sink=2,recent=5", 128, "float16", 16),
        ("int2:k.group=32,v.group=16,search=3", 64, "bfloat16", None),
        ("int8:k.group=32,v.group=0", 64, "bfloat16", None),
        ("oscar:group=64,sink=3,recent=20", 128, "bfloat16", None),
        ("oscar:group=32,sink=0,recent=9", 128, "float16", None),
        ("oscar:k.group=0,v.group=32", 64, "bfloat16", None),
        ("saw-int4-kv:group=32", 64, "bfloat16", None),
        ("int4:sink=2,recent=5", 96, "bfloat16", None),
        ("kvant-4-fast", 96, "bfloat16", None),
        ("saw-int4:seed=1", 96, "float16", None),
        ("kvant-2", 128, "bfloat16", None),
        ("kvant-2:rope=post", 64, "float16", 16),
        ("kvant-2:rope=post,sink=0,recent=0", 128, "bfloat16", 32),
        ("kvant-2:rope_block=70,sink=0,recent=0", 64, "bfloat16", None),
        ("kvant-2:rope_block=70,sink=3,recent=20", 128, "float16", 16),
        ("kvant-2:v.bits=4,k.bits=4/4/0", 64, "float16", None),
        ("kvant-2:k.bits=0/4/2,rope_block=64", 128, "bfloat16", 128),
        ("kvant-2:search=9,k.bits=2,v.unbiased=true", 64, "bfloat16", None),
        ("kvant-3", 128, "bfloat16", None),
        ("kvant-3:k.bits=3,rope=post,sink=0,recent=0", 128, "float16", 16),
        ("int3", 128, "bfloat16", None),
        ("saw-int4-kv:k.bits=3,seed=3,sink=3,recent=20", 128, "float16", 16),
        ("int4:v.bits=3,search=3,zero=float", 128, "bfloat16", None),
        ("oscar:bits=3,sink=3,recent=20", 128, "bfloat16", None),
        ("turboquant-4", 128, "bfloat16", None),
        ("turboquant-3:sink=3,recent=20", 128, "float16", 16),
        ("turboquant-2:v.bits=4", 64, "bfloat16", None),
        ("turboquant-4:meta=bfloat16", 96, "float16", None),
    ],
)
def test_append_of_tiles(name: str, dim: int, dtype: str, page: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that begin anywhere in a page, even or odd, that sequences share, and that are not full."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", 1)
    ran: list[bool] = []
    kernel = cuda_append._kernel
    monkeypatch.setattr(cuda_append, "_kernel", lambda *args: ran.append(args[-1]) or kernel(*args))
    first = 1013 if "rope_block" in name else 0  # position of the first token
    check_append(name, dim, ([5, 2, 64], [1, 1, 1], [0, 30, 2]), dtype, page, first=first)
    assert ran == [True] * 3


@pytest.mark.slow
def test_tiles_of_which_some_channels_are_turned_are_appended_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_append, "TILE_ROWS", 1)
    ran: list[bool] = []
    kernel = cuda_append._kernel
    monkeypatch.setattr(cuda_append, "_kernel", lambda *args: ran.append(args[-1]) or kernel(*args))
    check_append("kvant-2:rope_block=70", 64, ([5, 2, 64],), rotated=24)
    assert ran == [False]


@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_windows_of_values_as_fp8(dtype: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the conversion of GPUs before sm_89, which is not that of later ones."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    check_fp8_windows(dtype, "cpu")


@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
@pytest.mark.parametrize("name", ["kvant-2:sink=0,recent=0", "oscar:sink=0,recent=0"])
def test_rows_of_zeros_and_of_any_size(name: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are brought into the range of fp16, and those of nothing stay nothing; in tiles and in steps."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    made = [filled(name, 2, 1, 64, [1, 63]) for _ in range(2)]
    size = torch.tensor([0.0, 1e-30, 1e-9, 1.0, 3e5, 1e12])[torch.arange(60) % 6, None, None]
    k, v = ((vectors(60, 2, 64, "cpu", shift) * size).bfloat16() for shift in (0.0, 0.4))
    for (cache, seqs), run in zip(made, (reference.append, cuda_append.append), strict=True):
        run(cache.stores[0], k, v, cache.extend(seqs, [41, 19]))
    one, two = (cache.stores[0].pages for cache, _ in made)
    assert float((one != two).double().mean()) < 1e-3


@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
@pytest.mark.parametrize("name", ["kvant-2:rope=post,sink=0,recent=0", "oscar:sink=0,recent=0"])
def test_rows_beside_those_that_are_not_finite(name: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tile are multiplied and scaled on their own: what is coded of the finite ones does not depend on the others."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    made = [filled(name, 2, 1, 64, [64]) for _ in range(2)]
    k, v = (vectors(64, 2, 64, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
    bad = torch.arange(64) % 3 == 1
    k_bad, v_bad = k.clone(), v.clone()
    for x in (k_bad, v_bad):
        x[bad, :, 5] = torch.tensor([float("inf"), float("nan"), -float("inf")]).repeat(7)[:, None].bfloat16()
    for (cache, seqs), rows in zip(made, ((k, v), (k_bad, v_bad)), strict=True):
        cuda_append.append(cache.stores[0], *rows, cache.extend(seqs, [64]))
    for stream in ("key", "value"):
        one, two = (
            cache.layout.unpack(stream, cache.stores[0].pages[cache.batch(seqs).block_table[0, 1:]])  # type: ignore[arg-type]
            for cache, seqs in made
        )
        for part, expected in one.items():
            assert torch.equal(two[part][~bad], expected[~bad]), (stream, part)
            assert len(expected) == 64 and bool((expected != 0).any())


@pytest.mark.parametrize("way", ["rows", "step", "tiles"])
@pytest.mark.parametrize(
    "name", ["int2:clip=0.9,zero=float", "int4:k.clip=0.6", "int8:clip=0.95,zero=float", "int2:clip=0.9,group=32"]
)
def test_rows_are_clipped_where_the_reference_clips_them(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with many equal magnitudes, few that are not zero, heavy tails, and numbers far from zero. There is no sum before the codes:
    they are the reference's, and so are scales, minima and zeros, but for the sign of a minimum of zero. The kernel of a step, which
    serves rows that have a matrix, is given rows without one."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", 1 if way == "tiles" else 1 << 30)
    monkeypatch.setattr(cuda_append, "_way", lambda *args: way)
    made = [filled(name, 2, 1, 64, [1, 63], spare=9) for _ in range(2)]
    x = torch.randn(64, 2, 64)
    rows = [x, x.sign(), x * (torch.rand_like(x) < 0.05), x**9, x + 300, (x * 2).round() / 2, x * 1e-20, x * 1e20]
    k, v = torch.stack(rows).transpose(0, 1).reshape(2, -1, 2, 64).bfloat16()
    check_rows_are_clipped(made, k, v)


@pytest.mark.parametrize("way", ["rows", "step", "tiles"])
def test_rows_are_clipped_where_their_largest_magnitudes_are_equal(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are clipped, the other channels zero: a search for where to clip has an interval of nothing to divide."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", 1 if way == "tiles" else 1 << 30)
    monkeypatch.setattr(cuda_append, "_way", lambda *args: way)
    made = [filled("int2:clip=0.9,zero=float", 2, 1, 64, [1, 63], spare=9) for _ in range(2)]
    size = 1 + torch.arange(128) / 128  # all that bfloat16 has in [1, 2)
    count = torch.tensor([8, 11, 13, 17])
    chosen = torch.rand(2, 128, 4, 64).argsort(-1) < count[:, None]
    rows = torch.randn(chosen.shape).sign() * size[:, None, None] * chosen
    k, v = rows.reshape(2, -1, 2, 64).bfloat16()
    check_rows_are_clipped(made, k, v)


def check_rows_are_clipped(made: list[tuple[PagedCache, list[Sequence]]], k: torch.Tensor, v: torch.Tensor) -> None:
    """All codes, scales, minima and zeros are those of the reference, which has the first of two equal caches."""
    for (cache, seqs), run in zip(made, (reference.append, cuda_append.append), strict=True):
        run(cache.stores[0], k, v, cache.extend(seqs, [100, len(k) - 100]))
    for stream in ("key", "value"):
        one, two = (cache.layout.unpack(stream, cache.stores[0].pages[:10]) for cache, _ in made)  # type: ignore[arg-type]
        for part, expected in one.items():
            torch.testing.assert_close(two[part], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["int4", "kvant-2", "vecinfer-2", "kivi-k2v2"])
def test_numbers_of_another_type_are_refused(name: str) -> None:
    cache, seqs = filled(name, 2, 1, 64, [3], order=None)
    with pytest.raises(ValueError, match="keys must be bfloat16, float16, float32, got torch.float64"):
        cuda_append.append(cache.stores[0], *torch.randn(2, 1, 2, 64).double(), cache.extend(seqs, [1]))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "dim", "first"),
    [("kvant-2", 64, 1000), ("oscar", 128, 0), ("kvant-2:rope_block=70", 96, 3), ("saw-int4-kv:seed=3", 64, 0)],
)
def test_transform_rows(name: str, dim: int, first: int) -> None:
    """New tokens of several sequences at odd positions, some of them padding."""
    cache, seqs = filled(name, 2, 1, dim, [1, 63, 300], order=None, first=first)
    store, batch = cache.stores[0], cache.extend(seqs, [0, 3, 17])
    x = vectors(20, 2, dim, "cpu", 0.3)
    for stream in ("key", "value"):
        bound = store.stream(stream)  # type: ignore[arg-type]
        for dtype in (torch.float32, torch.bfloat16):
            rows = x.to(dtype)
            found = transform_kv.transform_rows(store, stream, rows, batch)  # type: ignore[arg-type]
            torch.testing.assert_close(found, bound.stored(rows.float(), batch.positions[1]), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [None, 2, 9])
def test_rows_are_copied_where_somebody_wants_them(tokens: int | None) -> None:
    x = torch.randn(3, 6, 4, 2, 520).bfloat16()  # more than a block of threads copies at once
    source, target = torch.tensor([1, 4, 0, 2]), torch.tensor([3, 5, 2, 5])  # row 5 is nobody's
    expected = x.clone()
    for i, j in ((1, 3), (0, 2)):
        expected[:, j, :tokens] = x[:, i, :tokens]
    copy_rows.copy_rows(x, source, target, tokens)
    assert torch.equal(x, expected)
    copy_rows.copy_rows(x[1:2], source[:1], target[:1], tokens)
    assert torch.equal(x, expected)
    copy_rows.copy_rows(torch.empty(3, 6, 0, 2, 8), source, target, tokens)  # a stream without a window
