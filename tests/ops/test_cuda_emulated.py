"""The CUDA kernels' text, run on a CPU, against the reference on the same bytes: float64, poisoned memory."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.bench import attention
from kvant.bench.synthetic import vectors
from kvant.cache import PagedCache, Sequence
from kvant.ops import flash, implementations, reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import (
    append_groups,
    append_pq,
    copy_rows,
    fit_subspace,
    geometry,
    merge_parts,
    nearest_centroids,
    nvrtc,
    plan,
    transform_kv,
    unpack,
)
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import prefill as cuda_prefill
from kvant.ops.cuda.config import QueryTransform
from kvant.ops.cuda.decode_matrices import DecodeTransforms
from kvant.ops.cuda.key_planes import key_planes
from scripts.kernel_resources import GPUS
from tests.conftest import make_layout, relative_error
from tests.ops import emulated, test_cuda
from tests.ops.scores import head_errors, log_sum_exp, some_sinks, with_sinks

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")

ROOT = Path(__file__).parent.parent.parent


class Stream:
    cuda_stream = 0


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled for and run on this machine."""
    monkeypatch.setattr(nvrtc, "Kernel", emulated.Kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(cuda_decode, "shared_memory", lambda device: emulated.H200)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    caches = (cuda_decode._kernel, cuda_decode._transform_kernel, cuda_decode._rotate_kernel, cuda_append._kernel)
    caches += (cuda_decode._high_batch_kernel, cuda_decode._plan)
    caches += (unpack._kernel, transform_kv._kernel, append_pq._kernel, append_groups._kernel, copy_rows._kernel)
    caches += (fit_subspace._kernel,)
    caches += (nearest_centroids._kernel, merge_parts._kernel)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def filled(
    name: str,
    heads: int,
    group: int,
    dim: int,
    lengths: list[int],
    dtype: str = "bfloat16",
    order: str | None = "fragment",
    **options: int | None,
) -> tuple[PagedCache, list[Sequence]]:
    torch.manual_seed(0)
    cache, seqs = test_cuda.filled(name, heads, group, dim, dtype, lengths, device="cpu", **options)  # type: ignore[arg-type]
    assert order in (None, cache.layout.order) or cache.layout.format("key").is_pq
    return cache, seqs


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("saw-int4", 4, 64, {}),
        ("quarot-int2-win:sink=5,recent=70", 5, 64, {}),
        ("oscar:sink=3,recent=20", 2, 64, {"sliding_window": 150}),
        ("kvant-2:rope=post", 4, 64, {}),
        *test_cuda.ROTATED,
        ("kvant-4-fast", 9, 64, {"softcap": 5.0}),
        ("int3", 1, 64, {}),
        *test_cuda.SCALES,
        *test_cuda.RESIDUAL,
        *test_cuda.LEVELS,
        *test_cuda.SPACES,
        *test_cuda.HALVED,
        ("vecinfer-2", 4, 64, {}),
        ("vecinfer-4", 9, 64, {"softcap": 5.0}),
        ("million-1.5:bits=8,books=head", 2, 128, {"sliding_window": 150}),
        ("million-2:k.bits=10,v.bits=9", 3, 96, {}),
        ("vecinfer-3", 4, 64, {}),
        ("vecinfer-2:dim=2,bits=4", 4, 128, {}),
        ("vecinfer-2:dim=2,k.bits=3,v.bits=3", 3, 64, {}),
        ("vecinfer-2:dim=4,bits=6", 9, 64, {"softcap": 5.0}),
        ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 4, 64, {"first": 30}),
        ("million-2:rope=block,rope_block=100", 9, 128, {"softcap": 5.0}),
    ],
)
def test_decode(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    options = dict(options)
    first, rotated = (int(options.pop(key, 0)) for key in ("first", "rotated"))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 300], first=first, rotated=rotated)
    check(cache, seqs, group, dim, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


@pytest.mark.parametrize("lengths", [[900, 900, 880], [900, 130, 500]])  # about equal, or not
@pytest.mark.parametrize("blocks", [4, 7, 13])  # for six (sequence, head tile)s: two of them a CTA, one, or half of one
@pytest.mark.parametrize("inside", [False, True])
def test_ctas_take_whole_tiles_where_sequences_are_about_equal(
    inside: bool, blocks: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    name, tuned = "oscar:sink=3,recent=20", ()
    if inside:  # heads first
        name, tuned = "kvant-2:rope_block=64,sink=4,recent=50", test_cuda.ROTATED_BY_DECODE
    cache, seqs = filled(name, 2, 4, 64, lengths)
    q, batch = torch.randn(len(seqs), 8, 64).bfloat16(), cache.batch(seqs)
    expected = reference.decode(cache.stores[0], q.double(), batch, scale=0.125)
    with attention.poisoned():
        found, _ = cuda_decode.decode_with_lse(cache.stores[0], q, batch, scale=0.125, tuned=tuned)
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize("blocks", [1, 3, 7])  # twice as many teams share six (sequence, head tile)s
@pytest.mark.parametrize("tuned", [(("TEAMS", 1),), (), (("TEAMS", 2), ("WARPS", 3)), (("WHOLE_TILES", 1),)])
@pytest.mark.parametrize("name", ["vecinfer-2:sink=3,recent=20", "vecinfer-2:dim=2,sink=3,recent=20"])
def test_teams_of_a_cta_share_codebooks(
    name: str, tuned: tuple[tuple[str, int], ...], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    cache, seqs = filled(name, 2, 4, 64, [900, 130, 500])
    q, batch = torch.randn(len(seqs), 8, 64), cache.batch(seqs)
    expected = reference.decode(cache.stores[0], q.double(), batch, scale=0.125)
    with attention.poisoned():
        found, _ = cuda_decode.decode_with_lse(cache.stores[0], q, batch, scale=0.125, tuned=tuned)
    assert relative_error(found, expected) < 5e-4


# Sub-vectors of 2 channels at head_dim 64 have 32 indices a token, as those of 4 at head_dim 128.
@pytest.mark.parametrize("tuned", test_cuda.INDEX_LAUNCHES)
@pytest.mark.parametrize(
    ("name", "dim", "group", "options"),
    [
        ("vecinfer-2:dim=2,sink=0,recent=0", 64, 4, {}),
        ("vecinfer-2:sink=1,recent=20", 128, 4, {}),
        ("vecinfer-2:dim=2,sink=3,recent=20", 64, 3, {"sliding_window": 150, "softcap": 5.0}),
        ("vecinfer-2:dim=2", 64, 9, {"sliding_window": 70}),
    ],
)
def test_indices_go_to_registers_or_to_shared_memory(
    name: str, dim: int, group: int, options: dict[str, float], tuned: tuple[tuple[str, int], ...]
) -> None:
    lengths = [1, 0, 63, 64, 65, 129, 700]
    cache, seqs = filled(name, 2, group, dim, lengths)
    batch, store = cache.batch(seqs), cache.stores[0]
    wide = torch.cat((batch.block_table, torch.zeros(len(seqs), 3, dtype=torch.int64)), 1)
    for row, tokens in zip(wide, lengths, strict=True):
        row[tokens // cache.layout.page_tokens + 1 :] = 1 << 40  # behind the last page a table may hold anything
    q = torch.randn(len(seqs), 2 * group, dim)
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options}
    with attention.poisoned():
        wider = batch._replace(block_table=wide)
        found, lse = cuda_decode.decode_with_lse(store, q, wider, tuned=tuned, **settings)  # type: ignore[arg-type]
    assert relative_error(found, reference.decode(store, q.double(), batch, **settings)) < 5e-4  # type: ignore[arg-type]
    exact = log_sum_exp(store, q, batch, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("tuned", test_cuda.INDEX_LAUNCHES)
@pytest.mark.parametrize(("group", "queries"), [(1, 3), (4, 2)])
def test_several_queries_by_indices_in_registers(group: int, queries: int, tuned: tuple[tuple[str, int], ...]) -> None:
    cache, seqs = filled("vecinfer-2:dim=2,sink=3,recent=20,rollback=3", 2, group, 64, [1, 64, 65, 300])
    settings = {"scale": 0.125, "softcap": None, "sliding_window": 150}
    test_cuda.check_several_queries(cache, seqs, group, 64, queries, settings, 5e-4, tuned=tuned)


def test_which_indices_go_to_registers() -> None:
    def made(name: str, dim: int = 128, group: int = 4, shared: tuple[int, int] = emulated.H200, **options: Any) -> Any:
        return plan.Plan(make_layout(name, 8, dim), group, "bfloat16", (2, 1), (0, 1), False, True, shared, **options)

    usual = made("vecinfer-2")
    assert usual.indices_in_registers and usual.paired_books and usual.teams_below == usual.teams == 3
    assert usual.warp_bytes == 16 * (128 + 4) and usual.dynamic_bytes == 2 << 16
    assert made("vecinfer-2:dim=2", 64).indices_in_registers
    for name in ("vecinfer-4", "vecinfer-3", "vecinfer-2:books=head", "vecinfer-2:rope=block", "vecinfer-1.25"):
        assert not made(name).indices_in_registers and not made(name).paired_books, name
    assert not made("vecinfer-2", 64).indices_in_registers  # half a word of a lane's values
    assert not made("vecinfer-2", low_batch=True).indices_in_registers
    assert not made("vecinfer-2", group=8).indices_in_registers
    assert not made("vecinfer-2", shared=GPUS["sm_86"].shared).indices_in_registers
    copied = made("vecinfer-2", tuned=test_cuda.COPIED_INDICES)
    assert not copied.indices_in_registers and not copied.paired_books and copied.teams_below == copied.teams
    beside = made("vecinfer-2", tuned=(*test_cuda.COPIED_INDICES, ("PAIRED_BOOKS", 1), ("TEAMS", 3), ("WARPS", 4)))
    assert beside.teams_below == 1 and beside.dynamic_bytes == (2 << 16) + 8 * beside.warp_bytes


def test_teams_where_heads_share_codebooks_and_a_kernel_makes_the_queries() -> None:
    def teams(name: str, dual: tuple[int, int] = (2, 1), **options: Any) -> tuple[int, int]:
        ways = dual, (0, 1), False, True, emulated.H200
        made = plan.Plan(make_layout(name, 8, 128), 4, "bfloat16", *ways, **options)
        return made.teams, made.warps

    assert teams("vecinfer-2") == (3, 4)
    assert teams("vecinfer-2", tuned=test_cuda.COPIED_INDICES) == (2, 8)
    assert teams("vecinfer-2", low_batch=True) == (1, 16)
    assert teams("vecinfer-2:books=head") == (1, 16)
    assert teams("million-2", (0, 1)) == (1, 16)
    assert teams("saw-int4-kmeans", (0, 1)) == (1, 8)


# Scores that move the reference of the exponents up again and again; scores that are all but equal, whose sums of P would become too large; and some that
# come with a window, several queries of a sequence or a soft cap.
@pytest.mark.few(4)
@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(
    ("name", "group", "dim", "lengths", "options"),
    [
        ("saw-int4-kmeans:sink=2,recent=5", 4, 128, [1, 63, 500], {"scale": 1.5}),
        ("saw-int4-kmeans", 1, 64, [3300], {"scale": 1e-3, "tuned": (("WARPS", 1),)}),
        ("saw-int4-kmeans:k.centroids=30,v.centroids=70", 7, 64, [1, 63, 500], {"scale": 0.5, "softcap": 5.0}),
        ("saw-int4-kmeans-rot:centroids=100,group=32", 3, 128, [300], {"scale": 0.3, "sliding_window": 150}),
        ("saw-int4-kmeans:centroids=40", 16, 64, [300], {"scale": 1.0, "tuned": (("CENTROID_SUMS", 1),)}),
        ("saw-int4-kmeans", 4, 128, [300], {"scale": 1.0, "tuned": (("CENTROID_SUMS", 0),)}),
    ],
)
def test_probabilities_are_summed_by_centroid(
    name: str,
    group: int,
    dim: int,
    lengths: list[int],
    options: dict[str, Any],
    low_batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", 2)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    cache, seqs = filled(name, 2, group, dim, lengths)
    q, batch, store = torch.randn(len(seqs), 2 * group, dim), cache.batch(seqs), cache.stores[0]
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, **options)
    options = {key: value for key, value in options.items() if key != "tuned"}
    assert relative_error(found, reference.decode(store, q.double(), batch, **options)) < 5e-4
    torch.testing.assert_close(lse.double(), log_sum_exp(store, q, batch, **options), rtol=1e-3, atol=5e-3)


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "group", "dim", "queries", "options"), test_cuda.SEVERAL_QUERIES)
def test_decode_of_several_queries(name: str, group: int, dim: int, queries: int, options: dict[str, float]) -> None:
    """Each sees the tokens up to its own, from where decode at that length would read them."""
    options = dict(options)
    first, rotated = (int(options.pop(key, 0)) for key in ("first", "rotated"))
    cache, seqs = filled(name, 2, group, dim, [queries, 66, 131, 300], first=first, rotated=rotated)
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options}
    test_cuda.check_several_queries(cache, seqs, group, dim, queries, settings, 5e-4)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Queries are rotated as where there are many blocks of positions. Lists the kernels that are launched."""
    monkeypatch.setattr(cuda_decode, "HIGH_BATCH_PASSES", 0)
    launched: list[str] = []
    for cache in ("_rotate_kernel", "_high_batch_kernel"):
        kernel = getattr(cuda_decode, cache).__wrapped__

        def recording(*args: Any, kernel: Any = kernel, name: str = cache) -> emulated.Kernel:
            made = kernel(*args)
            launch = made.launch
            made.launch = lambda *args: launched.append(name) or launch(*args)
            return made

        monkeypatch.setattr(cuda_decode, cache, functools.lru_cache(recording))
    return launched


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "group", "dim", "options"), [*test_cuda.ROTATED, *test_cuda.ROTATED_HIGH_BATCH])
def test_rotated_queries_of_a_high_batch(
    name: str, group: int, dim: int, options: dict[str, float], many: list[str]
) -> None:
    options = dict(options)
    first, rotated = (int(options.pop(key, 0)) for key in ("first", "rotated"))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 300, 170], first=first, rotated=rotated)
    check(cache, seqs, group, dim, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})
    # the matrix of head_dim 256 in two parts is more than shared memory holds twice
    assert many == ["_rotate_kernel" if rotated or dim == 256 else "_high_batch_kernel"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype", "limit"),
    [
        ("kvant-2", 4, 128, torch.bfloat16, 2e-3),
        ("kvant-2:rope_block=64", 3, 64, torch.float16, 5e-4),
        ("kvant-2:rope_block=64", 1, 128, torch.float16, 5e-4),
        ("kvant-2:rope_block=128", 16, 128, torch.bfloat16, 2e-3),
        ("kvant-2:rope_block=128", 9, 256, torch.bfloat16, 2e-3),
        ("vecinfer-2:rope=block,rope_block=64", 8, 128, torch.float16, 5e-4),
    ],
)
def test_rotated_queries_of_a_high_batch_in_16_bits(
    name: str, group: int, dim: int, dtype: torch.dtype, limit: float, many: list[str]
) -> None:
    """Beside tables that are wider than sequences are long, and more sequences than a warp has lanes."""
    cache, seqs = filled(name, 2, group, dim, [1, 300, 70], first=1000)
    batch, store = cache.batch(seqs * 12), cache.stores[0]
    wide = torch.cat((batch.block_table, torch.full((len(batch.block_table), 9), 1 << 40)), 1).contiguous()
    q = torch.randn(len(wide), 2 * group, dim).to(dtype)
    with attention.poisoned():
        wider, tuned = batch._replace(block_table=wide), test_cuda.ROTATED_BEFORE
        found, _ = cuda_decode.decode_with_lse(store, q, wider, scale=dim**-0.5, tuned=tuned)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=dim**-0.5)) < limit
    assert many == ["_high_batch_kernel"]


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: None) -> None:
    """Any number of sequences is few; on a GPU that copies pages in bulk, and on one before."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the kernels that are launched."""
    found: list[str] = []
    make, launch = emulated.Kernel.__init__, emulated.Kernel.launch

    def named(self: Any, text: str, name: str, *args: Any) -> None:
        make(self, text, name, *args)
        self.name = name

    monkeypatch.setattr(emulated.Kernel, "__init__", named)
    monkeypatch.setattr(emulated.Kernel, "launch", lambda self, *args: found.append(self.name) or launch(self, *args))
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(
    ("name", "group", "dim", "queries", "options"),
    [
        ("saw-int4", 4, 64, 4, {}),
        ("kvant-4-fast", 3, 64, 2, {}),  # keys without their mean, whose logits a sink's is compared with
        ("kvant-4-fast", 4, 64, 3, {"softcap": 5.0}),
        ("kvant-2:rope_block=64,recent=40,rollback=3", 4, 64, 4, {"sliding_window": 100}),
        ("oscar:sink=3,recent=20,rollback=3", 2, 64, 4, {}),
        ("oscar:per_head=true,sink=3,recent=20,rollback=1", 5, 64, 2, {"sliding_window": 100}),
        ("vecinfer-2:rollback=2", 4, 64, 3, {}),
        ("kivi-k2v2:rollback=3", 2, 64, 4, {}),
    ],
)
def test_sink_logits_of_several_queries(
    name: str,
    group: int,
    dim: int,
    queries: int,
    options: dict[str, float],
    low_batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    cache, seqs = filled(name, 2, group, dim, [queries, 66, 131, 300])
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None, "sink_logits": some_sinks(2 * group)}
    test_cuda.check_several_queries(cache, seqs, group, dim, queries, {**settings, **options}, 5e-4)
    test_cuda.check_several_queries(cache, seqs[-1:], group, dim, queries, {**settings, **options}, 5e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "group", "dim", "queries", "dtype", "limit"),
    [
        ("kvant-2:rollback=3", 4, 128, 4, "bfloat16", 2e-3),
        ("kvant-2:rope_block=64,sink=70,recent=130,rollback=7", 4, 64, 8, "float16", 5e-4),
        ("kvant-2:rope_block=64,recent=20,rollback=1", 2, 64, 2, "float16", 5e-4),
        ("oscar:sink=3,recent=20,rollback=3", 4, 128, 4, "bfloat16", 2e-3),
        ("saw-int4", 4, 64, 4, "float16", 5e-4),
    ],
)
def test_several_queries_of_a_low_batch(
    name: str, group: int, dim: int, queries: int, dtype: str, limit: float, few: None
) -> None:
    cache, seqs = filled(name, 2, group, dim, [queries, 66, 131, 300], first=7, dtype=dtype)
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None}
    test_cuda.check_several_queries(cache, seqs, group, dim, queries, settings, limit, getattr(torch, dtype))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "dim", "queries"),
    [
        ("kvant-2:rope_block=64,recent=40,rollback=3", 64, 4),
        ("kvant-2:rope_block=100,recent=20,rollback=7", 128, 8),
        ("kvant-3:rope_block=64,recent=20,rollback=3", 128, 4),
    ],
)
def test_several_queries_whose_operands_are_copied_to_shared_memory(
    name: str, dim: int, queries: int, many: list[str]
) -> None:
    """One for every RoPE block: warps go from one to the next, and begin with any."""
    cache, seqs = filled(name, 2, 4, dim, [queries, 66, 131, 700], first=7)
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None}
    test_cuda.check_several_queries(cache, seqs, 4, dim, queries, settings, 2e-3, torch.bfloat16)
    assert many == ["_high_batch_kernel"]


