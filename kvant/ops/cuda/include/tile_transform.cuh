// Transforms of a tile: from the words that lanes read to the rows that they hold (token_tile.cuh). Tensor cores move the numbers: keys are
// multiplied by a matrix from the right, X M, so that sums stay with their tokens; values by a Hadamard or the identity from the left, M^T X^T, so that a
// lane ends up with neighbouring tokens. Values with a learnt matrix are held as keys are.

#pragma once
#include "include/copies.cuh"
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

// --- where rows come from -----------------------------------------------------------------------------------------------------

// Where a lane reads row r of its tile from: channels that RoPE rotates together go to the same lane, as two halves of its words.
template <class S> DEV const u8* tile_row(const AppendArguments& a, int first, int head, int lane, int r) {
  return (const u8*)S::rows(a) + ((s64)min(first + (lane >> 2) + 8 * r, a.tokens - 1) * S::stride(a) + head * D) * 2 + (lane & 3) * (S::ROPE_BLOCK > 0 ? D / 4 : D / 2);
}

// What a tile is read from and multiplied by.
struct TileSource {
  const u8* matrix;  // of the head, in shared memory, where rows are multiplied by one
  u32 staged;        // address of shared memory where the rows are, where they are STAGED
  int next;          // first token of the warp's next tile, whose rows go there once these have been read
};
template <class S> constexpr bool STAGED = Config::TILE_STAGED && S::MATRIX_PARTS > 0;

// Rows of a warp's next tile, in shared memory: every lane copies what it will read itself, 16 bytes at a time, so that no lane waits for another. `mine` is the
// address of the first 16 bytes of the lane.
template <class S> struct StagedRows {
  static constexpr int CHUNKS = READ_WORDS / 4, APART = Config::TILE_WARPS * 32 * 16;  // of a row; bytes from a lane's chunk to its next
  template <int I> DEV static void copy_from(u32 mine, const u8* one, const u8* two) {
    if constexpr (I < CHUNKS) {
      constexpr int AT = S::ROPE_BLOCK > 0 ? I / (CHUNKS / 2) * D + I % (CHUNKS / 2) * 16 : I * 16;
      copy16_at<I * APART, AT>(mine, one), copy16_at<(I + CHUNKS) * APART, AT>(mine, two);
      copy_from<I + 1>(mine, one, two);
    }
  }
  DEV static void copy(u32 mine, const AppendArguments& a, int first, int head, int lane) {
    copy_from<0>(mine, tile_row<S>(a, first, head, lane, 0), tile_row<S>(a, first, head, lane, 1));
  }
  DEV static void load(u32 mine, u32 (*w)[READ_WORDS]) {
    await_copies();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) load_chunk(mine, w, c);
  }
  DEV static void load_chunk(u32 mine, u32 (*w)[READ_WORDS], int c) {  // of both rows
    load_shared<4>(w[0] + 4 * c, mine + c * APART), load_shared<4>(w[1] + 4 * c, mine + (CHUNKS + c) * APART);
  }
};

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

// sums = X M for rows X as they were read. M is parts of the input's type in shared memory, whose sum it is: [parts, D / 16 steps] of Warpgroup's operands. `meanwhile`
// runs while the tensor cores multiply.
template <class S, class F> DEV void multiply_read(float* sums, u32 (*w)[READ_WORDS], const u8* matrix, F meanwhile) {
  using Products = Warpgroup<D, S::IN_TYPE>;
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
template <class S> DEV void multiply_unrotated(float* sums, const TokenTile<S>& tile, const AppendArguments& a, u32 (*w)[READ_WORDS], const TileSource& source, int rope_block, u32* exponent) {
  using Products = Warpgroup<D, ElementType::FP16>;
  constexpr int STEPS = D / 16, PARTS = S::MATRIX_PARTS;
  const int t = tile.t;
  const u32 own_exponent = row_exponent(tile, w), other_exponent = __shfl_xor_sync(FULL, own_exponent, 2);
  exponent[0] = t & 2 ? other_exponent : own_exponent, exponent[1] = t & 2 ? own_exponent : other_exponent;
  const float times[2] = {scale_to_fp16(exponent[0]), scale_to_fp16(exponent[1])};
  int blocks[2];
  tile.broadcast_rows(rope_block, blocks);
  const s64 at[2] = {(s64)blocks[0] * (D / 2) + t * (D / 8), (s64)blocks[1] * (D / 2) + t * (D / 8)};
  const Products::Operand b = Products::operand(source.matrix);
  // Staged rows are read once more, when it is their turn: there are no registers for all of them.
  const auto read = [&](int m) {
    if constexpr (STAGED<S>)
      if (m % 4 == 0) StagedRows<S>::load_chunk(source.staged, w, m / 4), StagedRows<S>::load_chunk(source.staged, w, (m + STEPS) / 4);
  };
  read(0);
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
    if (m + 1 < STEPS) read(m + 1), next = step_operands<S>(a, w, at, times, m + 1);
    Products::await();
    Products::template hold<4>(now.y);
    Products::template hold<4>(now.rest);
    now = next;
  }
}

// x = R x M - mean. The warps of a warpgroup come here together. What is looked up for the tile's tokens is, if nothing depends on it before.
template <class S> DEV void multiply(TokenTile<S>& tile, const AppendArguments& a, u32 (*w)[READ_WORDS], const TileSource& source, OwnedToken& owned, int first, int head) {
  static_assert(S::KEY, "a row lies in four lanes");
  constexpr int N = TokenTile<S>::N;
  constexpr bool UNROTATED = S::ROPE_BLOCK > 0, FP16 = UNROTATED || S::IN_TYPE == ElementType::FP16;
  float sums[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sums[i] = 0.f;
  constexpr float FACTOR = S::MEAN || S::CENTROIDS ? S::HADAMARD_SCALE : 1.f;
  float back[2] = {FACTOR, FACTOR};
  if constexpr (FP16) back[0] *= S::matrix_unit(a), back[1] *= S::matrix_unit(a);  // entries of bfloat16 are whole
  const auto copy_next = [&] {
    if constexpr (STAGED<S>)
      if (source.next < a.tokens) StagedRows<S>::copy(source.staged, a, source.next, head, tile.lane);
  };
  if constexpr (UNROTATED) {
    u32 exponent[2];
    owned = look_up(tile, a, first);
    multiply_unrotated(sums, tile, a, w, source, owned.rope_block, exponent);
    copy_next();
    back[0] *= scale_from_fp16(exponent[0]), back[1] *= scale_from_fp16(exponent[1]);
  } else {
    multiply_read<S>(sums, w, source.matrix, [&] {
      copy_next();
      owned = look_up(tile, a, first);
    });
  }
  Warpgroup<D, ElementType::FP16>::template hold<D / 2>(sums);
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    float off[2] = {0.f, 0.f};
    if constexpr (S::MEAN) load_floats<2>(off, S::mean(a) + head * D + tile.share() * N + i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (!FP16 && FACTOR == 1.f && !S::MEAN) tile.x[j / 2][i + j % 2] = sums[2 * i + j];
      else tile.x[j / 2][i + j % 2] = fmaf(sums[2 * i + j], back[j / 2], -off[j % 2]);
    }
  }
}
