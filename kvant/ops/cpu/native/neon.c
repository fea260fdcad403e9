/* ARM with the dot-product instruction. It multiplies signed bytes, so a code c of eight bits is split: c = 2 (c >> 1) + (c & 1). */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>
#define LANE_COUNT 4
#define SIGNED_CODES 1
#define NAME(x) x##_neon
#include "vector.h"

/* Older versions of Clang declare the intrinsic only where the whole file is compiled for the instruction. */
INLINE int32x4_t signed_dot(int32x4_t acc, int8x16_t codes, int8x16_t numbers) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, codes, numbers);
#else
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(codes), "w"(numbers));
  return acc;
#endif
}

INLINE vi dot4(vi acc, vu codes, int32_t numbers, int wide) {
  const int8x16_t n = vreinterpretq_s8_s32(vdupq_n_s32(numbers));
  const uint8x16_t c = vreinterpretq_u8_u32((uint32x4_t)codes);
  if (!wide) return (vi)signed_dot((int32x4_t)acc, vreinterpretq_s8_u8(c), n);
  const int8x16_t half = vreinterpretq_s8_u8(vshrq_n_u8(c, 1)), bit = vreinterpretq_s8_u8(vandq_u8(c, vdupq_n_u8(1)));
  return (vi)signed_dot(signed_dot(signed_dot((int32x4_t)acc, half, n), half, n), bit, n);
}

INLINE vf fused(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }

INLINE float sum_of(vf x) { return vaddvq_f32((float32x4_t)x); }
INLINE float max_of(vf x) { return vmaxvq_f32((float32x4_t)x); }
INLINE unsigned lanes_at_least(vf x, float least) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcgeq_f32((float32x4_t)x, vdupq_n_f32(least)), bits));
}

INLINE vf lookup(const float *levels, vi index) {
  vf out;
  for (int lane = 0; lane < LANE_COUNT; lane++) out[lane] = levels[index[lane]];
  return out;
}

#include "operations.h"
const Isa KVANT_NEON = {"NEON with dot products", NAME(prepare), NAME(split), NAME(merge), NAME(check), NAME(append), NAME(append_groups), NAME(read)};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kvant_not_arm;
#endif
