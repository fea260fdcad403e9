// Decode attention over pages of 16-bit numbers, the recipe `full`: paged, in one launch, split along the sequence. What packed pages
// are compared with.
//
// S^T = K Q^T and O^T = V^T P^T, as decode.cu: tokens (then channels) fill the 16 rows of the tensor core's product, query heads its 8
// columns. Pages lie token after token. Keys are read 16 bytes a lane, since dot products do not care which channels a step takes; values
// as the transposed operand wants them. Rows of a page fall on the same banks of shared memory, so lanes read their share in different
// order and put it right in registers: no wait, a few selections.
//
// Of bfloat16, probabilities are two numbers, the larger and what it lacks: with up to four query heads, in columns 0 to 3 and 4 to 7 (HALVED).
//
// A unit of work is a tile of 16 tokens; a warp copies its keys and its values apart, each TILE_BYTES bytes, STAGES of them in flight.

#include "include/copies.cuh"
#include "include/scheduler.cuh"

constexpr int TILE_HEADS = Config::TILE_HEADS, WARPS = Config::WARPS, STAGES = Config::STAGES, KV_HEADS = Config::KV_HEADS, GROUP = Config::GROUP, QUERY_TILES = Config::QUERY_TILES;
constexpr int TILE_BYTES = Config::TILE_BYTES, PAGE_HEAD_BYTES = Config::PAGE_HEAD_BYTES, NUMBERS = Config::ELEMENT_TYPE;
constexpr int D = Config::HEAD_DIM, TILES = Config::PAGE_TOKENS / 16, HEAD_TILES = KV_HEADS * QUERY_TILES, THREADS = WARPS * 32;
constexpr bool HALVED = TILE_HEADS <= 4;
constexpr int COLUMN_TILES = (TILE_HEADS + 7) / 8, COLUMNS = 8 * COLUMN_TILES;
constexpr int LOW = NUMBERS == 0 && !HALVED;  // whether what probabilities lack is a product of its own
constexpr int PARTIAL = TILE_HEADS * (D + 4);  // floats of a block's part of a (sequence, head): outputs, then their log-sum-exps
constexpr float HEADROOM = 14.f, REFERENCE = 6.f;  // probabilities are at most 2^14, and 2^6 when the reference is set
DEV constexpr int head_of(int column) { return HALVED ? column % 4 : column; }

struct SequenceWork {  // of one sequence: tokens [low, n) in `tiles` tiles from `first` on
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

// --- a tile ---------------------------------------------------------------------------------------------------------------

// Words 4 j to 4 j + 3 are channels 32 j + 8 t to 32 j + 8 t + 7 of rows g and g + 8. Where neighbouring rows fall on the same banks, odd
// ones are read two words of 32 channels the other way round.
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

// Rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, the D / 8 channels from g D / 8 on. Where these are four pieces of 1, 2 or 4 words, lanes t
// begin with different ones, so that all banks are asked at once.
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
  DEV void mask(int at, int first, int last, int t) {  // past the ends a page may hold anything
#pragma unroll
    for (int r = 0; r < 4; r++)
      if (at + row(r, t) < first || at + row(r, t) >= last)
#pragma unroll
        for (int k = 0; k < WORDS; k++) v[r][k] = 0u;
  }
};

DEV float soft_cap(float x, float m, float cap) {  // a score in powers of two, less m
  if constexpr (Config::SOFTCAP)
    return fmaf(cap, 1.f - __fdividef(2.f, 1.f + exp2_(fminf(x, 80.f))), -m);
  else
    return x - m;
}

// --- online softmax of a warp ---------------------------------------------------------------------------------------------

struct OnlineSoftmax {
  float m[COLUMN_TILES][2], l[COLUMN_TILES][2];  // of the lane's columns 2 t and 2 t + 1; m is the same in all lanes of a column
  float acc[COLUMN_TILES][D / 16][4];
  bool fresh;

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
  // s are scores in powers of two, less m. Where one is beyond the headroom m is set anew; most of the time nothing happens.
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

// Probabilities of a tile as second operands: tokens 2 t, 2 t + 1 (and 8 on) of column g.
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

// The parts of a warp's tiles [tile, end), keys and values in turn, on their way to shared memory.
struct Ahead {
  int tile, end, value, stage;
  const s64* block_table;
  const u8* page_head;
  s64 next;  // page that comes after

