// Stores whole prompts: the text before it is append.cu, whose pairs of tokens serve what does not fit here. It does the same with a third of
// the instructions.
//
// A warp takes sixteen tokens of one head and stream. Lane 4 g + t reads a quarter of tokens g and g + 8, and the tensor cores leave
// every number where the page wants its code: keys are multiplied by a matrix from the right, so that lane (g, t) has the t-th quarter
// of tokens g and g + 8; values from the left, so that it has the g-th eighth of tokens 2t, 2t + 1, 2t + 8 and 2t + 9. The matrix is the identity, or the
// Hadamard of those bits of a channel's number that lanes differ in; sums and differences in registers do the other bits. Codes become
// words of the page in registers. A learnt matrix is a sum of PARTS matrices of the input's type, so that products are exact.
//
// Streams of bands always have a matrix, of two parts in fp16 whatever the input's type: rows are brought into its range by a power of
// two of their own, and those that are turned back have two parts as well. Its columns are in the order in which a lane has channels: its
// share of the first band, of the second, and so on.
//
// Constants beside those of append.cu: for KEY_ and VALUE_: MEAN (whether one is taken off), PARTS (of a matrix, 0 for none), ALL_BANDS
// (as BANDS, with those that are not stored), WEIGHTED (whether channels have weights); KEY_TURNED (positions of a block that keys are turned back to the start of, 0 for none);
// TILE_WARPS, TILE_BLOCKS. Blocks have keys and values in turn; of bands, all of a head and stream, whose matrix is then near.

#include "kernels/append.cu"

constexpr int WORDS_READ = D / 8;  // of a lane and token
using AllKeyBands = KEY_ALL_BANDS;
using AllValueBands = VALUE_ALL_BANDS;
template <bool KEY> struct BandsOf { using Stored = KeyBands; using All = AllKeyBands; };
template <> struct BandsOf<false> { using Stored = ValueBands; using All = AllValueBands; };
DEV constexpr u32 ones(int count, int apart) {  // so many bits, so far apart
  u32 x = 0;
  for (int i = 0; i < count; i++) x |= 1u << (i * apart);
  return x;
}

// Codes of evenly spaced levels around zero, rounded as append.cu's inexact Coder does it. BITS and what a level is of the scale, as bits.
template <int BITS, u32 STEP> struct Levels {
  static constexpr float TOP = (1 << BITS) - 1, UNIT = 2 << BITS, REST = (UNIT - TOP) / UNIT;
  float by;
  DEV explicit Levels(float back) : by(back * (1.f / UNIT / __uint_as_float(STEP))) {}  // from the scale's reciprocal
  DEV float rounded(float x) const { return fmaf(add_held(fma_held(x, by, REST + TOP / 2.f / UNIT), -REST), UNIT, MAGIC); }  // the code and MAGIC
  DEV u32 bits(float x) const { return __float_as_uint(rounded(x)); }
  DEV u32 base() const { return __float_as_uint(MAGIC); }
  DEV float level(float x) const { return rounded(x) - MAGIC - TOP / 2.f; }
  DEV float missed(float x) const { return fmaf(x, -UNIT * by, level(x)); }  // by the level, in steps
};