def test_operands_of_several_queries_are_copied_to_shared_memory_where_as_many_ctas_fit() -> None:
    def made(name: str, queries: int, shared: tuple[int, int] = emulated.H200, **options: Any) -> plan.Plan:
        layout = make_layout(name, 8, 128)
        options = {"dual": (2, 1), "low_batch": False, **options}
        dual, group = options.pop("dual"), 4 * queries
        return plan.Plan(layout, group, "bfloat16", dual, (0, 1), False, True, shared, queries=queries, **options)

    for queries in (1, 2, 4, 8):
        found = made("kvant-2", queries)
        assert found.shared_operand == found.constants["SHARED_OPERAND"] == (queries >= 4)
    assert not made("kvant-2", 4, low_batch=True).shared_operand
    assert not made("kvant-2", 4, (101376, 102400)).shared_operand
    assert not made("kvant-4", 4).shared_operand  # its pages leave no room
    assert not made("oscar", 4).shared_operand
    assert not made("kvant-2", 4, tuned=test_cuda.ROTATED_BY_DECODE).shared_operand


@pytest.mark.parametrize("sliding_window", [None, 100])
@pytest.mark.parametrize("inside", [False, True])
def test_rotated_queries_of_which_a_sequence_has_several(
    inside: bool, sliding_window: int | None, many: list[str]
) -> None:
    """By a kernel for many RoPE blocks, or inside decode."""
    cache, seqs = filled("kvant-2:rope_block=64,recent=40,rollback=3", 2, 4, 64, [4, 66, 131, 300], first=7)
    settings = {"scale": 64**-0.5, "softcap": None, "sliding_window": sliding_window}
    tuned = (("QUERY_TRANSFORM", int(QueryTransform.ROTATED_MATRIX)),) if inside else test_cuda.ROTATED_BEFORE
    test_cuda.check_several_queries(cache, seqs, 4, 64, 4, settings, 2e-3, torch.bfloat16, tuned)
    assert many == ([] if inside else ["_high_batch_kernel"])


