"""Bytes of codebooks and centroids in shared memory."""

from __future__ import annotations

from kvant.codecs.format import Codebook
from kvant.layout import Layout


def codebook_bytes(layout: Layout) -> list[int]:
    """Bytes of one copy of the codebooks, fp16, of a head's keys and values; none without product quantization."""
    books = [layout.format(name).codebook for name in layout.recipe.streams if layout.format(name).is_pq]
    return [head_book_bytes(book) for book in books if book is not None]


def head_book_bytes(book: Codebook) -> int:
    """Bytes of the codebooks, fp16, of one stream of a head."""
    return 2 * book.dim * book.centroids * (book.vectors if book.per == "space" else 1)


def residual_bytes(layout: Layout, lane_heads: int = 4) -> list[int]:
    """Shared memory of decode where residuals of centroids are coded: scores of a lane's query heads with the keys' centroids, then
    the values' centroids, whose rows begin in different banks (codecs/residual.cuh)."""
    key, value = (stream.codebook if stream.is_residual else None for stream in layout.formats.values())
    return [
        0 if key is None else 16 * lane_heads * key.centroids,
        0 if value is None else (2 * layout.head_dim + 16) * value.centroids,
    ]
