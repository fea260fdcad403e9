// Appends new tokens where keys are coded per channel over groups of tokens. The groups of keys that the new tokens complete are coded first; their older
// tokens come from the overlay. Then values and the overlay are stored, token by token, which overwrites the older tokens.
//
//   kvant_append_groups, kvant_append_tokens  for prompts: a CTA takes a group, then a warp a token
//   kvant_append_sequences                    for steps: a CTA takes a head of a sequence and does both, one after the other
//
// Keys that are corrected (SQuat) are coded block by block of channels, see SubspaceShared.

#pragma once
#include "include/rounding.cuh"
#include "include/subspace.cuh"
#include "include/tokens.cuh"

constexpr int D = Config::HEAD_DIM, THREADS = Config::WARPS * 32, KEY_GROUP = Config::KEY_GROUP;

// A plane of codes: BITS bits from bit SHIFT of the code on, from byte OFFSET of the page of a head on.
template <int BITS_, int SHIFT_, int OFFSET_> struct Plane {
  static constexpr int BITS = BITS_, SHIFT = SHIFT_, OFFSET = OFFSET_;
};
template <class... P> struct Planes {
  template <class F> DEV static void each(F f) { (f(P{}), ...); }
};

struct Scale {  // x ~ code * scale + least
  float scale, least;
};
// The scale of numbers in [least, most] with codes 0 to top, as kvant.codecs computes it.
template <int TYPE> DEV Scale scale_of(float least, float most, float top) {
  least = round_to<TYPE>(fminf(fmaxf(least, -LARGEST<TYPE>), LARGEST<TYPE>));
  return {round_to<TYPE>(fminf(fmaxf(__fdiv_rn(most - least, top), TINY<TYPE>), LARGEST<TYPE>)), least};
}
DEV int code_of(float x, Scale s, float top) { return (int)fminf(fmaxf(rintf(__fdiv_rn(x - s.least, s.scale)), 0.f), top); }

// The place of a position in an overlay row: sinks first, then a ring.
template <class S> DEV int overlay_token(int position) { return position < Config::SINK ? position : Config::SINK + (position - Config::SINK) % S::RING; }

// The page of a head that holds a position of sequence b.
DEV u8* page_head_of(const AppendGroupsArguments& a, int b, int position, int head) {
  const s64 page = a.block_table[(s64)b * a.table_width + (position - Config::ORIGIN) / Config::PAGE_TOKENS];
  return a.pages + (page * Config::KV_HEADS + head) * Config::PAGE_HEAD_BYTES;
}

// --- keys ---------------------------------------------------------------------------------------------------------------------

// Channel c of a new key as it is stored: unrotated by its position, or by that of the start of its RoPE block.
DEV float stored_key(const AppendGroupsArguments& a, int token, int position, int head, int c) {
  return load_unrotated<Config::Key::IN_TYPE>(a, a.key, ((s64)token * Config::KV_HEADS + head) * D, position, c);
}

// The position before which the keys of a sequence of n tokens are packed: ORIGIN, and whole flushes behind it that leave KEY_RECENT tokens.
DEV int packed_end(int n) { return min(n, Config::ORIGIN) + max(0, n - Config::ORIGIN - Config::KEY_RECENT) / Config::KEY_FLUSH * Config::KEY_FLUSH; }

// The first position of sequence b, from ORIGIN on, whose key is not packed, before its new tokens are.
DEV int first_unpacked(const AppendGroupsArguments& a, int b, int before) { return max(max(Config::ORIGIN, packed_end(before)), (int)a.key_ring_start[b]); }

// The number of the first candidate group of a sequence: candidates are the groups that its new tokens may complete. The numbers of two sequences do not meet,
// and the grid does not depend on which groups are really completed.
DEV int first_candidate(const AppendGroupsArguments& a, int b) { return (int)(a.query_start_loc[b] / KEY_GROUP) + b * Config::SPARE_GROUPS; }