def check_rotated(
    name: str,
    group: int,
    dim: int,
    dtype: str,
    options: dict[str, float],
    lengths: list[int],
    launched: list[str],
    constants: tuple[tuple[str, int], ...] = (),
) -> None:
    """Decode that rotates queries itself against the reference, also with each of the other `constants`, and decode after the kernel
    that rotates them. Pages are in random order, behind a table that is wider than sequences are long."""
    options = dict(options)
    first = int(options.pop("first", 0))
    cache, seqs = filled(name, 2, group, dim, lengths, dtype, first=first)
    batch, store = cache.batch(seqs), cache.stores[0]
    order = torch.randperm(len(store.pages))
    pages, table = store.pages[order].clone(), torch.argsort(order)[batch.block_table]
    wide = torch.full((len(table), table.shape[1] + 40), 1 << 40)
    for row, n in enumerate(lengths):
        count = cache.layout.pages_for(n)
        wide[row, :count] = table[row, :count]
    settings = {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options}
    q = torch.randn(len(seqs), 2 * group, dim).to(getattr(torch, dtype))
    expected = reference.decode(store, q.double(), batch, **settings)  # type: ignore[arg-type]
    sums = log_sum_exp(store, q, batch, **settings)  # type: ignore[arg-type]
    store.pages.copy_(pages)
    batch = batch._replace(block_table=wide)
    limit = 2e-3 if dtype == "bfloat16" else 5e-4
    inside = [(*test_cuda.ROTATED_BY_DECODE, *more) for more in ((), *((constant,) for constant in constants))]
    for tuned in (*inside, test_cuda.ROTATED_BEFORE):
        launched.clear()
        with attention.poisoned():
            found, lse = cuda_decode.decode_with_lse(store, q, batch, tuned=tuned, **settings)  # type: ignore[arg-type]
        assert ("kvant_rotate_queries" in str(launched)) == (tuned == test_cuda.ROTATED_BEFORE), launched
        assert relative_error(found, expected) < limit
        torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=5e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "group", "dim", "options"), test_cuda.ROTATED_INSIDE)
