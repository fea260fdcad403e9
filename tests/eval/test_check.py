"""Whether recipes fit: on tiny models whose keys have a large mean, and on a real one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import passages, recipes, verdicts
from kvant.calibrate.builtin import fits_in_seconds
from kvant.eval import check as checking
from kvant.eval import choose
from kvant.eval.check import check, check_segment, examine, fast_recipes, packed_read
from kvant.eval.choose import cached_choice, choose_recipe, require_fit
from kvant.eval.why import key_stats
from kvant.verdicts import Threshold, Unfit
from tests.engines.test_hf import make_model
from tests.eval.biased import Bytes, make_biased


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept among the user's own; near ties of a random model's tokens are not held against a recipe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "GOOD", Threshold(0.1, 0.5))
    monkeypatch.setattr(verdicts, "USABLE", Threshold(0.2, 0.4))


@pytest.fixture(scope="module")
def biased() -> Any:
    return make_biased(20.0)


def test_keys_with_a_mean_are_found_out_and_explained(biased: Any) -> None:
    names = ["full", "saw-int4", "int4", "kvant-4-fast", "kivi-k4v4"]
    found = {each.recipe: each for each in check(biased, Bytes(), names)}
    assert list(found) == names
    assert [found[name].word for name in names] == ["good", "unfit", "unfit", "good", "good"]
    assert abs(found["full"].kl) < 1e-5
    assert found["saw-int4"].why.startswith(
        "layer 0's keys have a mean 7 times their spread and the rotation spreads it"
    )
    assert "its largest channel is 31 times the typical one" in found["int4"].why
    assert found["kvant-4-fast"].why == ""
    assert found["kvant-4-fast"].artifact and not found["int4"].artifact
    assert found["int4"].tokens == 319  # the model reads 512 tokens at most, of which 192 are the prompt
    assert verdicts.verdict(found["int4"].fingerprint, recipes.get("int4")) == found["int4"]


def test_a_cache_without_a_recipe_survives_such_keys(biased: Any) -> None:
    """saw-int4, which it used to take, does not."""
    cache = kvant.Cache(biased)
    assert cache.recipe.name == recipes.PLAIN
    (found,) = check(biased, Bytes(), recipes.PLAIN)
    assert found.kl < 0.05
    (other,) = check(biased, Bytes(), "saw-int4")
    assert other.kl > 10 * found.kl


def test_the_default_divides_every_head() -> None:
    from kvant.layout import Layout

    assert recipes.plain(128) == recipes.get(recipes.PLAIN)
    for head_dim in (64, 80, 96, 112, 128, 256):
        assert 4.9 < Layout.of(recipes.plain(head_dim), 2, head_dim).bits_per_element() < 6.1
    assert kvant.Cache(make_model("llama", head_dim=80)).recipe.name == "kivi-k4v4:v.group=16"


def test_what_is_all_in_a_window_is_unknown() -> None:
    model = make_model("llama", vocab_size=256)
    (found,) = check(model, Bytes(), "int2:sink=64,recent=512")
    assert (found.word, found.packed) == ("unknown", 0.0)
    assert abs(found.kl) < 0.01  # which must not be called good


def test_packed_read_counts_by_the_windows() -> None:
    segments = check_segment(make_model("llama", vocab_size=256), Bytes(), 100)
    assert (segments.prompt, segments.scored) == (37, 62)
    assert packed_read(recipes.get("int4"), segments) == sum(range(38, 100)) / 62
    assert packed_read(recipes.get("int4:sink=4,recent=90"), segments) == sum(range(1, 6)) / 62


def test_a_long_fit_is_left_out_unless_it_is_asked_for_or_there(biased: Any) -> None:
    recipe = "saw-int4-hessian"
    found = examine(biased, Bytes(), ["int8", recipe])
    assert [each.recipe for each in found.verdicts] == ["int8"]
    assert "--fit" in found.left_out[recipe]
    with pytest.raises(ValueError, match="recipe saw-int4-hessian: needs a fit"):
        check(biased, Bytes(), recipe)
    (fitted,) = check(biased, Bytes(), recipe, fit=True)
    assert fitted.artifact
    (again,) = check(biased, Bytes(), recipe)  # the artifact was kept
    assert again.artifact == fitted.artifact


def test_verdicts_are_measured_once_where_that_is_asked_for(biased: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = examine(biased, Bytes(), ["int8"]).verdicts
    with monkeypatch.context() as patch:
        patch.setattr(checking, "evaluate", None)
        assert examine(biased, Bytes(), ["int8"], again=False).verdicts == [first]
    other = make_biased(0.0)
    assert verdicts.verdicts(first.fingerprint) == [first]
    assert examine(other, Bytes(), ["int8"], again=False).verdicts[0].fingerprint != first.fingerprint


def test_a_short_look_is_not_kept(biased: Any) -> None:
    (found,) = check(biased, Bytes(), "int8", tokens=64)
    assert found.tokens == 39
    assert verdicts.verdicts(found.fingerprint) == []
    with pytest.raises(ValueError, match="tokens must be at least 16, got 3"):
        check(biased, Bytes(), "int8", tokens=3)


def test_a_place_that_cannot_be_written_is_told_and_no_error(
    biased: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="the verdict on int8 could not be stored"):
        assert check(biased, Bytes(), "int8")[0].recipe == "int8"


def test_by_default_all_with_fast_kernels_are_looked_at() -> None:
    names = [recipe.name for recipe in fast_recipes(make_model("llama"))]
    assert {"int4", "saw-int4", "kvant-4-fast", "turboquant-4"} <= set(names)
    assert "full" not in names
    assert "gear" not in names  # the plain reference
    assert [name for name in names if fits_in_seconds(recipes.get(name))] == ["kvant-4-fast"]


# --- choosing -----------------------------------------------------------------------------------------------------------


def test_without_a_recipe_the_best_that_is_good_is_taken_once(biased: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = choose_recipe(biased, Bytes(), said.append)
    assert found.recipe.name == "kvant-4-fast"
    assert found.artifact is not None and found.verdict.artifact == found.artifact.digest
    assert found.reason.startswith("kvant-4-fast: good, KL ")
    assert "kvant-2 has fewer bits, once it is fitted: kvant check --recipe kvant-2 --fit" in found.reason
    assert said == ["checking once whether kvant-4-fast fits this model"]
    with monkeypatch.context() as patch:
        patch.setattr(checking, "evaluate", None)
        again = choose_recipe(biased, Bytes(), said.append)
        kept = cached_choice(found.verdict.fingerprint)
    assert len(said) == 1
    assert again.recipe == found.recipe and again.reason == found.reason
    assert kept is not None and kept.reason == found.reason
    assert kept.artifact is not None and kept.artifact.digest == found.artifact.digest


def test_a_recipe_that_fails_is_passed_over_and_named(biased: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "kivi-k4v4:k.recent=32"  # by vLLM
    monkeypatch.setattr(recipes, "LADDER", ("saw-int4", refused, "int8"))
    found = choose_recipe(biased, Bytes())
    assert found.recipe.name == refused
    assert "better than saw-int4 (unfit, KL 0." in found.reason
    from kvant.engines.vllm.options import refusal

    assert choose_recipe(biased, Bytes(), refusal=refusal).recipe.name == "int8"


def test_where_nothing_is_good_the_usable_is_taken_and_the_unfit_never(
    biased: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "LADDER", ("int4", "saw-int4"))
    with pytest.raises(Unfit, match="is unfit for this model"):
        choose_recipe(biased, Bytes())
    monkeypatch.setattr(verdicts, "USABLE", Threshold(0.5, 0.2))
    found = choose_recipe(biased, Bytes())
    assert (found.recipe.name, found.verdict.word) == ("saw-int4", "usable")
    assert found.reason.endswith("none is good")


def test_the_usable_one_keeps_an_artifact_that_could_not_be_cached(
    biased: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(recipes, "LADDER", ("kvant-4-fast",))
    monkeypatch.setattr(verdicts, "GOOD", Threshold(0.0, 1.1))
    monkeypatch.setattr(verdicts, "USABLE", Threshold(9.0, 0.0))
    with pytest.warns(UserWarning, match="is not cached and serves this process alone"):
        found = choose_recipe(biased, Bytes())
    assert found.verdict.word == "usable" and found.artifact is not None
    assert found.artifact.digest == found.verdict.artifact


def test_an_unfit_recipe_is_refused_and_what_fits_is_named(biased: Any) -> None:
    with pytest.raises(
        Unfit, match="recipe saw-int4 is unfit .*; what fits: kvant-4-fast: good, KL .*; --please takes it"
    ):
        require_fit(biased, Bytes(), recipes.get("saw-int4"), None, "--please")
    assert require_fit(biased, Bytes(), recipes.get("int8"), None, "--please").word == "good"


def test_key_stats_are_those_of_their_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4000, 2, 64, generator=generator)
    keys[:, 1, :32] += 12.0
    stats = key_stats(keys)
    assert stats.mean == pytest.approx(12 / math.sqrt(2), rel=0.02)
    assert stats.largest == pytest.approx(math.sqrt(145), rel=0.3)
    plain = key_stats(torch.randn(4000, 2, 64, generator=generator))
    assert plain.mean < 0.1 and plain.largest < 1.2


@pytest.mark.model
def test_smollm2_survives_kvant_4_and_not_int2(smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "GOOD", Threshold(0.1, 0.8))
    monkeypatch.setattr(verdicts, "USABLE", Threshold(0.4, 0.6))
    model, tokenizer = smollm2
    assert 900 < len(passages.encode(tokenizer, passages.conversation())) < 1200
    found = {each.recipe: each.word for each in check(model, tokenizer, ["kvant-4-fast", "int2"], tokens=512)}
    assert found == {"kvant-4-fast": "good", "int2": "unfit"}


def test_choose_has_no_names_of_its_own() -> None:
    """What is tried is `recipes.LADDER`, with bits in ascending order."""
    from kvant.layout import Layout

    bits = [Layout.of(recipes.get(name), 2, 128).bits_per_element() for name in recipes.LADDER]
    assert bits == sorted(bits)
    assert recipes.PLAIN in recipes.LADDER and recipes.LADDER[0] == recipes.DEFAULT
    assert choose.recipes is recipes