struct GroupShared {  // by channel
  float scale[D], least[D], top[D];
  double magnitude[Config::BOOSTED ? D : 1];  // sum over the group, for the choice of boosted channels
  u8 chosen[D], channels[D];                  // whether a channel is boosted; boosted channels in rising order
};

// Marks the BOOSTED channels with the largest sums of magnitudes, of equal ones the first.
DEV void choose_boosted(GroupShared& sh) {
  for (int c = threadIdx.x; c < D; c += THREADS) {
    int rank = 0;
    for (int i = 0; i < D; i++) rank += sh.magnitude[i] > sh.magnitude[c] || (sh.magnitude[i] == sh.magnitude[c] && i < c);
    sh.chosen[c] = rank < Config::BOOSTED;
  }
  __syncthreads();
}

// Loads a group [KEY_GROUP, D] of keys from `position` on in the type of the overlay: old tokens from its ring, new ones from the input. The first
// new token of sequence b is `start` of the input, at position `before`.
DEV void load_group(const AppendGroupsArguments& a, u16* x, int b, int head, int position, int start, int before) {
  const u16* overlay = (const u16*)a.overlay_key;
  for (int i = threadIdx.x; i < KEY_GROUP * D; i += THREADS) {
    const int at = position + i / D;
    if (at < before)
      x[i] = overlay[((a.overlay_rows[b] * Config::Key::OVERLAY_TOKENS + overlay_token<Config::Key>(at)) * Config::KV_HEADS + head) * D + i % D];
    else x[i] = (u16)bits_of<Config::OVERLAY_TYPE>(stored_key(a, start + at - before, at, head, i % D));
  }
  __syncthreads();
}

// Stores the scale and the minimum of a channel of a group of the page.
DEV void store_channel_scale(u8* page_head, int group, int c, Scale s) {
  u16* scales = (u16*)(page_head + Config::Key::SCALE_OFFSET) + group * 2 * D;  // [2, D]: scales, minima
  scales[c] = (u16)bits_of<ElementType::FP16>(s.scale), scales[D + c] = (u16)bits_of<ElementType::FP16>(s.least);
}

// Computes and stores the scales of the group's channels, and which of them are boosted to 4 bits.
DEV void scale_group(GroupShared& sh, const u16* x, u8* page_head, int group) {
  for (int c = threadIdx.x; c < D; c += THREADS) {
    float least = low<Config::OVERLAY_TYPE>(x[c]), most = least;
    double magnitude = 0.;  // exact, so that the order of the sum does not matter
    for (int i = 0; i < KEY_GROUP; i++) {
      const float y = low<Config::OVERLAY_TYPE>(x[i * D + c]);
      least = fminf(least, y), most = fmaxf(most, y);
      if (Config::BOOSTED) magnitude += fabsf(y);
    }
    sh.least[c] = least, sh.scale[c] = most;
    if (Config::BOOSTED) sh.magnitude[Config::BOOSTED ? c : 0] = magnitude;
  }
  __syncthreads();
  if constexpr (Config::BOOSTED > 0) choose_boosted(sh);
  for (int c = threadIdx.x; c < D; c += THREADS) {
    float top = (1 << Config::Key::BITS) - 1;
    if constexpr (Config::BOOSTED > 0) {
      int row = 0;
      for (int i = 0; i < c; i++) row += sh.chosen[i];
      if (sh.chosen[c]) sh.channels[row] = (u8)c, top = 15.f;
      page_head[Config::INDEX_OFFSET + group * D + c] = (u8)(sh.chosen[c] ? row : min(Config::BOOSTED, 255));
    }
    const Scale s = scale_of<ElementType::FP16>(sh.least[c], sh.scale[c], top);
    sh.scale[c] = s.scale, sh.least[c] = s.least, sh.top[c] = top;
    store_channel_scale(page_head, group, c, s);
  }
  __syncthreads();
}

