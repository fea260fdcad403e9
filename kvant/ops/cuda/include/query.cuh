// Queries of a tile of heads: from rows in global memory, through the transform into the space of the keys, to operands of the MMAs.
//
//   QueryOperand   what a kernel before decode makes, in global memory (kernels/transform_queries.cu, kernels/rotate_queries.cu); or a warp of decode in shared
//                  memory (rotated_query.cuh)
//   SharedQuery    what a CTA makes itself, in shared memory
//   QueryFragment  a lane's registers, loaded from either
//
// Channel-wise keys have a SharedQuery and a QueryFragment of their own (codecs/channel_pages.cuh).

#pragma once
#include "include/online_softmax.cuh"

constexpr int OPERAND_REGISTERS = Keys::REGISTERS ? Keys::REGISTERS : 1;  // of a lane, for each of its heads

// Of queries in fp16, where keys are coded per channel or have centroids.
// Power of two that scales a query of largest magnitude `top` to 2 .. 4: 16-bit queries stay exact, and times any scale they are fp16 numbers.
DEV float query_power(float top) { return __uint_as_float((255u - (__float_as_uint(top) >> 23)) << 23); }
// The query head of column g of S^T = K Q^T. PAIRED: odd columns hold what fp16 leaves of the even ones.
DEV int query_column(int n, int g) { return PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1); }

// Sums of a query's channels by the groups of channels that have a scale of their own; nothing where there is one group.
template <int GROUPS> struct GroupSums {
  float group_sum[GROUPS][4 * LANE_HEADS];  // by query head
  DEV void set_groups(int h, const float* row, int lane) {  // by one warp
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
      float x = 0.f;
      for (int i = lane; i < D / GROUPS; i += 32) x += row[j * (D / GROUPS) + i];
      x = warp_sum(x);
      if (lane == 0) group_sum[j][h] = x;
    }
  }
};
template <> struct GroupSums<1> {
  DEV void set_groups(int, const float*, int) {}
};

// Query operand of the int8 MMA: two signed bytes, high * 128 + low, in neighbouring columns. Exact in integers: S = (128 high + low) codes. Of
// product quantization: fp16 numbers. One for each (sequence, head tile), and for each RoPE block where there are any.
struct QueryOperand : GroupSums<KEY_GROUPS> {
  u32 f[LANE_HEADS][OPERAND_REGISTERS][32];                   // by lane
  float top[4 * LANE_HEADS];                                  // by query head: max |q|; of rotated queries, divided by the largest weight of a plane
  float sum[4 * LANE_HEADS], bias[4 * LANE_HEADS];            // sum_c q_c, and that of centred levels
  float mean_logit[4 * LANE_HEADS];                           // q . mu, which removing the key mean took off every logit
  float peak[4 * LANE_HEADS];                                 // the largest magnitude of all channels, where the overlay holds keys as they are coded
  DEV float peak_of(int head) const { return peak[head]; }
};

// Rows of queries that the overlay is multiplied by: float32 [D], or two parts of bfloat16 [2, D], high + low (SPLIT_ROWS), in as many bytes.
DEV void store_overlay_query(float* row, int channel, float x, float y) {  // of `channel`, which is even, and the next
  if constexpr (Config::SPLIT_ROWS) {
    const u32 first = bf16_pair(x, y);
    ((u32*)row)[channel / 2] = first, ((u32*)row)[D / 2 + channel / 2] = bf16_pair(x - bf16_low(first), y - bf16_high(first));
  } else *(float2*)(row + channel) = {x, y};
}

struct QueryFragment {
  u32 f[SHARED_OPERAND ? 1 : LANE_HEADS][SHARED_OPERAND ? 1 : OPERAND_REGISTERS];  // B operands. Column g: head g / 2 (+ 4, ...), high byte in even columns, low byte in odd ones
  float factor[LANE_HEADS], bias[LANE_HEADS], sum[LANE_HEADS], mean_logit[LANE_HEADS];  // of the lane's heads t, t + 4, ...
  float group_sum[LANE_HEADS][KEY_GROUPS];  // where there are several groups: GroupSums in steps of the operand
  u32 operand;  // SHARED_OPERAND: address of the lane's part of the operand in shared memory, from which every chunk reads it

