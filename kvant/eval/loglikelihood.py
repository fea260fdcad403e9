"""Log-likelihoods of continuations, from a packed cache.

A forward pass over a whole text attends to its own unpacked keys and values, so every recipe would score as (nearly) lossless. Here
a context is prefilled but for its last token. The last token of the context and the continuation are then read as decode would have
read them (`Cache.as_decoded`, kvant.ops.replay): each token attends to the packed context and to the packed tokens before it, with
the recipe's windows. So every scored distribution comes from a decode step, that of a continuation of one token too.

Continuations of one context share its prefill: their sequences are forked. Continuations that differ in their last token only
(the letters of a multiple-choice question) are read once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvant.engines.hf import Cache
from kvant.engines.hybrid import HybridCache, packed_of
from kvant.eval.padding import pad_rows

Tensor = torch.Tensor
BLOCK = 64  # columns that are read at a time: logits are held for these, and attention weights of these over all tokens


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A continuation and what comes before it, as token ids.

    prompt   prefilled: the context without its last token; may be empty
    decoded  read as decode would: the last token of the context, then the continuation without its last token
    targets  the continuation; targets[i] is scored from the distribution after decoded[i]
    """

    prompt: tuple[int, ...]
    decoded: tuple[int, ...]
    targets: tuple[int, ...]

    @staticmethod
    def of(context: Sequence[int], continuation: Sequence[int], limit: int) -> Continuation:
        """At most `limit` tokens are read: where there are more, the context loses its first ones."""
        if not context or not continuation:
            raise ValueError(
                f"context and continuation need at least one token each, got {len(context)} and {len(continuation)}"
            )
        if len(continuation) > limit:
            raise ValueError(f"the continuation has {len(continuation)} tokens, and the model's context is {limit}")
        inputs = tuple([*context, *continuation][-(limit + 1) : -1])
        split = len(inputs) - len(continuation)
        return Continuation(inputs[:split], inputs[split:], tuple(continuation))

    @property
    def inputs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the model reads; continuations with the same inputs are one row of a batch."""
        return self.prompt, self.decoded


def in_order(continuations: Sequence[Continuation]) -> list[int]:
    """Indices of continuations such that those next to each other make good batches: long prompts come first, and the same prompt
    comes once."""

    def key(index: int) -> tuple[int, tuple[int, ...], int, tuple[int, ...], int]:
        one = continuations[index]
        return -len(one.prompt), one.prompt, -len(one.decoded), one.decoded, index

    return sorted(range(len(continuations)), key=key)


def first_batch(continuations: Sequence[Continuation], rows: int) -> int:
    """How many of the continuations, from the first on, make a batch of at most `rows` rows. Prompts that are empty and prompts
    that are not do not share one."""
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for count, one in enumerate(continuations):
        if bool(one.prompt) != bool(continuations[0].prompt) or (one.inputs not in seen and len(seen) == rows):
            return count
        seen.add(one.inputs)
    return len(continuations)


@torch.no_grad()
def score(
    model: Any,
    cache: Cache | HybridCache,
    continuations: Sequence[Continuation],
    *,
    pad: int = 0,
    dtype: torch.dtype | None = None,
) -> list[tuple[float, bool]]:
    """Log-likelihood of every continuation, and whether greedy decoding would have written it. One batch, see `first_batch`.

    cache  is emptied first, and left empty
    pad    a token id for columns that are padding; it changes nothing
    dtype  of the softmax; that of the logits where None
    """
    rows = list(dict.fromkeys(one.inputs for one in continuations))  # [(prompt, decoded)]
    place = {inputs: row for row, inputs in enumerate(rows)}
    device = model.device
    of_row = torch.tensor([place[one.inputs] for one in continuations], device=device)
    targets, scored = pad_rows([one.targets for one in continuations], 0, "right", device)
    found = torch.zeros(len(continuations), dtype=torch.float64, device=device)
    greedy = torch.ones(len(continuations), dtype=torch.bool, device=device)
    cache.reset()
    try:
        for start, logits in _decoded(model, cache, rows, pad):
            block = slice(start, start + logits.shape[1])
            wanted, counts = targets[:, block], scored[:, block]  # [continuations, columns of the block]
            column = torch.arange(logits.shape[1], device=device)
            log_probs = torch.log_softmax(logits, -1, dtype=dtype)
            picked = log_probs[of_row[:, None], column, wanted].double()
            found += torch.where(counts, picked, 0.0).sum(1)
            greedy &= ((logits.argmax(-1)[of_row] == wanted) | ~counts).all(1)
    finally:
        packed_of(cache).as_decoded = False
        cache.reset()
    return list(zip(found.tolist(), greedy.tolist(), strict=True))


def _decoded(
    model: Any, cache: Cache | HybridCache, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], pad: int
) -> Iterator[tuple[int, Tensor]]:
    """Prefills the prompts, then reads the rest as decode would: (first column, logits [rows, columns, vocabulary]) of every
    block. A row's tokens lie in neighbouring columns: prompts are padded on the left, what is decoded on the right."""
    device = model.device
    prompts = list(dict.fromkeys(prompt for prompt, _ in rows))
    mask = torch.zeros(len(rows), 0, dtype=torch.bool, device=device)
    if prompts != [()]:
        assert () not in prompts
        ids, mask = pad_rows(prompts, pad, "left", device)
        packed_of(cache).as_decoded = False
        position = (mask.cumsum(1) - 1).clamp_min(0)
        model(
            ids,
            attention_mask=mask.long(),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        source = torch.tensor([prompts.index(prompt) for prompt, _ in rows], device=device)
        mask = mask[source]
        if len(prompts) < len(rows):
            cache.batch_select_indices(source)
    ids, new = pad_rows([decoded for _, decoded in rows], pad, "right", device)
    before = mask.sum(1, keepdim=True)
    position = before + torch.arange(ids.shape[1], device=device)
    packed_of(cache).as_decoded = True
    for start in range(0, ids.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        mask = torch.cat((mask, new[:, block]), 1)
        yield (
            start,
            model(
                ids[:, block],
                attention_mask=mask.long(),
                position_ids=position[:, block],
                past_key_values=cache,
                use_cache=True,
            ).logits,
        )
