// Appends prompts: does what append.cu does, for tiles of 16 tokens, with about a third of the instructions. include/token_tile.cuh says
// which lane holds what. The kernels need not write equal bytes: they round differently before they code (the order of sums, reciprocals for
// divisions), so a number at the border of two codes may get either, most of all with the bands of kvant-2. Each is held to the reference: fewer than 1e-4 of the bytes may differ (test_append_writes_what_the_reference_writes).
//
// Grid: one dimension; a warp takes a tile. CTAs take keys and values alternately. Where a stream has a matrix, a CTA has one head and some tiles of its
// keys and then of its values, and keeps the matrix in shared memory.

#pragma once
#include "codecs/encode_banded.cuh"
#include "include/copies.cuh"
#include "include/tile_groups.cuh"
#include "include/tile_store.cuh"
#include "include/tile_transform.cuh"
#include "kernels/append.cu"

// --- affine codes -------------------------------------------------------------------------------------------------------------

// The limits at which the held rows are clipped. Returns whether every row of the warp is known to reach beyond its limit at both ends.
template <class S> DEV bool clip_limits(const TokenTile<S>& tile, const Clip& clip, float* limit) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  if constexpr (S::KEY) {
    ClipSearch search[2];
    search[0].template begin<N, 1, 4>(tile.x[0], clip), search[1].template begin<N, 1, 4>(tile.x[1], clip);
    u32 least, most;
    narrow_search<N>(search, tile.x, clip, least, most);
    limit[0] = search[0].template finish<N, 1, 4>(tile.x[0], clip), limit[1] = search[1].template finish<N, 1, 4>(tile.x[1], clip);
    const bool one = fp16_low(most) >= limit[0] & -fp16_low(least) >= limit[0], two = fp16_high(most) >= limit[1] & -fp16_high(least) >= limit[1];
    return !__any_sync(FULL, !(one & two));
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; r++) limit[r] = clip_limit<N, 4, 32>(tile.x[r], clip);
    return false;
  }
}

// Clips rows; [least, most] becomes the range of the owned row. Where there are few codes, what lies beyond the range gets the code of its end anyway,
// and is left as it is; unless the range is so narrow that the end, rounded, is another code.
template <class S> DEV void clip_tile(TokenTile<S>& tile, const AppendArguments& a, const u32 (*w)[READ_WORDS], float& least, float& most) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  constexpr bool LEFT = S::BITS <= 4 && S::SEARCH == 1 && S::SCALE_FORM == ScaleForm::SCALE_MIN;
  const Clip clip = S::clip(a);
  float limit[ROWS];
  const bool beyond = clip_limits(tile, clip, limit);
  const float end = tile.owned(limit) * tile.owned_factor();
  least = -end, most = end;
  if (!beyond) {
    tile.range(w, least, most);
    least = fminf(fmaxf(least, -end), end), most = fminf(fmaxf(most, -end), end);
  }
  if (!LEFT || __any_sync(FULL, clip.drop && most - least <= end * 0.0625f))
#pragma unroll
    for (int r = 0; r < ROWS; r++) clip_row<N>(tile.x[r], limit[r]);
}

// Stores the codes of a tile of one width. coder(r) codes the held row r.
template <class S, class F> DEV void store_tile(const TokenTile<S>& tile, const AppendArguments& a, int first, int head, F coder) {
  if constexpr (S::BITS == 3 && !S::VALUES) {
#pragma unroll
    for (int r = 0; r < 2; r++)
      S::CodeBands::each([&](auto band) { store_three_bit_keys<S, decltype(band)>(tile, a, tile_slot(a, first, tile.token(r)), head, r, coder(r)); });
  } else if constexpr (S::BITS == 3) {
    store_three_bit_value_rows(tile, a, first, head, coder);
  } else if constexpr (!S::VALUES) {
    store_keys(tile, a, first, head, coder);
  } else if constexpr (S::KEY) {
    store_value_rows(tile, a, first, head, coder);
  } else {
    store_values(tile, a, first, head, coder);
  }
}

