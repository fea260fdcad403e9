"""The kernel for pages of 16-bit numbers against the reference on the same bytes: its text on a CPU, by emulation, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvant.bench import attention
from kvant.cache import PagedCache, Sequence
from kvant.ops import OPS, choose, explain, flash, reference
from kvant.ops.cuda import append_full, full, nvrtc
from kvant.ops.cuda import prefill as cuda_prefill
from tests.conftest import make_layout, relative_error
from tests.needs import gpu, needs_compiler, needs_gpu, skip_without_nvrtc
from tests.ops import emulated
from tests.ops.cuda import filling
from tests.ops.cuda.decode_cases import LENGTHS
from tests.ops.plain_flash import plain
from tests.ops.scores import head_errors, log_sum_exp, some_sinks, with_sinks

KINDS = [("bfloat16", 2e-3), ("float16", 5e-4)]  # an output in bfloat16 is itself off by up to 1.6e-3
SHAPES = [
    (1, 128),
    (2, 64),
    (3, 96),
    (4, 256),
    (4, 128),
    (5, 64),
    (8, 128),
    (12, 96),
    (16, 64),
    (7, 192),
    (40, 64),
    (3, 32),
]
OPTIONS = [{"softcap": 5.0}, {"sliding_window": 100}, {"softcap": 30.0, "sliding_window": 300}, {"sliding_window": 1}]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled for and run on this machine."""
    monkeypatch.setattr(full, "shared_memory", lambda device: emulated.H200)
    with emulated.on_this_machine(monkeypatch, full._kernel, full._plan, append_full._kernel):
        yield


