// Decode attention, 5 of 5: paged, over packed codes, in one launch, split along the sequence, windows and merge included. The
// text before it is common.cu, softmax.cu, queries.cu, groups.cu, attend.cu and deal.cu; for vector quantization, indices.cu and lookup.cu too.
//
// S^T = K Q^T and O^T = V^T P^T: tokens (then channels) fill the 16 rows of the tensor core's product, the query heads of a KV
// head its 8 columns. The page lies in the order of the lanes (kvant/layout.py), so a lane reads its own share and nothing is
// shuffled. Scales touch scores and probabilities, never elements.
//
// Scores: codes as bytes times queries as two signed bytes (128 high + low, in neighbouring columns), exact in integers. A lane
// then holds the scores of query head t (t + 4, ...) for tokens g and g + 8 of every tile of 16.
// Outputs: codes as fp16 times probabilities as fp16. Up to four query heads leave half of the columns idle, so two tiles share
// them: PAIRED.
//
// Work is cut into equal parts, one for each block, over all (sequence, head)s laid end to end; a unit is a page, or one or two
// tiles of the full-precision windows. Where a (sequence, head) is shared by several blocks, the last to finish merges.
//
// Constants beside those of common.cu: GROUP (query heads of a KV head), TILE_HEADS (of them, a block's), QUERY_TILES,
// KEY_PLANES and VALUE_CODES, KEY_META, VALUE_META (0 scale and minimum, 1 scale and integer zero, 2 scale), their types and
// offsets, VALUE_FLAG (a negative scale says that the mean was taken off a value), SINK, RECENT, WINDOW_TOKENS (full-precision tokens of a sequence), WINDOW_TYPE, WINDOW_TILES (of windows that a warp attends to at once), WINDOWS_LAST (whether after pages), OVERLAY_UNITS
// (what they count, in pages), MIXED (what a page counts whose tokens are partly in windows), QUERY_TYPE, WARP_BYTES (of dynamic shared memory), DUAL and INVERSE (0 nothing, 1 Hadamard of order ..._ORDER,
// 2 a matrix, in kernels of their own before and after, 3 a matrix in this one, where both share their place), PREPARED (whether a kernel before makes the queries' bytes too), TURNED (positions of a block to whose start keys are operands back, 0 where
// they are not; queries are then operands by kvant_turn before, of TURN_WARPS and TURN_BLOCKS, as TURN_PARTS numbers of fp16), SOFTCAP, STAGES, WARPS, MIN_BLOCKS, BULK,
// INDEXED (whether streams are indices of centroids, which have no scales: indices.cu), KEY_BOOK and VALUE_BOOK, KEY_BOOK_HEADS and VALUE_BOOK_HEADS
// (1 where heads share them).

#include "include/copies.cuh"
#include "include/scheduler.cuh"
#include "include/online_softmax.cuh"
#include "include/queries.cuh"
#include "kernels/rotate_queries.cuh"
#include "codecs/product_vq_page.cuh"
#include "codecs/channel.cuh"
#include "include/attend.cuh"

// --- a block --------------------------------------------------------------------------------------------------------------

struct Shared {
#if !QUERY_KERNEL
  SharedQuery query;
#endif
  float m[WARPS][4 * LANE_HEADS], l[WARPS][4 * LANE_HEADS], flags[WARPS][4 * LANE_HEADS];
  u64 barrier[WARPS][STAGES];
  Work work[WARPS];  // here, not in registers
};
constexpr int PARTIAL = TILE_HEADS * (D + 4);  // floats of a block's part of a (sequence, head): outputs, their log-sum-exp, flags

constexpr bool MERGED_FLAGS = VALUE_FLAG && INVERSE != 3;  // whether means are added when all parts are there, or by every block
constexpr int OUTPUT_ROW = D + 4;  // floats of a query head's outputs in shared memory: rows start in different banks

// The output of a query head, by a warp: sums of values times weights, and of weights relative to 2^m.
struct Output {
  float x[LANE_QUADS][4], m, l, flags;

