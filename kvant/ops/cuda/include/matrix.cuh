// Rows times a matrix in float32, plus an offset.

#pragma once
#include "include/math.cuh"

constexpr int MATRIX_ROWS = 8, MATRIX_THREADS = 4 * Config::HEAD_DIM;  // rows at once, and threads of a block
static_assert(Config::HEAD_DIM % 16 == 0, "a quarter of a column is whole vectors");

// A block has a matrix [Config::HEAD_DIM, Config::HEAD_DIM], in registers, a quarter of a column a thread, and gridDim.x-th of `all` rows. `begin` is called
// when the matrix is asked for, `next` before every few rows with the first and their number; `load` and `store` are given a row and a channel.
template <class Begin, class Next, class Load, class Store>
DEV void times_matrix(const float* matrix, const float* offset, int all, Begin begin, Next next, Load load, Store store) {
  constexpr int D = Config::HEAD_DIM;
  __shared__ __align__(16) float x[MATRIX_ROWS][D], part[4][MATRIX_ROWS][D];
  const int i = threadIdx.x % D, slice = threadIdx.x / D;
  float m[D / 4];
#pragma unroll
  for (int e = 0; e < D / 4; e++) m[e] = __ldg(matrix + (slice * (D / 4) + e) * D + i);
  begin();
  const float more = offset ? offset[i] : 0.f;
  const int each = (all + gridDim.x - 1) / gridDim.x, end = min(all, (int)(blockIdx.x + 1) * each);
  for (int first = blockIdx.x * each; first < end; first += MATRIX_ROWS) {
    const int count = min(MATRIX_ROWS, end - first);
    next(first, count);
    for (int j = threadIdx.x; j < count * D; j += MATRIX_THREADS) x[j / D][i] = load(first + j / D, i);  // 4 D is a multiple of D: channel i
    __syncthreads();
    for (int row = 0; row < count; row++) {
      float y = 0.f;
#pragma unroll
      for (int e = 0; e < D / 4; e += 4) {
        const float4 v = *(const float4*)&x[row][slice * (D / 4) + e];
        y = fmaf(v.w, m[e + 3], fmaf(v.z, m[e + 2], fmaf(v.y, m[e + 1], fmaf(v.x, m[e], y))));
      }
      part[slice][row][i] = y;
    }
    __syncthreads();
    for (int row = threadIdx.x / D; row < count; row += 4)
      store(first + row, i, part[0][row][i] + part[1][row][i] + part[2][row][i] + part[3][row][i] + more);
    __syncthreads();
  }
}
