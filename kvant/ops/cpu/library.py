"""The compiled module: whether it is there, which instruction sets it can run on this machine, and its threads."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

import torch

from kvant.ops.cpu import structures
from kvant.ops.registry import NOT_BUILT
from kvant.ops.types import LayerStore, PagedBatch

ISA = "KVANT_CPU_ISA"  # environment variable that names the instruction set to use


@functools.cache
def module() -> ModuleType | str:
    """The compiled module, or why there is none."""
    try:
        found = importlib.import_module("kvant.ops.cpu._native")
    except ImportError as error:
        return f"{NOT_BUILT} is missing ({error}); it is built when kvant is installed on a machine with a C compiler"
    files = sorted((Path(__file__).parent / "native").glob("*.[ch]"))  # an installed wheel has none
    if (
        files
        and getattr(found, "sources", str)()
        != hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    ):
        return f"{NOT_BUILT} is older or newer than its sources; install kvant again (./scripts/setup)"
    sizes = tuple(
        map(ctypes.sizeof, (structures.Stream, structures.Batch, structures.Decode, structures.Append, structures.Read))
    )
    if found.sizes() != sizes:
        return f"{NOT_BUILT} is of another version of kvant ({found.sizes()} in place of {sizes}); install kvant again"
    return found


def missing() -> str | None:
    """Why the compiled operations cannot run on this machine, or None."""
    found = module()
    return found if isinstance(found, str) else None


def kinds() -> list[str]:
    """The instruction sets that this machine can run, best first."""
    found = module()
    return [] if isinstance(found, str) else list(found.kinds())


def is_arm() -> bool:
    """Whether this machine can run the operations of native/arm.h."""
    return any(kind.startswith("NEON") for kind in kinds())


@functools.cache
def isa() -> int:
    """Index in `kinds()` of the instruction set to use: the best, or the one that KVANT_CPU_ISA names."""
    wanted = os.environ.get(ISA)
    if not wanted:
        return 0
    if wanted not in kinds():
        raise ValueError(f"{ISA} must be one of {', '.join(kinds())}, got {wanted!r}")
    return kinds().index(wanted)


@functools.cache
def parallel() -> int:
    """Address of GOMP_parallel in torch's OpenMP runtime; 0 where it is not found."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
    for path in sorted(paths):
        if any(name in os.path.basename(path) for name in ("libgomp", "libiomp5", "libomp")):
            entry = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if entry is not None:
                return ctypes.cast(entry, ctypes.c_void_p).value or 0
    return 0


class _Workspace(threading.local):
    """Scratch memory that calls of one thread reuse: page faults of new memory take longer than a short attention.

    It belongs to no cache, and is freed when the thread ends. It is at most 1.25 times what the largest call so far needed: for
    decode 40 to 200 KiB a thread of torch's, and the parts of the output, head_dim + 2 floats for each query head and split of 512
    to 2,048 tokens. That is a few per cent of the pages of one layer; one sequence of 32,768 tokens with 32 heads of 128 takes
    0.3 MiB of parts. Beside it a thread keeps up to KEPT_PLANS plans of decode, with a block table each, and scratch memory that
    was outgrown as long as a plan points to it."""

    floats = torch.empty(0, dtype=torch.float32, device="cpu")


_WORKSPACE = _Workspace()


class _LastBatch(threading.local):
    """The last batch of a thread, since all layers of a step pass the same one."""

    batch: PagedBatch | None = None
    made = structures.Batch()
    address = 0  # of `made`


_LAST = _LastBatch()


def batch_address(batch: PagedBatch) -> int:
    """Address of `batch_structure`. It is valid until this thread passes another batch, unless the caller holds the structure and
    the batch."""
    return _LAST.address if _LAST.batch is batch else ctypes.addressof(batch_structure(batch))


def batch_structure(batch: PagedBatch) -> structures.Batch:
    """The `Batch` structure of a batch."""
    if _LAST.batch is not batch:
        *fields, ring_start = batch
        for x in (*fields, *ring_start.values()):
            assert x.dtype == torch.int64 and x.is_contiguous(), (x.dtype, x.shape, x.stride())
        made = structures.Batch(width=batch.block_table.shape[1], count=len(batch.seq_lens))
        made.block_table, made.seq_lens, made.overlay_rows = (
            x.data_ptr() for x in (batch.block_table, batch.seq_lens, batch.overlay_rows)
        )
        made.sinks, made.slot_mapping, made.query_start_loc = (
            x.data_ptr() for x in (batch.sinks, batch.slot_mapping, batch.query_start_loc)
        )
        made.ring_start[:] = batch.ring_start["key"].data_ptr(), batch.ring_start["value"].data_ptr()
        _LAST.batch, _LAST.made, _LAST.address = batch, made, ctypes.addressof(made)
    return _LAST.made


def workspace(floats: int) -> torch.Tensor:
    """Scratch memory of at least `floats` floats, uninitialized, valid until the next call of this thread."""
    if _WORKSPACE.floats.shape[0] < floats:
        with torch.inference_mode(False):
            _WORKSPACE.floats = torch.empty(floats + floats // 4, dtype=torch.float32, device="cpu")
    return _WORKSPACE.floats


def bytes_at(address: int, size: int) -> bytes:
    """The bytes from an address on."""
    return ctypes.string_at(address, size)


class Memory:
    """Cached addresses of a store's pages and overlays; refreshed when the tensors are other ones."""

    # the tensors and their addresses, set at once: an interrupt between would leave addresses of memory that was freed
    known: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, tuple[int, int, int]]
    known = None, None, None, (0, 0, 0)

    def of(self, store: LayerStore) -> tuple[int, int, int]:
        """Addresses of pages, key overlay and value overlay."""
        pages, key, value = store.pages, store.overlays["key"], store.overlays["value"]
        old_pages, old_key, old_value, places = self.known
        if pages is not old_pages or key is not old_key or value is not old_value:
            places = pages.data_ptr(), key.data_ptr(), value.data_ptr()
            self.known = pages, key, value, places
        return places


def run(
    name: str, call: ctypes.Structure, tasks: int, scratch: torch.Tensor | None, stride: int, threads: int = 0
) -> None:
    """Runs an operation on `threads` threads (default: as many as torch uses). `stride`: floats of scratch per thread."""
    found = module()
    assert not isinstance(found, str), found
    at = 0 if scratch is None else scratch.data_ptr()
    threads = threads or torch.get_num_threads()
    getattr(found, name)(ctypes.addressof(call), isa(), threads, parallel(), tasks, at, stride)
