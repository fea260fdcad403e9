// Stores new tokens: transform, scale, codes, page bytes and full-precision windows in one pass.
//
// A warp takes two neighbouring tokens of one head: four rows (keys, keys, values, values), eight lanes a row, D / 8 neighbouring
// channels a lane. Two neighbouring tokens share the words of the values' codes, so a pair at an even place writes whole words; any
// other token writes its own halves. Every byte belongs to one token (kvant/layout.py), so nothing is read.
//
// Constants beside those of common.cu: for KEY_ and VALUE_: TYPE (of the input), BITS, SEARCH, OFFSET, HIGH (of the third bit), META, META_TYPE, META_OFFSET,
// HADAMARD (order, 1 for none) and HADAMARD_SCALE, BANDS, BANDED (whether they are coded by their levels), UNBIASED, FLAG; SINK, RING, RING_TOKENS, WINDOW_TOKENS,
// WINDOW_TYPE, WARPS, CLIP (whether rows are clipped).

#pragma once
#include "include/rows.cuh"

struct Arguments {
  const void *key, *value;
  const float *key_mean, *value_mean;  // [KV_HEADS, D], taken off what is transformed; or null
  const float *key_signs, *value_signs;
  const float *key_weights, *value_weights, *key_taken, *value_taken;  // of banded codes, [KV_HEADS, D] each; or null
  const u32 *key_matrix, *value_matrix;  // as tiles.cu reads them; or null
  u8* pages;
  const s64 *slot_mapping, *query_start_loc, *seq_lens, *overlay_rows;
  void *window_key, *window_value;
  const float *cosine, *sine;     // [blocks, D / 2] each, by which tiles.cu turns keys back; or null
  float key_unit, value_unit;     // what tiles.cu's matrices of bands are multiples of
  float key_share, value_share;   // where a row is clipped: so far from the magnitude that ..._drop others exceed to the next larger
  int key_drop, value_drop;       // 0 where nothing is clipped
  int key_stride, value_stride;   // from a head's matrix to the next, in units of 16 bytes
  int rope_first, blocks;         // the first position that keys are turned for, and blocks of positions
  int tokens, batch, half_batch;  // the last is the largest power of two below the batch, or 0
};

// The same for the rows of one stream. The others go along, since lanes that wait cost as much.
template <int ORDER> DEV void one_stream(float* x, bool mine, const float* signs, float by, int j, float* scratch) {
  float y[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) y[i] = x[i];
  hadamard<ORDER>(y, signs, by, j, scratch);
#pragma unroll
  for (int i = 0; i < OWN; i++) x[i] = mine ? y[i] : x[i];
}

template <int TYPE> DEV float rounded(float x) { return TYPE == 0 ? bf16_low(bf16_pair(x, 0.f)) : fp16_low(fp16_pair(x, 0.f)); }

// Clips a row at a quantile of its magnitudes: the largest are taken off one by one. `most` is the largest `drop` of the warp's rows.
// Lanes that have a row together, `mates`, have numbers that differ in the bits from FROM up to below TO.
template <int N, int FROM, int TO> DEV void clip(float* x, int drop, int most, float share, u32 mates, int lane) {
  float left[N], above = 0.f, below = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) left[i] = fabsf(x[i]);
  for (int k = 0; k <= most; k++) {
    float own = left[0];
#pragma unroll
    for (int i = 1; i < N; i++) own = fmaxf(own, left[i]);
    float top = own;
#pragma unroll
    for (int o = FROM; o < TO; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
    bool mine = __ffs(__ballot_sync(FULL, own == top) & mates) - 1 == lane;  // the first of the lanes that have it gives it away
#pragma unroll
    for (int i = 0; i < N; i++) {
      const bool this_one = mine & left[i] == top;
      left[i] = this_one ? -1.f : left[i], mine = mine & !this_one;
    }
    if (k == drop - 1) above = top;
    if (k == drop) below = top;
  }
  const float apart = above - below, limit = share < 0.5f ? fmaf(share, apart, below) : fmaf(share - 1.f, apart, above);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (drop) x[i] = fminf(fmaxf(x[i], -limit), limit);
}

struct Scale {
  float scale, back, zero;  // zero is the minimum, or the integer zero point
};

