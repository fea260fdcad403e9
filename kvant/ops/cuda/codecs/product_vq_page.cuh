// Decode attention: a warp attends to a page whose streams are indices of centroids. Its part in the text is that of "pages" in
// attend.cu; indices.cu says which lane has what.

#pragma once
#include "include/queries.cuh"

#if PQ
// One chunk of at most 64 tokens of a page. Tokens outside [first, last) of the sequence are not there. Codebooks are in `memory`.
DEV void attend_page(const u8* page_head, int tile, int at, int first, int last, int lane, const QueryFragment& q, OnlineSoftmax& softmax, float cap, const u8* memory) {
  const int g = lane >> 2, t = lane & 3;
  const u32 keys = KeyBook::copy_of(memory, lane), values = ValueBook::copy_of(memory, lane);
  float s[CHUNK][LANE_HEADS][2];
#pragma unroll
  for (int i = 0; i < CHUNK; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 x[Keys::WORDS];
      KeyBook::centroids<4>(x, page_head, (tile + i) * 16 + r * 8 + row_token(g), t, keys);
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int k = 0; k < Keys::WORDS / 4; k++) mma_fp16(c, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3], q.f[n][2 * k], q.f[n][2 * k + 1]);
        const float less = SOFTCAP ? 0.f : ROPE_BLOCK ? softmax.m[n] - q.mean_logit[n] : softmax.m[n];
        const float y = fmaf(c[0] + c[3], q.factor[n], -less);
        s[i][n][r] = SOFTCAP ? soft_cap(y + q.mean_logit[n], softmax.m[n], cap) : y;
      }
    }
  if (at < first || at + 16 * CHUNK > last) {  // past the ends a page may hold anything, which is an index all the same
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = at + i * 16 + r * 8 + row_token(g);
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++)
          if (position < first || position >= last) s[i][n][r] = minus_infinity();
      }
  }
  softmax.update<CHUNK>(s, 0.f);
#pragma unroll
  for (int i = 0; i < CHUNK; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 b[LANE_HEADS][2], x[2][Values::WORDS];
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) spread(b[n], s[i][n][r], g);
#pragma unroll
      for (int e = 0; e < 2; e++) ValueBook::centroids<8>(x[e], page_head, (tile + i) * 16 + r * 8 + row_token(2 * t + e), g, values);
#pragma unroll
      for (int k = 0; k < Values::WORDS / 2; k++)
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) mma_fp16(softmax.acc[n][k], x[0][2 * k], x[0][2 * k + 1], x[1][2 * k], x[1][2 * k + 1], b[n][0], b[n][1]);
    }
}
#endif
