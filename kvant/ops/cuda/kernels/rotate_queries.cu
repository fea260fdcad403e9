// Query operands for keys that are stored unrotated to the start of their RoPE block: every query, rotated back by the start of every RoPE block that its sequence
// reaches, times the matrix into the space of the keys. This kernel is for low batches, rotate_queries_high_batch.cu for high ones.
//
// Columns of the matrix come in tiles of 8: two for each register of the operand, so that what the MMA leaves in a lane is the four bytes of its word; one
// (SPECIAL) whose columns are the sum, the bias and q . mu.

#pragma once
#include "include/query.cuh"
#include "include/sequence_work.cuh"

constexpr int AT_ONCE = 16 / TILE_HEADS, PASS_ROWS = AT_ONCE * TILE_HEADS;  // head tiles, and query heads, that are rows of one MMA
constexpr int PARTS = Config::QUERY_PARTS;  // fp16 numbers that a query is the sum of
constexpr int ROTATE_THREADS = Config::ROTATE_WARPS * 32, EACH = Keys::REGISTERS / Config::ROTATE_WARPS;  // registers of the keys that a warp makes
constexpr int SPECIAL = 2 * Keys::REGISTERS, ROTATE_TILES = SPECIAL + 1;
// A warp's part of the matrix stays in its registers where they have room (HELD), else it is read anew for every product. Products of high and low parts have
// accumulators of their own (APART) where registers are left, so that MMAs do not wait for each other.
constexpr int FRAGMENTS = 2 * EACH * (D / 16);  // of 2 PARTS registers each
constexpr bool HELD = FRAGMENTS <= 32;
constexpr int APART = PARTS == 2 && FRAGMENTS == 16 ? 3 : 1;
struct Fragment {
  uint2 part[PARTS];
};
DEV Fragment fragment(const uint2* matrix, int tile, int k) {  // `matrix` is the lane's own place
  Fragment m;
#pragma unroll
  for (int i = 0; i < PARTS; i++) m.part[i] = __ldg(matrix + ((tile * (D / 16) + k) * 2 + i) * 32);
  return m;
}
static_assert(Keys::REGISTERS % Config::ROTATE_WARPS == 0, "warps have as many registers each");

// RoPE blocks whose queries are rows of one MMA.
struct RotatePass {
  int found;                       // whether there is a pass
  int b[AT_ONCE], block[AT_ONCE];  // sequence, and RoPE block of it or -1
  int place[AT_ONCE];              // operand of it, or -1
};
struct RotateShared {
  u32 part[PARTS][16][D / 2 + 4];  // rotated queries as fp16, high + low; rows begin in different banks
  Fragment special[D / 16][32];
  float top[16][Config::ROTATE_WARPS];
  RotatePass pass[3];  // the one that is stored, the one that is rotated, the next
};

// Finds the first pass from RoPE block `first` on that has any block: tables are wider than sequences are long. A warp looks at several passes at once. Returns where
// to look for the next.
DEV int next_pass(const RotateQueriesArguments& a, int first, RotatePass& out, int tile, int lane) {
  constexpr int SOME = 32 / AT_ONCE;
  const int all = a.batch * a.rope_blocks, stride = gridDim.x * AT_ONCE, mine = lane / AT_ONCE, place = lane % AT_ONCE;
  for (; first < all; first += SOME * stride) {
    const int pair = first + mine * stride + place;  // (sequence, RoPE block)
    int b = 0, block = -1;
    if (mine < SOME && pair < all) {
      b = pair / a.rope_blocks;
      const int here = pair - b * a.rope_blocks, n = (int)a.seq_lens[b];
      const int begin = (a.first_position / ROPE_TOKENS + here) * ROPE_TOKENS - a.first_position, end = begin + ROPE_TOKENS;  // its tokens
      if (begin < n && !(a.sliding_window > 0 && end <= first_length(n) - a.sliding_window)) block = here;
    }
    const u32 there = __ballot_sync(FULL, block >= 0);
    if (!there) continue;
    const int which = (__ffs(there) - 1) / AT_ONCE;
    if (mine == which) {
      out.b[place] = b, out.block[place] = block;
      out.place[place] = block < 0 ? -1 : (b * HEAD_TILES + tile) * a.rope_blocks + block;
    }
    if (lane == 0) out.found = 1;
    return first + (which + 1) * stride;
  }
  if (lane == 0) out.found = 0;
  return first;
}

