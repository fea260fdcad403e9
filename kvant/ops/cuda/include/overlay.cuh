// Attention over the overlay: the sinks and the ring of recent tokens, in 16 bits or, values alone, in fp8, as A operands of 16-bit MMAs.

#pragma once
#include "include/query.cuh"
#include "include/head_tile_rows.cuh"
#include "include/sequence_work.cuh"

// P of N tiles, s[i][head][row] of the lane's heads, as B operands: transposed to columns of heads. PAIRED: of two tiles at a time.
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

// Where a row of the overlay [rows, tokens, KV_HEADS, D] holds a position, in elements: sinks in order, then the ring.
DEV s64 overlay_offset(int position, s64 overlay_row, int head, int ring, int tokens) {
  const int place = position < Config::SINK ? position : Config::SINK + (position - Config::SINK) % ring;
  return ((overlay_row * tokens + place) * Config::KV_HEADS + head) * D;
}

// Numbers of the values: fp8, half as many bytes, or of the keys' type. P meets bfloat16 as two parts, high + low, other numbers as fp16.
constexpr bool FP8_VALUES = Config::VALUE_WINDOW_TYPE == ElementType::FP8, BF16_VALUES = Config::VALUE_WINDOW_TYPE == ElementType::BF16;
constexpr int VALUE_BYTES = FP8_VALUES ? 1 : 2;

// The places of a chunk of tokens from `from` <= first on, as byte offsets from the row of the overlay: either sinks alone or tokens of the ring, so that one remainder
// serves all.
template <int RING, int BYTES = 2> struct OverlayPlaces {
  int place, least, most;  // of the first token; offsets of the first and the last token that is in the overlay

  DEV OverlayPlaces(int from, int first, int last) : place(from < Config::SINK ? from : Config::SINK + (from - Config::SINK) % RING), least(first - from), most(last - 1 - from) {}
  DEV u32 offset(int token) const {  // of a token of the chunk, or of the nearest that is in the overlay
    const int at = place + max(least, min(token, most));
    return (u32)(at >= Config::SINK + RING ? at - RING : at) * (Config::KV_HEADS * D * BYTES);
  }
};
template <int BYTES = 2> DEV const u8* overlay_bytes(const void* overlay, s64 overlay_row, int head, int tokens) { return (const u8*)overlay + (overlay_row * (tokens * Config::KV_HEADS) + head) * (D * BYTES); }

// Lane t of a row of the overlay has words e of D / 8, each of two channels. Where a word is: LANES_SIDE_BY_SIDE, four lanes read 64 neighbouring bytes at once, else
// each reads a quarter of the row.
constexpr bool LANES_SIDE_BY_SIDE = TOKENWISE && D % 32 == 0;
DEV constexpr int overlay_channel(int e, int t) { return LANES_SIDE_BY_SIDE ? e / 4 * 32 + t * 8 + e % 4 * 2 : t * (D / 4) + 2 * e; }
DEV void load_overlay_words(u32* w, const u8* row, int t) {
  constexpr int AT_ONCE = LANES_SIDE_BY_SIDE ? 4 : D / 8;
#pragma unroll
  for (int e = 0; e < D / 8; e += AT_ONCE) load_words<AT_ONCE>(w + e, row + overlay_channel(e, t) * 2);
}

// K of N tiles of tokens from `from` on as A operands. Tokens outside [first, last) are not in the overlay; the nearest that is stands for them.
template <int N> struct OverlayKeys {
  u32 k[N][2][D / 8];
  DEV void load(const DecodeArguments& a, int from, int first, int last, s64 overlay_row, int head, int lane) {
    if constexpr (TOKENWISE) {
      const OverlayPlaces<Key::RING> places(from, first, last);
      const u8* row = overlay_bytes(a.overlay_key, overlay_row, head, Key::OVERLAY_TOKENS);
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) load_overlay_words(k[i][r], row + places.offset(i * 16 + r * 8 + (lane >> 2)), lane & 3);
    } else {
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int position = max(first, min(from + i * 16 + r * 8 + (lane >> 2), last - 1));
          load_words<D / 8>(k[i][r], (const u8*)a.overlay_key + (overlay_offset(position, overlay_row, head, Key::RING, Key::OVERLAY_TOKENS) + (lane & 3) * (D / 4)) * 2);
        }
    }
  }
};

