// New tokens by a stream's matrix, before the kernel of append: turned back to the start of their block of positions where they are
// stored so, times the matrix, plus an offset. The text before it is ptx.cu and common.cu.
//
// Constants beside those of common.cu: IN_TYPE, TURNED (positions of a block, 0 where nothing is turned back).

struct StoredArguments {
  const void* in;  // [tokens, KV_HEADS, D]
  float* out;
  const float *matrix, *offset, *cosine, *sine;  // [1 or KV_HEADS, D, D], [1 or KV_HEADS, D] or nothing, [blocks, half] twice
  const s64 *starts, *lengths;
  int tokens, batch, half_batch, matrix_heads, offset_heads, half, first, blocks;
};

constexpr int D = HEAD_DIM;
constexpr int MATRIX_ROWS = 8, MATRIX_THREADS = 4 * HEAD_DIM;  // rows at once, and threads of a block
static_assert(HEAD_DIM % 16 == 0, "a quarter of a column is whole vectors");

// Rows times a matrix in float32, plus an offset. A block has a matrix [D, D], in registers, a quarter of a column a thread, and gridDim.x-th of
// `all` rows. `next` is called before every few rows with the first and their number; `load` and `store` are given a row and a channel.
template <class Next, class Load, class Store>
DEV void times_matrix(const float* matrix, const float* offset, int all, Next next, Load load, Store store) {
  __shared__ __align__(16) float x[MATRIX_ROWS][D], part[4][MATRIX_ROWS][D];
  const int i = threadIdx.x % D, slice = threadIdx.x / D;
  float m[D / 4];
#pragma unroll
  for (int e = 0; e < D / 4; e++) m[e] = __ldg(matrix + (slice * (D / 4) + e) * D + i);
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

// The block of positions of a new token. Padding has any.
DEV int block_of(const StoredArguments& a, int token) {
  const int b = sequence_of(a, token), position = (int)(a.lengths[b] - a.starts[b + 1]) + token;
  return min(max((position + a.first) / max(TURNED, 1) - a.first / max(TURNED, 1), 0), a.blocks - 1);
}

extern "C" __global__ void __launch_bounds__(MATRIX_THREADS) kvant_stored(const StoredArguments a) {
  __shared__ int block[MATRIX_ROWS];
  const int head = blockIdx.y;
  const auto place = [&](int token) { return ((s64)token * KV_HEADS + head) * D; };
  const auto next = [&](int first, int count) {
    if (!TURNED) return;
    if (threadIdx.x < count) block[(first + threadIdx.x) % MATRIX_ROWS] = block_of(a, first + threadIdx.x);
    __syncthreads();
  };
  const auto load = [&](int token, int e) {
    const float y = load_number<IN_TYPE>(a.in, place(token) + e);
    if (!TURNED || e >= 2 * a.half) return y;
    const bool second = e >= a.half;
    const s64 at = (s64)block[token % MATRIX_ROWS] * a.half + (second ? e - a.half : e);
    const float other = load_number<IN_TYPE>(a.in, place(token) + (second ? e - a.half : e + a.half));
    return y * a.cosine[at] + (second ? -other : other) * a.sine[at];
  };
  times_matrix(
      a.matrix + (s64)(head % a.matrix_heads) * D * D, a.offset ? a.offset + head % a.offset_heads * D : nullptr, a.tokens, next, load,
      [&](int token, int e, float y) { a.out[place(token) + e] = y; });
}
