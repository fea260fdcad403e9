// Unpacks the stored tokens of one sequence to 16-bit rows [KV_HEADS, count, D], from its pages and its overlay row. Prefill reads a
// history like this. A second kernel rotates unpacked keys by the start of their RoPE block, which gives them their positions.
//
// Grid of kvant_unpack: (any, KV_HEADS). A warp takes 16 tokens of a head at a time: one tile of a page, in the fragment order of decode.

#pragma once
#include "include/bands.cuh"
#include "codecs/tokenwise.cuh"

using Stream = Config::Stream;
constexpr int D = Config::HEAD_DIM;

struct Scale {
  float scale, zero;  // zero is the minimum, or the integer zero point
};

// The scale of a token of the page. Scales lie in the order in which lanes need them: token % 8 first, then token / 8.
DEV Scale load_scale(const u8* page_head, int token) {
  const int place = token % 8 * (Config::PAGE_TOKENS / 8) + token / 8;
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE) return {low<Stream::SCALE_TYPE>(*(const u16*)(page_head + Stream::SCALE_OFFSET + place * 2)), 0.f};
  const u32 x = *(const u32*)(page_head + Stream::SCALE_OFFSET + place * 4);
  return {low<Stream::SCALE_TYPE>(x), high<Stream::SCALE_TYPE>(x)};
}

// The number that a code of band B stands for. The sign of a scale alone is a flag, see `unpack_values`.
template <class B> DEV float decode_number(float code, const Scale& s) {
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE_MIN) return fmaf(code, s.scale, s.zero);
  if constexpr (Stream::SCALE_FORM == ScaleForm::SCALE_ZERO) return (code - s.zero) * s.scale;
  return (code - B::TOP * 0.5f) * (B::WEIGHT * fabsf(s.scale));
}

// Adds a plane of key codes, times `weight`, to `codes`: two rows of a lane (tokens g and g + 8 of the tile), N channels each.
template <class P, int N> DEV void add_key_plane(const u8* page_head, int tile, int lane, int weight, int (&codes)[2][N]) {
  u32 w[P::WORDS];
  load_words<P::WORDS>(w, page_head + P::OFFSET + (tile * 32 + lane) * P::WORDS * 4);
#pragma unroll
  for (int row = 0; row < 2; row++)
#pragma unroll
    for (int i = 0; i < P::ROW_WORDS * P::PER; i++) {
      const u32 x = P::get(w, row, i) >> P::raised(i);
#pragma unroll
      for (int byte = 0; byte < 4; byte++) {
        const int pair = i / P::PER * (16 / P::BITS) + (byte & 1) * P::PER + i % P::PER;
        if (pair < P::WIDTH / 8) codes[row][2 * pair + (byte >> 1)] += (int)(x >> (8 * byte) & (u32)P::TOP) * weight;
      }
    }
}

// A lane's share of one band of a tile of keys: tokens g and g + 8, a quarter of the channels. A row where `skip` is set is not written.
template <class B> DEV void unpack_keys(const u8* page_head, int tile, int lane, u8* const* rows, const bool* skip) {
  constexpr int N = B::WIDTH / 4;
  const int g = lane >> 2, t = lane & 3;
  int codes[2][N];
#pragma unroll
  for (int row = 0; row < 2; row++)
#pragma unroll
    for (int j = 0; j < N; j++) codes[row][j] = 0;
  if constexpr (B::BITS != 0) {
    add_key_plane<KeyPlane<B::WIDTH, B::BITS == 3 ? 2 : B::BITS, B::OFFSET, 0, 1, 0>>(page_head, tile, lane, 1, codes);
    if constexpr (B::BITS == 3) add_key_plane<KeyPlane<B::WIDTH, 1, B::HIGH_OFFSET, 0, 1, 0>>(page_head, tile, lane, 4, codes);
  }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    if (skip[row]) continue;
    const Scale s = load_scale(page_head, tile * 16 + row * 8 + g);
    u32 w[N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
      float x = 0.f, y = 0.f;
      if constexpr (B::BITS != 0) x = decode_number<B>((float)codes[row][2 * j], s), y = decode_number<B>((float)codes[row][2 * j + 1], s);
      w[j] = pair_of<Config::OUT_TYPE>(x, y);
    }
    store_words<N / 2>(rows[row] + (B::FIRST + t * N) * 2, w);
  }
}

// A lane's share of a tile of values: tokens 2t, 2t + 1, 2t + 8 and 2t + 9, an eighth of the channels. Where the stream has a FLAG, a
// negative scale says that the mean [D] was subtracted before the row was coded, and it is added here.
template <class B> DEV void unpack_values(const u8* page_head, int tile, int lane, u8* const* rows, const bool* skip, const float* mean) {
  constexpr int N = B::WIDTH / 8;
  using Codes = ValueCodes<B::WIDTH, B::BITS, B::OFFSET, B::HIGH_OFFSET, 1>;
  const int g = lane >> 2, t = lane & 3;
  Codes codes;
  codes.load(page_head, tile, lane);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    if (skip[r]) continue;
    const Scale s = load_scale(page_head, tile * 16 + (r >> 1) * 8 + 2 * t + (r & 1));
    float x[N];
#pragma unroll
    for (int e = 0; e < N; e++) {
      const int place = (r >> 1) * N + e, half = (r & 1) * 16;
      u32 code = codes.w[place / Codes::PER] >> (half + bit_of<Codes::LOW_BITS>(place)) & ((1u << Codes::LOW_BITS) - 1u);
      if constexpr (B::BITS == 3) code += (codes.h[place / 16] >> (half + place % 16) & 1u) * 4u;
      x[e] = decode_number<B>((float)code, s);
      if (Stream::FLAG && s.scale < 0.f) x[e] += mean[g * N + e];
    }
    u32 w[N / 2];
#pragma unroll
    for (int e = 0; e < N / 2; e++) w[e] = pair_of<Config::OUT_TYPE>(x[2 * e], x[2 * e + 1]);
    store_words<N / 2>(rows[r] + (B::FIRST + g * N) * 2, w);
  }
}

