"""CUDA kernels run on this machine, in all tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import (
    append_groups,
    append_pq,
    convert_rows,
    copy_rows,
    fit_subspace,
    merge_parts,
    nearest_centroids,
    transform_kv,
    unpack,
)
from kvant.ops.cuda import decode as cuda_decode
from tests.ops import emulated


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled for and run on this machine."""
    monkeypatch.setattr(cuda_decode, "shared_memory", lambda device: emulated.H200)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 0)
    caches = (cuda_decode._kernel, cuda_decode._transform_kernel, cuda_decode._rotate_kernel, cuda_append._kernel)
    caches += (cuda_decode._high_batch_kernel, cuda_decode._plan)
    caches += (unpack._kernel, transform_kv._kernel, append_pq._kernel, append_groups._kernel, copy_rows._kernel)
    caches += (fit_subspace._kernel,)
    caches += (nearest_centroids._kernel, merge_parts._kernel, convert_rows._kernel)
    with emulated.on_this_machine(monkeypatch, *caches):
        yield


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
