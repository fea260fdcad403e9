// Appends new tokens to streams of product quantization: transforms rows, finds the nearest centroid of every sub-vector, and stores the
// indices in pages and the rows in the overlay.
//
// Grid: (any, 2), blockIdx.y is the stream. A CTA holds a codebook in shared memory and takes ROWS rows of one head at a time, eight
// lanes a row while they are transformed. Then every thread searches for some sub-vectors among all centroids or, where there are
// few rows, among every PARTS-th. Where every sub-vector's place has a codebook of its own, a CTA holds those of SLICE places.
//
// The nearest centroid c of x has the largest score x.c - |c|^2 / 2, computed in float32. Where the second best is so near that rounding may
// have changed their order, all are compared again in float64, which is what kvant/codecs/codebook.py does. The first of equals is taken.

#pragma once
#include "include/rows.cuh"

// A codebook of 2^(LOW_BITS + HIGH_BITS) centroids of DIM channels. Of the COUNT indices of a row, LOW_BITS low bits lie from byte OFFSET of the page of a
// head on; their bits above these, HIGH_BITS each, from byte HIGH_OFFSET on. A CTA finds SLICE indices of a row. BOOKS: codebooks that it holds, one for each of
// them or one for all, STRIDE words apart: those that lanes read at once begin in different banks.
template <int DIM_, int COUNT_, int LOW_BITS_, int HIGH_BITS_, int OFFSET_, int HIGH_OFFSET_, int SLICE_, bool BY_PLACE> struct Book {
  static constexpr int LOW_BITS = LOW_BITS_;
  static constexpr int DIM = DIM_, COUNT = COUNT_, HIGH_BITS = HIGH_BITS_, OFFSET = OFFSET_, HIGH_OFFSET = HIGH_OFFSET_;
  static constexpr int WORDS = DIM / 2, CENTROIDS = 1 << (LOW_BITS + HIGH_BITS);  // words of a centroid
  static constexpr int SLICE = SLICE_, SLICES = COUNT / SLICE, BOOKS = BY_PLACE ? SLICE : 1;
  static constexpr int STRIDE = (CENTROIDS + BY_PLACE) * WORDS, HALF_STRIDE = CENTROIDS + BY_PLACE;
  static_assert(COUNT % SLICE == 0 && (BY_PLACE || SLICES == 1), "CTAs have as many places each");
};

DEV constexpr int power_below(int x) { return x > 1 ? 2 * power_below(x / 2) : 1; }  // the largest power of two that is not above x

struct BestTwo {  // the best two scores of a sub-vector
  float first, second;
  int index;  // of the first
  DEV void add(float score, int i) {
    second = fmaxf(second, fminf(score, first));
    if (score > first) first = score, index = i;
  }
  DEV void merge(int lanes) {  // with those of the lane whose number differs in these bits
    const float other = __shfl_xor_sync(FULL, first, lanes), next = __shfl_xor_sync(FULL, second, lanes);
    const int i = __shfl_xor_sync(FULL, index, lanes);
    second = fmaxf(fmaxf(second, next), fminf(first, other));
    if (other > first || (other == first && i < index)) first = other, index = i;
  }
};

template <class B> DEV void load_centroid(float* c, const u32* book, int i) {
  u32 w[B::WORDS];
  load_words<B::WORDS>(w, (const u8*)(book + i * B::WORDS));
#pragma unroll
  for (int k = 0; k < B::WORDS; k++) c[2 * k] = fp16_low(w[k]), c[2 * k + 1] = fp16_high(w[k]);
}

// The nearest centroid of x, by scores in float64.
template <class B> DEV int nearest_exactly(const float* x, const u32* book) {
  double best = 0.;
  int index = 0;
  for (int i = 0; i < B::CENTROIDS; i++) {
    float c[B::DIM];
    load_centroid<B>(c, book, i);
    double score = 0., size = 0.;
#pragma unroll
    for (int k = 0; k < B::DIM; k++) score += (double)x[k] * (double)c[k], size += (double)c[k] * (double)c[k];
    score -= size * 0.5;
    if (i == 0 || score > best) best = score, index = i;
  }
  return index;
}

