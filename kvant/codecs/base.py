"""What a codec is: numbers in, codes and scales out, and back. Bytes are the layout's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

import torch

from kvant.codecs.format import LayerTensors, StreamFormat
from kvant.spec import Spec

Tensor = torch.Tensor
Parts: TypeAlias = dict[str, Tensor]
"""Field name -> [rows, heads, width]; one row per token, or per group of tokens where the field says so."""

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class Field:
    """One kind of number that a codec stores.

    code:  small integers that the dot products read, in the layout's order of codes.
    index: integers that look something up (a centroid), tokens after one another whatever the layout's order.
    meta:  16-bit floats beside the codes (scale, zero), in the layout's order of tokens.
    raw:   plain elements, tokens after one another.
    """

    name: str
    kind: Literal["code", "index", "meta", "raw"]
    bits: int
    width: int  # elements a row
    tokens: int = 1  # tokens that share a row
    dtype: str = "uint8"  # of the decoded tensor: an entry of DTYPES, uint8 or int32


class BoundCodec:
    """A codec for one head dim, with its tensors. `encode` and `decode` are the reference: plain torch, the same on every
    machine."""

    @property
    def group_tokens(self) -> int:
        """Tokens that are coded together; 1 where every token stands alone."""
        return 1

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        raise NotImplementedError(f"{type(self).__name__} must say which fields it stores")

    def format(self, head_dim: int) -> StreamFormat:
        """The stored form, which kernels are made for. Agrees with `fields`, which the layout places."""
        raise NotImplementedError(f"{type(self).__name__} must describe its stored form")

    @property
    def tensors(self) -> LayerTensors:
        """What kernels are given of this layer beside the format."""
        return LayerTensors()

    def encode(self, x: Tensor) -> Parts:
        """[tokens, heads, head_dim] float32 -> parts."""
        raise NotImplementedError(f"{type(self).__name__} must encode")

    def decode(self, parts: Parts) -> Tensor:
        """Parts -> [tokens, heads, head_dim] float32."""
        raise NotImplementedError(f"{type(self).__name__} must decode")


@dataclasses.dataclass(frozen=True)
class Codec(BoundCodec, Spec):
    """Base of all codec specs. One without calibrated tensors is its own bound form."""

    channelwise: ClassVar[bool] = (
        False  # codes every channel for itself, so that a corrector may drive it block by block
    )
    ranked: ClassVar[bool] = False  # codes the tokens of a group by their saliency, which a corrector has to tell it

    def bind(self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, dtype: str = "bfloat16") -> BoundCodec:
        """The codec for one head dim, with its calibrated tensors if it has any. Refuses a head dim it cannot take.

        Without `tensors` (None) it only knows its fields; a calibrated codec refuses a mapping that lacks what it needs.
        """
        self.fields(head_dim)
        return self
