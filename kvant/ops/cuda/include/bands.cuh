// Bands of channels: neighbouring channels whose codes have the same number of bits. A stream with one width has one band.

#pragma once
#include "include/ptx.cuh"

// WIDTH channels from channel FIRST on. Their codes of BITS bits lie from byte OFFSET of the page of a head on. Codes of 3 bits lie in two
// planes: the two low bits at OFFSET, the third bit at HIGH_OFFSET. A band of 0 bits has no codes.
// Levels are STEP times the scale apart: STEP_BITS are the bits of that float, and WEIGHT is it as a multiple of 2^-20, which is what
// decode multiplies by.
template <int WIDTH_, int BITS_, int OFFSET_, int HIGH_OFFSET_, int FIRST_, u32 STEP_BITS_, int WEIGHT_> struct Band {
  static constexpr int WIDTH = WIDTH_, BITS = BITS_, OFFSET = OFFSET_, HIGH_OFFSET = HIGH_OFFSET_, FIRST = FIRST_, TOP = (1 << BITS) - 1;
  static constexpr u32 STEP_BITS = STEP_BITS_;
  static constexpr float WEIGHT = WEIGHT_ / 1048576.f;
  DEV static bool has(int channel) { return channel >= FIRST && channel < FIRST + WIDTH; }
};

// The positive ones of the edges between neighbouring levels, over the scale, as the bits of floats.
template <u32... BITS> struct LevelEdges {
  DEV static int count_below(float x) { return (0 + ... + (int)(x > __uint_as_float(BITS))); }
};

template <class... B> struct Bands {
  static constexpr int CHANNELS = (B::WIDTH + ...), COUNT = sizeof...(B);  // of all bands
  DEV static int bits(int channel) { return ((B::has(channel) ? B::BITS : 0) + ...); }
  DEV static float step(int channel) { return __uint_as_float(((B::has(channel) ? B::STEP_BITS : 0u) | ...)); }
  // Calls f(B{}) for every band.
  template <class F> DEV static void each(F f) { (f(B{}), ...); }
};