  // SHARED_OPERAND: B operand k of head n.
  DEV u32 get(int n, int k) const {
    u32 b;
    load_shared<1>(&b, operand + (n * OPERAND_REGISTERS + k) * 128);
    return b;
  }
};

// sum_c q_c times the middle of the levels of channel c: codes with a scale alone have centred levels, code - TOP / 2.
template <class P> DEV float plane_bias(const float* q, int lane) {
  float x = 0.f;
  for (int i = lane; i < P::WIDTH; i += 32) x -= q[P::FIRST + i] * (P::WEIGHT * P::TOP * 0.5f);
  return x;
}
template <class... P> DEV float centre_bias(KeyPlanes<P...>, const float* q, int lane) { return (plane_bias<P>(q, lane) + ...); }
DEV float centre_bias(KeyPlanes<>, const float*, int) { return 0.f; }
template <class... P> DEV constexpr float largest_weight(KeyPlanes<P...>) {
  float x = 0.f;
  ((x = P::WEIGHT > x ? P::WEIGHT : x), ...);
  return x;
}

template <class I> DEV float centre_bias(CentroidKeys<I>, const float*, int) { return 0.f; }
template <class I> DEV constexpr float largest_weight(CentroidKeys<I>) { return 1.f; }
// What a step of one in the operand stands for, of a query whose largest magnitude is `top`: bytes count whole numbers up to QUERY_TOP; fp16 goes up to 512, a power of
// two, so that 16-bit queries without a transform are exact.
template <class... P> DEV float query_step(KeyPlanes<P...>, float top) { return top * (largest_weight(KeyPlanes<P...>{}) / QUERY_TOP); }
template <class I> DEV float query_step(CentroidKeys<I>, float top) { return __uint_as_float(__float_as_uint(top) & 0x7f800000u) * (1.f / 256.f); }

// round(x * by) of four numbers as 128 high + low in signed bytes. The last bits of a float of 1.5 * 2^23 count whole numbers: those from bit 7 on are the
// high byte, those below the low byte, which is never negative.
DEV void split_bytes(float x0, float x1, float x2, float x3, float by, u32& high, u32& low) {
  constexpr float WHOLE = 12582912.f;
  const u32 w0 = __float_as_uint(fmaf(x0, by, WHOLE)), w1 = __float_as_uint(fmaf(x1, by, WHOLE));
  const u32 w2 = __float_as_uint(fmaf(x2, by, WHOLE)), w3 = __float_as_uint(fmaf(x3, by, WHOLE));
  const u32 one = __byte_perm(w0, w1, 0x5410), two = __byte_perm(w2, w3, 0x5410);
  high = __byte_perm(one << 1, two << 1, 0x7531), low = __byte_perm(one, two, 0x6420) & 0x7f7f7f7fu;
}

// Bytes of TILE_HEADS queries, rows of STRIDE floats, for one plane of the keys' codes. top(head) is the largest magnitude of a row.
template <int THREADS, int STRIDE, class P, class Top> DEV void store_plane(const float* rows, Top top, u32 (*f)[OPERAND_REGISTERS][32]) {
  for (int j = threadIdx.x; j < LANE_HEADS * P::REGISTERS * 32; j += THREADS) {
    const int lane = j % 32, i = j / 32 % P::REGISTERS, n = j / 32 / P::REGISTERS, g = lane >> 2, head = 4 * n + (g >> 1);
    u32 packed = 0;
    if (head < TILE_HEADS) {
      const float by = __fdividef(QUERY_TOP, top(head) * largest_weight(Keys{})) * (P::WEIGHT / (float)(1 << P::raised(i)));
#pragma unroll
      for (int byte = 0; byte < 4; byte++) {
        const int channel = P::channel(i, byte, lane & 3);
        const int whole = channel >= 0 ? __float2int_rn(rows[head * STRIDE + channel] * by) : 0, high = (whole + 64) >> 7;
        packed |= (u32)((g & 1 ? whole - high * 128 : high) & 255) << (8 * byte);
      }
    }
    f[n][P::BEFORE + i][lane] = packed;
  }
}
template <int THREADS, int STRIDE, class Top, class... P> DEV void store_query_planes(KeyPlanes<P...>, const float* rows, Top top, u32 (*f)[OPERAND_REGISTERS][32]) {
  (store_plane<THREADS, STRIDE, P>(rows, top, f), ...);
}
template <int THREADS, int STRIDE, class Top, class I> DEV void store_query_planes(CentroidKeys<I>, const float* rows, Top top, u32 (*f)[OPERAND_REGISTERS][32]) {
  for (int j = threadIdx.x; j < LANE_HEADS * OPERAND_REGISTERS * 32; j += THREADS) {
    const int lane = j % 32, i = j / 32 % OPERAND_REGISTERS, n = j / 32 / OPERAND_REGISTERS, g = lane >> 2, head = 4 * n + (g >> 1);
    const float* x = rows + min(head, TILE_HEADS - 1) * STRIDE + (lane & 3) * (D / 4) + 2 * CentroidKeys<I>::word(i, g);
    const float by = head < TILE_HEADS ? 1.f / query_step(CentroidKeys<I>{}, top(head)) : 0.f;
    f[n][i][lane] = fp16_pair(x[0] * by, x[1] * by);
  }
}

