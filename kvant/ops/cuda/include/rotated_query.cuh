// Queries that the warps of decode rotate themselves (QueryTransform::ROTATED_MATRIX), where keys are stored unrotated to the start of their RoPE block.
//
//   Q' = (Q unrotated to a RoPE block) M, with M into the space of the keys
//
// M lies in shared memory once for a CTA, as A operands: Q'^T = M^T Q^T. Columns of M fill the 16 rows of an MMA, one tile for each register of the query
// operand, and the queries of ROTATED_BLOCKS RoPE blocks its 8 columns. When a warp enters a RoPE block that it has no operand of, it makes those of this block and
// of the next into its own part of shared memory. Nothing goes through global memory, and warps do not wait for each other.

#pragma once
#include "include/head_tile_rows.cuh"
#include "include/overlay.cuh"

constexpr int ROTATED_BLOCKS = TILE_HEADS <= 4 ? 2 : 1;  // RoPE blocks whose queries are columns of one MMA
constexpr int ROTATED_STEPS = D / 16;                    // of 16 channels

// The matrix of a head, fp16 [ROTATED_TILES + D / 16 tiles, D / 16 steps, 32 lanes] of 16 bytes: fragments.decode_fragments. First the tiles that lie in shared
// memory: those of the operand, and one of the sum, the bias and q . mu. Then the channels in their order, for the overlay.
template <class K> struct RotatedMatrix {
  static constexpr int TILES = K::REGISTERS + 1, WORDS = TILES * ROTATED_STEPS * 32, ALL_WORDS = (TILES + D / 16) * ROTATED_STEPS * 32;  // of uint4
  DEV static const uint4* of(const DecodeArguments& a, int which) { return a.query_matrix + (s64)which * ALL_WORDS; }
  DEV static void copy(u8* to, const DecodeArguments& a, int which) {
    const uint4* from = of(a, which);
    for (int i = threadIdx.x; i < WORDS; i += WARPS * 32) copy16((uint4*)to + i, from + i);
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

  DEV void load(const DecodeArguments& a, s64 query, const RotatedAngles& angles, int member, int t) {
    const u8* q = (const u8*)a.query + (query * D + 4 * t) * 2;
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
      u32 u[2], v[2];
      load_words<2>(u, q + 32 * k), load_words<2>(v, q + 32 * k + D);
      const float4 c = *(const float4*)(angles.cosine[member] + 16 * k + 4 * t), s = *(const float4*)(angles.sine[member] + 16 * k + 4 * t);
      const float by[4] = {c.x, c.y, c.z, c.w}, across[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x0 = low<Config::QUERY_TYPE>(u[i]), x1 = high<Config::QUERY_TYPE>(u[i]), y0 = low<Config::QUERY_TYPE>(v[i]), y1 = high<Config::QUERY_TYPE>(v[i]);
        x[2 * k + i][0] = fp16_pair(x0 * by[2 * i] + y0 * across[2 * i], x1 * by[2 * i + 1] + y1 * across[2 * i + 1]);
        x[2 * k + i][1] = fp16_pair(y0 * by[2 * i] - x0 * across[2 * i], y1 * by[2 * i + 1] - x1 * across[2 * i + 1]);
      }
    }
  }
  // c = M^T Q'^T of N tiles; `matrix` is the lane's own place.
  template <int N> DEV void multiply(float (*c)[4], const uint4* matrix) const {
#pragma unroll
    for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
    for (int k = 0; k < ROTATED_STEPS; k++)
#pragma unroll
      for (int n = 0; n < N; n++) {
        const uint4 m = matrix[(n * ROTATED_STEPS + k) * 32];
        mma_fp16(c[n], m.x, m.y, m.z, m.w, x[k][0], x[k][1]);
      }
  }
};

