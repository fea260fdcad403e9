// Decode attention over pages of 16-bit numbers, the recipe `full`: paged, split along the sequence (split-KV), in one launch. Packed pages
// are compared with it.
//
//   for every work tile of the CTA: a part of one sequence for one tile of query heads
//     load the query, S = Q K^T and O += P V over token tiles by every warp, merge the warps, write a partial result or finish
//
// S^T = K Q^T and O^T = V^T P^T, as decode.cu: tokens (then channels) fill the 16 rows of an MMA, query heads its 8 columns. Pages are
// [tokens, head_dim], keys and values apart. A lane reads keys 16 bytes at a time: a dot product may take channels in any order. It reads
// values as the transposed operand wants them. The rows of a page begin at the same bank of shared memory, so lanes read their share in
// different orders and put it in order in registers, by selections.
//
// P is fp16 for fp16 pages. For bfloat16 pages, P = high + low, two bfloat16 numbers, since one has 8 bits: with up to four query heads high is
// in columns 0 to 3 and low in columns 4 to 7 of one MMA (HALVED), with more low is an MMA of its own (LOW).
//
// A unit of the scheduler is a token tile: 16 tokens of a KV head. A warp copies its keys and its values separately, TILE_BYTES each.

#include "include/copies.cuh"
#include "include/head_tile_rows.cuh"

constexpr int TILE_HEADS = Config::TILE_HEADS, WARPS = Config::WARPS, STAGES = Config::STAGES, KV_HEADS = Config::KV_HEADS, QUERY_TILES = Config::QUERY_TILES;
constexpr int TILE_BYTES = Config::TILE_BYTES, PAGE_HEAD_BYTES = Config::PAGE_HEAD_BYTES, NUMBERS = Config::ELEMENT_TYPE;
constexpr int D = Config::HEAD_DIM, TILES = Config::PAGE_TOKENS / 16, HEAD_TILES = KV_HEADS * QUERY_TILES, THREADS = WARPS * 32;
constexpr bool HALVED = TILE_HEADS <= 4;
constexpr int COLUMN_TILES = (TILE_HEADS + 7) / 8, COLUMNS = 8 * COLUMN_TILES;
constexpr int LOW = NUMBERS == 0 && !HALVED;  // whether the low part of P has an MMA of its own
constexpr int PARTIAL = TILE_HEADS * (D + 4);  // floats of a block's part of a (sequence, head): outputs, then their log-sum-exps
constexpr float HEADROOM = 14.f, REFERENCE = 6.f;  // exponents of P: see online_softmax.cuh, which gives the reasons for the same numbers
constexpr float LN_2 = 0.69314718055994531f;       // log-sum-exps are to base 2 in here, natural outside
DEV constexpr int head_of(int column) { return HALVED ? column % 4 : column; }

// A sequence of n tokens, of which [low, n) are attended to: token tiles [first, first + tiles). At least one unit, so that a CTA writes its output.
struct SequenceWork {
  int n, low, first, tiles, units;
};
DEV SequenceWork sequence_work(const DecodeFullArguments& a, int b) {
  SequenceWork w;
  w.n = (int)a.seq_lens[b];
  w.low = a.sliding_window > 0 ? max(0, w.n - a.sliding_window) : 0;
  w.first = w.low / 16;
  w.tiles = w.n > w.low ? (w.n - 1) / 16 - w.first + 1 : 0;
  w.units = max(1, w.tiles);
  return w;
}

// --- a token tile -----------------------------------------------------------------------------------------------------------

// Keys of a lane: rows g and g + 8, of which words 4 j to 4 j + 3 are channels 32 j + 8 t to 32 j + 8 t + 7. Where neighbouring rows begin at the
// same bank, odd rows read every two runs of 32 channels in the other order.
struct Rows {
  u32 x[2][D / 8];
  DEV void load(u32 tile, int g, int t) {
    const int odd = D % 64 == 0 ? g & 1 : 0;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int j = 0; j < D / 32; j++) load_shared<4>(x[r] + 4 * j, tile + (r * 8 + g) * D * 2 + t * 16 + (j + (j & 1 ? -odd : odd)) * 64);
    if (D % 64 == 0)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
          u32 &one = x[r][i / 4 * 8 + i % 4], &two = x[r][i / 4 * 8 + i % 4 + 4], was = one;
          one = odd ? two : one, two = odd ? was : two;
        }
  }
};

