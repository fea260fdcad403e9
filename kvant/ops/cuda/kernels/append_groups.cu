// Stores new tokens where keys are coded per channel over groups of tokens: first the groups that they complete, whose older tokens
// come from the window's tail; then, token by token, values and windows.
//
// Constants beside those of common.cu: KEY_TYPE, VALUE_TYPE (of the input), KEY_GROUP, KEY_PLANES (of the codes), KEY_BITS, KEY_META_OFFSET, BOOSTED (channels
// with two high bits more), HIGH_OFFSET, INDEX_OFFSET, VALUE_PLANES, VALUE_BITS, VALUE_GROUPS, VALUE_ORDER_GROUPS (that the order of the codes looks at), VALUE_META_TYPE, VALUE_META_OFFSET, ORIGIN, SINK,
// KEY_RECENT, KEY_FLUSH, KEY_RING, KEY_WINDOW, VALUE_RING, VALUE_RING_TOKENS, VALUE_WINDOW, WINDOW_TYPE, WARPS, SPARE (groups that a sequence's tail may complete).

#include "include/common.cuh"
#include "include/tokens.cuh"

constexpr int D = HEAD_DIM, THREADS = WARPS * 32;

struct Arguments {
  const void *key, *value;  // [tokens, KV_HEADS, D], in the space of attention
  u8* pages;
  const s64 *table, *query_start_loc, *seq_lens, *overlay_rows, *exact_key;
  void *window_key, *window_value;
  int tokens, batch, half_batch, table_width;  // half_batch is the largest power of two below the batch, or 0
};

// A plane of codes: BITS bits from bit SHIFT of the code on, from byte OFFSET of the run on.
template <int BITS_, int SHIFT_, int OFFSET_> struct Plane {
  static constexpr int BITS = BITS_, SHIFT = SHIFT_, OFFSET = OFFSET_;
};
template <class... P> struct Planes {
  template <class F> DEV static void each(F f) { (f(P{}), ...); }
};

template <int TYPE> DEV float rounded(float x) { return TYPE == 0 ? bf16_low(bf16_pair(x, 0.f)) : fp16_low(fp16_pair(x, 0.f)); }
template <int TYPE> DEV u32 bits_of(float x) { return (TYPE == 0 ? bf16_pair(x, 0.f) : fp16_pair(x, 0.f)) & 0xffffu; }

struct Scale {
  float scale, least;
};
// As kvant.codecs computes them from a range. LIMIT: the largest number of the type.
template <int TYPE> DEV Scale scale_of(float least, float most, float top) {
  constexpr float TINY = TYPE == 0 ? 1.17549435e-38f : 6.103515625e-05f, LIMIT = TYPE == 0 ? 3.3895313892515355e38f : 65504.f;
  least = rounded<TYPE>(fminf(fmaxf(least, -LIMIT), LIMIT));
  return {rounded<TYPE>(fminf(fmaxf(__fdiv_rn(most - least, top), TINY), LIMIT)), least};
}
DEV int code_of(float x, Scale s, float top) { return (int)fminf(fmaxf(rintf(__fdiv_rn(x - s.least, s.scale)), 0.f), top); }

DEV int packed_end(int n) { return min(n, SINK) + max(0, n - SINK - KEY_RECENT) / KEY_FLUSH * KEY_FLUSH; }
// Groups are numbered from here on for a sequence: no two of them have the same number, and the grid does not depend on what is completed.
DEV int first_unit(const Arguments& a, int b) { return (int)(a.query_start_loc[b] / KEY_GROUP) + b * SPARE; }

// --- keys -------------------------------------------------------------------------------------------------------------

struct GroupShared {
  float scale[D], least[D], top[D];
  double strength[BOOSTED ? D : 1];
  u8 chosen[D], channels[D];
};

