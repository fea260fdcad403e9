// Merges attention over two parts of the keys: O = w O_a + (1 - w) O_b with w = 1 / (1 + exp(lse_b - lse_a)), the share of part a in the
// sum of exponentials. Both parts have sequences of `rows` rows each, which the result has one after another.
//
// Grid: any number of CTAs. A thread merges VECTOR channels of one row and head at a time: 16 bytes of each part.

#pragma once
#include "include/math.cuh"

extern "C" __global__ void __launch_bounds__(Config::THREADS) kvant_merge_parts(const MergePartsArguments a) {
  constexpr int TYPE = Config::IN_TYPE, VECTOR = 8, VECTORS = Config::HEAD_DIM / VECTOR;
  const u32 count = (u32)a.sequences * a.rows * a.heads * VECTORS;
  for (u32 i = blockIdx.x * Config::THREADS + threadIdx.x; i < count; i += gridDim.x * Config::THREADS) {
    const u32 vector = i % VECTORS, head = i / VECTORS % (u32)a.heads, row = i / VECTORS / (u32)a.heads;  // of all sequences
    const s64 sequence = row / (u32)a.rows, own = row % (u32)a.rows;
    const float first = a.lse_a[sequence * a.lse_a_sequence + own * a.lse_a_row + head * a.lse_a_head];
    const float second = a.lse_b[sequence * a.lse_b_sequence + own * a.lse_b_row + head * a.lse_b_head];
    const float w = 1.f / (1.f + exp2_((second - first) * 1.4426950408889634f));  // log2(e)
    const s64 at_a = sequence * a.out_a_sequence + own * a.out_a_row + head * a.out_a_head + vector * VECTOR;
    const s64 at_b = sequence * a.out_b_sequence + own * a.out_b_row + head * a.out_b_head + vector * VECTOR;
    u32 x[VECTOR / 2], y[VECTOR / 2], z[VECTOR / 2];
    load_words<VECTOR / 2>(x, (const u8*)a.out_a + 2 * at_a);
    load_words<VECTOR / 2>(y, (const u8*)a.out_b + 2 * at_b);
    const auto merged = [&](float p, float q) { return fmaf(w, p - q, q); };
#pragma unroll
    for (int j = 0; j < VECTOR / 2; j++)
      z[j] = pair_of<Config::OUT_TYPE>(merged(low<TYPE>(x[j]), low<TYPE>(y[j])), merged(high<TYPE>(x[j]), high<TYPE>(y[j])));
    store_words<VECTOR / 2>((u8*)a.out + 2 * VECTOR * (s64)i, z);
  }
}
