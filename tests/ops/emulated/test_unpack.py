"""Emulated unpack against the rows that the reference reads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvant.bench import attention
from kvant.bench.synthetic import vectors
from kvant.ops import reference
from kvant.ops.cuda import prefill as cuda_prefill
from kvant.ops.cuda import unpack
from tests.needs import needs_compiler
from tests.ops.emulated.checks import READ, filled

pytestmark = needs_compiler

LENGTHS = [1, 63, 300, 20]


def check_unpack(name: str, dim: int, first: int, dtype: torch.dtype) -> None:
    cache, seqs = filled(name, 2, 1, dim, LENGTHS, first=first)
    batch, store, counts = cache.batch(seqs), cache.stores[0], [5, 0, 40, 17]
    assert cuda_prefill.refuse_layout(store.layout) is None
    begins = [sum(counts[:b]) for b in range(len(counts))]
    whole = tuple(unpack.Span(0, n, n, begins[b], counts[b]) for b, n in enumerate(LENGTHS))
    parts = tuple(unpack.Span(n // 3, n - n // 5, n, begins[b], 0) for b, n in enumerate(LENGTHS))
    nothing = tuple(span._replace(last=0, new=3) if b == 2 else span for b, span in enumerate(whole))
    for stream in unpack.STREAMS:
        expected = reference.restored(store, stream, batch)
        new = vectors(sum(counts), 3, dim, "cpu", 0.4).bfloat16()[:, 1:]  # with a stride
        for spans in (whole, parts, nothing):
            with attention.poisoned():
                found = unpack.unpack(store, stream, batch, spans, new, dtype)
            at, limit = 0, 8e-3 if dtype == torch.bfloat16 else 1e-3
            for b, span in enumerate(spans):
                own = new[span.new_first : span.new_first + span.new].float()
                rows = torch.cat((expected[b, span.first : span.last], own))
                here = found[at : at + span.tokens].float()
                at += span.tokens
                if len(rows):
                    atol = limit / 2 * float(rows.abs().max())
                    torch.testing.assert_close(here, rows, rtol=limit, atol=atol)
            assert at == len(found)


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "dim", "first"), READ)
def test_unpack(name: str, dim: int, first: int) -> None:
    """Every stored token of a ragged batch in the model's space, from pages and windows; new tokens behind them."""
    check_unpack(name, dim, first, torch.float16)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "dim", "first"), [READ[i] for i in range(0, len(READ), 3)])
def test_unpack_as_on_gpus_from_sm_100_on(name: str, dim: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens at a time."""
    monkeypatch.setattr(unpack, "narrow", lambda device: True)
    check_unpack(name, dim, first, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_of_unpacked_rows(dtype: torch.dtype) -> None:
    check_unpack("kvant-2:sink=5,recent=70", 64, 30, dtype)


def test_unpacked_rows_have_matrices_of_any_magnitude() -> None:
    """float16 holds up to 65504, and nothing below 6e-5 in full; heads may differ."""
    cache, seqs = filled("oscar:sink=3,recent=20", 2, 1, 64, [100])
    store, batch = cache.stores[0], cache.batch(seqs)
    spans, sizes = (unpack.Span(0, 100, 100),), torch.tensor([2.0**20, 2.0**-20])
    one = [unpack.unpack(store, name, batch, spans, None, torch.float32) for name in unpack.STREAMS]
    held = store.derive(unpack.StoredTables)
    for name in unpack.STREAMS:
        matrix = held.inverse[name].tensor
        assert matrix is not None
        held.inverse[name] = dataclasses.replace(held.inverse[name], tensor=matrix * sizes[:, None, None])
    held.found.clear()
    for before, name in zip(one, unpack.STREAMS, strict=True):
        found = unpack.unpack(store, name, batch, spans, None, torch.float32)
        torch.testing.assert_close(found, before * sizes[:, None], rtol=1e-6, atol=0)


def test_what_a_store_keeps_does_not_go_stale() -> None:
    """Pages that are replaced are read; a longer history has longer tables of angles; types have kernels of their own, which stores of
    one layout do not share. The work units of spans are those of all layers of a layout."""
    cache, seqs = filled("kvant-2:sink=5,recent=20", 2, 1, 64, [100, 20000], first=30)
    store, batch = cache.stores[0], cache.batch(seqs)
    short, long = (tuple(unpack.Span(0, min(n, m), m) for m in (100, 20000)) for n in (90, 20000))
    before = unpack.unpack(store, "key", batch, short, None, torch.float16)
    held = store.derive(unpack.StoredTables)
    assert held.tabulated is not None and held.tabulated.last < 20000
    found = unpack.unpack(store, "key", batch, long, None, torch.float16)
    assert held.tabulated.last >= 20000 + 29
    torch.testing.assert_close(found[100:190], before[90:])
    store.pages = store.pages.clone()
    store.pages[batch.block_table[0, 0]] = store.pages[batch.block_table[0, 1]]
    again = unpack.unpack(store, "key", batch, short, None, torch.float16)
    assert not torch.equal(again[5:64], before[5:64]) and torch.equal(again[64:], before[64:])
    new = torch.randn(3, 2, 64)
    spans = (short[0]._replace(new=3), short[1])
    for dtype in (torch.bfloat16, torch.float16):
        found = unpack.unpack(store, "key", batch, spans, new.to(dtype), torch.float16)
        torch.testing.assert_close(found[90:93], new.to(dtype).half())
    assert len(held.kernels) == 3
    other = dataclasses.replace(store, derived={})
    where = unpack.joined(store, spans)
    assert unpack.joined(other, spans) is where and other.derive(unpack.StoredTables).kernels == {}
    kivi, _ = filled("kivi-k2v2", 2, 1, 64, [100])
    assert unpack.joined(kivi.stores[0], spans).units != where.units