// Values of a lane: rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, of each the D / 8 channels from g D / 8 on. Where these are four pieces of 1, 2 or 4
// words, lane t begins with piece t, so that the lanes of a g read different banks.
struct Transposed {
  static constexpr bool PIECES = D == 64 || D == 128 || D == 256;
  static constexpr int WORDS = D / 16, PIECE = PIECES ? WORDS / 4 : 1, STEP = WORDS % 4 ? 2 : 4;
  u32 v[4][WORDS];
  DEV static int row(int r, int t) { return r / 2 * 8 + 2 * t + r % 2; }
  DEV void load(u32 tile, int g, int t) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u32 from = tile + row(r, t) * D * 2 + g * (D / 4);
      if constexpr (PIECES) {
        u32 x[4][PIECE];
#pragma unroll
        for (int i = 0; i < 4; i++) load_shared<PIECE>(x[i], from + ((i + t) & 3) * PIECE * 4);
#pragma unroll
        for (int i = 0; i < 4; i++)  // piece i is x[(i - t) & 3]
#pragma unroll
          for (int e = 0; e < PIECE; e++) {
            const u32 even = t & 2 ? x[(i + 2) & 3][e] : x[i][e], other = t & 2 ? x[(i + 1) & 3][e] : x[(i + 3) & 3][e];
            v[r][i * PIECE + e] = t & 1 ? other : even;
          }
      } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += STEP) load_shared<STEP>(v[r] + i, from + i * 4);
      }
    }
  }
  DEV void mask(int at, int first, int last, int t) {  // tokens outside [first, last) are zero: a page may hold anything there, also NaN
#pragma unroll
    for (int r = 0; r < 4; r++)
      if (at + row(r, t) < first || at + row(r, t) >= last)
#pragma unroll
        for (int k = 0; k < WORDS; k++) v[r][k] = 0u;
  }
};

// A logit to base 2, less m; with a soft cap, cap tanh(logit / cap) = cap (1 - 2 / (1 + 2^x)) for x = 2 log2(e) logit / cap.
DEV float soft_cap(float x, float m, float cap) {
  if constexpr (Config::SOFTCAP)
    return fmaf(cap, 1.f - __fdividef(2.f, 1.f + exp2_(fminf(x, 80.f))), -m);
  else
    return x - m;
}

// --- online softmax of a warp ---------------------------------------------------------------------------------------------

struct OnlineSoftmax {
  float m[COLUMN_TILES][2], l[COLUMN_TILES][2];  // of the lane's columns 2 t and 2 t + 1; m is the same in all lanes of a column, l the lane's part of the sum
  float acc[COLUMN_TILES][D / 16][4];            // O^T: rows are channels
  bool fresh;                                    // no score yet: m is not set

  DEV void clear() {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      m[n][0] = m[n][1] = l[n][0] = l[n][1] = 0.f;
#pragma unroll
      for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][k][i] = 0.f;
    }
    fresh = true;
  }
  // s: scores to base 2, less m. Where one exceeds HEADROOM, m moves and sums and accumulators are rescaled; most of the time nothing happens.
  DEV void update(float s[COLUMN_TILES][4]) {
    float top = minus_infinity();
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) top = fmaxf(top, s[n][i]);
    if (!__any_sync(FULL, fresh | (top > HEADROOM))) return;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float x = fmaxf(s[n][e], s[n][e + 2]);
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
        x -= REFERENCE;
        const float by = fresh ? x : fmaxf(x, 0.f), factor = fresh ? 1.f : exp2_(-by);
        m[n][e] += by, l[n][e] *= factor, s[n][e] -= by, s[n][e + 2] -= by;
#pragma unroll
        for (int k = 0; k < D / 16; k++) acc[n][k][e] *= factor, acc[n][k][e + 2] *= factor;
      }
    fresh = false;
  }
};

// P^T of a token tile as second operand of an MMA: tokens 2 t, 2 t + 1 (and 8 on) of column g.
struct Probs {
  u32 p[1 + LOW][COLUMN_TILES][2];
  DEV void set(const float s[COLUMN_TILES][4], int t) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x = s[n][2 * r], y = s[n][2 * r + 1];
        const u32 high = NUMBERS == 0 ? bf16_pair(x, y) : fp16_pair(x, y), low = NUMBERS == 0 ? bf16_pair(x - bf16_low(high), y - bf16_high(high)) : 0u;
        p[0][n][r] = transpose_8x8(NUMBERS == 0 && HALVED && t >= 2 ? low : high);
        if constexpr (LOW) p[1][n][r] = transpose_8x8(low);
      }
  }
};

// --- copies ---------------------------------------------------------------------------------------------------------------

