// Shapes of decode attention, derived from Config.
//
// S^T = K Q^T and O^T = V^T P^T: tokens (then channels) fill the 16 rows of an MMA, the query heads of a KV head its 8 columns. With
// lane = 4 g + t, a lane holds rows g and g + 8 and columns 2t and 2t + 1 of an accumulator.

#pragma once
#include "codecs/tokenwise.cuh"
#include "codecs/group_keys.cuh"
#include "codecs/levels.cuh"
#include "codecs/product_vq.cuh"
#include "include/copies.cuh"
#include "include/hadamard.cuh"

using Key = Config::Key;
using Value = Config::Value;
using Keys = Key::Operand;   // KeyPlanes<...> or CentroidKeys<...>: what registers of the query operand are multiplied by
using Values = Value::Codes;  // ValueCodes<...>, LevelValues<...> or CentroidValues<...>

constexpr int D = Config::HEAD_DIM, TILE_HEADS = Config::TILE_HEADS, WARPS = Config::WARPS, STAGES = Config::STAGES;
constexpr bool PQ = Config::PQ, SOFTCAP = Config::SOFTCAP;
constexpr int ROPE_BLOCK = Config::ROPE_BLOCK, PAGE_HEAD_BYTES = Config::PAGE_HEAD_BYTES, VALUE_GROUPS = Config::VALUE_GROUPS;
constexpr int KEY_GROUPS = Config::KEY_GROUPS;
constexpr bool CHANNELWISE = Config::KEY_GROUP > 0;  // keys are coded per channel over groups of tokens
constexpr bool FUSED_QUERIES = Config::QUERY_TRANSFORM == QueryTransform::FUSED_MATRIX;
constexpr bool ROTATED_QUERIES = Config::QUERY_TRANSFORM == QueryTransform::ROTATED_MATRIX;
constexpr bool FUSED_OUTPUTS = Config::OUTPUT_TRANSFORM == OutputTransform::FUSED_MATRIX;
constexpr bool OVERLAY = Config::OVERLAY_TOKENS > 0;
constexpr bool RESIDUAL_KEYS = Key::CENTROIDS > 0, RESIDUAL_VALUES = Value::CENTROIDS > 0;  // codes are those of residuals (codecs/residual.cuh)
constexpr bool CENTROID_SUMS = Config::CENTROID_SUMS;  // P is summed by the value's centroid; the sums are multiplied by the centroids once, at the end (codecs/residual.cuh)
constexpr bool CENTROID_PRODUCTS = RESIDUAL_VALUES && !CENTROID_SUMS;  // P is multiplied by the centroids of every token
constexpr bool TOKENWISE = !CHANNELWISE && !PQ && !RESIDUAL_KEYS && !RESIDUAL_VALUES;
constexpr bool SCALED_PROBS = VALUE_GROUPS > 1 && !CHANNELWISE;  // P is multiplied by the scales of every group in float32 (codecs/scaled_values.cuh)

// TEAMS teams of WARPS warps of a CTA have work tiles of their own and share codebooks in shared memory: while one merges and begins, the others look up. A team is
// what elsewhere is a CTA; a CTA of one team is that team.
constexpr int TEAMS = Config::TEAMS;
DEV int team() { return TEAMS > 1 ? (int)threadIdx.x / (WARPS * 32) : 0; }
DEV void team_barrier() {
  if constexpr (TEAMS > 1) named_barrier(1 + team(), WARPS * 32);
  else __syncthreads();
}

