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

// --- rows of bfloat16 as fp16 ------------------------------------------------------------------------------------------------

// Rows of bfloat16 as fp16 numbers, in place, times a power of two of each row that brings its largest magnitude to [2^9, 2^10): exact but for 2^-24 of the row's
// largest number. Both types have the sign first and the exponent next: magnitudes less the exponent of 2^-15, three bits up, are those of fp16; what is smaller becomes
// zero. back[r] is multiplied by what undoes it; by NaN where the row has a number that is not finite.
DEV void scale_rows(u32 (*w)[READ_WORDS], float* back) {
  u32 most[2] = {0u, 0u};
#pragma unroll
  for (int i = 0; i < 2 * READ_WORDS; i++) most[i % 2] = bf16_pair_max_magnitude(w[i % 2][i / 2], most[i % 2]);
  u32 both = bf16_pair_max_magnitude(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));  // of token g, of token g + 8
  both = bf16_pair_max_magnitude(both, __shfl_xor_sync(FULL, both, 1));
  both = bf16_pair_max_magnitude(both, __shfl_xor_sync(FULL, both, 2));
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 found = both >> (16 * r + 7) & 0xFFu, exponent = max(found, 24u), zero = (exponent - 24u) * 0x00800080u, from_zero = (24u - exponent) * 0x04000400u;  // -8 zero
    back[r] *= __uint_as_float(found < 255u ? (exponent - 9u) << 23 : 0x7FC00000u);
#pragma unroll
    for (int i = 0; i < READ_WORDS; i++) w[r][i] = (bf16_pair_max_magnitude(w[r][i], zero) * 8u + from_zero) | (w[r][i] & 0x80008000u);
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

// The A operands of a step of 16 channels: of tokens g and g + 8, words m and m + D / 16 of the lane. `at` is where its cosines begin: it has eight of every 32.
struct StepOperands {
  u32 y[4], rest[4];
};
template <class S> DEV StepOperands step_operands(const AppendArguments& a, const u32 (*w)[READ_WORDS], const s64* at, const float* times, int m) {
  StepOperands made;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u32 y[2], rest[2] = {0u, 0u};
    unrotate_words<S>(a, w[r][m], w[r][m + D / 16], at[r], m / 4 * 16 + m % 4, times[r], y, rest);
    made.y[r] = y[0], made.y[r + 2] = y[1], made.rest[r] = rest[0], made.rest[r + 2] = rest[1];
  }
  return made;
}

// sums = X M for rows X as they were read, or as fp16 after scale_rows: numbers of TYPE. M is parts of that type in shared memory, whose sum it is: [parts, D / 16 steps]
// of Warpgroup's operands. `meanwhile` runs while the tensor cores multiply.
template <class S, int TYPE, class F> DEV void multiply_read(float* sums, u32 (*w)[READ_WORDS], const u8* matrix, F meanwhile) {
  using Products = Warpgroup<D, TYPE>;
  constexpr int STEPS = D / 16;
  const typename Products::Operand b = Products::operand(matrix);
  Products::begin();
#pragma unroll
  for (int i = 0; i < S::MATRIX_PARTS * STEPS; i++) {
    const u32 y[4] = {w[0][i % STEPS], w[1][i % STEPS], w[0][i % STEPS + STEPS], w[1][i % STEPS + STEPS]};
    Products::multiply(sums, y, Products::later(b, i * Products::STEP_BYTES));
  }
  Products::commit();
  meanwhile();
  Products::await();
  Products::template hold<READ_WORDS>(w[0]);
  Products::template hold<READ_WORDS>(w[1]);
}

