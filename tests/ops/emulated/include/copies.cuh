// Copies of a page to shared memory, as include/copies.cuh of kvant/ops/cuda has them, on a CPU. A copy arrives when it is awaited.

#pragma once
#include "include/ptx.cuh"

static void begin_copy(const Copy& copy) { memset(copy.to, 0xff, copy.bytes); }
static void end_copy(const Copy& copy) { memcpy(copy.to, copy.from, copy.bytes); }
static void end_groups(size_t but) {  // all that are closed but the last so many
  auto& groups = current->copies;
  for (; groups.size() - 1 > but; groups.erase(groups.begin()))
    for (const Copy& copy : groups.front()) end_copy(copy);
}
DEV void copy16(void* to, const void* from) {
  current->copies.back().push_back({(u8*)to, (const u8*)from, 16});
  begin_copy(current->copies.back().back());
}
DEV void await_copies() { current->copies.push_back({}), end_groups(0); }
DEV bool stage_ready(u32, u32) { return false; }
DEV void wait_prior_grid() {}
DEV void launch_dependent_grids() {}
// Addresses of dynamic shared memory count from its beginning. Those of static shared memory, variables of this library, have the highest bit set.
alignas(16) static u8 static_origin[16];
static const u8* shared_bytes(u32 address) { return address >> 31 ? static_origin + ((int)(address << 1) >> 1) : emulated_dynamic + address; }
DEV u32 shared_address(const void* p) {
  const s64 offset = (const u8*)p - emulated_dynamic;
  return offset >= 0 && offset < 1 << 20 ? (u32)offset : (u32)((const u8*)p - static_origin) | 1u << 31;
}
DEV u32 shared_address_register(const void* p) { return shared_address(p); }
template <int N> DEV void load_shared(u32* w, u32 address) {
  memcpy(w, shared_bytes(address), 4 * N);
  current->loads.push_back({address, 4 * N});
}
DEV u32 load_shared_byte(u32 address) {
  current->loads.push_back({address, 1});
  return emulated_dynamic[address];
}
DEV u32 load_shared_half(u32 address) {
  current->loads.push_back({address, 2});
  return *(const u16*)(emulated_dynamic + address);
}
DEV const u8* pointer_register(const u8* p) { return p; }
DEV u32 load_global_if(const u8* p, bool wanted, u32 other) { return wanted ? *(const u32*)p : other; }
DEV int opaque(int x) { return x; }
template <int N> DEV void load_once(u32* w, const u8* p) { memcpy(w, p, 4 * N); }
DEV void store_shared(u32 address, u32 x) { memcpy((u8*)shared_bytes(address), &x, 4); }
DEV void add_shared(u32 address, u32 x) { *(u32*)shared_bytes(address) += x; }  // a fiber runs until it waits
DEV void fence_copies() { current->loads.clear(); }
DEV void release_stage() {
  fence_copies();
  __syncwarp();
}
// A bulk copy writes by the async proxy: it may overtake loads that no fence of their lane follows.
static void check_loads(u32 to, u32 bytes) {
  for (const Load& load : current->loads)
    if (load.at < to + bytes && to < load.at + load.bytes) stop("a stage is copied to that a lane may still be reading: it has not fenced its loads");
}
DEV void begin_copies(u64*, int, int) {}

#if BULK
template <int BYTES, bool ONCE = false> DEV void copy_stage(u32 to, const u8* from, u32 barrier, int lane, bool wanted = true) {
  if (!wanted) return;
  check_loads(to, BYTES);
  if (lane == 0) {
    if (emulated_runs.count(barrier)) stop("a run is copied behind one that nobody awaited");
    begin_copy(emulated_runs[barrier] = {emulated_dynamic + to, from, BYTES});
  }
  __syncwarp();
}
DEV void no_copy() {}
template <int STAGES> DEV void await_stage(u32 barrier, u32) {
  __syncwarp();
  const auto found = emulated_runs.find(barrier);
  if (found != emulated_runs.end()) end_copy(found->second), emulated_runs.erase(found);
  __syncwarp();
}
#else
template <int BYTES, bool ONCE = false> DEV void copy_stage(u32 to, const u8* from, u32, int lane, bool wanted = true) {
  for (int o = lane * 16; wanted && o < BYTES; o += 512) copy16(emulated_dynamic + to + o, from + o);
  current->copies.push_back({});
}
DEV void no_copy() { current->copies.push_back({}); }
template <int STAGES> DEV void await_stage(u32, u32) {
  end_groups(STAGES - 1);
  __syncwarp();
}
#endif
