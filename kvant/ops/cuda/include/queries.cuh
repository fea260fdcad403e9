// Decode attention, 2 of 5: queries, from what comes in to the bytes that keys are multiplied by.

#pragma once
#include "include/online_softmax.cuh"
#include "include/matrix.cuh"

// --- queries ----------------------------------------------------------------------------------------------------------

#if KEY_GROUP
#if BOOSTED
constexpr int HIGH_STEPS = (BOOSTED / 4 + 3) / 4;  // bytes of a lane and token: four channels each
#else
constexpr int HIGH_STEPS = 1;
#endif

// Keys that are coded per channel over groups of tokens: queries times the scales of the group at hand. See groups.cu.
struct SharedQuery {
  float rows[TILE_HEADS * D];  // queries in the space of the keys
  float top[4 * LANE_HEADS], mean_logit[4 * LANE_HEADS];
  // pairs of channels as fp16, four registers of a lane side by side: for the minima, and times 2^-p for codes at bit p
  u32 pairs[COLUMN_TILES][D / 32][32][4], scaled[COLUMN_TILES][D / 32][32][4];
  u8 boosted[WARPS][16 * HIGH_STEPS];  // channels that have two more bits
};
struct QueryFragment {
  u32 k[COLUMN_TILES][D / 8], high[COLUMN_TILES][2 * HIGH_STEPS];
  float factor[LANE_HEADS], back[LANE_HEADS], base[LANE_HEADS], mean_logit[LANE_HEADS];
  int entered;  // the group of the page that they are for
  SharedQuery* prepared;
};
// Queries are brought to a largest magnitude from 2 to 4 by a power of two, so that 16-bit queries lose nothing and times any scale are fp16 numbers.
DEV float query_power(float top) { return __uint_as_float((255u - (__float_as_uint(top) >> 23)) << 23); }
// The query head of column g of the first product, in lane g, t. Where columns are left, odd ones have what fp16 leaves of the even ones.
DEV int query_column(int n, int g) { return PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1); }
DEV float limb(float x, int g) { return PAIRED && (g & 1) ? x - fp16_low(fp16_pair(x, 0.f)) : x; }
#else
struct QueryFragment {
  u32 f[LANE_HEADS][Keys::REGISTERS];             // column g: head g / 2 (+ 4, ...), its high byte in even columns, its low one in odd; or as indices.cu says
  float factor[LANE_HEADS], bias[LANE_HEADS], sum[LANE_HEADS], mean_logit[LANE_HEADS];  // of the lane's heads t, t + 4, ...
};

// What all warps of a block have in common of a query.
struct SharedQuery {
  float rows[TILE_HEADS * D];  // queries in the space of the keys
  float top[4 * LANE_HEADS], sum[4 * LANE_HEADS], bias[4 * LANE_HEADS];
  float mean_logit[4 * LANE_HEADS];  // what all scores of a query are short of before the soft cap, where a mean was taken off the keys
  u32 f[LANE_HEADS][Keys::REGISTERS][32];
#if DUAL == 3
  float tops[WARPS][4 * LANE_HEADS], sums[WARPS][4 * LANE_HEADS];  // of a warp's columns
#endif
};
#endif

DEV float peak_of(const SharedQuery& p, int head) { return p.top[head]; }  // the largest of all channels of a query
DEV float peak_of(const QueryOperand& p, int head) { return p.peak[head]; }

constexpr int LANE_QUADS = (D / 4 + 31) / 32;  // a lane of a row has channels 4 (lane + 32 j) to 4 (lane + 32 j) + 3, where they are fewer than D

DEV float warp_sum(float x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}
DEV float warp_max(float x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
  return x;
}

DEV float max_abs(const float* x) { return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))); }  // magnitude of four numbers
// Powers of two that bring numbers of at most a magnitude below one, and back.
DEV float scale_below_one(float top) { return __uint_as_float((253u - (__float_as_uint(top) >> 23)) << 23); }
DEV float unscale_below_one(float top) { return __uint_as_float(((__float_as_uint(top) >> 23) + 1u) << 23); }

DEV float quad_max(float x) {  // the largest of lanes that share a row of a product
  x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
}
DEV float quad_sum(float x) {
  x += __shfl_xor_sync(FULL, x, 1);
  return x + __shfl_xor_sync(FULL, x, 2);
}

template <int ORDER> DEV void hadamard(float (*x)[4], int lane) {  // of every run of ORDER elements of a warp's row
#pragma unroll
  for (int half = 1; half < ORDER; half *= 2)
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (half >= 4 && half < 128) {
          const float other = __shfl_xor_sync(FULL, x[j][i], half / 4);
          x[j][i] = lane & half / 4 ? other - x[j][i] : x[j][i] + other;
        } else if (half < 4 ? !(i & half) : !(j & half / 128)) {
          float &first = x[j][i], &second = x[half < 4 ? j : (j + half / 128) % LANE_QUADS][half < 4 ? (i + half) % 4 : i];
          const float sum = first + second;
          second = first - second, first = sum;
        }
      }
  const float by = rsqrtf((float)ORDER);
#pragma unroll
  for (int j = 0; j < LANE_QUADS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) x[j][i] *= by;
}