// The token tiles of a warp in flight: a ring of STAGES stages of TILE_BYTES, which keys and values of a tile take in turn.
struct TileRing {
  u32 room, barriers;      // addresses in shared memory, of the ring and of a barrier for each stage
  int stage, parity;       // the stage that is read next, and the parity of its barrier's phase
  int to;                  // the stage that is copied to next
  int tile, end, value;    // what is copied next: keys or values of `tile`, up to `end`
  const s64* block_table;  // of the sequence
  const u8* page_head;     // the page that is copied from
  s64 next;                // the number of the page after it
  int head;                // KV head

  DEV void open(u8* stages, u64* barrier) {
    to = stage = parity = 0;
    room = shared_address_register(stages), barriers = shared_address_register(barrier);
  }
  // Copies the first parts of tiles [from, last).
  DEV void begin(const DecodeFullArguments& a, int b, int kv_head, int from, int last, int lane) {
    block_table = a.block_table + (s64)b * a.block_table_width, head = kv_head, tile = from, end = last, value = 0;
    page_head = nullptr;
    next = from < last ? block_table[from / TILES] : 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < STAGES; i++) copy(a.pages, lane);
  }
  DEV void copy(const u8* pages, int lane) {
    if (tile < end) {
      if (!value && (!page_head || tile % TILES == 0)) {
        page_head = pages + (next * KV_HEADS + head) * PAGE_HEAD_BYTES;
        next = (tile / TILES + 1) * TILES < end ? block_table[tile / TILES + 1] : 0;
      }
      copy_stage<TILE_BYTES>(room + to * TILE_BYTES, page_head + (value ? Config::VALUE_OFFSET : 0) + tile % TILES * TILE_BYTES, barriers + to * 8, lane);
      to = to + 1 == STAGES ? 0 : to + 1;
      tile += value, value ^= 1;
    } else no_copy();
  }
  DEV u32 await() const {  // the address of the stage that is read next
    await_stage<STAGES>(barriers + stage * 8, parity);
    return room + stage * TILE_BYTES;
  }
  DEV void release(const u8* pages, int lane) {  // the stage was read: what comes STAGES later takes its place
    release_stage();
    stage = stage + 1 == STAGES ? 0 : stage + 1, parity ^= stage == 0;
    copy(pages, lane);
  }
};

// --- the query --------------------------------------------------------------------------------------------------------------

// Second operand of S^T = K Q^T: column g, channels in the order of `Rows`. Columns without a query head repeat the last one.
struct Query {
  u32 x[COLUMN_TILES][D / 8];
  DEV void load(const DecodeFullArguments& a, const HeadTileRows& rows, int g, int t) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int j = 0; j < D / 32; j++) load_words<4>(x[n] + 4 * j, (const u8*)a.query + ((rows.query + min(head_of(8 * n + g), rows.count - 1)) * D + 32 * j + 8 * t) * 2);
  }
};

// --- attention to token tiles -----------------------------------------------------------------------------------------------

// S^T = K Q^T of the token tile from `at` on: s are logits to base 2, less m; -infinity outside [low, n).
DEV void multiply_keys(const DecodeFullArguments& a, const SequenceWork& w, const Rows& keys, const Query& q, const OnlineSoftmax& softmax, int at, bool partly, int g,
                       float (&s)[COLUMN_TILES][4]) {
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    float c[2][4] = {};  // two chains of products, each half as long
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      mma_16bit<NUMBERS>(c[k & 1], keys.x[0][2 * k], keys.x[1][2 * k], keys.x[0][2 * k + 1], keys.x[1][2 * k + 1], q.x[n][2 * k], q.x[n][2 * k + 1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[n][i] = soft_cap((c[0][i] + c[1][i]) * a.scale, softmax.m[n][i & 1], a.cap);
      const int position = at + i / 2 * 8 + g;
      if (partly && (position < w.low || position >= w.n)) s[n][i] = minus_infinity();
    }
  }
}

// O^T += V^T P^T of a token tile.
DEV void accumulate(OnlineSoftmax& softmax, const Transposed& values, const Probs& p) {
  const auto& v = values.v;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const u32 a0 = __byte_perm(v[0][k], v[1][k], 0x5410), a1 = __byte_perm(v[0][k], v[1][k], 0x7632);
    const u32 a2 = __byte_perm(v[2][k], v[3][k], 0x5410), a3 = __byte_perm(v[2][k], v[3][k], 0x7632);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i <= LOW; i++) mma_16bit<NUMBERS>(softmax.acc[n][k], a0, a1, a2, a3, p.p[i][n][0], p.p[i][n][1]);
  }
}