template <bool KEY> struct Tile {
  static constexpr int TYPE = KEY ? KEY_TYPE : VALUE_TYPE, BITS = KEY ? KEY_BITS : VALUE_BITS, META = KEY ? KEY_META : VALUE_META;
  static constexpr int META_TYPE = KEY ? KEY_META_TYPE : VALUE_META_TYPE, META_OFFSET = KEY ? KEY_META_OFFSET : VALUE_META_OFFSET;
  static constexpr int OFFSET = KEY ? KEY_OFFSET : VALUE_OFFSET, ORDER = KEY ? KEY_HADAMARD : VALUE_HADAMARD, SEARCH = KEY ? KEY_SEARCH : VALUE_SEARCH;
  static constexpr bool MEAN = KEY ? KEY_MEAN : VALUE_MEAN;
  static constexpr int PARTS = KEY ? KEY_PARTS : VALUE_PARTS;
  static constexpr float BY = MEAN || (KEY ? KEY_BANDED : VALUE_BANDED) ? 1.f : (float)(KEY ? KEY_HADAMARD_SCALE : VALUE_HADAMARD_SCALE);  // numbers are that of what the lane has
  static constexpr bool AS_READ = ORDER == 1 && !PARTS && !MEAN && SEARCH == 1 && !CLIP;  // ranges are those of the tokens as they were read
  static constexpr int ROWS = KEY ? 2 : 4, N = D / (2 * ROWS);         // tokens of a lane and channels of each
  static constexpr int ROW_WORDS = D * BITS / 128;                     // of a lane: one token's keys, or two tokens' values
  static constexpr bool BANDED = KEY ? KEY_BANDED : VALUE_BANDED, UNBIASED = KEY ? KEY_UNBIASED : VALUE_UNBIASED, FLAG = KEY ? KEY_FLAG : VALUE_FLAG;
  static constexpr bool TURNED = KEY && KEY_TURNED, WEIGHTED = KEY ? KEY_WEIGHTED : VALUE_WEIGHTED;
  using Code = Coder<BITS, META, !AS_READ>;
  using Stored = typename BandsOf<KEY>::Stored;
  using All = typename BandsOf<KEY>::All;

  int lane, g, t;
  float x[ROWS][N];

  // --- whose row is whose: every row of the tile is owned by lanes that compute its scale --------------------------------------

  DEV int token(int r) const { return KEY ? g + 8 * r : 8 * (r >> 1) + 2 * t + (r & 1); }
  DEV int owned() const { return KEY || AS_READ ? g + 8 * (t >> 1) : 8 * (lane >> 4) + 2 * t + (lane >> 3 & 1); }
  template <class F> DEV float own_of_two(float a, float b, int apart, F f) const {
    const bool second = lane & apart;
    return f(second ? b : a, __shfl_xor_sync(FULL, second ? a : b, apart));
  }
  template <class F> DEV float own(const float* v, F f) const {  // of all lanes' parts of a row
    if constexpr (KEY || AS_READ) {
      const float both = own_of_two(v[0], v[1], 2, f);
      return f(both, __shfl_xor_sync(FULL, both, 1));
    } else {
      const float both = own_of_two(own_of_two(v[0], v[2], 16, f), own_of_two(v[1], v[3], 16, f), 8, f);
      return f(both, __shfl_xor_sync(FULL, both, 4));
    }
  }
  template <class T> DEV void spread(T mine, T* v) const {  // what owners know to lanes that have the row
    if constexpr (KEY) {
      const T other = __shfl_xor_sync(FULL, mine, 2);
      v[0] = t & 2 ? other : mine, v[1] = t & 2 ? mine : other;
    } else {
#pragma unroll
      for (int r = 0; r < 4; r++) v[r] = __shfl_sync(FULL, mine, AS_READ ? 4 * (2 * t + (r & 1)) + (r & 2) : 8 * r + (lane & 7));
    }
  }

  // --- from what was read to what is stored --------------------------------------------------------------------------------------

  DEV static u32 entry(int in, int out) {  // of the matrix: two neighbouring channels on one
    u32 both = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const u32 one = (TYPE == 0 ? 0x3F80u : 0x3C00u) | (__popc((in + e) & out & (ORDER - 1)) & 1) << 15;
      both |= (((in + e) ^ out) & ~(ORDER - 1) ? 0u : one) << (16 * e);
    }
    return both;
  }
  DEV static void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (TYPE == 0) mma_bf16(c, a0, a1, a2, a3, b0, b1);
    else mma(c, a0, a1, a2, a3, b0, b1);
  }
  // Adds a product, the k-th of two for the matrix's columns (of values: rows) q, to where its sums belong.
  template <class F> DEV void add_product(int q, int k, F product) {
    float* c[4];
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] = KEY ? &x[i / 2][4 * q + 2 * k + i % 2] : &x[2 * k + i % 2][2 * q + i / 2];
    float sum[4] = {*c[0], *c[1], *c[2], *c[3]};
    product(sum);
