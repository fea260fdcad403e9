// Stores new tokens as indices of the nearest centroids: transform, search, page bytes and full-precision windows in one pass.
//
// A block has one stream (blockIdx.y), its codebook in shared memory, and ROWS rows at a time, eight lanes a row while they are
// transformed. Then every thread searches for some sub-vectors in all centroids, or, where there are few rows, in every PARTS-th.
//
// The nearest centroid has the largest x.c - |c|^2 / 2, computed in float32. Where the second best is so near that rounding may have
// changed their order, all are compared again in float64, which is what kvant/codecs/codebook.py does. The first of equals is taken.
//
// Constants beside those of common.cu and rows.cu: for KEY_ and VALUE_: TYPE (of the input), HADAMARD (order, 1 for none) and
// HADAMARD_SCALE, BOOK (DIM, COUNT, HIGH_BITS, OFFSET and HIGH, as in indices.cu), BOOK_HEADS (1 where heads share it); ROWS, THREADS.

#include "include/rows.cuh"

struct Arguments {
  const void *key, *value;
  const float *key_mean, *value_mean;  // [KV_HEADS, D], taken off first; or null
  const float *key_factors, *value_factors;  // [KV_HEADS, D], divided by; or null
  const float *key_signs, *value_signs;
  const u8 *key_books, *value_books;  // fp16 [KV_HEADS or 1, centroids, DIM]
  u8* pages;
  const s64 *slot_mapping, *query_start_loc, *seq_lens, *overlay_rows;
  void *window_key, *window_value;
  int tokens, batch, half_batch;  // the last is the largest power of two below the batch, or 0
};

template <int DIM_, int COUNT_, int HIGH_BITS_, int OFFSET_, int HIGH_> struct Book {
  static constexpr int DIM = DIM_, COUNT = COUNT_, HIGH_BITS = HIGH_BITS_, OFFSET = OFFSET_, HIGH = HIGH_;
  static constexpr int WORDS = DIM / 2, ENTRIES = 256 << HIGH_BITS;
};

DEV constexpr int power_below(int x) { return x > 1 ? 2 * power_below(x / 2) : 1; }

// What is known of the best two scores of a sub-vector.
struct Best {
  float first, second;
  int index;
  DEV void see(float score, int i) {
    second = fmaxf(second, fminf(score, first));
    if (score > first) first = score, index = i;
  }
  DEV void merge(int lanes) {  // with what another lane knows
    const float other = __shfl_xor_sync(FULL, first, lanes), next = __shfl_xor_sync(FULL, second, lanes);
    const int i = __shfl_xor_sync(FULL, index, lanes);
    second = fmaxf(fmaxf(second, next), fminf(first, other));
    if (other > first || (other == first && i < index)) first = other, index = i;
  }
};

template <class B> DEV void centroid(float* c, const u32* book, int i) {
  u32 w[B::WORDS];
  load_words<B::WORDS>(w, (const u8*)(book + i * B::WORDS));
#pragma unroll
  for (int k = 0; k < B::WORDS; k++) c[2 * k] = fp16_low(w[k]), c[2 * k + 1] = fp16_high(w[k]);
}

template <class B> DEV int nearest_exactly(const float* x, const u32* book) {
  double best = 0.;
  int index = 0;
  for (int i = 0; i < B::ENTRIES; i++) {
    float c[B::DIM];
    centroid<B>(c, book, i);
    double score = 0., size = 0.;
#pragma unroll
    for (int k = 0; k < B::DIM; k++) score += (double)x[k] * (double)c[k], size += (double)c[k] * (double)c[k];
    score -= size * 0.5;
    if (i == 0 || score > best) best = score, index = i;
  }
  return index;
}