// Prefetches K and V of tokens [from, last), at most 16 OVERLAY_TILES, to L2: a lane a token.
DEV void prefetch_overlay(const DecodeArguments& a, int from, int last, s64 overlay_row, int head, int lane) {
  if (from + lane >= last || lane >= 16 * OVERLAY_TILES) return;
  const u8* key = (const u8*)a.overlay_key + overlay_offset(from + lane, overlay_row, head, Key::RING, Key::OVERLAY_TOKENS) * 2;
  const u8* value = (const u8*)a.overlay_value + overlay_offset(from + lane, overlay_row, head, Value::RING, Value::OVERLAY_TOKENS) * VALUE_BYTES;
#pragma unroll
  for (int o = 0; o < 2 * D; o += 128) prefetch_l2(key + o);
#pragma unroll
  for (int o = 0; o < VALUE_BYTES * D; o += 128) prefetch_l2(value + o);
}

// Products c of N tiles of tokens with column tile n as scores in log2, less m; minus infinity outside [first, last). SCALED: queries were scaled to a largest
// magnitude of 256. MEAN: the logits lack q . mu, which is added.
template <int N, bool SCALED, bool MEAN, class From>
DEV void mask_scores(const float c[N][4], int n, const DecodeArguments& a, int from, int first, int last, int lane, const From& sh, const OnlineSoftmax& softmax, float s[N][LANE_HEADS][2]) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < (PAIRED ? 1 : 2); j++) {
    const int h = PAIRED ? 0 : (2 * n + j) % LANE_HEADS, own = min(4 * h + t, TILE_HEADS - 1);
    const float back = SCALED ? sh.peak_of(own) * (a.scale / 256.f) : a.scale, mean_logit = MEAN ? sh.mean_logit[own] : 0.f;
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

// S = Q K^T of N tiles of tokens from `from` on; minus infinity outside [first, last). Q [TILE_HEADS, D] in float32 is split into two numbers of the
// overlay's type, high + low; fp16 is scaled to a largest magnitude of 256 first. PAIRED: odd columns hold the low part.
//
// Where keys are stored before RoPE, each is rotated by its position (codecs/rotated_channel.cuh): K cos and K sin as fp16, times q and q''.
template <int N, class From>
DEV void rotated_overlay_scores(const OverlayKeys<N>& keys, const DecodeArguments& a, int from, int first, int last, int lane, const From& sh, const float* rows, const OnlineSoftmax& softmax, float s[N][LANE_HEADS][2]) {
  const int g = lane >> 2, t = lane & 3, pair = (t & 1) * (D / 4);
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const int column = PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1);  // the query head
    const float* row = rows + min(column, TILE_HEADS - 1) * D + pair;
    const float by = column < TILE_HEADS ? 256.f / sh.peak_of(column) : 0.f, odd = PAIRED && (g & 1) ? 1.f : 0.f;
    float c[N][4] = {};
#pragma unroll
    for (int e = 0; e < D / 8; e += 2) {
      float one[4], two[4], x[2][4];  // q and q''
      load_floats<4>(one, row + 2 * e), load_floats<4>(two, row + D / 2 + 2 * e);
#pragma unroll
      for (int j = 0; j < 4; j++) x[0][j] = (t < 2 ? one[j] : two[j]) * by, x[1][j] = (t < 2 ? two[j] : -one[j]) * by;
      u32 k[N][2][2][2];  // cos or sin, row, register
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int position = max(first, min(from + i * 16 + r * 8 + g, last - 1));
          float cosine[4], sine[4];
          load_floats<4>(cosine, a.cosine + (s64)position * (D / 2) + pair + 2 * e), load_floats<4>(sine, a.sine + (s64)position * (D / 2) + pair + 2 * e);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const u32 w = keys.k[i][r][e + j];
            const float y = low<Config::OVERLAY_TYPE>(w), z = high<Config::OVERLAY_TYPE>(w);
            k[i][0][r][j] = fp16_pair(y * cosine[2 * j], z * cosine[2 * j + 1]), k[i][1][r][j] = fp16_pair(y * sine[2 * j], z * sine[2 * j + 1]);
          }
        }
