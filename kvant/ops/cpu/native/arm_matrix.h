/* Queries of RoPE blocks times the matrix of the key transform, on ARM: Y = X M by integer dot products. Both are split into two wide
 * limbs, v = 256 high + low; low * low is left out, about as much as rounding to integers v changes. Three instructions do what takes
 * four with floats, and a matrix takes half as many bytes: that of head_dim 128 fits in the first-level cache. */

#define TILE_ROWS 4 /* rows of X of a tile of Y; it has eight columns */

/* X diag(factor) of TILE_ROWS rows as limbs, to out: [dim / 16, high and low, 4, TILE_ROWS, 4 channels]. Rows from `count` on are 0.
 * unit[row]: what 256 of an integer stand for. dim is a multiple of 16. */
static void pack_rows(int count, const float *x, const float *factor, int dim, int32_t *out, float *unit) {
  vf times[TILE_ROWS];
  for (int r = 0; r < TILE_ROWS; r++) {
    vf tops[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (int c = 0; r < count && c < dim; c += 16)
      for (int k = 0; k < 4; k++)
        tops[k] = highest(magnitude(load_floats(x + r * dim + c + 4 * k) * load_floats(factor + c + 4 * k)), tops[k]);
    const float top = max_of(highest(highest(tops[0], tops[1]), highest(tops[2], tops[3])));
    unit[r] = top * (256.0f / WIDE_LIMIT);
    times[r] = splat(top > 0x1p-100f ? WIDE_LIMIT / top : 0.0f); /* 0: all zero, or too small to divide by */
  }
  for (int c = 0; c < dim; c += 16, out += 32) {
    int32x4x4_t high, low;
    for (int r = 0; r < TILE_ROWS; r++) {
      int16x8_t v[2] = {}; /* low halves of the bits of ROUNDER + v */
      for (int k = 0; r < count && k < 2; k++) {
        const float *from = x + r * dim + c + 8 * k, *by = factor + c + 8 * k;
        const vf first = fused(load_floats(from) * load_floats(by), times[r], splat(ROUNDER));
        const vf second = fused(load_floats(from + 4) * load_floats(by + 4), times[r], splat(ROUNDER));
        v[k] = vuzp1q_s16(vreinterpretq_s16_f32((float32x4_t)first), vreinterpretq_s16_f32((float32x4_t)second));
      }
      int8x16_t upper, lower;
      wide_limbs(v[0], v[1], &upper, &lower);
      high.val[r] = vreinterpretq_s32_s8(upper), low.val[r] = vreinterpretq_s32_s8(lower);
    }
    vst4q_s32(out, high);
    vst4q_s32(out + 16, low);
  }
}

/* Adds the products of four channels: `upper` are sums of high * high, `mixed` of high * low and low * high.
 * matrix: [high and low, 8 columns, 4 channels]. */
#define ADD_ROW(r)                                          \
  for (int k = 0; k < 2; k++) {                             \
    upper[r][k] = DOT_WORD(upper[r][k], m[k], high, r);     \
    mixed[r][k] = DOT_WORD(mixed[r][k], m[2 + k], high, r); \
  }                                                         \
  for (int k = 0; k < 2; k++) mixed[r][k] = DOT_WORD(mixed[r][k], m[k], low, r);
INLINE void add_channels(const int32_t *x, const int8_t *matrix, int32x4_t (*upper)[2], int32x4_t (*mixed)[2]) {
  const int8x16_t high = vreinterpretq_s8_s32(vld1q_s32(x)), low = vreinterpretq_s8_s32(vld1q_s32(x + 16));
  const int8x16_t m[4] = {vld1q_s8(matrix), vld1q_s8(matrix + 16), vld1q_s8(matrix + 32), vld1q_s8(matrix + 48)};
  ADD_ROW(0) ADD_ROW(1) ADD_ROW(2) ADD_ROW(3)
}
#undef ADD_ROW

/* A tile of Y, of ROWS rows. matrix: [dim / 4, high and low, 8 columns, 4 channels]. */
INLINE void matrix_tile(const int ROWS, const int32_t *x, const int8_t *matrix, const float *column, const float *unit, int dim, float *y,
                        int64_t stride) {
  int32x4_t upper[TILE_ROWS][2], mixed[TILE_ROWS][2];
  for (int r = 0; r < TILE_ROWS; r++)
    for (int k = 0; k < 2; k++) upper[r][k] = mixed[r][k] = vdupq_n_s32(0);
  for (int c = 0; c < dim; c += 16, x += 32, matrix += 256) {
    add_channels(x, matrix, upper, mixed);
    add_channels(x + 4, matrix + 64, upper, mixed);
    add_channels(x + 8, matrix + 128, upper, mixed);
    add_channels(x + 12, matrix + 192, upper, mixed);
  }
  const vf columns[2] = {load_floats(column), load_floats(column + 4)};
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < 2; k++) {
      const vf sum = floats((vi)vaddq_s32(vshlq_n_s32(upper[r][k], 8), mixed[r][k]));
      store_floats(y + r * stride + 4 * k, sum * columns[k] * splat(unit[r]));
    }
}

#define WIDE_ROWS (4 * MOST_ROWS) /* rows that are multiplied by a matrix together */

/* Y = X M for columns [0, end), rounded up to a multiple of eight, and at most WIDE_ROWS rows. M = diag(row) V diag(column) with
 * integers V; scales: row [dim], then column [dim]. limbs: V as [dim / 8, dim / 4, high and low, 8 columns, 4 channels]. */
static void times_limbs(int rows, const float *x, const int8_t *limbs, const float *scales, int dim, int end, float *y, int64_t stride) {
  int32_t packed[WIDE_ROWS * 2 * 256 / 4];
  float unit[WIDE_ROWS];
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, panel = 16 * dim; /* panel: bytes of eight columns of V */
  const int share = (panel / 64 + tiles - 1) / tiles * 64;                /* bytes of the next panel that a tile prefetches */
  fetch(limbs, panel);
  for (int r = 0; r < rows; r += TILE_ROWS)
    pack_rows(rows - r < TILE_ROWS ? rows - r : TILE_ROWS, x + r * dim, scales, dim, packed + r * dim / 2, unit + r);
  for (int e = 0; e < end; e += 8, limbs += panel)
    for (int r = 0; r < rows; r += TILE_ROWS) {
      if (e + 8 < end) fetch(limbs + panel + r / TILE_ROWS * share, share);
      FOR_COUNT(rows - r, matrix_tile, packed + r * dim / 2, limbs, scales + dim + e, unit + r, dim, y + r * stride + e, stride)
    }
}
