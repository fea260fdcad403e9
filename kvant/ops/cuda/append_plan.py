"""The kernels that append token-wise codes, kernels/append.cu, append_step.cu and append_tiles.cu: which layouts they serve, their
constants and their arguments."""

from __future__ import annotations

import dataclasses
import functools

from kvant.codecs.format import ScaleKind, StreamFormat
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc, refusals
from kvant.ops.cuda.arguments import Arguments, float32, int32, optional, pointer
from kvant.ops.cuda.bands import all_bands, code_bands, code_offsets, level_edges
from kvant.ops.cuda.config import ELEMENT_TYPES, overlay_config, page_config, scale_config, window_type

WARPS = 8  # of a CTA of kvant_append
STEP_WARPS = 16  # of a CTA of kvant_append_step: one for each of 16 tokens
STEP_CTAS = 1  # of kvant_append_step that a multiprocessor is to hold
STEP_DIMS = (64, 96, 128)  # head dims of kvant_append_step: two warps for every 16 columns of the matrix
TILE_DIMS = (64, 96, 128)  # head dims of affine tiles: more do not fit into registers
MATRIX_TILE_WARPS = 8  # of a CTA of kvant_append_tiles where rows have a matrix, 4, 8 or 16
BANDED_TILE_WARPS = 12  # the same of banded rows, 4 or 12
READ_AHEAD = True  # whether kvant_append_tiles reads rows that have a matrix while it codes those before
BAND_DIMS = (64, 128)  # head dims of banded tiles: a lane's share of each is whole bytes

AppendArguments = Arguments(
    "AppendArguments",
    key=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM], tokens key_stride elements apart"),
    value=pointer("const void", "[tokens, KV_HEADS, HEAD_DIM], tokens value_stride elements apart"),
    key_mean=optional("const float", "[KV_HEADS, HEAD_DIM], subtracted after the Hadamard or the matrix"),
    value_mean=optional("const float", "[KV_HEADS, HEAD_DIM]"),
    key_signs=optional("const float", "[HEAD_DIM], multiplied by before the Hadamard"),
    value_signs=optional("const float", "[HEAD_DIM]"),
    key_weights=optional("const float", "[KV_HEADS, HEAD_DIM], of the errors of banded codes"),
    value_weights=optional("const float", "[KV_HEADS, HEAD_DIM]"),
    key_flag_mean=optional("const float", "[KV_HEADS, HEAD_DIM], subtracted from rows whose scale is stored negative"),
    value_flag_mean=optional("const float", "[KV_HEADS, HEAD_DIM]"),
    key_matrix=optional("const u32", "[1 or KV_HEADS, parts, ...], in the order in which the kernel multiplies"),
    value_matrix=optional("const u32", "[1 or KV_HEADS, parts, ...]"),
    key_books=optional("const u8", "float16 [KV_HEADS or 1, centroids, HEAD_DIM]: their residuals are coded"),
    value_books=optional("const u8", "float16 [KV_HEADS or 1, centroids, HEAD_DIM]"),
    key_indices=optional("const u8", "[tokens, KV_HEADS], the nearest centroids"),
    value_indices=optional("const u8", "[tokens, KV_HEADS]"),
    pages=pointer("u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    slot_mapping=pointer("const s64", "[tokens], page * PAGE_TOKENS + place; -1 is padding"),
    query_start_loc=pointer("const s64", "[batch + 1], first new token of a sequence"),
    seq_lens=pointer("const s64", "[batch], tokens of a sequence with its new ones"),
    overlay_rows=pointer("const s64", "[batch], row of the overlays"),
    raw_key=optional(
        "const void", "[tokens, KV_HEADS, HEAD_DIM], keys as the model gave them, where kvant_append stores these"
    ),
    overlay_key=pointer("void", "[rows, OVERLAY_TOKENS, KV_HEADS, HEAD_DIM]"),
    overlay_value=pointer("void", "[rows, OVERLAY_TOKENS, KV_HEADS, HEAD_DIM]"),
    cosine=optional("const float", "[RoPE blocks, HEAD_DIM / 2], by which tiles unrotate keys"),
    sine=optional("const float", "[RoPE blocks, HEAD_DIM / 2]"),
    key_matrix_unit=float32("what the entries of a banded stream's matrix are multiples of"),
    value_matrix_unit=float32("the same of values"),
    key_clip_share=float32(
        "a row is clipped so far between two of its magnitudes: from that which clip_drop others exceed up"
    ),
    value_clip_share=float32("the same of values"),
    key_clip_start=float32("where the search for the clip begins, in mean magnitudes of the row"),
    value_clip_start=float32("the same of values"),
    key_clip_gap=float32("how far apart magnitudes are there, about, in mean magnitudes of the row"),
    value_clip_gap=float32("the same of values"),
    key_clip_drop=int32("magnitudes above the clip; 0 clips nothing"),
    value_clip_drop=int32("the same of values"),
    key_matrix_stride=int32("16-byte words from a head's matrix to the next; 0 where heads share one"),
    value_matrix_stride=int32("the same of values"),
    key_stride=int32("elements from a token's keys to the next token's"),
    value_stride=int32("the same of values"),
    raw_stride=int32("elements from a token's raw keys to the next token's"),
    rope_first=int32("RoPE position of a sequence's first token"),
    rope_blocks=int32("RoPE blocks of the table"),
    tokens=int32("new tokens"),
    batch=int32("sequences"),
    half_batch=int32("largest power of two below the batch, or 0: where a binary search begins"),
    sequence_rate=float32("batch / tokens: where the search for a token's sequence begins"),
)