// Stores one plane of the codes x [KEY_GROUP, D] of a group that begins at token `in_page` of the page, in fragment order (page_codes.cuh).
template <class P> DEV void store_key_plane(const u16* x, u8* page_head, int in_page) {
  constexpr int PER = 16 / P::BITS, WORDS = D * P::BITS / 64;  // codes of half a word; words of a lane and tile
  u32* words = (u32*)(page_head + P::OFFSET) + in_page / 16 * 32 * WORDS;
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
}

// Stores the two high bits of the codes of boosted channels, [KEY_GROUP, BOOSTED / 4] bytes.
template <int BOOSTED> DEV void store_high_bits(const GroupShared& sh, const u16* x, u8* page_head, int in_page) {
  for (int i = threadIdx.x; i < KEY_GROUP * (BOOSTED / 4); i += THREADS) {
    const int token = i / (BOOSTED / 4), first = i % (BOOSTED / 4) * 4;
    u32 packed = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) packed |= ((u32)x[token * D + sh.channels[first + e]] >> 2 & 3u) << 2 * e;
    page_head[Config::HIGH_OFFSET + in_page * (BOOSTED / 4) + i] = (u8)packed;
  }
}

// SQuat: after a block of channels is coded, the channels that are still free take up its error e [KEY_GROUP, block]. With Q = [Q1, Q2] the subspace of the
// block and of the free channels, and w its weight, they are moved by
//
//   -(I + w Q2^T Q2)^-1 w Q2^T Q1 e = -w Q2^T (I + w Q2 Q2^T)^-1 Q1 e,
//
// which is B_t H_t of the paper's Lemma 2, with a matrix of RANK rows to invert.
struct SubspaceShared {
  static constexpr int RANK = Config::RANK > 0 ? Config::RANK : 1, ROW = D + 1;  // floats of a token: neighbouring tokens lie in other banks
  static constexpr int X = (KEY_GROUP * ROW * 4 + 15) / 16 * 16, PROJECTED = KEY_GROUP * RANK * 8;
  float* x;               // [KEY_GROUP, ROW]: keys; of blocks that are coded, their error
  double *once, *inside;  // [KEY_GROUP, RANK]: Q1 e, and the inverse times it
  double* inverse;        // [RANK, RANK]
  float* q;               // [RANK, D]
  u16* codes;             // [KEY_GROUP, D]

  DEV SubspaceShared(u8* memory)
      : x((float*)memory), once((double*)(memory + X)), inside((double*)(memory + X + PROJECTED)), inverse((double*)(memory + X + 2 * PROJECTED)),
        q((float*)(inverse + RANK * RANK)), codes((u16*)(q + RANK * D)) {}

