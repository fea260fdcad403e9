"""A task: questions with known answers, and how an answer is scored.

A task is a frozen dataclass that registers itself by its name. Its fields are its options: `needle:length=8192,needles=4` on
the command line. Questions depend on the options, the seed and the tokenizer alone, so that every recipe gets the same ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvant.spec import parse_json, parse_tokens, parse_value, split_names

TASKS: dict[str, type[Task]] = {}
TOKENS = ("length", "new_tokens")  # options that are numbers of tokens
MARGIN = 32  # tokens of a prompt's length that the chat template may take


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    id              names it in reports.
    prompt          what the user says.
    answers         what a right answer contains; a task says how they count.
    max_new_tokens  tokens after which the answer is cut.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int


Count = Callable[[str], int]
"""Tokens of a text."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Base of all tasks."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    needs: ClassVar[str] = ""  # the file that it reads its questions or its text from, in words; "" for none
    length: int = (
        0  # tokens of a prompt, for tasks that are made at any length; 0 where questions are as long as they are
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            if cls.name in TASKS:
                raise TypeError(f"two tasks are called {cls.name}")
            TASKS[cls.name] = cls

    @property
    def label(self) -> str:
        """The name with the options that differ from the defaults, as on the command line."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def check(self) -> None:
        """Refuses options that cannot work, and files that cannot be read, before a model is loaded."""

    def questions(self, limit: int | None, seed: int, count: Count) -> list[Question]:
        """At most `limit` questions. `count` gives the tokens of a text."""
        raise NotImplementedError(f"{type(self).__name__} must make questions")

    def score(self, question: Question, answer: str) -> float:
        """Between 0 (wrong) and 1 (right)."""
        raise NotImplementedError(f"{type(self).__name__} must score answers")


def split(text: str) -> list[str]:
    """A comma-separated list of tasks, where the commas between one task's options do not count."""
    out = split_names(text)
    if not out:
        raise ValueError(f"expected one or more tasks, got {text!r}; known: {known()}")
    return out


def known() -> str:
    return f"{', '.join(name for name in TASKS if name != 'file')}, or a .jsonl file"


def get(text: str) -> Task:
    """The task of a name such as "gsm8k", "needle:length=8192" or "questions.jsonl:answer=(\\d+)"."""
    name, _, options = text.partition(":")
    given: dict[str, str] = {}
    if name not in TASKS and Path(name).suffix in (".jsonl", ".json"):
        name, given = "file", {"path": name}
    if name not in TASKS or (name == "file" and not given):
        raise ValueError(f"unknown task {name!r}; known: {known()}")
    kind = TASKS[name]
    hints = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    for item in filter(None, options.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in fields:
            raise ValueError(
                f"task {name}: expected option=value with one of {', '.join(sorted(fields))}, got {item!r}"
            )
        given[key] = value
    values = {key: _parsed(key, value, hints[key]) for key, value in given.items()}
    made = kind(**values)  # type: ignore[arg-type]
    if getattr(made, "new_tokens", 1) < 1:
        raise ValueError(f"task {made.label}: new_tokens must be positive")
    made.check()
    return made


def _parsed(option: str, text: str, hint: Any) -> Any:
    """The value of a task's option."""
    if hint is str:
        return text
    if option in TOKENS:
        try:
            return parse_tokens(text)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
    return parse_value(text, hint, option)


def digest(questions: Sequence[Question]) -> str:
    """Names a list of questions."""
    return hashlib.sha256(json.dumps([dataclasses.astuple(q) for q in questions]).encode()).hexdigest()


def read_lines(path: str, what: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{what} {path!r}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} {path!r}: expected lines of JSON in UTF-8: {error}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{what} {path!r}, line {number}: expected one JSON object a line: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{what} {path!r}, line {number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{what} {path!r}: there are no lines")
    return rows


def text_of(row: dict[str, Any], key: str, where: str) -> str:
    """A string of a JSON object."""
    found = row.get(key)
    if not isinstance(found, str):
        raise ValueError(f"{where}: expected a string {key!r}, got {type(found).__name__}")
    return found
