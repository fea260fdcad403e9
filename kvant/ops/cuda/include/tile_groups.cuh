// Tiles of append_tiles.cu whose rows have several scales, one for each of S::GROUPS groups of channels. A lane holds its share of the first group, of the
// second, and so on, where the page wants their codes (kvant/layout.py); values with a matrix are held as two eighths a lane, each so.

#pragma once
#include "include/tile_store.cuh"

template <class S> struct TileGroups {
  using Tile = TokenTile<S>;
  static constexpr int N = Tile::N, GROUP = D / S::GROUPS;
  static constexpr int PARTS = S::VALUES && S::KEY ? 2 : 1;       // eighths of a lane, or its one share
  static constexpr int CHUNK = GROUP / (S::VALUES ? 8 : 4);       // neighbouring channels of a lane
  static constexpr int READ_PARTS = S::VALUES ? 2 : 1;            // the same of what a lane reads, a quarter of a row

  DEV static constexpr int of(int i) { return i % (N / PARTS) / CHUNK; }  // group of the held number i
  DEV static int channel(int share, int i) { return of(i) * GROUP + (share * PARTS + i / (N / PARTS)) * CHUNK + i % CHUNK; }

  // Reads lane t's words of a row without a matrix.
  DEV static void read(u32* w, const u8* row, int t) {
    constexpr int WORDS = CHUNK / 2;  // of a chunk; the chunks of a group are neighbours
#pragma unroll
    for (int j = 0; j < S::GROUPS; j++) {
      u32 both[READ_PARTS * WORDS];
      load_words<READ_PARTS * WORDS>(both, row + (j * GROUP + t * READ_PARTS * CHUNK) * 2);
#pragma unroll
      for (int i = 0; i < READ_PARTS * WORDS; i++) w[i / WORDS * (READ_WORDS / READ_PARTS) + j * WORDS + i % WORDS] = both[i];
    }
  }
  DEV static constexpr int read_group(int word) { return word % (READ_WORDS / READ_PARTS) / (CHUNK / 2); }

  // The range [least, most] of group j of the owned row.
  DEV static void range(const Tile& tile, const u32 (*w)[READ_WORDS], int j, float& least, float& most) {
    constexpr int TYPE = S::IN_TYPE, ROWS = Tile::AS_READ ? 2 : Tile::ROWS;
    float low_[ROWS], high_[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if constexpr (Tile::AS_READ) {
        u32 a = w[r][j * (CHUNK / 2)], b = a;
#pragma unroll
        for (int i = 0; i < READ_WORDS; i++)
          if (read_group(i) == j) a = pair_min<TYPE>(a, w[r][i]), b = pair_max<TYPE>(b, w[r][i]);
        low_[r] = fminf(low<TYPE>(a), high<TYPE>(a)), high_[r] = fmaxf(low<TYPE>(b), high<TYPE>(b));
      } else {
        low_[r] = high_[r] = tile.x[r][j * CHUNK];
#pragma unroll
        for (int i = 0; i < N; i++)
          if (of(i) == j) low_[r] = fminf(low_[r], tile.x[r][i]), high_[r] = fmaxf(high_[r], tile.x[r][i]);
      }
    }
    least = tile.reduce_rows(low_, [](float a, float b) { return fminf(a, b); }) * tile.FACTOR;
    most = tile.reduce_rows(high_, [](float a, float b) { return fmaxf(a, b); }) * tile.FACTOR;
  }
  // x = HADAMARD_SCALE x where nothing has been subtracted; the overlay wants it so.
  DEV static void scale(Tile& tile) {
    if constexpr (S::CENTROIDS > 0 && !S::MEAN && S::MATRIX_PARTS == 0 && S::HADAMARD > 1)
#pragma unroll
      for (int i = 0; i < Tile::ROWS * N; i++) tile.x[i / N][i % N] *= S::HADAMARD_SCALE;
  }
  DEV static void subtract_centroids(Tile& tile, const AppendArguments& a, int first, int head) {
#pragma unroll
    for (int r = 0; r < Tile::ROWS; r++)
#pragma unroll
      for (int i = 0; i < N; i += CHUNK) subtract_centroid<S, CHUNK>(a, tile.x[r] + i, first + tile.token(r), head, channel(tile.share(), i));
  }
  DEV static void subtract_mean(Tile& tile, const float* mean) {  // in the order of channels
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float off = mean[channel(tile.share(), i)];
#pragma unroll
      for (int r = 0; r < Tile::ROWS; r++) tile.x[r][i] -= off;
    }
  }
  DEV static void store_overlay(const Tile& tile, const AppendArguments& a, int head, s64 mine) {
    if (!__any_sync(FULL, mine >= 0)) return;
    s64 at[Tile::ROWS];
    tile.broadcast_rows(mine, at);
#pragma unroll
    for (int r = 0; r < Tile::ROWS; r++)
      if (at[r] >= 0) {
        const s64 row = (at[r] * Config::KV_HEADS + head) * D;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          const s64 to = row + channel(tile.share(), i);
          const float x = tile.x[r][i] * tile.FACTOR, y = tile.x[r][i + 1] * tile.FACTOR;
          if constexpr (S::WINDOW_TYPE == ElementType::FP8) *(u16*)((u8*)S::overlay(a) + to) = (u16)fp8_pair(x, y);
          else *(u32*)((u16*)S::overlay(a) + to) = pair_of<S::WINDOW_TYPE>(x, y);
        }
      }
  }
};

