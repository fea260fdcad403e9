// What kernels that store new tokens share: rows, from what comes in to what is stored, and the full-precision windows.
//
// Eight lanes have a row, D / 8 neighbouring channels each; `j` is a lane's number among them. Constants beside those of common.cu:
// SINK, RING, RING_TOKENS, WINDOW_TOKENS, WINDOW_TYPE.

#pragma once
#include "include/common.cuh"
#include "include/tokens.cuh"

constexpr int D = HEAD_DIM, OWN = D / 8;

template <int TYPE> DEV void load_row(float* x, const void* p, s64 place) {
  if constexpr (TYPE == 2) {
    u32 w[OWN];
    load_words<OWN>(w, (const u8*)p + place * 4);
#pragma unroll
    for (int i = 0; i < OWN; i++) x[i] = __uint_as_float(w[i]);
  } else {
    u32 w[OWN / 2];
    load_words<OWN / 2>(w, (const u8*)p + place * 2);
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) x[2 * i] = low<TYPE>(w[i]), x[2 * i + 1] = high<TYPE>(w[i]);
  }
}

// As kvant.transforms.hadamard does it, sum for sum: passes of sums and differences, then one multiplication.
template <int ORDER> DEV void hadamard(float* x, const float* signs, float by, int j, float* scratch) {
  if (signs)
#pragma unroll
    for (int i = 0; i < OWN; i++) x[i] *= signs[j * OWN + i];
  if constexpr ((OWN & (OWN - 1)) == 0) {
#pragma unroll
    for (int half = 1; half < ORDER; half *= 2) {
      if (half < OWN) {
#pragma unroll
        for (int i = 0; i < OWN; i++)
          if (!(i & half)) {
            const float first = x[i], second = x[(i + half) % OWN];
            x[i] = first + second, x[(i + half) % OWN] = first - second;
          }
      } else {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          const float other = __shfl_xor_sync(FULL, x[i], half / OWN);
          x[i] = fmaf(x[i], j & half / OWN ? -1.f : 1.f, other);
        }
      }
    }
  } else {  // blocks do not end where lanes do: through shared memory
#pragma unroll
    for (int i = 0; i < OWN; i++) scratch[j * OWN + i] = x[i];
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
    for (int i = 0; i < OWN; i++) x[i] = scratch[j * OWN + i];
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) x[i] *= by;
}

// Where a new token lies in the windows, or -1: they have the sinks, and the last tokens in a ring.
template <class A> DEV s64 window_place(const A& a, int token) {
  const int b = sequence_of(a, token);
  const s64 length = a.seq_lens[b], position = length - (a.query_start_loc[b + 1] - token);
  if (position >= SINK && position < length - RING_TOKENS) return -1;
  return a.overlay_rows[b] * WINDOW_TOKENS + (position < SINK ? position : SINK + (position - SINK) % RING);
}

// Keeps a row of a new token in a window, where it has a place there.
template <class A> DEV void store_window(const A& a, void* window, const float* x, int token, int head, int j) {
#if WINDOW_TOKENS
  const s64 at = window_place(a, token);
  if (at < 0) return;
  u32* p = (u32*)((u16*)window + (at * KV_HEADS + head) * D + j * OWN);
#pragma unroll
  for (int i = 0; i < OWN / 2; i++) p[i] = WINDOW_TYPE == 0 ? bf16_pair(x[2 * i], x[2 * i + 1]) : fp16_pair(x[2 * i], x[2 * i + 1]);
#endif
}
