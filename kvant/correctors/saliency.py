"""ZipCache's measure of a token: the attention that it gets from the tokens after it, per query that could see it."""

from __future__ import annotations

import dataclasses

import torch

from kvant.codecs import BoundCodec, Codec, Parts
from kvant.codecs.salient import Salient
from kvant.correctors.base import Corrector, Progress, Tensor

UNIT = 2.0**16  # weights are rounded to this fraction of one, so that float32 sums of them are exact in any order


@dataclasses.dataclass(frozen=True)
class Saliency(Corrector):
    """The normalized attention score of the paper: the mean of a token's attention weights over the queries that see
    it.

    The paper takes some of the prompt's queries as probes and their attention over the whole prompt. Here the probes of
    a group are the queries of its own tokens, and they attend to the group alone: what a page holds then depends on the
    tokens before its end and not on how they came, and nothing has to be kept but a sum for each token of the tail. The
    weights of a KV head's query heads are averaged; the softmax has the usual scale.
    """

    def check(self, codec: Codec) -> None:
        if not codec.ranked:
            raise ValueError(f"Saliency needs a codec that ranks tokens, got {type(codec).__name__}")

    def state_shape(self, head_dim: int, ring: int) -> tuple[int, ...]:
        return (ring,)

    def observe(self, state: Tensor, queries: Tensor, keys: Tensor, progress: Progress) -> Tensor:
        """Sums of weights so far, of every token from the first that is not packed: [tokens, heads]."""
        first, before = progress.first, progress.before
        sums = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
        held = torch.arange(first, max(first, before), device=keys.device)
        sums[: len(held)] = state[:, (held - progress.sink) % progress.ring].mT
        for start in range(first, progress.total, progress.group):
            stop = min(start + progress.group, progress.total)
            new = max(start, before)
            if new >= stop:
                continue
            q = queries[new - before : stop - before].double()
            k = keys[start - first : stop - first].double()
            scores = torch.einsum("qhgd,khd->hgqk", q, k) * k.shape[-1] ** -0.5
            later = torch.arange(start, stop, device=k.device) > torch.arange(new, stop, device=k.device)[:, None]
            weights = scores.masked_fill(later, float("-inf")).softmax(-1).mean(1)  # [heads, queries, keys]
            sums[start - first : stop - first] += ((weights * UNIT).round() / UNIT).sum(1).mT.float()
        stop = max(first, progress.total)  # of sinks alone there is nothing to remember
        tail = torch.arange(max(first, stop - progress.ring), stop, device=keys.device)
        state[:, (tail - progress.sink) % progress.ring] = sums[tail - first].mT
        return sums

    def encode(self, x: Tensor, codec: BoundCodec, known: Tensor) -> Parts:
        assert isinstance(codec, Salient)
        place = torch.arange(len(x), device=x.device) % codec.group
        return codec.encode(x, known[: len(x)] / (codec.group - place)[:, None])
