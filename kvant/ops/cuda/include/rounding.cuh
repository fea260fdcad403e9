// Rounding: of scales to their 16-bit type, TYPE an ElementType; of quotients; to integers.

#pragma once
#include "codecs/tokenwise.cuh"

template <int TYPE> DEV float round_to(float x) { return low<TYPE>(pair_of<TYPE>(x, 0.f)); }
template <int TYPE> DEV u32 bits_of(float x) { return pair_of<TYPE>(x, 0.f) & 0xffffu; }

constexpr float FLOAT_TINY = 1.17549435e-38f;  // the smallest normal float32, and bfloat16
template <int TYPE> constexpr float TINY = TYPE == ElementType::BF16 ? FLOAT_TINY : 6.103515625e-05f;            // smallest normal number
template <int TYPE> constexpr float LARGEST = TYPE == ElementType::BF16 ? 3.3895313892515355e38f : 65504.f;      // largest number

DEV float quotient(float x, float y, float reciprocal) {  // x / y, nearly always as a division rounds it; `reciprocal` is 1 / y
  const float z = x * reciprocal;
  return fmaf(fmaf(-z, y, x), reciprocal, z);
}

constexpr float ROUNDER = 12582912.f;  // 1.5 * 2^23: x + ROUNDER has no bits behind the point, rounded to even; faster than an instruction that rounds
