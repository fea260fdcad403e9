"""Files that are not what they should be: one line that says what was expected, at once, and never a traceback."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

import kvant
from kvant import models
from kvant.shape import LARGEST, ModelShape
from tests.cli.test_cli import run, text, tiny  # noqa: F401 (fixtures)

DEEP = "[" * 100_000


@pytest.fixture
def model(tiny: str, tmp_path: Path) -> Path:  # noqa: F811
    """A copy of the tiny model, to be damaged. 6 heads, 3 KV heads."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def change(model: Path, **fields: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line that a command ends in."""
    start = time.monotonic()
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, ""), err
    assert time.monotonic() - start < 60, "at once, imports apart"
    lines = [line for line in err.splitlines() if not line.startswith("kvant: ")]
    assert len(lines) == 1 and lines[0].startswith(f"kvant {argv[0]}: "), err
    return lines[0]


@pytest.mark.parametrize("value", [0, -1, 10**9, 10**30, "many", 64.5, True, [4], {}, float("nan")])
@pytest.mark.parametrize("name", sorted(LARGEST))
def test_a_config_with_a_size_that_no_model_has_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], model: Path, name: str, value: Any
) -> None:
    if name in ("sliding_window", "max_position_embeddings") and value in (0, 10**9):
        pytest.skip("a model may have this")
    change(model, **{name: value})
    line = refused(capsys, "plan", "--model", str(model))
    assert f"model {str(model)!r}: {name} in its config must be an integer from " in line
    assert line.endswith(f"got {value!r}")


@pytest.mark.parametrize(
    "command", ["generate --prompt hi --model", "check --model", "calibrate --recipe oscar --out {out} --model"]
)
def test_every_command_refuses_it_before_it_makes_the_model(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, command: str
) -> None:
    change(model, num_hidden_layers=10**9)
    line = refused(capsys, *command.format(out=tmp_path / "out").split(), str(model))
    assert "num_hidden_layers in its config must be an integer from 1 to 10,000, got 1000000000" in line


def test_sizes_of_a_language_model_in_a_larger_one_are_looked_at(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    """Transformers would list the kinds of so many layers."""
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 10**9}}
    (model / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers in its config must be" in refused(capsys, "plan", "--model", str(model))


def test_a_config_object_is_looked_at_too() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    for name, value in (("num_hidden_layers", 10**9), ("num_key_value_heads", -1), ("head_dim", 10**9)):
        before = getattr(config, name)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=f"cannot serve llama: {name} in its config must be an integer from 1 to"):
            kvant.plan(config)
        setattr(config, name, before)
    config.num_key_value_heads = 3
    with pytest.raises(ValueError, match="its 3 KV heads do not divide its 4 attention heads"):
        ModelShape.of(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": None}, "Field 'num_attention_heads' expected int, got NoneType"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "is not a multiple of the number of attention heads"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": "x", "factor": "x"}}, "expected a Hugging Face"),
        ({"dtype": "many"}, "transformers raised AttributeError: module 'torch' has no attribute 'many'"),
        ({"model_type": []}, "transformers raised TypeError"),
        ({"hidden_act": "nonsense"}, "KeyError: 'nonsense'"),
        ({"vocab_size": 3}, "expected a Hugging Face directory or id"),
    ],
)
def test_what_transformers_cannot_read_is_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, fields: dict[str, Any], message: str
) -> None:
    change(model, **fields)
    line = refused(capsys, "generate", "--model", str(model), "--prompt", "hi", "--recipe", "int4")
    assert f"model {str(model)!r}: expected a Hugging Face directory or id" in line and message in line


@pytest.mark.parametrize("content", [DEEP, '{"a":' * 100_000, "", "3", "null", "[]", '{"a": 1}', "\ufffe"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_files_of_a_model_that_are_something_else(
    capsys: pytest.CaptureFixture[str], model: Path, name: str, content: str
) -> None:
    (model / name).write_text(content)
    code, _, err = run(capsys, "generate", "--model", str(model), "--prompt", "hi", "--recipe", "int4", "--raw")
    if name == "generation_config.json" and code == 0:
        return  # transformers does without
    assert code == 2 and f"model {str(model)!r}: " in err.splitlines()[-1]
    if content == DEEP and name.endswith(".json"):
        assert "its files are nested too deeply" in err.splitlines()[-1]


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no') }}", "{{ messages[99].content }}"])
def test_a_chat_template_that_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, template: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    line = refused(capsys, "generate", "--model", str(model), "--prompt", "hi", "--recipe", "int4")
    assert "the prompt: the chat template refuses these messages: " in line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (DEEP, "expected JSON: .*; it is nested too deeply"),
        ('{"messages":' * 50_000, "expected JSON: .*; it is nested too deeply"),
        (
            json.dumps([{"role": "assistant", "content": "\ud800"}]),
            "expected Unicode text, got half of a surrogate pair",
        ),
    ],
)
def test_chats_that_are_no_text(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, line: str, message: str
) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(line)
    for command in (["eval", "--text"], ["calibrate", "--out", str(tmp_path / "out"), "--text"]):
        recipe = "int4" if command[0] == "eval" else "oscar"
        told = refused(capsys, *command, str(chats), "--model", str(model), "--recipe", recipe)
        assert f"{chats}, line 1: " in told
        assert re.search(message, told)
    assert not (tmp_path / "out").exists()


