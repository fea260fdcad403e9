// Queries and outputs by a matrix, in kernels of their own before and after decode.

#pragma once
#include "include/matrix.cuh"
#include "include/query.cuh"

constexpr int TRANSFORM_WARPS = D / 16, TRANSFORM_STEPS = D / 16;
constexpr bool MATRIX_IN_REGISTERS = D <= 128;  // whether a warp's columns of the matrix stay in registers

// A quarter of the channels of a row (lane t) as pairs of bfloat16, x = high + low; bfloat16 itself has one part.
template <int TYPE> struct Bf16Row {
  static constexpr int PARTS = TYPE == 0 ? 1 : 2, WORDS = TYPE == 2 ? D / 4 : D / 8;
  u32 x[PARTS][D / 8];
  DEV void load(const void* in, s64 place, int t) {
    u32 w[WORDS];
    load_words<WORDS>(w, (const u8*)in + place * (TYPE == 2 ? 4 : 2) + t * WORDS * 4);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      if constexpr (TYPE == 0) {
        x[0][i] = w[i];
      } else {
        float y, z;
        if constexpr (TYPE == 1) y = fp16_low(w[i]), z = fp16_high(w[i]);
        else y = __uint_as_float(w[2 * i]), z = __uint_as_float(w[2 * i + 1]);
        x[0][i] = bf16_pair(y, z);
        x[1][i] = bf16_pair(y - bf16_low(x[0][i]), z - bf16_high(x[0][i]));
      }
    }
  }
};

// 16 columns of a matrix, bfloat16 high + low, as B operands of a warp. Lane t multiplies its quarter of a row's channels and gets four columns.
struct MatrixColumns {
  const uint4* matrix;
  uint4 held[MATRIX_IN_REGISTERS ? TRANSFORM_STEPS : 1][2];

