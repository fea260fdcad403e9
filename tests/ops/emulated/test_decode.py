"""The text of decode, run on a CPU, against the reference on the same bytes: float64, poisoned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvant.bench import attention
from kvant.bench.synthetic import vectors
from kvant.ops import reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import decode as cuda_decode
from tests.conftest import relative_error
from tests.needs import needs_compiler
from tests.ops import emulated
from tests.ops.cuda.decode_cases import (
    FP8_WINDOWS,
    HALVED,
    LEVELS,
    RESIDUAL,
    ROTATED,
    ROTATED_BY_DECODE,
    SCALES,
    SINK_LOGITS,
    SPACES,
)
from tests.ops.cuda.decode_checks import check_outputs, check_sink_logits
from tests.ops.cuda.filling import widened
from tests.ops.emulated.checks import filled
from tests.ops.scores import log_sum_exp

pytestmark = needs_compiler


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("saw-int4", 4, 64, {}),
        ("quarot-int2-win:sink=5,recent=70", 5, 64, {}),
        ("oscar:sink=3,recent=20", 2, 64, {"sliding_window": 150}),
        ("kvant-2:rope=post", 4, 64, {}),
        *FP8_WINDOWS,
        *ROTATED,
        ("kvant-4-fast", 9, 64, {"softcap": 5.0}),
        ("int3", 1, 64, {}),
        *SCALES,
        *RESIDUAL,
        *LEVELS,
        *SPACES,
        *HALVED,
        ("vecinfer-2", 4, 64, {}),
        ("vecinfer-4", 9, 64, {"softcap": 5.0}),
        ("million-1.5:bits=8,books=head", 2, 128, {"sliding_window": 150}),
        ("million-2:k.bits=10,v.bits=9", 3, 96, {}),
        ("vecinfer-3", 4, 64, {}),
        ("vecinfer-2:dim=2,bits=4", 4, 128, {}),
        ("vecinfer-2:dim=2,k.bits=3,v.bits=3", 3, 64, {}),
        ("vecinfer-2:dim=4,bits=6", 9, 64, {"softcap": 5.0}),
        ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 4, 64, {"first": 30}),
        ("million-2:rope=block,rope_block=100", 9, 128, {"softcap": 5.0}),
    ],
)
def test_decode(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    options = dict(options)
    first, rotated = (int(options.pop(key, 0)) for key in ("first", "rotated"))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 300], first=first, rotated=rotated)
    check_outputs(cache, seqs, group, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


@pytest.mark.parametrize("lengths", [[900, 900, 880], [900, 130, 500]])  # about equal, or not
@pytest.mark.parametrize("blocks", [4, 7, 13])  # for six (sequence, head tile)s: two of them a CTA, one, or half of one
@pytest.mark.parametrize("inside", [False, True])
def test_ctas_take_whole_tiles_where_sequences_are_about_equal(
    inside: bool, blocks: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    name, tuned = "oscar:sink=3,recent=20", ()
    if inside:  # heads first
        name, tuned = "kvant-2:rope_block=64,sink=4,recent=50", ROTATED_BY_DECODE
    cache, seqs = filled(name, 2, 4, 64, lengths)
    q, batch = torch.randn(len(seqs), 8, 64).bfloat16(), cache.batch(seqs)
    expected = reference.decode(cache.stores[0], q.double(), batch, scale=0.125)
    with attention.poisoned():
        found, _ = cuda_decode.decode_with_lse(cache.stores[0], q, batch, scale=0.125, tuned=tuned)
    assert relative_error(found, expected) < 2e-3


# Scores that move the reference of the exponents up again and again; scores that are all but equal, whose sums of P would become too large; and some that
# come with a window, several queries of a sequence or a soft cap.
@pytest.mark.few(4)
@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(
    ("name", "group", "dim", "lengths", "options"),
    [
        ("saw-int4-kmeans:sink=2,recent=5", 4, 128, [1, 63, 500], {"scale": 1.5}),
        ("saw-int4-kmeans", 1, 64, [3300], {"scale": 1e-3, "tuned": (("WARPS", 1),)}),
        ("saw-int4-kmeans:k.centroids=30,v.centroids=70", 7, 64, [1, 63, 500], {"scale": 0.5, "softcap": 5.0}),
        ("saw-int4-kmeans-rot:centroids=100,group=32", 3, 128, [300], {"scale": 0.3, "sliding_window": 150}),
        ("saw-int4-kmeans:centroids=40", 16, 64, [300], {"scale": 1.0, "tuned": (("CENTROID_SUMS", 1),)}),
        ("saw-int4-kmeans", 4, 128, [300], {"scale": 1.0, "tuned": (("CENTROID_SUMS", 0),)}),
    ],
)
def test_probabilities_are_summed_by_centroid(
    name: str,
    group: int,
    dim: int,
    lengths: list[int],
    options: dict[str, Any],
    low_batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", 2)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    cache, seqs = filled(name, 2, group, dim, lengths)
    q, batch, store = torch.randn(len(seqs), 2 * group, dim), cache.batch(seqs), cache.stores[0]
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, **options)
    options = {key: value for key, value in options.items() if key != "tuned"}
    assert relative_error(found, reference.decode(store, q.double(), batch, **options)) < 5e-4
    torch.testing.assert_close(lse.double(), log_sum_exp(store, q, batch, **options), rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("tiles", [1, 2])
def test_windows_shorter_than_a_tile(tiles: int) -> None:
    """A chunk of the overlay is one or two tiles of 16 tokens, of which the ring has fewer: no row of another place is read."""
    cache, seqs = filled("int2:sink=2,recent=5", 2, 4, 64, [3, 20, 300])
    batch, store, q = cache.batch(seqs), cache.stores[0], torch.randn(3, 8, 64).bfloat16()
    expected = reference.decode(store, q.double(), batch, scale=0.125)
    found, _ = cuda_decode.decode_with_lse(store, q, batch, scale=0.125, tuned=(("OVERLAY_TILES", tiles),))
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize("blocks", [5, 200])  # CTAs that take many sequences each, and one for each
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("int2:sink=2,recent=5", [7 * i % 90 for i in range(170)]),
        ("oscar:sink=2,recent=5", [64] * 170),  # equal lengths may be whole tiles
        ("oscar:sink=2,recent=5", [64] * 100 + [3] * 70),
    ],
)
def test_more_sequences_than_lanes(name: str, lengths: list[int], blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    cache, seqs = filled(name, 1, 4, 64, lengths)
    batch, store, q = cache.batch(seqs), cache.stores[0], torch.randn(len(seqs), 4, 64).bfloat16()
    expected = reference.decode(store, q.double(), batch, scale=0.125)
    with attention.poisoned():
        found, _ = cuda_decode.decode_with_lse(store, q, batch, scale=0.125)
    some = torch.tensor(lengths) > 0
    assert relative_error(found[some], expected[some]) < 2e-3


@pytest.mark.few(3)
@pytest.mark.parametrize("blocks", [6, 60])  # so that a CTA has whole (sequence, head)s, or CTAs share them
@pytest.mark.parametrize("low_batch", [False, True])
@pytest.mark.parametrize(("name", "group", "dim", "options"), SINK_LOGITS)
def test_sink_logits(
    name: str,
    group: int,
    dim: int,
    options: dict[str, float],
    low_batch: bool,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sink counts once, however many warps and CTAs share a sequence."""
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 700])
    check_sink_logits(cache, seqs, group, options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype", "limit"),
    [
        ("kvant-2", 4, 128, torch.bfloat16, 2e-3),
        ("kvant-2:rope_block=64", 3, 64, torch.float16, 5e-4),
    ],
)
def test_decode_in_16_bits(name: str, group: int, dim: int, dtype: torch.dtype, limit: float) -> None:
    cache, seqs = filled(name, 2, group, dim, [1, 300], first=1000)
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), 2 * group, dim).to(dtype)
    with attention.poisoned():
        found = cuda_decode.decode(store, q, batch, scale=dim**-0.5)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=dim**-0.5)) < limit


