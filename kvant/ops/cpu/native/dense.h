/* Dense float arithmetic: exponential, dot products, rows times a matrix; and the split of floats into two 8-bit limbs. */

#define LIMIT 8128.0f /* 64 * 127: largest integer that is split into limbs; then |high| and |low| are at most 64 */
#define CHUNK 4       /* queries of a KV head that are computed together */
#define MOST_ROWS 8   /* rows that are multiplied by a matrix together */
#define AHEAD 8       /* overlay tokens are prefetched this many positions before they are read */

/* Calls `function` with `count`, 1 to CHUNK, as a compile-time constant, so that its loops over queries or rows are unrolled. */
#define FOR_COUNT(count, function, ...)          \
  switch (count) {                               \
    case 1: function(1, __VA_ARGS__); break;     \
    case 2: function(2, __VA_ARGS__); break;     \
    case 3: function(3, __VA_ARGS__); break;     \
    default: function(4, __VA_ARGS__);           \
  }

/* e^x for x <= 0, relative error 4e-6; e^-64 for x < -64. */
INLINE vf exponential(vf x) {
  x = highest(x, splat(-64.0f));
  const vf rounded = fused(x, splat(1.44269504f), splat(12582912.0f)); /* the low bits are round(x / ln 2), the exponent of two */
  const vf f = fused(rounded - splat(12582912.0f), splat(-0.693147181f), x);
  vf y = fused(splat(8.3333333e-3f), f, splat(4.1666667e-2f));
  y = fused(y, f, splat(1.6666667e-1f));
  y = fused(y, f, splat(0.5f));
  y = fused(y, f, splat(1.0f));
  y = fused(y, f, splat(1.0f));
  return (vf)((vi)y + ((vi)rounded << 23));
}

#if ARM
/* 2^x for x <= 0, four vectors, relative error 3e-6; 2^-126 for x < -126. With n = round(x), f = x - n and s = 2^n it is s (1 + f q(f)).
 * Each step is done for all vectors: of several exponentials in a row GCC would load the constants again. fmla adds to its output, so a sum that
 * begins with a constant costs a copy of it: s begins without one. */
INLINE void powers_of_two(vf *x) {
  const vf rounder = splat(ROUNDER + 127.0f); /* the low bits are then n + 127, the exponent of s */
  vf s[4], f[4], q[4];
  for (int i = 0; i < 4; i++) x[i] = highest(x[i], splat(-126.0f));
  for (int i = 0; i < 4; i++) s[i] = x[i] + rounder;
  for (int i = 0; i < 4; i++) f[i] = x[i] - (s[i] - rounder);
  for (int i = 0; i < 4; i++) s[i] = (vf)((vi)s[i] << 23);
  for (int i = 0; i < 4; i++) q[i] = fused(f[i], splat(9.58280731e-3f), splat(5.59063405e-2f));
  for (int i = 0; i < 4; i++) q[i] = fused(f[i], q[i], splat(2.40240991e-1f));
  for (int i = 0; i < 4; i++) q[i] = fused(f[i], q[i], splat(6.93124175e-1f));
  for (int i = 0; i < 4; i++) x[i] = fused(s[i] * f[i], q[i], s[i]);
}
#endif

/* Splits floats into two limbs: x ~ scale * (128 high + low). Returns the scale. `sum` is the sum of the rounded numbers,
 * scale * (128 high + low). Where it multiplies the min or zero of the other operand, the error of the dot product is
 * sum_c e_c y_c, with e the rounding and y the elements, which are centred, and not sum_c e_c (y_c - min), whose terms are larger. */
