// Decode attention, 4 of 5: a warp attends to a page, or to a part of the full-precision windows.

#pragma once
#include "include/queries.cuh"
#include "codecs/channel.cuh"

// --- scores of a page, keys coded token by token -------------------------------------------------------------------------

#if !KEY_GROUP && !PQ
// The keys of N tiles of a page. Where a page is one chunk and comes in bulk, those of the next page are read while the values of this one are
// multiplied (PIPELINED).
constexpr bool PIPELINED = BULK && STAGES > 1 && TILES == CHUNK && !ROPE_BLOCK;  // registers are short where queries are turned
template <int N> struct KeyWords {
  u32 w[N][Keys::WORDS];

  DEV void load(PageHead page_head, int tile, int lane) { load(Keys{}, page_head, tile, lane); }
  template <class... P> DEV void load(Planes<P...>, PageHead page_head, int tile, int lane) {
    int before = 0;
    ((load<P>(page_head, tile, lane, before), before += P::WORDS), ...);
  }
  template <class P> DEV void load(PageHead page_head, int tile, int lane, int before) {
#pragma unroll
    for (int i = 0; i < N; i++) load_words<P::WORDS>(w[i] + before, page_head + (P::OFFSET + ((tile + i) * 32 + lane) * P::WORDS * 4));
  }
};
struct NextPage {  // the next page
  PageHead page_head;
  u32 barrier, parity;
  bool ready, wanted;
};

template <int N, class P> DEV void key_products(const KeyWords<N>& keys, int before, const QueryFragment& q, int c[N][LANE_HEADS][4]) {
#pragma unroll
  for (int k = 0; k < P::REGISTERS; k += 2) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u32* w = keys.w[i] + before;
      const u32 a0 = P::get(w, 0, k), a1 = P::get(w, 1, k), a2 = P::get(w, 0, k + 1), a3 = P::get(w, 1, k + 1);
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) mma_u8s8(c[i][n], a0, a1, a2, a3, q.f[n][P::BEFORE + k], q.f[n][P::BEFORE + k + 1]);
    }
  }
}
template <int N, class... P> DEV void all_products(Planes<P...>, const KeyWords<N>& keys, const QueryFragment& q, int c[N][LANE_HEADS][4]) {
  int before = 0;
  ((key_products<N, P>(keys, before, q, c), before += P::WORDS), ...);
}

// Scores of N tiles of a page in powers of two, less the state's m.
template <int N> DEV void page_scores(const KeyWords<N>& keys, PageHead page_head, int tile, int lane, const QueryFragment& q, const OnlineSoftmax& softmax, float cap, float s[N][LANE_HEADS][2]) {
  int c[N][LANE_HEADS][4];
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int n = 0; n < LANE_HEADS; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0;
  all_products<N>(Keys{}, keys, q, c);
#pragma unroll
  for (int i = 0; i < N; i++) {
    Scales key[2];
    load_scales<KEY_META, KEY_META_TYPE>(key, page_head + KEY_META_OFFSET, (lane >> 2) * (PAGE / 8) + (tile + i) * 2);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) {
        const float x = (float)(c[i][n][2 * r] * 128 + c[i][n][2 * r + 1]), less = SOFTCAP ? 0.f : ROPE_BLOCK ? softmax.m[n] - q.mean_logit[n] : softmax.m[n];
        float y;
        if (KEY_META == 0) y = fmaf(x * key[r].scale, q.factor[n], fmaf(q.sum[n], key[r].zero, -less));
        if (KEY_META == 1) y = fmaf(fmaf(x, q.factor[n], -q.sum[n] * key[r].zero), key[r].scale, -less);
        if (KEY_META == 2) y = fmaf(fmaf(x, q.factor[n], q.bias[n]), key[r].scale, -less);
        s[i][n][r] = SOFTCAP ? soft_cap(y + q.mean_logit[n], softmax.m[n], cap) : y;
      }
  }
}
#endif

// --- values of a page -----------------------------------------------------------------------------------------------------