#if KEY_GROUP
DEV void store_fp16_query(SharedQuery& sh) {
  using Codes = KEY_CODES;
  for (int j = threadIdx.x; j < COLUMN_TILES * D / 8 * 32; j += WARPS * 32) {
    const int i = j % (D / 8), lane = j / (D / 8) % 32, n = j / (D / 8) / 32, g = lane >> 2, head = query_column(n, g);
    float x = 0.f, y = 0.f;
    if (head < TILE_HEADS) {
      const float* row = sh.rows + head * D + (lane & 3) * (D / 4) + 2 * i;
      const float by = query_power(sh.top[head]);
      x = limb(row[0] * by, g), y = limb(row[1] * by, g);
    }
    const float less = 1.f / (float)(1 << Codes::power(i));
    sh.pairs[n][i / 4][lane][i % 4] = fp16_pair(x, y);
    sh.scaled[n][i / 4][lane][i % 4] = fp16_pair(x * less, y * less);
  }
}
#else
template <class P> DEV float plane_bias(const float* q, int lane) {  // levels are centred where keys have a scale alone
  float x = 0.f;
  for (int i = lane; i < P::WIDTH; i += 32) x -= q[P::FIRST + i] * (P::WEIGHT * P::TOP * 0.5f);
  return x;
}
template <class... P> DEV float centre_bias(Planes<P...>, const float* q, int lane) { return (plane_bias<P>(q, lane) + ...); }
template <class... P> DEV constexpr float largest_weight(Planes<P...>) {
  float x = 0.f;
  ((x = P::WEIGHT > x ? P::WEIGHT : x), ...);
  return x;
}

template <class I> DEV float centre_bias(KeyIndices<I>, const float*, int) { return 0.f; }
template <class I> DEV constexpr float largest_weight(KeyIndices<I>) { return 1.f; }
// What one is of what queries of a largest magnitude are multiplied by keys as: whole numbers; or fp16 up to 512, a power of two, so
// that 16-bit queries that need no transform lose nothing.
template <class... P> DEV float query_step(Planes<P...>, float top) { return top * (largest_weight(Planes<P...>{}) / QUERY_TOP); }
template <class I> DEV float query_step(KeyIndices<I>, float top) { return __uint_as_float(__float_as_uint(top) & 0x7f800000u) * (1.f / 256.f); }

// Bytes of TILE_HEADS queries, rows of STRIDE floats whose largest magnitudes `top` gives, for a plane of the keys' codes.
template <int THREADS, int STRIDE, class P, class Top> DEV void store_plane(const float* rows, Top top, u32 (*f)[Keys::REGISTERS][32]) {
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
template <int THREADS, int STRIDE, class Top, class... P> DEV void store_query_planes(Planes<P...>, const float* rows, Top top, u32 (*f)[Keys::REGISTERS][32]) {
  (store_plane<THREADS, STRIDE, P>(rows, top, f), ...);
}
template <int THREADS, int STRIDE, class Top, class I> DEV void store_query_planes(KeyIndices<I>, const float* rows, Top top, u32 (*f)[Keys::REGISTERS][32]) {
  for (int j = threadIdx.x; j < LANE_HEADS * Keys::REGISTERS * 32; j += THREADS) {
    const int lane = j % 32, i = j / 32 % Keys::REGISTERS, n = j / 32 / Keys::REGISTERS, g = lane >> 2, head = 4 * n + (g >> 1);
    const float* x = rows + min(head, TILE_HEADS - 1) * STRIDE + (lane & 3) * (D / 4) + 2 * KeyIndices<I>::word(i, g);
    const float by = head < TILE_HEADS ? 1.f / query_step(KeyIndices<I>{}, top(head)) : 0.f;
    f[n][i][lane] = fp16_pair(x[0] * by, x[1] * by);
  }
}

#endif

// --- a matrix in shared memory ------------------------------------------------------------------------------------------

#if DUAL == 3 || INVERSE == 3
// Matrices are fp16 [heads or 1, D / 16, D / 16, 32] fragments of 16 bytes, then what each is to be multiplied by: floats [heads or 1]; see fragments.py.
constexpr int MATRIX_BYTES = 2 * D * D;
// By the block's threads, in all blocks in the same order: where blocks began in different places, all waited longer.
DEV void copy_matrix(u8* to, const uint4* matrices, int which) {
  const u8* from = (const u8*)matrices + (s64)which * MATRIX_BYTES;
  for (int i = threadIdx.x * 16; i < MATRIX_BYTES; i += WARPS * 32 * 16) copy16(to + i, from + i);
}
DEV float matrix_scale(const uint4* matrices, int count, int which) { return __ldg((const float*)matrices + count * (MATRIX_BYTES / 4) + which); }

// Rows g and g + 8 by the matrix, each warp some tiles of 16 columns: of those a lane has four from 16 tile + 4 t on.
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
#endif

#if DUAL == 3
// Queries as they come, asked for before pages are: behind those they would arrive last. Rows g and g + 8 of a product, of every warp.
struct RawQuery {
  u32 x[2][D / 8];
  float power;

  DEV void load(const Arguments& a, int which, s64 query, int heads) {
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
// TILE_HEADS queries by a matrix in shared memory: fp16, once a power of two brings queries to magnitudes of at most
// one. Each warp has some tiles of 16 columns. For few sequences: a kernel before would have to be waited for.
DEV void transform_raw_query(SharedQuery& sh, RawQuery& raw, const u8* matrix, int heads) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  auto& x = raw.x;
  float back[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < (TILE_HEADS + 7) / 8; r++) {
    float top = 1e-30f;
#pragma unroll
    for (int e = 0; e < D / 8; e++) top = fmaxf(top, fmaxf(fabsf(low<QUERY_TYPE>(x[r][e])), fabsf(high<QUERY_TYPE>(x[r][e]))));
    top = quad_max(top);
    const float by = scale_below_one(top);
    back[r] = g + 8 * r < heads ? unscale_below_one(top) * raw.power : 0.f;
#pragma unroll
    for (int e = 0; e < D / 8; e++) x[r][e] = fp16_pair(low<QUERY_TYPE>(x[r][e]) * by, high<QUERY_TYPE>(x[r][e]) * by);
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
#else
// Queries as they come, asked for before pages are: behind those they would arrive last. Those of a warp are the warp-th and every WARPS-th after it.
struct RawQuery {
  static constexpr int EACH = (TILE_HEADS + WARPS - 1) / WARPS;
  Quad<DUAL == 2 ? 2 : QUERY_TYPE> x[EACH][LANE_QUADS];
  Quad<2> signs[LANE_QUADS];

  DEV void load(const Arguments& a, int, s64 query, int heads) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const int e = 4 * (lane + 32 * j);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        x[i][j].clear();
        if (e < D && warp + i * WARPS < heads) x[i][j].load(a.query, (query + warp + i * WARPS) * D + e);
      }
      if (DUAL == 1 && a.query_signs && e < D) signs[j].load(a.query_signs, e);
    }
  }
};
#endif

template <class A> DEV float load_mean_logit(const A& a, s64 query, int h, int heads) {  // Arguments or DualArguments
  return SOFTCAP && a.mean_logit && h < heads ? a.mean_logit[query + h] * a.scale : 0.f;
}

// Brings TILE_HEADS queries, from the query-th on, into the space of the keys, and makes their bytes. Every query is brought to the same
// largest magnitude.
DEV void load_shared_query(SharedQuery& sh, const Arguments& a, RawQuery& raw, const u8* matrix, s64 query, int heads) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#if DUAL == 3
  transform_raw_query(sh, raw, matrix, heads);
  const auto top_of = [&](int h) {
    float top = 1e-30f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, sh.tops[i][h]);
    return top;
  };
  for (int h = warp; h < TILE_HEADS; h += WARPS) {
    const float bias = KEY_META == 2 ? warp_sum(centre_bias(Keys{}, sh.rows + h * D, lane)) : 0.f;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sh.sums[i][h];
    if (lane == 0) sh.top[h] = top_of(h), sh.sum[h] = sum, sh.bias[h] = bias, sh.mean_logit[h] = load_mean_logit(a, query, h, heads);
  }
  store_query_planes<WARPS * 32, D>(Keys{}, sh.rows, top_of, sh.f);