// Query of a CTA in shared memory.
struct SharedQueryBase : GroupSums<KEY_GROUPS> {
  float rows[TILE_HEADS * D];  // in the space of the keys
  float top[4 * LANE_HEADS], sum[4 * LANE_HEADS], bias[4 * LANE_HEADS], mean_logit[4 * LANE_HEADS];  // as QueryOperand's
  u32 f[LANE_HEADS][OPERAND_REGISTERS][32];

  DEV float peak_of(int head) const { return top[head]; }
  // The sum and the bias of a head whose row is there, by one warp.
  DEV void set_head(int h, float total, int lane) {
    const float x = Key::SCALE_FORM == ScaleForm::SCALE ? warp_sum(centre_bias(Keys{}, rows + h * D, lane)) : 0.f;
    if (lane == 0) sum[h] = total, bias[h] = x;
    this->set_groups(h, rows + h * D, lane);
  }
  DEV void store_operand() { store_query_planes<WARPS * 32, D>(Keys{}, rows, [&](int head) { return top[head]; }, f); }
};
struct FusedSharedQuery : SharedQueryBase {
  float tops[WARPS][4 * LANE_HEADS], sums[WARPS][4 * LANE_HEADS];  // of a warp's columns
};
using SharedQuery = Select<FUSED_QUERIES, FusedSharedQuery, SharedQueryBase>;

// A lane's registers of the operand of all its heads.
template <class From> DEV void load_query(QueryFragment& q, const From& sh, int lane, float scale) {  // From: SharedQuery or QueryOperand
#pragma unroll
  for (int n = 0; n < LANE_HEADS; n++) {
    const int head = min(4 * n + (lane & 3), TILE_HEADS - 1);
    q.factor[n] = scale * query_step(Keys{}, sh.top[head]);
    q.bias[n] = sh.bias[head] * scale, q.sum[n] = sh.sum[head] * scale, q.mean_logit[n] = SOFTCAP || ROPE_BLOCK ? sh.mean_logit[head] : 0.f;
    if constexpr (KEY_GROUPS > 1) {
      const float back = __fdividef(1.f, query_step(Keys{}, sh.top[head]));
#pragma unroll
      for (int j = 0; j < KEY_GROUPS; j++) q.group_sum[n][j] = sh.group_sum[j][head] * back;
    }
    if constexpr (!SHARED_OPERAND)
#pragma unroll
    for (int i = 0; i < OPERAND_REGISTERS; i++) q.f[n][i] = sh.f[n][i][lane];
  }
  if constexpr (SHARED_OPERAND) q.operand = shared_address(sh.f[0][0] + lane);
}

// --- a matrix in shared memory ------------------------------------------------------------------------------------------

