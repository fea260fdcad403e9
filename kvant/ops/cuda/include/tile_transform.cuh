// Transforms of a tile: from the words that lanes read to the rows that they hold (token_tile.cuh). Tensor cores move the numbers: keys are
// multiplied by a matrix from the right, X M, so that sums stay with their tokens; values from the left, M^T X^T, so that a lane ends up with
// neighbouring tokens. The matrix is the identity, a Hadamard, or a learnt one.

#pragma once
#include "include/token_tile.cuh"
#include "include/unrotate.cuh"

// Adds the k-th of two products for the columns (of values: the rows) q of the matrix to where its four sums are held.
template <class S, class F> DEV void add_product(TokenTile<S>& tile, int q, int k, F product) {
  float* c[4];
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] = S::KEY ? &tile.x[i / 2][4 * q + 2 * k + i % 2] : &tile.x[2 * k + i % 2][2 * q + i / 2];
  float sum[4] = {*c[0], *c[1], *c[2], *c[3]};
  product(sum);
#pragma unroll
  for (int i = 0; i < 4; i++) *c[i] = sum[i];
}
template <class S> DEV void clear(TokenTile<S>& tile) {
#pragma unroll
  for (int i = 0; i < tile.ROWS * tile.N; i++) tile.x[i / tile.N][i % tile.N] = 0.f;
}

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

// --- a learnt matrix ----------------------------------------------------------------------------------------------------------

// x = x M. M is the sum of MATRIX_PARTS matrices of the input's type, smallest first, so that products are exact; its registers lie in the order
// in which they are used: [parts, D / 16, D / 16, lane].
template <class S> DEV void multiply_matrix(TokenTile<S>& tile, const u32 (*w)[READ_WORDS], const uint4* matrix) {
  clear(tile);
#pragma unroll 1
  for (int p = 0; p < S::MATRIX_PARTS; p++)
#pragma unroll
    for (int m = 0; m < D / 16; m++)
#pragma unroll
      for (int q = 0; q < D / 16; q++) {
        const uint4 f = matrix[((p * (D / 16) + m) * (D / 16) + q) * 32 + tile.lane];
#pragma unroll
        for (int k = 0; k < 2; k++)
          add_product(tile, q, k, [&](float* sum) {
            if constexpr (S::KEY) mma_16bit<S::IN_TYPE>(sum, w[0][2 * m], w[1][2 * m], w[0][2 * m + 1], w[1][2 * m + 1], k ? f.z : f.x, k ? f.w : f.y);
            else mma_16bit<S::IN_TYPE>(sum, f.x, f.y, f.z, f.w, w[k][m], w[k][m + D / 16]);
          });
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

// --- bands: RoPE and a learnt matrix in fp16 ----------------------------------------------------------------------------------

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

// x = R x M - mean for streams of bands. M is two matrices of fp16, the larger one last, times matrix_unit; rows are brought into the range of
// fp16 by a power of two of their own. R unrotates keys to the start of their RoPE block.
template <class S> DEV void multiply_bands(TokenTile<S>& tile, const AppendArguments& a, const u32 (*w)[READ_WORDS], int first, int head) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  constexpr bool KEY = S::KEY, UNROTATED = S::ROPE_BLOCK > 0;
  const int lane = tile.lane, g = tile.g, t = tile.t;
  const uint4* matrix = S::matrix(a, head);
  const u32 own_exponent = row_exponent(tile, w), other_exponent = __shfl_xor_sync(FULL, own_exponent, 2);
  const float times[2] = {scale_to_fp16(t & 2 ? other_exponent : own_exponent), scale_to_fp16(t & 2 ? own_exponent : other_exponent)};
  s64 at[2] = {0, 0};
  if constexpr (UNROTATED) {
    const int mine = new_token_rope_block<S::ROPE_BLOCK>(a, min(first + g + 8 * (t >> 1), a.tokens - 1)), other = __shfl_xor_sync(FULL, mine, 2);
    at[0] = (s64)(t & 2 ? other : mine) * (D / 2) + t * (D / 8), at[1] = (s64)(t & 2 ? mine : other) * (D / 2) + t * (D / 8);
  }
  clear(tile);
#pragma unroll
  for (int m = 0; m < D / 16; m++) {
    u32 y[2][2], rest[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) unrotate_words<S>(a, w[r][m], w[r][m + D / 16], at[r], m, times[r], y[r], rest[r]);
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
      for (int q = 0; q < D / 16; q++) {
        const uint4 f = matrix[((p * (D / 16) + m) * (D / 16) + q) * 32 + lane];
#pragma unroll
        for (int k = 0; k < 2; k++)
          add_product(tile, q, k, [&](float* sum) {
            if constexpr (KEY) {
              if constexpr (UNROTATED)
                if (p) mma_fp16(sum, rest[0][0], rest[1][0], rest[0][1], rest[1][1], k ? f.z : f.x, k ? f.w : f.y);
              mma_fp16(sum, y[0][0], y[1][0], y[0][1], y[1][1], k ? f.z : f.x, k ? f.w : f.y);
            } else {
              mma_fp16(sum, f.x, f.y, f.z, f.w, y[k][0], y[k][1]);
            }
          });
      }
  }
  float back[ROWS];  // undoes the powers of two
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int lane_of = KEY ? lane & 28 | 2 * r : 4 * (2 * t + (r & 1)) + (r & 2);
    back[r] = scale_from_fp16(__shfl_sync(FULL, own_exponent, lane_of)) * S::matrix_unit(a);
  }
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    float off[4] = {0.f, 0.f, 0.f, 0.f};
    if constexpr (S::MEAN) load_vector(off, S::mean(a) + head * D + tile.share() * N + i);
#pragma unroll
    for (int j = 0; j < 4 * ROWS; j++) tile.x[j / 4][i + j % 4] = fmaf(tile.x[j / 4][i + j % 4], back[j / 4], -off[j % 4]);
  }
}