// As kvant.codecs.affine computes them from a range.
template <int BITS, int META, int TYPE> DEV Scale scale_of(float least, float most) {
  constexpr float TOP = (1 << BITS) - 1, TINY = TYPE == 0 ? 1.17549435e-38f : 6.103515625e-05f;
  if (META == 0) least = rounded<TYPE>(least);
  const float scale = rounded<TYPE>(fmaxf(__fdiv_rn(most - least, TOP), TINY));
  const float zero = META == 0 ? least : rounded<TYPE>(fminf(fmaxf(rintf(__fdiv_rn(-least, scale)), -32768.f), 32768.f));
  return {scale, __fdiv_rn(1.f, scale), zero};
}

// Codes of numbers x BY under a scale. Adding 1.5 * 2^23 leaves no bits behind the point, ties to even: four times as fast as the
// instruction that rounds.
//
// EXACT: the quotient is rounded as a division rounds it, since it may lie close to halfway between two codes.
//
// Otherwise, for numbers of few bits that lie halfway or far from it: three or four multiplications and additions each, since
// what else it takes to hold codes in their range goes to slower parts of the processor. Held between 0 and 1 as
// 1 - (TOP - code) / UNIT, a code has its top at 1; less (UNIT - TOP) / UNIT it has its bottom at 0. From 0.5 to 1, floats are UNIT / 2^24 of
// a code apart, which takes the inexact reciprocal of the scale off a half again. An integer zero, which comes after rounding, has a say
// in what is even.
constexpr float MAGIC = 12582912.f;
template <int BITS, int META, bool EXACT> struct Coder {
  static constexpr float TOP = (1 << BITS) - 1, UNIT = 2 << BITS, REST = (UNIT - TOP) / UNIT;
  float scale, back, zero, by, magic;
  DEV Coder(float scale_, float back_, float zero_, float by_) : scale(scale_), back(back_), zero(zero_), by(by_), magic(MAGIC) {
    if (META && !EXACT) magic = __uint_as_float(__float_as_uint(MAGIC) | (__float_as_uint(MAGIC + zero) & 1u));
  }
  DEV float rounded(float x) const {  // the code, and what `base` says
    const float y = META == 0 ? fmaf(x, by, -zero) : x * by;
    if constexpr (EXACT) {
      const float z = y * back, quotient = fmaf(fmaf(-z, scale, y), back, z), least = META == 0 ? 0.f : -zero;
      return fminf(fmaxf(quotient, least), TOP + least) + MAGIC;
    } else {
      const float u = META == 0 ? fma_held(y, back * (1.f / UNIT), REST) : fma_held(x, back * by * (1.f / UNIT), fmaf(zero, 1.f / UNIT, REST));
      return fmaf(add_held(u, -REST), UNIT, magic);
    }
  }
  DEV u32 bits(float x) const { return __float_as_uint(rounded(x)); }  // the code and `base`
  DEV u32 base() const { return EXACT && META ? __float_as_uint(MAGIC) - (u32)__float2int_rn(zero) : __float_as_uint(magic); }
  DEV float missed(float x) const {  // by the code, in units of the scale
    static_assert(!EXACT, "an error is the same on both sides of a half");
    if (META == 0) return fmaf(fmaf(x, by, -zero), -back, rounded(x) - magic);
    return fmaf(x, -back * by, rounded(x) - (magic + zero));
  }
};
// The part of a row's range that the k-th of so many ranges is.
template <int SEARCH> DEV float part(int k) { return (float)(1.0 - (1.0 - 0.7) * k / (SEARCH > 1 ? SEARCH - 1 : 1)); }

