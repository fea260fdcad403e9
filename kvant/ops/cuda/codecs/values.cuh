// Values with scales per token: O^T += V^T P^T over codes as fp16 numbers. Scales touch P, never the elements of V.

#pragma once
#include "codecs/residual.cuh"
#include "codecs/scaled_values.cuh"
#include "include/overlay.cuh"

// Codes of a tile of values; CODE_BANKS: codes of four bits, of 128 channels.
template <class Codes, class PageHead> DEV void load_codes(Codes& codes, PageHead page_head, int tile, int lane) {
  if constexpr (CODE_BANKS) {
    load_halves(codes.w, page_head + (Codes::OFFSET + (tile * 32 + lane) * 32), lane >> 2 & 1);
    swap_halves(codes.w, lane >> 2 & 1);
  } else {
    codes.load(page_head, tile, lane);
  }
}

// Values with one scale (and minimum or zero point) a token: V = scale * (code - TOP / 2) + rest. The accumulators end up with centred
// codes (unscale_accumulators), so rest = scale * (TOP / 2 - zero), or min + scale * TOP / 2. P is multiplied by scale * norm, z collects
// P * rest. Values of a table of levels (codecs/levels.cuh) have no rest, and their numbers no 1024. FLAG: the sign bit of a scale marks a value whose mean was subtracted.
template <int N> struct TokenValues {
  static constexpr bool SCALES_TIMES_NORM = true;  // as they are held
  float scale[N][2], rest[N][2];

  // Returns the largest scale times norm that the lane sees.
  template <class PageHead> DEV float load(PageHead page_head, int tile, int lane, float norm) {
    constexpr bool PAIRS = Value::SCALE_FORM == ScaleForm::SCALE && Value::SCALE_TYPE == ElementType::BF16;  // magnitudes are compared two at a time
    const float by = norm * (Value::SCALE_FORM == ScaleForm::SCALE ? Values::STEP : 1.f);
    const int place = (lane >> 2) * (Config::PAGE_TOKENS / 8) + tile * 2;
    if constexpr (PAIRS) {
      u32 most = 0u;
#pragma unroll
      for (int i = 0; i < N; i++) {
        u32 x;
        load_words<1>(&x, page_head + (Value::SCALE_OFFSET + (place + 2 * i) * 2));
        scale[i][0] = bf16_low(x) * by, scale[i][1] = bf16_high(x) * by;
        most = bf16_pair_max_magnitude(x, most);
      }
      return fmaxf(bf16_low(most), bf16_high(most)) * by;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      Scales value[2];
      load_scales<Value::SCALE_FORM, Value::SCALE_TYPE>(value, page_head + Value::SCALE_OFFSET, place + 2 * i);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float v = value[r].scale;
        scale[i][r] = v * by;
        if (Value::SCALE_FORM == ScaleForm::SCALE_MIN) rest[i][r] = fmaf(Values::TOP * 0.5f, v, value[r].zero);
        if (Value::SCALE_FORM == ScaleForm::SCALE_ZERO) rest[i][r] = v * (Values::TOP * 0.5f - value[r].zero);
      }
    }
    return largest();
  }
  // Floats that are not negative are ordered as their bits are. Of integers one instruction takes the largest of three.
  DEV float largest() const {
    int most = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
      most = max(max(most, __float_as_int(Value::SCALE_FORM == ScaleForm::SCALE ? fabsf(scale[i][0]) : scale[i][0])), __float_as_int(Value::SCALE_FORM == ScaleForm::SCALE ? fabsf(scale[i][1]) : scale[i][1]));
    return __int_as_float(most);
  }
  // Masks tokens outside [first, last); `at` is the first token of the tiles. Returns the largest scale that is left, times norm.
  DEV float mask(int at, int first, int last, int lane) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = at + i * 16 + r * 8 + (lane >> 2);
        if (position < first || position >= last) scale[i][r] = rest[i][r] = 0.f;
      }
    return largest();
  }
  // O^T += V^T P^T, for P in x.
  template <class PageHead, class After> DEV void accumulate(OnlineSoftmax& softmax, float x[N][LANE_HEADS][2], PageHead page_head, int tile, int lane, After after_loads) const {
    const int g = lane >> 2;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) {
          if (Value::SCALE_FORM != ScaleForm::SCALE) softmax.z[n] = fmaf(x[i][n][r], rest[i][r], softmax.z[n]);
          if (Value::FLAG && __float_as_int(scale[i][r]) < 0) softmax.flags[n] += x[i][n][r];
          x[i][n][r] *= Value::SCALE_FORM == ScaleForm::SCALE ? fabsf(scale[i][r]) : scale[i][r];
        }
    Probs<N> p;
    p.set(x);
    if constexpr (!Values::TABLE)
