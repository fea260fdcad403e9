// Merging and writing outputs: of the warps of a CTA, of the CTAs that share a (sequence, head tile), and the transform out of the space of the values.

#pragma once
#include "include/query.cuh"
#include "include/head_tile_rows.cuh"

// What warps leave for each other, by query head.
struct MergeBuffers {
  float m[WARPS][4 * LANE_HEADS], l[WARPS][4 * LANE_HEADS], flags[WARPS][4 * LANE_HEADS];
};
constexpr int PARTIAL = TILE_HEADS * (D + 4);  // floats of a partial result of a (sequence, head tile): outputs, log2-sum-exps, flags
constexpr int OUTPUT_ROW = D + 4;              // floats of a query head's outputs in shared memory: rows begin in different banks
constexpr bool MERGED_FLAGS = Value::FLAG && !FUSED_OUTPUTS;  // the mean is added when all parts are merged; else by every CTA, before its matrix

// CENTROID_SUMS: the part of O of all warps that is P times the values' centroids, over l / 2^14: [4 LANE_HEADS][OUTPUT_ROW] (codecs/residual.cuh).
DEV float* centroid_outputs() {
  DYNAMIC_SHARED(memory);
  return (float*)(memory + Value::CENTROID_OFFSET);
}

// Where the output of row h of a head tile lies, among all [batch, QUERIES, KV_HEADS, QUERY_HEADS].
DEV s64 output_row(const HeadTileRows& rows, int h) {
  if constexpr (QUERIES == 1) return rows.query + h;
  const int row = rows.row + h;
  return (((s64)rows.b * QUERIES + row / QUERY_HEADS) * Config::KV_HEADS + rows.head) * QUERY_HEADS + row % QUERY_HEADS;
}

// The output of one query head, held by a warp: O = sum of P V and l = sum of P, both relative to 2^m.
struct Output {
  float x[LANE_QUADS][4], m, l, flags;
  float share = 1.f;  // of the tokens in the softmax, with a sink logit

