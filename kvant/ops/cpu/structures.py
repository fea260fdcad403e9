"""The structures of native/kvant.h as ctypes: the same fields in the same order."""

from __future__ import annotations

import ctypes
import enum
import struct
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

MAX_SECTIONS, MAX_SPANS = 8, 64
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
FP8 = 3  # of overlays alone
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Kind(enum.IntEnum):
    """How the elements of a stream are stored."""

    SCALE_MIN = 0  # scales per token: x = scale * code + min
    SCALE_ZERO = 1  # scales per token: x = scale * (code - zero)
    SCALE_ALONE = 2  # scales per token: x = scale * level, uniform levels
    CHANNEL = 3  # a scale and a minimum per channel of a group of tokens
    BOOSTED = 4  # the same; some channels have two more bits
    CENTROIDS = 5  # indices of product quantization
    RAW = 6  # unquantized elements
    LEVELS = 7  # a scale per token: x = scale * levels[code]


def _all(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Section(ctypes.Structure):
    _fields_ = [("offset", c_int64), *_all(c_int32, "bits first width shift"), ("alpha", c_float)]


class Span(ctypes.Structure):
    _fields_ = [*_all(c_int32, "first end meta bits"), *_all(c_float, "step center")]


class Stream(ctypes.Structure):
    _fields_ = [
        *_all(c_int32, "kind sections spans metas meta_fields meta_type"),
        *_all(c_int32, "sink ring flush recent first overlay_tokens group_tokens raw_window window_type"),
        *_all(c_int32, "boosted subvector_dim books_heads books_subvectors book_bits centers index_bits"),
        *_all(c_int64, "meta_offset high_offset index_offset"),
        *_all(c_void_p, "mean books levels overlay ring_start"),
        ("section", Section * MAX_SECTIONS),
        ("span", Span * MAX_SPANS),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "block_table seq_lens overlay_rows sinks slot_mapping query_start_loc"),
        ("ring_start", c_void_p * 2),
        *_all(c_int64, "width count"),
    ]


class Decode(ctypes.Structure):
    _fields_ = [
        *_all(Stream, "key value"),
        *_all(c_void_p, "dual inverse inverse_offset mean_logit dual_limbs dual_scales"),
        ("page_head_bytes", c_int64),
        *_all(c_int32, "heads dim page_tokens origin"),
        *_all(
            c_int32, "dual_heads inverse_heads offset_heads rope_half rope_block rope_first split_tokens longest_split"
        ),
        *_all(c_void_p, "batch query out lse sink_logits pages"),
        ("overlay", c_void_p * 2),
        *_all(c_void_p, "cosine sine operands tables partial"),
        ("operand_stride", c_int64),
        *_all(c_int32, "group type splits sliding_window use_mean_logit"),
        *_all(c_float, "scale softcap"),
    ]


DECODED = struct.Struct("@13Pq5i2f")  # the fields of Decode from `batch` on


class FusedTransform(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "mean signs matrix offset cosine sine weights flag_mean edges columns_f64 columns_f32"),
        ("clip_share", c_float),
        *_all(c_int32, "order matrix_heads offset_heads rope_half rope_block rope_first"),
        *_all(c_int32, "rope_blocks clip_rank search unbiased single"),
    ]


class Append(ctypes.Structure):
    _fields_ = [
        *_all(Stream, "key value"),
        *_all(FusedTransform, "key_transform value_transform"),
        ("page_head_bytes", c_int64),
        *_all(c_int32, "heads dim page_tokens origin refused"),
        *_all(c_void_p, "batch pages"),
        ("overlay", c_void_p * 2),
        ("source", c_void_p * 2),
        ("stride", c_int64 * 2),
        ("head_stride", c_int64 * 2),
        ("tokens", c_int32),
        ("type", c_int32 * 2),
        ("limit", c_float),
    ]


APPENDED = struct.Struct("@6P4q3if")  # the fields of Append from `batch` on


class Read(ctypes.Structure):
    _fields_ = [
        ("stream", Stream),
        *_all(c_void_p, "pages block_table out"),
        ("page_head_bytes", c_int64),
        *_all(c_int32, "first last heads dim page_tokens keys"),
    ]
