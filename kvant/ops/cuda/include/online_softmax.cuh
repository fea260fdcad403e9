// Decode attention, 1 of 5: what a block is asked for, and what a warp knows of the softmax. See decode.cu.

#pragma once
#include "include/scheduler.cuh"
#include "codecs/product_vq.cuh"

constexpr int D = HEAD_DIM, TILES = PAGE / 16, CHUNK = TILES < 4 ? TILES : 4, HEADS = KV_HEADS * QUERY_TILES;
constexpr int OWN = (TILE_HEADS + 3) / 4 == 3 ? 4 : (TILE_HEADS + 3) / 4;  // query heads of a lane: t, t + 4, ...
constexpr bool PAIRED = OWN == 1;
constexpr int COLUMN_TILES = OWN == 4 ? 2 : 1;                             // of the second product
constexpr int ACC_TILES = INDEXED ? OWN : COLUMN_TILES, ACC_STEPS = INDEXED ? D / 32 : D / 16;  // of its sums
constexpr float HEADROOM = 14.f, REFERENCE = 6.f;  // probabilities are at most 2^14, and 2^6 when the reference is set
constexpr float VALUE_NORM = INDEXED || VALUE_GROUPS > 1 ? 1.f : 1099511627776.f;  // 2^40: what a value's scale is multiplied by until one has been seen
constexpr float QUERY_TOP = 16250.f;               // 128 * 127 less some

// A page in shared memory: by address, so that nothing is added to a pointer; keys of groups and indices are read by pointers.
struct Bytes {
  u32 at;
  DEV Bytes operator+(int by) const { return {at + by}; }
};
template <int N> DEV void load_words(u32* w, Bytes p) {
  constexpr int EACH = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < N; i += EACH) load_shared<EACH>(w + i, p.at + 4 * i);
}
#if KEY_GROUP || INDEXED
using Run = const u8*;
#else
using Run = Bytes;
#endif

template <class... P> struct Planes {
  static constexpr int REGISTERS = (0 + ... + P::REGISTERS), WORDS = (0 + ... + P::WORDS);
};
using Keys = KEY_PLANES;
using Values = VALUE_CODES;
constexpr int SHARE = D / VALUE_GROUPS / 8;  // channels that a lane has of each group of channels with a scale of its own
DEV constexpr int value_channel(int g, int element) { return element / SHARE * (D / VALUE_GROUPS) + g * SHARE + element % SHARE; }

// What a query is multiplied by keys as: its bytes for the 32 lanes, and numbers of every head. Where a kernel before makes them (PREPARED), for
// every block of positions to which queries are turned back (TURNED), or for one. See queries.cu.
struct Turned {
  u32 f[OWN][Keys::REGISTERS ? Keys::REGISTERS : 1][32];
  float top[4 * OWN], sum[4 * OWN], bias[4 * OWN], lost[4 * OWN];
  float peak[4 * OWN];  // the largest of all channels, where windows reach into the block
};
constexpr int TURNED_BY = TURNED ? TURNED : 1;
// Blocks that windows may reach into: the first ones and the last ones, counted from the block of the last token.
constexpr int SINK_BLOCKS = SINK ? (SINK + TURNED_BY - 2) / TURNED_BY + 1 : 0;
constexpr int TURNED_SLOTS = SINK_BLOCKS + (RECENT + TURNED_BY - 2) / TURNED_BY + 1;
DEV int turned_slot(int block, int last) { return block < SINK_BLOCKS ? block : SINK_BLOCKS + last - block; }

struct Arguments {
  const void* query;
  void* out;
  float* lse;
  const u8* pages;
  const s64 *table, *lengths, *owners, *sinks, *exact_key, *exact_value;
  const void *window_key, *window_value;
  const float *dual_signs, *inverse_signs, *mean, *lost;
  const uint4 *dual_matrix, *inverse_matrix;  // where queries, or outputs, are multiplied by a matrix here: see queries.cu
  const float* inverse_offset;                // [inverse_heads, D], what is added to outputs then, or nothing
  float* partial;
  int* arrived;
  const u8 *key_books, *value_books;  // where streams are indices: fp16 [KV_HEADS or 1, centroids, channels of a sub-vector]
  // where a kernel before makes queries: bytes, and rows in the space of the keys for windows. Where keys are turned back to the start of their
  // block of TURNED positions, for every block, and rows for those that windows reach into
  const Turned* turned;      // [batch, HEADS, blocks]
  const float* turned_rows;  // [batch, HEADS, TURNED_SLOTS, TILE_HEADS, D]; [batch, KV_HEADS * GROUP, D] where nothing is turned back
  float scale, cap;
  int batch, table_width, window, blocks, first, matrix_heads, inverse_heads;  // first: position of the first token, for RoPE
};