def test_decode_rotates_its_queries(
    name: str, group: int, dim: int, dtype: str, options: dict[str, float], launched: list[str]
) -> None:
    check_rotated(name, group, dim, dtype, options, [1, 63, 0, 64, 300, 170, 700], launched)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "blocks", [1, 6, 60]
)  # so that a CTA has all (sequence, head)s, some of them, or a part of one
def test_ctas_that_share_a_sequence_rotate_its_queries(
    blocks: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    constants = ("PIPELINED_ROPE", 1), ("OVERLAY_LAST", 1)
    check_rotated("kvant-2:rope_block=64", 4, 64, "float16", {"first": 40}, [1700, 5, 130], launched, constants)


def test_windows_shorter_than_a_tile() -> None:
    """A chunk of the overlay is two tiles of 16 tokens, of which the ring has fewer: no row of another place is read."""
    cache, seqs = filled("int2:sink=2,recent=5", 2, 4, 64, [3, 20, 300])
    batch, store, q = cache.batch(seqs), cache.stores[0], torch.randn(3, 8, 64).bfloat16()
    expected = reference.decode(store, q.double(), batch, scale=0.125)
    assert relative_error(cuda_decode.decode_with_lse(store, q, batch, scale=0.125)[0], expected) < 2e-3


@pytest.mark.parametrize(
    ("name", "late"),
    [("kvant-2", True), ("oscar", True), ("saw-int4", False), ("int4:sink=4", False), ("kivi-k2v2", False)],
)
def test_decode_waits_late_for_append_where_a_window_holds_new_tokens(
    name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call: matrices that kernels read before they wait are there by then."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    told: list[bool] = []
    launch = emulated.Kernel.launch

    def recording(self: Any, blocks: Any, arguments: Any, dependent: bool = False) -> None:
        told.append(bool(arguments.after_append) if hasattr(arguments, "after_append") else dependent)
        launch(self, blocks, arguments, dependent)

    monkeypatch.setattr(emulated.Kernel, "launch", recording)
    cache, seqs = filled(name, 2, 4, 64, [3, 300])
    batch, store, q = cache.batch(seqs), cache.stores[0], torch.randn(2, 8, 64).bfloat16()
    assert cuda_append.allocates(store, torch.bfloat16) == (name == "kivi-k2v2")
    expected = reference.decode(store, q.double(), batch, scale=0.125)
    for again in (False, True):
        told.clear()
        out = torch.full_like(q, torch.nan)
        found, _ = cuda_decode.decode_with_lse(store, q, batch, scale=0.125, out=out, after_append=True)
        assert found is out and relative_error(out, expected) < 2e-3
        assert told[0] == (late and again), told


@pytest.mark.parametrize(
    ("name", "dtype", "memory"),
    [
        ("kvant-2", torch.bfloat16, False),
        ("kvant-2", torch.float32, True),
        ("int4", torch.float32, False),
        *((name, torch.bfloat16, True) for name in ("kivi-k2v2", "vecinfer-2", "saw-int4-kmeans:centroids=4")),
    ],
)
def test_which_appends_take_memory(name: str, dtype: torch.dtype, memory: bool) -> None:
    cache, _ = filled(name, 1, 2, 64, [3])
    assert cuda_append.allocates(cache.stores[0], dtype) == memory


def test_queries_are_rotated_inside_decode_where_it_holds_their_matrix() -> None:
    def made(name: str, group: int = 4, dim: int = 128, query: str = "bfloat16", **options: Any) -> plan.Plan:
        layout = make_layout(name, 8, dim)
        shared = options.pop("shared", emulated.H200)
        return plan.Plan(layout, group, query, (2, 1), (0, 1), False, True, shared, **options)

    for group in (1, 2, 3, 4, 5, 8):
        assert made("kvant-2", group).rotated_queries == (2 <= group <= 4)
        assert made("kvant-2", group, low_batch=True).query_kernel
        found = made("kvant-2", group, tuned=test_cuda.ROTATED_BY_DECODE)
        assert found.rotated_queries and not found.query_kernel
        usual = made("kvant-2", group, tuned=test_cuda.ROTATED_BEFORE)
        assert usual.query_kernel and not usual.rotated_queries
        assert (found.warps, found.constants["MIN_CTAS"]) == (usual.warps, usual.constants["MIN_CTAS"])
        bytes_ = found.dynamic_bytes + found.warps * found.rotated_bytes + 2048
        assert bytes_ * int(str(found.constants["MIN_CTAS"])) <= emulated.H200[1]
    assert not made("kvant-2", query="float32").rotated_queries
    assert not made("kvant-2", dim=256).rotated_queries
    assert not made("kvant-2", partial_rope=True).rotated_queries
    assert not made("kvant-2", shared=(101376, 102400)).rotated_queries
    assert not made("kvant-2:rope=post").rotated_queries
    assert not made("vecinfer-2:rope=block").rotated_queries


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("saw-int4", 4, 128, {}),
        ("oscar:sink=3,recent=20", 4, 128, {"sliding_window": 150}),
        ("kvant-2:rope_block=64", 4, 128, {"softcap": 5.0}),
        ("kvant-2:rope=post", 3, 128, {"softcap": 5.0}),
        ("int3", 4, 128, {}),
        ("int4:group=32", 3, 128, {"softcap": 5.0}),
        ("turboquant-4:sink=3,recent=20", 4, 64, {}),
        ("million-2:books=space,bits=6", 4, 64, {}),
        ("saw-int4-kmeans-rot:centroids=40,sink=3,recent=20", 4, 64, {"sliding_window": 150}),
        ("kivi-k2v2", 4, 64, {}),
        ("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", 9, 64, {"softcap": 5.0}),
        ("squat-pre:sink=3", 4, 64, {}),
        ("squat-pre", 3, 128, {}),
        ("vecinfer-2", 4, 64, {}),
    ],
)
def test_decode_of_a_low_batch(name: str, group: int, dim: int, options: dict[str, float], few: None) -> None:
    """By blocks of more warps, windows after pages."""
    cache, seqs = filled(name, 2, group, dim, [1, 63, 0, 1500])
    if dim == 128 and group == 4:
        made = plan.Plan(cache.layout, 4, "bfloat16", (1, 128), (0, 1), False, True, emulated.H200, (), True)
        assert (made.warps, made.constants["MIN_CTAS"]) == (geometry.LOW_BATCH_WARPS, 2)
    check(cache, seqs, group, dim, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arch", "name", "group", "dim", "low_batch", "constants"),
    [
        ("sm_86", "int4:group=32", 4, 128, False, {"WARPS": 2, "MIN_CTAS": 2}),
        ("sm_80", "saw-int4", 4, 128, True, {"WARPS": 4}),
        ("sm_80", "vecinfer-4", 8, 128, True, {"WARPS": 8}),  # fewer copies of codebooks
        ("sm_120", "vecinfer-2", 4, 128, False, {"TEAMS": 2, "WARPS": 4, "INDICES_IN_REGISTERS": 0}),
        ("sm_100", "vecinfer-2", 4, 128, False, {"TEAMS": 3, "WARPS": 4, "INDICES_IN_REGISTERS": 1}),  # as on sm_90
        ("sm_80", "vecinfer-2", 4, 128, False, {"TEAMS": 3, "WARPS": 4, "INDICES_IN_REGISTERS": 1}),
        ("sm_120", "kvant-4", 4, 128, False, {"STAGES": 2, "MIN_CTAS": 1}),
        ("sm_86", "kvant-4-fast", 4, 128, True, {"QUERY_TRANSFORM": "QueryTransform::HADAMARD"}),
        # by a kernel before decode
        ("sm_86", "oscar:group=32", 4, 128, True, {"QUERY_TRANSFORM": "QueryTransform::MATRIX"}),
        ("sm_86", "kitty-pro", 16, 128, False, {"WARPS": 2}),
        ("sm_100", "saw-int4-kmeans", 4, 128, False, {"WARPS": 8, "MIN_CTAS": 1, "CENTROID_SUMS": 1}),  # as on sm_90
        ("sm_80", "saw-int4-kmeans", 4, 128, False, {"WARPS": 6, "MIN_CTAS": 1, "CENTROID_SUMS": 1}),
        ("sm_100", "saw-int4-kmeans", 4, 128, True, {"WARPS": 8, "MIN_CTAS": 1, "CENTROID_SUMS": 1}),
        ("sm_86", "kvant-2", 4, 128, False, {"QUERY_TRANSFORM": "QueryTransform::MATRIX"}),
        ("sm_100", "kvant-2", 4, 128, False, {"QUERY_TRANSFORM": "QueryTransform::ROTATED_MATRIX"}),  # as on sm_90
        ("sm_120", "million-2:k.bits=10,v.bits=9", 4, 256, True, {"WARPS": 2}),
        ("sm_120", "saw-int4", 8, 256, True, {"WARPS": 2}),
    ],
)
def test_decode_by_the_plans_of_other_gpus(
    arch: str,
    name: str,
    group: int,
    dim: int,
    low_batch: bool,
    constants: dict[str, int | str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer warps, stages and copies, and transforms by other kernels, as their shared memory makes it."""
    gpu = GPUS[arch]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu.capability)
    monkeypatch.setattr(cuda_decode, "shared_memory", lambda device: gpu.shared)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    texts = list[str]()
    make = emulated.Kernel.__init__

    def checked(self: Any, text: str, kernel: str, device: torch.device, threads: int, shared: int = 0) -> None:
        assert shared <= gpu.shared[0] and threads <= 1024
        texts.append(text)
        make(self, text, kernel, device, threads, shared)

    monkeypatch.setattr(emulated.Kernel, "__init__", checked)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 300])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), 2 * group, dim).bfloat16()
    with attention.poisoned():
        found = cuda_decode.decode(store, q, batch, scale=dim**-0.5)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=dim**-0.5)) < 2e-3
    assert f"#define BULK {int(gpu.capability >= (9, 0))}\n" in texts[0]
    for constant, value in constants.items():
        assert f" int {constant} = {value};" in texts[0], constant


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype", "softcap"),
    [
        ("oscar:sink=3,recent=20", 4, 128, torch.bfloat16, None),
        ("oscar:per_head=true", 5, 64, torch.float16, None),
        ("oscar", 9, 96, torch.bfloat16, None),
        ("oscar:group=64,sink=3,recent=20", 4, 128, torch.float16, None),
        ("kvant-2:rope=post", 17, 64, torch.bfloat16, 5.0),
        ("turboquant-4", 4, 128, torch.bfloat16, None),
        ("turboquant-3:v.bits=2", 5, 64, torch.float16, None),
    ],
)
def test_a_low_batch_transforms_its_queries_in_the_decode_kernel(
    name: str,
    group: int,
    dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    few: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[int, int]] = []
    launch = emulated.Kernel.launch
    monkeypatch.setattr(emulated.Kernel, "launch", lambda self, *args: launched.append(args[0]) or launch(self, *args))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 0, 900])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = (torch.randn(len(seqs), 2 * group, dim) * 300.0).to(dtype)
    with attention.poisoned():
        found = cuda_decode.decode(store, q, batch, scale=dim**-0.5 / 300.0, softcap=softcap)
    assert len(launched) == 1
    expected = reference.decode(store, q.double(), batch, scale=dim**-0.5 / 300.0, softcap=softcap)
    assert relative_error(found, expected) < (2e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [6, 60])  # so that a block has whole (sequence, head)s, or blocks share them
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype"),
    [
        ("oscar:per_head=true", 4, 64, torch.float16),
        ("oscar:sink=3,recent=20", 9, 96, torch.bfloat16),
        ("kvant-2:rope=post", 3, 128, torch.bfloat16),
        ("kvant-2:rope_block=64,sink=5", 4, 128, torch.float16),
        ("oscar", 17, 64, torch.bfloat16),
    ],
)
def test_a_low_batch_transforms_its_outputs_in_the_decode_kernel(
    name: str, group: int, dim: int, dtype: torch.dtype, blocks: int, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they are what the kernel after gives, and the reference; also where something is added to them."""
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    multiplied: list[object] = []
    multiply = cuda_decode._transform_outputs
    monkeypatch.setattr(cuda_decode, "_transform_outputs", lambda *args: multiplied.append(args) or multiply(*args))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 900])
    batch, store = cache.batch(seqs), cache.stores[0]
    transforms = store.derive(DecodeTransforms)
    inverse = transforms.inverse
    assert inverse.tensor is not None
    offset = torch.randn(len(inverse.tensor), dim)
    store.derived[DecodeTransforms] = dataclasses.replace(
        transforms, inverse=dataclasses.replace(inverse, offset=offset)
    )
    q = (torch.randn(len(seqs), 2 * group, dim) * 300.0).to(dtype)
    scale = dim**-0.5 / 300.0
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, scale=scale)
    assert not multiplied
    after, lse_after = cuda_decode.decode_with_lse(store, q, batch, scale=scale, tuned=(("OUTPUT_TRANSFORM", 2),))
    assert multiplied
    expected = reference.decode(store, q.double(), batch, scale=scale)
    expected += offset.double().expand(2, dim).repeat_interleave(group, 0)
    tolerance = 2e-3 if dtype == torch.bfloat16 else 5e-4
    assert relative_error(found, expected) < tolerance
    assert relative_error(found, after.double()) < tolerance * 2
    torch.testing.assert_close(lse, lse_after, rtol=1e-6, atol=1e-6)


