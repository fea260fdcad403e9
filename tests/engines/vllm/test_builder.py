"""A step's tokens are cut into parts of which each is written once, in the order that windows need."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.layout import Layout
from kvant.ops.types import empty_overlay, queries_per_sequence
from kvant.recipes import get
from kvant.serving.step import decode_queries
from tests.engines.vllm.engines import needs_vllm
from tests.ops import emulated

PAGE = 64


def builder(recipe: str) -> Any:
    """One that has never seen vLLM's configuration."""
    from kvant.engines.vllm.builder import KvantBuilder
    from kvant.engines.vllm.metrics import MissedSinks

    layout = Layout.of(get(recipe), 1, 16, PAGE, dtype="float32")
    overlays = {name: empty_overlay(layout, name, 2 * 9, "cpu").unflatten(0, (2, 9)) for name in layout.recipe.streams}
    ring = any(stream.window.ring for stream in layout.recipe.streams.values())
    has_overlay = any(overlay.shape[2] for overlay in overlays.values())
    made = object.__new__(KvantBuilder)
    made.device, made.graphs, made.overlay, made.split = torch.device("cpu"), False, None, 1
    made.layers = SimpleNamespace(
        layout=layout, overlays=overlays, drafts=0, has_overlay=has_overlay, ring=ring, sinks={}, sliding_window=None
    )
    made.missed = MissedSinks()
    made.layers.groupwise = any(stream.groupwise for stream in layout.recipe.streams.values())
    made.layers.room = 0
    made.attention = [SimpleNamespace(kv_cache=torch.empty(2000, 1))]
    return made