// Probabilities of N tiles, p[i][head][row] for the lane's heads, as second operands.
template <int N> struct Probs {
  static constexpr int STEPS = PAIRED ? (N + 1) / 2 : N;  // products that share a set
  u32 p[STEPS][COLUMN_TILES][2];

  DEV void set(const float s[N][LANE_HEADS][2]) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float x = PAIRED ? s[2 * i * PAIRED + i * !PAIRED][0][r] : s[i][2 * n * !PAIRED][r];
          const float y = PAIRED ? (2 * i + 1 < N ? s[(2 * i + 1) % N][0][r] : 0.f) : s[i][(2 * n + 1) % LANE_HEADS][r];
          p[i][n][r] = transpose_8x8(fp16_pair(x, y));
        }
  }
  DEV u32 of(int tile, int n, int r) const { return p[PAIRED ? tile / 2 : tile][n][r]; }
};

#if PQ  // lookup.cu
#elif VALUE_GROUPS == 1
// Of tokens with one scale each: what a page's values are multiplied by.
template <int N> struct PageValues {
  float scale[N][2], rest[N][2], flag[N][2];

  DEV float load(PageHead page_head, int tile, int lane) {  // returns the largest scale that the lane sees
    float max_abs = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) {
      Scales value[2];
      load_scales<VALUE_META, VALUE_META_TYPE>(value, page_head + VALUE_META_OFFSET, (lane >> 2) * (PAGE / 8) + (tile + i) * 2);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float v = VALUE_META == 2 ? fabsf(value[r].scale) * Values::STEP : value[r].scale;
        scale[i][r] = v;
        if (VALUE_META == 0) rest[i][r] = fmaf(Values::TOP * 0.5f, v, value[r].zero);
        if (VALUE_META == 1) rest[i][r] = v * (Values::TOP * 0.5f - value[r].zero);
        flag[i][r] = VALUE_FLAG && __float_as_int(value[r].scale) < 0 ? 1.f : 0.f;
        max_abs = fmaxf(max_abs, v);
      }
    }
    return max_abs;
  }
  // Leaves out the tokens that are not in [first, last) of the sequence; `at` is the first of the page's.
  DEV float mask(int at, int first, int last, int lane) {
    float max_abs = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = at + i * 16 + r * 8 + (lane >> 2);
        if (position < first || position >= last) scale[i][r] = rest[i][r] = flag[i][r] = 0.f;
        max_abs = fmaxf(max_abs, scale[i][r]);
      }
    return max_abs;
  }
  // Adds probabilities x times values.
  DEV void add(OnlineSoftmax& softmax, float x[N][LANE_HEADS][2], PageHead page_head, int tile, int lane) const {
    const int g = lane >> 2;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) {
          if (VALUE_META != 2) softmax.z[n] = fmaf(x[i][n][r], rest[i][r], softmax.z[n]);
          if (VALUE_FLAG) softmax.flags[n] = fmaf(x[i][n][r], flag[i][r], softmax.flags[n]);
          x[i][n][r] *= scale[i][r] * softmax.norm;
        }
    Probs<N> p;
    p.set(x);
#pragma unroll
    for (int i = 0; i < p.STEPS; i++)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.bias[n], 0xE4006400u, 0xE4006400u, 0xE4006400u, 0xE4006400u, p.p[i][n][0], p.p[i][n][1]);