INLINE float to_limbs(const float *x, int count, int8_t *high, int8_t *low, float *sum) {
  const int whole = count / LANE_COUNT * LANE_COUNT;
  vf tops = splat(0.0f);
  int i = 0;
#if ARM /* four at a time: one waits less for another */
  vf four[4] = {tops, tops, tops, tops};
  for (; i + 4 * LANE_COUNT <= whole; i += 4 * LANE_COUNT)
    for (int k = 0; k < 4; k++) four[k] = highest(magnitude(load_floats(x + i + k * LANE_COUNT)), four[k]);
  tops = highest(highest(four[0], four[1]), highest(four[2], four[3]));
#endif
  for (; i < whole; i += LANE_COUNT) tops = highest(magnitude(load_floats(x + i)), tops);
  float most = max_of(tops);
  for (i = whole; i < count; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  *sum = 0.0f;
  if (!(most > 0x1p-100f)) { /* all zero, or too small to divide by */
    memset(high, 0, (size_t)count);
    memset(low, 0, (size_t)count);
    return 0.0f;
  }
  const float times = LIMIT / most;
  vi totals = {};
  i = 0;
#if ARM
  for (; i + 16 <= whole; i += 16) {
    vi v[4]; /* the bits of ROUNDER + v: those of ROUNDER are above the lower 16, of which limbs are made */
    for (int k = 0; k < 4; k++) v[k] = (vi)fused(load_floats(x + i + 4 * k), splat(times), splat(ROUNDER));
    store_limbs(v, high + i, low + i);
    totals += (vi)(((vu)v[0] + (vu)v[1]) + ((vu)v[2] + (vu)v[3]) - 4u * ROUNDER_BITS); /* unsigned: sums may wrap around */
  }
#endif
  for (; i < whole; i += LANE_COUNT) {
    const vi v = __builtin_convertvector(fused(load_floats(x + i), splat(times), splat(16384.5f)), vi) - 16384;
    const vi h = (v + 64) >> 7;
    const vc upper = __builtin_convertvector(h, vc), lower = __builtin_convertvector(v - (h << 7), vc);
    memcpy(high + i, &upper, sizeof upper);
    memcpy(low + i, &lower, sizeof lower);
    totals += v;
  }
  float total = sum_of(floats(totals)); /* below 2^24, so the float sum is exact */
  for (i = whole; i < count; i++) {
    const int v = (int)(x[i] * times + 16384.5f) - 16384, h = (v + 64) >> 7;
    high[i] = (int8_t)h;
    low[i] = (int8_t)(v - 128 * h);
    total += (float)v;
  }
  *sum = total * (most / LIMIT);
  return most / LIMIT;
}

/* Prefetches `bytes` bytes, cache line by cache line. */
INLINE void fetch(const void *from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at);
}

/* Dot product x . y. */
INLINE float product(const float *x, const float *y, int dim) {
  vf sum = splat(0.0f);
  int c = 0;
#if ARM /* four sums: one waits less for another */
  vf four[4] = {sum, sum, sum, sum};
  for (; c + 4 * LANE_COUNT <= dim; c += 4 * LANE_COUNT)
    for (int k = 0; k < 4; k++) four[k] = fused(load_floats(x + c + k * LANE_COUNT), load_floats(y + c + k * LANE_COUNT), four[k]);
  sum = (four[0] + four[1]) + (four[2] + four[3]);
#endif
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT) sum = fused(load_floats(x + c), load_floats(y + c), sum);
  float out = sum_of(sum);
  for (; c < dim; c++) out += x[c] * y[c];
  return out;
}

/* out[r] = x . rows[r], rows of `stride` floats. */
INLINE void row_products(const int ROWS, const float *x, const float *rows, int stride, int dim, float *out) {
  vf sum[CHUNK];
  for (int r = 0; r < ROWS; r++) sum[r] = splat(0.0f);
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT)
    for (int r = 0; r < ROWS; r++) sum[r] = fused(load_floats(x + c), load_floats(rows + stride * r + c), sum[r]);
  for (int r = 0; r < ROWS; r++) out[r] = sum_of(sum[r]);
  for (; c < dim; c++)
    for (int r = 0; r < ROWS; r++) out[r] += x[c] * rows[stride * r + c];
}