// Keys are unrotated for banded codes alone; of the others the overlay holds what is coded.
template <class S, class F> DEV void append_affine(TokenTile<S>& tile, const AppendArguments& a, u32 (*w)[READ_WORDS], const u8* matrix, int first, int head, F read_next) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  constexpr bool AS_READ = TokenTile<S>::AS_READ;
  OwnedToken owned;
  if constexpr (!S::MATRIX_PARTS) owned = look_up(tile, a, first);
  float least, most, scale[ROWS], reciprocal[ROWS], zero[ROWS];

  // Transform: x = x M or H x, less the mean.
  if constexpr (AS_READ) tile.range(w, least, most);
  if constexpr (S::MATRIX_PARTS > 0) {
    multiply(tile, a, w, matrix, owned, first, head);
  } else {
    apply_hadamard(tile, w, S::signs(a));
    if constexpr (S::MEAN) subtract_mean(tile, S::mean(a) + head * D);
  }
  if constexpr (S::CENTROIDS > 0) {
    TileGroups<S>::scale(tile);
    if constexpr (Config::OVERLAY_TOKENS > 0) store_overlay(tile, a, head, owned.place);
    TileGroups<S>::subtract_centroids(tile, a, first, head);
  }
  if constexpr (!AS_READ && !Config::CLIP) tile.range(w, least, most);
  if constexpr (Config::OVERLAY_TOKENS > 0 && !S::CENTROIDS) store_overlay(tile, a, head, owned.place);

  // Scale of the owned row.
  if constexpr (Config::CLIP) clip_tile(tile, a, w, least, most);
  const AffineScale best = search_affine_scale<S>(least, most, [&](const AffineScale& tried) {
    float squares[ROWS];
    tile.broadcast_rows(tried.reciprocal, reciprocal), tile.broadcast_rows(tried.zero, zero);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const AffineCoder<S::BITS, S::SCALE_FORM, false> coder(0.f, reciprocal[r], zero[r], tile.factor(r));
      squares[r] = 0.f;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float error = coder.error(tile.x[r][i]);
        squares[r] = fmaf(error, error, squares[r]);
      }
    }
    return tile.sum_rows(squares);
  });
  if (owned.slot >= 0 && tile.stores_scale()) store_scale(page_head_of(a, owned.slot, head), S::SCALE_OFFSET, S::SCALE_FORM, owned.slot, pair_of<S::SCALE_TYPE>(best.scale, best.zero));

  read_next();

  // Codes. Numbers as they were read need no exact rounding, nor do those that a product has rounded already.
  constexpr bool PRODUCT = S::MATRIX_PARTS > 0 && S::SCALE_FORM == ScaleForm::SCALE_MIN, EXACT = !AS_READ && !PRODUCT;
  tile.broadcast_rows(best.scale, scale), tile.broadcast_rows(best.reciprocal, reciprocal), tile.broadcast_rows(best.zero, zero);
  const auto coder = [&](int r) { return AffineCoder<S::BITS, S::SCALE_FORM, EXACT, PRODUCT>(scale[r], reciprocal[r], zero[r], tile.factor(r)); };
  store_tile(tile, a, first, head, coder);
}

