/* ARM with the dot-product instruction. It takes signed codes: those of eight bits go in two parts. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>
#define LANE_COUNT 4
#define NAME(x) x##_neon
#include "vector.h"

INLINE vi dot4(vi acc, vu codes, int32_t numbers, int wide) {
  int8x16_t n = vreinterpretq_s8_s32(vdupq_n_s32(numbers));
  uint8x16_t c = vreinterpretq_u8_u32((uint32x4_t)codes);
  if (!wide) return (vi)vdotq_s32((int32x4_t)acc, vreinterpretq_s8_u8(c), n);
  int8x16_t half = vreinterpretq_s8_u8(vshrq_n_u8(c, 1)), bit = vreinterpretq_s8_u8(vandq_u8(c, vdupq_n_u8(1)));
  int32x4_t sum = vdotq_s32(vdotq_s32((int32x4_t)acc, half, n), half, n);
  return (vi)vdotq_s32(sum, bit, n);
}

INLINE vf fused(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }

INLINE float total_of(vf x) { return vaddvq_f32((float32x4_t)x); }
INLINE float top_of(vf x) { return vmaxvq_f32((float32x4_t)x); }

#include "operations.h"
const Isa KVANT_NEON = {"NEON with dot products", NAME(prepare), NAME(split), NAME(merge), NAME(append), NAME(append_groups), NAME(read)};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kvant_not_arm;
#endif
