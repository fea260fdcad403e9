// Codes with one scale per token (or per group of channels of a token), in fragment order: how lanes read them as MMA operands.
//
// Tokens fill the 16 rows of the A operand. With lane = 4 g + t, a lane holds rows g and g + 8. Pages lie in the order of lanes
// (kvant/layout.py): a lane reads its own words, nothing is shuffled.

#pragma once
#include "include/math.cuh"

// The planes of the codes of the keys.
template <class... P> struct KeyPlanes {
  static constexpr int REGISTERS = (0 + ... + P::REGISTERS), WORDS = (0 + ... + P::WORDS);
};

// --- codes of keys: bytes ---------------------------------------------------------------------------------------------

// Two nibbles of every byte `which` of the halves of a word, as bytes: their lower halves are what is meant. Bytes of an even and of an odd channel stay as far apart.
DEV u32 nibbles(u32 w, int which) { return __byte_perm(w, w >> 4, which ? 0x7351 : 0x6240); }

// The words of a lane and tile where its share of a token is one byte (a plane of 32 bits a token): even channels in the low nibble, odd ones in the high nibble. They
// become what two more bytes would make them: even channels in the low half of a word, odd ones in the high half; row 0 in the lower nibble of each.
template <class PageHead> DEV void load_halved(u32* w, PageHead section, int tile, int lane) {
  u32 x;
  load_words<1>(&x, section + (tile * 32 + lane) / 2 * 4);
  x >>= lane % 2 * 16;
  w[0] = (x & 0xFu) | (x >> 4 & 0xF0u) | (x << 12 & 0xF0000u) | (x << 8 & 0xF00000u);
}

