"""What decode derives from a layer's store: transforms of queries and outputs in the orders of its kernels, and codebooks."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch

from kvant.ops.cuda.fragments import (
    decode_fragments,
    fused_fragments,
    high_batch_fragments,
    matrix_fragments,
    rotate_fragments,
)
from kvant.ops.cuda.geometry import CHUNK_TOKENS, angle_row, rotates_keys
from kvant.ops.fused import FusedTransform, TransformKind, fuse, matrix_of, mean_logit_vector
from kvant.ops.types import Derived, LayerStore

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class DecodeTransforms(Derived):
    """How queries enter the space of the stored keys and outputs leave that of the stored values. A matrix of the queries is in
    the order of the kernel that applies it: kvant_rotate_queries where keys are stored unrotated by RoPE blocks, otherwise
    kvant_transform_queries."""

    dual: FusedTransform
    inverse: FusedTransform
    high_batch: Tensor | None = None  # the queries' matrix for kvant_rotate_queries_high_batch
    fused_dual: Tensor | None = None  # the queries' matrix for the decode kernel itself, also where it rotates them
    fused_inverse: Tensor | None = None  # the outputs' matrix for the decode kernel itself
    value_mean: Tensor | None = None  # float32 [heads, head_dim]: was taken off values whose scale is stored negative

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        layout, device = store.layout, store.pages.device
        high_batch, fused_dual, fused_inverse = None, None, None
        if store.key.rope is not None and not rotates_keys(layout):
            if len(store.key.rope.inv_freq) % 2:
                raise ValueError(
                    f"the CUDA kernel rotates channels in twos, and rope rotates {len(store.key.rope.inv_freq)} pairs of them"
                )
            matrix = matrix_of(store.key.transforms, "dual", layout, device).tensor
            if matrix is None:
                matrix = torch.eye(layout.head_dim, dtype=torch.float32, device=device)[None]
            mean_logit = mean_logit_vector(store)
            dual = FusedTransform(TransformKind.MATRIX, 1, rotate_fragments(layout, matrix, mean_logit))
            if layout.head_dim % 32 == 0:
                high_batch = high_batch_fragments(layout, matrix, mean_logit)
                if layout.head_dim <= 128 and not layout.format("key").is_pq:
                    fused_dual = decode_fragments(layout, matrix, mean_logit)
        else:
            dual = fuse(store.key.transforms, "dual", layout, device)
            if dual.kind is TransformKind.MATRIX:
                assert dual.tensor is not None
                fused_dual = fused_fragments(dual.tensor)
                dual = dataclasses.replace(dual, tensor=matrix_fragments(dual.tensor))
        inverse = fuse(store.value.transforms, "inverse", layout, device)
        if inverse.kind is TransformKind.MATRIX and layout.head_dim <= 128:
            assert inverse.tensor is not None
            fused_inverse = fused_fragments(inverse.tensor)
        return cls(dual, inverse, high_batch, fused_dual, fused_inverse, store.value.codec.tensors.mean)


@dataclasses.dataclass(frozen=True)
class ChunkAngles(Derived):
    """Cosines and sines of the positions inside a chunk of tokens, where keys are rotated when they are read: int32 [tokens, words
    of a row], fp16 numbers of all pairs of channels."""

    table: Tensor | None

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        rope, layout = store.key.rope, store.layout
        if rope is None or not rotates_keys(layout):
            return cls(None)
        if 2 * len(rope.inv_freq) != layout.head_dim:
            raise ValueError(
                f"the CUDA kernel rotates keys in all of their {layout.head_dim} channels, and rope rotates "
                f"{2 * len(rope.inv_freq)} of them; implementation='reference' serves such a model"
            )
        tokens = min(CHUNK_TOKENS, layout.page_tokens)
        angle = torch.arange(tokens, dtype=torch.float64)[:, None] * rope.inv_freq.cpu().double()
        rows = torch.zeros(tokens, 2 * angle_row(layout.head_dim), dtype=torch.float16)
        rows[:, : layout.head_dim] = torch.cat((angle.cos(), angle.sin()), 1).half()
        return cls(rows.to(store.pages.device).view(torch.int32))


@dataclasses.dataclass(frozen=True)
class Codebooks(Derived):
    """Contiguous copies of codebooks: fp16 [heads or 1, 1, centroids, dim], or None. Where they are centroids of whole value vectors,
    channels are in the order of the accumulators' rows (codecs/residual.cuh). `value_fragments` has the same centroids as A operands:
    fp16 [heads or 1, channels / 16, centroids / 16, 32 lanes, 8]."""

    key: Tensor | None
    value: Tensor | None
    value_fragments: Tensor | None = None

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        books = [stream.codec.tensors.codebooks for stream in (store.key, store.value)]
        layout, fragments = store.layout, None
        if books[1] is not None and layout.format("value").is_residual:
            fragments = _channel_fragments(books[1].half())
            groups, dim = layout.scale_groups("value"), layout.head_dim
            share = dim // groups // 8
            order = torch.arange(dim).view(groups, 8, share).permute(0, 2, 1).flatten()  # [element, g]
            books[1] = books[1][..., order.to(books[1].device)]
        key, value = (
            None if book is None else book.half().clone(memory_format=torch.contiguous_format) for book in books
        )
        return cls(key, value, fragments)


def _channel_fragments(books: Tensor) -> Tensor:
    """Centroids [heads, 1, centroids, channels] as A operands of an MMA whose rows are channels and whose columns are centroids,
    with zeros for the centroids that 16 lack: [heads, channels / 16, centroids / 16, g, t, second eight centroids, second eight
    channels, two centroids]."""
    heads, _, count, dim = books.shape
    padded = torch.nn.functional.pad(books[:, 0], (0, 0, 0, -count % 16))
    parts = padded.view(heads, -1, 2, 4, 2, dim // 16, 2, 8)  # [heads, step, half, t, pair, tile, half, g]
    return parts.permute(0, 5, 1, 7, 3, 2, 6, 4).contiguous()
