// Codes of a row that LANES lanes of a warp hold (include/rows.cuh).

#pragma once
#include "codecs/encode_affine.cuh"
#include "codecs/encode_banded.cuh"
#include "include/page_codes.cuh"
#include "include/rows.cuh"

template <int LANES> constexpr int CODE_WORDS = (D / LANES + 3) / 4;  // of a lane's codes, a byte each

template <int LANES> DEV float sum_row(float x) {  // over the lanes of a row
#pragma unroll
  for (int o = 1; o < LANES; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}

// The least and the largest number of a row that OVER of its LANES lanes hold.
template <int LANES, int OVER = LANES> DEV void row_range(const float* x, float& least, float& most) {
  least = most = x[0];
#pragma unroll
  for (int i = 1; i < D / LANES; i++) least = fminf(least, x[i]), most = fmaxf(most, x[i]);
  if constexpr (OVER == 32) {
    least = from_ordered(__reduce_min_sync(FULL, to_ordered(least))), most = from_ordered(__reduce_max_sync(FULL, to_ordered(most)));
  } else {
#pragma unroll
    for (int o = 1; o < OVER; o <<= 1) {
      least = fminf(least, __shfl_xor_sync(FULL, least, o));
      most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
    }
  }
}

// --- affine codes -------------------------------------------------------------------------------------------------------------

// Codes of a lane's channels, a byte each; returns the scale and the minimum or zero of the row, or of the lane's group of its channels, as one word.
// [least, most] is their range.
template <class S, int LANES> DEV u32 encode_affine(const float* x, float least, float most, u32* codes) {
  constexpr int N = D / LANES, OVER = LANES / S::GROUPS;
  static_assert(LANES % S::GROUPS == 0, "a lane's channels have one scale");
  const AffineScale best = search_affine_scale<S>(least, most, [&](const AffineScale& tried) {
    const AffineCoder<S::BITS, S::SCALE_FORM, false> coder(tried.scale, tried.reciprocal, tried.zero, 1.f);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float error = coder.error(x[i]);
      squares = fmaf(error, error, squares);
    }
    return sum_row<OVER>(squares);
  });
  const AffineCoder<S::BITS, S::SCALE_FORM, true> coder(best.scale, best.reciprocal, best.zero, 1.f);
#pragma unroll
  for (int i = 0; i < CODE_WORDS<LANES>; i++) {
    codes[i] = 0u;
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (4 * i + k < N) codes[i] += (coder.bits(x[4 * i + k]) - coder.base()) << (8 * k);
  }
  return pair_of<S::SCALE_TYPE>(best.scale, best.zero);
}
template <class S, int LANES> DEV u32 encode_affine(const float* x, u32* codes) {
  float least, most;
  row_range<LANES, LANES / S::GROUPS>(x, least, most);
  return encode_affine<S, LANES>(x, least, most, codes);
}

// --- banded codes -------------------------------------------------------------------------------------------------------------

struct BandedLane {  // a lane's channels lie in one band
  int bits;
  float step, reciprocal, top;  // between levels, over the scale, and one over it; the largest code
  const float* weights;         // of the errors of its channels, or null
  DEV float weight(int i) const { return weights ? weights[i] : 1.f; }
  DEV float code(float x, float scale, float reciprocal_scale) const {
    const float level = quotient(quotient(x, scale, reciprocal_scale), step, reciprocal) + top * 0.5f;
    return fminf(fmaxf(level, 0.f), top) + ROUNDER - ROUNDER;
  }
  DEV float level(float code) const { return step * (code - top * 0.5f); }
};

// The scale of a row with the smallest weighted squared error, which goes to `least`.
template <class S, int LANES> DEV float banded_scale(const float* x, const BandedLane& band, float& least) {
  constexpr int N = D / LANES;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) squares += band.bits ? x[i] * x[i] : 0.f;
  const float rms = sqrtf(__fdiv_rn(sum_row<LANES>(squares), (float)S::CodeBands::CHANNELS));
  if constexpr (S::SEARCH == 1 && !S::FLAG) return round_to<S::SCALE_TYPE>(clamp_scale<S::SCALE_TYPE>(rms));  // nobody asks for the error
  return search_banded_scale<S>(rms, least, [&](float scale) {
    const float reciprocal = __fdiv_rn(1.f, scale);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float error = band.bits ? x[i] - scale * band.level(band.code(x[i], scale, reciprocal)) : 0.f;
      sum += error * error * band.weight(i);
    }
    return sum_row<LANES>(sum);
  });
}

