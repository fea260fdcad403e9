/* Vectors of LANE_COUNT 32-bit lanes, by the compiler's vector extension.
 *
 * The file that includes this one defines LANE_COUNT before, and after it the functions that need the instruction set:
 *   dot4            acc[lane] += sum of four unsigned 8-bit codes times four signed 8-bit numbers
 *   fused           a * b + c
 *   sum_of, max_of  sum and maximum of the lanes
 *   lanes_at_least  bit mask of the lanes that are >= a number
 *   lookup          levels[index] of a table of 16 floats
 * SIGNED_CODES is 1 where dot4 multiplies signed bytes, so that codes beyond 127 take more instructions (`wide`).
 * ARM is 1 where the functions of arm.h are there. */
#include <math.h>
#include <string.h>

#include "kvant.h"

#ifndef ARM
#define ARM 0
#endif
#define INLINE static inline __attribute__((always_inline))
#define BYTES (4 * LANE_COUNT)

typedef int32_t vi __attribute__((vector_size(BYTES)));
typedef uint32_t vu __attribute__((vector_size(BYTES)));
typedef float vf __attribute__((vector_size(BYTES)));
typedef int8_t vc __attribute__((vector_size(LANE_COUNT)));
typedef double vd __attribute__((vector_size(BYTES)));
typedef float v4 __attribute__((vector_size(16)));
typedef uint16_t vh __attribute__((vector_size(BYTES / 2)));