#pragma unroll
      for (int way = 0; way < 2; way++)
#pragma unroll
        for (int part = 0; part < (PAIRED ? 1 : 2); part++) {
          u32 q[2];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float less = PAIRED ? odd : (float)part;
            const u32 whole = fp16_pair(x[way][2 * j], x[way][2 * j + 1]);
            q[j] = fp16_pair(fmaf(-less, fp16_low(whole), x[way][2 * j]), fmaf(-less, fp16_high(whole), x[way][2 * j + 1]));
          }
#pragma unroll
          for (int i = 0; i < N; i++) mma_fp16(c[i], k[i][way][0][0], k[i][way][1][0], k[i][way][0][1], k[i][way][1][1], q[0], q[1]);
        }
    }
    mask_scores<N, true, SOFTCAP>(c, n, a, from, first, last, lane, sh, softmax, s);
  }
}
template <int N, class From>  // From: SharedQuery or QueryOperand
DEV void overlay_scores(const OverlayKeys<N>& keys, const DecodeArguments& a, int from, int first, int last, int lane, const From& sh, const float* rows, const OnlineSoftmax& softmax, float s[N][LANE_HEADS][2]) {
  if constexpr (Config::ROTATED_KEYS) return rotated_overlay_scores<N>(keys, a, from, first, last, lane, sh, rows, softmax, s);
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const int column = PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1);  // the query head
    const float* row = rows + min(column, TILE_HEADS - 1) * D;
    float c[N][4] = {};
    float by = column < TILE_HEADS ? 1.f : 0.f;
    if (Config::OVERLAY_TYPE == 1) by *= 256.f / sh.peak_of(min(column, TILE_HEADS - 1));
    const float odd = PAIRED && (g & 1) ? 1.f : 0.f;
#pragma unroll
    for (int e = 0; e < D / 8; e += 2) {
      const float4 x = *(const float4*)(row + overlay_channel(e, t));
      float y[4] = {x.x * by, x.y * by, x.z * by, x.w * by};
#pragma unroll
      for (int part = 0; part < (PAIRED ? 1 : 2); part++) {
        u32 q[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float less = PAIRED ? odd : (float)part;
          const u32 first = pair_of<Config::OVERLAY_TYPE>(y[2 * j], y[2 * j + 1]);
          q[j] = pair_of<Config::OVERLAY_TYPE>(fmaf(-less, low<Config::OVERLAY_TYPE>(first), y[2 * j]), fmaf(-less, high<Config::OVERLAY_TYPE>(first), y[2 * j + 1]));
        }
#pragma unroll
        for (int i = 0; i < N; i++) mma_16bit<Config::OVERLAY_TYPE>(c[i], keys.k[i][0][e], keys.k[i][1][e], keys.k[i][0][e + 1], keys.k[i][1][e + 1], q[0], q[1]);
      }
    }
    mask_scores<N, Config::OVERLAY_TYPE == 1, SOFTCAP>(c, n, a, from, first, last, lane, sh, softmax, s);
  }
}

// The same with queries that were split before (SPLIT_ROWS).
struct SplitRows {
  const u8* bytes;
  DEV SplitRows(const float* rows) : bytes((const u8*)rows) {}
};
template <int N, class From>
DEV void overlay_scores(const OverlayKeys<N>& keys, const DecodeArguments& a, int from, int first, int last, int lane, const From& sh, const SplitRows& rows, const OnlineSoftmax& softmax, float s[N][LANE_HEADS][2]) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const int column = PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1);  // the query head
    constexpr int SUMS = N == 1 ? 2 : 1;  // that do not wait for each other
    float c[SUMS][N][4] = {};
