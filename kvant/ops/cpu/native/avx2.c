/* x86 with AVX2. dot4 adds pairs of products in 16 bits, which cannot saturate: the signed numbers are limbs within +-64. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#define LANE_COUNT 8
#define SIGNED_CODES 0
#define NAME(x) x##_avx2
#include "vector.h"

INLINE vi dot4(vi acc, vu codes, int32_t numbers, int wide) {
  (void)wide;
  __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(numbers));
  return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

INLINE float sum_of(vf x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE float max_of(vf x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
INLINE unsigned lanes_at_least(vf x, float least) {
  return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(least), _CMP_GE_OQ));
}

INLINE vf lookup(const float *levels, vi index) {
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), (__m256i)index);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), (__m256i)index);
  return (vf)_mm256_blendv_ps(low, high, (__m256)(index << 28));
}

#include "operations.h"
const Isa KVANT_AVX2 = {"AVX2", NAME(prepare), NAME(split), NAME(merge), NAME(check), NAME(append), NAME(append_groups), NAME(read)};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kvant_not_x86;
#endif