INLINE vu load_bytes(const uint8_t *p) { vu x; memcpy(&x, p, sizeof x); return x; }
#if ARM /* of memcpy GCC 12 makes two moves to integer registers and a store of these */
INLINE vf load_floats(const float *p) { return (vf)vld1q_f32(p); }
INLINE void store_floats(float *p, vf x) { vst1q_f32(p, (float32x4_t)x); }
#else
INLINE vf load_floats(const float *p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE void store_floats(float *p, vf x) { memcpy(p, &x, sizeof x); }
#endif
INLINE vf splat(float x) { return x - (vf){}; } /* x - 0 is x for every x; x + 0 would make +0 of -0 */
INLINE vf floats(vi x) { return __builtin_convertvector(x, vf); }
INLINE int32_t word(const int8_t *p) { int32_t w; memcpy(&w, p, 4); return w; }

/* Lane-wise minimum and maximum; b where a is NaN. */
#if LANE_COUNT == 16
INLINE vf lowest(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vf highest(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#elif LANE_COUNT == 8
INLINE vf lowest(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vf highest(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#elif ARM /* one instruction: the number where one of them is NaN */
INLINE vf lowest(vf a, vf b) { return (vf)vminnmq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf highest(vf a, vf b) { return (vf)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf lowest(vf a, vf b) { vi less = a < b; return (vf)((less & (vi)a) | (~less & (vi)b)); }
INLINE vf highest(vf a, vf b) { vi more = a > b; return (vf)((more & (vi)a) | (~more & (vi)b)); }
#endif
INLINE vf choose(vi which, vf a, vf b) { return (vf)((which & (vi)a) | (~which & (vi)b)); }
INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* 16-bit floats to float32. bfloat16: the upper half of the bits. float16: exponent and mantissa are shifted into place, then
 * multiplied by 2^112, the difference of the exponent biases. */
INLINE vf widen(vh half, int type) {
#if LANE_COUNT == 16 /* one instruction; GCC compiles the other line to five */
  vu bits = (vu)_mm512_cvtepu16_epi32((__m256i)half);
#elif ARM
  if (type == BFLOAT16) return (vf)vshll_n_u16((uint16x4_t)half, 16);
  vu bits = (vu)vmovl_u16((uint16x4_t)half);
#else
  vu bits = __builtin_convertvector(half, vu);
#endif
  if (type == BFLOAT16) return (vf)(bits << 16);
  vf small = (vf)((bits & 0x7fff) << 13) * splat(0x1p112f);
  return (vf)((vu)small | (bits & 0x8000) << 16);
}
INLINE vf load_halves(const void *p, int type) { vh x; memcpy(&x, p, sizeof x); return widen(x, type); }

INLINE float widen_one(uint16_t half, int type) {
  uint32_t bits = type == BFLOAT16 ? (uint32_t)half << 16 : (uint32_t)(half & 0x7fff) << 13;
  float x;
  memcpy(&x, &bits, 4);
  if (type == BFLOAT16) return x;
  x *= 0x1p112f;
  return half & 0x8000 ? -x : x;
}

/* fp8 (e4m3) to float32. Exponent and mantissa are shifted into place, as if there were no subnormals; with an exponent of zero that gives 2^-7 (1 + m / 8)
 * instead of 2^-6 m / 8. A factor of 2^120 would mend all of them, but a product with a subnormal float is slow. */
typedef uint8_t vb __attribute__((vector_size(LANE_COUNT)));
INLINE vf load_fp8(const uint8_t *p) {
  vb bytes;
  memcpy(&bytes, p, sizeof bytes);
  const vu bits = __builtin_convertvector(bytes, vu);
  const vf size = (vf)(((bits & 0x7f) << 20) + (120u << 23));
  const vf found = choose((vi)((bits & 0x78) == 0), size + size - splat(0x1p-6f), size);
  return (vf)((vu)choose((vi)((bits & 0x7f) == 0x7f), splat(NAN), found) | (bits & 0x80) << 24);
}
INLINE float widen_fp8(uint8_t x) {
  const int top = x >> 3 & 15, m = x & 7;
  const float size = (x & 127) == 127 ? NAN : top ? ldexpf((float)(8 + m), top - 10) : (float)m * 0x1p-9f;
  return x & 128 ? -size : size;
}
/* Rounds to the nearest, ties to even; what is beyond the largest number becomes that, 448. */
INLINE uint8_t narrow_fp8(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint8_t sign = (uint8_t)(bits >> 24 & 128);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint8_t)(sign | 127);
  if (bits >= 0x43e00000) return (uint8_t)(sign | 126);
  if (bits < 0x3c800000) { /* below 2^-6, subnormal: adding 2^14 rounds the mantissa at the right bit */
    float size;
    memcpy(&size, &bits, 4);
    size += 0x1p14f;
    memcpy(&bits, &size, 4);
    return (uint8_t)(sign | (bits - 0x46800000));
  }
  bits += 0x7ffff + (bits >> 20 & 1);
  return (uint8_t)(sign | ((bits >> 20) - (120 << 3)));
}
/* Bytes of a number. */
INLINE int type_bytes(int type) { return type == FLOAT32 ? 4 : type == FP8 ? 1 : 2; }

INLINE float load_one(const void *p, int64_t i, int type) {
  return type == FLOAT32 ? ((const float *)p)[i] : widen_one(((const uint16_t *)p)[i], type);
}

/* Rounds to the nearest 16-bit float, ties to even, as torch does. */
INLINE uint16_t narrow_one(float x, int type) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (type == BFLOAT16) {
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and larger rounds to infinity */
  if (size < 0x38800000) { /* subnormal: adding 0.5 rounds the mantissa at the right bit */
    float small, magic = 0.5f;
    memcpy(&small, &size, 4);
    small += magic;
    uint32_t sum;
    memcpy(&sum, &small, 4);
    return (uint16_t)(sign | (sum - 0x3f000000));
  }
  size += 0xfff + (size >> 13 & 1);
  return (uint16_t)(sign | (size - 0x38000000) >> 13);
}
INLINE float rounded_one(float x, int type) { return widen_one(narrow_one(x, type), type); }

INLINE void store_one(void *p, int64_t i, int type, float x) {
  if (type == FLOAT32)
    ((float *)p)[i] = x;
  else if (type == FP8)
    ((uint8_t *)p)[i] = narrow_fp8(x);
  else
    ((uint16_t *)p)[i] = narrow_one(x, type);
}
