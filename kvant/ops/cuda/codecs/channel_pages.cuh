// Decode attention over pages whose keys are coded per channel over groups of tokens (KIVI), with boosted channels (Kitty).
//
// S = sum_c q_c (scale_c code_c + min_c). For every group of tokens a warp multiplies its queries by the group's scales, once for all of its tokens,
// and gets q . min from one more MMA. Codes are fp16 numbers c 2^(p - 24) (ValueCodes, BARE); 2^-p is in the query.
//
// Boosted channels have two high bits more, in a compact tensor [tokens, BOOSTED], token after token. They are one more small MMA with the queries of those
// channels, which the group's index names; no element is masked.
//
// The overlay of keys and that of values reach back differently far: a page may have tokens whose keys, or values, are still in the overlay.

// Keys that are stored before RoPE are rotated when they are read: codecs/rotated_channel.cuh.

#pragma once
#include "codecs/values.cuh"
#include "include/page_ring.cuh"

using KeyCodes = Key::Codes;
constexpr int GROUP_TILES = Config::KEY_GROUP / 16;
constexpr int BASE_GROUPS = Config::PAGE_TOKENS > Config::KEY_GROUP ? 2 : 1;  // groups of a page whose q . min is one product: rows g of one, g + 8 of the other
constexpr int HIGH_STEPS = Config::BOOSTED ? (Config::BOOSTED / 4 + 3) / 4 : 1;  // bytes of high bits of a lane and token: four channels each

// Scales of channels 8 block ... 8 block + 7 of lane t's quarter lie where those of lane t + 2 do, by banks. KEY_BANKS: lanes t > 1 have every two blocks in the
// other order, in the registers of queries and keys alike.
constexpr bool KEY_BANKS = Config::KEY_BANKS;
static_assert(!KEY_BANKS || (KeyCodes::BITS == 2 && D % 64 == 0), "two blocks of a row are the bytes of half words");
DEV int key_block(int block, int t) { return KEY_BANKS ? block ^ t >> 1 : block; }
DEV int key_element(int element, int t) { return KEY_BANKS ? element ^ (t >> 1) * 4 : element; }  // that register `element` has
DEV void order_blocks(KeyCodes& codes, int t) {
  if constexpr (KEY_BANKS)
#pragma unroll
    for (int i = 0; i < KeyCodes::WORDS; i++) codes.w[i] = __byte_perm(codes.w[i], 0u, t > 1 ? 0x2301 : 0x3210);
}

// Of a number x of a query, what column g holds: see query_column.
DEV float limb(float x, int g) { return PAIRED && (g & 1) ? x - fp16_low(fp16_pair(x, 0.f)) : x; }

#include "codecs/rotated_channel.cuh"

// KEY_BANKS: the four words of minima of a load are an A operand as they are, two products take two of them each (load_bases), and the queries' words stand in
// the order 0, 2, 1, 3. Else rows g and g + 8 are two groups, for which words have to be moved.
DEV int pair_place(int i) { return KEY_BANKS ? i >> 1 | (i & 1) << 1 : i; }

// Query of a CTA in shared memory.
struct ChannelQuery {
  float rows[TILE_HEADS * D];  // in the space of the keys
  float top[4 * LANE_HEADS], mean_logit[4 * LANE_HEADS];
  // Pairs of channels as fp16, four registers of a lane side by side: for q . min, and times 2^-p for codes at bit p.
  u32 pairs[COLUMN_TILES][D / 32][32][4], scaled[COLUMN_TILES][D / 32][32][4];
  u8 boosted[WARPS][16 * HIGH_STEPS];  // boosted channels of the group at hand, of a warp

