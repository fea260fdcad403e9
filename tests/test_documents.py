"""The documents are readable in a terminal and in a diff: no line is longer than 100 columns."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from kvant import recipes
from kvant.cli import parser
from kvant.cli.recipes import KL, MODEL, RECOMMENDED

ROOT = Path(__file__).parent.parent
COLUMNS = 100
URL = re.compile(r"https?://\S+")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_lines_have_at_most_100_columns(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    long = [f"{path.name}:{at}: {len(line)}" for at, line in enumerate(lines, 1) if len(URL.sub("", line)) > COLUMNS]
    assert not long, long


def test_documents_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "design.md", "glossary.md"} <= {
        path.name for path in DOCUMENTS
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    """To a file of the repository, and where a heading is named, to a heading of it."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)", path.read_text(encoding="utf-8")):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, f"{path.name} links to {target}{anchor}"


def test_the_readme_is_short_and_agrees_with_the_code_about_defaults() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert re.findall(r"kvant\.Cache\(model\): ([\w-]+)", text) == [recipes.PLAIN]
    assert "default of kvant.Cache" in RECOMMENDED[recipes.PLAIN]
    assert "default of commands once fitted" in RECOMMENDED[recipes.DEFAULT]
    assert f"which recipe | `{recipes.DEFAULT}`" in text


def test_the_kl_of_recommended_recipes_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "results" / f"{MODEL.lower()}.json").read_text(encoding="utf-8"))
    measured = {entry["recipe"]: round(entry["kl"], 4) for entry in results["texts"]["prose"]["results"]}
    assert {name: measured[name] for name in RECOMMENDED} == KL


def test_the_demo_shows_what_we_recommend() -> None:
    [named] = re.findall(r"--recipe (\S+)", (ROOT / "scripts" / "demo").read_text())
    assert {recipes.DEFAULT, "kvant-4", "full"} <= set(named.split(","))
    table = re.findall(r"^ {6}([\w-]+) +[\d.]+ +[\d.]+ MiB", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert table == named.split(",")


def test_docstrings_become_markdown() -> None:
    """What the API reference shows: two columns are a list, doctests are code."""
    pytest.importorskip("griffe", reason="needs the extra docs")
    from scripts.docs_griffe import markdown

    text = "Packs.\n\nfirst, second  what they are\n               and more.\nlast           another.\n\n>>> 1 + 1\n2\n\nThe end."
    expected = "Packs.\n\n\n- `first`, `second`: what they are\n  and more.\n- `last`: another.\n\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThe end."
    assert markdown(text) == expected


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_are_understood(path: Path) -> None:
    """Those that stand on lines of their own parse, with recipes that exist; those inside a sentence name known options."""
    text, top = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8")), parser()
    for line in re.findall(r"^    (?:[A-Z_]+=\S+ )?(kvant [^\n]+)$", text, re.MULTILINE):
        if line.startswith(("kvant serves ", "kvant lm-eval ")):  # a line of a log; a harness with options of its own
            continue
        command = re.split(r"\s[#>|]\s?|\s\[", line)[0].replace("...", "").replace("$S", "")
        args, rest = top.parse_known_args(shlex.split(command)[1:])
        assert not rest or args.command == "serve", f"{path.name}: {line}"
        named = getattr(args, "recipe", None) or []
        for name in recipes.split(named) if isinstance(named, str) else named:
            assert name == "R" or recipes.get(name), f"{path.name}: {line}"
    for inline in re.findall(r"`kvant ([^`]+)`", text):
        command, *words = inline.split()
        for option in (word.split("=")[0] for word in words if re.match(r"--\w", word)):
            assert command in ("serve", "lm-eval") or option in options(top, command), f"{path.name}: kvant {inline}"


def options(top: argparse.ArgumentParser, command: str) -> set[str]:
    """Options of a command and of its own commands."""
    found: set[str] = set()
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                if name == command or top.prog != "kvant":
                    found |= options(each, command)
        found |= set(action.option_strings)
    return found
