// Walsh-Hadamard transform of a row that the lanes of a warp hold together.

#pragma once
#include "include/math.cuh"

// Quads of a lane: it holds channels 4 (lane + 32 j) to 4 (lane + 32 j) + 3 of a row, j < LANE_QUADS, where they are below HEAD_DIM.
constexpr int LANE_QUADS = (Config::HEAD_DIM / 4 + 31) / 32;

// x <- H x / sqrt(ORDER) on every ORDER neighbouring channels: log2(ORDER) butterflies, between lanes where channels lie in others.
template <int ORDER> DEV void hadamard(float (*x)[4], int lane) {
#pragma unroll
  for (int half = 1; half < ORDER; half *= 2)
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (half >= 4 && half < 128) {
          const float other = __shfl_xor_sync(FULL, x[j][i], half / 4);
          x[j][i] = lane & half / 4 ? other - x[j][i] : x[j][i] + other;
        } else if (half < 4 ? !(i & half) : !(j & half / 128)) {
          float &first = x[j][i], &second = x[half < 4 ? j : (j + half / 128) % LANE_QUADS][half < 4 ? (i + half) % 4 : i];
          const float sum = first + second;
          second = first - second, first = sum;
        }
      }
  const float by = rsqrtf((float)ORDER);
#pragma unroll
  for (int j = 0; j < LANE_QUADS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) x[j][i] *= by;
}
