// Appends the few new tokens of a decode step where rows are multiplied by a matrix or unrotated: does what append.cu does after transform_kv,
// in one launch, with the products on the tensor cores. Also serves prompts whose codes append_tiles.cu does not write.
//
// Grid: (any, 2 KV_HEADS). A CTA has one stream of one head, keys or values, and every gridDim.x-th tile of 16 tokens, which may be of different
// sequences: a warp a token. Its latency is what counts. Loads are begun before anything waits: a token's slot, sequence and row, then the
// matrix, which stays in registers; after them, only cosines depend on what was loaded. Where the kernel starts before the one before it has ended
// (EARLY), it loads the matrix and other constants meanwhile, and waits.

#pragma once
#include "codecs/clip_rank.cuh"
#include "codecs/encode_rows.cuh"
#include "include/append_stream.cuh"
#include "include/copies.cuh"
#include "include/step_transform.cuh"

// A token of a warp.
template <class S> struct StepToken {
  static constexpr bool PLACED = S::ROPE_BLOCK > 0 || Config::OVERLAY_TOKENS > 0;  // whether its place in its sequence matters
  s64 slot;  // -1 where there is no such token
  NewToken found;
  StepRow<S> row;

  // Begins to load it; where there are not so many tokens, the last one.
  DEV void load(const AppendArguments& a, int token, int head, int lane) {
    const int there = min(token, a.tokens - 1);
    slot = a.slot_mapping[there];
    if constexpr (PLACED) found.load(a, there);
    row.load(a, there, head, lane);
  }
  // The same before wait_prior_grid: no number is read, but addresses are computed then.
  DEV static void prefetch(const AppendArguments& a, int token, int head, int lane) {
    const int there = min(token, a.tokens - 1);
    prefetch_l2(a.slot_mapping + there);
    if constexpr (PLACED) NewToken::prefetch(a, there);
    StepRow<S>::prefetch(a, there, head, lane);
  }
  // Waits for it; returns its position.
  DEV s64 position(const AppendArguments& a, int token) {
    slot = token < a.tokens ? slot : -1;
    if constexpr (!PLACED) return 0;
    found.find(a, min(token, a.tokens - 1), slot >= 0);
    return found.position(min(token, a.tokens - 1));
  }
};

// Constants of a lane's channels.
template <class S> struct StepChannels {
  float mean[STEP_CHANNELS], weights[STEP_CHANNELS], flag_mean[STEP_CHANNELS];

  DEV void load(const AppendArguments& a, int head, int lane) {
    const int at = head * D + lane * STEP_CHANNELS;
#pragma unroll
    for (int i = 0; i < STEP_CHANNELS; i++) mean[i] = 0.f, weights[i] = 1.f, flag_mean[i] = 0.f;
    if constexpr (S::MEAN) load_floats<STEP_CHANNELS>(mean, S::mean(a) + at);
    if constexpr (S::WEIGHTED)
      if (S::weights(a)) load_floats<STEP_CHANNELS>(weights, S::weights(a) + at);
    if constexpr (S::FLAG) load_floats<STEP_CHANNELS>(flag_mean, S::flag_mean(a) + at);
  }
};

