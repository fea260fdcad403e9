// Affine codes of a row: x ~ code * scale + min, or (code - zero) * scale with an integer zero, as kvant.codecs.affine computes them.

#pragma once
#include "include/rounding.cuh"

// Reductions over the lanes that hold a row: their numbers differ in the bits from FROM up to below TO.
template <int FROM, int TO, class T, class F> DEV T reduce_lanes(T x, F f) {
#pragma unroll
  for (int o = FROM; o < TO; o <<= 1) x = f(x, __shfl_xor_sync(FULL, x, o));
  return x;
}
template <int FROM, int TO> DEV int count_lanes(float x) {  // of whole numbers
  if constexpr (FROM == 1 && TO == 32) return __reduce_add_sync(FULL, __float2int_rn(x));
  else return __float2int_rn(reduce_lanes<FROM, TO>(x, [](float a, float b) { return a + b; }));
}

// How a row is clipped at a quantile of its magnitudes. With the magnitudes in falling order m[0] >= m[1] >= ..., the limit lies `share` of the
// way from m[drop] up to m[drop - 1]; drop = 0 clips nothing.
struct Clip {
  int drop;
  float share, start, gap;  // start: where the search begins; gap: about how far apart magnitudes are there; in mean magnitudes of the row
};

// Search for the limit at which a row is clipped: a threshold with `drop` magnitudes above it is searched by counting, first where it would be for normal numbers, then
// by Newton's method with their density, and by bisection where that leaves the range. Floats of one sign are in the order of their bits, so that every try makes the
// range (low, high) smaller.
struct ClipSearch {
  int low, high;     // more than `drop` magnitudes are above low, fewer above high, as floats; where low = high, `drop` magnitudes are above it
  float guess, gap;  // what to try next; about how far apart magnitudes are there
  bool pair = false;  // one magnitude too many is above low, one too few above high: m[drop] and m[drop - 1] are the two between them

  template <int N, int FROM, int TO> DEV void begin(const float* x, const Clip& clip) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) sum += fabsf(x[i]);
    sum = reduce_lanes<FROM, TO>(sum, [](float a, float b) { return a + b; });
    const float mean = sum * (1.f / Config::HEAD_DIM);
    low = -1, high = __float_as_int(sum);
    guess = mean * clip.start, gap = mean * clip.gap;
  }
  DEV bool open() const { return high - low > 1 && !pair; }
  DEV float inside() const {  // the guess, or the middle of the range
    const int near = __float_as_int(guess);
    return near > low && near < high ? guess : 0.5f * (__int_as_float(max(low, 0)) + __int_as_float(high));
  }
  DEV void take(int tried, float excess) {  // so many more than `drop` magnitudes are above `tried`
    if (excess >= 0.f) low = tried;
    if (excess <= 0.f) high = tried;
    guess = fmaf(excess, gap, __int_as_float(tried));
  }
  // The limit, a lane having N of the row's channels; infinity where nothing is clipped.
  template <int N, int FROM, int TO> DEV float finish(const float* x, const Clip& clip) {
    for (int k = 0; __any_sync(FULL, clip.drop && open()); k++) {
      int tried = k < 16 ? __float_as_int(inside()) : low + (high - low) / 2;  // so that it ends, whatever the numbers are
      tried = max(min(tried, high - 1), low + 1);
      const float threshold = __int_as_float(tried);
      float more = 0.f;
#pragma unroll
      for (int i = 0; i < N; i++) more += is_greater(fabsf(x[i]), threshold);
      const int above = count_lanes<FROM, TO>(more);
      if (open()) take(tried, (float)(above - clip.drop));
    }
    // The smallest magnitude above low and the largest up to high. Bits of magnitudes are doubled to drop the sign, less those of the next float above a bound: what
    // exceeds it is small, what does not has wrapped around and is larger.
    float limit = __int_as_float(high);
    const u32 from_low = 0u - 2u * ((u32)low + 1u), from_high = 0u - 2u * ((u32)high + 1u);
    u32 above = FULL, below = 0u;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u32 size = __float_as_uint(x[i]) * 2u;
      above = min(above, size + from_low), below = max(below, size + from_high);
    }
    above = reduce_lanes<FROM, TO>(above, [](u32 a, u32 b) { return min(a, b); });
    below = reduce_lanes<FROM, TO>(below, [](u32 a, u32 b) { return max(a, b); });
    if (low == high || pair) {  // otherwise m[drop - 1] = m[drop] = limit
      const float one = __uint_as_float((above - from_low) / 2u), two = __uint_as_float((below - from_high) / 2u);
      const float least = pair ? two : one, most = pair ? one : two, apart = least - most;
      limit = clip.share < 0.5f ? fmaf(clip.share, apart, most) : fmaf(clip.share - 1.f, apart, least);
    }
    return clip.drop ? limit : __int_as_float(0x7f800000);
  }
};
template <int N, int FROM, int TO> DEV float clip_limit(const float* x, const Clip& clip) {
  ClipSearch search;
  search.begin<N, FROM, TO>(x, clip);
  return search.finish<N, FROM, TO>(x, clip);
}