#else
#pragma unroll
  for (int own = 0; own < RawQuery::EACH; own++) {
    const int h = warp + own * WARPS;
    if (h >= TILE_HEADS) break;
    float x[LANE_QUADS][4], top = 1e-30f, sum = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[j][i] = raw.x[own][j].get(i);
        if (DUAL == 1 && a.query_signs && 4 * (lane + 32 * j) < D) x[j][i] *= raw.signs[j].get(i);
      }
    if constexpr (DUAL == 1) hadamard<DUAL_ORDER>(x, lane);
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      if (4 * (lane + 32 * j) < D) store_four<2>(sh.rows, h * D + 4 * (lane + 32 * j), x[j]);
#pragma unroll
      for (int i = 0; i < 4; i++) top = fmaxf(top, fabsf(x[j][i])), sum += x[j][i];
    }
    sum = warp_sum(sum), top = warp_max(top);
    __syncwarp();
    if (lane == 0) sh.top[h] = top, sh.mean_logit[h] = load_mean_logit(a, query, h, heads);
#if !KEY_GROUP
    const float bias = KEY_META == 2 ? warp_sum(centre_bias(Keys{}, sh.rows + h * D, lane)) : 0.f;
    if (lane == 0) sh.sum[h] = sum, sh.bias[h] = bias;
#endif
  }
  __syncthreads();
#if KEY_GROUP
  store_fp16_query(sh);
#else
  store_query_planes<WARPS * 32, D>(Keys{}, sh.rows, [&](int head) { return sh.top[head]; }, sh.f);
#endif
#endif
  __syncthreads();
}

#if !KEY_GROUP
template <class From> DEV void load_query(QueryFragment& q, const From& sh, int lane, float scale) {  // From: Prepared or Turned
#pragma unroll
  for (int n = 0; n < LANE_HEADS; n++) {
    const int head = min(4 * n + (lane & 3), TILE_HEADS - 1);
    q.factor[n] = scale * query_step(Keys{}, sh.top[head]);
    q.bias[n] = sh.bias[head] * scale, q.sum[n] = sh.sum[head] * scale, q.mean_logit[n] = SOFTCAP || ROPE_BLOCK ? sh.mean_logit[head] : 0.f;
#pragma unroll
    for (int i = 0; i < Keys::REGISTERS; i++) q.f[n][i] = sh.f[n][i][lane];
  }
}

