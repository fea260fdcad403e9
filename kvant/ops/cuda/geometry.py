"""How many warps, CTAs and bytes of shared memory the decode kernels of a layout take, and which of their ways are chosen."""

from __future__ import annotations

import dataclasses
import functools

from kvant.layout import Layout, Section, StreamName
from kvant.ops.cuda.books import codebook_bytes, residual_bytes
from kvant.ops.cuda.config import QueryTransform
from kvant.ops.cuda.key_planes import key_planes
from kvant.ops.fused import MATRIX

WARPS, LOW_BATCH_WARPS = 4, 6  # of a CTA of kvant_decode
RESIDUAL_WARPS = 8  # the same, at most, where centroids are in shared memory: one CTA on a multiprocessor
FEW_CENTROIDS = 64  # of values, below which P is multiplied by the centroids of every token
STAGES = 2  # pages that a warp has in flight
LARGE_PAGE = 8192  # bytes of a page of a head from which on a warp has one more in flight, with RoPE blocks
LOW_BATCH = 128  # sequences times KV heads, at most: a GPU has about as many multiprocessors
HIGH_BATCH_CTAS = 2  # CTAs of kvant_rotate_queries_high_batch on a multiprocessor
HIGH_BATCH_REGISTERS, HIGH_BATCH_MORE_REGISTERS = 72, 24  # of a lane of it, beside its accumulators
STATIC_BYTES = 20 * 1024  # of static shared memory, at most: what is not pages, codebooks or a matrix
ROTATED_STATIC_BYTES = 2048  # the same where warps rotate queries, but for operands; with what CUDA reserves
ROTATED_OPERAND_BYTES = 40 * 1024  # of static shared memory for those operands, at most; a kernel may have 48 KiB
ROW = 128  # bytes that shared memory reads in one cycle: 32 banks of 4
CHUNK_TOKENS = 64  # that a warp attends to at once, at most
PAIRED_ROW = 2 * ROW  # bytes of a centroid of the keys and one of the values, side by side, in all copies
PAIRED_STATIC_BYTES = 8192  # of static shared memory beside such codebooks, at most, with what CUDA reserves
INDEX_TEAMS, INDEX_WARPS = 3, 4  # of a CTA, and of a team, where lanes hold indices: 12 warps have 168 registers
BOOKED_WARPS = 8  # warps whose pages must fit beside the codebooks before these are copied more often


