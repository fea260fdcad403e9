// Channel-wise keys that are stored before RoPE: S = q^T R(p) k for the key k at position p.
//
// A chunk of 64 tokens begins at p0, and R(p) = R(p0) R(j). Queries are rotated back by p0 once a chunk, q' = R(p0)^T q. Keys are made fp16 numbers
// k = code * scale + min in registers and rotated by j as two operands: with q''_c = q'_(c + D/2) in the first half of the channels and -q'_(c - D/2) in the
// second,
//
//   q'^T R(j) k = sum_c q'_c (k_c cos(j f_c)) + q''_c (k_c sin(j f_c)).
//
// No lane needs the other channel of a pair. The cosines and sines of j = 0 ... 63 are fp16 numbers in shared memory, the same for all chunks.
//
// PAIRED_CHANNELS: lane t has both channels of a pair, c = t D/8 ... (t + 1) D/8 - 1 and c + D/2, whose codes two lanes would have had. It rotates keys,
//
//   k'_c = k_c cos(j f_c) - k_(c + D/2) sin(j f_c),  k'_(c + D/2) = k_(c + D/2) cos(j f_c) + k_c sin(j f_c),
//
// as one operand: half of the products, of the queries' registers and of the reads of angles.

#pragma once
#include "codecs/values.cuh"

constexpr bool PAIRED_CHANNELS = Config::PAIRED_CHANNELS;
constexpr int ANGLE_ROW = D / 2 + (D == 64 ? 16 : D == 128 ? 4 : 8);  // words of a token: cosines of D / 2 pairs, sines, and room so that neighbouring tokens lie in other banks
constexpr int ANGLE_WORDS = 16 * CHUNK_TILES * ANGLE_ROW;

// Query of a CTA in shared memory.
struct RotatedChannelQuery {
  static constexpr int QUARTER = D / 8 + 4;  // words of a lane's quarter of the channels, and room so that quarters lie in other banks
  float rows[TILE_HEADS * D];                // as it comes
  float top[4 * LANE_HEADS], mean_logit[4 * LANE_HEADS];
  u32 rotated[WARPS][TILE_HEADS][4][QUARTER];  // q' of a warp's chunk as fp16, times query_power

  DEV float peak_of(int head) const { return top[head]; }
  DEV void set_head(int, float, int) {}
  DEV void store_operand() {}
};
// A lane's registers: B operands of a chunk of tokens.
struct RotatedChannelFragment {
  u32 cosine[COLUMN_TILES][D / 8], sine[COLUMN_TILES][PAIRED_CHANNELS ? 1 : D / 8];  // q' and q''; PAIRED_CHANNELS: q' of both channels of pairs
  float factor[LANE_HEADS], mean_logit[LANE_HEADS];
  int group, bases;  // not used: scales are read with the codes
  int chunk;  // position of its first token; -1 before the first
  const u32* angles;  // [16 CHUNK_TILES, ANGLE_ROW]
  RotatedChannelQuery* shared;