// The block of positions that a token is in, and the token after its last.
DEV int block_of(const Arguments& a, int token) { return TURNED ? (token + a.first) / TURNED_BY - a.first / TURNED_BY : 0; }
DEV int block_end(const Arguments& a, int token) { return ((token + a.first) / TURNED_BY + 1) * TURNED_BY - a.first; }

struct Work {  // of one sequence: tokens [low, first_end) and [second, n) in windows, [packed, packed_end) in pages
  int n, low, first_end, second, packed, packed_end, page, pages, units_first, units_windows, units;
  int keys, values;  // packed tokens from here on have their keys, or their values, in windows; see KEY_GROUP
  int owner;          // of the windows
  int mixed, weight;  // the last pages, that have such tokens and count MIXED pages each; all pages as they count
};

#if KEY_GROUP
// The first of the last tokens of a stream that are in its window.
DEV int full_from(int n, int exact, int recent, int flush) {
  return min(n, max(min(n, SINK) + max(0, n - SINK - recent) / flush * flush, max(exact, SINK)));
}
#elif WINDOW_TOKENS
// The first of the last tokens that are in the window.
DEV int recent_of(int n, int exact_key, int exact_value) {
  return min(n, max(min(n, SINK) + max(0, n - SINK - RECENT), max(max(exact_key, exact_value), SINK)));
}
#endif

DEV Work work_of(const Arguments& a, int b) {
  Work w;
  w.n = (int)a.lengths[b];
  w.low = a.window > 0 ? max(0, w.n - a.window) : 0;
  int sinks = 0, recent = w.n;
  w.owner = WINDOW_TOKENS ? (int)a.owners[b] : 0;
#if KEY_GROUP
  sinks = min((int)a.sinks[b], w.n);
  w.keys = full_from(w.n, (int)a.exact_key[b], KEY_RECENT, KEY_FLUSH);
  w.values = full_from(w.n, (int)a.exact_value[b], VALUE_RECENT, VALUE_FLUSH);
  recent = max(w.keys, w.values);
#elif WINDOW_TOKENS
  sinks = min((int)a.sinks[b], w.n);
  recent = recent_of(w.n, (int)a.exact_key[b], (int)a.exact_value[b]);
#endif
  w.packed = max(max(sinks, w.low), ORIGIN);
  w.packed_end = recent;
  w.page = (w.packed - ORIGIN) / PAGE;
  w.pages = w.packed < recent ? (recent - 1 - ORIGIN) / PAGE - w.page + 1 : 0;
  w.first_end = sinks;
  w.second = max(recent, w.low);
  constexpr int TOKENS = 16 * WINDOW_TILES;
  w.units_first = (max(0, sinks - w.low) + TOKENS - 1) / TOKENS;
  w.units_windows = w.units_first + (w.n - w.second + TOKENS - 1) / TOKENS;
  w.mixed = 0;
#if KEY_GROUP
  const int apart = max(w.packed, min(w.keys, w.values));
  if (w.pages && apart < recent) w.mixed = (recent - 1 - ORIGIN) / PAGE - (apart - ORIGIN) / PAGE + 1;
#endif
  w.weight = w.pages + w.mixed * (MIXED - 1);
  w.units = max(1, w.units_windows * UNIT + w.weight);
  return w;
}
// The page that the first so many units of pages end before.
DEV int page_at(int units, int pages, int mixed) {
  const int plain = pages - mixed;
  return MIXED == 1 || units <= plain ? units : plain + (units - plain + MIXED - 1) / MIXED;
}

// --- what a warp knows of the softmax ---------------------------------------------------------------------------------

struct State {
  float m[OWN], l[OWN], z[OWN], flags[OWN];  // of the lane's heads; m is the same in all lanes of a head
  float acc[ACC_TILES][ACC_STEPS][4], riding[COLUMN_TILES][4];  // riding: what 1024s gave; with several scales a token, minima by row
  float norm;  // power of two: scale * norm is at most one for every value so far
  float limit;  // scores that are larger set m anew: all but minus infinity as long as there were none, then those beyond the headroom

  DEV static constexpr int head(int column_tile, int i) { return INDEXED ? column_tile : PAIRED ? 0 : 2 * column_tile + (i & 1); }  // of an accumulator