def heads_at_once(group: int, head_dim: int) -> int:
    """Query heads of a KV head that a CTA attends with at once: the group in equal tiles of at most 16, or 8 for wide heads."""
    tiles = -(-group // (8 if head_dim > 128 else 16))
    return -(-group // tiles)


def rotates_keys(layout: Layout) -> bool:
    """Whether decode rotates a layout's keys when it reads them."""
    return layout.format("key").is_channelwise and layout.recipe.key.rope == "pre"


def angle_row(head_dim: int) -> int:
    """32-bit words of a row of angles: ANGLE_ROW of codecs/rotated_channel.cuh."""
    return head_dim // 2 + {64: 16, 128: 4}.get(head_dim, 8)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a decode kernel takes: for one layout, number of query heads a KV head, and way to call it."""

    layout: Layout
    group: int  # query heads of a KV head, of all queries of a sequence
    query: str  # type of the queries
    dual: tuple[int, int]  # kind and order of the transform of queries: 0 none, 1 Hadamard, 2 matrix
    inverse: tuple[int, int]
    softcap: bool
    bulk: bool  # whether the GPU copies in bulk (sm_90 on)
    shared: tuple[int, int]  # as `shared_memory`
    tuned: tuple[tuple[str, int], ...] = ()  # constants to override, for measuring
    low_batch: bool = False  # whether (sequence, head)s are fewer than multiprocessors, and each is cut into many parts
    partial_rope: bool = False  # whether RoPE rotates some of the channels only
    queries: int = 1  # of a sequence; each has group / queries query heads a KV head
    sink_logits: bool = False

    # --- heads and queries -------------------------------------------------------------------------------------------

    @property
    def tile_heads(self) -> int:
        return heads_at_once(self.group, self.layout.head_dim)

    @property
    def head_tiles(self) -> int:
        """Tiles of query heads of all KV heads."""
        return -(-self.group // self.tile_heads) * self.layout.heads

    @property
    def lane_heads(self) -> int:
        """Query heads of a lane."""
        return {1: 1, 2: 2, 3: 4, 4: 4}[-(-self.tile_heads // 4)]

    @property
    def pq(self) -> bool:
        return self.layout.format("key").is_pq

    @property
    def residual(self) -> bool:
        """Whether residuals of centroids of whole head vectors are coded."""
        return any(stream.is_residual for stream in self.layout.formats.values())

    @property
    def _tokenwise(self) -> bool:
        """Whether a token's codes have scales of its own, and nothing else."""
        return not (self.pq or self.residual or self.layout.recipe.key.groupwise)

    @property
    def key_groups(self) -> int:
        """Scales of a key vector that is coded token by token."""
        return self.layout.scale_groups("key")

    @property
    def key_registers(self) -> int:
        """Registers of a lane that hold the query operand, of each of its query heads."""
        if self.pq:
            return self.layout.head_dim // 16
        return sum(plane.registers for plane in key_planes(self.layout))

    @property
    def operand_words(self) -> int:
        """32-bit words of the query operand of a head tile: the kernels' `QueryOperand`."""
        sums = 4 * self.key_groups if self.key_groups > 1 else 0  # of the channels of each scale
        return self.lane_heads * (self.key_registers * 32 + 20 + sums)

    @property
    def rotated_keys(self) -> bool:
        """Whether keys are stored before RoPE and rotated when they are read: those that are coded per channel."""
        return rotates_keys(self.layout)

    @property
    def paired_channels(self) -> bool:
        """Whether lanes that rotate keys have both channels of a pair: where a lane has whole words of half of a row's codes."""
        if not self.rotated_keys:
            return False
        (band,) = self.layout.format("key").stored_bands
        fits = band.bits in (2, 4) and self.layout.head_dim // 16 % (16 // band.bits) == 0
        return bool(dict(self.tuned).get("PAIRED_CHANNELS", fits))

    # --- warps, teams and CTAs ---------------------------------------------------------------------------------------

    @property
    def warps(self) -> int:
        rest = sum(self.book_bytes) + self.matrix_bytes + self.angle_bytes + self.level_bytes
        fit = (self.shared[0] - self._static_bytes - rest) // (self.warp_bytes + self._sum_bytes)
        most = RESIDUAL_WARPS if self.residual else WARPS
        if self.pq:  # one CTA, since codebooks are large: as many warps as there are registers for
            size = self.layout.head_dim * self.lane_heads
            most = 16 if size <= 128 else 12 if size <= 256 else 8
        count = next((n for n in range(most, 1, -2) if n <= fit), 1) // self.teams
        if self.indices_in_registers:
            count = INDEX_TEAMS * INDEX_WARPS // self.teams
        if self.low_batch and count == WARPS and self._low_batch_warps == LOW_BATCH_WARPS:
            count = LOW_BATCH_WARPS
        return dict(self.tuned).get("WARPS", count)

    @property
    def teams(self) -> int:
        """Teams of warps of a CTA, each with work tiles of its own: two where one CTA fills a multiprocessor, since all heads share
        codebooks, and another kernel makes the queries. While one of them merges and begins, the other attends."""
        if not self.pq or not self.query_kernel or self.low_batch:
            return 1
        books = [stream.codebook for stream in self.layout.formats.values()]
        shared = all(book is not None and book.heads(self.layout.heads) == 1 for book in books)
        fits = self.shared[0] - STATIC_BYTES - sum(self.book_bytes) >= BOOKED_WARPS * self.warp_bytes
        several = INDEX_TEAMS if self.indices_in_registers else 2
        return dict(self.tuned).get("TEAMS", several if shared and fits else 1)

    @property
    def teams_below(self) -> int:
        """Teams whose pages and outputs lie before the codebooks. Paired ones begin at an address that 64 KiB divide."""
        if not self.paired_books:
            return self.teams
        return min(self.teams, ((PAIRED_ROW << 8) - PAIRED_STATIC_BYTES) // (self.warps * self.warp_bytes))

    @property
    def _most_blocks(self) -> int:
        """CTAs that the registers of a multiprocessor are enough for."""
        if self.pq or self.residual:
            return 1
        size = self.layout.head_dim * -(-self.tile_heads // 8)
        if self._bare_two_bits and size <= 128:
            return 4
        # Channel-wise keys take more registers. At 32 x 32768 on an H200, in two CTAs and in three: 240 and 252 us (kivi-k2v2), 344
        # and 430 (squat-pre).
        return 3 if size <= (64 if self.layout.recipe.key.groupwise else 128) else 2

    @property
    def _bare_two_bits(self) -> bool:
        """Whether affine codes of two bits are read at a high batch, without overlay and RoPE blocks. 128 registers are enough for
        that, so that a multiprocessor runs 16 warps instead of 12: 161 us at 32 x 32768, 164 in an earlier run with 12 (int2)."""
        formats = self.layout.formats.values()
        two_bits = all(band.bits == 2 for stream in formats for band in stream.stored_bands)
        one_scale = self.key_groups == self.layout.scale_groups("value") == 1
        bare = (
            self._tokenwise
            and all(stream.uniform for stream in formats)
            and not self.layout.overlay_tokens("key")
            and not self.layout.recipe.key.effective_rope_block
        )
        return bare and two_bits and one_scale and self.lane_heads == 1 and not self.low_batch

    def _blocks(self, warps: int) -> int:
        """CTAs that a multiprocessor is to hold."""
        grouped = self.layout.recipe.key.groupwise
        most = min(self._most_blocks, max(3, self._most_blocks) * WARPS // warps)
        static = ROTATED_STATIC_BYTES if self.rotated_queries else 8192 if grouped else 4096
        if self.rotated_keys:  # queries as they come, and rotated ones of every warp
            row = self.layout.head_dim
            static = ROTATED_STATIC_BYTES + self.tile_heads * (4 * row + warps * (2 * row + 64)) + 1024
        rest = self.matrix_bytes + self.angle_bytes + self.level_bytes + static
        if self.residual:
            rest += sum(self.book_bytes) + self._static_bytes - static + 1024
        bytes_ = warps * (self.warp_bytes + self.rotated_bytes + self._sum_bytes) + rest
        return max(1, min(most, self.shared[1] // bytes_))

    @property
    def _low_batch_warps(self) -> int:
        """Warps of a CTA at a low batch: more where as many fit on a multiprocessor then, so that there are fewer parts to merge."""
        return LOW_BATCH_WARPS if self._blocks(WARPS) == 3 and self._blocks(LOW_BATCH_WARPS) == 2 else WARPS

    @property
    def stages(self) -> int:
        """Pages that a warp has in flight. With RoPE blocks and large pages there is one more, in two CTAs instead of three,
        which then have registers enough: 335 us instead of 344 at 32 x 32768, 358 instead of 370 at 128 x 8192 (kvant-4, H200).
        kvant-2 and kvant-3, whose pages are smaller, lose by it. Channel-wise keys, in two CTAs anyway, have it too."""
        page, key = self.layout.page_head_bytes, self.layout.recipe.key
        fits = 2 * (WARPS * (STAGES + 1) * page + (8192 if key.groupwise else 4096)) <= self.shared[1]
        large = key.effective_rope_block > 0 and page >= LARGE_PAGE and not self.low_batch and not self.pq
        more = large or (key.groupwise and not self.rotated_keys and self._most_blocks == 2)
        return dict(self.tuned).get("STAGES", STAGES + (more and fits))

    # --- shared memory -----------------------------------------------------------------------------------------------

    @property
    def _static_bytes(self) -> int:
        """Static shared memory, at most. Beside centroids it is counted: rows and operands of the queries, and the rest."""
        if not self.residual:
            return STATIC_BYTES
        return (
            4 * self.layout.head_dim * self.tile_heads
            + 128 * self.lane_heads * self.key_registers
            + 3072 * self.lane_heads
        )

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: its pages in flight, then its outputs."""
        pages = 0 if self.indices_in_registers else self.stages * self.layout.page_head_bytes
        return max(pages, 16 * self.lane_heads * (self.layout.head_dim + 4))

    @property
    def dynamic_bytes(self) -> int:
        if self.paired_books:  # from address PAIRED_ROW << 8 on
            behind = (self.teams - self.teams_below) * self.warps * self.warp_bytes
            return 2 * (PAIRED_ROW << 8) + behind
        return (
            self.teams * self.warps * self.warp_bytes
            + self.matrix_bytes
            + self.angle_bytes
            + sum(self.book_bytes)
            + self._sums_bytes
            + self.level_bytes
        )

    @property
    def least_bytes(self) -> int:
        """Shared memory of a CTA of one warp, with one copy of its codebooks and without a matrix: decode takes this at least."""
        books = self.book_bytes if self.residual else codebook_bytes(self.layout)
        sums = max(self._sum_bytes, 16 * self.lane_heads * (self.layout.head_dim + 4) * self.centroid_sums)
        return self._static_bytes + sum(books) + sums + self.angle_bytes + self.level_bytes + self.warp_bytes

    @property
    def level_copies(self) -> int:
        """Copies of the table of levels of the values' codes: one for every lane, or so many that registers limit the CTAs."""
        value = self.layout.format("value")
        if value.uniform:
            return 0
        return dict(self.tuned).get("LEVEL_COPIES", 4 if max(value.widths) > 3 else 32)

    @property
    def level_bytes(self) -> int:
        """Shared memory of this table: fp16 levels of all pairs of codes."""
        return sum(self.level_copies * 4 << 2 * bits for bits in self.layout.format("value").widths)

    @property
    def angle_bytes(self) -> int:
        """Shared memory of the angles inside a chunk of tokens."""
        tokens = min(CHUNK_TOKENS, self.layout.page_tokens)
        return 4 * tokens * angle_row(self.layout.head_dim) if self.rotated_keys else 0

    # --- codebooks and centroids -------------------------------------------------------------------------------------

    @functools.cached_property
    def indices_in_registers(self) -> bool:
        """Whether lanes read indices from global memory to registers: where shared memory is busy with centroids and has room for all
        copies of them, an index is a byte and a lane has whole words of them, and registers suffice."""
        books = [stream.codebook for stream in self.layout.formats.values() if stream.is_pq]
        if len(books) < 2 or not all(self._byte_indices(name) for name in self.layout.recipe.streams):
            return False
        usual = self.query_kernel and not self.low_batch and self.layout.head_dim * self.lane_heads <= 128
        shared = all(book is not None and book.heads(self.layout.heads) == 1 for book in books)
        paired = all(book is not None and book.centroids == 256 and book.per != "space" for book in books)
        room = self.shared[0] - STATIC_BYTES - BOOKED_WARPS * STAGES * self.layout.page_head_bytes
        usual = usual and shared and paired and room >= PAIRED_ROW << 8
        return bool(dict(self.tuned).get("INDICES_IN_REGISTERS", usual))

    def _byte_indices(self, name: StreamName) -> bool:
        """Whether indices of a stream are bytes, of which a lane has whole words, and no queries of RoPE blocks interrupt a chunk."""
        low, *high = self._sections(name, "index")
        words = low.width % (16 if name == "key" else 32) == 0 and low.width <= 32
        return low.bits == 8 and not high and words and not self.layout.recipe.key.effective_rope_block

    @property
    def paired_books(self) -> bool:
        """Whether centroids of the keys and of the values lie side by side in shared memory, so that an index is a byte of an
        address."""
        if not self.pq:
            return False
        books = [stream.codebook for stream in self.layout.formats.values()]
        usual = self.indices_in_registers and self.book_bytes == [ROW << 8] * 2
        usual = usual and all(book is not None and book.per != "space" for book in books)
        return bool(dict(self.tuned).get("PAIRED_BOOKS", usual))

    @functools.cached_property
    def copies(self) -> tuple[int, ...]:
        """Copies of the keys' and the values' codebook in shared memory: lanes with copies of their own do not wait for each
        other. As many as fit beside the pages of some warps."""
        if not self.pq:
            return ()
        sizes, books = codebook_bytes(self.layout), [stream.codebook for stream in self.layout.formats.values()]
        copies = [ROW // (2 * book.dim) for book in books if book is not None]
        room = self.shared[0] - STATIC_BYTES - BOOKED_WARPS * self.warp_bytes
        while max(copies) > 1 and sum(n * size for n, size in zip(copies, sizes, strict=True)) > room:
            i = max(range(2), key=lambda i: (copies[i] > 1, copies[i] * sizes[i]))
            copies[i] = (
                copies[i] // 2 if copies[i] > 4 else 1
            )  # two do not help: rows of banks are as crowded as with one
        return tuple(copies)

    @property
    def book_bytes(self) -> list[int]:
        """Shared memory of the codebooks."""
        if self.residual:
            books = residual_bytes(self.layout, self.lane_heads)
            unit = 256 * self.lane_heads  # of 16 centroids
            # Shares of the values' centroids lie where the keys' scores were; sums are the warps' (`_sum_bytes`).
            return [max(books[0], -(-self._sum_bytes // unit) * unit), 0] if self.centroid_sums else books
        return [n * size for n, size in zip(self.copies, codebook_bytes(self.layout), strict=True)]

    @property
    def centroid_sums(self) -> bool:
        """Whether P is summed by the value's centroid, instead of multiplied by the centroids of every token (codecs/residual.cuh).
        A warp then has sums of its own in shared memory, which a lane's many query heads would make large. Few centroids would
        have most lanes wait for each other."""
        key, value = self.layout.format("key"), self.layout.format("value")
        if not (key.is_residual and value.is_residual):
            return False
        assert value.codebook is not None
        usual = self.lane_heads <= 2 and value.codebook.centroids >= FEW_CENTROIDS
        return bool(dict(self.tuned).get("CENTROID_SUMS", usual))

    @property
    def _sum_bytes(self) -> int:
        """Shared memory of a warp for sums of P by centroid."""
        codebook = self.layout.format("value").codebook
        return 16 * self.lane_heads * codebook.centroids if self.centroid_sums and codebook is not None else 0

    @property
    def _sums_bytes(self) -> int:
        """The same of all warps, later the outputs that these sums make."""
        return max(self.warps * self._sum_bytes, 16 * self.lane_heads * (self.layout.head_dim + 4) * self.centroid_sums)

    @property
    def _residual_words(self) -> bool:
        """Whether residuals of centroids are coded, of keys and values, with eight words of codes of a lane and tile."""
        formats = self.layout.formats.values()
        four = all([(band.width, band.bits) for band in stream.stored_bands] == [(128, 4)] for stream in formats)
        return self.residual and four and self.key_groups == self.layout.scale_groups("value") == 1

    def _sections(self, stream: StreamName, kind: str) -> list[Section]:
        return [s for s in self.layout.sections if s.stream == stream and s.kind == kind]

    # --- where queries and outputs are transformed -------------------------------------------------------------------

    @property
    def query_kernel(self) -> bool:
        """Whether a kernel before decode makes the query operands, and not every CTA for itself."""
        own = self.layout.recipe.key.groupwise or self.fused_queries or self.rotated_queries or self.residual
        return self.dual[0] == MATRIX and not own

    @functools.cached_property
    def rotated_queries(self) -> bool:
        """Whether the warps of decode rotate their queries to every RoPE block themselves. That is so at a high batch, where queries
        have 16 bits, RoPE rotates all channels, two to four query heads of two RoPE blocks fill a product, and a multiprocessor
        holds as many CTAs with the matrix in its shared memory as without: 178 us instead of 191 at 32 x 32768, 195 instead of 212
        at 128 x 8192, 185 instead of 203 at 256 x 3072, 59 instead of 62 at 64 x 3072, 40 and 40 at 64 x 1024 (kvant-2, folded,
        H200). At a low batch a kernel before decode is faster: 35 us instead of 38 at 1 x 131072, 23 instead of 25 at 8 x 8192."""
        key, dim, asked = self.layout.recipe.key, self.layout.head_dim, dict(self.tuned).get("QUERY_TRANSFORM")
        if not key.effective_rope_block or key.groupwise or self.pq or self.partial_rope:
            return False
        if self.low_batch or self.query == "float32" or dim % 32 or dim > 128 or asked == MATRIX:
            return False
        if not 2 <= self.tile_heads <= 4 and asked != QueryTransform.ROTATED_MATRIX:
            return False
        pages = WARPS * self.warp_bytes + ROTATED_STATIC_BYTES
        matrix = self._rotated_matrix_bytes + WARPS * self._rotated_operand_bytes
        if WARPS * self._rotated_operand_bytes > ROTATED_OPERAND_BYTES:
            return False
        ctas = [min(12 // WARPS, self._most_blocks, self.shared[1] // room) for room in (pages, pages + matrix)]
        return ctas[0] == ctas[1] and pages + matrix + STATIC_BYTES <= self.shared[0]

    @property
    def _rotated_matrix_bytes(self) -> int:
        """Shared memory of the matrix that rotated queries are multiplied by: columns of the operand, and 16 more."""
        return (self.key_registers + 1) * self.layout.head_dim * 32

    @property
    def _rotated_blocks(self) -> int:
        """RoPE blocks whose queries are columns of one MMA (include/rotated_query.cuh)."""
        return 2 if self.tile_heads <= 4 else 1

    @property
    def _rotated_operand_bytes(self) -> int:
        """Shared memory of a warp for query operands and angles of some RoPE blocks."""
        return 4 * (self.operand_words + self.layout.head_dim) * self._rotated_blocks

    @property
    def rotated_bytes(self) -> int:
        """Static shared memory of a warp for the query operands that it makes itself."""
        return self._rotated_operand_bytes if self.rotated_queries else 0

    @property
    def fused_queries(self) -> bool:
        """Whether every CTA of decode multiplies its queries by their matrix. At a low batch this takes less time than waiting for
        a kernel before it."""
        key = self.layout.recipe.key
        if not self.low_batch or self.dual[0] != MATRIX or key.groupwise or key.effective_rope_block or self.pq:
            return False
        return self._holds_matrix and not self.residual and dict(self.tuned).get("QUERY_TRANSFORM") != MATRIX

    @property
    def fused_outputs(self) -> bool:
        """Whether every CTA of decode multiplies its outputs by their matrix: at a low batch. At a high one, a kernel after decode
        takes less time (docs/kernels.md)."""
        fused = self.low_batch and self.inverse[0] == MATRIX and not (self.pq or self.residual) and self._holds_matrix
        return fused and dict(self.tuned).get("OUTPUT_TRANSFORM") != MATRIX

    @property
    def _holds_matrix(self) -> bool:
        """Whether a matrix, in 16 bits, fits beside pages."""
        room = (self.shared[0] - STATIC_BYTES - 2 * self.layout.head_dim**2) // self.warp_bytes  # warps
        return self.query != "float32" and self.layout.head_dim <= 128 and room >= WARPS

    @property
    def matrix_bytes(self) -> int:
        """Shared memory of a matrix, of queries or of outputs: where both are multiplied here, one after the other."""
        if self.rotated_queries:
            return self._rotated_matrix_bytes
        return 2 * self.layout.head_dim**2 if self.fused_queries or self.fused_outputs else 0

    @property
    def _split_rows(self) -> bool:
        """Whether the queries that the overlay is multiplied by are stored as the two bfloat16 numbers that the products take."""
        made = self._tokenwise and self.query_kernel and not self.layout.recipe.key.raw_window
        return made and self.layout.overlay_tokens("key") > 0 and self.layout.overlay_dtype == "bfloat16"

    @property
    def shared_operand(self) -> bool:
        """Whether every chunk of tokens reads the query operand from shared memory, where each warp copies that of its RoPE block,
        instead of registers: at a high batch, for several queries, of which a lane has four query heads, and where as many CTAs
        fit then. With 4 queries at 32 x 32768 decode takes 383 us instead of 398 (kvant-2, H200)."""
        rope = self.layout.recipe.key.effective_rope_block > 0
        if self.queries == 1 or self.lane_heads < 4 or self.low_batch or not (rope and self.query_kernel) or self.pq:
            return False
        operands = self.warps * 2 * 4 * self.operand_words  # bytes: of the RoPE block at hand, and of the next
        fit = self.shared[1] // (self.dynamic_bytes + 4096 + operands)  # CTAs
        return operands <= ROTATED_OPERAND_BYTES and fit >= self._blocks(self.warps)

    @property
    def rotate_warps(self) -> int:
        """Warps of a CTA of kvant_rotate_queries: each makes the same number of `key_registers`."""
        return max(warps for warps in range(1, 17) if self.key_registers % warps == 0)

    @property
    def high_batch_bytes(self) -> int:
        """Shared memory of a CTA of kvant_rotate_queries_high_batch: its matrix."""
        parts = 2 if self.query == "float32" else 1
        return (self.key_registers + 1) * self.layout.head_dim // 16 * parts * 512

    @property
    def high_batch_warps(self) -> int:
        """Warps of a CTA of kvant_rotate_queries_high_batch; 0 where it does not serve the layout. Two CTAs have to fit on a
        multiprocessor, and a lane holds accumulators of all columns."""
        if not self.layout.recipe.key.effective_rope_block or self.layout.head_dim % 32:
            return 0
        if HIGH_BATCH_CTAS * (self.high_batch_bytes + 1024) > self.shared[1]:
            return 0
        registers = 8 * self.key_registers + 4 + HIGH_BATCH_REGISTERS
        if 8 % self.tile_heads or self.query == "float32":  # a lane has queries of several heads, or in two parts
            registers += HIGH_BATCH_MORE_REGISTERS
        count = next((warps for warps, most in ((8, 128), (6, 168), (4, 255)) if registers <= most), 0)
        return dict(self.tuned).get("HIGH_BATCH_WARPS", count)


@functools.lru_cache(maxsize=1024)
def least_shared_bytes(layout: Layout) -> int:
    """Shared memory of a CTA that decode takes at least, whatever the number of query heads of a KV head."""
    groups = range(1, heads_at_once(16, layout.head_dim) + 1)
    plans = (Geometry(layout, group, "float32", (0, 1), (0, 1), True, True, (0, 0)) for group in groups)
    return max(made.least_bytes for made in plans)
