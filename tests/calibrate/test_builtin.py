"""The built-in text: every kind of it is read, as the model serves it, wherever kvant is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import passages
from kvant.calibrate import builtin
from kvant.calibrate.builtin import LEAST, MEAN_TOKENS, TOKENS, excerpts, most_tokens, shares, tokens_for
from kvant.calibrate.run import calibrate
from tests.chatting import ALTERNATING, make_tokenizer
from tests.engines.test_hf import make_model

KINDS = ["arithmetic", "code", "dialogue", "languages", "programming", "prose", "tables", "tools"]
START, END = 260, 261  # <|im_start|> and <|im_end|>


def pieces_of(excerpt: torch.Tensor, tokenizer: Any) -> list[str]:
    """The kinds of the pieces whose beginnings make up an excerpt, one after another."""
    encoded = [(kind, passages.encode(tokenizer, p)) for kind, pieces in passages.pieces().items() for p in pieces]
    ids, out = excerpt.tolist(), []
    while ids:
        alike = [(_alike(ids, whole), kind) for kind, whole in encoded]
        length, kind = max(alike)
        assert length > 8, "no piece begins like this"
        ids = ids[length:]
        out.append(kind)
    return out


def _alike(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize(
    ("total", "sizes", "expected"),
    [
        (30, [100, 100, 100], [10, 10, 10]),
        (31, [100, 4, 100], [13, 4, 14]),
        (1000, [7, 5], [7, 5]),
        (1, [9, 9], [0, 1]),
        (0, [3], [0]),
    ],
)
def test_a_total_is_split_evenly(total: int, sizes: list[int], expected: list[int]) -> None:
    assert shares(total, sizes) == expected


def test_every_kind_has_the_same_share_of_as_few_pieces_as_have_so_many_tokens() -> None:
    tokenizer = make_tokenizer()
    found = excerpts(tokenizer, TOKENS, 1024)
    assert list(passages.pieces()) == KINDS
    assert sum(map(len, found)) == TOKENS
    share = TOKENS // len(KINDS)
    tokens, pieces = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for excerpt in found:
        kinds = pieces_of(excerpt, tokenizer)
        assert len(set(kinds)) == 1
        tokens[kinds[0]] += len(excerpt)
        pieces[kinds[0]] += len(kinds)
    assert set(tokens.values()) == {share}
    for kind, each in passages.pieces().items():
        sizes = [len(passages.encode(tokenizer, piece)[:1024]) for piece in each]
        assert sum(sizes[: pieces[kind] - 1]) < share <= sum(sizes[: pieces[kind]])
    lengths = sorted(map(len, found))
    assert lengths[0] < 400, "short contexts"
    assert lengths[-4:] == [1024] * 4, "and long ones"


def test_all_of_it_is_read_on_a_gpu() -> None:
    whole = sum(len(passages.encode(make_tokenizer(), piece)) for each in passages.pieces().values() for piece in each)
    assert sum(map(len, excerpts(make_tokenizer(), 2 * whole, 8192))) == whole
    cpu, gpu = (most_tokens(torch.device(name)) for name in ("cpu", "cuda"))
    assert cpu == TOKENS and gpu > whole / 3, "a token of a model's vocabulary is at least three bytes of this text"
    assert tokens_for(kvant.recipes.get("kvant-2"), torch.device("cuda")) == gpu
    assert tokens_for(kvant.recipes.get("kvant-4-fast"), torch.device("cuda")) == MEAN_TOKENS


def test_chats_begin_as_the_template_does_and_plain_texts_do_not() -> None:
    tokenizer = make_tokenizer()
    found = excerpts(tokenizer, TOKENS, 1024)
    chats = [excerpt for excerpt in found if int(excerpt[0]) == START]
    plain = [excerpt for excerpt in found if START not in excerpt]
    assert len(chats) + len(plain) == len(found)
    assert len(chats) >= 8 and len(plain) >= 3
    assert sum(END in excerpt for excerpt in chats) >= 8, "whole turns"
    assert any(tokenizer.decode(excerpt).startswith("<|im_start|>system\n") for excerpt in chats)


def test_a_model_without_a_template_reads_everything_as_plain_text() -> None:
    tokenizer = make_tokenizer(None)
    found = excerpts(tokenizer, TOKENS, 1024)
    assert sum(map(len, found)) == TOKENS
    assert not any(START in excerpt or END in excerpt for excerpt in found)
    assert not any("<<" in tokenizer.decode(excerpt[:20]) for excerpt in found), "no marks of the files"
    turns = passages.pieces()["dialogue"][1]
    assert tokenizer.decode(passages.encode(tokenizer, turns)).startswith("hi\n\nHello! How can I help you today?")


def test_where_a_template_refuses_a_system_turn_the_user_has_the_prompt() -> None:
    tokenizer = make_tokenizer(ALTERNATING)
    (chat,) = (piece for piece in passages.pieces()["dialogue"] if piece[0]["role"] == "system")  # type: ignore[index]
    text = tokenizer.decode(passages.encode(tokenizer, chat))
    assert text.startswith("<|im_start|>You are a helpful, concise assistant.\n\nRewrite this")
    with pytest.raises(Exception, match="roles must alternate"):
        passages.encode(tokenizer, [{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(("tokens", "count"), [(40, 1), (2 * LEAST, 2), (MEAN_TOKENS, 8)])
def test_few_tokens_are_few_excerpts(tokens: int, count: int) -> None:
    found = excerpts(make_tokenizer(), tokens, 1024)
    assert len(found) == count and sum(map(len, found)) == tokens


def test_a_short_context_bounds_the_excerpts_and_too_many_tokens_are_refused() -> None:
    tokenizer = make_tokenizer()
    found = excerpts(tokenizer, TOKENS, 50)
    pieces = sum(map(len, passages.pieces().values()))
    assert max(map(len, found)) == 50 and sum(map(len, found)) == TOKENS
    most, asked = 50 * pieces, 50 * pieces + 1
    with pytest.raises(ValueError, match=f"the built-in text has {most} tokens .* at least {asked}: give a longer"):
        excerpts(tokenizer, asked, 50, exactly=True)


def test_it_is_fitted_on_where_no_text_is_given() -> None:
    model, tokenizer = make_model("llama", vocab_size=262), make_tokenizer()
    stages: list[str] = []
    first = calibrate(model, tokenizer, "kvant-2", tokens=400, progress=lambda stage, *_: stages.append(stage))
    assert first.source["text"] == "built in" and first.source["text_sha256"] == passages.digest("fit")
    assert first.source["tokens"] == 400 and first.source["kinds"] == KINDS[: 400 // LEAST]
    assert list(dict.fromkeys(stages)) == ["measuring", "fitting"]
    again = calibrate(model, tokenizer, "kvant-2", tokens=400)
    plain = calibrate(model, make_tokenizer(None), "kvant-2", tokens=400)
    assert first.digest == again.digest != plain.digest
    means = calibrate(model, tokenizer, "kvant-4-fast")
    assert means.source["tokens"] == MEAN_TOKENS
    kvant.Cache(model, artifact=means)
    with pytest.raises(ValueError, match="text is not given: a tokenizer is needed, or token ids in its place"):
        calibrate(model, None, "kvant-2")


def test_recipes_that_learn_means_read_less_than_others_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant import recipes
    from kvant.calibrate.run import calibrate_all

    monkeypatch.setattr(builtin, "TOKENS", 300)
    monkeypatch.setattr(builtin, "MEAN_TOKENS", 100)
    chosen = [recipes.get(name) for name in ("kvant-4-fast", "saw-int4-hessian", "kvant-4-fast:sink=4")]
    found = calibrate_all(make_model("llama", vocab_size=262), make_tokenizer(), chosen)
    assert [artifact.source["tokens"] for artifact in found] == [100, 300, 100]


def test_chats_are_chats() -> None:
    """Turns alternate from the user's on, after a system turn at most, and the assistant has the last word."""
    for kind, pieces in passages.pieces().items():
        for piece in pieces:
            if isinstance(piece, str):
                assert len(piece) > 80, kind
                continue
            roles = [turn["role"] for turn in piece if turn["role"] != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2), (kind, piece)
            assert [turn["role"] for turn in piece].count("system") == (piece[0]["role"] == "system")
            assert all(turn["content"] for turn in piece)


def test_every_file_of_the_texts_is_in_a_wheel() -> None:
    root = Path(kvant.__file__).parent
    project = root.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("kvant is installed: it was found in the wheel")
    patterns = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["kvant"]
    packed = {path for pattern in patterns for path in root.glob(pattern)}
    texts = {path for path in (root / "passages").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert len(texts) == 1 + len(KINDS) and texts <= packed
