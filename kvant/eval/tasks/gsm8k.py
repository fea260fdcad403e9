"""GSM8K: grade-school arithmetic in words (Cobbe and others, 2021), zero-shot, scored by the last number of the answer."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import ClassVar

from kvant.eval.tasks.base import Count, Question, Task, read_lines, text_of
from kvant.files import cache_dir

NUMBER = re.compile(r"(?:(?<!\w)-)?\d[\d,]*(?:\.\d+)?")  # a hyphen after a letter or a digit is no minus: passage-7
FILE = "gsm8k.test.jsonl"


def last_number(text: str) -> float | None:
    """The last number of a text, as a person writes it: 1,319 and -3.5."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


@dataclasses.dataclass(frozen=True)
class GSM8K(Task):
    """path: the test set as lines of JSON with `question` and `answer`, whose solution ends in "#### 42". Without it,
    gsm8k.test.jsonl of the working directory or of kvant's cache directory."""

    name: ClassVar[str] = "gsm8k"
    summary: ClassVar[str] = "grade-school arithmetic in words, zero-shot; the last number counts"
    needs: ClassVar[str] = "gsm8k.test.jsonl"
    path: str = ""
    new_tokens: int = 320

    def file(self) -> Path:
        if self.path:
            return Path(self.path)
        places = [Path(FILE), cache_dir() / FILE]
        for place in places:
            if place.is_file():
                return place
        raise ValueError(
            f"task gsm8k: expected the test set at {places[0]} or {places[1]}, or as gsm8k:path=FILE: lines of JSON with "
            "question and answer, as openai/grade-school-math publishes them"
        )

    def check(self) -> None:
        self._rows()

    def _rows(self) -> list[tuple[str, float]]:
        file = str(self.file())
        out = []
        for number, row in enumerate(read_lines(file, "task gsm8k: file"), 1):
            where = f"task gsm8k: file {file!r}, line {number}"
            solution = last_number(text_of(row, "answer", where).split("####")[-1])
            if solution is None:
                raise ValueError(f"{where}: the solution has no number")
            out.append((text_of(row, "question", where), solution))
        return out

    def questions(self, limit: int | None, seed: int, count: Count) -> list[Question]:
        return [
            Question(str(i), text, (repr(solution),), self.new_tokens)
            for i, (text, solution) in enumerate(self._rows()[:limit])
        ]

    def score(self, question: Question, answer: str) -> float:
        return float(last_number(answer) == float(question.answers[0]))
