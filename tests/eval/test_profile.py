"""Error profiles: the sums by hand, and that what is compared is what the cache's attention read."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.calibrate.run import calibrate
from kvant.engines.hf import Cache
from kvant.eval import Segments, evaluate, profile, teacher
from kvant.eval.profile import METRICS, ReadForms, Sums, WhichForm, logit_errors, stream_error
from tests.engines.test_hf import make_model, prompt

# kinds of windows: none, token-wise ones, groups of tokens with tails, a mean that is removed and keys that are stored unrotated
NAMES = [
    "int4",
    "int4:sink=3,recent=5",
    "kivi-k2v2:k.group=16,k.flush=32,k.recent=7,v.recent=9,sink=5",
    "kvant-2:recent=8,rope_block=32",
    "full",
]


def test_errors_of_logits_are_those_of_the_definition() -> None:
    """Two tokens: p = (1/4, 3/4) from the exact logits, r = (1/2, 1/2) from those that were read. A third token is masked."""
    three = math.log(3.0)
    exact, found = torch.tensor([[[[0.0, three, 7.0]]]]), torch.tensor([[[[1.0, 1.0, -5.0]]]])
    keep = torch.tensor([[True, True, False]])
    sums = {name: float(x) for name, x in logit_errors(exact, found, keep).items()}
    assert sums["attention_kl"] == pytest.approx(0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5))
    assert sums["weighted_logit"] == pytest.approx(0.25 * 0.75 * three**2)
    assert sums["logit_error"] == pytest.approx(three**2 / 2)  # e = (1, 1 - ln 3), and their mean is taken off
    assert sums["logit_energy"] == pytest.approx(three**2 / 2)
    assert sums["queries"] == 1.0


def test_errors_of_a_stream_are_those_of_what_each_query_reads() -> None:
    exact = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]], [[0.0, 2.0]]])  # energies 25, 1, 4
    packed = exact + torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]], [[float("nan"), 0.0]]])  # errors 1, 4; never coded
    overlay = exact + torch.tensor([[[9.0, 0.0]], [[0.5, 0.0]], [[0.0, 0.0]]])
    which = WhichForm(
        torch.tensor([[True, False, False], [True, True, False]]),
        torch.tensor([[False, True, False], [False, False, True]]),
    )
    keep = torch.tensor([[True, True, False], [True, True, True]])
    error, energy = stream_error(ReadForms(exact, packed, overlay), which, keep)
    assert error[:, 0].tolist() == [1.25, 5.0]
    assert energy[:, 0].tolist() == [26.0, 30.0]


def test_sums_become_ratios_by_head_layer_and_length() -> None:
    sums = Sums(layers=1, heads=2)
    length = torch.tensor([3, 4, 5])  # buckets up to 4 and up to 8
    for name in Sums.NAMES:
        sums.add(name, 0, length, torch.ones(3, 2))
    sums.add("key_error", 0, length, torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, 6.0]]))
    sums.add("attention_kl", 0, length, torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, 6.0]]))
    found = sums.profile()
    assert found.lengths == [4, 8]
    for metric in ("key_error", "attention_kl"):
        assert found.heads[metric] == [[1.0, 4.0]]
        assert found.layers[metric] == [2.5]
        assert found.by_length[metric] == [[1.75], [4.0]]
    assert found.heads["output_error"] == [[1.0, 1.0]]
    assert Sums(1, 2).profile().lengths == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("chunk", "stepwise"), [(1, False), (1, True), (7, False)])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_what_is_compared_is_what_attention_read(
    name: str, chunk: int, stepwise: bool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention over the forms that the profile takes for read gives the cache's own outputs."""
    outputs: list[torch.Tensor] = []
    differences: list[float] = []
    compare, called = teacher.AttentionError._compare, Sums.compare

    def keep_output(self: Any, layer: int, query: Any, keys: Any, values: Any, out: Any, asked: Any) -> None:
        outputs.append(out)
        compare(self, layer, query, keys, values, out, asked)

    def recompute(
        self: Any, layer: int, store: Any, row: Any, query: Any, keys: Any, values: Any, at: Any, **o: Any
    ) -> None:
        called(self, layer, store, row, query, keys, values, at, **o)
        position = torch.arange(len(keys))
        keep = position <= at[:, None]
        if o["sliding_window"] is not None:
            keep &= position > at[:, None] - o["sliding_window"]
        mixed = {}
        for stream, x in (("key", keys), ("value", values)):
            forms = profile.read_forms(store, stream, x, row)
            which = profile.which_form(store, stream, at, len(x), o["before"])
            mixed[stream] = torch.where(which.overlay[..., None, None], forms.overlay, forms.exact)
            mixed[stream] = torch.where(which.packed[..., None, None], forms.packed, mixed[stream])
        q = query.unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("qhgd,qnhd->qhgn", q, mixed["key"]) * o["scale"]
        weights = scores.masked_fill(~keep[:, None, None], float("-inf")).softmax(-1)
        found = torch.einsum(
            "qhgn,qnhd->qhgd", weights, torch.where(keep[..., None, None], mixed["value"], 0.0)
        ).flatten(1, 2)
        differences.append(float((found - outputs[-1][0]).norm() / outputs[-1].norm()))

    monkeypatch.setattr(teacher.AttentionError, "_compare", keep_output)
    monkeypatch.setattr(Sums, "compare", recompute)
    model = make_model(family)
    recipe, artifact = recipes.get(name), None
    if recipe.calibrated:
        artifact = calibrate(model, None, recipe, prompt(1, 600)[0], excerpt_tokens=128, max_position=512, resume=False)
    evaluate(
        model,
        [recipe],
        Segments(prompt(1, 61), 20),
        chunk,
        make_cache=lambda chosen: Cache(model, chosen, artifact=artifact),
        stepwise=stepwise,
        profile=True,
    )
    assert len(differences) >= 3
    assert max(differences) < 2e-3  # compiled operations round queries and weights to 14 bits


