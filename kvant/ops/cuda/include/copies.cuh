// Asynchronous copies to shared memory and its loads, in PTX. BULK, a define: whether the GPU copies in bulk (cp.async.bulk, sm_90 on).

#pragma once
#include "include/ptx.cuh"

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The same, pinned to a register: the compiler would compute it anew at every use.
DEV u32 shared_address_register(const void* p) { u32 x; asm volatile("mov.u32 %0, %1;" : "=r"(x) : "r"(shared_address(p))); return x; }
// 1, 2 or 4 words of shared memory, by 32-bit address: the compiler adds the base of a pointer to every offset anew.
template <int N> DEV void load_shared(u32* w, u32 address) {
  if constexpr (N == 1) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address));
  if constexpr (N == 2) asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address));
  if constexpr (N == 4)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address));
}
DEV u32 load_shared_byte(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}
DEV u32 load_shared_half(u32 address) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
  return x;
}
DEV void store_shared(u32 address, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
DEV void add_shared(u32 address, u32 x) { asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }  // atomic
// A pointer pinned to registers: the compiler would compute it anew for every offset.
DEV const u8* pointer_register(const u8* p) { const u8* x; asm volatile("mov.u64 %0, %1;" : "=l"(x) : "l"(p)); return x; }
// The word of global memory at p where it is `wanted`, else `other`, without a branch; p need not be valid then.
DEV u32 load_global_if(const u8* p, bool wanted, u32 other) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1];}" : "+r"(other) : "l"(p), "r"((u32)wanted));
  return other;
}
// The same number, of which the compiler knows nothing: it does not move what depends on it out of a branch.
DEV int opaque(int x) { asm volatile("mov.b32 %0, %0;" : "+r"(x)); return x; }
// 1, 2 or 4 words of global memory that nobody writes meanwhile and nobody reads again: they are not kept in the first-level cache.
template <int N> DEV void load_once(u32* w, const u8* p) {
  if constexpr (N == 1) asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p));
  if constexpr (N == 2) asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
  if constexpr (N == 4)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
}
// cp.async of 16 bytes: visible to this thread after await_copies, to the others after a barrier, too.
DEV void copy16(void* to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory"); }
DEV void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#if BULK
// Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for its results here.
DEV void wait_prior_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;"); }
// Copies BYTES bytes to address `to` of shared memory, by one instruction of one elected lane; they arrive at `barrier`, an mbarrier. Without a branch. ONCE: nobody
// reads them again, so they leave the L2 cache before others (evict_first; the constant is what createpolicy makes for the whole of a copy). Nothing is copied where it
// is not `wanted`.
template <int BYTES, bool ONCE = false> DEV void copy_stage(u32 to, const u8* from, u32 barrier, int, bool wanted = true) {
  if constexpr (ONCE)
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; setp.ne.and.u32 p, %5, 0, p;\n"
                 "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
                 "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%2], [%3], %1, [%0], %4;}" ::"r"(barrier),
                 "r"(BYTES), "r"(to), "l"(from), "l"(0x12F0000000000000ull), "r"((u32)wanted) : "memory");
  else
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; setp.ne.and.u32 p, %4, 0, p;\n"
                 "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
                 "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];}" ::"r"(barrier),
                 "r"(BYTES), "r"(to), "l"(from), "r"((u32)wanted) : "memory");
}
template <int STAGES> DEV void await_stage(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
DEV bool stage_ready(u32 barrier, u32 parity) {  // whether it has arrived
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
DEV void no_copy() {}
DEV void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void begin_copies(u64* barriers, int count, int lane) {
  if (lane == 0)
    for (int i = 0; i < count; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
  fence_copies();
  __syncwarp();
}
#else
DEV void wait_prior_grid() {}
DEV void launch_dependent_grids() {}
template <int BYTES, bool ONCE = false> DEV void copy_stage(u32 to, const u8* from, u32, int lane, bool wanted = true) {
#pragma unroll
  for (int o = 0; o < BYTES; o += 512)
    if (wanted && (BYTES % 512 == 0 || o + lane * 16 < BYTES))
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + o + lane * 16), "l"(from + o + lane * 16) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}
DEV bool stage_ready(u32, u32) { return false; }
template <int STAGES> DEV void await_stage(u32, u32) {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
  __syncwarp();
}
DEV void no_copy() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEV void fence_copies() {}
DEV void begin_copies(u64*, int, int) {}
#endif
// The warp has read a stage, and a copy may overwrite it. __syncwarp is not enough: a bulk copy writes through the async proxy, whose writes it
// does not order, and the loads may still be queued (bank conflicts) when the copy is issued. The fence of every lane waits for its own loads.
DEV void release_stage() {
  fence_copies();
  __syncwarp();
}
