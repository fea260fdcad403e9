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
    books  one codebook per "layer", per "head", or per sub-"space" (place of a sub-vector) of every head.
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

    def subvectors(self, head_dim: int) -> int:
        """Sub-vectors of a head vector."""
        if head_dim % self.dim:
            raise ValueError(f"dim must divide head_dim {head_dim}, got {self.dim}")
        return head_dim // self.dim

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        dtype = "uint8" if self.bits <= 8 else "int32"
        return (Field("indices", "index", self.bits, self.subvectors(head_dim), dtype=dtype),)

    def format(self, head_dim: int) -> StreamFormat:
        book = Codebook("indices", self.dim, self.subvectors(head_dim), self.bits, self.centroids, self.books)
        return StreamFormat(type(self).__name__, head_dim, codebook=book)

    def book_shape(self, head_dim: int, heads: int) -> tuple[int, int, int, int]:
        """Shape of a layer's codebooks: [heads or 1, subvectors or 1, centroids, dim]."""
        book_heads = heads if self.books in ("head", "space") else 1
        book_subvectors = self.subvectors(head_dim) if self.books == "space" else 1
        return book_heads, book_subvectors, self.centroids, self.dim

    def codebook_bytes(self, head_dim: int, heads: int) -> int:
        """Bytes of a layer's codebooks. They are stored once per model and are not counted in the bits per element."""
        return torch.Size(self.book_shape(head_dim, heads)).numel() * BOOK_DTYPE.itemsize

    def by_book(self, x: Tensor) -> Tensor:
        """Groups sub-vectors by their codebook: [tokens, heads, head_dim] -> [books, vectors, dim]."""
        tokens, heads, head_dim = x.shape
        subvectors = self.subvectors(head_dim)
        x = x.reshape(tokens, heads, subvectors, self.dim)
        if self.books == "layer":
            return x.reshape(1, tokens * heads * subvectors, self.dim)
        if self.books == "head":
            return x.transpose(0, 1).reshape(heads, tokens * subvectors, self.dim)
        return x.permute(1, 2, 0, 3).reshape(heads * subvectors, tokens, self.dim)

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
                f"codebooks must be {BOOK_DTYPE} [heads or 1, subvectors or 1, {self.centroids}, {self.dim}], one for each "
                f"{self.books}, got {books.dtype} {list(books.shape)}"
            )
        return BoundProductVQ(self, books)


class BoundProductVQ(BoundCodec):
    """Product VQ with one layer's codebooks, [heads or 1, subvectors or 1, centroids, dim]."""

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
        spec, subvectors = self.spec, self.spec.subvectors(head_dim)
        indices = nearest(spec.by_book(x), self.codebooks.flatten(0, 1))
        if spec.books == "layer":
            indices = indices.reshape(tokens, heads, subvectors)
        elif spec.books == "head":
            indices = indices.reshape(heads, tokens, subvectors).transpose(0, 1)
        else:
            indices = indices.reshape(heads, subvectors, tokens).permute(2, 0, 1)
        return {"indices": indices.to(torch.uint8 if spec.bits <= 8 else torch.int32)}

    def decode(self, parts: Parts) -> Tensor:
        indices = parts["indices"].long()
        tokens, heads, subvectors = indices.shape
        book_heads, book_subvectors, count, dim = self.codebooks.shape
        device = indices.device
        head = torch.arange(heads, device=device)[:, None] % book_heads
        subvector = torch.arange(subvectors, device=device) % book_subvectors
        row = (head * book_subvectors + subvector) * count + indices  # [tokens, heads, subvectors]
        return self.codebooks.reshape(-1, dim)[row].float().reshape(tokens, heads, subvectors * dim)