  // The block's own, from what its warps left in shared memory.
  DEV void gather(const Shared& sh, const float* outputs, int stride, int h, int lane) {
    m = minus_infinity(), l = flags = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) m = fmaxf(m, sh.l[i][h] > 0.f ? sh.m[i][h] : minus_infinity());
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {  // without branches: what a warp without tokens left is zeros
      const float by = sh.l[i][h] > 0.f ? exp2_(sh.m[i][h] - m) : 0.f;
      l += by * sh.l[i][h], flags += by * sh.flags[i][h];
      add(outputs + i * stride + h * OUTPUT_ROW, by, lane);
    }
  }
  DEV void add(const float* row, float by, int lane) {
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      float y[4] = {0.f, 0.f, 0.f, 0.f};
      if (4 * (lane + 32 * j) < D) load_four<2>(y, row, 4 * (lane + 32 * j));
#pragma unroll
      for (int i = 0; i < 4; i++) x[j][i] = fmaf(by, y[i], x[j][i]);
    }
  }
  // As a part among others: outputs, then by query head log-sum-exps and flags.
  DEV void store(float* part, int h, int lane) const {
    const float back = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const float y[4] = {x[j][0] * back, x[j][1] * back, x[j][2] * back, x[j][3] * back};
      if (4 * (lane + 32 * j) < D) store_four<2>(part, h * D + 4 * (lane + 32 * j), y);
    }
    store_sum(part, h, lane);
    if (lane == 0) part[TILE_HEADS * (D + 1) + h] = flags * back;
  }
  DEV void store_sum(float* part, int h, int lane) const {
    if (lane == 0) part[TILE_HEADS * D + h] = l > 0.f ? m + log2_(l) : minus_infinity();
  }
  // All parts, of blocks first to last. A block's lies in its second slot where it began with this (sequence, head) or before it, which only the first one did.
  DEV void merge(const float* partial, int first, int last, int h, int lane) {
    constexpr int SOME = 16 / LANE_QUADS;  // rows that are asked for at once: one after another, they would be most of a short attention's time
    m = minus_infinity(), l = flags = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
    const auto part = [&](int block) { return partial + (s64)(block * 2 + (block == first)) * PARTIAL; };
    for (int base = first; base <= last; base += SOME) {
      const int block = base + lane;
      float4 y[SOME][LANE_QUADS];
      float own = minus_infinity(), mark = 0.f;
      if (lane < SOME && block <= last) {
        own = __ldcg(part(block) + TILE_HEADS * D + h);
        if (MERGED_FLAGS) mark = __ldcg(part(block) + TILE_HEADS * (D + 1) + h);
      }
#pragma unroll
      for (int k = 0; k < SOME; k++)
#pragma unroll
        for (int j = 0; j < LANE_QUADS; j++) {
          y[k][j] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (base + k <= last && 4 * (lane + 32 * j) < D) y[k][j] = __ldcg((const float4*)(part(base + k) + h * D) + lane + 32 * j);
        }
      const float top = fmaxf(m, warp_max(own)), factor = m > -1e29f ? exp2_(m - top) : 0.f, by = own > -1e29f ? exp2_(own - top) : 0.f;
      m = top, l = fmaf(l, factor, warp_sum(by)), flags *= factor;
      if (MERGED_FLAGS) flags += warp_sum(by * mark);
#pragma unroll
      for (int j = 0; j < LANE_QUADS; j++) {
        x[j][0] *= factor, x[j][1] *= factor, x[j][2] *= factor, x[j][3] *= factor;
#pragma unroll
        for (int k = 0; k < SOME; k++) {
          const float weight = __shfl_sync(FULL, by, k);
          x[j][0] = fmaf(weight, y[k][j].x, x[j][0]), x[j][1] = fmaf(weight, y[k][j].y, x[j][1]);
          x[j][2] = fmaf(weight, y[k][j].z, x[j][2]), x[j][3] = fmaf(weight, y[k][j].w, x[j][3]);
        }
      }
    }
  }
  // The mean of values, in their own space.
  template <bool FLAGS> DEV void normalise(const Arguments& a, int head, int lane) {
    const float by = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const int e = 4 * (lane + 32 * j);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[j][i] *= by;
        if (FLAGS && e < D) x[j][i] = fmaf(flags * by, a.value_mean[head * D + e + i], x[j][i]);
      }
    }
  }
