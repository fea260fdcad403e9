"""Tasks over the whole of a long text: variable tracking, common words, retrieval and count of a book's passages."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvant.eval.tasks.base import Count, Question, Task
from kvant.eval.tasks.gsm8k import last_number
from kvant.eval.tasks.haystack import fill, insert, read_book, sentences

_SYLLABLES = ("ba", "do", "fi", "ga", "ke", "lo", "mi", "nu", "pe", "ra", "so", "ti", "vu", "wa", "zo")
_INVENTED = re.compile(rf"\b(?:{'|'.join(_SYLLABLES)}){{3,}}\b")  # words of the task `words`


@dataclasses.dataclass(frozen=True)
class Long(Task):
    """length: tokens of a prompt."""

    length: int = 4096

    def check(self) -> None:
        if self.length < 256:
            raise ValueError(f"task {self.name}: length must be at least 256 tokens, got {self.length}")

    def questions(self, limit: int | None, seed: int, count: Count) -> list[Question]:
        return [self.question(i, seed * 1_000_003 + i, count) for i in range(20 if limit is None else limit)]

    def question(self, index: int, seed: int, count: Count) -> Question:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Tracking(Long):
    """Variables that are assigned from each other, hops apart in the text. chains: how many chains there are, of which one is
    asked for; hops: assignments of a chain after the first."""

    name: ClassVar[str] = "tracking"
    summary: ClassVar[str] = "which variables have a value, through a chain of assignments"
    chains: int = 2
    hops: int = 4

    def check(self) -> None:
        super().check()
        if not 1 <= self.chains <= 8 or not 1 <= self.hops <= 16:
            raise ValueError(
                f"task tracking: chains must be 1 to 8 and hops 1 to 16, got {self.chains} and {self.hops}"
            )

    def question(self, index: int, seed: int, count: Count) -> Question:
        draw = random.Random(seed)
        names = [f"V{number}" for number in draw.sample(range(100, 1000), self.chains * (self.hops + 1))]
        values = draw.sample(range(10_000, 100_000), self.chains)
        chains = [names[i :: self.chains] for i in range(self.chains)]
        hidden: list[str] = []
        places: list[float] = []
        for chain, value in zip(chains, values, strict=True):
            steps = [f"Set {chain[0]} to {value}."]
            steps += [f"Set {later} to the value of {earlier}." for earlier, later in itertools.pairwise(chain)]
            hidden += steps
            places += sorted(draw.random() for _ in steps)  # an assignment comes after the one that it reads
        ask = (
            f"The text above sets variables. Which variables have the value {values[0]}, directly or through others? "
            "Answer with their names only."
        )

        def make(pieces: Sequence[str]) -> str:
            return f"{' '.join(insert(pieces, hidden, places))}\n\n{ask}"

        prompt = make(fill(sentences(seed), make, self.length, count))
        return Question(str(index), prompt, tuple(chains[0]), 16 + 8 * len(chains[0]))

    def score(self, question: Question, answer: str) -> float:
        """Names that are right, over names that are right or were said: who names all of them gets little."""
        said, right = set(re.findall(r"V\d{3}\b", answer)), set(question.answers)
        return len(said & right) / len(said | right)


@dataclasses.dataclass(frozen=True)
class CommonWords(Long):
    """A list of invented words, of which some come often. common: how many; times: how often they come, others come twice."""

    name: ClassVar[str] = "words"
    summary: ClassVar[str] = "the most frequent words of a long list"
    common: int = 5
    times: int = 20

    def question(self, index: int, seed: int, count: Count) -> Question:
        draw = random.Random(seed)
        words: dict[str, None] = {}

        def new() -> str:
            syllables = next(n for n in itertools.count(3) if len(words) < 0.9 * len(_SYLLABLES) ** n)
            while True:
                word = "".join(draw.choice(_SYLLABLES) for _ in range(syllables))
                if word not in words:
                    words[word] = None
                    return word

        wanted = [new() for _ in range(self.common)]
        ask = f"Which {self.common} words occur most often in the list above? Answer with these words only."

        def others() -> Iterator[str]:
            while True:
                yield new()

        def make(rare: Sequence[str]) -> str:
            listed = [*wanted * self.times, *[word for word in rare for _ in range(2)]]
            random.Random(seed + 1).shuffle(listed)
            return f"A list of words: {' '.join(listed)}\n\n{ask}"

        prompt = make(fill(others(), make, self.length, count))
        return Question(str(index), prompt, tuple(wanted), 16 + 8 * self.common)

    def check(self) -> None:
        super().check()
        if not 1 <= self.common <= 10 or not 3 <= self.times <= 100:
            raise ValueError(
                f"task words: common must be 1 to 10 and times 3 to 100, got {self.common} and {self.times}"
            )

    def score(self, question: Question, answer: str) -> float:
        """Right ones among the first invented words that were said."""
        said = list(dict.fromkeys(_INVENTED.findall(answer.lower())))[: len(question.answers)]
        return sum(word in said for word in question.answers) / len(question.answers)


@dataclasses.dataclass(frozen=True)
class Passages(Long):
    """Numbered passages of a book. The question quotes a sentence; the answer is its passage's number. book: a UTF-8 text."""

    name: ClassVar[str] = "passage"
    summary: ClassVar[str] = "which passage of a book a sentence is from"
    needs: ClassVar[str] = "a book"
    book: str = ""

    def check(self) -> None:
        super().check()
        if not self.book:
            raise ValueError(f"task {self.name}: needs a text, given as {self.name}:book=FILE")
        if len(_passages(self.book)) < 8:
            raise ValueError(
                f"task {self.name}: book {self.book!r} has fewer than 8 passages of 300 to 1,200 characters"
            )

    def _drawn(self, seed: int) -> Iterator[str]:
        found = _passages(self.book)
        random.Random(seed).shuffle(found)
        yield from found
        raise ValueError(f"task {self.name}: book {self.book!r} is too short for prompts of {self.length} tokens")

    def question(self, index: int, seed: int, count: Count) -> Question:
        def make(passages: Sequence[str], quoted: str = "x" * 200) -> str:
            text = "\n\n".join(f"Passage {i}: {passage}" for i, passage in enumerate(passages, 1))
            return f'{text}\n\nWhich passage contains this sentence: "{quoted}"? Answer with the number of the passage only.'

        passages = fill(self._drawn(seed), make, self.length, count)
        if len(passages) < 2:
            raise ValueError(f"task {self.name}: length must hold at least two passages, got {self.length}")
        counted = Counter(sentence for passage in passages for sentence in _quotable(passage))
        options = [(i, s) for i, passage in enumerate(passages, 1) for s in _quotable(passage) if counted[s] == 1]
        if not options:
            raise ValueError(f"task {self.name}: book {self.book!r} has no sentence of 40 to 200 characters to quote")
        number, sentence = random.Random(seed + 1).choice(options)
        return Question(str(index), make(passages, sentence), (str(number),), 16)

    def score(self, question: Question, answer: str) -> float:
        return float(last_number(answer) == float(question.answers[0]))


