// Instructions in PTX; this file, copies.cuh and warpgroup.cuh have all of it. NVRTC compiles without host headers, so conversions of 16-bit numbers
// are here, too. tests/ops/emulated/include has the same functions for a CPU.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define DEV __device__ __forceinline__
#define FULL 0xffffffffu
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

// --- 16-bit floats --------------------------------------------------------------------------------------------------

DEV float fp16_low(u32 x) { float y; asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x)); return y; }
DEV float fp16_high(u32 x) { float y; asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x)); return y; }
DEV u32 fp16_pair(float low, float high) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
DEV u32 bf16_pair(float low, float high) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
// fp8 (e4m3) on GPUs from sm_89 on; math.cuh has the same for others. Two numbers are the low half of a word.
#if __CUDA_ARCH__ >= 890
#define HARDWARE_FP8 1
DEV u32 fp8_pair(float low, float high) { u32 y; asm("{.reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, %1, %2; cvt.u32.u16 %0, a;}" : "=r"(y) : "f"(high), "f"(low)); return y; }
DEV u32 fp16_of_fp8(u32 x) { u32 y; asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(y) : "r"(x)); return y; }
#endif
DEV float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float reciprocal_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }  // exact for powers of two
DEV float log2_(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Held within 0 and 1, which costs nothing.
DEV float fma_held(float x, float y, float z) { float d; asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(x), "f"(y), "f"(z)); return d; }
DEV float add_held(float x, float y) { float d; asm("add.rn.sat.f32 %0, %1, %2;" : "=f"(d) : "f"(x), "f"(y)); return d; }
DEV float is_greater(float x, float y) { float d; asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(d) : "f"(x), "f"(y)); return d; }  // 1 or 0
// Of two numbers at once; TYPE 0 is bfloat16, 1 is float16.
template <int TYPE> DEV u32 pair_min(u32 x, u32 y) {
  u32 z;
  if (TYPE == 0) asm("min.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else asm("min.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
template <int TYPE> DEV u32 pair_max(u32 x, u32 y) {
  u32 z;
  if (TYPE == 0) asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// The larger of |x| and y, of two bfloat16 each, y not negative; NaN where either is.
DEV u32 bf16_pair_max_magnitude(u32 x, u32 y) {
  u32 z;
  asm("{.reg .b32 a; abs.bf16x2 a, %1; max.NaN.bf16x2 %0, a, %2;}" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// Adds one and returns the old count, with acquire-release order: who counts last sees what all others wrote before they counted.
DEV int atomic_add_acq_rel(int* counter) { int n; asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(n) : "l"(counter) : "memory"); return n; }
DEV int load_acquire(const int* p) { int n; asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(n) : "l"(p) : "memory"); return n; }
DEV void pause_thread() { asm volatile("nanosleep.u32 64;"); }  // between two looks at what another CTA will write
// 16 bytes that no running kernel writes. (Volatile: the compiler would move the load behind wait_prior_grid.)
DEV void load_constant(u32* w, const void* p) { asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory"); }
DEV void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }  // the line of memory is wanted soon
DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }  // by some multiprocessor
DEV u32 fp16_pair_down(float low, float high) { u32 y; asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }  // rounded towards zero
DEV u32 is_larger_fp16x2(u32 x, u32 y) {  // 1 where |x| > y, else 0, each
  u32 z;
  asm("{.reg .b32 a; abs.f16x2 a, %1; set.gt.f16x2.f16x2 %0, a, %2;}" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
DEV u32 add_fp16x2(u32 x, u32 y) { u32 z; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y)); return z; }
DEV u32 fma_fp16x2(u32 x, u32 y, u32 z) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z)); return d; }
// x - y z
DEV u32 sub_product_fp16x2(u32 x, u32 y, u32 z) { u32 d; asm("{.reg .b32 n; neg.f16x2 n, %2; fma.rn.f16x2 %0, n, %3, %1;}" : "=r"(d) : "r"(x), "r"(y), "r"(z)); return d; }
DEV u32 subtract_fp16x2(u32 x, u32 y) { u32 z; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y)); return z; }
DEV u32 mul_fp16x2(u32 x, u32 y) { u32 z; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y)); return z; }

// Four bytes of x (0 to 3) and y (4 to 7), by the nibbles of `which`. A nibble with its highest bit set gives the sign of its byte, eight times.
DEV u32 permute_bytes(u32 x, u32 y, u32 which) { u32 z; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(which)); return z; }
DEV u32 and_xor(u32 w, u32 mask, u32 rest) {  // (w & mask) ^ rest
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(y) : "r"(w), "r"(mask), "r"(rest));
  return y;
}

// Barrier of `threads` threads of a CTA, with a number other than that of __syncthreads, 0.
DEV void named_barrier(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// --- tensor cores ---------------------------------------------------------------------------------------------------

// c += a b for a [16, 16] and b [16, 8] of fp16. With lane = 4 g + t: a0 is (row g, columns 2t, 2t + 1), a1 row g + 8, a2 and
// a3 the same eight columns on; b0 is (rows 2t, 2t + 1, column g), b1 eight rows on; c is (g, 2t), (g, 2t + 1), (g + 8, ...).
DEV void mma_fp16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // of bfloat16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four tiles of 8 rows of 8 fp16 from shared memory, as mma takes them: lane i has the address of row i % 8 of tile i / 8, and gets
// columns 2t, 2t + 1 of row g of each.
DEV void ldmatrix_x4(u32* x, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
}
// The same by 32-bit addresses, each tile transposed: a lane gets rows 2t, 2t + 1 of column g. (Volatile: where all tokens have one centroid, the address is the
// same for all pages, and the compiler took the load before the barrier that the centroids arrive at.)
DEV void ldmatrix_x4_transposed(u32* x, u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
}
DEV u32 transpose_8x8(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c += a b for a [16, 32] of unsigned and b [32, 8] of signed bytes, exact. As above with four columns a register: a0 is (row g,
// columns 4t to 4t + 3), a2 sixteen columns on; b0 is (rows 4t to 4t + 3, column g), b1 sixteen rows on.
DEV void mma_u8s8(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
