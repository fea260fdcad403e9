"""A stream's transforms as a kernel applies them: nothing, a Hadamard in shared memory, or one matrix and an offset."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from kvant.layout import Layout
from kvant.ops.types import LayerStore
from kvant.transforms import BoundTransform
from kvant.transforms.affine_map import BoundAffine
from kvant.transforms.hadamard import BoundHadamard, walsh_hadamard

Tensor = torch.Tensor
NONE, HADAMARD, MATRIX = 0, 1, 2
SHORTEST_BLOCK = 64  # of positions for which queries are rotated


@dataclasses.dataclass(frozen=True)
class FusedTransform:
    kind: int = NONE
    order: int = 1  # of a Hadamard's blocks
    tensor: Tensor | None = None  # a Hadamard's signs, float32 [head_dim]; a matrix, [1 or heads, head_dim, head_dim]
    offset: Tensor | None = None  # added after the matrix, float32 [1 or heads, head_dim]
    mean: Tensor | None = None  # taken off before a Hadamard, float32 [heads, head_dim]


def fuse(
    transforms: Sequence[BoundTransform],
    way: Literal["forward", "dual", "inverse"],
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> FusedTransform:
    """The composition of transforms in one direction, read off what it does to the unit vectors. `dtype` is the matrix's."""
    heads, dim = layout.heads, layout.head_dim
    unit = torch.eye(dim, dtype=torch.float64, device=device).expand(heads, dim, dim)
    if way == "dual":  # a mean that was taken off the keys does nothing to queries
        transforms = [transform for transform in transforms if not torch.equal(transform.dual(unit), unit)]
    mean = None
    plain = len(transforms) in (1, 2) and all(isinstance(rest, BoundHadamard) for rest in transforms[1:])
    if way == "forward" and plain and _only_a_mean(transforms[0]):
        mean = transforms[0].offset.float().expand(heads, dim).contiguous()  # type: ignore[attr-defined]
        transforms = transforms[1:]
    if not transforms:
        return FusedTransform(mean=mean)
    if len(transforms) == 1 and isinstance(transforms[0], BoundHadamard):
        signs = transforms[0].signs
        return FusedTransform(
            HADAMARD, transforms[0].order, None if signs is None else signs.float().contiguous(), mean=mean
        )
    zero = torch.zeros(heads, 1, dim, dtype=torch.float64, device=device)
    if way == "forward":  # takes [..., heads, head_dim]
        offset = _apply(transforms, way, zero.transpose(0, 1)).transpose(0, 1)
        matrix = _apply(transforms, way, unit.transpose(0, 1)).transpose(0, 1) - offset
    else:
        offset = _apply(transforms, way, zero)
        matrix = _apply(transforms, way, unit) - offset
    if torch.equal(matrix, matrix[:1].expand_as(matrix)) and torch.equal(offset, offset[:1].expand_as(offset)):
        matrix, offset = matrix[:1], offset[:1]
    shift = offset[:, 0].to(dtype).contiguous() if bool(offset.any()) else None
    return FusedTransform(MATRIX, 1, matrix.to(dtype).contiguous(), shift)


def _only_a_mean(transform: BoundTransform) -> bool:
    return isinstance(transform, BoundAffine) and transform.matrix is None and transform.offset is not None


def _apply(transforms: Sequence[BoundTransform], way: str, x: Tensor) -> Tensor:
    for transform in reversed(transforms) if way == "inverse" else transforms:
        x = getattr(transform, way)(x)
    return x


def matrix_of(
    transforms: Sequence[BoundTransform], way: Literal["dual", "inverse"], layout: Layout, device: torch.device
) -> FusedTransform:
    """As `fuse`, with one matrix in place of a Hadamard transform."""
    found, dim = fuse(transforms, way, layout, device), layout.head_dim
    if found.kind != HADAMARD:
        return found
    matrix = walsh_hadamard(torch.eye(dim, dtype=torch.float64, device=device), found.order)
    if found.tensor is not None:  # signs come first on the way in, last on the way out
        matrix = matrix * (found.tensor if way == "inverse" else found.tensor[:, None])
    return FusedTransform(MATRIX, 1, matrix.float()[None].contiguous(), found.offset)


def refuse_rope(layout: Layout) -> str | None:
    """Why queries cannot be rotated for the blocks of positions of a layout's keys, or None."""
    for name, stream in layout.recipe.streams.items():
        if stream.rope != "post" and stream.effective_rope_block < SHORTEST_BLOCK:
            return f"it rotates queries for blocks of positions, and the {name}s are stored unrotated one by one"
    return None


def blocks_of(tokens: int, first: int, size: int) -> int:
    """Blocks of so many positions that the first tokens of a sequence reach into; it starts at position `first`."""
    return max(0, tokens - 1 + first) // size - first // size + 1


def rope_table(store: LayerStore, blocks: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [at least so many blocks, pairs of channels], by which the keys of a sequence's blocks of positions
    are unrotated."""
    found = store.prepared.get("rope_table")
    if found is None or len(found[0]) < blocks:
        rope, size, device = store.key.rope, store.key.spec.effective_rope_block, store.pages.device
        assert rope is not None
        count = max(blocks, 64 if found is None else 2 * len(found[0]))
        first = rope.first // size
        at = torch.arange(first, first + count, dtype=torch.float64, device=device)[:, None] * size
        angle = at * rope.inv_freq.to(device).double()
        if found is not None:  # a graph may have been captured that reads them
            store.prepared.setdefault("rope_table before", []).append(found)
        found = angle.cos().float().contiguous(), angle.sin().float().contiguous()
        store.prepared["rope_table"] = found
    return found  # type: ignore[no-any-return]


def mean_logit_vector(store: LayerStore) -> Tensor | None:
    """What the logit of a query with each unit vector is short of, once the keys' mean is taken off: float32 [heads, head_dim]."""
    layout, device = store.layout, store.pages.device
    unit = torch.eye(layout.head_dim, dtype=torch.float64, device=device).expand(layout.heads, -1, -1)
    found: Tensor | None = None
    for transform in store.key.transforms:
        here = transform.mean_logit(unit)
        found = here if found is None else found if here is None else found + here
        unit = transform.dual(unit)
    return None if found is None else found.float().contiguous()