// Codes of a row, four to a word, and its scale and zero as one word. SEARCH ranges are tried, down to 0.7 of the whole.
template <int BITS, int META, int TYPE, int SEARCH> DEV u32 encode(const float* x, u32* codes) {
  float least = x[0], most = x[0];
#pragma unroll
  for (int i = 1; i < OWN; i++) least = fminf(least, x[i]), most = fmaxf(most, x[i]);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) {
    least = fminf(least, __shfl_xor_sync(FULL, least, o));
    most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
  }
  Scale best = scale_of<BITS, META, TYPE>(least, most);
  if constexpr (SEARCH > 1) {
    const float middle = (most + least) * 0.5f, half = (most - least) * 0.5f;
    float lowest = 0.f;
    for (int k = 0; k < SEARCH; k++) {
      const float reach = half * part<SEARCH>(k);
      const Scale found = k ? scale_of<BITS, META, TYPE>(middle - reach, middle + reach) : best;
      const Coder<BITS, META, false> coder(found.scale, found.back, found.zero, 1.f);
      float error = 0.f;
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const float missed = coder.missed(x[i]);
        error = fmaf(missed, missed, error);
      }
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) error += __shfl_xor_sync(FULL, error, o);
      error *= found.scale * found.scale;
      if (k == 0 || error < lowest) lowest = error, best = found;
    }
  }
  const Coder<BITS, META, true> coder(best.scale, best.back, best.zero, 1.f);
#pragma unroll
  for (int i = 0; i < (OWN + 3) / 4; i++) {
    codes[i] = 0u;
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (4 * i + k < OWN) codes[i] += (coder.bits(x[4 * i + k]) - coder.base()) << (8 * k);
  }
  return TYPE == 0 ? bf16_pair(best.scale, best.zero) : fp16_pair(best.scale, best.zero);
}

// --- bands: some channels have more bits than others, under one scale ---------------------------------------------------------

// WIDTH channels from FIRST on, whose codes of BITS bits lie from byte OFFSET of the run on; of three bits the lower two, and the third from
// byte HIGH on. Levels are as far apart as the float whose bits are STEP says.
template <int WIDTH_, int BITS_, int OFFSET_, int FIRST_, u32 STEP_, int HIGH_ = 0> struct Band {
  static constexpr int WIDTH = WIDTH_, BITS = BITS_, OFFSET = OFFSET_, FIRST = FIRST_, HIGH = HIGH_;
  static constexpr u32 STEP = STEP_;
  static_assert(WIDTH % OWN == 0 && FIRST % OWN == 0, "a lane's channels are in one band");
  DEV static bool has(int channel) { return channel >= FIRST && channel < FIRST + WIDTH; }
};
template <class... B> struct Bands {
  static constexpr int STORED = (B::WIDTH + ...);
  DEV static int bits(int channel) { return ((B::has(channel) ? B::BITS : 0) + ...); }
  DEV static float step(int channel) { return __uint_as_float(((B::has(channel) ? B::STEP : 0u) | ...)); }
  template <class Store> DEV static void each(Store store) { (store(B{}), ...); }
};
using KeyBands = KEY_BANDS;
using ValueBands = VALUE_BANDS;

DEV float eight(float x) {  // the sum over a row's lanes
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}
template <int TYPE> DEV float storable(float x) {  // not beyond what the 16-bit type holds
  return fminf(fmaxf(x, TYPE == 0 ? 1.17549435e-38f : 6.103515625e-05f), TYPE == 0 ? 3.38953139e38f : 65504.f);
}

struct Row {  // a lane's part of a row
  int bits;
  float step, top;
  const float* weights;  // of its channels, or null
  DEV float weight(int i) const { return weights ? weights[i] : 1.f; }
  DEV float code(float x, float scale) const { return fminf(fmaxf(rintf(__fdiv_rn(__fdiv_rn(x, scale), step) + top * 0.5f), 0.f), top); }
  DEV float level(float code) const { return step * (code - top * 0.5f); }
};

// The best scale of a row, as kvant.codecs.banded finds it; the error it leaves goes to `least`.
template <int STORED, int TYPE, int SEARCH> DEV float banded_scale(const float* x, const Row& row, float& least) {
  float squares = 0.f, chosen = 1.f;
#pragma unroll
  for (int i = 0; i < OWN; i++) squares += row.bits ? x[i] * x[i] : 0.f;
  const float rms = sqrtf(__fdiv_rn(eight(squares), (float)STORED));
  least = __int_as_float(0x7f800000);
  for (int k = 0; k < SEARCH; k++) {
    const float factor = SEARCH == 1 ? 1.f : (float)(0.6 + (1.4 - 0.6) * k / (SEARCH > 1 ? SEARCH - 1 : 1));
    const float scale = rounded<TYPE>(storable<TYPE>(rms * factor));
    float error = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float missed = row.bits ? x[i] - scale * row.level(row.code(x[i], scale)) : 0.f;
      error += missed * missed * row.weight(i);
    }
    error = eight(error);
    if (error < least) least = error, chosen = scale;
  }
  return chosen;
}

