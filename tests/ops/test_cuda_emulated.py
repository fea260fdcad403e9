"""The CUDA kernels' text, run on a CPU, against the reference on the same bytes: float64, poisoned memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvant.bench import attention
from kvant.bench.synthetic import vectors
from kvant.cache import Entry, PagedCache
from kvant.ops import reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import append_groups, nvrtc
from kvant.ops.cuda import decode as cuda_decode
from tests.conftest import relative_error
from tests.ops import emulated, test_cuda
from tests.ops.scores import log_sum_exp

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
    caches = (
        cuda_decode._kernel,
        cuda_decode._row_kernel,
        cuda_decode._turn_kernel,
        cuda_append._kernel,
        append_groups._kernel,
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def filled(
    name: str, heads: int, group: int, dim: int, lengths: list[int], first: int = 0
) -> tuple[PagedCache, list[Entry]]:
    torch.manual_seed(0)
    cache, entries = test_cuda.filled(name, heads, group, dim, "bfloat16", lengths, device="cpu", first=first)
    assert cache.layout.order == "fragment"
    return cache, entries


@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("saw-int4", 4, 64, {}),
        ("quarot-int2-win:sink=5,recent=70", 5, 64, {}),
        ("oscar:sink=3,recent=20", 2, 64, {"window": 150}),
        ("kvant-2:rope=post", 4, 64, {}),
        ("kvant-2", 4, 64, {}),
        ("kvant-2:rope_block=100", 5, 64, {"softcap": 5.0, "first": 1000}),
        ("kvant-2", 2, 64, {"window": 150}),
        ("kvant-2:rope_block=64,sink=70,recent=130", 3, 128, {"first": 30}),
        ("kvant-4", 9, 64, {"softcap": 5.0}),
        ("int3", 1, 64, {}),
    ],
)
def test_decode(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    options = dict(options)
    cache, entries = filled(name, 2, group, dim, [1, 63, 300], first=int(options.pop("first", 0)))
    check(cache, entries, group, dim, {"scale": dim**-0.5, "softcap": None, "window": None, **options})


def check(cache: PagedCache, entries: list[Entry], group: int, dim: int, settings: dict[str, float | None]) -> None:
    batch, store = cache.batch(entries), cache.stores[0]
    q = torch.randn(len(entries), 2 * group, dim)
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, **settings)  # type: ignore[arg-type]
    assert relative_error(found, reference.decode(store, q.double(), batch, **settings)) < 5e-4  # type: ignore[arg-type]
    expected = log_sum_exp(store, q, batch, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(lse.double(), expected, rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("kivi-k2v2", 4, 64, {}),
        ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", 5, 64, {"softcap": 5.0}),
        ("kivi-k2v4-sink:v.recent=20,sink=3", 2, 96, {"window": 150}),
        ("kitty-pro", 4, 128, {}),
        ("kitty", 3, 96, {"window": 250}),
        ("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", 9, 64, {}),
        ("squat", 1, 64, {}),
    ],
)
def test_decode_of_groups(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    """Keys per channel over groups of tokens, with tails of all lengths; then cut, so that keys wait where values are packed."""
    cache, entries = filled(name, 2, group, dim, [1, 63, 130, 300])
    for cut in (0, 111):
        for entry in entries:
            cache.crop(entry, max(1, entry.length - cut))
        check(cache, entries, group, dim, {"scale": dim**-0.5, "softcap": None, "window": None, **options})


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("saw-int4", 64),
        ("quarot-int2-win:sink=5,recent=70", 64),
        ("kvant-4", 96),
        ("int8", 64),
        ("oscar:sink=3,recent=20", 64),
        ("int4:k.clip=0.6", 64),
        ("kvant-2", 64),
        ("kvant-2:search=9,rope_block=70,v.bits=4", 128),
        ("kivi-k2v2:k.flush=64", 64),
        ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", 96),
        ("kivi-k2v2:k.bits=3,k.flush=32,v.bits=3,v.group=16", 64),
        ("kitty-pro:k.group=32,k.flush=64,v.recent=40,sink=2", 64),
        ("kitty:k.group=64,k.flush=64,sink=0", 128),
    ],
)
def test_append(name: str, dim: int) -> None:
    """What it decodes to; codes may differ where a number lies halfway between two."""
    caches = [filled(name, 2, 1, dim, [1, 63, 140]) for _ in range(2)]
    for counts in ([5, 1, 0], [1, 1, 1], [0, 30, 2]):
        k, v = (vectors(sum(counts), 2, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        for (cache, entries), run in zip(caches, (reference.append, cuda_append.append), strict=True):
            run(cache.stores[0], k, v, cache.extend(entries, counts))
    one, two = (cache.stores[0] for cache, _ in caches)
    for mine, theirs in [(one.pages, two.pages), *((one.overlays[s], two.overlays[s]) for s in one.overlays)]:
        mine, theirs = (x.view(torch.uint8) for x in (mine, theirs))
        assert mine.shape == theirs.shape
        if not mine.numel():
            continue
        assert bool((mine != 0xFF).any())
        assert float((mine != theirs).float().mean()) < 1e-3


APART = (
    """
import ctypes, torch
from kvant.ops.cuda import nvrtc
from kvant.rope import Rope
from tests.calibrate.synthetic import rope_of
from tests.ops import emulated, test_cuda
from tests.ops.scores import log_sum_exp

text = nvrtc.source("ptx.cu") + """
    + repr(
        'struct Nothing { int x; };\nextern "C" __global__ void __launch_bounds__(32) apart(const Nothing a) {'
        " if (threadIdx.x < 7) __syncwarp(); }\n"
    )
    + """
emulated.Kernel(text, "apart", torch.device("cpu"), 32).launch((1, 1), ctypes.c_int(0))
"""
)


def test_a_kernel_whose_lanes_part_is_stopped() -> None:
    """Where some lanes wait for others that never come, the process ends; on a GPU it would hang."""
    done = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "some lanes wait for others that never come" in done.stderr