// The same where GROUPS groups of a row's channels have a scale each: a group after the other.
template <class S, class F> DEV void append_groups(TokenTile<S>& tile, const AppendArguments& a, u32 (*w)[READ_WORDS], const u8* matrix, int first, int head, F read_next) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  constexpr bool PRODUCT = S::MATRIX_PARTS > 0 && S::SCALE_FORM == ScaleForm::SCALE_MIN, EXACT = !TokenTile<S>::AS_READ && !PRODUCT;
  using Groups = TileGroups<S>;
  OwnedToken owned;
  if constexpr (!S::MATRIX_PARTS) owned = look_up(tile, a, first);

  // Transform: x = x M, less the mean; or as it is. Then clip.
  if constexpr (S::MATRIX_PARTS > 0) {
    multiply(tile, a, w, matrix, owned, first, head);
  } else {
    static_assert(S::HADAMARD == 1, "channels are in the order of groups before a Hadamard");
    apply_hadamard(tile, w, nullptr);
    if constexpr (S::MEAN) Groups::subtract_mean(tile, S::mean(a) + head * D);
  }
  if constexpr (S::CENTROIDS > 0) Groups::scale(tile);
  if constexpr (Config::OVERLAY_TOKENS > 0) Groups::store_overlay(tile, a, head, owned.place);
  if constexpr (S::CENTROIDS > 0) Groups::subtract_centroids(tile, a, first, head);
  if constexpr (Config::CLIP) {
    float limit[ROWS];
    clip_limits(tile, S::clip(a), limit);
#pragma unroll
    for (int r = 0; r < ROWS; r++) clip_row<N>(tile.x[r], limit[r]);
  }

  read_next();

  // Scale of the owned row, and codes, of each group.
  GroupWords<S> words;
  words.clear();
#pragma unroll
  for (int j = 0; j < S::GROUPS; j++) {
    float least, most, scale[ROWS], reciprocal[ROWS], zero[ROWS];
    Groups::range(tile, w, j, least, most);
    const AffineScale best = search_affine_scale<S>(least, most, [&](const AffineScale& tried) {
      float squares[ROWS];
      tile.broadcast_rows(tried.reciprocal, reciprocal), tile.broadcast_rows(tried.zero, zero);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const AffineCoder<S::BITS, S::SCALE_FORM, false> coder(0.f, reciprocal[r], zero[r], tile.FACTOR);
        squares[r] = 0.f;
#pragma unroll
        for (int i = 0; i < N; i++)
          if (Groups::of(i) == j) {
            const float error = coder.error(tile.x[r][i]);
            squares[r] = fmaf(error, error, squares[r]);
          }
      }
      return tile.sum_rows(squares);
    });
    if (owned.slot >= 0 && tile.stores_scale())
      store_scale(page_head_of(a, owned.slot, head), S::SCALE_OFFSET + j * (Config::PAGE_TOKENS * 4), S::SCALE_FORM, owned.slot, pair_of<S::SCALE_TYPE>(best.scale, best.zero));
    tile.broadcast_rows(best.scale, scale), tile.broadcast_rows(best.reciprocal, reciprocal), tile.broadcast_rows(best.zero, zero);
#pragma unroll
    for (int r = 0; r < ROWS; r++) words.add(tile, r, j, AffineCoder<S::BITS, S::SCALE_FORM, EXACT, PRODUCT>(scale[r], reciprocal[r], zero[r], tile.FACTOR));
  }
  words.store(tile, a, first, head);
}

// --- codes of levels ------------------------------------------------------------------------------------------------------------

// The code of x is the place of the nearest level to x * factor: encode_levels of codecs/encode_rows.cuh.
template <class S> struct LevelCoder {
  float factor;
  DEV u32 bits(float x) const {
    const float unit = x * factor;
    const int before = S::Edges::count_below(__int_as_float(__float_as_int(fabsf(unit)) + !(unit > 0.f)));
    return (u32)(unit > 0.f ? S::LEVELS / 2 + before : S::LEVELS / 2 - 1 - before);
  }
  DEV u32 base() const { return 0u; }
};