template <class B, int TYPE, int SEARCH, int UNBIASED, int FLAG>
DEV u32 encode_bands(const float* row_of, u32* codes, const float* weights, const float* taken, int j) {
  Row row;
  row.bits = B::bits(j * OWN), row.step = B::step(j * OWN), row.top = (float)((1 << row.bits) - 1);
  row.weights = weights ? weights + j * OWN : nullptr;
  float x[OWN], error, sign = 1.f;
#pragma unroll
  for (int i = 0; i < OWN; i++) x[i] = row_of[i];
  float scale = banded_scale<B::STORED, TYPE, SEARCH>(x, row, error);
  if constexpr (FLAG) {
    float centred[OWN], less;
#pragma unroll
    for (int i = 0; i < OWN; i++) centred[i] = x[i] - taken[j * OWN + i];
    const float other = banded_scale<B::STORED, TYPE, SEARCH>(centred, row, less);
    if (less < error) {
      scale = other, sign = -1.f;
#pragma unroll
      for (int i = 0; i < OWN; i++) x[i] = centred[i];
    }
  }
  float reached = 0.f, wanted = 0.f;
#pragma unroll
  for (int i = 0; i < (OWN + 3) / 4; i++) codes[i] = 0u;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const float code = row.bits ? row.code(x[i], scale) : 0.f;
    codes[i / 4] |= (u32)code << (8 * (i % 4));
    reached += row.bits ? row.weight(i) * x[i] * row.level(code) : 0.f;
    wanted += row.weight(i) * (x[i] * x[i]);
  }
  if constexpr (UNBIASED) {
    reached = eight(reached), wanted = eight(wanted);
    scale *= fminf(fmaxf(__fdiv_rn(wanted, fmaxf(reached * scale, 1.17549435e-38f)), 0.8f), 1.6f);
  }
  scale = storable<TYPE>(scale) * sign;
  return TYPE == 0 ? bf16_pair(scale, 0.f) : fp16_pair(scale, 0.f);
}

// Codes of a row of either stream, four to a word, and what is stored beside them. `a` is the kernel's arguments.
template <bool KEY> DEV u32 encode_row(const Arguments& a, const float* x, u32* codes, int head, int j) {
  if constexpr (KEY && KEY_BANDED) {
    const float* weights = a.key_weights ? a.key_weights + head * D : nullptr;
    return encode_bands<KeyBands, KEY_META_TYPE, KEY_SEARCH, KEY_UNBIASED, KEY_FLAG>(x, codes, weights, a.key_taken + head * D, j);
  } else if constexpr (!KEY && VALUE_BANDED) {
    const float* weights = a.value_weights ? a.value_weights + head * D : nullptr;
    return encode_bands<ValueBands, VALUE_META_TYPE, VALUE_SEARCH, VALUE_UNBIASED, VALUE_FLAG>(x, codes, weights, a.value_taken + head * D, j);
  } else if constexpr (KEY) {
    return encode<KEY_BITS, KEY_META, KEY_META_TYPE, KEY_SEARCH>(x, codes);
  } else {
    return encode<VALUE_BITS, VALUE_META, VALUE_META_TYPE, VALUE_SEARCH>(x, codes);
  }
}

// One plane of codes of ALL bits, a byte each: BITS of them, the lower two or the third of three.
template <int BITS, int ALL> DEV u32 plane(u32 codes) { return BITS == ALL ? codes : codes >> (BITS == 1 ? 2 : 0) & ((1 << BITS) - 1) * 0x01010101u; }
template <int BITS, int ALL> DEV uint2 plane(uint2 w) { return {plane<BITS, ALL>(w.x), plane<BITS, ALL>(w.y)}; }
template <int BITS, int ALL> DEV uint4 plane(uint4 w) { return {plane<BITS, ALL>(w.x), plane<BITS, ALL>(w.y), plane<BITS, ALL>(w.z), plane<BITS, ALL>(w.w)}; }

