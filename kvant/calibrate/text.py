"""Given texts as excerpts of token ids."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

Tensor = torch.Tensor
PIECE = 1 << 16  # characters that are tokenized at a time


def encode(tokenizer: Any, text: str) -> Tensor:
    """Token ids of a text: int32 [n]. A long text is tokenized in pieces that end at line ends, to bound memory."""
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
    """`tokens` tokens as excerpts of at most `length`, spread evenly over the text, none of them twice."""
    assert 0 < tokens <= len(ids), (tokens, len(ids))
    count = -(-tokens // length)
    sizes = [tokens // count + (i < tokens % count) for i in range(count)]
    spare = len(ids) - tokens
    excerpts, start = [], 0
    for index, size in enumerate(sizes):
        first = start + (round(spare * index / (count - 1)) if count > 1 else 0)
        excerpts.append(ids[first : first + size])
        start += size
    return excerpts


def digest(ids: list[Tensor]) -> str:
    """SHA-256 of the token ids of excerpts."""
    found = hashlib.sha256()
    for excerpt in ids:
        found.update(excerpt.to(torch.int32).contiguous().numpy().tobytes())
    return found.hexdigest()
