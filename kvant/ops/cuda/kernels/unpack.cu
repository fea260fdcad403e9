// Tokens of one sequence as they are stored, from pages and windows to 16-bit numbers: what prefill reads of a history.
//
// Constants beside those of common.cu: VALUES (0 keys, 1 values), BANDS, META (0 scale and minimum, 1 scale and integer zero, 2
// scale), META_TYPE, META_OFFSET, FLAG (a negative scale says that the mean was taken off), SINK, RING, WINDOW_TOKENS,
// WINDOW_TYPE, OUT_TYPE, WARPS.

#include "include/common.cuh"

struct UnpackArguments {
  const u8* pages;
  const s64* table;  // of the sequence
  const void* window;
  const s64 *owner, *sinks, *exact;  // of the sequence
  const float* mean;
  void* out;  // [KV_HEADS, count, D]
  int first, count, n, frontier;  // tokens [first, first + count) of n, of which those from the frontier on may be in the window
};

struct Scale {
  float scale, zero;
};
DEV Scale scale_of(const u8* run, int token) {  // of a token of the page
  const int place = token % 8 * (PAGE / 8) + token / 8;
  if constexpr (META == 2) return {low<META_TYPE>(*(const u16*)(run + META_OFFSET + place * 2)), 0.f};
  const u32 x = *(const u32*)(run + META_OFFSET + place * 4);
  return {low<META_TYPE>(x), high<META_TYPE>(x)};
}
DEV float number(float code, float top, float step, const Scale& by) {
  if constexpr (META == 0) return fmaf(code, by.scale, by.zero);
  if constexpr (META == 1) return (code - by.zero) * by.scale;
  return (code - top * 0.5f) * (step * fabsf(by.scale));
}

// WIDTH channels from FIRST on, codes of BITS bits from byte OFFSET of the run on (the high plane of three-bit codes from HIGH on); levels
// are STEP / 2^20 apart where there is a scale alone.
template <int WIDTH_, int BITS_, int OFFSET_, int HIGH_, int FIRST_, int STEP_> struct Band {
  static constexpr int WIDTH = WIDTH_, BITS = BITS_, OFFSET = OFFSET_, HIGH = HIGH_, FIRST = FIRST_;
  static constexpr float TOP = (1 << BITS) - 1, STEP = STEP_ / 1048576.f;
};

// Codes of a plane for the two rows of a lane, added to `codes` times WEIGHT.
template <class P, int N> DEV void add_codes(const u8* run, int tile, int lane, int weight, int (&codes)[2][N]) {
  u32 w[P::WORDS];
  load_words<P::WORDS>(w, run + P::OFFSET + (tile * 32 + lane) * P::WORDS * 4);
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

// A lane's share of a tile of keys: tokens g and g + 8, a quarter of a band's channels. Rows where `skip` are not written.
template <class B> DEV void unpack_keys(const u8* run, int tile, int lane, u8* const* rows, const bool* skip) {
  constexpr int N = B::WIDTH / 4;
  const int g = lane >> 2, t = lane & 3;
  int codes[2][N];
#pragma unroll
  for (int row = 0; row < 2; row++)
#pragma unroll
    for (int j = 0; j < N; j++) codes[row][j] = 0;
  if constexpr (B::BITS != 0) {
    add_codes<KeyPlane<B::WIDTH, B::BITS == 3 ? 2 : B::BITS, B::OFFSET, 0, 1, 0>>(run, tile, lane, 1, codes);
    if constexpr (B::BITS == 3) add_codes<KeyPlane<B::WIDTH, 1, B::HIGH, 0, 1, 0>>(run, tile, lane, 4, codes);
  }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    if (skip[row]) continue;
    const Scale by = scale_of(run, tile * 16 + row * 8 + g);
    u32 w[N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
      float x = 0.f, y = 0.f;
      if constexpr (B::BITS != 0) x = number((float)codes[row][2 * j], B::TOP, B::STEP, by), y = number((float)codes[row][2 * j + 1], B::TOP, B::STEP, by);
      w[j] = pair_of<OUT_TYPE>(x, y);
    }
    store_words<N / 2>(rows[row] + (B::FIRST + t * N) * 2, w);
  }
}