  // Merges the outputs that the warps of the CTA left in shared memory: m = max m_i, l = sum 2^(m_i - m) l_i, O = sum 2^(m_i - m) O_i.
  DEV void gather(const MergeBuffers& sh, const float* outputs, int stride, int h, int lane) {
    m = minus_infinity(), l = flags = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) m = fmaxf(m, sh.l[i][h] > 0.f ? sh.m[i][h] : minus_infinity());
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {  // without branches: a warp without tokens left zeros
      const float by = sh.l[i][h] > 0.f ? exp2_(sh.m[i][h] - m) : 0.f;
      l += by * sh.l[i][h], flags += by * sh.flags[i][h];
      add(outputs + i * stride + h * OUTPUT_ROW, by, lane);
    }
    if constexpr (CENTROID_SUMS) add(centroid_outputs() + h * OUTPUT_ROW, l * (1.f / 16384.f), lane);
  }
  DEV void add(const float* row, float by, int lane) {
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      float y[4] = {0.f, 0.f, 0.f, 0.f};
      if (4 * (lane + 32 * j) < D) load_four<2>(y, row, 4 * (lane + 32 * j));
#pragma unroll
      for (int i = 0; i < 4; i++) x[j][i] = fmaf(by, y[i], x[j][i]);
    }
  }
  // Writes a partial result: O / l, then by query head log2-sum-exps and flags.
  DEV void store(float* part, int h, int lane) const {
    const float back = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const float y[4] = {x[j][0] * back, x[j][1] * back, x[j][2] * back, x[j][3] * back};
      if (4 * (lane + 32 * j) < D) store_four<2>(part, h * D + 4 * (lane + 32 * j), y);
    }
    store_sum(part, h, lane);
    if (lane == 0) part[TILE_HEADS * (D + 1) + h] = flags * back;
  }
  DEV void store_sum(float* part, int h, int lane) const {
    if (lane == 0) part[TILE_HEADS * D + h] = l > 0.f ? m + log2_(l) : minus_infinity();
  }
  // Merges the partial results of parts first to last, weighted by 2^(lse_i - max lse). A part has two slots: slot 1 for the
  // (sequence, head tile) whose beginning it contains, as only the first of its parts does; else slot 0.
  DEV void merge(const float* partial, int first, int last, int h, int lane) {
    constexpr int SOME = 16 / LANE_QUADS;  // rows that are loaded at once: one after another they would take most of the time of a short attention
    m = minus_infinity(), l = flags = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
    const auto part = [&](int block) { return partial + (s64)(block * 2 + (block == first)) * PARTIAL; };
    for (int base = first; base <= last; base += SOME) {
      const int block = base + lane;
      float4 y[SOME][LANE_QUADS];
      float own = minus_infinity(), mark = 0.f;
      if (lane < SOME && block <= last) {
        own = __ldcg(part(block) + TILE_HEADS * D + h);
        if (MERGED_FLAGS) mark = __ldcg(part(block) + TILE_HEADS * (D + 1) + h);
      }
#pragma unroll
      for (int k = 0; k < SOME; k++)
#pragma unroll
        for (int j = 0; j < LANE_QUADS; j++) {
          y[k][j] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (base + k <= last && 4 * (lane + 32 * j) < D) y[k][j] = __ldcg((const float4*)(part(base + k) + h * D) + lane + 32 * j);
        }
      const float top = fmaxf(m, warp_max(own)), factor = m > -1e29f ? exp2_(m - top) : 0.f, by = own > -1e29f ? exp2_(own - top) : 0.f;
      m = top, l = fmaf(l, factor, warp_sum(by)), flags *= factor;
      if (MERGED_FLAGS) flags += warp_sum(by * mark);
#pragma unroll
      for (int j = 0; j < LANE_QUADS; j++) {
        x[j][0] *= factor, x[j][1] *= factor, x[j][2] *= factor, x[j][3] *= factor;
#pragma unroll
        for (int k = 0; k < SOME; k++) {
          const float weight = __shfl_sync(FULL, by, k);
          x[j][0] = fmaf(weight, y[k][j].x, x[j][0]), x[j][1] = fmaf(weight, y[k][j].y, x[j][1]);
          x[j][2] = fmaf(weight, y[k][j].z, x[j][2]), x[j][3] = fmaf(weight, y[k][j].w, x[j][3]);
        }
      }
    }
  }
  // Adds the query head's sink logit to l. Called once all tokens are in it.
  DEV void add_sink(const DecodeArguments& a, s64 query) {
    if constexpr (Config::SINK_LOGITS) {
      const float tokens = l, by = add_sink_logit(a.sink_logits[a.sink_rows > 1 ? query : query % (Config::KV_HEADS * QUERY_HEADS)] * LOG2_E, m, l);
      share = by > 0.f ? __fdividef(tokens * by, l) : 0.f, flags *= by;
#pragma unroll
      for (int j = 0; j < LANE_QUADS; j++) x[j][0] *= by, x[j][1] *= by, x[j][2] *= by, x[j][3] *= by;
    }
  }
  // O / l, plus the mean of values where it had been subtracted (flags).
  template <bool FLAGS> DEV void normalise(const DecodeArguments& a, int head, int lane) {
    const float by = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const int e = 4 * (lane + 32 * j);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[j][i] *= by;
        if (FLAGS && e < D) x[j][i] = fmaf(flags * by, a.value_mean[head * D + e + i], x[j][i]);
      }
    }
  }
  // A operand of the output transform: fp16 high + low, scaled to magnitudes of at most one by a power of two, then that power. In the place of a row of a
  // warp's outputs.
  DEV void split_fp16(const DecodeArguments& a, float* row, int head, int lane) {
    normalise<Value::FLAG>(a, head, lane);
    float top = 1e-30f;
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) top = fmaxf(top, max_abs(x[j]));
    top = warp_max(top);
    const float by = scale_below_one(top);
    __syncwarp();  // all lanes have read the row
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const float y[4] = {x[j][0] * by, x[j][1] * by, x[j][2] * by, x[j][3] * by};
      const u32 w[2] = {fp16_pair(y[0], y[1]), fp16_pair(y[2], y[3])};
      const u32 rest[2] = {fp16_pair(y[0] - fp16_low(w[0]), y[1] - fp16_high(w[0])), fp16_pair(y[2] - fp16_low(w[1]), y[3] - fp16_high(w[1]))};
      if (4 * (lane + 32 * j) < D) store_words<2>((u8*)row + 8 * (lane + 32 * j), w), store_words<2>((u8*)row + 2 * D + 8 * (lane + 32 * j), rest);
    }
    if (lane == 0) row[D] = unscale_below_one(top);
  }
  // Applies the output transform (Hadamard) and writes O and its log-sum-exp.
  DEV void finish(const DecodeArguments& a, s64 query, int head, int lane) {
    add_sink(a, query);
    normalise<MERGED_FLAGS>(a, head, lane);
    if constexpr (Config::OUTPUT_TRANSFORM == OutputTransform::HADAMARD) hadamard<Config::OUTPUT_HADAMARD>(x, lane);
#pragma unroll
    for (int j = 0; j < LANE_QUADS; j++) {
      const int e = 4 * (lane + 32 * j);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (Config::OUTPUT_TRANSFORM == OutputTransform::HADAMARD && a.output_signs && e < D) x[j][i] *= a.output_signs[e + i];
      if (FUSED_OUTPUTS && e < D) add_offset(a, head, e, x[j], share);
      if (e < D) store_four<Config::OUTPUT_TRANSFORM == OutputTransform::MATRIX ? 2 : Config::QUERY_TYPE>(a.out, query * D + e, x[j]);
    }
    finish_sum(a, query, lane);
  }
  DEV void finish_sum(const DecodeArguments& a, s64 query, int lane) const {
    if (a.lse && lane == 0) a.lse[query] = l > 0.f ? (m + log2_(l)) * 0.69314718055994531f : minus_infinity();
  }
  // The mean of values, as far as the tokens' probabilities reach.
  DEV static void add_offset(const DecodeArguments& a, int head, int e, float* y, float share) {
    float more[4] = {0.f, 0.f, 0.f, 0.f};
    if (a.output_offset) load_four<2>(more, a.output_offset, head % a.output_matrix_heads * D + e);
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] += Config::SINK_LOGITS ? more[i] * share : more[i];
  }
};

