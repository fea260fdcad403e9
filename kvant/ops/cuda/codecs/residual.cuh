// Keys and values that are coded as a centroid of the whole head vector and the codes of the residual (SAW-INT4's k-means): x = c + residual.
//
// Keys: S = q . c + q . residual. A CTA multiplies its queries by all centroids once; a token looks its q . c up in shared memory.
// Values: O = sum P c + sum P residual. Either the centroids lie in shared memory, and ldmatrix reads those of 16 tokens as the A operand of one more product
// (CENTROID_PRODUCTS). Or a warp sums P by centroid in shared memory, and the CTA multiplies these sums by the centroids once, when it has attended to all
// tokens (CENTROID_SUMS): 4 bytes a token and query head instead of 2 D bytes a token.

#pragma once
#include "include/output.cuh"
#include "include/overlay.cuh"

template <class S> constexpr int TABLE_ROW = 16 * LANE_HEADS;  // bytes of a centroid's scores: 4 LANE_HEADS query heads
constexpr int CENTROID_ROW = 2 * D + 16;                        // bytes of a centroid of the values: rows begin in different banks

// The centroid of a token of the page. The index of a token that was never written is undefined.
template <class S> DEV u32 centroid_of(SharedBytes page_head, int token) {
  if constexpr (S::INDEX_OFFSET < 0) return 0u;
  const u32 index = load_shared_byte(page_head.at + S::INDEX_OFFSET + token);
  return S::CENTROIDS < 256 ? min(index, (u32)S::CENTROIDS - 1u) : index;
}

// --- keys -----------------------------------------------------------------------------------------------------------------

// S of TILE_HEADS queries (rows [TILE_HEADS, D] with largest magnitudes `top`) with all centroids of the keys, in log2, to shared memory
// [CENTROIDS][4 LANE_HEADS]. By all threads of the CTA, a warp 16 centroids at a time; ends with a barrier.
DEV void store_centroid_scores(const float* rows, const float* top, const DecodeArguments& a, int head) {
  DYNAMIC_SHARED(memory);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr int COUNT = Key::CENTROIDS;
  float* table = (float*)(memory + Key::CENTROID_OFFSET);
  const u8* book = a.key_codebooks + (s64)(Key::BOOK_HEADS > 1 ? head : 0) * COUNT * (2 * D);
  for (int first = warp * 16; first < COUNT; first += WARPS * 16) {
    u32 k[2][D / 8];
#pragma unroll
    for (int r = 0; r < 2; r++) load_words<D / 8>(k[r], book + min(first + g + 8 * r, COUNT - 1) * (2 * D) + t * (D / 2));
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const int column = query_column(n, g);  // the query head
      const float* row = rows + min(column, TILE_HEADS - 1) * D + t * (D / 4);
      const float by = column < TILE_HEADS ? query_power(top[min(column, TILE_HEADS - 1)]) : 0.f;
      float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int e = 0; e < D / 8; e += 2) {
        const float4 x = *(const float4*)(row + 2 * e);
        const float y[4] = {x.x * by, x.y * by, x.z * by, x.w * by};
#pragma unroll
        for (int part = 0; part < (PAIRED ? 1 : 2); part++) {
          u32 q[2];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float less = PAIRED ? (float)(g & 1) : (float)part;
            const u32 high = fp16_pair(y[2 * j], y[2 * j + 1]);
            q[j] = fp16_pair(fmaf(-less, fp16_low(high), y[2 * j]), fmaf(-less, fp16_high(high), y[2 * j + 1]));
          }
          mma_fp16(c, k[0][e], k[1][e], k[0][e + 1], k[1][e + 1], q[0], q[1]);
        }
      }
#pragma unroll
      for (int j = 0; j < (PAIRED ? 1 : 2); j++) {
        const int h = PAIRED ? 0 : (2 * n + j) % LANE_HEADS;
        const float back = a.scale / query_power(top[min(4 * h + t, TILE_HEADS - 1)]);
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (first + g + 8 * r < COUNT) table[(first + g + 8 * r) * (4 * LANE_HEADS) + 4 * h + t] = (PAIRED ? c[2 * r] + c[2 * r + 1] : c[2 * r + j]) * back;
      }
    }
  }
  __syncthreads();
}