#endif

DEV float soft_cap(float x, float m, float cap) {  // a score in powers of two, less m
#if SOFTCAP
  return fmaf(cap, 1.f - __fdividef(2.f, 1.f + exp2_(fminf(x, 80.f))), -m);  // x is 2 log2(e) / cap times the product
#else
  return x - m;
#endif
}

// --- rows by a matrix ---------------------------------------------------------------------------------------------------------

constexpr int AT_ONCE = 16 / TILE_HEADS, UNIT_ROWS = AT_ONCE * TILE_HEADS;  // sets of queries, and queries, that are rows of one product

struct TransformArguments {
  const void* in;       // queries
  const uint4* matrix;  // [1 or KV_HEADS, D / 16, D / 16, 2, 32], see fragments.py
  const float* mean_logit;    // as decode's
  QueryOperand* out;          // [batch, HEADS]; not where keys are coded over groups of tokens
  float* rows;          // [batch, KV_HEADS * GROUP, D], for windows and such groups
  float scale;
  int batch, matrix_heads, at_once;  // at_once: sequences of a block at a time, at most AT_ONCE; fewer are ready sooner
};

constexpr int TRANSFORM_WARPS = D / 16, TRANSFORM_STEPS = D / 16;
constexpr bool MATRIX_IN_REGISTERS = D <= 128;  // whether a warp's columns of the matrix stay in registers

// A quarter of a row's channels as pairs of bfloat16, the larger part first. One part holds bfloat16 itself.
template <int TYPE> struct Bf16Row {
  static constexpr int PARTS = TYPE == 0 ? 1 : 2, WORDS = TYPE == 2 ? D / 4 : D / 8;
  u32 x[PARTS][D / 8];
  DEV void load(const void* in, s64 place, int t) {
    u32 w[WORDS];
    load_words<WORDS>(w, (const u8*)in + place * (TYPE == 2 ? 4 : 2) + t * WORDS * 4);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      if constexpr (TYPE == 0) {
        x[0][i] = w[i];
      } else {
        float y, z;
        if constexpr (TYPE == 1) y = fp16_low(w[i]), z = fp16_high(w[i]);
        else y = __uint_as_float(w[2 * i]), z = __uint_as_float(w[2 * i + 1]);
        x[0][i] = bf16_pair(y, z);
        x[1][i] = bf16_pair(y - bf16_low(x[0][i]), z - bf16_high(x[0][i]));
      }
    }
  }
};

// 16 columns of a matrix in two parts of bfloat16, a warp's. Of the channels of a row lane t has a quarter, one after another, and of the columns four.
struct MatrixColumns {
  const uint4* matrix;
  uint4 held[MATRIX_IN_REGISTERS ? TRANSFORM_STEPS : 1][2];