template <class S, class F> DEV void append_levels(TokenTile<S>& tile, const AppendArguments& a, u32 (*w)[READ_WORDS], const u8* matrix, int first, int head, F read_next) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  OwnedToken owned;
  if constexpr (!S::MATRIX_PARTS) owned = look_up(tile, a, first);
  if constexpr (S::MATRIX_PARTS > 0) {
    multiply(tile, a, w, matrix, owned, first, head);
  } else {
    apply_hadamard(tile, w, S::signs(a));
    if constexpr (S::MEAN) subtract_mean(tile, S::mean(a) + head * D);
  }
  if constexpr (Config::OVERLAY_TOKENS > 0) store_overlay(tile, a, head, owned.place);
  float squares[ROWS], factor[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    squares[r] = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) squares[r] = fmaf(tile.x[r][i], tile.x[r][i], squares[r]);
  }
  read_next();
  const float norm = round_to<S::SCALE_TYPE>(fminf(sqrtf(tile.sum_rows(squares)) * tile.FACTOR, LARGEST<S::SCALE_TYPE>));
  if (owned.slot >= 0 && tile.stores_scale()) store_scale(page_head_of(a, owned.slot, head), S::SCALE_OFFSET, S::SCALE_FORM, owned.slot, pair_of<S::SCALE_TYPE>(norm, 0.f));
  tile.broadcast_rows(__fdiv_rn(tile.FACTOR, fmaxf(norm, TINY<S::SCALE_TYPE>)), factor);
  store_tile(tile, a, first, head, [&](int r) { return LevelCoder<S>{factor[r]}; });
}

// --- banded codes -------------------------------------------------------------------------------------------------------------

// Codes of evenly spaced levels around zero, x ~ scale * step * (code - TOP / 2), rounded as the AffineCoder of a product does it.
template <class B> struct BandCoder {
  static constexpr float TOP = B::TOP;
  float steps;  // of a number, times it
  DEV explicit BandCoder(float reciprocal) : steps(reciprocal * (1.f / __uint_as_float(B::STEP_BITS))) {}  // of the scale
  DEV float rounded(float x) const { return fmaf(fma_held(x, steps * (1.f / TOP), 0.5f), TOP, ROUNDER); }  // the code + ROUNDER
  DEV u32 bits(float x) const { return __float_as_uint(rounded(x)); }
  DEV u32 base() const { return __float_as_uint(ROUNDER); }
};
// The error of x under a scale, of either sign. Levels lie as far apart on both sides of every multiple of a power of two steps: ||x| - 2^(BITS - 2)| and so on folds
// them onto one.
template <class B> DEV float band_error(float x, float scale) {
  const float step = scale * __uint_as_float(B::STEP_BITS);
#pragma unroll
  for (int middle = 1 << B::BITS >> 2; middle; middle >>= 1) x = fabsf(x) - (float)middle * step;
  return fabsf(x) - 0.5f * step;
}
// Numbers that have been rounded already.
template <class B> struct RoundedBand {
  DEV explicit RoundedBand(float) {}
  DEV u32 bits(float x) const { return __float_as_uint(x); }
  DEV u32 base() const { return __float_as_uint(ROUNDER); }
};

template <int ROWS> struct RowSums {  // of every held row
  float of[ROWS];
  DEV RowSums() {
#pragma unroll
    for (int r = 0; r < ROWS; r++) of[r] = 0.f;
  }
  DEV void add(const RowSums& other, float factor) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) of[r] = fmaf(other.of[r], factor, of[r]);
  }
};

// Calls f(row, number, weight, mean) for every held number of band B. Weights are 1 and means 0 where they are not asked for.
template <class B, bool WEIGHTED, bool CENTRED, class Tile, class F>
DEV void each_number(Tile& tile, const float* weights, const float* mean, F f) {
#pragma unroll
  for (int i = B::FIRST / tile.SHARE; i < (B::FIRST + B::WIDTH) / tile.SHARE; i += 4) {
    float weight[4] = {1.f, 1.f, 1.f, 1.f}, off[4] = {0.f, 0.f, 0.f, 0.f};
    if constexpr (WEIGHTED) load_vector(weight, weights + i);
    if constexpr (CENTRED) load_vector(off, mean + i);
#pragma unroll
    for (int j = 0; j < 4 * tile.ROWS; j++) f(j / 4, tile.x[j / 4][i + j % 4], weight[j % 4], off[j % 4]);
  }
}