  // Codes channels [first, last) of the group.
  DEV void code_block(GroupShared& sh, u8* page_head, int group, int first, int last) {
    constexpr float TOP = (1 << Config::Key::BITS) - 1;
    for (int c = first + threadIdx.x; c < last; c += THREADS) {
      float least = x[c], most = least;
      for (int i = 1; i < KEY_GROUP; i++) least = fminf(least, x[i * ROW + c]), most = fmaxf(most, x[i * ROW + c]);
      const Scale s = scale_of<ElementType::FP16>(least, most, TOP);
      sh.scale[c] = s.scale, sh.least[c] = s.least;
      store_channel_scale(page_head, group, c, s);
    }
    __syncthreads();
    const int width = last - first;
    for (int i = threadIdx.x; i < KEY_GROUP * width; i += THREADS) {
      const int token = i / width, c = first + i % width;
      float& y = x[token * ROW + c];
      const int code = code_of(y, {sh.scale[c], sh.least[c]}, TOP);
      codes[token * D + c] = (u16)code;
      y = __fsub_rn(__fadd_rn(__fmul_rn((float)code, sh.scale[c]), sh.least[c]), y);
    }
    __syncthreads();
  }
  // inverse = (I + w Q2 Q2^T)^-1 of the channels from `first` on, by Gauss-Jordan elimination: the matrix is symmetric and positive definite.
  DEV void invert(int first) {
    for (int i = threadIdx.x; i < RANK * RANK; i += THREADS) {
      double sum = i / RANK == i % RANK ? 1. : 0.;
      for (int c = first; c < D; c++) sum += Config::SUBSPACE_WEIGHT * ((double)q[i / RANK * D + c] * (double)q[i % RANK * D + c]);
      inverse[i] = sum;
    }
    for (int k = 0; k < RANK; k++) {
      constexpr int EACH = (RANK * RANK + THREADS - 1) / THREADS;
      double next[EACH];
      __syncthreads();
      const double pivot = 1. / inverse[k * RANK + k];
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const int i = min((int)threadIdx.x + j * THREADS, RANK * RANK - 1), row = i / RANK, column = i % RANK;
        const double across = inverse[row * RANK + k], above = inverse[k * RANK + column];
        next[j] = row == k ? (column == k ? pivot : above * pivot) : column == k ? -across * pivot : inverse[i] - across * above * pivot;
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < EACH; j++)
        if (threadIdx.x + j * THREADS < RANK * RANK) inverse[threadIdx.x + j * THREADS] = next[j];
    }
    __syncthreads();
  }
  // Moves the channels from `last` on by the error of channels [first, last).
  DEV void move_free(int first, int last) {
    invert(last);
    for (int i = threadIdx.x; i < KEY_GROUP * RANK; i += THREADS) {
      double sum = 0.;
      for (int c = first; c < last; c++) sum += (double)q[i % RANK * D + c] * (double)x[i / RANK * ROW + c];
      once[i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < KEY_GROUP * RANK; i += THREADS) {
      double sum = 0.;
      for (int k = 0; k < RANK; k++) sum += inverse[i % RANK * RANK + k] * once[i / RANK * RANK + k];
      inside[i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < KEY_GROUP * (D - last); i += THREADS) {
      const int token = i / (D - last), c = last + i % (D - last);
      double sum = 0.;
      for (int k = 0; k < RANK; k++) sum += (double)q[k * D + c] * inside[token * RANK + k];
      x[token * ROW + c] = (float)((double)x[token * ROW + c] - Config::SUBSPACE_WEIGHT * sum);
    }
    __syncthreads();
  }
};

// Codes one group of keys of sequence b from `position` on, by all threads of the CTA.
DEV void code_group(const AppendGroupsArguments& a, GroupShared& sh, u8* memory, int b, int head, int position, int start, int before) {
  const int in_page = (position - Config::ORIGIN) % Config::PAGE_TOKENS;
  u8* page_head = page_head_of(a, b, position, head);
  if constexpr (Config::RANK > 0) {
    SubspaceShared squat(memory);
    load_group(a, squat.codes, b, head, position, start, before);
    for (int i = threadIdx.x; i < KEY_GROUP * D; i += THREADS) squat.x[i / D * squat.ROW + i % D] = low<Config::OVERLAY_TYPE>(squat.codes[i]);
    const float* subspace = a.subspace + (a.overlay_rows[b] * Config::KV_HEADS + head) * (Config::RANK * D);
    for (int i = threadIdx.x; i < Config::RANK * D; i += THREADS) squat.q[i] = subspace[i];
    __syncthreads();
    for (int first = 0; first < D; first += Config::BLOCK_CHANNELS) {
      const int last = first + Config::BLOCK_CHANNELS;
      squat.code_block(sh, page_head, in_page / KEY_GROUP, first, last);
      if (last < D) squat.move_free(first, last);
    }
    Config::Key::CodePlanes::each([&](auto plane) { store_key_plane<decltype(plane)>(squat.codes, page_head, in_page); });
  } else {
    u16* x = (u16*)memory;  // [KEY_GROUP, D]: keys as the overlay holds them, then codes
    load_group(a, x, b, head, position, start, before);
    scale_group(sh, x, page_head, in_page / KEY_GROUP);
    for (int i = threadIdx.x; i < KEY_GROUP * D; i += THREADS) {
      const int c = i % D;
      x[i] = (u16)code_of(low<Config::OVERLAY_TYPE>(x[i]), {sh.scale[c], sh.least[c]}, sh.top[c]);
    }
    __syncthreads();
    Config::Key::CodePlanes::each([&](auto plane) { store_key_plane<decltype(plane)>(x, page_head, in_page); });
    if constexpr (Config::BOOSTED > 0) store_high_bits<Config::BOOSTED>(sh, x, page_head, in_page);
  }
}

// Grid: (candidate groups, KV_HEADS). A CTA codes one group of one head, if the new tokens complete it.
extern "C" __global__ void __launch_bounds__(THREADS) kvant_append_groups(const AppendGroupsArguments a) {
  DYNAMIC_SHARED(dynamic);
  __shared__ __align__(16) GroupShared sh;
  const int candidate = blockIdx.x, head = blockIdx.y;
  const int b = last_sequence(a.batch, a.half_batch, [&](int i) { return first_candidate(a, i) <= candidate; });
  const int total = (int)a.seq_lens[b], start = (int)a.query_start_loc[b], before = total - ((int)a.query_start_loc[b + 1] - start);
  const int position = first_unpacked(a, b, before) + (candidate - first_candidate(a, b)) * KEY_GROUP;
  if (position + KEY_GROUP > packed_end(total)) return;
  code_group(a, sh, dynamic, b, head, position, start, before);
}

// --- values and the overlay ---------------------------------------------------------------------------------------------------

// Stores one plane of a token's value codes [D], a byte each in shared memory, in fragment order (page_codes.cuh). Channels are ordered
// within VALUE_ORDER_GROUPS parts of the vector.
template <class P> DEV void store_value_plane(const u8* codes, u8* page_head, int tile, int inside, int lane) {
  constexpr int PER = 8 / P::BITS, BYTES = D * P::BITS / 64, WORDS = BYTES;  // codes of a byte; bytes of the token and a g; words of a lane
  constexpr int PART = D / Config::VALUE_ORDER_GROUPS, SHARE = PART / 8;
  for (int i = lane; i < 8 * BYTES; i += 32) {
    const int g = i / BYTES, byte = inside / 8 * BYTES + i % BYTES;  // of the lane's half words
    u32 packed = 0;
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
      const int element = i % BYTES * PER + slot, channel = element / SHARE * PART + g * SHARE + element % SHARE;
      packed |= ((u32)codes[channel] >> P::SHIFT & ((1u << P::BITS) - 1)) << slot * P::BITS;
    }
    page_head[P::OFFSET + (((tile * 8 + g) * 4 + inside / 2 % 4) * WORDS + byte / 2) * 4 + inside % 2 * 2 + byte % 2] = (u8)packed;
  }
}

