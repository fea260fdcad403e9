// Decode attention over pages of product-quantized keys and values. codecs/product_vq.cuh says which lane holds what.

#pragma once
#include "include/overlay.cuh"
#include "include/page_ring.cuh"

using KeyBook = Key::Codebook;
using ValueBook = Value::Codebook;

constexpr bool INDICES_IN_REGISTERS = Config::INDICES_IN_REGISTERS;

// Indices of pages that are copied to shared memory.
struct CopiedIndices : PageRing {
  u32 page_head;  // address in shared memory of the page that is attended to

  DEV void await_page() {
    await();
    page_head = address();
    advance();
  }
  DEV void request_values(int, int) {}
  DEV void request_keys(int, bool, int) {}
  DEV static int row_token(int row) { return ::row_token<false>(row); }
  // Centroids of group i of eight tokens of the chunk: of a lane's quarter t of the key of row g, and of eighth g of the value of row 2t + e.
  DEV void key_centroids(u32* x, int tile, int i, int g, int t, u32 book) const { KeyBook::centroids<4>(x, page_head, tile * 16 + i * 8 + row_token(g), t, book); }
  DEV void value_centroids(u32* x, int tile, int i, int e, int g, int t, u32 book) const { ValueBook::centroids<8>(x, page_head, tile * 16 + i * 8 + row_token(2 * t + e), g, book); }
};

// Indices of a warp's pages, which its lanes read from global memory to registers: as long ahead as a warp takes for keys or values of a chunk of tokens. The values'
// are requested when the keys of the chunk begin, the keys' of the next chunk when the values begin; each behind the first lookups, since a lane that waits for some of
// its loads may wait for all of them. Shared memory, which centroids are looked up in, has no part in it.
struct PageIndices {
  static constexpr int BYTES = 0;             // of shared memory
  static constexpr int GROUPS = 2 * CHUNK_TILES;  // of eight tokens of a chunk
  static constexpr int KEY_ROW = KeyBook::COUNT, VALUE_ROW = ValueBook::COUNT;  // bytes of a token
  static constexpr int KEY_WORDS = KEY_ROW / 16, VALUE_WORDS = VALUE_ROW / 32;  // of a lane: a quarter of a token's keys, an eighth of its values
  static_assert(!INDICES_IN_REGISTERS || (KeyBook::LOW_BITS == 8 && KeyBook::HIGH_BITS == 0 && ValueBook::LOW_BITS == 8 && ValueBook::HIGH_BITS == 0), "an index is a byte");
  static_assert(!INDICES_IN_REGISTERS || (KEY_ROW % 16 == 0 && VALUE_ROW % 32 == 0 && ROPE_BLOCK == 0), "whole words, which a chunk takes once");
  const s64* table;  // of the work tile: page numbers,
  const u8* pages;   // and the head's part of page 0
  const u8* page;    // the head's part of the page that is attended to
  u32 next, later;   // numbers of the pages after it
  PackedIndices<KEY_ROW / 4, 8> keys[GROUPS];
  PackedIndices<VALUE_ROW / 8, 8> values[GROUPS][2];

  DEV void open(u8*, u64*) {}
  DEV const u8* address(u32 number) const { return pages + (u64)number * (Config::KV_HEADS * PAGE_HEAD_BYTES); }
  // Reads the numbers of the first pages, all loads at once.
  DEV void list(const s64* block_table, const u8* head_pages, const WarpRange& range) {
    table = block_table, pages = head_pages;
    page = address(range.page < range.page_end ? (u32)table[range.page] : 0u);
    next = range.page + 1 < range.page_end ? (u32)table[range.page + 1] : 0u;
  }
  DEV void fill(const WarpRange& range, int lane) {
    if (range.page < range.page_end) load_keys(page, 0, lane);
  }
  DEV void enter(int at, const WarpRange& range) {
    if (at + 2 < range.page_end) later = (u32)table[at + 2];
  }
  DEV void refill(int, const WarpRange&, int, bool = true) { page = address(next), next = later; }

