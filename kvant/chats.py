"""Chats: a JSONL file of messages, put through a model's chat template, and which of their tokens the assistant wrote."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvant.spec import parse_json

Message = dict[str, str]
EXPECTED = '{"messages": [{"role": ..., "content": ...}, ...]}, or the list of messages alone'


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One chat as token ids. `answer` is True for tokens of the assistant's answers and for the special token that ends each of
    them, False for all that users, the system or the template wrote."""

    ids: list[int]
    answer: list[bool]
    where: str  # for messages: "FILE, line N"

    @property
    def answered(self) -> int:
        """Tokens of the answers."""
        return sum(self.answer)


@dataclasses.dataclass(frozen=True)
class Chats:
    """Chats of a file. `digest` names them: a SHA-256 that is not that of a plain text of the same bytes."""

    chats: list[list[Message]]
    where: list[str]
    digest: str

    @staticmethod
    def parse(text: str, source: str) -> Chats:
        """Reads JSON lines: {"messages": [{"role": ..., "content": ...}, ...]}, or a bare list of messages. Empty lines are
        skipped. `source` names the file in messages."""
        chats, places = [], []
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            place = f"{source}, line {number}"
            try:
                found = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{place}: expected JSON: {EXPECTED}; {error}") from None
            chats.append(_messages(found.get("messages") if isinstance(found, dict) else found, place))
            places.append(place)
        if not chats:
            raise ValueError(f"{source}: expected at least one chat a line, got an empty file")
        return Chats(chats, places, hashlib.sha256(b"chats\n" + text.encode()).hexdigest())

    def check(self, tokenizer: Any) -> None:
        """Refuses a tokenizer that cannot encode chats."""
        source = self.where[0].rpartition(", line ")[0]
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"{source}: the model's tokenizer has no chat template, which chats are put through")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{source}: chats need a fast tokenizer, which says where in a text a token stands")

    def encode(self, tokenizer: Any) -> Iterator[Encoded]:
        """One chat after another through the tokenizer's chat template."""
        self.check(tokenizer)
        for chat, place in zip(self.chats, self.where, strict=True):
            yield encode(tokenizer, chat, place)

    def ids(self, tokenizer: Any) -> list[int]:
        """Token ids of all chats, one after another, special tokens of the template included."""
        return [i for chat in self.encode(tokenizer) for i in chat.ids]


def _messages(found: Any, place: str) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise ValueError(f"{place}: expected {EXPECTED}")
    for number, message in enumerate(found, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{place}: message {number} has no role and content that are both strings")
    return found


def encode(tokenizer: Any, messages: list[Message], where: str) -> Encoded:
    """Token ids of a whole chat, as the template renders it, and which of them are the assistant's."""
    whole = _render(tokenizer, messages, where)
    if not whole.isascii() and any("\ud800" <= character <= "\udfff" for character in whole):
        raise ValueError(f"{where}: expected Unicode text, got half of a surrogate pair")
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    answer = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, stop = _span(tokenizer, messages, i, whole, where)
        for t, (a, b) in enumerate(offsets):
            if max(a, start) < min(b, stop):
                answer[t] = True
        after = next((t for t, (a, b) in enumerate(offsets) if a >= stop and b > a), None)
        if after is not None and ids[after] in special and not whole[stop : offsets[after][0]].strip():
            answer[after] = True
    return Encoded(ids, answer, where)


def _span(tokenizer: Any, messages: list[Message], i: int, whole: str, where: str) -> tuple[int, int]:
    """Where in the rendered chat the text of message i stands. The chat is rendered once more with a marker in its place: what
    stands before and after the marker is the template's and the other messages'."""
    marker = "kvant-marker"
    while marker in whole:
        marker += "-x"
    before, found, after = _render(
        tokenizer, [*messages[:i], {**messages[i], "content": marker}, *messages[i + 1 :]], where
    ).partition(marker)
    start, stop = len(before), len(whole) - len(after)
    if not whole.startswith(before):  # the template renders reasoning apart: all that the model writes is its answer
        prompt = _render(tokenizer, messages[:i], where, add_generation_prompt=True)
        start = len(prompt) if whole.startswith(prompt) else len(whole) + 1
    if not found or not whole.endswith(after) or start > stop:
        raise ValueError(f"{where}: the chat template does not keep the text of message {i + 1} in one piece")
    return start, stop


def _render(tokenizer: Any, messages: list[Message], where: str, **options: Any) -> str:
    return str(templated(tokenizer, messages, where, tokenize=False, **options))


def templated(tokenizer: Any, messages: Sequence[Message], where: str, **options: Any) -> Any:
    """What the tokenizer's chat template makes of messages. `where` begins the error of a template that refuses them."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except ImportError:
        raise
    except Exception as error:  # a template may raise anything
        raise ValueError(f"{where}: the chat template refuses these messages: {error}") from error