#pragma unroll
    for (int i = 0; i < N; i++) {
      Values codes;
      codes.load(page_head, tile + i, lane);
      u32 b[COLUMN_TILES][2];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) b[n][r] = own_columns(p.of(i, n, r), i, g);
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        const u32 a0 = codes.get(0, 2 * k), a1 = codes.get(0, 2 * k + 1), a2 = codes.get(1, 2 * k), a3 = codes.get(1, 2 * k + 1);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.acc[n][k], a0, a1, a2, a3, b[n][0], b[n][1]);
      }
    }
  }
};
#else
// Of tokens with a scale and a minimum for each of VALUE_GROUPS groups of channels. Probabilities are multiplied by a group's
// scales where they lie as second operands, tokens 2t and 2t + 1 a register; the minima are one more product, a row for each group.
template <int N> struct PageValues {
  static constexpr int STEPS = Probs<N>::STEPS;
  u32 scale[VALUE_GROUPS][STEPS][2], least[N][2];

  DEV static const u8* place(const u8* page_head, int group, int tile, int token) {  // of rows token and token + 8
    return page_head + VALUE_META_OFFSET + (group * PAGE + token * (PAGE / 8) + tile * 2) * 4;
  }
  DEV static int shift(int step, int lane) {  // tile whose probabilities the lane's column has
    return PAIRED ? min(2 * step + (lane >> 2 & 1), N - 1) : step;
  }
  DEV float max_abs() const {
    u32 x = 0u;
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++)
#pragma unroll
      for (int i = 0; i < STEPS; i++) x = pair_max<1>(x, pair_max<1>(scale[j][i][0], scale[j][i][1]));
    return fmaxf(fp16_low(x), fp16_high(x));
  }
  DEV float load(const u8* page_head, int tile, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++)
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const uint2 x = *(const uint2*)place(page_head, j, tile + shift(i, lane), 2 * t), y = *(const uint2*)place(page_head, j, tile + shift(i, lane), 2 * t + 1);
        scale[j][i][0] = __byte_perm(x.x, y.x, 0x5410), scale[j][i][1] = __byte_perm(x.y, y.y, 0x5410);
      }
#pragma unroll
    for (int i = 0; i < N; i++) {  // row g: group g; rows of no group are not looked at
      const int group = min(g, VALUE_GROUPS - 1);
      const uint2 x = *(const uint2*)place(page_head, group, tile + i, 2 * t), y = *(const uint2*)place(page_head, group, tile + i, 2 * t + 1);
      least[i][0] = __byte_perm(x.x, y.x, 0x7632), least[i][1] = __byte_perm(x.y, y.y, 0x7632);
    }
    return max_abs();
  }
  DEV static u32 kept(int position, int first, int last) {  // mask of two tokens
    return (position >= first && position < last ? 0xffffu : 0u) | (position + 1 >= first && position + 1 < last ? 0xffff0000u : 0u);
  }
  DEV float mask(int at, int first, int last, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int position = at + r * 8 + 2 * (lane & 3);
#pragma unroll
      for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < VALUE_GROUPS; j++) scale[j][i][r] &= kept(position + shift(i, lane) * 16, first, last);
#pragma unroll
      for (int i = 0; i < N; i++) least[i][r] &= kept(position + i * 16, first, last);
    }
    return max_abs();
  }
  DEV void add(OnlineSoftmax& softmax, float x[N][LANE_HEADS][2], const u8* page_head, int tile, int lane) const {
    const int g = lane >> 2;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) x[i][n][0] *= softmax.norm, x[i][n][1] *= softmax.norm;
    Probs<N> p;
    p.set(x);
#pragma unroll
    for (int i = 0; i < N; i++) {
      Values codes;
      codes.load(page_head, tile + i, lane);
      u32 own[COLUMN_TILES][2];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        own[n][0] = own_columns(p.of(i, n, 0), i, g), own[n][1] = own_columns(p.of(i, n, 1), i, g);
        mma_fp16(softmax.bias[n], least[i][0], 0u, least[i][1], 0u, own[n][0], own[n][1]);
      }
#pragma unroll
      for (int j = 0; j < VALUE_GROUPS; j++) {
        u32 b[COLUMN_TILES][2];
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
          for (int r = 0; r < 2; r++) b[n][r] = mul_fp16x2(own[n][r], scale[j][PAIRED ? i / 2 : i][r]);
#pragma unroll
        for (int k = j * GROUP_SHARE / 2; k < (j + 1) * GROUP_SHARE / 2; k++) {
          const u32 a0 = codes.get(0, 2 * k), a1 = codes.get(0, 2 * k + 1), a2 = codes.get(1, 2 * k), a3 = codes.get(1, 2 * k + 1);
#pragma unroll
          for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.acc[n][k], a0, a1, a2, a3, b[n][0], b[n][1]);
        }
      }
    }
  }
};
#endif

