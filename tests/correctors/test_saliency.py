from __future__ import annotations

import pytest
import torch

from kvant.codecs.channel import Channel
from kvant.codecs.salient import Salient
from kvant.correctors import Progress
from kvant.correctors.saliency import Saliency
from kvant.recipe import Stream, Window


def written_out(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Normalized attention scores inside one group: q is [tokens, queries, dim], k is [tokens, dim]."""
    n = len(k)
    sums = torch.zeros(n, dtype=torch.float64)
    for t in range(n):
        for head in range(q.shape[1]):
            weights = torch.softmax(k[: t + 1].double() @ q[t, head].double() * k.shape[1] ** -0.5, 0)
            sums[: t + 1] += weights / q.shape[1]
    return sums / torch.arange(n, 0, -1)


@pytest.mark.parametrize("chunks", [[96], [1] * 96, [5, 40, 51], [32, 32, 32], [31, 2, 63]])
@pytest.mark.parametrize("sink", [0, 3])
def test_saliency_is_the_mean_attention_of_the_queries_that_see_a_token(chunks: list[int], sink: int) -> None:
    torch.manual_seed(1)
    group, codec, corrector = 16, Salient("channel", 16, 0.25), Saliency()
    window = Window(sink=sink, flush=32)
    n = 96
    q, k = torch.randn(n, 2, 3, 24), torch.randn(n, 2, 24)
    state = torch.zeros(2, *corrector.state_shape(24, window.ring))
    ranked: list[torch.Tensor] = []

    class Spy(Salient):
        def encode(self, x: torch.Tensor, saliency: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            assert saliency is not None
            ranked.append(saliency)
            return super().encode(x, saliency)

    before = 0
    for count in chunks:
        first = max(sink, window.packed_end(before))
        progress = Progress(first, before, before + count, sink, window.ring, group)
        known = corrector.observe(state, q[before : before + count], k[first : before + count], progress)
        end = window.packed_end(before + count)
        if end > first:
            corrector.encode(k[first:end], Spy("channel", group, 0.25), known)
        before += count
    found = torch.cat(ranked)
    assert len(found) == window.packed_end(n) - sink
    for start in range(0, len(found), group):
        at = slice(sink + start, sink + start + group)
        for head in range(2):
            expected = written_out(q[at, head], k[at, head])
            torch.testing.assert_close(found[start : start + group, head].double(), expected, rtol=0, atol=2e-5)
    assert codec.ranked


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="Salient needs a corrector"):
        Stream(Salient(), window=Window(flush=128))
    with pytest.raises(ValueError, match="a codec that ranks tokens, got Channel"):
        Stream(Channel(), window=Window(flush=128), corrector=Saliency())
