"""Statistics are those of what attention really sees, whatever the number of excerpts, passes and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvant.calibrate.capture import attending, checked_ropes, gather
from kvant.calibrate.exact_attention import exact_attention
from kvant.calibrate.gatherer import Plan, Running, layer_bytes
from kvant.engines.hf import ModelShape
from kvant.rope import ropes_of
from kvant.stats import LayerStats
from tests.calibrate.synthetic import attend, draw, gather_layer, rope_of
from tests.conftest import dense_attention
from tests.engines.test_hf import BASE, make_model


def tokens_of(count: int) -> torch.Tensor:
    return torch.randint(2, 200, (count,), generator=torch.Generator().manual_seed(11))


class Spy(transformers.DynamicCache):
    """Keeps what a model's layers put into their cache: keys and values after RoPE."""


def reference(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = Spy(config=model.config)
    with torch.no_grad():
        model(ids[None], past_key_values=cache)
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "llama-mha"])
def test_moments_are_those_of_the_models_own_keys_and_values(family: str) -> None:
    model = make_model(family)
    excerpts = [tokens_of(70), tokens_of(33)]
    sink = 5
    plan = Plan(2, 103, max_position=33, sink=sink)
    wanted = [reference(model, excerpt) for excerpt in excerpts]
    found = dict(gather(model, excerpts, plan))
    assert sorted(found) == [0, 1, 2]
    for layer, stats in found.items():
        for which, moments in ((0, stats.keys), (1, stats.values)):
            x = torch.cat([excerpt[layer][which][sink:] for excerpt in wanted]).double()
            assert moments.count == len(x) == 103 - 2 * sink
            torch.testing.assert_close(moments.mean, x.mean(0), rtol=1e-5, atol=1e-6)
            second = torch.einsum("nhd,nhe->hde", x, x) / len(x)
            torch.testing.assert_close(moments.second, second, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(moments.absmax, x.abs().amax(0), rtol=1e-5, atol=1e-6)
            order, wanted_order = moments.sample[0, :, 0].argsort(), x[:, 0, 0].argsort()
            every = x.float().transpose(0, 1)  # all vectors fit into the sample, in any order
            torch.testing.assert_close(moments.sample[:, order], every[:, wanted_order], rtol=1e-5, atol=1e-5)
        probe = stats.probes[0]
        torch.testing.assert_close(probe.keys, wanted[0][layer][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(probe.values, wanted[0][layer][1], rtol=1e-5, atol=1e-5)
        assert stats.sink == sink


def test_queries_are_pooled_over_the_group_and_c_s_is_brute_force() -> None:
    """C_S streamed from the attention outputs equals V^T S^T S V / N formed with the whole S, head by head."""
    heads, groups, dim, sink = 2, 3, 16, 4
    excerpts = []
    for tokens in (40, 23):
        q, k, v = draw(tokens, heads, groups, dim)
        excerpts.append((q, k, v, attend(q, k, v)))
    stats = gather_layer(excerpts, max_position=23, sink=sink)
    total, count = torch.zeros(heads, dim, dim, dtype=torch.float64), 0
    for q, k, v, _ in excerpts:
        tokens = len(k)
        for h in range(heads):
            for g in range(groups):
                scores = (q[:, h, g].double() @ k[:, h].double().T) * dim**-0.5
                scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
                s = scores.softmax(-1)[sink:]
                total[h] += v[:, h].double().T @ s.T @ s @ v[:, h].double()
        count += (tokens - sink) * groups
    torch.testing.assert_close(stats.attended, total / count, rtol=1e-5, atol=1e-6)
    pooled = torch.cat([q[sink:].transpose(1, 2).reshape(-1, heads, dim) for q, *_ in excerpts]).double()
    assert stats.queries.count == len(pooled) == count
    torch.testing.assert_close(stats.queries.second, torch.einsum("nhd,nhe->hde", pooled, pooled) / count)
    assert stats.attended_mean is not None


@pytest.mark.parametrize("sliding_window", [None, 5, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_exact_attention(sliding_window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.calibrate.exact_attention.SCORE_BYTES", 4 * 4 * 21 * 8)  # blocks of 8 queries
    q, k, v = torch.randn(21, 4, 16), torch.randn(21, 2, 16), torch.randn(21, 2, 16)
    found = exact_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), 0.3, sliding_window, softcap)[0].transpose(
        0, 1
    )
    expected = dense_attention(q, k, v, 0.3, softcap, sliding_window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_sliding_layers_and_soft_caps_are_seen() -> None:
    model = make_model("mistral-sliding")
    stats = dict(gather(model, [tokens_of(60)], Plan(1, 60, 60)))
    assert {s.sliding_window for s in stats.values()} == {24}
    config = transformers.Gemma2Config(
        **{**BASE, "sliding_window": 24, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 20.0}
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    stats = dict(gather(model, [tokens_of(60)], Plan(1, 60, 60)))
    assert [s.sliding_window for s in stats.values()] == [24, None, 24]
    assert {s.softcap for s in stats.values()} == {20.0}


def test_the_model_is_left_as_it_was() -> None:
    model = make_model("llama").train()
    model.set_attn_implementation("sdpa")
    ids = tokens_of(20)
    with attending(model):
        assert model.config._attn_implementation == "kvant"
        assert not model.training
    with pytest.raises(IndexError), attending(model):
        model(ids[None] + 10000)
    dict(gather(model, [ids], Plan(1, 20, 20)))
    assert model.training
    assert model.config._attn_implementation == "sdpa"


# --- bounded memory --------------------------------------------------------------------------------------------------


def equal(a: LayerStats, b: LayerStats) -> None:
    for name in ("queries", "keys", "values"):
        for field in ("count", "mean", "second", "absmax", "sample"):
            torch.testing.assert_close(getattr(getattr(a, name), field), getattr(getattr(b, name), field))
    torch.testing.assert_close(a.attended, b.attended)
    for one, other in zip(a.probes, b.probes, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y)


def test_several_passes_see_what_one_pass_sees() -> None:
    model = make_model("gemma3")
    excerpts = [tokens_of(50), tokens_of(41)]
    plan = Plan(2, 91, 400, samples=30)
    calls: list[tuple[str, int, int]] = []
    whole = dict(gather(model, excerpts, plan))
    shape = ModelShape.of(model)
    budget = 3 * layer_bytes(shape, plan, 3)
    parts = dict(gather(model, excerpts, plan, lambda *call: calls.append(call), budget))
    assert list(parts) == list(whole) == list(range(7))
    for layer in whole:
        equal(parts[layer], whole[layer])
    assert calls[-1] == ("measuring", 91 * 3, 91 * 3)  # 7 layers, 3 at a time
    assert len(calls) == 6


def kept_bytes(stats: LayerStats) -> int:
    total = stats.attended.nbytes + (0 if stats.attended_mean is None else stats.attended_mean.nbytes)
    for moments in (stats.queries, stats.keys, stats.values):
        total += sum(t.nbytes for t in (moments.mean, moments.second, moments.absmax, moments.sample))
    return total + sum(x.nbytes for probe in stats.probes for x in probe)


def test_what_is_kept_does_not_grow_with_the_text_and_is_predicted() -> None:
    model = make_model("qwen3")
    shape = ModelShape.of(model)
    sizes = []
    for count in (4, 12):
        plan = Plan(count, count * 40, 300, samples=50, probes=2, probe_tokens=32)
        stats = dict(gather(model, [tokens_of(40)] * count, plan))
        sizes.append(kept_bytes(stats[1]))
        assert sizes[-1] <= layer_bytes(shape, plan, groups=3)
    assert sizes[0] == sizes[1]


def test_the_sample_is_uniform() -> None:
    """Every vector of a stream has the same chance to be kept, whichever batch it came in."""
    hits = torch.zeros(60)
    for seed in range(400):
        running = Running(1, 1, 15, torch.device("cpu"), seed)
        for first, last in ((0, 7), (7, 40), (40, 41), (41, 60)):
            running.add(torch.arange(first, last).float().reshape(-1, 1, 1))
        kept = running.finish().sample[0, :, 0].long()
        assert len(set(kept.tolist())) == 15
        hits[kept] += 1
    expected = 400 * 15 / 60
    assert float((hits - expected).abs().max()) < 5 * (expected * 0.75) ** 0.5  # five standard deviations


# --- positions -------------------------------------------------------------------------------------------------------


def test_moments_cover_the_positions_that_will_be_served() -> None:
    """Rotated to a position of its own, every token counts once; the moments are those of the rotated vectors."""
    heads, groups, dim, tokens, end = 2, 2, 16, 64, 5000
    rope = rope_of(dim)
    q, k, v = draw(tokens, heads, groups, dim, rope)
    stats = gather_layer([(q, k, v, attend(q, k, v))], end, rope, sink=6)
    positions = Plan(1, tokens, end).positions(0, tokens)
    assert positions is not None
    strata = positions.double().mul(tokens / end).long().sort().values
    assert strata.tolist() == list(range(tokens))  # one in each stretch of end / tokens positions
    by = (positions - torch.arange(tokens))[6:]
    rotated = torch.stack([rope.rotate(k[6 + i : 7 + i], int(n))[0] for i, n in enumerate(by)]).double()
    torch.testing.assert_close(stats.keys.second, torch.einsum("nhd,nhe->hde", rotated, rotated) / len(rotated))
    moved = torch.stack([rope.rotate(q[6 + i : 7 + i], int(n))[0] for i, n in enumerate(by)]).double()
    moved = moved.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(stats.queries.second, torch.einsum("nhd,nhe->hde", moved, moved) / len(moved))
    values = v[6:].double()
    torch.testing.assert_close(stats.values.second, torch.einsum("nhd,nhe->hde", values, values) / len(values))


def test_excerpts_are_turned_as_a_whole_and_attend_as_before() -> None:
    heads, groups, dim, end = 2, 2, 16, 20000
    rope = rope_of(dim)
    q, k, v = draw(50, heads, groups, dim, rope)
    excerpt = (q, k, v, attend(q, k, v))
    stats = gather_layer([excerpt] * 3, end, rope)
    offsets = [Plan(3, 150, end).probe_offset(i, 50) for i in range(3)]
    assert offsets == [0, 9975, 19950]
    before = torch.einsum("qhgd,nhd->hgqn", q[stats.probes[0].rows], k)
    for offset, probe in zip(offsets, stats.probes, strict=True):
        assert offset is not None
        torch.testing.assert_close(probe.keys, rope.rotate(k, offset))
        after = torch.einsum("qhgd,nhd->hgqn", probe.queries, probe.keys)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-3)
        assert int(probe.rows[-1]) == 49


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_ropes_are_tried_on_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family)
    shape = ModelShape.of(model)
    ropes = checked_ropes(model, shape, tokens_of(20))
    assert len(ropes) == len(shape.layers)

    def wrong(model: Any, layers: int) -> list[Any]:
        return [rope_of(64, base=1234.0)] * layers

    monkeypatch.setattr("kvant.calibrate.capture.ropes_of", wrong)
    with pytest.raises(ValueError, match="cannot rotate keys of"):
        checked_ropes(model, shape, tokens_of(20))


def test_a_rotation_of_another_kind_is_refused_but_short_positions_are_measured() -> None:
    """GLM pairs neighbouring channels; kvant's Rope pairs halves."""
    config = transformers.GlmConfig(**{**BASE, "partial_rotary_factor": 0.5})
    model = transformers.GlmForCausalLM(config).eval()
    assert len(ropes_of(model, 3)) == 3
    with pytest.raises(ValueError, match="max_position"):
        dict(gather(model, [tokens_of(30)], Plan(1, 30, 512)))
    assert len(dict(gather(model, [tokens_of(30)], Plan(1, 30, 30)))) == 3
