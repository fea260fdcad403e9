// A tile of append_tiles.cu: 16 tokens of one head and stream, held by a warp. With lane = 4 g + t, as tensor cores number lanes:
//
//   read    lane (g, t) reads tokens g and g + 8, D / 4 channels each, as READ_WORDS words of two 16-bit numbers a token: the t-th quarter of them or, where rows are
//           multiplied, from every 32 channels the t-th eight
//   held    lane (g, t) holds ROWS rows of N channels, where the page wants their codes: of keys tokens g and g + 8, the t-th quarter of
//           the channels; of values tokens 2t, 2t + 1, 2t + 8 and 2t + 9, the g-th eighth
//   owned   every token is owned by lanes that compute its scale (where AS_READ, by the lanes that hold it). Of keys lane (g, t) owns token g + 8 (t / 2); of values, token
//           8 (lane / 16) + 2 t + (lane / 8) % 2
//
// For streams of bands, channels are in the order in which lanes hold them: a lane's share of the first band, of the second, and so on.

#pragma once
#include "codecs/encode_affine.cuh"
#include "include/append_stream.cuh"
#include "include/rows.cuh"

constexpr int READ_WORDS = D / 8;

template <class S> struct TokenTile {
  static constexpr bool KEY = S::KEY;
  static constexpr int SHARE = KEY ? 4 : 8;            // lanes that hold a row
  static constexpr int ROWS = SHARE / 2, N = D / SHARE;  // rows of a lane, and channels of each
  // Ranges of rows are read off the 16-bit numbers as they come: nothing is done to them before they are coded.
  static constexpr bool AS_READ = S::HADAMARD == 1 && !S::MATRIX_PARTS && !S::MEAN && S::SEARCH == 1 && !Config::CLIP && !S::CENTROIDS && !S::LEVELS;
  // A row is FACTOR * x: without a mean, the factor of the Hadamard is applied in range() and in the coder.
  static constexpr float FACTOR = S::MEAN || S::BANDED || S::CENTROIDS ? 1.f : S::HADAMARD_SCALE;

  // Rows of bfloat16 are multiplied as fp16, times a power of two of each. Where nothing is added to what comes out, they stay so: a row is unit[r] * FACTOR * x.
  static constexpr bool SCALED = S::IN_TYPE == ElementType::BF16 && S::MATRIX_PARTS > 1 && S::ROPE_BLOCK == 0;
  static constexpr bool KEEPS_UNIT = SCALED && !S::MEAN && !S::BANDED && !S::CENTROIDS && !S::LEVELS && S::GROUPS == 1;

  int lane, g, t;
  float x[ROWS][N], unit[ROWS];

  DEV int share() const { return KEY ? t : g; }  // which share of a row this lane holds
  DEV int token(int r) const { return KEY ? g + 8 * r : 8 * (r >> 1) + 2 * t + (r & 1); }  // of a held row, in the tile
  DEV int owned_token() const { return KEY || AS_READ ? g + 8 * (t >> 1) : 8 * (lane >> 4) + 2 * t + (lane >> 3 & 1); }
  DEV bool stores_scale() const { return (KEY || AS_READ ? t : g) % 2 == 0; }  // one of the two lanes that own a token

  // f(a or b, the same of the lane `apart` away): lanes without that bit keep a, lanes with it keep b.
  template <class F> DEV float reduce_two(float a, float b, int apart, F f) const {
    const bool second = lane & apart;
    return f(second ? b : a, __shfl_xor_sync(FULL, second ? a : b, apart));
  }
  // Reduces v [ROWS], a lane's parts of its rows, over the lanes that hold them; returns the result of the owned row.
  template <class F> DEV float reduce_rows(const float* v, F f) const {
    if constexpr (KEY || AS_READ) {
      const float both = reduce_two(v[0], v[1], 2, f);
      return f(both, __shfl_xor_sync(FULL, both, 1));
    } else {
      const float both = reduce_two(reduce_two(v[0], v[2], 16, f), reduce_two(v[1], v[3], 16, f), 8, f);
      return f(both, __shfl_xor_sync(FULL, both, 4));
    }
  }
  DEV float sum_rows(const float* v) const {
    return reduce_rows(v, [](float a, float b) { return a + b; });
  }
  // Of the held rows, v [ROWS], that of the owned one.
  DEV float owned(const float* v) const {
    if constexpr (KEY || AS_READ) return t & 2 ? v[1] : v[0];
    else return lane & 16 ? (lane & 8 ? v[ROWS - 1] : v[ROWS - 2]) : lane & 8 ? v[1] : v[0];
  }
  // What x is multiplied by: of a held row, and of the owned one.
  DEV float factor(int r) const {
    if constexpr (KEEPS_UNIT) return unit[r] * FACTOR;
    else return FACTOR;
  }
  DEV float owned_factor() const {
    if constexpr (KEEPS_UNIT) return owned(unit) * FACTOR;
    else return FACTOR;
  }
  // From the owned row to the held rows: v [ROWS].
  template <class T> DEV void broadcast_rows(T mine, T* v) const {
    if constexpr (KEY) {
      const T other = __shfl_xor_sync(FULL, mine, 2);
      v[0] = t & 2 ? other : mine, v[1] = t & 2 ? mine : other;
    } else {
#pragma unroll
      for (int r = 0; r < 4; r++) v[r] = __shfl_sync(FULL, mine, AS_READ ? 4 * (2 * t + (r & 1)) + (r & 2) : 8 * r + (lane & 7));
    }
  }

  // The range [least, most] of the owned row.
  DEV void range(const u32 (*w)[READ_WORDS], float& least, float& most) const {
    constexpr int TYPE = S::IN_TYPE;
    float low_[ROWS], high_[ROWS];
    if constexpr (AS_READ) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 a = w[r][0], b = w[r][0];
#pragma unroll
        for (int i = 1; i < READ_WORDS; i++) a = pair_min<TYPE>(a, w[r][i]), b = pair_max<TYPE>(b, w[r][i]);
        low_[r] = fminf(low<TYPE>(a), high<TYPE>(a)), high_[r] = fmaxf(low<TYPE>(b), high<TYPE>(b));
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        low_[r] = high_[r] = x[r][0];
#pragma unroll
        for (int i = 1; i < N; i++) low_[r] = fminf(low_[r], x[r][i]), high_[r] = fmaxf(high_[r], x[r][i]);
      }
    }
    least = reduce_rows(low_, [](float a, float b) { return fminf(a, b); }) * owned_factor();
    most = reduce_rows(high_, [](float a, float b) { return fmaxf(a, b); }) * owned_factor();
  }
};

