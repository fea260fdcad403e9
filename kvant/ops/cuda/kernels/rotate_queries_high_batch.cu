// What rotate_queries.cu does, for many RoPE blocks: one warp makes a whole product.
//
// A warp reads queries and angles, builds rotated queries in registers as A operands, and multiplies them by a matrix that lies in shared memory once for a CTA:
// nothing goes between lanes but the largest magnitude of a row. Where products are few, rotate_queries.cu has its results sooner, since its warps share the
// columns of one. This kernel serves RoPE that rotates all channels.

#pragma once
#include "kernels/rotate_queries.cu"

// Rows of an MMA are RoPE blocks of one sequence times TILE_HEADS queries.
constexpr int HIGH_BATCH_TILES = SPECIAL + 1, HIGH_BATCH_TILE_PAIRS = HIGH_BATCH_TILES / 2 + 1;  // of columns; they lie in pairs
constexpr int HIGH_BATCH_STEPS = D / 32;                                        // of two MMAs each
constexpr bool SAME_HEAD = 8 % TILE_HEADS == 0;  // both rows of a lane are the same query
static_assert(Keys::REGISTERS % 2 == 0 && D % 32 == 0, "lanes have whole words");

// The matrix of a head, [HIGH_BATCH_TILE_PAIRS pairs of tiles, D / 16, 2 parts, 32 lanes]: the columns of rotate_queries.cu in another order, fragments.py.
DEV const uint4* high_batch_matrix(const RotateQueriesArguments& a, int tile) {
  return (const uint4*)a.matrix + (s64)(tile / Config::QUERY_TILES % a.matrix_heads) * HIGH_BATCH_TILE_PAIRS * (D / 16) * 64;
}

// RoPE blocks [low, high] of a sequence that are attended to.
struct Span {
  int low, high;
  DEV int passes() const { return (high - low + AT_ONCE) / AT_ONCE; }
};
DEV Span span_of(const RotateQueriesArguments& a, int b) {
  const int n = b < a.batch ? (int)a.seq_lens[b] : 0, before = a.first_position / ROPE_TOKENS;
  if (n <= 0) return {0, -1};
  const int high = min((n - 1 + a.first_position) / ROPE_TOKENS - before, a.rope_blocks - 1);
  return {a.sliding_window > 0 ? min((max(0, first_length(n) - a.sliding_window) + a.first_position) / ROPE_TOKENS - before, high + 1) : 0, high};
}

// A warp's passes [begin, end) of all: all warps have as many.
struct Share {
  int begin, end;
};
DEV Share share_of(const RotateQueriesArguments& a, int lane) {
  int all = 0;
  for (int i = lane; i < a.batch; i += 32) all += span_of(a, i).passes();
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) all += __shfl_xor_sync(FULL, all, o);
  const int warps = gridDim.x * Config::HIGH_BATCH_WARPS, warp = (threadIdx.x >> 5) * gridDim.x + blockIdx.x;
  return {(int)((s64)all * warp / warps), (int)((s64)all * (warp + 1) / warps)};
}
// Maps pass `at` to its sequence b and its number there, by a prefix sum over sequences.
DEV void find_pass(const RotateQueriesArguments& a, int lane, int& b, int& at) {
  for (b = 0;; b += 32) {
    const int mine = span_of(a, b + lane).passes();
    int upto = mine;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int other = __shfl_up_sync(FULL, upto, o);
      if (lane >= o) upto += other;
    }
    const u32 after = __ballot_sync(FULL, upto > at);
    if (after) {
      const int which = __ffs(after) - 1;
      b += which, at -= __shfl_sync(FULL, upto - mine, which);
      return;
    }
    at -= __shfl_sync(FULL, upto, 31);
  }
}

// Where a lane's queries and angles lie. It holds channels 4i to 4i + 3 and those D / 2 further, which they are rotated with, for i = 4 step + t: four of each for
// two MMAs.
constexpr int QUERY_BYTES = Config::QUERY_TYPE == 2 ? 4 : 2, LANE_QUERIES = SAME_HEAD ? 1 : 2;
struct LaneQueries {
  const u8* query[LANE_QUERIES];
  u32 angle[2];

