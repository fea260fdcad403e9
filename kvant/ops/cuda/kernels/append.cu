// Appends new tokens: transforms rows, finds scales and codes, and stores them in pages and in the overlay. Serves any number of tokens;
// append_tiles.cu serves prompts faster.
//
// Grid: one dimension. A warp takes two neighbouring tokens of one head, which are four rows (key, key, value, value): eight lanes a row,
// LANE_CHANNELS neighbouring channels a lane. Two values at an even and the next odd slot share words of the page and are stored
// together; any other value stores its halves of words.

#pragma once
#include "codecs/encode_rows.cuh"
#include "include/append_stream.cuh"
#include "include/copies.cuh"

// --- transform ----------------------------------------------------------------------------------------------------------------

// apply_hadamard for the rows of one stream. The rows of the other stream compute along, since lanes that wait take as long.
template <class S> DEV void transform_stream(float* x, bool mine, const float* signs, int j, float* scratch) {
  float y[LANE_CHANNELS];
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) y[i] = x[i];
  apply_hadamard<S::HADAMARD>(y, signs, S::HADAMARD_SCALE, j, scratch);
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) x[i] = mine ? y[i] : x[i];
}

// x = H x - mean, with the Hadamard and the mean of the row's stream.
DEV void transform_row(const AppendArguments& a, float* x, bool is_key, int head, int j, float* scratch) {
  if constexpr (KeyStream::HADAMARD == ValueStream::HADAMARD && KeyStream::HADAMARD > 1) {
    apply_hadamard<KeyStream::HADAMARD>(x, is_key ? a.key_signs : a.value_signs, KeyStream::HADAMARD_SCALE, j, scratch);
  } else {
    if constexpr (KeyStream::HADAMARD > 1) transform_stream<KeyStream>(x, is_key, a.key_signs, j, scratch);
    if constexpr (ValueStream::HADAMARD > 1) transform_stream<ValueStream>(x, !is_key, a.value_signs, j, scratch);
  }
  const float* mean = is_key ? a.key_mean : a.value_mean;
  if (mean)
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) x[i] -= mean[head * D + j * LANE_CHANNELS + i];
}

// --- codes of either stream ---------------------------------------------------------------------------------------------------

template <class S> DEV u32 encode_stream(const AppendArguments& a, const float* x, u32* codes, int head, int j) {
  if constexpr (S::LEVELS > 0) {
    return encode_levels<S, 8>(x, codes);
  } else if constexpr (S::BANDED) {
    const float* weights = S::weights(a) ? S::weights(a) + head * D : nullptr;
    return encode_banded<S, 8>(x, codes, weights ? weights + j * LANE_CHANNELS : nullptr, S::flag_mean(a) + head * D + j * LANE_CHANNELS, j);
  } else {
    return encode_affine<S, 8>(x, codes);
  }
}

// Codes and scale of a row. Where the streams differ, every lane computes both and takes its own.
DEV u32 encode_row(const AppendArguments& a, const float* x, u32* codes, bool is_key, int head, int j) {
  using K = KeyStream;
  using V = ValueStream;
  if constexpr (K::LEVELS > 0 && V::LEVELS == K::LEVELS && K::SCALE_TYPE == V::SCALE_TYPE) {
    return encode_levels<K, 8>(x, codes);
  } else if constexpr (!K::BANDED && !V::BANDED && !K::LEVELS && !V::LEVELS && K::BITS == V::BITS && K::SCALE_FORM == V::SCALE_FORM && K::SCALE_TYPE == V::SCALE_TYPE && K::SEARCH == V::SEARCH && K::GROUPS == V::GROUPS) {
    return encode_affine<K, 8>(x, codes);
  } else {
    u32 value_codes[CODE_WORDS<8>];
    const u32 key_scale = encode_stream<K>(a, x, codes, head, j), value_scale = encode_stream<V>(a, x, value_codes, head, j);
    if (is_key) return key_scale;
#pragma unroll
    for (int i = 0; i < CODE_WORDS<8>; i++) codes[i] = value_codes[i];
    return value_scale;
  }
}

// --- stores -------------------------------------------------------------------------------------------------------------------

constexpr bool SEVERAL_SCALES = KeyStream::GROUPS > 1 || ValueStream::GROUPS > 1;  // a row has; a stream of one scale is stored alike

struct AppendShared {
  u8 codes[Config::WARPS][4][(D + 15) / 16 * 16];                     // of the four rows of a warp
  float scratch[POWER_OF_TWO_CHANNELS ? 1 : Config::WARPS][4][D];     // of apply_hadamard
};

