// New rows as fp16 operands of tensor-core products. A power of two of its own brings the largest magnitude of a row close to 2^8.

#pragma once
#include "include/append_stream.cuh"
#include "include/math.cuh"

// From the biased exponent of a row's largest magnitude: the power of two, and what undoes it.
DEV u32 clamp_exponent(u32 exponent) { return min(max(exponent, 8u), 254u); }
DEV float scale_to_fp16(u32 exponent) { return __uint_as_float((261u - exponent) << 23); }
DEV float scale_from_fp16(u32 exponent) { return __uint_as_float((exponent - 7u) << 23); }

// Two words of a row, times a power of two, as fp16 numbers y; where keys are unrotated, in two parts, y + rest. With the angle phi of the
// start of the token's RoPE block, the pair (one, two) becomes (one cos phi + two sin phi, two cos phi - one sin phi): `first` and
// `second` are channels that RoPE rotates together, whose cosines and sines begin at element at + 2 m of the table.
template <class S> DEV void unrotate_words(const AppendArguments& a, u32 first, u32 second, s64 at, int m, float times, u32* y, u32* rest) {
  constexpr int TYPE = S::IN_TYPE;
  float one[2] = {low<TYPE>(first), high<TYPE>(first)}, two[2] = {low<TYPE>(second), high<TYPE>(second)};
  if constexpr (S::ROPE_BLOCK > 0) {
    const float2 c = *(const float2*)(a.cosine + at + 2 * m), s = *(const float2*)(a.sine + at + 2 * m);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float cosine = e ? c.y : c.x, sine = e ? s.y : s.x, unrotated = one[e] * cosine + two[e] * sine;
      two[e] = two[e] * cosine - one[e] * sine, one[e] = unrotated;
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) one[e] *= times, two[e] *= times;
  y[0] = fp16_pair(one[0], one[1]), y[1] = fp16_pair(two[0], two[1]);
  if constexpr (S::ROPE_BLOCK > 0) {
    rest[0] = fp16_pair(one[0] - fp16_low(y[0]), one[1] - fp16_high(y[0]));
    rest[1] = fp16_pair(two[0] - fp16_low(y[1]), two[1] - fp16_high(y[1]));
  }
}