  // Queries for the chunk of tokens from `at` on: the lanes rotate 8 pairs of channels of a head each, then load what they need.
  DEV void enter_chunk(const DecodeArguments& a, int at, int lane) {
    if (at == chunk) return;
    chunk = at;
    constexpr int PAIRS = 8, SHARES = D / 2 / PAIRS;
    const int g = lane >> 2, t = lane & 3;
    auto& rotated = shared->rotated[threadIdx.x >> 5];
    __syncwarp();
    for (int i = lane; i < TILE_HEADS * SHARES; i += 32) {
      const int head = i / SHARES, pair = i % SHARES * PAIRS, quarter = pair / (D / 4), word = pair % (D / 4) / 2;
      const float* row = shared->rows + head * D + pair;
      const float by = query_power(shared->top[head]);
      u32 u[PAIRS / 2], v[PAIRS / 2];
#pragma unroll
      for (int e = 0; e < PAIRS; e += 4) {
        float x[4], y[4], c[4], s[4];
        load_floats<4>(x, row + e), load_floats<4>(y, row + D / 2 + e);
        load_floats<4>(c, a.cosine + (s64)at * (D / 2) + pair + e), load_floats<4>(s, a.sine + (s64)at * (D / 2) + pair + e);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          c[j] *= by, s[j] *= by;
          const float z = x[j];
          x[j] = fmaf(x[j], c[j], y[j] * s[j]), y[j] = fmaf(y[j], c[j], -z * s[j]);
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) u[(e + j) / 2] = fp16_pair(x[j], x[j + 1]), v[(e + j) / 2] = fp16_pair(y[j], y[j + 1]);
      }
      store_words<PAIRS / 2>((u8*)(rotated[head][quarter] + word), u), store_words<PAIRS / 2>((u8*)(rotated[head][quarter + 2] + word), v);
    }
    constexpr int LINES = (2 * D + 127) / 128;  // of the cosines of a position; they are wanted soon for the next chunk
    if (at + 16 * CHUNK_TILES < a.rope_blocks && lane < 2 * LINES)
      prefetch_l1((lane < LINES ? a.cosine : a.sine) + (s64)(at + 16 * CHUNK_TILES) * (D / 2) + min(lane % LINES * 32, D / 2 - 1));
    __syncwarp();
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const int head = min(query_column(n, g), TILE_HEADS - 1);
      if constexpr (PAIRED_CHANNELS) {
#pragma unroll
        for (int h = 0; h < 2; h++) load_words<D / 16>(cosine[n] + h * (D / 16), (const u8*)(rotated[head][(t >> 1) + 2 * h] + (t & 1) * (D / 16)));
        continue;
      }
      load_words<D / 8>(cosine[n], (const u8*)rotated[head][t]), load_words<D / 8>(sine[n], (const u8*)rotated[head][t ^ 2]);
#pragma unroll
      for (int k = 0; k < D / 8 * !PAIRED_CHANNELS; k++) sine[n][k] ^= t < 2 ? 0u : 0x80008000u;
    }
  }
};

DEV void load_query(RotatedChannelFragment& q, RotatedChannelQuery& sh, int lane, float scale) {
  q.shared = &sh, q.chunk = -1;
#pragma unroll
  for (int n = 0; n < LANE_HEADS; n++) {
    const int head = min(4 * n + (lane & 3), TILE_HEADS - 1);
    q.factor[n] = scale / query_power(sh.top[head]);
    q.mean_logit[n] = SOFTCAP ? sh.mean_logit[head] : 0.f;
  }
}

// Codes of the channels that a lane has: of each row, those of the first channels of its pairs, then those of the second ones. They lie with lanes t / 2 and
// t / 2 + 2 of the rows.
DEV void load_paired(KeyCodes& codes, const u8* page_head, int tile, int lane) {
  constexpr int ROW = KeyCodes::WORDS / 2, HALF = ROW / 2;  // words
  const u8* from = page_head + KeyCodes::OFFSET + ((tile * 32 + (lane & 28) + (lane >> 1 & 1)) * KeyCodes::WORDS + (lane & 1) * HALF) * 4;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int r = 0; r < 2; r++) load_words<HALF>(codes.w + r * ROW + h * HALF, from + (h * 2 * KeyCodes::WORDS + r * ROW) * 4);
}

