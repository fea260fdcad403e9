// Unpacks stored tokens of a batch of sequences, from their pages and overlay rows, into the model's own space: y = x M + offset, and keys that are
// stored unrotated are rotated by the start of their RoPE block. Copies the sequences' new tokens behind them. Prefill reads its history like this:
// rows [tokens of all sequences, KV_HEADS, D], sequence after sequence, are what varlen FlashAttention takes.
//
// Tensor cores compute Y = X M, 16 tokens at a time, with M in shared memory as B operands. Codes with one scale a token are A operands as they are
// (ValueCodes, BARE): for x = scale (weight code) + z, Y = scale (codes (weight M)) + z (1 M), so that scales are applied to sums, and neither the scale's
// range nor its rounding matters. Other formats are decoded to fp16 numbers first. Without a transform M is the identity.
//
// Which channel a place of the k dimension, and of the n dimension, stands for is free: M's entries lie in the order that the codes have in the page, and
// so that a lane ends up with VECTOR neighbouring channels (kvant/ops/cuda/unpack.py: `fragments`).
//
// Grid: (any, KV_HEADS). A warp takes a work unit at a time: UNIT tokens of the history of a sequence, or UNIT of its new tokens.

#pragma once
#include "include/bands.cuh"
#include "codecs/tokenwise.cuh"
#include "codecs/product_vq.cuh"

using Stream = Config::Stream;
constexpr int D = Config::HEAD_DIM, STEPS = D / 16, COLUMN_TILES = D / 8;
constexpr int TILES = Config::TILES, UNIT = 16 * TILES;
constexpr int VECTOR = Config::VECTOR, BLOCK_TILES = VECTOR / 2, BLOCK_CHANNELS = 4 * VECTOR;  // a lane's run of channels; four lanes have a block
constexpr int PASS_TILES = Config::PASS_TILES, PASS_BLOCKS = PASS_TILES / BLOCK_TILES;
constexpr int HALF_BLOCKS = Config::ROTATED / BLOCK_CHANNELS;  // blocks of the first channels of rotated pairs
constexpr int MATRIX_BYTES = D * D * 2, TERM_BYTES = 3 * D * 4;
constexpr bool CODED = !Config::PQ && Config::KEY_GROUP == 0 && Config::SCALE_GROUPS == 1 && !Config::LEVELS;  // codes are operands
static_assert(PASS_TILES % 2 == 0 && PASS_TILES % BLOCK_TILES == 0 && COLUMN_TILES % PASS_TILES == 0, "passes are whole blocks");
static_assert(!Config::ROTATED || (Config::ROTATED % BLOCK_CHANNELS == 0 && PASS_BLOCKS % 2 == 0), "rotated pairs are in one pass");

// A sequence of the batch.
struct Sequence {
  int units;        // work units of the sequences before it
  int out_row;      // row of the output for position `first`
  int first, last;  // positions to unpack
  int packed_end;   // position from which on tokens may be in the ring
  int new_row, new_tokens;  // rows of new tokens to copy behind them
  int padding;
};

// --- scales -------------------------------------------------------------------------------------------------------------------

struct Scale {
  float scale, zero;  // zero is the minimum, or the integer zero point
};

// The scale of a group of channels of a token of the page. Scales lie in the order in which lanes need them: token % 8 first, then token / 8.
DEV Scale load_scale(const u8* page_head, int token, int group = 0) {
  const int place = group * Config::PAGE_TOKENS + token % 8 * (Config::PAGE_TOKENS / 8) + token / 8;
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE) return {low<Stream::SCALE_TYPE>(*(const u16*)(page_head + Stream::SCALE_OFFSET + place * 2)), 0.f};
  const u32 x = *(const u32*)(page_head + Stream::SCALE_OFFSET + place * 4);
  return {low<Stream::SCALE_TYPE>(x), high<Stream::SCALE_TYPE>(x)};
}