def test_a_profile_has_every_metric_by_head_and_by_length() -> None:
    model = make_model("llama", initializer_range=0.3)
    segments = Segments(prompt(3, 101), 20)
    names = ["full", "int8", "int4", "int2"]
    results = evaluate(model, [recipes.get(name) for name in names], segments, batch=2, profile=True)
    found = [result.profile for result in results]
    for result in results:
        p = result.profile
        assert p is not None
        assert p.heads.keys() == p.layers.keys() == p.by_length.keys() == set(METRICS)
        assert p.lengths == [32, 64, 128]
        for metric in METRICS:
            assert (len(p.heads[metric]), len(p.heads[metric][0])) == (3, 2)
            assert (len(p.by_length[metric]), len(p.by_length[metric][0])) == (3, 3)
            for layer, heads in zip(p.layers[metric], p.heads[metric], strict=True):
                assert min(heads) - 1e-9 <= layer <= max(heads) + 1e-9, "a layer is between its heads"
        assert p.layers["output_error"] == pytest.approx(result.layers)
        assert json.loads(json.dumps(dataclasses.asdict(result)))["profile"]["heads"] == p.heads
    for metric in METRICS:
        values = [sum(p.layers[metric]) for p in found if p is not None]
        assert values == sorted(values), "fewer bits, larger errors"
        assert values[0] < 1e-3 < values[-1]


def test_a_profile_does_not_depend_on_how_queries_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    segments = Segments(prompt(1, 91), 20)
    whole, cut = (_profile_with(model, segments, scores, monkeypatch) for scores in (1 << 24, 6 * 91 * 5))
    for metric in METRICS:
        assert torch.tensor(cut.heads[metric]).allclose(torch.tensor(whole.heads[metric]), rtol=1e-4)


def _profile_with(model: Any, segments: Segments, scores: int, monkeypatch: pytest.MonkeyPatch) -> profile.Profile:
    monkeypatch.setattr(profile, "SCORES", scores)
    (result,) = evaluate(model, [recipes.get("int4:sink=2,recent=3")], segments, profile=True)
    assert result.profile is not None
    return result.profile
