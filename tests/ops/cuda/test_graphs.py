"""Decode and append on a GPU in CUDA graphs, and in launches that do not wait for each other."""

from __future__ import annotations

import pytest
import torch

from kvant.bench.synthetic import vectors
from kvant.ops import PagedBatch, reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.types import one_query_each
from tests.conftest import make_layout, relative_error
from tests.needs import gpu, needs_gpu
from tests.ops.cuda.append_checks import assert_as_the_reference, beside_reference
from tests.ops.cuda.decode_cases import ROTATED_BEFORE, ROTATED_BY_DECODE
from tests.ops.cuda.filling import filled


def of_eight_pages(batch: PagedBatch) -> PagedBatch:
    """With a table of eight columns, so that the batches of all steps have one shape."""
    table = torch.zeros(len(batch.block_table), 8, dtype=torch.int64, device="cuda")
    table[:, : batch.block_table.shape[1]] = batch.block_table
    return batch._replace(block_table=table)


def copy_batch(target: PagedBatch, source: PagedBatch) -> None:
    for name, tensor in source._asdict().items():
        for into, out in zip(_tensors(getattr(target, name)), _tensors(tensor), strict=True):
            into.copy_(out)


def _tensors(x: object) -> list[torch.Tensor]:
    return list(x.values()) if isinstance(x, dict) else [x]  # type: ignore[list-item]


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "tuned", "few"),
    [
        ("kvant-2", ROTATED_BY_DECODE, False),  # at a low batch a kernel before always rotates queries
        *(("kvant-2", ROTATED_BEFORE, few) for few in (False, True)),
        *(("kvant-4", tuned, few) for tuned in (ROTATED_BEFORE, ()) for few in (False, True)),
        *(
            (name, (), few)
            for name in ("oscar", "oscar:recent=1", "quarot-int2-win", "saw-int4")
            for few in (False, True)
        ),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_decode_beside_append(
    name: str, tuned: tuple[tuple[str, int], ...], few: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are launched without a wait of the host give what steps give that wait. Queries look for the newest token."""
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 1 << 20 if few else 0)
    lengths, heads, group, steps = [3, 64, 200, 700] * 8, 8, 4, 16
    cache, seqs = filled(name, heads, group, 128, "bfloat16", lengths, first=300, spare=2 + len(lengths))
    store = cache.stores[0]
    batches = [cache.extend(seqs, [1] * len(seqs)) for _ in range(steps)]
    before = [store.pages.clone(), *(overlay.clone() for overlay in store.overlays.values())]
    k, v = (torch.randn(steps, len(seqs), heads, 128, device="cuda").bfloat16() for _ in range(2))
    q = (4 * k.float()).bfloat16().repeat_interleave(group, 2)
    assert not cuda_append.allocates(store, torch.bfloat16)

    def run(after_append: bool) -> torch.Tensor:
        for mine, kept in zip((store.pages, *store.overlays.values()), before, strict=True):
            mine.copy_(kept)
        out = torch.empty_like(q)

        def step(i: int) -> None:
            queries = q[i].clone()  # by a kernel before append
            cuda_append.append(store, k[i], v[i], batches[i])
            cuda_decode.decode_with_lse(
                store, queries, batches[i], scale=128**-0.5, out=out[i], after_append=after_append, tuned=tuned
            )

        for i in range(steps):
            if not after_append:
                step(i), torch.cuda.synchronize()
            elif not captured:
                step(i)
        if after_append and captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(steps):
                    step(i)
            graph.replay()
        torch.cuda.synchronize()
        return out

    expected = run(False)
    close = torch.nn.functional.cosine_similarity(expected.float(), v.repeat_interleave(group, 2).float(), dim=-1)
    assert close.median() > 0.9  # what is appended last decides
    for _ in range(3):
        torch.testing.assert_close(run(True), expected, rtol=0, atol=0)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["quarot-int2-win", "vecinfer-2"])
def test_decode_in_a_cuda_graph_follows_its_inputs(name: str) -> None:
    cache, seqs = filled(name, 2, 4, 128, "bfloat16", [900, 400])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    run = cache.ops["decode"].run
    run(store, q, batch, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(store, q, batch, scale=0.1)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        batch.seq_lens.sub_(3)
        graph.replay()
        assert relative_error(out, reference.decode(store, q.double(), batch, scale=0.1)) < 2e-3


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["saw-int4", "kvant-2:rollback=9", "kivi-k2v2:rollback=9", "full"])
def test_decode_of_several_queries_in_a_cuda_graph(name: str) -> None:
    """As in a server's graph of steps that verify drafts: some are taken back, and a sequence of padding has no token."""
    queries = 4
    cache, seqs = filled(name, 2, 4, 128, "bfloat16", [900, 400, 77])
    batch, store = cache.batch(seqs), cache.stores[0]
    batch.seq_lens[2] = 0
    q = torch.randn(3 * queries, 8, 128, device="cuda", dtype=torch.bfloat16)
    run = cache.ops["decode"].run
    run(store, q, batch, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(store, q, batch, scale=0.1)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        batch.seq_lens[:2].sub_(3)
        graph.replay()
        each = one_query_each(batch, queries)
        expected = reference.decode(store, q.double(), each, scale=0.1)
        assert relative_error(out[: 2 * queries], expected[: 2 * queries]) < 2e-3
        assert bool((out[2 * queries :] == 0).all())


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["oscar:sink=3,recent=20", "kvant-2:rope_block=70,sink=3,recent=20"])
def test_steps_are_appended_in_a_cuda_graph(name: str) -> None:
    """Steps of one graph, whose sequences leave the sinks, fill the ring, enter another RoPE block and another page."""
    lengths, heads, dim, steps = [0, 2, 61], 2, 128, 80
    layout = make_layout(name, heads, dim, dtype="bfloat16")
    caches, seqs, stores = beside_reference(layout, len(lengths), 20, "cuda")
    new = torch.empty(2, len(lengths), heads, dim, dtype=torch.bfloat16, device="cuda")
    graph, still = torch.cuda.CUDAGraph(), None
    for step in range(-1, steps):
        counts = lengths if step < 0 else [1] * len(lengths)
        k, v = (vectors(sum(counts), heads, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        batches = [cache.extend(own, counts) for cache, own in zip(caches, seqs, strict=True)]
        reference.append(stores[1], k, v, batches[1])
        if step < 0:
            cuda_append.append(stores[0], k.cuda(), v.cuda(), batches[0])
            continue
        batch = of_eight_pages(batches[0])
        new[0].copy_(k), new[1].copy_(v)
        if still is None:
            still = batch
            cuda_append.append(stores[0], new[0], new[1], still)  # the same again writes the same
            with torch.cuda.graph(graph):
                cuda_append.append(stores[0], new[0], new[1], still)
        copy_batch(still, batch)
        graph.replay()
    assert_as_the_reference(stores[0], stores[1], 1e-4)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["squat", "squat-pre"])
def test_corrected_keys_are_appended_in_a_cuda_graph(name: str) -> None:
    """Steps of one graph: sequences whose subspace is still fitted, which complete their first group and later ones, and such that
    have one."""
    lengths, heads, dim, steps = [0, 20, 90], 2, 64, 80
    caches = [filled(name, heads, 2, dim, "bfloat16", lengths, device=where, spare=9) for where in ("cuda", "cpu")]
    stores = [cache.stores[0] for cache, _ in caches]
    stores[0].pages.copy_(stores[1].pages)
    for one, two in zip(stores[0].owned, stores[1].owned, strict=True):
        one.copy_(two)
    new = torch.empty(2, len(lengths), heads, dim, dtype=torch.bfloat16, device="cuda")
    queries = torch.empty(len(lengths), 2 * heads, dim, dtype=torch.bfloat16, device="cuda")
    graph, still = torch.cuda.CUDAGraph(), None
    for _ in range(steps):
        k, v = (vectors(len(lengths), heads, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        q = vectors(len(lengths), 2 * heads, dim, "cpu", 0.2).bfloat16()
        batches = [cache.extend(own, [1] * len(lengths)) for cache, own in caches]
        reference.append(stores[1], k, v, batches[1], q)
        batch = of_eight_pages(batches[0])
        new[0].copy_(k), new[1].copy_(v), queries.copy_(q)
        if still is None:
            still = batch
            kept = [x.clone() for x in (stores[0].pages, *stores[0].owned)]
            cuda_append.append(
                stores[0], new[0], new[1], still, queries
            )  # kernels are compiled; what it learnt is forgotten
            for into, out in zip((stores[0].pages, *stores[0].owned), kept, strict=True):
                into.copy_(out)
            with torch.cuda.graph(graph):
                cuda_append.append(stores[0], new[0], new[1], still, queries)
        copy_batch(still, batch)
        graph.replay()
    assert_as_the_reference(stores[0], stores[1], 1e-3, equal_nan=True)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["kivi-k2v2:k.flush=32,v.recent=32", "kitty:k.group=32,k.flush=32,sink=3"])
def test_groups_are_appended_in_a_cuda_graph(name: str) -> None:
    """One token a sequence; some steps complete a group and some do not, in the same graph."""
    lengths, heads, dim, steps = [90, 17], 2, 64, 40
    layout = make_layout(name, heads, dim, dtype="bfloat16")
    caches, seqs, stores = beside_reference(layout, len(lengths), 12, "cuda")
    assert caches[0].ops["append"].name == "cuda"
    rows = [vectors(sum(lengths) + steps * len(lengths), heads, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4)]
    graph, still, new = (
        torch.cuda.CUDAGraph(),
        None,
        torch.empty(2, len(lengths), heads, dim, dtype=torch.bfloat16, device="cuda"),
    )
    for step in range(-1, steps):
        counts = lengths if step < 0 else [1] * len(lengths)
        at = 0 if step < 0 else sum(lengths) + step * len(lengths)
        k, v = (x[at : at + sum(counts)] for x in rows)
        batches = [cache.extend(own, counts) for cache, own in zip(caches, seqs, strict=True)]
        reference.append(stores[1], k, v, batches[1])
        if step < 0:
            cuda_append.append(stores[0], k.cuda(), v.cuda(), batches[0])
            continue
        batch = of_eight_pages(batches[0])
        new[0].copy_(k), new[1].copy_(v)
        if still is None:
            still = batch
            cuda_append.append(stores[0], new[0], new[1], still)  # the same again writes the same
            with torch.cuda.graph(graph):
                cuda_append.append(stores[0], new[0], new[1], still)
        copy_batch(still, batch)
        graph.replay()
    assert float((stores[0].pages.cpu() != stores[1].pages).double().mean()) < 1e-4
    for side in ("key", "value"):
        one, two = (store.overlays[side].cpu().view(torch.uint8) for store in stores)  # type: ignore[index]
        assert torch.equal(one, two)