// --- full-precision windows -------------------------------------------------------------------------------------------

#if OVERLAY_TOKENS
DEV s64 overlay_offset(int position, s64 overlay_row, int head, int ring, int tokens) {
  const int place = position < SINK ? position : SINK + (position - SINK) % ring;
  return ((overlay_row * tokens + place) * KV_HEADS + head) * D;
}

// The keys of N tiles of tokens from `from` on, of which [first, last) are in the window; for others, one that is.
template <int N> struct OverlayKeys {
  u32 k[N][2][D / 8];
  DEV void load(const Arguments& a, int from, int first, int last, s64 overlay_row, int head, int lane) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = max(first, min(from + i * 16 + r * 8 + (lane >> 2), last - 1));
        load_words<D / 8>(k[i][r], (const u8*)a.overlay_key + (overlay_offset(position, overlay_row, head, KEY_RING, KEY_OVERLAY_TOKENS) + (lane & 3) * (D / 4)) * 2);
      }
  }
};

// Keys and values of tokens [from, last), at most 32, are wanted soon.
DEV void prefetch_overlay(const Arguments& a, int from, int last, s64 overlay_row, int head, int lane) {
  if (from + lane >= last || lane >= 16 * OVERLAY_TILES) return;
  const u8* key = (const u8*)a.overlay_key + overlay_offset(from + lane, overlay_row, head, KEY_RING, KEY_OVERLAY_TOKENS) * 2;
  const u8* value = (const u8*)a.overlay_value + overlay_offset(from + lane, overlay_row, head, VALUE_RING, VALUE_OVERLAY_TOKENS) * 2;
#pragma unroll
  for (int o = 0; o < 2 * D; o += 128) prefetch_l2(key + o), prefetch_l2(value + o);
}

// Scores of N tiles of tokens from `from` on, of which [first, last) are in the window; the others are minus infinity. Queries are two numbers
// of the windows' type, the second what the first leaves; fp16 is brought to a largest magnitude of 256. Where columns are left, the odd ones have the
// second number.
template <int N, class From>  // Prepared or Turned
DEV void overlay_scores(const OverlayKeys<N>& keys, const Arguments& a, int from, int first, int last, int lane, const From& sh, const float* rows, const OnlineSoftmax& softmax, float s[N][LANE_HEADS][2]) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const int column = PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1);  // the query head
    const float* row = rows + min(column, TILE_HEADS - 1) * D + t * (D / 4);
    float c[N][4] = {};
    float by = column < TILE_HEADS ? 1.f : 0.f;
    if (OVERLAY_TYPE == 1) by *= 256.f / peak_of(sh, min(column, TILE_HEADS - 1));
    const float odd = PAIRED && (g & 1) ? 1.f : 0.f;
#pragma unroll
    for (int e = 0; e < D / 8; e += 2) {
      const float4 x = *(const float4*)(row + 2 * e);
      float y[4] = {x.x * by, x.y * by, x.z * by, x.w * by};
#pragma unroll
      for (int part = 0; part < (PAIRED ? 1 : 2); part++) {
        u32 q[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float less = PAIRED ? odd : (float)part;
          const u32 first = pair_of<OVERLAY_TYPE>(y[2 * j], y[2 * j + 1]);
          q[j] = pair_of<OVERLAY_TYPE>(fmaf(-less, low<OVERLAY_TYPE>(first), y[2 * j]), fmaf(-less, high<OVERLAY_TYPE>(first), y[2 * j + 1]));
        }
#pragma unroll
        for (int i = 0; i < N; i++) mma_16bit<OVERLAY_TYPE>(c[i], keys.k[i][0][e], keys.k[i][1][e], keys.k[i][0][e + 1], keys.k[i][1][e + 1], q[0], q[1]);
      }
    }