// Matrices are B fragments of fp16 [heads or 1, D / 16, D / 16, 32 lanes] of 16 bytes, then the scale of each matrix, float [heads or 1]: fragments.py.
constexpr int MATRIX_BYTES = 2 * D * D;
// cp.async by all threads. All CTAs copy in the same order: they wait less than where they begin in different places.
DEV void copy_matrix(u8* to, const uint4* matrices, int which) {
  const u8* from = (const u8*)matrices + (s64)which * MATRIX_BYTES;
  for (int i = threadIdx.x * 16; i < MATRIX_BYTES; i += WARPS * 32 * 16) copy16(to + i, from + i);
}
DEV float matrix_scale(const uint4* matrices, int count, int which) { return __ldg((const float*)matrices + count * (MATRIX_BYTES / 4) + which); }

// Y = X M for 16 rows of X (a lane holds rows g and g + 8) and M in shared memory. A warp takes tiles warp, warp + WARPS, ... of 16 columns; a lane gets
// columns 16 tile + 4t to 16 tile + 4t + 3 of its rows: store(tile, c).
template <class Store> DEV void multiply_shared(const u32 (*x)[D / 8], const u8* matrix, Store store) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int tile = warp; tile < D / 16; tile += WARPS) {
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 m[4];
      load_words<4>(m, matrix + ((tile * (D / 16) + k) * 32 + lane) * 16);
      mma_fp16(c[0], x[0][2 * k], x[1][2 * k], x[0][2 * k + 1], x[1][2 * k + 1], m[0], m[1]);
      mma_fp16(c[1], x[0][2 * k], x[1][2 * k], x[0][2 * k + 1], x[1][2 * k + 1], m[2], m[3]);
    }
    store(tile, c);
  }
}

// --- rows of queries ------------------------------------------------------------------------------------------------------

// Queries are read from global memory before pages are copied: behind those they would arrive last.
//
// For the matrix of the decode kernel itself: A operands, rows g and g + 8, the same in every warp.
struct RawFragments {
  u32 x[2][D / 8];
  float power;

  DEV void load(const DecodeArguments& a, int which, s64 query, int heads) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    power = matrix_scale(a.query_matrix, a.matrix_heads, which);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (8 * r < TILE_HEADS) load_words<D / 8>(x[r], (const u8*)a.query + ((query + min(g + 8 * r, heads - 1)) * D + t * (D / 4)) * 2);
      else
#pragma unroll
        for (int e = 0; e < D / 8; e++) x[r][e] = 0u;
    }
  }
};
// One by one: a warp holds rows warp, warp + WARPS, ...
struct RawRows {
  static constexpr int EACH = (TILE_HEADS + WARPS - 1) / WARPS;
  Quad<Config::QUERY_TRANSFORM == QueryTransform::MATRIX ? 2 : Config::QUERY_TYPE> x[EACH][LANE_QUADS];
  Quad<2> signs[LANE_QUADS];

  DEV void load(const DecodeArguments& a, int, s64 query, int heads) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const int e = 4 * (lane + 32 * j);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        x[i][j].clear();
        if (e < D && warp + i * WARPS < heads) x[i][j].load(a.query, (query + warp + i * WARPS) * D + e);
      }
      if (Config::QUERY_TRANSFORM == QueryTransform::HADAMARD && a.query_signs && e < D) signs[j].load(a.query_signs, e);
    }
  }
};
using RawQuery = Select<FUSED_QUERIES, RawFragments, RawRows>;

// log2-scaled q . mu of a head: what removing the key mean took off every logit. A soft cap needs it, and so do RoPE blocks,
// between which it differs (QueryFragment); elsewhere softmax cancels it.
template <class A> DEV float load_mean_logit(const A& a, s64 query, int h, int heads) {
  return SOFTCAP && a.mean_logit && h < heads ? a.mean_logit[query + h] * a.scale : 0.f;
}