#pragma unroll
    for (int part = 0; part < (PAIRED ? 1 : 2); part++) {
      u32 q[D / 8];
      load_overlay_words(q, rows.bytes + (min(column, TILE_HEADS - 1) * 2 + (PAIRED ? g & 1 : part)) * (D * 2), t);
#pragma unroll
      for (int e = 0; e < D / 8; e += 2) {
        if (TILE_HEADS < 4 * LANE_HEADS && column >= TILE_HEADS) q[e] = q[e + 1] = 0u;
#pragma unroll
        for (int i = 0; i < N; i++) mma_bf16(c[e / 2 % SUMS][i], keys.k[i][0][e], keys.k[i][1][e], keys.k[i][0][e + 1], keys.k[i][1][e + 1], q[e], q[e + 1]);
      }
    }
    if constexpr (SUMS > 1)
#pragma unroll
      for (int i = 0; i < 4; i++) c[0][0][i] += c[SUMS - 1][0][i];
    mask_scores<N, false, SOFTCAP>(c[0], n, a, from, first, last, lane, sh, softmax, s);
  }
}
using OverlayRows = Select<Config::SPLIT_ROWS, SplitRows, const float*>;  // that a kernel before decode makes

// The same with queries as they came: where keys are stored unrotated, the overlay holds them as the model gave them (RAW_WINDOW). Queries of the overlay's type are
// one operand, exactly; others are split into high + low.
struct GivenQueries {
  static constexpr bool EXACT = Config::QUERY_TYPE == Config::OVERLAY_TYPE;
  static constexpr int PARTS = EXACT || PAIRED ? 1 : 2, BYTES = Config::QUERY_TYPE == 2 ? 4 : 2;  // PAIRED: odd columns hold the low part
  const u8* bytes;
  int count;  // rows
  DEV GivenQueries(const DecodeArguments& a, const HeadTileRows& tile) : bytes((const u8*)a.query + tile.query * D * BYTES), count(tile.count) {}

  // B operands of all steps: `low_part` of the row of a column, or zero where there is no such row.
  DEV void load(u32* q, int column, bool low_part, int t) const {
    const u8* row = bytes + min(column, count - 1) * (D * BYTES);
    if constexpr (EXACT) {
      load_overlay_words(q, row, t);
    } else {
#pragma unroll
      for (int e = 0; e < D / 8; e++) {
        float x[2];
        load_pair(x, row, overlay_channel(e, t));
        const u32 first = pair_of<Config::OVERLAY_TYPE>(x[0], x[1]);
        q[e] = low_part ? pair_of<Config::OVERLAY_TYPE>(x[0] - low<Config::OVERLAY_TYPE>(first), x[1] - high<Config::OVERLAY_TYPE>(first)) : first;
      }
    }
    if (column >= count || (EXACT && low_part))
#pragma unroll
      for (int e = 0; e < D / 8; e++) q[e] = 0u;
  }
  DEV static void load_pair(float* x, const u8* row, int channel) {
    if constexpr (Config::QUERY_TYPE == 2) {
      const float2 y = *(const float2*)(row + channel * 4);
      x[0] = y.x, x[1] = y.y;
    } else {
      const u32 w = *(const u32*)(row + channel * 2);
      x[0] = low<Config::QUERY_TYPE>(w), x[1] = high<Config::QUERY_TYPE>(w);
    }
  }
};
template <int N, class From>
DEV void overlay_scores(const OverlayKeys<N>& keys, const DecodeArguments& a, int from, int first, int last, int lane, const From& sh, const GivenQueries& rows, const OnlineSoftmax& softmax, float s[N][LANE_HEADS][2]) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    constexpr int SUMS = N == 1 ? 2 : 1;  // that do not wait for each other
    float c[SUMS][N][4] = {};