template <bool KEY> struct PqStreamConfig : Config::Key {};
template <> struct PqStreamConfig<false> : Config::Value {};

// One stream: its constants and its arguments.
template <bool KEY_> struct PqStream : PqStreamConfig<KEY_> {
  static constexpr bool KEY = KEY_;
  DEV static const void* rows(const AppendPqArguments& a) { return KEY ? a.key : a.value; }
  DEV static const float* mean(const AppendPqArguments& a) { return KEY ? a.key_mean : a.value_mean; }
  DEV static const float* factors(const AppendPqArguments& a) { return KEY ? a.key_factors : a.value_factors; }
  DEV static const float* signs(const AppendPqArguments& a) { return KEY ? a.key_signs : a.value_signs; }
  DEV static const u8* books(const AppendPqArguments& a) { return KEY ? a.key_books : a.value_books; }
  DEV static void* overlay(const AppendPqArguments& a) { return KEY ? a.overlay_key : a.overlay_value; }
};

constexpr int ROWS = Config::ROWS, THREADS = Config::THREADS;

// The shared memory of a CTA.
template <class B> struct PqShared {
  u32* book;      // [BOOKS, STRIDE]: centroids of WORDS words
  float* halves;  // [BOOKS, HALF_STRIDE], |c|^2 / 2
  float* tops;    // [BOOKS, SHARERS], the largest |c|^2 that a warp saw
  float* rows;    // [ROWS, D]
  u16* indices;   // [ROWS, SLICE]
  static constexpr int SHARERS = B::BOOKS > 1 ? 1 : THREADS / 32;  // warps that copy a codebook
  DEV PqShared(u8* dynamic) : book((u32*)dynamic), halves((float*)(book + B::BOOKS * B::STRIDE)), tops(halves + B::BOOKS * B::HALF_STRIDE), rows(tops + B::BOOKS * SHARERS), indices((u16*)(rows + ROWS * D)) {}
  DEV float top(int which) const {  // the largest |c|^2 of a codebook
    float x = 0.f;
#pragma unroll
    for (int i = 0; i < SHARERS; i++) x = fmaxf(x, tops[which * SHARERS + i]);
    return x;
  }
};

// Copies the codebooks of a slice to shared memory: all warps one, or each some. Ends with a barrier.
template <class B> DEV void load_codebooks(const PqShared<B>& sh, const u32* from) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr int SHARERS = PqShared<B>::SHARERS, APART = THREADS / 32 / SHARERS;  // codebooks that are copied at once
  __syncthreads();
  for (int which = warp / SHARERS; which < B::BOOKS; which += APART) {
    const u32* own = from + which * (B::CENTROIDS * B::WORDS);
    float top = 0.f;
    for (int i = warp % SHARERS * 32 + lane; i < B::CENTROIDS; i += 32 * SHARERS) {
      float c[B::DIM], size = 0.f;
      load_centroid<B>(c, own, i);
#pragma unroll
      for (int k = 0; k < B::DIM; k++) size = fmaf(c[k], c[k], size);
#pragma unroll
      for (int k = 0; k < B::WORDS; k++) sh.book[which * B::STRIDE + i * B::WORDS + k] = own[i * B::WORDS + k];
      sh.halves[which * B::HALF_STRIDE + i] = size * 0.5f;
      top = fmaxf(top, size);
    }
    __syncwarp();
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
    if (lane == 0) sh.tops[which * SHARERS + warp % SHARERS] = top;
  }
  __syncthreads();
}