  DEV void load(const uint4* from) {
    matrix = from;
    if constexpr (MATRIX_IN_REGISTERS)
#pragma unroll
      for (int k = 0; k < TRANSFORM_STEPS; k++) held[k][0] = __ldg(matrix + k * 64), held[k][1] = __ldg(matrix + k * 64 + 32);
  }
  // y = x M for rows g and g + 8: four columns each, float32 accumulators. The product of the low parts is left out.
  template <int TYPE> DEV void multiply(const Bf16Row<TYPE>* x, float y[2][4]) {
    float c[2][4] = {}, rest[2][4] = {};  // sums that do not wait for each other
#pragma unroll
    for (int k = 0; k < TRANSFORM_STEPS; k++) {
      if constexpr (!MATRIX_IN_REGISTERS) held[0][0] = __ldg(matrix + k * 64), held[0][1] = __ldg(matrix + k * 64 + 32);
      const uint4 high = held[MATRIX_IN_REGISTERS ? k : 0][0], low = held[MATRIX_IN_REGISTERS ? k : 0][1];
#pragma unroll
      for (int p = Bf16Row<TYPE>::PARTS - 1; p >= 0; p--) {  // the smallest of the products is left out
        const u32 a0 = x[0].x[p][2 * k], a1 = x[1].x[p][2 * k], a2 = x[0].x[p][2 * k + 1], a3 = x[1].x[p][2 * k + 1];
        if (p == 0) mma_bf16(rest[0], a0, a1, a2, a3, low.x, low.y), mma_bf16(rest[1], a0, a1, a2, a3, low.z, low.w);
        mma_bf16(p ? rest[0] : c[0], a0, a1, a2, a3, high.x, high.y), mma_bf16(p ? rest[1] : c[1], a0, a1, a2, a3, high.z, high.w);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) y[r][i] = c[i / 2][2 * r + i % 2] + rest[i / 2][2 * r + i % 2];
  }
};

// Q M for all queries of a head tile, and their operands. Grid: (any, HEAD_TILES). A CTA takes the queries of `at_once` sequences at a time as 16 rows, a
// warp 16 columns.
extern "C" __global__ void __launch_bounds__(TRANSFORM_WARPS * 32) kvant_transform_queries(const TransformQueriesArguments a) {
  constexpr int STRIDE = D + 4;  // rows start in different banks
  __shared__ __align__(16) float rows[16 * STRIDE];
  __shared__ float tops[16][TRANSFORM_WARPS + 1], sums[16][TRANSFORM_WARPS + 1];  // of a warp's columns
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = blockIdx.y, head = tile / Config::QUERY_TILES;
  const int query = head * Config::GROUP + tile % Config::QUERY_TILES * TILE_HEADS, heads = min(TILE_HEADS, Config::GROUP - tile % Config::QUERY_TILES * TILE_HEADS);
  MatrixColumns columns;
  columns.load(a.matrix + (s64)(head % a.matrix_heads * TRANSFORM_WARPS + warp) * TRANSFORM_STEPS * 64 + lane);
  if (!a.after_append) wait_prior_grid();  // what makes queries, or writes pages
  launch_dependent_grids();                // then only: decode reads pages before it waits for this kernel
  const int all = a.at_once * TILE_HEADS;  // rows
  for (int first = blockIdx.x * a.at_once; first < a.batch; first += gridDim.x * a.at_once) {
    s64 place[2];
    bool there[2];
    Bf16Row<Config::QUERY_TYPE> x[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = g + 8 * r, b = first + row / TILE_HEADS, h = row % TILE_HEADS;
      there[r] = row < all && b < a.batch && h < heads;
      place[r] = ((s64)min(b, a.batch - 1) * Config::KV_HEADS * Config::GROUP + query + min(h, heads - 1)) * D;
      x[r].load(a.query, place[r], t);
    }
    float products[2][4];
    columns.multiply(x, products);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float* y = products[r];
      const float none[4] = {0.f, 0.f, 0.f, 0.f};
      const int row = g + 8 * r, column = warp * 16 + 4 * t;
      if constexpr (Config::SPLIT_ROWS) {
        float* to = (float*)a.rows + place[r];
        if (there[r]) store_overlay_query(to, column, y[0], y[1]), store_overlay_query(to, column + 2, y[2], y[3]);
      } else if ((OVERLAY || CHANNELWISE || RESIDUAL_KEYS || RESIDUAL_VALUES) && there[r]) store_four<2>(a.rows, place[r] + column, y);
      store_four<2>(rows, row * STRIDE + column, there[r] ? y : none);
      const float top = quad_max(max_abs(y)), sum = quad_sum((y[0] + y[1]) + (y[2] + y[3]));
      if (t == 0) tops[row][warp] = there[r] ? top : 0.f, sums[row][warp] = there[r] ? sum : 0.f;
    }
    if constexpr (!CHANNELWISE && !RESIDUAL_KEYS && !RESIDUAL_VALUES) {
      __syncthreads();
      for (int sequence = 0; sequence < a.at_once && first + sequence < a.batch; sequence++) {
        QueryOperand& out = a.operands[(s64)(first + sequence) * HEAD_TILES + tile];
        const auto top_of = [&](int h) {
          float x = 1e-30f;
#pragma unroll
          for (int i = 0; i < TRANSFORM_WARPS; i++) x = fmaxf(x, tops[sequence * TILE_HEADS + h][i]);
          return x;
        };
        if (threadIdx.x < TILE_HEADS) {
          const int h = threadIdx.x;
          float sum = 0.f;
#pragma unroll
          for (int i = 0; i < TRANSFORM_WARPS; i++) sum += sums[sequence * TILE_HEADS + h][i];
          out.top[h] = out.peak[h] = top_of(h), out.sum[h] = sum;
          out.mean_logit[h] = load_mean_logit(a, (s64)(first + sequence) * Config::KV_HEADS * Config::GROUP + query, h, heads);
        }
        for (int h = warp; h < TILE_HEADS; h += TRANSFORM_WARPS) {
          const float bias = Key::SCALE_FORM == ScaleForm::SCALE ? warp_sum(centre_bias(Keys{}, rows + (sequence * TILE_HEADS + h) * STRIDE, lane)) : 0.f;
          if (lane == 0) out.bias[h] = bias;
          out.set_groups(h, rows + (sequence * TILE_HEADS + h) * STRIDE, lane);
        }
        store_query_planes<TRANSFORM_WARPS * 32, STRIDE>(Keys{}, rows + sequence * TILE_HEADS * STRIDE, top_of, out.f);
      }
      __syncthreads();
    }
  }
  wait_prior_grid();  // decode waits for this kernel alone
}

DEV s64 row_place(const TransformOutputsArguments& a, int row) { return (((s64)(row / a.head_rows) * a.heads + blockIdx.y) * a.head_rows + row % a.head_rows) * D; }

// What the offset of a row is multiplied by: the tokens' share of the softmax, 1 - exp(s - lse), beside a sink logit s.
DEV float token_share(const TransformOutputsArguments& a, int row) {
  if constexpr (!Config::SINK_LOGITS) return 1.f;
  const int heads = a.heads * a.head_rows, query = row_place(a, row) / D;
  return a.lse[query] > minus_infinity() ? 1.f - exp2_((a.sink_logits[a.sink_rows > 1 ? query : query % heads] - a.lse[query]) * LOG2_E) : 0.f;
}

// O M + offset in float32, where decode does not transform outputs itself. Grid: (any, matrices). On the tensor cores, 16 rows a CTA, it took longer.
extern "C" __global__ void __launch_bounds__(MATRIX_THREADS) kvant_transform_outputs(const TransformOutputsArguments a) {
  const auto begin = []() { launch_dependent_grids(), wait_prior_grid(); };  // outputs come from the kernel before
  times_matrix(
      a.matrix + (s64)blockIdx.y * D * D, a.offset && !Config::SINK_LOGITS ? a.offset + blockIdx.y * D : nullptr, a.batch * a.head_rows, begin, [](int, int) {},
      [&](int row, int e) { return ((const float*)a.rows)[row_place(a, row) + e]; },
      [&](int row, int e, float y) {
        if (Config::SINK_LOGITS && a.offset) y = fmaf(token_share(a, row), a.offset[blockIdx.y * D + e], y);
        store_number<Config::QUERY_TYPE>(a.out, row_place(a, row) + e, y);
      });
}
