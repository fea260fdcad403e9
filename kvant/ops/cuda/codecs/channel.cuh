// Decode attention, 3 of 5: keys that are coded per channel over groups of tokens, and Kitty's boosted pages.
//
// A score is sum_c q_c (s_c code_c + m_c): for every group a warp multiplies its queries by the group's scales, once for all of
// its tokens, and has the minima's part from one more product. Codes are fp16 numbers of c 2^(p - 24) (common.cu); the power is in the query.
//
// Boosted channels have two high bits more, in a compact tensor of BOOSTED channels, token after token. They are one more small product, with the
// queries of those channels, which the group's index names; no element has a mask.
//
// Constants: KEY_GROUP (tokens of a group, 0 where keys are coded token by token), KEY_CODES, KEY_META_OFFSET, BOOSTED, HIGH_OFFSET, INDEX_OFFSET, ORIGIN
// (token that the first page starts with), KEY_RECENT, KEY_FLUSH, KEY_RING, KEY_WINDOW and the same of values: the windows differ.

#pragma once
#include "include/queries.cuh"

#if KEY_GROUP
using KeyCodes = KEY_CODES;
constexpr int GROUP_TILES = KEY_GROUP / 16;

DEV void load_query(QueryFragment& q, SharedQuery& sh, int lane, float scale) {
  q.prepared = &sh;
#pragma unroll
  for (int n = 0; n < LANE_HEADS; n++) {
    const int head = min(4 * n + (lane & 3), TILE_HEADS - 1);
    q.back[n] = scale / query_power(sh.top[head]);
    q.factor[n] = q.back[n] * 16777216.f;
    q.mean_logit[n] = SOFTCAP ? sh.mean_logit[head] : 0.f;
  }
}

// What a product gave a lane for its n-th query head, in row g + 8 row.
template <class Sums> DEV float own_sum(const Sums& c, int n, int row) {
  return PAIRED ? c[0][2 * row] + c[0][2 * row + 1] : c[n / 2][2 * row + n % 2];
}

#if BOOSTED
// Queries of the boosted channels times their scales and four. Register 2 u + i of lane t: channels 4 (HIGH_STEPS t + u) + 2 i and the
// next one of the compact tensor, whose codes lie at bits 4 i and 4 i + 2.
DEV void load_boosted(QueryFragment& q, const u8* meta, const u8* index, int lane) {
  const int g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  SharedQuery& sh = *q.prepared;
  u8* boosted = sh.boosted[warp];
  __syncwarp();
  for (int i = lane; i < D / 4; i += 32) {
    const u32 rows = ((const u32*)index)[i];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = rows >> 8 * e & 255;
      if (row < BOOSTED) boosted[row] = (u8)(4 * i + e);
    }
  }
  __syncwarp();
#pragma unroll
  for (int u = 0; u < HIGH_STEPS; u++) {
    const int place = 4 * (HIGH_STEPS * t + u);  // BOOSTED is a multiple of four
    const u32 channels = place < BOOSTED ? *(const u32*)(boosted + place) : 0u;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const int head = query_column(n, g);
      const float by = place < BOOSTED && head < TILE_HEADS ? query_power(sh.top[head]) * 4.f : 0.f;
      const float* row = sh.rows + min(head, TILE_HEADS - 1) * D;
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int channel = min((int)(channels >> 8 * e & 255), D - 1);  // a group that is not there names anything
        x[e] = limb(row[channel] * fp16_low(*(const u16*)(meta + channel * 2)) * (by / (float)(1 << 2 * e)), g);
      }
      q.high[n][2 * u] = fp16_pair(x[0], x[1]), q.high[n][2 * u + 1] = fp16_pair(x[2], x[3]);
    }
  }
}
#endif