// A warp attends to token tiles [tile, end).
DEV void attend_tiles(const DecodeFullArguments& a, const SequenceWork& w, TileRing& ring, const Query& q, int tile, int end, int lane, OnlineSoftmax& softmax) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (; tile < end; tile++) {
    const int at = tile * 16;
    const bool partly = at < w.low || at + 16 > w.n;
    Rows keys;
    keys.load(ring.await(), g, t);
    ring.release(a.pages, lane);
    float s[COLUMN_TILES][4];
    multiply_keys(a, w, keys, q, softmax, at, partly, g, s);
    softmax.update(s);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) softmax.l[n][i & 1] += s[n][i] = exp2_(s[n][i]);
    Probs p;
    p.set(s, t);
    Transposed values;
    values.load(ring.await(), g, t);
    ring.release(a.pages, lane);
    if (partly) values.mask(at, w.low, w.n, t);
    accumulate(softmax, values, p);
  }
}

// --- merge ------------------------------------------------------------------------------------------------------------------

// Memory of a CTA for its merge: m and l of every warp, then its weight in place of l; the log-sum-exp of all, and the inverse of its sum.
struct Shared {
  float m[WARPS][COLUMNS], l[WARPS][COLUMNS], top[COLUMNS], total[COLUMNS];
  u64 barrier[WARPS][STAGES];
  int last;
};

constexpr int OUTPUT_STRIDE = Config::WARP_BYTES / 4;  // floats from the outputs of a warp to those of the next

// Writes a warp's result to shared memory: m and l of every column to sh, outputs [TILE_HEADS, D].
DEV void store_warp(Shared& sh, OnlineSoftmax& softmax, float* outputs, int warp, int g, int t) {
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = 8 * n + 2 * t + e;
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) softmax.l[n][e] += __shfl_xor_sync(FULL, softmax.l[n][e], o);
      if (g == 0) sh.m[warp][column] = softmax.m[n][e], sh.l[warp][column] = softmax.l[n][e];
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        float x = softmax.acc[n][k][e], y = softmax.acc[n][k][e + 2];
        if (NUMBERS == 0 && HALVED) x += __shfl_xor_sync(FULL, x, 2), y += __shfl_xor_sync(FULL, y, 2);
        if (column < TILE_HEADS) *(float2*)(outputs + warp * OUTPUT_STRIDE + column * D + g * (D / 8) + 2 * k) = {x, y};
      }
    }
}

// The sink logit of a query, by its number among all queries, to base 2.
DEV float sink_logit(const DecodeFullArguments& a, s64 query) { return a.sink_logits[query % (KV_HEADS * Config::GROUP)] * LOG2_E; }

// Merges the warps of the CTA and writes outputs and log-sum-exps: to their place where the CTA has the `whole` work tile, else to its partial
// result `mine`.
DEV void merge_warps(const DecodeFullArguments& a, Shared& sh, const float* outputs, bool whole, float* mine, s64 query, int count) {
  if (threadIdx.x < count) {
    const int h = threadIdx.x;
    float m = minus_infinity(), l = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++)
      if (sh.l[i][h] > 0.f) m = fmaxf(m, sh.m[i][h]);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float by = sh.l[i][h] > 0.f ? exp2_(sh.m[i][h] - m) : 0.f;
      l += by * sh.l[i][h];
      sh.l[i][h] = by;  // the warp's weight
    }
    const float by = Config::SINK_LOGITS && whole ? add_sink_logit(sink_logit(a, query + h), m, l) : 1.f;
    sh.total[h] = l > 0.f ? by / l : 0.f;
    const float top = l > 0.f ? m + log2_(l) : minus_infinity();
    if (whole) a.lse[query + h] = top * LN_2;
    else mine[TILE_HEADS * D + h] = top;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * D; i += THREADS) {
    float x = 0.f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      const float by = sh.l[k][i / D];
      x += by > 0.f ? by * outputs[k * OUTPUT_STRIDE + i] : 0.f;
    }
    x *= sh.total[i / D];
    if (whole) store_number<NUMBERS>(a.out, query * D + i, x);
    else mine[i] = x;
  }
}

