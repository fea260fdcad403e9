from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvant.artifact import FILE, Artifact
from kvant.cli.check import UNFIT
from kvant.recipe import MixedRecipe
from tests.cli.test_cli import run, text, tiny  # noqa: F401 (fixtures)

SMALL = ["--bits", "2.7", "--context", "2k", "--recent", "8,24", "--tokens", "400"]


@pytest.fixture
def tuned(capsys: pytest.CaptureFixture[str], tiny: str, text: str, tmp_path: Path) -> Path:  # noqa: F811
    out = tmp_path / "a" / "tuned"
    options = ["--model", tiny, "--text", text, *SMALL, "--out", str(out), "--json", str(tmp_path / "told.json")]
    code, printed, said = run(capsys, "tune", *options)
    assert code == 0, said
    assert printed.splitlines()[-1] == str(out / FILE)
    told = json.loads((tmp_path / "told.json").read_text())
    artifact = Artifact.load(out)
    assert isinstance(artifact.recipe, MixedRecipe)
    assert told["bits"] <= 2.7 and told["context"] == 2048 and told["digest"] == artifact.digest
    assert [layer["recipe"] for layer in told["layers"]] == [recipe.name for recipe in artifact.recipe]
    for layer in told["layers"]:
        assert layer["recipe"] in printed.replace("\n", "")
    assert told["predicted_kl"] == pytest.approx(sum(x["key_kl"] + x["value_kl"] for x in told["layers"]))
    assert [result["recipe"] for result in told["measured"]] == ["tuned-2.7", "kvant-2"]
    assert f"{told['measured'][0]['kl']:.5f}" in printed and f"{told['predicted_kl']:.5f}" in printed
    return out


def test_other_commands_take_the_artifact(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tuned: Path,
    tmp_path: Path,
) -> None:
    common = ["--model", tiny, "--artifact", str(tuned)]
    short = ["--text", text, "--context", "120", "--tokens", "40"]
    code, _, said = run(capsys, "eval", *common, *short, "--recipe", "int4", "--json", str(tmp_path / "eval.json"))
    assert code == 0, said
    found = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert [result["recipe"] for result in found] == ["int4", "tuned-2.7"]
    code, _, said = run(capsys, "eval", *common, *short, "--json", str(tmp_path / "eval.json"))
    assert code == 0, said
    again = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert [result["recipe"] for result in again] == ["tuned-2.7"] and again[0]["kl"] == found[1]["kl"]
    code, printed, said = run(capsys, "generate", *common, "--prompt", "The lamp", "--max-new-tokens", "40", "--json")
    assert code == 0, said
    (answer,) = json.loads(printed)["results"]
    assert answer["recipe"] == "tuned-2.7" and answer["packed_tokens"] > 0 and 2.0 < answer["bpe"] < 3.2
    code, printed, said = run(capsys, "check", *common, "--tokens", "200", "--json")
    assert code in (0, UNFIT), said
    (verdict,) = json.loads(printed)["verdicts"]
    assert verdict["recipe"] == "tuned-2.7"
    code, printed, said = run(capsys, "doctor", "--artifact", str(tuned), "--json")
    assert code == 0, said
    taken = json.loads(printed)["taken"]
    assert {each["by"] for each in taken if each["device"] == "cpu"} == {"cpu"}
    assert "every layer runs on fast kernels" in run(capsys, "doctor", "--artifact", str(tuned))[1]
    assert {each["recipe"] for each in taken} == {recipe.name for recipe in Artifact.load(tuned).recipe.recipes}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--bits": "1"}, "bits must be at least"),
        ({"--bits": "7"}, "bits must be at most"),
        ({"--bits": "two"}, "invalid float value"),
        ({"--context": "long"}, "expected a number of tokens such as 8192 or 32k, got 'long'"),
        ({"--candidates": "kvant-9"}, "unknown recipe 'kvant-9'"),
        ({"--candidates": "kivi-k2v2"}, "coded in groups of"),
        ({"--recipes": "0"}, "--recipes must be positive, got 0"),
        ({"--recent": "many"}, "expected numbers of tokens such as 64,128, got 'many'"),
        ({"--text": "/nowhere/text"}, "no such file"),
        ({"--out": "taken"}, "expected a new directory or an artifact's, it has a.txt"),
        ({"--json": "/nowhere/x.json"}, "there is no directory"),
        ({"--json": "new", "--out": "new"}, "--json 'new': expected a file other than --out"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setattr("kvant.models.load", lambda *args: pytest.fail("loaded"))
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "a.txt").write_text("mine")
    asked = {"--model": tiny, "--bits": "2.7", "--text": text, "--out": str(tmp_path / "out"), **change}
    if asked["--out"] == "taken":
        asked["--out"] = str(taken)
    code, printed, said = run(capsys, "tune", *(each for pair in asked.items() for each in pair))
    assert code == 2 and message in said and not printed
    assert not (tmp_path / "out" / FILE).exists() and (taken / "a.txt").read_text() == "mine"
