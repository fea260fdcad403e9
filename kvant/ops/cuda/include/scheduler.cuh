// Which units of work are a block's: over all (sequence, head)s laid end to end. Arguments are those that a kernel has a `work_of`.
//

#pragma once
#include "include/common.cuh"

// Units are dealt to blocks as evenly as can be: the first `more` blocks have `each` + 1, the others `each`.
struct Deal {
  int each, more;
  DEV int start(int block) const { return block * each + min(block, more); }
  DEV int block(int unit) const { return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each; }
};

DEV int warp_sum_int(int x) { return __reduce_add_sync(FULL, x); }
DEV int quotient(int x, int by) {  // exact; a division of integers takes several times as long
  const int near = (int)__fdividef((float)x, (float)by), rest = x - near * by;
  return near + (rest >= by) - (rest < 0);
}
DEV int parts_of(int units, float share) { return max(1, (int)((float)units * share)); }

// The sequence b that a unit is of, and the units of all heads of the sequences before it. `own` are those of the lane-th sequence.
template <int HEAD_TILES, class A> DEV void find(const A& a, int unit, bool split, float share, int own, int lane, int& b, int& before) {
  b = before = 0;
  for (int base = 0; base < a.batch; base += 32) {
    int units = own;
    if (base) units = base + lane < a.batch ? work_of(a, base + lane).units : 0;
    if (split && base + lane < a.batch) units = parts_of(units, share);
    int sum = units;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int x = __shfl_up_sync(FULL, sum, o);
      if (lane >= o) sum += x;
    }
    const u32 beyond = __ballot_sync(FULL, before + sum * HEAD_TILES > unit);
    if (beyond) {
      const int found = __ffs(beyond) - 1;
      b = base + found;
      before += __shfl_sync(FULL, sum - units, found) * HEAD_TILES;
      return;
    }
    before += __shfl_sync(FULL, sum, 31) * HEAD_TILES;
  }
}