#pragma unroll
    for (int i = 0; i < 4; i++) *c[i] = sum[i];
  }
  // Products with a learnt matrix, whose registers lie in the order in which they are used.
  DEV void multiply_all(const u32 (*w)[WORDS_READ], const uint4* matrix) {
#pragma unroll
    for (int i = 0; i < ROWS * N; i++) x[i / N][i % N] = 0.f;
#pragma unroll 1
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int m = 0; m < D / 16; m++)
#pragma unroll
        for (int q = 0; q < D / 16; q++) {
          const uint4 f = matrix[((p * (D / 16) + m) * (D / 16) + q) * 32 + lane];
#pragma unroll
          for (int k = 0; k < 2; k++)
            add_product(q, k, [&](float* sum) {
              if constexpr (KEY) multiply(sum, w[0][2 * m], w[1][2 * m], w[0][2 * m + 1], w[1][2 * m + 1], k ? f.z : f.x, k ? f.w : f.y);
              else multiply(sum, f.x, f.y, f.z, f.w, w[k][m], w[k][m + D / 16]);
            });
        }
  }
  // --- bands: from what was read to what is stored ---------------------------------------------------------------------------

  // A power of two that brings a row close to 2^8, for the row among g, g + 8 that this lane owns as it was read.
  DEV u32 exponent(const u32 (*w)[WORDS_READ]) const {
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 a = w[r][0] & 0x7FFF7FFFu;
#pragma unroll
      for (int i = 1; i < WORDS_READ; i++) a = pair_max<TYPE>(a, w[r][i] & 0x7FFF7FFFu);
      most[r] = fmaxf(low<TYPE>(a), high<TYPE>(a));
    }
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const float both = own_of_two(most[0], most[1], 2, larger), all = larger(both, __shfl_xor_sync(FULL, both, 1));
    return min(max(__float_as_uint(all) >> 23, 8u), 254u);
  }
  DEV int block_of(const Arguments& a, int token) const {  // of positions; padding has any
    int b = 0;  // the last sequence that starts at the token or before
    for (int step = a.half_batch; step; step >>= 1)
      if (b + step < a.batch && a.query_start_loc[b + step] <= token) b += step;
    const int position = (int)(a.seq_lens[b] - a.query_start_loc[b + 1]) + token, size = KEY_TURNED ? KEY_TURNED : 1;
    return min(max((position + a.rope_first) / size - a.rope_first / size, 0), a.blocks - 1);
  }
  // Products with a matrix of two parts of fp16, the larger last. A lane's words m and m + D / 16 are multiplied together; of keys that are
  // turned back, they are channels that are turned together.
  DEV void multiply_bands(const Arguments& a, const u32 (*w)[WORDS_READ], int first, int head) {
    const uint4* matrix = (const uint4*)(KEY ? a.key_matrix : a.value_matrix) + head * (KEY ? a.key_stride : a.value_stride);
    const u32 own_exponent = exponent(w), other_exponent = __shfl_xor_sync(FULL, own_exponent, 2);
    const float times[2] = {__uint_as_float((261u - (t & 2 ? other_exponent : own_exponent)) << 23), __uint_as_float((261u - (t & 2 ? own_exponent : other_exponent)) << 23)};
    s64 at[2] = {0, 0};
    if constexpr (TURNED) {
      const int mine = block_of(a, min(first + g + 8 * (t >> 1), a.tokens - 1)), other = __shfl_xor_sync(FULL, mine, 2);
      at[0] = (s64)(t & 2 ? other : mine) * (D / 2) + t * (D / 8), at[1] = (s64)(t & 2 ? mine : other) * (D / 2) + t * (D / 8);
    }
#pragma unroll
    for (int i = 0; i < ROWS * N; i++) x[i / N][i % N] = 0.f;
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
      u32 y[2][2], rest[2][2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float one[2] = {low<TYPE>(w[r][m]), high<TYPE>(w[r][m])}, two[2] = {low<TYPE>(w[r][m + D / 16]), high<TYPE>(w[r][m + D / 16])};
        if constexpr (TURNED) {
          const float2 c = *(const float2*)(a.cosine + at[r] + 2 * m), s = *(const float2*)(a.sine + at[r] + 2 * m);
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float cosine = e ? c.y : c.x, sine = e ? s.y : s.x, turned = one[e] * cosine + two[e] * sine;
            two[e] = two[e] * cosine - one[e] * sine, one[e] = turned;
          }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) one[e] *= times[r], two[e] *= times[r];
        y[r][0] = fp16_pair(one[0], one[1]), y[r][1] = fp16_pair(two[0], two[1]);
        if constexpr (TURNED) {
          rest[r][0] = fp16_pair(one[0] - fp16_low(y[r][0]), one[1] - fp16_high(y[r][0]));
          rest[r][1] = fp16_pair(two[0] - fp16_low(y[r][1]), two[1] - fp16_high(y[r][1]));
        }
      }
#pragma unroll
      for (int p = 0; p < 2; p++)