// Bits of `count` codes, one in every `step`-th byte, from the first on.
template <int BITS, int ALL> DEV u32 gathered(const u8* codes, int count, int step) {
  u32 x = 0;
#pragma unroll
  for (int i = 0; i < count; i++) x |= plane<BITS, ALL>(codes[i * step]) << (i * BITS);
  return x;
}
DEV u32 four_bits(u32 w) {  // of four bytes
  w |= w >> 7, w |= w >> 14;
  return w & 15u;
}
DEV u32 sixteen_bits(uint4 w) { return four_bits(w.x) | four_bits(w.y) << 4 | four_bits(w.z) << 8 | four_bits(w.w) << 12; }

// A word of key codes from 32 / BITS bytes: every other code in the low half, the others in the high half.
template <int BITS, int ALL> DEV u32 key_word(const u8* codes) {
  if constexpr (BITS == 8) return __byte_perm(*(const u32*)codes, 0u, 0x3120);
  if constexpr (BITS == 4) {
    const uint2 w = *(const uint2*)codes;
    return __byte_perm(w.x | w.x >> 12, w.y | w.y >> 12, 0x5140);
  }
  if constexpr (BITS == 2) {
    const uint4 w = plane<BITS, ALL>(*(const uint4*)codes);
    const u32 x = ((w.x | w.x >> 14) & 0x0F0Fu) | ((w.y | w.y >> 14) & 0x0F0Fu) << 4;
    const u32 y = ((w.z | w.z >> 14) & 0x0F0Fu) | ((w.w | w.w >> 14) & 0x0F0Fu) << 4;
    return __byte_perm(x, y, 0x5140);
  }
  if constexpr (BITS == 1) {
    u32 x = 0u;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 w = plane<BITS, ALL>(((const u32*)codes)[i]), both = w | w >> 15;  // bytes 0 and 2, and 8 bits up 1 and 3
      x |= (both & 3u) << (2 * i) | (both >> 8 & 3u) << (16 + 2 * i);
    }
    return x;
  }
}
// A word of value codes from 16 / BITS bytes each of two tokens: one token in each half.
template <int BITS, int ALL> DEV u32 value_word(const u8* a, const u8* b) {
  if constexpr (BITS == 8) return *(const u16*)a | (u32) * (const u16*)b << 16;
  if constexpr (BITS == 4) {
    const u32 x = *(const u32*)a, y = *(const u32*)b;
    return __byte_perm(x | x >> 4, y | y >> 4, 0x6420);
  }
  if constexpr (BITS == 2) {
    uint2 x = plane<BITS, ALL>(*(const uint2*)a), y = plane<BITS, ALL>(*(const uint2*)b);
    x.x |= x.x >> 6, x.y |= x.y >> 6, y.x |= y.x >> 6, y.y |= y.y >> 6;
    x.x |= x.x >> 12, x.y |= x.y >> 12, y.x |= y.x >> 12, y.y |= y.y >> 12;
    return __byte_perm(__byte_perm(x.x, x.y, 0x0040), __byte_perm(y.x, y.y, 0x0040), 0x5410);
  }
  if constexpr (BITS == 1) return sixteen_bits(plane<BITS, ALL>(*(const uint4*)a)) | sixteen_bits(plane<BITS, ALL>(*(const uint4*)b)) << 16;
}

DEV u8* run_of(const Arguments& a, s64 slot, int head) { return a.pages + ((s64)((u64)slot / PAGE) * KV_HEADS + head) * RUN; }
DEV void store_meta(u8* run, int offset, int kind, s64 slot, u32 meta) {
  const int in_page = (int)((u64)slot % PAGE), lane_order = in_page % 8 * (PAGE / 8) + in_page / 16 * 2 + in_page % 16 / 8;
  if (kind == 2) ((u16*)(run + offset))[lane_order] = (u16)meta;  // a scale alone
  else ((u32*)(run + offset))[lane_order] = meta;
}

struct Place {  // of a token in its page
  int tile, inside;
  DEV Place(s64 slot) : tile((int)((u64)slot % PAGE) / 16), inside((int)((u64)slot % 16)) {}
};

