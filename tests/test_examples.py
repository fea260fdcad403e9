"""The examples run, on SmolLM2, and show what they say that they show."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.model
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
PYTHON_OF_VLLM = EXAMPLES.parent / ".venv-vllm" / "bin" / "python"


def shown(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(sys, "exit", lambda code=0: codes.append(code))
    codes: list[int] = []
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not any(codes)
    return capsys.readouterr().out


@pytest.fixture
def example(smollm2: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda name, *arguments: shown(name, capsys, monkeypatch, *arguments)


def test_generate(example: Any) -> None:
    out = example("generate.py")
    assert "colo" in out.lower()
    assert re.search(r"Cache\(recipe='kvant-4-fast', layers=30, tokens=\d+, nbytes=\d+\)", out)


def test_chats_share_their_system_prompt(example: Any) -> None:
    found = [
        tuple(map(int, each))
        for each in re.findall(r"(\d+) tokens, (\d+) of them not computed again", example("chat_shared_prefix.py"))
    ]
    assert len(found) == 3
    (_, nothing), (_, own), (tokens, shared) = found
    assert nothing == 0
    assert own > shared > tokens // 2


def test_a_document_is_read_once_for_all_questions(example: Any) -> None:
    out = example("one_document_many_questions.py")
    [(tokens, reused)] = re.findall(r"(\d+) tokens a row, (\d+) of them not computed again", out)
    assert int(reused) > 0.9 * int(tokens)
    assert out.count("?") >= 3 and "Give it a title." in out


def test_own_questions_are_scored(example: Any) -> None:
    out = example("evaluate_your_task.py")
    assert re.search(r"^full cache: \d+% of 4 questions$", out, re.MULTILINE)
    assert re.search(r"^int8: \d+% of 4 questions$", out, re.MULTILINE)


def test_a_recipe_of_ones_own_is_judged(example: Any) -> None:
    out = example("own_recipe.py")
    assert "6.50 bits per number in pages" in out
    assert re.search(r"^mine: good, KL 0\.00", out, re.MULTILINE)
    assert re.search(r"^int4: \w+, KL ", out, re.MULTILINE)


def test_all_examples_are_tried_and_listed() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    text, listed = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    assert len(programs) == 6
    for name in programs:
        assert f'"{name}"' in text
        assert f"]({name})" in listed


@pytest.mark.skipif(not PYTHON_OF_VLLM.exists(), reason="needs .venv-vllm: ./scripts/setup --vllm")
def test_vllm_offline(smollm2: Any) -> None:
    command = [str(PYTHON_OF_VLLM), str(EXAMPLES / "vllm_offline.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | QUIET)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"'The capital of France is' -> '.*Paris", done.stdout)