#if INVERSE == 3
  // For the matrix: as fp16 in two parts, once a power of two brings it to magnitudes of at most one, then that power. In the place of a row of a warp's outputs.
  DEV void spread(const Arguments& a, float* row, int head, int lane) {
    normalise<VALUE_FLAG>(a, head, lane);
    float top = 1e-30f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) top = fmaxf(top, max_abs(x[j]));
    top = warp_max(top);
    const float by = scale_below_one(top);
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const float y[4] = {x[j][0] * by, x[j][1] * by, x[j][2] * by, x[j][3] * by};
      const u32 w[2] = {fp16_pair(y[0], y[1]), fp16_pair(y[2], y[3])};
      const u32 rest[2] = {fp16_pair(y[0] - fp16_low(w[0]), y[1] - fp16_high(w[0])), fp16_pair(y[2] - fp16_low(w[1]), y[3] - fp16_high(w[1]))};
      if (4 * (lane + 32 * j) < D) store_words<2>((u8*)row + 8 * (lane + 32 * j), w), store_words<2>((u8*)row + 2 * D + 8 * (lane + 32 * j), rest);
    }
    if (lane == 0) row[D] = unscale_below_one(top);
  }
#endif
  // Into the space of outputs, and out.
  DEV void finish(const Arguments& a, s64 query, int head, int lane) {
    normalise<MERGED_FLAGS>(a, head, lane);
    if constexpr (INVERSE == 1) hadamard<INVERSE_ORDER>(x, lane);
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const int e = 4 * (lane + 32 * j);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (INVERSE == 1 && a.output_signs && e < D) x[j][i] *= a.output_signs[e + i];
      if (INVERSE == 3 && e < D) add_offset(a, head, e, x[j]);
      if (e < D) store_four<INVERSE == 2 ? 2 : QUERY_TYPE>(a.out, query * D + e, x[j]);
    }
    finish_sum(a, query, lane);
  }
  DEV void finish_sum(const Arguments& a, s64 query, int lane) const {
    if (a.lse && lane == 0) a.lse[query] = l > 0.f ? (m + log2_(l)) * 0.69314718055994531f : minus_infinity();
  }
  DEV static void add_offset(const Arguments& a, int head, int e, float* y) {
    float more[4] = {0.f, 0.f, 0.f, 0.f};
    if (a.output_offset) load_four<2>(more, a.output_offset, head % a.output_matrix_heads * D + e);
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] += more[i];
  }
};

