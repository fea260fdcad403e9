// Stores of a tile: codes to words of the page in registers (page_codes.cuh says where they lie), and rows to the overlay.

#pragma once
#include "include/page_codes.cuh"
#include "include/token_tile.cuh"

DEV constexpr u32 ones(int count, int apart) {  // `count` set bits, `apart` bits apart
  u32 x = 0;
  for (int i = 0; i < count; i++) x |= 1u << (i * apart);
  return x;
}

// Stores the held rows of tokens that the overlay holds. `mine` is the place of the owned one.
template <class S> DEV void store_overlay(const TokenTile<S>& tile, const AppendArguments& a, int head, s64 mine) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS, SHARE = TokenTile<S>::SHARE;
  if (!__any_sync(FULL, mine >= 0)) return;
  s64 at[ROWS];
  tile.broadcast_rows(mine, at);
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (at[r] >= 0) {
      const s64 row = (at[r] * Config::KV_HEADS + head) * D;
      if constexpr (S::WINDOW_TYPE == ElementType::FP8) {  // of values, which have one band
        static_assert(!S::BANDED || S::AllBands::COUNT == 1, "a lane's numbers are neighbours");
        float x[N];
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = tile.x[r][i] * tile.factor(r);
        store_fp8<N>((u8*)S::overlay(a) + row + tile.share() * N, x);
        continue;
      }
      u32 w[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; i++) w[i] = pair_of<S::WINDOW_TYPE>(tile.x[r][2 * i] * tile.factor(r), tile.x[r][2 * i + 1] * tile.factor(r));
      u16* to = (u16*)S::overlay(a) + row;
      if constexpr (S::BANDED) S::AllBands::each([&](auto band) {
        using B = decltype(band);
        store_words<B::WIDTH / SHARE / 2>((u8*)(to + B::FIRST + tile.share() * (B::WIDTH / SHARE)), w + B::FIRST / SHARE / 2);
      });
      else store_words<N / 2>((u8*)(to + tile.share() * N), w);
    }
}

// The same of keys as the model gave them, of the tile that begins at token `first`.
template <class S> DEV void store_raw_overlay(const TokenTile<S>& tile, const AppendArguments& a, int first, int head, s64 mine) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  if (!__any_sync(FULL, mine >= 0)) return;
  s64 at[ROWS];
  tile.broadcast_rows(mine, at);
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (at[r] >= 0) {
      u32 w[N / 2];
      load_words<N / 2>(w, (const u8*)S::rows(a) + ((s64)(first + tile.token(r)) * S::stride(a) + head * D + tile.share() * N) * 2);
#pragma unroll
      for (int i = 0; i < N / 2; i++) w[i] = overlay_word<S::IN_TYPE>(w[i]);
      store_words<N / 2>((u8*)S::overlay(a) + ((at[r] * Config::KV_HEADS + head) * D + tile.share() * N) * 2, w);
    }
}

// Words of codes from a coder for the low halves and one for the high halves: of keys, even and odd channels of one row, of values, two rows.
// bits(x) is the code on top of base(), which is subtracted once a word.
template <class S, int WORDS, class Coder> DEV void code_words(u32* w, const Coder& low_, const Coder& high_, const float* x_low, const float* x_high) {
  constexpr int PER = 16 / S::BITS;
  constexpr u32 HALF = 0xFFFFu / ((1 << S::BITS) - 1);  // a one at every place of a half
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    w[k] = 0u - low_.base() * HALF - (high_.base() * HALF << 16);
#pragma unroll
    for (int s = 0; s < PER; s++) {
      const int i = k * PER + s;
      w[k] += low_.bits(x_low[S::KEY ? 2 * i : i]) << (s * S::BITS);
      w[k] += high_.bits(x_high[S::KEY ? 2 * i + 1 : i]) << (16 + s * S::BITS);
    }
  }
}

template <class S> constexpr int ROW_WORDS = D * S::BITS / 128;  // of a lane: one token's keys, or two tokens' values

