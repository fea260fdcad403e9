// Products of append_step.cu: 16 tokens of a head, a row a warp, times the head's matrix on the tensor cores.
//
//   rows     warp w reads the row of token w as fp16 operands into shared memory; where keys are unrotated, in two parts
//   matrix   two parts of fp16, the smaller one first. Warp w has 16 columns, w / 2, and half w % 2 of the channels, in registers
//   sums     of either half of the channels in float32, to shared memory; warp w takes those of token w back

#pragma once
#include "include/rows.cuh"
#include "include/unrotate.cuh"

constexpr int STEP_TOKENS = 16, STEP_CHANNELS = D / 32;          // tokens of a tile; channels of a lane
constexpr int OPERAND_WORDS = D / 2 + 4, SUM_FLOATS = D + 8;     // of a row, so that lanes read and write different banks
static_assert(Config::STEP_WARPS == STEP_TOKENS && D % 32 == 0 && D / 16 <= STEP_TOKENS / 2, "a warp a row, and 16 columns of half of the channels");

struct StepShared {
  u32 operand[2][STEP_TOKENS][OPERAND_WORDS];  // fp16 numbers, and what they lack
  float sums[2][STEP_TOKENS][SUM_FLOATS];      // [half of the channels, token, column]
};

// A warp's share of the matrix of a stream and head: [parts, steps of 16 channels], as B operands of two tiles of 8 columns.
template <class S> struct MatrixShare {
  static constexpr int STEPS = D / 32;
  u32 f[2][STEPS][4];
  bool active;  // at head_dim 128 all warps are

  DEV void load(const AppendArguments& a, int head, int warp, int lane) {
    active = D / 16 == STEP_TOKENS / 2 || warp / 2 < D / 16;
    if (!active) return;
    const uint4* from = S::matrix(a, head) + ((warp / 2) * (D / 16) + warp % 2 * STEPS) * 32 + lane;
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
      for (int m = 0; m < STEPS; m++) load_constant(f[p][m], from + (p * (D / 16) * (D / 16) + m) * 32);
  }

  // The operands of all tokens times the share, to sh.sums.
  DEV void multiply(StepShared& sh, int warp, int lane) const {
    if (!active) return;
    const int half = warp % 2, row = lane % 16, column = lane / 16 * 4;  // of the word that this lane names to ldmatrix
    float large[2][4] = {}, small[2][4] = {};
#pragma unroll
    for (int m = 0; m < STEPS; m++) {
      u32 x[4];
      ldmatrix_x4(x, &sh.operand[0][row][(half * STEPS + m) * 8 + column]);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        mma_fp16(small[k], x[0], x[1], x[2], x[3], f[0][m][2 * k], f[0][m][2 * k + 1]);
        mma_fp16(large[k], x[0], x[1], x[2], x[3], f[1][m][2 * k], f[1][m][2 * k + 1]);
      }
      if constexpr (S::ROPE_BLOCK > 0) {
        ldmatrix_x4(x, &sh.operand[1][row][(half * STEPS + m) * 8 + column]);
#pragma unroll
        for (int k = 0; k < 2; k++) mma_fp16(small[k], x[0], x[1], x[2], x[3], f[1][m][2 * k], f[1][m][2 * k + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {  // tokens g and g + 8, tiles of 8 columns
      float* to = &sh.sums[half][lane / 4 + i / 2 * 8][warp / 2 * 16 + i % 2 * 8 + lane % 4 * 2];
      *(float2*)to = {small[i % 2][i / 2 * 2] + large[i % 2][i / 2 * 2], small[i % 2][i / 2 * 2 + 1] + large[i % 2][i / 2 * 2 + 1]};
    }
  }
};

// The row of a warp as it was read: where it is multiplied, a lane has words `lane` and lane + D / 4, channels that RoPE rotates together.
template <class S> struct StepRow {
  static constexpr bool MULTIPLIED = S::MATRIX_PARTS > 0;
  u32 w[2];
  float x[STEP_CHANNELS];  // where it is not multiplied

  DEV void load(const AppendArguments& a, int token, int head, int lane) {
    const s64 at = (s64)token * S::stride(a) + head * D;
    if constexpr (MULTIPLIED) {
      const u32* from = (const u32*)S::rows(a) + at / 2 + lane;
      w[0] = w[1] = 0u;
      if (lane < D / 4) w[0] = from[0], w[1] = from[D / 4];  // no __ldg: the compiler would be free to load them before wait_prior_grid
    } else {
      load_row<S::IN_TYPE, 32>(x, S::rows(a), at + lane * STEP_CHANNELS);
    }
  }

  // Prefetches it to L2, which other multiprocessors write to, too.
  DEV static void prefetch(const AppendArguments& a, int token, int head, int lane) {
    const s64 at = (s64)token * S::stride(a) + head * D;
    if constexpr (MULTIPLIED) {
      const u32* from = (const u32*)S::rows(a) + at / 2 + lane;
      if (lane < D / 4) prefetch_l2(from);
    }
  }
  // Stores a key as it was read at a place of the overlay; -1 is no place.
  DEV void store_raw(const AppendArguments& a, s64 at, int head, int lane) const {
    static_assert(MULTIPLIED, "keys that are unrotated have a matrix");
    if (at < 0 || lane >= D / 4) return;
    u32* to = (u32*)a.overlay_key + (at * Config::KV_HEADS + head) * (D / 2) + lane;
    to[0] = overlay_word<S::IN_TYPE>(w[0]), to[D / 4] = overlay_word<S::IN_TYPE>(w[1]);
  }

  // Writes the operands of row `warp`; returns the factor that brings its sums to numbers. `block` is the token's RoPE block.
  DEV float put(const AppendArguments& a, StepShared& sh, int block, int warp, int lane) const {
    constexpr int TYPE = S::IN_TYPE;
    const u32 most = pair_max<TYPE>(w[0] & 0x7FFF7FFFu, w[1] & 0x7FFF7FFFu);
    const u32 exponent = clamp_exponent((u32)__reduce_max_sync(FULL, __float_as_int(fmaxf(low<TYPE>(most), high<TYPE>(most)))) >> 23);
    if (lane < D / 4) {
      u32 y[2], rest[2];
      unrotate_words<S>(a, w[0], w[1], (s64)block * (D / 2), lane, scale_to_fp16(exponent), y, rest);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sh.operand[0][warp][i * (D / 4) + lane] = y[i];
        if constexpr (S::ROPE_BLOCK > 0) sh.operand[1][warp][i * (D / 4) + lane] = rest[i];
      }
    }
    return scale_from_fp16(exponent) * S::matrix_unit(a);
  }
};

// x = R x M - mean or H x - mean: the channels of a lane, those of row `warp`. All warps of the CTA come here together. Returns the power of two that the
// products were divided by, 1 where there are none.
template <class S> DEV float transform_step(const AppendArguments& a, StepShared& sh, const StepRow<S>& row, const MatrixShare<S>& matrix, const float* mean, int block, int warp, int lane, float* x) {
  constexpr int N = STEP_CHANNELS;
  if constexpr (S::MATRIX_PARTS > 0) {
    const float back = row.put(a, sh, block, warp, lane), times = reciprocal_approx(back);
    __syncthreads();
    matrix.multiply(sh, warp, lane);
    __syncthreads();
    float more[N];
    load_floats<N>(x, &sh.sums[0][warp][lane * N]), load_floats<N>(more, &sh.sums[1][warp][lane * N]);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = fmaf(x[i] + more[i], back, -mean[i]);
    return times;
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = row.x[i];
    if constexpr (S::HADAMARD > 1) apply_hadamard<S::HADAMARD, 32>(x, S::signs(a), S::HADAMARD_SCALE, lane, sh.sums[0][warp]);
    if constexpr (S::MEAN)
#pragma unroll
      for (int i = 0; i < N; i++) x[i] -= mean[i];
    return 1.f;
  }
}
// About one over the mean magnitude of the row x of a warp. Products, below 2^23 before they are scaled, are added as integers of 2^8: one instruction adds them over a warp.
// Of a row that is small beside the mean that was subtracted, the result may be anything, a negative number included.
template <class S> DEV float inverse_mean(const float* x, float times) {
  constexpr u32 ZERO = 0x4B400000u;  // bits of ROUNDER
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < STEP_CHANNELS; i++) sum += fabsf(x[i]);
  if constexpr (S::MATRIX_PARTS > 0) {
    const u32 sums = __reduce_add_sync(FULL, __float_as_uint(fmaf(sum, times * (1.f / 256.f), ROUNDER)));
    return reciprocal_approx(__uint_as_float(sums - 31u * ZERO) - ROUNDER) * (times * (D / 256.f));
  } else {
    return reciprocal_approx(warp_sum(sum) * (1.f / D));
  }
}