// Queries for a group of a page's tokens.
DEV void load_group(QueryFragment& q, const u8* page_head, int group, int lane) {
  const SharedQuery& sh = *q.prepared;
  const u8* meta = page_head + KEY_META_OFFSET + group * D * 4;
  q.entered = group;
  float c[COLUMN_TILES][4], other[COLUMN_TILES][4];  // two sums that do not wait for each other
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) c[n][i] = other[n][i] = 0.f;
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    u32 scale[4], least[4];
    load_words<4>(scale, meta + ((lane & 3) * (D / 4) + 8 * i) * 2);
    load_words<4>(least, meta + (D + (lane & 3) * (D / 4) + 8 * i) * 2);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      u32 x[4], y[4];
      load_words<4>(x, (const u8*)sh.pairs[n][i][lane]);
      load_words<4>(y, (const u8*)sh.scaled[n][i][lane]);
#pragma unroll
      for (int j = 0; j < 4; j++) q.k[n][4 * i + j] = mul_fp16x2(y[j], scale[j]);
      mma_fp16(c[n], least[0], least[0], least[1], least[1], x[0], x[1]);
      mma_fp16(other[n], least[2], least[2], least[3], least[3], x[2], x[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < LANE_HEADS; n++) q.base[n] = (own_sum(c, n, 0) + own_sum(other, n, 0)) * q.back[n];
#if BOOSTED
  load_boosted(q, meta, page_head + INDEX_OFFSET + group * D, lane);
#endif
}

#if BOOSTED
DEV void high_products(float c[COLUMN_TILES][4], const u8* page_head, int tile, int lane, const QueryFragment& q) {
  constexpr int ROW = BOOSTED / 4;
  static_assert(HIGH_STEPS <= 4, "a lane's bytes of a token are one word");
  u32 x[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u8* p = page_head + HIGH_OFFSET + (tile * 16 + r * 8 + (lane >> 2)) * ROW + (lane & 3) * HIGH_STEPS;
    if constexpr (HIGH_STEPS == 2 && ROW % 2 == 0) x[r] = *(const u16*)p;
    else if constexpr (HIGH_STEPS == 4 && ROW % 4 == 0) x[r] = *(const u32*)p;
    else {
      x[r] = 0u;
#pragma unroll
      for (int u = 0; u < HIGH_STEPS; u++) x[r] |= (u32)p[u] << 8 * u;
    }
  }
#pragma unroll
  for (int u = 0; u < HIGH_STEPS; u++) {
    const u32 y = __byte_perm(x[0], 0u, 0x4040 + 0x101 * u), z = __byte_perm(x[1], 0u, 0x4040 + 0x101 * u);  // the byte in both halves
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
      mma_fp16(c[n], y & 0x000C0003u, z & 0x000C0003u, y & 0x00C00030u, z & 0x00C00030u, q.high[n][2 * u], q.high[n][2 * u + 1]);
  }
}
#endif

// Scores of N tiles of a page in powers of two, less the state's m. Tiles of one group go side by side: their sums do not wait for each other.
template <int N> DEV void page_scores(const u8* page_head, int tile, int lane, QueryFragment& q, const OnlineSoftmax& softmax, float cap, float s[N][LANE_HEADS][2]) {
  constexpr int T = N < GROUP_TILES ? N : GROUP_TILES;
#pragma unroll
  for (int first = 0; first < N; first += T) {
    const int group = (tile + first) / GROUP_TILES;
    if (group != q.entered) load_group(q, page_head, group, lane);
    float c[T][COLUMN_TILES][4];
    KeyCodes codes[T];
#pragma unroll
    for (int i = 0; i < T; i++) {
      codes[i].load(page_head, tile + first + i, lane);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < D / 8; k += 2)
#pragma unroll
      for (int i = 0; i < T; i++) {
        const u32 a0 = codes[i].get(0, k), a1 = codes[i].get(1, k), a2 = codes[i].get(0, k + 1), a3 = codes[i].get(1, k + 1);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(c[i][n], a0, a1, a2, a3, q.k[n][k], q.k[n][k + 1]);
      }
#pragma unroll
    for (int i = 0; i < T; i++) {
#if BOOSTED
      high_products(c[i], page_head, tile + first + i, lane, q);
#endif
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float x = fmaf(own_sum(c[i], n, r), q.factor[n], SOFTCAP ? q.base[n] + q.mean_logit[n] : q.base[n] - softmax.m[n]);
          s[first + i][n][r] = SOFTCAP ? soft_cap(x, softmax.m[n], cap) : x;
        }
    }
  }
}
#endif
