"""Prefill and unpack on a GPU against the reference on the same bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.bench import attention
from kvant.bench.synthetic import vectors
from kvant.layout import Layout
from kvant.ops import flash, reference
from kvant.ops.blocked import attend_plain
from kvant.ops.cuda import prefill as cuda_prefill
from kvant.ops.cuda import unpack
from kvant.ops.cuda.convert_rows import convert_rows
from kvant.ops.cuda.merge_parts import merge_parts
from kvant.ops.types import LayerStore
from tests.conftest import make_layout, relative_error
from tests.needs import gpu, needs_gpu
from tests.ops.cuda.filling import filled
from tests.ops.scores import some_sinks

HISTORIES = [
    "int4",
    "saw-int4",
    "oscar:sink=3,recent=20",
    "int4:sink=3,recent=70,v.window_dtype=fp8",
    "oscar:group=32,sink=3,recent=20,v.window_dtype=fp8",
    "kvant-2",
    "kvant-2:rope_block=100",
    "kvant-3",
    "kvant-4-fast",
    "int3",
    "oscar:group=32,sink=3,recent=20",
    "kivi-k2v2",
    "kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5",
    "kitty-pro",
    "kitty:sink=3",
    "kivi-k2v2-sink:shift=false",
    "squat",
    "squat-pre",
    "kvant-2:rope_block=24",
    "vecinfer-2",
    "vecinfer-4",
    "million-2:k.bits=10,v.bits=9",
    "million-1.5:bits=8,books=head",
    "turboquant-2",
    "turboquant-3",
    "million-2:books=space",
    "saw-int4-kmeans:centroids=64",
    "saw-int4-kmeans-rot:k.books=layer,k.centroids=300,v.centroids=1,v.group=64",
]


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("room", [96, 400, 1 << 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", HISTORIES)
def test_prefill_over_a_history(name: str, dtype: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all sequences at once, for some of them, and not for the longest; lengths on the device and on the host."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", room)
    cache, seqs = filled(name, 2, 4, 128, dtype, [1, 63, 700])
    store, counts = cache.stores[0], [3, 1, 60, 5]
    k, v = (vectors(sum(counts), 2, 128, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 8, 128, device="cuda").to(getattr(torch, dtype))
    batch = cache.extend([*seqs, cache.new()], counts)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    sinks = some_sinks(8, "cuda")
    for softcap, window, own in (
        (None, None, None),
        (3.0, None, None),
        (None, 200, None),
        (None, None, sinks),
        (None, 200, sinks),
    ):
        options = {"scale": 128**-0.5, "softcap": softcap, "sliding_window": window, "sink_logits": own}
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
        for given in (batch, host):
            with attention.poisoned():
                found = cuda_prefill.prefill(store, q, k, v, given, **options)  # type: ignore[arg-type]
            assert relative_error(found, expected) < 2e-3, (softcap, window, own is not None)


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("window", [1, 100, 257, 1000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["saw-int4", "kvant-2", "kivi-k2v2"])
def test_prefill_with_a_sliding_window(
    name: str, dim: int, dtype: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention's window over histories longer and shorter than it, and over new tokens in pieces, with and without the model's
    sinks."""
    layout = make_layout(name, 2, dim)
    if (reason := cuda_prefill.refuse(layout, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", max(400, 2 * window))
    monkeypatch.setattr(cuda_prefill, "_masked", lambda *args: pytest.fail("scores were held"))
    cache, seqs = filled(name, 2, 4, dim, dtype, [1, 63, 700, 1300], spare=20)
    store, counts = cache.stores[0], [3, 1, 600, 60, 5]
    k, v = (vectors(sum(counts), 2, dim, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 8, dim, device="cuda").to(getattr(torch, dtype))
    batch = cache.extend([*seqs, cache.new()], counts)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    for sinks in (None, some_sinks(8, "cuda")):
        options = {"scale": dim**-0.5, "sliding_window": window, "sink_logits": sinks}
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
        with attention.poisoned():
            found = cuda_prefill.prefill(store, q, k, v, host, **options)  # type: ignore[arg-type]
        assert relative_error(found, expected) < 2e-3, sinks is not None


@gpu
@needs_gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_torchs_flash_attention_has_windows(dim: int) -> None:
    """Sequences of more keys than rows, and of as many; a window of one, inside, and beyond all."""
    rows, tokens = (0, 1, 40, 300), (0, 500, 539, 1100)
    bounds = flash.Bounds(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (rows, tokens)), 260, 561)
    q = torch.randn(300, 8, dim, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1100, 2, dim, device="cuda", dtype=torch.float16) for _ in range(2))
    for window in (1, 33, 128, 2000):
        out, lse = flash.attend(q, k, v, bounds, dim**-0.5, True, None, window)
        for b in range(3):
            mine, theirs = (slice(*x[b : b + 2]) for x in (rows, tokens))
            part = attend_plain(
                q[mine].double().unflatten(1, (2, 4)).permute(1, 2, 0, 3),
                k[theirs].double(),
                v[theirs].double(),
                dim**-0.5,
                None,
                window,
                (tokens[b + 1] - tokens[b]) - (rows[b + 1] - rows[b]),
                None,
            )
            expected = part.out.permute(2, 0, 1, 3).flatten(1, 2)
            assert relative_error(out[mine], expected) < 2e-3, (window, b)
            torch.testing.assert_close(
                lse[mine].double(), part.lse[..., 0].permute(2, 0, 1).flatten(1, 2), rtol=1e-3, atol=1e-3
            )


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("room", [3000, 9000, 1 << 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["int4", "oscar", "kvant-2", "kivi-k2v2"])
def test_cudnn_attends_to_long_histories(
    name: str, dim: int, dtype: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN over the first tokens of long histories, FlashAttention-2 over the rest, merged: in one call for neighbours of like
    lengths, beside sequences that FlashAttention-2 serves alone; with room for all, for some, and not for the longest."""
    reason = flash.refuse_cudnn(torch.device("cuda"), dim)
    if reason is not None:
        pytest.skip(reason)
    for constant, n in {"JOINED_TOKENS": room, "UNMASKED_TOKENS": 1024, "UNMASKED_TILES": 8}.items():
        monkeypatch.setattr(cuda_prefill, constant, n)
    cache, seqs = filled(name, 2, 4, dim, dtype, [1100, 1024, 700, 4500, 2000], spare=20)
    store, counts = cache.stores[0], [130, 130, 50, 300, 0]
    k, v = (vectors(sum(counts), 2, dim, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 8, dim, device="cuda").to(getattr(torch, dtype))
    batch = cache.extend(seqs, counts)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    calls = recorded_calls(store)
    expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=dim**-0.5)
    with attention.poisoned():
        found = cuda_prefill.prefill(store, q, k, v, host, scale=dim**-0.5)
    assert relative_error(found, expected) < 2e-3
    longest = {3000: [(1, 384, 2816), (1, 384, 1664)], 9000: [(1, 384, 4096)], 1 << 16: [(1, 384, 4096)]}[room]
    assert [shape for shape in calls if len(shape) == 3] == [(2, 256, 1024), *longest]
    before = len(calls)
    monkeypatch.setattr(cuda_prefill, "UNMASKED_TOKENS", 1 << 30)  # and without cuDNN
    with attention.poisoned():
        alone = cuda_prefill.prefill(store, q, k, v, host, scale=dim**-0.5)
    assert all(len(shape) == 2 for shape in calls[before:]) and relative_error(alone, expected) < 2e-3
    assert relative_error(found, alone.double()) < (4e-3 if dtype == "bfloat16" else 1e-3)


def recorded_calls(store: LayerStore) -> list[tuple[int | str, ...]]:
    """The shapes that cuDNN's attention is called with (sequences, rows, tokens), with "causal" behind where it has that mask, and those
    of FlashAttention-2 (rows, tokens)."""
    calls = list[tuple[int | str, ...]]()

    def cudnn(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((len(q), q.shape[1], k.shape[1], *(["causal"] if causal else [])))
        return flash.attend_cudnn(q, k, v, scale, causal)

    def varlen(q: torch.Tensor, k: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((len(q), len(k)))
        return flash.attend(q, k, *args)

    store.flash = flash.Flash(varlen, torch.float16, fixed_length=flash.FixedLength(cudnn, flash.refuse_cudnn))
    return calls


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["saw-int4", "oscar", "kvant-2", "full"])
@pytest.mark.parametrize(
    ("lengths", "counts", "expected"),
    [  # exactly at a length that is attended to without a mask; new tokens that are padded, and that are not
        ([1024, 1024], [130, 130], [(2, 256, 256, "causal"), (2, 256, 1024)]),
        ([1024, 1024], [256, 256], [(2, 256, 256, "causal"), (2, 256, 1024)]),
        ([1024, 1152], [130, 130], [(2, 256, 256, "causal"), (1, 256, 1024), (1, 256, 1152)]),
        # one without a history, one without new tokens, one with other new tokens
        ([1024, 0, 1024], [130, 130, 130], [(3, 256, 256, "causal"), (1, 256, 1024), (1, 256, 1024)]),
        ([2000, 1024, 1024], [0, 130, 130], [(2, 256, 256, "causal"), (2, 256, 1024)]),
        ([1024, 1024, 2048], [130, 130, 300], [(560, 560), (2, 256, 1024), (1, 384, 2048)]),
        ([1024, 0], [130, 3], [(133, 133), (1, 256, 1024)]),
        # just above: what is left of the history is unpacked with the new tokens
        ([1024, 1025], [130, 130], [(260, 261), (2, 256, 1024)]),
        # longer than the workspace
        ([6144], [130], [(1, 256, 4608), (1, 256, 1536), (1, 256, 256, "causal")]),
    ],
)
def test_new_tokens_attend_to_themselves_where_no_history_is_left(
    lengths: list[int],
    counts: list[int],
    expected: list[tuple[int | str, ...]],
    name: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By cuDNN's causal attention with as many new tokens of every sequence, by FlashAttention-2 otherwise; merged with the histories."""
    reason = flash.refuse_cudnn(torch.device("cuda"), 128)
    if reason is not None:
        pytest.skip(reason)
    for constant, n in {"JOINED_TOKENS": 4700, "UNMASKED_TOKENS": 1024, "UNMASKED_TILES": 8}.items():
        monkeypatch.setattr(cuda_prefill, constant, n)
    cache, seqs = filled(name, 2, 4, 128, dtype, [n for n in lengths if n], spare=20)
    for at in (i for i, n in enumerate(lengths) if not n):
        seqs.insert(at, cache.new())
    store, calls = cache.stores[0], recorded_calls(cache.stores[0])
    k, v = (vectors(sum(counts), 2, 128, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    q = torch.randn(sum(counts), 10, 128, device="cuda").to(getattr(torch, dtype))[:, 1:9]  # with a stride
    batch = cache.extend(seqs, counts)
    host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
    reference_out = reference.prefill(store, q.double(), k.double(), v.double(), batch, scale=128**-0.5)
    with attention.poisoned():
        found = cuda_prefill.prefill(store, q, k, v, host, scale=128**-0.5)
    limit = 5e-3 if name == "full" and dtype == "bfloat16" else 2e-3  # attention in bfloat16
    assert calls == expected and relative_error(found, reference_out) < limit


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_cudnns_attention_has_a_causal_mask(dim: int, dtype: torch.dtype) -> None:
    """Of sequences with padding behind their rows, which no row before it sees; log-sum-exps are natural logarithms."""
    reason = flash.refuse_cudnn(torch.device("cuda"), dim)
    if reason is not None:
        pytest.skip(reason)
    q = torch.randn(3, 256, 8, dim, device="cuda").to(dtype)
    k, v = (torch.randn(3, 256, 2, dim, device="cuda").to(dtype) for _ in range(2))
    for x in (q, k, v):
        x[:, 200:] = 0.0
    out, lse = flash.attend_cudnn(q, k, v, dim**-0.5, True)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    for b in range(3):
        heads = q[b, :200].double().unflatten(1, (2, 4)).permute(1, 2, 0, 3)
        part = attend_plain(heads, k[b, :200].double(), v[b, :200].double(), dim**-0.5, None, None, 0, None)
        expected = part.out.permute(2, 0, 1, 3).flatten(1, 2)
        assert relative_error(out[b, :200], expected) < (5e-3 if dtype == torch.bfloat16 else 2e-3)
        torch.testing.assert_close(
            lse[b, :200].double(), part.lse[..., 0].permute(2, 0, 1).flatten(1, 2), rtol=1e-3, atol=1e-3
        )


@gpu
@needs_gpu
@pytest.mark.parametrize("types", list(itertools.product(["bfloat16", "float16"], repeat=2)))
@pytest.mark.parametrize(("sequences", "rows", "padded"), [(1, 1, 1), (4, 512, 512), (3, 130, 256)])
def test_rows_are_converted_and_padded(sequences: int, rows: int, padded: int, types: tuple[str, str]) -> None:
    """As torch converts them, bit by bit; queries with a stride; what float16 does not hold is infinite."""
    given, wanted = (getattr(torch, name) for name in types)
    xs = [torch.randn(sequences * rows, heads, 128, device="cuda").mul(1e3).to(given) for heads in (34, 8, 8)]
    xs[0][0, 3, 5], xs[0][0, 3, 6] = 65536.0, 1e-7
    xs[0] = xs[0][:, 2:]
    with attention.poisoned():
        found = convert_rows(xs, wanted, rows, padded)
    for x, y in zip(xs, found, strict=True):
        assert y.shape == (sequences, padded, *x.shape[1:]) and y.dtype == wanted and y.is_contiguous()
        assert torch.equal(y[:, :rows], x.to(wanted).unflatten(0, (sequences, rows))) and not y[:, rows:].any()


@gpu
@needs_gpu
@pytest.mark.parametrize("types", list(itertools.product(["bfloat16", "float16"], repeat=2)))
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("both", [False, True])
def test_parts_of_attention_are_merged(dim: int, types: tuple[str, str], both: bool) -> None:
    """By their log-sum-exps, which may be far apart; parts are strided as cuDNN leaves them, and FlashAttention-2 or cuDNN."""
    sequences, rows, heads = 3, 37, 6
    in_type, out_type = (getattr(torch, name) for name in types)

    def padded() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.randn(sequences, heads, rows + 27, dim, device="cuda").to(in_type).transpose(1, 2)[:, :rows]
        return out, torch.randn(sequences, heads, rows + 27, device="cuda").transpose(1, 2)[:, :rows] * 30

    a, lse_a = padded()
    b, lse_b = padded()
    if not both:
        b = torch.randn(sequences, rows, heads, dim, device="cuda").to(in_type)
        lse_b = (torch.randn(heads, sequences * rows, device="cuda").transpose(0, 1) * 30).unflatten(0, (-1, rows))
    with attention.poisoned():
        out = torch.empty(sequences * rows, heads, dim, dtype=out_type, device="cuda")
        merge_parts(out, a, lse_a, b, lse_b)
    w = torch.sigmoid(lse_a.double() - lse_b.double())[..., None]
    expected = (w * a.double() + (1 - w) * b.double()).flatten(0, 1)
    tolerance = 2.0**-8 if out_type == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", HISTORIES)
def test_unpack_gives_what_the_reference_reads(name: str, dim: int, dtype: torch.dtype) -> None:
    lengths = [1, 63, 1500, 200, 129]
    if dim == 96 and "group=64" in name:
        pytest.skip("groups of 64 do not divide 96 channels")
    layout = Layout.of(recipes.get(name), 2, dim)
    if (reason := cuda_prefill.refuse(layout, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    cache, seqs = filled(name, 2, 1, dim, "bfloat16", lengths, first=30 if recipes.get(name).wants_rope else 0)
    batch, store = cache.batch(seqs), cache.stores[0]
    counts = [70, 0, 33, 1, 16]
    begins = [sum(counts[:b]) for b in range(len(counts))]
    whole = tuple(unpack.Span(0, n, n, begins[b], counts[b]) for b, n in enumerate(lengths))
    parts = tuple(unpack.Span(n // 3, n - n // 5, n) for n in lengths)
    new = vectors(sum(counts), 2, dim, "cuda", 0.4).bfloat16()
    for stream in unpack.STREAMS:
        expected = reference.restored(store, stream, batch)
        for spans in (whole, parts):
            with attention.poisoned():
                found = unpack.unpack(store, stream, batch, spans, new, dtype)
            rows = torch.cat(
                [
                    part
                    for b, span in enumerate(spans)
                    for part in (
                        expected[b, span.first : span.last],
                        new[span.new_first : span.new_first + span.new].float(),
                    )
                ]
            )
            assert relative_error(found.float(), rows) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
