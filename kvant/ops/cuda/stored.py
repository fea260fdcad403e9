"""New tokens unrotated and multiplied by a stream's matrix, by the kernel in stored.cu: one launch, in float32."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.plan import TYPES, page_constants
from kvant.ops.fused import HADAMARD, NONE, FusedTransform, blocks_of, fuse, matrix_of, rope_table
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
TOKENS_A_BLOCK = 8
_PLANS: nvrtc.Numbered[StoredPlan] = nvrtc.Numbered()


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out", "matrix", "offset", "cosine", "sine", "starts", "lengths")),
        *((name, ctypes.c_int) for name in ("tokens", "batch", "half_batch", "matrix_heads", "offset_heads")),
        *((name, ctypes.c_int) for name in ("half", "first", "blocks")),
    ]


@dataclasses.dataclass(frozen=True)
class StoredPlan:
    layout: Layout
    dtype: str
    rotated: int

    @functools.cached_property
    def text(self) -> str:
        constants = {
            **page_constants(self.layout),
            "IN_TYPE": TYPES[self.dtype],
            "TURNED": self.rotated,
        }
        return nvrtc.program("kernels/transform_kv.cu", defines=constants)


@functools.lru_cache(maxsize=256)
def _kernel(made: StoredPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, "kvant_stored", device, 4 * made.layout.head_dim)


def stored_rows(store: LayerStore, name: StreamName, x: Tensor, batch: PagedBatch) -> Tensor:
    """New tokens [tokens, heads, head_dim] as they are stored, in float32. As `BoundStream.stored`, whose positions are the
    batch's."""
    layout, stream = store.layout, store.stream(name)
    cosine, sine, first = None, None, 0
    if stream.rope is not None:
        first = stream.rope.first
        tokens = batch.block_table.shape[1] * layout.page_tokens + layout.recipe.origin
        cosine, sine = rope_table(store, blocks_of(tokens, first, stream.spec.effective_rope_block))
    space = matrix_in(store, name)
    made = StoredPlan(
        layout, str(x.dtype).removeprefix("torch."), 0 if cosine is None else stream.spec.effective_rope_block
    )
    assert space.tensor is not None
    return _stored(
        x.contiguous(),
        space.tensor,
        space.offset,
        cosine,
        sine,
        batch.query_start_loc,
        batch.seq_lens,
        first,
        _PLANS.number(made),
    )


def matrix_in(store: LayerStore, name: StreamName) -> FusedTransform:
    """The way in as one matrix and an offset; made once for a store."""
    place = f"cuda.stored.{name}"
    if place not in store.prepared:
        layout, device, transforms = store.layout, store.pages.device, store.stream(name).transforms
        found = fuse(transforms, "forward", layout, device)
        if found.kind in (NONE, HADAMARD):
            matrix = matrix_of(transforms, "dual", layout, device).tensor  # orthogonal: the same way in
            if matrix is None:
                matrix = torch.eye(layout.head_dim, dtype=torch.float32, device=device)[None]
            offset = None if found.mean is None else -(found.mean[:, None].double() @ matrix.double())[:, 0].float()
            found = dataclasses.replace(found, tensor=matrix, offset=offset)
        store.prepared[place] = found
    return store.prepared[place]  # type: ignore[no-any-return]


@torch.library.custom_op("kvant::stored", mutates_args=())
def _stored(
    x: Tensor,
    matrix: Tensor,
    offset: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    first: int,
    plan: int,
) -> Tensor:
    made = _PLANS[plan]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not len(x):
        return out
    tensors = (x, out, matrix, offset, cosine, sine, query_start_loc, seq_lens)
    half, blocks = (0, 1) if cosine is None else (cosine.shape[1], len(cosine))
    arguments = _Arguments(
        *nvrtc.addresses(*tensors),
        len(x),
        len(seq_lens),
        nvrtc.half_of(len(seq_lens)),
        len(matrix),
        1 if offset is None else len(offset),
        half,
        first,
        blocks,
    )
    kernel = _kernel(made, x.device)
    heads = made.layout.heads
    kernel.launch((max(1, min(-(-len(x) // TOKENS_A_BLOCK), kernel.blocks // heads)), heads), arguments)
    return out


@_stored.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)
