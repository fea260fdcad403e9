// Rows of new tokens: a row is one head's key or value vector of one token, [D]. LANES lanes of a warp hold a row in registers, D / LANES
// neighbouring channels each; `j` is a lane's number among them. LANES is 8 unless it is given: LANE_CHANNELS channels each.

#pragma once
#include "codecs/tokenwise.cuh"
#include "include/tokens.cuh"

constexpr int D = Config::HEAD_DIM, LANE_CHANNELS = D / 8;
constexpr bool POWER_OF_TWO_CHANNELS = (LANE_CHANNELS & (LANE_CHANNELS - 1)) == 0;  // of D / 32, too

// Loads D / LANES numbers of an ElementType from element `at` on.
template <int TYPE, int LANES = 8> DEV void load_row(float* x, const void* p, s64 at) {
  constexpr int N = D / LANES;
  if constexpr (TYPE == ElementType::FP32) {
    u32 w[N];
    load_words<N>(w, (const u8*)p + at * 4);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __uint_as_float(w[i]);
  } else if constexpr (N % 2 == 0) {
    u32 w[N / 2];
    load_words<N / 2>(w, (const u8*)p + at * 2);
#pragma unroll
    for (int i = 0; i < N / 2; i++) x[2 * i] = low<TYPE>(w[i]), x[2 * i + 1] = high<TYPE>(w[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = load_number<TYPE>(p, at + i);
  }
}

// x = H diag(signs) x * factor for blocks of ORDER channels, with the sums in the order of kvant.transforms.hadamard: log2(ORDER) passes of
// sums and differences (a, b) -> (a + b, a - b), then one multiplication. Pairs inside a lane's channels are in registers, others are a
// shuffle away. Where a lane's channels are no power of two, passes go through `scratch` [D] in shared memory.
template <int ORDER, int LANES = 8> DEV void apply_hadamard(float* x, const float* signs, float factor, int j, float* scratch) {
  constexpr int N = D / LANES;
  if (signs)
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= signs[j * N + i];
  if constexpr (POWER_OF_TWO_CHANNELS) {
#pragma unroll
    for (int half = 1; half < ORDER; half *= 2) {
      if (half < N) {
#pragma unroll
        for (int i = 0; i < N; i++)
          if (!(i & half)) {
            const float first = x[i], second = x[(i + half) % N];
            x[i] = first + second, x[(i + half) % N] = first - second;
          }
      } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
          const float other = __shfl_xor_sync(FULL, x[i], half / N);
          x[i] = fmaf(x[i], j & half / N ? -1.f : 1.f, other);
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) scratch[j * N + i] = x[i];
    for (int half = 1; half < ORDER; half *= 2) {
      __syncwarp();
      for (int i = j; i < D / 2; i += LANES) {
        const int e = i / half * 2 * half + i % half;
        const float first = scratch[e], second = scratch[e + half];
        scratch[e] = first + second, scratch[e + half] = first - second;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = scratch[j * N + i];
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < N; i++) x[i] *= factor;
}

// The place of a new token in the overlay [rows, OVERLAY_TOKENS], or -1 where the overlay does not hold it. It holds the first SINK tokens of
// a sequence, and the last RING_TOKENS ones in a ring of RING places.
DEV s64 overlay_place(s64 row, s64 length, s64 position) {
  if (position >= Config::SINK && position < length - Config::RING_TOKENS) return -1;
  return row * Config::OVERLAY_TOKENS + (position < Config::SINK ? position : Config::SINK + (position - Config::SINK) % Config::RING);
}
template <class A> DEV s64 overlay_place(const A& a, int token) {
  const int b = sequence_of(a, token);
  const s64 length = a.seq_lens[b];
  return overlay_place(a.overlay_rows[b], length, length - (a.query_start_loc[b + 1] - token));
}

// Stores a row of a new token at a place of the overlay of its stream, whose numbers are of TYPE; -1 is no place.
template <int TYPE, int LANES = 8> DEV void store_overlay_row(void* overlay, const float* x, s64 at, int head, int j) {
  constexpr int N = D / LANES;
  if (at < 0) return;
  const s64 first = (at * Config::KV_HEADS + head) * D + j * N;
  if constexpr (TYPE == ElementType::FP8) {
    store_fp8<N>((u8*)overlay + first, x);
  } else if constexpr (N % 2 == 0) {
    u32* p = (u32*)((u16*)overlay + first);
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = pair_of<TYPE>(x[2 * i], x[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) store_number<TYPE>(overlay, first + i, x[i]);
  }
}
// The same of a token that the overlay holds or not.
template <int TYPE, class A> DEV void store_overlay(const A& a, void* overlay, const float* x, int token, int head, int j) {
  if constexpr (Config::OVERLAY_TOKENS > 0) store_overlay_row<TYPE>(overlay, x, overlay_place(a, token), head, j);
}
// A key as the model gave it, of TYPE, to the overlay.
template <int TYPE, class A> DEV void store_raw_key(const A& a, int token, int head, int j) {
  if constexpr (Config::OVERLAY_TOKENS > 0) {
    float x[D / 8];
    load_row<TYPE>(x, a.raw_key, (s64)token * a.raw_stride + head * D + j * (D / 8));
    store_overlay<Config::OVERLAY_TYPE>(a, a.overlay_key, x, token, head, j);
  }
}
// Two numbers of a word in the overlay's type.
template <int TYPE> DEV u32 overlay_word(u32 w) {
  if constexpr (TYPE == Config::OVERLAY_TYPE) return w;
  else return pair_of<Config::OVERLAY_TYPE>(low<TYPE>(w), high<TYPE>(w));
}
