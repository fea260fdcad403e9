// Online softmax of a warp: reference m, sum l and output O of its tokens, for one tile of query heads.
//
// P = 2^(S - m), l = sum P, O^T = V^T P^T. Unlike in FlashAttention m does not follow the maximum: it is set so that the first scores are at most
// REFERENCE (P at most 2^REFERENCE), and moves only when a score exceeds HEADROOM, so that rescaling is rare. P stays inside fp16.

#pragma once
#include "include/decode_shapes.cuh"

// P <= 2^HEADROOM: fp16 ends at 65504 < 2^16, and no rounding passes the factor of four that is left. When m is set, the largest P is 2^REFERENCE:
// scores may rise by HEADROOM - REFERENCE = 8 powers of two before m moves again, and P of 20 powers of two below the largest are still normal
// fp16 numbers (2^-14).
constexpr float HEADROOM = CENTROID_SUMS ? 12.f : 14.f, REFERENCE = 6.f;
// Sums of P by centroid are 32-bit integers of 2^-SUM_BITS. A lane's l is at most LARGEST_SUM before a chunk, else m moves by SUM_STEP: a sum is less than
// 8 lanes 2^14 + 64 tokens 2^HEADROOM < 2^19.
constexpr int SUM_BITS = 13;
constexpr float LARGEST_SUM = 16384.f, SUM_STEP = 8.f;
constexpr int SUM_ROW = 16 * LANE_HEADS;  // bytes of the sums of a centroid: 4 LANE_HEADS query heads
constexpr float LARGEST_PROB = 16384.f;  // 2^HEADROOM
constexpr bool SUM_LIMIT = SHARED_OPERAND;  // update_by_sums, for several queries: the two were measured together, and alone it gains nothing
static_assert(!SUM_LIMIT || (QUERIES > 1 && !PQ), "limit[] is per query head only with several queries");
constexpr float INITIAL_NORM = PQ || (VALUE_GROUPS > 1 && !SCALED_PROBS) ? 1.f : 1099511627776.f;  // 2^40, until a value's scale has been seen

// A score in log2 units, less m. x is 2 log2(e) / cap times the logit with a soft cap: cap tanh(logit / cap) = cap (1 - 2 / (1 + e^(2 logit / cap))).
DEV float soft_cap(float x, float m, float cap) {
  if constexpr (SOFTCAP) return fmaf(cap, 1.f - __fdividef(2.f, 1.f + exp2_(fminf(x, 80.f))), -m);
  else return x - m;
}

// The limit before the first score. Scores are compared as signed integers, of which -0.f is the least, so every score reaches it. Negative scores are in
// reversed order then, but only scores above HEADROOM move m later.
constexpr float FRESH = SUM_LIMIT ? __builtin_bit_cast(float, 0xff800000u) : -0.f;

struct OnlineSoftmax {
  float m[LANE_HEADS];      // reference of the exponents, log2; the same in all lanes of a head
  float l[LANE_HEADS];      // sum of P of the lane's tokens
  float z[LANE_HEADS];      // sum of P times what all channels of a token's value have in common (minimum or zero point)
  float group_z[SCALED_PROBS ? LANE_HEADS : 1][SCALED_PROBS ? VALUE_GROUPS : 1];  // the same of the channels of a scale, times norm
  float flags[LANE_HEADS];  // sum of P over tokens whose value had its mean subtracted
  float acc[ACC_TILES][ACC_STEPS][4];  // O^T, unnormalised, times norm
  float centroids[CENTROID_PRODUCTS ? ACC_TILES : 1][CENTROID_PRODUCTS ? ACC_STEPS : 1][4];  // the part of O^T that is P times the values' centroids
  u32 sums;                            // CENTROID_SUMS: address of the warp's sums of P by centroid, u32 [CENTROIDS][4 LANE_HEADS]
  float bias[COLUMN_TILES][4];         // 1024 * (sum of P over even tokens - over odd tokens); with several scales a token, P times the minima, row minima_row(group, column)
  float norm;                          // power of two: scale * norm <= 1 for every value so far, so that P times scale is an fp16 number
  float limit[QUERIES > 1 ? LANE_HEADS : 1];  // scores that reach it move m: FRESH before the first score, then HEADROOM (SUM_LIMIT: sums of P above it, then 2^HEADROOM). By query where each sees other tokens

