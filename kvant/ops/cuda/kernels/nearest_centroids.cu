// The nearest centroid of every new row, for streams that code the residual of a centroid of the whole head vector: indices to pages, and to the append
// kernels, which subtract the centroids.
//
// Grid: (any, 2 KV_HEADS). A CTA has one stream of one head, whose centroids it holds in shared memory, and takes 32 rows at a time: eight lanes a row while
// they are transformed. A warp then multiplies all 32 rows by every WARPS-th 8 centroids on the tensor cores, rows in one or two parts of fp16.
//
// The nearest centroid c of x has the largest score x.c - |c|^2 / 2, computed in float32. Where the second best is so near that rounding may have changed
// their order, all are compared again in float64, which is what kvant/codecs/codebook.py does. The first of equals is taken.

#pragma once
#include "include/math.cuh"
#include "include/page_codes.cuh"
#include "include/rows.cuh"

constexpr int ROWS = 32, WARPS = Config::WARPS, THREADS = WARPS * 32;
static_assert(ROWS == 4 * WARPS, "eight lanes a row");
constexpr int ROW = D + 8;  // 16-bit numbers from a row to the next: rows begin in different banks

template <bool KEY> struct CentroidStreamConfig : Config::Key {};
template <> struct CentroidStreamConfig<false> : Config::Value {};

template <bool KEY> struct CentroidStream : CentroidStreamConfig<KEY> {
  using Base = CentroidStreamConfig<KEY>;
  // 16-bit rows that nothing is done to are one part
  static constexpr int PARTS = Base::IN_TYPE == ElementType::FP32 || Base::HADAMARD > 1 || Base::MEAN ? 2 : 1;
  static constexpr int TILES = (Base::CENTROIDS + 7) / 8;
  DEV static const void* rows(const NearestArguments& a) { return KEY ? a.key : a.value; }
  DEV static const float* mean(const NearestArguments& a) { return KEY ? a.key_mean : a.value_mean; }
  DEV static const float* signs(const NearestArguments& a) { return KEY ? a.key_signs : a.value_signs; }
  DEV static const u16* book(const NearestArguments& a, int head) { return (const u16*)(KEY ? a.key_books : a.value_books) + (s64)(Base::BOOK_HEADS > 1 ? head : 0) * Base::CENTROIDS * D; }
  DEV static u8* indices(const NearestArguments& a) { return KEY ? a.key_indices : a.value_indices; }
};

struct Nearest {  // the best two scores of a row
  float first, second;
  int index;  // of the first
  DEV void add(float score, int i) {
    second = fmaxf(second, fminf(score, first));
    if (score > first) first = score, index = i;
  }
  DEV void merge(const Nearest& other) {
    second = fmaxf(fmaxf(second, other.second), fminf(first, other.first));
    if (other.first > first || (other.first == first && other.index < index)) first = other.first, index = other.index;
  }
};

// The shared memory of a CTA.
template <class S> struct NearestShared {
  u16 book[S::TILES * 8 * ROW];       // centroids
  u16 parts[S::PARTS][ROWS * ROW];    // rows times a power of two, high and low
  float halves[S::TILES * 8];         // |c|^2 / 2; infinity where there is no centroid
  float rows[ROWS * D];
  float back[ROWS], size[ROWS];       // what undoes the power of two; |x|^2
  Nearest best[WARPS][ROWS];
  float largest[WARPS];
};