  DEV float peak_of(int head) const { return top[head]; }
  DEV void set_head(int, float, int) {}
  // Fills `pairs` and `scaled` from the rows, by all threads.
  DEV void store_operand() {
    for (int j = threadIdx.x; j < COLUMN_TILES * D / 8 * 32; j += WARPS * 32) {
      const int i = j % (D / 8), lane = j / (D / 8) % 32, n = j / (D / 8) / 32, g = lane >> 2, head = query_column(n, g);
      float x = 0.f, y = 0.f;
      if (head < TILE_HEADS) {
        const float* row = rows + head * D + (lane & 3) * (D / 4) + 2 * key_element(i, lane & 3);
        const float by = query_power(top[head]);
        x = limb(row[0] * by, g), y = limb(row[1] * by, g);
      }
      const float less = 1.f / (float)(1 << KeyCodes::power(i));
      pairs[n][i / 4][lane][pair_place(i % 4)] = fp16_pair(x, y);
      scaled[n][i / 4][lane][i % 4] = fp16_pair(x * less, y * less);
    }
  }
};
// A lane's registers: B operands for one group of tokens.
struct ChannelFragment {
  u32 k[COLUMN_TILES][D / 8], high[COLUMN_TILES][2 * HIGH_STEPS];  // q * scale * 2^-p; the same of boosted channels
  float factor[LANE_HEADS], back[LANE_HEADS], base[BASE_GROUPS][LANE_HEADS], mean_logit[LANE_HEADS];  // base: q . min, of groups `bases` on
  int group, bases;  // of the page; -1 before the first
  ChannelQuery* shared;

  const u32* angles;  // of rotated keys alone
  DEV void enter_chunk(const DecodeArguments&, int, int) {}
};

DEV void load_query(ChannelFragment& q, ChannelQuery& sh, int lane, float scale) {
  q.shared = &sh;
#pragma unroll
  for (int n = 0; n < LANE_HEADS; n++) {
    const int head = min(4 * n + (lane & 3), TILE_HEADS - 1);
    q.back[n] = scale / query_power(sh.top[head]);
    q.factor[n] = q.back[n] * 16777216.f;
    q.mean_logit[n] = SOFTCAP ? sh.mean_logit[head] : 0.f;
  }
}

// What an accumulator of S^T gave a lane for its n-th query head, in row g + 8 row.
template <class Sums> DEV float own_sum(const Sums& c, int n, int row) {
  return PAIRED ? c[0][2 * row] + c[0][2 * row + 1] : c[n / 2][2 * row + n % 2];
}

// Queries of the boosted channels, times their scales and four. Register 2u + i of lane t: channels 4 (HIGH_STEPS t + u) + 2i and the next one of the
// compact tensor, whose codes lie at bits 4i and 4i + 2.
DEV void load_boosted(ChannelFragment& q, const u8* meta, const u8* index, int lane) {
  const int g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  ChannelQuery& sh = *q.shared;
  u8* boosted = sh.boosted[warp];
  __syncwarp();
  for (int i = lane; i < D / 4; i += 32) {
    const u32 rows = ((const u32*)index)[i];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = rows >> 8 * e & 255;
      if (row < Config::BOOSTED) boosted[row] = (u8)(4 * i + e);
    }
  }
  __syncwarp();
#pragma unroll
  for (int u = 0; u < HIGH_STEPS; u++) {
    const int place = 4 * (HIGH_STEPS * t + u);  // Config::BOOSTED is a multiple of four
    const u32 channels = place < Config::BOOSTED ? *(const u32*)(boosted + place) : 0u;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const int head = query_column(n, g);
      const float by = place < Config::BOOSTED && head < TILE_HEADS ? query_power(sh.top[head]) * 4.f : 0.f;
      const float* row = sh.rows + min(head, TILE_HEADS - 1) * D;
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int channel = min((int)(channels >> 8 * e & 255), D - 1);  // a group that is not there names anything
        x[e] = limb(row[channel] * fp16_low(*(const u16*)(meta + channel * 2)) * (by / (float)(1 << 2 * e)), g);
      }
      q.high[n][2 * u] = fp16_pair(x[0], x[1]), q.high[n][2 * u + 1] = fp16_pair(x[2], x[3]);
    }
  }
}