def described(before: list[int], counts: list[int]) -> Any:
    """Sequences with so many tokens already and so many new ones, as vLLM describes them."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor([a + b for a, b in zip(before, counts, strict=True)]).int()
    pages = 1 + int(lengths.max()) // PAGE
    table = torch.arange(1, 1 + pages * len(before)).view(len(before), pages).int()
    slots = [
        int(table[b, p // PAGE]) * PAGE + p % PAGE
        for b in range(len(before))
        for p in range(before[b], int(lengths[b]))
    ]
    return SimpleNamespace(
        num_reqs=len(before),
        num_actual_tokens=int(starts[-1]),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        max_seq_len=int(lengths.max()),
        slot_mapping=torch.tensor(slots),
        block_table_tensor=table,
    )


GROUPED = "kivi-k2v2-sink:k.flush=64,v.group=0,shift=false"


@needs_vllm
@pytest.mark.parametrize("recipe", ["saw-int4", "int2:sink=3,recent=20", GROUPED])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_is_written_once(recipe: str, seed: int) -> None:
    draw = random.Random(seed)
    decodes = draw.randrange(3)
    unit = PAGE if recipe == GROUPED else 1  # whole groups: nothing is known of these sequences
    before = [draw.randrange(1, 200) * unit for _ in range(decodes)]
    counts = [1] * decodes
    for _ in range(draw.randrange(1, 5)):  # prefills, some of them with a history
        before.append(draw.choice([0, 0, 1, 2, draw.randrange(1, 200)]) * unit)
        counts.append(draw.randrange(2, 100))
    made, m = builder(recipe), described(before, counts)
    step = made.build(0, m)
    older = [bool(b and c > 1) for b, c in zip(before, counts, strict=True)]
    assert step.decodes == decodes and step.tokens == sum(counts) and step.history == any(older)
    sequence, position = step.batch.positions
    assert position.tolist() == [p for b, c in zip(before, counts, strict=True) for p in range(b, b + c)]
    sink = made.layers.layout.recipe.key.window.sink
    cut = [b for b, c in zip(before, counts, strict=True) if c > 1 and 0 < b < sink]
    if cut and made.layers.ring:  # of prompts that were cut among their sinks, these are written before attention, too
        early = step.appends.pop()
        local, place = early.batch.positions
        assert place.tolist() == [
            p for b, n in zip(cut, early.batch.seq_lens.tolist(), strict=True) for p in range(b, n)
        ]
        assert torch.equal(place, position[early.tokens]) and bool((place < sink).all())
        assert torch.equal(early.batch.slot_mapping, m.slot_mapping[early.tokens])
        assert torch.equal(early.batch.overlay_rows[local], step.batch.overlay_rows[sequence[early.tokens]])
    late = step.last is not None
    assert late == (made.layers.ring and any(older))
    times = torch.zeros(step.tokens, dtype=torch.int64)
    for part in (*step.appends, *([step.last] if late else [])):
        own = torch.arange(step.tokens)[part.tokens]
        meant = part.batch.slot_mapping >= 0
        assert recipe != GROUPED or bool(meant.all())
        times[own[meant]] += 1
        if late:  # windows of prefills that have read their history come last, and those alone
            assert bool((torch.tensor(older)[sequence[own[meant]]] == (part is step.last)).all())
        assert torch.equal(part.batch.slot_mapping[meant], m.slot_mapping[own[meant]])
        local, place = part.batch.positions
        assert torch.equal(place, position[own])
        assert torch.equal(part.batch.overlay_rows[local], step.batch.overlay_rows[sequence[own]])
    assert bool((times == 1).all())
    if sum(counts) > decodes:
        assert step.prefill is not None and step.prefill.seq_lens.tolist() == m.seq_lens[decodes:].tolist()
        assert step.prefill.query_start_loc.diff().tolist() == counts[decodes:]


@needs_vllm
@pytest.mark.parametrize("drafts", [0, 3, 7, 8])
def test_drafts_are_verified_by_decode(drafts: int) -> None:
    """As many queries of every sequence, or a sequence for every query where they differ; then prefills."""
    made = builder("int2:sink=3,recent=20,rollback=8")
    made.layers.drafts = drafts
    made.queries = decode_queries(drafts)
    for counts in ([1, 1], [4, 4, 4], [1, 4, 2], [3, 3, 50], [4, 1, 30, 2], [9, 9]):
        before = [100 + 70 * i for i in range(len(counts))]
        step = made.build(0, described(before, counts))
        limit = drafts + 1 if drafts < 8 else 1
        decodes = next((i for i, count in enumerate(counts) if count > limit), len(counts))
        assert step.decodes == decodes and step.decode_tokens == sum(counts[:decodes])
        assert (step.prefill is None) == (decodes == len(counts))
        batch = step.decoding
        if len(set(counts[:decodes])) > 1:
            ends = [b + i + 1 for b, count in zip(before, counts[:decodes], strict=False) for i in range(count)]
            rows = [i for i, count in enumerate(counts[:decodes]) for _ in range(count)]
        else:
            ends = [b + count for b, count in zip(before, counts[:decodes], strict=False)]
            rows = list(range(decodes))
        assert batch.seq_lens.tolist() == ends
        assert torch.equal(batch.block_table, step.batch.block_table[rows])
        assert torch.equal(batch.overlay_rows, step.batch.overlay_rows[rows])
        if decodes:
            assert queries_per_sequence(torch.empty(step.decode_tokens, 1, 16), batch, made.layers.layout) == (
                counts[0] if len(set(counts[:decodes])) == 1 else 1
            )


@needs_vllm
def test_verify_steps_replay_graphs() -> None:
    """vLLM pads a graph's batch with sequences without tokens. What is not uniform is not captured."""
    from vllm.v1.attention.backend import AttentionCGSupport

    from kvant.engines.vllm.builder import KvantBuilder

    made = on_a_gpu("saw-int4", "cpu")
    made.device, made.queries = torch.device("cpu"), 4
    m = described([100, 200, 0], [4, 4, 0])
    m.num_actual_tokens, m.slot_mapping = 12, torch.cat((m.slot_mapping, torch.full((4,), -1)))
    step = made.build(0, m)
    assert step.tokens == step.decode_tokens == 12 and step.decodes == 3 and step.counts is None
    step = made.build(0, described([100, 200], [4, 3]))
    assert step.tokens == step.decode_tokens == 7 and step.counts is not None

    def supported(drafts: int, capturable: bool = True) -> AttentionCGSupport:
        kernel = SimpleNamespace(capturable=capturable)
        group = SimpleNamespace(ops={"append": kernel, "decode": kernel}, drafts=drafts)
        layer = SimpleNamespace(impl=SimpleNamespace(layers=group))
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"0": layer}))
        return KvantBuilder.get_cudagraph_support(config, None)

    assert supported(0) == supported(8) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert supported(3) == AttentionCGSupport.UNIFORM_BATCH
    assert supported(3, capturable=False) == AttentionCGSupport.NEVER


def on_a_gpu(recipe: str, device: str = "cuda") -> Any:
    """A builder of a GPU, with its overlays on this device."""
    made = builder(recipe)
    made.device, made.graphs, made.tensors = torch.device("cuda"), True, None
    made.layers.overlays = {name: overlay.to(device) for name, overlay in made.layers.overlays.items()}
    made.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=8),
        scheduler_config=SimpleNamespace(max_num_seqs=6, max_num_batched_tokens=300),
        model_config=SimpleNamespace(max_model_len=1000),
    )
    return made