constexpr int PAGE_TILES = Config::PAGE_TOKENS / 16;           // of 16 tokens
constexpr int CHUNK_TILES = Config::CHUNK_TILES;                // that a warp attends to at once
constexpr int OVERLAY_TILES = Config::OVERLAY_TILES;           // of the overlay that a warp attends to at once
// Several queries of a sequence are rows of one tile: row r of a KV head is query head r % QUERY_HEADS of query r / QUERY_HEADS.
constexpr int QUERIES = Config::QUERIES, QUERY_HEADS = Config::GROUP / QUERIES;
constexpr bool SHARED_OPERAND = Config::SHARED_OPERAND;
constexpr int HEAD_TILES = Config::KV_HEADS * Config::QUERY_TILES;
constexpr int LANE_HEADS = (TILE_HEADS + 3) / 4 == 3 ? 4 : (TILE_HEADS + 3) / 4;  // query heads of a lane: t, t + 4, ...
constexpr bool PAIRED = LANE_HEADS == 1;                       // up to four query heads leave half of the columns of P V idle: two tiles share them
constexpr int COLUMN_TILES = LANE_HEADS == 4 ? 2 : 1;          // tiles of 8 columns of P V
constexpr int ACC_TILES = PQ ? LANE_HEADS : COLUMN_TILES, ACC_STEPS = PQ ? D / 32 : D / 16;  // accumulators of P V: [ACC_TILES][ACC_STEPS][4]
// Largest magnitude of a query in the int8 operand, 128 high + low with both in signed bytes. high is rounded to nearest, so 127 * 128 + 63 = 16319
// would fit; it is 0.4 % less, so that the roundings of the largest element, of its reciprocal and of the product do not pass it.
constexpr float QUERY_TOP = 16250.f;
constexpr int GROUP_SHARE = D / VALUE_GROUPS / 8;              // channels of a lane in each group of channels with a scale
DEV constexpr int value_channel(int g, int element) { return element / GROUP_SHARE * (D / VALUE_GROUPS) + g * GROUP_SHARE + element % GROUP_SHARE; }

// With few scales a value and two tiles that share the columns of P V, the product of P and the minima (codecs/values.cuh) takes both tiles at once: row g is
// group g / 2 of the tile whose columns have the parity of g.
constexpr bool MINIMA_BY_TILE = PAIRED && VALUE_GROUPS > 1 && VALUE_GROUPS <= 4 && Config::VALUE_BANKS;
DEV constexpr int minima_row(int group, int parity) { return MINIMA_BY_TILE ? 2 * group + parity : group; }

// A page head in shared memory by its 32-bit address: the compiler adds the base of a pointer to every offset anew.
struct SharedBytes {
  u32 at;
  DEV SharedBytes operator+(int by) const { return {at + by}; }
};
template <int N> DEV void load_words(u32* w, SharedBytes p) {
  constexpr int EACH = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < N; i += EACH) load_shared<EACH>(w + i, p.at + 4 * i);
}

// Eight words of a lane, the lanes' words one after another: lanes 4 apart would read the same banks. Those whose g is odd (`second`) read the second half
// first; `w` has the halves in the order in which they are read.
constexpr bool CODE_BANKS = Config::CODE_BANKS;
DEV void load_halves(u32* w, SharedBytes p, int second) {
  load_words<4>(w, p + second * 16), load_words<4>(w + 4, p + (16 - second * 16));
}
DEV void swap_halves(u32* w, int second) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 x = w[i];
    w[i] = second ? w[i + 4] : x, w[i + 4] = second ? x : w[i + 4];
  }
}

// Scale and minimum (or zero point) of a token.
struct Scales {
  float scale, zero;
};
// Of rows g and g + 8 of a tile, which lie side by side: `place` counts tokens.
template <int KIND, int TYPE, class Section> DEV void load_scales(Scales* out, Section section, int place) {
  if constexpr (KIND == ScaleForm::NONE) {
    out[0] = out[1] = {1.f, 0.f};
  } else if constexpr (KIND == ScaleForm::SCALE) {
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

// --- RoPE blocks ----------------------------------------------------------------------------------------------------------

// Where keys are stored unrotated to the start of their RoPE block (ROPE_BLOCK > 0), every RoPE block has a query operand of its own, rotated
// back by the same angle.
constexpr int ROPE_TOKENS = ROPE_BLOCK ? ROPE_BLOCK : 1;

// The RoPE block of a token, counted from the one of the first token, and the token after its last one.
template <class A> DEV int rope_block_of(const A& a, int token) { return ROPE_BLOCK ? (token + a.first_position) / ROPE_TOKENS - a.first_position / ROPE_TOKENS : 0; }
template <class A> DEV int rope_block_end(const A& a, int token) { return ((token + a.first_position) / ROPE_TOKENS + 1) * ROPE_TOKENS - a.first_position; }
