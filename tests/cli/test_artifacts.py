"""Kept artifacts from the command line: found by what was asked for, listed, shown, removed."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import pytest

from kvant import models, recipes
from kvant.artifact import FILE, Artifact
from kvant.cli.artifact_options import artifacts_for
from kvant.cli.artifacts import cached_artifacts
from tests.cli.test_cli import run, text, tiny  # noqa: F401

OSCAR = "oscar:sink=4,recent=16"


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def options(text: str | None, *artifacts: str) -> argparse.Namespace:  # noqa: F811
    return argparse.Namespace(artifact=list(artifacts), calibration_text=text)


def test_made_once_listed_shown_and_removed(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    code, out, _ = run(capsys, "artifacts")
    assert code == 0 and "no artifacts are cached" in out
    model, tokenizer = models.load(tiny)
    narrow, wide = recipes.get(OSCAR), recipes.get("oscar:sink=4,recent=64")
    found = artifacts_for(model, tokenizer, [narrow, wide], options(text))
    assert [found[recipe.name].recipe for recipe in (narrow, wide)] == [narrow, wide]
    again = artifacts_for(model, tokenizer, [wide], options(text))
    assert again[wide.name].recipe == wide and again[wide.name].digest == found[wide.name].digest
    other = tmp_path / "other"
    other.write_text(Path(text).read_text()[::-1])
    artifacts_for(model, tokenizer, [narrow], options(str(other)))
    capsys.readouterr()

    code, out, _ = run(capsys, "artifacts", "--json")
    listed = json.loads(out)
    assert code == 0 and len(listed) == 2
    first = next(each for each in listed if each["id"] == found[narrow.name].digest[:16])
    assert (
        first["model"] == Path(tiny).name and first["recipe"] == "oscar" and first["text"].startswith("given, sha256 ")
    )
    assert first["bytes"] == (Path(first["path"]) / FILE).stat().st_size and first["problem"] is None
    code, out, _ = run(capsys, "artifacts")
    assert code == 0 and first["id"] in out and "2 artifacts" in out

    code, out, _ = run(capsys, "artifacts", "show", first["id"][:8], "--json")
    assert code == 0 and json.loads(out)["digest"] == found[narrow.name].digest
    code, out, _ = run(capsys, "artifacts", "show", first["path"])
    assert code == 0 and "source.tokens: " in out

    code, out, _ = run(capsys, "artifacts", "remove", first["id"])
    assert code == 0 and not Path(first["path"]).exists() and len(cached_artifacts()) == 1
    code, _, error = run(capsys, "artifacts", "remove", first["id"])
    assert code == 2 and "no such artifact is cached" in error
    code, _, error = run(capsys, "artifacts", "remove")
    assert code == 2 and "name one ID, or --all" in error
    code, out, _ = run(capsys, "artifacts", "remove", "--all", "--json")
    assert code == 0 and cached_artifacts() == []
    assert [entry["id"] for entry in json.loads(out)] == [each["id"] for each in listed if each != first]


def test_a_damaged_one_is_listed_and_can_be_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "cache" / "kvant" / "artifacts" / "model" / "fit"
    place.mkdir(parents=True)
    (place / FILE).write_bytes(b"half")
    (damaged,) = cached_artifacts()
    assert damaged.problem is not None and "cannot be read" in damaged.problem
    code, out, _ = run(capsys, "artifacts")
    assert code == 0 and "damaged" in out
    code, _, _ = run(capsys, "artifacts", "remove", damaged.id)
    assert code == 0 and not place.exists()


def test_an_artifact_that_cannot_be_kept_serves_all_the_same(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model, tokenizer = models.load(tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = artifacts_for(model, tokenizer, [recipes.get(OSCAR)], options(text))
    assert isinstance(found[OSCAR], Artifact)
    assert "kvant: not cached: [Errno 20] Not a directory" in capsys.readouterr().err
