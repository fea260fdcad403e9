// Decode attention over pages of codes: paged, split along the sequence (split-KV), overlay and merge included, in one launch.
//
//   for every work tile of the CTA: a part of one sequence for one tile of query heads
//     load the query, S = Q K^T and O += P V over overlay and pages by every warp, merge the warps, write a partial result or finish
//
// S^T = K Q^T and O^T = V^T P^T, see include/decode_shapes.cuh. Codes are operands as they are stored: scales touch scores and probabilities, never elements.
// How a page is attended to is the codec's: Config::PageAttention, a type of codecs/*_pages.cuh, whose header a program includes before this file.

#pragma once
#include "codecs/residual.cuh"
#include "include/output.cuh"
#include "include/overlay.cuh"
#include "include/page_ring.cuh"
#include "include/rotated_query.cuh"

using PageAttention = Config::PageAttention;
constexpr bool AFTER_KERNEL = Config::QUERY_TRANSFORM == QueryTransform::MATRIX;  // a kernel before this one transforms queries and writes their rows
static_assert(!SHARED_OPERAND || (Config::QUERY_KERNEL && ROPE_BLOCK), "operands of RoPE blocks are copied to shared memory");
static_assert(!ROTATED_QUERIES || !FUSED_OUTPUTS, "the matrix of rotated queries stays in shared memory");
static_assert(TEAMS == 1 || (Config::QUERY_KERNEL && !FUSED_OUTPUTS), "what the threads of a CTA transform together, those of a team do not");

// --- shared memory ----------------------------------------------------------------------------------------------------------

// Byte of dynamic shared memory from which on a team has its pages and outputs. Codebooks whose entries lie side by side begin at the next address that 64 KiB
// divide: teams for which there is no room before them come behind.
constexpr int TEAM_BYTES = WARPS * Config::WARP_BYTES, BOOKS_ALIGNMENT = 1 << 16;
DEV int team_offset(const u8* dynamic) {
  if (team() < Config::TEAMS_BELOW) return team() * TEAM_BYTES;
  const u32 memory = shared_address(dynamic), books = (memory + Config::TEAMS_BELOW * TEAM_BYTES + BOOKS_ALIGNMENT - 1) / BOOKS_ALIGNMENT * BOOKS_ALIGNMENT;
  return (int)(books - memory) + BOOKS_ALIGNMENT + (team() - Config::TEAMS_BELOW) * TEAM_BYTES;
}

// The matrix of queries, or of outputs, behind the pages of all warps.
struct SharedMatrix {
  u8* bytes;
  int head;         // whose matrix is there, or -1
  int output_head;  // whose matrix the outputs of this work tile are multiplied by

  DEV void open(u8* memory, const DecodeArguments& a) {
    bytes = memory;
    if constexpr (ROTATED_QUERIES) {
      head = -1;
      RotatedMatrix<Keys>::prefetch(a);
    } else if constexpr (FUSED_QUERIES || FUSED_OUTPUTS) {
      head = (FUSED_QUERIES ? a.matrix_heads : a.output_matrix_heads) == 1 ? 0 : -1;  // one for all heads is copied now
      if (head == 0) copy_matrix(bytes, FUSED_QUERIES ? a.query_matrix : a.output_matrix, 0);
    }
  }
  DEV void copy_query_matrix(const DecodeArguments& a, int which) {
    if (head != which) copy_matrix(bytes, a.query_matrix, head = which);
  }
  DEV void copy_output_matrix(const DecodeArguments& a, int kv_head) {
    output_head = kv_head % a.output_matrix_heads;
    if (FUSED_QUERIES || head != output_head) copy_matrix(bytes, a.output_matrix, output_head), head = FUSED_QUERIES ? -1 : output_head;
  }
};

// --- the query --------------------------------------------------------------------------------------------------------------

// A query whose operand a kernel before this one made; with RoPE blocks, one operand for each.
struct OperandQuery {
  struct Empty {};
  struct Copied {
    QueryOperand operand[2 * WARPS];  // two of each warp: of the RoPE block at hand, and of the next, on its way
  };
  using Shared = Select<SHARED_OPERAND, Copied, Empty>;
  const QueryOperand* operands;  // of the (sequence, head tile), by RoPE block
  int coming;                    // SHARED_OPERAND: the RoPE block whose operand is on its way, or -1

