"""kvant eval --html and kvant report: pages from real runs and from files, and what is refused before the work starts."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from kvant import models, recipes
from kvant.report import page as pages
from tests.cli.test_cli import run, text, tiny  # noqa: F401
from tests.report import samples
from tests.report.test_page import Page


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    made = {"text": samples.chat_results(), "task": samples.task_results(), "bench": samples.bench_results()}
    made["other"] = samples.task_results() | {"model": "qwen3-8b"}
    for name, data in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return {name: str(tmp_path / f"{name}.json") for name in made}


def test_files_become_one_page(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    target.write_text("what was there before")
    given = ["--bench", files["bench"], "--request-context", "4096", "--requests", "2", "--html", str(target)]
    code, out, err = run(capsys, "report", files["text"], files["task"], *given)
    assert (code, out) == (0, ""), err
    page = Page(target.read_text())
    assert {
        "Quality on wikitext2.test.txt",
        "gsm8k: 100 questions",
        "Memory of 2 requests of 4,096 tokens",
    } <= page.tables.keys()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "no temporary file is left"


def test_the_results_of_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    code, _, err = run(capsys, "report", str(samples.QUALITY), "--html", str(target))
    assert code == 0, err
    page = Page(target.read_text())
    assert "Memory of 1 request of 8,192 tokens" in page.tables, "the name is one of kvant plan's"
    rows = page.tables["Quality on prose"]
    assert len(rows) == 1 + len(json.loads(samples.QUALITY.read_text())["texts"]["prose"]["results"])
    assert "cannot be counted here: oscar+20000" in page.words, "rows of another position or calibration are no recipes"


def test_some_recipes_only(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    code, _, err = run(capsys, "report", str(samples.QUALITY), "--recipe", "all", "--html", str(target))
    assert code == 0, err
    rows = Page(target.read_text()).tables["Quality on prose"]
    assert sorted(row[0] for row in rows[1:]) == sorted(recipes.names())
    given = ["--recipe", "int4,oscar", "--html", str(target)]
    code, _, err = run(capsys, "report", files["text"], files["task"], *given)
    assert code == 0, err
    tables = Page(target.read_text()).tables
    assert [row[0] for row in tables["Quality on wikitext2.test.txt"]] == ["recipe", "oscar", "int4"]
    assert [row[0] for row in tables["gsm8k: 100 questions"]] == ["cache", "full cache", "full cache again", "int4"]
    assert not any(caption.startswith("needle") for caption in tables), "neither of them answered it"


def test_a_model_is_named_where_files_name_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = samples.text_results()
    del data["model"], data["shape"]
    (tmp_path / "text.json").write_text(json.dumps(data))
    given = ["report", str(tmp_path / "text.json"), "--html", str(tmp_path / "report.html")]
    code, _, err = run(capsys, *given)
    assert code == 0, err
    page = Page((tmp_path / "report.html").read_text())
    assert "KV cache recipes on unnamed model" in page.words
    assert not any(caption.startswith("Memory") for caption in page.tables)
    code, _, err = run(capsys, *given, "--model", "smollm2")
    assert code == 0, err
    page = Page((tmp_path / "report.html").read_text())
    assert "KV cache recipes on smollm2" in page.words
    assert "Memory of 1 request of 8,192 tokens" in page.tables


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("report {text} {other} --html {out}", "results of different models do not go on one page"),
        ("report {text} {text} --html {out}", "another file has the same recipe on the same text"),
        ("report {bench} --html {out}", "give it with --bench"),
        ("report {text} --bench {task} --html {out}", "expected a file of kvant bench attention --json"),
        ("report {text}.no --html {out}", "there is no such file"),
        ("report {text} --html {out}/no/report.html", "--html"),
        ("report {text} --html {out} --requests 0", "--request-context and --requests must be positive, got 8192 and 0"),
        ("report {text} --html {out} --model qwen3-8b", "--model 'qwen3-8b': the results are of 'smollm2'"),
        ("report {text} --html {out} --recipe int4,int5", "--recipe: the results have no int5; they have "),
        ("report {text}", "--html"),
        ("report --html {out}", "FILE"),
        ("eval --model {tiny} --recipe int4 --text {text} --bench {bench}", "--bench: only for a page; give --html FILE too"),
        ("eval --model {tiny} --recipe int4 --text {text} --html {out} --bench {task}", "kvant bench attention"),
        ("eval --model {tiny} --recipe int4 --task needle --html {out} --request-context 0", "must be positive"),
        ("eval --model {tiny} --recipe int4 --task needle --requests 3", "--requests: only for a page"),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_the_work(
    argv: str,
    message: str,
    files: dict[str, str],
    tiny: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "load", lambda *args, **kwargs: pytest.fail("weights were read"))
    out = tmp_path / "report.html"
    code, _, err = run(capsys, *argv.format(**files, tiny=tiny, out=out).split())
    assert code == 2
    assert message in err
    assert not out.exists()


def test_without_plotly_it_says_what_to_install(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = pages.importlib.util.find_spec

    def none(name: str, *rest: Any) -> ModuleSpec | None:
        return None if name == "plotly" else find(name, *rest)

    monkeypatch.setattr(pages.importlib.util, "find_spec", none)
    code, _, err = run(capsys, "report", files["text"], "--html", str(tmp_path / "report.html"))
    assert code == 2
    assert "--html needs plotly: pip install 'kvant[report]'" in err


def test_eval_of_a_text_makes_a_page(
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, page = tmp_path / "report.json", tmp_path / "report.html"
    options = [
        "--context",
        "60",
        "--tokens",
        "40",
        "--chunk",
        "3",
        "--json",
        str(made),
        "--html",
        str(page),
        "--profile",
    ]
    code, _, err = run(capsys, "eval", "--model", tiny, "--recipe", "full,int4,int8", "--text", text, *options)
    assert code == 0, err
    assert f"wrote {page}" in err
    found = Page(page.read_text())
    rows = {row[0]: row for row in found.tables["Quality on text.txt"]}
    assert rows.keys() == {"recipe", "full", "int4", "int8"}
    assert rows["full"][1] == "16.000", "served in 16 bits, evaluated in 32"
    assert found.words.count("text.txt") > 0
    again = tmp_path / "again.html"
    code, _, err = run(capsys, "report", str(made), "--html", str(again))
    assert code == 0, err
    assert again.read_text() == page.read_text(), "the page of a file is that of the run that wrote it"


def test_eval_of_a_task_makes_a_page(
    tiny: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = tmp_path / "own.jsonl"
    task.write_text("\n".join(json.dumps({"prompt": f"What comes after {n}?", "answer": str(n + 1)}) for n in range(3)))
    page = tmp_path / "report.html"
    options = ["--task", f"{task}:new_tokens=4", "--recipe", "int4", "--html", str(page)]
    code, _, err = run(capsys, "eval", "--model", tiny, *options)
    assert code == 0, err
    found = Page(page.read_text())
    rows = next(rows for caption, rows in found.tables.items() if caption.endswith(": 3 questions"))
    assert [row[0] for row in rows] == ["cache", "full cache", "full cache again", "int4"]