#pragma unroll
    for (int part = 0; part < GivenQueries::PARTS; part++) {
      u32 q[D / 8];
      rows.load(q, query_column(n, g), PAIRED ? g & 1 : part, t);
#pragma unroll
      for (int e = 0; e < D / 8; e += 2)
#pragma unroll
        for (int i = 0; i < N; i++) mma_16bit<Config::OVERLAY_TYPE>(c[e / 2 % SUMS][i], keys.k[i][0][e], keys.k[i][1][e], keys.k[i][0][e + 1], keys.k[i][1][e + 1], q[e], q[e + 1]);
    }
    if constexpr (SUMS > 1)
#pragma unroll
      for (int i = 0; i < 4; i++) c[0][0][i] += c[SUMS - 1][0][i];
    mask_scores<N, false, false>(c[0], n, a, from, first, last, lane, sh, softmax, s);  // these logits lack no q . mu
  }
}

// P of N tiles as B operands: fp16, or beside bfloat16 values bfloat16 in two parts, high + low. PAIRED: the odd columns hold the low part.
template <int N> struct OverlayProbs {
  static constexpr int PARTS = BF16_VALUES && !PAIRED ? 2 : 1;
  u32 p[N][COLUMN_TILES][PARTS][2];

  DEV void set(const float s[N][LANE_HEADS][2], int g) {
    if constexpr (!BF16_VALUES) {
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

// V of a tile as the transposed A operand. Tokens outside [first, last): the nearest that is in the overlay, with P = 0.
struct OverlayValues {
  static constexpr int CHANNELS = 4 / VALUE_BYTES;  // of a word
  u32 v[4][(D / 8 + CHANNELS - 1) / CHANNELS];

  // The lane's channels of a row, those of each scale one after another.
  DEV void load_row(u32* w, const u8* row, int g) {
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++) {
      const u8* from = row + value_channel(g, j * GROUP_SHARE) * VALUE_BYTES;
      if constexpr (GROUP_SHARE % CHANNELS == 0) load_words<GROUP_SHARE / CHANNELS>(w + j * (GROUP_SHARE / CHANNELS), from);
      else
#pragma unroll
        for (int i = 0; i < GROUP_SHARE / 2; i++) {  // half words
          const int half = j * (GROUP_SHARE / 2) + i;
          const u32 x = ((const u16*)from)[i];
          w[half / 2] = half % 2 ? w[half / 2] | x << 16 : x;
        }
    }
  }
  // Tile `tile` of the chunk of tokens from `from` on.
  DEV void load(const DecodeArguments& a, int from, int tile, int first, int last, s64 overlay_row, int head, int lane) {
    const int g = lane >> 2, t = lane & 3;
    if constexpr (TOKENWISE) {
      const OverlayPlaces<Value::RING, VALUE_BYTES> places(from, first, last);
      const u8* bytes = overlay_bytes<VALUE_BYTES>(a.overlay_value, overlay_row, head, Value::OVERLAY_TOKENS);
#pragma unroll
      for (int r = 0; r < 4; r++) load_row(v[r], bytes + places.offset(tile * 16 + (r >> 1) * 8 + 2 * t + (r & 1)), g);
    } else {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int position = max(first, min(from + tile * 16 + (r >> 1) * 8 + 2 * t + (r & 1), last - 1));
        load_row(v[r], (const u8*)a.overlay_value + overlay_offset(position, overlay_row, head, Value::RING, Value::OVERLAY_TOKENS) * VALUE_BYTES, g);
      }
    }
  }
  template <int PARTS> DEV void add(float* c, int k, const u32 (*p)[2]) const {  // the k-th 16 channels
    u32 x[4];  // two tokens of a channel each
    if constexpr (FP8_VALUES) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 bytes = __byte_perm(v[2 * i][k / 2], v[2 * i + 1][k / 2], k % 2 ? 0x7362 : 0x5140);
        x[2 * i] = fp16_of_fp8(bytes), x[2 * i + 1] = fp16_of_fp8(bytes >> 16);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) x[2 * i] = __byte_perm(v[2 * i][k], v[2 * i + 1][k], 0x5410), x[2 * i + 1] = __byte_perm(v[2 * i][k], v[2 * i + 1][k], 0x7632);
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) mma_16bit<BF16_VALUES ? 0 : 1>(c, x[0], x[1], x[2], x[3], p[part][0], p[part][1]);
  }
};