/* y += sum_r weight[r] rows[r], rows of `stride` floats. */
INLINE void add_rows(const int ROWS, float *y, const float *weight, const float *rows, int stride, int dim) {
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT) {
    vf sum = load_floats(y + c);
    for (int r = 0; r < ROWS; r++) sum = fused(splat(weight[r]), load_floats(rows + stride * r + c), sum);
    store_floats(y + c, sum);
  }
  for (; c < dim; c++)
    for (int r = 0; r < ROWS; r++) y[c] += weight[r] * rows[stride * r + c];
}

/* y += factor * x. */
INLINE void add_times(float *y, float factor, const float *x, int dim) {
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT)
    store_floats(y + c, fused(splat(factor), load_floats(x + c), load_floats(y + c)));
  for (; c < dim; c++) y[c] += factor * x[c];
}

/* Loads `dim` numbers of a type from index `at` on, as floats. */
INLINE void load_row(const void *source, int64_t at, int type, int dim, float *out) {
  if (type == FLOAT32) {
    memcpy(out, (const float *)source + at, sizeof(float) * (size_t)dim);
    return;
  }
  const uint16_t *p = (const uint16_t *)source + at;
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT) store_floats(out + c, load_halves(p + c, type));
  for (; c < dim; c++) out[c] = widen_one(p[c], type);
}

#if ARM
#define CLOBBERED                                                                                                                          \
  "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", \
      "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

/* Y = X M for eight rows and eight columns. x: [dim / 4, 8, 4]; rows of the matrix are `step` floats apart. Lines `apart` floats from one another,
 * from `next` on, are prefetched, one for every four rows of the matrix. */
#define FMLA(sum, row, number, lane) "fmla v" #sum ".4s, v" #row ".4s, v" #number ".s[" #lane "]\n"
#define FMLA_ROWS(first, second, lane)                                                                               \
  FMLA(16, first, 0, lane) FMLA(17, second, 0, lane) FMLA(18, first, 1, lane) FMLA(19, second, 1, lane)                    \
  FMLA(20, first, 2, lane) FMLA(21, second, 2, lane) FMLA(22, first, 3, lane) FMLA(23, second, 3, lane)                    \
  FMLA(24, first, 4, lane) FMLA(25, second, 4, lane) FMLA(26, first, 5, lane) FMLA(27, second, 5, lane)                    \
  FMLA(28, first, 6, lane) FMLA(29, second, 6, lane) FMLA(30, first, 7, lane) FMLA(31, second, 7, lane)
#define ZERO(sum) "movi v" #sum ".4s, #0\n"
#define STORE_ROW(first, second) "stp q" #first ", q" #second ", [%[y]]\n add %[y], %[y], %[stride]\n"
#define LOAD_ROW(first, second) "ldp q" #first ", q" #second ", [%[matrix]]\n add %[matrix], %[matrix], %[step]\n"
static void times_panel(const float32x4_t *x, const float *matrix, int64_t step, int64_t dim, const float *next, int64_t apart, float *y, int64_t stride) {
  __asm__ volatile(
      ZERO(16) ZERO(17) ZERO(18) ZERO(19) ZERO(20) ZERO(21) ZERO(22) ZERO(23) ZERO(24) ZERO(25) ZERO(26) ZERO(27) ZERO(28) ZERO(29) ZERO(30) ZERO(31)
      "1:\n"
      "ldp q0, q1, [%[x]]\n ldp q2, q3, [%[x], #32]\n ldp q4, q5, [%[x], #64]\n ldp q6, q7, [%[x], #96]\n add %[x], %[x], #128\n"
      LOAD_ROW(8, 9) LOAD_ROW(10, 11) LOAD_ROW(12, 13) LOAD_ROW(14, 15)
      "prfm pldl1keep, [%[next]]\n add %[next], %[next], %[apart]\n"
      FMLA_ROWS(8, 9, 0) FMLA_ROWS(10, 11, 1) FMLA_ROWS(12, 13, 2) FMLA_ROWS(14, 15, 3)
      "subs %[dim], %[dim], #4\n b.gt 1b\n"
      STORE_ROW(16, 17) STORE_ROW(18, 19) STORE_ROW(20, 21) STORE_ROW(22, 23) STORE_ROW(24, 25) STORE_ROW(26, 27) STORE_ROW(28, 29) STORE_ROW(30, 31)
      : [x] "+r"(x), [matrix] "+r"(matrix), [dim] "+r"(dim), [next] "+r"(next), [y] "+r"(y)
      : [step] "r"(4 * step), [apart] "r"(4 * apart), [stride] "r"(4 * stride)
      : CLOBBERED);
}