  DEV void request(Shared&, const DecodeArguments&, const HeadTileRows&, int, int) {}
  DEV void copy_matrix(const DecodeArguments&, SharedMatrix&, const HeadTileRows&) {}
  DEV void finish(Shared&, const DecodeArguments& a, SharedMatrix&, const HeadTileRows& rows) {
    operands = a.operands + ((s64)rows.b * HEAD_TILES + rows.head_tile) * a.rope_blocks;
  }
  template <class Pages> DEV void load(Pages& pages, Shared&, const DecodeArguments& a, int lane) {
    if constexpr (SHARED_OPERAND) coming = -1, await_copies();  // of an operand that nobody asked for
    else if constexpr (!ROPE_BLOCK) pages.load_query(*operands, lane, a.scale);
  }
  // The operand of a RoPE block; the next one is prefetched.
  template <class Pages, class S> DEV void load_block(Pages& pages, S& sh, const DecodeArguments& a, const HeadTileRows&, int block, int lane) {  // S: derived from Shared
    if constexpr (SHARED_OPERAND) {
      QueryOperand* own = sh.operand + (threadIdx.x >> 5) * 2;
      if (block != coming) copy_operand(own[block & 1], operands[block], lane);
      await_copies();
      __syncwarp();  // all lanes have copied their part, and have read the operand of the block before
      pages.load_query(own[block & 1], lane, a.scale);
      coming = block + 1 < a.rope_blocks ? block + 1 : -1;
      if (coming >= 0) copy_operand(own[coming & 1], operands[coming], lane);
    } else {
      constexpr int LAST_LINE = (sizeof(QueryOperand) + 127) / 128;
      pages.load_query(operands[block], lane, a.scale);
      if (block + 1 < a.rope_blocks && lane <= LAST_LINE) prefetch_l1((const u8*)(operands + block + 1) + min(lane * 128, (int)sizeof(QueryOperand) - 4));
    }
  }
  // cp.async by the lanes of a warp.
  DEV static void copy_operand(QueryOperand& to, const QueryOperand& from, int lane) {
    static_assert(sizeof(QueryOperand) % 16 == 0, "16 bytes are copied at a time");
#pragma unroll
    for (int i = 0; i < (int)sizeof(QueryOperand); i += 32 * 16)
      if (i + lane * 16 < (int)sizeof(QueryOperand)) copy16((u8*)&to + i + lane * 16, (const u8*)&from + i + lane * 16);
  }
  // Overlay tokens [at, last).
  DEV void attend(Shared&, const DecodeArguments& a, const HeadTileRows& rows, const volatile SequenceWork& w, int at, int last, s64 overlay_row, int lane, OnlineSoftmax& softmax) const {
    if constexpr (ROPE_BLOCK > 0) attend_overlay(a, w, rows, at, at, last, overlay_row, lane, *operands, GivenQueries(a, rows), softmax);
    else attend_overlay(a, w, rows, at, at, last, overlay_row, lane, *operands, OverlayRows(a.query_rows + rows.query * D), softmax);
  }
};

// A query that the CTA transforms itself, into shared memory.
struct CtaQuery {
  using Shared = PageAttention::Shared;
  RawQuery raw;

  DEV static int matrix_of(const DecodeArguments& a, const HeadTileRows& rows) { return FUSED_QUERIES ? rows.head % a.matrix_heads : 0; }
  DEV void request(Shared&, const DecodeArguments& a, const HeadTileRows& rows, int, int) {
    if (!AFTER_KERNEL) raw.load(a, matrix_of(a, rows), rows.query, rows.count);
  }
  DEV void copy_matrix(const DecodeArguments& a, SharedMatrix& matrix, const HeadTileRows& rows) {
    if constexpr (FUSED_QUERIES) matrix.copy_query_matrix(a, matrix_of(a, rows));
  }
  DEV void finish(Shared& sh, const DecodeArguments& a, SharedMatrix& matrix, const HeadTileRows& rows) {
    if (AFTER_KERNEL) raw.load(a, matrix_of(a, rows), rows.query, rows.count);
    load_shared_query(sh, a, raw, matrix.bytes, rows.query, rows.count);
    if constexpr (RESIDUAL_KEYS) store_centroid_scores(sh.rows, sh.top, a, rows.head);
  }
  template <class Pages> DEV void load(Pages& pages, Shared& sh, const DecodeArguments& a, int lane) const { pages.load_query(sh, lane, a.scale); }
  DEV void attend(Shared& sh, const DecodeArguments& a, const HeadTileRows& rows, const volatile SequenceWork& w, int at, int last, s64 overlay_row, int lane, OnlineSoftmax& softmax) const {
    attend_overlay(a, w, rows, at, at, last, overlay_row, lane, sh, sh.rows, softmax);
  }
};
using Query = Select<Config::QUERY_KERNEL, OperandQuery, Select<ROTATED_QUERIES, RotatedQuery<Keys>, CtaQuery>>;

