"""The text to calibrate on: a user's, or the model's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kvant.calibrate.checkpoint import Checkpoint
from kvant.engines.hf import ModelShape

Tensor = torch.Tensor
PIECE = 1 << 16  # characters that are tokenized at a time
CACHE_BYTES = 384 << 20  # of the unquantized cache while the model writes
TOP = 50  # top-k of sampling
BATCH = 16
CHUNK = 128  # tokens per row that are prefilled at a time when an interrupted text is continued


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


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    tokens: int,
    length: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> list[Tensor]:
    """Text that the model writes without a prompt: excerpts of at most `length` tokens, by top-50 sampling.

    An excerpt starts with the BOS token, or with a random token where the model has none. It does not end at an end-of-text
    token: another text follows, as in packed training data. With a checkpoint, an interrupted call continues where it stopped.
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
    so_far = Written.of(checkpoint.load(), length) if checkpoint is not None else None
    so_far = so_far or Written([], None, generator.get_state())
    generator.set_state(so_far.generator)
    try:
        while len(so_far.excerpts) < count:
            ids = so_far.ids
            if ids is None:
                rows = min(batch, count - len(so_far.excerpts))
                ids = torch.randint(vocabulary, (rows, 1), generator=generator)
                if first is not None:
                    ids.fill_(first)
            cache = DynamicCache(config=model.config)
            for start in range(0, ids.shape[1] - 1, CHUNK):  # prefill what was written before an interruption
                chunk = ids[:, start : min(start + CHUNK, ids.shape[1] - 1)].to(device)
                model.base_model(input_ids=chunk, past_key_values=cache, use_cache=True)
            while ids.shape[1] < length:
                logits = (
                    model(ids[:, -1:].to(device), past_key_values=cache, use_cache=True).logits[:, -1].float().cpu()
                )
                top = logits.topk(min(TOP, logits.shape[-1]))
                drawn = torch.multinomial(top.values.softmax(-1), 1, generator=generator)
                ids = torch.cat((ids, top.indices.gather(-1, drawn)), 1)
                so_far = Written(so_far.excerpts, ids, generator.get_state())
                if progress is not None:
                    progress(so_far.tokens, count * length)
                if checkpoint is not None and checkpoint.due:
                    checkpoint.save(so_far.tensors)
            so_far = Written([*so_far.excerpts, *ids.to(torch.int32)], None, generator.get_state())
    except KeyboardInterrupt:
        if checkpoint is None or not so_far.tokens:
            raise
        checkpoint.save(so_far.tensors)
        raise KeyboardInterrupt(f"{so_far.tokens:,} of {count * length:,} tokens of text") from None
    return so_far.excerpts


class Written(NamedTuple):
    """State of a text that the model is writing. It is replaced as a whole, so that an interrupt finds a consistent one."""

    excerpts: list[Tensor]  # complete ones, int32 [length]
    ids: Tensor | None  # int64 [rows, n]: the batch that is being written
    generator: Tensor  # state of the random generator

    @property
    def tokens(self) -> int:
        return sum(map(len, self.excerpts)) + (0 if self.ids is None else self.ids.numel())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The form that a checkpoint stores."""
        out = {f"run.{i}": excerpt for i, excerpt in enumerate(self.excerpts)} | {"generator": self.generator}
        return out if self.ids is None else out | {"ids": self.ids}

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of text"

    @staticmethod
    def of(tensors: dict[str, Tensor], length: int) -> Written | None:
        """The state that a checkpoint stored; None where it is empty."""
        if "generator" not in tensors:
            return None
        excerpts = [tensors[f"run.{i}"] for i in range(sum(name.startswith("run.") for name in tensors))]
        found = Written(excerpts, tensors.get("ids"), tensors["generator"])
        assert all(len(excerpt) == length for excerpt in excerpts)
        assert found.ids is None or found.ids.shape[1] <= length
        return found