template <class K> struct RotatedQuery;
template <class... P> struct RotatedQuery<KeyPlanes<P...>> {
  using K = KeyPlanes<P...>;
  using Matrix = RotatedMatrix<K>;
  struct Shared {
    QueryOperand operands[WARPS][ROTATED_BLOCKS];  // of RoPE blocks `first` to first + ROTATED_BLOCKS - 1; for the overlay, sums and peaks of one
    RotatedAngles angles[WARPS];                   // of RoPE blocks `next` on, on their way
  };
  static constexpr int NONE = 1 << 30;
  const uint4* matrix;  // in shared memory
  int first, next;      // RoPE block of the first operand, or NONE, and of the first angles

  // The column of an MMA: its head (`from` on) and its RoPE block among those of the product; columns beyond the last are idle.
  DEV static int member(int column) { return ROTATED_BLOCKS > 1 ? column / TILE_HEADS : 0; }
  DEV static int head_of(int column, int from) { return ROTATED_BLOCKS > 1 ? column % TILE_HEADS : from + column; }
  DEV static bool stored(int channel) { return ((channel >= P::FIRST && channel < P::FIRST + P::WIDTH) || ...); }
  DEV static bool all_stored(int tile) {  // of 16 channels
    bool all = true;
#pragma unroll
    for (int i = 0; i < 16; i++) all = all && stored(16 * tile + i);
    return all;
  }

  // Queries, and angles of the RoPE block of the warp's first token, are wanted soon.
  DEV void request(Shared& sh, const DecodeArguments& a, const HeadTileRows& rows, int token, int lane) {
    if (lane * 64 < rows.count * D) prefetch_l1((const u8*)a.query + (rows.query * D + lane * 64) * 2);
    await_copies();  // of angles that nobody asked for
    first = NONE;
    sh.angles[threadIdx.x >> 5].copy(a, next = rope_block_of(a, token), lane);
  }
  // The angles of `block` on are there.
  DEV const RotatedAngles& await_angles(Shared& sh, const DecodeArguments& a, int block, int lane) {
    RotatedAngles& own = sh.angles[threadIdx.x >> 5];
    if (next != block) {  // those on their way are of other blocks
      await_copies();
      __syncwarp();
      own.copy(a, next = block, lane);
    }
    await_copies();
    __syncwarp();
    return own;
  }
  template <class SharedMatrix> DEV void finish(Shared&, const DecodeArguments& a, SharedMatrix& shared, const HeadTileRows& rows) {
    const int which = rows.head % a.matrix_heads;
    if (shared.head != which) {
      Matrix::copy(shared.bytes, a, shared.head = which);
      await_copies();
      __syncthreads();
    }
    matrix = (const uint4*)shared.bytes + (threadIdx.x & 31);
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

  // Operands of RoPE blocks `block` to block + ROTATED_BLOCKS - 1. Rows of tiles are in an order in which the four accumulators of two tiles are the bytes of a
  // word: lane g has word g >> 1 of register g & 1 of every two.
  DEV void make_operands(QueryOperand* out, const RotatedAngles& angles, const DecodeArguments& a, const HeadTileRows& rows, int lane) const {
    const int g = lane >> 2, t = lane & 3;
    constexpr int MISSING = 4 * LANE_HEADS - TILE_HEADS, MISSING_WORDS = MISSING * K::REGISTERS * 8;  // operands of heads that do not exist are zero
#pragma unroll 1
    for (int from = 0; from < TILE_HEADS; from += 8) {
      RotatedFragment q;
      q.load(a, rows.query + min(head_of(g, from), rows.count - 1), angles, min(member(g), ROTATED_BLOCKS - 1), t);
      float c[Matrix::TILES][4];
      q.template multiply<Matrix::TILES>(c, matrix);
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
    if constexpr (MISSING > 0)
      for (int i = lane; i < ROTATED_BLOCKS * MISSING_WORDS; i += 32) {
        const int none = TILE_HEADS + i / 8 / K::REGISTERS % MISSING;
        out[i / MISSING_WORDS].f[none / 4][i / 8 % K::REGISTERS][none % 4 * 8 + i % 8] = 0u;
      }
    __syncwarp();
  }
  // The operand of a RoPE block.
  template <class Pages> DEV void load_block(Pages& pages, Shared& sh, const DecodeArguments& a, const HeadTileRows& rows, int block, int lane) {
    QueryOperand* own = sh.operands[threadIdx.x >> 5];
    if ((u32)(block - first) >= (u32)ROTATED_BLOCKS) {
      make_operands(own, await_angles(sh, a, first = block, lane), a, rows, lane);
      sh.angles[threadIdx.x >> 5].copy(a, next = block + ROTATED_BLOCKS, lane);
    }
    pages.load_query(own[block - first], lane, a.scale);
  }

  // --- the overlay ----------------------------------------------------------------------------------------------------------

  // The channels of a column that a plane holds.
  template <class One> DEV static void store_plane(const float (*c)[4], int e, int g, float* row) {
#pragma unroll
    for (int k = 0; k < One::REGISTERS; k += 2) {
      const int i = k + (g & 1);
      const float by = (float)(1 << One::raised(i)) / One::WEIGHT;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int channel = One::channel(i, j, g >> 1);
        if (channel >= 0) row[channel] = c[One::BEFORE + k + j / 2][j % 2 * 2 + e] * by;
      }
    }
  }
  // Queries of a RoPE block as float32 rows [TILE_HEADS, D], by which the overlay is multiplied. Channels that are not stored come from the matrix in global memory.
  DEV void make_rows(float* rows_out, QueryOperand& out, const RotatedAngles& angles, const DecodeArguments& a, const HeadTileRows& rows, int lane) const {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll 1
    for (int from = 0; from < TILE_HEADS; from += 8) {
      RotatedFragment q;
      q.load(a, rows.query + min(head_of(g, from), rows.count - 1), angles, 0, t);
      float c[Matrix::TILES][4];
      q.template multiply<Matrix::TILES>(c, matrix);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = 2 * t + e, h = head_of(column, from);
        if (member(column) > 0 || h >= TILE_HEADS) continue;
        (store_plane<P>(c, e, g, rows_out + h * D), ...);
        if (g == 2) out.mean_logit[h] = c[K::REGISTERS][e] * a.scale;
      }
      const uint4* rest = Matrix::of(a, rows.head % a.matrix_heads) + Matrix::WORDS + lane;
#pragma unroll 1
      for (int n = 0; n < D / 16; n++) {
        if (all_stored(n)) continue;
        q.template multiply<1>(c, rest + n * ROTATED_STEPS * 32);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int column = 2 * t + e, h = head_of(column, from);
          if (member(column) > 0 || h >= TILE_HEADS) continue;
          rows_out[h * D + 16 * n + g] = c[0][e], rows_out[h * D + 16 * n + 8 + g] = c[0][2 + e];
        }
      }
    }
    __syncwarp();
    if constexpr (Config::OVERLAY_TYPE == 1) {
      for (int h = 0; h < TILE_HEADS; h++) {
        float peak = 1e-30f;
        for (int i = lane; i < D; i += 32) peak = fmaxf(peak, fabsf(rows_out[h * D + i]));
        peak = warp_max(peak);
        if (lane == 0) out.peak[h] = peak;
      }
      __syncwarp();
    }
  }
  // Overlay tokens [at, last), those of one RoPE block at a time. The rows lie where the warp's pages were: the overlay comes after them.
  DEV void attend(Shared& sh, u8* memory, const DecodeArguments& a, const HeadTileRows& rows, const volatile SequenceWork&, int at, int last, s64 overlay_row, int lane, OnlineSoftmax& softmax) {
    QueryOperand& own = sh.operands[threadIdx.x >> 5][0];
    for (int from = at; from < last;) {
      const int until = min(last, rope_block_end(a, from)), block = rope_block_of(a, from);
      make_rows((float*)memory, own, await_angles(sh, a, block, lane), a, rows, lane);
      attend_overlay(a, at, from, until, overlay_row, rows.head, lane, own, (const float*)memory, softmax);
      from = until;
    }
    __syncwarp();  // outputs come where the rows were
  }
};
