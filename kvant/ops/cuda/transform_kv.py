"""Transforms the new rows of a stream before they are appended, by kernels/transform_kv.cu: unrotates them to the start of their
RoPE block and multiplies by the matrix of the stream's transforms, in float32."""

from __future__ import annotations

import dataclasses
import functools
from typing import Self

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES, page_config
from kvant.ops.fused import FusedTransform, TransformKind, blocks_of, fuse, matrix_of, rope_table
from kvant.ops.types import Derived, LayerStore, PagedBatch

Tensor = torch.Tensor
CTA_TOKENS = 8  # that a CTA has at least, where there are enough
_PLANS: nvrtc.Numbered[TransformPlan] = nvrtc.Numbered()


TransformArguments = Arguments(
    "TransformArguments",
    x=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM]"),
    out=pointer("float", "[tokens, KV_HEADS, HEAD_DIM]"),
    matrix=pointer("const float", "[matrix_heads, HEAD_DIM, HEAD_DIM]"),
    offset=optional("const float", "[offset_heads, HEAD_DIM], added after the matrix"),
    cosine=optional("const float", "[RoPE blocks, half]"),
    sine=optional("const float", "[RoPE blocks, half]"),
    query_start_loc=pointer("const s64", "[batch + 1], first new token of a sequence"),
    seq_lens=pointer("const s64", "[batch], tokens of a sequence with its new ones"),
    tokens=int32("new tokens"),
    batch=int32("sequences"),
    half_batch=int32("largest power of two below the batch, or 0: where a binary search begins"),
    matrix_heads=int32("1 where heads share the matrix"),
    offset_heads=int32("1 where heads share the offset"),
    half=int32("rotated pairs of channels"),
    rope_first=int32("RoPE position of a sequence's first token"),
    rope_blocks=int32("RoPE blocks of the table"),
)


@dataclasses.dataclass(frozen=True)
class TransformPlan:
    """The kernel for a layout, the type of the rows that come in, and the positions of a RoPE block (0: nothing is unrotated)."""

    layout: Layout
    dtype: str
    rope_block: int

    @functools.cached_property
    def text(self) -> str:
        config = {**page_config(self.layout), "IN_TYPE": ELEMENT_TYPES[self.dtype], "ROPE_BLOCK": self.rope_block}
        return nvrtc.program("kernels/transform_kv.cu", config=config, arguments=[TransformArguments])


@functools.lru_cache(maxsize=256)
def _kernel(made: TransformPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, "kvant_transform_kv", device, 4 * made.layout.head_dim)


def transform_rows(store: LayerStore, name: StreamName, x: Tensor, batch: PagedBatch) -> Tensor:
    """New rows [tokens, heads, head_dim] as they are stored, in float32: as `BoundStream.stored` at the positions of the batch."""
    layout, stream = store.layout, store.stream(name)
    cosine, sine, first = None, None, 0
    if stream.rope is not None:
        first = stream.rope.first
        tokens = batch.block_table.shape[1] * layout.page_tokens + layout.recipe.origin
        cosine, sine = rope_table(store, blocks_of(tokens, first, stream.spec.effective_rope_block))
    fused = matrix_in(store, name)
    made = TransformPlan(
        layout, str(x.dtype).removeprefix("torch."), 0 if cosine is None else stream.spec.effective_rope_block
    )
    assert fused.tensor is not None
    return _transform(
        x.contiguous(),
        fused.tensor,
        fused.offset,
        cosine,
        sine,
        batch.query_start_loc,
        batch.seq_lens,
        first,
        _PLANS.number(made),
    )


@dataclasses.dataclass
class StreamMatrices(Derived):
    """The transforms of a store's streams as one matrix and an offset each."""

    forward: dict[StreamName, FusedTransform] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        return cls()


def matrix_in(store: LayerStore, name: StreamName) -> FusedTransform:
    """The transforms of a stream as one matrix and an offset, x M + offset; made once for a store."""
    made = store.derive(StreamMatrices).forward
    if name not in made:
        layout, device, transforms = store.layout, store.pages.device, store.stream(name).transforms
        found = fuse(transforms, "forward", layout, device)
        if found.kind is not TransformKind.MATRIX:
            matrix = matrix_of(transforms, "dual", layout, device).tensor  # orthogonal: dual and forward are the same
            if matrix is None:
                matrix = torch.eye(layout.head_dim, dtype=torch.float32, device=device)[None]
            offset = None if found.mean is None else -(found.mean[:, None].double() @ matrix.double())[:, 0].float()
            found = dataclasses.replace(found, tensor=matrix, offset=offset)
        made[name] = found
    return made[name]


@torch.library.custom_op("kvant::transform_kv", mutates_args=())
def _transform(
    x: Tensor,
    matrix: Tensor,
    offset: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rope_first: int,
    plan: int,
) -> Tensor:
    made = _PLANS[plan]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not len(x):
        return out
    arguments = TransformArguments.fill(
        x=x,
        out=out,
        matrix=matrix,
        offset=offset,
        cosine=cosine,
        sine=sine,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        tokens=len(x),
        batch=len(seq_lens),
        half_batch=nvrtc.half_of(len(seq_lens)),
        matrix_heads=len(matrix),
        offset_heads=1 if offset is None else len(offset),
        half=0 if cosine is None else cosine.shape[1],
        rope_first=rope_first,
        rope_blocks=1 if cosine is None else len(cosine),
    )
    kernel = _kernel(made, x.device)
    heads = made.layout.heads
    kernel.launch((max(1, min(-(-len(x) // CTA_TOKENS), kernel.blocks // heads)), heads), arguments)
    return out


@_transform.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)