template <int WIDTH, int BITS, int OFFSET, int HIGH, int ALL = BITS> DEV void store_keys(u8* run, Place p, const u8* codes, int lane, int lanes) {
  if constexpr (BITS == 3) {
    store_keys<WIDTH, 2, OFFSET, 0, 3>(run, p, codes, lane, lanes), store_keys<WIDTH, 1, HIGH, 0, 3>(run, p, codes, lane, lanes);
  } else {
    constexpr int ROW = WIDTH * BITS / 64, WORDS = ROW, PER = 8 / BITS;  // bytes of a row and half; words of a lane; codes of a byte
    const int row = p.inside / 8, g = p.inside % 8;
    for (int i = lane; i < 4 * (ROW % 2 ? 2 * ROW : ROW / 2); i += lanes) {
      if constexpr (ROW % 2 == 0) {
        const int k = i % (ROW / 2), t = i / (ROW / 2);
        const u32 w = key_word<BITS, ALL>(codes + t * (WIDTH / 4) + k * (32 / BITS));
        ((u32*)(run + OFFSET))[((p.tile * 8 + g) * 4 + t) * WORDS + row * (ROW / 2) + k] = w;
      } else {
        const int half = i % 2, k = i / 2 % ROW, t = i / 2 / ROW, byte = row * ROW + k;
        const u32 w = gathered<BITS, ALL>(codes + t * (WIDTH / 4) + k * 2 * PER + half, PER, 2);
        run[OFFSET + (((p.tile * 8 + g) * 4 + t) * WORDS + byte / 2) * 4 + byte % 2 + 2 * half] = (u8)w;
      }
    }
  }
}

// `codes` and `next` are of two neighbouring tokens, the first at an even place; without `next`, one token at any place.
template <int BITS, int OFFSET, int HIGH, int ALL = BITS> DEV void store_values(u8* run, Place p, const u8* codes, const u8* next, int lane) {
  if constexpr (BITS == 3) {
    store_values<2, OFFSET, 0, 3>(run, p, codes, next, lane), store_values<1, HIGH, 0, 3>(run, p, codes, next, lane);
  } else {
    constexpr int ROW = D * BITS / 64, WORDS = ROW, PER = 8 / BITS;
    const int second = p.inside / 8, t = p.inside / 2 % 4, half = p.inside % 2;
    for (int i = lane; i < 8 * (ROW % 2 ? ROW : ROW / 2); i += 32) {
      if constexpr (ROW % 2 == 0) {
        const int k = i % (ROW / 2), g = i / (ROW / 2), from = g * (D / 8) + k * 2 * PER;
        u32* word = (u32*)(run + OFFSET) + ((p.tile * 8 + g) * 4 + t) * WORDS + second * (ROW / 2) + k;
        const u32 w = value_word<BITS, ALL>(codes + from, (next ? next : codes) + from);
        if (next) *word = w;
        else ((u16*)word)[half] = (u16)w;
      } else {
        const int k = i % ROW, g = i / ROW, byte = second * ROW + k, from = g * (D / 8) + k * PER;
        u8* word = run + OFFSET + (((p.tile * 8 + g) * 4 + t) * WORDS + byte / 2) * 4 + byte % 2;
        word[2 * half] = (u8)gathered<BITS, ALL>(codes + from, PER, 1);
        if (next) word[2] = (u8)gathered<BITS, ALL>(next + from, PER, 1);
      }
    }
  }
}

