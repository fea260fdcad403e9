"""Emulated decode of keys that are stored unrotated by RoPE blocks: queries are rotated before decode or inside it."""

from __future__ import annotations

import pytest
import torch

from kvant.bench import attention
from kvant.ops import reference
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda.config import QueryTransform
from tests.conftest import relative_error
from tests.needs import needs_compiler
from tests.ops import emulated
from tests.ops.cuda.decode_cases import ROTATED, ROTATED_BEFORE, ROTATED_BY_DECODE, ROTATED_HIGH_BATCH, ROTATED_INSIDE
from tests.ops.cuda.decode_checks import check_outputs, check_several_queries
from tests.ops.cuda.filling import widened
from tests.ops.emulated.checks import filled
from tests.ops.scores import log_sum_exp

pytestmark = needs_compiler


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "group", "dim", "options"), [*ROTATED, *ROTATED_HIGH_BATCH])
def test_rotated_queries_of_a_high_batch(
    name: str, group: int, dim: int, options: dict[str, float], many: list[str]
) -> None:
    options = dict(options)
    first, rotated = (int(options.pop(key, 0)) for key in ("first", "rotated"))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 300, 170], first=first, rotated=rotated)
    check_outputs(cache, seqs, group, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})
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
    q = torch.randn(len(batch.block_table), 2 * group, dim).to(dtype)
    with attention.poisoned():
        wider, tuned = widened(batch, 9), ROTATED_BEFORE
        found, _ = cuda_decode.decode_with_lse(store, q, wider, scale=dim**-0.5, tuned=tuned)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=dim**-0.5)) < limit
    assert many == ["_high_batch_kernel"]


@pytest.mark.parametrize(("group", "queries"), [(4, 4), (2, 2), (1, 3)])
@pytest.mark.parametrize("sliding_window", [None, 100])
@pytest.mark.parametrize("inside", [False, True])
def test_rotated_queries_of_which_a_sequence_has_several(
    inside: bool, sliding_window: int | None, group: int, queries: int, many: list[str]
) -> None:
    """By a kernel for many RoPE blocks, or inside decode, where up to four rows of two RoPE blocks share a product."""
    cache, seqs = filled("kvant-2:rope_block=64,recent=40,rollback=3", 2, group, 64, [4, 66, 131, 300], first=7)
    settings = {"scale": 64**-0.5, "softcap": None, "sliding_window": sliding_window}
    tuned = (("QUERY_TRANSFORM", int(QueryTransform.ROTATED_MATRIX)),) if inside else ROTATED_BEFORE
    check_several_queries(cache, seqs, group, 64, queries, settings, 2e-3, torch.bfloat16, tuned)
    assert many == ([] if inside else ["_high_batch_kernel"])


@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(
    ("name", "group", "stored", "asked", "options"),
    [
        ("kvant-2:rope_block=64", 4, "bfloat16", "float16", {"softcap": 5.0}),
        ("kvant-2:rope_block=64,sink=5,recent=70", 3, "bfloat16", "float32", {"sliding_window": 150}),
        ("kvant-2:rope_block=64", 9, "float16", "bfloat16", {}),
        ("kvant-3:rope_block=100", 2, "float16", "float32", {"softcap": 5.0}),
        ("saw-int4-kv:rope=block,rope_block=64,sink=3,recent=20", 4, "bfloat16", "float16", {}),
        ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 4, "float16", "bfloat16", {}),
    ],
)
def test_queries_of_another_type_meet_windows_of_raw_keys(
    name: str,
    group: int,
    stored: str,
    asked: str,
    options: dict[str, float],
    low_batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As two numbers of the window's type, of which queries of its own type are one."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    cache, seqs = filled(name, 2, group, 64, [1, 64, 300], stored, first=30)
    assert cache.layout.overlay_dtype == stored and cache.layout.recipe.key.raw_window
    settings = {"scale": 0.125, "softcap": None, "sliding_window": None, **options}
    check_outputs(cache, seqs, group, settings, 2e-3 if asked == "bfloat16" else 5e-4, getattr(torch, asked))


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
    inside = [(*ROTATED_BY_DECODE, *more) for more in ((), *((constant,) for constant in constants))]
    for tuned in (*inside, ROTATED_BEFORE):
        launched.clear()
        with attention.poisoned():
            found, lse = cuda_decode.decode_with_lse(store, q, batch, tuned=tuned, **settings)  # type: ignore[arg-type]
        assert ("kvant_rotate_queries" in str(launched)) == (tuned == ROTATED_BEFORE), launched
        assert relative_error(found, expected) < limit
        torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=5e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "group", "dim", "options"), ROTATED_INSIDE)
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


def test_an_odd_number_of_rotated_pairs_is_refused() -> None:
    cache, seqs = filled("kvant-2", 2, 4, 64, [5], rotated=18)
    with pytest.raises(ValueError, match="rope rotates 9 pairs"):
        cuda_decode.decode(cache.stores[0], torch.randn(1, 8, 64), cache.batch(seqs), scale=0.1)