// Transforms the rows of tokens [first, first + ROWS), x = H diag(signs) ((x - mean) / factors), to shared memory and, where `keep` says so, to the overlay.
template <class S, class B> DEV void transform_rows(const AppendPqArguments& a, const PqShared<B>& sh, int first, int head, bool keep) {
  const int lane = threadIdx.x & 31, j = lane & 7;
  for (int four = threadIdx.x >> 5; four < ROWS / 4; four += THREADS / 32) {
    const int row = four * 4 + (lane >> 3), token = min(first + row, a.tokens - 1);
    const s64 slot = first + row < a.tokens ? a.slot_mapping[token] : -1;
    const float *mean = S::mean(a), *factors = S::factors(a);
    float x[LANE_CHANNELS];
    load_row<S::IN_TYPE>(x, S::rows(a), ((s64)token * Config::KV_HEADS + head) * D + j * LANE_CHANNELS);
    if (mean)
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; i++) x[i] -= mean[head * D + j * LANE_CHANNELS + i];
    if (factors)
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; i++) x[i] = __fdiv_rn(x[i], factors[head * D + j * LANE_CHANNELS + i]);
    if constexpr (S::HADAMARD > 1) apply_hadamard<S::HADAMARD>(x, S::signs(a), S::HADAMARD_SCALE, j, sh.rows + row * D);
    if (keep && slot >= 0) {
      if constexpr (S::KEY && Config::RAW_WINDOW) store_raw_key<Config::RAW_TYPE>(a, token, head, j);
      else store_overlay<Config::OVERLAY_TYPE>(a, S::overlay(a), x, token, head, j);
    }
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) sh.rows[row * D + j * LANE_CHANNELS + i] = x[i];
  }
  __syncthreads();
}

// Finds the nearest centroids of sub-vectors [first, first + SLICE) of all rows in shared memory. A thread has EACH sub-vectors, so that a centroid is
// read for several of them; PARTS threads share each, and every one of them looks at every PARTS-th centroid. Where places have codebooks of their own,
// a thread's sub-vectors are of one place and of neighbouring rows.
template <class B> DEV void find_nearest(const PqShared<B>& sh, int first) {
  constexpr bool BY_PLACE = B::BOOKS > 1;
  constexpr int VECTORS = ROWS * B::SLICE, WHOLE = VECTORS > 4 * THREADS ? (VECTORS + THREADS - 1) / THREADS : 4, EACH = BY_PLACE && power_below(WHOLE) < WHOLE ? 2 * power_below(WHOLE) : WHOLE;
  constexpr int SHARED_BY = THREADS * EACH / VECTORS, PARTS = SHARED_BY < 32 ? power_below(SHARED_BY) : 32, GROUPS = THREADS / PARTS;
  static_assert(GROUPS * EACH >= VECTORS, "lanes of a warp share sub-vectors");
  static_assert(!BY_PLACE || ROWS % EACH == 0, "a thread has sub-vectors of one place");
  float x[EACH][B::DIM];
  BestTwo best[EACH];
  const int part = threadIdx.x % PARTS;
  const auto number_of = [&](int v) { return BY_PLACE ? (int)threadIdx.x / PARTS * EACH + v : (int)threadIdx.x / PARTS + v * GROUPS; };
  // where a sub-vector is among the rows, and its index among the indices
  const auto channel_of = [&](int vector) { return BY_PLACE ? vector % ROWS * D + (first + vector / ROWS) * B::DIM : vector * B::DIM; };
  const auto index_of = [](int vector) { return BY_PLACE ? vector % ROWS * B::SLICE + vector / ROWS : vector; };
#pragma unroll
  for (int v = 0; v < EACH; v++) {
    const int vector = min(number_of(v), VECTORS - 1);
#pragma unroll
    for (int k = 0; k < B::DIM; k++) x[v][k] = sh.rows[channel_of(vector) + k];
    best[v] = {minus_infinity(), minus_infinity(), 0};
  }
  const int which = BY_PLACE ? min(number_of(0), VECTORS - 1) / ROWS : 0;
  const u32* book = sh.book + which * B::STRIDE;
  const float* halves = sh.halves + which * B::HALF_STRIDE;
#pragma unroll 4
  for (int i = part; i < B::CENTROIDS; i += PARTS) {
    float c[B::DIM];
    load_centroid<B>(c, book, i);
    const float half = halves[i];
#pragma unroll
    for (int v = 0; v < EACH; v++) {
      float score = -half;
#pragma unroll
      for (int k = 0; k < B::DIM; k++) score = fmaf(x[v][k], c[k], score);
      best[v].add(score, i);
    }
  }
  const float top = sh.top(which);
#pragma unroll
  for (int v = 0; v < EACH; v++) {
#pragma unroll
    for (int o = 1; o < PARTS; o <<= 1) best[v].merge(o);
    const int vector = number_of(v);
    if (part == 0 && vector < VECTORS) {
      float size = 0.f;
#pragma unroll
      for (int k = 0; k < B::DIM; k++) size = fmaf(x[v][k], x[v][k], size);
      // a score is off by at most DIM + 2 roundings of sums that are no larger than |x| |c| + |c|^2 / 2
      const float doubt = (B::DIM + 4) * 1.2e-7f * (sqrtf(size * top) + top * 0.5f);
      sh.indices[index_of(vector)] = (u16)(best[v].first - best[v].second > doubt ? best[v].index : nearest_exactly<B>(x[v], book));
    }
  }
  __syncthreads();
}

