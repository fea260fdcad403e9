/* Transforms of new keys and values before they are coded: unrotate to the start of the RoPE block, subtract the mean, then a Hadamard
 * transform or a matrix. */

#define DOUBLES (LANE_COUNT / 2)

INLINE vd load_doubles(const double *p) { vd x; memcpy(&x, p, sizeof x); return x; }

typedef float vs __attribute__((vector_size(BYTES / 2)));
INLINE vd load_singles(const float *p) { vs x; memcpy(&x, p, sizeof x); return __builtin_convertvector(x, vd); }

/* out = in M in double, for VECTORS * DOUBLES columns from `first` on. Reads M row by row, as it lies in memory. */
INLINE void double_columns(const int VECTORS, const int SINGLE, const void *matrix, int dim, int first, const double *in, double *out) {
  vd sum[8];
  for (int k = 0; k < VECTORS; k++) sum[k] = (vd){};
  for (int d = 0; d < dim; d++) {
    const int64_t at = (int64_t)d * dim + first;
    const vd factor = (vd){} + in[d];
    for (int k = 0; k < VECTORS; k++)
      sum[k] += factor * (SINGLE ? load_singles((const float *)matrix + at + k * DOUBLES)
                                 : load_doubles((const double *)matrix + at + k * DOUBLES));
  }
  for (int k = 0; k < VECTORS; k++) memcpy(out + first + k * DOUBLES, &sum[k], sizeof sum[k]);
}

/* out = in M in double; M: [dim, dim], float (SINGLE) or double. */
INLINE void times_doubles(const int SINGLE, const void *matrix, int dim, const double *in, double *out) {
  int e = 0;
  for (; e + 8 * DOUBLES <= dim; e += 8 * DOUBLES) double_columns(8, SINGLE, matrix, dim, e, in, out);
  for (; e + 2 * DOUBLES <= dim; e += 2 * DOUBLES) double_columns(2, SINGLE, matrix, dim, e, in, out);
  for (; e < dim; e++) {
    out[e] = 0.0;
    for (int d = 0; d < dim; d++) {
      const int64_t at = (int64_t)d * dim + e;
      out[e] += in[d] * (SINGLE ? (double)((const float *)matrix)[at] : ((const double *)matrix)[at]);
    }
  }
}

/* x <- x M + offset in double precision. */
static void apply_matrix(const FusedTransform *transform, int head, int dim, float *x) {
  double in[256], out[256];
  const int64_t at = (int64_t)(head % transform->matrix_heads) * dim * dim;
  for (int c = 0; c < dim; c++) in[c] = x[c];
  if (transform->single)
    times_doubles(1, (const float *)transform->matrix + at, dim, in, out);
  else
    times_doubles(0, (const double *)transform->matrix + at, dim, in, out);
  const double *offset = transform->offset ? transform->offset + (int64_t)(head % transform->offset_heads) * dim : NULL;
  for (int c = 0; c < dim; c++) x[c] = (float)(offset ? out[c] + offset[c] : out[c]);
}

/* x <- x diag(signs) diag(H, ..., H) / sqrt(order), with H of size `order`: log2(order) passes of sums and differences. */
static void apply_hadamard(const FusedTransform *transform, int dim, float *x) {
  if (transform->signs)
    for (int c = 0; c < dim; c++) x[c] *= transform->signs[c];
  for (int half = 1; half < transform->order; half *= 2)
    for (int start = 0; start < dim; start += 2 * half)
      for (int c = start; c < start + half; c++) {
        const float a = x[c], b = x[c + half];
        x[c] = a + b;
        x[c + half] = a - b;
      }
  const float scale = (float)(1.0 / sqrt((double)transform->order));
  for (int c = 0; c < dim; c++) x[c] *= scale;
}

/* x <- (x rotated by -block * rope_block positions - mean) A, with A a Hadamard transform or a matrix; x: [dim]. */
static void apply_transform(const FusedTransform *transform, int head, int64_t position, int dim, float *x) {
  if (transform->rope_block) {
    const int64_t block = (position + transform->rope_first) / transform->rope_block - transform->rope_first / transform->rope_block;
    const float *cosine = transform->cosine + block * transform->rope_half, *sine = transform->sine + block * transform->rope_half;
    for (int c = 0; c < transform->rope_half; c++) {
      const float u = x[c], v = x[c + transform->rope_half];
      x[c] = u * cosine[c] + v * sine[c];
      x[c + transform->rope_half] = v * cosine[c] - u * sine[c];
    }
  }
  if (transform->mean)
    for (int c = 0; c < dim; c++) x[c] = (float)((double)x[c] - (double)transform->mean[(int64_t)head * dim + c]);
  if (transform->order > 1) apply_hadamard(transform, dim, x);
  if (transform->matrix) apply_matrix(transform, head, dim, x);
}