// sh.rows = Q M for TILE_HEADS queries by a matrix in shared memory. Queries are scaled to magnitudes of at most one by a power of two, as fp16. For
// low batches: waiting for a kernel before would take longer.
template <class Shared> DEV void transform_raw_query(Shared& sh, RawFragments& raw, const u8* matrix, int heads) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  auto& x = raw.x;
  float back[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < (TILE_HEADS + 7) / 8; r++) {
    float top = 1e-30f;
#pragma unroll
    for (int e = 0; e < D / 8; e++) top = fmaxf(top, fmaxf(fabsf(low<Config::QUERY_TYPE>(x[r][e])), fabsf(high<Config::QUERY_TYPE>(x[r][e]))));
    top = quad_max(top);
    const float by = scale_below_one(top);
    back[r] = g + 8 * r < heads ? unscale_below_one(top) * raw.power : 0.f;
#pragma unroll
    for (int e = 0; e < D / 8; e++) x[r][e] = fp16_pair(low<Config::QUERY_TYPE>(x[r][e]) * by, high<Config::QUERY_TYPE>(x[r][e]) * by);
  }
  await_copies();
  __syncthreads();
  float top[2] = {0.f, 0.f}, sum[2] = {0.f, 0.f};
  multiply_shared(x, matrix, [&](int tile, const float (*c)[4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float y[4] = {c[0][2 * r] * back[r], c[0][2 * r + 1] * back[r], c[1][2 * r] * back[r], c[1][2 * r + 1] * back[r]};
      if (g + 8 * r < TILE_HEADS) store_four<2>(sh.rows, (g + 8 * r) * D + tile * 16 + 4 * t, y);
      top[r] = fmaxf(top[r], max_abs(y)), sum[r] += (y[0] + y[1]) + (y[2] + y[3]);
    }
  });
#pragma unroll
  for (int r = 0; r < (TILE_HEADS + 7) / 8; r++) {
    const float most = quad_max(top[r]), all = quad_sum(sum[r]);
    if (t == 0 && g + 8 * r < TILE_HEADS) sh.tops[warp][g + 8 * r] = most, sh.sums[warp][g + 8 * r] = all;
  }
  __syncthreads();
}

// Brings TILE_HEADS queries, from the query-th on, into the space of the keys and makes their operand, in shared memory. Ends with a barrier.
template <class Shared> DEV void load_shared_query(Shared& sh, const DecodeArguments& a, RawFragments& raw, const u8* matrix, s64 query, int heads) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  transform_raw_query(sh, raw, matrix, heads);
  const auto top_of = [&](int h) {
    float top = 1e-30f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, sh.tops[i][h]);
    return top;
  };
  for (int h = warp; h < TILE_HEADS; h += WARPS) {
    const float bias = Key::SCALE_FORM == ScaleForm::SCALE ? warp_sum(centre_bias(Keys{}, sh.rows + h * D, lane)) : 0.f;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sh.sums[i][h];
    if (lane == 0) sh.top[h] = top_of(h), sh.sum[h] = sum, sh.bias[h] = bias, sh.mean_logit[h] = load_mean_logit(a, query, h, heads);
    sh.set_groups(h, sh.rows + h * D, lane);
  }
  store_query_planes<WARPS * 32, D>(Keys{}, sh.rows, top_of, sh.f);
  __syncthreads();
}
template <class Shared> DEV void load_shared_query(Shared& sh, const DecodeArguments& a, RawRows& raw, const u8*, s64 query, int heads) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int own = 0; own < RawRows::EACH; own++) {
    const int h = warp + own * WARPS;
    if (h >= TILE_HEADS) break;
    float x[LANE_QUADS][4], top = 1e-30f, sum = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[j][i] = raw.x[own][j].get(i);
        if (Config::QUERY_TRANSFORM == QueryTransform::HADAMARD && a.query_signs && 4 * (lane + 32 * j) < D) x[j][i] *= raw.signs[j].get(i);
      }
    if constexpr (Config::QUERY_TRANSFORM == QueryTransform::HADAMARD) hadamard<Config::QUERY_HADAMARD>(x, lane);
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      if (4 * (lane + 32 * j) < D) store_four<2>(sh.rows, h * D + 4 * (lane + 32 * j), x[j]);
#pragma unroll
      for (int i = 0; i < 4; i++) top = fmaxf(top, fabsf(x[j][i])), sum += x[j][i];
    }
    sum = warp_sum(sum), top = warp_max(top);
    __syncwarp();
    if (lane == 0) sh.top[h] = top, sh.mean_logit[h] = load_mean_logit(a, query, h, heads);
    sh.set_head(h, sum, lane);
  }
  __syncthreads();
  sh.store_operand();
  __syncthreads();
}