struct Shared : Query::Shared, MergeBuffers {
  alignas(16) u64 barrier[WARPS][STAGES];  // aligned for PageRing::step
  SequenceWork work[WARPS];  // here, not in registers
};

// --- overlay and pages --------------------------------------------------------------------------------------------------------

// Tokens [begin(i), end(i)) of chunk i of the overlay: sinks first, then the recent ones.
struct OverlayChunks {
  static constexpr int TOKENS = 16 * OVERLAY_TILES;
  const volatile SequenceWork& w;
  DEV int begin(int i) const { return i >= w.sink_chunks ? w.recent_begin + (i - w.sink_chunks) * TOKENS : w.low + i * TOKENS; }
  DEV int end(int i) const { return min(begin(i) + TOKENS, i >= w.sink_chunks ? w.n : w.sink_end); }
};

// A warp attends to its pages, chunk by chunk; with RoPE blocks, to the tokens of one block at a time.
template <class Q, class S> DEV void attend_pages(const DecodeArguments& a, PageAttention::Ring& ring, PageAttention& pages, Q& query, S& sh, const HeadTileRows& rows, const WarpRange& range, const PackedRange& packed, int lane,
                      OnlineSoftmax& softmax) {
  [[maybe_unused]] int rope_end = -1;  // end (exclusive) of the RoPE block whose operand is loaded
  for (int page = range.page; page < range.page_end; page++) {
    ring.enter(page, range);
    pages.enter(ring, page + 1 < range.page_end);
#pragma unroll 1
    for (int tile = 0; tile < PAGE_TILES; tile += CHUNK_TILES) {
      const int at = Config::ORIGIN + (packed.page + page) * Config::PAGE_TOKENS + tile * 16;
      if (PAGE_TILES > CHUNK_TILES && !Config::INDICES_IN_REGISTERS && (at + 16 * CHUNK_TILES <= packed.begin || at >= packed.end)) continue;
      const auto attend = [&](int first, int last, bool final) {
        pages.attend(a, packed, rows.head, tile, at, first, last, lane, final, softmax, [&]() {
          if constexpr (PageAttention::EARLY_REFILL) ring.refill(page, range, lane, final);
        });
      };
      if constexpr (ROPE_BLOCK > 0) {
        int first = max(at, packed.begin);
        const int end = min(at + 16 * CHUNK_TILES, packed.end);
        do {  // every chunk here has a token in [packed.begin, packed.end)
          if (first >= rope_end) {
            rope_end = rope_block_end(a, first);
            query.load_block(pages, sh, a, rows, rope_block_of(a, first), lane);
          }
          const int last = min(end, rope_end);
          attend(first, last, last == end);
          first = last;
        } while (first < end);
      } else {
        attend(packed.begin, packed.end, true);
      }
    }
    if constexpr (!PageAttention::EARLY_REFILL) ring.refill(page, range, lane);
  }
}