def refuse_layout(layout: Layout) -> str | None:
    """Why the kernels cannot write the codes of a layout, or None."""
    for name, stream in layout.formats.items():
        if not (stream.is_tokenwise or stream.is_residual):
            return f"it writes token-wise codes, and the {name}s are coded by {stream.codec}"
        for bits in stream.widths - {2, 3, 4, 8}:
            return f"it writes codes of 2, 3, 4 or 8 bits, and the {name}s have {bits}"
        if 8 % stream.scale_groups:
            return f"it writes 1, 2, 4 or 8 scales a token, and the {name}s have {stream.scale_groups}"
    return refusals.refuse_layout(layout)


def is_banded(stream: StreamFormat) -> bool:
    """Whether codes are evenly spaced levels around zero under a scale alone (codecs/encode_banded.cuh), not affine."""
    return stream.scales is not None and stream.scales.kind is ScaleKind.ALONE and stream.uniform


def tileable(layout: Layout) -> bool:
    """Whether tiles of 16 tokens can be written, if they come in 16 bits: every lane then has whole words of codes."""
    dim, formats = layout.head_dim, list(layout.formats.values())
    three = [band for stream in formats for band in stream.stored_bands if band.bits == 3]  # whose codes are two planes
    if all(is_banded(stream) for stream in formats):
        halved = any(
            band.width * band.bits == 32 for stream in formats for band in stream.stored_bands
        )  # parts of words
        return (
            dim in BAND_DIMS and not halved and not any(band.width % 64 for band in three) and not (three and dim < 128)
        )
    if three and (dim != 128 or any(stream.scale_groups > 1 for stream in formats if 3 in stream.widths)):
        return False
    if any(is_banded(stream) or not (stream.is_tokenwise or stream.is_residual) for stream in formats):
        return False
    return dim in TILE_DIMS and all(dim * bits % 128 == 0 for stream in formats for bits in stream.widths)


def steppable(layout: Layout) -> bool:
    """Whether kvant_append_step writes a layout's codes, if rows come in 16 bits."""
    return layout.head_dim in STEP_DIMS