struct Shared {
  u8 codes[WARPS][4][(D + 15) / 16 * 16];
  float scratch[OWN & (OWN - 1) ? WARPS : 1][4][D];
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) kvant_append(const Arguments a) {
  __shared__ __align__(16) Shared sh;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 3, j = lane & 7;
  const s64 job = (s64)blockIdx.x * WARPS + warp;
  const int head = (int)(job % KV_HEADS), first = (int)(job / KV_HEADS) * 2, token = first + (row & 1);
  if (first >= a.tokens) return;
  const s64 slot = token < a.tokens ? a.slot_mapping[token] : -1;
  const s64 place = ((s64)min(token, a.tokens - 1) * KV_HEADS + head) * D + j * OWN;
  const bool is_key = row < 2;

  float x[OWN];
  if (is_key) load_row<KEY_TYPE>(x, a.key, place);
  else load_row<VALUE_TYPE>(x, a.value, place);
  float* scratch = sh.scratch[OWN & (OWN - 1) ? warp : 0][row];
  if constexpr (KEY_HADAMARD == VALUE_HADAMARD && KEY_HADAMARD > 1) {
    hadamard<KEY_HADAMARD>(x, is_key ? a.key_signs : a.value_signs, (float)KEY_HADAMARD_SCALE, j, scratch);
  } else {
    if constexpr (KEY_HADAMARD > 1) one_stream<KEY_HADAMARD>(x, is_key, a.key_signs, (float)KEY_HADAMARD_SCALE, j, scratch);
    if constexpr (VALUE_HADAMARD > 1) one_stream<VALUE_HADAMARD>(x, !is_key, a.value_signs, (float)VALUE_HADAMARD_SCALE, j, scratch);
  }
  const float* mean = is_key ? a.key_mean : a.value_mean;
  if (mean)
#pragma unroll
    for (int i = 0; i < OWN; i++) x[i] -= mean[head * D + j * OWN + i];

  if (slot >= 0) store_window(a, is_key ? a.window_key : a.window_value, x, token, head, j);

#if CLIP
  clip<OWN, 1, 8>(x, is_key ? a.key_drop : a.value_drop, max(a.key_drop, a.value_drop), is_key ? a.key_share : a.value_share, 255u << (lane & 24), lane);
#endif
  u32 codes[(OWN + 3) / 4], meta;
  if constexpr (!KEY_BANDED && !VALUE_BANDED && KEY_BITS == VALUE_BITS && KEY_META == VALUE_META && KEY_META_TYPE == VALUE_META_TYPE && KEY_SEARCH == VALUE_SEARCH) {
    meta = encode<KEY_BITS, KEY_META, KEY_META_TYPE, KEY_SEARCH>(x, codes);
  } else {
    u32 other[(OWN + 3) / 4];
    meta = encode_row<true>(a, x, codes, head, j);
    const u32 of_value = encode_row<false>(a, x, other, head, j);
    if (!is_key) {
      meta = of_value;
#pragma unroll
      for (int i = 0; i < (OWN + 3) / 4; i++) codes[i] = other[i];
    }
  }
  if constexpr (OWN % 4 == 0) {
#pragma unroll
    for (int i = 0; i < OWN / 4; i++) ((u32*)sh.codes[warp][row])[j * (OWN / 4) + i] = codes[i];
  } else {
#pragma unroll
    for (int i = 0; i < OWN; i++) sh.codes[warp][row][j * OWN + i] = (u8)(codes[i / 4] >> (8 * (i % 4)));
  }
  if (j == 0 && slot >= 0)
    store_meta(run_of(a, slot, head), is_key ? KEY_META_OFFSET : VALUE_META_OFFSET, is_key ? KEY_META : VALUE_META, slot, meta);
  __syncwarp();

  const s64 slots[2] = {__shfl_sync(FULL, slot, 0), __shfl_sync(FULL, slot, 8)};
  {  // sixteen lanes a token
    const s64 own = lane < 16 ? slots[0] : slots[1];
    if (own >= 0)
      KeyBands::each([&](auto band) {
        using B = decltype(band);
        store_keys<B::WIDTH, B::BITS, B::OFFSET, B::HIGH>(run_of(a, own, head), Place(own), sh.codes[warp][lane >> 4] + B::FIRST, lane & 15, 16);
      });
  }
  if (slots[0] >= 0 && slots[0] % 2 == 0 && slots[1] == slots[0] + 1) {
    store_values<VALUE_BITS, VALUE_OFFSET, VALUE_HIGH>(run_of(a, slots[0], head), Place(slots[0]), sh.codes[warp][2], sh.codes[warp][3], lane);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (slots[i] >= 0)
        store_values<VALUE_BITS, VALUE_OFFSET, VALUE_HIGH>(run_of(a, slots[i], head), Place(slots[i]), sh.codes[warp][2 + i], nullptr, lane);
  }
}