def test_questions_that_are_nested_too_deeply(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(DEEP)
    line = refused(capsys, "eval", "--model", str(model), "--recipe", "int4", "--task", str(path))
    assert "line 1: expected one JSON object a line: it is nested too deeply" in line


ROW = {"recipe": "int4", "bpe": 4.5, "kl": 0.1}
SHAPE = {"layers": [None, None], "heads": 2, "head_dim": 64, "dtype": "float32"}
SCORE = {"task": "t", "recipe": "full cache", "score": 0.5, "difference": 0.0, "half": 0.1, "bits": 16.0, "batch": 1}
SCORE |= {"wins": 0, "losses": 0, "questions": 3, "tokens": 9}
PROFILE = {"heads": {"key_error": [[1.0, 2.0]]}, "by_length": {"key_error": [[1.0]]}, "lengths": [10]}
ODD: tuple[Any, ...] = (0, -1, 10**400, float("inf"), float("nan"), "x", None, True, [], {}, [[1]], ["x"], 1e308)


def reports() -> list[Any]:
    """Reports with one odd value each."""
    out: list[Any] = [{"results": [ROW], "shape": odd} for odd in ODD]
    for odd in ODD:
        out += [{"results": [{**ROW, name: odd}]} for name in (*ROW, "kl_se", "top1", "layers", "profile")]
        out += [{"results": [ROW], "shape": {**SHAPE, name: odd}} for name in SHAPE]
        out += [{"results": [{**ROW, "profile": {**PROFILE, name: odd}}]} for name in PROFILE]
        out += [{"scores": [{**SCORE, name: odd}]} for name in SCORE]
        about = ("tokens", "chats", "mean_length", "context", "offset", "kind", "dtype")
        out += [{"texts": [{"results": [ROW], name: odd, "kind": kind}]} for name in about for kind in ("chat", "text")]
    return out


def test_a_report_with_any_odd_value_is_a_page_or_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file, page = tmp_path / "results.json", tmp_path / "page.html"
    ends = set()
    for each in reports():
        file.write_text(json.dumps(each))
        code, _, err = run(capsys, "report", str(file), "--html", str(page))
        assert code in (0, 2) and err.count("\n") == 1, (each, err)
        ends.add(code)
    assert ends == {0, 2}
    file.write_text(DEEP)
    line = refused(capsys, "report", str(file), "--html", str(page))
    assert "expected a JSON file that kvant wrote: it is nested too deeply" in line


@pytest.mark.parametrize("recipe", ["kvant-2", "kvant-4-fast", "oscar"])
def test_a_token_alone_fits_nothing(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    text: str,  # noqa: F811
    tmp_path: Path,
    recipe: str,
) -> None:
    options = ["--model", str(model), "--recipe", recipe, "--out", str(tmp_path / "out")]
    for more in ([], ["--text", text]):
        assert "tokens must be at least 2, got 1" in refused(capsys, "calibrate", *options, "--tokens", "1", *more)
    assert "max_position must be at least 2, got 1" in refused(capsys, "calibrate", *options, "--max-position", "1")
    assert run(capsys, "calibrate", *options, "--tokens", "2")[0] == 0


def test_eval_refuses_segments_that_the_context_does_not_hold(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    text: str,  # noqa: F811
) -> None:
    options = ["eval", "--model", str(model), "--recipe", "int4", "--text", text]
    assert "--context 513: the model has 512 positions" in refused(capsys, *options, "--context", "513")
    line = refused(capsys, *options, "--context", "113", "--offset", "400")
    assert "--context 113 and --offset 400: the model has 512 positions" in line


def test_recipes_for_layers_that_are_nested_too_deeply(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvant.cli.serve import _ranges

    with pytest.raises(ValueError, match="--layers: expected JSON such as .*: it is nested too deeply"):
        _ranges(DEEP)
    assert models.config_of(str(model)).num_attention_heads == 6