// q . min of BASE_GROUPS groups of the page's tokens from `group` on.
DEV void load_bases(ChannelFragment& q, const u8* page_head, int group, int lane) {
  const ChannelQuery& sh = *q.shared;
  const u8* meta = page_head + Key::SCALE_OFFSET + group * D * 4 + D * 2;
  q.bases = group;
  if constexpr (KEY_BANKS) {
    float c[BASE_GROUPS][2][COLUMN_TILES][4] = {};  // row g of the first, row g + 8 of the second is q . min
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      u32 least[BASE_GROUPS][4];
#pragma unroll
      for (int j = 0; j < BASE_GROUPS; j++) load_words<4>(least[j], meta + j * D * 4 + ((lane & 3) * (D / 4) + 8 * key_block(i, lane & 3)) * 2);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        u32 x[4];
        load_words<4>(x, (const u8*)sh.pairs[n][i][lane]);
#pragma unroll
        for (int j = 0; j < BASE_GROUPS; j++)
#pragma unroll
          for (int k = 0; k < 2; k++) mma_fp16(c[j][k][n], least[j][0], least[j][1], least[j][2], least[j][3], x[2 * k], x[2 * k + 1]);
      }
    }
#pragma unroll
    for (int j = 0; j < BASE_GROUPS; j++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) q.base[j][n] = (own_sum(c[j][0], n, 0) + own_sum(c[j][1], n, 1)) * q.back[n];
    return;
  }
  float c[COLUMN_TILES][4], other[COLUMN_TILES][4];  // two sums that do not wait for each other
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) c[n][i] = other[n][i] = 0.f;
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    u32 least[BASE_GROUPS][4];
#pragma unroll
    for (int j = 0; j < BASE_GROUPS; j++) load_words<4>(least[j], meta + j * D * 4 + ((lane & 3) * (D / 4) + 8 * key_block(i, lane & 3)) * 2);
    const u32 *one = least[0], *two = least[BASE_GROUPS - 1];
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      u32 x[4];
      load_words<4>(x, (const u8*)sh.pairs[n][i][lane]);
      mma_fp16(c[n], one[0], two[0], one[1], two[1], x[0], x[1]);
      mma_fp16(other[n], one[2], two[2], one[3], two[3], x[2], x[3]);
    }
  }
#pragma unroll
  for (int j = 0; j < BASE_GROUPS; j++)
#pragma unroll
    for (int n = 0; n < LANE_HEADS; n++) q.base[j][n] = (own_sum(c, n, j) + own_sum(other, n, j)) * q.back[n];
}

// Queries times the scales of a group of the page's tokens, and q . min.
DEV void load_group(ChannelFragment& q, const u8* page_head, int group, int lane) {
  const ChannelQuery& sh = *q.shared;
  const u8* meta = page_head + Key::SCALE_OFFSET + group * D * 4;
  q.group = group;
  if (group / BASE_GROUPS * BASE_GROUPS != q.bases) load_bases(q, page_head, group / BASE_GROUPS * BASE_GROUPS, lane);
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    u32 scale[4];
    load_words<4>(scale, meta + ((lane & 3) * (D / 4) + 8 * key_block(i, lane & 3)) * 2);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      u32 y[4];
      load_words<4>(y, (const u8*)sh.scaled[n][i][lane]);
#pragma unroll
      for (int j = 0; j < 4; j++) q.k[n][4 * i + j] = mul_fp16x2(y[j], scale[j]);
    }
  }
  if constexpr (Config::BOOSTED > 0) load_boosted(q, meta, page_head + Config::INDEX_OFFSET + group * D, lane);
}

// S += the high bits of a tile's boosted channels.
DEV void high_products(float c[COLUMN_TILES][4], const u8* page_head, int tile, int lane, const ChannelFragment& q) {
  constexpr int ROW = Config::BOOSTED / 4;
  static_assert(HIGH_STEPS <= 4, "a lane's bytes of a token are one word");
  u32 x[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u8* p = page_head + Config::HIGH_OFFSET + (tile * 16 + r * 8 + (lane >> 2)) * ROW + (lane & 3) * HIGH_STEPS;
    if constexpr (HIGH_STEPS == 2 && ROW % 2 == 0) x[r] = *(const u16*)p;
    else if constexpr (HIGH_STEPS == 4 && ROW % 4 == 0) x[r] = *(const u32*)p;
    else {
      x[r] = 0u;
#pragma unroll
      for (int u = 0; u < HIGH_STEPS; u++) x[r] |= (u32)p[u] << 8 * u;
    }
  }
#pragma unroll
  for (int u = 0; u < HIGH_STEPS; u++) {
    const u32 y = __byte_perm(x[0], 0u, 0x4040 + 0x101 * u), z = __byte_perm(x[1], 0u, 0x4040 + 0x101 * u);  // the byte in both halves
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
      mma_fp16(c[n], y & 0x000C0003u, z & 0x000C0003u, y & 0x00C00030u, z & 0x00C00030u, q.high[n][2 * u], q.high[n][2 * u + 1]);
  }
}