// A lane's share of the overlay's row of a token: the lanes that would unpack the token copy it together.
DEV void copy_overlay(const UnpackArguments& a, u8* out, int position, s64 overlay_row, int head, int share_index) {
  constexpr int SHARE = Config::VALUES ? D / 8 : D / 4;
  const int place = position < Config::SINK ? position : Config::SINK + (position - Config::SINK) % Config::RING, part = share_index * SHARE;
  const s64 from = ((overlay_row * Config::OVERLAY_TOKENS + place) * Config::KV_HEADS + head) * D + part;
  for (int e = 0; e < SHARE; e++) store_number<Config::OUT_TYPE>(out, part + e, load_number<Config::OVERLAY_TYPE>(a.overlay, from + e));
}

extern "C" __global__ void __launch_bounds__(Config::WARPS * 32) kvant_unpack(const UnpackArguments a) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, head = blockIdx.y;
  constexpr int ROWS = Config::VALUES ? 4 : 2;  // tokens of a lane
  int sinks = 0, ring_start = a.seq_len;  // positions before the one and from the other on are in the overlay
  s64 overlay_row = 0;
  if (Config::OVERLAY_TOKENS) sinks = min((int)*a.sinks, a.seq_len), ring_start = max(a.packed_end, (int)*a.ring_start), overlay_row = *a.overlay_row;
  for (int tile = blockIdx.x * Config::WARPS + warp; tile * 16 < a.count; tile += gridDim.x * Config::WARPS) {
    const int at = a.first + tile * 16;
    const s64 page = a.block_table[at / Config::PAGE_TOKENS];  // -1 where the overlay has all of the page
    const u8* page_head = a.pages + ((page < 0 ? 0 : page) * Config::KV_HEADS + head) * Config::PAGE_HEAD_BYTES;
    u8* rows[ROWS];
    bool skip[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int token = tile * 16 + (Config::VALUES ? (r >> 1) * 8 + 2 * t + (r & 1) : r * 8 + g), position = a.first + token;
      rows[r] = (u8*)a.out + ((s64)head * a.count + min(token, a.count - 1)) * D * 2;
      const bool in_overlay = Config::OVERLAY_TOKENS && (position < sinks || position >= ring_start);
      skip[r] = token >= a.count || in_overlay;
      if (in_overlay && token < a.count) copy_overlay(a, rows[r], position, overlay_row, head, Config::VALUES ? g : t);
    }
    Stream::AllBands::each([&](auto band) {
      using B = decltype(band);
      if constexpr (Config::VALUES) unpack_values<B>(page_head, at % Config::PAGE_TOKENS / 16, lane, rows, skip, Stream::FLAG ? a.mean + head * D : nullptr);
      else unpack_keys<B>(page_head, at % Config::PAGE_TOKENS / 16, lane, rows, skip);
    });
  }
}

// Rotates keys [KV_HEADS, count, D] in place. A stored key has the rotation of its offset inside its RoPE block; this adds the angle phi of
// the block's start. For the pair of channels (c, c + half):  x' = x cos phi - y sin phi,  y' = y cos phi + x sin phi.
// A thread has channels c and c + 1 of both halves.
extern "C" __global__ void __launch_bounds__(Config::WARPS * 32) kvant_rotate_keys(const RotateKeysArguments a) {
  constexpr int TYPE = Config::OUT_TYPE, THREADS = Config::WARPS * 32;
  const int pairs = a.half / 2, rows = Config::KV_HEADS * a.count;
  for (s64 i = (s64)blockIdx.x * THREADS + threadIdx.x; i < (s64)rows * pairs; i += (s64)gridDim.x * THREADS) {
    const int row = (int)(i / pairs), c = (int)(i % pairs) * 2, position = a.first + row % a.count + a.rope_first;
    const s64 block = position / a.rope_block - a.rope_first / a.rope_block;
    u32* low_half = (u32*)((u16*)a.keys + (s64)row * D + c);
    u32* high_half = (u32*)((u16*)a.keys + (s64)row * D + a.half + c);
    const u32 x = *low_half, y = *high_half;
    const float2 cosine = *(const float2*)(a.cosine + block * a.half + c), sine = *(const float2*)(a.sine + block * a.half + c);
    const float x0 = low<TYPE>(x), x1 = high<TYPE>(x), y0 = low<TYPE>(y), y1 = high<TYPE>(y);
    *low_half = pair_of<TYPE>(x0 * cosine.x - y0 * sine.x, x1 * cosine.y - y1 * sine.y);
    *high_half = pair_of<TYPE>(y0 * cosine.x + x0 * sine.x, y1 * cosine.y + x1 * sine.y);
  }
}