  DEV void await_page() {}
  // Of the chunk from `tile` on, and of the chunk after it; `more` says whether another page follows.
  DEV void request_values(int tile, int lane) { load_values(tile, lane); }
  DEV void request_keys(int tile, bool more, int lane) {
    const bool inside = tile + CHUNK_TILES < PAGE_TILES;  // the chunk after it is of the same page
    if (inside || more) load_keys(inside ? page : address(next), inside ? tile + CHUNK_TILES : 0, lane);
  }
  DEV static int row_token(int row) { return ::row_token<true>(row); }
  DEV void key_centroids(u32* x, int, int i, int, int t, u32 book) const { KeyBook::look_up(x, keys[i], keys[i], t, book); }
  DEV void value_centroids(u32* x, int, int i, int e, int g, int, u32 book) const { ValueBook::look_up(x, values[i][e], values[i][e], g, book); }

  DEV void load_keys(const u8* from, int tile, int lane) {
    const u8* p = pointer_register(from + KeyBook::OFFSET + tile * (16 * KEY_ROW) + row_token(lane >> 2) * KEY_ROW + (lane & 3) * (KEY_ROW / 4));
#pragma unroll
    for (int i = 0; i < GROUPS; i++) load_once<KEY_WORDS>(keys[i].w, p + i * (8 * KEY_ROW));
  }
  DEV void load_values(int tile, int lane) {
    const u8* p = page + ValueBook::OFFSET + tile * (16 * VALUE_ROW) + (lane >> 2) * (VALUE_ROW / 8);
    const u8* each[2] = {pointer_register(p + row_token((lane & 3) * 2) * VALUE_ROW), pointer_register(p + row_token((lane & 3) * 2 + 1) * VALUE_ROW)};
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) load_once<VALUE_WORDS>(values[i][e].w, each[e] + i * (8 * VALUE_ROW));
  }
};

struct ProductVQPages {
  using Shared = SharedQuery;
  using Ring = Select<INDICES_IN_REGISTERS, PageIndices, CopiedIndices>;

  QueryFragment q;
  u32 keys, values;  // addresses in shared memory of the lane's copies of the codebooks
  Ring* indices;
  bool more;  // whether another page follows

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
  DEV void begin(Ring&, const u8* dynamic, bool, int lane) { keys = KeyBook::copy_of(shared_address(dynamic), lane), values = ValueBook::copy_of(shared_address(dynamic), lane); }
  DEV void enter(Ring& ring, bool another) {
    indices = &ring, more = another;
    ring.await_page();
  }
  static constexpr bool EARLY_REFILL = false;  // PageIndices has no stages
  // As TokenwisePages.
  template <class Refill> DEV void attend(const DecodeArguments& a, const PackedRange& packed, int, int tile, int at, int first, int last, int lane, bool, OnlineSoftmax& softmax, Refill) {
    const int g = lane >> 2, t = lane & 3;
    float s[CHUNK_TILES][LANE_HEADS][2];
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 x[Keys::WORDS];
        indices->key_centroids(x, tile, 2 * i + r, g, t, keys);
        if (i + r == 0) indices->request_values(tile, lane);
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
          const int position = at + i * 16 + r * 8 + Ring::row_token(g);
#pragma unroll
          for (int n = 0; n < LANE_HEADS; n++)
            if (position < first || position >= last) s[i][n][r] = minus_infinity();
        }
    }
    if constexpr (QUERIES > 1)
      if (packed.uneven(at)) mask_packed_rows<CHUNK_TILES>(s, RowLimits(packed.work, a.sliding_window, packed.row), lane, [&](int i, int r) { return at + i * 16 + r * 8 + Ring::row_token(g); });
    softmax.update<CHUNK_TILES>(s, 0.f, [](float) { return 0.f; });
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 b[LANE_HEADS][2], x[2][Values::WORDS];
#pragma unroll
        for (int n = 0; n < LANE_HEADS; n++) expand_probs(b[n], s[i][n][r], g);
#pragma unroll
        for (int e = 0; e < 2; e++) indices->value_centroids(x[e], tile, 2 * i + r, e, g, t, values);
        if (i + r == 0) indices->request_keys(tile, more, lane);
#pragma unroll
        for (int k = 0; k < Values::WORDS / 2; k++)
#pragma unroll
          for (int n = 0; n < LANE_HEADS; n++) mma_fp16(softmax.acc[n][k], x[0][2 * k], x[0][2 * k + 1], x[1][2 * k], x[1][2 * k + 1], b[n][0], b[n][1]);
      }
  }
};
