// Rows of new tokens: a row is one head's key or value vector of one token, [D]. Eight lanes hold a row in registers, LANE_CHANNELS
// neighbouring channels each; `j` is a lane's number among the eight.

#pragma once
#include "codecs/tokenwise.cuh"
#include "include/tokens.cuh"

constexpr int D = Config::HEAD_DIM, LANE_CHANNELS = D / 8;
constexpr bool POWER_OF_TWO_CHANNELS = (LANE_CHANNELS & (LANE_CHANNELS - 1)) == 0;

// Loads LANE_CHANNELS numbers of an ElementType from element `at` on.
template <int TYPE> DEV void load_row(float* x, const void* p, s64 at) {
  if constexpr (TYPE == ElementType::FP32) {
    u32 w[LANE_CHANNELS];
    load_words<LANE_CHANNELS>(w, (const u8*)p + at * 4);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) x[i] = __uint_as_float(w[i]);
  } else {
    u32 w[LANE_CHANNELS / 2];
    load_words<LANE_CHANNELS / 2>(w, (const u8*)p + at * 2);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS / 2; i++) x[2 * i] = low<TYPE>(w[i]), x[2 * i + 1] = high<TYPE>(w[i]);
  }
}

// x = H diag(signs) x * factor for blocks of ORDER channels, with the sums in the order of kvant.transforms.hadamard: log2(ORDER) passes of
// sums and differences (a, b) -> (a + b, a - b), then one multiplication. Pairs inside a lane's channels are in registers, others are a
// shuffle away. Where a lane's channels are no power of two, passes go through `scratch` [D] in shared memory.
template <int ORDER> DEV void apply_hadamard(float* x, const float* signs, float factor, int j, float* scratch) {
  if (signs)
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) x[i] *= signs[j * LANE_CHANNELS + i];
  if constexpr (POWER_OF_TWO_CHANNELS) {
#pragma unroll
    for (int half = 1; half < ORDER; half *= 2) {
      if (half < LANE_CHANNELS) {
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++)
          if (!(i & half)) {
            const float first = x[i], second = x[(i + half) % LANE_CHANNELS];
            x[i] = first + second, x[(i + half) % LANE_CHANNELS] = first - second;
          }
      } else {
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
          const float other = __shfl_xor_sync(FULL, x[i], half / LANE_CHANNELS);
          x[i] = fmaf(x[i], j & half / LANE_CHANNELS ? -1.f : 1.f, other);
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) scratch[j * LANE_CHANNELS + i] = x[i];
    for (int half = 1; half < ORDER; half *= 2) {
      __syncwarp();
      for (int i = j; i < D / 2; i += 8) {
        const int e = i / half * 2 * half + i % half;
        const float first = scratch[e], second = scratch[e + half];
        scratch[e] = first + second, scratch[e + half] = first - second;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) x[i] = scratch[j * LANE_CHANNELS + i];
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) x[i] *= factor;
}

// The place of a new token in the overlay [rows, OVERLAY_TOKENS], or -1 where the overlay does not hold it. It holds the first SINK tokens of
// a sequence, and the last RING_TOKENS ones in a ring of RING places.
template <class A> DEV s64 overlay_place(const A& a, int token) {
  const int b = sequence_of(a, token);
  const s64 length = a.seq_lens[b], position = length - (a.query_start_loc[b + 1] - token);
  if (position >= Config::SINK && position < length - Config::RING_TOKENS) return -1;
  return a.overlay_rows[b] * Config::OVERLAY_TOKENS + (position < Config::SINK ? position : Config::SINK + (position - Config::SINK) % Config::RING);
}

// Stores a row of a new token in the overlay of its stream, where the overlay holds the token.
template <class A> DEV void store_overlay(const A& a, void* overlay, const float* x, int token, int head, int j) {
  if constexpr (Config::OVERLAY_TOKENS > 0) {
    const s64 at = overlay_place(a, token);
    if (at < 0) return;
    u32* p = (u32*)((u16*)overlay + (at * Config::KV_HEADS + head) * D + j * LANE_CHANNELS);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS / 2; i++) p[i] = pair_of<Config::OVERLAY_TYPE>(x[2 * i], x[2 * i + 1]);
  }
}
