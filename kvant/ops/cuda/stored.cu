// New tokens by a stream's matrix, before the kernel of append: turned back to the start of their block of positions where they are
// stored so, times the matrix, plus an offset. The text before it is ptx.cu and common.cu.
//
// Constants beside those of common.cu: IN_TYPE, TURNED (positions of a block, 0 where nothing is turned back).

struct StoredArguments {
  const void* in;  // [tokens, KV_HEADS, D]
  float* out;
  const float *matrix, *offset, *cosine, *sine;  // [1 or KV_HEADS, D, D], [1 or KV_HEADS, D] or nothing, [blocks, half] twice
  const s64 *starts, *lengths;
  int tokens, sequences, matrix_heads, offset_heads, half, first, blocks;
};

constexpr int D = HEAD_DIM, AT_ONCE = 8;
static_assert(D % 16 == 0, "a quarter of a column is whole vectors");

// The block of positions of a new token. Padding has any.
DEV int block_of(const StoredArguments& a, int token) {
  int low = 0, high = a.sequences - 1;  // the sequence is the first that ends beyond the token
  while (low < high) {
    const int middle = (low + high) / 2;
    if (a.starts[middle + 1] > token) high = middle;
    else low = middle + 1;
  }
  const int position = (int)(a.lengths[low] - a.starts[low + 1]) + token;
  return min(max((position + a.first) / max(TURNED, 1) - a.first / max(TURNED, 1), 0), a.blocks - 1);
}

// A block of threads has a matrix, in registers, a quarter of a column a thread, and gridDim.x-th of the tokens.
extern "C" __global__ void __launch_bounds__(4 * D) kvant_stored(const StoredArguments a) {
  __shared__ __align__(16) float x[AT_ONCE][D], part[4][AT_ONCE][D];
  __shared__ int block[AT_ONCE];
  const int i = threadIdx.x % D, slice = threadIdx.x / D, head = blockIdx.y;
  float m[D / 4];
  const float* matrix = a.matrix + (s64)(head % a.matrix_heads) * D * D;
#pragma unroll
  for (int e = 0; e < D / 4; e++) m[e] = __ldg(matrix + (slice * (D / 4) + e) * D + i);
  const float offset = a.offset ? a.offset[head % a.offset_heads * D + i] : 0.f;
  const int each = (a.tokens + gridDim.x - 1) / gridDim.x, end = min(a.tokens, (int)(blockIdx.x + 1) * each);
  for (int first = blockIdx.x * each; first < end; first += AT_ONCE) {
    const int count = min(AT_ONCE, end - first);
    if (TURNED) {
      if (threadIdx.x < count) block[threadIdx.x] = block_of(a, first + threadIdx.x);
      __syncthreads();
    }
    for (int j = threadIdx.x; j < count * D; j += 4 * D) {
      const int row = j / D, e = j % D;
      const s64 place = ((s64)(first + row) * KV_HEADS + head) * D;
      float y = load_number<IN_TYPE>(a.in, place + e);
      if (TURNED && e < 2 * a.half) {
        const bool second = e >= a.half;
        const s64 at = (s64)block[row] * a.half + (second ? e - a.half : e);
        const float other = load_number<IN_TYPE>(a.in, place + (second ? e - a.half : e + a.half));
        y = y * a.cosine[at] + (second ? -other : other) * a.sine[at];
      }
      x[row][e] = y;
    }
    __syncthreads();
    for (int row = 0; row < count; row++) {
      float y = 0.f;
#pragma unroll
      for (int e = 0; e < D / 4; e += 4) {
        const float4 v = *(const float4*)&x[row][slice * (D / 4) + e];
        y = fmaf(v.x, m[e], fmaf(v.y, m[e + 1], fmaf(v.z, m[e + 2], fmaf(v.w, m[e + 3], y))));
      }
      part[slice][row][i] = y;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < count * D; j += 4 * D) {
      const int row = j / D;  // 4 D is a multiple of D: the channel is i
      a.out[((s64)(first + row) * KV_HEADS + head) * D + i] = part[0][row][i] + part[1][row][i] + part[2][row][i] + part[3][row][i] + offset;
    }
    __syncthreads();
  }
}
