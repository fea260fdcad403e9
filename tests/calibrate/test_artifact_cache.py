"""Artifacts that are made once and kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import kvant
from kvant import models, passages, recipes
from kvant.artifact import Artifact
from kvant.calibrate import artifact_cache, artifact_paths
from kvant.calibrate.run import calibrate
from kvant.engines.fingerprint import fingerprint
from tests.engines.test_hf import make_model


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "cache_dir", lambda: tmp_path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What was calibrated: the recipe and the text."""
    done: list[tuple[str, object]] = []

    def counted(model: object, tokenizer: object, recipe: kvant.Recipe, text: object, **options: object) -> Artifact:
        done.append((recipe.name, text))
        seed = 1 if text is None else len(str(text))
        ids = torch.randint(0, 100, (300,), generator=torch.Generator().manual_seed(seed))
        return original(model, None, recipe, ids, max_position=512)

    original = artifact_cache.calibrate
    monkeypatch.setattr(artifact_cache, "calibrate", counted)
    return done


def test_an_artifact_is_made_once_and_serves(made: list[tuple[str, object]]) -> None:
    model = make_model("llama")
    first = kvant.artifact_for(model, None)
    assert first is not None
    assert first.recipe.name == recipes.DEFAULT == "kvant-2"
    again = kvant.artifact_for(model, None, "kvant-2:recent=5,k.search=1")  # what does not decide the fit
    assert again is not None
    assert again.digest == first.digest
    assert made == [("kvant-2", None)]
    kvant.artifact_for(model, None, "kvant-2:power=0.5")
    assert made[1:] == [("kvant-2:power=0.5", None)]
    assert kvant.artifact_for(model, None, "saw-int4") is None

    cache = kvant.Cache(model, artifact=first)
    assert cache.recipe.name == "kvant-2"
    assert kvant.Cache(model).recipe.name == recipes.PLAIN == "kivi-k4v4"
    ids = torch.randint(0, 100, (1, 20))
    with torch.no_grad():
        assert torch.isfinite(model(ids, past_key_values=cache).logits).all()
    with pytest.raises(ValueError, match=r"kvant\.artifact_for"):
        kvant.Cache(model, "kvant-2")


@pytest.mark.parametrize("name", ["oscar:sink=0,recent=0", "kvant-2:sink=9,k.recent=5,power=0.5"])
def test_a_fit_does_not_depend_on_which_windows_were_asked_for_first(
    made: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Windows decide which tokens calibration looks at: kept artifacts are those of the usual ones."""
    model = make_model("llama")
    usual = recipes.as_fitted(recipes.get(name))
    found = []
    for order in ((name, usual), (usual, name)):
        monkeypatch.setattr(models, "cache_dir", lambda: tmp_path / str(len(found)))
        found.append({str(each): kvant.artifact_for(model, None, each) for each in order})
    assert [recipe for recipe, _ in made] == [usual.name] * 2
    digests = {artifact.digest for artifacts in found for artifact in artifacts.values() if artifact is not None}
    assert len(digests) == 1
    first = found[0][name]
    assert first is not None and first.recipe == recipes.get(name)


def test_what_is_asked_for_is_served(made: list[tuple[str, object]]) -> None:
    """The windows of the recipe that the artifact was first made for are nobody else's."""
    model = make_model("llama")
    kvant.artifact_for(model, None, "kvant-2")
    wide = kvant.artifact_for(model, None, "kvant-2:recent=256")
    assert made == [("kvant-2", None)]
    cache = kvant.Cache(model, artifact=wide)
    assert cache.recipe == recipes.get("kvant-2:recent=256")
    assert cache.recipe.key.window.recent == 256
    with pytest.raises(ValueError, match="fitted for recipe kvant-2:recent=256, not for kvant-4-fast"):
        wide.serving(recipes.get("kvant-4-fast"))


def test_a_text_of_ones_own_is_kept_apart(made: list[tuple[str, object]]) -> None:
    model = make_model("llama")
    default = kvant.artifact_for(model, None)
    own = kvant.artifact_for(model, None, text="another text")
    other = kvant.artifact_for(model, None, text="yet another text")
    assert len({default.digest, own.digest, other.digest}) == 3
    assert kvant.artifact_for(model, None).digest == default.digest
    assert kvant.artifact_for(model, None, text="another text").digest == own.digest
    ids = torch.arange(50)
    assert kvant.artifact_for(model, None, text=ids).digest == kvant.artifact_for(model, None, text=ids.clone()).digest
    assert [text for _, text in made[:3]] == [None, "another text", "yet another text"] and len(made) == 4


def test_an_artifact_that_cannot_be_kept_is_given_all_the_same(
    made: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(models, "cache_dir", lambda: tmp_path / "file")
    model = make_model("llama")
    with pytest.warns(UserWarning, match="is not cached and serves this process alone: .*Not a directory"):
        artifact = kvant.artifact_for(model, None)
    assert kvant.Cache(model, artifact=artifact).recipe.name == "kvant-2"


def test_progress_is_shown_unless_it_is_taken(
    made: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvant import progress

    monkeypatch.setattr(progress, "EVERY", 0.0)
    original = artifact_cache.calibrate

    def calibrating(model: object, tokenizer: object, recipe: object, text: object, **options: object) -> Artifact:
        options["progress"]("fitting", 1, 2)  # type: ignore[operator]
        return original(model, tokenizer, recipe, text)  # type: ignore[arg-type]

    monkeypatch.setattr(artifact_cache, "calibrate", calibrating)
    kvant.artifact_for(make_model("llama"), None, "kvant-2:power=0.5")
    assert "fitting: 1 of 2" in capsys.readouterr().err
    told: list[tuple[object, ...]] = []
    kvant.artifact_for(make_model("llama"), None, "kvant-2", progress=lambda *each: told.append(each))
    assert told == [("fitting", 1, 2)] and not capsys.readouterr().err


def test_an_artifact_on_text_that_the_model_wrote_is_not_the_defaults(made: list[tuple[str, object]]) -> None:
    """Earlier versions let the model write its text, and cached the fit in a directory without a text's digest."""
    model, recipe = make_model("llama"), recipes.get("kvant-2")
    ids = torch.randint(0, 100, (200,), generator=torch.Generator().manual_seed(9))
    old = calibrate(model, None, recipe, ids, max_position=512)
    path = artifact_paths.artifact_path(fingerprint(model), recipe)
    assert path.name.endswith(f"-{passages.digest('fit')[:16]}")
    dataclasses.replace(old, source=old.source | {"text": "written by the model"}).save(
        path.with_name(path.name.partition("-")[0])
    )
    assert artifact_paths.cached(fingerprint(model), recipe) is None
    found = kvant.artifact_for(model, None, recipe)
    assert found is not None and found.digest != old.digest
    assert made == [("kvant-2", None)]


def test_another_built_in_text_is_another_fit(made: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    kvant.artifact_for(model, None)
    monkeypatch.setattr(passages, "digest", lambda name: "0" * 64)
    kvant.artifact_for(model, None)
    kvant.artifact_for(model, None)
    assert made == [("kvant-2", None)] * 2