def check(cache: PagedCache, seqs: list[Sequence], group: int, dim: int, settings: dict[str, float | None]) -> None:
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), 2 * group, dim)
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, **settings)  # type: ignore[arg-type]
    assert relative_error(found, reference.decode(store, q.double(), batch, **settings)) < 5e-4  # type: ignore[arg-type]
    expected = log_sum_exp(store, q, batch, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(lse.double(), expected, rtol=1e-3, atol=5e-3)


@pytest.mark.few(3)
@pytest.mark.parametrize("blocks", [6, 60])  # so that a CTA has whole (sequence, head)s, or CTAs share them
@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(("name", "group", "dim", "options"), test_cuda.SINK_LOGITS)
def test_sink_logits(
    name: str,
    group: int,
    dim: int,
    options: dict[str, float],
    low_batch: bool,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sink counts once, however many warps and CTAs share a sequence."""
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 700])
    batch, store = cache.batch(seqs), cache.stores[0]
    q, sinks = torch.randn(3, 2 * group, dim), some_sinks(2 * group)
    settings: dict[str, Any] = {"scale": dim**-0.5, **options}
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, sink_logits=sinks, **settings)
    expected, sums = with_sinks(store, q, batch, sinks, **settings)
    assert relative_error(found, expected) < 5e-4
    assert (
        max(head_errors(found, expected)) < 2e-3
    )  # where tokens have little of the softmax, it shows the error of logits
    torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=5e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("blocks", [6, 60])
@pytest.mark.parametrize("after", [False, True])  # a kernel after decode transforms the outputs, or decode does
@pytest.mark.parametrize("name", ["oscar:per_head=true", "oscar:sink=3,recent=20"])
def test_the_mean_of_values_reaches_as_far_as_their_probabilities(
    name: str, after: bool, blocks: int, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    cache, seqs = filled(name, 2, 5, 64, [1, 63, 900])
    batch, store = cache.batch(seqs), cache.stores[0]
    transforms = store.derive(DecodeTransforms)
    assert transforms.inverse.tensor is not None
    offset = torch.randn(len(transforms.inverse.tensor), 64)
    store.derived[DecodeTransforms] = dataclasses.replace(
        transforms, inverse=dataclasses.replace(transforms.inverse, offset=offset)
    )
    q, sinks = torch.randn(3, 10, 64).half(), some_sinks(10)
    tuned = (("OUTPUT_TRANSFORM", 2),) if after else ()
    with attention.poisoned():
        found, _ = cuda_decode.decode_with_lse(store, q, batch, scale=0.125, sink_logits=sinks, tuned=tuned)
    expected, sums = with_sinks(store, q, batch, sinks, scale=0.125)
    share = 1 - (sinks.double() - sums).exp()
    expected += share[..., None] * offset.double().expand(2, 64).repeat_interleave(5, 0)
    assert max(head_errors(found, expected)) < 1e-3


def check_append(
    name: str,
    dim: int,
    rounds: tuple[list[int], ...],
    dtype: str = "bfloat16",
    page: int | None = None,
    **options: int | None,
) -> None:
    """The bytes of pages and windows; codes may differ where a number lies halfway between two."""
    made = [filled(name, 2, 1, dim, [1, 63, 140], dtype, page=page, spare=9, **options) for _ in range(2)]
    for counts in rounds:
        k, v = (vectors(sum(counts), 2, dim, "cpu", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
        for (cache, seqs), run in zip(made, (reference.append, cuda_append.append), strict=True):
            batch = cache.extend(seqs, counts)
            if len(k) > 40:  # some are padding
                batch.slot_mapping[[3, 16, 35]] = -1
            run(cache.stores[0], *test_cuda.parts_of_one(k, v), batch)
    one, two = (cache.stores[0] for cache, _ in made)
    for mine, theirs in [(one.pages, two.pages), *((one.overlays[s], two.overlays[s]) for s in one.overlays)]:
        mine, theirs = (x.view(torch.uint8) for x in (mine, theirs))
        assert mine.shape == theirs.shape
        if not mine.numel():
            continue
        assert bool((mine != 0xFF).any())
        assert float((mine != theirs).float().mean()) < 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype", "limit"),
    [
        ("kvant-2", 4, 128, torch.bfloat16, 2e-3),
        ("kvant-2:rope_block=64", 3, 64, torch.float16, 5e-4),
    ],
)
def test_decode_in_16_bits(name: str, group: int, dim: int, dtype: torch.dtype, limit: float) -> None:
    cache, seqs = filled(name, 2, group, dim, [1, 300], first=1000)
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), 2 * group, dim).to(dtype)
    with attention.poisoned():
        found = cuda_decode.decode(store, q, batch, scale=dim**-0.5)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=dim**-0.5)) < limit


@pytest.mark.slow
def test_a_table_may_be_wider_than_its_sequences_are_long() -> None:
    """As an engine's, for the longest sequence it serves: blocks of positions that are not there are neither rotated nor read."""
    cache, seqs = filled("kvant-2:rope_block=64", 2, 4, 64, [1, 70, 300])
    batch, store = cache.batch(seqs), cache.stores[0]
    wide = torch.cat((batch.block_table, torch.full((len(seqs), 90), 1 << 40)), 1).contiguous()
    q = torch.randn(len(seqs), 8, 64)
    with attention.poisoned():
        found = cuda_decode.decode(store, q, batch._replace(block_table=wide), scale=0.125)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=0.125)) < 5e-4


PLACES = """
struct Places { int *channel, *raised; };
template <class P> DEV void write_places(const Places& a) {
  for (int i = 0; i < P::REGISTERS; i++) {
    a.raised[P::BEFORE + i] = P::raised(i);
    for (int j = 0; j < 16; j++) a.channel[(P::BEFORE + i) * 16 + j] = P::channel(i, j / 4, j % 4);
  }
}
template <class... P> DEV void write_all(KeyPlanes<P...>, const Places& a) { (write_places<P>(a), ...); }
extern "C" __global__ void __launch_bounds__(32) places(const Places a) { if (threadIdx.x == 0) write_all(Keys{}, a); }
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        *(
            ("kvant-2", 64),
            ("kvant-2:k.bits=4/4/0", 128),
            ("kvant-2:k.bits=3/2/0", 256),
            ("kvant-3", 128),
            ("kvant-3", 64),
            ("int8", 96),
        ),
        *(("turboquant-4", 96), ("turboquant-3", 128), ("turboquant-2", 64)),
    ],
)
def test_the_kernels_registers_have_the_plans_channels(name: str, dim: int) -> None:
    layout = make_layout(name, 2, dim)
    made = plan.Plan(layout, 4, "bfloat16", (2, 1), (2, 1), False, True, emulated.H200)
    channel, raised = (torch.full((made.key_registers * n,), -9, dtype=torch.int32) for n in (16, 1))
    arguments = (ctypes.c_void_p * 2)(channel.data_ptr(), raised.data_ptr())
    emulated.Kernel(made.text + PLACES, "places", torch.device("cpu"), 32).launch((1, 1), arguments)  # type: ignore[arg-type]
    planes = [(plane, i) for plane in key_planes(layout) for i in range(plane.registers)]
    assert raised.tolist() == [plane.raised(i) for plane, i in planes]
    assert channel.tolist() == [plane.channel(i, j // 4, j % 4) for plane, i in planes for j in range(16)]
    stored = sorted(c for c in set(channel.tolist()) if c >= 0)
    assert stored == [
        c for band in layout.format("key").stored_bands for c in range(band.first, band.first + band.width)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["kvant-2", "oscar"])
def test_a_launch_that_depends_on_the_one_before_comes_right_after_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeroes for counters may be a launch of their own, while a graph is captured."""
    cache, seqs = filled(name, 2, 4, 64, [70])
    said: list[str] = []
    counters, launch = cuda_decode.counters, emulated.Kernel.launch
    monkeypatch.setattr(cuda_decode, "counters", lambda *args: said.append("counters") or counters(*args))
    monkeypatch.setattr(emulated.Kernel, "launch", lambda *args: said.append("launch") or launch(*args))
    cuda_decode.decode(cache.stores[0], torch.randn(1, 8, 64), cache.batch(seqs), scale=0.1)
    assert said == ["counters", *["launch"] * 3]  # of queries, attention and outputs