// S of N tiles of a page in log2, less m. Tiles of one group go side by side: their accumulators do not wait for each other.
template <int N> DEV void page_scores(const u8* page_head, int tile, int lane, ChannelFragment& q, const OnlineSoftmax& softmax, float cap, float s[N][LANE_HEADS][2]) {
  constexpr int T = N < GROUP_TILES ? N : GROUP_TILES;
#pragma unroll
  for (int first = 0; first < N; first += T) {
    const int group = (tile + first) / GROUP_TILES;
    if (group != q.group) load_group(q, page_head, group, lane);
    float c[T][COLUMN_TILES][4];
    KeyCodes codes[T];
#pragma unroll
    for (int i = 0; i < T; i++) {
      codes[i].load(page_head, tile + first + i, lane);
      order_blocks(codes[i], lane & 3);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < D / 8; k += 2)
#pragma unroll
      for (int i = 0; i < T; i++) {
        const u32 a0 = codes[i].get(0, k), a1 = codes[i].get(1, k), a2 = codes[i].get(0, k + 1), a3 = codes[i].get(1, k + 1);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) mma_fp16(c[i][n], a0, a1, a2, a3, q.k[n][k], q.k[n][k + 1]);
      }
#pragma unroll
    for (int i = 0; i < T; i++) {
      if constexpr (Config::BOOSTED > 0) high_products(c[i], page_head, tile + first + i, lane, q);
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float base = BASE_GROUPS > 1 && group % 2 ? q.base[BASE_GROUPS - 1][n] : q.base[0][n];
          const float x = fmaf(own_sum(c[i], n, r), q.factor[n], SOFTCAP ? base + q.mean_logit[n] : base - softmax.m[n]);
          s[first + i][n][r] = SOFTCAP ? soft_cap(x, softmax.m[n], cap) : x;
        }
    }
  }
}

using PageQuery = Select<Config::ROTATED_KEYS, RotatedChannelQuery, ChannelQuery>;
using PageFragment = Select<Config::ROTATED_KEYS, RotatedChannelFragment, ChannelFragment>;

constexpr int MIXED_TILES = PAIRED && CHUNK_TILES > 1 && !Config::ROTATED_KEYS ? 2 : 1;

