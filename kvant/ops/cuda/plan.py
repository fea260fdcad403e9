"""The program of the decode kernels for a layout: its constants and types, and its text."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.bands import ONE, code_offsets
from kvant.ops.cuda.config import (
    ELEMENT_TYPES,
    ElementType,
    OutputTransform,
    QueryTransform,
    ScaleForm,
    page_config,
    scale_config,
    window_type,
)
from kvant.ops.cuda.decode_arguments import (
    DecodeArguments,
    RotateQueriesArguments,
    TransformOutputsArguments,
    TransformQueriesArguments,
)
from kvant.ops.cuda.geometry import CHUNK_TOKENS, HIGH_BATCH_CTAS, Geometry
from kvant.ops.cuda.key_planes import key_planes
from kvant.ops.cuda.levels import value_levels


class PageCodec(NamedTuple):
    """A header of codecs/ and its type that attends to pages of a format."""

    header: str
    type: str


def page_codec(layout: Layout) -> PageCodec:
    """The codec type that serves a layout. A new one is a header and a line here."""
    key = layout.format("key")
    if key.is_pq:
        return PageCodec("codecs/product_vq_pages.cuh", "ProductVQPages")
    if key.is_channelwise:
        return PageCodec("codecs/channel_pages.cuh", "ChannelPages")
    return PageCodec("codecs/tokenwise_pages.cuh", "TokenwisePages")


@dataclasses.dataclass(frozen=True)
class Plan(Geometry):
    """A kernel for one layout, number of query heads a KV head, and way to call it."""

    @property
    def page_codec(self) -> PageCodec:
        return page_codec(self.layout)

    @functools.cached_property
    def constants(self) -> dict[str, object]:
        """`struct Config` of the program (kvant/ops/cuda/config.py)."""
        layout, heads = self.layout, self.tile_heads
        channelwise = layout.recipe.key.groupwise
        parts = 2 if self.query == "float32" else 1  # one fp16 number holds what a 16-bit query does
        words = parts * self.key_registers // self.rotate_warps * layout.head_dim // 4  # of a thread, of its matrix
        # Of 32 overlay tokens at once a lane holds more numbers: 62 us instead of 60 at 64 x 3072 (oscar, folded, H200).
        one = self.low_batch or self.lane_heads > 1 or self.rotated_keys or self._tokenwise
        tiles = int(dict(self.tuned).get("OVERLAY_TILES", 1 if one else 2))
        overlay_bytes = 16 * tiles * layout.head_dim * 4  # that are attended to at once
        pages_of_overlay = overlay_bytes / layout.page_head_bytes
        overlay_units = round(pages_of_overlay / (1.0 if channelwise else 1.2 if self.low_batch else 2.0))
        return {
            **page_config(layout),
            "ORIGIN": layout.recipe.origin,
            "SINK": layout.recipe.key.window.sink,
            "OVERLAY_TOKENS": layout.overlay_tokens("key"),
            "OVERLAY_TYPE": window_type(layout, "key"),
            "VALUE_WINDOW_TYPE": window_type(layout, "value"),
            "WARPS": self.warps,
            "TEAMS": self.teams,
            "TEAMS_BELOW": self.teams_below,
            "PAIRED_BOOKS": int(self.paired_books),
            "INDICES_IN_REGISTERS": int(self.indices_in_registers),
            "ROPE_BLOCK": 0 if self.rotated_keys else layout.recipe.key.effective_rope_block,
            "ROTATED_KEYS": int(self.rotated_keys),
            **self._bank_orders,
            "CENTROID_SUMS": int(self.centroid_sums),
            "PAIRED_CHANNELS": int(self.paired_channels),
            "ANGLE_OFFSET": self.warps * self.warp_bytes + self.matrix_bytes,
            "KEY_GROUP": layout.format("key").group_tokens if channelwise else 0,
            **self._boosted(),
            "VALUE_GROUPS": layout.scale_groups("value"),
            "KEY_GROUPS": self.key_groups,
            "PageAttention": f"struct {self.page_codec.type}",
            "PQ": int(self.pq),
            "GROUP": self.group,
            "QUERIES": self.queries,
            "TILE_HEADS": heads,
            "QUERY_TILES": self.head_tiles // layout.heads,
            "QUERY_TYPE": ELEMENT_TYPES[self.query],
            "QUERY_TRANSFORM": self._query_transform,
            "QUERY_HADAMARD": self.dual[1],
            "OUTPUT_TRANSFORM": OutputTransform.FUSED_MATRIX
            if self.fused_outputs
            else OutputTransform(self.inverse[0]),
            "OUTPUT_HADAMARD": self.inverse[1],
            "QUERY_KERNEL": int(self.query_kernel),
            "QUERY_PARTS": parts,
            "ROTATE_WARPS": self.rotate_warps,
            "ROTATE_CTAS": max(1, (12 if words > 32 else 24 if parts == 1 else 18) // self.rotate_warps),
            "HIGH_BATCH_WARPS": self.high_batch_warps,
            "HIGH_BATCH_CTAS": HIGH_BATCH_CTAS,
            "PAGES_ONCE": int(bool(layout.recipe.key.effective_rope_block) and not self.rotated_queries),
            "LEVEL_COPIES": self.level_copies,
            "PIPELINED_ROPE": 0,
            "CHUNK_TILES": min(CHUNK_TOKENS, layout.page_tokens) // 16,
            "SHARED_OPERAND": int(self.shared_operand),
            "OVERLAY_TILES": tiles,
            "OVERLAY_LAST": int(self.low_batch),
            "OVERLAY_UNITS": max(1, overlay_units),
            "SPLIT_ROWS": int(self._split_rows),
            "WHOLE_TILES": int(self._tokenwise and (self.low_batch or layout.overlay_tokens("key") > 0)),
            "MIXED_PAGE_UNITS": 4 if channelwise else 1,
            "SOFTCAP": int(self.softcap),
            "SINK_LOGITS": int(self.sink_logits),
            "STAGES": self.stages,
            "WARP_BYTES": self.warp_bytes,
            "MIN_CTAS": self._blocks(self.warps),
            **dict(self.tuned),
            "Key": self._stream("key"),
            "Value": self._stream("value"),
        }

    @functools.cached_property
    def text(self) -> str:
        arguments = [DecodeArguments, TransformQueriesArguments, TransformOutputsArguments]
        files = [self.page_codec.header, "kernels/decode.cu", "kernels/transform_queries.cu"]
        if self.layout.recipe.key.effective_rope_block and not self.rotated_queries and not self.rotated_keys:
            arguments.append(RotateQueriesArguments)
            files.append(f"kernels/rotate_queries{'_high_batch' if self.high_batch_warps else ''}.cu")
        return nvrtc.program(*files, config=self.constants, arguments=arguments, defines={"BULK": int(self.bulk)})

    @property
    def _bank_orders(self) -> dict[str, object]:
        """Whether lanes read codes and scales in another order than that of the pages, so that they do not wait for each other. At
        32 x 32768 on an H200, with and without: codes of residuals 345 and 364 us (saw-int4-kmeans), scales of values 344 and 376
        (squat-pre) and 226 to 235 and 240 to 244 (kivi-k2v2), scales of keys 251 and 253 (kivi-k2v2, in three CTAs)."""
        key = self.layout.format("key")
        plain = self.layout.recipe.key.groupwise and not self._boosted()["BOOSTED"]
        two_bits = plain and self.layout.head_dim == 128 and [band.bits for band in key.stored_bands] == [2]
        return {
            "CODE_BANKS": int(self._residual_words),
            "VALUE_BANKS": int(self.layout.recipe.key.groupwise and self.layout.page_tokens == 64),
            "KEY_BANKS": int(two_bits and not self.rotated_keys),
        }

    def _boosted(self) -> dict[str, object]:
        found = {} if self.pq or self.residual else {s.names[0]: s for s in self._sections("key", "index")}
        return {
            "BOOSTED": found["high"].width if found else 0,
            "HIGH_OFFSET": found["high"].offset if found else 0,
            "INDEX_OFFSET": found["index"].offset if found else 0,
        }

    @property
    def _query_transform(self) -> QueryTransform:
        if self.rotated_queries:
            return QueryTransform.ROTATED_MATRIX
        return QueryTransform.FUSED_MATRIX if self.fused_queries else QueryTransform(self.dual[0])

    def _stream(self, name: StreamName) -> dict[str, object]:
        """Constants and types of a stream."""
        layout, window = self.layout, self.layout.recipe.streams[name].window
        constants: dict[str, object] = {
            "RECENT": window.recent,
            "FLUSH": window.flush,
            "RING": max(1, window.ring),
            "OVERLAY_TOKENS": layout.overlay_tokens(name),
            "FLAG": int(layout.format(name).mean_flag),
            **self._centroids(name),
        }
        if self.pq:
            return constants | self._book(name)
        constants |= scale_config(layout, name)
        if name == "value":
            return constants | {"Codes": self._codes("value", layout.scale_groups("value") > 1)}
        if layout.recipe.key.groupwise:
            return constants | {"Operand": "KeyPlanes<>", "Codes": self._codes("key", bare=True)}
        return constants | {"Operand": f"KeyPlanes<{', '.join(plane.text for plane in key_planes(layout))}>"}

    def _centroids(self, name: StreamName) -> dict[str, object]:
        """Centroids whose residuals a stream codes: behind the pages of all warps, what belongs to the keys first."""
        stream = self.layout.format(name)
        if not stream.is_residual:
            return {"CENTROIDS": 0, "INDEX_OFFSET": -1, "CENTROID_OFFSET": 0, "BOOK_HEADS": 1}
        assert stream.codebook is not None
        index = self._sections(name, "index")
        return {
            "CENTROIDS": stream.codebook.centroids,
            "INDEX_OFFSET": index[0].offset if index else -1,
            "CENTROID_OFFSET": self.warps * self.warp_bytes + (self.book_bytes[0] if name == "value" else 0),
            "BOOK_HEADS": stream.codebook.heads(self.layout.heads),
        }

    def _book(self, name: StreamName) -> dict[str, object]:
        """The codebook of a stream: behind the pages of all warps, that of the keys first."""
        at = 0 if name == "key" else 1
        codebook = self.layout.format(name).codebook
        assert codebook is not None
        low, *high = self._sections(name, "index")
        bits, offset = (high[0].bits, high[0].offset) if high else (0, 0)
        place, side = self.teams * self.warps * self.warp_bytes + sum(self.book_bytes[:at]), -1
        if self.paired_books:
            place, side = self.teams_below * self.warps * self.warp_bytes, at
        by_place = str(codebook.per == "space").lower()
        indices = f"{low.width}, {low.bits}, {bits}, {low.offset}, {offset}"
        book = f"SharedCodebook<{codebook.dim}, {indices}, {self.copies[at]}, {place}, {by_place}, {side}>"
        kind = {"Operand": f"CentroidKeys<{book}>"} if name == "key" else {"Codes": f"CentroidValues<{book}>"}
        return {
            "Codebook": book,
            **kind,
            "BOOK_HEADS": codebook.heads(self.layout.heads),
            "SCALE_FORM": ScaleForm.NONE,
            "SCALE_TYPE": ElementType.BF16,
            "SCALE_OFFSET": 0,
        }

    def _codes(self, stream: StreamName, bare: bool = False) -> str:
        """The C++ type that reads the codes of a stream of one band as fp16 numbers."""
        (band,) = self.layout.format(stream).stored_bands
        low, high = code_offsets(self.layout, stream, band)
        if band.levels:
            step, magnitudes = value_levels(band.levels)
            place = self.warps * self.warp_bytes + self.matrix_bytes
            return f"LevelValues<{band.width}, {band.bits}, {low}, {high}, {place}, {step}, {', '.join(f'{x}u' for x in magnitudes)}>"
        return f"ValueCodes<{band.width}, {band.bits}, {low}, {high}, {round(ONE * band.step)}, {str(bare).lower()}>"
