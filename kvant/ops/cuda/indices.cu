// Product vector quantization: a token's sub-vectors are indices of centroids, which lanes look up in shared memory.
//
// A codebook of fp16 lies there COPIES times, entry after entry, an entry's copies side by side. A lane has the copy that its number
// says. Where the copies of an entry are 128 bytes, lanes never want different rows of one bank; with fewer copies, few do.

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
    } else {  // a part may start inside a byte
      static_assert(BITS < 32, "a part is a word");
      const int bit = part * BITS;
      w[0] = 0;
#pragma unroll
      for (int i = 0; i < (BITS % 8 && BITS > 4 ? BITS + 14 : BITS + 7) / 8; i++) w[0] |= (u32)row[bit / 8 + i] << 8 * i;
      w[0] >>= bit % 8;
    }
  }
  // Number i from bit `at` on, and `rest` in the bits around it.
  DEV u32 get(int i, int at, u32 rest) const {
    const int bit = i * B % 32;
    return pick(moved(w[i * B / 32], bit - at), ((1u << B) - 1) << at, rest);
  }
};

// The COUNT indices of a token, of sub-vectors of DIM channels: their low eight bits from byte OFFSET of the run on, HIGH_BITS more
// from HIGH on. The codebook is from byte BOOK of the block's memory on.
template <int DIM_, int COUNT_, int HIGH_BITS_, int OFFSET_, int HIGH_, int COPIES_, int BOOK_> struct Indices {
  static constexpr int DIM = DIM_, COUNT = COUNT_, HIGH_BITS = HIGH_BITS_, OFFSET = OFFSET_, HIGH = HIGH_, COPIES = COPIES_, BOOK = BOOK_;
  static constexpr int WORDS = DIM / 2, ENTRY = 2 * DIM, STRIDE = COPIES * ENTRY, ENTRIES = 256 << HIGH_BITS;
  DEV static constexpr int log2(int x) { return x > 1 ? 1 + log2(x / 2) : 0; }

  // Centroids of a token, the part-th of PARTS equal parts of its sub-vectors: two channels a word.
  template <int PARTS> DEV static void centroids(u32* out, const u8* run, int token, int part, const u8* memory, u32 copy) {
    constexpr int N = COUNT / PARTS;
    static_assert(COUNT % PARTS == 0, "lanes have the same number of sub-vectors");
    Packed<N, 8> low;
    Packed<N, HIGH_BITS ? HIGH_BITS : 1> high;
    low.load(run + OFFSET + token * COUNT, part);
    if constexpr (HIGH_BITS > 0) high.load(run + HIGH + token * (COUNT * HIGH_BITS / 8), part);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 place = low.get(i, log2(STRIDE), copy);
      if constexpr (HIGH_BITS > 0) place = high.get(i, log2(STRIDE) + 8, place);
      load_words<WORDS>(out + i * WORDS, memory + BOOK + place);
    }
  }
  DEV static u32 copy_of(int lane) { return (u32)(lane % COPIES) * ENTRY; }

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

#if INDEXED
using KeyBook = KEY_BOOK;
using ValueBook = VALUE_BOOK;
#endif

// Tokens lie in plain order, so which row of a tile's product a token is can be chosen: the tokens that four lanes read at once for
// the values are neighbours, which have no bank in common.
DEV int row_token(int row) { return row / 8 * 8 + row % 8 / 2 + row % 2 * 4; }

// Keys: lane (g, t) has tokens of rows g and g + 8, the t-th quarter of the channels. Queries are fp16 in two parts, in neighbouring columns.
template <class I> struct KeyIndices {
  typedef float Sum;
  static constexpr int REGISTERS = I::COUNT * I::WORDS / 4;
  DEV static float sum(const float* c) { return c[0] + c[1]; }
};

// Values: lane (g, t) has tokens of rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, the g-th eighth of the channels.
template <class I> struct ValueIndices {
  static constexpr int WORDS = I::COUNT * I::WORDS / 8;  // of a token
  static constexpr float TOP = 0.f, STEP = 1.f;
  u32 w[4][WORDS];

  DEV static constexpr int power(int) { return 0; }
  DEV void load(const u8* run, int tile, int lane, const u8* memory) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      I::template centroids<8>(w[i], run, tile * 16 + row_token(2 * (lane & 3) + i % 2 + i / 2 * 8), lane >> 2, memory, I::copy_of(lane));
  }
  DEV u32 get(int second, int element) const {
    return __byte_perm(w[2 * second][element / 2], w[2 * second + 1][element / 2], element % 2 ? 0x7632 : 0x5410);
  }
};