#pragma unroll
    for (int j = 0; j < (PAIRED ? 1 : 2); j++) {
      const int h = PAIRED ? 0 : (2 * n + j) % LANE_HEADS, own = min(4 * h + t, TILE_HEADS - 1);
      const float back = OVERLAY_TYPE == 1 ? peak_of(sh, own) * (a.scale / 256.f) : a.scale, mean_logit = SOFTCAP || ROPE_BLOCK ? sh.mean_logit[own] : 0.f;
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int position = from + i * 16 + r * 8 + g;
          const float x = soft_cap((PAIRED ? c[i][2 * r] + c[i][2 * r + 1] : c[i][2 * r + j]) * back + mean_logit, softmax.m[h], a.cap);
          s[i][h][r] = position >= first && position < last ? x : minus_infinity();
        }
    }
  }
}

// Probabilities of N tiles as second operands in the windows' type: fp16, or bfloat16 in two parts, the second what the first leaves, in the odd columns
// where these are left.
template <int N> struct OverlayProbs {
  static constexpr int PARTS = OVERLAY_TYPE == 0 && !PAIRED ? 2 : 1;
  u32 p[N][COLUMN_TILES][PARTS][2];

  DEV void set(const float s[N][LANE_HEADS][2], int g) {
    if constexpr (OVERLAY_TYPE == 1) {
      Probs<N> both;
      both.set(s);
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) p[i][n][0][0] = own_columns(both.of(i, n, 0), i, g), p[i][n][0][1] = own_columns(both.of(i, n, 1), i, g);
    } else {
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float x = s[i][2 * n % LANE_HEADS][r], y = s[i][(2 * n + 1) % LANE_HEADS][r];
            const u32 first = bf16_pair(x, y);
            if (PAIRED) p[i][n][0][r] = transpose_8x8(bf16_pair(x, x - bf16_low(first)));
            else p[i][n][0][r] = transpose_8x8(first), p[i][n][PARTS - 1][r] = transpose_8x8(bf16_pair(x - bf16_low(first), y - bf16_high(first)));
          }
    }
  }
};

// The values of a tile, of which [first, last) are in the window; for others, one that is.
struct OverlayValues {
  u32 v[4][D / 16];
  DEV void load(const Arguments& a, int from, int first, int last, s64 overlay_row, int head, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int position = max(first, min(from + (r >> 1) * 8 + 2 * t + (r & 1), last - 1));
      const s64 row = overlay_offset(position, overlay_row, head, VALUE_RING, VALUE_OVERLAY_TOKENS);
#pragma unroll
      for (int j = 0; j < VALUE_GROUPS; j++) load_words<GROUP_SHARE / 2>(v[r] + j * GROUP_SHARE / 2, (const u8*)a.overlay_value + (row + value_channel(g, j * GROUP_SHARE)) * 2);
    }
  }
  template <int PARTS> DEV void add(float* c, int k, const u32 (*p)[2]) const {  // the k-th 16 channels
    const u32 a0 = __byte_perm(v[0][k], v[1][k], 0x5410), a1 = __byte_perm(v[0][k], v[1][k], 0x7632);
    const u32 a2 = __byte_perm(v[2][k], v[3][k], 0x5410), a3 = __byte_perm(v[2][k], v[3][k], 0x7632);
#pragma unroll
    for (int part = 0; part < PARTS; part++) mma_16bit<OVERLAY_TYPE>(c, a0, a1, a2, a3, p[part][0], p[part][1]);
  }
};

// The tokens [first, last) of WINDOW_TILES tiles of a sequence from `from` on.
template <class From>  // Prepared or Turned
DEV void attend_overlay(const Arguments& a, int from, int first, int last, s64 overlay_row, int head, int lane, const From& sh, const float* rows, OnlineSoftmax& softmax) {
  OverlayKeys<OVERLAY_TILES> keys;
  keys.load(a, from, first, last, overlay_row, head, lane);
  OverlayValues v[OVERLAY_TILES];  // asked for before the probabilities are there; with the keys, where registers are enough
  const auto load_values = [&]() {
#pragma unroll
    for (int i = 0; i < OVERLAY_TILES; i++) v[i].load(a, from + i * 16, first, last, overlay_row, head, lane);
  };
  float s[OVERLAY_TILES][LANE_HEADS][2];
  if (OVERLAY_TILES == 1 && PAIRED) load_values();
  overlay_scores<OVERLAY_TILES>(keys, a, from, first, last, lane, sh, rows, softmax, s);
  if (OVERLAY_TILES > 1 || !PAIRED) load_values();
  softmax.update<OVERLAY_TILES>(s, 0.f);
#if PQ
#pragma unroll
  for (int i = 0; i < OVERLAY_TILES; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) {
        u32 b[2];
        spread(b, s[i][n][r], lane >> 2);
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
          const u32 *x = v[i].v[2 * r] + 2 * k, *y = v[i].v[2 * r + 1] + 2 * k;
          mma_fp16(softmax.acc[n][k], to_fp16<OVERLAY_TYPE>(x[0]), to_fp16<OVERLAY_TYPE>(x[1]), to_fp16<OVERLAY_TYPE>(y[0]), to_fp16<OVERLAY_TYPE>(y[1]), b[0], b[1]);
        }
      }
