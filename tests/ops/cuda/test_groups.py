"""Recipes that code groups of tokens, on a GPU: decode, and append of corrected keys."""

from __future__ import annotations

import pytest
import torch

from kvant.ops import reference
from kvant.ops.cuda import decode as cuda_decode
from tests.conftest import relative_error
from tests.needs import gpu, needs_gpu
from tests.ops.cuda.append_checks import SQUAT, check_padded_step, check_squat
from tests.ops.cuda.decode_cases import LENGTHS, ROTATED_KEYS
from tests.ops.cuda.decode_checks import check_decode
from tests.ops.cuda.filling import filled


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


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["kivi-k2v2-sink:shift=false", "kitty-pro:shift=false", "kitty-pro"])
def test_a_step_of_groups_may_be_padded(name: str) -> None:
    check_padded_step(name, "cuda")


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