// O M for the rows that split_fp16 left, by a matrix in shared memory; store(head, channel, four elements). High and low parts of eight rows are one MMA.
template <class Store> DEV void multiply_outputs(const float* rows, const u8* matrix, float power, int count, Store store) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < (TILE_HEADS + 7) / 8; r++) {
    const float* row = rows + min(g + 8 * r, count - 1) * OUTPUT_ROW;
    const float by = row[D] * power;
    u32 x[2][D / 8];
#pragma unroll
    for (int part = 0; part < 2; part++) load_words<D / 8>(x[part], (const u8*)row + part * 2 * D + t * (D / 2));
    multiply_shared(x, matrix, [&](int tile, const float (*c)[4]) {
      float y[4] = {(c[0][0] + c[0][2]) * by, (c[0][1] + c[0][3]) * by, (c[1][0] + c[1][2]) * by, (c[1][1] + c[1][3]) * by};
      if (g + 8 * r < count) store(g + 8 * r, tile * 16 + 4 * t, y);
    });
  }
}

// Sums over the lanes of a warp, and its outputs to shared memory.
DEV void store_warp(OnlineSoftmax& softmax, MergeBuffers& sh, float* outputs, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int h = 0; h < LANE_HEADS; h++)
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      softmax.l[h] += __shfl_xor_sync(FULL, softmax.l[h], o);
      softmax.z[h] += __shfl_xor_sync(FULL, softmax.z[h], o);
      if (Value::FLAG) softmax.flags[h] += __shfl_xor_sync(FULL, softmax.flags[h], o);
    }
  if constexpr (PQ) {
#pragma unroll
    for (int n = 0; n < LANE_HEADS; n++)
      if (4 * n + t < TILE_HEADS)
#pragma unroll
        for (int k = 0; k < ACC_STEPS; k++) {
          const float* x = softmax.acc[n % ACC_TILES][k];
          ((float4*)(outputs + (4 * n + t) * OUTPUT_ROW + g * (D / 8)))[k] = make_float4(x[0], x[1], x[2], x[3]);
        }
  } else {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const auto& x = softmax.acc[n];
#pragma unroll
      for (int j = 0; j < (PAIRED ? 1 : 2); j++) {
        const int h = PAIRED ? 0 : (2 * n + j) % LANE_HEADS;
        if (4 * h + t < TILE_HEADS) {
          float* o = outputs + (4 * h + t) * OUTPUT_ROW;
#pragma unroll
          for (int k = 0; k < D / 16; k++)
            *(float2*)(o + value_channel(g, 2 * k)) = {(PAIRED ? x[k][0] + x[k][1] : x[k][j]) + softmax.z[h], (PAIRED ? x[k][2] + x[k][3] : x[k][j + 2]) + softmax.z[h]};
        }
      }
    }
  }
  if (g == 0)
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) sh.m[warp][4 * h + t] = softmax.m[h], sh.l[warp][4 * h + t] = softmax.l[h], sh.flags[warp][4 * h + t] = softmax.flags[h];
}

