"""Constants of a CUDA program, as one generated `struct Config` that stands before the includes.

    struct Config {
      static constexpr int HEAD_DIM = 128;  // channels of a head
      using CodePlanes = Planes<...>;       // planes of the codes
      struct Key { ... };                   // constants of a stream
    };

A kernel reads `Config::HEAD_DIM`; a part that serves keys and values alike is a template over `Config::Key` and `Config::Value`.
Every constant is documented in the tables below, and a name that is not there is refused. A constant that the preprocessor has
to see stays a define, see `nvrtc.program`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import NamedTuple

from kvant.layout import Layout, StreamName


class ElementType(enum.IntEnum):
    """Floating-point types of tensors, as the kernels number them."""

    BF16 = 0
    FP16 = 1
    FP32 = 2
    FP8 = 3  # e4m3; in overlays of values


class ScaleForm(enum.IntEnum):
    """What is stored beside the codes of a token: how a number is made from a code."""

    SCALE_MIN = 0  # x = code * scale + min
    SCALE_ZERO = 1  # x = (code - zero) * scale, with an integer zero
    SCALE = 2  # x = level(code) * scale
    NONE = 3  # nothing: codes are indices of centroids


class QueryTransform(enum.IntEnum):
    """How queries come into the space that keys are stored in."""

    NONE = 0
    HADAMARD = 1  # by the decode kernel, in shared memory
    MATRIX = 2  # by a kernel before the decode kernel
    FUSED_MATRIX = 3  # by the decode kernel, on tensor cores
    ROTATED_MATRIX = 4  # by the warps of the decode kernel, for every RoPE block


class OutputTransform(enum.IntEnum):
    """How outputs leave the space that values are stored in."""

    NONE = 0
    HADAMARD = 1  # by the decode kernel, in shared memory
    MATRIX = 2  # by a kernel after the decode kernel
    FUSED_MATRIX = 3  # by the decode kernel, on tensor cores


ENUMS: tuple[type[enum.IntEnum], ...] = (ElementType, ScaleForm, QueryTransform, OutputTransform)


ELEMENT_TYPES = {"bfloat16": ElementType.BF16, "float16": ElementType.FP16, "float32": ElementType.FP32}
SCALE_FORMS = {
    "min": ScaleForm.SCALE_MIN,
    "zero": ScaleForm.SCALE_ZERO,
    "alone": ScaleForm.SCALE,
}  # by format.ScaleKind


class Constant(NamedTuple):
    """The C++ type of a constant ("type" for an alias of a type), and what it is, with its unit."""

    type: str
    doc: str


def _ints(**docs: str) -> dict[str, Constant]:
    return {name: Constant("int", doc) for name, doc in docs.items()}


def _types(**docs: str) -> dict[str, Constant]:
    return {name: Constant("type", doc) for name, doc in docs.items()}


# Of a program.
CONSTANTS: dict[str, Constant] = {
    # the layout of pages
    **_ints(
        HEAD_DIM="channels of a head",
        KV_HEADS="KV heads of a page",
        PAGE_TOKENS="tokens of a page",
        PAGE_HEAD_BYTES="bytes of one page of one KV head",
        ORIGIN="position of the first token that pages hold; the ones before are in the overlay alone",
    ),
    # the overlay: full-precision tokens
    **_ints(
        SINK="first tokens of a sequence that the overlay holds",
        RING="places of the overlay's ring of recent tokens, at least 1",
        RING_TOKENS="recent tokens that the ring holds; 0 without a ring",
        OVERLAY_TOKENS="tokens of an overlay row: SINK + RING_TOKENS; 0 without an overlay",
        OVERLAY_TYPE="ElementType of the overlay; where a program serves both streams, of its keys",
        VALUE_WINDOW_TYPE="ElementType of the overlay of the values",
        RAW_WINDOW="1 where the overlay holds keys as the model gave them, 0 where as they are coded",
        RAW_TYPE="ElementType of the keys as the model gave them",
    ),
    # the launch
    **_ints(
        THREADS="threads of a CTA",
        WARPS="warps of a CTA; of a team of it where there are several",
        TEAMS="teams of WARPS warps of a CTA of kvant_decode, each with work tiles of its own",
        TEAMS_BELOW="teams whose pages and outputs lie before the codebooks in shared memory, the others' behind",
        TILE_WARPS="warps of a CTA of kvant_append_tiles",
        TILE_CTAS="CTAs of kvant_append_tiles that a multiprocessor is to hold, by registers",
        READ_AHEAD="whether kvant_append_tiles reads rows that have a matrix while it codes those before",
        STEP_WARPS="warps of a CTA of kvant_append_step",
        STEP_CTAS="CTAs of kvant_append_step that a multiprocessor is to hold, by registers",
        EARLY="whether kvant_append_step loads its matrices and then waits for the kernel before it",
    ),
    # the step of a server
    **_ints(
        ITEMS="sequences of a thread",
    ),
    # appending
    **_ints(
        CLIP="1 where rows are clipped at a quantile of their magnitudes",
        ROPE_BLOCK="positions of a RoPE block, to whose start keys are unrotated; 0 where they are not",
        IN_TYPE="ElementType of the rows that come in",
        OUT_TYPE="ElementType of the rows that go out",
        ROWS="rows (tokens of a head) of a CTA at a time",
        VALUES="1 where values are unpacked, 0 for keys",
        KEY_GROUP="tokens of a group of keys that are coded per channel",
        SPARE_GROUPS="groups of a sequence that its tail may complete beside those that its new tokens fill",
        KEY_RECENT="recent tokens whose keys are not packed yet",
        KEY_FLUSH="tokens whose keys are packed at a time",
        BOOSTED="channels of a group of keys with two bits more; 0 without",
        HIGH_OFFSET="byte of the boosted channels' high bits in a page of a head",
        INDEX_OFFSET="byte of the boosted channels' indices in a page of a head",
        RANK="rows of the subspace that errors of keys are kept orthogonal to; 0 where keys are coded as they are",
        BLOCK_CHANNELS="channels of keys that are coded at a time, where they are corrected",
        VALUE_GROUPS="scales of a value vector",
        KEY_GROUPS="scales of a key vector that is coded token by token",
        VALUE_ORDER_GROUPS="parts of a value vector that the order of its codes is made of",
    ),
    # unpacking
    **_ints(
        TILES="tiles of 16 tokens that a warp unpacks at once",
        VECTOR="neighbouring channels that a lane stores at once",
        PASS_TILES="tiles of 8 output channels that a warp computes at once",
        ROTATED="pairs of channels that RoPE rotates when keys are read; 0 where none",
        ROPE_STEP="positions of the RoPE blocks, where ROPE_BLOCK is a multiple that angles are tabulated for; 0 where it is them",
        SCALE_GROUPS="scales of a token",
        LEVELS="1 where codes are places in a table of levels",
        CENTROIDS="centroids of head vectors whose residuals are coded; 0 where they are not",
        INDEX_BITS="bits of the index of a token's centroid; 0 where one needs none",
        ORDER_GROUPS="parts of a token's vector that the order of its codes is made of",
    ),
    "SUBSPACE_WEIGHT": Constant("double", "weight of the subspace beside the error itself, lambda of SQuat's paper"),
    # decode attention
    **_types(PageAttention="how a page is attended to: a type of codecs/*_pages.cuh"),
    **_ints(
        PQ="1 where keys and values are product-quantized",
        GROUP="query heads of a KV head, of all queries of a sequence",
        QUERIES="queries of a sequence; GROUP / QUERIES query heads of each are neighbours",
        TILE_HEADS="query heads that a CTA serves at once",
        QUERY_TILES="tiles of TILE_HEADS query heads of a KV head",
        QUERY_TYPE="ElementType of queries and outputs",
        QUERY_TRANSFORM="QueryTransform of the queries",
        QUERY_HADAMARD="order of the queries' Hadamard transform",
        OUTPUT_TRANSFORM="OutputTransform of the outputs",
        OUTPUT_HADAMARD="order of the outputs' Hadamard transform",
        QUERY_KERNEL="1 where a kernel before decode makes the query operands",
        QUERY_PARTS="fp16 numbers that a rotated query is the sum of",
        ROTATE_WARPS="warps of a CTA of kvant_rotate_queries",
        ROTATE_CTAS="CTAs of kvant_rotate_queries that a multiprocessor is to hold, by registers",
        HIGH_BATCH_WARPS="warps of a CTA of kvant_rotate_queries_high_batch; 0 where it does not serve the layout",
        HIGH_BATCH_CTAS="CTAs of kvant_rotate_queries_high_batch that a multiprocessor is to hold",
        PAGES_ONCE="1 where pages leave the L2 cache before query operands do",
        ROTATED_KEYS="1 where keys are stored before RoPE and rotated when they are read",
        CENTROID_SUMS="1 where P is summed by the value's centroid, and the sums are multiplied by the centroids at the end",
        PAIRED_BOOKS="1 where the keys' and the values' centroids alternate in shared memory, 256 bytes apart",
        INDICES_IN_REGISTERS="1 where lanes read indices of product VQ from global memory, 0 where pages are copied to shared memory",
        CODE_BANKS="1 where lanes read their codes, four bits each, in an order without bank conflicts",
        VALUE_BANKS="1 where lanes read the scales of values, several a token, in an order without bank conflicts",
        KEY_BANKS="1 where lanes read the scales of channel-wise keys without bank conflicts, and minima as operands",
        PAIRED_CHANNELS="1 where lanes that rotate keys have both channels of a pair",
        ANGLE_OFFSET="byte of dynamic shared memory of the angles inside a chunk of tokens, where keys are rotated",
        LEVEL_COPIES="copies of the table of levels of the values' codes in shared memory; 0 without",
        PIPELINED_ROPE="1 where keys of the next page are read while values of this one are multiplied also with RoPE blocks",
        CHUNK_TILES="tiles of 16 tokens of a page that a warp attends to at once",
        OVERLAY_TILES="tiles of 16 overlay tokens that a warp attends to at once",
        OVERLAY_LAST="1 where the overlay is attended to after the pages",
        OVERLAY_UNITS="units of work that OVERLAY_TILES tiles count; a page counts one",
        SPLIT_ROWS="1 where queries for the overlay are stored as two bfloat16 numbers, else as float32",
        WHOLE_TILES="1 where CTAs take whole (sequence, head tile)s wherever these are about equal",
        MIXED_PAGE_UNITS="units of work of a page some of whose tokens are in the overlay",
        SOFTCAP="1 where logits have a soft cap",
        SINK_LOGITS="1 where every query head has a logit in the softmax's denominator alone",
        ELEMENT_TYPE="ElementType of keys and values that are stored as they come",
        TILE_BYTES="bytes of the keys, or of the values, of 16 tokens of a head that are stored as they come",
        VALUE_OFFSET="byte of the values in a page of a head, where they are stored as they come",
        STAGES="stages of a warp's ring of pages in flight",
        WARP_BYTES="dynamic shared memory of a warp: its pages in flight, then its outputs",
        SHARED_OPERAND="1 where every chunk of tokens reads the query operand from shared memory, 0 where registers hold it",
        MIN_CTAS="CTAs of decode that a multiprocessor is to hold, by registers",
    ),
}

# Of a stream: of `struct Key`, `struct Value` or `struct Stream` inside.
STREAM_CONSTANTS: dict[str, Constant] = {
    "HADAMARD_SCALE": Constant("float", "factor after the Hadamard transform: ORDER^-0.5"),
    **_ints(
        IN_TYPE="ElementType of the rows that come in",
        HADAMARD="order of the Hadamard transform; 1 without",
        MEAN="1 where a mean is subtracted",
        MATRIX_PARTS="16-bit matrices whose sum the rows are multiplied by; 0 without a matrix",
        BITS="bits of a code, of the first band",
        OFFSET="byte of the codes, of the first band, in a page of a head",
        HIGH_OFFSET="byte of the third bits of 3-bit codes, of the first band",
        BANDED="1 where codes are evenly spaced levels of a band under a scale alone",
        LEVELS="levels of a table that codes are places in; 0 where levels are evenly spaced",
        UNBIASED="1 where the scale is corrected so that the row keeps its squared norm",
        WEIGHTED="1 where the errors of channels are weighted",
        OFFSETS="1 where an offset is added after the matrix",
        FLAG="1 where the sign of a scale says whether the mean was subtracted",
        SEARCH="ranges or scales that are tried for a row",
        GROUPS="scales of a row",
        ROPE_BLOCK="positions of a RoPE block, to whose start rows are unrotated; 0 where they are not",
        SCALE_FORM="ScaleForm of the stream",
        SCALE_TYPE="ElementType of scales, minima and zeros",
        SCALE_OFFSET="byte of the scales in a page of a head",
        OVERLAY_TOKENS="tokens of an overlay row",
        RING="places of the overlay's ring of recent tokens, at least 1",
        RING_TOKENS="recent tokens that the ring holds; 0 without a ring",
        BOOK_HEADS="codebooks: 1 where heads share one",
        CENTROIDS="centroids of whole head vectors, whose residuals are coded; 0 without",
        INDEX_OFFSET="byte of the indices of these centroids in a page of a head; -1 where one centroid needs none",
        CENTROID_OFFSET="byte in dynamic shared memory of the keys' scores with these centroids, or of the values' centroids",
        RECENT="recent tokens that are not packed yet",
        FLUSH="tokens that are packed at a time",
    ),
    **_types(
        CodeBands="bands that have codes",
        Edges="positive edges between the levels of a table",
        AllBands="bands of all channels, those without codes included",
        CodePlanes="planes of the codes",
        Codebook="codebook of product quantization and the place of its indices",
        Operand="what registers of the query operand are multiplied by",
        Codes="codes as fp16 numbers",
    ),
}

# Templates that types are made of: declared before Config, defined in the headers.
TEMPLATES = {
    "Band": "template <int, int, int, int, int, u32, int> struct Band;",
    "Bands": "template <class...> struct Bands;",
    "LevelEdges": "template <u32...> struct LevelEdges;",
    "Plane": "template <int, int, int> struct Plane;",
    "Planes": "template <class...> struct Planes;",
    "Book": "template <int, int, int, int, int, int, int, bool> struct Book;",
    "KeyPlane": "template <int, int, int, int, int, int> struct KeyPlane;",
    "GroupedKeyPlane": "template <int, int, int, int, int> struct GroupedKeyPlane;",
    "ThreeBitKeys": "template <int, int, int, int, int, int> struct ThreeBitKeys;",
    "LevelKeys": "template <class, int, int, int, u32, u32, u32, u32, u32, u32, u32, u32> struct LevelKeys;",
    "KeyPlanes": "template <class...> struct KeyPlanes;",
    "ValueCodes": "template <int, int, int, int, int, bool> struct ValueCodes;",
    "LevelValues": "template <int, int, int, int, int, int, u32...> struct LevelValues;",
    "SharedCodebook": "template <int, int, int, int, int, int, int, int, bool, int = -1> struct SharedCodebook;",
    "CentroidKeys": "template <class> struct CentroidKeys;",
    "CentroidValues": "template <class> struct CentroidValues;",
}


def page_config(layout: Layout) -> dict[str, object]:
    """The constants of a layout's pages."""
    return {
        "HEAD_DIM": layout.head_dim,
        "PAGE_TOKENS": layout.page_tokens,
        "PAGE_HEAD_BYTES": layout.page_head_bytes,
        "KV_HEADS": layout.heads,
    }