// A lane's share of a tile of values: tokens 2t, 2t + 1 and the same eight on, an eighth of the channels.
template <class B> DEV void unpack_values(const u8* run, int tile, int lane, u8* const* rows, const bool* skip, const float* mean) {
  constexpr int N = B::WIDTH / 8;
  using Codes = ValueCodes<B::WIDTH, B::BITS, B::OFFSET, B::HIGH, 1>;
  const int g = lane >> 2, t = lane & 3;
  Codes codes;
  codes.load(run, tile, lane);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    if (skip[r]) continue;
    const Scale by = scale_of(run, tile * 16 + (r >> 1) * 8 + 2 * t + (r & 1));
    float x[N];
#pragma unroll
    for (int e = 0; e < N; e++) {
      const int place = (r >> 1) * N + e, half = (r & 1) * 16;
      u32 code = codes.w[place / Codes::PER] >> (half + bit_of<Codes::LOW_BITS>(place)) & ((1u << Codes::LOW_BITS) - 1u);
      if constexpr (B::BITS == 3) code += (codes.h[place / 16] >> (half + place % 16) & 1u) * 4u;
      x[e] = number((float)code, B::TOP, B::STEP, by);
      if (FLAG && by.scale < 0.f) x[e] += mean[g * N + e];
    }
    u32 w[N / 2];
#pragma unroll
    for (int e = 0; e < N / 2; e++) w[e] = pair_of<OUT_TYPE>(x[2 * e], x[2 * e + 1]);
    store_words<N / 2>(rows[r] + (B::FIRST + g * N) * 2, w);
  }
}

template <class... B> struct AllBands {
  DEV static void unpack(const u8* run, int tile, int lane, u8* const* rows, const bool* skip, const float* mean) {
    if constexpr (VALUES) (unpack_values<B>(run, tile, lane, rows, skip, mean), ...);
    else (unpack_keys<B>(run, tile, lane, rows, skip), ...);
  }
};

// A warp has a tile of 16 tokens of a head.
extern "C" __global__ void __launch_bounds__(WARPS * 32) kvant_unpack(const UnpackArguments a) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, head = blockIdx.y;
  constexpr int ROWS = VALUES ? 4 : 2;
  int sinks = 0, recent = a.n;
  s64 owner = 0;
  if (WINDOW_TOKENS) sinks = min((int)*a.sinks, a.n), recent = max(a.frontier, (int)*a.exact), owner = *a.owner;
  for (int tile = blockIdx.x * WARPS + warp; tile * 16 < a.count; tile += gridDim.x * WARPS) {
    const int at = a.first + tile * 16;
    const s64 page = a.table[at / PAGE];
    const u8* run = a.pages + ((page < 0 ? 0 : page) * KV_HEADS + head) * RUN;
    u8* rows[ROWS];
    bool skip[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int token = tile * 16 + (VALUES ? (r >> 1) * 8 + 2 * t + (r & 1) : r * 8 + g), position = a.first + token;
      rows[r] = (u8*)a.out + ((s64)head * a.count + min(token, a.count - 1)) * HEAD_DIM * 2;
      const bool full = WINDOW_TOKENS && (position < sinks || position >= recent);
      skip[r] = token >= a.count || full;
      if (full && token < a.count) {  // the lanes that share the token copy it
        constexpr int SHARE = VALUES ? HEAD_DIM / 8 : HEAD_DIM / 4;
        const int place = position < SINK ? position : SINK + (position - SINK) % RING, part = (VALUES ? g : t) * SHARE;
        const s64 from = ((owner * WINDOW_TOKENS + place) * KV_HEADS + head) * HEAD_DIM + part;
        for (int e = 0; e < SHARE; e++) store_number<OUT_TYPE>(rows[r], part + e, load_number<WINDOW_TYPE>(a.window, from + e));
      }
    }
    BANDS::unpack(run, at % PAGE / 16, lane, rows, skip, FLAG ? a.mean + head * HEAD_DIM : nullptr);
  }
}

// --- keys turned to their positions -------------------------------------------------------------------------------------

struct ForthArguments {
  void* keys;  // [KV_HEADS, count, D], in place
  const float *cosine, *sine;  // [blocks, half]
  int first, count, half, size, offset;  // of the first token; positions of a block; position of the sequence's first token
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) kvant_turn_forth(const ForthArguments a) {
  const int pairs = a.half / 2, rows = KV_HEADS * a.count;
  for (s64 i = (s64)blockIdx.x * WARPS * 32 + threadIdx.x; i < (s64)rows * pairs; i += (s64)gridDim.x * WARPS * 32) {
    const int row = (int)(i / pairs), c = (int)(i % pairs) * 2, position = a.first + row % a.count + a.offset;
    const s64 block = position / a.size - a.offset / a.size;
    u32* low_half = (u32*)((u16*)a.keys + (s64)row * HEAD_DIM + c);
    u32* high_half = (u32*)((u16*)a.keys + (s64)row * HEAD_DIM + a.half + c);
    const u32 x = *low_half, y = *high_half;
    const float2 by = *(const float2*)(a.cosine + block * a.half + c), across = *(const float2*)(a.sine + block * a.half + c);
    const float x0 = low<OUT_TYPE>(x), x1 = high<OUT_TYPE>(x), y0 = low<OUT_TYPE>(y), y1 = high<OUT_TYPE>(y);
    *low_half = pair_of<OUT_TYPE>(x0 * by.x - y0 * across.x, x1 * by.y - y1 * across.y);
    *high_half = pair_of<OUT_TYPE>(y0 * by.x + x0 * across.x, y1 * by.y + x1 * across.y);
  }
}
