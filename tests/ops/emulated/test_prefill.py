"""Emulated prefill against the reference: what is unpacked, attended to and merged."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvant.bench import attention
from kvant.bench.synthetic import vectors
from kvant.cache import PagedCache, Sequence
from kvant.ops import flash, implementations, reference
from kvant.ops.cuda import prefill as cuda_prefill
from tests.conftest import relative_error
from tests.needs import needs_compiler
from tests.ops.emulated.checks import READ, filled
from tests.ops.plain_flash import plain, plain_fixed_length
from tests.ops.scores import some_sinks

pytestmark = needs_compiler


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "dim", "first"), READ)
@pytest.mark.parametrize("room", [96, 400, 1 << 16])
def test_prefill(name: str, dim: int, first: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens over a history, with room for all sequences at once, for some, and not for the longest; beside a sequence without
    a history and one without new tokens."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", room)
    monkeypatch.setattr(cuda_prefill, "MASKED_TOKENS", 96)
    cache, seqs = filled(name, 2, 2, dim, [1, 63, 300], first=first)
    store, counts = cache.stores[0], [1, 0, 40, 5]
    store.flash = flash.Flash(plain, torch.float16, softcap=True)
    seqs = [*seqs, cache.new()]
    k, v = (vectors(sum(counts), 2, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 4, dim).bfloat16()
    batch = cache.extend(seqs, counts)
    for softcap, window, sinks in (
        (None, None, None),
        (3.0, None, None),
        (None, 200, None),
        (None, None, some_sinks(4)),
        (None, 200, some_sinks(4)),
        (3.0, 35, None),  # shorter than the new tokens
    ):
        options = {"scale": dim**-0.5, "softcap": softcap, "sliding_window": window, "sink_logits": sinks}
        with attention.poisoned():
            found = cuda_prefill.prefill(store, q, k, v, batch, **options)  # type: ignore[arg-type]
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
        assert relative_error(found, expected) < 2e-3


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("room", [200, 450, 1 << 16])
@pytest.mark.parametrize(
    ("name", "dim", "first"),
    [("int4", 64, 0), ("kvant-2:sink=5,recent=70", 64, 30), ("oscar:sink=3,recent=20", 128, 0), ("kivi-k2v2", 64, 0)],
)
def test_prefill_attends_to_long_histories_without_a_mask(
    name: str, dim: int, first: int, room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbouring sequences of like lengths in one call, beside one that is short, one that has too few new tokens and one without
    any; with room for all at once, for some, and not for the longest."""
    for constant, n in {"JOINED_TOKENS": room, "UNMASKED_TOKENS": 64, "UNMASKED_ROWS": 16, "UNMASKED_TILES": 8}.items():
        monkeypatch.setattr(cuda_prefill, constant, n)
    calls, counts = list[Any](), [20, 20, 20, 37, 0, 3]
    cache, seqs = filled(name, 2, 2, dim, [71, 64, 40, 300, 90, 80], first=first)
    check_long_histories(cache, seqs, counts, dtype, calls)
    longest = [(1, 48, 192), (1, 48, 104)] if room == 200 else [(1, 48, 288)]
    assert [shape for shape in calls if len(shape) == 3] == [(2, 32, 64), *longest]


