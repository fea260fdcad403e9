"""The texts that are scored: segments of one text, or chats of which only the answers count."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from kvant.chats import Encoded

Tensor = torch.Tensor


class Batch(NamedTuple):
    """Rows that are read together.

    ids     int64 [rows, columns]; the last column is only a target
    prompt  columns that are prefilled; the others are read as decoded
    real    bool [rows, columns], False where a column is padding; None where none is. Padding stands before a row's first token
            and after its last.
    scored  bool [rows, columns], True for tokens whose prediction, made one column before, is scored; None: all after the
            prompt's next one. None of the first prompt + 1 columns is scored.
    """

    ids: Tensor
    prompt: int
    real: Tensor | None = None
    scored: Tensor | None = None

    def targets(self, start: int, stop: int) -> Tensor:
        """Of the columns [start, stop) that are fed, which predictions are scored: bool [rows, stop - start]."""
        if self.scored is None:
            return torch.ones(len(self.ids), stop - start, dtype=torch.bool, device=self.ids.device)
        return self.scored[:, start + 1 : stop + 1]

    def positions(self, start: int, stop: int) -> Tensor:
        """Position of every fed token in its own sequence: int64 [rows, stop - start]; 0 for padding before it."""
        if self.real is None:
            return torch.arange(start, stop, device=self.ids.device).expand(len(self.ids), -1)
        return (self.real[:, :stop].cumsum(1) - 1).clamp_min(0)[:, start:]

    def to(self, device: torch.device) -> Batch:
        real, scored = (None if x is None else x.to(device) for x in (self.real, self.scored))
        return Batch(self.ids.to(device), self.prompt, real, scored)


class Text(Protocol):
    """What `evaluate` reads."""

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""

    @property
    def length(self) -> int:
        """Mean length of a sequence at its end, in tokens."""

    @property
    def ragged(self) -> bool:
        """Whether rows of a batch may have padding."""

    @property
    def lengths(self) -> Counter[int]:
        """How many scored predictions are made from a context of so many tokens."""

    def batches(self, rows: int) -> Iterator[Batch]: ...


def beginning(ids: Sequence[int], bos: int | None) -> list[int]:
    """What every part of a text begins with: token `bos`, where the tokenizer has one and wrote it before the text."""
    return [bos] if bos is not None and len(ids) and ids[0] == bos else []


@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments of a text. ids is int64 [segments, prompt + scored + 1]; the last column is only a target."""

    ids: Tensor
    prompt: int

    ragged = False

    @property
    def scored(self) -> int:
        """Tokens per segment whose prediction is scored."""
        return self.ids.shape[1] - 1 - self.prompt

    @property
    def tokens(self) -> int:
        return self.scored * len(self.ids)

    @property
    def length(self) -> int:
        return self.ids.shape[1] - 1

    @property
    def lengths(self) -> Counter[int]:
        return Counter(dict.fromkeys(range(self.prompt + 1, self.ids.shape[1]), len(self.ids)))

    def batches(self, rows: int) -> Iterator[Batch]:
        for first in range(0, len(self.ids), rows):
            yield Batch(self.ids[first : first + rows], self.prompt)

    @staticmethod
    def over(
        ids: Sequence[int], context: int, tokens: int, prompt: int | None = None, bos: int | None = None
    ) -> Segments:
        """As many segments as it takes to score at least `tokens` tokens, spread evenly over the text. No more than the text has
        behind a prompt: a token that is scored twice would make standard errors too small. Where the text begins with token `bos`,
        so does every segment: a model that was trained with it predicts otherwise without it."""
        prompt = context // 3 if prompt is None else prompt
        if context < 2:
            raise ValueError(f"context must be at least 2 tokens, got {context}")
        if not 1 <= prompt < context:
            raise ValueError(
                f"prompt must be at least 1 and shorter than the context of {context} tokens, got {prompt}"
            )
        if tokens < 1:
            raise ValueError(f"tokens must be positive, got {tokens}")
        if len(ids) < context + 1:
            raise ValueError(f"the text has {len(ids)} tokens, a context of {context} needs at least {context + 1}")
        most = len(ids) - 1 - prompt
        if tokens > most:
            raise ValueError(
                f"tokens must be at most {most}, got {tokens}: the text has {len(ids)} tokens, and {prompt} of them are a prompt"
            )
        count = math.ceil(tokens / (context - prompt))
        length = prompt + math.ceil(tokens / count) + 1
        begin = beginning(ids, bos)
        text, own = ids[len(begin) :], length - len(begin)
        room = len(text) - own
        starts = [round(room * i / max(1, count - 1)) for i in range(count)]
        return Segments(torch.tensor([[*begin, *text[start : start + own]] for start in starts]), prompt)


