"""What a person sees of an answer: words as they come, and a line that says what is true."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvant import recipes
from kvant.cli import common, generate, main
from tests.cli.test_cli import run, text, tiny  # noqa: F401 (fixtures)

pick_device = common.pick_device  # as it is, before a fixture replaces it


class Pieces:
    """A tokenizer whose tokens are these pieces of text; a piece of a character's bytes shows as the replacement."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_words_come_as_they_are_generated_and_characters_whole() -> None:
    written: list[str] = []
    tokenizer = Pieces(b"\n\n", b" The", b" wa", b"ter", b" is \xc3", b"\xa9t", b"rang", b"e.", b"\n", b" Yes", b" \n")
    words = generate.Words(tokenizer, written.append)
    words.put(torch.tensor([[5, 6, 7]]))  # the prompt
    seen = []
    for token in range(11):
        words.put(torch.tensor([token]))
        seen.append("".join(written))
    words.end()
    assert seen[:7] == ["", "The", "The wa", "The water", "The water is", "The water is ét", "The water is étrang"]
    assert "".join(written) == "The water is étrange.\n Yes"
    assert len(words.times) == 12


def test_an_answer_is_streamed_and_is_the_same_answer(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: str,  # noqa: F811
) -> None:
    options = ["generate", "--model", tiny, "--recipe", "int4", "--prompt", "hello", "--max-new-tokens", "60"]
    _, out, _ = run(capsys, *options, "--json")
    expected = json.loads(out)["results"][0]["text"]
    before_the_end: list[str] = []
    end = generate.Words.end

    def ending(self: generate.Words) -> None:
        before_the_end.append(capsys.readouterr().out)
        end(self)

    monkeypatch.setattr(generate.Words, "end", ending)
    code = main(options)
    rest = capsys.readouterr().out
    assert code == 0
    assert len(before_the_end[0]) > len(expected) / 2, "most of it was there before the last token"
    assert before_the_end[0] + rest == expected + "\n"


def test_several_answers_are_streamed_a_line_each(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
) -> None:
    options = ["generate", "--model", tiny, "--recipe", "full,int8", "--prompt", "hello", "--max-new-tokens", "40"]
    _, out, _ = run(capsys, *options, "--json")
    expected = [f"{r['recipe']}: {' '.join(r['text'].split())}" for r in json.loads(out)["results"]]
    _, out, _ = run(capsys, *options)
    assert out.split("\n\n")[:2] == expected


def test_a_cache_that_is_larger_is_called_larger() -> None:
    assert common.against_16_bit(3.556) == "3.56 times smaller than 16-bit"
    assert common.against_16_bit(0.83) == "1.20 times larger than 16-bit"
    assert common.against_16_bit(1.001) == "as large as 16-bit"