// Attends to MIXED_TILES tiles of which some tokens have keys, from the keys-th token on, or values, from the values-th on, in the overlay.
DEV void attend_mixed(const DecodeArguments& a, const u8* page_head, int tile, int at, int first, int last, int keys, int values, s64 overlay_row, int head, int lane,
                      PageFragment& q, OnlineSoftmax& softmax) {
  float s[MIXED_TILES][LANE_HEADS][2];
  if (at < keys) page_scores<MIXED_TILES>(page_head, tile, lane, q, softmax, a.cap, s);
  mask_scores<MIXED_TILES>(s, at, first, min(keys, last), lane);
  if (at + 16 * MIXED_TILES > keys && keys < last) {
    float x[MIXED_TILES][LANE_HEADS][2];
    OverlayKeys<MIXED_TILES> full;
    full.load(a, at, max(keys, first), last, overlay_row, head, lane);
    overlay_scores<MIXED_TILES>(full, a, at, max(keys, first), last, lane, *q.shared, q.shared->rows, softmax, x);
#pragma unroll
    for (int i = 0; i < MIXED_TILES; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) s[i][n][0] = fmaxf(s[i][n][0], x[i][n][0]), s[i][n][1] = fmaxf(s[i][n][1], x[i][n][1]);
  }
  PageValues<MIXED_TILES> packed;
  const auto load = [&](float norm) {  // the largest scale times norm
    load_scales_of(packed, page_head, tile, lane, norm);
    return mask_scales_of(packed, at, first, min(values, last), lane, norm);
  };
  softmax.update<MIXED_TILES>(s, load(softmax.norm), load);
  if (at + 16 * MIXED_TILES > values && values < last) {
    float x[MIXED_TILES][LANE_HEADS][2];
#pragma unroll
    for (int i = 0; i < MIXED_TILES; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) x[i][n][r] = at + i * 16 + r * 8 + (lane >> 2) >= values ? s[i][n][r] : 0.f;
    OverlayProbs<MIXED_TILES> p;
    p.set(x, lane >> 2);
#pragma unroll
    for (int i = 0; i < MIXED_TILES; i++) {
      OverlayValues v;
      v.load(a, at, i, max(values, first), last, overlay_row, head, lane);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
          float c[4] = {0.f, 0.f, 0.f, 0.f};
          v.add<p.PARTS>(c, k, p.p[i][n]);
          const float y = softmax.norm * Values::code_step(2 * k), z = softmax.norm * Values::code_step(2 * k + 1);
          softmax.acc[n][k][0] = fmaf(c[0], y, softmax.acc[n][k][0]), softmax.acc[n][k][1] = fmaf(c[1], y, softmax.acc[n][k][1]);
          softmax.acc[n][k][2] = fmaf(c[2], z, softmax.acc[n][k][2]), softmax.acc[n][k][3] = fmaf(c[3], z, softmax.acc[n][k][3]);
        }
    }
  }
  packed.accumulate(softmax, s, page_head, tile, lane, []() {});
}

struct ChannelPages {
  using Shared = PageQuery;
  using Ring = PageRing;

  PageFragment q;
  const u8* page_head;

  // The angles inside a chunk, once: queries are loaded later, with a barrier.
  DEV static void load_codebooks(int& loaded, u8* dynamic, const DecodeArguments& a, int) {
    if constexpr (Config::ROTATED_KEYS) {
      if (loaded < 0)
        for (int i = threadIdx.x; i < ANGLE_WORDS / 4; i += WARPS * 32) ((uint4*)(dynamic + Config::ANGLE_OFFSET))[i] = a.angles[i];
      loaded = 0;
    }
  }
  DEV void load_query(PageQuery& from, int lane, float scale) { ::load_query(q, from, lane, scale); }
  DEV void begin(PageRing&, const u8* dynamic, bool, int) {
    q.angles = (const u32*)(dynamic + Config::ANGLE_OFFSET);
  }
  DEV void enter(PageRing& ring, bool) {
    ring.await();
    page_head = ring.bytes + ring.stage * PAGE_HEAD_BYTES;
    ring.advance();
    q.group = q.bases = -1;
  }
  static constexpr bool EARLY_REFILL = false;  // keys and values of a page may come from the page and the overlay
  // As TokenwisePages.
  template <class Refill> DEV void attend(const DecodeArguments& a, const PackedRange& w, int head, int tile, int at, int first, int last, int lane, bool, OnlineSoftmax& softmax, Refill) {
    q.enter_chunk(a, at, lane);
    if (at + 16 * CHUNK_TILES <= min(w.keys, w.values) || w.keys == w.values) {
      attend_chunk(a, w, page_head, tile, at, first, last, lane, softmax, [&](float s[CHUNK_TILES][LANE_HEADS][2]) { page_scores<CHUNK_TILES>(page_head, tile, lane, q, softmax, a.cap, s); }, []() {}, []() {});
    } else {
#pragma unroll 1
      for (int i = 0; i < CHUNK_TILES; i += MIXED_TILES)
        if (at + 16 * (i + MIXED_TILES) > first && at + 16 * i < last)
          attend_mixed(a, page_head, tile + i, at + 16 * i, first, last, w.keys, w.values, w.overlay_row, head, lane, q, softmax);
    }
  }
};
