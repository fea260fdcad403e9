// Numbers and words: 16-bit floats, loads and stores of several elements, reductions over the lanes of a warp.
//
// A TYPE is an ElementType of kvant/ops/cuda/config.py: 0 bfloat16, 1 float16, 2 float32; 3, fp8 (e4m3), has functions of its own.

#pragma once
#include "include/ptx.cuh"

// One of two types.
template <bool FIRST, class A, class B> struct SelectType { using type = A; };
template <class A, class B> struct SelectType<false, A, B> { using type = B; };
template <bool FIRST, class A, class B> using Select = typename SelectType<FIRST, A, B>::type;

// --- 16-bit floats --------------------------------------------------------------------------------------------------

DEV float bf16_low(u32 x) { return __uint_as_float(x << 16); }
DEV float bf16_high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// The low and the high half of a word as floats; a word of two 16-bit floats.
template <int TYPE> DEV float low(u32 x) { return TYPE == 0 ? bf16_low(x) : fp16_low(x); }
template <int TYPE> DEV float high(u32 x) { return TYPE == 0 ? bf16_high(x) : fp16_high(x); }
template <int TYPE> DEV u32 pair_of(float x, float y) { return TYPE == 0 ? bf16_pair(x, y) : fp16_pair(x, y); }
template <int TYPE> DEV u32 to_fp16(u32 x) { return TYPE == 1 ? x : fp16_pair(bf16_low(x), bf16_high(x)); }

// fp8 is e4m3 without infinities. Rounded to the nearest, ties to even; what is beyond the largest number, 448, becomes that.
#if !HARDWARE_FP8
DEV u32 to_fp8(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 128u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 127u;  // NaN
  if (size >= 0x43e00000u) return sign | 126u;
  if (size < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(size) + 16384.f) - 0x46800000u);  // subnormal: adding 2^14 rounds at the right bit
  return sign | (((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3));
}
DEV u32 fp8_pair(float low, float high) { return to_fp8(low) | to_fp8(high) << 8; }
DEV u32 fp16_of_fp8(u32 x) {  // exponent and mantissa are shifted into place and multiplied by 2^8, the difference of the biases
  u32 size = (x & 0x7fu) << 7 | (x & 0x7f00u) << 15;
  if ((x & 0x7fu) == 0x7fu) size |= 0x7fffu;
  if ((x & 0x7f00u) == 0x7f00u) size |= 0x7fff0000u;
  return mul_fp16x2(size | (x & 0x80u) << 8 | (x & 0x8000u) << 16, 0x5c005c00u);
}
#endif

// Of each half of a word: ones where its sign is set; bits of a where `mask` has ones, of b elsewhere.
DEV u32 sign_mask(u32 x) { return permute_bytes(x, 0u, 0xBB99u); }
DEV u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

DEV float minus_infinity() { return __int_as_float(0xff800000); }
constexpr float LOG2_E = 1.4426950408889634f;

// A logit s in the softmax's denominator alone, beside tokens whose sum of exponentials is l, relative to 2^m: l becomes 2^m l + 2^s, relative to the larger
// of both powers. Returns what the tokens' outputs are multiplied by to be relative to it, too.
DEV float add_sink_logit(float s, float& m, float& l) {
  const float top = l > 0.f ? fmaxf(m, s) : s, by = l > 0.f ? exp2_(m - top) : 0.f;
  l = l * by + (s > minus_infinity() ? exp2_(s - top) : 0.f);
  m = top;
  return by;
}

template <int TYPE> DEV float load_number(const void* p, s64 i) {
  if (TYPE == 2) return ((const float*)p)[i];
  const u32 x = ((const u16*)p)[i];
  return low<TYPE>(x);
}
template <int TYPE> DEV void store_number(void* p, s64 i, float x) {
  if (TYPE == 2) ((float*)p)[i] = x;
  else ((u16*)p)[i] = (u16)(TYPE == 0 ? bf16_pair(x, 0.f) : fp16_pair(x, 0.f));
}

// C += A B on the tensor cores, A and B in bfloat16 (TYPE 0) or float16 (TYPE 1). Shapes and lanes as mma_fp16.
template <int TYPE> DEV void mma_16bit(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (TYPE == 0) mma_bf16(c, a0, a1, a2, a3, b0, b1);
  else mma_fp16(c, a0, a1, a2, a3, b0, b1);
}

