// Affine codes of a row: x ~ code * scale + min, or (code - zero) * scale with an integer zero, as kvant.codecs.affine computes them.

#pragma once
#include "include/rounding.cuh"

// Clips a row at a quantile of its magnitudes. With the magnitudes in falling order m[0] >= m[1] >= ..., the limit lies `share` of the way from
// m[drop] up to m[drop - 1]; drop = 0 clips nothing. The largest magnitudes are found one by one. `most` is the largest `drop` of the
// rows of the warp. A row is held by lanes whose numbers differ in the bits from FROM up to below TO, the set bits of `mates`; a lane has
// N of its channels.
template <int N, int FROM, int TO> DEV void clip_row(float* x, int drop, int most, float share, u32 mates, int lane) {
  float left[N], above = 0.f, below = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) left[i] = fabsf(x[i]);
  for (int k = 0; k <= most; k++) {
    float own = left[0];
#pragma unroll
    for (int i = 1; i < N; i++) own = fmaxf(own, left[i]);
    float top = own;
#pragma unroll
    for (int o = FROM; o < TO; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
    bool mine = __ffs(__ballot_sync(FULL, own == top) & mates) - 1 == lane;  // of equal magnitudes, one is removed: the first lane's first
#pragma unroll
    for (int i = 0; i < N; i++) {
      const bool this_one = mine & left[i] == top;
      left[i] = this_one ? -1.f : left[i], mine = mine & !this_one;
    }
    if (k == drop - 1) above = top;
    if (k == drop) below = top;
  }
  const float apart = above - below, limit = share < 0.5f ? fmaf(share, apart, below) : fmaf(share - 1.f, apart, above);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (drop) x[i] = fminf(fmaxf(x[i], -limit), limit);
}

struct AffineScale {
  float scale, reciprocal, zero;  // zero is the minimum, or the integer zero point
};

// The scale of a row whose numbers lie in [least, most]: (most - least) / (2^BITS - 1).
template <class S> DEV AffineScale affine_scale(float least, float most) {
  constexpr float TOP = (1 << S::BITS) - 1;
  constexpr bool MINIMUM = S::SCALE_FORM == ScaleForm::SCALE_MIN;
  if (MINIMUM) least = round_to<S::SCALE_TYPE>(least);
  const float scale = round_to<S::SCALE_TYPE>(fmaxf(__fdiv_rn(most - least, TOP), TINY<S::SCALE_TYPE>));
  const float zero = MINIMUM ? least : round_to<S::SCALE_TYPE>(fminf(fmaxf(rintf(__fdiv_rn(-least, scale)), -32768.f), 32768.f));
  return {scale, __fdiv_rn(1.f, scale), zero};
}

constexpr float ROUNDER = 12582912.f;  // 1.5 * 2^23: x + ROUNDER has no bits behind the point, rounded to even; faster than an instruction that rounds

// Codes of the numbers x * factor under a scale, as floats ROUNDER + code: `bits(x) - base()` is the code.
//
// EXACT: the quotient is rounded as a division rounds it, because it may lie close to halfway between two codes.
//
// Otherwise, for 16-bit inputs, whose x / scale is exactly a half or clearly not one, three or four FMAs do it, clamping included, because
// minimum and maximum run at half rate. With UNIT = 2^(BITS + 1), the saturating FMA holds u = 1 - (TOP - code) / UNIT in [0, 1], which
// clamps the code at TOP; subtracting REST = (UNIT - TOP) / UNIT, again saturating, clamps it at 0. Between 0.5 and 1 floats are
// UNIT / 2^24 of a code apart, which rounds away the error of the reciprocal at exact halves. An integer zero point is added after
// rounding and changes which code is even, so ROUNDER gets its lowest bit.
template <int BITS, int SCALE_FORM, bool EXACT> struct AffineCoder {
  static constexpr float TOP = (1 << BITS) - 1, UNIT = 2 << BITS, REST = (UNIT - TOP) / UNIT;
  static constexpr bool MINIMUM = SCALE_FORM == ScaleForm::SCALE_MIN;
  float scale, reciprocal, zero, factor, rounder;
  DEV AffineCoder(float scale_, float reciprocal_, float zero_, float factor_) : scale(scale_), reciprocal(reciprocal_), zero(zero_), factor(factor_), rounder(ROUNDER) {
    if (!MINIMUM && !EXACT) rounder = __uint_as_float(__float_as_uint(ROUNDER) | (__float_as_uint(ROUNDER + zero) & 1u));
  }
  DEV float rounded(float x) const {  // the code on top of `base`
    const float y = MINIMUM ? fmaf(x, factor, -zero) : x * factor;
    if constexpr (EXACT) {
      const float z = y * reciprocal, quotient = fmaf(fmaf(-z, scale, y), reciprocal, z), least = MINIMUM ? 0.f : -zero;
      return fminf(fmaxf(quotient, least), TOP + least) + ROUNDER;
    } else {
      const float u = MINIMUM ? fma_held(y, reciprocal * (1.f / UNIT), REST) : fma_held(x, reciprocal * factor * (1.f / UNIT), fmaf(zero, 1.f / UNIT, REST));
      return fmaf(add_held(u, -REST), UNIT, rounder);
    }
  }
  DEV u32 bits(float x) const { return __float_as_uint(rounded(x)); }
  DEV u32 base() const { return EXACT && !MINIMUM ? __float_as_uint(ROUNDER) - (u32)__float2int_rn(zero) : __float_as_uint(rounder); }
  DEV float error(float x) const {  // (decoded - x) / scale
    static_assert(!EXACT, "on both sides of a half the error is the same, so that inexact codes do");
    if (MINIMUM) return fmaf(fmaf(x, factor, -zero), -reciprocal, rounded(x) - rounder);
    return fmaf(x, -reciprocal * factor, rounded(x) - (rounder + zero));
  }
};

// The scale of a row with range [least, most]. S::SEARCH ranges about its middle are tried, from the whole one down to 0.7 of it, and the one
// with the smallest squared error is taken. `squared_error` gives sum_i error_i^2 over the row, in units of the scale squared.
template <class S, class F> DEV AffineScale search_affine_scale(float least, float most, F squared_error) {
  AffineScale best = affine_scale<S>(least, most);
  if constexpr (S::SEARCH > 1) {
    const float middle = (most + least) * 0.5f, half = (most - least) * 0.5f;
    float lowest = 0.f;
    for (int k = 0; k < S::SEARCH; k++) {
      const float reach = half * (float)(1.0 - (1.0 - 0.7) * k / (S::SEARCH > 1 ? S::SEARCH - 1 : 1));
      const AffineScale found = k ? affine_scale<S>(middle - reach, middle + reach) : best;
      const float error = squared_error(found) * (found.scale * found.scale);
      if (k == 0 || error < lowest) lowest = error, best = found;
    }
  }
  return best;
}
