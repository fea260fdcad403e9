// The limit at which a row that a whole warp holds is clipped, by ranks of its magnitudes. What counts is the number of steps that wait for each other: one row is
// searched at a time, so that the search of encode_affine.cuh, a count after each guess, would take eight of them and more.
//
//   histogram   of eight bins around the place that a row of normal numbers would be clipped at: two additions over the warp. The bin of a magnitude never rises with
//               it, so that the bin that holds m[drop], and its rank there, are exact whatever the rounding. Bins of 1.2 standard deviations of that rank: one histogram
//               nearly always does, otherwise the bin is divided again
//   walk        down the magnitudes of that bin, from the largest one: a maximum over the warp each, one or two of them on average
//
// Of rows of finite numbers, the result is that of ClipSearch, bit by bit.

#pragma once
#include "codecs/encode_affine.cuh"

struct ClipBins {
  float slope, offset;  // of the first histogram: a magnitude of s mean magnitudes is at offset - slope s of [0, 1]

  DEV explicit ClipBins(const Clip& clip) {
    slope = rsqrtf((float)clip.drop) * reciprocal_approx(clip.gap * (7.f * 1.2f));
    offset = fmaf(slope, clip.start, 0.5f);
  }
};

struct ClipRank {
  static constexpr int HISTOGRAMS = 4, WALK = 4;  // histograms, at most; steps of a walk that cost no more than another histogram
  static constexpr u32 FIRST = 0x4B400000u;       // bits of ROUNDER: of bin 0, which has the largest magnitudes
  float slope, offset;
  u32 chosen;  // bits of the bin that holds m[drop]
  int rank;    // of m[drop] in it

  // Bits of the bin of a magnitude: FIRST to FIRST + 7.
  DEV u32 bin(float x) const { return __float_as_uint(fmaf(fma_held(fabsf(x), -slope, offset), 7.f, ROUNDER)); }

  template <int N> DEV void count(const float* x, int drop) {
    static_assert(Config::HEAD_DIM < 256, "counts are bytes");
    u32 low = 0u, high = 0u;  // a byte a bin
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u64 one = 1ull << (bin(x[i]) * 8u - FIRST * 8u);
      low += (u32)one, high += (u32)(one >> 32);
    }
    low = __reduce_add_sync(FULL, low) * 0x01010101u;  // a byte: how many magnitudes are in this bin and in those before
    high = __reduce_add_sync(FULL, high) * 0x01010101u + (low >> 24) * 0x01010101u;
    const u32 most = 0x80808080u + (u32)drop * 0x01010101u;
    const int before = __popc((most - low) & 0x80808080u) + __popc((most - high) & 0x80808080u);  // bins that end before m[drop]
    chosen = FIRST + (u32)before;
    rank = drop - (int)(__byte_perm(low << 8, low >> 24 | high << 8, (u32)before) & 255u);
  }
  // Divides the chosen bin into bins 1 to 6; its ends may be rounded, so that 0 and 7 have a part of it, too.
  template <int N> DEV void divide(const float* x) {
    const float place = (float)(int)(chosen - FIRST), back = reciprocal_approx(slope);
    float top = (offset - (place - 0.5f) * (1.f / 7.f)) * back, end = (offset - (place + 0.5f) * (1.f / 7.f)) * back;
    if (chosen == FIRST) {
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < N; i++) largest = fmaxf(largest, fabsf(x[i]));
      top = __int_as_float(__reduce_max_sync(FULL, __float_as_int(largest)));
    }
    if (chosen == FIRST + 7u) end = 0.f;
    if (!(top > end)) return;  // equal, as far as floats tell: the walk finds them. The slope stays positive, or the order of bins would turn around
    slope = reciprocal_approx(top - end) * (6.f / 7.f), offset = fmaf(slope, top, 0.5f / 7.f);
  }
  // m[drop] and m[drop - 1], as integers.
  template <int N> DEV void find(const float* x, int drop, int& size, int& larger) const {
    int sizes[N], above = 0x7fffffff, next = 0;  // magnitudes of the chosen bin, others are 0; the least one of the bins before
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u32 place = bin(x[i]);
      const int bits = __float_as_int(fabsf(x[i]));
      sizes[i] = place == chosen ? bits : 0;
      next = max(next, sizes[i]), above = min(above, place < chosen ? bits : 0x7fffffff);
    }
    size = __reduce_max_sync(FULL, next), larger = __reduce_min_sync(FULL, above);
    int reached = 0;  // magnitudes of the bin that are at least `size`; none counted yet
    while (reached < rank) {
      int many = 0;
      next = 0;
#pragma unroll
      for (int i = 0; i < N; i++) many += sizes[i] >= size, next = max(next, sizes[i] < size ? sizes[i] : 0);
      reached = __reduce_add_sync(FULL, many), next = __reduce_max_sync(FULL, next);
      larger = size;
      if (reached <= rank) size = next;  // otherwise m[drop - 1] and m[drop] are equal
    }
  }
};

// The limit of a row of which every lane has N channels. `inverse_mean` is about one over its mean magnitude; where it is far off, as of a row that is small beside the mean
// that was subtracted, only the number of steps depends on it. clip.drop > 0.
template <int N> DEV float clip_limit_of_warp(const float* x, float inverse_mean, const ClipBins& bins, const Clip& clip) {
  ClipRank found;
  found.slope = bins.slope * fabsf(inverse_mean), found.offset = bins.offset;
  found.count<N>(x, clip.drop);
#pragma unroll 1
  for (int k = 1; k < ClipRank::HISTOGRAMS && found.rank > ClipRank::WALK; k++) found.divide<N>(x), found.count<N>(x, clip.drop);
  int size, larger;
  found.find<N>(x, clip.drop, size, larger);
  const float least = __int_as_float(larger), most = __int_as_float(size), apart = least - most;
  return clip.share < 0.5f ? fmaf(clip.share, apart, most) : fmaf(clip.share - 1.f, apart, least);
}
