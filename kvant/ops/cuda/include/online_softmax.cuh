// Decode attention, 1 of 5: what a block is asked for, and what a warp knows of the softmax. See decode.cu.

#pragma once
#include "include/scheduler.cuh"
#include "codecs/product_vq.cuh"

constexpr int D = HEAD_DIM, TILES = PAGE / 16, CHUNK = TILES < 4 ? TILES : 4, HEAD_TILES = KV_HEADS * QUERY_TILES;
constexpr int LANE_HEADS = (TILE_HEADS + 3) / 4 == 3 ? 4 : (TILE_HEADS + 3) / 4;  // query heads of a lane: t, t + 4, ...
constexpr bool PAIRED = LANE_HEADS == 1;
constexpr int COLUMN_TILES = LANE_HEADS == 4 ? 2 : 1;                             // of the second product
constexpr int ACC_TILES = PQ ? LANE_HEADS : COLUMN_TILES, ACC_STEPS = PQ ? D / 32 : D / 16;  // of its sums
constexpr float HEADROOM = 14.f, REFERENCE = 6.f;  // probabilities are at most 2^14, and 2^6 when the reference is set
constexpr float VALUE_NORM = PQ || VALUE_GROUPS > 1 ? 1.f : 1099511627776.f;  // 2^40: what a value's scale is multiplied by until one has been seen
constexpr float QUERY_TOP = 16250.f;               // 128 * 127 less some

// A page in shared memory: by address, so that nothing is added to a pointer; keys of groups and indices are read by pointers.
struct SharedBytes {
  u32 at;
  DEV SharedBytes operator+(int by) const { return {at + by}; }
};
template <int N> DEV void load_words(u32* w, SharedBytes p) {
  constexpr int EACH = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < N; i += EACH) load_shared<EACH>(w + i, p.at + 4 * i);
}
#if KEY_GROUP || PQ
using PageHead = const u8*;
#else
using PageHead = SharedBytes;
#endif

template <class... P> struct Planes {
  static constexpr int REGISTERS = (0 + ... + P::REGISTERS), WORDS = (0 + ... + P::WORDS);
};
using Keys = KEY_PLANES;
using Values = VALUE_CODES;
constexpr int GROUP_SHARE = D / VALUE_GROUPS / 8;  // channels that a lane has of each group of channels with a scale of its own
DEV constexpr int value_channel(int g, int element) { return element / GROUP_SHARE * (D / VALUE_GROUPS) + g * GROUP_SHARE + element % GROUP_SHARE; }

// What a query is multiplied by keys as: its bytes for the 32 lanes, and numbers of every head. Where a kernel before makes them (PREPARED), for
// every block of positions to which queries are turned back (TURNED), or for one. See queries.cu.
struct QueryOperand {
  u32 f[LANE_HEADS][Keys::REGISTERS ? Keys::REGISTERS : 1][32];
  float top[4 * LANE_HEADS], sum[4 * LANE_HEADS], bias[4 * LANE_HEADS], mean_logit[4 * LANE_HEADS];
  float peak[4 * LANE_HEADS];  // the largest of all channels, where windows reach into the block
};
constexpr int ROPE_TOKENS = ROPE_BLOCK ? ROPE_BLOCK : 1;
// Blocks that windows may reach into: the first ones and the last ones, counted from the block of the last token.
constexpr int SINK_ROPE_BLOCKS = SINK ? (SINK + ROPE_TOKENS - 2) / ROPE_TOKENS + 1 : 0;
constexpr int OVERLAY_SLOTS = SINK_ROPE_BLOCKS + (RECENT + ROPE_TOKENS - 2) / ROPE_TOKENS + 1;
DEV int overlay_slot(int block, int last) { return block < SINK_ROPE_BLOCKS ? block : SINK_ROPE_BLOCKS + last - block; }

