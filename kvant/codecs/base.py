"""Base of codecs: numbers to codes and scales, and back. The layout decides where they are stored as bytes."""

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
    index: integers that name an entry of a table (a centroid), token after token in every order of the layout.
    meta:  16-bit floats beside the codes (scale, zero), in the layout's order of tokens.
    raw:   unquantized elements, token after token.
    """

    name: str
    kind: Literal["code", "index", "meta", "raw"]
    bits: int
    width: int  # elements of a row
    tokens: int = 1  # tokens that share a row
    dtype: str = "uint8"  # of the decoded tensor: an entry of DTYPES, uint8 or int32


class BoundCodec:
    """A codec for one head dim, with its tensors. `encode` and `decode` are the reference: plain torch, the same on every
    machine."""

    @property
    def group_tokens(self) -> int:
        """Tokens that are coded together; 1 for token-wise codecs."""
        return 1

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        raise NotImplementedError(f"{type(self).__name__} must say which fields it stores")

    def format(self, head_dim: int) -> StreamFormat:
        """The stored form, as kernels read it. It describes the same fields as `fields`, which the layout places."""
        raise NotImplementedError(f"{type(self).__name__} must describe its stored form")

    @property
    def tensors(self) -> LayerTensors:
        """Tensors and numbers of this layer that kernels need beside the format."""
        return LayerTensors()

    def encode(self, x: Tensor) -> Parts:
        """[tokens, heads, head_dim] float32 -> parts."""
        raise NotImplementedError(f"{type(self).__name__} must encode")

    def decode(self, parts: Parts) -> Tensor:
        """Parts -> [tokens, heads, head_dim] float32."""
        raise NotImplementedError(f"{type(self).__name__} must decode")


@dataclasses.dataclass(frozen=True)
class Codec(BoundCodec, Spec):
    """Base of all codec specs. A codec without calibrated tensors is also its bound form."""

    channelwise: ClassVar[bool] = (
        False  # codes every channel separately, so that a corrector may code channels block by block
    )
    ranked: ClassVar[bool] = False  # needs the saliency of a group's tokens, which a corrector computes

    def bind(self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, dtype: str = "bfloat16") -> BoundCodec:
        """The codec for one head dim, with its calibrated tensors if it has any. Raises ValueError for a head dim that it does not
        support.

        Without `tensors` (None) only `fields` and `format` can be used; a calibrated codec refuses a mapping that lacks a tensor.
        """
        self.fields(head_dim)
        return self
