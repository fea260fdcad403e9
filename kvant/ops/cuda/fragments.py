"""Matrices that queries and outputs are multiplied by, in the order in which the lanes of a warp hold MMA operands (fragments).

DecodeTransforms (kvant/ops/cuda/decode_matrices.py) makes them once for a store. With lane = 4 g + t, a lane holds rows 2t, 2t + 1,
2t + 8 and 2t + 9 of column g of a B operand [16, 8].
"""

from __future__ import annotations

import itertools

import torch

from kvant.layout import Layout
from kvant.ops.cuda.bands import ONE
from kvant.ops.cuda.key_planes import key_planes

Tensor = torch.Tensor


def rotated_columns(layout: Layout, matrix: Tensor, mean_logit: Tensor | None) -> tuple[Tensor, int]:
    """The matrix M that kernels multiply rotated queries by, float64 [1 or heads, head_dim, columns], and how many of its first
    columns make the query operand. `matrix` [1 or heads, head_dim, head_dim] brings queries q into the space that keys are stored
    in: q' = q @ matrix. `mean_logit` [heads, head_dim] is mu of q . mu, the logit that removing the key mean took off.

    q @ M has these columns, in tiles of 8:
      two tiles for each register of the query operand: the four bytes of the words of lanes t = 0..3, as channels of q' times the
        weight of their plane. For product quantization, the register's words of the even and of the odd columns
        (codecs/product_vq.cuh);
      one tile of the sum of all channels of q', the bias of centred levels (sum_c q'_c times the middle of the levels of channel
        c), q . mu, and five zeros."""
    planes, dim = key_planes(layout), layout.head_dim
    picked = torch.zeros(dim, 16 * sum(plane.registers for plane in planes) or dim, dtype=torch.float64)
    bias = torch.zeros(dim, dtype=torch.float64)
    if not planes:
        register, tile, lane, e = torch.meshgrid(*map(torch.arange, (dim // 16, 2, 4, 2)), indexing="ij")
        picked[lane * (dim // 4) + 4 * register + 2 * tile + e, 16 * register + 8 * tile + 2 * lane + e] = 1.0
    for plane in planes:
        weight = plane.weight / ONE
        bias[plane.first : plane.first + plane.width] -= weight * ((1 << plane.bits) - 1) / 2
        for i in range(plane.registers):
            for half, column in itertools.product(range(2), range(8)):
                channel = plane.channel(i, 2 * half + column % 2, column // 2)
                if channel >= 0:
                    place = 16 * (plane.before + i) + 8 * half + column
                    picked[channel, place] = weight / (1 << plane.raised(i))
    special = torch.zeros(dim, 8, dtype=torch.float64)
    special[:, 0], special[:, 1] = 1.0, bias
    columns = torch.cat((picked, special), 1).to(matrix.device)
    if mean_logit is not None:
        matrix = matrix.expand(layout.heads, dim, dim)
    product = matrix.double() @ columns
    if mean_logit is not None:
        product[:, :, picked.shape[1] + 2] = mean_logit
    return product, picked.shape[1]


def _half_parts(x: Tensor) -> Tensor:
    """[2, ...]: fp16 numbers high = fp16(x) and low = fp16(x - high), whose sum is x to about 22 bits."""
    high = x.half()
    return torch.stack((high, (x - high.double()).half()))


def rotate_fragments(layout: Layout, matrix: Tensor, mean_logit: Tensor | None) -> Tensor:
    """B operand of kvant_rotate_queries, int32 [1 or heads, tiles of 8 columns, steps of 16 rows, 2 parts, 32 lanes, 2 registers]:
    the matrix of `rotated_columns` in fp16 as high + low."""
    product, _ = rotated_columns(layout, matrix, mean_logit)
    # a row is 16 step + 8 register + 2 t + element, a column 8 tile + g:
    # [part, head, step, register, t, element, tile, g] to [head, tile, step, part, g, t, register, element]
    parts = _half_parts(product).view(2, len(product), layout.head_dim // 16, 2, 4, 2, -1, 8)
    parts = parts.permute(1, 6, 2, 0, 7, 4, 3, 5).contiguous()
    return parts.view(torch.int32).view(*parts.shape[:4], 32, 2)


def high_batch_fragments(layout: Layout, matrix: Tensor, mean_logit: Tensor | None) -> Tensor:
    """B operand of kvant_rotate_queries_high_batch, int32 [1 or heads, pairs of tiles, steps of 16 rows, 2 parts, 32 lanes, 4
    registers]: the matrix of `rotated_columns` in fp16 as high + low. Its rows are in the order in which lanes hold channels
    (kernels/rotate_queries_high_batch.cu). Its columns are permuted so that a lane makes words of the query operand that are
    neighbours in memory: of every four registers it makes one whole register, of two that are left half a register."""
    product, picked = rotated_columns(layout, matrix, mean_logit)
    dim, count = layout.head_dim, picked // 16
    k, lane = torch.arange(count)[:, None], torch.arange(4)
    whole = k < count // 4 * 4
    register = torch.where(whole, k // 4 * 4 + lane, count - 2 + lane // 2)
    place = torch.where(
        whole, k % 4 + 0 * lane, lane % 2 * 2 + k % 2
    )  # t of the lane that reads the word in the decode kernel
    half, e = torch.arange(2)[:, None, None], torch.arange(2)
    columns = (16 * register + 2 * place)[:, None, :, None] + 8 * half + e  # [word, half, lane, element]
    product = torch.cat(
        (
            product[:, :, columns.reshape(-1).to(product.device)],
            product[:, :, picked:],
            torch.zeros_like(product[:, :, :8]),
        ),
        2,
    )
    # a row is (dim / 2) half + 16 steps + 4 t + 2 step + element, where `steps` counts two steps of 16 rows
    parts = _half_parts(product).view(2, len(product), 2, dim // 32, 4, 2, 2, -1, 2, 8)
    # [part, head, half, steps, t, step, element, pair of tiles, tile, g] to
    # [head, pair, steps, step, part, g, t, tile, half, element]
    parts = parts.permute(1, 7, 3, 5, 0, 9, 4, 8, 2, 6).contiguous().view(torch.int32)
    return parts.view(len(product), -1, dim // 16, 2, 32, 4)


def decode_fragments(layout: Layout, matrix: Tensor, mean_logit: Tensor | None) -> Tensor:
    """A operand of the queries that kvant_decode rotates itself, int32 [1 or heads, tiles, steps of 16 channels, 32 lanes, 4
    registers]: the matrix of `rotated_columns`, transposed, in fp16. Tiles of 16 rows are, in this order, the registers of the query
    operand, and the sums. In every two tiles of the operand, lane g holds the four bytes of word
    g // 2 of register g % 2: two in rows g and g + 8 of the first tile, two in those of the second. Steps are in the order in which
    lanes hold channels (include/rotated_query.cuh)."""
    product, picked = rotated_columns(layout, matrix, mean_logit)
    dim = layout.head_dim
    pair, tile, high, g = torch.meshgrid(*map(torch.arange, (picked // 32, 2, 2, 8)), indexing="ij")
    rows = 16 * (2 * pair + g % 2) + 8 * tile + 2 * (g // 2) + high
    sums = product[:, :, picked:]
    product = torch.cat((product[:, :, rows.reshape(-1).to(product.device)], sums, torch.zeros_like(sums)), 2)
    # a row is 16 tile + 8 high + g, a channel (dim / 2) half + 16 steps + 4 t + 2 step + element: from
    # [head, half, steps, t, step, element, tile, high, g] to [head, tile, steps, step, g, t, half, high, element]
    made = product.half().view(len(product), 2, dim // 32, 4, 2, 2, -1, 2, 8).permute(0, 6, 2, 4, 8, 3, 1, 7, 5)
    return made.contiguous().view(torch.int32).view(len(product), -1, dim // 16, 32, 4)


def matrix_fragments(matrix: Tensor) -> Tensor:
    """B operand of kvant_transform_queries, int32 [1 or heads, 16 columns each, steps of 16 channels,
    2 parts, 32 lanes, 4 registers], from a matrix [1 or heads, head_dim, head_dim]: high + low in bfloat16."""
    high = matrix.double().bfloat16()
    return _fragments(torch.stack((high, (matrix.double() - high.double()).bfloat16()), 1))


def fused_fragments(matrix: Tensor) -> Tensor:
    """B operand of the transforms inside the decode kernel, int32, one-dimensional: the fragments of all matrices in fp16, each
    matrix divided by the power of two that brings its largest entry to at most one; then these powers as float32."""
    power = torch.exp2(matrix.abs().amax((1, 2)).float().clamp_min(2.0**-60).log2().ceil())
    parts = (matrix / power[:, None, None]).half()[:, None]
    return torch.cat((_fragments(parts).flatten(), power.view(torch.int32)))


def _fragments(parts: Tensor) -> Tensor:
    """16-bit parts [1 or heads, parts, head_dim, head_dim] in the order of `matrix_fragments`. Rows are permuted as lanes read
    queries: lane t has the t-th quarter of the channels, four neighbouring ones a step. Columns are permuted so that a lane's
    accumulators are four neighbouring columns."""
    dim = parts.shape[-1]
    warp, k, lane, j, r, e = torch.meshgrid(*map(torch.arange, (dim // 16, dim // 16, 32, 2, 2, 2)), indexing="ij")
    g, t = lane // 4, lane % 4
    rows, columns = t * (dim // 4) + 4 * k + 2 * r + e, 16 * warp + 4 * (g // 2) + 2 * j + g % 2
    made = parts[:, :, rows.to(parts.device), columns.to(parts.device)]  # [heads, part, warp, step, lane, 2, 2, 2]
    made = made.permute(0, 2, 3, 1, 4, 5, 6, 7).contiguous().view(torch.int32)
    return made.view(len(parts), dim // 16, dim // 16, -1, 32, 4)
