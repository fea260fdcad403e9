// Transforms of a tile: from the words that lanes read to the rows that they hold (token_tile.cuh). Tensor cores move the numbers: keys are
// multiplied by a matrix from the right, X M, so that sums stay with their tokens; values by a Hadamard or the identity from the left, M^T X^T, so that a
// lane ends up with neighbouring tokens. Values with a learnt matrix are held as keys are.

#pragma once
#include "include/token_tile.cuh"
#include "include/unrotate.cuh"
#include "include/warpgroup.cuh"

// --- Hadamard -----------------------------------------------------------------------------------------------------------------

// H[in, out] and H[in + 1, out] of the block-diagonal Hadamard matrix without its factor, as two numbers of the input's type:
// (-1)^popcount(in & out) inside a block of ORDER, 0 outside; the identity where ORDER is 1.
template <int TYPE, int ORDER> DEV u32 hadamard_entries(int in, int out) {
  u32 both = 0;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const u32 one = (TYPE == ElementType::BF16 ? 0x3F80u : 0x3C00u) | (__popc((in + e) & out & (ORDER - 1)) & 1) << 15;
    both |= (((in + e) ^ out) & ~(ORDER - 1) ? 0u : one) << (16 * e);
  }
  return both;
}

// x = H diag(signs) x without the factor, for blocks of ORDER channels. H is a product over the bits of a channel's number: tensor cores do the
// bits that lanes differ in, and move numbers to where they are held; passes of sums and differences in registers do the other bits.
template <class S> DEV void apply_hadamard(TokenTile<S>& tile, u32 (*w)[READ_WORDS], const float* signs) {
  constexpr int TYPE = S::IN_TYPE, ORDER = S::HADAMARD, N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  constexpr bool KEY = S::KEY;
  const int g = tile.g, t = tile.t;
  if (ORDER > 1 && signs)
#pragma unroll
    for (int i = 0; i < READ_WORDS; i++) {
      const float* s = signs + t * (D / 4) + 2 * i;
      const u32 flip = (s[0] < 0.f ? 0x8000u : 0u) | (s[1] < 0.f ? 0x80000000u : 0u);
      w[0][i] ^= flip, w[1][i] ^= flip;
    }
  u32 part[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++)
    part[i / 2][i % 2] = KEY ? hadamard_entries<TYPE, ORDER>(t * (D / 4) + i % 2 * 2, g / 2 * (D / 4) + i / 2 * 2 + g % 2)
                             : hadamard_entries<TYPE, ORDER>(t * (D / 4) + i % 2 * (D / 8), g * (D / 8) + i / 2);
#pragma unroll
  for (int m = 0; m < D / 16; m++)
#pragma unroll
    for (int k = 0; k < 2; k++) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      if constexpr (KEY) mma_16bit<TYPE>(c, w[0][2 * m], w[1][2 * m], w[0][2 * m + 1], w[1][2 * m + 1], part[k][0], part[k][1]);
      else mma_16bit<TYPE>(c, part[0][0], part[1][0], part[0][1], part[1][1], w[k][m], w[k][m + D / 16]);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if constexpr (KEY) tile.x[i / 2][4 * m + 2 * k + i % 2] = c[i];
        else tile.x[2 * k + i % 2][2 * m + i / 2] = c[i];
    }
#pragma unroll
  for (int half = KEY ? 4 : 2; half < N && half < ORDER; half *= 2)
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < N; i++)
        if (!(i & half)) {
          const float first = tile.x[r][i], second = tile.x[r][(i + half) % N];
          tile.x[r][i] = first + second, tile.x[r][(i + half) % N] = first - second;
        }
}

// x = FACTOR x - mean, the mean after the transform.
template <class S> DEV void subtract_mean(TokenTile<S>& tile, const float* mean) {
#pragma unroll
  for (int i = 0; i < tile.N; i++) {
    const float off = mean[tile.share() * tile.N + i];
#pragma unroll
    for (int r = 0; r < tile.ROWS; r++) tile.x[r][i] = fmaf(tile.x[r][i], S::HADAMARD_SCALE, -off);
  }
}

// --- RoPE and a matrix in fp16 ------------------------------------------------------------------------------------------------

