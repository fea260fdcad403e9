// Queries that the warps of decode rotate themselves (QueryTransform::ROTATED_MATRIX), where keys are stored unrotated to the start of their RoPE block.
//
//   Q' = (Q unrotated to a RoPE block) M, with M into the space of the keys
//
// M lies in shared memory once for a CTA, as A operands: Q'^T = M^T Q^T. Columns of M fill the 16 rows of an MMA, one tile for each register of the query
// operand, and the queries of ROTATED_BLOCKS RoPE blocks its 8 columns. When a warp enters a RoPE block that it has no operand of, it makes those of this block and
// of the next into its own part of shared memory: nothing goes through global memory, and warps do not wait for each other.

#pragma once
#include "include/head_tile_rows.cuh"
#include "include/overlay.cuh"

constexpr int ROTATED_BLOCKS = TILE_HEADS <= 4 ? 2 : 1;  // RoPE blocks whose queries are columns of one MMA
constexpr int ROTATED_STEPS = D / 16;                    // of 16 channels

// The matrix of a head, fp16 [TILES, D / 16 steps, 32 lanes] of 16 bytes: fragments.decode_fragments. Tiles are those of the operand, and one of the sum, the bias and
// q . mu.
template <class K> struct RotatedMatrix {
  static constexpr int TILES = K::REGISTERS + 1, WORDS = TILES * ROTATED_STEPS * 32;  // of uint4
  DEV static const uint4* of(const DecodeArguments& a, int which) { return a.query_matrix + (s64)which * WORDS; }
  DEV static void copy(u8* to, const DecodeArguments& a, int which) {
    const uint4* from = of(a, which);
    for (int i = threadIdx.x; i < WORDS; i += WARPS * 32) copy16((uint4*)to + i, from + i);
  }
  // Of all heads to L2, by all threads of the grid.
  DEV static void prefetch(const DecodeArguments& a) {
    const int line = blockIdx.x * (WARPS * 32) + threadIdx.x;  // of 128 bytes
    if (line < a.matrix_heads * (WORDS / 8)) prefetch_l2(a.query_matrix + line * 8);
  }
};

// Cosines and sines of the starts of ROTATED_BLOCKS RoPE blocks.
struct RotatedAngles {
  float cosine[ROTATED_BLOCKS][D / 2], sine[ROTATED_BLOCKS][D / 2];

  // cp.async by the lanes of a warp, of RoPE blocks `block` on.
  DEV void copy(const DecodeArguments& a, int block, int lane) {
    for (int i = lane; i < ROTATED_BLOCKS * (D / 8); i += 32) {
      const int from = min(block + i / (D / 8), a.rope_blocks - 1) * (D / 2) + i % (D / 8) * 4;
      copy16(cosine[0] + 4 * i, a.cosine + from), copy16(sine[0] + 4 * i, a.sine + from);
    }
  }
};

// B operands of a lane's query, all steps. In steps 2k and 2k + 1 a lane has channels c = 16k + 4t to 16k + 4t + 3 and those that they are rotated with, c + D / 2:
// x' = x cos + y sin, y' = y cos - x sin.
struct RotatedFragment {
  u32 x[ROTATED_STEPS][2];

  DEV void load(const DecodeArguments& a, s64 query, const float* cosine, const float* sine, int t) {
    const u8* q = (const u8*)a.query + (query * D + 4 * t) * 2;
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
      u32 u[2], v[2];
      load_words<2>(u, q + 32 * k), load_words<2>(v, q + 32 * k + D);
      const float4 c = *(const float4*)(cosine + 16 * k + 4 * t), s = *(const float4*)(sine + 16 * k + 4 * t);
      const float by[4] = {c.x, c.y, c.z, c.w}, across[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x0 = low<Config::QUERY_TYPE>(u[i]), x1 = high<Config::QUERY_TYPE>(u[i]), y0 = low<Config::QUERY_TYPE>(v[i]), y1 = high<Config::QUERY_TYPE>(v[i]);
        x[2 * k + i][0] = fp16_pair(x0 * by[2 * i] + y0 * across[2 * i], x1 * by[2 * i + 1] + y1 * across[2 * i + 1]);
        x[2 * k + i][1] = fp16_pair(y0 * by[2 * i] - x0 * across[2 * i], y1 * by[2 * i + 1] - x1 * across[2 * i + 1]);
      }
    }
  }
};
// c = M^T Q'^T of N tiles; tile(n, k) is the lane's part of the n-th tile in step k.
template <int N, class Tile> DEV void multiply_rotated(float (*c)[4], const RotatedFragment& q, Tile tile) {
#pragma unroll
  for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
  for (int k = 0; k < ROTATED_STEPS; k++)
#pragma unroll
    for (int n = 0; n < N; n++) {
      const uint4 m = tile(n, k);
      mma_fp16(c[n], m.x, m.y, m.z, m.w, q.x[k][0], q.x[k][1]);
    }
}