#pragma unroll
    for (int i = 0; i < p.STEPS; i++)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.bias[n], 0xE4006400u, 0xE4006400u, 0xE4006400u, 0xE4006400u, p.p[i][n][0], p.p[i][n][1]);
#pragma unroll
    for (int i = 0; i < N; i++) {
      Values codes;
      load_codes(codes, page_head, tile + i, lane);
      if (i == N - 1) after_loads();
      u32 b[COLUMN_TILES][2];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) b[n][r] = own_columns(p.of(i, n, r), i, g);
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        u32 a0, a1, a2, a3;
        codes.get_two(0, 2 * k, a0, a1), codes.get_two(1, 2 * k, a2, a3);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.acc[n][k], a0, a1, a2, a3, b[n][0], b[n][1]);
      }
    }
  }
};

// Values with a scale and a minimum for each of VALUE_GROUPS groups of channels. P is multiplied by a group's scales where it lies as a B operand,
// tokens 2t and 2t + 1 a register; P times the minima is one more MMA (MINIMA_BY_TILE).
template <int N> struct GroupValues {
  static constexpr bool SCALES_TIMES_NORM = false;
  static constexpr int STEPS = Probs<N>::STEPS, LEAST = MINIMA_BY_TILE ? STEPS : N;
  u32 scale[VALUE_GROUPS][STEPS][2], least[LEAST][2];

  DEV static const u8* place(const u8* page_head, int group, int tile, int token) {  // of rows token and token + 8
    return page_head + Value::SCALE_OFFSET + (group * Config::PAGE_TOKENS + token * (Config::PAGE_TOKENS / 8) + tile * 2) * 4;
  }
  DEV static int shift(int step, int lane) {  // tile whose probabilities the lane's column has
    return PAIRED ? min(2 * step + (lane >> 2 & 1), N - 1) : step;
  }
  DEV float largest() const {
    u32 x = 0u;
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++)
#pragma unroll
      for (int i = 0; i < STEPS; i++) x = pair_max<1>(x, pair_max<1>(scale[j][i][0], scale[j][i][1]));
    return fmaxf(fp16_low(x), fp16_high(x));
  }
  // Tokens 2t and 2t + 1 of pages of 64 tokens lie 32 bytes apart, and those of lanes t and t + 2 in the same banks: where t > 1, the second is read first (VALUE_BANKS).
  DEV float load(const u8* page_head, int tile, int lane) {
    const int g = lane >> 2, t = lane & 3, swap = Config::VALUE_BANKS ? t >> 1 : 0;
    const u32 lows = swap ? 0x1054u : 0x5410u, highs = swap ? 0x3276u : 0x7632u;
    const auto read = [&](int group, int at, uint2& x, uint2& y) {
      x = *(const uint2*)place(page_head, group, at, 2 * t + swap), y = *(const uint2*)place(page_head, group, at, 2 * t + 1 - swap);
    };
#pragma unroll
    for (int j = 0; j < VALUE_GROUPS; j++)
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        uint2 x, y;
        read(j, tile + shift(i, lane), x, y);
        scale[j][i][0] = __byte_perm(x.x, y.x, lows), scale[j][i][1] = __byte_perm(x.y, y.y, lows);
      }
#pragma unroll
    for (int i = 0; i < LEAST; i++) {  // rows of no group are not looked at
      uint2 x, y;
      read(min(MINIMA_BY_TILE ? g >> 1 : g, VALUE_GROUPS - 1), tile + (MINIMA_BY_TILE ? shift(i, lane) : i), x, y);
      least[i][0] = __byte_perm(x.x, y.x, highs), least[i][1] = __byte_perm(x.y, y.y, highs);
    }
    return largest();
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
      for (int i = 0; i < LEAST; i++) least[i][r] &= kept(position + (MINIMA_BY_TILE ? shift(i, lane) : i) * 16, first, last);
    }
    return largest();
  }
  template <class After> DEV void accumulate(OnlineSoftmax& softmax, float x[N][LANE_HEADS][2], const u8* page_head, int tile, int lane, After after_loads) const {
    const int g = lane >> 2;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) x[i][n][0] *= softmax.norm, x[i][n][1] *= softmax.norm;
    Probs<N> p;
    p.set(x);
    if constexpr (MINIMA_BY_TILE)