// The biased exponent of the largest magnitude of a row as it was read, of token g + 8 (t / 2): a power of two brings the row close to 2^8.
template <class S> DEV u32 row_exponent(const TokenTile<S>& tile, const u32 (*w)[READ_WORDS]) {
  constexpr int TYPE = S::IN_TYPE;
  float most[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u32 a = w[r][0] & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < READ_WORDS; i++) a = pair_max<TYPE>(a, w[r][i] & 0x7FFF7FFFu);
    most[r] = fmaxf(low<TYPE>(a), high<TYPE>(a));
  }
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
  const float both = tile.reduce_two(most[0], most[1], 2, larger), all = larger(both, __shfl_xor_sync(FULL, both, 1));
  return clamp_exponent(__float_as_uint(all) >> 23);
}

// The A operands of a step of 16 channels: of tokens g and g + 8, words m and m + D / 16 of the lane.
struct StepOperands {
  u32 y[4], rest[4];
};
template <class S> DEV StepOperands step_operands(const AppendArguments& a, const u32 (*w)[READ_WORDS], const s64* at, const float* times, int m) {
  StepOperands made;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u32 y[2], rest[2] = {0u, 0u};
    unrotate_words<S>(a, w[r][m], w[r][m + D / 16], at[r], m, times[r], y, rest);
    made.y[r] = y[0], made.y[r + 2] = y[1], made.rest[r] = rest[0], made.rest[r + 2] = rest[1];
  }
  return made;
}

// x = R x M - mean. M is one or two matrices of fp16 in shared memory, the larger one last, times matrix_unit: [parts, D / 16 steps] of Warpgroup's
// operands. Rows are brought into the range of fp16 by a power of two of their own. R unrotates keys to the start of their RoPE block. The warps
// of a warpgroup come here together.
template <class S> DEV void multiply(TokenTile<S>& tile, const AppendArguments& a, const u32 (*w)[READ_WORDS], const u8* matrix, int first, int head) {
  static_assert(S::KEY, "a row lies in four lanes");
  using Products = Warpgroup<D>;
  constexpr int N = TokenTile<S>::N, STEPS = D / 16, PARTS = S::MATRIX_PARTS;
  constexpr bool UNROTATED = S::ROPE_BLOCK > 0;
  const int lane = tile.lane, g = tile.g, t = tile.t;
  const u32 own_exponent = row_exponent(tile, w), other_exponent = __shfl_xor_sync(FULL, own_exponent, 2);
  const u32 exponent[2] = {t & 2 ? other_exponent : own_exponent, t & 2 ? own_exponent : other_exponent};
  const float times[2] = {scale_to_fp16(exponent[0]), scale_to_fp16(exponent[1])};
  s64 at[2] = {0, 0};
  if constexpr (UNROTATED) {
    const int mine = new_token_rope_block<S::ROPE_BLOCK>(a, min(first + g + 8 * (t >> 1), a.tokens - 1)), other = __shfl_xor_sync(FULL, mine, 2);
    at[0] = (s64)(t & 2 ? other : mine) * (D / 2) + t * (D / 8), at[1] = (s64)(t & 2 ? mine : other) * (D / 2) + t * (D / 8);
  }
  float sums[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sums[i] = 0.f;
  StepOperands now = step_operands<S>(a, w, at, times, 0);
#pragma unroll
  for (int m = 0; m < STEPS; m++) {
    const u8* large = matrix + ((PARTS - 1) * STEPS + m) * Products::STEP_BYTES;
    Products::begin();
    if constexpr (PARTS > 1) Products::multiply(sums, now.y, matrix + m * Products::STEP_BYTES);
    if constexpr (UNROTATED) Products::multiply(sums, now.rest, large);
    Products::multiply(sums, now.y, large);
    Products::commit();
    StepOperands next = now;
    if (m + 1 < STEPS) next = step_operands<S>(a, w, at, times, m + 1);
    Products::await();
    Products::template hold<4>(now.y);
    if constexpr (UNROTATED) Products::template hold<4>(now.rest);
    now = next;
  }
  Products::template hold<D / 2>(sums);
  const float factor = (S::MEAN || S::CENTROIDS ? S::HADAMARD_SCALE : 1.f) * S::matrix_unit(a);
  const float back[2] = {scale_from_fp16(exponent[0]) * factor, scale_from_fp16(exponent[1]) * factor};
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    float off[2] = {0.f, 0.f};
    if constexpr (S::MEAN) load_floats<2>(off, S::mean(a) + head * D + tile.share() * N + i);
#pragma unroll
    for (int j = 0; j < 4; j++) tile.x[j / 2][i + j % 2] = fmaf(sums[2 * i + j], back[j / 2], -off[j % 2]);
  }
}