// Makes the ranges of the searches of two rows smaller, most often down to the end, by magnitudes that are rounded towards zero to fp16. Instructions for pairs of
// fp16 do both rows at once: the first row is the low half of every word. Counts are those of the exact magnitudes: rounded like this, one exceeds a number of fp16
// where it is at least the next such number. A row lies in four lanes, N numbers each. [least, most] become the ranges of both rows, rounded towards zero as well;
// nothing where rows are not clipped.
template <int N> DEV void narrow_search(ClipSearch (&search)[2], const float (*x)[N], const Clip& clip, u32& least, u32& most) {
  constexpr u32 INFINITE = 0x7C007C00u, HALF = 0x38003800u, TWO = 0x40004000u, MANY = 0x58005800u;  // of fp16; MANY is 128
  least = most = 0u;
  if (!clip.drop) return;
  const float drop = (float)clip.drop;
  const u32 wanted = fp16_pair(drop, drop), gap = fp16_pair(search[0].gap, search[1].gap);
  u32 sizes[N], low = 0u, high = INFINITE, over = MANY, under = MANY | 0x80008000u;  // excess at low and at high
  u32 bound = fp16_pair_down(search[0].guess, search[1].guess);
#pragma unroll
  for (int i = 0; i < N; i++) sizes[i] = fp16_pair_down(x[0][i], x[1][i]);
#pragma unroll
  for (int i = 0; i < N; i++) least = pair_min<ElementType::FP16>(least, sizes[i]), most = pair_max<ElementType::FP16>(most, sizes[i]);
  least = pair_min<ElementType::FP16>(least, __shfl_xor_sync(FULL, least, 1)), most = pair_max<ElementType::FP16>(most, __shfl_xor_sync(FULL, most, 1));
  least = pair_min<ElementType::FP16>(least, __shfl_xor_sync(FULL, least, 2)), most = pair_max<ElementType::FP16>(most, __shfl_xor_sync(FULL, most, 2));
  for (int k = 0; k < 10; k++) {
    u32 more[2] = {is_larger_fp16x2(sizes[0], bound), is_larger_fp16x2(sizes[1], bound)};
#pragma unroll
    for (int i = 2; i < N; i++) more[i % 2] = add_fp16x2(more[i % 2], is_larger_fp16x2(sizes[i], bound));
    u32 above = add_fp16x2(more[0], more[1]);
    above = add_fp16x2(above, __shfl_xor_sync(FULL, above, 1));
    above = add_fp16x2(above, __shfl_xor_sync(FULL, above, 2));
    const u32 excess = subtract_fp16x2(above, wanted), few = sign_mask(excess), many = sign_mask(subtract_fp16x2(wanted, above));
    low = select_bits(few, low, bound), high = select_bits(many, high, bound), over = select_bits(few, over, excess), under = select_bits(many, under, excess);
    // Newton's guess where it lies inside the range, otherwise the middle of it. A row stays where it is once no more than two magnitudes are between low and high.
    const u32 guess = fma_fp16x2(excess, gap, bound), middle = fma_fp16x2(low, HALF, mul_fp16x2(high, HALF));
    const u32 inside = sign_mask(subtract_fp16x2(low, guess) & subtract_fp16x2(guess, high)), open = sign_mask(subtract_fp16x2(TWO, subtract_fp16x2(over, under)));
    const u32 next = select_bits(open, select_bits(inside, guess, middle), bound);
    if (!__any_sync(FULL, next != bound)) break;
    bound = next;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 lower = low >> (16 * r) & 0xFFFFu, upper = high >> (16 * r) & 0xFFFFu, one = over >> (16 * r) & 0xFFFFu, other = under >> (16 * r) & 0xFFFFu;
    // the largest float below the next number of fp16, where that has been tried
    if (one != (MANY & 0xFFFFu)) search[r].low = __float_as_int(fp16_low(lower + 1u)) - 1;
    if (upper < 0x7C00u) search[r].high = __float_as_int(fp16_low(upper + 1u)) - 1;
    search[r].pair = one == 0x3C00u && other == 0xBC00u;
  }
}
template <int N> DEV void clip_row(float* x, float limit) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = fminf(fmaxf(x[i], -limit), limit);
}

