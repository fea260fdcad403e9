// Decode attention over pages of token-wise codes: scales per token, keys as bytes, values as fp16 numbers.

#pragma once
#include "codecs/values.cuh"
#include "include/page_ring.cuh"

// The keys of the next page are read while the values of this one are multiplied, where a page is one chunk and is copied in bulk. With RoPE blocks
// registers are short.
constexpr bool PIPELINED = BULK && STAGES > 1 && PAGE_TILES == CHUNK_TILES && (!ROPE_BLOCK || Config::PIPELINED_ROPE);

// Words of the keys of N tiles of a page, of a lane.
template <int N> struct KeyWords {
  u32 w[N][Keys::WORDS];

  DEV void load(SharedBytes page_head, int tile, int lane) { load(Keys{}, page_head, tile, lane); }
  template <class... P> DEV void load(KeyPlanes<P...>, SharedBytes page_head, int tile, int lane) {
    int before = 0;
    ((load<P>(page_head, tile, lane, before), before += P::WORDS), ...);
  }
  template <class P> DEV void load(SharedBytes page_head, int tile, int lane, int before) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if constexpr (CODE_BANKS) load_halves(w[i] + before, page_head + (P::OFFSET + ((tile + i) * 32 + lane) * 32), lane >> 2 & 1);
      else P::load(w[i] + before, page_head, tile + i, lane);
    }
  }
};

// --- S = Q K^T --------------------------------------------------------------------------------------------------------------

template <int N, class P> DEV void key_products(const KeyWords<N>& keys, int before, const QueryFragment& q, int c[N][LANE_HEADS][4]) {
#pragma unroll
  for (int k = 0; k < P::REGISTERS; k += 2) {
    [[maybe_unused]] u32 b[LANE_HEADS][2];
    if constexpr (SHARED_OPERAND)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) b[n][0] = q.get(n, P::BEFORE + k), b[n][1] = q.get(n, P::BEFORE + k + 1);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u32* w = keys.w[i] + before;
      const u32 a0 = P::get(w, 0, k), a1 = P::get(w, 1, k), a2 = P::get(w, 0, k + 1), a3 = P::get(w, 1, k + 1);
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++)
        if constexpr (SHARED_OPERAND) mma_u8s8(c[i][n], a0, a1, a2, a3, b[n][0], b[n][1]);
        else mma_u8s8(c[i][n], a0, a1, a2, a3, q.f[n][P::BEFORE + k], q.f[n][P::BEFORE + k + 1]);
    }
  }
}
template <int N, class... P> DEV void all_products(KeyPlanes<P...>, const KeyWords<N>& keys, const QueryFragment& q, int c[N][LANE_HEADS][4]) {
  int before = 0;
  ((key_products<N, P>(keys, before, q, c), before += P::WORDS), ...);
}

// S of N tiles where a token's keys have KEY_GROUPS scales (codecs/group_keys.cuh): sums of the groups are added in steps of the query operand.
template <int N, class P> DEV void group_scores(KeyPlanes<P>, const KeyWords<N>& keys, SharedBytes page_head, int tile, int lane, const QueryFragment& q, const OnlineSoftmax& softmax, float cap, float s[N][LANE_HEADS][2]) {
  static_assert(P::GROUPS == KEY_GROUPS && Key::SCALE_FORM != ScaleForm::SCALE && !ROPE_BLOCK, "a scale and a minimum or zero point for each group");
#pragma unroll
  for (int j = 0; j < KEY_GROUPS; j++) {
    int c[N][LANE_HEADS][4];
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0;
#pragma unroll
    for (int step = 0; step < P::GROUP_REGISTERS; step += 2)
#pragma unroll
      for (int i = 0; i < N; i++) {
        const int k = j * P::GROUP_REGISTERS + step;
        const u32* w = keys.w[i];
        const u32 a0 = P::get(w, 0, k), a1 = P::get(w, 1, k), a2 = P::get(w, 0, k + 1), a3 = P::get(w, 1, k + 1);
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) mma_u8s8(c[i][n], a0, a1, a2, a3, q.f[n][k], q.f[n][k + 1]);
      }
#pragma unroll
    for (int i = 0; i < N; i++) {
      Scales key[2];
      load_scales<Key::SCALE_FORM, Key::SCALE_TYPE>(key, page_head + (Key::SCALE_OFFSET + j * Config::PAGE_TOKENS * 4), (lane >> 2) * (Config::PAGE_TOKENS / 8) + (tile + i) * 2);
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) {
          const float x = (float)(c[i][n][2 * r] * 128 + c[i][n][2 * r + 1]), before = j ? s[i][n][r] : 0.f;
          if (Key::SCALE_FORM == ScaleForm::SCALE_MIN) s[i][n][r] = fmaf(x, key[r].scale, fmaf(q.group_sum[n][j], key[r].zero, before));
          if (Key::SCALE_FORM == ScaleForm::SCALE_ZERO) s[i][n][r] = fmaf(fmaf(-q.group_sum[n][j], key[r].zero, x), key[r].scale, before);
        }
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    [[maybe_unused]] float of_centroid[2][LANE_HEADS];
    if constexpr (RESIDUAL_KEYS) centroid_scores(of_centroid, page_head, tile + i, lane);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) {
        const float more = RESIDUAL_KEYS ? of_centroid[r][n] : 0.f;
        if constexpr (SOFTCAP) s[i][n][r] = soft_cap(fmaf(s[i][n][r], q.factor[n], q.mean_logit[n] + more), softmax.m[n], cap);
        else s[i][n][r] = fmaf(s[i][n][r], q.factor[n], more - softmax.m[n]);
      }
  }
}