struct Arguments {
  const void* query;
  void* out;
  float* lse;
  const u8* pages;
  const s64 *block_table, *seq_lens, *overlay_rows, *sinks, *key_ring_start, *value_ring_start;
  const void *overlay_key, *overlay_value;
  const float *query_signs, *output_signs, *value_mean, *mean_logit;
  const uint4 *query_matrix, *output_matrix;  // where queries, or outputs, are multiplied by a matrix here: see queries.cu
  const float* output_offset;                // [inverse_heads, D], what is added to outputs then, or nothing
  float* partial;
  int* arrivals;
  const u8 *key_codebooks, *value_codebooks;  // where streams are indices: fp16 [KV_HEADS or 1, centroids, channels of a sub-vector]
  // where a kernel before makes queries: bytes, and rows in the space of the keys for windows. Where keys are turned back to the start of their
  // block of TURNED positions, for every block, and rows for those that windows reach into
  const QueryOperand* operands;     // [batch, HEADS, blocks]
  const float* query_rows;  // [batch, HEADS, TURNED_SLOTS, TILE_HEADS, D]; [batch, KV_HEADS * GROUP, D] where nothing is turned back
  float scale, cap;
  int batch, block_table_width, sliding_window, rope_blocks, first_position, matrix_heads, output_matrix_heads;  // first: position of the first token, for RoPE
};

// The block of positions that a token is in, and the token after its last.
DEV int rope_block_of(const Arguments& a, int token) { return ROPE_BLOCK ? (token + a.first_position) / ROPE_TOKENS - a.first_position / ROPE_TOKENS : 0; }
DEV int rope_block_end(const Arguments& a, int token) { return ((token + a.first_position) / ROPE_TOKENS + 1) * ROPE_TOKENS - a.first_position; }

struct Work {  // of one sequence: tokens [low, first_end) and [second, n) in windows, [packed, packed_end) in pages
  int n, low, sink_end, recent_begin, packed, packed_end, page, pages, sink_units, overlay_units, units;
  int keys, values;  // packed tokens from here on have their keys, or their values, in windows; see KEY_GROUP
  int overlay_row;          // of the windows
  int mixed, weight;  // the last pages, that have such tokens and count MIXED pages each; all pages as they count
};

#if KEY_GROUP
// The first of the last tokens of a stream that are in its window.
DEV int ring_begin(int n, int exact, int recent, int flush) {
  return min(n, max(min(n, SINK) + max(0, n - SINK - recent) / flush * flush, max(exact, SINK)));
}
#elif OVERLAY_TOKENS
// The first of the last tokens that are in the window.
DEV int overlay_start(int n, int key_ring_start, int value_ring_start) {
  return min(n, max(min(n, SINK) + max(0, n - SINK - RECENT), max(max(key_ring_start, value_ring_start), SINK)));
}
#endif

DEV Work work_of(const Arguments& a, int b) {
  Work w;
  w.n = (int)a.seq_lens[b];
  w.low = a.sliding_window > 0 ? max(0, w.n - a.sliding_window) : 0;
  int sinks = 0, recent = w.n;
  w.overlay_row = OVERLAY_TOKENS ? (int)a.overlay_rows[b] : 0;
#if KEY_GROUP
  sinks = min((int)a.sinks[b], w.n);
  w.keys = ring_begin(w.n, (int)a.key_ring_start[b], KEY_RECENT, KEY_FLUSH);
  w.values = ring_begin(w.n, (int)a.value_ring_start[b], VALUE_RECENT, VALUE_FLUSH);
  recent = max(w.keys, w.values);
#elif OVERLAY_TOKENS
  sinks = min((int)a.sinks[b], w.n);
  recent = overlay_start(w.n, (int)a.key_ring_start[b], (int)a.value_ring_start[b]);
#endif
  w.packed = max(max(sinks, w.low), ORIGIN);
  w.packed_end = recent;
  w.page = (w.packed - ORIGIN) / PAGE;
  w.pages = w.packed < recent ? (recent - 1 - ORIGIN) / PAGE - w.page + 1 : 0;
  w.sink_end = sinks;
  w.recent_begin = max(recent, w.low);
  constexpr int TOKENS = 16 * OVERLAY_TILES;
  w.sink_units = (max(0, sinks - w.low) + TOKENS - 1) / TOKENS;
  w.overlay_units = w.sink_units + (w.n - w.recent_begin + TOKENS - 1) / TOKENS;
  w.mixed = 0;
#if KEY_GROUP
  const int apart = max(w.packed, min(w.keys, w.values));
  if (w.pages && apart < recent) w.mixed = (recent - 1 - ORIGIN) / PAGE - (apart - ORIGIN) / PAGE + 1;
#endif
  w.weight = w.pages + w.mixed * (MIXED_PAGE_UNITS - 1);
  w.units = max(1, w.overlay_units * OVERLAY_UNITS + w.weight);
  return w;
}
// The page that the first so many units of pages end before.
DEV int page_at_unit(int units, int pages, int mixed) {
  const int plain = pages - mixed;
  return MIXED_PAGE_UNITS == 1 || units <= plain ? units : plain + (units - plain + MIXED_PAGE_UNITS - 1) / MIXED_PAGE_UNITS;
}