// --- words ------------------------------------------------------------------------------------------------------------

// N words from p, in the widest loads that N allows; p is aligned to them.
template <int N> DEV void load_words(u32* w, const u8* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const uint4 v = ((const uint4*)p)[i];
      w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const uint2 v = ((const uint2*)p)[i];
      w[2 * i] = v.x, w[2 * i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = ((const u32*)p)[i];
  }
}
template <int N> DEV void store_words(u8* p, const u32* w) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) ((uint4*)p)[i] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) ((uint2*)p)[i] = {w[2 * i], w[2 * i + 1]};
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) ((u32*)p)[i] = w[i];
  }
}

template <int N> DEV void load_floats(float* x, const float* p) {  // aligned to N floats where N is 2 or 4
  if constexpr (N == 4) {
    const float4 v = *(const float4*)p;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else if constexpr (N == 2) {
    const float2 v = *(const float2*)p;
    x[0] = v.x, x[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = p[i];
  }
}

// Elements i to i + 3 of an array of TYPE, i a multiple of 4, in registers as they lie in memory.
template <int TYPE> struct Quad {
  u32 w[TYPE == 2 ? 4 : 2];

  DEV void clear() {
#pragma unroll
    for (int k = 0; k < (TYPE == 2 ? 4 : 2); k++) w[k] = 0u;
  }
  DEV void load(const void* p, s64 i) { load_words<TYPE == 2 ? 4 : 2>(w, (const u8*)p + i * (TYPE == 2 ? 4 : 2)); }
  DEV float get(int k) const { return TYPE == 2 ? __uint_as_float(w[TYPE == 2 ? k : 0]) : k % 2 ? high<TYPE>(w[k / 2]) : low<TYPE>(w[k / 2]); }
};
template <int TYPE> DEV void load_four(float* x, const void* p, s64 i) {
  Quad<TYPE> four;
  four.load(p, i);
#pragma unroll
  for (int k = 0; k < 4; k++) x[k] = four.get(k);
}
template <int TYPE> DEV void store_four(void* p, s64 i, const float* x) {
  if constexpr (TYPE == 2) *(float4*)((float*)p + i) = make_float4(x[0], x[1], x[2], x[3]);
  else {
    const u32 w[2] = {pair_of<TYPE>(x[0], x[1]), pair_of<TYPE>(x[2], x[3])};
    store_words<2>((u8*)p + i * 2, w);
  }
}

// Stores N numbers as fp8; p is aligned to them, or to 16 bytes.
template <int N> DEV void store_fp8(u8* p, const float* x) {
  if constexpr (N % 4 == 0) {
    u32 w[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) w[i] = fp8_pair(x[4 * i], x[4 * i + 1]) | fp8_pair(x[4 * i + 2], x[4 * i + 3]) << 16;
    store_words<N / 4>(p, w);
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) ((u16*)p)[i] = (u16)fp8_pair(x[2 * i], x[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) p[i] = (u8)fp8_pair(x[i], 0.f);
  }
}

// --- reductions over lanes ---------------------------------------------------------------------------------------------

DEV float warp_sum(float x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}
DEV float warp_max(float x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
  return x;
}

// Floats as integers in the same order, which one instruction reduces over a warp.
DEV int to_ordered(float x) { const int i = __float_as_int(x); return i ^ (i >> 31 & 0x7fffffff); }
DEV float from_ordered(int i) { return __int_as_float(i ^ (i >> 31 & 0x7fffffff)); }

DEV float max_abs(const float* x) { return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))); }  // of four numbers
// The power of two that scales magnitudes of at most `top` to below one, and its inverse.
DEV float scale_below_one(float top) { return __uint_as_float((253u - (__float_as_uint(top) >> 23)) << 23); }
DEV float unscale_below_one(float top) { return __uint_as_float(((__float_as_uint(top) >> 23) + 1u) << 23); }

// Over the four lanes t = 0..3 of a row g of an MMA accumulator.
DEV float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
}
DEV float quad_sum(float x) {
  x += __shfl_xor_sync(FULL, x, 1);
  return x + __shfl_xor_sync(FULL, x, 2);
}