class Row(NamedTuple):
    """One chat, up to its last scored token."""

    ids: list[int]
    scored: list[bool]
    prompt: int  # tokens that are prefilled

    @property
    def decoded(self) -> int:
        """Tokens that are read as decoded, and the last one, which is only a target."""
        return len(self.ids) - self.prompt


@dataclasses.dataclass(frozen=True)
class ChatSegments:
    """Chats of which the answers are scored.

    What stands before the first answer is prefilled, but for its last token, whose prediction is the answer's first token. From
    there on all is read as decoded, later messages of the user too. So every scored prediction is made from the packed cache, as
    decode makes it; a server would read the user's later messages as a chunk over the packed history.
    """

    rows: list[Row]

    ragged = True

    @property
    def tokens(self) -> int:
        return sum(sum(row.scored) for row in self.rows)

    @property
    def length(self) -> int:
        return round(sum(len(row.ids) - 1 for row in self.rows) / len(self.rows))

    @property
    def lengths(self) -> Counter[int]:
        return Counter(at for row in self.rows for at, scored in enumerate(row.scored) if scored)

    def batches(self, rows: int) -> Iterator[Batch]:
        """Chats with about as many tokens to decode share a batch. Prompts are padded on the left and the rest on the right, so
        that all begin to decode in one column."""
        order = sorted(self.rows, key=lambda row: (row.decoded, row.prompt), reverse=True)
        for first in range(0, len(order), rows):
            some = order[first : first + rows]
            prompt = max(row.prompt for row in some)
            columns = prompt + max(row.decoded for row in some)
            ids = torch.zeros(len(some), columns, dtype=torch.int64)
            real, scored = (torch.zeros(len(some), columns, dtype=torch.bool) for _ in range(2))
            for i, row in enumerate(some):
                place = slice(prompt - row.prompt, prompt + row.decoded)
                ids[i, place], scored[i, place] = torch.tensor(row.ids), torch.tensor(row.scored)
                real[i, place] = True
            yield Batch(ids, prompt, None if bool(real.all()) else real, scored)

    @staticmethod
    def of(chats: Iterable[Encoded], tokens: int | None = None, longest: int | None = None) -> ChatSegments:
        """Chats in the order given, until `tokens` tokens of answers are scored (default: all of them); the last chat is cut
        there. A chat of more than `longest` tokens, the model's context, is refused."""
        if tokens is not None and tokens < 1:
            raise ValueError(f"tokens must be positive, got {tokens}")
        left = tokens
        rows: list[Row] = []
        for chat in chats:
            if not chat.answered:
                raise ValueError(f"{chat.where}: the chat has no answer of the assistant, and nothing to score")
            if longest is not None and len(chat.ids) > longest:
                raise ValueError(
                    f"{chat.where}: the chat has {len(chat.ids)} tokens, and the model's context is {longest}"
                )
            prompt = max(1, chat.answer.index(True) - 1)
            places = [at for at, answer in enumerate(chat.answer) if answer and at > prompt][:left]
            if not places:
                continue  # one token of answer after one token of prompt
            end = places[-1] + 1
            rows.append(Row(chat.ids[:end], [at > prompt and chat.answer[at] for at in range(end)], prompt))
            left = None if left is None else left - len(places)
            if left == 0:
                break
        if not rows:
            raise ValueError("the chats have no token to score")
        return ChatSegments(rows)
