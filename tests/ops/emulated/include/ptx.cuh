// A GPU's block on one CPU thread, to run the kernels of kvant/ops/cuda where there is no GPU: every thread of a block is a fiber, and
// what lanes of a warp do together is done when all of them have come. Blocks run one after another, the warps of a block at paces that
// change by chance, and a copy to shared memory arrives no sooner than it is awaited. It shows what kernels compute, and most of what they
// forget to wait for; it says nothing of other races or of speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include <ucontext.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define DEV inline
#define FULL 0xffffffffu
#define DYNAMIC_SHARED(name) u8* name = emulated_dynamic

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- fibers -----------------------------------------------------------------------------------------------------------

struct Index { u32 x, y; };
struct Group {  // lanes that do something together
  int size = 32, arrived = 0, what = 0;
  u32 generation = 0;
  alignas(16) u8 in[32][64], out[32][64];
};
struct Copy {
  u8* to;
  const u8* from;
  int bytes;
};
struct Load {  // of shared memory, by its address in the dynamic part
  u32 at, bytes;
};
struct Fiber {
  std::vector<std::vector<Copy>> copies = {{}};  // groups that have not arrived; the last is open
  std::vector<Load> loads;                       // since the lane's last fence
  ucontext_t context;
  Index thread;
  Group* warp;
  bool done;
};
static Fiber* current;
static ucontext_t scheduler;
static Index emulated_block, emulated_grid;
static Group emulated_threads;  // of a block
static u8* emulated_dynamic;
#define threadIdx (current->thread)
#define blockIdx emulated_block
#define gridDim emulated_grid

static void stop(const char* why) {
  fprintf(stderr, "emulated kernel: %s\n", why);
  abort();
}
static void yield_fiber() { swapcontext(&current->context, &scheduler); }

// Every lane brings `mine`; the last one computes what all of them get.
template <class Out, class In, class F> static Out together(Group& group, int what, int lane, const In& mine, F compute) {
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64, "a lane brings and takes at most 64 bytes");
  if (group.arrived && group.what != what) stop("lanes of a warp do different things together");
  group.what = what;
  if (lane < 32) memcpy(group.in[lane], &mine, sizeof mine);
  const u32 generation = group.generation;
  if (++group.arrived == group.size) {
    In in[32];
    Out out[32];
    for (int i = 0; i < 32; i++) memcpy(&in[i], group.in[i], sizeof in[i]);
    compute(in, out);
    for (int i = 0; i < 32; i++) memcpy(group.out[i], &out[i], sizeof out[i]);
    group.arrived = 0;
    group.generation++;
  } else {
    while (group.generation == generation) yield_fiber();
  }
  Out out;
  memcpy(&out, group.out[lane % 32], sizeof out);
  return out;
}
template <class Out, class In, class F> static Out lanes_together(int what, const In& mine, F compute) {
  return together<Out>(*current->warp, what, (int)(current->thread.x % 32), mine, compute);
}

static inline void __syncwarp() { lanes_together<int>(1, 0, [](const int*, int* out) { memset(out, 0, 32 * sizeof(int)); }); }
static inline void __syncthreads() {
  together<int>(emulated_threads, 2, 32, 0, [](const int*, int* out) { memset(out, 0, 32 * sizeof(int)); });
}
static Group emulated_named[16];  // barriers of some threads of a block
static inline void named_barrier(int number, int threads) {
  emulated_named[number].size = threads;
  together<int>(emulated_named[number], 2, 32, 0, [](const int*, int* out) { memset(out, 0, 32 * sizeof(int)); });
}
static int emulated_any;
static inline int __syncthreads_or(int x) {
  emulated_any = 0;
  __syncthreads();
  if (x) emulated_any = 1;
  __syncthreads();
  const int any = emulated_any;
  __syncthreads();  // all have read it
  return any;
}
template <class T> static T __shfl_xor_sync(u32, T x, int mask) {
  return lanes_together<T>(3, x, [=](const T* in, T* out) { for (int i = 0; i < 32; i++) out[i] = in[i ^ mask]; });
}
template <class T> static T __shfl_up_sync(u32, T x, int by) {
  return lanes_together<T>(4, x, [=](const T* in, T* out) { for (int i = 0; i < 32; i++) out[i] = in[i < by ? i : i - by]; });
}
template <class T> static T __shfl_sync(u32, T x, int lane) {
  struct Asked { T x; int lane; };
  return lanes_together<T>(5, Asked{x, lane}, [](const Asked* in, T* out) { for (int i = 0; i < 32; i++) out[i] = in[in[i].lane].x; });
}
static inline u32 __ballot_sync(u32, int x) {
  return lanes_together<u32>(6, x, [](const int* in, u32* out) {
    u32 all = 0;
    for (int i = 0; i < 32; i++) all |= (u32)(in[i] != 0) << i;
    for (int i = 0; i < 32; i++) out[i] = all;
  });
}
static inline int __reduce_add_sync(u32, int x) {
  return lanes_together<int>(7, x, [](const int* in, int* out) {
    u32 all = 0;
    for (int i = 0; i < 32; i++) all += (u32)in[i];
    for (int i = 0; i < 32; i++) out[i] = (int)all;
  });
}
static inline int __reduce_min_sync(u32, int x) {
  return lanes_together<int>(12, x, [](const int* in, int* out) {
    int all = in[0];
    for (int i = 1; i < 32; i++) all = in[i] < all ? in[i] : all;
    for (int i = 0; i < 32; i++) out[i] = all;
  });
}
static inline int __reduce_max_sync(u32, int x) {
  return lanes_together<int>(13, x, [](const int* in, int* out) {
    int all = in[0];
    for (int i = 1; i < 32; i++) all = in[i] > all ? in[i] : all;
    for (int i = 0; i < 32; i++) out[i] = all;
  });
}
static inline int __any_sync(u32 mask, int x) { return __ballot_sync(mask, x) != 0; }

