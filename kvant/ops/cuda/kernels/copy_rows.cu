// Rows of windows to other rows, for pairs of them that a kernel before has found: those that nobody wants cost nothing.
//

#include "include/ptx.cuh"

struct CopyArguments {
  uint4* x;  // [layers, rows, ...]
  const s64 *source, *target;  // of rows; a target of `nobody` is left out
  s64 layer, row, words;  // of 16 bytes: from layer to layer, from row to row, to copy of a row
  int nobody;
};

extern "C" __global__ void __launch_bounds__(THREADS) kvant_copy_rows(const CopyArguments a) {
  const s64 from = a.source[blockIdx.x], to = a.target[blockIdx.x];
  if (to == a.nobody || to == from) return;
  const uint4* in = a.x + blockIdx.y * a.layer + from * a.row;
  uint4* out = a.x + blockIdx.y * a.layer + to * a.row;
  for (s64 i = threadIdx.x; i < a.words; i += THREADS) out[i] = in[i];
}