  DEV static constexpr int head(int column_tile, int i) { return PQ ? column_tile : PAIRED ? 0 : 2 * column_tile + (i & 1); }  // of column i & 1 of an accumulator

  DEV void clear() {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) m[h] = l[h] = z[h] = flags[h] = 0.f;
    if constexpr (SCALED_PROBS)
#pragma unroll
      for (int i = 0; i < LANE_HEADS * VALUE_GROUPS; i++) group_z[i / VALUE_GROUPS][i % VALUE_GROUPS] = 0.f;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) bias[n][i] = 0.f;
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++)
#pragma unroll
      for (int k = 0; k < ACC_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][k][i] = 0.f;
    if constexpr (CENTROID_PRODUCTS)
#pragma unroll
      for (int i = 0; i < ACC_TILES * ACC_STEPS * 4; i++) centroids[i / 4 / ACC_STEPS][i / 4 % ACC_STEPS][i % 4] = 0.f;
    norm = INITIAL_NORM;
#pragma unroll
    for (int h = 0; h < (QUERIES > 1 ? LANE_HEADS : 1); h++) limit[h] = FRESH;
  }

  // S = s + m in log2 becomes P = 2^s; l += P. `largest` is the largest scale of a value times norm. reload_scales(norm) reads the values' scales again, times
  // another norm, and returns the largest of them. Where a score reaches the headroom, or a scale times norm is above 1, m and norm are moved; most of the time nothing happens. The powers are
  // taken before that is known, which hides their latency.
  template <int N, class Reload> DEV void update(float s[N][LANE_HEADS][2], float largest, Reload reload_scales) {
    if constexpr (SUM_LIMIT) return update_by_sums<N>(s, largest, reload_scales);
    float p[N][LANE_HEADS][2];
    int any = __float_as_int(FRESH);
    [[maybe_unused]] bool beyond = false;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
      int top = __float_as_int(FRESH);  // the largest score, if one is positive
#pragma unroll
      for (int i = 0; i < N; i++) top = max(max(top, __float_as_int(s[i][h][0])), __float_as_int(s[i][h][1])), p[i][h][0] = exp2_(s[i][h][0]), p[i][h][1] = exp2_(s[i][h][1]);
      if constexpr (QUERIES > 1) beyond = beyond || top >= __float_as_int(limit[h % (QUERIES > 1 ? LANE_HEADS : 1)]);
      else any = max(any, top);
      if constexpr (CENTROID_SUMS) beyond = beyond || l[h] > LARGEST_SUM;
    }
    if (__any_sync(FULL, (QUERIES > 1 ? beyond : beyond || any >= __float_as_int(limit[0])) || (!PQ && largest > 1.f))) {
      rescale<N>(s, reload_scales);
#pragma unroll
      for (int h = 0; h < LANE_HEADS; h++)
#pragma unroll
        for (int i = 0; i < N; i++) p[i][h][0] = exp2_(s[i][h][0]), p[i][h][1] = exp2_(s[i][h][1]);
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++)
#pragma unroll
      for (int i = 0; i < N; i++) l[h] += (s[i][h][0] = p[i][h][0]) + (s[i][h][1] = p[i][h][1]);
  }
  // The same with fewer instructions: a head's sum of P of the lane's tokens, which l needs anyway, is compared with the headroom instead of the largest score. The
  // sum is not smaller than the largest P.
  template <int N, class Reload> DEV void update_by_sums(float s[N][LANE_HEADS][2], float largest, Reload reload_scales) {
    float sum[LANE_HEADS], p[N][LANE_HEADS][2];
    const auto powers = [&]() {
#pragma unroll
      for (int h = 0; h < LANE_HEADS; h++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
          p[i][h][0] = exp2_(s[i][h][0]), p[i][h][1] = exp2_(s[i][h][1]);
          const float two = p[i][h][0] + p[i][h][1];
          sum[h] = i ? sum[h] + two : two;
        }
      }
    };
    powers();
    bool beyond = largest > 1.f;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) beyond = beyond || sum[h] > limit[h];
    if (__any_sync(FULL, beyond)) {
      rescale<N>(s, reload_scales);
      powers();
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
      l[h] += sum[h];
#pragma unroll
      for (int i = 0; i < N; i++) s[i][h][0] = p[i][h][0], s[i][h][1] = p[i][h][1];
    }
  }
  // Moves m so that the largest score is REFERENCE, and norm; multiplies sums and accumulators by 2^(m_old - m_new).
  template <int N, class Reload> DEV void rescale(float s[N][LANE_HEADS][2], Reload reload_scales) {
    float ratio = 1.f, factor[LANE_HEADS], largest_scale = reload_scales(1.f);  // without norm, from which the new norm follows
    bool seen = false;  // whether a head of the lane has a score above minus infinity
#pragma unroll
    for (int o = 1; o < 32 * !PQ; o <<= 1) largest_scale = fmaxf(largest_scale, __shfl_xor_sync(FULL, largest_scale, o));
    if (!PQ && largest_scale * norm > 1.f) {
      const int exponent = max(1, min(252, (int)(__float_as_uint(largest_scale) >> 23)));
      const float wanted = fminf(__uint_as_float((u32)(253 - exponent) << 23), norm);
      ratio = __fdividef(wanted, norm);
      norm = wanted;
    }
    reload_scales(norm);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
      float x = minus_infinity();
#pragma unroll
      for (int i = 0; i < N; i++) x = fmaxf(x, fmaxf(s[i][h][0], s[i][h][1]));
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
      [[maybe_unused]] float most = l[h];
      if constexpr (CENTROID_SUMS)
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
      float& bound = limit[QUERIES > 1 ? h : 0];
      const bool fresh = __float_as_int(bound) < 0;
      if (fresh && x == minus_infinity()) {  // this query has seen no token yet
        factor[h] = 1.f;
        continue;
      }
      seen = true;
      x -= REFERENCE;
      float by = fresh ? fmaxf(x, -1e30f) : fmaxf(x, 0.f);
      if (CENTROID_SUMS && most > LARGEST_SUM) by = fmaxf(by, SUM_STEP);
      factor[h] = fresh ? 1.f : exp2_(-by);
      m[h] += by, l[h] *= factor[h];
      if constexpr (!PQ) z[h] *= factor[h], flags[h] *= factor[h];  // with product quantization they stay zero, and take no registers
      if constexpr (SCALED_PROBS)
#pragma unroll
        for (int j = 0; j < VALUE_GROUPS; j++) group_z[h][j] *= factor[h] * ratio;
#pragma unroll
      for (int i = 0; i < N; i++) s[i][h][0] -= by, s[i][h][1] -= by;
      if (QUERIES > 1) bound = SUM_LIMIT ? LARGEST_PROB : HEADROOM;
    }
    if constexpr (CENTROID_PRODUCTS)