// --- the kernel -----------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(TEAMS * WARPS * 32, Config::MIN_CTAS) kvant_decode(const DecodeArguments a) {
  DYNAMIC_SHARED(dynamic);  // [TEAMS, WARPS, WARP_BYTES]: a warp's pages, later overwritten by its outputs [TILE_HEADS, OUTPUT_ROW]; behind all warps a matrix or codebooks
  __shared__ __align__(16) Shared shared[TEAMS];
  Shared& sh = shared[team()];
  static_assert(!Config::PAIRED_BOOKS || 1024 + sizeof(shared) + Config::TEAMS_BELOW * TEAM_BYTES <= BOOKS_ALIGNMENT, "what lies before the codebooks, with what CUDA reserves");
  static_assert(Config::WARP_BYTES >= PageAttention::Ring::BYTES && Config::WARP_BYTES >= 4 * LANE_HEADS * OUTPUT_ROW * 4, "a warp's bytes hold its pages, then its outputs");
  const int warp = (threadIdx.x >> 5) - (TEAMS > 1 ? team() * WARPS : 0), lane = threadIdx.x & 31;  // of the team
  u8* const outputs = dynamic + team_offset(dynamic);  // of this team's warps, and their pages
  begin_copies(sh.barrier[warp], STAGES, lane);
  SharedMatrix matrix;
  matrix.open(dynamic + TEAMS * WARPS * Config::WARP_BYTES, a);
  const bool after_append = OVERLAY && a.after_append;  // then the overlay alone has to wait: new tokens are read nowhere else
  if (!AFTER_KERNEL && !after_append) wait_prior_grid();
  launch_dependent_grids();  // the transform of outputs, or the next call
  int codebook_head = -1;    // whose codebooks are in shared memory
  if constexpr (TEAMS > 1) PageAttention::load_codebooks(codebook_head, dynamic, a, 0);

  const TileScheduler<HEAD_TILES, 2 * WARPS, ROTATED_QUERIES || RESIDUAL_VALUES, Config::WHOLE_TILES, TEAMS> scheduler(a, lane);  // two pages a warp
  PageAttention::Ring ring;
  ring.open(outputs + warp * Config::WARP_BYTES, sh.barrier[warp]);
  for (int part = blockIdx.x * TEAMS + team(); part < scheduler.parts; part += gridDim.x * TEAMS)
    for (WorkTile work = scheduler.first_tile(a, part, lane); work.unit < work.end; scheduler.advance(work, a.batch)) {
      // schedule: this warp's pages and overlay tiles
      const SequenceWork found = sequence_work(a, work.b);
      if (lane == 0) sh.work[warp] = found;
      scheduler.enter(work, found.units);
      const WarpRange range = warp_range(found, work, scheduler.split, warp);
      const volatile SequenceWork& w = sh.work[warp];
      const OverlayChunks overlay = {w};
      const s64 overlay_row = found.overlay_row;
      __syncwarp();

      // query: the first pages are on their way while it is loaded
      const HeadTileRows rows(work);
      ring.list(a.block_table + (s64)work.b * a.block_table_width + found.page, a.pages + rows.head * PAGE_HEAD_BYTES, range);
      Query query;
      query.request(sh, a, rows, first_packed(found, range.page), lane);
      query.copy_matrix(a, matrix, rows);  // before the pages, behind which it would arrive last
      ring.fill(range, lane);
      if constexpr (TEAMS == 1) PageAttention::load_codebooks(codebook_head, dynamic, a, rows.head);
      if (OVERLAY && (ROPE_BLOCK || CHANNELWISE))  // elsewhere prefetching takes longer than it saves
        for (int i = range.overlay + warp; i < range.overlay_end; i += WARPS) prefetch_overlay(a, overlay.begin(i), overlay.end(i), overlay_row, rows.head, lane);
      if (AFTER_KERNEL) wait_prior_grid();  // pages and lengths read so far were complete, but for tokens that the overlay holds: see after_append
      query.finish(sh, a, matrix, rows);
      if constexpr (FUSED_OUTPUTS) matrix.copy_output_matrix(a, rows.head);

      // tiles: S = Q K^T, P = softmax S, O += P V
      OnlineSoftmax softmax;
      softmax.clear();
      if constexpr (CENTROID_SUMS) clear_sums(softmax, lane);
      const auto attend_overlay_chunks = [&]() {
        if (!AFTER_KERNEL && after_append && range.overlay + warp < range.overlay_end) wait_prior_grid();
        if constexpr (OVERLAY)
          for (int i = range.overlay + warp; i < range.overlay_end; i += WARPS) {
            const int at = overlay.begin(i), last = overlay.end(i);
            query.attend(sh, a, rows, w, at, last, overlay_row, lane, softmax);
          }
      };
      if (OVERLAY && !Config::OVERLAY_LAST) attend_overlay_chunks(), scale_accumulators(softmax);
      PageAttention pages;
      query.load(pages, sh, a, lane);
      const PackedRange packed(a, w, rows.row, found.overlay_row);
      pages.begin(ring, dynamic, range.page < range.page_end, lane);
      attend_pages(a, ring, pages, query, sh, rows, range, packed, lane, softmax);
      unscale_accumulators(softmax, lane & 3);
      if (Config::OVERLAY_LAST) attend_overlay_chunks();

      // merge: the warps of the CTA, then the CTAs that share the (sequence, head tile)
      store_warp(softmax, sh, (float*)(outputs + warp * Config::WARP_BYTES), warp, lane);
      if (FUSED_OUTPUTS) await_copies();
      team_barrier();
      if constexpr (CENTROID_SUMS) CentroidSums::multiply(a, sh, rows.head);
      finish_cta(a, sh, (float*)outputs, matrix.bytes, matrix.output_head, rows, work.whole(), a.partial + ((s64)part * 2 + (work.from == 0)) * PARTIAL);
      if (!work.whole() && warp < rows.count) merge_parts(a, rows, scheduler.first_part(work), scheduler.last_part(work));
      fence_copies();  // outputs were written where pages will be copied to
      team_barrier();
    }
  if (AFTER_KERNEL || after_append) wait_prior_grid();  // every CTA waits, also one without work: the next kernel waits for this one alone
  if (FUSED_QUERIES || FUSED_OUTPUTS || ROTATED_QUERIES || SHARED_OPERAND) await_copies();
}