// S of N tiles of a page in log2, less m: (128 high + low) . codes from the tensor cores, then each token's scale, minimum or zero point and each query's
// factor. x = code * scale + min: S = scale (q . code) + min sum(q); zero point: scale (q . code - zero sum(q)); centred: scale (q . code + bias).
template <int N> DEV void page_scores(const KeyWords<N>& keys, SharedBytes page_head, int tile, int lane, const QueryFragment& q, const OnlineSoftmax& softmax, float cap, float s[N][LANE_HEADS][2]) {
  if constexpr (KEY_GROUPS > 1) {
    group_scores<N>(Keys{}, keys, page_head, tile, lane, q, softmax, cap, s);
    return;
  }
  int c[N][LANE_HEADS][4];
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int n = 0; n < LANE_HEADS; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0;
  all_products<N>(Keys{}, keys, q, c);
  if constexpr (CODE_BANKS) {  // the halves of a lane's words are rows g and g + 8
    const int second = lane >> 2 & 1;
#pragma unroll
    for (int i = 0; i < N * LANE_HEADS * 2; i++) {
      int &x = c[i / 2 / LANE_HEADS][i / 2 % LANE_HEADS][i % 2], &y = c[i / 2 / LANE_HEADS][i / 2 % LANE_HEADS][2 + i % 2];
      const int was = x;
      x = second ? y : was, y = second ? was : y;
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    Scales key[2];
    load_scales<Key::SCALE_FORM, Key::SCALE_TYPE>(key, page_head + Key::SCALE_OFFSET, (lane >> 2) * (Config::PAGE_TOKENS / 8) + (tile + i) * 2);
    [[maybe_unused]] float of_centroid[2][LANE_HEADS];
    if constexpr (RESIDUAL_KEYS) centroid_scores(of_centroid, page_head, tile + i, lane);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < LANE_HEADS; n++) {
        const float x = (float)(c[i][n][2 * r] * 128 + c[i][n][2 * r + 1]), less = (SOFTCAP ? 0.f : ROPE_BLOCK ? softmax.m[n] - q.mean_logit[n] : softmax.m[n]) - (RESIDUAL_KEYS ? of_centroid[r][n] : 0.f);
        float y;
        if (Key::SCALE_FORM == ScaleForm::SCALE_MIN) y = fmaf(x * key[r].scale, q.factor[n], fmaf(q.sum[n], key[r].zero, -less));
        if (Key::SCALE_FORM == ScaleForm::SCALE_ZERO) y = fmaf(fmaf(x, q.factor[n], -q.sum[n] * key[r].zero), key[r].scale, -less);
        if (Key::SCALE_FORM == ScaleForm::SCALE) y = fmaf(fmaf(x, q.factor[n], q.bias[n]), key[r].scale, -less);
        s[i][n][r] = SOFTCAP ? soft_cap(y + q.mean_logit[n], softmax.m[n], cap) : y;
      }
  }
}

struct TokenwisePages {
  using Shared = SharedQuery;  // of a query that the CTA makes itself
  using Ring = PageRing;

  KeyWords<CHUNK_TILES> keys;
  QueryFragment q;
  SharedBytes page_head;      // the page that is attended to
  SharedBytes next;           // the page after it,
  u32 barrier, parity;        // the barrier that it arrives at,
  bool ready;                 // whether it has arrived, or none follows: its keys are then loaded from a stale stage and not used

  DEV static void load_codebooks(int& loaded, u8* memory, const DecodeArguments& a, int head) {
    if constexpr (CENTROID_PRODUCTS) load_value_centroids(loaded, memory, a, head);
    if constexpr (Values::TABLE)
      if (loaded < 0) Values::template fill<WARPS * 32>(memory), loaded = head;
  }
  template <class From> DEV void load_query(From& from, int lane, float scale) { ::load_query(q, from, lane, scale); }
  // Before the first of a warp's pages.
  DEV void begin(PageRing& ring, const u8*, bool any, int lane) {
    if (PIPELINED && any) {
      ring.await();
      keys.load({ring.next_address()}, 0, lane);
    }
  }
  // Waits for a page; `more` says whether another follows it.
  DEV void enter(PageRing& ring, bool more) {
    if (!PIPELINED) ring.await();
    page_head = {ring.address()};
    ring.advance();
    next = {ring.next_address()}, barrier = ring.barrier(), parity = ring.parity(), ready = true;
    if (PIPELINED) ready = !more || stage_ready(barrier, parity);
  }
  static constexpr bool EARLY_REFILL = PAGE_TILES == CHUNK_TILES && !PIPELINED;  // the stage is refilled once the last codes of values are loaded, before their products are done
  // Attends to tokens [first, last) of the chunk of tiles from `tile` on, whose first token is `at`. `final`: nothing of the page comes after it. refill() runs as soon
  // as the chunk has been read.
  template <class Refill> DEV void attend(const DecodeArguments& a, const PackedRange& packed, int, int tile, int at, int first, int last, int lane, bool final, OnlineSoftmax& softmax, Refill refill) {
    if (!PIPELINED) keys.load(page_head, tile, lane);
    attend_chunk(a, packed, page_head, tile, at, first, last, lane, softmax, [&](float s[CHUNK_TILES][LANE_HEADS][2]) { page_scores<CHUNK_TILES>(keys, page_head, tile, lane, q, softmax, a.cap, s); }, [&]() {
      if (!PIPELINED || !final) return;
      if (!ready) await_stage<STAGES>(barrier, parity);
      keys.load(next, 0, lane);
    }, refill);
  }
};