  DEV void enter(const RotateQueriesArguments& a, int b, int tile, int g, int t) {
    const int before = tile % Config::QUERY_TILES * TILE_HEADS, heads = min(TILE_HEADS, Config::GROUP - before);
#pragma unroll
    for (int i = 0; i < LANE_QUERIES; i++) {
      const int h = min((g + 8 * i) % TILE_HEADS, heads - 1);  // nobody reads heads that do not exist
      const u32 place = (((u32)b * Config::KV_HEADS + tile / Config::QUERY_TILES) * Config::GROUP + before + h) * D + 4 * t;  // in elements; a batch of queries is small
      query[i] = (const u8*)a.query + (s64)place * QUERY_BYTES;
    }
  }
};
struct Four {
  u32 w[QUERY_BYTES];
  DEV void load(const u8* p) { load_words<QUERY_BYTES>(w, p); }
  DEV float get(int i) const {
    if constexpr (Config::QUERY_TYPE == 2) return __uint_as_float(w[i]);
    else return i % 2 ? high<Config::QUERY_TYPE>(w[i / 2]) : low<Config::QUERY_TYPE>(w[i / 2]);
  }
};
struct RotatedStep {
  Four x[LANE_QUERIES], y[LANE_QUERIES];
  float4 cosine[2], sine[2];

  DEV void load(const RotateQueriesArguments& a, const LaneQueries& rows, int k) {
#pragma unroll
    for (int i = 0; i < LANE_QUERIES; i++) {
      const u8* p = rows.query[i] + 16 * k * QUERY_BYTES;
      x[i].load(p), y[i].load(p + D / 2 * QUERY_BYTES);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) cosine[r] = *(const float4*)(a.cosine + rows.angle[r] + 16 * k), sine[r] = *(const float4*)(a.sine + rows.angle[r] + 16 * k);
  }
  // Row r rotated, as its registers of the A operand of MMA s.
  DEV void rotate(int r, int s, u32 (*out)[4]) const {
    const float by[4] = {cosine[r].x, cosine[r].y, cosine[r].z, cosine[r].w}, across[4] = {sine[r].x, sine[r].y, sine[r].z, sine[r].w};
    float z[2][2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int j = 2 * s + e, i = SAME_HEAD ? 0 : r;
      const float u = x[i].get(j), v = y[i].get(j);
      z[0][e] = u * by[j] + v * across[j], z[1][e] = v * by[j] - u * across[j];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 pair = fp16_pair(z[i][0], z[i][1]);
      out[0][r + 2 * i] = pair;
      if constexpr (PARTS == 2) out[1 % PARTS][r + 2 * i] = fp16_pair(z[i][0] - fp16_low(pair), z[i][1] - fp16_high(pair));
    }
  }
};

// c = Q' M for N tiles of columns; tile(n, step, part) is a lane's share of two tiles. The product of the low parts is left out, as in rotate_queries.cu.
template <int N, int UNROLL, class Tile> DEV void multiply_rotated(float (*c)[4], const RotateQueriesArguments& a, const LaneQueries& rows, Tile tile) {
#pragma unroll
  for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
  RotatedStep now, next;
  next.load(a, rows, 0);
#pragma unroll UNROLL
  for (int k = 0; k < HIGH_BATCH_STEPS; k++) {
    now = next;
    u32 x[2][PARTS][4];
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int r = 0; r < 2; r++) now.rotate(r, s, x[s]);
    if (k + 1 < HIGH_BATCH_STEPS) next.load(a, rows, k + 1);
    __syncwarp();  // reads ahead no further: the next step has registers of its own
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int n = 0; n < N; n += 2)
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          const uint4 w = tile(n / 2, 2 * k + s, p);
#pragma unroll
          for (int i = 0; i < PARTS - p; i++) {
            const u32* y = x[s][i];
            mma_fp16(c[n], y[0], y[1], y[2], y[3], w.x, w.y);
            if (n + 1 < N) mma_fp16(c[(n + 1) % N], y[0], y[1], y[2], y[3], w.z, w.w);
          }
        }
  }
}