def test_an_odd_number_of_rotated_pairs_is_refused() -> None:
    cache, seqs = filled("kvant-2", 2, 4, 64, [5], rotated=18)
    with pytest.raises(ValueError, match="rope rotates 9 pairs"):
        cuda_decode.decode(cache.stores[0], torch.randn(1, 8, 64), cache.batch(seqs), scale=0.1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("kivi-k2v2", 4, 128, {}),
        ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", 5, 64, {"softcap": 5.0}),
        ("kivi-k2v2", 4, 64, {}),
        ("kivi-k2v4-sink:v.recent=20,sink=3", 2, 96, {"sliding_window": 150}),
        ("kitty-pro", 4, 128, {}),
        ("kitty", 3, 96, {"sliding_window": 250}),
        ("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", 9, 64, {}),
        ("kitty:k.boost=1.0", 4, 64, {}),
        ("squat", 1, 64, {}),
        ("kivi-k2v2-sink:shift=false", 4, 128, {"page": 128}),
        ("kitty-pro:k.group=64,k.flush=64,v.recent=40,sink=9,shift=false", 4, 64, {}),
    ],
)
def test_decode_of_groups(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    """Keys per channel over groups of tokens, with tails of all lengths; then cut, so that keys wait where values are packed."""
    options = dict(options)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 130, 300], page=options.pop("page", None))  # type: ignore[arg-type]
    for cut in (0, 111):
        for seq in seqs:
            cache.crop(seq, max(1, seq.length - cut))
        check(cache, seqs, group, dim, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "group", "dim", "options"), test_cuda.ROTATED_KEYS)
def test_decode_of_keys_before_rope(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    """Keys are rotated one by one when they are read: from pages, from tails of all lengths and from sinks, at odd positions."""
    options = dict(options)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 130, 300], first=int(options.pop("first", 0)))
    for cut in (0, 41):
        for seq in seqs:
            cache.crop(seq, max(1, seq.length - cut))
        check(cache, seqs, group, dim, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


def test_keys_of_which_rope_rotates_some_channels_are_refused() -> None:
    cache, seqs = filled("squat-pre", 2, 4, 64, [5], rotated=32)
    with pytest.raises(ValueError, match="all of their 64 channels, and rope rotates 32 of them"):
        cuda_decode.decode(cache.stores[0], torch.randn(1, 8, 64), cache.batch(seqs), scale=0.1)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("saw-int4", 64),
        ("quarot-int2-win:sink=5,recent=70", 64),
        ("kvant-4-fast", 96),
        ("int8", 64),
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


@pytest.mark.parametrize("name", ["kivi-k2v2-sink:shift=false", "kitty-pro:k.group=64,k.flush=64,sink=9"])
def test_a_step_of_groups_may_be_padded(name: str) -> None:
    """As a graph of a server's decode step is: sequences of no tokens, and tokens of no sequence."""
    test_cuda.check_padded_step(name, "cpu")


@pytest.mark.parametrize(
    "name", ["kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", "kitty-pro:k.group=32,k.flush=64,sink=2"]
)
@pytest.mark.parametrize("spare", [32, -100])
def test_groups_are_appended_in_one_launch_or_two(
    name: str, spare: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_groups, "STEP_SPARE", spare)
    check_append(name, 64, ([5, 1, 0], [1, 1, 1], [0, 30, 2]))
    two = ["kvant_append_groups", "kvant_append_tokens"]
    assert launched == (["kvant_append_sequences"] if spare > 0 else two) * 3


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "group", "dim", "rounds"), test_cuda.SQUAT)
def test_append_of_corrected_keys(name: str, group: int, dim: int, rounds: tuple[list[int], ...]) -> None:
    test_cuda.check_squat(name, group, dim, rounds, "cpu")


def test_sums_over_the_queries_of_a_prompt_are_spread(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_subspace, "LEAST_CHUNK", 16)
    test_cuda.check_squat("squat", 2, 32, ([40, 1, 17], [1, 1, 1]), "cpu")
    assert launched == [
        *("kvant_subspace_gram", "kvant_fit_subspace", "kvant_append_groups", "kvant_append_tokens"),
        *("kvant_fit_subspace", "kvant_append_sequences"),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("sequences", [1, 15, 16, 17])
@pytest.mark.parametrize(("name", "dim", "dtype", "page"), test_cuda.STEPS)
def test_append_of_a_step(
    name: str, dim: int, dtype: str, page: int | None, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows have a matrix or are unrotated: by one kernel, whose CTAs take one tile of 16 tokens or several."""
    monkeypatch.setattr(emulated.Kernel, "blocks", 8 if sequences == 17 else 4)
    test_cuda.check_step(name, dim, dtype, page, sequences, monkeypatch, "cpu", 1e-3)


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
@pytest.mark.parametrize(
    "name", ["int2:clip=0.9,zero=float", "int4:k.clip=0.6", "int8:clip=0.95,zero=float", "int2:clip=0.9,group=32"]
)
def test_rows_are_clipped_where_the_reference_clips_them(
    name: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with many equal magnitudes, few that are not zero, heavy tails, and numbers far from zero. There is no sum before the codes:
    they are the reference's, and so are scales, minima and zeros, but for the sign of a minimum of zero."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    made = [filled(name, 2, 1, 64, [1, 63], spare=9) for _ in range(2)]
    x = torch.randn(64, 2, 64)
    rows = [x, x.sign(), x * (torch.rand_like(x) < 0.05), x**9, x + 300, (x * 2).round() / 2, x * 1e-20, x * 1e20]
    k, v = torch.stack(rows).transpose(0, 1).reshape(2, -1, 2, 64).bfloat16()
    for (cache, seqs), run in zip(made, (reference.append, cuda_append.append), strict=True):
        run(cache.stores[0], k, v, cache.extend(seqs, [100, len(k) - 100]))
    for stream in ("key", "value"):
        one, two = (cache.layout.unpack(stream, cache.stores[0].pages[:10]) for cache, _ in made)  # type: ignore[arg-type]
        for part, expected in one.items():
            torch.testing.assert_close(two[part], expected, rtol=0, atol=0, equal_nan=True)


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


READ = [
    ("saw-int4", 64, 0),
    ("quarot-int2-win:sink=5,recent=70", 64, 0),
    ("saw-int4-kv:seed=3", 128, 0),
    ("oscar:sink=3,recent=20", 64, 0),
    ("kvant-2:sink=5,recent=70", 64, 1000),
    ("kvant-2:rope_block=100", 128, 30),
    ("kvant-2:k.bits=4,rope_block=64", 96, 3),
    ("kvant-3", 128, 0),
    ("kvant-2:rope=post,k.bits=4/4/0,v.bits=4", 128, 0),
    ("kvant-2:rope=post,k.bits=0/2/4", 128, 0),
    ("kvant-2:rope=post,k.bits=4/0/2", 128, 0),
    ("kvant-4-fast", 96, 0),
    ("kvant-3:rope=post", 128, 0),
    ("int3", 64, 0),
    ("int8", 64, 0),
    ("int4", 80, 0),
    ("int4", 256, 0),
    ("kivi-k2v2", 64, 0),
    ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", 64, 0),
    ("kivi-k2v2-sink:k.bits=3,v.bits=3,v.group=64", 64, 0),
    ("kitty-pro", 64, 0),
    ("kitty:sink=3", 128, 0),
    ("squat", 64, 0),
    ("squat-pre", 64, 30),
    ("kvant-2:rope_block=24", 64, 100),
    ("oscar:group=32,sink=3,recent=20", 64, 0),
    ("int4:group=16", 64, 0),
    ("oscar:group=64", 128, 0),
    ("int8:k.group=32,v.group=0", 96, 0),
    ("vecinfer-2", 64, 0),
    ("vecinfer-2:dim=2,k.bits=3,v.bits=4", 64, 0),
    ("vecinfer-2:dim=4,bits=6", 128, 0),
    ("vecinfer-4", 64, 0),
    ("million-2:k.bits=10,v.bits=9", 96, 0),
    ("million-1.5:bits=8,books=head", 128, 0),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 64, 30),
    ("turboquant-3", 64, 0),
    ("million-2:books=space", 64, 0),
    ("kvant-3", 64, 30),
    ("kvant-2:rope=post,k.bits=3/2/0", 128, 0),
    ("vecinfer-2:k.books=space,k.bits=9,v.bits=4", 128, 0),
    ("saw-int4-kmeans:centroids=64", 64, 0),
    ("saw-int4-kmeans-rot:k.books=layer,k.centroids=300,v.centroids=1,v.group=64", 128, 0),
    ("kivi-k2v2-sink:shift=false", 64, 0),  # as inside vLLM: sinks are in pages and in the overlay
    ("kitty-pro:k.group=64,k.flush=64,v.recent=40,sink=9,shift=false", 64, 0),
]
LENGTHS = [1, 63, 300, 20]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "dim", "first"), READ)
def test_unpack(name: str, dim: int, first: int) -> None:
    """Every stored token of a ragged batch in the model's space, from pages and windows; new tokens behind them."""
    check_unpack(name, dim, first, torch.float16)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "dim", "first"), [READ[i] for i in range(0, len(READ), 3)])
