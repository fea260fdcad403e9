// Product quantization: the sub-vectors of a token are indices of centroids, which lanes look up in shared memory.
//
// A codebook of fp16 lies there COPIES times, entry after entry, the copies of an entry side by side; a lane reads copy lane % COPIES. Where the copies
// of an entry are 128 bytes, no two lanes ask for different rows of one bank; with fewer copies, few do. Where both books are of that kind, with indices of a byte,
// an entry of the keys and one of the values may lie side by side (SIDE): an index is then byte 1 of an address.

#pragma once
#include "include/copies.cuh"
#include "include/math.cuh"

// What indices are read from: shared memory, by its 32-bit address, or global memory.
template <int N> DEV void load_index_words(u32* w, u32 address) { load_shared<N>(w, address); }
template <int N> DEV void load_index_words(u32* w, const u8* p) { load_words<N>(w, p); }
DEV u32 load_index_half(u32 address) { return load_shared_half(address); }
DEV u32 load_index_half(const u8* p) { return *(const u16*)p; }
DEV u32 load_index_byte(u32 address) { return load_shared_byte(address); }
DEV u32 load_index_byte(const u8* p) { return *p; }

// N neighbouring B-bit numbers of a row, from number part * N on, in 32-bit words.
template <int N, int B> struct PackedIndices {
  static constexpr int BITS = N * B, WORDS = (BITS + 31) / 32;
  u32 w[WORDS];

  template <class Row> DEV void load(Row row, int part) {
    if constexpr (BITS % 32 == 0) {
      constexpr int EACH = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int i = 0; i < WORDS; i += EACH) load_index_words<EACH>(w + i, row + part * (BITS / 8) + 4 * i);
    } else if constexpr (BITS % 16 == 0) {
      const Row p = row + part * (BITS / 8);
#pragma unroll
      for (int i = 0; i < WORDS; i++) w[i] = load_index_half(p + 4 * i) | (2 * i + 1 < BITS / 16 ? load_index_half(p + 4 * i + 2) << 16 : 0u);
    } else if constexpr (BITS % 8 == 0) {
#pragma unroll
      for (int i = 0; i < BITS / 8; i++) w[i / 4] = (i % 4 ? w[i / 4] : 0u) | load_index_byte(row + part * (BITS / 8) + i) << i % 4 * 8;
    } else {  // a part may begin inside a byte
      constexpr int INSIDE = 8 - (BITS & -BITS);  // the furthest from the start of its byte
      static_assert(BITS + INSIDE <= 32, "a part is read as a word");
      const int bit = part * BITS;
      w[0] = 0;
#pragma unroll
      for (int i = 0; i < (BITS + INSIDE + 7) / 8; i++) w[0] |= load_index_byte(row + bit / 8 + i) << 8 * i;
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

// COUNT indices a token, of sub-vectors of DIM channels: their LOW_BITS low bits from byte OFFSET of the page of a head on, HIGH_BITS more bits from byte
// HIGH on. The codebook lies from byte BOOK of the CTA's dynamic shared memory on. BY_PLACE: every sub-vector's place has a codebook of its own, one after another.
// SIDE: -1, or 0 for the first and 1 for the second of two codebooks whose entries alternate, from the next address after byte BOOK on that 64 KiB divide.
template <int DIM_, int COUNT_, int LOW_BITS_, int HIGH_BITS_, int OFFSET_, int HIGH_, int COPIES_, int BOOK_, bool BY_PLACE, int SIDE_> struct SharedCodebook {
  static constexpr int LOW_BITS = LOW_BITS_;
  static constexpr int DIM = DIM_, COUNT = COUNT_, HIGH_BITS = HIGH_BITS_, OFFSET = OFFSET_, HIGH = HIGH_, COPIES = COPIES_, BOOK = BOOK_;
  static constexpr int SIDE = SIDE_;
  static constexpr int WORDS = DIM / 2, ENTRY = 2 * DIM, STRIDE = (SIDE < 0 ? 1 : 2) * COPIES * ENTRY;
  static_assert(SIDE < 0 || (LOW_BITS == 8 && HIGH_BITS == 0 && STRIDE == 256 && !BY_PLACE), "an index is byte 1 of an address");
  static constexpr int BOOK_STRIDE = BY_PLACE ? STRIDE << (LOW_BITS + HIGH_BITS) : 0, ENTRIES = (BY_PLACE ? COUNT : 1) << (LOW_BITS + HIGH_BITS);

  // Centroids of part `part` of PARTS equal parts of a token's sub-vectors, two channels a word. `page_head` is the page's address, `book` that of the lane's copy.
  template <int PARTS, class Page> DEV static void centroids(u32* out, Page page_head, int token, int part, u32 book) {
    constexpr int N = COUNT / PARTS;
    static_assert(COUNT % PARTS == 0, "lanes have the same number of sub-vectors");
    PackedIndices<N, LOW_BITS> low;
    PackedIndices<N, HIGH_BITS ? HIGH_BITS : 1> high;
    low.load(page_head + OFFSET + token * (COUNT * LOW_BITS / 8), part);
    if constexpr (HIGH_BITS > 0) high.load(page_head + HIGH + token * (COUNT * HIGH_BITS / 8), part);
    look_up(out, low, high, part, book);
  }
  // The same by indices in registers.
  template <int N, int B, int H> DEV static void look_up(u32* out, const PackedIndices<N, B>& low, [[maybe_unused]] const PackedIndices<N, H>& high, int part, u32 book) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if constexpr (SIDE >= 0) {
        load_shared<WORDS>(out + i * WORDS, __byte_perm(low.w[i / 4], book, 0x7604 | i % 4 << 4));
        continue;
      }
      u32 index = LOW_BITS == 8 ? low.byte(i) : low.get(i, 0, 0u);
      if constexpr (HIGH_BITS > 0) index = high.get(i, LOW_BITS, index);
      load_shared<WORDS>(out + i * WORDS, index * STRIDE + (book + (part * N + i) * BOOK_STRIDE));
    }
  }
  DEV static u32 start(u32 memory) { return SIDE < 0 ? memory + BOOK : (memory + BOOK + 0xffff & ~0xffffu) + SIDE * (COPIES * ENTRY); }
  DEV static u32 copy_of(u32 memory, int lane) { return start(memory) + lane % COPIES * ENTRY; }

  template <int THREADS> DEV static void load_book(u8* memory, const u8* book) {
    u8* const first = SIDE < 0 ? memory + BOOK : memory + (start(shared_address(memory)) - shared_address(memory));
#pragma unroll 8
    for (int i = threadIdx.x; i < ENTRIES * COPIES; i += THREADS) {
      u32 w[WORDS];
      load_words<WORDS>(w, book + i / COPIES * ENTRY);
      u32* to = (u32*)(first + i / COPIES * STRIDE + i % COPIES * ENTRY);
      if constexpr (WORDS == 1) to[0] = w[0];
      else if constexpr (WORDS == 2) *(uint2*)to = {w[0], w[1]};
      else *(uint4*)to = {w[0], w[1 % WORDS], w[2 % WORDS], w[3 % WORDS]};
    }
  }
};

