"""The codec of the unquantized cache: elements are stored in a float type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from kvant.codecs.base import DTYPES, Codec, Field, Parts, Tensor
from kvant.codecs.format import StreamFormat


@dataclasses.dataclass(frozen=True)
class Raw(Codec):
    """dtype "auto" is the model's own type."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"

    def bind(self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, dtype: str = "bfloat16") -> Raw:
        return dataclasses.replace(self, dtype=dtype) if self.dtype == "auto" else self  # type: ignore[arg-type]

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        dtype = "bfloat16" if self.dtype == "auto" else self.dtype
        return (Field("values", "raw", 8 * DTYPES[dtype].itemsize, head_dim, dtype=dtype),)

    def format(self, head_dim: int) -> StreamFormat:
        return StreamFormat(type(self).__name__, head_dim, raw_dtype=self.fields(head_dim)[0].dtype)

    def encode(self, x: Tensor) -> Parts:
        return {"values": x.to(DTYPES[self.fields(x.shape[-1])[0].dtype])}

    def decode(self, parts: Parts) -> Tensor:
        return parts["values"].float()
