/* Any machine: vectors of four lanes in plain C, which the compiler lowers to the instructions it may use. */
#define LANE_COUNT 4
#define SIGNED_CODES 0
#define NAME(x) x##_generic
#include "vector.h"

INLINE vi dot4(vi acc, vu codes, int32_t numbers, int wide) {
  (void)wide;
  uint8_t c[BYTES];
  int8_t n[4];
  memcpy(c, &codes, sizeof c);
  memcpy(n, &numbers, sizeof n);
  for (int lane = 0; lane < LANE_COUNT; lane++)
    for (int i = 0; i < 4; i++) acc[lane] += c[4 * lane + i] * n[i];
  return acc;
}

INLINE vf fused(vf a, vf b, vf c) { return a * b + c; }

INLINE float sum_of(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE float max_of(vf x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
INLINE unsigned lanes_at_least(vf x, float least) {
  unsigned lanes = 0;
  for (int lane = 0; lane < LANE_COUNT; lane++) lanes |= (unsigned)(x[lane] >= least) << lane;
  return lanes;
}

INLINE vf lookup(const float *levels, vi index) {
  vf out;
  for (int lane = 0; lane < LANE_COUNT; lane++) out[lane] = levels[index[lane]];
  return out;
}

#include "operations.h"
const Isa KVANT_GENERIC = {"generic", NAME(prepare), NAME(split), NAME(merge), NAME(check), NAME(append), NAME(append_groups), NAME(read)};