// With several queries: tokens that a query does not read from the overlay get S = minus infinity.
template <int N> DEV void mask_overlay_rows(float s[N][LANE_HEADS][2], int from, const RowLimits& limits, int lane) {
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < LANE_HEADS; h++)
        if (!limits.overlay(4 * h + (lane & 3), from + i * 16 + r * 8 + (lane >> 2))) s[i][h][r] = minus_infinity();
}

// With several queries: tokens that a query does not read from pages get S = minus infinity. The token of row r of tile i is token(i, r).
template <int N, class Token> DEV void mask_packed_rows(float s[N][LANE_HEADS][2], const RowLimits& limits, int lane, Token token) {
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++)
        if (!limits.packed(4 * n + (lane & 3), token(i, r))) s[i][n][r] = minus_infinity();
}

// Attends to tokens [first, last) of OVERLAY_TILES tiles of the sequence from `from` on: S, softmax update, O += P V.
template <class From, class Rows>  // From: SharedQuery or QueryOperand; Rows: const float*, OverlayRows or GivenQueries
DEV void attend_overlay(const DecodeArguments& a, const volatile SequenceWork& w, const HeadTileRows& tile, int from, int first, int last, s64 overlay_row, int lane, const From& sh, const Rows& rows, OnlineSoftmax& softmax) {
  OverlayKeys<OVERLAY_TILES> keys;
  const int head = tile.head;
  keys.load(a, from, first, last, overlay_row, head, lane);
  OverlayValues v[OVERLAY_TILES];  // loaded before P is known; together with K where registers are enough
  const auto load_values = [&]() {
#pragma unroll
    for (int i = 0; i < OVERLAY_TILES; i++) v[i].load(a, from, i, first, last, overlay_row, head, lane);
  };
  float s[OVERLAY_TILES][LANE_HEADS][2];
  if (OVERLAY_TILES == 1 && PAIRED) load_values();
  overlay_scores<OVERLAY_TILES>(keys, a, from, first, last, lane, sh, rows, softmax, s);
  if (OVERLAY_TILES > 1 || !PAIRED) load_values();
  if constexpr (QUERIES > 1) mask_overlay_rows<OVERLAY_TILES>(s, from, RowLimits(w, a.sliding_window, tile.row), lane);
  softmax.update<OVERLAY_TILES>(s, 0.f, [](float) { return 0.f; });
  if constexpr (PQ) {
#pragma unroll
  for (int i = 0; i < OVERLAY_TILES; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) {
        u32 b[2];
        expand_probs(b, s[i][n][r], lane >> 2);
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
          const u32 *x = v[i].v[2 * r] + 2 * k, *y = v[i].v[2 * r + 1] + 2 * k;
          mma_fp16(softmax.acc[n][k], to_fp16<Config::OVERLAY_TYPE>(x[0]), to_fp16<Config::OVERLAY_TYPE>(x[1]), to_fp16<Config::OVERLAY_TYPE>(y[0]), to_fp16<Config::OVERLAY_TYPE>(y[1]), b[0], b[1]);
        }
      }
  } else {
  OverlayProbs<OVERLAY_TILES> p;
  p.set(s, lane >> 2);
#pragma unroll
  for (int i = 0; i < OVERLAY_TILES; i++)
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) v[i].add<p.PARTS>(softmax.acc[n][k], k, p.p[i][n]);
  }
}
