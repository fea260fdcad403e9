"""Help fits a screen and has examples that are real commands; `kvant` alone says what to do first; warnings are one line each."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import warnings

import pytest

from kvant.cli import START, completion, main, parser, quiet
from kvant.cli.parsers import Parser
from kvant.ops.registry import IncompleteInstallation, SlowReference

LINES, COLUMNS = 40, 100


def commands() -> dict[str, Parser]:
    [found] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


@pytest.mark.parametrize("name", ["", *commands()])
def test_help_fits_a_screen_and_has_two_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    found = commands()[name] if name else parser()
    lines = found.format_help().splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert len(found.examples) >= 2
    for example in found.examples:
        assert f"  {example}" in lines
        assert f"kvant {name}" in example


@pytest.mark.parametrize("name", commands())
def test_examples_are_commands(name: str) -> None:
    for example in commands()[name].examples:
        line = example.partition(" > ")[0]
        args, rest = parser().parse_known_args(shlex.split(line)[1:])
        assert args.command == name
        assert not rest or hasattr(args, "passes_on")


def test_json_is_printed_or_goes_to_a_file() -> None:
    """A command whose answer is what it prints has the flag --json; one that prints tables while it measures has --json FILE."""
    taken = {name: found._option_string_actions.get("--json") for name, found in commands().items()}
    printed = {"artifacts", "calibrate", "check", "doctor", "fold", "generate", "plan", "recipes"}
    written = {"bench", "eval", "tune"}
    assert {name for name, action in taken.items() if action is not None} == printed | written
    for name in printed | written:
        action = taken[name]
        assert action is not None and action.help is not None
        start = "print JSON in place of text" if name in printed else "also write "
        assert (action.nargs == 0) == (name in printed) and action.help.startswith(start)
    assert parser().parse_args(["artifacts", "--json", "show", "ID"]).json is True
    assert parser().parse_args(["artifacts", "remove", "--all", "--json"]).json is True
    assert parser().parse_args(["artifacts", "show", "ID"]).json is False


def test_kvant_alone_says_what_to_do_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (START, "")
    assert len(out.splitlines()) <= LINES
    known = commands()
    named = [line.split()[1] for line in out.splitlines() if line.startswith("  kvant ")]
    assert len(named) >= 5 and set(named) <= set(known)


def test_warnings_are_one_line_each_and_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in quiet.LOGS:
        monkeypatch.setenv(name, "error")
    monkeypatch.setattr(sys, "warnoptions", [])
    with quiet.one_line_warnings():
        for op in ("append", "decode", "prefill"):
            said = SlowReference(f"{op} of recipe gear: many\nreasons", "gear", "cuda")
            warnings.warn_explicit(said, None, "registry.py", 1, module="kvant.ops.registry")
        missing = IncompleteInstallation("decode ...")
        warnings.warn_explicit(missing, None, "registry.py", 1, module="kvant.ops.registry")
        warnings.warn_explicit("two\nlines", UserWarning, "cache.py", 1, module="kvant.cache")
        warnings.warn_explicit("a library's", UserWarning, "x.py", 1, module="transformers.generation")
    assert capsys.readouterr().err.splitlines() == [
        "kvant: warning: recipe gear runs on the slow reference on cuda: kvant doctor --recipe gear says why, kvant recipes "
        "lists what is fast",
        "kvant: warning: the compiled operations are missing, so that everything is slow: kvant doctor says how to get them",
        "kvant: warning: two lines",
    ]
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    with pytest.warns(UserWarning, match="a library's"), quiet.one_line_warnings():
        warnings.warn_explicit("a library's", UserWarning, "x.py", 1, module="transformers.generation")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_is_a_script_that_knows_all_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    for name, found in commands().items():
        assert name in out
        for action in found._actions:
            for option in action.option_strings:
                assert option.removeprefix("--") in out
    assert "kvant-2" in out
    if shell in ("bash", "zsh"):
        assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0


def completed(line: str, script: str) -> list[str]:
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    array = " ".join(map(shlex.quote, words))
    code = f"{script}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _kvant; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_options_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert completed("kvant ca", script) == ["calibrate"]
    assert "--calibration-text" in completed("kvant generate --ca", script)
    assert completed("kvant generate --recipe kvant-4-", script) == ["kvant-4-fast"]
    assert completed("kvant eval --recipe int4,kvant-4-", script) == ["int4,kvant-4-fast"]
    assert set(completed("kvant generate --dtype ", script)) == {"float32", "bfloat16", "float16"}
    assert completed("kvant bench att", script) == ["attention"]
