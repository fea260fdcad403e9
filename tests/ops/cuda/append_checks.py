"""Appends by the CUDA kernels against the bytes of the reference, on a GPU and emulated."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvant import recipes
from kvant.bench.synthetic import Shape, fitted, vectors
from kvant.cache import PagedCache, Sequence
from kvant.layout import Layout
from kvant.ops import LayerStore, PagedBatch, reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import decode as cuda_decode
from kvant.rope import Rope
from tests.calibrate.synthetic import rope_of
from tests.conftest import relative_error
from tests.ops.cuda.filling import filled

STEPS = [  # recipe, head_dim, type and tokens of a page of rows that kernels/append_step.cu appends
    ("oscar:sink=3,recent=20", 128, "bfloat16", None),
    ("oscar", 96, "float16", None),
    ("oscar:per_head=true,sink=0,recent=0", 64, "bfloat16", 16),
    ("oscar:v.target=none,v.hadamard=none,v.bitrev=false,clip=1", 128, "float16", None),  # values have no matrix
    ("oscar:bits=3,k.clip=0.6", 128, "bfloat16", None),
    ("oscar:group=64,sink=3,recent=20", 128, "bfloat16", None),
    ("oscar:group=32", 64, "float16", 16),
    ("saw-int4-hessian", 96, "bfloat16", None),
    ("saw-int4-hessian-kv:sink=2,recent=5", 64, "float16", None),
    ("kvant-2", 128, "bfloat16", None),
    ("kvant-2:rope_block=70,sink=3,recent=20", 64, "float16", 16),
    ("kvant-2:rope=post,sink=0,recent=0", 128, "float16", 32),
    ("kvant-2:k.bits=4,v.bits=4", 128, "bfloat16", None),
    ("kvant-3", 128, "bfloat16", None),
    ("kvant-2:search=9,k.bits=0/4/2,v.unbiased=true", 128, "bfloat16", 128),
    ("kvant-4:k.rope=block,rope_block=64", 96, "bfloat16", None),  # values have a Hadamard
    ("kvant-3", 64, "bfloat16", None),  # bands of which a lane has one byte of a token
    ("turboquant-4", 128, "bfloat16", None),
    ("turboquant-3:sink=3,recent=20", 64, "float16", 16),
    ("turboquant-2:v.bits=4", 96, "bfloat16", None),
]
SQUAT = [  # recipe, query heads a KV head, head_dim, rounds of new tokens after 1, 63 and 0
    ("squat", 2, 32, ([40, 1, 0], [1, 1, 1], [1, 1, 1], [0, 30, 40])),  # rows and Gram matrices
    ("squat:k.group=16,k.flush=16,v.recent=5,rank=12,block=8", 1, 32, ([3, 1, 6], [1, 1, 1], [20, 30, 4])),
    ("squat:sink=5,k.recent=3,weight=0.01", 1, 64, ([1, 1, 1], [40, 2, 9])),
    ("squat", 2, 64, ([40, 1, 2],)),
    ("squat-pre:weight=0.05", 2, 32, ([7, 1, 0], [1, 1, 1], [60, 30, 2])),
    ("squat-pre:sink=3,k.group=16,k.flush=32,k.bits=4", 1, 64, ([5, 1, 2], [1, 1, 1], [30, 2, 9])),
]


def beside_reference(
    layout: Layout, sequences: int, pages: int, device: str
) -> tuple[list[PagedCache], list[list[Sequence]], list[LayerStore]]:
    """Two caches of as many empty sequences, poisoned: one on `device`, one on the CPU for the reference. Where RoPE is asked for, the
    first token's position is 1013."""
    recipe, heads, dim = layout.recipe, layout.heads, layout.head_dim
    tensors = fitted(recipe, Shape(1, 1, heads, heads, dim, layout.dtype), "cpu")
    caches = []
    for where in (device, "cpu"):
        ropes = [Rope(rope_of(dim).inv_freq.to(where), 1013)] if recipe.wants_rope else None
        with warnings.catch_warnings(action="ignore"):  # of the reference
            by = "reference" if where == "cpu" else None
            caches.append(PagedCache(layout, 1, pages, where, {0: tensors}, ropes=ropes, implementation=by))
    seqs = [[cache.new() for _ in range(sequences)] for cache in caches]
    stores = [cache.stores[0] for cache in caches]
    for store in stores:
        store.pages.fill_(0xFF)
        for overlay in store.overlays.values():
            overlay.fill_(7.0)
    return caches, seqs, stores