#if BOOSTED
// Marks the channels with the largest sums of magnitudes, the first ones where they are equal, and lists them in order.
DEV void choose(GroupShared& sh) {
  for (int c = threadIdx.x; c < D; c += THREADS) {
    int rank = 0;
    for (int i = 0; i < D; i++) rank += sh.strength[i] > sh.strength[c] || (sh.strength[i] == sh.strength[c] && i < c);
    sh.chosen[c] = rank < BOOSTED;
  }
  __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32) kvant_append_groups(const Arguments a) {
  DYNAMIC_SHARED(dynamic);
  __shared__ __align__(16) GroupShared sh;
  u16* x = (u16*)dynamic;  // [KEY_GROUP, D]: keys as the window holds them, then codes
  const int unit = blockIdx.x, head = blockIdx.y;
  const int b = last_sequence(a.batch, a.half_batch, [&](int i) { return first_unit(a, i) <= unit; });
  const int total = (int)a.seq_lens[b], start = (int)a.query_start_loc[b], before = total - ((int)a.query_start_loc[b + 1] - start);
  const int position = max(max(SINK, packed_end(before)), (int)a.exact_key[b]) + (unit - first_unit(a, b)) * KEY_GROUP;
  if (position + KEY_GROUP > packed_end(total)) return;
  const u16* tail = (const u16*)a.window_key;
  for (int i = threadIdx.x; i < KEY_GROUP * D; i += THREADS) {
    const int at = position + i / D;
    if (at < before) x[i] = tail[((a.overlay_rows[b] * KEY_WINDOW + SINK + (at - SINK) % KEY_RING) * KV_HEADS + head) * D + i % D];
    else x[i] = (u16)bits_of<WINDOW_TYPE>(load_number<KEY_TYPE>(a.key, ((s64)(start + at - before) * KV_HEADS + head) * D + i % D));
  }
  __syncthreads();

  const int in_page = (position - ORIGIN) % PAGE, group = in_page / KEY_GROUP;
  u8* run = a.pages + (a.table[(s64)b * a.table_width + (position - ORIGIN) / PAGE] * KV_HEADS + head) * RUN;
  for (int c = threadIdx.x; c < D; c += THREADS) {
    float least = low<WINDOW_TYPE>(x[c]), most = least;
    double strength = 0.;  // exact, so in any order the same
    for (int i = 0; i < KEY_GROUP; i++) {
      const float y = low<WINDOW_TYPE>(x[i * D + c]);
      least = fminf(least, y), most = fmaxf(most, y);
      if (BOOSTED) strength += fabsf(y);
    }
    sh.least[c] = least, sh.scale[c] = most;
    if (BOOSTED) sh.strength[BOOSTED ? c : 0] = strength;
  }
  __syncthreads();
#if BOOSTED
  choose(sh);
#endif
  for (int c = threadIdx.x; c < D; c += THREADS) {
    float top = (1 << KEY_BITS) - 1;
#if BOOSTED
    int row = 0;
    for (int i = 0; i < c; i++) row += sh.chosen[i];
    if (sh.chosen[c]) sh.channels[row] = (u8)c, top = 15.f;
    run[INDEX_OFFSET + group * D + c] = (u8)(sh.chosen[c] ? row : min(BOOSTED, 255));
#endif
    const Scale s = scale_of<1>(sh.least[c], sh.scale[c], top);
    sh.scale[c] = s.scale, sh.least[c] = s.least, sh.top[c] = top;
    u16* meta = (u16*)(run + KEY_META_OFFSET) + group * 2 * D;
    meta[c] = (u16)bits_of<1>(s.scale), meta[D + c] = (u16)bits_of<1>(s.least);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < KEY_GROUP * D; i += THREADS) {
    const int c = i % D;
    x[i] = (u16)code_of(low<WINDOW_TYPE>(x[i]), {sh.scale[c], sh.least[c]}, sh.top[c]);
  }
  __syncthreads();
  KEY_PLANES::each([&](auto plane) {
    using P = decltype(plane);
    constexpr int PER = 16 / P::BITS, WORDS = D * P::BITS / 64;  // codes of half a word; words of a lane and tile
    u32* words = (u32*)(run + P::OFFSET) + in_page / 16 * 32 * WORDS;
    for (int i = threadIdx.x; i < KEY_GROUP / 16 * 32 * WORDS; i += THREADS) {
      const int word = i % WORDS, lane = i / WORDS % 32, tile = i / WORDS / 32;
      u32 packed = 0;
#pragma unroll
      for (int slot = 0; slot < PER; slot++) {
        const int place = word * PER + slot, row = place / (D / 8), channel = lane % 4 * (D / 4) + 2 * (place % (D / 8));
        const u16* code = x + (tile * 16 + row * 8 + lane / 4) * D + channel;
        constexpr u32 MASK = (1u << P::BITS) - 1;
        packed |= ((u32)code[0] >> P::SHIFT & MASK) << slot * P::BITS | ((u32)code[1] >> P::SHIFT & MASK) << (16 + slot * P::BITS);
      }
      words[i] = packed;
    }
  });
#if BOOSTED
  for (int i = threadIdx.x; i < KEY_GROUP * (BOOSTED / 4); i += THREADS) {
    const int token = i / (BOOSTED / 4), first = i % (BOOSTED / 4) * 4;
    u32 packed = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) packed |= ((u32)x[token * D + sh.channels[first + e]] >> 2 & 3u) << 2 * e;
    run[HIGH_OFFSET + in_page * (BOOSTED / 4) + i] = (u8)packed;
  }
#endif
}

// --- values and windows -------------------------------------------------------------------------------------------------