def window_type(layout: Layout, name: StreamName) -> ElementType:
    """The type in which the overlay holds a stream."""
    return ElementType.FP8 if layout.is_fp8_window(name) else ELEMENT_TYPES[layout.overlay_dtype]


def overlay_config(layout: Layout, name: StreamName = "key") -> dict[str, object]:
    """The constants of the overlay of a stream."""
    window = layout.recipe.streams[name].window
    return {
        "SINK": window.sink,
        "RING": max(1, window.ring),
        "RING_TOKENS": window.ring,
        "OVERLAY_TOKENS": layout.overlay_tokens(name),
        "OVERLAY_TYPE": window_type(layout, name),
        "RAW_WINDOW": int(layout.recipe.streams[name].raw_window),
    }


def scale_config(layout: Layout, name: StreamName) -> dict[str, object]:
    """The constants of the scales of a stream's tokens."""
    scales = layout.format(name).scales
    assert scales is not None
    (section,) = (s for s in layout.sections if s.stream == name and s.names == scales.fields)
    return {
        "SCALE_FORM": SCALE_FORMS[scales.kind.value],
        "SCALE_TYPE": ELEMENT_TYPES[scales.dtype],
        "SCALE_OFFSET": section.offset,
    }


def config_text(config: Mapping[str, object]) -> str:
    """`struct Config` with these constants, and the enumerations and templates that it names. A value may be a mapping of the
    constants of a stream: for "Key" and "Value", or for "Stream" where a program serves one of them."""
    lines = _constants(config, CONSTANTS, "  ")
    used = {name for name in TEMPLATES if re.search(rf"\b{name}<", "".join(lines))}
    declared = [f"{TEMPLATES[name]}\n" for name in TEMPLATES if name in used]
    return "".join([*map(_enum_text, ENUMS), *declared, "struct Config {\n", *lines, "};\n"])