// Clips the row x of a warp; codes and scale to the page of its slot. Padding, which has no slot, is computed too: the compiler then knows that lanes stay together.
template <class S> DEV void store_row(const AppendArguments& a, float* x, float times, const ClipBins& bins, const StepChannels<S>& about, u8* bytes, s64 slot, u8* page_head, int lane) {
  constexpr bool AFFINE = S::LEVELS == 0 && !S::BANDED;
  u32 codes[CODE_WORDS<32>], scale;
  float least, most;
  if constexpr (AFFINE) row_range<32, 32 / S::GROUPS>(x, least, most);  // no step waits for it here; of the clipped row, it is the range clipped
  if constexpr (Config::CLIP) {
    const Clip clip = S::clip(a);
    if (clip.drop) {
      const float limit = clip_limit_of_warp<STEP_CHANNELS>(x, inverse_mean<S>(x, times), bins, clip);
      clip_row<STEP_CHANNELS>(x, limit);
      if constexpr (AFFINE) clip_row<1>(&least, limit), clip_row<1>(&most, limit);
    }
  }
  if constexpr (S::LEVELS > 0) scale = encode_levels<S, 32>(x, codes);
  else if constexpr (S::BANDED) scale = encode_banded<S, 32>(x, codes, S::WEIGHTED ? about.weights : nullptr, about.flag_mean, lane);
  else scale = encode_affine<S, 32>(x, least, most, codes);
  const bool wanted = slot >= 0;
  if constexpr (S::GROUPS > 1) {
    constexpr int OVER = 32 / S::GROUPS;  // lanes of a scale
    share_group_codes<S, 32>(bytes, codes, lane);
    if (wanted && lane % OVER == 0) store_scale(page_head, S::SCALE_OFFSET + lane / OVER * (Config::PAGE_TOKENS * 4), S::SCALE_FORM, slot, scale);
  } else {
    share_codes<32>(bytes, codes, lane);
  }
  if (S::GROUPS == 1 && wanted && lane == 0) store_scale(page_head, S::SCALE_OFFSET, S::SCALE_FORM, slot, scale);
  __syncwarp();
  if (wanted) {
    if constexpr (S::KEY) {
      S::CodeBands::each([&](auto band) {
        using B = decltype(band);
        store_key_codes<B::WIDTH, B::BITS, B::OFFSET, B::HIGH_OFFSET>(page_head, PagePlace(slot), bytes + B::FIRST, lane, 32);
      });
    } else {
      store_value_codes<S::BITS, S::OFFSET, S::HIGH_OFFSET>(page_head, PagePlace(slot), bytes, nullptr, lane);
    }
  }
  __syncwarp();
}

template <class S> DEV void append_stream(const AppendArguments& a, StepShared& sh, u8* bytes, int head) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, apart = gridDim.x * STEP_TOKENS;
  int first = blockIdx.x * STEP_TOKENS;
  if (first >= a.tokens) {
    if constexpr (Config::EARLY) wait_prior_grid();  // the next kernel waits for this one alone
    return;
  }
  StepToken<S> token;
  if constexpr (!Config::EARLY) token.load(a, first + warp, head, lane);
  MatrixShare<S> matrix;
  if constexpr (S::MATRIX_PARTS > 0) matrix.load(a, head, warp, lane);
  StepChannels<S> about;
  about.load(a, head, lane);
  const ClipBins bins(S::clip(a));
  if constexpr (Config::EARLY) {
    StepToken<S>::prefetch(a, first + warp, head, lane);
    wait_prior_grid();
    launch_dependent_grids();  // after the wait: they may read what kernels before this one wrote
    token.load(a, first + warp, head, lane);
  }
  while (true) {
    // Transform.
    float x[STEP_CHANNELS];
    const s64 position = token.position(a, first + warp);
    const int block = S::ROPE_BLOCK > 0 ? rope_block_of<S::ROPE_BLOCK>(a, (int)position) : 0;
    const s64 slot = token.slot, at = Config::OVERLAY_TOKENS > 0 ? overlay_place(token.found.overlay_row, token.found.length, position) : -1;
    u8* page_head = (u8*)pointer_register(page_head_of(a, slot, head));
    const float times = transform_step<S>(a, sh, token.row, matrix, about.mean, block, warp, lane, x);
    constexpr bool RAW = S::KEY && Config::RAW_WINDOW, OVERLAY = Config::OVERLAY_TOKENS > 0;
    if constexpr (RAW && OVERLAY)
      if (slot >= 0) token.row.store_raw(a, at, head, lane);
    first += apart;
    if (first < a.tokens) token.load(a, first + warp, head, lane);

    // Keep in the overlay, and code.
    if constexpr (OVERLAY && !RAW)
      if (slot >= 0) store_overlay_row<S::WINDOW_TYPE, 32>(S::overlay(a), x, at, head, lane);
    store_row<S>(a, x, times, bins, about, bytes, slot, page_head, lane);
    if (first >= a.tokens) return;
  }
}

extern "C" __global__ void __launch_bounds__(Config::STEP_WARPS * 32, Config::STEP_CTAS) kvant_append_step(const AppendArguments a) {
  __shared__ __align__(16) StepShared sh;
  __shared__ __align__(16) u8 bytes[STEP_TOKENS][(D + 15) / 16 * 16];  // codes of the row of each warp
  const int head = blockIdx.y % Config::KV_HEADS, warp = threadIdx.x >> 5;
  if constexpr (!Config::EARLY) launch_dependent_grids();  // which wait for this one before they read what it writes
  if (blockIdx.y < Config::KV_HEADS) append_stream<KeyStream>(a, sh, bytes[warp], head);
  else append_stream<ValueStream>(a, sh, bytes[warp], head);
}
