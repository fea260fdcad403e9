// The pages of a warp in flight: a ring of STAGES page heads in shared memory, filled by asynchronous copies.

#pragma once
#include "include/sequence_work.cuh"

struct PageRing {
  static constexpr int BYTES = STAGES * PAGE_HEAD_BYTES;  // of shared memory
  u8* bytes;           // [STAGES, PAGE_HEAD_BYTES] of this warp
  u32 room, barriers;  // addresses in shared memory, of the ring and of a barrier for each stage
  u32 read;            // page heads that this warp has entered since the kernel began
  u32 stage;           // of the page that is attended to
  const s64* table;    // of the work tile: page numbers,
  const u8* pages;     // and the head's part of page 0
  u32 upcoming[STAGES + 1];  // page numbers that are copied next

  DEV void open(u8* stages, u64* barrier) { bytes = stages, room = shared_address_register(stages), barriers = shared_address_register(barrier), read = 0; }

  DEV void enter(int, const WarpRange&) { stage = read % STAGES; }
  DEV u32 address() const { return room + stage * PAGE_HEAD_BYTES; }
  DEV u32 next_address() const { return room + read % STAGES * PAGE_HEAD_BYTES; }
  DEV u32 barrier() const { return barriers + read % STAGES * 8; }
  DEV u32 parity() const { return read / STAGES & 1; }
  DEV void await() { await_stage<STAGES>(barrier(), parity()); }

  // Reads the numbers of the first pages, all loads at once.
  DEV void list(const s64* block_table, const u8* head_pages, const WarpRange& range) {
    table = block_table, pages = head_pages;
#pragma unroll
    for (int i = 0; i <= STAGES; i++) upcoming[i] = range.page + i < range.page_end ? (u32)table[range.page + i] : 0u;
  }
  DEV void copy(u32 to, u32 page, int lane) {
    copy_stage<PAGE_HEAD_BYTES, Config::PAGES_ONCE>(room + to * PAGE_HEAD_BYTES, pages + (u64)page * (Config::KV_HEADS * PAGE_HEAD_BYTES), barriers + to * 8, lane);
  }
  DEV void fill(const WarpRange& range, int lane) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      const u32 to = (read + i) % STAGES;
      if (range.page + i < range.page_end) copy(to, upcoming[i], lane);
      else no_copy();
    }
  }
  // The warp has read the page: the one STAGES later takes its place.
  DEV void refill(int page, const WarpRange& range, int lane) {
    release_stage();
    if (page + STAGES < range.page_end) {
      copy(stage, upcoming[STAGES], lane);
      if (page + STAGES + 1 < range.page_end) upcoming[STAGES] = (u32)table[page + STAGES + 1];
    } else no_copy();
  }
};
