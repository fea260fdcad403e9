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
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import nearest, nvrtc, plan
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
        nearest._kernel,
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
    assert cache.layout.order == "fragment" or plan.is_indexed(cache.layout)
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
        ("vecinfer-2", 4, 64, {}),
        ("vecinfer-4", 9, 64, {"softcap": 5.0}),
        ("million-1.5:bits=8,books=head", 2, 128, {"window": 150}),
        ("million-2:k.bits=10,v.bits=9", 3, 96, {}),
    ],
)
def test_decode(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    options = dict(options)
    cache, entries = filled(name, 2, group, dim, [1, 63, 300], first=int(options.pop("first", 0)))
    batch, store = cache.batch(entries), cache.stores[0]
    q = torch.randn(len(entries), 2 * group, dim)
    settings = {"scale": dim**-0.5, "softcap": None, "window": None, **options}
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, **settings)  # type: ignore[arg-type]
    assert relative_error(found, reference.decode(store, q.double(), batch, **settings)) < 5e-4  # type: ignore[arg-type]
    expected = log_sum_exp(store, q, batch, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(lse.double(), expected, rtol=1e-3, atol=5e-3)


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


def same_pages(one: PagedCache, two: PagedCache) -> None:
    """Indices of nearest centroids are the reference's, every one."""
    torch.testing.assert_close(one.stores[0].pages, two.stores[0].pages, rtol=0, atol=0)
    for name, overlay in one.stores[0].overlays.items():
        torch.testing.assert_close(overlay, two.stores[0].overlays[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "dim"), [("vecinfer-2", 64), ("million-1.5:bits=9,books=head", 64)])
def test_append_of_nearest_centroids(name: str, dim: int) -> None:
    caches = [filled(name, 2, 1, dim, [1, 63, 140]) for _ in range(2)]
    for counts in ([5, 1, 0], [1, 1, 1], [0, 90, 2]):  # few and many at a time
        k, v = (vectors(sum(counts), 2, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        for (cache, entries), run in zip(caches, (reference.append, cuda_append.append), strict=True):
            batch = cache.extend(entries, counts)
            batch.slots[-1] = -1  # padding
            run(cache.stores[0], k, v, batch)
    same_pages(caches[0][0], caches[1][0])
    assert bool((caches[0][0].stores[0].pages != 0xFF).any())


def test_append_takes_the_first_of_equal_centroids() -> None:
    """Every centroid is there twice, or nearly: what float32 cannot tell apart is compared in float64."""
    caches = [filled("million-2", 2, 1, 64, [3]) for _ in range(2)]
    x = vectors(40, 2, 64, "cpu").bfloat16()
    for (cache, entries), run in zip(caches, (reference.append, cuda_append.append), strict=True):
        for stream in (cache.stores[0].key, cache.stores[0].value):
            books = stream.codec.codebooks  # type: ignore[attr-defined]
            books[:, :, 1::2] = books[:, :, 0::2]
            books[:, :, 3::4, 0] *= 1 + 2**-10
        cache.stores[0].prepared.clear()
        run(cache.stores[0], x, 8 * x, cache.extend(entries, [40]))
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
