"""Needles: facts hidden in a long text. The kinds that RULER calls single, multi-key, multi-value and multi-query needles."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

from kvant.eval.tasks.base import Count, Question, Task
from kvant.eval.tasks.haystack import book_sentences, fill, insert, read_book, sentences

CITIES = (
    *("Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Cairo", "Dublin", "Havana", "Kyoto", "Riga", "Quito", "Perth"),
    *(
        "Tunis",
        "Zagreb",
        "Bergen",
        "Accra",
        "Denver",
        "Geneva",
        "Jakarta",
        "Krakow",
        "Madrid",
        "Naples",
        "Ottawa",
        "Porto",
    ),
    *("Santiago", "Tbilisi", "Utrecht", "Valencia", "Warsaw", "Yerevan", "Zurich", "Bogota", "Casablanca", "Dakar"),
)


@dataclasses.dataclass(frozen=True)
class Needle(Task):
    """length   tokens of a prompt.
    depth    where the needle lies, from 0 (first) to 1 (last); -1 draws a place for every needle.
    book     a UTF-8 text to hide them in; without it, generated sentences.
    """

    name: ClassVar[str] = "needle"
    summary: ClassVar[str] = "one number hidden in a long text"
    length: int = 4096
    depth: float = -1.0
    book: str = ""
    keys: ClassVar[int] = 1  # cities with a code in the text
    values: ClassVar[int] = 1  # codes of each city
    asked: ClassVar[int] = 1  # cities that the question is about

    def check(self) -> None:
        if self.length < 128:
            raise ValueError(f"task {self.name}: length must be at least 128 tokens, got {self.length}")
        if not (self.depth == -1.0 or 0.0 <= self.depth <= 1.0):
            raise ValueError(
                f"task {self.name}: depth must be between 0 and 1, or -1 for random places, got {self.depth}"
            )
        if self.book:
            read_book(self.book)

    def questions(self, limit: int | None, seed: int, count: Count) -> list[Question]:
        return [self._question(i, seed * 1_000_003 + i, count) for i in range(20 if limit is None else limit)]

    def _question(self, index: int, seed: int, count: Count) -> Question:
        draw = random.Random(seed)
        cities = draw.sample(CITIES, self.keys)
        codes = {city: [str(draw.randrange(10**6, 10**7)) for _ in range(self.values)] for city in cities}
        asked = draw.sample(cities, self.asked)
        hidden = [f"A code of {city} is {code}." for city in cities for code in codes[city]]
        draw.shuffle(hidden)
        places = [draw.random() if self.depth < 0 else self.depth for _ in hidden]
        many = self.values > 1 or self.asked > 1
        ask = (
            f"{'What are all the codes' if many else 'What is the code'} of {_listed(asked)} in the text above? "
            f"Answer with the number{'s' if many else ''} only."
        )

        def make(pieces: Sequence[str]) -> str:
            text = " ".join(insert(pieces, hidden, places))
            return f"Read the text. It mentions codes of cities. Remember them.\n\n{text}\n\n{ask}"

        stream = book_sentences(self.book, seed) if self.book else sentences(seed)
        prompt = make(fill(stream, make, self.length, count))
        wanted = tuple(code for city in asked for code in codes[city])
        return Question(str(index), prompt, wanted, 16 + 16 * len(wanted))

    def score(self, question: Question, answer: str) -> float:
        digits = answer.replace(",", "")
        return sum(code in digits for code in question.answers) / len(question.answers)


@dataclasses.dataclass(frozen=True)
class MultiKey(Needle):
    """As needle, among needles of other cities."""

    name: ClassVar[str] = "needle-multikey"
    summary: ClassVar[str] = "one number among eight of the same kind"
    keys: ClassVar[int] = 8


@dataclasses.dataclass(frozen=True)
class MultiValue(Needle):
    """One city has several codes, and all are asked for."""

    name: ClassVar[str] = "needle-multivalue"
    summary: ClassVar[str] = "four numbers of one city, all asked for"
    values: ClassVar[int] = 4


@dataclasses.dataclass(frozen=True)
class MultiQuery(Needle):
    """Several cities have a code, and those of four are asked for."""

    name: ClassVar[str] = "needle-multiquery"
    summary: ClassVar[str] = "the numbers of four cities out of eight"
    keys: ClassVar[int] = 8
    asked: ClassVar[int] = 4


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