// How a row of sums becomes numbers: y = acc scale + z bias + flag mean + offset + centroid M.
struct RowTerms {
  float scale, z, flag;
  int centroid;  // of the token's residual; -1 without
};

// The terms of a coded token. The sign of a scale alone is a flag: the mean was subtracted before the row was coded.
DEV RowTerms coded_terms(const Scale& s, float power) {
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE_MIN) return {s.scale * power, s.zero, 0.f, -1};
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE_ZERO) return {s.scale * power, -s.zero * s.scale, 0.f, -1};
  return {fabsf(s.scale) * power, fabsf(s.scale), Stream::FLAG && s.scale < 0.f ? 1.f : 0.f, -1};
}

// The number that a code of band B stands for.
template <class B> DEV float decode_number(float code, const Scale& s, const float* levels) {
  if constexpr (Config::LEVELS) return levels[(int)code] * s.scale;
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE_MIN) return fmaf(code, s.scale, s.zero);
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE_ZERO) return (code - s.zero) * s.scale;
  return (code - B::TOP * 0.5f) * (B::WEIGHT * fabsf(s.scale));
}

// The centroid that a token of the page is the residual of.
DEV int load_centroid(const u8* page_head, int token) {
  if constexpr (Config::INDEX_BITS == 0) return 0;
  int index = page_head[Config::INDEX_OFFSET + token];
  if constexpr (Config::INDEX_BITS == 16) index |= page_head[Config::HIGH_OFFSET + token] << 8;
  return min(index, Config::CENTROIDS - 1);  // a token that is not there names anything
}

// --- operands: codes ------------------------------------------------------------------------------------------------------------

// Codes of T tiles of all bands that have some. steps(f) calls f(x, m) for step m of the k dimension with the A operands x [T][4].
template <int T, class... B> struct CodeOperand {
  DEV void load(const u8*, int, int) {}
  template <class F> DEV void steps(F) const {}
};
template <int T, class B, class... Rest> struct CodeOperand<T, B, Rest...> {
  ValueCodes<B::WIDTH, B::BITS, B::OFFSET, B::HIGH_OFFSET, 1, true> codes[T];
  CodeOperand<T, Rest...> rest;

  DEV void load(const u8* page_head, int tile, int lane) {
#pragma unroll
    for (int i = 0; i < T; i++) codes[i].load(page_head, tile + i, lane);
    rest.load(page_head, tile, lane);
  }
  template <class F> DEV void steps(F f) const {
#pragma unroll
    for (int m = 0; m < B::WIDTH / 16; m++) {
      u32 x[T][4];
#pragma unroll
      for (int i = 0; i < T; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          // of keys, a word has two channels of token g; of values, tokens 2t and 2t + 1 of one channel, which a transposition turns around
          const u32 w = codes[i].get(j & 1, 2 * m + (j >> 1));
          x[i][j] = Config::VALUES ? transpose_8x8(w) : w;
        }
      f(x, B::FIRST / 16 + m);
    }
    rest.steps(f);
  }
};
template <int T, class> struct CodeOperandOf;
template <int T, class... B> struct CodeOperandOf<T, Bands<B...>> { using type = CodeOperand<T, B...>; };

// Code of element `e` of a lane's row (keys: the low or high channel of pair e) or of its tokens (values), as an integer.
template <class Codes> DEV float code_at(const Codes& codes, int row, int e, int half) {
  const int place = row * Codes::PAIRS + e;
  u32 code = codes.w[place / Codes::PER] >> (half * 16 + bit_of<Codes::LOW_BITS>(place)) & ((1u << Codes::LOW_BITS) - 1u);
  if constexpr (Codes::BITS == 3) code += (codes.h[place / 16] >> (half * 16 + place % 16) & 1u) * 4u;
  return (float)code;
}