// Scales and codes of a token's values x: a lane has channels lane, lane + 32, ... Codes go to shared memory, scales to the page.
DEV void encode_values(const float* x, u8* codes, u8* page_head, int scale_place, int lane) {
  constexpr int COUNT = D / 32, WIDTH = D / Config::VALUE_GROUPS, TYPE = Config::Value::SCALE_TYPE;  // channels of a lane, and of a scale
  static_assert(WIDTH == 16 || WIDTH % 32 == 0, "a warp's lanes are whole groups, or two of them");
  float least[COUNT], most[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    least[i] = most[i] = x[i];
#pragma unroll
    for (int o = 1; o < (WIDTH < 32 ? WIDTH : 32); o <<= 1)
      least[i] = fminf(least[i], __shfl_xor_sync(FULL, least[i], o)), most[i] = fmaxf(most[i], __shfl_xor_sync(FULL, most[i], o));
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float low_end = least[i], high_end = most[i];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
      if (32 * k / WIDTH == 32 * i / WIDTH) low_end = fminf(low_end, least[k]), high_end = fmaxf(high_end, most[k]);
    constexpr float TOP = (1 << Config::Value::BITS) - 1;
    const Scale s = scale_of<TYPE>(WIDTH < 32 ? least[i] : low_end, WIDTH < 32 ? most[i] : high_end, TOP);
    const int c = lane + 32 * i;
    codes[c] = (u8)code_of(x[i], s, TOP);
    if (c % WIDTH == 0) ((u32*)(page_head + Config::Value::SCALE_OFFSET))[c / WIDTH * Config::PAGE_TOKENS + scale_place] = bits_of<TYPE>(s.scale) | bits_of<TYPE>(s.least) << 16;
  }
}