// Words of the held rows' codes: of keys a row, of values two neighbouring rows a word; of values that are held as keys a row in halves of words.
template <class S> struct GroupWords {
  static constexpr bool HALVES = S::VALUES && S::KEY;
  static constexpr int PER = 16 / S::BITS, COUNT = HALVES ? 2 * ROW_WORDS<S> : ROW_WORDS<S>;
  u32 w[2][COUNT];

  DEV void clear() {
#pragma unroll
    for (int i = 0; i < 2 * COUNT; i++) w[i / COUNT][i % COUNT] = 0u;
  }
  // The held number whose code is at place i of the low (or, of keys, high) halves of a row's words.
  DEV static constexpr int element(int i, int half) {
    if (S::VALUES) return i;
    constexpr int BYTE = 8 / S::BITS;
    const int reg = i / (2 * BYTE) * BYTE + i % BYTE;
    return reg / 2 * 8 + (i / BYTE % 2 * 2 + reg % 2) * 2 + half;
  }
  // Adds the codes of group j of row r: bits(x) is the code on top of base(), which is subtracted once a word.
  template <class Coder> DEV void add(const TokenTile<S>& tile, int r, int j, const Coder& coder) {
    const int row = S::VALUES && !HALVES ? r / 2 : r, up = S::VALUES && !HALVES ? r % 2 * 16 : 0;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      u32 ones = 0u;  // of this group's places
#pragma unroll
      for (int s = 0; s < PER; s++)
#pragma unroll
        for (int half = 0; half < (S::VALUES ? 1 : 2); half++) {
          const int e = element(k * PER + s, half), shift = s * S::BITS + 16 * half + up;
          if (TileGroups<S>::of(e) == j) ones += 1u << shift, w[row][k] += coder.bits(tile.x[r][e]) << shift;
        }
      w[row][k] -= coder.base() * ones;
    }
  }
  DEV void store(const TokenTile<S>& tile, const AppendArguments& a, int first, int head) const {
    if constexpr (HALVES) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const s64 slot = tile_slot(a, first, tile.token(r)), there = max(slot, (s64)0);
        u16* to = (u16*)lane_words<S>(page_head_of(a, there, head), there, 2 * tile.t, (int)(slot % 8 / 2), (int)(slot % 16 / 8)) + slot % 2;
#pragma unroll
        for (int k = 0; k < COUNT; k++)  // as store_value_rows
          if (slot >= 0) to[k / ROW_WORDS<S> * (16 * ROW_WORDS<S>) + k % ROW_WORDS<S> * 2] = (u16)w[r][k];
      }
    } else if constexpr (S::VALUES) {
      s64 slot[4];
#pragma unroll
      for (int r = 0; r < 4; r++) slot[r] = tile_slot(a, first, tile.token(r));
#pragma unroll
      for (int k = 0; k < 2; k++)
        if (shares_words(slot[2 * k], slot[2 * k + 1])) store_words<ROW_WORDS<S>>((u8*)pair_words(tile, a, head, slot[2 * k]), w[k]);
      if (__any_sync(FULL, !shares_words(slot[0], slot[1]) || !shares_words(slot[2], slot[3]))) store_odd_pairs(tile, a, first, head, slot, w);
    } else {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const s64 slot = tile_slot(a, first, tile.token(r));
        if (slot >= 0) store_words<ROW_WORDS<S>>((u8*)lane_words<S>(page_head_of(a, slot, head), slot, (int)(slot % 8), tile.t, (int)(slot % 16 / 8)), w[r]);
      }
    }
  }
};
