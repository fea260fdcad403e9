// Codes that are places in a table of levels (TurboQuant): x = norm * level[code]. The levels mirror each other around zero.

#pragma once
#include "codecs/tokenwise.cuh"
#include "include/copies.cuh"

DEV u32 dynamic_address() {
  DYNAMIC_SHARED(dynamic);
  return shared_address(dynamic);
}

// --- keys: bytes ------------------------------------------------------------------------------------------------------------

// As P, a KeyPlane or ThreeBitKeys, whose codes become levels as bytes of mma_u8s8: level = WEIGHT (u - TOP / 2), u = first byte + second byte / 128. Every other
// register has second bytes and meets the query divided by 128; with PARTS = 1 there are none. A byte permutation looks four bytes up among eight, A0 to A1
// (second bytes: B0 to B1), by the nibbles of a word. Sixteen levels take two of them: bytes are below 128 then, and a nibble whose highest bit is set gives zero.
template <class P, int PARTS, int TOP_, int WEIGHT_, u32 A0, u32 A1, u32 A2, u32 A3, u32 B0, u32 B1, u32 B2, u32 B3> struct LevelKeys {
  static constexpr int WIDTH = P::WIDTH, FIRST = P::FIRST, BEFORE = P::BEFORE, WORDS = P::WORDS, REGISTERS = PARTS * P::REGISTERS;
  static constexpr float WEIGHT = WEIGHT_ / 68719476736.f, TOP = TOP_ / 128.f;  // WEIGHT_ / 2^36
  static constexpr bool NIBBLES = P::TOP > 7.f;  // codes are nibbles as they lie: register i of P has those of half i % 2 of a word

  DEV static constexpr int raised(int i) { return i % PARTS ? 7 : 0; }
  DEV static int channel(int i, int byte, int t) {
    if constexpr (NIBBLES) {
      const int j = i / PARTS, pair = j / 2 * 4 + byte;
      return pair < WIDTH / 8 ? FIRST + t * (WIDTH / 4) + 2 * pair + j % 2 : -1;
    }
    return P::channel(i / PARTS, byte, t);
  }
  template <class PageHead> DEV static void load(u32* w, PageHead page_head, int tile, int lane) { P::load(w, page_head, tile, lane); }
  // Four codes of register i of P, in the low nibbles of a word.
  DEV static u32 four(const u32* w, int row, int i) {
    if constexpr (NIBBLES) {
      return P::row_word(w, row, i / 2) >> (i % 2 * 16);
    } else {
      const u32 codes = P::get(w, row, i) >> P::raised(i);  // a byte each
      return __byte_perm(codes | codes >> 4, 0u, 0x4420);
    }
  }
  DEV static u32 get(const u32* w, int row, int i) {
    const u32 codes = four(w, row, i / PARTS);
    if constexpr (NIBBLES) {
      const u32 other = codes ^ 0x8888u;
      return i % PARTS ? permute_bytes(B0, B1, codes) | permute_bytes(B2, B3, other) : permute_bytes(A0, A1, codes) | permute_bytes(A2, A3, other);
    } else {
      return i % PARTS ? permute_bytes(B0, B1, codes) : permute_bytes(A0, A1, codes);
    }
  }
};

// --- values: pairs of fp16 ----------------------------------------------------------------------------------------------------

// Codes of BITS bits from byte OFFSET of the page of a head on; the high plane of three-bit codes from HIGH on. A table in shared memory, from byte PLACE of the
// CTA's dynamic shared memory on, has the levels of two neighbouring channels' codes as fp16 numbers, in steps of STEP_ / 2^30, COPIES times: lanes with copies of
// their own do not wait for each other. MAGNITUDES are the positive levels.
template <int WIDTH, int BITS, int OFFSET, int HIGH, int PLACE, int STEP_, u32... MAGNITUDES> struct LevelValues {
  static constexpr bool TABLE = true;
  static constexpr int LOW_BITS = BITS == 3 ? 2 : BITS, PER = 16 / LOW_BITS, PAIRS = WIDTH / 8;
  static constexpr int WORDS = WIDTH * LOW_BITS / 64, HIGH_WORDS = BITS == 3 ? WIDTH / 64 : 1, COPIES = Config::LEVEL_COPIES;
  static constexpr float STEP = STEP_ / 1073741824.f, TOP = 0.f;
  u32 w[WORDS], h[HIGH_WORDS], table;

  DEV static constexpr float code_step(int) { return 1.f; }
  // The level of a code, fp16.
  DEV static u32 level(int code) {
    constexpr int HALF = 1 << (BITS - 1);
    const int wanted = code < HALF ? HALF - 1 - code : code - HALF;
    u32 x = code < HALF ? 0x8000u : 0u;
    int i = 0;
    ((x |= i++ == wanted ? MAGNITUDES : 0u), ...);
    return x;
  }
  // Writes the table, by all threads of a CTA; ends with a barrier. An entry's number has the low bits of two codes, then their third bits.
  template <int THREADS> DEV static void fill(u8* memory) {
    constexpr int LOW = (1 << LOW_BITS) - 1;
    for (int i = threadIdx.x; i < COPIES << (2 * BITS); i += THREADS) {
      const int entry = i / COPIES, third = BITS == 3 ? entry >> 4 : 0;
      const int first = (entry & LOW) | (third & 1) << 2, second = (entry >> LOW_BITS & LOW) | (third & 2) << 1;
      ((u32*)(memory + PLACE))[i] = level(first) | level(second) << 16;
    }
    __syncthreads();
  }
  template <class PageHead> DEV void load(PageHead page_head, int tile, int lane) {
    table = dynamic_address() + PLACE + lane % COPIES * 4;
    load_words<WORDS>(w, page_head + (OFFSET + (tile * 32 + lane) * WORDS * 4));
    if constexpr (BITS == 3) {
      static_assert(WIDTH % 64 == 0, "a lane has whole words");
      load_words<HIGH_WORDS>(h, page_head + (HIGH + (tile * 32 + lane) * HIGH_WORDS * 4));
    }
  }
  // Levels of elements `element`, an even one, and the next, each of two neighbouring tokens.
  DEV void get_two(int second, int element, u32& one, u32& two) const {
    const int place = second * PAIRS + element, bit = place % PER * LOW_BITS;
    u32 found[2];
#pragma unroll
    for (int token = 0; token < 2; token++) {
      u32 at = w[place / PER] >> (bit + 16 * token) & ((1u << 2 * LOW_BITS) - 1);
      if constexpr (BITS == 3) at |= (h[place / 16] >> (place % 16 + 16 * token) & 3u) << 4;
      load_shared<1>(found + token, at * (COPIES * 4) + table);
    }
    one = __byte_perm(found[0], found[1], 0x5410), two = __byte_perm(found[0], found[1], 0x7632);
  }
};
