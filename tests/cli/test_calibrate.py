from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvant
from kvant import models
from kvant.artifact import FILE, Artifact
from tests.cli.test_cli import run, text, tiny  # noqa: F401 (fixtures)

SMALL = "oscar:sink=4,recent=16"


def test_calibrates_and_serves(capsys: pytest.CaptureFixture[str], tiny: str, text: str, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "a" / "b"
    options = ["--model", tiny, "--recipe", SMALL, "--text", text, "--tokens", "300", "--max-position", "2000"]
    code, printed, _ = run(capsys, "calibrate", *options, "--seed", "3", "--out", str(out), "--json")
    assert code == 0
    report = json.loads(printed)
    artifact = Artifact.load(out)
    assert report["artifact"] == str(out / FILE)
    assert report["digest"] == artifact.digest
    assert report["bytes"] == (out / FILE).stat().st_size
    for key, value in {"tokens": 300, "max_position": 2000, "seed": 3, "recipe": SMALL, "model": tiny}.items():
        assert report[key] == value
    assert len(report["text_sha256"]) == len(report["fingerprint"]) == 64
    model, _ = models.load(tiny)
    assert kvant.Cache(model, SMALL, artifact=out).artifact is not None
    code, again, _ = run(capsys, "calibrate", *options, "--seed", "3", "--out", str(out))
    assert code == 0
    assert again.strip() == str(out / FILE)
    assert Artifact.load(out).digest == artifact.digest


def test_without_a_text_the_built_in_one_is_read(capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path) -> None:  # noqa: F811
    options = ["--model", tiny, "--recipe", "saw-int4-hessian", "--tokens", "40", "--out", str(tmp_path), "--json"]
    code, printed, _ = run(capsys, "calibrate", *options)
    assert code == 0
    report = json.loads(printed)
    assert (report["text"], report["tokens"], len(report["text_sha256"])) == ("built in", 40, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--recipe": "saw-int4"}, "nothing to calibrate"),
        ({"--recipe": "oskar"}, "unknown recipe"),
        ({"--text": "/nowhere/text"}, "no such file"),
        ({"--tokens": "1000000"}, "expected at least 1000000"),
        ({"--max-position": "0"}, "--max-position: must be positive"),
    ],
)
def test_mistakes_leave_nothing(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
    change: dict[str, str],
    message: str,
) -> None:
    options = {"--model": tiny, "--recipe": SMALL, "--text": text, "--out": str(tmp_path / "out"), **change}
    code, printed, error = run(capsys, "calibrate", *(part for pair in options.items() for part in pair))
    assert code == 2
    assert printed == ""
    assert message in error
    assert len([line for line in error.splitlines() if not line.startswith("kvant: ")]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "tokens", "told"),
    [
        (SMALL, "500", "fewer than 512 make a poor fit, 8192 are recommended"),
        (SMALL, "512", ""),
        ("kvant-4-fast", "100", "fewer than 128 make a poor fit, 1024 are recommended"),
        ("kvant-4-fast", "128", ""),
    ],
)
def test_a_fit_to_few_tokens_is_told_once(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
    recipe: str,
    tokens: str,
    told: str,
) -> None:
    """The model has a head dim of 64."""
    options = ["--model", tiny, "--recipe", recipe, "--text", text, "--out", str(tmp_path / "out"), "--tokens", tokens]
    code, printed, error = run(capsys, "calibrate", *options, "--json")
    assert code == 0 and json.loads(printed)["tokens"] == int(tokens)
    warned = [line for line in error.splitlines() if "warning" in line]
    assert len(warned) == bool(told)
    if told:
        assert (
            warned[0].startswith(f"kvant: warning: {recipe} had {tokens} tokens to be fitted to; ")
            and told in warned[0]
        )


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("command", [("calibrate", "--recipe", SMALL), ("tune", "--bits", "2.7", "--context", "2k")])
def test_an_interruption_leaves_no_new_directory(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    there: bool,
) -> None:
    """Neither that of --out nor its parents. A directory that was there before stays."""

    def interrupted(*args: object, **options: object) -> None:
        assert out.is_dir()
        raise KeyboardInterrupt

    out = tmp_path / "new" / "out"
    if there:
        out.mkdir(parents=True)
    monkeypatch.setattr("kvant.models.load", interrupted)
    code, printed, error = run(capsys, *command, "--model", tiny, "--text", text, "--out", str(out))
    assert (code, printed) == (130, "") and error.endswith(f"kvant {command[0]}: interrupted\n")
    assert (out.is_dir(), (tmp_path / "new").is_dir()) == (there, there)


def test_out_must_be_a_directory(capsys: pytest.CaptureFixture[str], text: str) -> None:  # noqa: F811
    code, _, error = run(capsys, "calibrate", "--recipe", "oscar", "--text", text, "--out", text)
    assert code == 2
    assert "expected a directory" in error