// Stores the codes of a warp's four rows. Slots are those of its two tokens, -1 where there is none.
DEV void store_codes(const AppendArguments& a, const u8 (*codes)[(D + 15) / 16 * 16], const s64* slots, int head, int lane) {
  const s64 own = lane < 16 ? slots[0] : slots[1];  // sixteen lanes for the key of each token
  if (own >= 0)
    KeyStream::CodeBands::each([&](auto band) {
      using B = decltype(band);
      store_key_codes<B::WIDTH, B::BITS, B::OFFSET, B::HIGH_OFFSET>(page_head_of(a, own, head), PagePlace(own), codes[lane >> 4] + B::FIRST, lane & 15, 16);
    });
  constexpr int BITS = ValueStream::BITS, OFFSET = ValueStream::OFFSET, HIGH_OFFSET = ValueStream::HIGH_OFFSET;
  if (slots[0] >= 0 && slots[0] % 2 == 0 && slots[1] == slots[0] + 1) {
    store_value_codes<BITS, OFFSET, HIGH_OFFSET>(page_head_of(a, slots[0], head), PagePlace(slots[0]), codes[2], codes[3], lane);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (slots[i] >= 0) store_value_codes<BITS, OFFSET, HIGH_OFFSET>(page_head_of(a, slots[i], head), PagePlace(slots[i]), codes[2 + i], nullptr, lane);
  }
}

extern "C" __global__ void __launch_bounds__(Config::WARPS * 32) kvant_append(const AppendArguments a) {
  __shared__ __align__(16) AppendShared sh;
  // Locate: the row of this lane.
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 3, j = lane & 7;
  const s64 job = (s64)blockIdx.x * Config::WARPS + warp;
  const int head = (int)(job % Config::KV_HEADS), first = (int)(job / Config::KV_HEADS) * 2, token = first + (row & 1);
  launch_dependent_grids();  // which wait for this one before they read what it writes
  if (first >= a.tokens) return;
  const s64 slot = token < a.tokens ? a.slot_mapping[token] : -1;
  const bool is_key = row < 2;
  const s64 at = (s64)min(token, a.tokens - 1) * (is_key ? a.key_stride : a.value_stride) + head * D + j * LANE_CHANNELS;

  // Transform, and keep in the overlay.
  float x[LANE_CHANNELS];
  if (is_key) load_row<KeyStream::IN_TYPE>(x, a.key, at);
  else load_row<ValueStream::IN_TYPE>(x, a.value, at);
  transform_row(a, x, is_key, head, j, sh.scratch[POWER_OF_TWO_CHANNELS ? 0 : warp][row]);
  if (slot >= 0) {
    if (Config::RAW_WINDOW && is_key) store_raw_key<Config::RAW_TYPE>(a, token, head, j);
    else if (KeyStream::WINDOW_TYPE == ValueStream::WINDOW_TYPE || is_key) store_overlay<KeyStream::WINDOW_TYPE>(a, is_key ? a.overlay_key : a.overlay_value, x, token, head, j);
    else store_overlay<ValueStream::WINDOW_TYPE>(a, a.overlay_value, x, token, head, j);
  }

  // Scale and codes.
  if constexpr (KeyStream::CENTROIDS > 0)
    if (is_key) subtract_centroid<KeyStream, LANE_CHANNELS>(a, x, token, head, j * LANE_CHANNELS);
  if constexpr (ValueStream::CENTROIDS > 0)
    if (!is_key) subtract_centroid<ValueStream, LANE_CHANNELS>(a, x, token, head, j * LANE_CHANNELS);
  if constexpr (Config::CLIP) clip_row<LANE_CHANNELS>(x, clip_limit<LANE_CHANNELS, 1, 8>(x, is_key ? KeyStream::clip(a) : ValueStream::clip(a)));
  u32 codes[CODE_WORDS<8>];
  const u32 scale = encode_row(a, x, codes, is_key, head, j);
  if constexpr (SEVERAL_SCALES) {
    if (is_key) share_group_codes<KeyStream, 8>(sh.codes[warp][row], codes, j);
    else share_group_codes<ValueStream, 8>(sh.codes[warp][row], codes, j);
    const int over = is_key ? 8 / KeyStream::GROUPS : 8 / ValueStream::GROUPS;  // lanes of a scale
    if (j % over == 0 && slot >= 0)
      store_scale(page_head_of(a, slot, head), (is_key ? KeyStream::SCALE_OFFSET : ValueStream::SCALE_OFFSET) + j / over * (Config::PAGE_TOKENS * 4), is_key ? KeyStream::SCALE_FORM : ValueStream::SCALE_FORM, slot, scale);
  } else {
    share_codes<8>(sh.codes[warp][row], codes, j);
  }

  // Store.
  if (!SEVERAL_SCALES && j == 0 && slot >= 0)
    store_scale(page_head_of(a, slot, head), is_key ? KeyStream::SCALE_OFFSET : ValueStream::SCALE_OFFSET, is_key ? KeyStream::SCALE_FORM : ValueStream::SCALE_FORM, slot, scale);
  __syncwarp();
  const s64 slots[2] = {__shfl_sync(FULL, slot, 0), __shfl_sync(FULL, slot, 8)};
  store_codes(a, sh.codes[warp], slots, head, lane);
}
