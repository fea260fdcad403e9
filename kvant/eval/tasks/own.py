"""A user's own questions: lines of JSON with `prompt` and `answer`."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from kvant.eval.tasks.base import Count, Question, Task, read_lines, text_of


@dataclasses.dataclass(frozen=True)
class OwnQuestions(Task):
    """path        the file. Every line has a `prompt`, and an `answer`: a string, or a list of strings.
    answer      a regular expression: its first group (or the whole match) of the last match in the model's answer is what the
                model said. It must be equal to the expected answer, or to one of the list, case and outer blanks aside. Without
                it, the model's answer must contain the expected one; of a list, the share that it contains is the score.
    new_tokens  tokens after which an answer is cut.
    """

    name: ClassVar[str] = "file"
    summary: ClassVar[str] = "your own questions: FILE.jsonl with prompt and answer"
    needs: ClassVar[str] = "FILE.jsonl"
    path: str = ""
    answer: str = ""
    new_tokens: int = 128

    @property
    def label(self) -> str:
        """As on the command line. Two readings of one file are two tasks: stored answers have been scored by one of them."""
        options = super().label.removeprefix(f"{self.name}:path={self.path}").removeprefix(",")
        return f"{self.path}:{options}" if options else self.path

    def check(self) -> None:
        try:
            re.compile(self.answer)
        except re.error as error:
            raise ValueError(
                f"task {self.path}: answer must be a regular expression, got {self.answer!r}: {error}"
            ) from error
        self._rows()

    def _rows(self) -> list[tuple[str, tuple[str, ...]]]:
        out = []
        for number, row in enumerate(read_lines(self.path, "task file"), 1):
            where = f"task file {self.path!r}, line {number}"
            found = row.get("answer")
            answers = found if isinstance(found, list) else [found]
            if not answers or not all(isinstance(each, str) and each.strip() for each in answers):
                raise ValueError(f"{where}: expected 'answer' to be a string or a list of strings, none of them empty")
            out.append((text_of(row, "prompt", where), tuple(answers)))
        return out

    def questions(self, limit: int | None, seed: int, count: Count) -> list[Question]:
        return [
            Question(str(i), prompt, answers, self.new_tokens)
            for i, (prompt, answers) in enumerate(self._rows()[:limit])
        ]

    def score(self, question: Question, answer: str) -> float:
        if not self.answer:
            return sum(each.casefold() in answer.casefold() for each in question.answers) / len(question.answers)
        matches = [match.group(1) if match.re.groups else match.group() for match in re.finditer(self.answer, answer)]
        said = (matches[-1] or "").strip().casefold() if matches else None
        return float(said in {each.strip().casefold() for each in question.answers})
