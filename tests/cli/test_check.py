"""kvant check, and what generate and serve make of its verdicts: on a tiny model whose keys have a large mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant import models, recipes, verdicts
from kvant.cli import serve
from kvant.engines.fingerprint import fingerprint
from kvant.verdicts import Threshold, Unfit
from tests.cli.test_cli import run, save_tokenizer
from tests.eval.biased import make_biased

pytestmark = pytest.mark.checks


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("biased")
    make_biased(20.0, vocab_size=260).save_pretrained(path)
    save_tokenizer(path)
    return str(path)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "GOOD", Threshold(0.1, 0.5))  # near ties of a random model's tokens
    monkeypatch.setattr(verdicts, "USABLE", Threshold(0.2, 0.4))


def test_a_table_says_what_fits_and_why_not(biased: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "--model", biased, "--recipe", "saw-int4,kvant-4-fast,kvant-2,int8")
    assert code == 1  # one that was named is unfit
    assert max(map(len, out.splitlines()[:8])) <= 100
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.startswith("  ") and "." in line}
    assert {name: rows[name] for name in ("saw-int4", "kvant-4-fast", "int8")} == {
        "saw-int4": "unfit",
        "kvant-4-fast": "good",
        "int8": "good",
    }
    assert "saw-int4: layer 0's keys have a mean 7 times their spread" in out
    assert "not checked: kvant-2: needs a fit" in err
    code, out, _ = run(capsys, "check", "--model", biased, "--recipe", "int8", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["verdicts"][0]["recipe"], report["verdicts"][0]["verdict"]) == ("int8", "good")
    assert report["left_out"] == {}
    code, out, err = run(capsys, "check", "--model", biased, "--recipe", "kvant-2")
    assert (code, out) == (3, "") and "not checked: kvant-2: needs a fit" in err


def test_what_is_taken_without_a_recipe_is_said(biased: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", "--model", biased, "--prompt", "hello", "--max-new-tokens", "4", "--json")
    code, out, err = run(capsys, *asked)  # the first answer waits for no check
    assert (code, json.loads(out)["results"][0]["recipe"]) == (0, "kivi-k4v4")
    assert f"kvant check --model {biased} --choose" in err and "checking" not in err
    code, out, err = run(capsys, "check", "--model", biased, "--choose")
    assert (code, out) == (0, "kvant-4-fast\n")
    assert "kvant-4-fast: good, KL" in err and "kvant check --recipe kvant-2 --fit" in err
    code, out, err = run(capsys, *asked)
    assert (code, json.loads(out)["results"][0]["recipe"]) == (0, "kvant-4-fast")
    assert "kvant-4-fast: good, KL" in err and "checking once" not in err  # once is enough


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--choose", "--recipe", "int4"], "--choose takes neither --recipe"),
        (["--fit"], "--fit needs --recipe: name the recipes to fit"),
        (["--recipe", "int5"], "unknown recipe 'int5'"),
        (["--recipe", "int4", "--tokens", "2"], "tokens must be at least 16, got 2"),
        (["--artifact", "/nowhere"], "artifact '/nowhere': no such file or directory"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, biased: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "check", "--model", biased, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_generate_refuses_what_the_model_does_not_survive(biased: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "--model", biased, "--prompt", "hello", "--max-new-tokens", "4", "--recipe"]
    code, out, err = run(capsys, *options, "saw-int4")
    assert (code, out) == (2, "")
    assert "recipe saw-int4 is unfit for this model" in err and "what fits: kvant-4-fast: good" in err
    code, out, err = run(capsys, *options, "saw-int4", "--unfit-anyway", "--json")
    assert (code, json.loads(out)["results"][0]["recipe"]) == (0, "saw-int4")
    code, out, err = run(capsys, *options, "full,saw-int4", "--json")  # there to be compared
    assert code == 0


def test_serve_refuses_and_chooses_as_generate_does(
    biased: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is loaded where there is no verdict yet, and never again."""
    loaded = models.load(biased)
    named = fingerprint(loaded[0])
    calls: list[int] = []

    def load() -> tuple[Any, Any]:
        calls.append(1)
        return loaded

    args: Any = type("Args", (), {"artifact": []})
    for expected in (1, 1):
        with pytest.raises(
            Unfit, match="recipe saw-int4 is unfit for this model.*what fits: kvant-4-fast.*--unfit-anyway"
        ):
            serve.require_fit(recipes.get("saw-int4"), None, lambda: named, load)
        assert len(calls) == expected
    monkeypatch.setattr(recipes, "LADDER", ("kvant-2", "kivi-k4v4:k.recent=32", "kvant-4-fast"))  # vLLM: not the 2nd
    assert serve.default_recipe(args, lambda: named, load).name == "kvant-4-fast"
    assert len(calls) == 1
    assert "kvant-4-fast: good, KL" in capsys.readouterr().err
    serve.require_fit(recipes.get("full"), None, lambda: pytest.fail("full fits"), load)