template <int TYPE> DEV void load_two(const void* p, u32 place, int i, float* x) {  // numbers place + i and the next
  if constexpr (TYPE == 2) {
    const float2 y = __ldg((const float2*)((const float*)p + place + i));
    x[0] = y.x, x[1] = y.y;
  } else {
    const u32 y = __ldg((const u32*)((const u16*)p + place + i));
    x[0] = low<TYPE>(y), x[1] = high<TYPE>(y);
  }
}
DEV void store_parts(RotateShared& sh, int row, int channel, float x, float y) {
  const u32 pair = fp16_pair(x, y);
  sh.part[0][row][channel / 2] = pair;
  if (PARTS == 2) sh.part[PARTS - 1][row][channel / 2] = fp16_pair(x - fp16_low(pair), y - fp16_high(pair));
}

// Rotates the queries of a pass back by the start of their RoPE block: x' = x cos + y sin, y' = y cos - x sin. A thread has two neighbouring channels x and the two, y,
// that they are rotated with, of some heads.
DEV void rotate_rows(const RotateQueriesArguments& a, RotateShared& sh, const RotatePass& now, int query, int heads) {
  constexpr int QUADS = D / 4, LANE_ROWS = TILE_HEADS < 4 ? TILE_HEADS : 4, HEAD_PARTS = (TILE_HEADS + LANE_ROWS - 1) / LANE_ROWS;
#pragma unroll 1
  for (int j = threadIdx.x; j < AT_ONCE * HEAD_PARTS * QUADS; j += ROTATE_THREADS) {
    const int quad = j % QUADS, from = j / QUADS % HEAD_PARTS * LANE_ROWS, member = j / (QUADS * HEAD_PARTS), block = now.block[member];
    if (block < 0) continue;
    const bool rotated = quad < a.half / 2;  // the other channels stay as they are
    const int c = rotated ? 2 * quad : 4 * quad, other = rotated ? c + a.half : c + 2;
    float2 by = {1.f, 1.f}, across = {0.f, 0.f};
    if (rotated) {
      by = __ldg((const float2*)(a.cosine + (u32)(block * a.half + c)));
      across = __ldg((const float2*)(a.sine + (u32)(block * a.half + c)));
    }
    const u32 place = ((u32)now.b[member] * Config::KV_HEADS * Config::GROUP + query + from) * D;  // in elements; a batch of queries is small
    float x[LANE_ROWS][2], y[LANE_ROWS][2];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      x[i][0] = x[i][1] = y[i][0] = y[i][1] = 0.f;
      if (from + i < heads) {
        load_two<Config::QUERY_TYPE>(a.query, place + c, i * D, x[i]);
        load_two<Config::QUERY_TYPE>(a.query, place + other, i * D, y[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      const int row = member * TILE_HEADS + from + i;
      if (TILE_HEADS % LANE_ROWS && from + i >= TILE_HEADS) continue;
      store_parts(sh, row, c, x[i][0] * by.x + y[i][0] * across.x, x[i][1] * by.y + y[i][1] * across.y);
      store_parts(sh, row, other, y[i][0] * by.x - x[i][0] * across.x, y[i][1] * by.y - x[i][1] * across.y);
    }
  }
}

// c += Q M for N tiles of 8 columns and 16 channels from 16 k on. With high + low parts, the product of the low parts is left out.
template <int N> DEV void multiply_parts(float (*c)[N][4], const RotateShared& sh, int k, const Fragment* m, int lane) {
  u32 x[4];
  ldmatrix_x4(x, &sh.part[0][lane % 16][8 * k + lane / 16 * 4]);
#pragma unroll
  for (int n = 0; n < N; n++) mma_fp16(c[0][n], x[0], x[1], x[2], x[3], m[n].part[0].x, m[n].part[0].y);
  if constexpr (PARTS == 2) {
    u32 y[4];
    ldmatrix_x4(y, &sh.part[PARTS - 1][lane % 16][8 * k + lane / 16 * 4]);
#pragma unroll
    for (int n = 0; n < N; n++) mma_fp16(c[1 % APART][n], y[0], y[1], y[2], y[3], m[n].part[0].x, m[n].part[0].y);
#pragma unroll
    for (int n = 0; n < N; n++) mma_fp16(c[2 % APART][n], x[0], x[1], x[2], x[3], m[n].part[PARTS - 1].x, m[n].part[PARTS - 1].y);
  }
}
template <int N> DEV void clear(float (*c)[N][4]) {
#pragma unroll
  for (int p = 0; p < APART; p++)
#pragma unroll
    for (int n = 0; n < N; n++) c[p][n][0] = c[p][n][1] = c[p][n][2] = c[p][n][3] = 0.f;
}
template <int N> DEV void gather(float (*c)[N][4]) {  // sums accumulators that were apart into the first
#pragma unroll
  for (int p = 1; p < APART; p++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[0][n][i] += c[p][n][i];
}

DEV float max_of_warps(const float* x) {
  u32 w[Config::ROTATE_WARPS];
  load_words<Config::ROTATE_WARPS>(w, (const u8*)x);
  float y = 1e-30f;
#pragma unroll
  for (int i = 0; i < Config::ROTATE_WARPS; i++) y = fmaxf(y, __uint_as_float(w[i]));
  return y;
}

// The words of a head's even and odd column, from the accumulators of a register's two column tiles.
template <class... P> DEV void make_words(KeyPlanes<P...>, const float* x, const float* y, float top, u32& even, u32& odd) {
  split_bytes(x[0], x[1], y[0], y[1], __fdividef(QUERY_TOP, top), even, odd);
}
template <class I> DEV void make_words(CentroidKeys<I>, const float* x, const float* y, float top, u32& even, u32& odd) {
  const float by = 1.f / query_step(CentroidKeys<I>{}, top);
  even = fp16_pair(x[0] * by, x[1] * by), odd = fp16_pair(y[0] * by, y[1] * by);
}

// The special tile: the sum of channels, the bias of centred levels and q . mu of every row of a pass.
DEV void make_sums(const RotateQueriesArguments& a, const RotateShared& sh, const int (&place)[2], int lane) {
  const int g = lane >> 2, t = lane & 3;
  float c[APART][1][4];
  clear<1>(c);
#pragma unroll
  for (int k = 0; k < D / 16; k++) multiply_parts<1>(c, sh, k, &sh.special[k][lane], lane);
  gather<1>(c);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int h = (g + 8 * r) % TILE_HEADS;
    if (place[r] < 0) continue;
    if (t == 0) a.operands[place[r]].sum[h] = c[0][0][2 * r], a.operands[place[r]].bias[h] = c[0][0][2 * r + 1];
    if (t == 1) a.operands[place[r]].mean_logit[h] = c[0][0][2 * r] * a.scale;
  }
}

// Operands of the heads that fill up a lane's heads but do not exist are zero.
DEV void clear_missing(const RotateQueriesArguments& a, const RotatePass& now) {
  constexpr int MISSING = 4 * LANE_HEADS - TILE_HEADS;  // operands of heads that do not exist are zero
  if constexpr (MISSING > 0)
#pragma unroll 1
    for (int j = threadIdx.x; j < AT_ONCE * MISSING * Keys::REGISTERS * 2; j += ROTATE_THREADS) {
      const int member = j / (MISSING * Keys::REGISTERS * 2), i = j / 2 % Keys::REGISTERS, none = TILE_HEADS + j / 2 / Keys::REGISTERS % MISSING;
      if (now.place[member] >= 0) *(uint4*)(a.operands[now.place[member]].f[none / 4][i] + none % 4 * 8 + j % 2 * 4) = {0u, 0u, 0u, 0u};
    }
}

// Grid: (any, HEAD_TILES). A CTA has the matrix of a head, each warp some columns, and every gridDim.x-th pass of RoPE blocks.
extern "C" __global__ void __launch_bounds__(ROTATE_THREADS, Config::ROTATE_CTAS) kvant_rotate_queries(const RotateQueriesArguments a) {
  __shared__ __align__(16) RotateShared sh;
  const int tile = blockIdx.y, head = tile / Config::QUERY_TILES, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int heads = min(TILE_HEADS, Config::GROUP - tile % Config::QUERY_TILES * TILE_HEADS);
  const int query = head * Config::GROUP + tile % Config::QUERY_TILES * TILE_HEADS;
  const bool spare = warp == Config::ROTATE_WARPS - 1;  // the warp with the least to rotate looks ahead and has the special tile
  const uint2* matrix = a.matrix + (s64)(head % a.matrix_heads) * ROTATE_TILES * (D / 16) * 64 + lane;
  Fragment held[HELD ? D / 16 : 1][2 * EACH];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    if (spare) sh.special[k][lane] = fragment(matrix, SPECIAL, k);
    if constexpr (HELD)
#pragma unroll
      for (int n = 0; n < 2 * EACH; n++) held[k][n] = fragment(matrix, warp * EACH * 2 + n, k);
  }
  if (!a.after_append) wait_prior_grid();
  launch_dependent_grids();
  int first = blockIdx.x * AT_ONCE;
  if (spare) first = next_pass(a, first, sh.pass[0], tile, lane);
  __syncthreads();
  for (int at = 0; sh.pass[at].found; at = at == 2 ? 0 : at + 1) {
    const RotatePass& now = sh.pass[at];
    rotate_rows(a, sh, now, query, heads);
    if (spare) first = next_pass(a, first, sh.pass[at == 2 ? 0 : at + 1], tile, lane);
    __syncthreads();
    int place[2];  // of rows g and g + 8
#pragma unroll
    for (int r = 0; r < 2; r++) place[r] = g + 8 * r < PASS_ROWS ? now.place[min((g + 8 * r) / TILE_HEADS, AT_ONCE - 1)] : -1;
    float sums[APART][2 * EACH][4], (*sum)[4] = sums[0];
    clear<2 * EACH>(sums);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      if constexpr (!HELD)
#pragma unroll
        for (int n = 0; n < 2 * EACH; n++) held[0][n] = fragment(matrix, warp * EACH * 2 + n, k);
      multiply_parts<2 * EACH>(sums, sh, k, held[HELD ? k : 0], lane);
    }
    gather<2 * EACH>(sums);
    if (spare) make_sums(a, sh, place, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top = 0.f;
#pragma unroll
      for (int n = 0; n < 2 * EACH; n++) top = fmaxf(top, fmaxf(fabsf(sum[n][2 * r]), fabsf(sum[n][2 * r + 1])));
      top = quad_max(top);
      if (t == 0) sh.top[g + 8 * r][warp] = top;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = g + 8 * r, h = row % TILE_HEADS;
      if (place[r] < 0) continue;
      QueryOperand& out = a.operands[(u32)place[r]];
      const float top = max_of_warps(sh.top[row]);
      if (warp == 0 && t == 0) out.top[h] = top * (1.f / largest_weight(Keys{}));
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        u32* f = out.f[h / 4][warp * EACH + e] + h % 4 * 8 + t, up, down;
        make_words(Keys{}, sum[2 * e] + 2 * r, sum[2 * e + 1] + 2 * r, top, up, down);
        f[0] = up, f[4] = down;
      }
    }
    clear_missing(a, now);
  }
  wait_prior_grid();  // decode waits for this kernel alone
}
