/* Dense float arithmetic: exponential, dot products, rows times a matrix; and the split of floats into two 8-bit limbs. */

#define LIMIT 8128.0f /* 64 * 127: largest integer that is split into limbs; then |high| and |low| are at most 64 */
#define WIDE_LIMIT 32639.0f /* 127 * 256 + 127: largest integer that ARM splits into wide limbs, 256 high + low */
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
  int c = 0;
  if (type == FP8) {
    const uint8_t *bytes = (const uint8_t *)source + at;
    for (; c + LANE_COUNT <= dim; c += LANE_COUNT) store_floats(out + c, load_fp8(bytes + c));
    for (; c < dim; c++) out[c] = widen_fp8(bytes[c]);
    return;
  }
  const uint16_t *p = (const uint16_t *)source + at;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT) store_floats(out + c, load_halves(p + c, type));
  for (; c < dim; c++) out[c] = widen_one(p[c], type);
}

#if ARM
/* Y = X M for 16 columns: a cache line of every row of M, [dim, dim]. x: [dim / 4, ROWS, 4]. A number of X is taken by its index in a
 * register, so that nothing is broadcast. The lines `next` floats further on are prefetched. */
INLINE void packed_columns(const int ROWS, const float32x4_t *x, const float *matrix, int dim, int next, float *y, int64_t stride) {
  vf sum[CHUNK][4];
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < 4; k++) sum[r][k] = splat(0.0f);
  for (int d = 0; d < dim; d += 4, x += ROWS) {
#define ROW(d)                                                                                                              \
  {                                                                                                                         \
    float32x4_t numbers[4];                                                                                                 \
    for (int k = 0; k < 4; k++) numbers[k] = vld1q_f32(matrix + 4 * k);                                                     \
    __builtin_prefetch(matrix + next);                                                                                      \
    for (int r = 0; r < ROWS; r++)                                                                                          \
      for (int k = 0; k < 4; k++) sum[r][k] = (vf)vfmaq_laneq_f32((float32x4_t)sum[r][k], numbers[k], x[r], d);             \
    matrix += dim;                                                                                                          \
  }
    ROW(0) ROW(1) ROW(2) ROW(3)
#undef ROW
  }
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < 4; k++) store_floats(y + r * stride + 4 * k, sum[r][k]);
}

/* Y = X M for columns [0, end) as far as they are a multiple of 16; returns the first column that is left. At most CHUNK rows; dim is a
 * multiple of four. */
static int times_lines(int rows, const float *x, const float *matrix, int dim, int end, float *y, int64_t stride) {
  float32x4_t packed[256 / 4 * CHUNK], *to = packed;
  for (int d = 0; d < dim; d += 4)
    for (int r = 0; r < rows; r++) *to++ = vld1q_f32(x + r * dim + d);
  int e = 0;
  for (; e + 16 <= end; e += 16) FOR_COUNT(rows, packed_columns, packed, matrix + e, dim, e + 32 <= end ? 16 : 0, y + e, stride)
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
  for (int r = 0; dim % 4 == 0 && r < rows; r += CHUNK)
    e = times_lines(rows - r < CHUNK ? rows - r : CHUNK, x + r * dim, matrix, dim, end, y + r * stride, stride);
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