template <class S> DEV float load_book(NearestShared<S>& sh, const u16* book) {  // returns the largest |c|^2
  constexpr int EACH = D / 8;  // 16 bytes
  for (int i = threadIdx.x; i < S::TILES * 8 * EACH; i += THREADS)
    *(uint4*)(sh.book + i / EACH * ROW + i % EACH * 8) = i / EACH < S::CENTROIDS ? ((const uint4*)book)[i] : uint4{0u, 0u, 0u, 0u};
  __syncthreads();
  float top = 0.f;
  for (int i = threadIdx.x; i < S::TILES * 8; i += THREADS) {
    float size = 0.f;
    for (int k = 0; k < D / 2; k++) {
      const u32 w = ((const u32*)(sh.book + i * ROW))[k];
      size = fmaf(fp16_low(w), fp16_low(w), fmaf(fp16_high(w), fp16_high(w), size));
    }
    sh.halves[i] = i < S::CENTROIDS ? size * 0.5f : -minus_infinity();
    top = fmaxf(top, size);
  }
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
  if (threadIdx.x % 32 == 0) sh.largest[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; i++) top = fmaxf(top, sh.largest[i]);
  return top;
}

// Transforms the rows of tokens [first, first + ROWS), x = H diag(signs) x - mean, to shared memory.
template <class S> DEV void prepare_rows(const NearestArguments& a, NearestShared<S>& sh, int first, int head) {
  const int row = threadIdx.x / 8, j = threadIdx.x % 8, token = min(first + row, a.tokens - 1);
  float x[LANE_CHANNELS], top = 0.f, size = 0.f;
  load_row<S::IN_TYPE>(x, S::rows(a), ((s64)token * Config::KV_HEADS + head) * D + j * LANE_CHANNELS);
  if constexpr (S::HADAMARD > 1) apply_hadamard<S::HADAMARD>(x, S::signs(a), S::HADAMARD_SCALE, j, sh.rows + row * D);
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) {
    if constexpr (S::MEAN) x[i] -= S::mean(a)[head * D + j * LANE_CHANNELS + i];
    sh.rows[row * D + j * LANE_CHANNELS + i] = x[i];
    top = fmaxf(top, fabsf(x[i])), size = fmaf(x[i], x[i], size);
  }
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o)), size += __shfl_xor_sync(FULL, size, o);
  const u32 exponent = min(max(__float_as_uint(top) >> 23, 8u), 254u);  // a power of two brings the row close to 2^8
  const float by = __uint_as_float((261u - exponent) << 23);
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i += 2) {
    const float y = x[i] * by, z = x[i + 1] * by;
    const u32 high = fp16_pair(y, z);
    u32* to = (u32*)(sh.parts[0] + row * ROW + j * LANE_CHANNELS + i);
    *to = high;
    if constexpr (S::PARTS > 1) to[ROWS * ROW / 2] = fp16_pair(y - fp16_low(high), z - fp16_high(high));
  }
  if (j == 0) sh.back[row] = __uint_as_float((exponent - 7u) << 23), sh.size[row] = size;
  __syncthreads();
}

// The best two of a warp's centroids for all rows.
template <class S> DEV void search_book(NearestShared<S>& sh, int warp, int lane) {
  constexpr int STEPS = D / 16;
  const int g = lane >> 2, t = lane & 3;
  u32 x[S::PARTS][2][STEPS][4];
#pragma unroll
  for (int p = 0; p < S::PARTS; p++)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int k = 0; k < STEPS; k++) ldmatrix_x4(x[p][m][k], sh.parts[p] + (m * 16 + (lane >> 3 & 1) * 8 + (lane & 7)) * ROW + k * 16 + (lane >> 4) * 8);
  float back[2][2];
  Nearest best[2][2];  // of rows 16 m + 8 r + g
#pragma unroll
  for (int i = 0; i < 4; i++) back[i / 2][i % 2] = sh.back[i / 2 * 16 + i % 2 * 8 + g], best[i / 2][i % 2] = {minus_infinity(), minus_infinity(), 0};