// Stores the indices of a slice of the rows: their low bits, and the bits above, both packed.
template <class B> DEV void store_indices(const AppendPqArguments& a, const u16* indices, int first, int head, int slice) {
  constexpr int LOW_PER = 8 / B::LOW_BITS, PER = B::HIGH_BITS ? 8 / B::HIGH_BITS : 1;  // indices of a byte
  constexpr int LOW_BYTES = B::SLICE / LOW_PER, BYTES = LOW_BYTES + (B::HIGH_BITS ? B::SLICE / PER : 0);  // of a row
  static_assert(B::SLICE % LOW_PER == 0 && B::SLICE % PER == 0, "a row is whole bytes");
  for (int i = threadIdx.x; i < ROWS * BYTES; i += THREADS) {
    const int row = i / BYTES, byte = i % BYTES;
    const s64 slot = first + row < a.tokens ? a.slot_mapping[first + row] : -1;
    if (slot < 0) continue;
    u8* page_head = a.pages + (slot / Config::PAGE_TOKENS * Config::KV_HEADS + head) * Config::PAGE_HEAD_BYTES;
    const int place = (int)(slot % Config::PAGE_TOKENS);
    const u16* mine = indices + row * B::SLICE;
    u32 packed = 0;
    if (byte < LOW_BYTES) {
#pragma unroll
      for (int k = 0; k < LOW_PER; k++) packed |= (u32)(mine[byte * LOW_PER + k] & ((1 << B::LOW_BITS) - 1)) << k * B::LOW_BITS;
      page_head[B::OFFSET + (place * B::SLICES + slice) * LOW_BYTES + byte] = (u8)packed;
    } else {
#pragma unroll
      for (int k = 0; k < PER; k++) packed |= (u32)(mine[(byte - LOW_BYTES) * PER + k] >> B::LOW_BITS) << k * B::HIGH_BITS;
      page_head[B::HIGH_OFFSET + (place * B::SLICES + slice) * (B::SLICE / PER) + byte - LOW_BYTES] = (u8)packed;
    }
  }
}

template <class S> DEV void append_stream(const AppendPqArguments& a, u8* dynamic) {
  using B = typename S::Codebook;
  constexpr bool OWN_BOOKS = S::BOOK_HEADS > 1 || B::SLICES > 1;  // of every head and slice
  const PqShared<B> sh(dynamic);
  const int tiles = (a.tokens + ROWS - 1) / ROWS, all = tiles * Config::KV_HEADS * B::SLICES;  // ROWS tokens of one head each, a slice of their places
  int held = -1;  // the head and slice whose codebooks are in shared memory
  for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
    const int own = tile / tiles, head = own / B::SLICES, slice = own % B::SLICES, first = tile % tiles * ROWS;
    if (held < 0 || (OWN_BOOKS && held != own)) {
      held = own;
      load_codebooks<B>(sh, (const u32*)S::books(a) + (OWN_BOOKS ? (s64)own * B::BOOKS * B::CENTROIDS * B::WORDS : 0));
    }
    transform_rows<S, B>(a, sh, first, head, slice == 0);
    find_nearest<B>(sh, slice * B::SLICE);
    store_indices<B>(a, sh.indices, first, head, slice);
    // no barrier: the next rows are written after all threads have left find_nearest, and the next indices after the next transform_rows
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) kvant_append_pq(const AppendPqArguments a) {
  DYNAMIC_SHARED(dynamic);
  if (blockIdx.y == 0) append_stream<PqStream<true>>(a, dynamic);
  else append_stream<PqStream<false>>(a, dynamic);
}