#if INVERSE == 3
// Rows that Output::spread made by the matrix in shared memory, and to where `store` puts them; both parts of eight rows are one product's.
template <class Store> DEV void multiply_outputs(const float* rows, const u8* matrix, float power, int count, Store store) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < (TILE_HEADS + 7) / 8; r++) {
    const float* row = rows + min(g + 8 * r, count - 1) * OUTPUT_ROW;
    const float by = row[D] * power;
    u32 x[2][D / 8];
#pragma unroll
    for (int part = 0; part < 2; part++) load_words<D / 8>(x[part], (const u8*)row + part * 2 * D + t * (D / 2));
    multiply_shared(x, matrix, [&](int tile, const float (*c)[4]) {
      float y[4] = {(c[0][0] + c[0][2]) * by, (c[0][1] + c[0][3]) * by, (c[1][0] + c[1][2]) * by, (c[1][1] + c[1][3]) * by};
      if (g + 8 * r < count) store(g + 8 * r, tile * 16 + 4 * t, y);
    });
  }
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS) kvant_decode(const Arguments a) {
  DYNAMIC_SHARED(dynamic);
  __shared__ __align__(16) Shared sh;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u8* stages = dynamic + warp * WARP_BYTES;
  float* outputs = (float*)dynamic;  // [WARPS][TILE_HEADS, OUTPUT_ROW], each warp's where its pages were
  constexpr int OUTPUT_STRIDE = WARP_BYTES / 4;
  static_assert(WARP_BYTES >= STAGES * RUN && WARP_BYTES >= 4 * LANE_HEADS * OUTPUT_ROW * 4, "a warp's bytes hold its pages, then its outputs");

  begin_copies(sh.barrier[warp], STAGES, lane);
  u8* matrix = dynamic + WARPS * WARP_BYTES;  // of queries, or of outputs
#if DUAL == 3 || INVERSE == 3
  int there = (DUAL == 3 ? a.matrix_heads : a.output_matrix_heads) == 1 ? 0 : -1;  // the head whose matrix is there: of queries, if they have one
  if (there == 0) copy_matrix(matrix, DUAL == 3 ? a.query_matrix : a.output_matrix, 0);
#endif
  if (DUAL != 2) wait_prior_grid();
  launch_dependent_grids();  // outputs by a matrix, or the next call
  int booked = -1;  // whose codebooks are in shared memory

  // Which part of all units is this block's. Where there are several blocks for every (sequence, head), each of those is cut into
  // as many equal parts as fit, so that no block has two of them; a unit is then such a part.
  const int own = lane < a.batch ? work_of(a, lane).units : 0;
  int all = own;
  for (int i = lane + 32; i < a.batch; i += 32) all += work_of(a, i).units;
  all = warp_sum_int(all) * HEAD_TILES;
  int blocks = min((int)gridDim.x, max(1, all / (WARPS * 2)));  // two pages a warp, or it is not worth a block
  const bool split = blocks >= 3 * a.batch * HEAD_TILES;
  const float share = __fdividef((float)blocks, (float)all);
  Deal deal = {1, 0};
  if (split) {
    blocks = lane < a.batch ? parts_of(own, share) : 0;
    for (int i = lane + 32; i < a.batch; i += 32) blocks += parts_of(work_of(a, i).units, share);
    blocks = warp_sum_int(blocks) * HEAD_TILES;
  } else {
    deal = {all / blocks, all % blocks};
  }
  const u32 room = shared_address_register(stages), barriers = shared_address_register(sh.barrier[warp]);
  u32 read = 0;  // runs of this warp
  for (int part = blockIdx.x; part < blocks; part += gridDim.x) {
  int now = deal.start(part), b, before;
  const int end = deal.start(part + 1);
  find<HEAD_TILES>(a, now, split, share, own, lane, b, before);
  while (now < end) {
    const Work found = work_of(a, b);
    if (lane == 0) sh.work[warp] = found;
    const int units = split ? parts_of(found.units, share) : found.units;
    const int head_tile = quotient(now - before, units), head = head_tile / QUERY_TILES, query_tile = head_tile % QUERY_TILES;
    const int start = before + head_tile * units;
    const int from = now - start, to = min(end, start + units) - start;
    int page_from = max(from - found.overlay_units * OVERLAY_UNITS, 0), page_to = min(max(to - found.overlay_units * OVERLAY_UNITS, 0), found.weight);
    int window_from = (from + OVERLAY_UNITS - 1) / OVERLAY_UNITS, window_to = min(found.overlay_units, (to + OVERLAY_UNITS - 1) / OVERLAY_UNITS);
    if (split) {  // the same share of both; where one part ends, the next one begins
      const float each = __fdividef(1.f, (float)units);
      const auto portion = [&](int i, int whole) { return i == units ? whole : (int)((float)(i * whole) * each); };
      page_from = portion(from, found.weight), page_to = portion(to, found.weight);
      window_from = portion(from, found.overlay_units), window_to = portion(to, found.overlay_units);
    }
    // A warp's share of the block's windows and pages: windows in turn, so that the first `more` warps have one more than the others, which
    // have `each`; pages in one stretch, fewer where it has more of the windows.
    const int own_windows = max(0, window_to - window_from), own_pages = max(0, page_to - page_from);
    const int each = own_windows / WARPS, more = own_windows % WARPS, level = own_windows * OVERLAY_UNITS;
    int quota = (level + own_pages + WARPS - 1) / WARPS;  // of units
    if (own_pages <= (WARPS - more) * OVERLAY_UNITS) quota = each * OVERLAY_UNITS + quotient(own_pages + WARPS - more - 1, WARPS - more);
    const int less = max(0, quota - (each + 1) * OVERLAY_UNITS), usual = quota - each * OVERLAY_UNITS;  // pages of warps with one more, and of the others
    page_from += min(warp, more) * less + max(0, warp - more) * usual;
    page_to = min(page_to, page_from + (warp < more ? less : usual));
    page_from = page_at_unit(page_from, found.pages, found.mixed), page_to = page_at_unit(page_to, found.pages, found.mixed);
    const volatile Work& w = sh.work[warp];
    __syncwarp();

    // the first copies are on their way while the query is prepared
    const s64* block_table = a.block_table + (s64)b * a.block_table_width + found.page;
    const u8* own_runs = a.pages + head * RUN;
    u32 next[STAGES + 1];  // pages, asked for all at once
#pragma unroll
    for (int i = 0; i <= STAGES; i++) next[i] = page_from + i < page_to ? (u32)block_table[page_from + i] : 0u;
    const int query_head = head * GROUP + query_tile * TILE_HEADS;
    const int count = min(TILE_HEADS, GROUP - query_tile * TILE_HEADS);
    const s64 query = (s64)b * KV_HEADS * GROUP + query_head;
#if !QUERY_KERNEL
    const int which = DUAL == 3 ? head % a.matrix_heads : 0;
    RawQuery raw;
    if (DUAL != 2) raw.load(a, which, query, count);
#endif
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      const u32 stage = (read + i) % STAGES;
      if (page_from + i < page_to) copy_stage(room + stage * RUN, own_runs + (u64)next[i] * (KV_HEADS * RUN), barriers + stage * 8, lane);
      else no_copy();
    }
    u32 coming = next[STAGES];  // the page to be copied when one has been read
#if PQ
    if (booked < 0 || (KEY_BOOK_HEADS * VALUE_BOOK_HEADS > 1 && booked != head)) {
      KeyBook::load_book<WARPS * 32>(dynamic, a.key_codebooks + (KEY_BOOK_HEADS > 1 ? head : 0) * KeyBook::ENTRIES * KeyBook::ENTRY);
      ValueBook::load_book<WARPS * 32>(dynamic, a.value_codebooks + (VALUE_BOOK_HEADS > 1 ? head : 0) * ValueBook::ENTRIES * ValueBook::ENTRY);
      booked = head;
      __syncthreads();
    }
#endif
#if OVERLAY_TOKENS
    constexpr int TOKENS = 16 * OVERLAY_TILES;
    const s64 overlay_row = found.overlay_row;
    const auto tile_at = [&](int i) { return i >= w.sink_units ? w.recent_begin + (i - w.sink_units) * TOKENS : w.low + i * TOKENS; };
    const auto tile_end = [&](int i) { return min(tile_at(i) + TOKENS, i >= w.sink_units ? w.n : w.sink_end); };
    // Where queries are turned, windows are on their way while those are waited for. Elsewhere asking for windows took longer than it saved, as far as it was measured:
    // not for keys of groups.
    if (ROPE_BLOCK || KEY_GROUP)
      for (int i = window_from + warp; i < window_to; i += WARPS) prefetch_overlay(a, tile_at(i), tile_end(i), overlay_row, head, lane);
#endif
    if (DUAL == 2) wait_prior_grid();  // what was read so far, the kernel of the queries does not write
#if QUERY_KERNEL
    const QueryOperand* operands = a.operands + ((s64)b * HEAD_TILES + head_tile) * a.rope_blocks;
#else
#if DUAL == 3
    if (there != which) copy_matrix(matrix, a.query_matrix, there = which);
#endif
    if (DUAL == 2) raw.load(a, which, query, count);
    load_shared_query(sh.query, a, raw, matrix, query, count);
#endif
#if INVERSE == 3
    const int by = head % a.output_matrix_heads;  // whose matrix outputs are multiplied by
    if (DUAL == 3 || there != by) copy_matrix(matrix, a.output_matrix, by), there = DUAL == 3 ? -1 : by;
#endif
    OnlineSoftmax softmax;
    softmax.clear();
    const auto attend_windows = [&]() {
#if OVERLAY_TOKENS
      for (int i = window_from + warp; i < window_to; i += WARPS) {
        const int at = tile_at(i), last = tile_end(i);
#if ROPE_BLOCK
        for (int some = at; some < last;) {  // tokens of one block of positions at a time
          const int until = min(last, rope_block_end(a, some));
          const int block = rope_block_of(a, some), slot = overlay_slot(block, rope_block_of(a, w.n - 1));
          const float* rows = a.query_rows + (((s64)b * HEAD_TILES + head_tile) * OVERLAY_SLOTS + slot) * TILE_HEADS * D;
          attend_overlay(a, at, some, until, overlay_row, head, lane, operands[block], rows, softmax);
          some = until;
        }
#elif QUERY_KERNEL
        attend_overlay(a, at, at, last, overlay_row, head, lane, *operands, a.query_rows + query * D, softmax);
#else
        attend_overlay(a, at, at, last, overlay_row, head, lane, sh.query, sh.query.rows, softmax);
#endif
      }
#endif
    };
    if (OVERLAY_TOKENS && !OVERLAY_LAST) attend_windows(), scale_accumulators(softmax);
    QueryFragment q;
#if ROPE_BLOCK
    constexpr int LAST_LINE = (sizeof(QueryOperand) + 127) / 128;
    int block = -1;
#elif QUERY_KERNEL
    load_query(q, *operands, lane, a.scale);
#else
    load_query(q, sh.query, lane, a.scale);
#endif
    const int packed = w.packed, packed_end = w.packed_end, first_page = w.page;
#if KEY_GROUP
    const int keys = w.keys, values = w.values;
#endif
#if !KEY_GROUP && !PQ
    KeyWords<CHUNK> key_words;
    if (PIPELINED && page_from < page_to) {
      await_stage(barriers + read % STAGES * 8, read / STAGES & 1);
      key_words.load({room + read % STAGES * RUN}, 0, lane);
    }
#endif
    for (int page = page_from; page < page_to; page++) {
      const u32 stage = read % STAGES;
#if KEY_GROUP || PQ
      await_stage(barriers + stage * 8, read / STAGES & 1);
      const PageHead page_head = stages + stage * RUN;
      read++;
#else
      if (!PIPELINED) await_stage(barriers + stage * 8, read / STAGES & 1);
      const PageHead page_head = {room + stage * RUN};
      read++;
      NextPage coming_page = {{room + read % STAGES * RUN}, barriers + read % STAGES * 8, read / STAGES & 1, true, true};
      if (PIPELINED) coming_page.ready = page + 1 >= page_to || stage_ready(coming_page.barrier, coming_page.parity);
#endif
#if KEY_GROUP
      q.entered = -1;
#endif
#pragma unroll 1
      for (int tile = 0; tile < TILES; tile += CHUNK) {
        const int at = ORIGIN + (first_page + page) * PAGE + tile * 16;
        if (TILES > CHUNK && (at + 16 * CHUNK <= packed || at >= packed_end)) continue;
#if ROPE_BLOCK
        for (int some = max(at, packed), end = min(at + 16 * CHUNK, packed_end); some < end;) {  // tokens of one block of positions at a time
          const int until = min(end, rope_block_end(a, some));
          if (rope_block_of(a, some) != block) {
            block = rope_block_of(a, some);
            load_query(q, operands[block], lane, a.scale);
            if (block + 1 < a.rope_blocks && lane <= LAST_LINE) prefetch_l1((const u8*)(operands + block + 1) + min(lane * 128, (int)sizeof(QueryOperand) - 4));
          }
#if PQ
          attend_page(page_head, tile, at, some, until, lane, q, softmax, a.cap, dynamic);
#else
          coming_page.wanted = until == end;
          attend_page(key_words, coming_page, page_head, tile, at, some, until, lane, q, softmax, a.cap);
#endif
          some = until;
        }
#elif KEY_GROUP
        if (at + 16 * CHUNK <= min(keys, values) || keys == values) {
          attend_page(page_head, tile, at, packed, packed_end, lane, q, softmax, a.cap);
        } else {
#pragma unroll 1
          for (int i = 0; i < CHUNK; i += MIXED_TILES)
            if (at + 16 * (i + MIXED_TILES) > packed && at + 16 * i < packed_end)
              attend_mixed(a, page_head, tile + i, at + 16 * i, packed, packed_end, keys, values, overlay_row, head, lane, q, softmax);
        }
#elif PQ
        attend_page(page_head, tile, at, packed, packed_end, lane, q, softmax, a.cap, dynamic);
#else
        attend_page(key_words, coming_page, page_head, tile, at, packed, packed_end, lane, q, softmax, a.cap);
#endif
      }
      __syncwarp();
      if (page + STAGES < page_to) {
        copy_stage(room + stage * RUN, own_runs + (u64)coming * (KV_HEADS * RUN), barriers + stage * 8, lane);
        if (page + STAGES + 1 < page_to) coming = (u32)block_table[page + STAGES + 1];
      } else no_copy();
    }

    unscale_accumulators(softmax, t);
    if (OVERLAY_LAST) attend_windows();

    // a warp's lanes together
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++)
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        softmax.l[h] += __shfl_xor_sync(FULL, softmax.l[h], o);
        softmax.z[h] += __shfl_xor_sync(FULL, softmax.z[h], o);
        if (VALUE_FLAG) softmax.flags[h] += __shfl_xor_sync(FULL, softmax.flags[h], o);
      }
