// Product vector quantization: a token's sub-vectors are indices of centroids, which lanes look up in shared memory.
//
// A codebook of fp16 lies there COPIES times, entry after entry, an entry's copies side by side. A lane has the copy that its number
// says. Where the copies of an entry are 128 bytes, lanes never want different rows of one bank; with fewer copies, few do.

#pragma once
#include "include/copies.cuh"
#include "include/common.cuh"

// N neighbouring numbers of B bits of a row, the part-th N of it, as 32-bit words.
template <int N, int B> struct Packed {
  static constexpr int BITS = N * B, WORDS = (BITS + 31) / 32;
  u32 w[WORDS];

  DEV void load(const u8* row, int part) {
    if constexpr (BITS % 32 == 0) {
      load_words<WORDS>(w, row + part * (BITS / 8));
    } else if constexpr (BITS % 16 == 0) {
      const u16* p = (const u16*)row + part * (BITS / 16);
#pragma unroll
      for (int i = 0; i < WORDS; i++) w[i] = p[2 * i] | (2 * i + 1 < BITS / 16 ? (u32)p[2 * i + 1] << 16 : 0u);
    } else if constexpr (BITS % 8 == 0) {
#pragma unroll
      for (int i = 0; i < BITS / 8; i++) w[i / 4] = (i % 4 ? w[i / 4] : 0u) | (u32)row[part * (BITS / 8) + i] << i % 4 * 8;
    } else {  // a part may start inside a byte
      constexpr int INSIDE = 8 - (BITS & -BITS);  // the furthest from the start of its byte
      static_assert(BITS + INSIDE <= 32, "a part is read as a word");
      const int bit = part * BITS;
      w[0] = 0;
#pragma unroll
      for (int i = 0; i < (BITS + INSIDE + 7) / 8; i++) w[0] |= (u32)row[bit / 8 + i] << 8 * i;
      w[0] >>= bit % 8;
    }
  }
  DEV u32 byte(int i) const { return __byte_perm(w[i / 4], 0u, 0x4440 | i % 4); }
  // Number i from bit `at` on, and `rest` in the bits around it.
  DEV u32 get(int i, int at, u32 rest) const {
    const int bit = i * B % 32;
    return and_xor(moved(w[i * B / 32], bit - at), ((1u << B) - 1) << at, rest);
  }
};

// The COUNT indices of a token, of sub-vectors of DIM channels: their low eight bits from byte OFFSET of the run on, HIGH_BITS more
// from HIGH on. The codebook is from byte BOOK of the block's memory on.
template <int DIM_, int COUNT_, int HIGH_BITS_, int OFFSET_, int HIGH_, int COPIES_, int BOOK_> struct Indices {
  static constexpr int DIM = DIM_, COUNT = COUNT_, HIGH_BITS = HIGH_BITS_, OFFSET = OFFSET_, HIGH = HIGH_, COPIES = COPIES_, BOOK = BOOK_;
  static constexpr int WORDS = DIM / 2, ENTRY = 2 * DIM, STRIDE = COPIES * ENTRY, ENTRIES = 256 << HIGH_BITS;

  // Centroids of a token, the part-th of PARTS equal parts of its sub-vectors: two channels a word. `book` is the lane's copy.
  template <int PARTS> DEV static void centroids(u32* out, const u8* page_head, int token, int part, u32 book) {
    constexpr int N = COUNT / PARTS;
    static_assert(COUNT % PARTS == 0, "lanes have the same number of sub-vectors");
    Packed<N, 8> low;
    Packed<N, HIGH_BITS ? HIGH_BITS : 1> high;
    low.load(page_head + OFFSET + token * COUNT, part);
    if constexpr (HIGH_BITS > 0) high.load(page_head + HIGH + token * (COUNT * HIGH_BITS / 8), part);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 index = low.byte(i);
      if constexpr (HIGH_BITS > 0) index = high.get(i, 8, index);
      load_shared<WORDS>(out + i * WORDS, index * STRIDE + book);
    }
  }
  DEV static u32 copy_of(const u8* memory, int lane) { return shared_address(memory) + BOOK + lane % COPIES * ENTRY; }

  template <int THREADS> DEV static void load_book(u8* memory, const u8* book) {
#pragma unroll 8
    for (int i = threadIdx.x; i < ENTRIES * COPIES; i += THREADS) {
      u32 w[WORDS];
      load_words<WORDS>(w, book + i / COPIES * ENTRY);
      u32* to = (u32*)(memory + BOOK + i * ENTRY);
      if constexpr (WORDS == 1) to[0] = w[0];
      else if constexpr (WORDS == 2) *(uint2*)to = {w[0], w[1]};
      else *(uint4*)to = {w[0], w[1 % WORDS], w[2 % WORDS], w[3 % WORDS]};
    }
  }
};

#if PQ
using KeyBook = KEY_BOOK;
using ValueBook = VALUE_BOOK;
#endif

// Tokens lie in plain order, so which of eight tokens a row is can be chosen. Rows that are read at once (four neighbours for the keys;
// every other one for the values) are tokens that differ modulo four: where a token's indices are 32 bytes, no bank is wanted twice.
DEV int row_token(int row) { return row ^ (row >> 2 & 1); }

// The products need no element moved. A centroid's words (two channels each) are read into neighbouring registers, which for the
// tensor core are rows g and g + 8 of the same columns; so these rows are two words of one token (keys), or of one sub-vector
// (values), and a query head has two columns.
//
// Keys, eight tokens at a time: lane (g, t) has the token of row g, the t-th quarter of the channels. A head's even column is the query
// by the first of two words, the odd one by the second: (g, 2 t) + (g + 8, 2 t + 1) is the score of head t.
template <class I> struct KeyIndices {
  static constexpr int WORDS = I::COUNT * I::WORDS / 4, REGISTERS = WORDS / 2;
  static_assert(WORDS % 4 == 0, "whole products");
  DEV static int word(int i, int g) { return 2 * i + (g & 1); }  // that register i of the queries is of
};

// Values, eight tokens at a time: lane (g, t) has the tokens of rows 2 t and 2 t + 1, the g-th eighth of the channels. The columns'
// probabilities are those of the first channel of a word in a head's even column, of the second one in the odd column.
template <class I> struct ValueIndices {
  static constexpr int WORDS = I::COUNT * I::WORDS / 8;  // of a token
  static_assert(WORDS % 2 == 0, "whole products");
  DEV static constexpr float unit(int) { return 1.f; }
};

// Probabilities of rows 2 t and 2 t + 1 for head g / 2, from those of row g for head t.
DEV void spread(u32* b, float p, int g) {
  const u32 pair = transpose_8x8(fp16_pair(p, p));
  b[0] = __byte_perm(pair, 0u, g & 1 ? 0x1044 : 0x4410), b[1] = __byte_perm(pair, 0u, g & 1 ? 0x3244 : 0x4432);
}