// The pair of a lane's channels at place e of its codes of keys. Where the order has parts, registers 2m and 2m + 1 of KeyPlane hold elements 8m to 8m + 7.
template <int BITS> DEV constexpr int key_pair(int e) {
  constexpr int PER = BITS < 8 ? 8 / BITS : 1;  // codes of a byte
  const int reg = e / (2 * PER) * PER + e % PER, byte = e % (2 * PER) / PER;
  return Config::ORDER_GROUPS == 1 ? e : reg / 2 * 4 + byte * 2 + reg % 2;
}

// --- operands: numbers ----------------------------------------------------------------------------------------------------------

// A tile of fp16 numbers. Unless it is said otherwise, lane (g, t) has tokens g and g + 8, the t-th quarter of the channels.
struct NumberOperand {
  u32 x[STEPS][4];

  DEV u32& pair(int row, int e) { return x[e / 2][e % 2 * 2 + row]; }  // channels 2 e and 2 e + 1 of the quarter
  template <class F> DEV void steps(F f) const {
#pragma unroll
    for (int m = 0; m < STEPS; m++) {
      u32 one[1][4];
#pragma unroll
      for (int j = 0; j < 4; j++) one[0][j] = x[m][j];
      f(one, m);
    }
  }

  // Two rows of 16-bit numbers, times a power of two each, so that fp16 holds them; `back` are the inverses.
  template <int TYPE> DEV void load_rows(const void* const* rows, float* back, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      constexpr bool BYTES = TYPE == ElementType::FP8;
      constexpr int LOADED = BYTES ? D / 16 : D / 8, HELD = BYTES ? (int)ElementType::FP16 : TYPE;
      u32 w[D / 8];
#pragma unroll
      for (int i = 0; i < D / 8; i++) w[i] = 0u;
      if (rows[r]) load_words<LOADED>(w, (const u8*)rows[r] + t * (LOADED * 4));
      if constexpr (BYTES)
#pragma unroll
        for (int i = D / 8 - 1; i >= 0; i--) w[i] = fp16_of_fp8(w[i / 2] >> (i % 2 * 16));
      float top = 0.f;
#pragma unroll
      for (int i = 0; i < D / 8; i++) top = fmaxf(top, fmaxf(fabsf(low<HELD>(w[i])), fabsf(high<HELD>(w[i]))));
      top = quad_max(top);
      const float by = scale_below_one(top);
      back[r] = unscale_below_one(top);
#pragma unroll
      for (int i = 0; i < D / 8; i++) pair(r, i) = fp16_pair(low<HELD>(w[i]) * by, high<HELD>(w[i]) * by);
    }
  }

  // Keys coded per channel of a group of tokens: x = scale_c code_c + min_c. The index of a boosted channel names its two high bits in the compact tensor.
  template <class B> DEV void load_channels(const u8* page_head, int tile, int g, int t) {
    const int lane = 4 * g + t, group = tile * 16 / (Config::KEY_GROUP ? Config::KEY_GROUP : 1), quarter = t * (D / 4);
    const u8* meta = page_head + Stream::SCALE_OFFSET + group * D * 4;
    ValueCodes<B::WIDTH, B::BITS, B::OFFSET, B::HIGH_OFFSET, 1, true> codes;
    codes.load(page_head, tile, lane);
#pragma unroll
    for (int e = 0; e < D / 8; e++) {
      const u32 scale = *(const u32*)(meta + (quarter + 2 * e) * 2), least = *(const u32*)(meta + (D + quarter + 2 * e) * 2);
      int raised[2] = {255, 255};  // row of the compact tensor
      if constexpr (Config::BOOSTED > 0) {
        const u32 index = *(const u16*)(page_head + Config::INDEX_OFFSET + group * D + quarter + 2 * e);
        raised[0] = index & 255, raised[1] = index >> 8;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float y[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          y[k] = code_at(codes, r, e, k);
          if constexpr (Config::BOOSTED > 0)
            if (raised[k] < Config::BOOSTED)
              y[k] += (float)((page_head[Config::HIGH_OFFSET + (tile * 16 + r * 8 + g) * (Config::BOOSTED / 4) + raised[k] / 4] >> 2 * (raised[k] % 4) & 3) * 4);
        }
        pair(r, e) = fp16_pair(fmaf(y[0], low<Stream::SCALE_TYPE>(scale), low<Stream::SCALE_TYPE>(least)),
                               fmaf(y[1], high<Stream::SCALE_TYPE>(scale), high<Stream::SCALE_TYPE>(least)));
      }
    }
  }

  // Token-wise codes with several scales a token, or with a table of levels. Values come as in CodeOperand, in the order of the page's places.
  template <class B> DEV void load_groups(const u8* page_head, int tile, int g, int t, const float* levels) {
    constexpr int GROUP = D / Config::SCALE_GROUPS, N = B::WIDTH / 8;
    ValueCodes<B::WIDTH, B::BITS, B::OFFSET, B::HIGH_OFFSET, 1, true> codes;
    codes.load(page_head, tile, 4 * g + t);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int e = 0; e < N; e++) {
        constexpr int ORDERED = B::WIDTH / Config::ORDER_GROUPS, SHARE = ORDERED / (Config::VALUES ? 8 : 4);  // channels of a part, and of a lane of it
        const int element = Config::VALUES ? e : 2 * key_pair<B::BITS>(e);
        const int channel = B::FIRST + element / SHARE * ORDERED + (Config::VALUES ? g : t) * SHARE + element % SHARE;
        float y[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const int token = tile * 16 + r * 8 + (Config::VALUES ? 2 * t + k : g);
          y[k] = decode_number<B>(code_at(codes, r, e, k), load_scale(page_head, token, (channel + (Config::VALUES ? 0 : k)) / GROUP), levels);
        }
        const u32 w = fp16_pair(y[0], y[1]);
        x[B::FIRST / 16 + e / 2][e % 2 * 2 + r] = Config::VALUES ? transpose_8x8(w) : w;
      }
  }

  // Centroids of product quantization.
  template <class Book> DEV void load_centroids(const u8* page_head, int tile, int g, int t, u32 book) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 w[D / 8];
      Book::template centroids<4>(w, page_head, tile * 16 + r * 8 + g, t, book);