#pragma unroll
      for (int i = 0; i < ACC_TILES * ACC_STEPS * 4; i++) centroids[i / 4 / ACC_STEPS][i / 4 % ACC_STEPS][i % 4] *= factor[head(i / 4 / ACC_STEPS, i % 4) % LANE_HEADS];
    if constexpr (CENTROID_SUMS) rescale_sums(factor);
    float own[2 * ACC_TILES];
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) own[2 * n + (i & 1)] = factor[head(n, i)] * ratio;
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++) {
#pragma unroll
      for (int i = 0; i < 4 * !PQ; i++) bias[n][i] *= own[2 * n + (i & 1)];
#pragma unroll
      for (int k = 0; k < ACC_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][k][i] *= own[2 * n + (i & 1)];
    }
    if (QUERIES == 1 && seen) limit[0] = HEADROOM;
  }
  // The sums of P by centroid, times 2^(m_old - m_new): lane (g, t) has centroids g, g + 8, ... of its heads.
  DEV void rescale_sums(const float* factor) {
    const int lane = threadIdx.x & 31;
    __syncwarp();  // all lanes have added their tokens
    for (int c = lane >> 2; c < Value::CENTROIDS; c += 8)
#pragma unroll
      for (int h = 0; h < LANE_HEADS; h++) {
        const u32 at = sums + c * SUM_ROW + (4 * h + (lane & 3)) * 4;
        u32 x;
        load_shared<1>(&x, at);
        store_shared(at, (u32)((float)x * factor[h]));
      }
    __syncwarp();
  }
};

