// The pages of a warp in flight: a ring of STAGES page heads in shared memory, filled by asynchronous copies.

#pragma once
#include "include/sequence_work.cuh"

struct PageRing {
  static constexpr int BYTES = STAGES * PAGE_HEAD_BYTES;  // of shared memory
  u8* bytes;                 // [STAGES, PAGE_HEAD_BYTES] of this warp
  u32 ring_address;          // of the ring, in shared memory
  u32 next_barrier;          // address of the barrier at which the next page arrives; each stage has one
  u32 read;                  // page heads that this warp has entered since the kernel began
  u32 stage, stage_address;  // of the page that is attended to
  const u8* table;           // address of the block table's entry of the page that is attended to, s64
  const u8* pages;           // the head's part of page 0
  u32 upcoming[STAGES + 1];  // page numbers that are copied next

  DEV void open(u8* stages, u64* barrier) { bytes = stages, ring_address = stage_address = shared_address_register(stages), next_barrier = shared_address_register(barrier), read = stage = 0; }

  DEV void enter(int, const WarpRange&) { stage = read % STAGES, stage_address = ring_address + stage * PAGE_HEAD_BYTES; }
  DEV void advance() { next_barrier = step(next_barrier, read++); }
  DEV u32 address() const { return stage_address; }
  DEV u32 next_address() const { return ring_address + read % STAGES * PAGE_HEAD_BYTES; }
  DEV u32 barrier() const { return next_barrier; }
  DEV u32 parity() const { return read / STAGES & 1; }
  DEV void await() { await_stage<STAGES>(barrier(), parity()); }
  // The barrier after that of stage `from` % STAGES. Two of a warp fill 16 aligned bytes (`barrier` of decode.cu), so that bit 3 of the address tells them apart.
  DEV static u32 step(u32 barrier, u32 from) {
    if constexpr (STAGES == 2) return barrier ^ 8;
    return from % STAGES == STAGES - 1 ? barrier - 8 * (STAGES - 1) : barrier + 8;
  }

  // Reads the numbers of the first pages, all loads at once.
  DEV void list(const s64* block_table, const u8* head_pages, const WarpRange& range) {
    table = pointer_register((const u8*)(block_table + range.page)), pages = pointer_register(head_pages);
#pragma unroll
    for (int i = 0; i <= STAGES; i++) upcoming[i] = load_global_if(table + i * sizeof(s64), range.page + i < range.page_end, 0u);
  }
  DEV void copy(u32 to, u32 page, u32 barrier, int lane, bool wanted) {
    copy_stage<PAGE_HEAD_BYTES, Config::PAGES_ONCE>(to, pages + (u64)page * (Config::KV_HEADS * PAGE_HEAD_BYTES), barrier, lane, wanted);
  }
  DEV void fill(const WarpRange& range, int lane) {
    u32 barrier = next_barrier;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      copy(ring_address + (read + i) % STAGES * PAGE_HEAD_BYTES, upcoming[i], barrier, lane, range.page + i < range.page_end);
      barrier = step(barrier, read + i);
    }
  }
  // The warp has read the page: the one STAGES later takes its place, and arrives at its barrier. Where the page is not `done`, nothing is copied. Predicated, not
  // branching, so that the compiler may schedule products between.
  DEV void refill(int page, const WarpRange& range, int lane, bool done = true) {
    release_stage();
    const u32 stage_barrier = STAGES == 2 ? next_barrier ^ 8 : next_barrier + (stage == STAGES - 1 ? 8 * (STAGES - 1) : -8);
    copy(stage_address, upcoming[STAGES], stage_barrier, lane, done && page + STAGES < range.page_end);
    upcoming[STAGES] = load_global_if(table + (STAGES + 1) * sizeof(s64), done && page + STAGES + 1 < range.page_end, upcoming[STAGES]);
    table += done ? sizeof(s64) : 0;
  }
};