@pytest.mark.slow
def test_a_table_may_be_wider_than_its_sequences_are_long() -> None:
    """As an engine's, for the longest sequence it serves: blocks of positions that are not there are neither rotated nor read."""
    cache, seqs = filled("kvant-2:rope_block=64", 2, 4, 64, [1, 70, 300])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), 8, 64)
    with attention.poisoned():
        found = cuda_decode.decode(store, q, widened(batch, 90), scale=0.125)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=0.125)) < 5e-4


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every launch, as on sm_90: whether it runs beside append, or, where that is no argument, depends on the one before."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    found: list[bool] = []
    launch = emulated.Kernel.launch

    def recording(self: Any, blocks: Any, arguments: Any, dependent: bool = False) -> None:
        found.append(bool(arguments.after_append) if hasattr(arguments, "after_append") else dependent)
        launch(self, blocks, arguments, dependent)

    monkeypatch.setattr(emulated.Kernel, "launch", recording)
    return found


@pytest.mark.parametrize(
    ("name", "late"),
    [("kvant-2", True), ("oscar", True), ("saw-int4", False), ("int4:sink=4", False), ("kivi-k2v2", False)],
)
def test_decode_waits_late_for_append_where_a_window_holds_new_tokens(name: str, late: bool, told: list[bool]) -> None:
    """The second call: matrices that kernels read before they wait are there by then."""
    cache, seqs = filled(name, 2, 4, 64, [3, 300])
    batch, store, q = cache.batch(seqs), cache.stores[0], torch.randn(2, 8, 64).bfloat16()
    assert cuda_append.allocates(store, torch.bfloat16) == (name == "kivi-k2v2")
    expected = reference.decode(store, q.double(), batch, scale=0.125)
    for again in (False, True):
        told.clear()
        out = torch.full_like(q, torch.nan)
        found, _ = cuda_decode.decode_with_lse(store, q, batch, scale=0.125, out=out, after_append=True)
        assert found is out and relative_error(out, expected) < 2e-3
        assert told[0] == (late and again), told


