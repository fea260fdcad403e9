"""Caches on the CPU, and what the emulated kernels are compared with."""

from __future__ import annotations

import torch

from kvant.bench.synthetic import vectors
from kvant.cache import PagedCache, Sequence
from kvant.ops import reference
from kvant.ops.cuda import append as cuda_append
from tests.ops.cuda import filling
from tests.ops.cuda.filling import parts_of_one

READ = [  # recipe, head_dim, position of the first token
    ("saw-int4", 64, 0),
    ("quarot-int2-win:sink=5,recent=70", 64, 0),
    ("saw-int4-kv:seed=3", 128, 0),
    ("oscar:sink=3,recent=20", 64, 0),
    ("kvant-2:sink=5,recent=70", 64, 1000),
    ("kvant-2:rope_block=100", 128, 30),
    ("kvant-2:v.window_dtype=model", 64, 0),
    ("int4:sink=3,recent=70,v.window_dtype=fp8", 80, 0),
    ("oscar:group=32,sink=3,recent=20,v.window_dtype=fp8", 128, 0),
    ("saw-int4-kmeans:centroids=64,sink=3,recent=20,v.window_dtype=fp8", 64, 0),
    ("kvant-2:k.bits=4,rope_block=64", 96, 3),
    ("kvant-3", 128, 0),
    ("kvant-2:rope=post,k.bits=4/4/0,v.bits=4", 128, 0),
    ("kvant-2:rope=post,k.bits=0/2/4", 128, 0),
    ("kvant-2:rope=post,k.bits=4/0/2", 128, 0),
    ("kvant-4-fast", 96, 0),
    ("kvant-3:rope=post", 128, 0),
    ("int3", 64, 0),
    ("int8", 64, 0),
    ("int4", 80, 0),
    ("int4", 256, 0),
    ("kivi-k2v2", 64, 0),
    ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", 64, 0),
    ("kivi-k2v2-sink:k.bits=3,v.bits=3,v.group=64", 64, 0),
    ("kitty-pro", 64, 0),
    ("kitty:sink=3", 128, 0),
    ("squat", 64, 0),
    ("squat-pre", 64, 30),
    ("kvant-2:rope_block=24", 64, 100),
    ("oscar:group=32,sink=3,recent=20", 64, 0),
    ("int4:group=16", 64, 0),
    ("oscar:group=64", 128, 0),
    ("int8:k.group=32,v.group=0", 96, 0),
    ("vecinfer-2", 64, 0),
    ("vecinfer-2:dim=2,k.bits=3,v.bits=4", 64, 0),
    ("vecinfer-2:dim=4,bits=6", 128, 0),
    ("vecinfer-4", 64, 0),
    ("million-2:k.bits=10,v.bits=9", 96, 0),
    ("million-1.5:bits=8,books=head", 128, 0),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 64, 30),
    ("turboquant-3", 64, 0),
    ("million-2:books=space", 64, 0),
    ("kvant-3", 64, 30),
    ("kvant-2:rope=post,k.bits=3/2/0", 128, 0),
    ("vecinfer-2:k.books=space,k.bits=9,v.bits=4", 128, 0),
    ("saw-int4-kmeans:centroids=64", 64, 0),
    ("saw-int4-kmeans-rot:k.books=layer,k.centroids=300,v.centroids=1,v.group=64", 128, 0),
    ("kivi-k2v2-sink:shift=false", 64, 0),  # as inside vLLM: sinks are in pages and in the overlay
    ("kitty-pro:k.group=64,k.flush=64,v.recent=40,sink=9,shift=false", 64, 0),
]


def filled(
    name: str,
    heads: int,
    group: int,
    dim: int,
    lengths: list[int],
    dtype: str = "bfloat16",
    order: str | None = "fragment",
    **options: int | None,
) -> tuple[PagedCache, list[Sequence]]:
    torch.manual_seed(0)
    cache, seqs = filling.filled(name, heads, group, dim, dtype, lengths, device="cpu", **options)  # type: ignore[arg-type]
    assert order in (None, cache.layout.order) or cache.layout.format("key").is_pq
    return cache, seqs


def check_append(
    name: str,
    dim: int,
    rounds: tuple[list[int], ...],
    dtype: str = "bfloat16",
    page: int | None = None,
    **options: int | None,
) -> None:
    """The bytes of pages and windows; codes may differ where a number lies halfway between two."""
    made = [filled(name, 2, 1, dim, [1, 63, 140], dtype, page=page, spare=9, **options) for _ in range(2)]
    for counts in rounds:
        k, v = (vectors(sum(counts), 2, dim, "cpu", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
        for (cache, seqs), run in zip(made, (reference.append, cuda_append.append), strict=True):
            batch = cache.extend(seqs, counts)
            if len(k) > 40:  # some are padding
                batch.slot_mapping[[3, 16, 35]] = -1
            run(cache.stores[0], *parts_of_one(k, v), batch)
    one, two = (cache.stores[0] for cache, _ in made)
    for mine, theirs in [(one.pages, two.pages), *((one.overlays[s], two.overlays[s]) for s in one.overlays)]:
        mine, theirs = (x.view(torch.uint8) for x in (mine, theirs))
        assert mine.shape == theirs.shape
        if not mine.numel():
            continue
        assert bool((mine != 0xFF).any())
        assert float((mine != theirs).float().mean()) < 1e-3