// The words of lane (g, t) of the tile of a slot; second: tokens 8 to 15 of the tile.
template <class S> DEV u32* lane_words(u8* page_head, s64 slot, int g, int t, int second) {
  return (u32*)(page_head + S::OFFSET) + ((PagePlace(slot).tile * 8 + g) * 4 + t) * (2 * ROW_WORDS<S>) + second * ROW_WORDS<S>;
}

// --- three bits ---------------------------------------------------------------------------------------------------------------

// Eight codes, of every STEP-th number, in the nibbles of a word.
template <int STEP, class Coder> DEV u32 code_nibbles(const Coder& coder, const float* x) {
  u32 w = 0u - coder.base() * 0x11111111u;
#pragma unroll
  for (int s = 0; s < 8; s++) w += coder.bits(x[s * STEP]) << (4 * s);
  return w;
}
// Their two low bits in 16 bits, and their third bits in 8.
DEV u32 low_plane(u32 w) {
  w &= 0x33333333u, w = (w | w >> 2) & 0x0F0F0F0Fu, w = (w | w >> 4) & 0x00FF00FFu;
  return (w | w >> 8) & 0xFFFFu;
}
DEV u32 third_plane(u32 w) {
  w = w >> 2 & 0x11111111u, w = (w | w >> 3) & 0x03030303u, w = (w | w >> 6) & 0x000F000Fu;
  return (w | w >> 12) & 0xFFu;
}

// Stores the codes of a band B of three bits of the held key row r.
template <class S, class B, class Coder> DEV void store_three_bit_keys(const TokenTile<S>& tile, const AppendArguments& a, s64 slot, int head, int r, const Coder& coder) {
  constexpr int WORDS = B::WIDTH / 64, FROM = B::FIRST / 4;  // of a row: words of low bits, bytes of third bits in each half of a word
  static_assert(B::WIDTH % 64 == 0 && (WORDS == 1 || WORDS % 2 == 0), "a lane has whole bytes");
  u32 w[WORDS], third[2][WORDS];
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    const float* x = tile.x[r] + FROM + 16 * k;
    const u32 even = code_nibbles<2>(coder, x), odd = code_nibbles<2>(coder, x + 1);
    w[k] = low_plane(even) | low_plane(odd) << 16, third[0][k] = third_plane(even), third[1][k] = third_plane(odd);
  }
  if (slot < 0) return;
  u8* page_head = page_head_of(a, slot, head);
  const int lane = (PagePlace(slot).tile * 8 + (int)(slot % 8)) * 4 + tile.t, second = (int)(slot % 16 / 8);
  store_words<WORDS>(page_head + B::OFFSET + (lane * 2 + second) * (4 * WORDS), w);
  u8* to = page_head + B::HIGH_OFFSET + lane * (4 * WORDS);
#pragma unroll
  for (int k = 0; k < WORDS; k += 2)
    if constexpr (WORDS == 1) to[second] = (u8)third[0][0], to[second + 2] = (u8)third[1][0];
    else ((u32*)to)[second * (WORDS / 2) + k / 2] = third[0][k] | third[0][(k + 1) % WORDS] << 8 | third[1][k] << 16 | third[1][(k + 1) % WORDS] << 24;
}
// Stores codes of three bits of values that are held as keys are, as store_value_rows does. coder(r) codes the held row r.
template <class S, class F> DEV void store_three_bit_value_rows(const TokenTile<S>& tile, const AppendArguments& a, int first, int head, F coder) {
  constexpr int WORDS = D / 64, THIRD = D / 128;  // of a token and eighth, in its half of them
  static_assert(S::BITS == 3 && D % 128 == 0, "a lane has whole halves of words");
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const s64 slot = tile_slot(a, first, tile.token(r)), at = max(slot, (s64)0);
    const auto by = coder(r);
    const u8* page_head = page_head_of(a, at, head);
    const int lane = (PagePlace(at).tile * 8 + 2 * tile.t) * 4 + (int)(at % 8 / 2), second = (int)(at % 16 / 8);
    u16* to = (u16*)(page_head + S::OFFSET) + (lane * 2 + second) * (2 * WORDS) + at % 2;
    u16* third = (u16*)(page_head + S::HIGH_OFFSET) + (lane * 2 + second) * (2 * THIRD) + at % 2;
#pragma unroll
    for (int k = 0; k < 2 * WORDS; k += 2) {
      const u32 one = code_nibbles<1>(by, tile.x[r] + 8 * k), two = code_nibbles<1>(by, tile.x[r] + 8 * k + 8);
      const int eighth = k / WORDS, j = k % WORDS;  // the next eighth is that of the next g of the page's order, four lanes of words on
      if (slot >= 0) {
        to[eighth * (16 * WORDS) + j * 2] = (u16)low_plane(one), to[eighth * (16 * WORDS) + j * 2 + 2] = (u16)low_plane(two);
        third[eighth * (16 * THIRD) + j] = (u16)(third_plane(one) | third_plane(two) << 8);
      }
    }
  }
}

