from __future__ import annotations

import pytest
import torch

from kvant.calibrate.text import PIECE, cut, digest, encode, sample
from tests.engines.test_hf import make_model


class Letters:
    """One token a character."""

    bos_token_id = 3

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


def test_sampled_text_is_reproducible_and_likely() -> None:
    model = make_model("llama", initializer_range=0.5)
    excerpts = sample(model, Letters(), 50, 20, seed=4)
    assert [len(excerpt) for excerpt in excerpts] == [17, 17, 17]
    assert {int(excerpt[0]) for excerpt in excerpts} == {3}
    assert digest(excerpts) == digest(sample(model, Letters(), 50, 20, seed=4))
    assert digest(excerpts) != digest(sample(model, Letters(), 50, 20, seed=5))
    with torch.no_grad():
        logits = model(excerpts[1][None].long()).logits[0, :-1]
    rank = (logits > logits.gather(-1, excerpts[1][1:, None].long())).sum(-1)
    assert int(rank.max()) < 50


def test_sampling_reports_and_starts_without_a_first_token() -> None:
    model = make_model("llama", bos_token_id=None)
    calls: list[tuple[int, int]] = []
    excerpts = sample(model, None, 24, 6, seed=1, progress=lambda done, total: calls.append((done, total)))
    assert len(excerpts) == 4
    assert len({int(excerpt[0]) for excerpt in excerpts}) > 1
    assert calls[-1] == (24, 24)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