@dataclasses.dataclass(frozen=True)
class AppendPlan:
    """The kernels for one layout and way to call them. Orders are those of Hadamard transforms, 1 where there is none."""

    layout: Layout
    types: tuple[str, str]  # of the keys and values that come in
    orders: tuple[int, int]
    means: tuple[bool, bool] = (False, False)  # whether one is subtracted
    parts: tuple[int, int] = (0, 0)  # 16-bit matrices that the kernel multiplies by, 0 where there is none
    rope_block: int = 0  # positions of a RoPE block, to whose start the kernel unrotates keys; 0 where it does not
    step: bool = False  # whether it is kvant_append_step
    wgmma: bool = False  # whether the GPU multiplies by warpgroups (sm_90a)
    early: bool = False  # whether kvant_append_step loads its matrices before it waits for the kernel before it
    bulk: bool = False  # whether the next kernel may start before this one has ended, see copies_in_bulk
    raw: str = "bfloat16"  # type of the keys as the model gave them, where kvant_append stores these in the overlay

    @functools.cached_property
    def tiled(self) -> bool:
        """Whether there is a kernel for tiles of 16 tokens, too."""
        if self.step or not tileable(self.layout) or "float32" in self.types:
            return False
        scales = [stream.scale_groups for stream in self.layout.formats.values()]
        if any(
            n > 1 and order > 1 and not parts for n, order, parts in zip(scales, self.orders, self.parts, strict=True)
        ):
            return False  # tiles multiply such rows by a matrix
        return all(self.parts) or not is_banded(self.layout.format("key"))

    @property
    def tile_warps(self) -> int:
        """Warps of a CTA of kvant_append_tiles: with a matrix, warpgroups that share it. Of banded rows, registers hold twelve
        warps."""
        if not any(self.parts):
            return 4
        return BANDED_TILE_WARPS if is_banded(self.layout.format("key")) else MATRIX_TILE_WARPS

    @property
    def _tile_ctas(self) -> int:
        """CTAs of kvant_append_tiles that a multiprocessor is to hold: with a matrix, rows take more registers and shared memory."""
        if any(self.parts):
            return (12 if is_banded(self.layout.format("key")) else 16) // self.tile_warps
        encodings = [stream.encoding for stream in self.layout.formats.values()]
        several = any(stream.scale_groups > 1 or stream.is_residual for stream in self.layout.formats.values())
        return 4 if several or any(encoding.clip or encoding.search > 1 for encoding in encodings) else 5

    @property
    def shared(self) -> int:
        """Bytes of shared memory of kvant_append_tiles: the matrix of a head."""
        return 2 * self.layout.head_dim**2 * max(self.parts)

    @functools.cached_property
    def text(self) -> str:
        config: dict[str, object] = {
            **page_config(self.layout),
            **overlay_config(self.layout),
            "VALUE_WINDOW_TYPE": window_type(self.layout, "value"),
            "RAW_TYPE": ELEMENT_TYPES[self.raw],
            "WARPS": WARPS,
            "TILE_WARPS": self.tile_warps,
            "TILE_CTAS": self._tile_ctas,
            "READ_AHEAD": int(READ_AHEAD),
            "STEP_WARPS": STEP_WARPS,
            "STEP_CTAS": STEP_CTAS,
            "EARLY": int(self.early),
            "CLIP": int(any(stream.encoding.clip for stream in self.layout.formats.values())),
            "Key": self._stream("key", 0),
            "Value": self._stream("value", 1),
        }
        tiled_products = self.wgmma and self.tiled and any(self.parts)
        defines = {"BULK": int(self.bulk or tiled_products), "WGMMA": int(tiled_products)}
        file = "append_step" if self.step else "append_tiles" if self.tiled else "append"
        return nvrtc.program(f"kernels/{file}.cu", config=config, arguments=[AppendArguments], defines=defines)

    def _stream(self, name: StreamName, i: int) -> dict[str, object]:
        stream = self.layout.format(name)
        first = stream.stored_bands[0]
        offset, high_offset = code_offsets(self.layout, name, first)
        return {
            "IN_TYPE": ELEMENT_TYPES[self.types[i]],
            "HADAMARD": self.orders[i],
            "HADAMARD_SCALE": self.orders[i] ** -0.5,
            "MEAN": int(self.means[i]),
            "MATRIX_PARTS": self.parts[i],
            "ROPE_BLOCK": self.rope_block if name == "key" else 0,
            "BANDED": int(is_banded(stream)),
            "LEVELS": 0 if stream.uniform else 1 << first.bits,
            "Edges": level_edges(stream),
            "CodeBands": code_bands(self.layout, name),
            "AllBands": all_bands(self.layout, name),
            "BITS": first.bits,
            "OFFSET": offset,
            "HIGH_OFFSET": high_offset,
            "SEARCH": stream.encoding.search,
            "GROUPS": stream.scale_groups,
            "CENTROIDS": stream.codebook.centroids if stream.codebook is not None else 0,
            "BOOK_HEADS": stream.codebook.heads(self.layout.heads) if stream.codebook is not None else 1,
            "UNBIASED": int(stream.encoding.unbiased),
            "WEIGHTED": int(stream.encoding.weighted),
            "FLAG": int(stream.mean_flag),
            **scale_config(self.layout, name),
        }