  DEV void load(const uint4* from) {
    matrix = from;
    if constexpr (MATRIX_IN_REGISTERS)
#pragma unroll
      for (int k = 0; k < TRANSFORM_STEPS; k++) held[k][0] = __ldg(matrix + k * 64), held[k][1] = __ldg(matrix + k * 64 + 32);
  }
  // Rows g and g + 8 by the columns: four numbers each. Sums are float32.
  template <int TYPE> DEV void multiply(const Bf16Row<TYPE>* x, float y[2][4]) {
    float c[2][4] = {}, rest[2][4] = {};  // sums that do not wait for each other
#pragma unroll
    for (int k = 0; k < TRANSFORM_STEPS; k++) {
      if constexpr (!MATRIX_IN_REGISTERS) held[0][0] = __ldg(matrix + k * 64), held[0][1] = __ldg(matrix + k * 64 + 32);
      const uint4 high = held[MATRIX_IN_REGISTERS ? k : 0][0], low = held[MATRIX_IN_REGISTERS ? k : 0][1];
#pragma unroll
      for (int p = Bf16Row<TYPE>::PARTS - 1; p >= 0; p--) {  // the smallest of the products is left out
        const u32 a0 = x[0].x[p][2 * k], a1 = x[1].x[p][2 * k], a2 = x[0].x[p][2 * k + 1], a3 = x[1].x[p][2 * k + 1];
        if (p == 0) mma_bf16(rest[0], a0, a1, a2, a3, low.x, low.y), mma_bf16(rest[1], a0, a1, a2, a3, low.z, low.w);
        mma_bf16(p ? rest[0] : c[0], a0, a1, a2, a3, high.x, high.y), mma_bf16(p ? rest[1] : c[1], a0, a1, a2, a3, high.z, high.w);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) y[r][i] = c[i / 2][2 * r + i % 2] + rest[i / 2][2 * r + i % 2];
  }
};

// Queries on their way in, by the matrix of a head, in two parts of bfloat16, and made into bytes: a block has the queries of AT_ONCE
// sequences at a time, 16 rows, a warp 16 columns.
extern "C" __global__ void __launch_bounds__(TRANSFORM_WARPS * 32) kvant_transform_queries(const TransformArguments a) {
  constexpr int STRIDE = D + 4;  // rows start in different banks
  __shared__ __align__(16) float rows[16 * STRIDE];
  __shared__ float tops[16][TRANSFORM_WARPS + 1], sums[16][TRANSFORM_WARPS + 1];  // of a warp's columns
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = blockIdx.y, head = tile / QUERY_TILES;
  const int query = head * GROUP + tile % QUERY_TILES * TILE_HEADS, heads = min(TILE_HEADS, GROUP - tile % QUERY_TILES * TILE_HEADS);
  MatrixColumns columns;
  columns.load(a.matrix + (s64)(head % a.matrix_heads * TRANSFORM_WARPS + warp) * TRANSFORM_STEPS * 64 + lane);
  wait_prior_grid();       // what makes queries, or writes pages
  launch_dependent_grids();  // then only: decode reads pages before it waits for this kernel
  const int all = a.at_once * TILE_HEADS;  // rows
  for (int first = blockIdx.x * a.at_once; first < a.batch; first += gridDim.x * a.at_once) {
    s64 place[2];
    bool there[2];
    Bf16Row<QUERY_TYPE> x[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = g + 8 * r, b = first + row / TILE_HEADS, h = row % TILE_HEADS;
      there[r] = row < all && b < a.batch && h < heads;
      place[r] = ((s64)min(b, a.batch - 1) * KV_HEADS * GROUP + query + min(h, heads - 1)) * D;
      x[r].load(a.in, place[r], t);
    }
    float products[2][4];
    columns.multiply(x, products);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float* y = products[r];
      const float none[4] = {0.f, 0.f, 0.f, 0.f};
      const int row = g + 8 * r, column = warp * 16 + 4 * t;
      if ((OVERLAY_TOKENS || KEY_GROUP) && there[r]) store_four<2>(a.rows, place[r] + column, y);
      store_four<2>(rows, row * STRIDE + column, there[r] ? y : none);
      const float top = quad_max(max_abs(y)), sum = quad_sum((y[0] + y[1]) + (y[2] + y[3]));
      if (t == 0) tops[row][warp] = there[r] ? top : 0.f, sums[row][warp] = there[r] ? sum : 0.f;
    }
#if !KEY_GROUP
    __syncthreads();
    for (int unit = 0; unit < a.at_once && first + unit < a.batch; unit++) {
      QueryOperand& out = a.out[(s64)(first + unit) * HEAD_TILES + tile];
      const auto top_of = [&](int h) {
        float x = 1e-30f;
#pragma unroll
        for (int i = 0; i < TRANSFORM_WARPS; i++) x = fmaxf(x, tops[unit * TILE_HEADS + h][i]);
        return x;
      };
      if (threadIdx.x < TILE_HEADS) {
        const int h = threadIdx.x;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < TRANSFORM_WARPS; i++) sum += sums[unit * TILE_HEADS + h][i];
        out.top[h] = out.peak[h] = top_of(h), out.sum[h] = sum;
        out.mean_logit[h] = load_mean_logit(a, (s64)(first + unit) * KV_HEADS * GROUP + query, h, heads);
      }
      for (int h = warp; h < TILE_HEADS; h += TRANSFORM_WARPS) {
        const float bias = KEY_META == 2 ? warp_sum(centre_bias(Keys{}, rows + (unit * TILE_HEADS + h) * STRIDE, lane)) : 0.f;
        if (lane == 0) out.bias[h] = bias;
      }
      store_query_planes<TRANSFORM_WARPS * 32, STRIDE>(Keys{}, rows + unit * TILE_HEADS * STRIDE, top_of, out.f);
    }
    __syncthreads();
#endif
  }
}

struct OutputArguments {
  const void* in;
  void* out;
  const float* matrix;     // [heads, D, D]
  const float* offset;     // [heads, D]
  int batch, heads, rows;  // rows of a head and sequence
};
DEV s64 row_place(const OutputArguments& a, int row) { return (((s64)(row / a.rows) * a.heads + blockIdx.y) * a.rows + row % a.rows) * D; }

// Outputs on their way out, in float32, where decode does not multiply them itself: with 16 rows a block on the tensor cores this took longer.
extern "C" __global__ void __launch_bounds__(MATRIX_THREADS) kvant_transform_outputs(const OutputArguments a) {
  const auto begin = []() { launch_dependent_grids(), wait_prior_grid(); };  // outputs come from the kernel before
  times_matrix(
      a.matrix + (s64)blockIdx.y * D * D, a.offset ? a.offset + blockIdx.y * D : nullptr, a.batch * a.rows, begin, [](int, int) {},
      [&](int row, int e) { return ((const float*)a.in)[row_place(a, row) + e]; },
      [&](int row, int e, float y) { store_number<QUERY_TYPE>(a.out, row_place(a, row) + e, y); });
}

// --- queries turned back ------------------------------------------------------------------------------------------------------

#if ROPE_BLOCK
struct RotateArguments {
  const void* query;
  const uint2* matrix;         // [1 or KV_HEADS, TURN_TILES, D / 16, 2 parts, 32]: fragments, see fragments.py
  const float *cosine, *sine;  // [blocks, half]
  QueryOperand* out;
  float* rows;
  const s64 *seq_lens, *sinks, *key_ring_start, *value_ring_start;
  float scale;
  int batch, rope_blocks, first_position, half, matrix_heads, sliding_window;
};