def assert_as_the_reference(mine: LayerStore, theirs: LayerStore, limit: float, equal_nan: bool = False) -> None:
    """At most this share of the bytes of pages differs: a code may be the next one where a number lies halfway. Overlays are close."""
    assert float((mine.pages.cpu() != theirs.pages).double().mean()) < limit
    for side, overlay in theirs.overlays.items():
        assert_windows_close(mine.overlays[side].cpu(), overlay, equal_nan)


def assert_windows_close(found: torch.Tensor, expected: torch.Tensor, equal_nan: bool = False) -> None:
    """Close numbers; of fp8 few that are not equal, and these neighbours."""
    limit = 1e-2
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if expected.dtype == torch.float8_e4m3fn:
        differ = int((found.view(torch.uint8) != expected.view(torch.uint8)).sum())
        assert differ <= 1e-2 * expected.numel()
        limit, found, expected = 0.126, found.float(), expected.float()
    torch.testing.assert_close(found, expected, rtol=limit, atol=1e-2, equal_nan=equal_nan)


FP8_WINDOW = "int4:sink=4,recent=60,v.window_dtype=fp8"


def fp8_numbers(dtype: str) -> torch.Tensor:
    """Values of the 64 tokens of FP8_WINDOW, 2 heads of 64: all numbers of fp8, those halfway between two and beside them, and numbers
    of any size."""
    fp8 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (fp8[1:] + fp8[:-1]) / 2
    sizes = torch.tensor([1e-30, 1e-7, 449, 463, 464, 465, 480, 1e4, 6e4])
    given = torch.cat((fp8, halves, halves * (1 + 2**-7), halves * (1 - 2**-7), sizes))
    v = torch.cat((given, -given)).repeat(9)[: 64 * 2 * 64].view(64, 2, 64).to(getattr(torch, dtype))
    return torch.where(v == 0, 0, v)  # a zero may lose its sign


def check_fp8_windows(dtype: str, device: str) -> None:
    """Values as fp8, rounded to the nearest."""
    layout = Layout.of(recipes.get(FP8_WINDOW), 2, 64, dtype=dtype)
    _, seqs, stores = caches = beside_reference(layout, 1, 2, device)
    v = fp8_numbers(dtype)
    k = torch.randn(64, 2, 64).to(v.dtype)
    for cache, [seq], run in zip(caches[0], seqs, (cuda_append.append, reference.append), strict=True):
        store = cache.stores[0]
        run(store, k.to(store.pages.device), v.to(store.pages.device), cache.extend([seq], [64]))
    mine, theirs = (store.overlays["value"].cpu() for store in stores)
    expected = v.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(theirs[0].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def check_padded_step(name: str, device: str) -> None:
    """A decode step of three sequences, as it is and with two sequences and two tokens of padding: the same bytes, the same outputs."""
    heads, group, dim, lengths = 2, 4, 64, [1, 127, 300]
    stores, outputs = [], []
    for padding in (0, 2):
        torch.manual_seed(1)
        cache, seqs = filled(name, heads, group, dim, "bfloat16", lengths, 128, device)
        batch = cache.extend(seqs, [1] * len(seqs))
        count = len(seqs) + padding
        k, v, q = (torch.randn(5, n, dim, device=device).bfloat16()[:count] for n in (heads, heads, heads * group))

        def padded(x: torch.Tensor, value: int, padding: int = padding) -> torch.Tensor:
            return torch.cat((x, torch.full_like(x[:1], value).expand(padding, *x.shape[1:])))

        batch = PagedBatch(
            padded(batch.block_table, 0),
            padded(batch.seq_lens, 0),
            padded(batch.slot_mapping, -1),
            padded(batch.query_start_loc, len(seqs)),
            padded(batch.overlay_rows, 0),
            padded(batch.sinks, 0),
            {side: padded(x, 0) for side, x in batch.ring_start.items()},
        )
        cuda_append.append(cache.stores[0], k, v, batch)
        outputs.append(cuda_decode.decode(cache.stores[0], q, batch, scale=0.1)[: len(seqs)])
        stores.append(cache.stores[0])
    one, two = stores
    assert torch.equal(one.pages, two.pages)
    for side, overlay in one.overlays.items():
        assert torch.equal(overlay.view(torch.uint8), two.overlays[side].view(torch.uint8))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-2, atol=1e-3)  # splits of a sequence may differ