@pytest.mark.parametrize(("recent", "late"), [(3, False), (4, True)])
def test_decode_of_several_queries_waits_for_tokens_that_one_of_them_reads_packed(
    recent: int, late: bool, told: list[bool]
) -> None:
    """Of four new tokens the last query reads the first one packed where three are recent."""
    cache, seqs = filled(f"int4:recent={recent},rollback=3", 2, 4, 64, [5, 300])
    batch, store, q = cache.batch(seqs), cache.stores[0], torch.randn(8, 8, 64).bfloat16()
    for _ in range(2):  # the first call waits for matrices that it makes
        told.clear()
        cuda_decode.decode_with_lse(store, q, batch, scale=0.125, after_append=True)
    assert told == [late]


@pytest.mark.parametrize(
    ("name", "dtype", "memory"),
    [
        ("kvant-2", torch.bfloat16, False),
        ("kvant-2", torch.float32, True),
        ("int4", torch.float32, False),
        *((name, torch.bfloat16, True) for name in ("kivi-k2v2", "vecinfer-2", "saw-int4-kmeans:centroids=4")),
    ],
)
def test_which_appends_take_memory(name: str, dtype: torch.dtype, memory: bool) -> None:
    cache, _ = filled(name, 1, 2, 64, [3])
    assert cuda_append.allocates(cache.stores[0], dtype) == memory


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["kvant-2", "oscar"])
def test_a_launch_that_depends_on_the_one_before_comes_right_after_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeroes for counters may be a launch of their own, while a graph is captured."""
    cache, seqs = filled(name, 2, 4, 64, [70])
    said: list[str] = []
    counters, launch = cuda_decode.counters, emulated.Kernel.launch
    monkeypatch.setattr(cuda_decode, "counters", lambda *args: said.append("counters") or counters(*args))
    monkeypatch.setattr(emulated.Kernel, "launch", lambda *args: said.append("launch") or launch(*args))
    cuda_decode.decode(cache.stores[0], torch.randn(1, 8, 64), cache.batch(seqs), scale=0.1)
    assert said == ["counters", *["launch"] * 3]  # of queries, attention and outputs


@pytest.mark.parametrize("copies", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_scores_of_minus_zero_are_scores(copies: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero vectors have a scale of zero in a table of levels. Where all scores of a warp's first page are -0.0, its weights still
    count as much as those of later pages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: copies)
    monkeypatch.setattr(emulated.Kernel, "blocks", 1)
    heads, dim, tokens = 2, 64, 256
    for seed in range(4):
        torch.manual_seed(seed)
        cache, _ = filled("turboquant-4", heads, 1, dim, [], spare=4)
        store, seq = cache.stores[0], cache.new()
        key, value = (vectors(tokens, heads, dim, "cpu", shift).bfloat16() for shift in (0.0, 0.4))
        key[:64] = value[:64] = 0
        reference.append(store, key, value, cache.extend([seq], [tokens]), None)
        query, batch = 3 * torch.randn(1, heads, dim).bfloat16(), cache.batch([seq])
        expected = reference.decode(store, query.double(), batch, scale=dim**-0.5)
        found, _ = cuda_decode.decode_with_lse(store, query, batch, scale=dim**-0.5, tuned=(("WARPS", 1),))
        for head in range(heads):
            assert relative_error(found[0, head].double(), expected[0, head]) < 5e-3