#if PQ
#pragma unroll
    for (int n = 0; n < LANE_HEADS; n++)
      if (4 * n + t < TILE_HEADS)
#pragma unroll
        for (int k = 0; k < ACC_STEPS; k++) {
          const float* x = softmax.acc[n][k];
          ((float4*)(outputs + warp * OUTPUT_STRIDE + (4 * n + t) * OUTPUT_ROW + g * (D / 8)))[k] = make_float4(x[0], x[1], x[2], x[3]);
        }
#else
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const auto& x = softmax.acc[n];
#pragma unroll
      for (int j = 0; j < (PAIRED ? 1 : 2); j++) {
        const int h = PAIRED ? 0 : (2 * n + j) % LANE_HEADS;
        if (4 * h + t < TILE_HEADS) {
          float* o = outputs + warp * OUTPUT_STRIDE + (4 * h + t) * OUTPUT_ROW;
#pragma unroll
          for (int k = 0; k < D / 16; k++)
            *(float2*)(o + value_channel(g, 2 * k)) = {(PAIRED ? x[k][0] + x[k][1] : x[k][j]) + softmax.z[h], (PAIRED ? x[k][2] + x[k][3] : x[k][j + 2]) + softmax.z[h]};
        }
      }
    }
#endif
    if (g == 0)