@dataclasses.dataclass(frozen=True)
class PassageCount(Passages):
    """Passages of a book, some of them twice. The question is how many different ones there are."""

    name: ClassVar[str] = "passage-count"
    summary: ClassVar[str] = "how many different passages there are, where some come twice"

    def question(self, index: int, seed: int, count: Count) -> Question:
        draw = random.Random(seed + 1)

        def make(passages: Sequence[str]) -> str:
            text = "\n\n".join(f"Passage {i}: {passage}" for i, passage in enumerate(passages, 1))
            return (
                f"{text}\n\nSome of these passages are repeated. How many different passages are there? "
                "Answer with the number only."
            )

        passages = fill(self._drawn(seed), make, self.length, count)
        different = max(1, len(passages) - draw.randrange(0, len(passages) // 2 + 1))
        shown = passages[:different] + [draw.choice(passages[:different]) for _ in range(len(passages) - different)]
        shown.sort(key=len)  # the lengths stay those that fit; then the order is drawn
        draw.shuffle(shown)
        while len(shown) > 1 and count(make(shown)) > self.length:
            shown.remove(max(shown, key=len))
        return Question(str(index), make(shown), (str(len(set(shown))),), 16)


def _passages(book: str) -> list[str]:
    """Paragraphs of a book that are neither short nor long, each once."""
    found = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", read_book(book)))
    return list(dict.fromkeys(part for part in found if 300 <= len(part) <= 1200))


def _quotable(passage: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", passage) if 40 <= len(sentence) <= 200]
