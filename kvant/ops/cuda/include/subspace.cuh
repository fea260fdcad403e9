// Rows of new tokens in the space in which keys are stored, where that is before RoPE.

#pragma once
#include "include/math.cuh"
#include "include/tokens.cuh"

// Channel c of a row that begins at element `row` of x, unrotated by the angles of its position or of the start of its RoPE block: pairs of channels
// i, i + half are (x cos + y sin, y cos - x sin), rounded as torch rounds them; channels past 2 half are left alone.
template <int TYPE, class A> DEV float load_unrotated(const A& a, const void* x, s64 row, int position, int c) {
  const float own = load_number<TYPE>(x, row + c);
  if constexpr (Config::ROPE_BLOCK > 0) {
    if (c >= 2 * a.rope_half) return own;
    const int pair = c < a.rope_half ? c : c - a.rope_half;
    const s64 angle = (s64)rope_block_of<Config::ROPE_BLOCK>(a, position) * a.rope_half + pair;
    const float across = __fmul_rn(load_number<TYPE>(x, row + (c < a.rope_half ? c + a.rope_half : pair)), a.sine[angle]);
    return __fadd_rn(__fmul_rn(own, a.cosine[angle]), c < a.rope_half ? across : -across);
  } else return own;
}