// Merges the warps of the CTA and writes the result: the output where the CTA has the whole work tile, else a partial result. A warp takes some query heads.
DEV void finish_cta(const DecodeArguments& a, const MergeBuffers& sh, float* outputs, const u8* matrix, int matrix_head, const HeadTileRows& rows, bool whole, float* partial) {
  const int warp = (threadIdx.x >> 5) - (TEAMS > 1 ? team() * WARPS : 0), lane = threadIdx.x & 31;  // of the team
  constexpr int STRIDE = Config::WARP_BYTES / 4;
  for (int h = warp; h < rows.count; h += WARPS) {
    Output out;
    out.gather(sh, outputs, STRIDE, h, lane);
    if constexpr (FUSED_OUTPUTS) {
      if (whole) out.add_sink(a, output_row(rows, h));
      if (Config::SINK_LOGITS && whole && lane == 0) outputs[h * OUTPUT_ROW + D + 1] = out.share;  // behind the power that split_fp16 leaves
      out.split_fp16(a, outputs + h * OUTPUT_ROW, rows.head, lane);
      if (whole) out.finish_sum(a, output_row(rows, h), lane);
      else out.store_sum(partial, h, lane);
    } else {
      if (whole) out.finish(a, output_row(rows, h), rows.head, lane);
      else out.store(partial, h, lane);
    }
  }
  if constexpr (FUSED_OUTPUTS) {
    __syncthreads();
    multiply_outputs(outputs, matrix, matrix_scale(a.output_matrix, a.output_matrix_heads, matrix_head), rows.count, [&](int h, int e, float* y) {
      if (whole) Output::add_offset(a, rows.head, e, y, Config::SINK_LOGITS ? outputs[h * OUTPUT_ROW + D + 1] : 1.f), store_four<Config::QUERY_TYPE>(a.out, output_row(rows, h) * D + e, y);
      else store_four<2>(partial, h * D + e, y);
    });
    if (!whole) __syncthreads();
  }
}
// The last of the parts [first, last] to arrive merges them. Warps arrive each for its query heads, so that no barrier is needed.
DEV void merge_parts(const DecodeArguments& a, const HeadTileRows& rows, int first, int last) {
  const int warp = (threadIdx.x >> 5) - (TEAMS > 1 ? team() * WARPS : 0), lane = threadIdx.x & 31;  // of the team
  int* counter = a.arrivals + (rows.b * HEAD_TILES + rows.head_tile) * min(WARPS, TILE_HEADS) + warp;
  int before_this = 0;
  __syncwarp();
  if (lane == 0) before_this = atomic_add_acq_rel(counter);
  if (__shfl_sync(FULL, before_this, 0) == last - first) {
    if (lane == 0) *counter = 0;
    __syncwarp();
    for (int h = warp; h < rows.count; h += WARPS) {
      Output out;
      out.merge(a.partial, first, last, h, lane), out.finish(a, output_row(rows, h), rows.head, lane);
    }
  }
}