#pragma unroll
      for (int i = 0; i < D / 8; i++) pair(r, i) = w[i];
    }
  }
};

// --- output -------------------------------------------------------------------------------------------------------------------

// Channel of a block in the order of passes: the two halves of rotated pairs are neighbours.
DEV int block_channel(int i) { return (i < 2 * HALF_BLOCKS ? i % 2 * HALF_BLOCKS + i / 2 : i) * BLOCK_CHANNELS; }

DEV void store_vector(void* out, s64 at, const float* y) {
  if constexpr (Config::OUT_TYPE == ElementType::FP32) {
    u32 w[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) w[i] = __float_as_uint(y[i]);
    store_words<VECTOR>((u8*)out + at * 4, w);
  } else {
    u32 w[VECTOR / 2];
#pragma unroll
    for (int i = 0; i < VECTOR / 2; i++) w[i] = pair_of<Config::OUT_TYPE>(y[2 * i], y[2 * i + 1]);
    store_words<VECTOR / 2>((u8*)out + at * 2, w);
  }
}

template <int N> DEV void load_vector(float* y, const float* p) {  // N floats, aligned to them
  if constexpr (N == 8) load_floats<4>(y, p), load_floats<4>(y + 4, p + 4);
  else load_floats<N>(y, p);
}

// Y = X M of T tiles and what becomes of it. `at` is the position of the first token, `keep` has a bit for each row of a lane: token g + 8 r at bit r.
template <int T, class Operand>
DEV void transform_tiles(const UnpackArguments& a, const Operand& operand, const uint4* matrix, const float* terms, const RowTerms* rows, u32 keep, s64 out_row, int at,
                         int head, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const float* centroids = Config::CENTROIDS > 0 ? (const float*)a.codebooks + (Stream::BOOK_HEADS > 1 ? (s64)head * Config::CENTROIDS * D : 0) : nullptr;
  const int begin = at + a.rope_first;  // RoPE position of the first token
  const bool same = !Config::ROTATED || (Config::ROPE_STEP == 0 && begin / Config::ROPE_BLOCK == (begin + 16 * T - 1) / Config::ROPE_BLOCK && begin + 16 * T - 1 <= a.rope_last);
  // Place of the angles of a token's RoPE block. Tokens after the last one have none.
  const auto angles = [&](int token) { return (min(begin + token, a.rope_last) / Config::ROPE_BLOCK - a.rope_first / Config::ROPE_BLOCK) * Config::ROTATED; };
  // Cosines and sines of a lane's channels from `channel` on.
  const auto load_angles = [&](float* cosine, float* sine, int token, int channel) {
    load_vector<VECTOR>(cosine, a.cosine + angles(token) + channel), load_vector<VECTOR>(sine, a.sine + angles(token) + channel);
    if constexpr (Config::ROPE_STEP > 0) {  // the angle inside the block is added
      const int step = min(begin + token, a.rope_last) % Config::ROPE_BLOCK / Config::ROPE_STEP * Config::ROTATED;
      float c[VECTOR], s[VECTOR];
      load_vector<VECTOR>(c, a.step_cosine + step + channel), load_vector<VECTOR>(s, a.step_sine + step + channel);
#pragma unroll
      for (int e = 0; e < VECTOR; e++) {
        const float x = cosine[e], y = sine[e];
        cosine[e] = x * c[e] - y * s[e], sine[e] = y * c[e] + x * s[e];
      }
    }
  };
#pragma unroll 1
  for (int pass = 0; pass < COLUMN_TILES / PASS_TILES; pass++) {
    float acc[T][PASS_TILES][4];
#pragma unroll
    for (int i = 0; i < T; i++)
#pragma unroll
      for (int n = 0; n < PASS_TILES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[i][n][j] = 0.f;
    operand.steps([&](const u32(&x)[T][4], int m) {
      const uint4* from = matrix + (m * (COLUMN_TILES / 2) + pass * (PASS_TILES / 2)) * 32 + lane;
#pragma unroll
      for (int n = 0; n < PASS_TILES; n += 2) {
        const uint4 b = from[n / 2 * 32];
#pragma unroll
        for (int i = 0; i < T; i++) {
          mma_fp16(acc[i][n], x[i][0], x[i][1], x[i][2], x[i][3], b.x, b.y);
          mma_fp16(acc[i][n + 1], x[i][0], x[i][1], x[i][2], x[i][3], b.z, b.w);
        }
      }
    });
    constexpr int PAIRED = Config::ROTATED > 0 ? 2 : 1;  // blocks at a time
#pragma unroll
    for (int k = 0; k < PASS_BLOCKS; k += PAIRED) {
      const int first = pass * PASS_BLOCKS + k;
      float bias[PAIRED][VECTOR], offset[PAIRED][VECTOR], mean[PAIRED][VECTOR];
#pragma unroll
      for (int b = 0; b < PAIRED; b++) {
        const int channel = block_channel(first + b) + t * VECTOR;
        if constexpr (CODED) load_vector<VECTOR>(bias[b], terms + channel);
        if constexpr (Stream::OFFSETS) load_vector<VECTOR>(offset[b], terms + D + channel);
        if constexpr (Stream::FLAG) load_vector<VECTOR>(mean[b], terms + 2 * D + channel);
      }
      const bool rotated = Config::ROTATED > 0 && first < 2 * HALF_BLOCKS;
      float cosine[VECTOR], sine[VECTOR];
      if (rotated && same) load_angles(cosine, sine, 0, block_channel(first) + t * VECTOR);
#pragma unroll
      for (int r = 0; r < 2 * T; r++) {
        if (!(keep >> r & 1)) continue;
        float y[PAIRED][VECTOR];
#pragma unroll
        for (int b = 0; b < PAIRED; b++) {
          float centroid[VECTOR];
          if constexpr (Config::CENTROIDS > 0) {
#pragma unroll
            for (int e = 0; e < VECTOR; e++) centroid[e] = 0.f;
            if (rows[r].centroid >= 0) load_vector<VECTOR>(centroid, centroids + (s64)rows[r].centroid * D + block_channel(first + b) + t * VECTOR);
          }
#pragma unroll
          for (int e = 0; e < VECTOR; e++) {
            float z = Stream::OFFSETS ? offset[b][e] : 0.f;
            if constexpr (CODED) z = fmaf(rows[r].z, bias[b][e], z);
            if constexpr (Stream::FLAG) z = fmaf(rows[r].flag, mean[b][e], z);
            if constexpr (Config::CENTROIDS > 0) z += centroid[e];
            y[b][e] = fmaf(acc[r / 2][(k + b) * BLOCK_TILES + e / 2][r % 2 * 2 + e % 2], rows[r].scale, z);
          }
        }
        if (rotated) {
          if (!same) load_angles(cosine, sine, 8 * r + g, block_channel(first) + t * VECTOR);
#pragma unroll
          for (int e = 0; e < VECTOR; e++) {  // of the pair of channels (c, c + half):  x' = x cos - y sin,  y' = y cos + x sin
            const float x = y[0][e], z = y[PAIRED - 1][e];
            y[0][e] = x * cosine[e] - z * sine[e], y[PAIRED - 1][e] = z * cosine[e] + x * sine[e];
          }
        }
#pragma unroll
        for (int b = 0; b < PAIRED; b++)
          store_vector(a.out, ((out_row + 8 * r + g) * Config::KV_HEADS + head) * D + block_channel(first + b) + t * VECTOR, y[b]);
      }
    }
  }
}

// --- work units -----------------------------------------------------------------------------------------------------------------

// Copies eight numbers of TYPE, from `from` on, to place `at` of the workspace.
template <int TYPE> DEV void copy_eight(const UnpackArguments& a, const u8* from, s64 at) {
  u32 w[4];
  load_words<4>(w, from);
  if constexpr (Config::OUT_TYPE == TYPE) store_words<4>((u8*)a.out + at * 2, w);
  else {
    float y[8];
#pragma unroll
    for (int k = 0; k < 4; k++) y[2 * k] = low<TYPE>(w[k]), y[2 * k + 1] = high<TYPE>(w[k]);
    store_four<Config::OUT_TYPE>(a.out, at, y), store_four<Config::OUT_TYPE>(a.out, at + 4, y + 4);
  }
}

// Copies new tokens [first, first + UNIT) of a sequence behind its history.
DEV void copy_new(const UnpackArguments& a, const Sequence& s, int first, int head, int lane) {
  constexpr int CHUNKS = D / 8;  // of 8 numbers
  const s64 to = (s64)s.out_row + (s.last - s.first);
  for (int i = lane; i < UNIT * CHUNKS; i += 32) {
    const int token = first + i / CHUNKS, channel = i % CHUNKS * 8;
    if (token >= s.new_tokens) break;
    const s64 from = (s64)(s.new_row + token) * a.new_stride + head * D + channel, at = ((to + token) * Config::KV_HEADS + head) * D + channel;
    copy_eight<Config::IN_TYPE>(a, (const u8*)a.new_rows + from * 2, at);
  }
}

// The tokens of a tile, from position `at` on, that the overlay holds.
DEV void unpack_overlay(const UnpackArguments& a, const float* terms, u32 keep, s64 out_row, int at, s64 overlay_row, int head, int lane) {
  const int g = lane >> 2, t = lane & 3;
  constexpr int BYTES = Config::OVERLAY_TYPE == ElementType::FP8 ? 1 : 2;
  const void* from[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int position = at + 8 * r + g, place = position < Config::SINK ? position : Config::SINK + (position - Config::SINK) % Config::RING;
    from[r] = keep >> r & 1 ? (const u8*)a.overlay + ((overlay_row * Config::OVERLAY_TOKENS + place) * Config::KV_HEADS + head) * D * BYTES : nullptr;
  }
  if constexpr (Config::RAW_WINDOW) {  // keys as the model gave them
#pragma unroll
    for (int r = 0; r < 2; r++)
      for (int channel = 8 * t; from[r] && channel < D; channel += 32)
        copy_eight<Config::OVERLAY_TYPE>(a, (const u8*)from[r] + channel * 2, ((out_row + 8 * r + g) * Config::KV_HEADS + head) * D + channel);
    return;
  }
  NumberOperand numbers;
  float back[2];
  numbers.load_rows<Config::OVERLAY_TYPE>(from, back, t);
  const float number_power = a.powers[2 * head + 1];
  const RowTerms rows[2] = {{back[0] * number_power, 0.f, 0.f, -1}, {back[1] * number_power, 0.f, 0.f, -1}};
  const uint4* matrix = (const uint4*)(a.number_matrix + (a.matrices > 1 ? (s64)head * MATRIX_BYTES : 0));
  transform_tiles<1>(a, numbers, matrix, terms, rows, keep, out_row, at, head, lane);
}

// A tile of a page whose format is decoded to numbers.
template <class S> DEV void load_numbers(NumberOperand& numbers, const u8* memory, const u8* page_head, int tile, int lane) {
  const int g = lane >> 2, t = lane & 3;
  if constexpr (Config::PQ) numbers.load_centroids<typename S::Codebook>(page_head, tile, g, t, S::Codebook::copy_of(shared_address(memory), lane));
  else if constexpr (Config::KEY_GROUP > 0) S::CodeBands::each([&](auto band) { numbers.load_channels<decltype(band)>(page_head, tile, g, t); });
  else S::CodeBands::each([&](auto band) { numbers.load_groups<decltype(band)>(page_head, tile, g, t, (const float*)(memory + MATRIX_BYTES)); });
}

// The tokens of T tiles of a page.
template <class S, int T>
DEV void unpack_page(const UnpackArguments& a, const u8* memory, const u8* page_head, int tile, u32 keep, s64 out_row, int at, int head, int lane) {
  const int g = lane >> 2;
  const float* terms = (const float*)(memory + MATRIX_BYTES);
  const float power = a.powers[2 * head];
  RowTerms rows[2 * T];
  if constexpr (CODED) {
    typename CodeOperandOf<T, typename S::CodeBands>::type codes;
    codes.load(page_head, tile, lane);
#pragma unroll
    for (int r = 0; r < 2 * T; r++) {
      rows[r] = coded_terms(load_scale(page_head, tile * 16 + r * 8 + g), power);
      if constexpr (Config::CENTROIDS > 0) rows[r].centroid = load_centroid(page_head, tile * 16 + r * 8 + g);
    }
    transform_tiles<T>(a, codes, (const uint4*)memory, terms, rows, keep, out_row, at, head, lane);
  } else {
    static_assert(T == 1, "numbers of one tile are held");
    NumberOperand numbers;
    load_numbers<S>(numbers, memory, page_head, tile, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) rows[r] = {power, 0.f, 0.f, Config::CENTROIDS > 0 ? load_centroid(page_head, tile * 16 + r * 8 + g) : -1};
    transform_tiles<1>(a, numbers, (const uint4*)memory, terms, rows, keep, out_row, at, head, lane);
  }
}

template <class S, int THREADS> DEV void load_codebook(const UnpackArguments& a, u8* memory, int head) {
  if constexpr (Config::PQ) {
    using Book = typename S::Codebook;
    Book::template load_book<THREADS>(memory, a.codebooks + (S::BOOK_HEADS > 1 ? (s64)head * Book::ENTRIES * Book::ENTRY : 0));
  }
}

extern "C" __global__ void __launch_bounds__(Config::WARPS * 32, Config::MIN_CTAS) kvant_unpack(const UnpackArguments a) {
  DYNAMIC_SHARED(memory);  // the matrix, the terms of rows, and a codebook
  constexpr int THREADS = Config::WARPS * 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, head = blockIdx.y;
  const u8* from = a.matrix + (a.matrices > 1 ? (s64)head * MATRIX_BYTES : 0);
  for (int i = threadIdx.x; i < MATRIX_BYTES / 16; i += THREADS) ((uint4*)memory)[i] = ((const uint4*)from)[i];
  for (int i = threadIdx.x; i < 3 * D; i += THREADS) ((float*)(memory + MATRIX_BYTES))[i] = a.terms[head * 3 * D + i];
  load_codebook<Stream, THREADS>(a, memory, head);
  __syncthreads();
  const float* terms = (const float*)(memory + MATRIX_BYTES);
  const Sequence* sequences = (const Sequence*)a.sequences;
  int b = 0;
  for (int unit = blockIdx.x * Config::WARPS + warp; unit < a.units; unit += gridDim.x * Config::WARPS) {
    while (b + 1 < a.batch && unit >= sequences[b + 1].units) b++;
    const Sequence s = sequences[b];
    const int rel_first = s.first - Config::ORIGIN, begin = (rel_first >= 0 ? rel_first : rel_first - UNIT + 1) / UNIT;  // floor
    const int history = s.last > s.first ? (s.last - Config::ORIGIN - begin * UNIT + UNIT - 1) / UNIT : 0, mine = unit - s.units;
    if (mine >= history) {
      copy_new(a, s, (mine - history) * UNIT, head, lane);
      continue;
    }
    const int rel = (begin + mine) * UNIT, at = rel + Config::ORIGIN;  // of the first token: in pages, and in the sequence
    int sinks = Config::ORIGIN, ring_start = s.last;  // positions before the one and from the other on are in the overlay
    s64 overlay_row = 0;
    if (Config::OVERLAY_TOKENS) {
      sinks = max(sinks, (int)a.sinks[b]), overlay_row = a.overlay_rows[b];
      ring_start = max(s.packed_end, (int)a.ring_start[b]);
    }
    u32 packed = 0, full = 0;
#pragma unroll
    for (int r = 0; r < 2 * TILES; r++) {
      const int position = at + 8 * r + g;
      if (position < s.first || position >= s.last) continue;
      (Config::OVERLAY_TOKENS && (position < sinks || position >= ring_start) ? full : packed) |= 1u << r;
    }
    const s64 out_row = (s64)s.out_row + at - s.first;
    if (at + UNIT > sinks && at < ring_start && rel >= 0) {
      const s64 page = max(a.block_table[b * a.table_stride + rel / Config::PAGE_TOKENS], (s64)0);
      const u8* page_head = a.pages + (page * Config::KV_HEADS + head) * Config::PAGE_HEAD_BYTES;
      unpack_page<Stream, TILES>(a, memory, page_head, rel % Config::PAGE_TOKENS / 16, packed, out_row, at, head, lane);
    }
    if constexpr (Config::OVERLAY_TOKENS > 0) {
      if (at < sinks || at + UNIT > ring_start)
#pragma unroll 1
        for (int i = 0; i < TILES; i++) unpack_overlay(a, terms, full >> 2 * i & 3u, out_row + 16 * i, at + 16 * i, overlay_row, head, lane);
    }
  }
}