#define PANEL_ROWS 32 /* rows that are multiplied by a panel of a matrix */

/* sum += X M for four rows of M, `step` floats apart, and eight columns; x: four numbers of each row of X. A number is taken by its
 * index in a register, so that nothing is broadcast. */
INLINE void fused_rows(const int ROWS, const float32x4_t *x, const float *matrix, int64_t step, vf (*sum)[2]) {
#define ROW(d)                                                                                                          \
  {                                                                                                                     \
    const float32x4_t numbers[2] = {vld1q_f32(matrix + d * step), vld1q_f32(matrix + d * step + LANE_COUNT)};           \
    for (int k = 0; k < 2; k++)                                                                                         \
      for (int r = 0; r < ROWS; r++) sum[r][k] = (vf)vfmaq_laneq_f32((float32x4_t)sum[r][k], numbers[k], x[r], d);      \
  }
  ROW(0) ROW(1) ROW(2) ROW(3)
#undef ROW
}

/* Y = X M for eight columns of M, whose rows are `step` floats apart. x: [dim / 4, ROWS, 4]. */
INLINE void packed_columns(const int ROWS, const float32x4_t *x, const float *matrix, int64_t step, int dim, float *y, int64_t stride) {
  vf sum[MOST_ROWS][2];
  for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = splat(0.0f);
  for (int d = 0; d < dim; d += 4, x += ROWS, matrix += 4 * step) fused_rows(ROWS, x, matrix, step, sum);
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < 2; k++) store_floats(y + r * stride + k * LANE_COUNT, sum[r][k]);
}

/* Y = X M for columns [0, end) as far as they are whole panels of eight; returns the first column that is left. At most PANEL_ROWS rows;
 * dim is a multiple of four. Where there are many rows, panels are copied first, so that they stay in the first-level cache for all of
 * them: the matrix of head_dim 128 fills a cache of 64 KB, and the rows of a panel lie in an eighth of its sets. */
static int times_panels(int rows, const float *x, const float *matrix, int dim, int end, float *y, int64_t stride) {
  float32x4_t packed[256 / 4 * PANEL_ROWS], *to = packed;
  float panel[256 * 16] __attribute__((aligned(64))); /* two panels: a cache line of every row */
  const int copied = rows > MOST_ROWS && dim > 64;
  for (int r = 0, count; r < rows; r += count) {
    count = rows - r >= MOST_ROWS ? MOST_ROWS : rows - r < CHUNK ? rows - r : CHUNK;
    for (int d = 0; d < dim; d += 4)
      for (int k = 0; k < count; k++) *to++ = vld1q_f32(x + (r + k) * dim + d);
  }
  int e = 0;
  for (; e + 8 <= end; e += 8) {
    const float *from = matrix + e;
    const float32x4_t *at = packed;
    int64_t step = dim;
    if (copied && e % 16 == 0 && e + 16 <= end)
      for (int d = 0; d < dim; d++) memcpy(panel + d * 16, from + (int64_t)d * dim, 16 * sizeof(float));
    if (copied && e / 16 * 16 + 16 <= end) from = panel + e % 16, step = 16;
    for (int r = 0, count; r < rows; r += count, at += count * dim / 4) {
      count = rows - r >= MOST_ROWS ? MOST_ROWS : rows - r < CHUNK ? rows - r : CHUNK;
      if (count == MOST_ROWS) { /* a quarter of the rows of the next two panels is prefetched */
        const float *next = matrix + (e / 16 * 16 + 16 < end ? e / 16 * 16 + 16 : 0) + (int64_t)(r / MOST_ROWS + e / 8) % 4 * (dim / 4) * dim;
        times_panel(at, from, step, dim, next, dim, y + r * stride + e, stride);
      }
      else
        FOR_COUNT(count, packed_columns, at, from, step, dim, y + r * stride + e, stride)
    }
  }
  return e;
}
#endif