template <class K> struct RotatedQuery;
template <class... P> struct RotatedQuery<KeyPlanes<P...>> {
  using K = KeyPlanes<P...>;
  using Matrix = RotatedMatrix<K>;
  struct Shared {
    QueryOperand operands[WARPS][ROTATED_BLOCKS];
    RotatedAngles angles[WARPS];  // of the next operands of a warp, on their way
  };
  static constexpr int NONE = 1 << 30;
  int first;     // RoPE block of the first operand, or NONE
  bool copying;  // the matrix of the head is on its way

  // A lane's part of a tile of the matrix in shared memory, where SharedMatrix puts it. Not by a pointer, which would take registers of every page.
  DEV static uint4 tile(int n, int k) {
    DYNAMIC_SHARED(dynamic);
    return ((const uint4*)(dynamic + WARPS * Config::WARP_BYTES))[(n * ROTATED_STEPS + k) * 32 + (threadIdx.x & 31)];
  }

  // The column of an MMA: its head (`from` on) and its RoPE block among those of the product; columns beyond the last are idle.
  DEV static int member(int column) { return ROTATED_BLOCKS > 1 ? column / TILE_HEADS : 0; }
  DEV static int head_of(int column, int from) { return ROTATED_BLOCKS > 1 ? column % TILE_HEADS : from + column; }

  // Queries, and the angles of what the warp rotates first, are wanted soon. Its packed tokens are those from `own` on.
  DEV void request(Shared& sh, const DecodeArguments& a, const HeadTileRows& rows, int own, int lane) {
    if (lane * 64 < rows.count * D) prefetch_l1((const u8*)a.query + (rows.query * D + lane * 64) * 2);
    await_copies();  // of angles that nobody asked for
    first = NONE;
    sh.angles[threadIdx.x >> 5].copy(a, rope_block_of(a, own), lane);
  }
  template <class SharedMatrix> DEV void copy_matrix(const DecodeArguments& a, SharedMatrix& shared, const HeadTileRows& rows) {
    const int which = rows.head % a.matrix_heads;
    copying = shared.head != which;
    if (copying) Matrix::copy(shared.bytes, a, shared.head = which);
  }
  template <class SharedMatrix> DEV void finish(Shared&, const DecodeArguments&, SharedMatrix&, const HeadTileRows&) const {
    if (!copying) return;
    await_copies();
    __syncthreads();
  }
  template <class Pages> DEV void load(Pages&, Shared&, const DecodeArguments&, int) const {}

  // The largest of a column's magnitudes, over the eight lanes that hold it.
  DEV static float column_top(const float (*c)[4], int e) {
    float top = 1e-30f;
#pragma unroll
    for (int n = 0; n < K::REGISTERS; n++) top = fmaxf(top, fmaxf(fabsf(c[n][e]), fabsf(c[n][2 + e])));
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
    return top;
  }

  // Operands of ROTATED_BLOCKS RoPE blocks, whose angles are given. Rows of tiles are in an order in which the four accumulators of two tiles are the bytes of a word:
  // lane g has word g >> 1 of register g & 1 of every two.
  DEV static void make_operands(QueryOperand* out, const RotatedAngles& angles, const DecodeArguments& a, const HeadTileRows& rows, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int MISSING = 4 * LANE_HEADS - TILE_HEADS, MISSING_WORDS = MISSING * K::REGISTERS * 8;  // operands of heads that do not exist are zero
#pragma unroll 1
    for (int from = 0; from < TILE_HEADS; from += 8) {
      RotatedFragment q;
      const int which = min(member(g), ROTATED_BLOCKS - 1);
      q.load(a, rows.query + min(head_of(g, from), rows.count - 1), angles.cosine[which], angles.sine[which], t);
      float c[Matrix::TILES][4];
      multiply_rotated<Matrix::TILES>(c, q, tile);
      store_operands(out, c, a, from, g, t);
    }
    if constexpr (MISSING > 0)
      for (int i = lane; i < ROTATED_BLOCKS * MISSING_WORDS; i += 32) {
        const int none = TILE_HEADS + i / 8 / K::REGISTERS % MISSING;
        out[i / MISSING_WORDS].f[none / 4][i / 8 % K::REGISTERS][none % 4 * 8 + i % 8] = 0u;
      }
    __syncwarp();
  }
  // Bytes of a tile of columns, and its sums.
  DEV static void store_operands(QueryOperand* out, const float (*c)[4], const DecodeArguments& a, int from, int g, int t) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = 2 * t + e, h = head_of(column, from);
      const float top = column_top(c, e), by = __fdividef(QUERY_TOP, top), special = c[K::REGISTERS][e];
      if (member(column) >= ROTATED_BLOCKS || h >= TILE_HEADS) continue;
      QueryOperand& to = out[member(column)];
      u32* f = to.f[h / 4][g & 1] + h % 4 * 8 + (g >> 1);
#pragma unroll
      for (int k = 0; k < K::REGISTERS; k += 2) {
        u32 up, down;
        split_bytes(c[k][e], c[k][2 + e], c[k + 1][e], c[k + 1][2 + e], by, up, down);
        f[k * 32] = up, f[k * 32 + 4] = down;
      }
      if (g == 0) to.top[h] = top * (1.f / largest_weight(K{})), to.sum[h] = special;
      if (g == 1) to.bias[h] = special;
      if (g == 2) to.mean_logit[h] = special * a.scale;
    }
  }
  // The operand of a RoPE block.
  template <class Pages> DEV void load_block(Pages& pages, Shared& sh, const DecodeArguments& a, const HeadTileRows& rows, int block, int lane) {
    QueryOperand* own = sh.operands[threadIdx.x >> 5];
    if ((u32)(block - first) >= (u32)ROTATED_BLOCKS) {
      RotatedAngles& angles = sh.angles[threadIdx.x >> 5];  // of this block: a warp goes from one RoPE block to the next
      await_copies();
      __syncwarp();
      make_operands(own, angles, a, rows, lane);
      angles.copy(a, (first = block) + ROTATED_BLOCKS, lane);
    }
    pages.load_query(own[block - first], lane, a.scale);
  }

  // Overlay tokens [at, last).
  DEV void attend(Shared& sh, const DecodeArguments& a, const HeadTileRows& rows, const volatile SequenceWork& w, int at, int last, s64 overlay_row, int lane, OnlineSoftmax& softmax) const {
    attend_overlay(a, w, rows, at, at, last, overlay_row, lane, sh.operands[0][0], GivenQueries(a, rows), softmax);
  }
};
