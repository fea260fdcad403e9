/* What the two instruction sets of ARM share: NEON with dot products (neon.c) and, with MATRIX, the 8-bit matrix products beside them
 * (i8mm.c). The sums of integers are exact, so both give the same bits.
 *
 * A product has codes of four lanes, a word of four bytes each, and limbs of up to four queries. sdot takes a word of the limbs by its
 * index in a register, so that nothing is broadcast. usmmla multiplies two lanes by both limbs, two words at a time. */
#include <arm_neon.h>
#define LANE_COUNT 4
#define SIGNED_CODES 1
#define ARM 1
#include "vector.h"

/* Older versions of Clang declare the intrinsics only where the whole file is compiled for the instructions. */
#if defined(__ARM_FEATURE_DOTPROD)
#define DOT(acc, codes, numbers) vdotq_s32(acc, codes, numbers)
#else
#define DOT(acc, codes, numbers) \
  ({ int32x4_t x_ = acc; __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(x_) : "w"(codes), "w"(numbers)); x_; })
#endif
/* vdotq_laneq_s32 and vusmmlaq_s32, around which GCC 12 copies sums from register to register: ten copies to 64 dot products. */
#define DOT_WORD(acc, codes, numbers, word) \
  ({ int32x4_t x_ = acc; __asm__("sdot %0.4s, %1.16b, %2.4b[" #word "]" : "+w"(x_) : "w"(codes), "w"(numbers)); x_; })
#define MATRIX_DOT(acc, codes, numbers) \
  ({ int32x4_t x_ = acc; __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(x_) : "w"(codes), "w"(numbers)); x_; })

/* sdot multiplies signed bytes, so a code c of eight bits is split: c = 2 (c >> 1) + (c & 1). */
INLINE vi dot4(vi acc, vu codes, int32_t numbers, int wide) {
  const int8x16_t n = vreinterpretq_s8_s32(vdupq_n_s32(numbers));
  const uint8x16_t c = vreinterpretq_u8_u32((uint32x4_t)codes);
  if (!wide) return (vi)DOT((int32x4_t)acc, vreinterpretq_s8_u8(c), n);
  const int8x16_t half = vreinterpretq_s8_u8(vshrq_n_u8(c, 1)), bit = vreinterpretq_s8_u8(vandq_u8(c, vdupq_n_u8(1)));
  int32x4_t sum = DOT((int32x4_t)acc, half, n);
  sum = DOT(sum, half, n);
  return (vi)DOT(sum, bit, n);
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

/* Bits by which the codes of plane SLOT may stay above the lowest bit of their bytes: without a shift, where they are still bytes that
 * can be multiplied. They are then 2^bits times too large. */
INLINE int bits_above(const int BITS, const int SLOT) { return BITS * (SLOT + 1) < 8 ? BITS * SLOT : 0; }

/* Codes in plane SLOT of 16 bytes at p; IN_PLACE: bits_above their place. Codes of eight bits less 128 where signed bytes are multiplied. */
INLINE uint8x16_t plane_codes(const uint8_t *p, const int BITS, const int SLOT, const int IN_PLACE) {
  uint8x16_t codes = vld1q_u8(p);
  if (BITS == 8) return MATRIX ? codes : codes ^ (uint8_t)128;
  if (IN_PLACE && (SLOT == 0 || bits_above(BITS, SLOT))) return codes & (uint8_t)(((1 << BITS) - 1) << BITS * SLOT);
  if (BITS == 1 || SLOT) codes = codes >> (uint8_t)(BITS * SLOT);
  return BITS == 1 || BITS * (SLOT + 1) < 8 ? codes & (uint8_t)((1 << BITS) - 1) : codes;
}

/* Limbs of two words of four numbers, high ones then low ones, as add_words takes them; `single`: of one word, the rest is 0. */
INLINE int8x16_t limb_pair(const int8_t *high, const int8_t *low, int single) {
  if (!single) return vcombine_s8(vld1_s8(high), vld1_s8(low));
  return vreinterpretq_s8_s32((int32x4_t){word(high), 0, word(low), 0});
}

/* Adds the products of WORDS words: 1, 2 or 4. Vector k of codes is plane SLOT + k * STEP at base[k]; its words lie `stride` bytes
 * apart. `limbs` are those of every query for the first two words, then those for the next two. Without MATRIX `one` are sums with high
 * limbs and `two` with low ones, of four lanes. With it `one` are sums of the lower two lanes, `two` of the upper two, with both limbs. */
INLINE void add_words(const int QUERIES, const int VECTORS, const int WORDS, const int BITS, const int SLOT, const int STEP,
                      const int IN_PLACE, const uint8_t *const *base, int64_t stride, const int8x16_t *limbs, int32x4_t (*one)[4], int32x4_t (*two)[4]) {
#if MATRIX
#define PAIR(word)                                                                                                        \
  if (word < WORDS)                                                                                                       \
    for (int k = 0; k < VECTORS; k++) {                                                                                   \
      const uint32x4_t a = vreinterpretq_u32_u8(plane_codes(base[k] + word * stride, BITS, SLOT + k * STEP, IN_PLACE));             \
      uint32x4_t b = {};                                                                                                  \
      if (word + 1 < WORDS) b = vreinterpretq_u32_u8(plane_codes(base[k] + (word + 1) * stride, BITS, SLOT + k * STEP, IN_PLACE));  \
      const uint8x16_t lower = vreinterpretq_u8_u32(vzip1q_u32(a, b)), upper = vreinterpretq_u8_u32(vzip2q_u32(a, b));    \
      for (int g = 0; g < QUERIES; g++) {                                                                                 \
        one[k][g] = MATRIX_DOT(one[k][g], lower, limbs[word / 2 * QUERIES + g]);                                          \
        two[k][g] = MATRIX_DOT(two[k][g], upper, limbs[word / 2 * QUERIES + g]);                                          \
      }                                                                                                                   \
    }
  PAIR(0)
  PAIR(2)
#undef PAIR
#else
#define WORD(word, in_high, in_low)                                                                                       \
  if (word < WORDS)                                                                                                       \
    for (int k = 0; k < VECTORS; k++) {                                                                                   \
      const int8x16_t codes = vreinterpretq_s8_u8(plane_codes(base[k] + word * stride, BITS, SLOT + k * STEP, IN_PLACE));           \
      for (int g = 0; g < QUERIES; g++) {                                                                                 \
        one[k][g] = DOT_WORD(one[k][g], codes, limbs[word / 2 * QUERIES + g], in_high);                                   \
        two[k][g] = DOT_WORD(two[k][g], codes, limbs[word / 2 * QUERIES + g], in_low);                                    \
      }                                                                                                                   \
    }
  WORD(0, 0, 2)
  WORD(1, 1, 3)
  WORD(2, 0, 2)
  WORD(3, 1, 3)
#undef WORD
#endif
}

/* x + ROUNDER, with ROUNDER = 1.5 * 2^23, is a float that has the integer round(x), |x| <= 2^22, in its low bits. So integers become
 * floats, and floats integers, without the instructions that convert, of which Neoverse-N1 starts one in two cycles. */
#define ROUNDER 12582912.0f
#define ROUNDER_BITS 0x4b400000

/* BASE high + low as floats, of the sums of add_words that began with ROUNDER_BITS: they are floats already. Rounded once. */
INLINE vf joined(const float BASE, int32x4_t first, int32x4_t second) {
  const int32x4_t high = MATRIX ? vuzp1q_s32(first, second) : first, low = MATRIX ? vuzp2q_s32(first, second) : second;
  return fused((vf)high - splat(ROUNDER), splat(BASE), (vf)low - splat(ROUNDER));
}

/* v mod 2^16 of 16 integers. */
INLINE int16x8x2_t lower_halves(const vi *v) {
  return (int16x8x2_t){{vuzp1q_s16(vreinterpretq_s16_s32((int32x4_t)v[0]), vreinterpretq_s16_s32((int32x4_t)v[1])),
                        vuzp1q_s16(vreinterpretq_s16_s32((int32x4_t)v[2]), vreinterpretq_s16_s32((int32x4_t)v[3]))}};
}

/* Limbs of 16 integers from -8128 to 8128, v = 128 high + low. */
INLINE void store_limbs(const vi *v, int8_t *high, int8_t *low) {
  const int16x8x2_t x = lower_halves(v);
  const int8x16_t upper = vrshrn_high_n_s16(vrshrn_n_s16(x.val[0], 7), x.val[1], 7); /* (v + 64) >> 7 */
  const int8x16_t lower = vuzp1q_s8(vreinterpretq_s8_s16(x.val[0]), vreinterpretq_s8_s16(x.val[1]));
  vst1q_s8(high, upper);
  /* the low byte of v - (h << 7), which may wrap around on the way: as unsigned bytes */
  vst1q_s8(low, vreinterpretq_s8_u8(vsubq_u8(vreinterpretq_u8_s8(lower), vshlq_n_u8(vreinterpretq_u8_s8(upper), 7))));
}

/* Wide limbs of 16 integers from -32639 to 32639, v = 256 high + low: low is the lower byte of v, as a signed one. */
INLINE void wide_limbs(int16x8_t a, int16x8_t b, int8x16_t *high, int8x16_t *low) {
  *high = vrshrn_high_n_s16(vrshrn_n_s16(a, 8), b, 8); /* (v + 128) >> 8 */
  *low = vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b));
}

/* The same as two limb_pairs, `stride` vectors apart. */
INLINE void store_limb_pairs(const vi *v, int8x16_t *pairs, int stride) {
  const int16x8x2_t x = lower_halves(v);
  int8x16_t upper, lower;
  wide_limbs(x.val[0], x.val[1], &upper, &lower);
  pairs[0] = vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(upper), vreinterpretq_s64_s8(lower)));
  pairs[stride] = vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(upper), vreinterpretq_s64_s8(lower)));
}