#pragma unroll
        for (int q = 0; q < D / 16; q++) {
          const uint4 f = matrix[((p * (D / 16) + m) * (D / 16) + q) * 32 + lane];
#pragma unroll
          for (int k = 0; k < 2; k++)
            add_product(q, k, [&](float* sum) {
              if constexpr (KEY) {
                if constexpr (TURNED)
                  if (p) mma(sum, rest[0][0], rest[1][0], rest[0][1], rest[1][1], k ? f.z : f.x, k ? f.w : f.y);
                mma(sum, y[0][0], y[1][0], y[0][1], y[1][1], k ? f.z : f.x, k ? f.w : f.y);
              } else {
                mma(sum, f.x, f.y, f.z, f.w, y[k][0], y[k][1]);
              }
            });
        }
    }
    float back[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int lane_of = KEY ? lane & 28 | 2 * r : 4 * (2 * t + (r & 1)) + (r & 2);
      back[r] = __uint_as_float((__shfl_sync(FULL, own_exponent, lane_of) - 7u) << 23) * (KEY ? a.key_unit : a.value_unit);
    }
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float off[4] = {0.f, 0.f, 0.f, 0.f};
      if constexpr (MEAN) load_four(off, (KEY ? a.key_mean : a.value_mean) + head * D + (KEY ? t : g) * N + i);
#pragma unroll
      for (int j = 0; j < 4 * ROWS; j++) x[j / 4][i + j % 4] = fmaf(x[j / 4][i + j % 4], back[j / 4], -off[j % 4]);
    }
  }
  DEV static void load_four(float* x, const float* p) {
    const float4 v = *(const float4*)p;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  }

  // --- bands: scales, as append.cu has them --------------------------------------------------------------------------------------

  static constexpr int SHARE = KEY ? 4 : 8;  // lanes that have a row
  template <class B> DEV static constexpr int from() { return B::FIRST / SHARE; }
  template <class B> DEV static constexpr int until() { return (B::FIRST + B::WIDTH) / SHARE; }
  // Every number of a band, with its row, what its error counts and what is taken off it, where that is asked for.
  template <class B, bool WEIGHED, bool LESS, class F> DEV void each_number(const float* weights, const float* taken, F f) const {
#pragma unroll
    for (int i = from<B>(); i < until<B>(); i += 4) {
      float weight[4] = {1.f, 1.f, 1.f, 1.f}, off[4] = {0.f, 0.f, 0.f, 0.f};
      if constexpr (WEIGHED) load_four(weight, weights + i);
      if constexpr (LESS) load_four(off, taken + i);
#pragma unroll
      for (int j = 0; j < 4 * ROWS; j++) f(j / 4, x[j / 4][i + j % 4], weight[j % 4], off[j % 4]);
    }
  }
  struct Sums {  // of every row
    float of[ROWS];
    DEV Sums() {
#pragma unroll
      for (int r = 0; r < ROWS; r++) of[r] = 0.f;
    }
    DEV void add(const Sums& other, float by) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) of[r] = fmaf(other.of[r], by, of[r]);
    }
  };
  DEV float owned(const Sums& sums) const {  // of this lane's row, over all lanes that have a part of it
    return own(sums.of, [](float a, float b) { return a + b; });
  }
  // The best scale of the owned row, less `taken` where there is one, and the error that it leaves.
  template <bool LESS> DEV float banded_scale(const float* weights, const float* taken, float& least) const {
    Sums squares;
    Stored::each([&](auto band) {
      each_number<decltype(band), false, LESS>(weights, taken, [&](int r, float one, float, float off) {
        const float y = one - off;
        squares.of[r] = fmaf(y, y, squares.of[r]);
      });
    });
    const float rms = sqrtf(__fdiv_rn(owned(squares), (float)Stored::STORED));
    if constexpr (SEARCH == 1 && !FLAG) return ::rounded<META_TYPE>(storable<META_TYPE>(rms));
    float chosen = 1.f;
    least = __int_as_float(0x7f800000);
    for (int k = 0; k < SEARCH; k++) {
      const float factor = SEARCH == 1 ? 1.f : (float)(0.6 + (1.4 - 0.6) * k / (SEARCH > 1 ? SEARCH - 1 : 1));
      const float scale = ::rounded<META_TYPE>(storable<META_TYPE>(rms * factor));
      float back[ROWS];
      spread(__fdiv_rn(1.f, scale), back);
      Sums sums;
      Stored::each([&](auto band) {
        using B = decltype(band);
        Sums errors;
        each_number<B, WEIGHTED, LESS>(weights, taken, [&](int r, float one, float weight, float off) {
          const float missed = Levels<B::BITS, B::STEP>(back[r]).missed(one - off);
          errors.of[r] = fmaf(missed * weight, missed, errors.of[r]);
        });
        sums.add(errors, __uint_as_float(B::STEP) * __uint_as_float(B::STEP));
      });
      const float error = owned(sums) * (scale * scale);
      if (error < least) least = error, chosen = scale;
    }
    return chosen;
  }
  // What the scale of the owned row is stretched by, so that rows are as long as their codes say.
  DEV float stretch(const float* weights, const float* back, float scale) const {
    Sums reached, wanted;
    All::each([&](auto band) {
      using B = decltype(band);
      Sums here;
      each_number<B, WEIGHTED, false>(weights, nullptr, [&](int r, float one, float weight, float) {
        const float weighed = one * weight;
        wanted.of[r] = fmaf(weighed, one, wanted.of[r]);
        if constexpr (B::BITS > 0) here.of[r] = fmaf(weighed, Levels<B::BITS, B::STEP>(back[r]).level(one), here.of[r]);
      });
      reached.add(here, __uint_as_float(B::STEP));
    });
    const float to = owned(wanted), is = owned(reached) * scale;
    return fminf(fmaxf(__fdiv_rn(to, fmaxf(is, 1.17549435e-38f)), 0.8f), 1.6f);
  }

  DEV void turn(u32 (*w)[WORDS_READ], const float* signs) {
    if (ORDER > 1 && signs)
#pragma unroll
      for (int i = 0; i < WORDS_READ; i++) {
        const float* s = signs + t * (D / 4) + 2 * i;
        const u32 flip = (s[0] < 0.f ? 0x8000u : 0u) | (s[1] < 0.f ? 0x80000000u : 0u);
        w[0][i] ^= flip, w[1][i] ^= flip;
      }
    u32 part[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
      part[i / 2][i % 2] = KEY ? entry(t * (D / 4) + i % 2 * 2, g / 2 * (D / 4) + i / 2 * 2 + g % 2) : entry(t * (D / 4) + i % 2 * (D / 8), g * (D / 8) + i / 2);
#pragma unroll
    for (int m = 0; m < D / 16; m++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        if constexpr (KEY) multiply(c, w[0][2 * m], w[1][2 * m], w[0][2 * m + 1], w[1][2 * m + 1], part[k][0], part[k][1]);
        else multiply(c, part[0][0], part[1][0], part[0][1], part[1][1], w[k][m], w[k][m + D / 16]);
#pragma unroll
        for (int i = 0; i < 4; i++)
          if constexpr (KEY) x[i / 2][4 * m + 2 * k + i % 2] = c[i];
          else x[2 * k + i % 2][2 * m + i / 2] = c[i];
      }
#pragma unroll
    for (int half = KEY ? 4 : 2; half < N && half < ORDER; half *= 2)
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < N; i++)
          if (!(i & half)) {
            const float first = x[r][i], second = x[r][(i + half) % N];
            x[r][i] = first + second, x[r][(i + half) % N] = first - second;
          }
  }
  DEV void take_off(const float* mean) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float off = mean[(KEY ? t : g) * N + i];
