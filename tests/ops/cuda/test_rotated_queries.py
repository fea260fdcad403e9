"""Decode of keys that are stored unrotated by RoPE blocks, on a GPU: queries are rotated before decode or inside it."""

from __future__ import annotations

import pytest
import torch

from kvant.bench import attention
from kvant.ops import reference
from kvant.ops.cuda import decode as cuda_decode
from tests.conftest import relative_error
from tests.needs import gpu, needs_gpu
from tests.ops.cuda.decode_cases import ROTATED, ROTATED_BEFORE, ROTATED_BY_DECODE, ROTATED_HIGH_BATCH, ROTATED_INSIDE
from tests.ops.cuda.decode_checks import check_decode
from tests.ops.cuda.filling import filled, widened


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
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
def test_queries_are_rotated_alike_by_all_kernels(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the two before decode and by decode itself. More sequences than a warp has lanes, of all lengths, beside a table that is wider than they are long."""
    cache, seqs = filled("kvant-2:rope_block=64", 2, group, 128, "bfloat16", [1, 63, 64, 700, 2000], first=7)
    batch, store = widened(cache.batch(seqs * 9), 30), cache.stores[0]
    q = torch.randn(9 * len(seqs), 2 * group, 128, device="cuda").bfloat16()
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    found = []
    for least, tuned in ((0, ROTATED_BEFORE), (1 << 30, ROTATED_BEFORE), (0, ROTATED_BY_DECODE)):
        monkeypatch.setattr(cuda_decode, "HIGH_BATCH_PASSES", least)
        with attention.poisoned():
            found.append(cuda_decode.decode_with_lse(store, q, batch, scale=128**-0.5, tuned=tuned)[1])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=2e-3)
