"""The Triton kernels against the reference on the same bytes, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from kvant import recipes
from kvant.cache import PagedCache
from kvant.layout import Layout
from kvant.ops import choose, reference
from kvant.ops.triton import append as triton_append
from kvant.ops.triton import common
from kvant.ops.triton import decode as triton_decode
from tests.conftest import make_layout, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAVE_TRITON = importlib.util.find_spec("triton") is not None
RUNS = HAVE_TRITON and (DEVICE == "cuda" or common.interpreted())
needs_triton = pytest.mark.skipif(not RUNS, reason="triton is not installed, or is tested in a process of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")  # that fills the caches
NAMES = [
    "saw-int4",
    "int4:zero=float,meta=float16",
    "quarot-int2",
    "int2:sink=3,recent=20",
    "int4:sink=0,recent=70",
    "int8",
    "int4:k.bits=2",
]


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # the interpreter runs them one after another
        monkeypatch.setattr(triton_decode, "SPLITS", 2)


@pytest.mark.skipif(not HAVE_TRITON or RUNS, reason="triton is not installed, or runs in this process")
def test_in_a_process_of_its_own() -> None:
    """Whether Triton interprets is settled when it is imported, and torch may have imported it."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", __file__]
    found = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert " passed" in found.stdout


def filled(name: str, heads: int, dim: int, lengths: list[int], order: str | None = None) -> tuple[PagedCache, list]:
    layout = Layout.of(recipes.get(name), heads, dim, order=order, dtype="float32")  # type: ignore[arg-type]
    cache = PagedCache(layout, 1, device=DEVICE)
    seqs = [cache.new() for _ in lengths]
    k, v = torch.randn(2, sum(lengths), heads, dim, device=DEVICE)
    reference.append(cache.stores[0], k, v + 0.4, cache.extend(seqs, lengths))
    return cache, seqs


@needs_triton
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "group", "dim", "order"), [(2, 1, 64, None), (1, 3, 96, None), (1, 4, 128, "plain")])
def test_decode_reads_the_same_bytes(name: str, heads: int, group: int, dim: int, order: str | None) -> None:
    cache, seqs = filled(name, heads, dim, [1, 131, 64], order)
    q = torch.randn(3, heads * group, dim, device=DEVICE)
    batch = cache.batch(seqs)
    found = triton_decode.decode(cache.stores[0], q, batch, scale=0.1)
    assert relative_error(found, reference.decode(cache.stores[0], q.double(), batch, scale=0.1)) < 1e-5


@needs_triton
@pytest.mark.parametrize(("softcap", "sliding_window"), [(None, 40), (5.0, None), (5.0, 70), (None, 1)])
def test_soft_cap_and_sliding_window(softcap: float | None, sliding_window: int | None) -> None:
    cache, seqs = filled("saw-int4:sink=5,recent=30", 1, 64, [150, 20])
    q, batch = torch.randn(2, 2, 64, device=DEVICE), cache.batch(seqs)
    options = {"scale": 0.3, "softcap": softcap, "sliding_window": sliding_window}
    found = triton_decode.decode(cache.stores[0], q, batch, **options)  # type: ignore[arg-type]
    assert relative_error(found, reference.decode(cache.stores[0], q.double(), batch, **options)) < 1e-5  # type: ignore[arg-type]


@needs_triton
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dim", "order"), [(64, None), (96, None), (128, "plain")])
def test_append_writes_the_same_bytes(name: str, dim: int, order: str | None) -> None:
    layout = Layout.of(recipes.get(name), 1, dim, order=order, dtype="bfloat16")  # type: ignore[arg-type]
    caches = [PagedCache(layout, 1, 8, DEVICE) for _ in range(2)]
    seqs = [[cache.new(), cache.new()] for cache in caches]
    for counts in ([19, 1], [1, 3]):
        k, v = torch.randn(2, sum(counts), 1, dim, device=DEVICE).bfloat16()
        for cache, own, run in zip(caches, seqs, (triton_append.append, reference.append), strict=True):
            batch = cache.extend(own, counts)
            if counts[0] == 1:
                batch.slot_mapping[-1] = -1  # padding
            run(cache.stores[0], k, v, batch)
    stores = [cache.stores[0] for cache in caches]
    assert torch.equal(stores[0].pages, stores[1].pages)
    for side in ("key", "value"):
        assert torch.equal(stores[0].overlays[side].nan_to_num(9.0), stores[1].overlays[side].nan_to_num(9.0))  # type: ignore[index]


@needs_triton
def test_it_is_offered_where_it_runs_and_taken_by_name() -> None:
    layout = make_layout("saw-int4")
    for op in ("append", "decode"):
        assert choose(op, layout, DEVICE, "triton").name == "triton"  # type: ignore[arg-type]
        assert choose(op, layout, DEVICE).name != "triton"  # type: ignore[arg-type]
    assert "coded by Channel" in (common.refuse_layout(make_layout("kivi-k2v2")) or "")
    assert "8, 4 or 2 bits" in (common.refuse_layout(make_layout("int3")) or "")
    assert "clipped or searched" in (triton_append.refuse(make_layout("oscar"), torch.device(DEVICE)) or "")


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert common.refuse(make_layout("saw-int4"), torch.device("cpu")) is not None
