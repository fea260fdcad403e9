// Converts rows of 16-bit floats to another 16-bit type, for up to three tensors in one launch. A tensor has sequences * rows rows, its
// result [sequences, padded_rows] of them; rows that are padding are zeros, which no NaN can come from in attention.
//
// Grid: any number of CTAs. A thread converts VECTOR numbers of one row at a time: 16 bytes.

#pragma once
#include "include/math.cuh"

// Vector i of a result whose rows have `vectors` of them.
DEV void convert_vector(const ConvertRowsArguments& a, const void* in, void* out, s64 stride, u32 vectors, u32 i) {
  constexpr int TYPE = Config::IN_TYPE, VECTOR = 8;
  const u32 row = i / vectors, sequence = row / (u32)a.padded_rows, own = row % (u32)a.padded_rows;
  u32 w[VECTOR / 2] = {0u, 0u, 0u, 0u};
  if (own < (u32)a.rows) {
    load_words<VECTOR / 2>(w, (const u8*)in + 2 * (((s64)sequence * a.rows + own) * stride + i % vectors * VECTOR));
    if constexpr (TYPE != Config::OUT_TYPE) {
#pragma unroll
      for (int j = 0; j < VECTOR / 2; j++) w[j] = pair_of<Config::OUT_TYPE>(low<TYPE>(w[j]), high<TYPE>(w[j]));
    }
  }
  store_words<VECTOR / 2>((u8*)out + 2 * VECTOR * (s64)i, w);
}

extern "C" __global__ void __launch_bounds__(Config::THREADS) kvant_convert_rows(const ConvertRowsArguments a) {
  const u32 all = (u32)a.sequences * a.padded_rows, first = all * a.vectors_a, second = all * a.vectors_b, third = all * a.vectors_c;
  for (u32 i = blockIdx.x * Config::THREADS + threadIdx.x; i < first + second + third; i += gridDim.x * Config::THREADS) {
    if (i < first) convert_vector(a, a.in_a, a.out_a, a.stride_a, a.vectors_a, i);
    else if (i < first + second) convert_vector(a, a.in_b, a.out_b, a.stride_b, a.vectors_b, i - first);
    else convert_vector(a, a.in_c, a.out_c, a.stride_c, a.vectors_c, i - first - second);
  }
}
