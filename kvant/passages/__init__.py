"""Texts that come with kvant: conversations with prose, a list, a table, arithmetic, code and a second language.

`check` is what recipes are judged on (kvant.eval.check); `fit` is what a recipe that needs only means is fitted on. The two
share no sentence, so that nothing is judged on what it was fitted on.
"""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources
from typing import Any, Literal

Name = Literal["check", "fit"]
_TURN = re.compile(r"^<<(user|assistant)>>\n", re.MULTILINE)


@functools.cache
def source(name: Name) -> str:
    """A text as it is stored: turns begin with a line <<user>> or <<assistant>>."""
    return (resources.files(__name__) / f"{name}.txt").read_text(encoding="utf-8")


def digest(name: Name) -> str:
    """Names a text: figures that were measured on another one are not compared with its own."""
    return hashlib.sha256(source(name).encode()).hexdigest()[:16]


def messages(name: Name) -> list[dict[str, str]]:
    """The turns of a conversation, user first."""
    parts = _TURN.split(source(name))[1:]
    return [{"role": role, "content": text.strip()} for role, text in zip(parts[::2], parts[1::2], strict=True)]


def encode(tokenizer: Any, name: Name) -> list[int]:
    """Token ids of a conversation, in the model's chat template if it has one: what a model serves is mostly that."""
    turns = messages(name)
    if getattr(tokenizer, "chat_template", None):
        return list(tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"])
    return list(tokenizer("\n\n".join(turn["content"] for turn in turns), verbose=False)["input_ids"])