template <class B, int TYPE, int ORDER>
DEV void append(const Arguments& a, u8* dynamic, const void* in, const float* mean, const float* factors, const float* signs, float by,
                const u8* books, int book_heads, void* window) {
  // A thread has EACH sub-vectors, so that a centroid is read for several; PARTS threads share them.
  constexpr int VECTORS = ROWS * B::COUNT, EACH = VECTORS > 4 * THREADS ? (VECTORS + THREADS - 1) / THREADS : 4;
  constexpr int SHARED_BY = THREADS * EACH / VECTORS, PARTS = SHARED_BY < 32 ? power_below(SHARED_BY) : 32, GROUPS = THREADS / PARTS;
  static_assert(GROUPS * EACH >= VECTORS, "lanes of a warp share sub-vectors");
  __shared__ float largest[THREADS / 32];
  u32* book = (u32*)dynamic;
  float* halves = (float*)(book + B::ENTRIES * B::WORDS);  // |c|^2 / 2
  float* rows = halves + B::ENTRIES;                        // [ROWS, D]
  u16* indices = (u16*)(rows + ROWS * D);                   // [ROWS, COUNT]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, j = lane & 7;
  const int tiles = (a.tokens + ROWS - 1) / ROWS, all = tiles * KV_HEADS;  // a tile is of one head
  int held = -1;
  float top = 0.f;  // the largest |c|^2
  for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
    const int head = tile / tiles, first = tile % tiles * ROWS;
    if (held < 0 || (book_heads > 1 && held != head)) {
      held = head;
      const u32* from = (const u32*)books + (book_heads > 1 ? head : 0) * B::ENTRIES * B::WORDS;
      top = 0.f;
      __syncthreads();
      for (int i = threadIdx.x; i < B::ENTRIES; i += THREADS) {
        float c[B::DIM], size = 0.f;
        centroid<B>(c, from, i);
#pragma unroll
        for (int k = 0; k < B::DIM; k++) size = fmaf(c[k], c[k], size);
#pragma unroll
        for (int k = 0; k < B::WORDS; k++) book[i * B::WORDS + k] = from[i * B::WORDS + k];
        halves[i] = size * 0.5f;
        top = fmaxf(top, size);
      }
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
      if (lane == 0) largest[warp] = top;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < THREADS / 32; i++) top = fmaxf(top, largest[i]);
    }

    if (warp < ROWS / 4) {
      const int row = warp * 4 + (lane >> 3), token = min(first + row, a.tokens - 1);
      const s64 slot = first + row < a.tokens ? a.slot_mapping[token] : -1;
      float x[OWN];
      load_row<TYPE>(x, in, ((s64)token * KV_HEADS + head) * D + j * OWN);
      if (mean)
#pragma unroll
        for (int i = 0; i < OWN; i++) x[i] -= mean[head * D + j * OWN + i];
      if (factors)
#pragma unroll
        for (int i = 0; i < OWN; i++) x[i] = __fdiv_rn(x[i], factors[head * D + j * OWN + i]);
      if constexpr (ORDER > 1) hadamard<ORDER>(x, signs, by, j, rows + row * D);
      if (slot >= 0) store_window(a, window, x, token, head, j);
#pragma unroll
      for (int i = 0; i < OWN; i++) rows[row * D + j * OWN + i] = x[i];
    }
    __syncthreads();

    float x[EACH][B::DIM];
    Best best[EACH];
    const int part = threadIdx.x % PARTS;
#pragma unroll
    for (int v = 0; v < EACH; v++) {
      const int vector = min((int)threadIdx.x / PARTS + v * GROUPS, VECTORS - 1);
#pragma unroll
      for (int k = 0; k < B::DIM; k++) x[v][k] = rows[vector * B::DIM + k];
      best[v] = {__int_as_float(0xff800000), __int_as_float(0xff800000), 0};
    }
#pragma unroll 4
    for (int i = part; i < B::ENTRIES; i += PARTS) {
      float c[B::DIM];
      centroid<B>(c, book, i);
      const float half = halves[i];
#pragma unroll
      for (int v = 0; v < EACH; v++) {
        float score = -half;
#pragma unroll
        for (int k = 0; k < B::DIM; k++) score = fmaf(x[v][k], c[k], score);
        best[v].see(score, i);
      }
    }
#pragma unroll
    for (int v = 0; v < EACH; v++) {
#pragma unroll
      for (int o = 1; o < PARTS; o <<= 1) best[v].merge(o);
      const int vector = (int)threadIdx.x / PARTS + v * GROUPS;
      if (part == 0 && vector < VECTORS) {
        float size = 0.f;
#pragma unroll
        for (int k = 0; k < B::DIM; k++) size = fmaf(x[v][k], x[v][k], size);
        // either score is off by at most DIM + 2 roundings of sums that are no larger than |x| |c| + |c|^2 / 2
        const float doubt = (B::DIM + 4) * 1.2e-7f * (sqrtf(size * top) + top * 0.5f);
        indices[vector] = (u16)(best[v].first - best[v].second > doubt ? best[v].index : nearest_exactly<B>(x[v], book));
      }
    }
    __syncthreads();

    constexpr int PER = B::HIGH_BITS ? 8 / B::HIGH_BITS : 1, BYTES = B::COUNT + (B::HIGH_BITS ? B::COUNT / PER : 0);  // of a row
    for (int i = threadIdx.x; i < ROWS * BYTES; i += THREADS) {
      const int row = i / BYTES, byte = i % BYTES;
      const s64 slot = first + row < a.tokens ? a.slot_mapping[first + row] : -1;
      if (slot < 0) continue;
      u8* run = a.pages + (slot / PAGE * KV_HEADS + head) * RUN;
      const int place = (int)(slot % PAGE);
      const u16* mine = indices + row * B::COUNT;
      if (byte < B::COUNT) {
        run[B::OFFSET + place * B::COUNT + byte] = (u8)mine[byte];
      } else {
        u32 high = 0;
#pragma unroll
        for (int k = 0; k < PER; k++) high |= (u32)(mine[(byte - B::COUNT) * PER + k] >> 8) << k * B::HIGH_BITS;
        run[B::HIGH + place * (B::COUNT / PER) + byte - B::COUNT] = (u8)high;
      }
    }
    // the next rows are written behind the barrier of the search that used these
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) kvant_append(const Arguments a) {
  DYNAMIC_SHARED(dynamic);
  if (blockIdx.y == 0) append<KEY_BOOK, KEY_TYPE, KEY_HADAMARD>(a, dynamic, a.key, a.key_mean, a.key_factors, a.key_signs, (float)KEY_HADAMARD_SCALE, a.key_books, KEY_BOOK_HEADS, a.window_key);
  else append<VALUE_BOOK, VALUE_TYPE, VALUE_HADAMARD>(a, dynamic, a.value, a.value_mean, a.value_factors, a.value_signs, (float)VALUE_HADAMARD_SCALE, a.value_books, VALUE_BOOK_HEADS, a.window_value);
}