def test_unpack_as_on_gpus_from_sm_100_on(name: str, dim: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens at a time."""
    monkeypatch.setattr(unpack, "narrow", lambda device: True)
    check_unpack(name, dim, first, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_of_unpacked_rows(dtype: torch.dtype) -> None:
    check_unpack("kvant-2:sink=5,recent=70", 64, 30, dtype)


def check_unpack(name: str, dim: int, first: int, dtype: torch.dtype) -> None:
    cache, seqs = filled(name, 2, 1, dim, LENGTHS, first=first)
    batch, store, counts = cache.batch(seqs), cache.stores[0], [5, 0, 40, 17]
    assert cuda_prefill.refuse_layout(store.layout) is None
    begins = [sum(counts[:b]) for b in range(len(counts))]
    whole = tuple(unpack.Span(0, n, n, begins[b], counts[b]) for b, n in enumerate(LENGTHS))
    parts = tuple(unpack.Span(n // 3, n - n // 5, n, begins[b], 0) for b, n in enumerate(LENGTHS))
    nothing = tuple(span._replace(last=0, new=3) if b == 2 else span for b, span in enumerate(whole))
    for stream in unpack.STREAMS:
        expected = reference.restored(store, stream, batch)
        new = vectors(sum(counts), 3, dim, "cpu", 0.4).bfloat16()[:, 1:]  # with a stride
        for spans in (whole, parts, nothing):
            with attention.poisoned():
                found = unpack.unpack(store, stream, batch, spans, new, dtype)
            at, limit = 0, 8e-3 if dtype == torch.bfloat16 else 1e-3
            for b, span in enumerate(spans):
                own = new[span.new_first : span.new_first + span.new].float()
                rows = torch.cat((expected[b, span.first : span.last], own))
                here = found[at : at + span.tokens].float()
                at += span.tokens
                if len(rows):
                    atol = limit / 2 * float(rows.abs().max())
                    torch.testing.assert_close(here, rows, rtol=limit, atol=atol)
            assert at == len(found)


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: flash.Bounds,
    scale: float,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a kernel, sequence by sequence."""
    parts, ends = [], [x.tolist() for x in bounds[:2]]
    assert bounds[2:] == tuple(max(x.diff().tolist()) for x in bounds[:2])
    assert ends[0][-1] == len(q) and ends[1][-1] == len(k) == len(v)
    for b in range(len(ends[0]) - 1):
        rows, tokens = (slice(*x[b : b + 2]) for x in ends)
        parts.append(one_plain(q[rows], k[tokens], v[tokens], scale, causal, softcap, sliding_window))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def one_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert causal or sliding_window is None
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        ahead, ones = k.shape[1] - q.shape[1], torch.ones(scores.shape[1:], dtype=torch.bool)
        hidden = ones.triu(ahead + 1)
        if sliding_window is not None:
            hidden |= ones.tril(ahead - sliding_window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "dim", "first"), READ)