// Columns of the matrix come in tiles of 8: two for each register of the keys, so that what the product leaves in a lane is the four
// bytes of its word; one whose columns are the sum, the bias and what is lost; and the channels in their order.
constexpr int ROTATE_THREADS = ROTATE_WARPS * 32, EACH = Keys::REGISTERS / ROTATE_WARPS;  // registers of the keys that a warp makes
constexpr int SPECIAL = 2 * Keys::REGISTERS, IN_ORDER = SPECIAL + 1, ROTATE_TILES = IN_ORDER + D / 8;
// A warp's part of the matrix is in its registers where they have room, else it is read anew for every product. Sums of the parts are kept
// apart, so that products need not wait for each other, where registers are left.
constexpr int FRAGMENTS = 2 * EACH * (D / 16);  // of 2 TURN_PARTS registers
constexpr bool HELD = FRAGMENTS <= 32;
constexpr int APART = QUERY_PARTS == 2 && FRAGMENTS == 16 ? 3 : 1;
struct Fragment {
  uint2 part[QUERY_PARTS];
};
DEV Fragment fragment(const uint2* matrix, int tile, int k) {  // of a lane's own place in the matrix
  Fragment m;
#pragma unroll
  for (int i = 0; i < QUERY_PARTS; i++) m.part[i] = __ldg(matrix + ((tile * (D / 16) + k) * 2 + i) * 32);
  return m;
}
static_assert(Keys::REGISTERS % ROTATE_WARPS == 0, "warps have as many registers each");
// Where a row of a product lies among those for windows, in floats. Slot and head are added up in 32 bits: of a remainder in 64, the compiler (CUDA
// 13.0 to 13.4) takes a constant out and widens what is left, which may be negative, without its sign.
DEV s64 overlay_query_row(int slot, int row) { return (s64)(slot * TILE_HEADS + row % TILE_HEADS) * D; }

struct RotatePass {  // blocks of positions whose queries are rows of one product
  int found, rows;                                 // whether there is one; whether windows reach into any of them
  int b[AT_ONCE], block[AT_ONCE];                  // of a sequence; -1 where nothing is there
  int place[AT_ONCE], slot[AT_ONCE];               // among all that are turned, and among those that windows reach into, or -1
};
struct RotateShared {
  u32 part[QUERY_PARTS][16][D / 2 + 4];  // turned queries as fp16, and what that leaves; rows start in different banks
  Fragment special[D / 16][32];
  float top[16][ROTATE_WARPS], peak[16][ROTATE_WARPS];
  RotatePass pass[3];  // the one that is stored, the one that is turned, the next
};

