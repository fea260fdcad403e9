"""The text to calibrate on: a user's, or the model's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from kvant.engines.hf import ModelShape

Tensor = torch.Tensor
PIECE = 1 << 16  # characters that are turned into tokens at a time
CACHE_BYTES = 384 << 20  # of the plain cache that sampling fills
TOP = 50  # likeliest tokens that sampling draws from
BATCH = 16


def encode(tokenizer: Any, text: str) -> Tensor:
    """The tokens of a text: int32 [n]. A long text is read in pieces that end at line ends, in little memory."""
    ids: list[Tensor] = []
    start = 0
    while start < len(text):
        stop = min(len(text), start + PIECE)
        if stop < len(text):
            stop = max(text.rfind("\n", start, stop) + 1, start) or stop
            stop = stop if stop > start else start + PIECE
        piece = tokenizer(text[start:stop], add_special_tokens=start == 0, verbose=False)["input_ids"]
        ids.append(torch.tensor(piece, dtype=torch.int32))
        start = stop
    return torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int32)


def cut(ids: Tensor, tokens: int, length: int) -> list[Tensor]:
    """`tokens` tokens as runs of at most `length`, spread evenly over the text, none of them twice."""
    assert 0 < tokens <= len(ids), (tokens, len(ids))
    count = -(-tokens // length)
    sizes = [tokens // count + (i < tokens % count) for i in range(count)]
    spare = len(ids) - tokens
    runs, start = [], 0
    for index, size in enumerate(sizes):
        first = start + (round(spare * index / (count - 1)) if count > 1 else 0)
        runs.append(ids[first : first + size])
        start += size
    return runs


def digest(ids: list[Tensor]) -> str:
    """Names a text by its tokens."""
    found = hashlib.sha256()
    for run in ids:
        found.update(run.to(torch.int32).contiguous().numpy().tobytes())
    return found.hexdigest()


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    tokens: int,
    length: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Text that the model itself writes from nothing: runs of at most `length` tokens, drawn from the 50 likeliest.

    A run starts with the model's first token, or a random one where it has none. The end-of-text token does not end it:
    what follows is another text, as in what models are trained on.
    """
    shape = ModelShape.of(model)
    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    count = -(-tokens // length)
    length = -(-tokens // count)
    kept = 2 * len(shape.layers) * shape.heads * shape.head_dim * length * model.dtype.itemsize
    batch = max(1, min(BATCH, count, CACHE_BYTES // kept))
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None:
        first = model.config.get_text_config(decoder=True).bos_token_id
    runs: list[Tensor] = []
    while len(runs) < count:
        rows = min(batch, count - len(runs))
        ids = torch.randint(vocabulary, (rows, 1), generator=generator)
        if first is not None:
            ids.fill_(first)
        cache = DynamicCache(config=model.config)
        while ids.shape[1] < length:
            logits = model(ids[:, -1:].to(device), past_key_values=cache, use_cache=True).logits[:, -1].float().cpu()
            top = logits.topk(min(TOP, logits.shape[-1]))
            drawn = torch.multinomial(top.values.softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, top.indices.gather(-1, drawn)), 1)
            if progress is not None:
                progress(len(runs) * length + rows * ids.shape[1], count * length)
        runs += list(ids.to(torch.int32))
    return runs