// --- keys ---------------------------------------------------------------------------------------------------------------------

// Stores affine codes of keys. coder(r) codes the held row r.
template <class S, class F> DEV void store_keys(const TokenTile<S>& tile, const AppendArguments& a, int first, int head, F coder) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const s64 slot = tile_slot(a, first, tile.token(r));
    u32 w[ROW_WORDS<S>];
    code_words<S, ROW_WORDS<S>>(w, coder(r), coder(r), tile.x[r], tile.x[r]);
    if (slot >= 0) store_words<ROW_WORDS<S>>((u8*)lane_words<S>(page_head_of(a, slot, head), slot, (int)(slot % 8), tile.t, (int)(slot % 16 / 8)), w);
  }
}

// Stores the codes of a band B of the held key row r. A row of an odd number of bytes ends inside a word, which it shares with the other row.
template <class S, class B, class Coder> DEV void store_key_band(const TokenTile<S>& tile, const AppendArguments& a, s64 slot, int head, int r, const Coder& coder) {
  constexpr int PER = 16 / B::BITS, PAIRS = B::WIDTH / 8, BYTES = B::WIDTH * B::BITS / 64, COUNT = (BYTES + 1) / 2, FROM = B::FIRST / 4;
  u32 w[COUNT];
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    constexpr u32 FILLED = ones(BYTES % 2 ? PER / 2 : PER, B::BITS), WHOLE = ones(PER, B::BITS);
    const u32 base = coder.base() * (k == COUNT - 1 ? FILLED : WHOLE);
    w[k] = 0u - base - (base << 16);
#pragma unroll
    for (int s = 0; s < PER; s++) {
      const int i = k * PER + s;
      if (i < PAIRS) {
        w[k] += coder.bits(tile.x[r][FROM + 2 * i]) << (s * B::BITS);
        w[k] += coder.bits(tile.x[r][FROM + 2 * i + 1]) << (16 + s * B::BITS);
      }
    }
  }
  if (slot < 0) return;
  u8* to = page_head_of(a, slot, head) + B::OFFSET + ((PagePlace(slot).tile * 8 + slot % 8) * 4 + tile.t) * (4 * BYTES);
  const int second = (int)(slot % 16 / 8);
  if constexpr (BYTES % 2 == 0) {
    store_words<COUNT>(to + second * (2 * BYTES), w);
  } else {
#pragma unroll
    for (int i = 0; i < BYTES; i++) {
      const int byte = second * BYTES + i;
      to[byte / 2 * 4 + byte % 2] = (u8)(w[i / 2] >> (i % 2 * 8)), to[byte / 2 * 4 + byte % 2 + 2] = (u8)(w[i / 2] >> (16 + i % 2 * 8));
    }
  }
}

// --- values -------------------------------------------------------------------------------------------------------------------