// The scale of the owned row, less `mean` where CENTRED, with the smallest weighted squared error, which goes to `least`.
template <bool CENTRED, class S> DEV float banded_scale(const TokenTile<S>& tile, const float* weights, const float* mean, float& least) {
  using Sums = RowSums<TokenTile<S>::ROWS>;
  Sums squares;
  S::CodeBands::each([&](auto band) {
    each_number<decltype(band), false, CENTRED>(tile, weights, mean, [&](int r, float x, float, float off) {
      const float y = x - off;
      squares.of[r] = fmaf(y, y, squares.of[r]);
    });
  });
  const float rms = sqrtf(__fdiv_rn(tile.sum_rows(squares.of), (float)S::CodeBands::CHANNELS));
  if constexpr (S::SEARCH == 1 && !S::FLAG) return round_to<S::SCALE_TYPE>(clamp_scale<S::SCALE_TYPE>(rms));  // nobody asks for the error
  return search_banded_scale<S>(rms, least, [&](float tried) {
    float scale[TokenTile<S>::ROWS];
    tile.broadcast_rows(tried, scale);
    Sums sums;
    S::CodeBands::each([&](auto band) {
      each_number<decltype(band), S::WEIGHTED, CENTRED>(tile, weights, mean, [&](int r, float x, float weight, float off) {
        const float error = band_error<decltype(band)>(x - off, scale[r]);
        sums.of[r] = fmaf(error * weight, error, sums.of[r]);
      });
    });
    return tile.sum_rows(sums.of);
  });
}

// unbiased_factor of the owned row. Numbers that have codes become them, on top of ROUNDER: nobody needs the numbers after it.
template <class S> DEV float row_unbiased_factor(TokenTile<S>& tile, const float* weights, const float* reciprocal, float scale) {
  using Sums = RowSums<TokenTile<S>::ROWS>;
  Sums reached, wanted;
  S::AllBands::each([&](auto band) {
    using B = decltype(band);
    Sums here;
    each_number<B, S::WEIGHTED, false>(tile, weights, nullptr, [&](int r, float& x, float weight, float) {
      const float weighted = x * weight;
      wanted.of[r] = fmaf(weighted, x, wanted.of[r]);
      if constexpr (B::BITS > 0) x = BandCoder<B>(reciprocal[r]).rounded(x), here.of[r] = fmaf(weighted, x - ROUNDER - B::TOP / 2.f, here.of[r]);
    });
    reached.add(here, __uint_as_float(B::STEP_BITS));
  });
  const float to = tile.sum_rows(wanted.of), is = tile.sum_rows(reached.of) * scale;
  return unbiased_factor(to, is);
}

// What codes numbers after row_unbiased_factor, where it is called.
template <class S> struct BandedCoders {
  template <class B> using Coder = Select<(S::UNBIASED != 0), RoundedBand<B>, BandCoder<B>>;
};

