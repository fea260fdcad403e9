/* x86 with AVX-512 and VNNI, whose instruction is dot4. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,prefer-vector-width=512")
#endif
#include <immintrin.h>
#define LANE_COUNT 16
#define SIGNED_CODES 0
#define NAME(x) x##_avx512
#include "vector.h"

INLINE vi dot4(vi acc, vu codes, int32_t numbers, int wide) {
  (void)wide;
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(numbers));
}

INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

INLINE float sum_of(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float max_of(vf x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE unsigned lanes_at_least(vf x, float least) { return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ); }

INLINE vf lookup(const float *levels, vi index) {
  return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(levels));
}

#include "operations.h"
const Isa KVANT_AVX512 = {"AVX-512 VNNI", NAME(prepare), NAME(split), NAME(merge), NAME(check), NAME(append), NAME(append_groups), NAME(read)};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kvant_not_x86;
#endif