def check(
    cache: PagedCache,
    seqs: list[Sequence],
    group: int,
    limit: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> None:
    store, batch, layout = cache.stores[0], cache.batch(seqs), cache.layout
    q = torch.randn(len(seqs), layout.heads * group, layout.head_dim).to(
        store.pages.device, getattr(torch, layout.dtype)
    )
    options = {"scale": layout.head_dim**-0.5, "softcap": softcap, "sliding_window": sliding_window}
    with attention.poisoned():
        found, lse = full.decode_with_lse(store, q, batch, **options)  # type: ignore[arg-type]
    assert found.dtype == q.dtype
    expected = reference.decode(store, q.double(), batch, **options)  # type: ignore[arg-type]
    assert relative_error(found, expected) < limit
    if (
        q.dtype == torch.bfloat16
    ):  # the output's rounding hides all that is smaller: it is the nearest number nearly always
        assert float((found != expected.to(found.dtype)).float().mean()) < 0.02
    lse_expected = log_sum_exp(store, q, batch, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(lse.double(), lse_expected, rtol=1e-4, atol=5e-4)


def filled(
    group: int, dim: int, dtype: str, lengths: list[int], page: int | None = None
) -> tuple[PagedCache, list[Sequence]]:
    torch.manual_seed(0)
    return filling.filled("full", 2, group, dim, dtype, lengths, page, device="cpu")


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_every_shape(group: int, dim: int) -> None:
    for dtype, limit in KINDS:
        check(*filled(group, dim, dtype, [1, 63, 300]), group, limit)


@needs_compiler
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("group", "dim", "dtype"), [(7, 192, "float16"), (3, 96, "bfloat16")])
def test_bulk_copies_wait_for_loads(group: int, dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that copies in bulk (sm_90): the emulator stops where a stage is copied to whose loads a lane has not fenced."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    check(*filled(group, dim, dtype, [1, 300]), group, dict(KINDS)[dtype])


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("options", OPTIONS)
def test_soft_cap_and_sliding_window(options: dict[str, float]) -> None:
    for dtype, limit in KINDS:
        check(*filled(4, 64, dtype, [1, 64, 130, 333]), 4, limit, **options)  # type: ignore[arg-type]


def check_sinks(cache: PagedCache, seqs: list[Sequence], group: int, limit: float, **options: float) -> None:
    """Against a float64 softmax with one more logit."""
    store, batch, layout = cache.stores[0], cache.batch(seqs), cache.layout
    device, query_heads = store.pages.device, layout.heads * group
    q = torch.randn(len(seqs), query_heads, layout.head_dim).to(device, getattr(torch, layout.dtype))
    sinks, settings = some_sinks(query_heads, device), {"scale": layout.head_dim**-0.5, **options}
    with attention.poisoned():
        found, lse = full.decode_with_lse(store, q, batch, sink_logits=sinks, **settings)  # type: ignore[arg-type]
    expected, sums = with_sinks(store, q, batch, sinks, **settings)  # type: ignore[arg-type]
    assert relative_error(found, expected) < limit
    assert max(head_errors(found, expected)) < 2 * limit
    torch.testing.assert_close(lse.double(), sums, rtol=1e-4, atol=5e-4)


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("blocks", [6, 60])  # so that a CTA has whole (sequence, head)s, or CTAs share them
@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_sink_logits(options: dict[str, float], blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    for dtype, limit in KINDS:
        check_sinks(*filled(8, 64, dtype, [1, 64, 700]), 8, limit, **options)


@gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "limit"), KINDS)
@pytest.mark.parametrize("options", [{}, *OPTIONS])
@pytest.mark.parametrize(("group", "dim"), [(8, 64), (4, 128), (1, 256)])
def test_sink_logits_on_a_gpu(group: int, dim: int, options: dict[str, float], dtype: str, limit: float) -> None:
    for lengths in ([1, 63, 700], [20000, 3], list(range(1, 400, 9))):
        cache, seqs = filling.filled("full", 2, group, dim, dtype, lengths)
        check_sinks(cache, seqs, group, limit, **options)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("page", [16, 32, 128])
def test_other_pages(page: int) -> None:
    check(*filled(2, 64, "bfloat16", [17, 300], page), 2, 2e-3, sliding_window=77)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_work_is_cut_anywhere(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that have several (sequence, head)s, blocks that share one, and (sequence, head)s that are cut into equal parts."""
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    for lengths in ([900, 5, 400, 17], [2100]):
        check(*filled(4, 64, "bfloat16", lengths), 4, 2e-3)


@needs_compiler
@pytest.mark.usefixtures("device")
def test_counters_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seqs = filled(2, 64, "float16", [700])
    zeros = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(full, "counters", lambda device, count: zeros[:count])
    for _ in range(2):
        check(cache, seqs, 2, 5e-4)
    assert not bool(zeros.any())


@needs_compiler
@pytest.mark.usefixtures("device")
def test_sequences_without_tokens_and_tables_that_are_wider() -> None:
    cache, seqs = filled(3, 64, "bfloat16", [40, 200])
    batch, store = cache.batch(seqs), cache.stores[0]
    wide = filling.widened(batch, 90).block_table
    lengths = torch.tensor([0, 200])
    q = torch.randn(2, 6, 64).bfloat16()
    with attention.poisoned():
        found, lse = full.decode_with_lse(store, q, batch._replace(block_table=wide, seq_lens=lengths), scale=0.1)
    assert bool((found[0] == 0).all()) and bool(lse[0].isneginf().all())
    assert relative_error(found[1:], reference.decode(store, q.double(), batch, scale=0.1)[1:]) < 2e-3
    nothing = batch._replace(block_table=wide[:0], seq_lens=lengths[:0])
    assert full.decode(store, q[:0], nothing, scale=0.1).shape == (0, 6, 64)


@needs_compiler
@pytest.mark.usefixtures("device")
def test_large_scores_and_one_token_that_has_it_all() -> None:
    """The reference of the softmax is set anew in the middle of a sequence."""
    for dtype, limit in KINDS:
        cache, seqs = filled(4, 64, dtype, [1])
        seq = cache.new()
        k, v = torch.randn(2, 100, 2, 64).to(getattr(torch, dtype))
        k *= torch.linspace(0.1, 8, 100)[:, None, None].to(k.dtype)  # scores grow with the position
        reference.append(cache.stores[0], k, v, cache.extend([seq], [100]))
        check(cache, [*seqs, seq], 4, limit)


@needs_compiler
@pytest.mark.usefixtures("device")
def test_queries_are_of_the_pages_type() -> None:
    cache, seqs = filled(2, 64, "bfloat16", [5])
    with pytest.raises(ValueError, match="queries must be bfloat16, got torch.float16"):
        full.decode(cache.stores[0], torch.randn(1, 4, 64).half(), cache.batch(seqs), scale=0.1)


def check_append(where: str, dtype: str, dim: int, page: int | None) -> None:
    """The bytes that the reference writes, and no others: padding is not written."""
    caches = []
    for run in (append_full.append, reference.append):
        torch.manual_seed(0)
        cache, seqs = filling.filled("full", 3, 1, dim, dtype, [1, 63, 300], page, device=where, spare=16)
        wide = torch.randn(2, 80, 4, dim, device=where).to(getattr(torch, dtype))  # rows with a stride
        batch = cache.extend(seqs, [70, 1, 9])
        slots = batch.slot_mapping.clone()
        slots[[3, 79]] = -1
        run(cache.stores[0], *wide[:, :, 1:], batch._replace(slot_mapping=slots))
        caches.append(cache)
    append_full.append(caches[0].stores[0], *wide[:, :0, 1:], batch._replace(slot_mapping=slots[:0]))  # nothing
    assert torch.equal(*(cache.stores[0].pages for cache in caches))


@needs_compiler
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("dtype", "dim", "page"), [("bfloat16", 64, None), ("float16", 96, 16), ("bfloat16", 256, 32)])
def test_append(dtype: str, dim: int, page: int | None) -> None:
    check_append("cpu", dtype, dim, page)


@gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "dim", "page"), [("bfloat16", 64, None), ("float16", 96, 16), ("bfloat16", 256, 32)])
def test_append_on_a_gpu(dtype: str, dim: int, page: int | None) -> None:
    check_append("cuda", dtype, dim, page)


def check_prefill(where: str, dtype: str, dim: int, page: int | None, limit: float) -> None:
    cache, seqs = filling.filled("full", 2, 2, dim, dtype, [1, 63, 300], page, device=where, spare=16)
    store, counts = cache.stores[0], [1, 0, 140, 5]
    if where == "cpu":
        store.flash = flash.Flash(plain, torch.float16)
    k, v = torch.randn(2, sum(counts), 2, dim, device=where).to(getattr(torch, dtype))
    q = torch.randn(sum(counts), 4, dim, device=where).to(getattr(torch, dtype))
    batch = cache.extend([*seqs, cache.new()], counts)
    for window, sinks in ((None, None), (90, None), (35, some_sinks(4, where)), (1, None)):
        options = {"scale": dim**-0.5, "sliding_window": window, "sink_logits": sinks}
        with attention.poisoned():
            found = cuda_prefill.prefill(store, q, k, v, batch, **options)  # type: ignore[arg-type]
        expected = reference.prefill(store, q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
        assert relative_error(found, expected) < limit, window


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("room", [200, 1 << 16])
@pytest.mark.parametrize(("dtype", "dim", "page"), [("bfloat16", 64, None), ("float16", 96, 16)])
def test_prefill(dtype: str, dim: int, page: int | None, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are attended to as they are, not in another type."""
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", room)
    monkeypatch.setattr(cuda_prefill, "_masked", lambda *args: pytest.fail("scores were held"))
    check_prefill("cpu", dtype, dim, page, 2e-3 if dtype == "bfloat16" else 3e-4)


@gpu
@needs_gpu
@pytest.mark.parametrize("room", [200, 1 << 16])
@pytest.mark.parametrize(("dtype", "dim", "page"), [("bfloat16", 64, None), ("float16", 96, 16), ("bfloat16", 256, 32)])
def test_prefill_on_a_gpu(dtype: str, dim: int, page: int | None, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_prefill, "JOINED_TOKENS", room)
    monkeypatch.setattr(cuda_prefill, "_masked", lambda *args: pytest.fail("scores were held"))
    # FlashAttention multiplies probabilities of 16 bits
    check_prefill("cuda", dtype, dim, page, 5e-3 if dtype == "bfloat16" else 1e-3)


@pytest.mark.parametrize(
    ("name", "dim", "dtype", "reason"),
    [
        ("full", 128, "bfloat16", None),
        ("full", 96, "float16", None),
        ("full", 64, "float32", "it reads keys and values of one 16-bit type, and they are float32"),
        ("full", 80, "bfloat16", "it reads head dims that are multiples of 32 up to 256, and this one is 80"),
        ("full", 512, "bfloat16", "it reads head dims that are multiples of 32 up to 256, and this one is 512"),
        (
            "full:v.dtype=float16",
            64,
            "bfloat16",
            "it reads keys and values of one 16-bit type, and they are bfloat16 and float16",
        ),
        ("full:sink=3", 64, "bfloat16", "it reads pages alone, and some of the keys are in a window"),
        ("int4", 64, "bfloat16", "it reads numbers as they come, and the keys are coded by Affine"),
    ],
)
def test_layouts_are_refused_with_a_reason(name: str, dim: int, dtype: str, reason: str | None) -> None:
    assert full.refuse_layout(make_layout(name, 2, dim, dtype=dtype)) == reason


def test_it_is_offered_on_a_gpu_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout("full", dtype="bfloat16")
    assert full.refuse(layout, torch.device("cpu")) == "it runs on CUDA devices, not on cpu"
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(full, "shared_memory", lambda device: emulated.H200)
    kernels = [choose(op, layout, "cuda") for op in OPS]  # append, decode, prefill
    assert [each.name for each in kernels] == ["cuda-full", "cuda-full", "cuda"]
    assert kernels[0].capturable and kernels[1].capturable
    assert "coded by Raw" in explain("decode", layout, "cuda")[1]["cuda"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert full.refuse(layout, torch.device("cuda")) == "it needs a GPU of compute capability 8.0 or newer"


def test_shared_memory_is_filled() -> None:
    """About 192 KiB of tiles in flight on an H200; what an older GPU has, there."""
    for dim, group, warps, blocks in ((64, 4, 4, 3), (128, 4, 4, 3), (128, 16, 4, 2), (256, 8, 6, 1)):
        made = full.FullPlan(make_layout("full", 8, dim, dtype="bfloat16"), group, False, True, emulated.H200)
        assert (made.warps, made.blocks) == (warps, blocks)
    small = full.FullPlan(make_layout("full", 8, 256, dtype="bfloat16"), 8, False, False, (99 << 10, 100 << 10))
    assert (small.warps, small.blocks) == (3, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(("group", "dim", "dtype"), [(4, 128, "bfloat16"), (9, 96, "float16"), (8, 256, "bfloat16")])
def test_it_compiles(group: int, dim: int, dtype: str) -> None:
    skip_without_nvrtc()
    for arch, bulk in (("sm_80", False), ("sm_90", True)):
        made = full.FullPlan(make_layout("full", 2, dim, dtype=dtype), group, bulk, bulk, emulated.H200)
        nvrtc.compile_text(made.text, arch)


# --- on a GPU -----------------------------------------------------------------------------------------------------------


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype_limit", KINDS)
@pytest.mark.parametrize(("group", "dim"), [*SHAPES, (64, 128)])
def test_every_shape_on_a_gpu(group: int, dim: int, dtype_limit: tuple[str, float]) -> None:
    dtype, limit = dtype_limit
    cache, seqs = filling.filled("full", 2, group, dim, dtype, LENGTHS)
    assert cache.ops["decode"].name == "cuda-full"
    check(cache, seqs, group, limit)
    for options in OPTIONS:
        check(cache, seqs, group, limit, **options)  # type: ignore[arg-type]


@gpu
@needs_gpu
@pytest.mark.parametrize("page", [16, 32, 128])
def test_other_pages_on_a_gpu(page: int) -> None:
    check(*filling.filled("full", 2, 4, 128, "bfloat16", LENGTHS, page), 4, 2e-3, sliding_window=777)


@gpu
@needs_gpu
def test_long_and_many_sequences_on_a_gpu() -> None:
    for lengths in ([40_000, 3], [40_000], list(range(1, 500, 3))):
        check(*filling.filled("full", 2, 4, 128, "bfloat16", lengths), 4, 2e-3)


@gpu
@needs_gpu
def test_a_cuda_graph_follows_its_inputs() -> None:
    cache, seqs = filling.filled("full", 2, 4, 128, "bfloat16", [900, 400])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    full.decode(store, q, batch, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = full.decode(store, q, batch, scale=0.1)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        batch.seq_lens.sub_(3)
        graph.replay()
        assert relative_error(out, reference.decode(store, q.double(), batch, scale=0.1)) < 2e-3
