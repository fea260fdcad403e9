// Transforms the new rows of one stream before they are appended, in float32: y = R x M + offset. R unrotates keys to the start of their
// RoPE block, where they are stored so; M [D, D] is the product of the stream's transforms.
//
// Grid: (any, KV_HEADS). A CTA holds the matrix of its head in registers and takes MATRIX_ROWS tokens at a time.

#pragma once
#include "include/matrix.cuh"
#include "include/tokens.cuh"

extern "C" __global__ void __launch_bounds__(MATRIX_THREADS) kvant_transform_kv(const TransformArguments a) {
  constexpr int D = Config::HEAD_DIM, TYPE = Config::IN_TYPE, ROPE_BLOCK = Config::ROPE_BLOCK;
  __shared__ int block[MATRIX_ROWS];  // RoPE blocks of the tokens at hand
  const int head = blockIdx.y;
  const auto row_of = [&](int token) { return ((s64)token * Config::KV_HEADS + head) * D; };
  const auto next = [&](int first, int count) {
    if (!ROPE_BLOCK) return;
    if (threadIdx.x < count) block[(first + threadIdx.x) % MATRIX_ROWS] = new_token_rope_block<ROPE_BLOCK>(a, first + threadIdx.x);
    __syncthreads();
  };
  // Channel e of a token, unrotated by the angle phi of its block's start: x cos phi + y sin phi and y cos phi - x sin phi for the pair
  // (x, y) of channels (e, e + half).
  const auto load = [&](int token, int e) {
    const float y = load_number<TYPE>(a.x, row_of(token) + e);
    if (!ROPE_BLOCK || e >= 2 * a.half) return y;
    const bool second = e >= a.half;
    const s64 at = (s64)block[token % MATRIX_ROWS] * a.half + (second ? e - a.half : e);
    const float other = load_number<TYPE>(a.x, row_of(token) + (second ? e - a.half : e + a.half));
    return y * a.cosine[at] + (second ? -other : other) * a.sine[at];
  };
  times_matrix(
      a.matrix + (s64)(head % a.matrix_heads) * D * D, a.offset ? a.offset + head % a.offset_heads * D : nullptr, a.tokens, []() {}, next, load,
      [&](int token, int e, float y) { a.out[row_of(token) + e] = y; });
}
