// Merges attention over two parts of the keys: O = w O_a + (1 - w) O_b with w = 1 / (1 + exp(lse_b - lse_a)), the share of part a in the
// sum of exponentials. Part a has sequences of `rows` rows each; part b and the result have the rows of all sequences one after another.
//
// Grid: any number of CTAs. A thread merges VECTOR channels of one row and head at a time: 16 bytes of each part.

#pragma once
#include "include/math.cuh"

extern "C" __global__ void __launch_bounds__(Config::THREADS) kvant_merge_parts(const MergePartsArguments a) {
  constexpr int TYPE = Config::IN_TYPE, VECTOR = 8, VECTORS = Config::HEAD_DIM / VECTOR;
  const s64 count = (s64)a.sequences * a.rows * a.heads * VECTORS;
  for (s64 i = (s64)blockIdx.x * Config::THREADS + threadIdx.x; i < count; i += (s64)gridDim.x * Config::THREADS) {
    const int vector = i % VECTORS, head = i / VECTORS % a.heads;
    const s64 row = i / VECTORS / a.heads;  // of all sequences
    const s64 sequence = row / a.rows, own = row % a.rows;
    const float first = a.lse_a[sequence * a.lse_a_sequence + own * a.lse_a_row + head * a.lse_a_head];
    const float second = a.lse_b[row * a.lse_b_row + head * a.lse_b_head];
    const float w = 1.f / (1.f + exp2_((second - first) * 1.4426950408889634f));  // log2(e)
    const s64 at = sequence * a.out_a_sequence + own * a.out_a_row + head * a.out_a_head + vector * VECTOR;
    u32 x[VECTOR / 2], y[VECTOR / 2], z[VECTOR / 2];
    load_words<VECTOR / 2>(x, (const u8*)a.out_a + 2 * at);
    load_words<VECTOR / 2>(y, (const u8*)a.out_b + 2 * VECTOR * i);
    const auto merged = [&](float p, float q) { return fmaf(w, p - q, q); };
#pragma unroll
    for (int j = 0; j < VECTOR / 2; j++)
      z[j] = pair_of<Config::OUT_TYPE>(merged(low<TYPE>(x[j]), low<TYPE>(y[j])), merged(high<TYPE>(x[j]), high<TYPE>(y[j])));
    store_words<VECTOR / 2>((u8*)a.out + 2 * VECTOR * i, z);
  }
}
