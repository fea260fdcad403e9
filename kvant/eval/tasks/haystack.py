"""Text of any length to hide things in: sentences of a small grammar, drawn by a seed, or the sentences of a book."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvant.eval.tasks.base import MARGIN, Count

_WHO = ("gardener", "sailor", "teacher", "neighbour", "baker", "clerk", "painter", "farmer", "doctor", "student")
_VERBS = ("carried", "found", "repaired", "painted", "sold", "borrowed", "cleaned", "forgot", "measured", "moved")
_HOW = ("old", "blue", "heavy", "small", "broken", "wooden", "empty", "narrow", "clean", "quiet")
_WHAT = ("ladder", "table", "boat", "basket", "lamp", "window", "letter", "clock", "chair", "bridge", "wheel", "door")
_WHERE = ("near the harbour", "behind the school", "in the valley", "by the river", "at the market", "on the hill")
_WHEN = ("before noon", "last winter", "after the rain", "every morning", "in the autumn", "late at night")


def sentences(seed: int) -> Iterator[str]:
    """Sentences without end: "The baker moved the old lamp by the river after the rain."."""
    draw = random.Random(seed)
    while True:
        parts = [draw.choice(words) for words in (_WHO, _VERBS, _HOW, _WHAT, _WHERE, _WHEN)]
        yield f"The {parts[0]} {parts[1]} the {parts[2]} {parts[3]} {parts[4]} {parts[5]}."


def book_sentences(path: str, seed: int) -> Iterator[str]:
    """The sentences of a book from a random one on, and again from its beginning."""
    found = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", read_book(path)))
    found = [sentence for sentence in found if 20 <= len(sentence) <= 400]
    if not found:
        raise ValueError(f"book {path!r}: found no sentences")
    first = random.Random(seed).randrange(len(found))
    while True:
        yield from found[first:]
        first = 0


def read_book(path: str) -> str:
    """A UTF-8 text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"book {path!r}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"book {path!r}: expected a UTF-8 text: {error}") from error


def fill(pieces: Iterator[str], make: Callable[[Sequence[str]], str], length: int, count: Count) -> list[str]:
    """As many pieces as a prompt of at most `length` tokens holds, where `make` makes the prompt of them. Found by bisection:
    tokenizers merge across pieces, so that tokens of parts do not add up."""
    room = length - MARGIN
    taken: list[str] = []

    def fits(n: int) -> bool:
        while len(taken) < n:
            taken.append(next(pieces))
        return count(make(taken[:n])) <= room

    if not fits(0):
        raise ValueError(
            f"length must hold the question itself, {count(make([]))} tokens and {MARGIN} more, got {length}"
        )
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return taken[:low]


def insert(pieces: Sequence[str], hidden: Sequence[str], places: Sequence[float]) -> list[str]:
    """The pieces with the hidden ones between them, each at its place between 0 (first) and 1 (last). Of those at the same
    place the earlier one comes first."""
    out = list(pieces)
    order = sorted(range(len(hidden)), key=lambda i: (round(places[i] * len(pieces)), i), reverse=True)
    for i in order:
        out.insert(round(places[i] * len(pieces)), hidden[i])
    return out