def _enum_text(kind: type[enum.IntEnum]) -> str:
    """An enumeration whose members are ints, so that templates over an int take them."""
    members = ", ".join(f"{member.name} = {member.value}" for member in kind)
    return f"struct {kind.__name__} {{ enum : int {{ {members} }}; }};\n"


def _constants(values: Mapping[str, object], table: Mapping[str, Constant], indent: str) -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping) and table is CONSTANTS and name in ("Key", "Value", "Stream"):
            inner = _constants(value, STREAM_CONSTANTS, indent + "  ")
            lines += [f"{indent}struct {name} {{\n", *inner, f"{indent}}};\n"]
            continue
        if name not in table:
            raise ValueError(f"a kernel has no constant {name!r}; kvant/ops/cuda/config.py lists them")
        kind, doc = table[name]
        if kind == "type":
            lines.append(f"{indent}using {name} = {value};  // {doc}\n")
        else:
            lines.append(f"{indent}static constexpr {kind} {name} = {_literal(value)};  // {doc}\n")
    return lines


def _literal(value: object) -> str:
    if isinstance(value, enum.IntEnum):
        return f"{type(value).__name__}::{value.name}"
    if isinstance(value, bool):
        return str(value).lower()
    assert isinstance(value, int | float), value
    return repr(value)