// The part of S that is q . c, of tokens g and g + 8 of a tile and the lane's heads.
DEV void centroid_scores(float s[2][LANE_HEADS], SharedBytes page_head, int tile, int lane) {
  const u32 table = dynamic_address() + Key::CENTROID_OFFSET + (lane & 3) * 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 row = table + centroid_of<Key>(page_head, tile * 16 + r * 8 + (lane >> 2)) * TABLE_ROW<Key>;
#pragma unroll
    for (int n = 0; n < LANE_HEADS; n++) {
      u32 x;
      load_shared<1>(&x, row + n * 16);
      s[r][n] = __uint_as_float(x);
    }
  }
}

// --- values -----------------------------------------------------------------------------------------------------------------

// Brings the values' centroids of a head to shared memory; `loaded` is the head whose centroids are there, -1 before the first. By all threads. They
// have arrived after the barrier that ends the loading of a query, for which this thread awaits its copies here.
DEV void load_value_centroids(int& loaded, u8* memory, const DecodeArguments& a, int head) {
  if (loaded >= 0 && (Value::BOOK_HEADS == 1 || loaded == head)) return;
  const u8* from = a.value_codebooks + (s64)(Value::BOOK_HEADS > 1 ? head : 0) * Value::CENTROIDS * (2 * D);
  for (int i = threadIdx.x; i < Value::CENTROIDS * (D / 8); i += WARPS * 32) copy16(memory + Value::CENTROID_OFFSET + i / (D / 8) * CENTROID_ROW + i % (D / 8) * 16, from + i * 16);
  await_copies();
  __syncthreads();
  loaded = head;
}

// O^T += C^T P^T for P in p, C the centroids of N tiles. A row of the centroids is in the order of the accumulators' rows: element, then g
// (decode_matrices.Codebooks).
template <int N> DEV void add_centroids(OnlineSoftmax& softmax, const float p[N][LANE_HEADS][2], SharedBytes page_head, int tile, int lane) {
  Probs<N> probs;
  probs.set(p);
  const u32 book = dynamic_address() + Value::CENTROID_OFFSET + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const u32 row = book + centroid_of<Value>(page_head, (tile + i) * 16 + (lane >> 4) * 8 + (lane & 7)) * CENTROID_ROW;
    u32 b[COLUMN_TILES][2];
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) b[n][r] = own_columns(probs.of(i, n, r), i, lane >> 2);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 c[4];
      ldmatrix_x4_transposed(c, row + k * 32);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.centroids[n][k], c[0], c[1], c[2], c[3], b[n][0], b[n][1]);
    }
  }
}

// --- sums of P by centroid ---------------------------------------------------------------------------------------------------

DEV u32 sums_of(int warp) { return dynamic_address() + Value::CENTROID_OFFSET + warp * (Value::CENTROIDS * SUM_ROW); }

DEV void clear_sums(OnlineSoftmax& softmax, int lane) {
  softmax.sums = sums_of(threadIdx.x >> 5);
  for (int i = lane; i < Value::CENTROIDS * 4 * LANE_HEADS; i += 32) store_shared(softmax.sums + i * 4, 0u);
  __syncwarp();
}

// Adds P of the tokens of N tiles to their centroids' sums. P 2^SUM_BITS is rounded down after a number between 0 and 1 is added, another for each of 64 tokens
// (bits of their place in reverse): many small P are then rounded right on average. Integers are added in any order with one result.
template <int N> DEV void add_to_sums(OnlineSoftmax& softmax, const float p[N][LANE_HEADS][2], SharedBytes page_head, int tile, int lane) {
  const int g = lane >> 2;
  const float place = (float)((g & 1) * 4 + (g & 2) + (g >> 2)) * 0.125f + 0.0078125f;
  const u32 sums = softmax.sums + (lane & 3) * 4;
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 row = sums + centroid_of<Value>(page_head, (tile + i) * 16 + r * 8 + g) * SUM_ROW;
      const float more = place + (float)(r * 4 + i % 2 * 2 + i / 2 % 2) * 0.015625f;
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) add_shared(row + n * 16, (u32)fmaf(p[i][n][r], (float)(1 << SUM_BITS), more));
    }
}

