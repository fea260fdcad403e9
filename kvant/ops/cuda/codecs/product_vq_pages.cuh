// Decode attention over pages of product-quantized keys and values. codecs/product_vq.cuh says which lane holds what.

#pragma once
#include "include/overlay.cuh"
#include "include/page_ring.cuh"

using KeyBook = Key::Codebook;
using ValueBook = Value::Codebook;

struct ProductVQPages {
  using Shared = SharedQuery;

  QueryFragment q;
  u32 page_head, keys, values;  // addresses in shared memory: the page, and the lane's copies of the codebooks

  static_assert(TEAMS == 1 || Key::BOOK_HEADS * Value::BOOK_HEADS == 1, "teams share codebooks, whatever their heads are");
  // Brings the codebooks of a head to shared memory; `loaded` is the head whose codebooks are there, -1 before the first. By all threads; with several teams before
  // the first work tile, which not every team has.
  DEV static void load_codebooks(int& loaded, u8* memory, const DecodeArguments& a, int head) {
    if (loaded < 0 || (Key::BOOK_HEADS * Value::BOOK_HEADS > 1 && loaded != head)) {
      KeyBook::load_book<TEAMS * WARPS * 32>(memory, a.key_codebooks + (Key::BOOK_HEADS > 1 ? head : 0) * KeyBook::ENTRIES * KeyBook::ENTRY);
      ValueBook::load_book<TEAMS * WARPS * 32>(memory, a.value_codebooks + (Value::BOOK_HEADS > 1 ? head : 0) * ValueBook::ENTRIES * ValueBook::ENTRY);
      loaded = head;
      __syncthreads();
    }
  }
  template <class From> DEV void load_query(From& from, int lane, float scale) { ::load_query(q, from, lane, scale); }
  DEV void begin(PageRing&, const u8* dynamic, bool, int lane) { keys = KeyBook::copy_of(shared_address(dynamic), lane), values = ValueBook::copy_of(shared_address(dynamic), lane); }
  DEV void enter(PageRing& ring, bool) {
    ring.await();
    page_head = ring.address();
    ring.read++;
  }
  // As TokenwisePages.
  DEV void attend(const DecodeArguments& a, const PackedRange& packed, int, int tile, int at, int first, int last, int lane, bool, OnlineSoftmax& softmax) {
    const int g = lane >> 2, t = lane & 3;
    float s[CHUNK_TILES][LANE_HEADS][2];
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 x[Keys::WORDS];
        KeyBook::centroids<4>(x, page_head, (tile + i) * 16 + r * 8 + row_token(g), t, keys);
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) {
          float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int k = 0; k < Keys::WORDS / 4; k++) mma_fp16(c, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3], q.f[n][2 * k], q.f[n][2 * k + 1]);
          const float less = SOFTCAP ? 0.f : ROPE_BLOCK ? softmax.m[n] - q.mean_logit[n] : softmax.m[n];
          const float y = fmaf(c[0] + c[3], q.factor[n], -less);
          s[i][n][r] = SOFTCAP ? soft_cap(y + q.mean_logit[n], softmax.m[n], a.cap) : y;
        }
      }
    if (at < first || at + 16 * CHUNK_TILES > last) {  // past the ends a page may hold anything, which is an index all the same
#pragma unroll
      for (int i = 0; i < CHUNK_TILES; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int position = at + i * 16 + r * 8 + row_token(g);
#pragma unroll
          for (int n = 0; n < LANE_HEADS; n++)
            if (position < first || position >= last) s[i][n][r] = minus_infinity();
        }
    }
    if constexpr (QUERIES > 1)
      if (packed.uneven(at)) mask_packed_rows<CHUNK_TILES>(s, RowLimits(packed.work, a.sliding_window, packed.row), lane, [&](int i, int r) { return at + i * 16 + r * 8 + row_token(g); });
    softmax.update<CHUNK_TILES>(s, 0.f);
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 b[LANE_HEADS][2], x[2][Values::WORDS];
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) expand_probs(b[n], s[i][n][r], g);
#pragma unroll
        for (int e = 0; e < 2; e++) ValueBook::centroids<8>(x[e], page_head, (tile + i) * 16 + r * 8 + row_token(2 * t + e), g, values);
#pragma unroll
        for (int k = 0; k < Values::WORDS / 2; k++)
#pragma unroll
          for (int n = 0; n < LANE_HEADS; n++) mma_fp16(softmax.acc[n][k], x[0][2 * k], x[0][2 * k + 1], x[1][2 * k], x[1][2 * k + 1], b[n][0], b[n][1]);
      }
  }
};