// sums = R X M for keys X that R unrotates to the start of their RoPE block, times a power of two of each row that brings it into the range of fp16; `exponent` is what
// undoes it. M is two matrices of fp16, the larger one last.
template <class S> DEV void multiply_unrotated(float* sums, const TokenTile<S>& tile, const AppendArguments& a, const u32 (*w)[READ_WORDS], const u8* matrix, int rope_block, u32* exponent) {
  using Products = Warpgroup<D, ElementType::FP16>;
  constexpr int STEPS = D / 16, PARTS = S::MATRIX_PARTS;
  const int t = tile.t;
  const u32 own_exponent = row_exponent(tile, w), other_exponent = __shfl_xor_sync(FULL, own_exponent, 2);
  exponent[0] = t & 2 ? other_exponent : own_exponent, exponent[1] = t & 2 ? own_exponent : other_exponent;
  const float times[2] = {scale_to_fp16(exponent[0]), scale_to_fp16(exponent[1])};
  int blocks[2];
  tile.broadcast_rows(rope_block, blocks);
  const s64 at[2] = {(s64)blocks[0] * (D / 2) + t * 8, (s64)blocks[1] * (D / 2) + t * 8};
  const Products::Operand b = Products::operand(matrix);
  StepOperands now = step_operands<S>(a, w, at, times, 0);
#pragma unroll
  for (int m = 0; m < STEPS; m++) {
    const Products::Operand large = Products::later(b, ((PARTS - 1) * STEPS + m) * Products::STEP_BYTES);
    Products::begin();
    if constexpr (PARTS > 1) Products::multiply(sums, now.y, Products::later(b, m * Products::STEP_BYTES));
    Products::multiply(sums, now.rest, large);
    Products::multiply(sums, now.y, large);
    Products::commit();
    StepOperands next = now;
    if (m + 1 < STEPS) next = step_operands<S>(a, w, at, times, m + 1);
    Products::await();
    Products::template hold<4>(now.y);
    Products::template hold<4>(now.rest);
    now = next;
  }
}

// x = R x M - mean. The warps of a warpgroup come here together. It also looks up what belongs to the owned tokens, while
// the tensor cores multiply where nothing depends on it before.
template <class S> DEV void multiply(TokenTile<S>& tile, const AppendArguments& a, u32 (*w)[READ_WORDS], const u8* matrix, OwnedToken& owned, int first, int head) {
  static_assert(S::KEY, "a row lies in four lanes");
  constexpr int N = TokenTile<S>::N;
  constexpr bool UNROTATED = S::ROPE_BLOCK > 0, SCALED = TokenTile<S>::SCALED;
  constexpr bool FP16 = UNROTATED || SCALED || S::IN_TYPE == ElementType::FP16;  // one part of bfloat16 is signs
  float sums[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sums[i] = 0.f;
  constexpr float FACTOR = S::MEAN || S::CENTROIDS ? S::HADAMARD_SCALE : 1.f;
  float back[2] = {FACTOR, FACTOR};
  if constexpr (FP16) back[0] *= S::matrix_unit(a), back[1] *= S::matrix_unit(a);  // entries of bfloat16 are whole
  if constexpr (UNROTATED) {
    u32 exponent[2];
    owned = look_up(tile, a, first);
    multiply_unrotated(sums, tile, a, w, matrix, owned.rope_block, exponent);
    back[0] *= scale_from_fp16(exponent[0]), back[1] *= scale_from_fp16(exponent[1]);
  } else {
    if constexpr (SCALED) scale_rows(w, back);
    multiply_read<S, FP16 ? ElementType::FP16 : ElementType::BF16>(sums, w, matrix, [&] { owned = look_up(tile, a, first); });
  }
  Warpgroup<D, ElementType::FP16>::template hold<D / 2>(sums);
  tile.unit[0] = back[0], tile.unit[1] = back[1];
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    float off[2] = {0.f, 0.f};
    if constexpr (S::MEAN) load_floats<2>(off, S::mean(a) + head * D + tile.share() * N + i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (TokenTile<S>::KEEPS_UNIT || (!FP16 && FACTOR == 1.f && !S::MEAN)) tile.x[j / 2][i + j % 2] = sums[2 * i + j];
      else tile.x[j / 2][i + j % 2] = fmaf(sums[2 * i + j], back[j / 2], -off[j % 2]);
    }
  }
}