#pragma unroll 1
  for (int tile = warp; tile < S::TILES; tile += WARPS) {
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {
      u32 b[4];
      ldmatrix_x4(b, sh.book + (tile * 8 + (lane & 7)) * ROW + min(k * 16 + (lane >> 3) * 8, D - 8));
#pragma unroll
      for (int p = S::PARTS - 1; p >= 0; p--)
#pragma unroll
        for (int m = 0; m < 2; m++) {
          mma_fp16(c[m], x[p][m][k][0], x[p][m][k][1], x[p][m][k][2], x[p][m][k][3], b[0], b[1]);
          if (k + 1 < STEPS) mma_fp16(c[m], x[p][m][(k + 1) % STEPS][0], x[p][m][(k + 1) % STEPS][1], x[p][m][(k + 1) % STEPS][2], x[p][m][(k + 1) % STEPS][3], b[2], b[3]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = tile * 8 + 2 * t + e;
      const float half = sh.halves[i];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) best[m][r].add(fmaf(c[m][2 * r + e], back[m][r], -half), i);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Nearest& mine = best[i / 2][i % 2];
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) mine.merge({__shfl_xor_sync(FULL, mine.first, o), __shfl_xor_sync(FULL, mine.second, o), __shfl_xor_sync(FULL, mine.index, o)});
    if (t == 0) sh.best[warp][i / 2 * 16 + i % 2 * 8 + g] = mine;
  }
  __syncthreads();
}

// The nearest centroid of a row, by scores in float64, by a warp.
template <class S> DEV int nearest_exactly(const NearestShared<S>& sh, int row, int lane) {
  double best = -1e300;
  int index = 0;
  for (int i = lane; i < S::CENTROIDS; i += 32) {
    double score = 0., size = 0.;
    for (int k = 0; k < D / 2; k++) {
      const u32 w = ((const u32*)(sh.book + i * ROW))[k];
      const double y = fp16_low(w), z = fp16_high(w);
      score += (double)sh.rows[row * D + 2 * k] * y + (double)sh.rows[row * D + 2 * k + 1] * z, size += y * y + z * z;
    }
    score -= size * 0.5;
    if (score > best) best = score, index = i;
  }
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const double other = __shfl_xor_sync(FULL, best, o);
    const int i = __shfl_xor_sync(FULL, index, o);
    if (other > best || (other == best && i < index)) best = other, index = i;
  }
  return index;
}

template <class S> DEV void find_centroids(const NearestArguments& a, u8* dynamic, int head) {
  NearestShared<S>& sh = *(NearestShared<S>*)dynamic;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if ((int)blockIdx.x * ROWS >= a.tokens) return;
  const float top = load_book(sh, S::book(a, head));
  for (int first = blockIdx.x * ROWS; first < a.tokens; first += gridDim.x * ROWS) {
    prepare_rows(a, sh, first, head);
    search_book(sh, warp, lane);
    for (int row = warp; row < ROWS && first + row < a.tokens; row += WARPS) {
      Nearest best = sh.best[0][row];
#pragma unroll
      for (int i = 1; i < WARPS; i++) best.merge(sh.best[i][row]);
      // a score is off by at most D + 2 roundings of sums that are no larger than |x| |c| + |c|^2 / 2
      const float doubt = (D + 4) * 1.2e-7f * (sqrtf(sh.size[row] * top) + top * 0.5f);
      const int index = best.first - best.second > doubt ? best.index : nearest_exactly(sh, row, lane);
      const s64 slot = a.slot_mapping[first + row];
      if (lane == 0) {
        S::indices(a)[(s64)(first + row) * Config::KV_HEADS + head] = (u8)index;
        if (slot >= 0) page_head_of(a, slot, head)[S::INDEX_OFFSET + (int)((u64)slot % Config::PAGE_TOKENS)] = (u8)index;
      }
    }
    __syncthreads();  // before the next rows
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) kvant_nearest_centroids(const NearestArguments a) {
  DYNAMIC_SHARED(dynamic);
  const int head = blockIdx.y % Config::KV_HEADS;
  if (blockIdx.y < Config::KV_HEADS) {
    if constexpr (Config::Key::CENTROIDS > 1) find_centroids<CentroidStream<true>>(a, dynamic, head);
  } else {
    if constexpr (Config::Value::CENTROIDS > 1) find_centroids<CentroidStream<false>>(a, dynamic, head);
  }
}
