"""Product vector quantization: a head vector is cut into short sub-vectors, each stored as the index of a centroid."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from kvant.codecs.base import BoundCodec, Codec, Field, Parts, Tensor
from kvant.codecs.codebook import BOOK_DTYPE, nearest
from kvant.codecs.format import Codebook, LayerTensors, StreamFormat
from kvant.spec import Expected


@dataclasses.dataclass(frozen=True)
class ProductVQ(Codec):
    """x = [x_1, ..., x_M] with sub-vectors of `dim` channels; x_i ~ centroid[j], j = argmin |x_i - centroid[j]|^2.

    dim    channels of a sub-vector (the X of dXbY).
    bits   bits of an index (the Y): 2^bits centroids.
    books  who has a codebook of its own: the "layer", each "head", or each sub-"space" of each head.
    """

    calibrated: ClassVar[bool] = True

    dim: Literal[2, 4, 8] = 4
    bits: int = 8
    books: Literal["layer", "head", "space"] = "layer"

    def __post_init__(self) -> None:
        if self.dim not in (2, 4, 8):
            raise ValueError(f"dim must be 2, 4 or 8 channels, got {self.dim}")
        if not 1 <= self.bits <= 16:
            raise ValueError(f"bits must be between 1 and 16, got {self.bits}")
        if self.books not in ("layer", "head", "space"):
            raise ValueError(f"books must be layer, head or space, got {self.books!r}")

    @property
    def centroids(self) -> int:
        """Centroids of a codebook."""
        return 1 << self.bits

    def spaces(self, head_dim: int) -> int:
        """Sub-vectors of a head vector."""
        if head_dim % self.dim:
            raise ValueError(f"dim must divide head_dim {head_dim}, got {self.dim}")
        return head_dim // self.dim

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        dtype = "uint8" if self.bits <= 8 else "int32"
        return (Field("indices", "index", self.bits, self.spaces(head_dim), dtype=dtype),)

    def format(self, head_dim: int) -> StreamFormat:
        book = Codebook("indices", self.dim, self.spaces(head_dim), self.bits, self.centroids, self.books)
        return StreamFormat(type(self).__name__, head_dim, codebook=book)

    def book_shape(self, head_dim: int, heads: int) -> tuple[int, int, int, int]:
        """Shape of a layer's codebooks: [heads or 1, spaces or 1, centroids, dim]."""
        own_head = heads if self.books in ("head", "space") else 1
        own_space = self.spaces(head_dim) if self.books == "space" else 1
        return own_head, own_space, self.centroids, self.dim

    def codebook_bytes(self, head_dim: int, heads: int) -> int:
        """Bytes of a layer's codebooks. They are held once, whatever is cached, and are not in the bits per element."""
        return torch.Size(self.book_shape(head_dim, heads)).numel() * BOOK_DTYPE.itemsize

    def by_book(self, x: Tensor) -> Tensor:
        """Sub-vectors by the codebook that codes them: [tokens, heads, head_dim] -> [books, vectors, dim]."""
        tokens, heads, head_dim = x.shape
        spaces = self.spaces(head_dim)
        x = x.reshape(tokens, heads, spaces, self.dim)
        if self.books == "layer":
            return x.reshape(1, tokens * heads * spaces, self.dim)
        if self.books == "head":
            return x.transpose(0, 1).reshape(heads, tokens * spaces, self.dim)
        return x.permute(1, 2, 0, 3).reshape(heads * spaces, tokens, self.dim)

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        return {"codebooks": Expected(self.book_shape(head_dim, heads), "nonzero")}

    def bind(self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, dtype: str = "bfloat16") -> BoundCodec:
        self.fields(head_dim)
        if tensors is None:
            return self
        if "codebooks" not in tensors:
            raise ValueError("product VQ needs the codebooks that kvant calibrate fits; the artifact has none for it")
        books = tensors["codebooks"]
        expected = self.book_shape(head_dim, books.shape[0] if books.ndim == 4 else 0)
        if books.shape != expected or books.dtype != BOOK_DTYPE:
            raise ValueError(
                f"codebooks must be {BOOK_DTYPE} [heads or 1, spaces or 1, {self.centroids}, {self.dim}], one for each "
                f"{self.books}, got {books.dtype} {list(books.shape)}"
            )
        return BoundProductVQ(self, books)


class BoundProductVQ(BoundCodec):
    """Product VQ with one layer's codebooks, [heads or 1, spaces or 1, centroids, dim]."""

    def __init__(self, spec: ProductVQ, codebooks: Tensor) -> None:
        self.spec, self.codebooks = spec, codebooks

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return self.spec.fields(head_dim)

    def format(self, head_dim: int) -> StreamFormat:
        return self.spec.format(head_dim)

    @property
    def tensors(self) -> LayerTensors:
        return LayerTensors(codebooks=self.codebooks)

    def encode(self, x: Tensor) -> Parts:
        tokens, heads, head_dim = x.shape
        spec, spaces = self.spec, self.spec.spaces(head_dim)
        indices = nearest(spec.by_book(x), self.codebooks.flatten(0, 1))
        if spec.books == "layer":
            indices = indices.reshape(tokens, heads, spaces)
        elif spec.books == "head":
            indices = indices.reshape(heads, tokens, spaces).transpose(0, 1)
        else:
            indices = indices.reshape(heads, spaces, tokens).permute(2, 0, 1)
        return {"indices": indices.to(torch.uint8 if spec.bits <= 8 else torch.int32)}

    def decode(self, parts: Parts) -> Tensor:
        indices = parts["indices"].long()
        tokens, heads, spaces = indices.shape
        own_heads, own_spaces, count, dim = self.codebooks.shape
        device = indices.device
        head = torch.arange(heads, device=device)[:, None] % own_heads
        space = torch.arange(spaces, device=device) % own_spaces
        row = (head * own_spaces + space) * count + indices  # [tokens, heads, spaces]
        return self.codebooks.reshape(-1, dim)[row].float().reshape(tokens, heads, spaces * dim)
