// New tokens by a stream's matrix, before the kernel of append: turned back to the start of their block of positions where they are
// stored so, times the matrix, plus an offset.
//
// Constants beside those of common.cu: IN_TYPE, TURNED (positions of a block, 0 where nothing is turned back).

#include "include/matrix.cuh"

struct StoredArguments {
  const void* in;  // [tokens, KV_HEADS, D]
  float* out;
  const float *matrix, *offset, *cosine, *sine;  // [1 or KV_HEADS, D, D], [1 or KV_HEADS, D] or nothing, [blocks, half] twice
  const s64 *starts, *lengths;
  int tokens, batch, half_batch, matrix_heads, offset_heads, half, first, blocks;
};

constexpr int D = HEAD_DIM;

// The block of positions of a new token. Padding has any.
DEV int block_of(const StoredArguments& a, int token) {
  const int b = sequence_of(a, token), position = (int)(a.lengths[b] - a.starts[b + 1]) + token;
  return min(max((position + a.first) / max(TURNED, 1) - a.first / max(TURNED, 1), 0), a.blocks - 1);
}

extern "C" __global__ void __launch_bounds__(MATRIX_THREADS) kvant_stored(const StoredArguments a) {
  __shared__ int block[MATRIX_ROWS];
  const int head = blockIdx.y;
  const auto place = [&](int token) { return ((s64)token * KV_HEADS + head) * D; };
  const auto next = [&](int first, int count) {
    if (!TURNED) return;
    if (threadIdx.x < count) block[(first + threadIdx.x) % MATRIX_ROWS] = block_of(a, first + threadIdx.x);
    __syncthreads();
  };
  const auto load = [&](int token, int e) {
    const float y = load_number<IN_TYPE>(a.in, place(token) + e);
    if (!TURNED || e >= 2 * a.half) return y;
    const bool second = e >= a.half;
    const s64 at = (s64)block[token % MATRIX_ROWS] * a.half + (second ? e - a.half : e);
    const float other = load_number<IN_TYPE>(a.in, place(token) + (second ? e - a.half : e + a.half));
    return y * a.cosine[at] + (second ? -other : other) * a.sine[at];
  };
  times_matrix(
      a.matrix + (s64)(head % a.matrix_heads) * D * D, a.offset ? a.offset + head % a.offset_heads * D : nullptr, a.tokens, []() {}, next, load,
      [&](int token, int e, float y) { a.out[place(token) + e] = y; });
}