  DEV void begin(const s64* pages, int from, int to) {
    block_table = pages, tile = from, end = to, value = 0;
    page_head = nullptr;
    next = from < to ? block_table[from / TILES] : 0;
  }
  DEV void copy(const u8* pages, int head, u32 room, u32 barriers, int lane) {
    if (tile < end) {
      if (!value && (!page_head || tile % TILES == 0)) {
        page_head = pages + (next * KV_HEADS + head) * PAGE_HEAD_BYTES;
        next = (tile / TILES + 1) * TILES < end ? block_table[tile / TILES + 1] : 0;
      }
      copy_stage<TILE_BYTES>(room + stage * TILE_BYTES, page_head + (value ? Config::VALUE_OFFSET : 0) + tile % TILES * TILE_BYTES, barriers + stage * 8, lane);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      tile += value, value ^= 1;
    } else no_copy();
  }
};

// --- a block --------------------------------------------------------------------------------------------------------------

struct Shared {
  float m[WARPS][COLUMNS], l[WARPS][COLUMNS], top[COLUMNS], total[COLUMNS];
  u64 barrier[WARPS][STAGES];
  int last;
};

// The parts of blocks first to last, weighted by their log-sum-exps. A block's part lies in its second slot where it began with this
// (sequence, head): only the first one did.
DEV void merge_parts(const DecodeFullArguments& a, Shared& sh, int first, int last, s64 query, int count) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const auto part = [&](int block) { return a.partial + ((s64)block * 2 + (block == first)) * PARTIAL; };
  for (int h = warp; h < count; h += WARPS) {
    float m = minus_infinity(), l = 0.f;
    for (int i = first + lane; i <= last; i += 32) m = fmaxf(m, __ldcg(part(i) + TILE_HEADS * D + h));
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, o));
    for (int i = first + lane; i <= last; i += 32) l += exp2_(__ldcg(part(i) + TILE_HEADS * D + h) - m);
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) l += __shfl_xor_sync(FULL, l, o);
    if (lane == 0) {
      sh.top[h] = m + log2_(l);
      a.lse[query + h] = sh.top[h] * 0.69314718055994531f;
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

// --- schedule ---------------------------------------------------------------------------------------------------------------

// The line of units (scheduler.cuh), cut as TileScheduler cuts it.
struct EvenSplit {
  int each, more;  // the first `more` parts have each + 1 units, the others `each`
  DEV int begin_of(int part) const { return part * each + min(part, more); }
  DEV int part_of(int unit) const { return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each; }
};
// Parts that a (sequence, head tile) of so many units is cut into; share: parts over units.
DEV int split_units(int units, float share) { return max(1, (int)((float)units * share)); }

// The sequence b of a unit, and the units of all head tiles of the sequences before it, by a prefix sum over 32 sequences at a time.
// own: units of the lane-th sequence.
DEV void find_sequence(const DecodeFullArguments& a, int unit, bool split, float share, int own, int lane, int& b, int& before) {
  b = before = 0;
  for (int base = 0; base < a.batch; base += 32) {
    int units = own;
    if (base) units = base + lane < a.batch ? sequence_work(a, base + lane).units : 0;
    if (split && base + lane < a.batch) units = split_units(units, share);
    int sum = units;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int x = __shfl_up_sync(FULL, sum, o);
      if (lane >= o) sum += x;
    }
    const u32 beyond = __ballot_sync(FULL, before + sum * HEAD_TILES > unit);
    if (beyond) {
      const int found = __ffs(beyond) - 1;
      b = base + found;
      before += __shfl_sync(FULL, sum - units, found) * HEAD_TILES;
      return;
    }
    before += __shfl_sync(FULL, sum, 31) * HEAD_TILES;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, Config::MIN_CTAS) kvant_decode_full(const DecodeFullArguments a) {
  DYNAMIC_SHARED(dynamic);
  __shared__ __align__(16) Shared sh;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u8* stages = dynamic + warp * Config::WARP_BYTES;
  float* outputs = (float*)dynamic;  // [WARPS][TILE_HEADS, D], each warp's where its tiles were
  constexpr int OUTPUT_STRIDE = Config::WARP_BYTES / 4;
  static_assert(Config::WARP_BYTES >= STAGES * TILE_BYTES && Config::WARP_BYTES >= TILE_HEADS * D * 4, "a warp's bytes hold its tiles, then its outputs");
  begin_copies(sh.barrier[warp], STAGES, lane);

  // Which part of all units is this block's. Where there are several parts for every (sequence, head), each of those is cut into
  // as many equal parts as fit, so that no block has two of them; a unit is then such a part.
  const int own = lane < a.batch ? sequence_work(a, lane).units : 0;
  int all = own;
  for (int i = lane + 32; i < a.batch; i += 32) all += sequence_work(a, i).units;
  all = warp_sum_int(all) * HEAD_TILES;
  int parts = min((int)gridDim.x, max(1, all / (WARPS * 4)));  // four tiles a warp, or it is not worth a block
  const bool split = parts >= 3 * a.batch * HEAD_TILES;
  const float share = (float)parts / (float)all;
  EvenSplit even = {all / parts, all % parts};
  if (split) {
    parts = 0;
    for (int i = lane; i < a.batch; i += 32) parts += split_units(sequence_work(a, i).units, share);
    parts = warp_sum_int(parts) * HEAD_TILES;
    even = {1, 0};
  }
  Ahead ahead;
  ahead.stage = 0;
  int stage = 0, parity = 0;
  const u32 room = shared_address_register(stages), barriers = shared_address_register(sh.barrier[warp]);
  const auto await = [&] { await_stage<STAGES>(barriers + stage * 8, parity); };
  for (int part = blockIdx.x; part < parts; part += gridDim.x) {
    int now = even.begin_of(part), b, before;
    const int end = even.begin_of(part + 1);
    find_sequence(a, now, split, share, own, lane, b, before);
    while (now < end) {
      const SequenceWork w = sequence_work(a, b);
      const int units = split ? split_units(w.units, share) : w.units;
      const int head_tile = (now - before) / units, head = head_tile / QUERY_TILES, query_tile = head_tile % QUERY_TILES;
      const int start = before + head_tile * units;
      const int from = now - start, to = min(end, start + units) - start;
      int tile = split ? (int)((s64)from * w.tiles / units) : from, tile_end = split ? (int)((s64)to * w.tiles / units) : min(to, w.tiles);
      const int own = tile_end - tile;  // this block's; then this warp's
      tile_end = w.first + tile + (warp + 1) * own / WARPS, tile += w.first + warp * own / WARPS;

      ahead.begin(a.block_table + (s64)b * a.block_table_width, tile, tile_end);  // the first copies are on their way while queries are read
      __syncwarp();
      const auto copy = [&] { ahead.copy(a.pages, head, room, barriers, lane); };
#pragma unroll
      for (int i = 0; i < STAGES; i++) copy();

      const int count = min(TILE_HEADS, GROUP - query_tile * TILE_HEADS);
      const s64 query = (s64)b * KV_HEADS * GROUP + head * GROUP + query_tile * TILE_HEADS;
      u32 q[COLUMN_TILES][D / 8];  // as `Rows` has a row
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int j = 0; j < D / 32; j++) load_words<4>(q[n] + 4 * j, (const u8*)a.query + ((query + min(head_of(8 * n + g), count - 1)) * D + 32 * j + 8 * t) * 2);
      OnlineSoftmax softmax;
      softmax.clear();
#pragma unroll 1
      for (; tile < tile_end; tile++) {
        const int at = tile * 16;
        const bool partly = at < w.low || at + 16 > w.n;
        const auto consumed = [&] {  // what comes STAGES later takes its place
          release_stage();
          stage = stage + 1 == STAGES ? 0 : stage + 1, parity ^= stage == 0;
          copy();
        };
        await();
        Rows keys;
        keys.load(room + stage * TILE_BYTES, g, t);
        consumed();
        float s[COLUMN_TILES][4];
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
          float c[2][4] = {};  // two chains of products, each half as long
#pragma unroll
          for (int k = 0; k < D / 16; k++)
            mma_16bit<NUMBERS>(c[k & 1], keys.x[0][2 * k], keys.x[1][2 * k], keys.x[0][2 * k + 1], keys.x[1][2 * k + 1], q[n][2 * k], q[n][2 * k + 1]);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            s[n][i] = soft_cap((c[0][i] + c[1][i]) * a.scale, softmax.m[n][i & 1], a.cap);
            const int position = at + i / 2 * 8 + g;
            if (partly && (position < w.low || position >= w.n)) s[n][i] = minus_infinity();
          }
        }
        softmax.update(s);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) softmax.l[n][i & 1] += s[n][i] = exp2_(s[n][i]);
        Probs p;
        p.set(s, t);

        await();
        Transposed values;
        values.load(room + stage * TILE_BYTES, g, t);
        consumed();
        if (partly) values.mask(at, w.low, w.n, t);
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

      // a warp's lanes together
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
      __syncthreads();

      // a block's warps together
      const bool whole = from == 0 && to == units;
      float* mine = a.partial + ((s64)part * 2 + (from > 0 ? 0 : 1)) * PARTIAL;
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
        sh.total[h] = l > 0.f ? 1.f / l : 0.f;
        const float top = l > 0.f ? m + log2_(l) : minus_infinity();
        if (whole) a.lse[query + h] = top * 0.69314718055994531f;
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

      // parts together
      if (!whole) {
        const int first = even.part_of(start), last = even.part_of(start + units - 1);
        __syncthreads();
        if (threadIdx.x == 0) {
          int* counter = a.arrivals + b * HEAD_TILES + head_tile;
          sh.last = atomic_add_acq_rel(counter) == last - first;
          if (sh.last) *counter = 0;
        }
        __syncthreads();
        if (sh.last) merge_parts(a, sh, first, last, query, count);
      }
      fence_copies();  // the stages were written as memory and will be copied to
      __syncthreads();
      now = start + to;
      if (now == before + units * HEAD_TILES) before = now, b++;
    }
  }
}