// As `encode_affine`, for bands. Where the stream has a FLAG, the row less `flag_mean` is tried too; if its error is smaller, it is taken,
// and the scale is stored negative. `weights` and `flag_mean` are those of the lane's channels; `weights` may be null.
template <class S, int LANES> DEV u32 encode_banded(const float* row, u32* codes, const float* weights, const float* flag_mean, int j) {
  constexpr int N = D / LANES;
  S::CodeBands::each([](auto band) {
    using B = decltype(band);
    static_assert(B::WIDTH % N == 0 && B::FIRST % N == 0, "a lane's channels lie in one band");
  });
  BandedLane band;
  band.bits = S::CodeBands::bits(j * N), band.step = S::CodeBands::step(j * N), band.top = (float)((1 << band.bits) - 1);
  band.reciprocal = __fdiv_rn(1.f, band.step), band.weights = weights;
  float x[N], error, sign = 1.f;
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = row[i];
  float scale = banded_scale<S, LANES>(x, band, error);
  if constexpr (S::FLAG) {
    float centred[N], centred_error;
#pragma unroll
    for (int i = 0; i < N; i++) centred[i] = x[i] - flag_mean[i];
    const float centred_scale = banded_scale<S, LANES>(centred, band, centred_error);
    if (centred_error < error) {
      scale = centred_scale, sign = -1.f;
#pragma unroll
      for (int i = 0; i < N; i++) x[i] = centred[i];
    }
  }
  const float reciprocal = __fdiv_rn(1.f, scale);
  float reached = 0.f, wanted = 0.f;  // sum w x level, sum w x^2
#pragma unroll
  for (int i = 0; i < CODE_WORDS<LANES>; i++) codes[i] = 0u;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float code = band.bits ? band.code(x[i], scale, reciprocal) : 0.f;
    codes[i / 4] |= (u32)code << (8 * (i % 4));
    reached += band.bits ? band.weight(i) * x[i] * band.level(code) : 0.f;
    wanted += band.weight(i) * (x[i] * x[i]);
  }
  if constexpr (S::UNBIASED) {
    reached = sum_row<LANES>(reached), wanted = sum_row<LANES>(wanted);
    scale *= unbiased_factor(wanted, reached * scale);
  }
  scale = clamp_scale<S::SCALE_TYPE>(scale) * sign;
  return pair_of<S::SCALE_TYPE>(scale, 0.f);
}

// --- codes of levels ----------------------------------------------------------------------------------------------------------

// As `encode_affine`, for codes under the norm of the row: the code of x is the place of the nearest level to x / norm, of S::LEVELS that mirror each
// other around zero. As kvant.codecs.lloyd_max computes them.
template <class S, int LANES> DEV u32 encode_levels(const float* x, u32* codes) {
  constexpr int N = D / LANES, HALF = S::LEVELS / 2;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) squares = fmaf(x[i], x[i], squares);
  const float norm = round_to<S::SCALE_TYPE>(fminf(sqrtf(sum_row<LANES>(squares)), LARGEST<S::SCALE_TYPE>));
  const float divisor = fmaxf(norm, TINY<S::SCALE_TYPE>), reciprocal = __fdiv_rn(1.f, divisor);
#pragma unroll
  for (int i = 0; i < CODE_WORDS<LANES>; i++) codes[i] = 0u;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float unit = quotient(x[i], divisor, reciprocal);
    const bool positive = unit > 0.f;
    // a number on an edge has the lower of two codes: below zero, the next larger magnitude is compared
    const int before = S::Edges::count_below(__int_as_float(__float_as_int(fabsf(unit)) + !positive));
    codes[i / 4] |= (u32)(positive ? HALF + before : HALF - 1 - before) << (8 * (i % 4));
  }
  return pair_of<S::SCALE_TYPE>(norm, 0.f);
}

// --- bytes of codes -----------------------------------------------------------------------------------------------------------

// Where several groups of channels of S have a scale each: the channel that has, in the order of codes for one scale, the place of channel c
// (kvant/layout.py). RUN neighbouring channels stay neighbours.
template <class S> struct GroupOrder {
  static constexpr int GROUP = D / S::GROUPS, SHARE = GROUP / (S::KEY ? 4 : 8);  // channels of a group, and of a lane of it
  static constexpr int RUN = (S::KEY ? S::BITS < 8 : SHARE % 4 == 0) ? 4 : 2;
  DEV static int place(int c) {
    const int lane = c % GROUP / SHARE, element = c / GROUP * SHARE + c % SHARE;
    if constexpr (S::GROUPS == 1) {
      return c;
    } else if constexpr (S::KEY) {
      constexpr int PER = 8 / S::BITS;
      const int pair = element / 2, i = element / 8 * 2 + pair % 2;  // register
      return lane * (D / 4) + 2 * (i / PER * (2 * PER) + pair % 4 / 2 * PER + i % PER) + element % 2;
    } else {
      return lane * (D / 8) + element;
    }
  }
};
// Puts a lane's codes beside those of the other lanes of its row, in the order in which they are stored.
template <class S, int LANES> DEV void share_group_codes(u8* row, const u32* codes, int j) {
  constexpr int N = D / LANES, RUN = N % 4 == 0 ? GroupOrder<S>::RUN : 2;
  static_assert(N % RUN == 0, "a lane has whole runs");
#pragma unroll
  for (int i = 0; i < N; i += RUN) {
    u8* to = row + GroupOrder<S>::place(j * N + i);
    if constexpr (RUN == 4) *(u32*)to = codes[i / 4];
    else *(u16*)to = (u16)(codes[i / 4] >> (8 * (i % 4)));
  }
}
// Puts a lane's codes beside those of the other lanes of its row.
template <int LANES> DEV void share_codes(u8* row, const u32* codes, int j) {
  constexpr int N = D / LANES;
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) ((u32*)row)[j * (N / 4) + i] = codes[i];
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) row[j * N + i] = (u8)(codes[i / 4] >> (8 * (i % 4)));
  }
}
