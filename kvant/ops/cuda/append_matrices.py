"""The matrices that kernels/append_tiles.cu and append_step.cu multiply by, as the operands of their tensor-core products."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Self

import torch

from kvant.layout import Layout, StreamName
from kvant.ops.cuda.append_plan import is_banded
from kvant.ops.cuda.transform_kv import matrix_in
from kvant.ops.fused import FusedTransform, TransformKind, fuse, matrix_of
from kvant.ops.types import Derived, LayerStore
from kvant.transforms.hadamard import walsh_hadamard

Tensor = torch.Tensor


class TileMatrix(NamedTuple):
    """What rows of a stream are multiplied by, and what is left to do after it. Where tiles of the stream are banded, channels are in
    the order in which lanes hold them."""

    matrix: (
        Tensor  # int32 [1 or heads, parts, ...]: pairs of 16-bit numbers, the largest part last, in the order of use
    )
    entry_step: float = 1.0  # power of two that the entries are multiples of
    order: int = 1  # of a Hadamard, whose factor is left to do
    mean: Tensor | None = None  # float32 [heads, head_dim], subtracted after it
    weights: Tensor | None = None  # float32 [heads, head_dim], of errors
    flag_mean: Tensor | None = None  # float32 [heads, head_dim], subtracted from rows whose scale is stored negative


@dataclasses.dataclass
class AppendTransforms(Derived):
    """The transforms of a store's streams as the append kernels apply them."""

    forward: dict[StreamName, FusedTransform]  # with the mean after the Hadamard
    tiles: dict[tuple[StreamName, torch.dtype], TileMatrix] = dataclasses.field(default_factory=dict)  # by type of rows
    step: dict[StreamName, TileMatrix] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        names: tuple[StreamName, ...] = ("key", "value")
        device = store.pages.device
        return cls(
            {name: _mean_after(fuse(store.stream(name).transforms, "forward", store.layout, device)) for name in names}
        )


def _mean_after(forward: FusedTransform) -> FusedTransform:
    """The same with the mean subtracted after the Hadamard: H (x - mu) = H x - H mu."""
    if forward.mean is None or forward.kind is TransformKind.NONE:
        return forward
    mean = forward.mean.double() if forward.tensor is None else forward.mean.double() * forward.tensor
    return dataclasses.replace(forward, mean=walsh_hadamard(mean, forward.order).float().contiguous())


def tile_matrix(store: LayerStore, name: StreamName, dtype: torch.dtype) -> TileMatrix:
    """The matrix of a stream for kernels/append_tiles.cu and rows of a 16-bit type; made once for a store."""
    made = store.derive(AppendTransforms)
    if (name, dtype) not in made.tiles:
        made.tiles[name, dtype] = _tile_matrix(store, name, dtype, made.forward[name])
    return made.tiles[name, dtype]


def _tile_matrix(store: LayerStore, name: StreamName, dtype: torch.dtype, fused: FusedTransform) -> TileMatrix:
    layout, device, stream = store.layout, store.pages.device, store.stream(name)
    rows, columns = tile_index(layout.head_dim, stream.rope is not None)
    banded = is_banded(layout.format(name))
    if fused.kind is TransformKind.HADAMARD and stream.rope is None and not banded:
        # as entries of +-1, which one part holds; the factor is left to the kernel
        dual = matrix_of(stream.transforms, "dual", layout, device).tensor  # as forward, without a mean
        assert dual is not None
        signs = dual.sign().to(dtype)[:, None]
        tensors = stream.codec.tensors
        order = _group_order(layout, name)
        mean = None if fused.mean is None else fused.mean[:, order.to(device)].contiguous()
        return TileMatrix(
            _fragments(signs, rows, order[columns]), 1.0, fused.order, mean, tensors.weights, tensors.mean
        )
    forward = matrix_in(store, name)
    assert forward.tensor is not None
    # the search for where to clip holds sums as fp16: those of rows that the kernel scales to 2^10 are below 2^15 then
    narrow = dtype is torch.bfloat16 and stream.rope is None and bool(layout.format(name).encoding.clip)
    parts, entry_step = _fp16_parts(forward.tensor.to(device), -2 if narrow else 8)
    order = _lane_order(layout) if name == "key" and banded else _group_order(layout, name)
    offset = None if forward.offset is None else -forward.offset.expand(layout.heads, -1)
    mean, weights, flag_mean = (
        None if x is None else x.to(device)[:, order.to(device)].contiguous()
        for x in (offset, stream.codec.tensors.weights, stream.codec.tensors.mean)
    )
    return TileMatrix(
        _fragments(parts, rows, order[columns]), entry_step, mean=mean, weights=weights, flag_mean=flag_mean
    )