def check_long_histories(
    cache: PagedCache, seqs: list[Sequence], counts: list[int], dtype: torch.dtype, calls: list[Any]
) -> None:
    """Prefill of new tokens against the reference. `calls` are those of the attention of sequences of one length (sequences, rows,
    tokens), those of a causal mask with "causal" behind, and those of the other (rows, tokens)."""
    store, dim = cache.stores[0], cache.layout.head_dim

    def fixed_length(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert q.dtype == k.dtype == v.dtype == torch.float16
        assert q.is_contiguous() and k.is_contiguous() and not (k.isnan().any() or v.isnan().any())
        calls.append((len(q), q.shape[1], k.shape[1], *(["causal"] if causal else [])))
        return plain_fixed_length(q, k, v, scale, causal)

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert q.dtype == k.dtype == v.dtype == torch.float16
        calls.append((len(q), len(k)))
        out, lse = plain(q, k, v, *args)
        return out.to(q.dtype), lse

    faster = flash.FixedLength(fixed_length, lambda device, dim: None)
    store.flash = flash.Flash(varlen, torch.float16, fixed_length=faster)
    k, v = (vectors(sum(counts), 2, dim, "cpu", shift).to(dtype) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 6, dim).to(dtype)[:, 1:5]  # with a stride
    batch = cache.extend(seqs, counts)
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=dim**-0.5)
    with attention.poisoned():
        found = cuda_prefill.prefill(store, q, k, v, batch, scale=dim**-0.5)
    assert found.dtype == dtype and relative_error(found, expected) < 2e-3


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["saw-int4", "kvant-2:sink=5,recent=70"])
@pytest.mark.parametrize(
    ("lengths", "counts", "expected"),
    [  # exactly at a length that is attended to without a mask; new tokens that are padded, and that are not
        ([64, 64], [20, 20], [(2, 32, 32, "causal"), (2, 32, 64)]),
        ([64, 64], [32, 32], [(2, 32, 32, "causal"), (2, 32, 64)]),
        ([64, 72, 64], [20, 20, 20], [(3, 32, 32, "causal"), (1, 32, 64), (1, 32, 72), (1, 32, 64)]),
        # one without a history, one without new tokens, one with other new tokens
        ([64, 0, 64], [20, 20, 20], [(3, 32, 32, "causal"), (1, 32, 64), (1, 32, 64)]),
        ([80, 64, 64, 300], [0, 20, 20, 0], [(2, 32, 32, "causal"), (2, 32, 64)]),
        ([64, 64, 128], [20, 20, 37], [(77, 77), (2, 32, 64), (1, 48, 128)]),
        ([64, 0], [40, 3], [(43, 43), (1, 48, 64)]),
        # just above: what is left of the history is unpacked with the new tokens
        ([64, 65], [20, 20], [(40, 41), (2, 32, 64)]),
        ([64, 40], [20, 20], [(40, 80), (1, 32, 64)]),
        # longer than the workspace, exactly and with some left
        ([960], [20], [(1, 32, 480), (1, 32, 480), (1, 32, 32, "causal")]),
        ([968], [20], [(1, 32, 480), (1, 32, 480), (20, 28)]),
    ],
)
def test_new_tokens_attend_to_themselves_where_no_history_is_left(
    lengths: list[int],
    counts: list[int],
    expected: list[tuple[int | str, ...]],
    name: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[str],
) -> None:
    """Then nothing is unpacked for them: as many of every sequence in one causal call of sequences of one length, others as ever."""
    for constant, n in {"JOINED_TOKENS": 490, "UNMASKED_TOKENS": 64, "UNMASKED_ROWS": 16, "UNMASKED_TILES": 4}.items():
        monkeypatch.setattr(cuda_prefill, constant, n)
    cache, seqs = filled(name, 2, 2, 64, [n for n in lengths if n], spare=8)
    for at in (i for i, n in enumerate(lengths) if not n):
        seqs.insert(at, cache.new())
    calls = list[Any]()
    check_long_histories(cache, seqs, counts, dtype, calls)
    assert calls == expected
    unpacked = sum(len(shape) == 3 or (len(shape) == 2 and shape[0] < shape[1]) for shape in calls)
    assert launched.count("kvant_unpack") == 2 * unpacked