@needs_vllm
@pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("recipe", ["saw-int4", "int2:sink=3,recent=20", GROUPED])
def test_a_step_of_a_gpu_is_one_launch_and_the_same_step(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the emulated kernel: the same batch as on a CPU, at the same addresses in every step."""
    from kvant.engines.vllm import builder as builders
    from kvant.ops.cuda import nvrtc, overlay_step
    from kvant.serving import overlay, step_tensors

    launches: list[int] = []
    launch = emulated.Kernel.launch
    monkeypatch.setattr(emulated.Kernel, "launch", lambda *args: launches.append(1) or launch(*args))
    monkeypatch.setattr(nvrtc, "Kernel", emulated.Kernel)
    monkeypatch.setattr(overlay_step, "THREADS", 64)
    monkeypatch.setattr(overlay_step, "COPY_CTAS", 2)
    monkeypatch.setattr(step_tensors, "fused", lambda device: True)
    on_cpu = torch.device("cpu")
    made_on_cpu = lambda *args, **options: step_tensors.StepTensors(*args[:-1], on_cpu, **options)  # noqa: E731
    monkeypatch.setattr(builders, "StepTensors", made_on_cpu)
    overlay_step._kernel.cache_clear()
    plain = builder(recipe)
    steps = [described([0, 0, 0], [70, 5, 64]), described([70, 5, 64], [1, 1, 1]), described([71, 6, 65], [1, 1, 1])]
    wanted = [plain.build(0, m) for m in steps]
    monkeypatch.setattr(overlay, "fused", lambda device: True)
    made = on_a_gpu(recipe, "cpu")
    addresses = set()
    for m, expected in zip(steps, wanted, strict=True):
        launches.clear()
        step = made.build(0, m)
        assert len(launches) == 1
        assert step.decodes == expected.decodes and step.tokens == expected.tokens
        for name, a, b in zip(step.batch._fields, step.batch, expected.batch, strict=True):
            if name == "block_table":
                pages = -(-m.seq_lens // PAGE)
                a, b = (torch.cat([row[:n] for row, n in zip(x, pages.tolist(), strict=True)]) for x in (a, b))
            assert torch.equal(a["key"], b["key"]) if name == "ring_start" else torch.equal(a, b), name
        addresses.add(tuple(x.data_ptr() for x in step.batch[:-1]))
    assert len(addresses) == 1
    overlay_step._kernel.cache_clear()


@pytest.mark.gpu
@needs_vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["saw-int4", "int2:sink=3,recent=20", GROUPED])
def test_the_metadata_of_a_decode_step_are_at_most_five_launches(recipe: str) -> None:
    from tests.serving.test_overlay_step import captured_nodes

    before = [64, 0, 128, 192] if recipe == GROUPED else [70, 5, 64, 200]  # whole groups: nothing is known of them
    made, m = on_a_gpu(recipe), described(before, [1, 1, 1, 1])
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor"):
        setattr(m, name, getattr(m, name).cuda())
    made.build(0, m)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        made.build(0, m)
    assert 1 <= captured_nodes(graph) <= 5


@needs_vllm
def test_calls_of_decode_in_graphs_share_their_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers' and all graphs': a stretch for each would soon be more than there are."""
    from kvant.ops.cuda import counters
    from kvant.serving.layer_group import LayerGroup

    seen: list[int] = []
    run = SimpleNamespace(run=lambda *args, **options: seen.append(len(counters._SHARED)) or args[1], in_place=False)
    made = object.__new__(LayerGroup)
    made.ops, made.counters = {"decode": run}, None  # type: ignore[dict-item]
    for number, zeros in ((1.0, None), (2.0, torch.zeros(4, dtype=torch.int32))):
        made.counters, out = zeros, torch.zeros(3)
        made.decode(None, torch.full((3,), number), None, out, after_append=True, scale=1.0)  # type: ignore[arg-type]
        assert out.tolist() == [number] * 3
    assert seen == [0, 1] and not counters._SHARED


@needs_vllm
def test_sinks_that_are_missed_are_logged_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY

    from kvant.engines.vllm import metrics
    from kvant.serving.overlay import Missed

    logged: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning_once", lambda text, *args: logged.append(text % args))
    recipe = SimpleNamespace(recipe=get("kvant-2"))
    overlay = SimpleNamespace(missed=Missed(0, 0), sink_rows=5, layout=recipe)
    reported = metrics.MissedSinks()
    names = {field: f"kvant_sinks_{field}_total" for field in Missed._fields}
    before = {field: REGISTRY.get_sample_value(name) for field, name in names.items()}
    for missed in (Missed(0, 0), Missed(2, 0), Missed(3, 1), Missed(3, 1), Missed(3, 4)):
        overlay.missed = missed
        reported.report(overlay)
    assert len(logged) == 2 and "run out of the 5 sink rows of recipe kvant-2" in logged[0] and "packed" in logged[1]
    assert {field: REGISTRY.get_sample_value(name) - before[field] for field, name in names.items()} == {
        "dropped": 3,
        "packed": 4,
    }