#pragma unroll
      for (int h = 0; h < LANE_HEADS; h++) sh.m[warp][4 * h + t] = softmax.m[h], sh.l[warp][4 * h + t] = softmax.l[h], sh.flags[warp][4 * h + t] = softmax.flags[h];
    if (INVERSE == 3) await_copies();
    __syncthreads();

    // a block's warps together, then blocks: a warp has some query heads
    const bool whole = from == 0 && to == units;
    float* partial = a.partial + ((s64)part * 2 + (from == 0)) * PARTIAL;
    Output out;
    for (int h = warp; h < count; h += WARPS) {
      out.gather(sh, outputs, OUTPUT_STRIDE, h, lane);
#if INVERSE == 3
      out.spread(a, outputs + h * OUTPUT_ROW, head, lane);
      if (whole) out.finish_sum(a, query + h, lane);
      else out.store_sum(partial, h, lane);
#else
      if (whole) out.finish(a, query + h, head, lane);
      else out.store(partial, h, lane);
#endif
    }
#if INVERSE == 3
    __syncthreads();
    multiply_outputs(outputs, matrix, matrix_scale(a.output_matrix, a.output_matrix_heads, by), count, [&](int h, int e, float* y) {
      if (whole) Output::add_offset(a, head, e, y), store_four<QUERY_TYPE>(a.out, (query + h) * D + e, y);
      else store_four<2>(partial, h * D + e, y);
    });
    if (!whole) __syncthreads();
#endif
    if (!whole && warp < count) {
      const int first = split ? start : deal.block(start), last = split ? start + units - 1 : deal.block(start + units - 1);
      int* counter = a.arrivals + (b * HEAD_TILES + head_tile) * min(WARPS, TILE_HEADS) + warp;
      int before_this = 0;
      __syncwarp();
      if (lane == 0) before_this = atomic_add_acq_rel(counter);
      if (__shfl_sync(FULL, before_this, 0) == last - first) {
        if (lane == 0) *counter = 0;
        __syncwarp();
        for (int h = warp; h < count; h += WARPS) out.merge(a.partial, first, last, h, lane), out.finish(a, query + h, head, lane);
      }
    }
    fence_copies();  // the stages were written as memory and will be copied to
    __syncthreads();
    now = start + to;
    if (now == before + units * HEAD_TILES) before = now, b++;
  }
  }
  if (DUAL == 2) wait_prior_grid();  // a block without work, too: the kernel after this one waits for no other
  if (DUAL == 3 || INVERSE == 3) await_copies();
}
