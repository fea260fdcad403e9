"""kvant eval on several texts, chats among them: tables, the report, the profile, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant import models
from kvant.cli.eval import text_names
from kvant.eval.profile import METRICS
from tests.chatting import make_tokenizer, says
from tests.cli.test_cli import run, text  # noqa: F401
from tests.engines.test_hf import make_model


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose tokenizer has a chat template."""
    path = tmp_path_factory.mktemp("chatty")
    make_model("llama", vocab_size=262).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "chats.jsonl"
    talks = [says("Who lit the lamp?", "The keeper.", "When?", "At seven."), says("Hi.", "Good evening.")]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(path)


def test_several_texts_are_scored_in_one_run(
    chatty: str,
    chats: str,
    text: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "report.json"
    options = ["--model", chatty, "--recipe", "full,int4", "--context", "60", "--tokens", "30", "--json", str(report)]
    code, out, err = run(capsys, "eval", *options, "--text", f"{text},{chats}")
    assert code == 0, err
    data = json.loads(report.read_text())
    assert "results" not in data
    prose, chat = data["texts"]
    assert (prose["text"], prose["kind"], prose["context"], prose["tokens"]) == (text, "text", 60, 30)
    assert (chat["text"], chat["kind"], chat["chats"], chat["tokens"]) == (chats, "chat", 2, 30)
    for entry in data["texts"]:
        assert [result["recipe"] for result in entry["results"]] == ["full", "int4"]
        assert entry["results"][0]["kl"] < 1e-5 < entry["results"][1]["kl"]
        assert entry["results"][0]["profile"] is None
    assert "2 chats of" in " ".join(out.split())
    assert err.count("on 1 CPU thread") + err.count("CPU threads") == 1, "the model is loaded once"
    again = tmp_path / "again.json"
    code, _, _ = run(capsys, "eval", *options[:-1], str(again), "--text", text, "--text", chats)
    assert code == 0
    assert [entry["text"] for entry in json.loads(again.read_text())["texts"]] == [text, chats]


def test_the_report_of_one_text_has_its_results_where_they_were(
    chatty: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    code, out, err = run(
        capsys, "eval", "--model", chatty, "--recipe", "int4", "--text", chats, "--profile", "--json", str(report)
    )
    assert code == 0, err
    data = json.loads(report.read_text())
    assert data["results"] == data["texts"][0]["results"]
    assert (data["kind"], data["chats"], data["tokens"]) == ("chat", 2, 12 + 10 + 14)
    assert data["results"][0]["profile"].keys() == {"heads", "layers", "lengths", "by_length"}
    assert data["results"][0]["profile"]["heads"].keys() == set(METRICS)
    assert "int4 by layer" in out
    assert "int4 by length of context" in out
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines())


def test_names_of_texts(tmp_path: Path) -> None:
    odd = tmp_path / "one,two.txt"
    odd.write_text("x")
    assert text_names([str(odd), "a,b", "c"]) == [str(odd), "a", "b", "c"]
    with pytest.raises(ValueError, match="--text: expected one or more files"):
        text_names([","])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"messages": [{"role": "user"}]}', "line 1: message 1 has no role and content"),
        ('{"prompt": "a", "answer": "b"}', 'line 1: expected {"messages"'),
        ('[{"role": "user", "content": "Hi"}]', "line 1: the chat has no answer of the assistant"),
        (json.dumps(says("x" * 600, "y")), "and the model's context is 512"),
        ("", "expected at least one chat a line"),
    ],
)
def test_wrong_chats_are_refused_before_the_model_is_loaded(
    chatty: str,
    tmp_path: Path,
    lines: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "load", _never)
    path = tmp_path / "wrong.jsonl"
    path.write_text(lines)
    code, _, err = run(capsys, "eval", "--model", chatty, "--recipe", "int4", "--text", str(path))
    assert code == 2
    assert message in err
    assert "wrong.jsonl" in err


def _never(*args: Any, **options: Any) -> None:
    raise AssertionError("the model is loaded")


def test_a_tokenizer_without_a_template_is_refused_before_the_model_is_loaded(
    chats: str,
    text: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = tmp_path / "plain"
    make_model("llama", vocab_size=262).config.save_pretrained(plain)
    make_tokenizer(None).save_pretrained(plain)
    monkeypatch.setattr(models, "load", _never)
    scored = ["--model", str(plain), "--recipe", "oscar", "--context", "60"]
    fitted = ["calibrate", "--model", str(plain), "--recipe", "oscar", "--out", str(tmp_path / "out")]
    for command in (
        ["eval", *scored, "--text", chats],
        ["eval", *scored, "--text", text, "--calibration-text", chats],
        [*fitted, "--text", chats],
    ):
        code, _, err = run(capsys, *command)
        assert code == 2
        assert "the model's tokenizer has no chat template" in err


def test_a_recipe_is_calibrated_on_chats(
    chatty: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fitted"
    options = ["--model", chatty, "--recipe", "kvant-4-fast", "--text", chats, "--out", str(out), "--json"]
    code, printed, err = run(capsys, "calibrate", *options)
    assert code == 0, err
    report = json.loads(printed)
    tokenizer = make_tokenizer()
    talks = [json.loads(line)["messages"] for line in Path(chats).read_text().splitlines()]
    rendered = [tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"] for talk in talks]
    assert report["text"] == "chats"
    assert report["tokens"] == sum(map(len, rendered)), "special tokens of the template are read too"
    code, _, err = run(
        capsys, "eval", "--model", chatty, "--recipe", "kvant-4-fast", "--text", chats, "--calibration-text", chats
    )
    assert code == 0, err
    assert f"calibrating on {chats}" in err
    code, _, err = run(
        capsys, "eval", "--model", chatty, "--recipe", "kvant-4-fast", "--text", chats, "--calibration-text", chats
    )
    assert code == 0, err
    assert "calibrating" not in err, "an artifact that was fitted on the same chats is found again"