// Stores a token of a head of sequence b by a warp: its value, and key and value in the overlay. `codes` [D] is shared memory of the warp.
DEV void store_token(const AppendGroupsArguments& a, u8* codes, int b, int head, int token, int position, int length, int lane) {
  using Key = Config::Key;
  using Value = Config::Value;
  float x[D / 32];  // channels lane, lane + 32, ...
  const bool key = position < Config::SINK || position >= length - Key::RING, value = position < Config::SINK || position >= length - Value::RING_TOKENS;
  const s64 row = a.overlay_rows[b], from = ((s64)token * Config::KV_HEADS + head) * D;
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const int c = lane + 32 * i;
    x[i] = load_number<Value::IN_TYPE>(a.value, from + c);
    if (key) store_number<Config::OVERLAY_TYPE>(a.overlay_key, ((row * Key::OVERLAY_TOKENS + overlay_token<Key>(position)) * Config::KV_HEADS + head) * D + c, stored_key(a, token, position, head, c));
    if (value) store_number<Config::OVERLAY_TYPE>(a.overlay_value, ((row * Value::OVERLAY_TOKENS + overlay_token<Value>(position)) * Config::KV_HEADS + head) * D + c, x[i]);
  }
  if (position < Config::ORIGIN) return;  // the overlay alone has it

  const int in_page = (position - Config::ORIGIN) % Config::PAGE_TOKENS, tile = in_page / 16, inside = in_page % 16;
  u8* page_head = page_head_of(a, b, position, head);
  encode_values(x, codes, page_head, in_page % 8 * (Config::PAGE_TOKENS / 8) + tile * 2 + inside / 8, lane);
  __syncwarp();
  Value::CodePlanes::each([&](auto plane) { store_value_plane<decltype(plane)>(codes, page_head, tile, inside, lane); });
  __syncwarp();
}

// Grid: one dimension. A warp takes a token of a head.
extern "C" __global__ void __launch_bounds__(THREADS) kvant_append_tokens(const AppendGroupsArguments a) {
  __shared__ u8 codes[Config::WARPS][D];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const s64 job = (s64)blockIdx.x * Config::WARPS + warp;
  const int head = (int)(job % Config::KV_HEADS), token = (int)(job / Config::KV_HEADS);
  if (token >= a.tokens || token >= a.query_start_loc[a.batch]) return;  // the latter is padding
  const int b = sequence_of(a, token);
  const int length = (int)a.seq_lens[b], position = length - (int)(a.query_start_loc[b + 1] - token);
  store_token(a, codes[warp], b, head, token, position, length, lane);
}

// Grid: (batch, KV_HEADS). A CTA appends all new tokens of a head of a sequence. What it overwrites in the overlay, no other CTA reads.
extern "C" __global__ void __launch_bounds__(THREADS) kvant_append_sequences(const AppendGroupsArguments a) {
  DYNAMIC_SHARED(dynamic);
  __shared__ __align__(16) GroupShared sh;
  __shared__ u8 codes[Config::WARPS][D];
  const int b = blockIdx.x, head = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int total = (int)a.seq_lens[b], start = (int)a.query_start_loc[b], stop = (int)a.query_start_loc[b + 1], before = total - (stop - start);
  const int end = packed_end(total);
  for (int position = first_unpacked(a, b, before); position + KEY_GROUP <= end; position += KEY_GROUP) {
    code_group(a, sh, dynamic, b, head, position, start, before);
    __syncthreads();
  }
  for (int token = start + warp; token < stop; token += Config::WARPS) store_token(a, codes[warp], b, head, token, before + token - start, total, lane);
}
