// Banded codes of a row: x ~ scale * STEP * (code - TOP / 2), evenly spaced levels around zero, some channels with more bits than others
// under one scale. As kvant.codecs.banded computes them.

#pragma once
#include "include/bands.cuh"
#include "include/rounding.cuh"

template <int TYPE> DEV float clamp_scale(float x) {  // to the normal numbers of the 16-bit type
  return fminf(fmaxf(x, TINY<TYPE>), LARGEST<TYPE>);
}

// The scale of a row with the smallest error. S::SEARCH multiples of its root mean square are tried, 0.6 to 1.4 of it; `least` is the error of
// the best. `squared_error` gives the weighted squared error of the row under a scale.
template <class S, class F> DEV float search_banded_scale(float rms, float& least, F squared_error) {
  float chosen = 1.f;
  least = __int_as_float(0x7f800000);  // infinity
  for (int k = 0; k < S::SEARCH; k++) {
    const float factor = S::SEARCH == 1 ? 1.f : (float)(0.6 + (1.4 - 0.6) * k / (S::SEARCH > 1 ? S::SEARCH - 1 : 1));
    const float scale = round_to<S::SCALE_TYPE>(clamp_scale<S::SCALE_TYPE>(rms * factor));
    const float error = squared_error(scale);
    if (error < least) least = error, chosen = scale;
  }
  return chosen;
}

// What the scale is multiplied by so that the row's weighted product with its code, `reached` = sum w x decoded, becomes its weighted squared
// norm, `wanted` = sum w x^2; at least 0.8 and at most 1.6.
DEV float unbiased_factor(float wanted, float reached) { return fminf(fmaxf(__fdiv_rn(wanted, fmaxf(reached, FLOAT_TINY)), 0.8f), 1.6f); }