DEV void load_vector(float* x, const float* p) {  // four floats
  const float4 v = *(const float4*)p;
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// What is looked up for the token that a lane owns, before its tile is multiplied: loads that wait for each other do so while rows are still on their way.
struct OwnedToken {
  s64 slot, place;  // where its codes go and its place in the overlay; -1 where there is none
  int rope_block;
};

// The slot of a token of the tile that begins at token `first`; -1 where there is none.
DEV s64 tile_slot(const AppendArguments& a, int first, int token) { return token >= 0 && token < 16 && first + token < a.tokens ? a.slot_mapping[first + token] : -1; }

template <class S> DEV OwnedToken look_up(const TokenTile<S>& tile, const AppendArguments& a, int first) {
  const int token = min(first + tile.owned_token(), a.tokens - 1);
  OwnedToken owned{tile_slot(a, first, tile.owned_token()), -1, 0};
  if constexpr (Config::OVERLAY_TOKENS > 0 || S::ROPE_BLOCK > 0) {
    NewToken found;
    found.load_of(a, likely_sequence(a, token));
    found.find(a, token, true);
    const s64 position = found.position(token);
    if constexpr (Config::OVERLAY_TOKENS > 0)
      if (owned.slot >= 0) owned.place = overlay_place(found.overlay_row, found.length, position);
    if constexpr (S::ROPE_BLOCK > 0) owned.rope_block = rope_block_of<S::ROPE_BLOCK>(a, (int)position);
  }
  return owned;
}
