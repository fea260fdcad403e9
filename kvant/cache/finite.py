"""Refuses keys and values that are not finite, or too large to be quantized."""

from __future__ import annotations

import torch

from kvant.layout import Layout, StreamName
from kvant.ops import PagedBatch

Tensor = torch.Tensor


def largest(layout: Layout) -> float:
    """Largest magnitude that a key or value may have. A rotation multiplies it by up to sqrt(head_dim), and a range is twice as
    large: beyond this limit scales overflow float16, or intermediate values float32."""
    streams: tuple[StreamName, ...] = ("key", "value")
    types = {field.dtype for name in streams for field in layout.fields(name)} | {layout.overlay_dtype}
    return 2.0**15 / layout.head_dim**0.5 if "float16" in types else 1e30


class NotFinite(ValueError):
    """A key or value that is NaN, infinite or beyond `largest`. The layer's pages were not written.

    >>> import torch, kvant
    >>> from kvant.models import tiny
    >>> model, tokenizer = tiny()
    >>> _ = model.model.layers[1].self_attn.v_proj.weight.data.fill_(torch.nan)
    >>> try:
    ...     with torch.no_grad():
    ...         _ = model(**tokenizer("x", return_tensors="pt"), past_key_values=kvant.Cache(model, "int4"))
    ... except kvant.NotFinite as error:
    ...     print(error.layer, error.stream)
    1 value
    """

    def __init__(self, layer: int, stream: str, sequence: int, token: int, number: float, limit: float) -> None:
        super().__init__(
            f"layer {layer}: the {stream} of token {token} of sequence {sequence} holds {number:g}; expected finite numbers "
            f"up to {limit:g}. Nothing of this layer was stored"
        )
        self.layer, self.stream, self.sequence, self.token = layer, stream, sequence, token


def check_finite(layer: int, key: Tensor, value: Tensor, batch: PagedBatch, limit: float) -> None:
    """Raises NotFinite for the first token of `batch` with such a number; key and value are [tokens, heads, head_dim]."""
    if not key.numel():
        return
    if key.is_cuda:
        fine = bool(torch.maximum(key.abs().amax(), value.abs().amax()) <= limit)  # one synchronization for both
    else:
        fine = all(float(torch.linalg.vector_norm(x.detach(), torch.inf)) <= limit for x in (key, value))
    if fine:  # false for NaN too
        return
    sequence, position = batch.positions
    for name, x in (("key", key), ("value", value)):
        bad = ~(x.abs() <= limit) & (batch.slot_mapping >= 0)[:, None, None]
        rows = bad.flatten(1).any(1).nonzero()
        if len(rows):
            row = int(rows[0])
            number = float(x[row][bad[row]][0])
            raise NotFinite(layer, name, int(sequence[row]), int(position[row]), number, limit)