// The part of O that is the sums times the centroids, of all warps: centroid_outputs(), in the place of the sums. By all threads, between barriers.
// `value_codebooks` are A operands of fp16 [heads or 1][D / 16][CENTROIDS / 16][32 lanes] of 16 bytes: rows are channels, columns centroids (decode_matrices.Codebooks).
struct CentroidSums {
  static constexpr int STEPS = (Value::CENTROIDS + 15) / 16;  // of 16 centroids
  // B operands: of head h (columns 2h and 2h + 1 of a tile of four heads) the share of a centroid in l, times 2^14, as the sum of two fp16 numbers. Where the keys' scores were.
  DEV static void store_shares(const MergeBuffers& sh) {
    DYNAMIC_SHARED(memory);
    const int column = threadIdx.x % (4 * LANE_HEADS);
    float m = minus_infinity(), l = 0.f, by[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++) m = fmaxf(m, sh.l[i][column] > 0.f ? sh.m[i][column] : minus_infinity());
#pragma unroll
    for (int i = 0; i < WARPS; i++) by[i] = sh.l[i][column] > 0.f ? exp2_(sh.m[i][column] - m) : 0.f, l = fmaf(by[i], sh.l[i][column], l);
    const float back = l > 0.f ? (float)(1 << 14) / (float)(1 << SUM_BITS) / l : 0.f;
    for (int c = threadIdx.x / (4 * LANE_HEADS); c < STEPS * 16; c += WARPS * 8 / LANE_HEADS) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) {
        u32 x = 0u;
        if (c < Value::CENTROIDS) load_shared<1>(&x, sums_of(i) + c * SUM_ROW + column * 4);
        sum = fmaf((float)x, by[i], sum);
      }
      const float share = sum * back;
      const u32 high = fp16_pair(share, 0.f), low = fp16_pair(share - fp16_low(high), 0.f);
      u16* to = (u16*)(memory + Key::CENTROID_OFFSET) + (((c / 16 * LANE_HEADS + column / 4) * 32 + column % 4 * 8 + c % 8 / 2) * 2 + c % 16 / 8) * 2 + c % 2;
      to[0] = (u16)high, to[16] = (u16)low;  // lanes 4 apart
    }
  }
  DEV static void multiply(const DecodeArguments& a, const MergeBuffers& sh, int head) {
    DYNAMIC_SHARED(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u8* book = a.value_codebooks + (s64)(Value::BOOK_HEADS > 1 ? head : 0) * (D / 16 * STEPS * 512) + lane * 16;
    store_shares(sh);
    __syncthreads();
#pragma unroll 1
    for (int tile = warp; tile < D / 16; tile += WARPS) {
      float c[LANE_HEADS][4] = {};
#pragma unroll 8
      for (int k = 0; k < STEPS; k++) {
        u32 x[4];
        load_words<4>(x, book + (tile * STEPS + k) * 512);
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) {
          const uint2 b = *(const uint2*)(memory + Key::CENTROID_OFFSET + ((k * LANE_HEADS + n) * 32 + lane) * 8);
          mma_fp16(c[n], x[0], x[1], x[2], x[3], b.x, b.y);
        }
      }
      float* out = centroid_outputs() + tile * 16 + g;
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) out[(4 * n + t) * OUTPUT_ROW] = c[n][0] + c[n][1], out[(4 * n + t) * OUTPUT_ROW + 8] = c[n][2] + c[n][3];
    }
    __syncthreads();
  }
};