// One band of channels: WIDTH channels from FIRST on, codes of BITS bits from byte OFFSET of the page of a head on. A code counts WEIGHT / 2^20. Registers of its query
// operand begin at BEFORE. (Three bits: ThreeBitKeys.)
//
// A lane's share of a tile of 16 tokens is two rows (tokens g and g + 8) of WIDTH / 4 channels. A word, read as bytes, is four series of
// codes: two of channels 2 pair and two of channels 2 pair + 1. One mask gives four codes as bytes, an operand of mma_u8s8. Codes at an odd
// place count 2^BITS times as much after the mask; the query is divided by that instead, which saves half of the shifts. Where a row is one byte in each half of a word
// (FOLDED), its upper nibbles become bytes of their own, so that no byte of a register is idle.
template <int WIDTH_, int BITS_, int OFFSET_, int FIRST_, int WEIGHT_, int BEFORE_> struct KeyPlane {
  static constexpr int WIDTH = WIDTH_, BITS = BITS_, OFFSET = OFFSET_, FIRST = FIRST_, BEFORE = BEFORE_;
  static constexpr float WEIGHT = WEIGHT_ / 1048576.f, TOP = (1 << BITS) - 1;
  static constexpr bool HALVED = WIDTH * BITS == 32;          // a lane has half a word of a tile
  static constexpr int WORDS = HALVED ? 1 : WIDTH * BITS / 64;  // of a lane and tile
  static constexpr int ROW_BYTES = WIDTH * BITS / 64;         // bytes of a token in each 16-bit half of the words of a lane
  static constexpr bool FOLDED = ROW_BYTES == 1 && BITS <= 2;
  static constexpr int ROW_WORDS = HALVED ? 1 : (ROW_BYTES + 1) / 2, PER = HALVED ? 1 : (FOLDED ? 4 : 8) / BITS;
  static constexpr int REGISTERS = (ROW_WORDS * PER + 1) / 2 * 2;  // of a row: an MMA takes two at a time
  static constexpr bool SHIFTED = BITS >= 4;                  // every place is shifted down, so that no query loses precision

  DEV static constexpr int raised(int i) { return SHIFTED ? 0 : i % PER % 2 * BITS; }  // log2 of what codes of register i count too much
  DEV static constexpr int shift(int i) { return SHIFTED ? i % PER * BITS : i % PER / 2 * 2 * BITS; }

  template <class PageHead> DEV static void load(u32* w, PageHead page_head, int tile, int lane) {
    if constexpr (HALVED) load_halved(w, page_head + OFFSET, tile, lane);
    else load_words<WORDS>(w, page_head + (OFFSET + (tile * 32 + lane) * WORDS * 4));
  }
  DEV static u32 row_word(const u32* w, int row, int k) {  // a row of an odd number of bytes starts inside a word
    if (FOLDED) return nibbles(w[0], row);
    const int byte = row * ROW_BYTES + 2 * k;
    if (byte % 2 == 0) return w[byte / 2];
    return __byte_perm(w[byte / 2], byte / 2 + 1 < WORDS ? w[byte / 2 + 1] : 0u, 0x6341);
  }
  DEV static u32 get(const u32* w, int row, int i) {  // register i of a row
    if (i >= ROW_WORDS * PER) return 0u;
    if constexpr (HALVED) {
      static_assert(!HALVED || BITS == 2, "two codes of two bits in each nibble");
      return (w[0] >> 4 * row & 0x00030003u) | (w[0] << 6 >> 4 * row & 0x03000300u);
    }
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

// The same of codes of three bits, which are two planes of a page: two low bits from byte OFFSET on, the third bit from byte HIGH on. A register holds the codes that one
// of the plane of two bits would; their third bits come in by a mask.
template <int WIDTH_, int OFFSET_, int HIGH_, int FIRST_, int WEIGHT_, int BEFORE_> struct ThreeBitKeys {
  using Low = KeyPlane<WIDTH_, 2, OFFSET_, FIRST_, WEIGHT_, BEFORE_>;
  using High = KeyPlane<WIDTH_, 1, HIGH_, FIRST_, WEIGHT_, BEFORE_>;
  static_assert(WIDTH_ % 64 == 0 || High::HALVED, "a lane has whole bytes of third bits");
  static constexpr int WIDTH = WIDTH_, FIRST = FIRST_, BEFORE = BEFORE_, REGISTERS = Low::REGISTERS, WORDS = Low::WORDS + High::WORDS;
  static constexpr float WEIGHT = Low::WEIGHT, TOP = 7.f;

  DEV static constexpr int raised(int i) { return Low::raised(i); }
  DEV static int channel(int i, int byte, int t) { return Low::channel(i, byte, t); }
  template <class PageHead> DEV static void load(u32* w, PageHead page_head, int tile, int lane) {
    Low::load(w, page_head, tile, lane), High::load(w + Low::WORDS, page_head, tile, lane);
  }
  DEV static u32 get(const u32* w, int row, int i) {
    if constexpr (High::HALVED) {  // four third bits in each half of a word: those of pairs i and i + 2
      const u32 third = w[Low::WORDS] >> (4 * row + i);
      return Low::get(w, row, i) | (((third & 0x00010001u) | (third << 6 & 0x01000100u)) << (2 + raised(i)));
    }
    const int byte = row * High::ROW_BYTES + i / 4, up = 2 + raised(i) - i % 4;  // pairs i / 4 * 8 to i / 4 * 8 + 7 of the row: their third bits, in each half of a word
    const u32 third = nibbles(w[Low::WORDS + byte / 2], byte % 2);
    return Low::get(w, row, i) | ((third << up) & (4u << raised(i)) * 0x01010101u);
  }
};

// --- codes of values: pairs of fp16 -------------------------------------------------------------------------------------

// A code c of B bits at bit p of a half word becomes the fp16 number 1024 + c 2^p by one lop3 with 0x6400, for every p inside the mantissa, so
// most pairs need no shift. Where the mantissa does not reach a place in the word, one shift serves several places.
template <int B> DEV constexpr int bit_of(int place) { return place % (16 / B) * B; }  // of a place, inside its half
template <int B> DEV constexpr int position(int place) {  // p of a place
  const int bit = bit_of<B == 3 ? 2 : B>(place);
  if (B == 2) return bit < 4 ? bit + 4 : bit <= 8 ? bit : bit - 6;
  if (B == 3) return bit % 4 + 4;
  return bit < 8 ? bit : bit - 6;  // four bits: 0, 4, 2, 6; eight: 0, 2
}
// Without 1024: a masked code at bit p of a half word is the (subnormal) fp16 number c 2^(p - 24), which tensor cores multiply exactly.
template <int B> DEV constexpr int bare_position(int place) {
  const int bit = bit_of<B == 3 ? 2 : B>(place);
  return B == 3 ? bit % 4 + 4 : bit + B <= 10 ? bit : bit - 6;
}
DEV u32 moved(u32 w, int right) { return right > 0 ? w >> right : w << -right; }

// Codes of BITS bits from byte OFFSET of the page of a head on; the high plane of three-bit codes from HIGH on. Levels are STEP / 2^20 apart,
// over the scale. BARE: as fp16 numbers c 2^(p - 24), without 1024; for channel-wise keys and for values with several scales a token.
template <int WIDTH_, int BITS_, int OFFSET_, int HIGH_, int STEP_, bool BARE_ = false> struct ValueCodes {
  static constexpr bool BARE = BARE_, TABLE = false;
  static constexpr int WIDTH = WIDTH_, BITS = BITS_, OFFSET = OFFSET_, HIGH = HIGH_;
  static constexpr int PAIRS = WIDTH / 8, LOW_BITS = BITS == 3 ? 2 : BITS, PER = 16 / LOW_BITS;
  static constexpr bool HALVED = WIDTH * LOW_BITS == 32, HIGH_HALVED = BITS == 3 && WIDTH == 32;  // a lane has half a word of a tile
  static constexpr int WORDS = HALVED ? 1 : WIDTH * LOW_BITS / 64;  // of a lane and tile
  static constexpr int HIGH_WORDS = BITS == 3 && !HIGH_HALVED ? WIDTH / 64 : 1;
  static constexpr float TOP = (1 << BITS) - 1, STEP = STEP_ / 1048576.f;
  u32 w[WORDS], h[HIGH_WORDS];

  DEV static constexpr int power(int element) { return BARE ? bare_position<BITS>(element) : position<BITS>(element); }
  DEV static constexpr float code_step(int element) { return (float)(1 << power(element)) * (BARE ? 5.9604644775390625e-8f : 1.f); }  // that a code counts

  template <class PageHead> DEV void load(PageHead page_head, int tile, int lane) {
    if constexpr (HALVED) load_halved(w, page_head + OFFSET, tile, lane);
    else load_words<WORDS>(w, page_head + OFFSET + (tile * 32 + lane) * WORDS * 4);
    if constexpr (HIGH_HALVED) {
      load_halved(h, page_head + HIGH, tile, lane);
    } else if constexpr (BITS == 3) {
      static_assert(WIDTH % 64 == 0, "a lane has whole words");
      load_words<HIGH_WORDS>(h, page_head + HIGH + (tile * 32 + lane) * HIGH_WORDS * 4);
    }
  }
  // Codes of two neighbouring tokens of a channel as fp16: 1024 + c 2^p in the low half, -(1024 + (TOP - c) 2^p) =
  // c 2^p - 1024 - TOP 2^p in the high half. The two offsets have opposite signs, so their sum over a sequence stays small.
  DEV u32 get(int second, int element) const { return masked(second, element, BARE ? 0u : 0x64006400u ^ (0x8000u | (u32)((1 << BITS) - 1) << power(element)) << 16); }
  DEV void get_two(int second, int element, u32& one, u32& two) const { one = get(second, element), two = get(second, element + 1); }
  template <int THREADS> DEV static void fill(u8*) {}  // there is no table
  // BARE: the codes themselves as two fp16 numbers. 1024 + c 2^p, of which the rest is taken off, exactly.
  DEV u32 number(int second, int element) const {
    static_assert(BARE, "neither half is negative");
    const u32 p = power(element);
    return fma_fp16x2(masked(second, element, 0x64006400u), (15u - p) * 0x04000400u, 0x80008000u | (25u - p) * 0x04000400u);
  }
  // The bits of two codes at bit p of their half words, exclusive or `rest`.
  DEV u32 masked(int second, int element, u32 rest) const {
    const int place = second * PAIRS + element, p = power(element);
    const u32 mask = (u32)((1 << BITS) - 1) << p;
    if constexpr (BITS == 3) {
      const u32 part = and_xor(moved(w[place / PER], bit_of<2>(place) - p), 0x00030003u << p, rest);
      return and_xor(moved(h[place / 16], place % 16 - p - 2), 0x00040004u << p, part);
    } else {
      return and_xor(moved(w[place / PER], bit_of<LOW_BITS>(place) - p), mask * 0x10001u, rest);
    }
  }
};