// The order of columns lets a lane store whole words side by side: one register of every four, and half a register of the last two where they are left.
DEV void store_operand(QueryOperand& out, const float (*c)[4], int r, int h, int t, float top, bool there) {
  constexpr int WHOLE = Keys::REGISTERS / 4 * 4;
  u32* f = out.f[h / 4][0] + h % 4 * 8;
  u32 high[4], low[4];
#pragma unroll
  for (int k = 0; k < WHOLE; k += 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) make_words(Keys{}, c[2 * (k + i)] + 2 * r, c[2 * (k + i) + 1] + 2 * r, top, high[i], low[i]);
    if (there) {
      store_words<4>((u8*)(f + (k + t) * 32), high);
      store_words<4>((u8*)(f + (k + t) * 32 + 4), low);
    }
  }
  if constexpr (WHOLE < Keys::REGISTERS) {
#pragma unroll
    for (int i = 0; i < 2; i++) make_words(Keys{}, c[2 * (WHOLE + i)] + 2 * r, c[2 * (WHOLE + i) + 1] + 2 * r, top, high[i], low[i]);
    if (there) {
      store_words<2>((u8*)(f + (WHOLE + t / 2) * 32 + t % 2 * 2), high);
      store_words<2>((u8*)(f + (WHOLE + t / 2) * 32 + t % 2 * 2 + 4), low);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::HIGH_BATCH_WARPS * 32, Config::HIGH_BATCH_CTAS) kvant_rotate_queries_high_batch(const RotateQueriesArguments a) {
  DYNAMIC_SHARED(dynamic);
  const int tile = blockIdx.y, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint4* matrix = high_batch_matrix(a, tile);
  uint4* shared = (uint4*)dynamic;
  for (int i = threadIdx.x; i < HIGH_BATCH_TILE_PAIRS * (D / 16) * PARTS * 32; i += Config::HIGH_BATCH_WARPS * 32)
    copy16(shared + i, matrix + (PARTS == 2 ? i : i / 32 * 64 + i % 32));
  if (!a.after_append) wait_prior_grid();  // which makes the queries
  launch_dependent_grids();
  const Share share = share_of(a, lane);
  await_copies();
  __syncthreads();
  shared += lane;
  int left = share.end - share.begin, b, at = share.begin;
  if (left <= 0) return wait_prior_grid();  // decode waits for this kernel alone
  find_pass(a, lane, b, at);
  Span span = span_of(a, b);
  for (span.low += at * AT_ONCE;; span.low += AT_ONCE) {
    while (span.low > span.high) span = span_of(a, ++b);
    const int first = span.low;
    LaneQueries rows;
    rows.enter(a, b, tile, g, t);
#pragma unroll
    for (int r = 0; r < 2; r++) rows.angle[r] = (u32)(min(first + (g + 8 * r) / TILE_HEADS, span.high) * (D / 2) + 4 * t);
    float c[HIGH_BATCH_TILES][4];
    multiply_rotated<HIGH_BATCH_TILES, HIGH_BATCH_STEPS>(c, a, rows, [=](int n, int k, int p) { return shared[((n * (D / 16) + k) * PARTS + p) * 32]; });
    QueryOperand* out = a.operands + (u32)((b * HEAD_TILES + tile) * a.rope_blocks + first);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int member = (g + 8 * r) / TILE_HEADS, h = (g + 8 * r) % TILE_HEADS;
      const bool there = member < AT_ONCE && first + member <= span.high;
      const float* special = c[SPECIAL] + 2 * r;
      float top = 1e-30f;
#pragma unroll
      for (int n = 0; n < SPECIAL; n++) top = fmaxf(top, fmaxf(fabsf(c[n][2 * r]), fabsf(c[n][2 * r + 1])));
      top = quad_max(top);
      store_operand(out[member], c, r, h, t, top, there);
      if (there && t == 0) out[member].top[h] = top * (1.f / largest_weight(Keys{})), out[member].sum[h] = special[0], out[member].bias[h] = special[1];
      if (there && t == 1) out[member].mean_logit[h] = special[0] * a.scale;
    }
    constexpr int MISSING = 4 * LANE_HEADS - TILE_HEADS, WORDS = MISSING * Keys::REGISTERS * 2;  // operands of heads that do not exist are zero
    if constexpr (MISSING > 0)
#pragma unroll 1
      for (int j = lane; j < AT_ONCE * WORDS; j += 32) {
        const int none = TILE_HEADS + j / 2 / Keys::REGISTERS % MISSING;
        if (first + j / WORDS <= span.high)
          *(uint4*)(out[j / WORDS].f[none / 4][j / 2 % Keys::REGISTERS] + none % 4 * 8 + j % 2 * 4) = {0u, 0u, 0u, 0u};
      }
    if (!--left) return wait_prior_grid();
  }
}