// --- what a warp knows of the softmax ---------------------------------------------------------------------------------

struct OnlineSoftmax {
  float m[LANE_HEADS], l[LANE_HEADS], z[LANE_HEADS], flags[LANE_HEADS];  // of the lane's heads; m is the same in all lanes of a head
  float acc[ACC_TILES][ACC_STEPS][4], bias[COLUMN_TILES][4];  // riding: what 1024s gave; with several scales a token, minima by row
  float norm;  // power of two: scale * norm is at most one for every value so far
  float limit;  // scores that are larger set m anew: all but minus infinity as long as there were none, then those beyond the headroom

  DEV static constexpr int head(int column_tile, int i) { return PQ ? column_tile : PAIRED ? 0 : 2 * column_tile + (i & 1); }  // of an accumulator

  DEV void clear() {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) m[h] = l[h] = z[h] = flags[h] = 0.f;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) bias[n][i] = 0.f;
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
  template <int N> DEV void update(float s[N][LANE_HEADS][2], float max_abs) {
    float top[LANE_HEADS], any = minus_infinity(), p[N][LANE_HEADS][2];
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
      top[h] = minus_infinity();
#pragma unroll
      for (int i = 0; i < N; i++) top[h] = fmaxf(top[h], fmaxf(s[i][h][0], s[i][h][1])), p[i][h][0] = exp2_(s[i][h][0]), p[i][h][1] = exp2_(s[i][h][1]);
      any = fmaxf(any, top[h]);
    }
    if (__any_sync(FULL, any > limit || (!PQ && max_abs * norm > 1.f))) {
      rescale<N>(s, top, max_abs);
#pragma unroll
      for (int h = 0; h < LANE_HEADS; h++)
#pragma unroll
        for (int i = 0; i < N; i++) p[i][h][0] = exp2_(s[i][h][0]), p[i][h][1] = exp2_(s[i][h][1]);
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++)
#pragma unroll
      for (int i = 0; i < N; i++) l[h] += (s[i][h][0] = p[i][h][0]) + (s[i][h][1] = p[i][h][1]);
  }
  template <int N> DEV void rescale(float s[N][LANE_HEADS][2], float* top, float max_abs) {
    const bool fresh = limit < 0.f;
    float ratio = 1.f, factor[LANE_HEADS];
#pragma unroll
    for (int o = 1; o < 32 * !PQ; o <<= 1) max_abs = fmaxf(max_abs, __shfl_xor_sync(FULL, max_abs, o));
    if (!PQ && max_abs * norm > 1.f) {
      const int exponent = max(1, min(252, (int)(__float_as_uint(max_abs) >> 23)));
      const float wanted = fminf(__uint_as_float((u32)(253 - exponent) << 23), norm);
      ratio = __fdividef(wanted, norm);
      norm = wanted;
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
      float x = top[h];
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
      x -= REFERENCE;
      const float by = fresh ? fmaxf(x, -1e30f) : fmaxf(x, 0.f);
      factor[h] = fresh ? 1.f : exp2_(-by);
      m[h] += by, l[h] *= factor[h], z[h] *= factor[h], flags[h] *= factor[h];
#pragma unroll
      for (int i = 0; i < N; i++) s[i][h][0] -= by, s[i][h][1] -= by;
    }
    float own[2 * ACC_TILES];
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) own[2 * n + (i & 1)] = factor[head(n, i)] * ratio;
#pragma unroll
    for (int n = 0; n < ACC_TILES; n++) {
#pragma unroll
      for (int i = 0; i < 4 * !PQ; i++) bias[n][i] *= own[2 * n + (i & 1)];
#pragma unroll
      for (int k = 0; k < ACC_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][k][i] *= own[2 * n + (i & 1)];
    }
    limit = HEADROOM;
  }
};

// Probabilities as the second operand of the second product. Where two tiles share the columns, those of the other one are zero.
DEV u32 own_columns(u32 x, int tile, int g) { return !PAIRED || (g & 1) == (tile & 1) ? x : 0u; }

struct Scales {
  float scale, zero;
};
template <int KIND, int TYPE, class Section> DEV void load_scales(Scales* out, Section section, int place) {  // of rows g and g + 8
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
