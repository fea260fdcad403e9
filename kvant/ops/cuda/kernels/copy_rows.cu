// Copies overlay rows to other overlay rows in all layers. An earlier kernel has chosen the pairs on the device; a pair whose target
// is the padding row copies nothing.
//
// Grid: (pairs, layers). The threads of a CTA copy one row of one layer, 16 bytes each at a time.

#pragma once
#include "include/ptx.cuh"

extern "C" __global__ void __launch_bounds__(Config::THREADS) kvant_copy_rows(const CopyRowsArguments a) {
  const s64 from = a.source[blockIdx.x], to = a.target[blockIdx.x];
  if (to == a.padding_row || to == from) return;
  const uint4* in = a.x + blockIdx.y * a.layer_stride + from * a.row_stride;
  uint4* out = a.x + blockIdx.y * a.layer_stride + to * a.row_stride;
  for (s64 i = threadIdx.x; i < a.words; i += Config::THREADS) out[i] = in[i];
}
