/* x86 with AVX2: pairs of products in 16 bits, which never saturate since the numbers stay within 64. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#define LANE_COUNT 8
#define NAME(x) x##_avx2
#include "vector.h"

INLINE vi dot4(vi acc, vu codes, int32_t numbers, int wide) {
  (void)wide;
  __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(numbers));
  return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

#include "operations.h"
const Isa KVANT_AVX2 = {"AVX2", NAME(prepare), NAME(split), NAME(merge), NAME(append), NAME(read)};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kvant_not_x86;
#endif