template <class S, class F> DEV void append_banded(TokenTile<S>& tile, const AppendArguments& a, u32 (*w)[READ_WORDS], const u8* matrix, int first, int head, F read_next) {
  constexpr int N = TokenTile<S>::N, ROWS = TokenTile<S>::ROWS;
  const float* weights = S::weights(a) + head * D + tile.share() * N;
  OwnedToken owned;
  multiply(tile, a, w, matrix, owned, first, head);
  if constexpr (Config::OVERLAY_TOKENS > 0) {
    if constexpr (Config::RAW_WINDOW && !S::VALUES) store_raw_overlay(tile, a, first, head, owned.place);
    else store_overlay(tile, a, head, owned.place);
  }

  // Scale of the owned row; where the stream has a FLAG, that of the row less flag_mean if its error is smaller.
  float error, scale = banded_scale<false>(tile, weights, nullptr, error), sign = 1.f, reciprocal[ROWS];
  if constexpr (S::FLAG) {
    const float* flag_mean = S::flag_mean(a) + head * D + tile.share() * N;
    float centred_error, centred[ROWS];
    const float centred_scale = banded_scale<true>(tile, weights, flag_mean, centred_error);
    if (centred_error < error) scale = centred_scale, sign = -1.f;
    tile.broadcast_rows(sign < 0.f ? 1.f : 0.f, centred);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float off[4];
      load_vector(off, flag_mean + i);
#pragma unroll
      for (int j = 0; j < 4 * ROWS; j++) tile.x[j / 4][i + j % 4] = fmaf(-centred[j / 4], off[j % 4], tile.x[j / 4][i + j % 4]);
    }
  }
  read_next();
  tile.broadcast_rows(__fdiv_rn(1.f, scale), reciprocal);
  if constexpr (S::UNBIASED) scale *= row_unbiased_factor(tile, weights, reciprocal, scale);
  scale = clamp_scale<S::SCALE_TYPE>(scale) * sign;
  if (owned.slot >= 0 && tile.stores_scale()) store_scale(page_head_of(a, owned.slot, head), S::SCALE_OFFSET, S::SCALE_FORM, owned.slot, pair_of<S::SCALE_TYPE>(scale, 0.f));

  // Codes.
  if constexpr (!S::VALUES) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const s64 to = tile_slot(a, first, tile.token(r));
      S::CodeBands::each([&](auto band) {
        using B = decltype(band);
        const typename BandedCoders<S>::template Coder<B> coder(reciprocal[r]);
        if constexpr (B::BITS == 3) store_three_bit_keys<S, B>(tile, a, to, head, r, coder);
        else store_key_band<S, B>(tile, a, to, head, r, coder);
      });
    }
  } else {
    S::CodeBands::each([&](auto band) {
      const auto coder = [&](int r) { return typename BandedCoders<S>::template Coder<decltype(band)>(reciprocal[r]); };
      if constexpr (S::BITS == 3) store_three_bit_value_rows(tile, a, first, head, coder);
      else store_value_rows(tile, a, first, head, coder);
    });
  }
}

// --- the kernel ---------------------------------------------------------------------------------------------------------------

// Where row r of a lane's tile begins.
template <class S> DEV const u8* tile_row(const AppendArguments& a, int first, int head, int lane, int r) {
  return (const u8*)S::rows(a) + ((s64)min(first + (lane >> 2) + 8 * r, a.tokens - 1) * S::stride(a) + head * D) * 2;
}
// Reads the words of the tile that begins at token `first`. Of a tile behind the last token, they are the last token's. Of rows that are multiplied, the four lanes of a
// row read 16 bytes in turn, so that an instruction reads whole sectors; of others, a quarter each.
template <class S> DEV void read_tile(u32 (*w)[READ_WORDS], const AppendArguments& a, int first, int head, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u8* row = tile_row<S>(a, first, head, lane, r);
    if constexpr (S::MATRIX_PARTS > 0) {
#pragma unroll
      for (int i = 0; i < READ_WORDS / 4; i++) load_words<4>(w[r] + 4 * i, row + 64 * i + (lane & 3) * 16);
    } else if constexpr (S::GROUPS > 1) {
      TileGroups<S>::read(w[r], row, lane & 3);
    } else {
      load_words<READ_WORDS>(w[r], row + (lane & 3) * (D / 2));
    }
  }
}
// Brings the same to the L1 cache: of every 128 bytes, a sector of 32 a lane.
template <class S> DEV void prefetch_tile(const AppendArguments& a, int first, int head, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int at = 0; at < D * 2; at += 128)
      if (at + 128 <= D * 2 || (lane & 3) * 32 < D * 2 - at) prefetch_l1(tile_row<S>(a, first, head, lane, r) + at + (lane & 3) * 32);
}