// Products of T tiles of a group, PAIRED_CHANNELS. `page_head`, `tile` and `angles` are those of the first.
template <int T> DEV void paired_products(float c[T][COLUMN_TILES][4], const u8* page_head, int tile, int lane, const RotatedChannelFragment& q) {
  constexpr int PAIRS = D / 16;  // words of the first channels of a lane's pairs
  const int t = lane & 3;
  const u8* meta = page_head + Key::SCALE_OFFSET + tile / GROUP_TILES * D * 4 + t * (D / 4);
  const u32* angles = q.angles + (tile % CHUNK_TILES * 16 + (lane >> 2)) * ANGLE_ROW + t * PAIRS;
  KeyCodes codes[T];
#pragma unroll
  for (int i = 0; i < T; i++) load_paired(codes[i], page_head, tile + i, lane);
#pragma unroll
  for (int k = 0; k < PAIRS; k += 4) {
    u32 scale[2][4], least[2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) load_words<4>(scale[h], meta + h * D + 4 * k), load_words<4>(least[h], meta + (2 + h) * D + 4 * k);
#pragma unroll
    for (int i = 0; i < T; i++) {
      u32 x[2][4], y[2][4];  // of rows g and g + 8: the first and the second channels of pairs, rotated
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 cosine[4], sine[4];
        load_words<4>(cosine, (const u8*)(angles + (16 * i + 8 * r) * ANGLE_ROW + k)), load_words<4>(sine, (const u8*)(angles + (16 * i + 8 * r) * ANGLE_ROW + D / 4 + k));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 one = fma_fp16x2(codes[i].number(r, k + j), scale[0][j], least[0][j]), two = fma_fp16x2(codes[i].number(r, PAIRS + k + j), scale[1][j], least[1][j]);
          x[r][j] = sub_product_fp16x2(mul_fp16x2(one, cosine[j]), two, sine[j]), y[r][j] = fma_fp16x2(one, sine[j], mul_fp16x2(two, cosine[j]));
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
          mma_fp16(c[i][n], x[0][j], x[1][j], x[0][j + 1], x[1][j + 1], q.cosine[n][k + j], q.cosine[n][k + j + 1]);
          mma_fp16(c[i][n], y[0][j], y[1][j], y[0][j + 1], y[1][j + 1], q.cosine[n][PAIRS + k + j], q.cosine[n][PAIRS + k + j + 1]);
        }
    }
  }
}
// The same of lanes that have one channel of a pair.
template <int T> DEV void unpaired_products(float c[T][COLUMN_TILES][4], const u8* page_head, int tile, int lane, const RotatedChannelFragment& q) {
  const int t = lane & 3;
  const u8* meta = page_head + Key::SCALE_OFFSET + tile / GROUP_TILES * D * 4 + t * (D / 2);
  const u32* angles = q.angles + (tile % CHUNK_TILES * 16 + (lane >> 2)) * ANGLE_ROW + (t & 1) * (D / 8);
  KeyCodes codes[T];
#pragma unroll
  for (int i = 0; i < T; i++) codes[i].load(page_head, tile + i, lane);
#pragma unroll
  for (int k = 0; k < D / 8; k += 4) {
    u32 scale[4], least[4];
    load_words<4>(scale, meta + 4 * k), load_words<4>(least, meta + D * 2 + 4 * k);
#pragma unroll
    for (int i = 0; i < T; i++) {
      u32 x[2][4], y[2][4];  // of rows g and g + 8: k cos, k sin
#pragma unroll
      for (int r = 0; r < 2; r++) {
        load_words<4>(x[r], (const u8*)(angles + (16 * i + 8 * r) * ANGLE_ROW + k)), load_words<4>(y[r], (const u8*)(angles + (16 * i + 8 * r) * ANGLE_ROW + D / 4 + k));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 key = fma_fp16x2(codes[i].number(r, k + j), scale[j], least[j]);
          x[r][j] = mul_fp16x2(key, x[r][j]), y[r][j] = mul_fp16x2(key, y[r][j]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
          mma_fp16(c[i][n], x[0][j], x[1][j], x[0][j + 1], x[1][j + 1], q.cosine[n][k + j], q.cosine[n][k + j + 1]);
          mma_fp16(c[i][n], y[0][j], y[1][j], y[0][j + 1], y[1][j + 1], q.sine[n][k + j], q.sine[n][k + j + 1]);
        }
    }
  }
}

// As page_scores of ChannelFragment, in the chunk that was entered.
template <int N> DEV void page_scores(const u8* page_head, int tile, int lane, RotatedChannelFragment& q, const OnlineSoftmax& softmax, float cap, float s[N][LANE_HEADS][2]) {
  constexpr int T = N < GROUP_TILES ? (N < 2 ? N : 2) : GROUP_TILES < 2 ? GROUP_TILES : 2;
#pragma unroll
  for (int first = 0; first < N; first += T) {
    float c[T][COLUMN_TILES][4];
#pragma unroll
    for (int i = 0; i < T; i++)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0.f;
    if constexpr (PAIRED_CHANNELS) paired_products<T>(c, page_head, tile + first, lane, q);
    else unpaired_products<T>(c, page_head, tile + first, lane, q);
#pragma unroll
    for (int i = 0; i < T; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float sum = PAIRED ? c[i][0][2 * r] : c[i][n / 2][2 * r + n % 2];
          const float x = fmaf(sum, q.factor[n], SOFTCAP ? q.mean_logit[n] : -softmax.m[n]);
          s[first + i][n][r] = SOFTCAP ? soft_cap(x, softmax.m[n], cap) : x;
        }
  }
}
