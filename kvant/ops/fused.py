"""A stream's transforms as a kernel applies them: nothing, a Walsh-Hadamard transform, or one matrix and an offset."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Sequence
from typing import Literal, Self

import torch

from kvant.layout import Layout
from kvant.ops.types import Derived, LayerStore
from kvant.transforms import BoundTransform
from kvant.transforms.hadamard import walsh_hadamard

Tensor = torch.Tensor
SHORTEST_BLOCK = 64  # positions of a RoPE block, at least, for queries to be rotated once per block
TABLE_BLOCKS = 64  # RoPE blocks of the first table


class TransformKind(enum.IntEnum):
    """How a kernel applies a fused transform. The numbers are those of the kernels."""

    NONE = 0
    HADAMARD = 1  # x diag(signs) diag(H, ..., H), after a mean was subtracted, where there is one
    MATRIX = 2  # x A + offset


NONE, HADAMARD, MATRIX = TransformKind


@dataclasses.dataclass(frozen=True)
class FusedTransform:
    """The composition of a stream's transforms in one direction."""

    kind: TransformKind = TransformKind.NONE
    order: int = 1  # of a Hadamard's blocks; 1 where there is none
    tensor: Tensor | None = (
        None  # HADAMARD: signs, float32 [head_dim], or None; MATRIX: A, [1 or heads, head_dim, head_dim]
    )
    offset: Tensor | None = None  # MATRIX: added after it, [1 or heads, head_dim]
    mean: Tensor | None = None  # subtracted first, before a Hadamard or alone: float32 [heads, head_dim]


