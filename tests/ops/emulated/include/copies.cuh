// Copies of a page to shared memory, as include/copies.cuh of kvant/ops/cuda has them, on a CPU. A copy arrives when it is awaited.

#pragma once
#include "include/ptx.cuh"

#if BULK
DEV void copy_stage(u32 to, const u8* from, u32 barrier, int lane) {
  if (lane == 0) {
    if (emulated_runs.count(barrier)) stop("a run is copied behind one that nobody awaited");
    begin_copy(emulated_runs[barrier] = {emulated_dynamic + to, from, RUN});
  }
  __syncwarp();
}
DEV void no_copy() {}
DEV void await_stage(u32 barrier, u32) {
  __syncwarp();
  const auto found = emulated_runs.find(barrier);
  if (found != emulated_runs.end()) end_copy(found->second), emulated_runs.erase(found);
  __syncwarp();
}
#else
DEV void copy_stage(u32 to, const u8* from, u32, int lane) {
  for (int o = lane * 16; o < RUN; o += 512) copy16(emulated_dynamic + to + o, from + o);
  current->copies.push_back({});
}
DEV void no_copy() { current->copies.push_back({}); }
DEV void await_stage(u32, u32) {
  end_groups(STAGES - 1);
  __syncwarp();
}
#endif
