// Keys with several scales a token, one for each group of channels.
//
// S = sum_j scale_j (q_j . code_j) + min_j sum(q_j) over groups j. The 32 channels that an MMA sums are of one group, so that a group has accumulators
// of its own; they are scaled and added as floats.

#pragma once
#include "codecs/tokenwise.cuh"

// As KeyPlane, where GROUPS groups of channels have a scale each: of every group, lane t has the t-th quarter, and registers 2m and 2m + 1 hold elements 8m
// to 8m + 7 of a lane (kvant/layout.py).
template <int WIDTH_, int BITS_, int OFFSET_, int WEIGHT_, int GROUPS_> struct GroupedKeyPlane : KeyPlane<WIDTH_, BITS_, OFFSET_, 0, WEIGHT_, 0> {
  using Base = KeyPlane<WIDTH_, BITS_, OFFSET_, 0, WEIGHT_, 0>;
  static constexpr int GROUPS = GROUPS_, GROUP = WIDTH_ / GROUPS, SHARE = GROUP / 4;
  static_assert(GROUP % 32 == 0 && WIDTH_ * BITS_ % 128 == 0, "an MMA sums channels of one group, and lanes have whole words");
  static constexpr int GROUP_REGISTERS = Base::REGISTERS / GROUPS;

  DEV static int channel(int i, int byte, int t) {
    const int element = i / 2 * 8 + ((byte & 1) * 2 + i % 2) * 2 + (byte >> 1);
    return element / SHARE * GROUP + t * SHARE + element % SHARE;
  }
};