struct AffineScale {
  float scale, reciprocal, zero;  // zero is the minimum, or the integer zero point
};

constexpr float LARGEST_ZERO = 32768.f;  // magnitude of an integer zero point

// The scale of a row whose numbers lie in [least, most]: (most - least) / (2^BITS - 1), but so large that scale * zero reaches the numbers.
template <class S> DEV AffineScale affine_scale(float least, float most) {
  constexpr float TOP = (1 << S::BITS) - 1;
  constexpr bool MINIMUM = S::SCALE_FORM == ScaleForm::SCALE_MIN;
  if (MINIMUM) least = round_to<S::SCALE_TYPE>(least);
  float step = fmaxf(__fdiv_rn(most - least, TOP), TINY<S::SCALE_TYPE>);
  if (!MINIMUM) step = fmaxf(step, fabsf(least) * (1.f / LARGEST_ZERO));
  const float scale = round_to<S::SCALE_TYPE>(step);
  const float zero = MINIMUM ? least : round_to<S::SCALE_TYPE>(fminf(fmaxf(rintf(__fdiv_rn(-least, scale)), -LARGEST_ZERO), LARGEST_ZERO));
  return {scale, __fdiv_rn(1.f, scale), zero};
}

// Codes of the numbers x * factor under a scale, as floats ROUNDER + code: `bits(x) - base()` is the code.
//
// EXACT: the quotient is rounded as a division rounds it, because it may lie close to halfway between two codes.
//
// Otherwise, for 16-bit inputs, whose x / scale is exactly a half or clearly not one, three or four FMAs do it, clamping included, because
// minimum and maximum run at half rate. With UNIT = 2^(BITS + 1), the saturating FMA holds u = 1 - (TOP - code) / UNIT in [0, 1], which
// clamps the code at TOP; subtracting REST = (UNIT - TOP) / UNIT, again saturating, clamps it at 0. Between 0.5 and 1 floats are
// UNIT / 2^24 of a code apart, which rounds away the error of the reciprocal at exact halves. An integer zero point is added after
// rounding and changes which code is even, so ROUNDER gets its lowest bit.
//
// PRODUCT: a product has rounded x already, and halves need no care. One saturating FMA then subtracts the minimum, divides by the scale and clamps at both ends: it
// holds code / TOP in [0, 1].
template <int BITS, int SCALE_FORM, bool EXACT, bool PRODUCT = false> struct AffineCoder {
  static constexpr float TOP = (1 << BITS) - 1, UNIT = 2 << BITS, REST = (UNIT - TOP) / UNIT;
  static constexpr bool MINIMUM = SCALE_FORM == ScaleForm::SCALE_MIN;
  float scale, reciprocal, zero, factor, rounder;
  DEV AffineCoder(float scale_, float reciprocal_, float zero_, float factor_) : scale(scale_), reciprocal(reciprocal_), zero(zero_), factor(factor_), rounder(ROUNDER) {
    if (!MINIMUM && !EXACT) rounder = __uint_as_float(__float_as_uint(ROUNDER) | (__float_as_uint(ROUNDER + zero) & 1u));
  }
  DEV float rounded(float x) const {  // the code on top of `base`
    const float y = MINIMUM ? fmaf(x, factor, -zero) : x * factor;
    if constexpr (EXACT) {
      const float least = MINIMUM ? 0.f : -zero;
      return fminf(fmaxf(quotient(y, scale, reciprocal), least), TOP + least) + ROUNDER;
    } else {
      float u;
      if (MINIMUM && PRODUCT) return fmaf(fma_held(x, reciprocal * factor * (1.f / TOP), -zero * reciprocal * (1.f / TOP)), TOP, rounder);
      if (MINIMUM) u = fma_held(y, reciprocal * (1.f / UNIT), REST);
      else u = fma_held(x, reciprocal * factor * (1.f / UNIT), fmaf(zero, 1.f / UNIT, REST));
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
