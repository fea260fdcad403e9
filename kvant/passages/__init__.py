"""Texts that come with kvant: what recipes are judged on, and what they are fitted on where no other text is given.

`check` is one conversation with prose, a list, a table, arithmetic, code and a second language (kvant.eval.check). `fit` has
pieces of several kinds, one file each: prose, code, dialogues, arithmetic with its steps, tables, programming, languages, system
prompts with tools. A piece is a plain text or a chat. The two share no sentence, so that nothing is judged on what it was fitted
on.

In the files a piece begins with a line <<text>> or <<chat>>, a turn of a chat with a line <<system>>, <<user>> or <<assistant>>.
"""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources
from typing import Any, Literal

from kvant.chats import templated

Name = Literal["check", "fit"]
Message = dict[str, str]
Piece = str | list[Message]  # a plain text or the turns of a chat
_PIECE = re.compile(r"^<<(text|chat)>>\n", re.MULTILINE)
_TURN = re.compile(r"^<<(system|user|assistant)>>\n", re.MULTILINE)


@functools.cache
def _files(name: Name) -> dict[str, str]:
    """The files of a text as they are stored, by kind of text."""
    here = resources.files(__name__)
    if name == "check":
        return {name: (here / "check.txt").read_text(encoding="utf-8")}
    found = sorted((file for file in (here / name).iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    return {file.name.removesuffix(".txt"): file.read_text(encoding="utf-8") for file in found}


def digest(name: Name) -> str:
    """SHA-256 of a text: figures that were measured on another one, or artifacts that were fitted on it, are kept apart."""
    return hashlib.sha256("".join(_files(name).values()).encode()).hexdigest()


def conversation() -> list[Message]:
    """The turns of the text `check`, user first."""
    return _turns(_files("check")["check"])


def pieces() -> dict[str, list[Piece]]:
    """The pieces of the text `fit` by kind."""
    out: dict[str, list[Piece]] = {}
    for kind, content in _files("fit").items():
        found = _PIECE.split(content)[1:]
        out[kind] = [
            _turns(text) if form == "chat" else text.strip() for form, text in zip(*[iter(found)] * 2, strict=True)
        ]
    return out


def _turns(text: str) -> list[Message]:
    found = _TURN.split(text)[1:]
    return [{"role": role, "content": content.strip()} for role, content in zip(*[iter(found)] * 2, strict=True)]


def encode(tokenizer: Any, piece: Piece) -> list[int]:
    """Token ids of a piece. A chat goes through the model's chat template if it has one, else its turns are one plain text."""
    if isinstance(piece, str):
        return list(tokenizer(piece, verbose=False)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n\n".join(turn["content"] for turn in piece), verbose=False)["input_ids"])
    try:
        return _template(tokenizer, piece)
    except ImportError:
        raise
    except (
        Exception
    ):  # some templates refuse system turns, with an exception of any kind: the user's turn then has the prompt
        if piece[0]["role"] != "system":
            raise
        system, user, *rest = piece
        return _template(tokenizer, [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest])


def _template(tokenizer: Any, turns: list[Message]) -> list[int]:
    return list(templated(tokenizer, turns, "the built-in text", return_dict=True)["input_ids"])
