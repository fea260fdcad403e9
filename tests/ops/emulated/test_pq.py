"""Emulated kernels of product quantization: codebooks, indices, nearest centroids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvant.bench import attention
from kvant.bench.synthetic import vectors
from kvant.cache import PagedCache
from kvant.ops import reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import plan
from scripts.kernel_resources import GPUS
from tests.conftest import make_layout, relative_error
from tests.needs import needs_compiler
from tests.ops import emulated
from tests.ops.cuda.decode_cases import COPIED_INDICES, INDEX_LAUNCHES
from tests.ops.cuda.decode_checks import check_several_queries
from tests.ops.emulated.checks import filled
from tests.ops.scores import log_sum_exp

pytestmark = needs_compiler


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


def test_teams_where_heads_share_codebooks_and_a_kernel_makes_the_queries() -> None:
    def teams(name: str, dual: tuple[int, int] = (2, 1), **options: Any) -> tuple[int, int]:
        ways = dual, (0, 1), False, True, emulated.H200
        made = plan.Plan(make_layout(name, 8, 128), 4, "bfloat16", *ways, **options)
        return made.teams, made.warps

    assert teams("vecinfer-2") == (3, 4)
    assert teams("vecinfer-2", tuned=COPIED_INDICES) == (2, 8)
    assert teams("vecinfer-2", low_batch=True) == (1, 16)
    assert teams("vecinfer-2:books=head") == (1, 16)
    assert teams("million-2", (0, 1)) == (1, 16)
    assert teams("saw-int4-kmeans", (0, 1)) == (1, 8)


# Sub-vectors of 2 channels at head_dim 64 have 32 indices a token, as those of 4 at head_dim 128.
@pytest.mark.parametrize("tuned", INDEX_LAUNCHES)
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


@pytest.mark.parametrize("tuned", INDEX_LAUNCHES)
@pytest.mark.parametrize(("group", "queries"), [(1, 3), (4, 2)])
def test_several_queries_by_indices_in_registers(group: int, queries: int, tuned: tuple[tuple[str, int], ...]) -> None:
    cache, seqs = filled("vecinfer-2:dim=2,sink=3,recent=20,rollback=3", 2, group, 64, [1, 64, 65, 300])
    settings = {"scale": 0.125, "softcap": None, "sliding_window": 150}
    check_several_queries(cache, seqs, group, 64, queries, settings, 5e-4, tuned=tuned)


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
    copied = made("vecinfer-2", tuned=COPIED_INDICES)
    assert not copied.indices_in_registers and not copied.paired_books and copied.teams_below == copied.teams
    beside = made("vecinfer-2", tuned=(*COPIED_INDICES, ("PAIRED_BOOKS", 1), ("TEAMS", 3), ("WARPS", 4)))
    assert beside.teams_below == 1 and beside.dynamic_bytes == (2 << 16) + 8 * beside.warp_bytes


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