// --- numbers ----------------------------------------------------------------------------------------------------------

template <class To, class From> static To bits_as(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "as many bits");
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
static inline float __int_as_float(int x) { return bits_as<float>(x); }
static inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
static inline int __float_as_int(float x) { return bits_as<int>(x); }
static inline int __float2int_rn(float x) { return (int)lrintf(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
static inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { return *p; }
static inline u32 __byte_perm(u32 x, u32 y, u32 which) {
  const u64 both = (u64)y << 32 | x;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}
DEV u32 permute_bytes(u32 x, u32 y, u32 which) {
  u32 out = __byte_perm(x, y, which);
  for (int i = 0; i < 4; i++)
    if (which >> (4 * i + 3) & 1) out = (out & ~(255u << 8 * i)) | (out >> (8 * i + 7) & 1 ? 255u << 8 * i : 0u);
  return out;
}

// --- the functions of ptx.cu --------------------------------------------------------------------------------------------

static inline float half_to_float(u32 x) {
  const u32 exponent = x >> 10 & 31, mantissa = x & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? ldexpf(1024.f + mantissa, (int)exponent - 25) : ldexpf((float)mantissa, -24);
  return x & 0x8000 ? -size : size;
}
static inline u32 float_to_half(float x) {  // to the nearest, ties to even
  const u32 sign = __float_as_uint(x) >> 16 & 0x8000;
  const float size = fabsf(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (size >= 65520.f) return sign | 0x7c00;
  if (size < 6.103515625e-05f) return sign | (u32)lrintf(ldexpf(size, 24));
  int exponent;
  frexpf(size, &exponent);
  const u32 whole = (u32)lrintf(ldexpf(size, 11 - exponent));  // 1024 to 2048
  return sign | (((u32)(exponent + 13) << 10) + whole);
}
DEV float fp16_low(u32 x) { return half_to_float(x & 0xffff); }
DEV float fp16_high(u32 x) { return half_to_float(x >> 16); }
DEV u32 fp16_pair(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
static inline u32 float_to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEV u32 bf16_pair(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }
DEV float exp2_(float x) { return exp2f(x); }
DEV void load_constant(u32* w, const void* p) { memcpy(w, p, 16); }
DEV float reciprocal_approx(float x) { return 1.f / x; }
DEV float log2_(float x) { return log2f(x); }
static inline float held(float x) { return x > 0.f ? fminf(x, 1.f) : 0.f; }
DEV float fma_held(float x, float y, float z) { return held(fmaf(x, y, z)); }
DEV float add_held(float x, float y) { return held(x + y); }
DEV float is_greater(float x, float y) { return x > y ? 1.f : 0.f; }
template <int TYPE, class F> static u32 of_pairs(u32 x, u32 y, F f) {
  const auto half = [](u32 w, int e) { return TYPE == 0 ? __uint_as_float((w >> 16 * e) << 16) : half_to_float(w >> 16 * e & 0xffff); };
  const float low = f(half(x, 0), half(y, 0)), high = f(half(x, 1), half(y, 1));
  return TYPE == 0 ? bf16_pair(low, high) : fp16_pair(low, high);
}
template <int TYPE> u32 pair_min(u32 x, u32 y) { return of_pairs<TYPE>(x, y, [](float a, float b) { return fminf(a, b); }); }
template <int TYPE> u32 pair_max(u32 x, u32 y) { return of_pairs<TYPE>(x, y, [](float a, float b) { return fmaxf(a, b); }); }
DEV u32 bf16_pair_max_magnitude(u32 x, u32 y) {
  u32 z = 0;
  for (int i = 0; i < 32; i += 16) {
    const u32 one = x >> i & 0x7FFFu, two = y >> i & 0x7FFFu;  // magnitudes are in the order of their bits
    z |= (one > 0x7F80u || two > 0x7F80u ? 0x7FFFu : max(one, two)) << i;
  }
  return z;
}
DEV void prefetch_l1(const void* p) { (void)*(const volatile u8*)p; }  // what is wanted must be there
DEV void prefetch_l2(const void* p) { prefetch_l1(p); }
DEV int atomic_add_acq_rel(int* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }
DEV int load_acquire(const int* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEV void pause_thread() { stop("a block waits for one that has not run"); }  // blocks run one after another
template <class T> static T atomicMax(T* p, T x) { const T old = *p; *p = max(old, x); return old; }  // a fiber runs until it waits
template <class T> static T atomicMin(T* p, T x) { const T old = *p; *p = min(old, x); return old; }
template <class T> static T atomicAdd(T* p, T x) { const T old = *p; *p = old + x; return old; }
static inline u32 float_to_half_down(float x) {
  const u32 near = float_to_half(x);
  return fabsf(half_to_float(near)) > fabsf(x) ? near - 1 : near;  // the next towards zero; infinity becomes the largest number
}
DEV u32 fp16_pair_down(float low, float high) { return float_to_half_down(low) | float_to_half_down(high) << 16; }
DEV u32 is_larger_fp16x2(u32 x, u32 y) { return of_pairs<1>(x & 0x7FFF7FFFu, y, [](float a, float b) { return a > b ? 1.f : 0.f; }); }
DEV u32 add_fp16x2(u32 x, u32 y) { return of_pairs<1>(x, y, [](float a, float b) { return a + b; }); }
DEV u32 sub_product_fp16x2(u32 x, u32 y, u32 z) { return fp16_pair(fmaf(-fp16_low(y), fp16_low(z), fp16_low(x)), fmaf(-fp16_high(y), fp16_high(z), fp16_high(x))); }
DEV u32 subtract_fp16x2(u32 x, u32 y) { return of_pairs<1>(x, y, [](float a, float b) { return a - b; }); }
DEV u32 fma_fp16x2(u32 x, u32 y, u32 z) { return fp16_pair(fmaf(fp16_low(x), fp16_low(y), fp16_low(z)), fmaf(fp16_high(x), fp16_high(y), fp16_high(z))); }
DEV u32 mul_fp16x2(u32 x, u32 y) { return fp16_pair(fp16_low(x) * fp16_low(y), fp16_high(x) * fp16_high(y)); }
DEV u32 and_xor(u32 w, u32 mask, u32 rest) { return (w & mask) ^ rest; }

struct Fragments { u32 a[4], b[2]; };
template <class Number> struct Product { Fragments f; Number c[4]; };
template <class Number> struct Sums { Number c[4]; };

// c += a b for a [16, K] and b [K, 8], PER elements a register, as ptx.cu says where they are. `of_a` and `of_b` take an element out
// of a register; sums are kept as Wide.
template <class Wide, int K, int PER, class Number, class OfA, class OfB>
static void product(int what, Number* c, const Fragments& f, OfA of_a, OfB of_b) {
  const Product<Number> mine = {f, {c[0], c[1], c[2], c[3]}};
  const auto sums = lanes_together<Sums<Number>>(what, mine, [=](const Product<Number>* in, Sums<Number>* out) {
    Wide a[16][K], b[K][8];
    for (int lane = 0; lane < 32; lane++)
      for (int e = 0; e < PER; e++) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) a[g + i % 2 * 8][PER * t + i / 2 * (K / 2) + e] = of_a(in[lane].f.a[i], e);
        for (int i = 0; i < 2; i++) b[PER * t + i * (K / 2) + e][g] = of_b(in[lane].f.b[i], e);
      }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        Wide sum = in[lane].c[i];
        for (int k = 0; k < K; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        out[lane].c[i] = (Number)sum;
      }
  });
  memcpy(c, sums.c, sizeof sums.c);
}
DEV void mma_fp16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto half = [](u32 x, int e) { return half_to_float(x >> 16 * e & 0xffff); };
  product<double, 16, 2>(7, c, {{a0, a1, a2, a3}, {b0, b1}}, half, half);
}
DEV void mma_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto half = [](u32 x, int e) { return __uint_as_float((x >> 16 * e) << 16); };
  product<double, 16, 2>(10, c, {{a0, a1, a2, a3}, {b0, b1}}, half, half);
}
DEV void mma_u8s8(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto code = [](u32 x, int e) { return (int)(u8)(x >> 8 * e); };
  const auto number = [](u32 x, int e) { return (int)(int8_t)(x >> 8 * e); };
  product<int, 32, 4>(8, c, {{a0, a1, a2, a3}, {b0, b1}}, code, number);
}
DEV void ldmatrix_x4(u32* x, const void* row) {
  struct Tiles { u32 x[4]; };
  const Tiles found = lanes_together<Tiles>(11, row, [](const void* const* in, Tiles* out) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) out[lane].x[i] = ((const u32*)in[8 * i + lane / 4])[lane % 4];
  });
  memcpy(x, found.x, sizeof found.x);
}
DEV void ldmatrix_x4_transposed(u32* x, u32 row) {
  struct Tiles { u32 x[4]; };
  const Tiles found = lanes_together<Tiles>(12, (const u16*)(emulated_dynamic + row), [](const u16* const* in, Tiles* out) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) out[lane].x[i] = in[8 * i + lane % 4 * 2][lane / 4] | (u32)in[8 * i + lane % 4 * 2 + 1][lane / 4] << 16;
  });
  memcpy(x, found.x, sizeof found.x);
}
DEV u32 transpose_8x8(u32 x) {
  return lanes_together<u32>(9, x, [](const u32* in, u32* out) {
    const auto at = [&](int row, int column) { return in[row * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
    for (int lane = 0; lane < 32; lane++) out[lane] = at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
  });
}

static std::map<u32, Copy> emulated_runs;  // copies to shared memory that have not been awaited, by barrier

// --- launching --------------------------------------------------------------------------------------------------------

static void (*emulated_kernel)(const void*);
static const void* emulated_arguments;
static void enter_fiber() {
  emulated_kernel(emulated_arguments);
  current->done = true;
  yield_fiber();
}

static u32 chance() {  // the warps that rest: about half of them, and every fourth time none
  static u64 state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return state >> 62 ? (u32)(state >> 30) : 0u;
}
static const int STACK_BYTES = 256 << 10;
static void run_block(int threads) {
  std::vector<Group> warps((threads + 31) / 32);
  std::vector<Fiber> fibers(threads);
  static std::vector<std::unique_ptr<u8[]>> stacks;  // kept for the next block, and not written to before they are used
  while ((int)stacks.size() < threads) stacks.emplace_back(new u8[STACK_BYTES]);
  emulated_threads = Group();
  emulated_threads.size = threads;
  for (Group& named : emulated_named) named = Group();
  for (int i = 0; i < threads; i++) {
    Fiber& f = fibers[i];
    f.thread = {(u32)i, 0};
    f.warp = &warps[i / 32];
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks[i].get();
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, enter_fiber, 0);
  }
  for (int left = threads; left;) {
    u64 before = 0, after = 0;
    const auto progress = [&] {
      u64 x = emulated_threads.generation + (u64)emulated_threads.arrived * 7919;
      for (const Group& named : emulated_named) x += named.generation + (u64)named.arrived * 7919;
      for (const Group& w : warps) x += w.generation + (u64)w.arrived * 7919;
      return x + (u64)left * 104729;
    };
    before = progress();
    const u32 resting = chance();  // warps
    for (Fiber& f : fibers) {
      if (f.done || resting >> f.thread.x / 32 & 1) continue;
      current = &f;
      swapcontext(&scheduler, &f.context);
      if (f.done) left--;
    }
    after = progress();
    if (left && !resting && before == after) stop("some lanes wait for others that never come");
  }
}

static void launch(void (*kernel)(const void*), int x, int y, int threads, int dynamic_bytes, const void* arguments) {
  std::vector<u8> dynamic(dynamic_bytes + 128);
  emulated_kernel = kernel;
  emulated_arguments = arguments;
  emulated_grid = {(u32)x, (u32)y};
  emulated_dynamic = dynamic.data() + (128 - (uintptr_t)dynamic.data() % 128) % 128;
  for (int j = 0; j < y; j++)
    for (int i = 0; i < x; i++) {
      memset(dynamic.data(), 0xff, dynamic.size());  // as good as anything
      emulated_block = {(u32)i, (u32)j};
      run_block(threads);
      if (!emulated_runs.empty()) stop("a run was copied that nobody awaited");
    }
}
