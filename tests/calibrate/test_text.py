from __future__ import annotations

import pytest
import torch

from kvant.calibrate.text import PIECE, cut, encode


class Letters:
    """One token a character."""

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}


@pytest.mark.parametrize("line", [7, 1000, 3 * PIECE])
def test_long_texts_are_read_whole(line: int) -> None:
    text = ("x" * (line - 1) + "\n") * (2 * PIECE // line + 1) + "tail"
    ids = encode(Letters(), text)
    assert ids.dtype == torch.int32
    assert "".join(map(chr, ids[1:].tolist())) == text  # the first token of the text comes once
    assert int(ids[0]) == 1
    assert len(encode(Letters(), "")) == 0


@pytest.mark.parametrize(("total", "tokens", "length"), [(100, 100, 30), (1000, 90, 30), (1000, 91, 30), (50, 7, 30)])
def test_runs_are_spread_over_the_text_without_overlap(total: int, tokens: int, length: int) -> None:
    excerpts = cut(torch.arange(total), tokens, length)
    flat = torch.cat(excerpts)
    assert len(flat) == tokens
    assert len(set(flat.tolist())) == tokens
    assert max(map(len, excerpts)) <= length
    for excerpt in excerpts:
        assert bool((excerpt.diff() == 1).all())
    if len(excerpts) > 1:
        assert int(flat[0]) == 0
        assert int(flat[-1]) == total - 1
