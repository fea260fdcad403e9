"""From a model to an artifact that its cache takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvant
from kvant.calibrate import run
from kvant.calibrate.gatherer import Plan
from kvant.calibrate.run import calibrate
from kvant.engines.fingerprint import fingerprint
from kvant.engines.fold import fold
from tests.engines.test_hf import FAMILIES, make_model

SMALL = "oscar:sink=4,recent=16"


def ids_of(count: int) -> torch.Tensor:
    return torch.randint(2, 200, (count,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_is_served_is_calibrated(family: str) -> None:
    model = make_model(family)
    artifact = calibrate(model, None, SMALL, ids_of(150), excerpt_tokens=60)
    assert artifact.source["tokens"] == 150
    assert artifact.source["max_position"] == 512
    assert sorted(artifact.tensors) == list(range(artifact.layers))
    cache = kvant.Cache(model, SMALL, artifact=artifact)
    ids = ids_of(80)[None]
    with torch.inference_mode():
        model(ids[:, :60], past_key_values=cache)
        assert bool(model(ids[:, 60:], past_key_values=cache).logits.isfinite().all())


def test_an_artifact_is_reproducible_and_the_seed_counts() -> None:
    model = make_model("qwen3")
    first, again = (calibrate(model, None, SMALL, ids_of(150), excerpt_tokens=60) for _ in range(2))
    assert first.digest == again.digest
    other = calibrate(model, None, SMALL, ids_of(150), excerpt_tokens=60, seed=1)
    assert other.digest != first.digest


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("saw-int4", {}, "nothing to calibrate"),
        ("oscar", {"tokens": 0}, "tokens must be at least 2, got 0"),
        ("kvant-2", {"excerpt_tokens": 1}, "excerpt_tokens must be at least 2, got 1"),
        ("oscar", {"max_position": -3}, "max_position must be at least 2, got -3"),
        ("oscar", {"tokens": 500}, "the text has 100 tokens, expected at least 500"),
    ],
)
def test_mistakes_are_named(recipe: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(make_model("llama"), None, recipe, ids_of(100), **options)


def test_a_string_needs_a_tokenizer_and_a_folded_model_is_refused() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="tokenizer"):
        calibrate(model, None, "oscar", "some text")
    fold(model, "quarot-int2")
    with pytest.raises(ValueError, match="folded"):
        calibrate(model, None, "oscar", ids_of(100))


def test_fingerprints_tell_models_apart_but_not_their_types() -> None:
    model = make_model("llama")
    found = fingerprint(model)
    assert fingerprint(make_model("llama")) == found
    assert fingerprint(make_model("llama").to(torch.bfloat16)) == found
    assert fingerprint(make_model("llama").to(torch.float16)) == found
    assert fingerprint(make_model("qwen3")) != found
    with torch.no_grad():
        model.lm_head.weight += 1
        model.model.embed_tokens.weight += 1
    assert fingerprint(model) != found


def test_refuses_to_search_a_clip_for_keys_before_rope() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="its clip is searched on keys after RoPE"):
        calibrate(model, None, "oscar:rope=pre", ids_of(100))
    calibrate(model, None, "oscar:rope=pre,k.clip=0.96", ids_of(100))


def test_an_artifact_of_another_model_of_the_same_shape_is_refused() -> None:
    model = make_model("llama")
    artifact = calibrate(model, None, "oscar:sink=0,recent=0", ids_of(300))
    kvant.Cache(model, artifact.recipe, artifact=artifact)
    folded = make_model("llama")
    fold(folded, artifact.recipe, artifact)
    kvant.Cache(folded, artifact.recipe, artifact=artifact)  # still the same model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.neg_()
            layer.self_attn.q_proj.weight.neg_()
    with pytest.raises(ValueError, match="another model of the same shape"):
        kvant.Cache(model, artifact.recipe, artifact=artifact)


def test_the_old_name_of_the_length_of_an_excerpt_works_and_warns() -> None:
    model = make_model("llama")
    with pytest.warns(DeprecationWarning, match="excerpt_tokens"):
        found = calibrate(model, None, SMALL, ids_of(150), run=60)
    assert found.digest == calibrate(model, None, SMALL, ids_of(150), excerpt_tokens=60).digest


@pytest.mark.parametrize(
    "name", ["kvant-2", "kvant-4-fast", "saw-int4-hessian-kv", SMALL, "saw-int4-kmeans:centroids=4"]
)
def test_what_no_fitter_reads_is_not_gathered_and_changes_no_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    seen: list[Plan] = []
    original = run.gather
    monkeypatch.setattr(run, "gather", lambda model, excerpts, plan, *rest, **options: (
        seen.append(plan), original(model, excerpts, plan, *rest, **options))[1])  # fmt: skip
    reduced = calibrate(model, None, name, ids_of(300), excerpt_tokens=150)
    monkeypatch.setattr(Plan, "reduced", lambda plan, reads: plan)
    whole = calibrate(model, None, name, ids_of(300), excerpt_tokens=150)
    assert reduced.digest == whole.digest
    plan = seen[0]
    expected = {"kvant-2": "", "kvant-4-fast": "", "saw-int4-hessian-kv": "attended", SMALL: "probes attended"}
    assert [plan.samples > 0, plan.probes > 0, plan.attended] == [
        word in expected.get(name, "sample") for word in ("sample", "probes", "attended")
    ]