#else
  OverlayProbs<OVERLAY_TILES> p;
  p.set(s, lane >> 2);
#pragma unroll
  for (int i = 0; i < OVERLAY_TILES; i++)
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) v[i].add<p.PARTS>(softmax.acc[n][k], k, p.p[i][n]);
#endif
}
#endif

// --- pages --------------------------------------------------------------------------------------------------------------

#if !PQ
// Tokens outside [first, last) are not there; past the ends a page may hold anything.
template <int N> DEV void mask_scores(float s[N][LANE_HEADS][2], int at, int first, int last, int lane) {
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int position = at + i * 16 + r * 8 + (lane >> 2);
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) s[i][n][r] = position < first || position >= last ? minus_infinity() : s[i][n][r];
    }
}
// One chunk of at most 64 tokens of a page.
template <class Scores, class Before> DEV void attend_chunk(PageHead page_head, int tile, int at, int first, int last, int lane, OnlineSoftmax& softmax, Scores scores, Before before_values) {
  float s[CHUNK][LANE_HEADS][2];
  scores(s);
  PageValues<CHUNK> values;
  float max_abs = values.load(page_head, tile, lane);
  if (at < first || at + 16 * CHUNK > last) {
    max_abs = values.mask(at, first, last, lane);
    mask_scores<CHUNK>(s, at, first, last, lane);
  }
  softmax.update<CHUNK>(s, max_abs);
  before_values();
  values.add(softmax, s, page_head, tile, lane);
}
#if KEY_GROUP
DEV void attend_page(PageHead page_head, int tile, int at, int first, int last, int lane, QueryFragment& q, OnlineSoftmax& softmax, float cap) {
  attend_chunk(page_head, tile, at, first, last, lane, softmax, [&](float s[CHUNK][LANE_HEADS][2]) { page_scores<CHUNK>(page_head, tile, lane, q, softmax, cap, s); }, []() {});
}
#else
DEV void attend_page(KeyWords<CHUNK>& keys, const NextPage& next, PageHead page_head, int tile, int at, int first, int last, int lane, const QueryFragment& q, OnlineSoftmax& softmax, float cap) {
  if (!PIPELINED) keys.load(page_head, tile, lane);
  attend_chunk(page_head, tile, at, first, last, lane, softmax, [&](float s[CHUNK][LANE_HEADS][2]) { page_scores<CHUNK>(keys, page_head, tile, lane, q, softmax, cap, s); }, [&]() {
    if (!PIPELINED || !next.wanted) return;
    if (!next.ready) await_stage(next.barrier, next.parity);
    keys.load(next.page_head, 0, lane);
  });
}
#endif
#endif

#if KEY_GROUP
constexpr int MIXED_TILES = PAIRED && CHUNK > 1 ? 2 : 1;

