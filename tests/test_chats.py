"""Chats of a file through a chat template: which tokens are the assistant's, and what is refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from kvant.chats import Chats, encode
from tests.chatting import ALTERNATING, CHATML, PLAIN, THINKING, make_tokenizer, says


def parse(*lines: Any) -> Chats:
    return Chats.parse("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), "some.jsonl")


def marked(template: str, messages: list[dict[str, str]]) -> str:
    """The chat's text with its answers' tokens in brackets."""
    tokenizer = make_tokenizer(template)
    found = encode(tokenizer, messages, "here")
    runs = itertools.groupby(zip(found.answer, found.ids, strict=True), key=lambda pair: pair[0])
    texts = [(answer, tokenizer.decode([token for _, token in run])) for answer, run in runs]
    return "".join(f"[{text}]" if answer else text for answer, text in texts)


def test_lines_are_objects_with_messages_or_lists_of_messages() -> None:
    chats = parse({"messages": says("a", "b"), "id": 7}, "", says("c", "d", "e"))
    assert chats.chats == [says("a", "b"), says("c", "d", "e")]
    assert chats.where == ["some.jsonl, line 1", "some.jsonl, line 3"]
    other = parse({"messages": says("a", "c")})
    assert chats.digest != other.digest == parse({"messages": says("a", "c")}).digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "some.jsonl, line 2: expected JSON"),
        ({"prompt": "a"}, 'line 2: expected {"messages"'),
        ({"messages": []}, 'line 2: expected {"messages"'),
        ("3", 'line 2: expected {"messages"'),
        ([{"role": "user", "content": None}], "line 2: message 1 has no role and content that are both strings"),
        ([*says("a"), {"content": "b"}], "line 2: message 2 has no role"),
    ],
)
def test_wrong_lines_are_named(line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        parse(says("a", "b"), line)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(ValueError, match="some.jsonl: expected at least one chat a line"):
        parse("", "  ")


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            CHATML,
            says("hi", "a b\nc", "so", "é ü"),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[a b\nc<|im_end|>]\n"
            "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[é ü<|im_end|>]\n",
        ),
        (  # the user repeats an answer, and has the last word
            CHATML,
            says("yes", "yes", "yes"),
            "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n[yes<|im_end|>]\n<|im_start|>user\nyes<|im_end|>\n",
        ),
        (CHATML, says("hi", ""), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<|im_end|>]\n"),
        (PLAIN, says("hi", " you ", "so", "far"), "Q: hi\nA: [you]\nQ: so\nA: [far]\n"),
        (
            THINKING,
            says("hi", "<think>\nhm\n</think>\n\nyou", "so", "far"),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[you<|im_end|>]\n"
            "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[far<|im_end|>]\n",
        ),
        (
            THINKING,
            says("hi", "<think>\nhm\n</think>\n\nyou"),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<think>\nhm\n</think>\n\nyou<|im_end|>]\n",
        ),
    ],
)
def test_the_assistants_tokens_are_found(template: str, messages: list[dict[str, str]], expected: str) -> None:
    assert marked(template, messages).encode() == expected.encode()


def test_ids_are_those_of_the_template() -> None:
    tokenizer = make_tokenizer()
    chats = parse(says("hi", "you"), says("a", "b", "c"))
    expected = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats.chats]
    assert [found.ids for found in chats.encode(tokenizer)] == expected
    assert chats.ids(tokenizer) == expected[0] + expected[1]
    assert {260, 261} < set(chats.ids(tokenizer)), "special tokens of the template are there"


def test_what_a_tokenizer_or_a_template_cannot_do_is_told() -> None:
    chats = parse(says("a", "b"), says("a", "b", first="assistant"))
    with pytest.raises(ValueError, match="some.jsonl: the model's tokenizer has no chat template"):
        list(chats.encode(make_tokenizer(None)))
    with pytest.raises(ValueError, match="line 2: the chat template refuses these messages: roles must alternate"):
        list(chats.encode(make_tokenizer(ALTERNATING)))
    upper = "{% for m in messages %}{{ m.content | upper }}|{% endfor %}"
    with pytest.raises(ValueError, match="line 1: the chat template does not keep the text of message 2 in one piece"):
        list(chats.encode(make_tokenizer(upper)))

    class Slow:
        chat_template, is_fast = CHATML, False

    with pytest.raises(ValueError, match="some.jsonl: chats need a fast tokenizer"):
        list(chats.encode(Slow()))