def fuse(
    transforms: Sequence[BoundTransform],
    direction: Literal["forward", "dual", "inverse"],
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> FusedTransform:
    """The composition of transforms in one direction. A mean alone, a Hadamard alone, and a mean before a Hadamard (forward)
    are kept as such; anything else becomes one matrix, read off the images of the unit vectors. `dtype` is the matrix's."""
    heads, dim = layout.heads, layout.head_dim
    unit = torch.eye(dim, dtype=torch.float64, device=device).expand(heads, dim, dim)
    if direction == "dual":  # removing the key mean does nothing to queries
        transforms = [transform for transform in transforms if not torch.equal(transform.dual(unit), unit)]
    forms = [transform.form for transform in transforms]
    mean = None
    if direction == "forward" and len(forms) in (1, 2) and all(form.order for form in forms[1:]):
        first = forms[0].mean
        if first is not None:
            mean = first.float().expand(heads, dim).contiguous()
            transforms, forms = transforms[1:], forms[1:]
    if not forms:
        return FusedTransform(mean=mean)
    if len(forms) == 1 and forms[0].order:
        signs = forms[0].signs
        signs = None if signs is None else signs.float().contiguous()
        return FusedTransform(TransformKind.HADAMARD, forms[0].order, signs, mean=mean)
    zero = torch.zeros(heads, 1, dim, dtype=torch.float64, device=device)
    if direction == "forward":  # takes [..., heads, head_dim]; the others take [..., heads, rows, head_dim]
        offset = _apply(transforms, direction, zero.transpose(0, 1)).transpose(0, 1)
        matrix = _apply(transforms, direction, unit.transpose(0, 1)).transpose(0, 1) - offset
    else:
        offset = _apply(transforms, direction, zero)
        matrix = _apply(transforms, direction, unit) - offset
    if torch.equal(matrix, matrix[:1].expand_as(matrix)) and torch.equal(offset, offset[:1].expand_as(offset)):
        matrix, offset = matrix[:1], offset[:1]  # one for all heads
    shift = offset[:, 0].to(dtype).contiguous() if bool(offset.any()) else None
    return FusedTransform(TransformKind.MATRIX, 1, matrix.to(dtype).contiguous(), shift)


def _apply(transforms: Sequence[BoundTransform], direction: str, x: Tensor) -> Tensor:
    for transform in reversed(transforms) if direction == "inverse" else transforms:
        x = getattr(transform, direction)(x)
    return x


def matrix_of(
    transforms: Sequence[BoundTransform], direction: Literal["dual", "inverse"], layout: Layout, device: torch.device
) -> FusedTransform:
    """As `fuse`, with a matrix in place of a Hadamard transform."""
    found, dim = fuse(transforms, direction, layout, device), layout.head_dim
    if found.kind is not TransformKind.HADAMARD:
        return found
    matrix = walsh_hadamard(torch.eye(dim, dtype=torch.float64, device=device), found.order)
    if found.tensor is not None:  # dual: diag(signs) H; inverse: H diag(signs)
        matrix = matrix * (found.tensor if direction == "inverse" else found.tensor[:, None])
    return FusedTransform(TransformKind.MATRIX, 1, matrix.float()[None].contiguous(), found.offset)


def refuse_rope(layout: Layout) -> str | None:
    """Why queries cannot be rotated once for each RoPE block of a layout's keys, or None."""
    for name, stream in layout.recipe.streams.items():
        if stream.rope != "post" and stream.effective_rope_block < SHORTEST_BLOCK:
            return f"it rotates queries for blocks of positions, and the {name}s are stored unrotated one by one"
    return None


def blocks_of(tokens: int, first: int, size: int) -> int:
    """RoPE blocks of `size` positions that the first `tokens` of a sequence reach into; its first token is at position
    `first`."""
    return max(0, tokens - 1 + first) // size - first // size + 1


@dataclasses.dataclass
class RopeTable(Derived):
    """Cosines and sines of a store's RoPE blocks, float32 [blocks, rotated pairs of channels] each: all tables that were handed out,
    since a captured graph may still read a short one. Caches of several threads share them, so cosines and sines are one object."""

    tables: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        """One for all layers that have the same frequencies: of keys that are stored unrotated one by one it is long."""
        rope = store.key.rope
        assert rope is not None
        frequencies = rope.inv_freq.double().cpu().numpy().tobytes()
        key = cls, frequencies, rope.first, store.key.spec.effective_rope_block, store.pages.device
        found = _TABLES.get(key)
        if found is None:
            found = _TABLES[key] = cls()
        assert isinstance(found, cls)
        return found


_TABLES: weakref.WeakValueDictionary[tuple[object, ...], RopeTable] = weakref.WeakValueDictionary()  # stores hold them


def rope_table(store: LayerStore, blocks: int) -> tuple[Tensor, Tensor]:
    """cos(p f) and sin(p f), float32 [at least `blocks`, rotated pairs of channels], of the first position p of each RoPE block
    of a sequence and the frequencies f: by these angles keys are stored unrotated. Grows by doubling."""
    tables = store.derive(RopeTable).tables
    found = next((pair for pair in reversed(tables) if len(pair[0]) >= blocks), None)
    if found is not None:
        return found
    rope, size, device = store.key.rope, store.key.spec.effective_rope_block, store.pages.device
    assert rope is not None
    count = max(blocks, TABLE_BLOCKS, *(2 * len(pair[0]) for pair in tables))
    first = rope.first // size
    position = torch.arange(first, first + count, dtype=torch.float64, device=device)[:, None] * size
    angle = position * rope.inv_freq.to(device).double()
    made = angle.cos().float().contiguous(), angle.sin().float().contiguous()
    tables.append(made)
    return made


def mean_logit_vector(store: LayerStore) -> Tensor | None:
    """mu with q . mu = what removing the key mean took off every logit of a query q: float32 [heads, head_dim]; None where no mean
    is removed."""
    layout, device = store.layout, store.pages.device
    unit = torch.eye(layout.head_dim, dtype=torch.float64, device=device).expand(layout.heads, -1, -1)
    found: Tensor | None = None
    for transform in store.key.transforms:
        here = transform.mean_logit(unit)
        found = here if found is None else found if here is None else found + here
        unit = transform.dual(unit)
    return None if found is None else found.float().contiguous()