// P as the B operand of P V, for one tile. Where two tiles share the columns (PAIRED), the columns of the other tile are zero.
DEV u32 own_columns(u32 x, int tile, int g) { return !PAIRED || (g & 1) == (tile & 1) ? x : 0u; }

// From overlay to pages: accumulators hold O, codes add code * 2^p * norm. Multiplies rows by 2^p * norm.
DEV void scale_accumulators(OnlineSoftmax& softmax) {
#pragma unroll
  for (int n = 0; n < ACC_TILES * !PQ; n++)
#pragma unroll
    for (int k = 0; k < ACC_STEPS; k++) {
      const float x = softmax.norm * Values::code_step(2 * k), y = softmax.norm * Values::code_step(2 * k + 1);
      softmax.acc[n][k][0] *= x, softmax.acc[n][k][1] *= x, softmax.acc[n][k][2] *= y, softmax.acc[n][k][3] *= y;
    }
}
// And back: removes the 1024 of the codes (bias), takes TOP / 2 off every code, divides by 2^p * norm. What all channels have in common stays in softmax.z.
DEV void unscale_accumulators(OnlineSoftmax& softmax, int t) {
  if constexpr (!PQ) {
  const float back = 1.f / softmax.norm;
  if constexpr (SCALED_PROBS)  // sums over the tokens of all lanes
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++)
#pragma unroll
      for (int j = 0; j < VALUE_GROUPS; j++)
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) softmax.group_z[h][j] += __shfl_xor_sync(FULL, softmax.group_z[h][j], o);
#pragma unroll
  for (int n = 0; n < ACC_TILES; n++)
#pragma unroll
    for (int k = 0; k < ACC_STEPS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float power = 1.f / Values::code_step(2 * k + (i >> 1));
        if constexpr (SCALED_PROBS) {  // PAIRED: both columns are of one head, and are added
          const float rest = PAIRED && (i & 1) ? 0.f : softmax.group_z[OnlineSoftmax::head(n, i) % LANE_HEADS][2 * k / GROUP_SHARE];
          softmax.acc[n][k][i] = fmaf(softmax.acc[n][k][i], power, rest) * back;
        } else if (VALUE_GROUPS > 1) {  // the minima's row of the channels' group
          const float least = __shfl_sync(FULL, softmax.bias[n][i & 1], minima_row(2 * k / GROUP_SHARE, i & 1) * 4 + t);
          softmax.acc[n][k][i] = (softmax.acc[n][k][i] * power + least) * back;
        } else {
          const float bias = softmax.bias[n][i & 1];
          softmax.acc[n][k][i] = ((softmax.acc[n][k][i] - bias) * power - bias * (Values::TOP * 0.5f / 1024.f)) * back;
        }
        if constexpr (CENTROID_PRODUCTS) softmax.acc[n][k][i] += softmax.centroids[n][k][i];
      }
  }
}
