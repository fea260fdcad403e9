"""The compiled operations under AddressSanitizer and UndefinedBehaviorSanitizer: a program that tests/ops/test_sanitized.py runs.

    python -m tests.ops.sanitized LIBRARY PLANT

Every tensor that is handed over is copied into memory of exactly its size, from malloc, which the sanitizer surrounds by bytes that
must not be touched; torch's own memory may be part of a larger piece, in which an overflow is not seen. The parts of decode's
workspace are pieces of their own for the same reason. What the operations write is copied back and compared with the reference.

PLANT is a fault that must be found: the name of a tensor that is handed over one byte short, "misaligned", or "nothing".
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import itertools
import sys

import torch

from kvant.cache import PagedCache
from kvant.ops import choose, reference
from kvant.ops.cpu import library, structures
from tests.conftest import make_layout, poison, relative_error
from tests.fitted import made_up_tensors

CASES = [  # recipe, heads, head dim, tokens of a page
    ("full", 1, 32, 16),
    ("int8:group=32", 2, 64, 64),
    ("int4:sink=2,recent=5", 3, 96, 16),
    ("int3:zero=float,meta=float16", 1, 32, 32),
    ("int2", 1, 256, 16),
    ("oscar:recent=20,sink=3", 2, 64, 16),
    ("saw-int4-kv:seed=3", 1, 128, 64),
    ("kvant-4-fast:sink=4", 2, 64, 16),
    ("kvant-2", 1, 96, 16),
    ("kvant-2:k.bits=3,v.bits=4", 2, 64, 64),
    ("turboquant-3", 1, 64, 16),
    ("million-2", 2, 64, 16),
    ("vecinfer-1.5:k.bits=6,v.bits=3", 1, 64, 16),
    ("vecinfer-2:books=space", 2, 32, 16),
    ("saw-int4-kmeans-rot:centroids=300", 1, 64, 16),
    ("saw-int4-kmeans:centroids=1", 2, 32, 16),
    ("kivi-k2v2:k.group=16,k.flush=32,k.recent=7,v.recent=9,sink=5", 2, 64, 16),
    ("kivi-k4v2-sink", 1, 96, 64),
    ("kitty", 1, 64, 128),
    ("kitty-pro", 1, 32, 128),
]
SMALL = ("int4:sink=2,recent=5", "kvant-2", "million-2", "kitty")  # of a planted fault, and of a quick run
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
own_address = torch.Tensor.data_ptr


class Memory:
    """Exact copies of the tensors that have been handed over."""

    def __init__(self, plant: str) -> None:
        self.copies: dict[tuple[int, int], tuple[torch.Tensor, int, int]] = {}  # and their address and size
        self.short: torch.Tensor | None = None  # handed over one byte short
        self.misaligned = plant == "misaligned"

    def address(self, tensor: torch.Tensor) -> int:
        nbytes = self.nbytes(tensor)
        key = own_address(tensor), nbytes
        if key not in self.copies:
            less = self.short is not None and key[0] == own_address(self.short)
            start = libc.malloc(nbytes - less + 2 * self.misaligned)
            self.copies[key] = tensor.detach(), start + 2 * self.misaligned, nbytes - less
        return self.copies[key][1]

    @staticmethod
    def nbytes(tensor: torch.Tensor) -> int:
        """From its first element to the end of its last."""
        if not tensor.numel():
            return 0
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()

    def move(self, back: bool) -> None:
        for (address, _), (_, copy, nbytes) in self.copies.items():
            ctypes.memmove(*((address, copy) if back else (copy, address)), nbytes)

    def clear(self) -> None:
        for _, start, _ in self.copies.values():
            libc.free(start - 2 * self.misaligned)
        self.copies = {}
        library._LAST.batch = None


def run(
    name: str,
    call: ctypes.Structure,
    tasks: int,
    scratch: torch.Tensor | None,
    stride: int,
    threads: int = 0,
) -> None:
    """As library.run, on one thread and in exact memory."""
    found, pieces = library.module(), []
    assert not isinstance(found, str), found
    at = 0 if scratch is None else scratch.data_ptr()
    MEMORY.move(back=False)
    if isinstance(call, structures.Decode):
        rows = library._LAST.made.count * call.heads * call.group
        end = call.partial + 4 * rows * call.splits * (call.dim + 2)
        places = [call.operands, call.tables, call.partial, end]
        pieces = [libc.malloc(end - start) for start, end in itertools.pairwise(places)]
        call.operands, call.tables, call.partial = pieces
    getattr(found, name)(ctypes.addressof(call), library.isa(), 1, 0, tasks, at, stride)
    for piece in pieces:
        libc.free(piece)
    MEMORY.move(back=True)


def exercise(name: str, heads: int, dim: int, page: int, plant: str) -> None:
    layout = make_layout(name, heads, dim, dtype="float32", device="cpu", page_tokens=page)
    rope = None
    if layout.recipe.wants_rope:
        from tests.calibrate.synthetic import rope_of

        rope = [rope_of(dim)]
    tensors = {0: made_up_tensors(layout.recipe, heads, dim)}
    cache = PagedCache(layout, 1, tensors=tensors, ropes=rope, implementation="reference", pages=40)
    store = cache.stores[0]
    poison(store)
    operations = {op: choose(op, layout, "cpu", "cpu").run for op in ("append", "decode", "prefill")}
    seqs = [cache.new() for _ in range(3)]
    for counts, dtype in (([1, 0, 37], torch.float32), ([130, 2, 1], torch.bfloat16), ([1, 1, 1], torch.float16)):
        batch = cache.extend(seqs, counts)
        q = torch.randn(sum(counts), heads * 3, dim)
        k, v = torch.randn(2, sum(counts), heads, dim)
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=0.1)
        assert relative_error(operations["prefill"](store, q, k, v, batch, scale=0.1), expected) < 1e-5, name
        k, v = k.to(dtype), v.to(dtype)
        MEMORY.short = {"key": k, "value": v}.get(plant)
        assert operations["append"](store, k, v, batch, limit=100.0)
        for group, options in ((1, {}), (3, {"softcap": 5.0, "sliding_window": 9}), (5, {"sliding_window": 100})):
            q = torch.randn(3, heads * group, dim)
            seen = cache.batch(seqs)
            sink_logits = torch.randn(heads * group) if group > 1 else None
            MEMORY.short = {"query": q, "lengths": seen.seq_lens, "sink logits": sink_logits}.get(plant)
            settings: dict[str, float | torch.Tensor | None] = {"scale": 0.1, "sink_logits": sink_logits, **options}
            expected = reference.decode(store, q.double(), seen, **settings)  # type: ignore[arg-type]
            assert relative_error(operations["decode"](store, q, seen, **settings), expected) < 2e-3, name
        MEMORY.clear()
        store.derived.clear()


def main(path: str, plant: str) -> None:
    global MEMORY
    MEMORY = Memory(plant)
    loader = importlib.machinery.ExtensionFileLoader("kvant.ops.cpu._native", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    assert library.missing() is None, library.missing()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.Tensor.data_ptr = lambda self: MEMORY.address(self)  # type: ignore[method-assign,assignment]
    library.run = run  # type: ignore[assignment]
    library.workspace = lambda floats: torch.empty(floats)  # type: ignore[assignment]
    library.bytes_at = lambda address, size: b""  # type: ignore[assignment]  # Python does not read the exact memory
    cases = CASES if plant == "nothing" else [case for case in CASES if case[0] in SMALL]
    for number, kind in enumerate(library.kinds()):
        library.isa = lambda number=number: number  # type: ignore[assignment,misc]
        for case in cases:
            exercise(*case, plant)
        print(f"{kind}: {len(cases)} layouts", flush=True)
    print("nothing found", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