// Maps rows 0..7 of an MMA to tokens. Tokens lie in plain order, so the map is free: rows that are read at once (four neighbours for keys, every other row
// for values) are tokens that differ modulo four, so that with 32 bytes of indices a token no bank is asked twice. From global memory (LINES), every other row is
// one of four neighbouring tokens, too: a line of 128 bytes.
template <bool LINES> DEV int row_token(int row) { return LINES ? row >> 1 ^ (row & 1 ? 6 : 0) : row ^ (row >> 2 & 1); }

// No element is moved between registers. The words of a centroid (two channels each) are read into neighbouring registers, which an MMA takes as rows g and
// g + 8 of the same columns. So these two rows are two words of one token (keys) or of one sub-vector (values), and a query head has two columns.
//
// Keys, eight tokens at a time: lane (g, t) reads the token of row g, quarter t of the channels. A head's even column is the query times the first of two
// words, its odd column times the second: c(g, 2t) + c(g + 8, 2t + 1) is the score of head t.
template <class I> struct CentroidKeys {
  static constexpr int WORDS = I::COUNT * I::WORDS / 4, REGISTERS = WORDS / 2;
  static_assert(WORDS % 4 == 0, "whole products");
  DEV static int word(int i, int g) { return 2 * i + (g & 1); }  // of two channels that register i of the query operand holds
};

// Values, eight tokens at a time: lane (g, t) reads the tokens of rows 2t and 2t + 1, eighth g of the channels. P of a head stands in its even column for
// the first channel of a word and in its odd column for the second.
template <class I> struct CentroidValues {
  static constexpr int WORDS = I::COUNT * I::WORDS / 8;  // of a token
  static_assert(WORDS % 2 == 0, "whole products");
  static constexpr float TOP = 0.f;
  DEV static constexpr float code_step(int) { return 1.f; }
};

// B operand from P: rows 2t and 2t + 1 of head g / 2, from P of row g of head t.
DEV void expand_probs(u32* b, float p, int g) {
  const u32 pair = transpose_8x8(fp16_pair(p, p));
  b[0] = __byte_perm(pair, 0u, g & 1 ? 0x1044 : 0x4410), b[1] = __byte_perm(pair, 0u, g & 1 ? 0x3244 : 0x4432);
}
