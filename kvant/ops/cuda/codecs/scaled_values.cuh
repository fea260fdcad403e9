// Values with several scales a token beside token-wise keys: O^T += V^T P^T with P times the scales of every group of channels.
//
// Unlike GroupValues (codecs/values.cuh), P is multiplied in float32 where it lies as S does, and then becomes one B operand for each group: scales may be
// bfloat16, with a minimum or a zero point.

#pragma once
#include "include/overlay.cuh"

template <int N> struct ScaledValues {
  static constexpr bool SCALES_TIMES_NORM = false;
  u32 w[VALUE_GROUPS][N][2];  // scale, and in the high half the minimum or zero point, of tokens g and g + 8

  DEV float largest() const {  // scale
    u32 x = w[0][0][0];
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++)
#pragma unroll
      for (int i = 0; i < N; i++) x = pair_max<Value::SCALE_TYPE>(x, pair_max<Value::SCALE_TYPE>(w[j][i][0], w[j][i][1]));
    return low<Value::SCALE_TYPE>(x);
  }
  template <class PageHead> DEV float load(PageHead page_head, int tile, int lane) {
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++)
#pragma unroll
      for (int i = 0; i < N; i++)
        load_words<2>(w[j][i], page_head + (Value::SCALE_OFFSET + (j * Config::PAGE_TOKENS + (lane >> 2) * (Config::PAGE_TOKENS / 8) + (tile + i) * 2) * 4));
    return largest();
  }
  DEV float mask(int at, int first, int last, int lane) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = at + i * 16 + r * 8 + (lane >> 2);
#pragma unroll
        for (int j = 0; j < VALUE_GROUPS; j++) w[j][i][r] = position < first || position >= last ? 0u : w[j][i][r];
      }
    return largest();
  }
  // O^T += V^T P^T, for P in x.
  template <class PageHead, class After> DEV void accumulate(OnlineSoftmax& softmax, float x[N][LANE_HEADS][2], PageHead page_head, int tile, int lane, After after_loads) const {
    const int g = lane >> 2;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) x[i][n][0] *= softmax.norm, x[i][n][1] *= softmax.norm;
    Probs<N> p[VALUE_GROUPS];
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++) {
      float y[N][LANE_HEADS][2];
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float scale = low<Value::SCALE_TYPE>(w[j][i][r]), rest = high<Value::SCALE_TYPE>(w[j][i][r]);
#pragma unroll
          for (int n = 0; n < LANE_HEADS; n++) {
            y[i][n][r] = x[i][n][r] * scale;
            if (Value::SCALE_FORM == ScaleForm::SCALE_MIN) softmax.group_z[n][j] = fmaf(x[i][n][r], rest, softmax.group_z[n][j]);
            if (Value::SCALE_FORM == ScaleForm::SCALE_ZERO) softmax.group_z[n][j] = fmaf(-y[i][n][r], rest, softmax.group_z[n][j]);
          }
        }
      p[j].set(y);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      Values codes;
      codes.load(page_head, tile + i, lane);
      if (i == N - 1) after_loads();
#pragma unroll
      for (int j = 0; j < VALUE_GROUPS; j++) {
        u32 b[COLUMN_TILES][2];
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
          for (int r = 0; r < 2; r++) b[n][r] = own_columns(p[j].of(i, n, r), i, g);
#pragma unroll
        for (int step = 0; step < GROUP_SHARE / 2; step++) {
          const int k = j * (GROUP_SHARE / 2) + step;
          u32 a0, a1, a2, a3;
          codes.get_two(0, 2 * k, a0, a1), codes.get_two(1, 2 * k, a2, a3);
#pragma unroll
          for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.acc[n][k], a0, a1, a2, a3, b[n][0], b[n][1]);
        }
      }
    }
  }
};