@pytest.mark.parametrize("room", [96, 400, 1 << 16])
def test_prefill(name: str, dim: int, first: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens over a history, with room for all sequences at once, for some, and not for the longest; beside a sequence without
    a history and one without new tokens."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", room)
    monkeypatch.setattr(cuda_prefill, "MASKED_TOKENS", 96)
    cache, seqs = filled(name, 2, 2, dim, [1, 63, 300], first=first)
    store, counts = cache.stores[0], [1, 0, 40, 5]
    store.flash = flash.Flash(plain, torch.float16, softcap=True)
    seqs = [*seqs, cache.new()]
    k, v = (vectors(sum(counts), 2, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 4, dim).bfloat16()
    batch = cache.extend(seqs, counts)
    for softcap, window, sinks in (
        (None, None, None),
        (3.0, None, None),
        (None, 200, None),
        (None, None, some_sinks(4)),
        (None, 200, some_sinks(4)),
        (3.0, 35, None),  # shorter than the new tokens
    ):
        options = {"scale": dim**-0.5, "softcap": softcap, "sliding_window": window, "sink_logits": sinks}
        with attention.poisoned():
            found = cuda_prefill.prefill(store, q, k, v, batch, **options)  # type: ignore[arg-type]
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
        assert relative_error(found, expected) < 2e-3


def plain_unmasked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As cuDNN's attention, without a kernel: 16-bit outputs, heads before rows in memory."""
    parts = [one_plain(*x, scale, False) for x in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(x).transpose(1, 2).contiguous().transpose(1, 2) for x in zip(*parts, strict=True))
    return out.to(q.dtype), lse


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("room", [200, 450, 1 << 16])
@pytest.mark.parametrize(
    ("name", "dim", "first"),
    [("int4", 64, 0), ("kvant-2:sink=5,recent=70", 64, 30), ("oscar:sink=3,recent=20", 128, 0), ("kivi-k2v2", 64, 0)],
)
def test_prefill_attends_to_long_histories_without_a_mask(
    name: str, dim: int, first: int, room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbouring sequences of like lengths in one call, beside one that is short, one that has too few new tokens and one without
    any; with room for all at once, for some, and not for the longest."""
    for constant, n in {"JOINED_TOKENS": room, "UNMASKED_TOKENS": 64, "UNMASKED_ROWS": 16, "UNMASKED_TILES": 8}.items():
        monkeypatch.setattr(cuda_prefill, constant, n)
    cache, seqs = filled(name, 2, 2, dim, [71, 64, 40, 300, 90, 80], first=first)
    store, counts, calls = cache.stores[0], [20, 20, 20, 37, 0, 3], list[tuple[int, ...]]()

    def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((len(q), q.shape[1], k.shape[1]))
        return plain_unmasked(q, k, v, scale)

    def tail(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = plain(q, *args)
        return out.to(q.dtype), lse

    store.flash = flash.Flash(tail, torch.float16, unmasked=flash.Unmasked(unmasked, lambda device, dim: None))
    k, v = (vectors(sum(counts), 2, dim, "cpu", shift).to(dtype) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 6, dim).to(dtype)[:, 1:5]  # with a stride
    batch = cache.extend(seqs, counts)
    with attention.poisoned():
        found = cuda_prefill.prefill(store, q, k, v, batch, scale=dim**-0.5)
    assert (
        relative_error(found, reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=dim**-0.5))
        < 2e-3
    )
    longest = [(1, 48, 192), (1, 48, 104)] if room == 200 else [(1, 48, 288)]
    assert calls == [(2, 32, 64), *longest]


def test_lengths_that_are_attended_to_without_a_mask() -> None:
    """At least 7/8 of a history, and few lengths; spans of a long one cover it."""
    found = [cuda_prefill.unmasked_tokens(n) for n in range(1 << 15)]
    least = cuda_prefill.UNMASKED_TOKENS
    assert not any(found[:least]) and all(7 * n < 8 * m <= 8 * n for n, m in enumerate(found) if n >= least)
    assert len(set(found)) == 1 + 8 * 3
    rows = [cuda_prefill.padded_rows(n) for n in range(1, 8193)]
    assert all(n <= m <= max(9 * n // 8, n + 127) and m % 128 == 0 for n, m in enumerate(rows, 1))
    assert len(set(rows)) == 16 + 8 + 8 and cuda_prefill.padded_rows(2048) == 2048
    for history, unmasked in ((200_000, True), (200_000, False), (131_072, True), (69_632, True)):
        spans = cuda_prefill.long_spans(history, unmasked)
        assert spans[0][0] == 0 and spans[-1][1] == history and all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert all(last - first <= cuda_prefill.JOINED_TOKENS for first, last in spans)
        lengths = [last - first for first, last in spans]
        assert not unmasked or all(n == cuda_prefill.unmasked_tokens(n) for n in lengths[:-1])


def test_cudnn_attends_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert "not measured" in (flash.refuse_cudnn(device, 128) or "")  # sm_80
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert flash.refuse_cudnn(device, 128) is None and flash.refuse_cudnn(device, 64) is None
    assert "head dims" in (flash.refuse_cudnn(device, 256) or "")
    assert "cpu" in (flash.refuse_cudnn(torch.device("cpu"), 128) or "")
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert "turned off" in (flash.refuse_cudnn(device, 128) or "")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    assert "no cuDNN" in (flash.refuse_cudnn(device, 128) or "")


def test_unpacked_rows_have_matrices_of_any_magnitude() -> None:
    """float16 holds up to 65504, and nothing below 6e-5 in full; heads may differ."""
    cache, seqs = filled("oscar:sink=3,recent=20", 2, 1, 64, [100])
    store, batch = cache.stores[0], cache.batch(seqs)
    spans, sizes = (unpack.Span(0, 100, 100),), torch.tensor([2.0**20, 2.0**-20])
    one = [unpack.unpack(store, name, batch, spans, None, torch.float32) for name in unpack.STREAMS]
    held = store.derive(unpack.StoredTables)
    for name in unpack.STREAMS:
        matrix = held.inverse[name].tensor
        assert matrix is not None
        held.inverse[name] = dataclasses.replace(held.inverse[name], tensor=matrix * sizes[:, None, None])
    held.found.clear()
    for before, name in zip(one, unpack.STREAMS, strict=True):
        found = unpack.unpack(store, name, batch, spans, None, torch.float32)
        torch.testing.assert_close(found, before * sizes[:, None], rtol=1e-6, atol=0)


def test_sequences_share_the_workspace_of_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", 100)
    spans = cuda_prefill.spans_of([0, 10, 10, 30, 31, 131], [60, 500, 50, 200, 100])
    assert [span.tokens for span in spans] == [60, 0, 50, 200, 100]
    assert list(cuda_prefill.workspaces(spans)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert list(cuda_prefill.workspaces([])) == []


def test_a_window_is_unpacked_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row sees the same positions whether its sequence is served whole or in pieces, which the workspace holds."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", 100)
    for history, new, window in itertools.product((0, 1, 29, 30, 31, 500), (1, 70, 71, 72, 150, 300), (1, 2, 30, 50)):
        (whole,) = cuda_prefill.spans_of([7, 7 + new], [history + new], window)
        assert whole == (max(0, history + 1 - window), history, history, 7, new)
        seen, before = list[range](), 0
        for rows, span in cuda_prefill.pieces_of(whole, window):
            assert rows.start == before and span.tokens <= 100 and span.first <= span.last == span.history == history
            before, positions = rows.stop, [*range(span.first, span.last)]
            positions += range(history + span.new_first - 7, history + span.new_first - 7 + span.new)
            assert positions == [*range(positions[0], history + rows.stop)], "one after another, up to the last row"
            for row in range(rows.start, rows.stop):
                seen.append(range(max(positions[0], history + row + 1 - window), history + row + 1))
        assert seen == [range(max(0, history + row + 1 - window), history + row + 1) for row in range(new)]
    assert cuda_prefill.spans_of([0, 0], [50], 10)[0].tokens == 0, "without new tokens nothing is read"


@pytest.mark.few(2)
@pytest.mark.parametrize("sinks", [None, some_sinks(4)])
@pytest.mark.parametrize("name", ["int4", "kvant-2:sink=5,recent=20", "kivi-k2v2"])
def test_prefill_with_a_sliding_window(name: str, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, for histories longer and shorter than the window; new tokens in pieces; pages that the window has left are not read."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", 300)
    monkeypatch.setattr(cuda_prefill, "_masked", lambda *args: pytest.fail("scores were held"))
    cache, seqs = filled(name, 2, 2, 64, [1, 63, 300, 420], spare=10)
    store, counts, calls = cache.stores[0], [1, 40, 400, 9, 5], list[int]()

    def recorded(q: torch.Tensor, k: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(k))
        return plain(q, k, *args)

    store.flash = flash.Flash(recorded, torch.float16)
    k, v = (vectors(sum(counts), 2, 64, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 4, 64).bfloat16()
    batch = cache.extend([*seqs, cache.new()], counts)
    options = {"scale": 64**-0.5, "sliding_window": 90, "sink_logits": sinks}
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
    left = batch.block_table.clone()
    left[3, : (420 + 1 - 90) // store.layout.page_tokens] = -(1 << 40)  # an address that nothing may read
    with attention.poisoned():
        found = cuda_prefill.prefill(store, q, k, v, batch._replace(block_table=left), **options)  # type: ignore[arg-type]
    assert relative_error(found, expected) < 2e-3
    # 1 + 1 and 63 + 40 tokens; 89 + 211 and 89 + 189 of the third; 89 + 9 and 5
    assert calls == [105, 300, 278, 103]


def test_the_way_of_a_prefill() -> None:
    """What only a call knows decides, in one place; the rule is what `kvant doctor` prints."""
    bare, capped = flash.Flash(plain), flash.Flash(plain, softcap=True)
    fused, masked, by_torch = cuda_prefill.Way
    widest = cuda_prefill.JOINED_TOKENS // 2
    for found, expected in (
        (cuda_prefill.way_of(bare, torch.bfloat16, None, None), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, 299), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, widest), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, widest + 1), masked),
        (cuda_prefill.way_of(bare, torch.bfloat16, 3.0, None), masked),
        (cuda_prefill.way_of(bare, torch.bfloat16, 3.0, 299), masked),
        (cuda_prefill.way_of(capped, torch.bfloat16, 3.0, 299), fused),
        (cuda_prefill.way_of(capped, torch.float32, None, None), masked),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, None, rotated=32), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, None, rotated=10), by_torch),
        (cuda_prefill.way_of(bare, torch.float32, 3.0, 5, rotated=10), by_torch),
    ):
        assert found is expected
    lengths = torch.tensor([1, 300])
    assert [cuda_prefill.narrowed(window, lengths) for window in (None, 299, 300)] == [None, 299, None]
    assert cuda_prefill.narrowed(5, lengths[:0]) is None
    (chosen,) = (i for i in implementations("prefill") if i.name == "cuda")
    assert f"sliding window above {widest}" in chosen.about and "pairs of channels" in chosen.about


@pytest.mark.parametrize("name", ["kvant-2", "squat-pre"])
def test_prefill_where_the_kernel_cannot_rotate_keys(name: str) -> None:
    cache, seqs = filled(name, 2, 2, 64, [1, 150], rotated=20)
    counts = [3, 5]
    q, k, v = (torch.randn(sum(counts), n, 64) for n in (4, 2, 2))
    batch, store = cache.extend(seqs, counts), cache.stores[0]
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=0.1)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    assert relative_error(cuda_prefill.prefill(store, q, k, v, host, scale=0.1), expected) < 1e-4
    options = {"scale": 0.1, "sink_logits": some_sinks(4)}
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
    assert relative_error(cuda_prefill.prefill(store, q, k, v, host, **options), expected) < 1e-4  # type: ignore[arg-type]


def same_pages(one: PagedCache, two: PagedCache) -> None:
    """Indices of nearest centroids are the reference's, every one."""
    torch.testing.assert_close(one.stores[0].pages, two.stores[0].pages, rtol=0, atol=0)
    for name, overlay in one.stores[0].overlays.items():
        torch.testing.assert_close(overlay, two.stores[0].overlays[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("vecinfer-2", 64),
        ("vecinfer-2:dim=2,k.bits=3,v.bits=4", 64),
        ("vecinfer-2:dim=4,bits=6", 128),
        ("million-1.5:bits=9,books=head", 64),
        ("million-1.5", 64),  # 4096 centroids
        ("million-2:bits=8,k.dim=8", 32),  # fewer sub-vectors than a warp's lanes can share
        ("million-2:books=space", 64),
        ("million-4:books=space,bits=6", 96),
        ("vecinfer-2:k.books=space,k.bits=9,v.bits=4", 128),
        ("million-2:books=space,bits=4", 256),
    ],
)
def test_append_of_nearest_centroids(name: str, dim: int) -> None:
    caches = [filled(name, 2, 1, dim, [1, 63, 140]) for _ in range(2)]
    for counts in ([5, 1, 0], [1, 1, 1], [0, 90, 2]):  # few and many at a time
        k, v = (vectors(sum(counts), 2, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        for (cache, seqs), run in zip(caches, (reference.append, cuda_append.append), strict=True):
            batch = cache.extend(seqs, counts)
            batch.slot_mapping[-1] = -1  # padding
            run(cache.stores[0], k, v, batch)
    same_pages(caches[0][0], caches[1][0])
    assert bool((caches[0][0].stores[0].pages != 0xFF).any())


def test_append_takes_the_first_of_equal_centroids() -> None:
    """Every centroid is there twice, or nearly: what float32 cannot tell apart is compared in float64."""
    caches = [filled("million-2", 2, 1, 64, [3]) for _ in range(2)]
    x = vectors(40, 2, 64, "cpu").bfloat16()
    for (cache, seqs), run in zip(caches, (reference.append, cuda_append.append), strict=True):
        for stream in (cache.stores[0].key, cache.stores[0].value):
            books = stream.codec.codebooks  # type: ignore[attr-defined]
            books[:, :, 1::2] = books[:, :, 0::2]
            books[:, :, 3::4, 0] *= 1 + 2**-10
        cache.stores[0].derived.clear()
        run(cache.stores[0], x, 8 * x, cache.extend(seqs, [40]))
    same_pages(caches[0][0], caches[1][0])
    indices = cache.layout.unpack("key", cache.stores[0].pages[:1])["indices"][3:43]
    assert bool((indices % 4 != 1).all()) and bool((indices % 4 == 3).any())


APART = (
    """
import ctypes, torch
from kvant.ops.cuda import nvrtc
from kvant.rope import Rope
from tests.calibrate.synthetic import rope_of
from tests.ops import emulated, test_cuda
from tests.ops.scores import log_sum_exp

text = nvrtc.program("include/ptx.cuh") + """
    + repr(
        'struct Nothing { int x; };\nextern "C" __global__ void __launch_bounds__(32) apart(const Nothing a) {'
        " if (threadIdx.x < 7) __syncwarp(); }\n"
    )
    + """
emulated.Kernel(text, "apart", torch.device("cpu"), 32).launch((1, 1), ctypes.c_int(0))
"""
)


@pytest.mark.slow
def test_a_kernel_whose_lanes_part_is_stopped() -> None:
    """Where some lanes wait for others that never come, the process ends; on a GPU it would hang."""
    done = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "some lanes wait for others that never come" in done.stderr


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


@pytest.mark.parametrize("name", ["int4", "kvant-2", "vecinfer-2", "kivi-k2v2"])
def test_numbers_of_another_type_are_refused(name: str) -> None:
    cache, seqs = filled(name, 2, 1, 64, [3], order=None)
    with pytest.raises(ValueError, match="keys must be bfloat16, float16, float32, got torch.float64"):
        cuda_append.append(cache.stores[0], *torch.randn(2, 1, 2, 64).double(), cache.extend(seqs, [1]))