// Merges the partial results of parts first to last, weighted by their log-sum-exps. A part has two slots: its result lies in slot 1 where
// the (sequence, head tile) begins in it, which holds for the first part alone, and in slot 0 elsewhere.
DEV void merge_parts(const DecodeFullArguments& a, Shared& sh, int first, int last, s64 query, int count) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const auto part = [&](int i) { return a.partial + ((s64)i * 2 + (i == first)) * PARTIAL; };
  for (int h = warp; h < count; h += WARPS) {
    float m = minus_infinity(), l = 0.f;
    for (int i = first + lane; i <= last; i += 32) m = fmaxf(m, __ldcg(part(i) + TILE_HEADS * D + h));
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, o));
    for (int i = first + lane; i <= last; i += 32) l += exp2_(__ldcg(part(i) + TILE_HEADS * D + h) - m);
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) l += __shfl_xor_sync(FULL, l, o);
    if (lane == 0) {
      if constexpr (Config::SINK_LOGITS) add_sink_logit(sink_logit(a, query + h), m, l);
      sh.top[h] = m + log2_(l);
      a.lse[query + h] = sh.top[h] * LN_2;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * (D / 4); i += THREADS) {
    const int h = i / (D / 4);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int k = first; k <= last; k++) {
      const float4 y = __ldcg((const float4*)part(k) + i);
      const float by = exp2_(__ldcg(part(k) + TILE_HEADS * D + h) - sh.top[h]);
      x.x = fmaf(by, y.x, x.x), x.y = fmaf(by, y.y, x.y), x.z = fmaf(by, y.z, x.z), x.w = fmaf(by, y.w, x.w);
    }
    const float y[4] = {x.x, x.y, x.z, x.w};
    store_four<NUMBERS>(a.out, query * D + 4 * i, y);
  }
}

// The last CTA to arrive merges the parts [first, last] of the (sequence, head tile).
DEV void arrive(const DecodeFullArguments& a, Shared& sh, int first, int last, const HeadTileRows& rows) {
  __syncthreads();
  if (threadIdx.x == 0) {
    int* counter = a.arrivals + rows.b * HEAD_TILES + rows.head_tile;
    sh.last = atomic_add_acq_rel(counter) == last - first;
    if (sh.last) *counter = 0;
  }
  __syncthreads();
  if (sh.last) merge_parts(a, sh, first, last, rows.query, rows.count);
}

// --- the kernel -----------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(WARPS * 32, Config::MIN_CTAS) kvant_decode_full(const DecodeFullArguments a) {
  DYNAMIC_SHARED(dynamic);  // [WARPS, WARP_BYTES]: a warp's stages, later overwritten by its outputs [TILE_HEADS, D]
  __shared__ __align__(16) Shared sh;
  static_assert(Config::WARP_BYTES >= STAGES * TILE_BYTES && Config::WARP_BYTES >= TILE_HEADS * D * 4, "a warp's bytes hold its stages, then its outputs");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float* outputs = (float*)dynamic;
  begin_copies(sh.barrier[warp], STAGES, lane);

  const TileScheduler<HEAD_TILES, 4 * WARPS> scheduler(a, lane);  // four token tiles a warp
  TileRing ring;
  ring.open(dynamic + warp * Config::WARP_BYTES, sh.barrier[warp]);
  for (int part = blockIdx.x; part < scheduler.parts; part += gridDim.x)
    for (WorkTile work = scheduler.first_tile(a, part, lane); work.unit < work.end; scheduler.advance(work, a.batch)) {
      // schedule: this warp's token tiles
      const SequenceWork w = sequence_work(a, work.b);
      scheduler.enter(work, w.units);
      int tile = scheduler.split ? (int)((s64)work.from * w.tiles / work.units) : work.from;
      int end = scheduler.split ? (int)((s64)work.to * w.tiles / work.units) : min(work.to, w.tiles);
      const int own = end - tile;  // the CTA's; now those of this warp:
      end = w.first + tile + (warp + 1) * own / WARPS, tile += w.first + warp * own / WARPS;

      // query: the first tiles are on their way while it is loaded
      const HeadTileRows rows(work);
      ring.begin(a, rows.b, rows.head, tile, end, lane);
      Query query;
      query.load(a, rows, g, t);

      // tiles: S = Q K^T, P = softmax S, O += P V
      OnlineSoftmax softmax;
      softmax.clear();
      attend_tiles(a, w, ring, query, tile, end, lane, softmax);

      // merge: the warps of the CTA, then the CTAs that share the (sequence, head tile)
      store_warp(sh, softmax, outputs, warp, g, t);
      __syncthreads();
      merge_warps(a, sh, outputs, work.whole(), a.partial + ((s64)part * 2 + (work.from == 0)) * PARTIAL, rows.query, rows.count);
      if (!work.whole()) arrive(a, sh, scheduler.first_part(work), scheduler.last_part(work), rows);
      fence_copies();  // outputs were written where tiles will be copied to
      __syncthreads();
    }
}