def test_lengths_that_are_attended_to_without_a_mask() -> None:
    """At least 7/8 of a history, and few lengths; spans of a long one cover it."""
    found = [cuda_prefill.unmasked_tokens(n) for n in range(1 << 15)]
    least = cuda_prefill.UNMASKED_TOKENS
    assert not any(found[:least]) and all(7 * n < 8 * m <= 8 * n for n, m in enumerate(found) if n >= least)
    assert len(set(found)) == 1 + 8 * 3
    rows = [cuda_prefill.padded_rows(n) for n in range(1, 8193)]
    assert all(n <= m <= max(9 * n // 8, n + 127) and m % 128 == 0 for n, m in enumerate(rows, 1))
    assert len(set(rows)) == 16 + 8 + 8 and cuda_prefill.padded_rows(2048) == 2048
    for history, unmasked in ((200_000, True), (200_000, False), (131_072, True), (69_632, True)):
        spans = cuda_prefill.long_spans(history, unmasked)
        assert spans[0][0] == 0 and spans[-1][1] == history and all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert all(last - first <= cuda_prefill.JOINED_TOKENS for first, last in spans)
        lengths = [last - first for first, last in spans]
        assert not unmasked or all(n == cuda_prefill.unmasked_tokens(n) for n in lengths[:-1])


def test_cudnn_attends_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert "not measured" in (flash.refuse_cudnn(device, 128) or "")  # sm_80
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert flash.refuse_cudnn(device, 128) is None and flash.refuse_cudnn(device, 64) is None
    assert "head dims" in (flash.refuse_cudnn(device, 256) or "")
    assert "cpu" in (flash.refuse_cudnn(torch.device("cpu"), 128) or "")
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert "turned off" in (flash.refuse_cudnn(device, 128) or "")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    assert "no cuDNN" in (flash.refuse_cudnn(device, 128) or "")


def test_sequences_share_the_workspace_of_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", 100)
    spans = cuda_prefill.spans_of([0, 10, 10, 30, 31, 131], [60, 500, 50, 200, 100])
    assert [span.tokens for span in spans] == [60, 0, 50, 200, 100]
    assert list(cuda_prefill.workspaces(spans)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert list(cuda_prefill.workspaces([])) == []


def test_a_window_is_unpacked_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row sees the same positions whether its sequence is served whole or in pieces, which the workspace holds."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", 100)
    for history, new, window in itertools.product((0, 1, 29, 30, 31, 500), (1, 70, 71, 72, 150, 300), (1, 2, 30, 50)):
        (whole,) = cuda_prefill.spans_of([7, 7 + new], [history + new], window)
        assert whole == (max(0, history + 1 - window), history, history, 7, new)
        seen, before = list[range](), 0
        for rows, span in cuda_prefill.pieces_of(whole, window):
            assert rows.start == before and span.tokens <= 100 and span.first <= span.last == span.history == history
            before, positions = rows.stop, [*range(span.first, span.last)]
            positions += range(history + span.new_first - 7, history + span.new_first - 7 + span.new)
            assert positions == [*range(positions[0], history + rows.stop)], "one after another, up to the last row"
            for row in range(rows.start, rows.stop):
                seen.append(range(max(positions[0], history + row + 1 - window), history + row + 1))
        assert seen == [range(max(0, history + row + 1 - window), history + row + 1) for row in range(new)]
    assert cuda_prefill.spans_of([0, 0], [50], 10)[0].tokens == 0, "without new tokens nothing is read"


@pytest.mark.few(2)
@pytest.mark.parametrize("sinks", [None, some_sinks(4)])
@pytest.mark.parametrize("name", ["int4", "kvant-2:sink=5,recent=20", "kivi-k2v2"])
def test_prefill_with_a_sliding_window(name: str, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, for histories longer and shorter than the window; new tokens in pieces; pages that the window has left are not read."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", 300)
    monkeypatch.setattr(cuda_prefill, "_masked", lambda *args: pytest.fail("scores were held"))
    cache, seqs = filled(name, 2, 2, 64, [1, 63, 300, 420], spare=10)
    store, counts, calls = cache.stores[0], [1, 40, 400, 9, 5], list[int]()

    def recorded(q: torch.Tensor, k: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(k))
        return plain(q, k, *args)

    store.flash = flash.Flash(recorded, torch.float16)
    k, v = (vectors(sum(counts), 2, 64, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 4, 64).bfloat16()
    batch = cache.extend([*seqs, cache.new()], counts)
    options = {"scale": 64**-0.5, "sliding_window": 90, "sink_logits": sinks}
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
    left = batch.block_table.clone()
    left[3, : (420 + 1 - 90) // store.layout.page_tokens] = -(1 << 40)  # an address that nothing may read
    with attention.poisoned():
        found = cuda_prefill.prefill(store, q, k, v, batch._replace(block_table=left), **options)  # type: ignore[arg-type]
    assert relative_error(found, expected) < 2e-3
    # 1 + 1 and 63 + 40 tokens; 89 + 211 and 89 + 189 of the third; 89 + 9 and 5
    assert calls == [105, 300, 278, 103]


def test_the_way_of_a_prefill() -> None:
    """What only a call knows decides, in one place; the rule is what `kvant doctor` prints."""
    bare, capped = flash.Flash(plain), flash.Flash(plain, softcap=True)
    fused, masked, by_torch = cuda_prefill.Way
    widest = cuda_prefill.JOINED_TOKENS // 2
    for found, expected in (
        (cuda_prefill.way_of(bare, torch.bfloat16, None, None), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, 299), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, widest), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, widest + 1), masked),
        (cuda_prefill.way_of(bare, torch.bfloat16, 3.0, None), masked),
        (cuda_prefill.way_of(bare, torch.bfloat16, 3.0, 299), masked),
        (cuda_prefill.way_of(capped, torch.bfloat16, 3.0, 299), fused),
        (cuda_prefill.way_of(capped, torch.float32, None, None), masked),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, None, rotated=32), fused),
        (cuda_prefill.way_of(bare, torch.bfloat16, None, None, rotated=10), by_torch),
        (cuda_prefill.way_of(bare, torch.float32, 3.0, 5, rotated=10), by_torch),
    ):
        assert found is expected
    lengths = torch.tensor([1, 300])
    assert [cuda_prefill.narrowed(window, lengths) for window in (None, 299, 300)] == [None, 299, None]
    assert cuda_prefill.narrowed(5, lengths[:0]) is None
    (chosen,) = (i for i in implementations("prefill") if i.name == "cuda")
    assert f"sliding window above {widest}" in chosen.about and "pairs of channels" in chosen.about


@pytest.mark.parametrize("name", ["kvant-2", "squat-pre"])
def test_prefill_where_the_kernel_cannot_rotate_keys(name: str) -> None:
    cache, seqs = filled(name, 2, 2, 64, [1, 150], rotated=20)
    counts = [3, 5]
    q, k, v = (torch.randn(sum(counts), n, 64) for n in (4, 2, 2))
    batch, store = cache.extend(seqs, counts), cache.stores[0]
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=0.1)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    assert relative_error(cuda_prefill.prefill(store, q, k, v, host, scale=0.1), expected) < 1e-4
    options = {"scale": 0.1, "sink_logits": some_sinks(4)}
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
    assert relative_error(cuda_prefill.prefill(store, q, k, v, host, **options), expected) < 1e-4  # type: ignore[arg-type]