// Stores codes of values that are held as keys are: the lane has a quarter of a row, two eighths of the page's order. Neighbouring tokens share words,
// whose halves lanes g and g + 1 store by the same instruction. coder(r) codes the held row r.
template <class S, class F> DEV void store_value_rows(const TokenTile<S>& tile, const AppendArguments& a, int first, int head, F coder) {
  constexpr int PER = 16 / S::BITS;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const s64 slot = tile_slot(a, first, tile.token(r));
    const auto by = coder(r);
    u16* to = (u16*)lane_words<S>(page_head_of(a, max(slot, (s64)0), head), max(slot, (s64)0), 2 * tile.t, (int)(slot % 8 / 2), (int)(slot % 16 / 8)) + slot % 2;
#pragma unroll
    for (int k = 0; k < 2 * ROW_WORDS<S>; k++) {
      u32 half = 0u - by.base() * ones(PER, S::BITS);
#pragma unroll
      for (int s = 0; s < PER; s++) half += by.bits(tile.x[r][k * PER + s]) << (s * S::BITS);
      // the next eighth is that of the next g of the page's order, four lanes of words on
      if (slot >= 0) to[k / ROW_WORDS<S> * (16 * ROW_WORDS<S>) + k % ROW_WORDS<S> * 2] = (u16)half;
    }
  }
}

DEV bool shares_words(s64 one, s64 two) { return one >= 0 && one % 2 == 0 && two == one + 1; }  // an even slot and the next one

template <class S> DEV u32* pair_words(const TokenTile<S>& tile, const AppendArguments& a, int head, s64 slot) {
  return lane_words<S>(page_head_of(a, slot, head), slot, tile.g, (int)(slot % 8 / 2), (int)(slot % 16 / 8));
}
// Stores one of the two tokens of w: half 0 is the low one.
template <class S> DEV void store_half(const TokenTile<S>& tile, const AppendArguments& a, int head, s64 slot, const u32* w, int half) {
  u16* to = (u16*)pair_words(tile, a, head, slot) + slot % 2;
#pragma unroll
  for (int i = 0; i < ROW_WORDS<S>; i++) to[2 * i] = (u16)(w[i] >> (16 * half));
}
// Stores the words w [2][ROW_WORDS] of the four held tokens where a pair of them does not share words of the page: a sequence may begin at an
// odd slot, and then a lane's second token shares its words with the next lane's first one.
template <class S> DEV void store_odd_pairs(const TokenTile<S>& tile, const AppendArguments& a, int first, int head, const s64* slot, const u32 (*w)[ROW_WORDS<S>]) {
  const int lane = tile.lane;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u32 crossed[ROW_WORDS<S>];  // this lane's second token and the next lane's first one
#pragma unroll
    for (int i = 0; i < ROW_WORDS<S>; i++) {
      const u32 next = __shfl_sync(FULL, tile.t == 0 ? w[1][i] : w[k][i], (lane & 28) + (lane + 1) % 4);
      crossed[i] = __byte_perm(w[k][i], next, 0x5432);
    }
    const s64 one = slot[2 * k], two = slot[2 * k + 1];
    if (shares_words(one, two)) continue;
    if (shares_words(two, tile_slot(a, first, tile.token(2 * k) + 2))) store_words<ROW_WORDS<S>>((u8*)pair_words(tile, a, head, two), crossed);
    else if (two >= 0) store_half(tile, a, head, two, w[k], 1);
    if (one >= 0 && !shares_words(tile_slot(a, first, tile.token(2 * k) - 1), one)) store_half(tile, a, head, one, w[k], 0);
  }
}
// Stores codes of values. coder(r) codes the held row r.
template <class S, class F> DEV void store_values(const TokenTile<S>& tile, const AppendArguments& a, int first, int head, F coder) {
  s64 slot[4];
  u32 w[2][ROW_WORDS<S>];
#pragma unroll
  for (int r = 0; r < 4; r++) slot[r] = tile_slot(a, first, tile.token(r));
#pragma unroll
  for (int k = 0; k < 2; k++) {
    code_words<S, ROW_WORDS<S>>(w[k], coder(2 * k), coder(2 * k + 1), tile.x[2 * k], tile.x[2 * k + 1]);
    if (shares_words(slot[2 * k], slot[2 * k + 1])) store_words<ROW_WORDS<S>>((u8*)pair_words(tile, a, head, slot[2 * k]), w[k]);
  }
  if (__any_sync(FULL, !shares_words(slot[0], slot[1]) || !shares_words(slot[2], slot[3]))) store_odd_pairs(tile, a, first, head, slot, w);
}