#pragma unroll
      for (int r = 0; r < ROWS; r++) x[r][i] = fmaf(x[r][i], (float)(KEY ? KEY_HADAMARD_SCALE : VALUE_HADAMARD_SCALE), -off);
    }
  }
  // As in append.cu, row after row: those of eight (keys) or of four tokens at once.
  DEV void clip_rows(int drop, float share) {
    constexpr u32 MATES = KEY ? 0xFu : 0x11111111u;  // lanes that have a row together
#pragma unroll
    for (int r = 0; r < ROWS; r++) clip<N, KEY ? 1 : 4, KEY ? 4 : 32>(x[r], drop, drop, share, MATES << (KEY ? lane & 28 : t), lane);
  }

  // The range of the owned row.
  DEV void range(const u32 (*w)[WORDS_READ], float& least, float& most) const {
    float low_[ROWS], high_[ROWS];
    if constexpr (AS_READ) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 a = w[r][0], b = w[r][0];
#pragma unroll
        for (int i = 1; i < WORDS_READ; i++) a = pair_min<TYPE>(a, w[r][i]), b = pair_max<TYPE>(b, w[r][i]);
        low_[r] = fminf(low<TYPE>(a), high<TYPE>(a)), high_[r] = fmaxf(low<TYPE>(b), high<TYPE>(b));
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        low_[r] = high_[r] = x[r][0];
#pragma unroll
        for (int i = 1; i < N; i++) low_[r] = fminf(low_[r], x[r][i]), high_[r] = fmaxf(high_[r], x[r][i]);
      }
    }
    least = own(low_, [](float a, float b) { return fminf(a, b); }) * BY;
    most = own(high_, [](float a, float b) { return fmaxf(a, b); }) * BY;
  }

  DEV Scale scale(float least, float most) const {  // of the owned row
    Scale best = scale_of<BITS, META, META_TYPE>(least, most);
    if constexpr (SEARCH > 1) {
      const float middle = (most + least) * 0.5f, half = (most - least) * 0.5f;
      float lowest = 0.f;
      for (int k = 0; k < SEARCH; k++) {
        const float reach = half * ::part<SEARCH>(k);
        const Scale found = k ? scale_of<BITS, META, META_TYPE>(middle - reach, middle + reach) : best;
        float back[ROWS], zero[ROWS], errors[ROWS];
        spread(found.back, back), spread(found.zero, zero);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const Coder<BITS, META, false> code(0.f, back[r], zero[r], BY);
          errors[r] = 0.f;
#pragma unroll
          for (int i = 0; i < N; i++) {
            const float missed = code.missed(x[r][i]);
            errors[r] = fmaf(missed, missed, errors[r]);
          }
        }
        const float error = own(errors, [](float a, float b) { return a + b; }) * (found.scale * found.scale);
        if (k == 0 || error < lowest) lowest = error, best = found;
      }
    }
    return best;
  }

  // --- writing -------------------------------------------------------------------------------------------------------------------

  DEV void store_window(const Arguments& a, int first, int head, s64 slot) const {
    const s64 mine = slot >= 0 ? window_place(a, first + owned()) : -1;
    if (!__any_sync(FULL, mine >= 0)) return;
    s64 at[ROWS];
    spread(mine, at);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (at[r] >= 0) {
        u32 w[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
          const float one = x[r][2 * i] * BY, two = x[r][2 * i + 1] * BY;
          w[i] = WINDOW_TYPE == 0 ? bf16_pair(one, two) : fp16_pair(one, two);
        }
        u16* to = (u16*)(KEY ? a.window_key : a.window_value) + (at[r] * KV_HEADS + head) * D;
        if constexpr (BANDED) All::each([&](auto band) {
          using B = decltype(band);
          store_words<B::WIDTH / SHARE / 2>((u8*)(to + B::FIRST + (KEY ? t : g) * (B::WIDTH / SHARE)), w + from<B>() / 2);
        });
        else store_words<N / 2>((u8*)(to + (KEY ? t : g) * N), w);
      }
  }

  // Words of codes: key words hold two neighbouring channels in their halves, value words two tokens.
  template <class C> DEV void words(u32* w, const C& low_, const C& high_, const float* x_low, const float* x_high) const {
    constexpr int PER = 16 / BITS;
    constexpr u32 HALF = 0xFFFFu / ((1 << BITS) - 1);  // a one at every place of a half
#pragma unroll
    for (int k = 0; k < ROW_WORDS; k++) {
      w[k] = 0u - low_.base() * HALF - (high_.base() * HALF << 16);
#pragma unroll
      for (int s = 0; s < PER; s++) {
        const int i = k * PER + s;
        w[k] += low_.bits(x_low[KEY ? 2 * i : i]) << (s * BITS);
        w[k] += high_.bits(x_high[KEY ? 2 * i + 1 : i]) << (16 + s * BITS);
      }
    }
  }
  DEV static u32* place(u8* run, s64 slot, int g, int t, int second) {
    return (u32*)(run + OFFSET) + ((Place(slot).tile * 8 + g) * 4 + t) * (2 * ROW_WORDS) + second * ROW_WORDS;
  }
  DEV static s64 slot_of(const Arguments& a, int first, int token) {  // of a token of the tile; -1 of others
    return token >= 0 && token < 16 && first + token < a.tokens ? a.slot_mapping[first + token] : -1;
  }
  template <class Codes> DEV void store_keys(const Arguments& a, int first, int head, Codes code) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const s64 slot = slot_of(a, first, token(r));
      u32 w[ROW_WORDS];
      words(w, code(r), code(r), x[r], x[r]);
      if (slot >= 0) store_words<ROW_WORDS>((u8*)place(run_of(a, slot, head), slot, (int)(slot % 8), t, (int)(slot % 16 / 8)), w);
    }
  }

  // As above, of one band; rows of an odd number of bytes share words.
  template <class B> DEV void store_band(const Arguments& a, s64 slot, int head, int r, float back) const {
    constexpr int PER = 16 / B::BITS, PAIRS = B::WIDTH / 8, BYTES = B::WIDTH * B::BITS / 64, COUNT = (BYTES + 1) / 2;
    const Levels<B::BITS, B::STEP> code(back);
    u32 w[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      constexpr u32 FILLED = ones(BYTES % 2 ? PER / 2 : PER, B::BITS), WHOLE = ones(PER, B::BITS);
      const u32 base = code.base() * (k == COUNT - 1 ? FILLED : WHOLE);
      w[k] = 0u - base - (base << 16);
#pragma unroll
      for (int s = 0; s < PER; s++) {
        const int i = k * PER + s;
        if (i < PAIRS) {
          w[k] += code.bits(x[r][from<B>() + 2 * i]) << (s * B::BITS);
          w[k] += code.bits(x[r][from<B>() + 2 * i + 1]) << (16 + s * B::BITS);
        }
      }
    }
    if (slot < 0) return;
    u8* to = run_of(a, slot, head) + B::OFFSET + ((Place(slot).tile * 8 + slot % 8) * 4 + t) * (4 * BYTES);
    const int second = (int)(slot % 16 / 8);
    if constexpr (BYTES % 2 == 0) {
      store_words<COUNT>(to + second * (2 * BYTES), w);
    } else {
#pragma unroll
      for (int i = 0; i < BYTES; i++) {
        const int byte = second * BYTES + i;
        to[byte / 2 * 4 + byte % 2] = (u8)(w[i / 2] >> (i % 2 * 8)), to[byte / 2 * 4 + byte % 2 + 2] = (u8)(w[i / 2] >> (16 + i % 2 * 8));
      }
    }
  }

  DEV static bool neighbours(s64 one, s64 two) { return one >= 0 && one % 2 == 0 && two == one + 1; }  // that share words
  DEV u32* pair_place(const Arguments& a, int head, s64 slot) const {
    return place(run_of(a, slot, head), slot, g, (int)(slot % 8 / 2), (int)(slot % 16 / 8));
  }
  DEV void store_half(const Arguments& a, int head, s64 slot, const u32* w, int half) const {
    u16* to = (u16*)pair_place(a, head, slot) + slot % 2;
#pragma unroll
    for (int i = 0; i < ROW_WORDS; i++) to[2 * i] = (u16)(w[i] >> (16 * half));
  }
  template <class Codes> DEV void store_values(const Arguments& a, int first, int head, Codes code) const {
    s64 slot[4];
    u32 w[2][ROW_WORDS];
#pragma unroll
    for (int r = 0; r < 4; r++) slot[r] = slot_of(a, first, token(r));
#pragma unroll
    for (int k = 0; k < 2; k++) {
      words(w[k], code(2 * k), code(2 * k + 1), x[2 * k], x[2 * k + 1]);
      if (neighbours(slot[2 * k], slot[2 * k + 1])) store_words<ROW_WORDS>((u8*)pair_place(a, head, slot[2 * k]), w[k]);
    }
    if (__any_sync(FULL, !neighbours(slot[0], slot[1]) || !neighbours(slot[2], slot[3]))) store_others(a, first, head, slot, w);
  }
  // A sequence may begin at an odd place: then a lane's second token shares its words with the next lane's first one.
  DEV void store_others(const Arguments& a, int first, int head, const s64* slot, const u32 (*w)[ROW_WORDS]) const {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      u32 crossed[ROW_WORDS];
#pragma unroll
      for (int i = 0; i < ROW_WORDS; i++) {
        const u32 next = __shfl_sync(FULL, t == 0 ? w[1][i] : w[k][i], (lane & 28) + (lane + 1) % 4);
        crossed[i] = __byte_perm(w[k][i], next, 0x5432);
      }
      const s64 one = slot[2 * k], two = slot[2 * k + 1];
      if (neighbours(one, two)) continue;
      if (neighbours(two, slot_of(a, first, token(2 * k) + 2))) store_words<ROW_WORDS>((u8*)pair_place(a, head, two), crossed);
      else if (two >= 0) store_half(a, head, two, w[k], 1);
      if (one >= 0 && !neighbours(slot_of(a, first, token(2 * k) - 1), one)) store_half(a, head, one, w[k], 0);
    }
  }

  DEV void append_bands(const Arguments& a, const u32 (*w)[WORDS_READ], int first, int head) {
    const float* weights = (KEY ? a.key_weights : a.value_weights) + head * D + (KEY ? t : g) * N;
    const s64 slot = slot_of(a, first, owned());
    multiply_bands(a, w, first, head);
#if WINDOW_TOKENS
    store_window(a, first, head, slot);
#endif
    float error, scale = banded_scale<false>(weights, nullptr, error), sign = 1.f, back[ROWS];
    if constexpr (FLAG) {
      const float* taken = (KEY ? a.key_taken : a.value_taken) + head * D + (KEY ? t : g) * N;
      float less, off[ROWS];
      const float other = banded_scale<true>(weights, taken, less);
      if (less < error) scale = other, sign = -1.f;
      spread(sign < 0.f ? 1.f : 0.f, off);
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        float less_[4];
        load_four(less_, taken + i);
#pragma unroll
        for (int j = 0; j < 4 * ROWS; j++) x[j / 4][i + j % 4] = fmaf(-off[j / 4], less_[j % 4], x[j / 4][i + j % 4]);
      }
    }
    spread(__fdiv_rn(1.f, scale), back);
    if constexpr (UNBIASED) scale *= stretch(weights, back, scale);
    scale = storable<META_TYPE>(scale) * sign;
    if (slot >= 0 && (KEY ? t : g) % 2 == 0) store_meta(run_of(a, slot, head), META_OFFSET, META, slot, META_TYPE == 0 ? bf16_pair(scale, 0.f) : fp16_pair(scale, 0.f));
    if constexpr (KEY) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const s64 to = slot_of(a, first, token(r));
        Stored::each([&](auto band) { store_band<decltype(band)>(a, to, head, r, back[r]); });
      }
    } else {
      Stored::each([&](auto band) {
        store_values(a, first, head, [&](int r) { return Levels<decltype(band)::BITS, decltype(band)::STEP>(back[r]); });
      });
    }
  }

  DEV void append(const Arguments& a, int first, int head) {
    u32 w[2][WORDS_READ];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u8* from = (const u8*)(KEY ? a.key : a.value) + ((s64)min(first + g + 8 * r, a.tokens - 1) * KV_HEADS + head) * (2 * D);
      if constexpr (TURNED) {
        load_words<WORDS_READ / 2>(w[r], from + t * (D / 4)), load_words<WORDS_READ / 2>(w[r] + WORDS_READ / 2, from + D + t * (D / 4));
      } else {
        load_words<WORDS_READ>(w[r], from + t * (D / 2));
      }
    }
    if constexpr (BANDED) append_bands(a, w, first, head);
    else append_codes(a, w, first, head);
  }

  DEV void append_codes(const Arguments& a, u32 (*w)[WORDS_READ], int first, int head) {
    const s64 slot = slot_of(a, first, owned());
    float least, most, scale_[ROWS], back[ROWS], zero[ROWS];
    if constexpr (AS_READ) range(w, least, most);
    if constexpr (PARTS > 0) multiply_all(w, (const uint4*)(KEY ? a.key_matrix : a.value_matrix) + head * (KEY ? a.key_stride : a.value_stride));
    else turn(w, KEY ? a.key_signs : a.value_signs);
    if constexpr (MEAN) take_off((KEY ? a.key_mean : a.value_mean) + head * D);
    if constexpr (!AS_READ && !CLIP) range(w, least, most);
#if WINDOW_TOKENS
    store_window(a, first, head, slot);
#endif
#if CLIP
    clip_rows(KEY ? a.key_drop : a.value_drop, KEY ? a.key_share : a.value_share);
    range(w, least, most);
#endif
    const Scale best = scale(least, most);
    if (slot >= 0 && (KEY || AS_READ ? t % 2 : g % 2) == 0)
      store_meta(run_of(a, slot, head), META_OFFSET, META, slot, META_TYPE == 0 ? bf16_pair(best.scale, best.zero) : fp16_pair(best.scale, best.zero));
    spread(best.scale, scale_), spread(best.back, back), spread(best.zero, zero);
    const auto code = [&](int r) { return Code(scale_[r], back[r], zero[r], BY); };
    if constexpr (KEY) store_keys(a, first, head, code);
    else store_values(a, first, head, code);
  }
};

extern "C" __global__ void __launch_bounds__(TILE_WARPS * 32, TILE_BLOCKS) kvant_append_tiles(const Arguments a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if KEY_BANDED || VALUE_BANDED
  const int blocks = gridDim.x / (2 * KV_HEADS), part = blockIdx.x / blocks, head = part % KV_HEADS, first = (blockIdx.x % blocks * TILE_WARPS + warp) * 16;
  const bool is_key = part < KV_HEADS;
#else
  const int job = blockIdx.x / 2 * TILE_WARPS + warp, head = job % KV_HEADS, first = job / KV_HEADS * 16;
  const bool is_key = blockIdx.x % 2 == 0;
#endif
  if (first >= a.tokens) return;
  if (is_key) {
    Tile<true> tile{lane, lane >> 2, lane & 3};
    tile.append(a, first, head);
  } else {
    Tile<false> tile{lane, lane >> 2, lane & 3};
    tile.append(a, first, head);
  }
}