// Appends the tile of one stream and head that begins at token `first`, whose words are w. `matrix` is the head's, in shared memory, where rows are multiplied by
// one. read_next() is called where w is not used any more and the registers that a search takes are free again.
template <class S, class F> DEV void append_tile(const AppendArguments& a, u32 (*w)[READ_WORDS], const u8* matrix, int first, int head, int lane, F read_next) {
  TokenTile<S> tile{lane, lane >> 2, lane & 3};
  if constexpr (S::BANDED) append_banded(tile, a, w, matrix, first, head, read_next);
  else if constexpr (S::LEVELS > 0) append_levels(tile, a, w, matrix, first, head, read_next);
  else if constexpr (S::GROUPS > 1) append_groups(tile, a, w, matrix, first, head, read_next);
  else append_affine(tile, a, w, matrix, first, head, read_next);
}
template <class S> DEV void append_tile(const AppendArguments& a, int first, int head, int lane) {
  u32 w[2][READ_WORDS];
  read_tile<S>(w, a, first, head, lane);
  append_tile<S>(a, w, nullptr, first, head, lane, [] {});
}

// Appends this CTA's tiles of one stream and head: every ctas-th TILE_WARPS of them, a warp a tile. The matrix is copied to shared memory once. READ_AHEAD: the rows
// of the next tile come to registers while this one is coded.
template <class S> DEV void append_tiles(const AppendArguments& a, u8* shared, int head, int cta, int ctas) {
  constexpr int BYTES = S::MATRIX_PARTS * D * D * 2, APART = Config::TILE_WARPS * 16;
  constexpr bool READ_AHEAD = Config::READ_AHEAD && BYTES > 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u32 w[2][READ_WORDS];
  if constexpr (READ_AHEAD) read_tile<S>(w, a, cta * APART + warp * 16, head, lane);
  if constexpr (BYTES > 0) {
    const u8* from = (const u8*)S::matrix(a, head);
    for (int i = threadIdx.x * 16; i < BYTES; i += Config::TILE_WARPS * 32 * 16) copy16(shared + i, from + i);
    await_copies();
    fence_copies();
    __syncthreads();
  }
  for (int first = cta * APART; first < a.tokens; first += ctas * APART) {
    const int mine = first + warp * 16, next = mine + ctas * APART;
    if (next < a.tokens) prefetch_tile<S>(a, next, head, lane);
    if (BYTES == 0 && mine >= a.tokens) continue;  // the warps of a product come together
    if constexpr (!READ_AHEAD) read_tile<S>(w, a, mine, head, lane);
    append_tile<S>(a, w, shared, mine, head, lane, [&] {
      if constexpr (READ_AHEAD) read_tile<S>(w, a, next, head, lane);
    });
  }
}

extern "C" __global__ void __launch_bounds__(Config::TILE_WARPS * 32, Config::TILE_CTAS) kvant_append_tiles(const AppendArguments a) {
  using Values = Select<(ValueStream::MATRIX_PARTS > 0 || ValueStream::BITS == 3), ValueRows, ValueStream>;
  if constexpr (KeyStream::MATRIX_PARTS > 0 || ValueStream::MATRIX_PARTS > 0) {
    DYNAMIC_SHARED(shared);
    const int ctas = gridDim.x / Config::KV_HEADS, head = blockIdx.x / ctas, cta = blockIdx.x % ctas;
    append_tiles<KeyStream>(a, shared, head, cta, ctas);
    __syncthreads();
    append_tiles<Values>(a, shared, head, cta, ctas);
  } else {
    const int lane = threadIdx.x & 31, job = blockIdx.x / 2 * Config::TILE_WARPS + (threadIdx.x >> 5), head = job % Config::KV_HEADS, first = job / Config::KV_HEADS * 16;
    if (first >= a.tokens) return;
    if (blockIdx.x % 2 == 0) append_tile<KeyStream>(a, first, head, lane);
    else append_tile<Values>(a, first, head, lane);
  }
}
