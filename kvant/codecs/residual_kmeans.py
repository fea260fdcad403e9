"""The index of the nearest centroid of a head vector, and the residual in token-wise integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.base import BoundCodec, Codec, Field, Parts, Tensor
from kvant.codecs.codebook import BOOK_DTYPE, nearest
from kvant.codecs.format import Codebook, LayerTensors, StreamFormat
from kvant.spec import Expected


@dataclasses.dataclass(frozen=True)
class ResidualKMeans(Codec):
    """x ~ c[j] + affine(x - c[j]), j = argmin |x - c[j]|^2 over the whole head vector (SAW-INT4 equations 5 and 6).

    centroids  number of centroids in a codebook. A single one needs no index: it only removes the mean. An index takes
               one byte, or two beyond 256 centroids, so that every byte belongs to one token.
    books      one codebook per "layer" or per "head".
    The other fields are those of Affine, for the residual.
    """

    calibrated: ClassVar[bool] = True
    fit_free: ClassVar[tuple[str, ...]] = ("bits", "group", "zero", "meta")  # how the residual is coded

    centroids: int = 256
    books: Literal["layer", "head"] = "head"
    bits: Literal[8, 4, 3, 2] = 4
    group: int = 0
    zero: Literal["float", "integer"] = "integer"
    meta: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if not 1 <= self.centroids <= 1 << 16:
            raise ValueError(f"centroids must be between 1 and 65536, got {self.centroids}")
        if self.books not in ("layer", "head"):
            raise ValueError(f"books must be layer or head, got {self.books!r}")
        assert self.residual, "Affine refuses what it does not take"

    @property
    def residual(self) -> Affine:
        """The codec of the residual."""
        return Affine(bits=self.bits, group=self.group, zero=self.zero, meta=self.meta)

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        rest = self.residual.fields(head_dim)
        if self.centroids == 1:
            return rest
        wide = self.centroids > 256
        return (*rest, Field("index", "index", 16 if wide else 8, 1, dtype="int32" if wide else "uint8"))

    def format(self, head_dim: int) -> StreamFormat:
        bits = 0 if self.centroids == 1 else 16 if self.centroids > 256 else 8
        book = Codebook("index" if bits else "", head_dim, 1, bits, self.centroids, self.books)
        return dataclasses.replace(self.residual.format(head_dim), codec=type(self).__name__, codebook=book)

    def codebook_bytes(self, head_dim: int, heads: int) -> int:
        """Bytes of a layer's centroids. They are stored once per model and are not counted in the bits per element."""
        return (heads if self.books == "head" else 1) * self.centroids * head_dim * BOOK_DTYPE.itemsize

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        shape = heads if self.books == "head" else 1, self.centroids, head_dim
        return {"centroids": Expected(shape, "nonzero" if self.centroids > 1 else "any")}

    def bind(self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, dtype: str = "bfloat16") -> BoundCodec:
        self.fields(head_dim)
        if tensors is None:
            return self
        if "centroids" not in tensors:
            raise ValueError(
                "residual k-means needs the centroids that kvant calibrate fits; the artifact has none for it"
            )
        book = tensors["centroids"]
        if book.shape[1:] != (self.centroids, head_dim) or (self.books == "layer" and len(book) != 1):
            raise ValueError(
                f"centroids must be [{'heads' if self.books == 'head' else 1}, {self.centroids}, {head_dim}], "
                f"got {list(book.shape)}"
            )
        return BoundResidualKMeans(self, book)


class BoundResidualKMeans(BoundCodec):
    """Residual k-means with one layer's centroids, [heads or 1, centroids, head_dim]."""

    def __init__(self, spec: ResidualKMeans, book: Tensor) -> None:
        self.spec, self.book = spec, book

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return self.spec.fields(head_dim)

    def format(self, head_dim: int) -> StreamFormat:
        return self.spec.format(head_dim)

    @property
    def tensors(self) -> LayerTensors:
        return LayerTensors(codebooks=self.book[:, None])

    def encode(self, x: Tensor) -> Parts:
        x = x.float()
        tokens, heads, dim = x.shape
        index = torch.zeros(tokens, heads, 1, dtype=torch.int64, device=x.device)
        if self.spec.centroids > 1:
            own = len(self.book)  # with one codebook per layer, all heads are searched together
            vectors = x.transpose(0, 1).reshape(own, heads * tokens // own, dim)
            index = nearest(vectors, self.book).reshape(heads, tokens).T[..., None]
        parts = self.spec.residual.encode(x - self._centroid(index))
        if self.spec.centroids > 1:
            parts["index"] = index.to(torch.int32 if self.spec.centroids > 256 else torch.uint8)
        return parts

    def decode(self, parts: Parts) -> Tensor:
        rest = self.spec.residual.decode(parts)
        if self.spec.centroids == 1:
            return rest + self.book[:, 0].float()
        return rest + self._centroid(parts["index"].long())

    def _centroid(self, index: Tensor) -> Tensor:
        """int64 [tokens, heads, 1] -> float32 [tokens, heads, head_dim]."""
        own, count, dim = self.book.shape
        head = torch.arange(index.shape[1], device=index.device) % own
        index = index[..., 0].clamp_max(count - 1)  # the index of a token that was never written is undefined
        return self.book.reshape(-1, dim)[head * count + index].float()
