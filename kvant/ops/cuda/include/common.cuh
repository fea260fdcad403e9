// What the kernels share.
//
// Constants that come from the layout (as -D options): HEAD_DIM, PAGE (tokens), RUN (bytes of one page and head), KV_HEADS.

#pragma once
#include "include/ptx.cuh"

// --- 16-bit floats --------------------------------------------------------------------------------------------------

DEV float bf16_low(u32 x) { return __uint_as_float(x << 16); }
DEV float bf16_high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// A 16-bit type by number: 0 is bfloat16, 1 is float16; 2 is float32 where the whole word is one number.
template <int TYPE> DEV float low(u32 x) { return TYPE == 0 ? bf16_low(x) : fp16_low(x); }
template <int TYPE> DEV float high(u32 x) { return TYPE == 0 ? bf16_high(x) : fp16_high(x); }
template <int TYPE> DEV u32 pair_of(float x, float y) { return TYPE == 0 ? bf16_pair(x, y) : fp16_pair(x, y); }
template <int TYPE> DEV u32 to_fp16(u32 x) { return TYPE == 1 ? x : fp16_pair(bf16_low(x), bf16_high(x)); }

DEV float minus_infinity() { return __int_as_float(0xff800000); }

template <int TYPE> DEV float load_number(const void* p, s64 i) {
  if (TYPE == 2) return ((const float*)p)[i];
  const u32 x = ((const u16*)p)[i];
  return low<TYPE>(x);
}
template <int TYPE> DEV void store_number(void* p, s64 i, float x) {
  if (TYPE == 2) ((float*)p)[i] = x;
  else ((u16*)p)[i] = (u16)(TYPE == 0 ? bf16_pair(x, 0.f) : fp16_pair(x, 0.f));
}

// Products of either type.
template <int TYPE> DEV void mma_16bit(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (TYPE == 0) mma_bf16(c, a0, a1, a2, a3, b0, b1);
  else mma_fp16(c, a0, a1, a2, a3, b0, b1);
}

// --- words ------------------------------------------------------------------------------------------------------------

template <int N> DEV void load_words(u32* w, const u8* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const uint4 v = ((const uint4*)p)[i];
      w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const uint2 v = ((const uint2*)p)[i];
      w[2 * i] = v.x, w[2 * i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = ((const u32*)p)[i];
  }
}
template <int N> DEV void store_words(u8* p, const u32* w) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) ((uint4*)p)[i] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) ((uint2*)p)[i] = {w[2 * i], w[2 * i + 1]};
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) ((u32*)p)[i] = w[i];
  }
}

// Numbers i to i + 3 of a 16-bit or 32-bit type; i is a multiple of 4.
template <int TYPE> struct Quad {  // as they lie
  u32 w[TYPE == 2 ? 4 : 2];

  DEV void clear() {
#pragma unroll
    for (int k = 0; k < (TYPE == 2 ? 4 : 2); k++) w[k] = 0u;
  }
  DEV void load(const void* p, s64 i) { load_words<TYPE == 2 ? 4 : 2>(w, (const u8*)p + i * (TYPE == 2 ? 4 : 2)); }
  DEV float get(int k) const { return TYPE == 2 ? __uint_as_float(w[TYPE == 2 ? k : 0]) : k % 2 ? high<TYPE>(w[k / 2]) : low<TYPE>(w[k / 2]); }
};
template <int TYPE> DEV void load_four(float* x, const void* p, s64 i) {
  Quad<TYPE> four;
  four.load(p, i);
#pragma unroll
  for (int k = 0; k < 4; k++) x[k] = four.get(k);
}
template <int TYPE> DEV void store_four(void* p, s64 i, const float* x) {
  if constexpr (TYPE == 2) *(float4*)((float*)p + i) = make_float4(x[0], x[1], x[2], x[3]);
  else {
    const u32 w[2] = {pair_of<TYPE>(x[0], x[1]), pair_of<TYPE>(x[2], x[3])};
    store_words<2>((u8*)p + i * 2, w);
  }
}

// --- codes of keys: bytes ---------------------------------------------------------------------------------------------