  DEV void clear() {
#pragma unroll
    for (int h = 0; h < OWN; h++) m[h] = l[h] = z[h] = flags[h] = 0.f;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) riding[n][i] = 0.f;
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++)
#pragma unroll
      for (int k = 0; k < ACC_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][k][i] = 0.f;
    norm = VALUE_NORM;
    limit = minus_infinity();
  }

  // s are scores in powers of two, less m; they become probabilities. Where one is beyond the headroom, or a value's scale beyond what was seen, m and
  // norm are set anew; most of the time nothing happens. Powers are taken before that is known, since it takes as long.
  template <int N> DEV void settle(float s[N][OWN][2], float largest) {
    float top[OWN], any = minus_infinity(), p[N][OWN][2];
#pragma unroll
    for (int h = 0; h < OWN; h++) {
      top[h] = minus_infinity();
#pragma unroll
      for (int i = 0; i < N; i++) top[h] = fmaxf(top[h], fmaxf(s[i][h][0], s[i][h][1])), p[i][h][0] = exp2_(s[i][h][0]), p[i][h][1] = exp2_(s[i][h][1]);
      any = fmaxf(any, top[h]);
    }
    if (__any_sync(FULL, any > limit || (!INDEXED && largest * norm > 1.f))) {
      reset<N>(s, top, largest);
#pragma unroll
      for (int h = 0; h < OWN; h++)
#pragma unroll
        for (int i = 0; i < N; i++) p[i][h][0] = exp2_(s[i][h][0]), p[i][h][1] = exp2_(s[i][h][1]);
    }
#pragma unroll
    for (int h = 0; h < OWN; h++)
#pragma unroll
      for (int i = 0; i < N; i++) l[h] += (s[i][h][0] = p[i][h][0]) + (s[i][h][1] = p[i][h][1]);
  }
  template <int N> DEV void reset(float s[N][OWN][2], float* top, float largest) {
    const bool fresh = limit < 0.f;
    float ratio = 1.f, fade[OWN];
#pragma unroll
    for (int o = 1; o < 32 * !INDEXED; o <<= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, o));
    if (!INDEXED && largest * norm > 1.f) {
      const int exponent = max(1, min(252, (int)(__float_as_uint(largest) >> 23)));
      const float wanted = fminf(__uint_as_float((u32)(253 - exponent) << 23), norm);
      ratio = __fdividef(wanted, norm);
      norm = wanted;
    }
#pragma unroll
    for (int h = 0; h < OWN; h++) {
      float x = top[h];
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
      x -= REFERENCE;
      const float by = fresh ? fmaxf(x, -1e30f) : fmaxf(x, 0.f);
      fade[h] = fresh ? 1.f : exp2_(-by);
      m[h] += by, l[h] *= fade[h], z[h] *= fade[h], flags[h] *= fade[h];
#pragma unroll
      for (int i = 0; i < N; i++) s[i][h][0] -= by, s[i][h][1] -= by;
    }
    float own[2 * ACC_TILES];
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) own[2 * n + (i & 1)] = fade[head(n, i)] * ratio;
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++) {
#pragma unroll
      for (int i = 0; i < 4 * !INDEXED; i++) riding[n][i] *= own[2 * n + (i & 1)];
#pragma unroll
      for (int k = 0; k < ACC_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][k][i] *= own[2 * n + (i & 1)];
    }
    limit = HEADROOM;
  }
};

// Probabilities as the second operand of the second product. Where two tiles share the columns, those of the other one are zero.
DEV u32 only(u32 x, int tile, int g) { return !PAIRED || (g & 1) == (tile & 1) ? x : 0u; }

struct Meta {
  float scale, zero;
};
template <int KIND, int TYPE, class Section> DEV void load_meta(Meta* out, Section section, int place) {  // of rows g and g + 8
  if constexpr (KIND == 3) {
    out[0] = out[1] = {1.f, 0.f};
  } else if constexpr (KIND == 2) {
    u32 x;
    load_words<1>(&x, section + place * 2);
    out[0].scale = low<TYPE>(x), out[1].scale = high<TYPE>(x);
  } else {
    u32 x[2];
    load_words<2>(x, section + place * 4);
    out[0].scale = low<TYPE>(x[0]), out[0].zero = high<TYPE>(x[0]);
    out[1].scale = low<TYPE>(x[1]), out[1].zero = high<TYPE>(x[1]);
  }
}