def check_step(
    name: str,
    dim: int,
    dtype: str,
    page: int | None,
    sequences: int,
    monkeypatch: pytest.MonkeyPatch,
    device: str = "cuda",
    limit: float = 1e-4,
) -> None:
    """Steps of one token a sequence and of several, some of them padding: sequences are in the sinks, in the ring, beyond both. One launch,
    and the bytes of the reference, which runs on the CPU."""
    torch.manual_seed(0)
    ran: list[bool] = []
    kernel = cuda_append._kernel
    monkeypatch.setattr(cuda_append, "_kernel", lambda *args: ran.append(args[0].step) or kernel(*args))
    monkeypatch.setattr(cuda_append, "transform_rows", None)
    recipe, heads = recipes.get(name), 2
    layout = Layout.of(recipe, heads, dim, page_tokens=page, dtype=dtype)
    lengths = [(1 + 37 * i) % 151 for i in range(sequences)]
    pages = sum(layout.pages_for(n + 8) for n in lengths) + 1
    caches, seqs, stores = beside_reference(layout, sequences, pages, device)
    for step, counts in enumerate((lengths, [1] * sequences, [i % 3 for i in range(1, sequences + 1)])):
        k, v = (vectors(sum(counts), heads, dim, "cpu", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
        batches = [cache.extend(own, counts) for cache, own in zip(caches, seqs, strict=True)]
        for batch in batches:
            batch.slot_mapping[5::7] = -1
        reference.append(stores[1], k, v, batches[1])
        if step:
            cuda_append.append(stores[0], k.to(device), v.to(device), batches[0])
        else:
            stores[0].pages.copy_(stores[1].pages)
            for side, overlay in stores[0].overlays.items():
                overlay.copy_(stores[1].overlays[side])
    assert ran == [True, True]
    assert bool((stores[1].pages != 0xFF).any())
    assert_as_the_reference(stores[0], stores[1], limit)


def check_squat(
    name: str, group: int, dim: int, rounds: tuple[list[int], ...], device: str = "cuda", dtype: str = "bfloat16"
) -> None:
    """Pages, overlays and subspaces are those of the reference, which runs on the CPU. Subspaces are compared as Q^T Q: vectors of equal
    singular values are not determined."""
    torch.manual_seed(0)
    first = 1013 if "pre" in name else 0
    spare = 9 + sum(map(sum, rounds)) // 64
    made = [
        filled(name, 2, group, dim, dtype, [1, 63, 0], device=where, first=first, spare=spare)
        for where in (device, "cpu")
    ]
    mine, theirs = (cache.stores[0] for cache, _ in made)
    mine.pages.copy_(theirs.pages)
    for one, two in zip(mine.owned, theirs.owned, strict=True):
        one.copy_(two)
    for counts in rounds:
        k, v, q = (
            vectors(sum(counts), heads, dim, "cpu", shift).to(getattr(torch, dtype))
            for heads, shift in ((2, 0.0), (2, 0.4), (2 * group, 0.2))
        )
        for (cache, seqs), run in zip(made, (cuda_append.append, reference.append), strict=True):
            where = cache.stores[0].pages.device
            run(cache.stores[0], k.to(where), v.to(where), cache.extend(seqs, counts), q.to(where))
    assert bool((theirs.pages != 0xFF).any())
    assert_as_the_reference(mine, theirs, 1e-3, equal_nan=True)
    rows = torch.tensor([seq.overlay_row for seq in made[1][1]])
    found, expected = (store.states["key"].cpu()[rows].double() for store in (mine, theirs))
    assert bool(expected.any())
    assert relative_error(found.mT @ found, expected.mT @ expected) < 1e-6