def step_matrix(store: LayerStore, name: StreamName) -> TileMatrix:
    """The matrix of a stream for kernels/append_step.cu, as two parts of float16; made once for a store."""
    made = store.derive(AppendTransforms)
    if name not in made.step:
        made.step[name] = _step_matrix(store, name)
    return made.step[name]


def _step_matrix(store: LayerStore, name: StreamName) -> TileMatrix:
    layout, forward = store.layout, matrix_in(store, name)
    assert forward.tensor is not None
    parts, entry_step = _fp16_parts(forward.tensor.to(store.pages.device))
    mean = None if forward.offset is None else -forward.offset.expand(layout.heads, -1).contiguous()
    return TileMatrix(_fragments(parts, *step_index(layout.head_dim)), entry_step, mean=mean)


def step_index(dim: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the matrix entries in the order of include/step_transform.cuh: [q, m, lane, i, j, e]. q counts 16 columns,
    m steps of 16 rows, i tiles of 8 columns, j registers of the B operand, e halves of a word."""
    count = dim // 16
    q, m, lane, i, j, e = torch.meshgrid(*map(torch.arange, (count, count, 32, 2, 2, 2)), indexing="ij")
    return 16 * m + 8 * j + 2 * (lane % 4) + e, 16 * q + 8 * i + lane // 4


def _fp16_parts(matrix: Tensor, top: int = 8) -> tuple[Tensor, float]:
    """A matrix [heads, head_dim, head_dim] as the sum of two of float16, [heads, 2, head_dim, head_dim], the larger one last, times
    a power of two. The largest entry becomes close to 2^top."""
    matrix = matrix.double()
    entry_step = 2.0 ** (math.frexp(float(matrix.abs().max()) or 1.0)[1] - top)
    high = (matrix / entry_step).half()
    return torch.stack(((matrix / entry_step - high.double()).half(), high), 1), entry_step


def _fragments(parts: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries [heads, parts, rows, columns] of a 16-bit type at these places, two to an int32."""
    device = parts.device
    return parts[:, :, rows.to(device), columns.to(device)].contiguous().view(torch.int32)


def tile_index(dim: int, rope: bool) -> tuple[Tensor, Tensor]:
    """Rows and columns of the matrix entries in the order of include/tile_transform.cuh: [m, n, j, column, t, e]. m counts steps
    of 16 rows, n tiles of 8 columns, j registers of the A operand, t its lanes, e halves of a word. A lane's two registers are words
    m and m + dim / 16 that it reads or, where keys are unrotated, channels that RoPE rotates together. The four lanes of a row read
    four words in turn. A lane's sums are neighbours."""
    m, n, j, column, t, e = torch.meshgrid(*map(torch.arange, (dim // 16, dim // 8, 2, 8, 4, 2)), indexing="ij")
    word = m if rope else m + j * (dim // 16)
    first = word // 4 * 32 + t * 8 + word % 4 * 2 + e
    return first + j * (dim // 2) if rope else first, column // 2 * (dim // 4) + 2 * n + column % 2


def _group_order(layout: Layout, name: StreamName) -> Tensor:
    """Channels as four lanes hold them where several groups of them have a scale each (include/tile_groups.cuh): of keys, a lane has
    a quarter of every group; of values, an eighth of every group, and then the next eighth. In order where there is one scale."""
    groups, dim = layout.format(name).scale_groups, layout.head_dim
    if groups == 1:
        return torch.arange(dim)
    parts = 1 if name == "key" else 2
    channels = torch.arange(dim).view(groups, 4 * parts, dim // groups // (4 * parts))
    return channels.permute(1, 0, 2).flatten()


def _lane_order(layout: Layout) -> Tensor:
    """Channels of the keys as four lanes hold them: each its quarter of every band, band after band."""
    bands = layout.format("key").bands
    quarters = [torch.arange(band.first, band.end).view(4, band.width // 4) for band in bands]
    return torch.cat(quarters, 1).flatten()