// The first pass from block of positions `first` on in which anything is there: tables are wider than sequences are long. A warp looks
// at several passes at once. Returns where to look for the next.
DEV int next_pass(const RotateArguments& a, int first, RotatePass& out, int tile, int lane) {
  constexpr int SOME = 32 / AT_ONCE;
  const int all = a.batch * a.rope_blocks, stride = gridDim.x * AT_ONCE, mine = lane / AT_ONCE, place = lane % AT_ONCE;
  for (; first < all; first += SOME * stride) {
    const int unit = first + mine * stride + place;
    int b = 0, block = -1, slot = -1;
    if (mine < SOME && unit < all) {
      b = unit / a.rope_blocks;
      const int here = unit - b * a.rope_blocks, n = (int)a.seq_lens[b];
      const int begin = (a.first_position / ROPE_TOKENS + here) * ROPE_TOKENS - a.first_position, end = begin + ROPE_TOKENS;  // its tokens
      if (begin < n && !(a.sliding_window > 0 && end <= n - a.sliding_window)) {
        block = here;
#if OVERLAY_TOKENS
        if (begin < min((int)a.sinks[b], n) || end > overlay_start(n, (int)a.key_ring_start[b], (int)a.value_ring_start[b]))
          slot = (b * HEAD_TILES + tile) * OVERLAY_SLOTS + overlay_slot(block, (n - 1 + a.first_position) / ROPE_TOKENS - a.first_position / ROPE_TOKENS);
#endif
      }
    }
    const u32 there = __ballot_sync(FULL, block >= 0);
    if (!there) continue;
    const int which = (__ffs(there) - 1) / AT_ONCE;
    const int rows = __any_sync(FULL, mine == which && slot >= 0);
    if (mine == which) {
      out.b[place] = b, out.block[place] = block, out.slot[place] = slot;
      out.place[place] = block < 0 ? -1 : (b * HEAD_TILES + tile) * a.rope_blocks + block;
    }
    if (lane == 0) out.found = 1, out.rows = rows;
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
  if (QUERY_PARTS == 2) sh.part[QUERY_PARTS - 1][row][channel / 2] = fp16_pair(x - fp16_low(pair), y - fp16_high(pair));
}

// Turns the queries of a pass. A thread has two neighbouring channels and the two that they are turned with, of some heads.
DEV void rotate_rows(const RotateArguments& a, RotateShared& sh, const RotatePass& now, int query, int heads) {
  constexpr int QUADS = D / 4, FEW = TILE_HEADS < 4 ? TILE_HEADS : 4, PARTS = (TILE_HEADS + FEW - 1) / FEW;
#pragma unroll 1
  for (int j = threadIdx.x; j < AT_ONCE * PARTS * QUADS; j += ROTATE_THREADS) {
    const int quad = j % QUADS, from = j / QUADS % PARTS * FEW, unit = j / (QUADS * PARTS), block = now.block[unit];
    if (block < 0) continue;
    const bool rotated = quad < a.half / 2;  // channels past the turned ones stay as they are
    const int c = rotated ? 2 * quad : 4 * quad, other = rotated ? c + a.half : c + 2;
    float2 by = {1.f, 1.f}, across = {0.f, 0.f};
    if (rotated) {
      by = __ldg((const float2*)(a.cosine + (u32)(block * a.half + c)));
      across = __ldg((const float2*)(a.sine + (u32)(block * a.half + c)));
    }
    const u32 place = ((u32)now.b[unit] * KV_HEADS * GROUP + query + from) * D;  // of numbers: a batch of queries is small
    float x[FEW][2], y[FEW][2];
#pragma unroll
    for (int i = 0; i < FEW; i++) {
      x[i][0] = x[i][1] = y[i][0] = y[i][1] = 0.f;
      if (from + i < heads) {
        load_two<QUERY_TYPE>(a.query, place + c, i * D, x[i]);
        load_two<QUERY_TYPE>(a.query, place + other, i * D, y[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < FEW; i++) {
      const int row = unit * TILE_HEADS + from + i;
      if (TILE_HEADS % FEW && from + i >= TILE_HEADS) continue;
      store_parts(sh, row, c, x[i][0] * by.x + y[i][0] * across.x, x[i][1] * by.y + y[i][1] * across.y);
      store_parts(sh, row, other, y[i][0] * by.x - x[i][0] * across.x, y[i][1] * by.y - x[i][1] * across.y);
    }
  }
}

// c += queries times N tiles of the matrix, for its rows from 16 k on. Where both are fp16 in two parts, the smallest of the four products
// is left out.
template <int N> DEV void multiply_parts(float (*c)[N][4], const RotateShared& sh, int k, const Fragment* m, int lane) {
  u32 x[4];
  ldmatrix_x4(x, &sh.part[0][lane % 16][8 * k + lane / 16 * 4]);
#pragma unroll
  for (int n = 0; n < N; n++) mma_fp16(c[0][n], x[0], x[1], x[2], x[3], m[n].part[0].x, m[n].part[0].y);
#if QUERY_PARTS == 2
  u32 y[4];
  ldmatrix_x4(y, &sh.part[1][lane % 16][8 * k + lane / 16 * 4]);
#pragma unroll
  for (int n = 0; n < N; n++) mma_fp16(c[1 % APART][n], y[0], y[1], y[2], y[3], m[n].part[0].x, m[n].part[0].y);
#pragma unroll
  for (int n = 0; n < N; n++) mma_fp16(c[2 % APART][n], x[0], x[1], x[2], x[3], m[n].part[1].x, m[n].part[1].y);
#endif
}
template <int N> DEV void clear(float (*c)[N][4]) {
#pragma unroll
  for (int p = 0; p < APART; p++)
#pragma unroll
    for (int n = 0; n < N; n++) c[p][n][0] = c[p][n][1] = c[p][n][2] = c[p][n][3] = 0.f;
}
template <int N> DEV void gather(float (*c)[N][4]) {  // the sum of what was kept apart, into the first
#pragma unroll
  for (int p = 1; p < APART; p++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[0][n][i] += c[p][n][i];
}

DEV float max_of_warps(const float* x) {
  u32 w[ROTATE_WARPS];
  load_words<ROTATE_WARPS>(w, (const u8*)x);
  float y = 1e-30f;
#pragma unroll
  for (int i = 0; i < ROTATE_WARPS; i++) y = fmaxf(y, __uint_as_float(w[i]));
  return y;
}

// Four numbers times `by`, rounded, as 128 high + low in signed bytes. A float of 1.5 * 2^23 counts whole numbers in its last bits: those from
// the seventh on are the high byte, those below the low one, which is never negative.
DEV void split_bytes(float x0, float x1, float x2, float x3, float by, u32& high, u32& low) {
  constexpr float WHOLE = 12582912.f;
  const u32 w0 = __float_as_uint(fmaf(x0, by, WHOLE)), w1 = __float_as_uint(fmaf(x1, by, WHOLE));
  const u32 w2 = __float_as_uint(fmaf(x2, by, WHOLE)), w3 = __float_as_uint(fmaf(x3, by, WHOLE));
  const u32 one = __byte_perm(w0, w1, 0x5410), two = __byte_perm(w2, w3, 0x5410);
  high = __byte_perm(one << 1, two << 1, 0x7531), low = __byte_perm(one, two, 0x6420) & 0x7f7f7f7fu;
}

// Words of a head's even and odd column, from what a register's two tiles of columns gave.
template <class... P> DEV void make_words(Planes<P...>, const float* x, const float* y, float top, u32& even, u32& odd) {
  split_bytes(x[0], x[1], y[0], y[1], __fdividef(QUERY_TOP, top), even, odd);
}
template <class I> DEV void make_words(KeyIndices<I>, const float* x, const float* y, float top, u32& even, u32& odd) {
  const float by = 1.f / query_step(KeyIndices<I>{}, top);
  even = fp16_pair(x[0] * by, x[1] * by), odd = fp16_pair(y[0] * by, y[1] * by);
}

// Every query turned back to the start of every block of positions that its sequence reaches, brought into the space of the keys and
// made into bytes. A block of threads has the matrix of a head, each warp some columns, and gridDim.x-th of the sequences' blocks.
extern "C" __global__ void __launch_bounds__(ROTATE_THREADS, ROTATE_CTAS) kvant_rotate_queries(const RotateArguments a) {
  __shared__ __align__(16) RotateShared sh;
  const int tile = blockIdx.y, head = tile / QUERY_TILES, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int heads = min(TILE_HEADS, GROUP - tile % QUERY_TILES * TILE_HEADS);
  const int query = head * GROUP + tile % QUERY_TILES * TILE_HEADS;
  const bool spare = warp == ROTATE_WARPS - 1;  // the warp with the least to turn looks ahead and has the special tile
  const uint2* matrix = a.matrix + (s64)(head % a.matrix_heads) * ROTATE_TILES * (D / 16) * 64 + lane;
  Fragment held[HELD ? D / 16 : 1][2 * EACH];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    if (spare) sh.special[k][lane] = fragment(matrix, SPECIAL, k);
    if constexpr (HELD)
#pragma unroll
      for (int n = 0; n < 2 * EACH; n++) held[k][n] = fragment(matrix, warp * EACH * 2 + n, k);
  }
  wait_prior_grid();
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
    for (int r = 0; r < 2; r++) place[r] = g + 8 * r < UNIT_ROWS ? now.place[min((g + 8 * r) / TILE_HEADS, AT_ONCE - 1)] : -1;
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
    if (spare) {
      float c[APART][1][4];
      clear<1>(c);
#pragma unroll
      for (int k = 0; k < D / 16; k++) multiply_parts<1>(c, sh, k, &sh.special[k][lane], lane);
      gather<1>(c);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int h = (g + 8 * r) % TILE_HEADS;
        if (place[r] < 0) continue;
        if (t == 0) a.out[place[r]].sum[h] = c[0][0][2 * r], a.out[place[r]].bias[h] = c[0][0][2 * r + 1];
        if (t == 1) a.out[place[r]].mean_logit[h] = c[0][0][2 * r] * a.scale;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top = 0.f;
#pragma unroll
      for (int n = 0; n < 2 * EACH; n++) top = fmaxf(top, fmaxf(fabsf(sum[n][2 * r]), fabsf(sum[n][2 * r + 1])));
      top = quad_max(top);
      if (t == 0) sh.top[g + 8 * r][warp] = top;
    }
#if OVERLAY_TOKENS
    if (now.rows) {  // the queries themselves, for the windows
      float peak[2] = {0.f, 0.f};
#pragma unroll 1
      for (int n = warp; n < D / 8; n += ROTATE_WARPS) {
        float c[APART][1][4];
        clear<1>(c);
#pragma unroll 2
        for (int k = 0; k < D / 16; k++) {
          const Fragment m = fragment(matrix, IN_ORDER + n, k);
          multiply_parts<1>(c, sh, k, &m, lane);
        }
        gather<1>(c);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = g + 8 * r, unit = min(row / TILE_HEADS, AT_ONCE - 1), slot = row < UNIT_ROWS ? now.slot[unit] : -1;
          peak[r] = fmaxf(peak[r], fmaxf(fabsf(c[0][0][2 * r]), fabsf(c[0][0][2 * r + 1])));
          if (slot >= 0) {
            float* to = a.rows + overlay_query_row(slot, row);
            *(float2*)(to + 8 * n + 2 * t) = {c[0][0][2 * r], c[0][0][2 * r + 1]};
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        peak[r] = quad_max(peak[r]);
        if (t == 0) sh.peak[g + 8 * r][warp] = peak[r];
      }
    }
#endif
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = g + 8 * r, h = row % TILE_HEADS;
      if (place[r] < 0) continue;
      QueryOperand& out = a.out[(u32)place[r]];
      const float top = max_of_warps(sh.top[row]);
      if (warp == 0 && t == 0) {
        out.top[h] = top * (1.f / largest_weight(Keys{}));
        if (now.rows) out.peak[h] = max_of_warps(sh.peak[row]);
      }
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        u32* f = out.f[h / 4][warp * EACH + e] + h % 4 * 8 + t, up, down;
        make_words(Keys{}, sum[2 * e] + 2 * r, sum[2 * e + 1] + 2 * r, top, up, down);
        f[0] = up, f[4] = down;
      }
    }
    constexpr int MISSING = 4 * LANE_HEADS - TILE_HEADS;  // heads that are not there count nothing
    if constexpr (MISSING > 0)
#pragma unroll 1
      for (int j = threadIdx.x; j < AT_ONCE * MISSING * Keys::REGISTERS * 2; j += ROTATE_THREADS) {
        const int unit = j / (MISSING * Keys::REGISTERS * 2), i = j / 2 % Keys::REGISTERS, none = TILE_HEADS + j / 2 / Keys::REGISTERS % MISSING;
        if (now.place[unit] >= 0) *(uint4*)(a.out[now.place[unit]].f[none / 4][i] + none % 4 * 8 + j % 2 * 4) = {0u, 0u, 0u, 0u};
      }
  }
}
#endif