template <int TYPE> DEV void store_window(void* window, s64 place, float x) { ((u16*)window)[place] = (u16)bits_of<TYPE>(x); }

extern "C" __global__ void __launch_bounds__(WARPS * 32) kvant_append_tokens(const Arguments a) {
  __shared__ u8 codes[WARPS][D];
  constexpr int COUNT = D / 32, WIDTH = D / VALUE_GROUPS;  // channels lane, lane + 32, ...; channels of a scale
  static_assert(WIDTH == 16 || WIDTH % 32 == 0, "a warp's lanes are whole groups, or two of them");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const s64 job = (s64)blockIdx.x * WARPS + warp;
  const int head = (int)(job % KV_HEADS), token = (int)(job / KV_HEADS);
  if (token >= a.tokens) return;
  const int b = sequence_of(a, token);
  const int length = (int)a.seq_lens[b], position = length - (int)(a.query_start_loc[b + 1] - token);
  float x[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const int c = lane + 32 * i;
    x[i] = load_number<VALUE_TYPE>(a.value, ((s64)token * KV_HEADS + head) * D + c);
    if (position < SINK || position >= length - KEY_RING) {
      const s64 row = (a.overlay_rows[b] * KEY_WINDOW + (position < SINK ? position : SINK + (position - SINK) % KEY_RING)) * KV_HEADS + head;
      store_window<WINDOW_TYPE>(a.window_key, row * D + c, load_number<KEY_TYPE>(a.key, ((s64)token * KV_HEADS + head) * D + c));
    }
    if (position < SINK || position >= length - VALUE_RING_TOKENS) {
      const s64 row = (a.overlay_rows[b] * VALUE_WINDOW + (position < SINK ? position : SINK + (position - SINK) % VALUE_RING)) * KV_HEADS + head;
      store_window<WINDOW_TYPE>(a.window_value, row * D + c, x[i]);
    }
  }
  if (position < ORIGIN) return;  // no page has it

  float least[COUNT], most[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    least[i] = most[i] = x[i];
#pragma unroll
    for (int o = 1; o < (WIDTH < 32 ? WIDTH : 32); o <<= 1)
      least[i] = fminf(least[i], __shfl_xor_sync(FULL, least[i], o)), most[i] = fmaxf(most[i], __shfl_xor_sync(FULL, most[i], o));
  }
  const int in_page = (position - ORIGIN) % PAGE, tile = in_page / 16, inside = in_page % 16;
  u8* run = a.pages + (a.table[(s64)b * a.table_width + (position - ORIGIN) / PAGE] * KV_HEADS + head) * RUN;
  const int lane_order = in_page % 8 * (PAGE / 8) + tile * 2 + inside / 8;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float low_end = least[i], high_end = most[i];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
      if (32 * k / WIDTH == 32 * i / WIDTH) low_end = fminf(low_end, least[k]), high_end = fmaxf(high_end, most[k]);
    constexpr float TOP = (1 << VALUE_BITS) - 1;
    const Scale s = scale_of<VALUE_META_TYPE>(WIDTH < 32 ? least[i] : low_end, WIDTH < 32 ? most[i] : high_end, TOP);
    const int c = lane + 32 * i;
    codes[warp][c] = (u8)code_of(x[i], s, TOP);
    if (c % WIDTH == 0)
      ((u32*)(run + VALUE_META_OFFSET))[c / WIDTH * PAGE + lane_order] = bits_of<VALUE_META_TYPE>(s.scale) | bits_of<VALUE_META_TYPE>(s.least) << 16;
  }
  __syncwarp();
  VALUE_PLANES::each([&](auto plane) {
    using P = decltype(plane);
    constexpr int PER = 8 / P::BITS, BYTES = D * P::BITS / 64, WORDS = BYTES, SHARE = D / VALUE_ORDER_GROUPS / 8;  // bytes of a token and g
    for (int i = lane; i < 8 * BYTES; i += 32) {
      const int g = i / BYTES, byte = inside / 8 * BYTES + i % BYTES;  // of the lane's and half's
      u32 packed = 0;
#pragma unroll
      for (int slot = 0; slot < PER; slot++) {
        const int element = i % BYTES * PER + slot, channel = element / SHARE * (D / VALUE_ORDER_GROUPS) + g * SHARE + element % SHARE;
        packed |= ((u32)codes[warp][channel] >> P::SHIFT & ((1u << P::BITS) - 1)) << slot * P::BITS;
      }
      run[P::OFFSET + (((tile * 8 + g) * 4 + inside / 2 % 4) * WORDS + byte / 2) * 4 + inside % 2 * 2 + byte % 2] = (u8)packed;
    }
  });
}