def test_nothing_packed_yet_is_said(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    recipe = "int4:sink=4,recent=100"
    options = ["generate", "--model", tiny, "--prompt", "hello", "--max-new-tokens", "8", "--recipe"]
    _, _, err = run(capsys, *options, recipe)
    assert "nothing has been packed yet: all 12 tokens are in the window of 4 first and 100 last tokens" in err
    assert "larger than 16-bit" in err
    assert "smaller" not in err
    assert "bits per number" not in err
    _, out, err = run(capsys, *options, f"full,{recipe}")
    assert f"{recipe}: nothing has been packed yet" in err
    assert "0.0000" in out, "the full cache against itself"
    row = next(line for line in out.splitlines() if "0.83x" in line or line.strip().startswith("int4:sink"))
    assert "0.0000" not in row
    _, out, _ = run(capsys, *options, f"full,{recipe}", "--json")
    assert [r["packed_tokens"] for r in json.loads(out)["results"]] == [12, 0]
    scored = ["--text", text, "--context", "60", "--tokens", "30"]
    _, _, err = run(capsys, "eval", "--model", tiny, "--recipe", f"{recipe},int4", *scored)
    assert err.count("nothing has been packed yet") == 1
    assert f"{recipe}: nothing has been packed yet: all 50 tokens" in err


def test_a_kl_is_not_negative(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
) -> None:
    from kvant.eval import teacher

    found = teacher._Scores.result

    def slightly_negative(self: Any, name: str) -> Any:
        result = found(self, name)
        result.kl = -3e-9
        return result

    monkeypatch.setattr(teacher._Scores, "result", slightly_negative)
    scored = ["--text", text, "--context", "60", "--tokens", "30"]
    _, out, _ = run(capsys, "eval", "--model", tiny, "--recipe", "full", *scored)
    assert "-0.0" not in out
    assert common.shown_kl(-0.5) == -0.5, "what is not rounding stays to be seen"


def test_the_device_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [pick_device(asked) for asked in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device here"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [pick_device(asked) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    with pytest.raises(ValueError, match="--device must be cpu, cuda or auto, got 'tpu'"):
        pick_device("tpu")


def test_the_device_is_told_in_a_line(capsys: pytest.CaptureFixture[str], tiny: str) -> None:  # noqa: F811
    options = ["--model", tiny, "--recipe", "int4", "--prompt", "hello", "--max-new-tokens", "2", "--threads", "1"]
    _, _, err = run(capsys, "generate", *options)
    assert f"kvant: {tiny} on 1 CPU thread, float32\n" in err


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        (600, 1, "the prompt has 600 tokens, and the model 512 positions for prompt and answer"),
        (512, 1, "the prompt has 512 tokens, and the model 512 positions for prompt and answer"),
        (505, 8, "the answer ends after 7 tokens: the model has 512 positions, and the prompt takes 505"),
        (505, 7, None),
    ],
)
def test_no_token_is_beyond_the_models_context(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: str,  # noqa: F811
    prompt: int,
    new: int,
    message: str | None,
) -> None:
    """A prompt that fills it is refused before a recipe is fitted or checked."""
    if prompt > 511:
        monkeypatch.setattr("kvant.cli.generate.decide", lambda *args: pytest.fail("too late"))
    options = ["--recipe", "int4", "--prompt", "a" * prompt, "--max-new-tokens", str(new), "--json"]
    code, out, err = run(capsys, "generate", "--model", tiny, *options)
    if prompt > 511:
        assert (code, out, err.splitlines()[-1]) == (2, "", f"kvant generate: {message}")
    else:
        assert code == 0 and 1 <= len(json.loads(out)["results"][0]["tokens"]) <= 7
        assert (f"kvant: {message}" in err.splitlines()) == (message is not None)
        assert ("the answer ends" in err) == (message is not None)


def test_a_context_that_rope_scaling_reaches_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    from kvant.shape import context_of

    def config(**rope: Any) -> Any:
        return transformers.LlamaConfig(max_position_embeddings=100, rope_parameters={"rope_theta": 1e4, **rope})

    linear = config(rope_type="linear", factor=4.0)
    yarn = config(rope_type="yarn", factor=4.0, original_max_position_embeddings=50)
    assert [context_of(each) for each in (config(rope_type="default"), linear, yarn)] == [100, 400, 200]
    assert generate.answer_room(linear, 80, 20) == 20 and capsys.readouterr().err == ""
    assert generate.answer_room(linear, 300, 100) == 100
    assert capsys.readouterr().err == "kvant: the model has 100 positions: only its RoPE scaling reaches 400 tokens\n"
    assert generate.answer_room(linear, 301, 100) == 99
    with pytest.raises(ValueError, match="the prompt has 400 tokens, and the model 400 positions"):
        generate.answer_room(linear, 400, 1)


def test_a_chat_ends_where_the_context_does(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: str,  # noqa: F811
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n" + "b" * 600 + "\nmore\n"))
    options = ["--recipe", "int4", "--max-new-tokens", "3", "--raw", "--json"]
    code, out, err = run(capsys, "generate", "--model", tiny, "--chat", *options)
    assert code == 2 and [turn["prompt"] for turn in json.loads(out)["turns"]] == ["hello"]
    assert "the chat ends: the prompt has 6" in err.splitlines()[-1]


@pytest.mark.parametrize("told", ["", "kept 5 of 9 tokens"])
def test_an_interrupt_is_one_line_and_exit_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt(*([told] if told else []))

    monkeypatch.setattr(recipes, "get", interrupted)
    code, out, err = run(capsys, "recipes")
    assert (code, out) == (130, "")
    assert err == f"kvant recipes: interrupted{f'; {told}' if told else ''}\n"
    monkeypatch.setattr("kvant.cli.parser", interrupted)
    code, out, err = run(capsys, "recipes")
    assert (code, out, err.count("\n")) == (130, "", 1)


def test_ctrl_c_leaves_no_traceback(tiny: str) -> None:  # noqa: F811
    command = [sys.executable, "-m", "kvant", "generate", "--model", tiny, "--recipe", "int4", "--unfit-anyway"]
    command += ["--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--prompt", "hello", "--max-new-tokens", "100000", "--temperature", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    assert process.stdout is not None
    try:
        first = process.stdout.read(1)  # the answer comes through a pipe while the rest is generated
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert first
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "kvant generate: interrupted"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m kvant recipes --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout in ("[141\n", "[0\n"), "0 where all of it fitted into the pipe"
    assert done.stderr == ""