// One plane of one band of channels: WIDTH channels from FIRST on, codes of BITS bits from byte OFFSET of the run on, each of
// which counts WEIGHT / 2^20 (the planes of three-bit codes are 1 and 4). The register of its queries is the BEFORE-th on.
//
// A lane's share of a tile is two rows (tokens g, g + 8) of WIDTH / 4 channels. Read as bytes, a word is four streams of codes,
// two of channels 2 pair and two of 2 pair + 1. Masking gives four codes at a time as bytes; those one place up count 2^BITS
// times as much, which goes into the query, so that half of the shifts are saved.
template <int WIDTH_, int BITS_, int OFFSET_, int FIRST_, int WEIGHT_, int BEFORE_> struct KeyPlane {
  static constexpr int WIDTH = WIDTH_, BITS = BITS_, OFFSET = OFFSET_, FIRST = FIRST_, BEFORE = BEFORE_;
  static constexpr float WEIGHT = WEIGHT_ / 1048576.f, TOP = (1 << BITS) - 1;
  static constexpr int WORDS = WIDTH * BITS / 64;             // of a lane and tile
  static constexpr int ROW_BYTES = WIDTH * BITS / 64;         // of a row and half
  static constexpr int ROW_WORDS = (ROW_BYTES + 1) / 2, PER = 8 / BITS;
  static constexpr int REGISTERS = (ROW_WORDS * PER + 1) / 2 * 2;  // of a row: the product takes two at a time
  static constexpr bool SHIFTED = BITS >= 4;                  // every place is shifted down, so that no query loses bits

  DEV static constexpr int raised(int i) { return SHIFTED ? 0 : i % PER % 2 * BITS; }  // power of two that a register counts too much
  DEV static constexpr int shift(int i) { return SHIFTED ? i % PER * BITS : i % PER / 2 * 2 * BITS; }

  DEV static u32 row_word(const u32* w, int row, int k) {  // a row of an odd number of bytes starts inside a word
    const int byte = row * ROW_BYTES + 2 * k;
    if (byte % 2 == 0) return w[byte / 2];
    return __byte_perm(w[byte / 2], byte / 2 + 1 < WORDS ? w[byte / 2 + 1] : 0u, 0x6341);
  }
  DEV static u32 get(const u32* w, int row, int i) {  // register i of a row
    if (i >= ROW_WORDS * PER) return 0u;
    const u32 x = row_word(w, row, i / PER);
    if (BITS == 8) return x;
    return (x >> shift(i)) & ((u32)(TOP * (1 << raised(i))) * 0x01010101u);
  }
  // The channel of a byte of register i in lane t, or -1.
  DEV static int channel(int i, int byte, int t) {
    const int pair = i / PER * (16 / BITS) + (byte & 1) * PER + i % PER;
    return pair < WIDTH / 8 && i < ROW_WORDS * PER ? FIRST + t * (WIDTH / 4) + 2 * pair + (byte >> 1) : -1;
  }
};

// --- codes of values: pairs of fp16 -------------------------------------------------------------------------------------

// A code c of B bits at bit p of a half becomes the fp16 number 1024 + c 2^p by one lop3 with 0x6400, for every p inside the
// mantissa, so most pairs need no shift. Where a place in the word cannot be reached, a shift serves several places.
template <int B> DEV constexpr int bit_of(int place) { return place % (16 / B) * B; }  // of a place, inside its half
template <int B> DEV constexpr int position(int place) {  // p of a place
  const int bit = bit_of<B == 3 ? 2 : B>(place);
  if (B == 2) return bit < 4 ? bit + 4 : bit <= 8 ? bit : bit - 6;
  if (B == 3) return bit % 4 + 4;
  return bit < 8 ? bit : bit - 6;  // four bits: 0, 4, 2, 6; eight: 0, 2
}
// Without 1024: a masked code at bit p of a half is the fp16 number c 2^(p - 24), which tensor cores multiply exactly.
template <int B> DEV constexpr int bare_position(int place) {
  const int bit = bit_of<B == 3 ? 2 : B>(place);
  return B == 3 ? bit % 4 + 4 : bit + B <= 10 ? bit : bit - 6;
}
DEV u32 moved(u32 w, int right) { return right > 0 ? w >> right : w << -right; }

// Codes of BITS bits from byte OFFSET of the run on; the high plane of three-bit codes from HIGH on. A code counts
// STEP / 2^20 where the stream has no minimum. BARE: as numbers of c 2^(p - 24); keys that are coded per channel are read like this too.
template <int WIDTH_, int BITS_, int OFFSET_, int HIGH_, int STEP_, bool BARE_ = false> struct ValueCodes {
  static constexpr bool BARE = BARE_;
  static constexpr int WIDTH = WIDTH_, BITS = BITS_, OFFSET = OFFSET_, HIGH = HIGH_;
  static constexpr int PAIRS = WIDTH / 8, LOW_BITS = BITS == 3 ? 2 : BITS, PER = 16 / LOW_BITS;
  static constexpr int WORDS = WIDTH * LOW_BITS / 64;  // of a lane and tile
  static constexpr int HIGH_WORDS = BITS == 3 ? WIDTH / 64 : 1;
  static constexpr float TOP = (1 << BITS) - 1, STEP = STEP_ / 1048576.f;
  u32 w[WORDS], h[HIGH_WORDS];

  DEV static constexpr int power(int element) { return BARE ? bare_position<BITS>(element) : position<BITS>(element); }
  DEV static constexpr float unit(int element) { return (float)(1 << power(element)) * (BARE ? 5.9604644775390625e-8f : 1.f); }  // that a code counts

  template <class Run> DEV void load(Run run, int tile, int lane) {
    load_words<WORDS>(w, run + OFFSET + (tile * 32 + lane) * WORDS * 4);
    if constexpr (BITS == 3) {
      static_assert(WIDTH % 64 == 0, "a lane has whole words");
      load_words<HIGH_WORDS>(h, run + HIGH + (tile * 32 + lane) * HIGH_WORDS * 4);
    }
  }
  // Two neighbouring tokens' codes of a channel as fp16: 1024 + c 2^p in the low half, -(1024 + (top - c) 2^p) =
  // c 2^p - 1024 - top 2^p in the high one. What rides on the codes has two signs and cancels instead of growing with the sequence.
  DEV u32 get(int second, int element) const {
    const int place = second * PAIRS + element, p = power(element);
    const u32 mask = (u32)((1 << BITS) - 1) << p;
    const u32 rest = BARE ? 0u : 0x64006400u ^ (0x8000u | mask) << 16;
    if constexpr (BITS == 3) {
      const u32 part = and_xor(moved(w[place / PER], bit_of<2>(place) - p), 0x00030003u << p, rest);
      return and_xor(moved(h[place / 16], place % 16 - p - 2), 0x00040004u << p, part);
    } else {
      return and_xor(moved(w[place / PER], bit_of<LOW_BITS>(place) - p), mask * 0x10001u, rest);
    }
  }
};
