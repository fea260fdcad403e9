"""A step's tokens are cut into parts of which each is written once, in the order that windows need."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.layout import Layout
from kvant.ops.types import empty_overlay
from kvant.recipes import get
from tests.engines.vllm.engines import needs_vllm

PAGE = 64


def builder(recipe: str) -> Any:
    """One that has never seen vLLM's configuration."""
    from kvant.engines.vllm.builder import KvantBuilder

    layout = Layout.of(get(recipe), 1, 16, PAGE, dtype="float32")
    overlays = {name: empty_overlay(layout, name, 2 * 9, "cpu").unflatten(0, (2, 9)) for name in layout.recipe.streams}
    ring = any(stream.window.ring for stream in layout.recipe.streams.values())
    has_overlay = any(overlay.shape[2] for overlay in overlays.values())
    made = object.__new__(KvantBuilder)
    made.device, made.graphs, made.overlay = torch.device("cpu"), False, None
    made.layers = SimpleNamespace(layout=layout, overlays=overlays, drafts=0, has_overlay=has_overlay, ring=ring)
    made.attention = [SimpleNamespace(kv_cache=torch.empty(100, 1))]
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


@needs_vllm
@pytest.mark.parametrize("recipe", ["saw-int4", "int2:sink=3,recent=20"])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_is_written_once(recipe: str, seed: int) -> None:
    draw = random.Random(seed)
    decodes = draw.randrange(3)
    before = [draw.randrange(1, 200) for _ in range(decodes)]
    counts = [1] * decodes
    for _ in range(draw.randrange(1, 5)):  # prefills, some of them with a history
        before.append(draw.choice([0, 0, draw.randrange(1, 200)]))
        counts.append(draw.randrange(2, 100))
    made, m = builder(recipe), described(before, counts)
    step = made.build(0, m)
    older = [bool(b and c > 1) for b, c in zip(before, counts, strict=True)]
    assert step.decodes == decodes and step.tokens == sum(counts) and step.history == any(older)
    sequence, position = step.batch.positions
    assert position.tolist() == [p for b, c in zip(before, counts, strict=True) for p in range(b, b + c)]
    late = step.last is not None
    assert late == (made.layers.ring and any(older))
    times = torch.zeros(step.tokens, dtype=torch.int64)
    for part in (*step.appends, *([step.last] if late else [])):
        own = torch.arange(step.tokens)[part.tokens]
        meant = part.batch.slot_mapping >= 0
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
def test_calls_of_decode_in_graphs_share_their_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers' and all graphs': a stretch for each would soon be more than there are."""
    from kvant.ops.cuda import counters
    from kvant.serving.layer_group import LayerGroup

    seen: list[int] = []
    run = SimpleNamespace(run=lambda *args, **options: seen.append(len(counters._SHARED)) or args[0])
    made = object.__new__(LayerGroup)
    made.ops, made.counters = {"decode": run}, None  # type: ignore[dict-item]
    assert made.decode(1, scale=1.0) == 1
    made.counters = torch.zeros(4, dtype=torch.int32)
    assert made.decode(2, scale=1.0) == 2
    assert seen == [0, 1] and not counters._SHARED
