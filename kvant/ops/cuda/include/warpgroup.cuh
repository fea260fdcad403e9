// Products of a warpgroup, four warps that come together: c += a b for a [64, 16] in registers and b [16, N] in shared memory, of a 16-bit TYPE. WGMMA, a
// define: whether the GPU has such an instruction (sm_90a); otherwise every warp multiplies its 16 rows by mma_16bit.
//
// Of b, every 8 columns are 256 bytes: rows 0 to 7 of the first column, of the second, and so on, then rows 8 to 15. Registers of a warp are those of
// mma_16bit: a[0..3], and c[4 n + i] for columns 8 n to 8 n + 7.

#pragma once
#include "include/math.cuh"

#if WGMMA
// The instruction, whose text names every register: SUMS are c in its operands, REGISTERS their numbers, FACTORS the numbers of a and of b's descriptor.
#define WARPGROUP_PRODUCT(SHAPE, NUMBER, REGISTERS, FACTORS, ...)                                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                                                                               \
               "wgmma.mma_async.sync.aligned.m64" SHAPE "k16.f32." NUMBER "." NUMBER " {" REGISTERS "}, " FACTORS ", p, 1, 1, 0;}" \
               : __VA_ARGS__                                                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand))
#define SUMS_8(I) "+f"(c[I]), "+f"(c[I + 1]), "+f"(c[I + 2]), "+f"(c[I + 3]), "+f"(c[I + 4]), "+f"(c[I + 5]), "+f"(c[I + 6]), "+f"(c[I + 7])
#define SUMS_32 SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24)
#define SUMS_48 SUMS_32, SUMS_8(32), SUMS_8(40)
#define SUMS_64 SUMS_48, SUMS_8(48), SUMS_8(56)
#define REGISTERS_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_48 REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_64 REGISTERS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#endif

template <int N, int TYPE> struct Warpgroup {
  static constexpr int STEP_BYTES = 32 * N;  // of b

#if WGMMA
  // Between writing registers and products of them.
  DEV static void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  // Where b lies, as a descriptor: address, bytes from 8 rows to the next 8, bytes from 8 columns to the next 8, all in 16 bytes; no swizzle.
  using Operand = u64;
  DEV static Operand operand(const u8* b) { return (u64)((u32)__cvta_generic_to_shared(b) >> 4 & 0x3FFFu) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32; }
  DEV static Operand later(Operand b, int bytes) { return b + (bytes >> 4); }  // so many bytes on
  DEV static void multiply(float* c, const u32* a, Operand operand) {
    if constexpr (N == 64 && TYPE == 0) WARPGROUP_PRODUCT("n64", "bf16", REGISTERS_32, "{%32,%33,%34,%35}, %36", SUMS_32);
    if constexpr (N == 64 && TYPE == 1) WARPGROUP_PRODUCT("n64", "f16", REGISTERS_32, "{%32,%33,%34,%35}, %36", SUMS_32);
    if constexpr (N == 96 && TYPE == 0) WARPGROUP_PRODUCT("n96", "bf16", REGISTERS_48, "{%48,%49,%50,%51}, %52", SUMS_48);
    if constexpr (N == 96 && TYPE == 1) WARPGROUP_PRODUCT("n96", "f16", REGISTERS_48, "{%48,%49,%50,%51}, %52", SUMS_48);
    if constexpr (N == 128 && TYPE == 0) WARPGROUP_PRODUCT("n128", "bf16", REGISTERS_64, "{%64,%65,%66,%67}, %68", SUMS_64);
    if constexpr (N == 128 && TYPE == 1) WARPGROUP_PRODUCT("n128", "f16", REGISTERS_64, "{%64,%65,%66,%67}, %68", SUMS_64);
  }
  DEV static void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  // Waits for all products; until then their registers must stay as they are.
  DEV static void await() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
  template <int COUNT> DEV static void hold(u32* x) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i])::"memory");
  }
  template <int COUNT> DEV static void hold(float* x) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i])::"memory");
  }
#else
  DEV static void begin() {}
  using Operand = const u8*;
  DEV static Operand operand(const u8* b) { return b; }
  DEV static Operand later(Operand b, int bytes) { return b + bytes; }
  DEV static void multiply(float* c, const u32* a, Operand b) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      const u32* w = (const u32*)(b + n * 256) + lane;  // row 2t of column g
      mma_16bit<TYPE>(c + 4 * n, a[0], a[1], a[2], a[3], w[0], w[32]);
    }
  }
  DEV static void commit() {}
  DEV static void await() {}
  template <int COUNT, class T> DEV static void hold(T*) {}
#endif
};