// The same for MIXED_TILES tiles of which some tokens have keys, from the keys-th token on, or values, from the values-th on, in windows.
DEV void attend_mixed(const Arguments& a, const u8* page_head, int tile, int at, int first, int last, int keys, int values, s64 overlay_row, int head, int lane,
                      QueryFragment& q, OnlineSoftmax& softmax) {
  float s[MIXED_TILES][LANE_HEADS][2];
  if (at < keys) page_scores<MIXED_TILES>(page_head, tile, lane, q, softmax, a.cap, s);
  mask_scores<MIXED_TILES>(s, at, first, min(keys, last), lane);
  if (at + 16 * MIXED_TILES > keys && keys < last) {
    float x[MIXED_TILES][LANE_HEADS][2];
    OverlayKeys<MIXED_TILES> full;
    full.load(a, at, max(keys, first), last, overlay_row, head, lane);
    overlay_scores<MIXED_TILES>(full, a, at, max(keys, first), last, lane, *q.prepared, q.prepared->rows, softmax, x);
#pragma unroll
    for (int i = 0; i < MIXED_TILES; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) s[i][n][0] = fmaxf(s[i][n][0], x[i][n][0]), s[i][n][1] = fmaxf(s[i][n][1], x[i][n][1]);
  }
  PageValues<MIXED_TILES> packed;
  packed.load(page_head, tile, lane);
  const float max_abs = packed.mask(at, first, min(values, last), lane);
  softmax.update<MIXED_TILES>(s, max_abs);
  if (at + 16 * MIXED_TILES > values && values < last) {
    float x[MIXED_TILES][LANE_HEADS][2];
#pragma unroll
    for (int i = 0; i < MIXED_TILES; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) x[i][n][r] = at + i * 16 + r * 8 + (lane >> 2) >= values ? s[i][n][r] : 0.f;
    OverlayProbs<MIXED_TILES> p;
    p.set(x, lane >> 2);
#pragma unroll
    for (int i = 0; i < MIXED_TILES; i++) {
      OverlayValues v;
      v.load(a, at + i * 16, max(values, first), last, overlay_row, head, lane);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
          float c[4] = {0.f, 0.f, 0.f, 0.f};
          v.add<p.PARTS>(c, k, p.p[i][n]);
          const float y = softmax.norm * Values::unit(2 * k), z = softmax.norm * Values::unit(2 * k + 1);
          softmax.acc[n][k][0] = fmaf(c[0], y, softmax.acc[n][k][0]), softmax.acc[n][k][1] = fmaf(c[1], y, softmax.acc[n][k][1]);
          softmax.acc[n][k][2] = fmaf(c[2], z, softmax.acc[n][k][2]), softmax.acc[n][k][3] = fmaf(c[3], z, softmax.acc[n][k][3]);
        }
    }
  }
  packed.add(softmax, s, page_head, tile, lane);
}
#endif

// Brings sums of values from their own scale to that of packed ones: rows times 2^p, all times the norm.
DEV void scale_accumulators(OnlineSoftmax& softmax) {
#pragma unroll
  for (int n = 0; n < ACC_TILES * !PQ; n++)
#pragma unroll
    for (int k = 0; k < ACC_STEPS; k++) {
      const float x = softmax.norm * Values::unit(2 * k), y = softmax.norm * Values::unit(2 * k + 1);
      softmax.acc[n][k][0] *= x, softmax.acc[n][k][1] *= x, softmax.acc[n][k][2] *= y, softmax.acc[n][k][3] *= y;
    }
}
// And back, without what rode on the codes. What all channels have in common is left in st.z.
DEV void unscale_accumulators(OnlineSoftmax& softmax, int t) {
#if !PQ
  const float back = 1.f / softmax.norm;
#pragma unroll
  for (int n = 0; n < ACC_TILES; n++)
#pragma unroll
    for (int k = 0; k < ACC_STEPS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float power = 1.f / Values::unit(2 * k + (i >> 1));
        if (VALUE_GROUPS > 1) {  // the minima's row of the channels' group
          const float least = __shfl_sync(FULL, softmax.bias[n][i & 1], 2 * k / GROUP_SHARE * 4 + t);
          softmax.acc[n][k][i] = (softmax.acc[n][k][i] * power + least) * back;
        } else {
          const float bias = softmax.bias[n][i & 1];
          softmax.acc[n][k][i] = ((softmax.acc[n][k][i] - bias) * power - bias * (Values::TOP * 0.5f / 1024.f)) * back;
        }
      }
#endif
}