#pragma unroll
      for (int i = 0; i < STEPS; i++) mma_fp16(softmax.bias[0], least[i][0], 0u, least[i][1], 0u, p.p[i][0][0], p.p[i][0][1]);
#pragma unroll
    for (int i = 0; i < N; i++) {
      Values codes;
      codes.load(page_head, tile + i, lane);
      if (i == N - 1) after_loads();
      u32 own[COLUMN_TILES][2];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        own[n][0] = own_columns(p.of(i, n, 0), i, g), own[n][1] = own_columns(p.of(i, n, 1), i, g);
        if constexpr (!MINIMA_BY_TILE) mma_fp16(softmax.bias[n], least[i][0], 0u, least[i][1], 0u, own[n][0], own[n][1]);
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
          u32 a0, a1, a2, a3;
          codes.get_two(0, 2 * k, a0, a1), codes.get_two(1, 2 * k, a2, a3);
#pragma unroll
          for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(softmax.acc[n][k], a0, a1, a2, a3, b[n][0], b[n][1]);
        }
      }
    }
  }
};

template <bool SEVERAL, int N> struct ValuesOf { using type = TokenValues<N>; };
template <int N> struct ValuesOf<true, N> { using type = Select<SCALED_PROBS, ScaledValues<N>, GroupValues<N>>; };
template <int N> using PageValues = typename ValuesOf<(VALUE_GROUPS > 1), N>::type;

// Scales of N tiles of values, and the largest of them times norm.
template <class V, class PageHead> DEV float load_scales_of(V& values, PageHead page_head, int tile, int lane, float norm) {
  if constexpr (V::SCALES_TIMES_NORM) return values.load(page_head, tile, lane, norm);
  else return values.load(page_head, tile, lane) * norm;
}
// The same of those inside [first, last), after the others became zero.
template <class V> DEV float mask_scales_of(V& values, int at, int first, int last, int lane, float norm) {
  return values.mask(at, first, last, lane) * (V::SCALES_TIMES_NORM ? 1.f : norm);
}

// --- a chunk of a page ----------------------------------------------------------------------------------------------------

// Tokens outside [first, last) get S = minus infinity: past its ends a page may hold anything.
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

// Attends to one chunk of at most 64 tokens of a page: S by scores(s), softmax update, O += P V. before_values() runs between the last two,
// after_loads() when nothing more of the chunk is read.
template <class PageHead, class Scores, class Before, class After> DEV void attend_chunk(const DecodeArguments& a, const PackedRange& packed, PageHead page_head, int tile, int at, int first, int last, int lane, OnlineSoftmax& softmax, Scores scores, Before before_values, After after_loads) {
  float s[CHUNK_TILES][LANE_HEADS][2];
  scores(s);
  PageValues<CHUNK_TILES> values;
  float largest = load_scales_of(values, page_head, tile, lane, softmax.norm);
  const bool cut = at < first || at + 16 * CHUNK_TILES > last;
  if (cut) {
    const int from = opaque(at);
    largest = mask_scales_of(values, from, first, last, lane, softmax.norm);
    mask_scores<CHUNK_TILES>(s, from, first, last, lane);
  }
  if constexpr (QUERIES > 1)
    if (packed.uneven(at)) mask_packed_rows<CHUNK_TILES>(s, RowLimits(packed.work, a.sliding_window, packed.row), lane, [&](int i, int r) { return at + i * 16 + r * 8 + (lane >> 2); });
  softmax.update<CHUNK_TILES>(s, largest, [&](float norm) {
    if constexpr (!PageValues<CHUNK_TILES>::SCALES_TIMES_NORM) return values.largest() * norm;
    float x = load_scales_of(values, page_head, tile, lane, norm);
    if (cut) x = mask_scales_of(values, opaque(at), first, last, lane, norm);
    return x;
  });
  before_values();
  if constexpr (CENTROID_PRODUCTS) add_centroids<CHUNK_TILES>(softmax, s, page_head, tile, lane);
  if constexpr (CENTROID_SUMS) add_to_sums<CHUNK_TILES>(softmax, s, page_head, tile, lane);
  values.accumulate(softmax, s, page_head, tile, lane, after_loads);
}
