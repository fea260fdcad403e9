"""Unpacks the histories of a batch of sequences into the model's own space, and copies their new tokens behind them, by
kernels/unpack.cu: one launch for keys and one for values, whatever the number of sequences."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from kvant.codecs.format import ScaleKind, StreamFormat
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, int32, int64, optional, pointer
from kvant.ops.cuda.bands import ONE, code_bands
from kvant.ops.cuda.books import head_book_bytes
from kvant.ops.cuda.config import ELEMENT_TYPES, ElementType, ScaleForm, overlay_config, page_config, scale_config
from kvant.ops.cuda.refusals import INDEX_BITS
from kvant.ops.cuda.unpack_spans import STREAMS, Grid, Joined, Span, join_spans
from kvant.ops.fused import SHORTEST_BLOCK, FusedTransform, blocks_of, matrix_of, rope_table
from kvant.ops.streams import stream_handle
from kvant.ops.types import Derived, LayerStore, PagedBatch
from kvant.rope import Rope

Tensor = torch.Tensor
WARPS = 8
MIN_CTAS = 2  # of a multiprocessor, by registers
PASS_TILES = 8  # tiles of 8 output channels at once, at most: 64 accumulators of a lane for 32 tokens
CODE_POWER = 8  # rows of a matrix for codes at bit p of an fp16 number are times 2^(CODE_POWER - p): see Tables


UnpackArguments = Arguments(
    "UnpackArguments",
    pages=pointer("const u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    block_table=pointer("const s64", "[batch, table_stride]"),
    overlay=pointer("const void", "[rows, OVERLAY_TOKENS, KV_HEADS, HEAD_DIM]"),
    overlay_rows=pointer("const s64", "[batch]"),
    sinks=pointer("const s64", "[batch]: first tokens of a sequence that the overlay holds"),
    ring_start=pointer("const s64", "[batch]: position from which on the overlay's ring holds a sequence"),
    sequences=pointer("const int", "[batch, 8]: struct Sequence"),
    new_rows=optional("const void", "[new tokens, KV_HEADS, HEAD_DIM], rows new_stride numbers apart"),
    matrix=pointer("const u8", "fp16 [1 or KV_HEADS, HEAD_DIM, HEAD_DIM] in fragment order, for what pages hold"),
    number_matrix=pointer("const u8", "the same for numbers, of the overlay"),
    terms=pointer(
        "const float", "[KV_HEADS, 3, HEAD_DIM]: what a row's z (or a table of levels), one and flag are multiplied by"
    ),
    powers=pointer(
        "const float", "[KV_HEADS, 2]: what products with `matrix`, and with `number_matrix`, are multiplied by"
    ),
    codebooks=optional(
        "const u8",
        "fp16 [KV_HEADS or 1, centroids, channels of a sub-vector]; of residuals, centroids times the matrix, float32 [KV_HEADS, "
        "CENTROIDS, HEAD_DIM]",
    ),
    cosine=optional("const float", "[RoPE blocks, ROTATED]"),
    sine=optional("const float", "[RoPE blocks, ROTATED]"),
    step_cosine=optional("const float", "[ROPE_BLOCK / ROPE_STEP, ROTATED]"),
    step_sine=optional("const float", "[ROPE_BLOCK / ROPE_STEP, ROTATED]"),
    out=pointer("void", "[tokens, KV_HEADS, HEAD_DIM]"),
    table_stride=int64("entries of a row of the block table"),
    new_stride=int64("numbers from a new token to the next"),
    batch=int32("sequences"),
    units=int32("work units of all sequences"),
    matrices=int32("matrices: 1, or one for each head"),
    rope_first=int32("RoPE position of the first token of a sequence"),
    rope_last=int32("last RoPE position that the table of angles serves"),
)


def refuse_layout(layout: Layout) -> str | None:
    """Why kernels/unpack.cu cannot read pages of a layout, or None."""
    for name, stream in layout.formats.items():
        if stream.is_pq:
            reason = _refuse_pq(layout, name)
        elif layout.order != "fragment":
            reason = f"it unpacks pages in fragment order: {layout.order_reason or 'the layout is plain'}"
        elif name == "key" and stream.is_channelwise:
            reason = _refuse_channelwise(layout)
        elif not _by_token(stream):
            reason = f"it unpacks scales per token, keys coded per channel and centroids, and the {name}s are coded by {stream.codec}"
        elif not stream.uniform and len(stream.bands) > 1:
            reason = f"it unpacks one table of levels, and the {name}s have bands"
        elif name == "value" and len(stream.bands) > 1:
            reason = "it unpacks values of one width, and they have bands"
        elif stream.mean_flag and stream.scale_groups > 1:
            reason = f"it adds means to tokens with one scale, and the {name}s have {stream.scale_groups}"
        else:
            reason = None
        if reason is not None:
            return reason
    return None


def _by_token(stream: StreamFormat) -> bool:
    """Codes with scales per token, and perhaps a centroid whose residual they are."""
    return stream.is_tokenwise or (stream.is_residual and stream.scales is not None and stream.scales.axis == "token")


def _refuse_pq(layout: Layout, name: StreamName) -> str | None:
    book = layout.format(name).codebook
    assert book is not None
    if book.vectors % 4 or layout.head_dim % 32:
        return f"the {book.vectors} sub-vectors of the {name}s cannot be shared evenly by 4 lanes"
    if book.bits not in INDEX_BITS:
        return f"it reads indices of 3, 4, 6, 8, 9, 10 or 12 bits, and those of the {name}s have {book.bits}"
    return None


def _refuse_channelwise(layout: Layout) -> str | None:
    key = layout.format("key")
    assert key.scales is not None
    if key.group_tokens < 16:
        return f"it unpacks groups of at least 16 tokens, and those of the keys have {key.group_tokens}"
    if key.scales.kind is not ScaleKind.MIN or len(key.bands) > 1:
        return "of keys coded per channel it reads codes of one width with scales and minima, and theirs are others"
    return None


def shared_bytes(layout: Layout, name: StreamName) -> int:
    """Shared memory of a CTA: a matrix, terms of rows, a codebook."""
    dim, stream = layout.head_dim, layout.format(name)
    book = stream.codebook if stream.is_pq else None
    return 2 * dim * dim + 12 * dim + (0 if book is None else head_book_bytes(book))


@dataclasses.dataclass(frozen=True)
class UnpackPlan:
    """The kernel for one stream of a layout, the types of new tokens and of the rows that come out, the pairs of channels that
    RoPE rotates when keys are read (0: none), whether an offset is added after the matrix, and whether the GPU is one that `narrow`
    means."""

    layout: Layout
    stream: StreamName
    new_type: str
    out_type: str
    rotated: int = 0
    offset: bool = False
    narrow: bool = False

    @property
    def tiles(self) -> int:
        """Tiles of 16 tokens that a warp unpacks at once: two where codes are operands, which takes few registers."""
        return 2 if self.coded and self.layout.page_tokens % 32 == 0 and not self.narrow else 1

    @property
    def unit(self) -> int:
        """Tokens of a work unit."""
        return 16 * self.tiles

    @property
    def coded(self) -> bool:
        """Whether codes are operands of the product, and scales are applied to sums."""
        stream = self.layout.format(self.stream)
        return _by_token(stream) and stream.scale_groups == 1 and stream.uniform

    @property
    def vector(self) -> int:
        """Neighbouring channels that a lane has of the output. Four lanes' are a block, and rotated pairs lie in two blocks."""
        for vector in (8, 4):
            if self.layout.head_dim % (4 * vector) == 0 and self.rotated % (4 * vector) == 0:
                return vector
        return 2

    @property
    def pass_tiles(self) -> int:
        return math.gcd(self.layout.head_dim // 8, PASS_TILES)

    @functools.cached_property
    def text(self) -> str:
        layout, name = self.layout, self.stream
        stream = layout.format(name)
        constants: dict[str, object] = {"FLAG": int(stream.mean_flag), "OFFSETS": int(self.offset), "BOOK_HEADS": 1}
        if stream.is_pq:
            assert stream.codebook is not None
            low, *high = (s for s in layout.sections if s.stream == name and s.kind == "index")
            bits, offset = (high[0].bits, high[0].offset) if high else (0, 0)
            planes = f"{low.bits}, {bits}, {low.offset}, {offset}"
            place = 2 * layout.head_dim**2 + 12 * layout.head_dim
            by_place = str(stream.codebook.per == "space").lower()
            constants |= {
                "Codebook": f"SharedCodebook<{stream.codebook.dim}, {low.width}, {planes}, 1, {place}, {by_place}>",
                "BOOK_HEADS": stream.codebook.heads(layout.heads),
                "SCALE_FORM": ScaleForm.NONE,
                "SCALE_TYPE": ElementType.BF16,
                "SCALE_OFFSET": 0,
            }
        else:
            constants |= {**scale_config(layout, name), "CodeBands": code_bands(layout, name)}
        high_offset = index_offset = index_bits = centroids = 0
        if stream.is_residual:
            assert stream.codebook is not None
            centroids, index_bits = stream.codebook.centroids, stream.codebook.bits
            constants |= {"BOOK_HEADS": layout.heads}
            places = [s.offset for s in layout.sections if s.stream == name and s.kind == "index"]
            index_offset, high_offset = (*places, 0, 0)[:2]
        if stream.boosted:
            high_offset, index_offset = (
                next(s.offset for s in layout.sections if s.stream == name and s.names == (field,))
                for field in ("high", "index")
            )
        block = layout.recipe.streams[name].effective_rope_block
        config: dict[str, object] = {
            **page_config(layout),
            **overlay_config(layout, name),
            "ORIGIN": layout.recipe.origin,
            "VALUES": int(name == "value"),
            "IN_TYPE": ELEMENT_TYPES[self.new_type],
            "OUT_TYPE": ELEMENT_TYPES[self.out_type],
            "WARPS": WARPS,
            "MIN_CTAS": MIN_CTAS if layout.head_dim <= 128 else 1,
            "PQ": int(stream.is_pq),
            "KEY_GROUP": stream.group_tokens if stream.is_channelwise else 0,
            "BOOSTED": stream.boosted,
            "HIGH_OFFSET": high_offset,
            "INDEX_OFFSET": index_offset,
            "SCALE_GROUPS": stream.scale_groups,
            "LEVELS": int(not stream.uniform),
            "CENTROIDS": centroids,
            "INDEX_BITS": index_bits,
            "ORDER_GROUPS": layout.scale_groups(name),
            "ROPE_BLOCK": table_block(block) if self.rotated else 1,
            "ROPE_STEP": block if self.rotated and block < SHORTEST_BLOCK else 0,
            "TILES": self.tiles,
            "VECTOR": self.vector,
            "PASS_TILES": self.pass_tiles,
            "ROTATED": self.rotated,
            "Stream": constants,
        }
        return nvrtc.program("kernels/unpack.cu", config=config, arguments=[UnpackArguments], defines={"BULK": 0})


def narrow(device: torch.device) -> bool:
    """Whether a warp is to unpack 16 tokens at a time: from sm_100 on. With 32 the compiler spills 656 bytes of registers a thread
    there (`unpack kvant-4 key`), with 16 it spills 88; on sm_90 it spills 104 with 32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


@functools.lru_cache(maxsize=256)
def _kernel(made: UnpackPlan, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, "kvant_unpack", device, WARPS * 32, shared_bytes(made.layout, made.stream))


# --- matrices ---------------------------------------------------------------------------------------------------------


def key_channels(bands: Sequence[tuple[int, int]], dim: int) -> Tensor:
    """Channel of every place of the k dimension, int64 [dim / 16 steps, 16], where lane t has the t-th quarter of the channels of
    every band (first, width): place 8 r + 2 t + j of step m is channel 2 (2 m + r) + j of the quarter."""
    out = torch.zeros(dim // 16, 2, 4, 2, dtype=torch.int64)
    for first, width in bands:
        m, r, t, j = torch.meshgrid(*map(torch.arange, (width // 16, 2, 4, 2)), indexing="ij")
        out[first // 16 : (first + width) // 16] = first + t * (width // 4) + 2 * (2 * m + r) + j
    return out.flatten(1)


def grouped_key_channels(groups: int, bits: int, dim: int) -> Tensor:
    """The same where lane t has the t-th quarter of the channels of each of `groups` groups, and the places of a lane's pairs are
    those of layout.code_places: `key_pair` of kernels/unpack.cu."""
    m, r, t, j = torch.meshgrid(*map(torch.arange, (dim // 16, 2, 4, 2)), indexing="ij")
    place, per = 2 * m + r, 8 // bits
    register, byte = place // (2 * per) * per + place % per, place % (2 * per) // per
    element, share = 2 * (register // 2 * 4 + byte * 2 + register % 2), dim // groups // 4
    return (element // share * (dim // groups) + t * share + element % share + j).flatten(1)


def value_channels(groups: int, dim: int) -> Tensor:
    """The same for values, of which lane g has the g-th eighth of the channels of each of `groups` groups, after a
    transposition."""
    m, r, g = torch.meshgrid(*map(torch.arange, (dim // 16, 2, 8)), indexing="ij")
    element, share = 2 * m + r, dim // groups // 8
    return (element // share * (dim // groups) + g * share + element % share).flatten(1)


def output_channels(vector: int, rotated: int, dim: int) -> Tensor:
    """Channel of every column of the n dimension, int64 [dim / 8 tiles, 8]: a lane of the accumulators has columns 2 t and 2 t + 1 of
    a tile, and `vector` neighbouring channels of the tiles of a block. The halves of rotated pairs are neighbouring blocks."""
    tiles, half = vector // 2, rotated // (4 * vector)
    n, column = torch.meshgrid(torch.arange(dim // 8), torch.arange(8), indexing="ij")
    i = n // tiles
    block = torch.where(i < 2 * half, i % 2 * half + i // 2, i)
    return block * 4 * vector + column // 2 * vector + n % tiles * 2 + column % 2


def fragments(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """B operands of a matrix [matrices, dim, dim], of which rows [steps, 16] and columns [tiles, 8] are places' channels: fp16
    [matrices, steps, tiles / 2, lanes, tile of the pair, register, 2]."""
    count, dim = matrix.shape[:2]
    picked = matrix[:, rows.flatten()][:, :, columns.flatten()]
    picked = picked.view(count, dim // 16, 2, 4, 2, dim // 16, 2, 8)  # [., step, register, t, j, tile pair, tile, g]
    return picked.permute(0, 1, 5, 7, 3, 6, 2, 4).half().contiguous()


class Tables(NamedTuple):
    """What a stream's tokens are multiplied by: y = x M + offset. Of codes c with one scale a token, x = scale (w c + low) + z, and
    rows of `matrix` are w M times a power of two; its places of codes at bit p of an fp16 number, which are c 2^(p - 24), have
    2^(CODE_POWER - p) more. `powers` are taken back. terms: w M summed over channels, for the z of a row (or a table of
    levels); the offset; mean M."""

    matrix: Tensor
    number_matrix: Tensor
    terms: Tensor  # float32 [heads, 3, head_dim]
    powers: Tensor  # float32 [heads, 2]
    codebooks: Tensor | None  # of product quantization; of residuals, centroids times M

    @staticmethod
    def of(store: LayerStore, made: UnpackPlan) -> Tables:
        layout, name, dim = made.layout, made.stream, made.layout.head_dim
        device, stream = store.pages.device, layout.format(name)
        bound = store.stream(name)
        found = store.derive(StoredTables).inverse[name]
        inverse = torch.eye(dim, dtype=torch.float32, device=device)[None] if found.tensor is None else found.tensor
        inverse = inverse.double().cpu()
        columns = output_channels(made.vector, made.rotated, dim)
        numbers = key_channels([(0, dim)], dim)
        number_power = _power(inverse) / 2.0**CODE_POWER
        terms = torch.zeros(layout.heads, 3, dim, dtype=torch.float64)
        if found.offset is not None:
            terms[:, 1] = found.offset.double().cpu()
        plain = fragments(inverse / number_power, numbers, columns)
        if not made.coded:
            rows = numbers
            if _by_token(stream):
                bands = [(band.first, band.width) for band in stream.stored_bands]
                rows = key_channels(bands, dim) if name == "key" else value_channels(layout.scale_groups(name), dim)
                if name == "key" and layout.scale_groups(name) > 1:
                    (band,) = stream.bands
                    rows = grouped_key_channels(layout.scale_groups(name), band.bits, dim)
            page, power = fragments(inverse / number_power, rows, columns), number_power
            if not stream.uniform:
                (band,) = stream.bands
                terms[:, 0, : len(band.levels)] = torch.tensor(band.levels, dtype=torch.float64)
        else:
            bands = [(band.first, band.width) for band in stream.stored_bands]
            rows = key_channels(bands, dim) if name == "key" else value_channels(layout.scale_groups(name), dim)
            assert stream.scales is not None
            alone = stream.scales.kind is ScaleKind.ALONE
            weight, lowest, raised = (
                torch.zeros(*size, dtype=torch.float32) for size in ((dim,), (dim,), (dim // 16, 2))
            )
            for band in stream.stored_bands:
                part = slice(band.first, band.first + band.width)
                weight[part] = round(ONE * band.step) / ONE if alone else 1.0
                lowest[part] = -((1 << band.bits) - 1) / 2 if alone else 1.0
                for m in range(band.width // 16):
                    for register in range(2):
                        bit = code_power(band.bits, 2 * m + register)
                        raised[band.first // 16 + m, register] = 2.0 ** (CODE_POWER - bit)
            weighted = inverse * weight.double()[:, None]
            power = _power(weighted)
            factor = torch.zeros(dim, dtype=torch.float64)  # of channels
            coded = raised[:, 0] > 0  # steps of bands that have codes
            factor[rows[coded].flatten()] = raised[coded].double().repeat_interleave(8, 1).flatten()
            stored = (weighted / power * factor[:, None]).half().double()
            page = fragments(stored, rows, columns)
            rounded = torch.where(factor[:, None] > 0, stored / factor[:, None].clamp_min(1e-30), 0.0) * power
            terms[:, 0] = (rounded * lowest.double()[:, None]).sum(1)
            power = power * 2.0 ** (24 - CODE_POWER)
            mean = bound.codec.tensors.mean
            if mean is not None:
                terms[:, 2] = (mean.double().cpu()[:, None] @ inverse)[:, 0]
        page, plain = (x.to(device) for x in (page, plain))
        books = bound.codec.tensors.codebooks
        if books is not None and stream.is_residual:
            books = (books.double().cpu().flatten(1, -2) @ inverse).expand(layout.heads, -1, -1)
            books = books.float().contiguous().to(device)
        elif books is not None:
            books = books.clone(memory_format=torch.contiguous_format)
        powers = torch.stack([x.flatten().expand(layout.heads) for x in (power, number_power)], 1)
        terms, powers = (x.float().contiguous().to(device) for x in (terms, powers))
        return Tables(page, plain, terms, powers, books)


def code_power(bits: int, element: int) -> int:
    """Bit of an fp16 number that a code of an element is brought to: `bare_position` of codecs/tokenwise.cuh."""
    plane = 2 if bits == 3 else bits
    bit = element % (16 // plane) * plane
    if bits == 3:
        return bit % 4 + 4
    return bit if bit + bits <= 10 else bit - 6


def _power(matrix: Tensor) -> Tensor:
    """The power of two that is the largest magnitude of each of some matrices, or above it: [matrices, 1, 1]."""
    top = matrix.abs().amax((1, 2), keepdim=True)
    return torch.where(top > 0, top.log2().ceil().exp2(), 1.0)


@dataclasses.dataclass
class StoredTables(Derived):
    """How stored tokens come back into the model's space, x M + offset, and what the kernel makes of it, by stream. A call finds here
    what depends on the store alone: to hash a layout takes as long as to queue a launch."""

    inverse: dict[StreamName, FusedTransform]
    grid: Grid
    found: dict[StreamName, Tables] = dataclasses.field(default_factory=dict)
    kernels: dict[tuple[StreamName, torch.dtype | None, torch.dtype], PlannedKernel] = dataclasses.field(
        default_factory=dict
    )  # by stream, type of new tokens and type of the rows that come out
    angles: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # of short RoPE blocks
    tabulated: Angles | None = None  # the angles of the last call

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        layout, device = store.layout, store.pages.device
        inverse = {name: matrix_of(store.stream(name).transforms, "inverse", layout, device) for name in STREAMS}
        return cls(inverse, grid_of(layout, narrow(device)))


class PlannedKernel(NamedTuple):
    plan: UnpackPlan
    kernel: nvrtc.Kernel


def planned_kernel(
    store: LayerStore, name: StreamName, new_type: torch.dtype | None, out_type: torch.dtype
) -> PlannedKernel:
    """The kernel that unpacks a stream of a store; made at the first call."""
    held, key = store.derive(StoredTables), (name, new_type, out_type)
    found = held.kernels.get(key)
    if found is None:
        layout, device = store.layout, store.pages.device
        types = layout.overlay_dtype if new_type is None else _type(new_type), _type(out_type)
        offset = held.inverse[name].offset is not None
        made = UnpackPlan(layout, name, *types, rotated_pairs(store, name), offset, narrow(device))
        found = held.kernels[key] = PlannedKernel(made, _kernel(made, device))
    return found


def tables(store: LayerStore, made: UnpackPlan) -> Tables:
    found = store.derive(StoredTables).found
    if made.stream not in found:
        found[made.stream] = Tables.of(store, made)
    return found[made.stream]


# --- batches ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def grid_of(layout: Layout, narrow: bool) -> Grid:
    units = {name: UnpackPlan(layout, name, "bfloat16", "bfloat16", narrow=narrow).unit for name in STREAMS}
    return Grid(layout.recipe.origin, {name: stream.window for name, stream in layout.recipe.streams.items()}, units)


def joined(store: LayerStore, spans: tuple[Span, ...]) -> Joined:
    """The rows of these spans. What it made is kept: the layers of a model ask for the same."""
    device = store.pages.device
    return join_spans(store.derive(StoredTables).grid, spans, device, stream_handle(device))


class Angles(NamedTuple):
    """Cosines and sines by which keys are rotated when they are read: float32 [tabulated blocks, pairs], and of RoPE blocks inside a
    tabulated one where these are short."""

    cosine: Tensor
    sine: Tensor
    steps: tuple[Tensor, Tensor] | None
    first: int  # RoPE position of the first token
    last: int  # last RoPE position that is tabulated


def table_block(size: int) -> int:
    """Positions of a tabulated block: a RoPE block, or as many as make about SHORTEST_BLOCK positions."""
    return size if size >= SHORTEST_BLOCK else SHORTEST_BLOCK // size * size


def angles_of(store: LayerStore, tokens: int) -> Angles:
    """The angles of the first `tokens` of a sequence, at least."""
    held, rope = store.derive(StoredTables), store.key.rope
    assert rope is not None
    if held.tabulated is None or rope.first + tokens - 1 > held.tabulated.last:
        held.tabulated = _angles_of(store, rope, held, tokens)
    return held.tabulated


def _angles_of(store: LayerStore, rope: Rope, held: StoredTables, tokens: int) -> Angles:
    size, steps = store.key.spec.effective_rope_block, None
    block = table_block(size)
    blocks = blocks_of(tokens, rope.first, block)
    if block == size:
        cosine, sine = rope_table(store, blocks)
    else:
        if held.angles is None or len(held.angles[0]) < blocks:
            at = torch.arange(rope.first // block, rope.first // block + max(64, 2 * blocks)) * block
            held.angles = *_tabulated(rope, at), *_tabulated(rope, torch.arange(0, block, size))
        cosine, sine, *rest = held.angles
        steps = rest[0], rest[1]
    return Angles(cosine, sine, steps, rope.first, (rope.first // block + len(cosine)) * block - 1)


def _tabulated(rope: Rope, position: Tensor) -> tuple[Tensor, Tensor]:
    angle = position.to(rope.inv_freq.device)[:, None].double() * rope.inv_freq.double()
    return angle.cos().float().contiguous(), angle.sin().float().contiguous()


def rotated_pairs(store: LayerStore, name: StreamName) -> int:
    """Pairs of channels that RoPE rotates when a stream is read."""
    rope = store.stream(name).rope
    return 0 if rope is None else len(rope.inv_freq)


def unpack(
    store: LayerStore,
    name: StreamName,
    batch: PagedBatch,
    spans: tuple[Span, ...],
    new: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Spans of the sequences of a batch in the model's space, one after another: [tokens, heads, head_dim]. `new` are the new
    tokens of the stream, [new tokens, heads, head_dim], of 16 bits; None where no span has any."""
    layout, device = store.layout, store.pages.device
    assert len(spans) == len(batch.block_table)
    assert new is not None or not any(span.new for span in spans)
    where = joined(store, spans)
    out = torch.empty(where.tokens, layout.heads, layout.head_dim, dtype=dtype, device=device)
    units = where.units[name]
    if not units:
        return out
    made, kernel = planned_kernel(store, name, None if new is None else new.dtype, dtype)
    table = tables(store, made)
    angles = None if made.rotated == 0 else angles_of(store, where.last)
    if new is not None and (new.stride()[1:] != (layout.head_dim, 1) or new.stride(0) % 8 or new.data_ptr() % 16):
        new = new.clone(memory_format=torch.contiguous_format)
    block_table = batch.block_table
    if block_table.shape[1] and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    arguments = UnpackArguments.fill(
        pages=store.pages,
        block_table=block_table,
        overlay=store.overlays[name],
        overlay_rows=batch.overlay_rows.contiguous(),
        sinks=batch.sinks.contiguous(),
        ring_start=batch.ring_start[name].contiguous(),
        sequences=where.sequences[name],
        new_rows=new,
        matrix=table.matrix,
        number_matrix=table.number_matrix,
        terms=table.terms,
        powers=table.powers,
        codebooks=table.codebooks,
        cosine=angles.cosine if angles else None,
        sine=angles.sine if angles else None,
        step_cosine=angles.steps[0] if angles and angles.steps else None,
        step_sine=angles.steps[1] if angles and angles.steps else None,
        out=out,
        table_stride=block_table.stride(0),
        new_stride=0 if new is None else new.stride(0),
        batch=len(spans),
        units=units,
        matrices=len(table.matrix),
        rope_first=angles.first if angles else 0,
        rope_last=angles.last if angles else 0,
    )
    kernel.launch((max(1, min(-(-units // WARPS), kernel.blocks // layout.heads)), layout.heads), arguments)
    return out


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