/* Y = X M for VECTORS * LANE_COUNT columns from `first` on. X: [ROWS, dim], M: [dim, dim]; rows of Y are `stride` floats apart. */
INLINE void matrix_columns(const int ROWS, const int VECTORS, const float *x, const float *matrix, int dim, int first, float *y,
                           int64_t stride) {
  vf sum[MOST_ROWS][4];
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < VECTORS; k++) sum[r][k] = splat(0.0f);
  for (int d = 0; d < dim; d++) {
    const float *row = matrix + (int64_t)d * dim + first;
    vf numbers[4];
    for (int k = 0; k < VECTORS; k++) numbers[k] = load_floats(row + k * LANE_COUNT);
    for (int r = 0; r < ROWS; r++)
      for (int k = 0; k < VECTORS; k++) sum[r][k] = fused(splat(x[r * dim + d]), numbers[k], sum[r][k]);
  }
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < VECTORS; k++) store_floats(y + r * stride + first + k * LANE_COUNT, sum[r][k]);
}

/* The same for columns [e, end). */
INLINE void times_matrix_of(const int ROWS, const float *x, const float *matrix, int dim, int e, int end, float *y, int64_t stride) {
  if (LANE_COUNT == 16 && ROWS > CHUNK)
    for (; e + 3 * LANE_COUNT <= end; e += 3 * LANE_COUNT) matrix_columns(ROWS, 3, x, matrix, dim, e, y, stride);
  if (LANE_COUNT == 16 && ROWS <= CHUNK)
    for (; e + 4 * LANE_COUNT <= end; e += 4 * LANE_COUNT) matrix_columns(ROWS, 4, x, matrix, dim, e, y, stride);
  for (; e + 2 * LANE_COUNT <= end; e += 2 * LANE_COUNT) matrix_columns(ROWS, 2, x, matrix, dim, e, y, stride);
  for (; e + LANE_COUNT <= end; e += LANE_COUNT) matrix_columns(ROWS, 1, x, matrix, dim, e, y, stride);
  for (; e < end; e++)
    for (int r = 0; r < ROWS; r++) {
      float sum = 0.0f;
      for (int d = 0; d < dim; d++) sum += x[r * dim + d] * matrix[(int64_t)d * dim + e];
      y[r * stride + e] = sum;
    }
}

/* The same for any number of rows. Eight rows at a time where there are registers for their sums, so that M is read less often. */
static void times_matrix(int rows, const float *x, const float *matrix, int dim, int end, float *y, int64_t stride) {
  int e = 0;
#if ARM
  for (int r = 0; dim % 4 == 0 && r < rows; r += PANEL_ROWS)
    e = times_panels(rows - r < PANEL_ROWS ? rows - r : PANEL_ROWS, x + r * dim, matrix, dim, end, y + r * stride, stride);
#endif
  for (int r = 0; e < end && r < rows;) {
    const int left = rows - r;
    if (LANE_COUNT != 8 && left >= MOST_ROWS) {
      times_matrix_of(MOST_ROWS, x + r * dim, matrix, dim, e, end, y + r * stride, stride);
      r += MOST_ROWS;
      continue;
    }
    FOR_COUNT(left, times_matrix_of, x + r * dim, matrix, dim, e, end, y + r * stride, stride)
    r += left < CHUNK ? left : CHUNK;
  }
}
