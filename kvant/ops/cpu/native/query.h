/* Query operands: queries unrotated and transformed, as floats and as limbs for the integer dot products. */

/* Query operand: q A^-T as floats [dim], and for each span as two signed bytes per channel, q ~ scale * (128 high + low). */
typedef struct {
  const float *vector;
  const int8_t *high, *low;
  const float *scale, *sum; /* of every span: scale of the integers, and sum_c q_c */
  const float *mean_logit;  /* [2]: q . mu of the removed key mean; q . mean of tokens whose scale is negative */
#if ARM
  const int8x16_t *limbs; /* in the first of a chunk of queries: their limbs as arm_products.h packs them; NULL elsewhere */
#endif
} QueryOperand;

/* The operand at p: vector [dim], mean_logit [2], scale [spans], sum [spans], then the bytes high [dim] and low [dim]. */
INLINE QueryOperand operand_at(const Decode *call, const float *p) {
  const int dim = call->dim, spans = call->key.spans;
  const int8_t *limbs = (const int8_t *)(p + dim + 2 + 2 * spans);
  return (QueryOperand){.vector = p, .high = limbs, .low = limbs + dim, .scale = p + dim + 2, .sum = p + dim + 2 + spans, .mean_logit = p + dim};
}

/* Loads a chunk of queries of a (sequence, KV head) as they are, to vectors: [CHUNK, dim]. Of the operands, only `vector` is set. */
INLINE void load_raw_queries(const Decode *call, int64_t row, int chunk, int queries, float *vectors, QueryOperand *query) {
  for (int g = 0; g < queries; g++) {
    query[g] = (QueryOperand){.vector = vectors + (int64_t)g * call->dim};
    load_row(call->query, (row * call->group + chunk + g) * call->dim, call->type, call->dim, vectors + (int64_t)g * call->dim);
  }
}

#if ARM
/* row_products of several queries with four rows: out[query * stride + row]. Every number is loaded once. */
INLINE void block_products(const int QUERIES, const QueryOperand *query, const float *rows, int row_stride, int dim, float *out, int stride) {
  float32x4_t sum[CHUNK][4];
  for (int g = 0; g < QUERIES; g++)
    for (int r = 0; r < 4; r++) sum[g][r] = vdupq_n_f32(0.0f);
  for (int c = 0; c < dim; c += LANE_COUNT) {
    float32x4_t row[4];
    for (int r = 0; r < 4; r++) row[r] = vld1q_f32(rows + r * row_stride + c);
    for (int g = 0; g < QUERIES; g++) {
      const float32x4_t x = vld1q_f32(query[g].vector + c);
      for (int r = 0; r < 4; r++) sum[g][r] = vfmaq_f32(sum[g][r], x, row[r]);
    }
  }
  for (int g = 0; g < QUERIES; g++) vst1q_f32(out + g * stride, vpaddq_f32(vpaddq_f32(sum[g][0], sum[g][1]), vpaddq_f32(sum[g][2], sum[g][3])));
}

/* add_rows of several queries with four rows; weight[query * stride + row]. */
INLINE void add_block(const int QUERIES, float *y, const float *weight, int stride, const float *rows, int row_stride, int dim) {
  float32x4_t weights[CHUNK];
  for (int g = 0; g < QUERIES; g++) weights[g] = vld1q_f32(weight + g * stride);
  for (int c = 0; c < dim; c += LANE_COUNT) {
    float32x4_t row[4];
    for (int r = 0; r < 4; r++) row[r] = vld1q_f32(rows + r * row_stride + c);
    for (int g = 0; g < QUERIES; g++) {
      float32x4_t sum = vfmaq_laneq_f32(vld1q_f32(y + g * dim + c), row[0], weights[g], 0);
      sum = vfmaq_laneq_f32(sum, row[1], weights[g], 1);
      sum = vfmaq_laneq_f32(sum, row[2], weights[g], 2);
      vst1q_f32(y + g * dim + c, vfmaq_laneq_f32(sum, row[3], weights[g], 3));
    }
  }
}
#endif

/* Undoes RoPE by the angles of a RoPE block: channel pairs (u, v) -> (u cos + v sin, v cos - u sin). */
INLINE void unrotate(float *x, const float *cosine, const float *sine, int half) {
  int c = 0;
  for (; c + LANE_COUNT <= half; c += LANE_COUNT) {
    const vf u = load_floats(x + c), v = load_floats(x + c + half), a = load_floats(cosine + c), b = load_floats(sine + c);
    store_floats(x + c, u * a + v * b);
    store_floats(x + c + half, v * a - u * b);
  }
  for (; c < half; c++) {
    const float u = x[c], v = x[c + half];
    x[c] = u * cosine[c] + v * sine[c];
    x[c + half] = v * cosine[c] - u * sine[c];
  }
}

/* Dot products of a chunk of queries with every centroid: [subvectors, 2^book_bits, CHUNK], or [centers, CHUNK]. */
INLINE float *lookup_tables(const Decode *call, int64_t row, int chunk) {
  const Stream *s = &call->key;
  const int64_t size = CHUNK * (s->centers ? s->centers : (int64_t)(call->dim / s->subvector_dim) << s->book_bits);
  return call->tables + (row * ((call->group + CHUNK - 1) / CHUNK) + chunk / CHUNK) * size;
}

/* Channels of a query that the scores of a RoPE block need: all, or only the stored ones where none of the block's tokens is in an
 * overlay of keys as they are coded. */
INLINE int channels_read(const Decode *call, int64_t b, int block) {
  const Stream *s = &call->key;
  if (!call->rope_block || s->kind != SCALE_ALONE || s->mean) return call->dim;
  if (s->raw_window) return s->span[s->spans - 1].end;
  int64_t sinks, recent;
  overlay_bounds(call, s, b, &sinks, &recent);
  const int64_t begin = (call->rope_first / call->rope_block + block) * call->rope_block - call->rope_first;
  return begin < sinks || begin + call->rope_block > recent ? call->dim : s->span[s->spans - 1].end;
}

/* Completes a query operand whose vector [dim] is set: mean_logit, limbs, and the dot products with centroids. `rotated` is the query
 * before the transform. */
INLINE void make_operand(const Decode *call, int64_t row, int g, const float *rotated, float *p) {
  const Stream *s = &call->key;
  const int dim = call->dim, head = (int)(row % call->heads), lane = g % CHUNK;
  const float *vector = p;
  p[dim] = call->use_mean_logit ? product(rotated, call->mean_logit + (int64_t)head * dim, dim) : 0.0f;
  p[dim + 1] = s->mean ? product(vector, s->mean + (int64_t)head * dim, dim) : 0.0f;
  float *scale = p + dim + 2, *sum = scale + s->spans;
  int8_t *high = (int8_t *)(sum + s->spans), *low = high + dim;
  for (int i = 0; i < s->spans; i++) {
    const int first = s->span[i].first, count = s->span[i].end - first;
    scale[i] = to_limbs(vector + first, count, high + first, low + first, &sum[i]);
  }
  if (s->centers) {
    float *table = lookup_tables(call, row, g - lane);
    for (int j = 0; j < s->centers; j++) table[(int64_t)j * CHUNK + lane] = product(vector, center_at(s, head, j, dim), dim);
  }
  if (s->kind == CENTROIDS) {
    const int length = s->subvector_dim, subvectors = dim / length;
    float *table = lookup_tables(call, row, g - lane);
    for (int subvector = 0; subvector < subvectors; subvector++) {
      const float *book = book_of(s, head, subvector, length);
      for (int j = 0; j < 1 << s->book_bits; j++) {
        float dot = 0.0f;
        for (int i = 0; i < length; i++) dot += vector[subvector * length + i] * book[(int64_t)j * length + i];
        table[(((int64_t)subvector << s->book_bits) + j) * CHUNK + lane] = dot;
      }
    }
  }
}

/* Operands of all queries of a (sequence, KV head), for `blocks` RoPE blocks from `block` on, to p: [blocks, group, operand_stride].
 * `most`: rows of dim floats that `scratch` has room for, and that are multiplied together. On ARM they need the same channels. */
static void make_operands(const Decode *call, int64_t row, int block, int blocks, float *p, float *scratch, int most) {
  const int dim = call->dim, group = call->group, half = call->rope_half;
  const int64_t b = row / call->heads, head = row % call->heads;
  for (int i = 0, rows; i < blocks * group; i += rows, p += rows * call->operand_stride) {
    const int left = blocks * group - i < most ? blocks * group - i : most;
    int end = 0;
    for (rows = 0; rows < left; rows++) {
      const int r = rows, rope_block = block + (i + r) / group, read = channels_read(call, b, rope_block);
      const int64_t angles = (int64_t)rope_block * half;
      if (ARM && rows && read != end) break;
      if (read > end) end = read;
      load_row(call->query, (row * group + (i + r) % group) * dim, call->type, dim, scratch + r * dim);
      if (call->rope_block) unrotate(scratch + r * dim, call->cosine + angles, call->sine + angles, half);
      if (!call->dual) memcpy(p + r * call->operand_stride, scratch + r * dim, sizeof(float) * (size_t)dim);
    }
    const int64_t matrix = call->dual ? head % call->dual_heads : 0;
#if ARM
    if (call->dual_limbs)
      times_limbs(rows, scratch, call->dual_limbs + matrix * 2 * dim * dim, call->dual_scales + matrix * 2 * dim, dim, end, p, call->operand_stride);
    else
#endif
    if (call->dual) times_matrix(rows, scratch, call->dual + matrix * dim * dim, dim, end, p, call->operand_stride);
    for (int r = 0; r < rows; r++) make_operand(call, row, (i + r) % group, scratch + r * dim, p + r * call->operand_stride);
  }
}

/* Task: the operands of one (sequence, KV head). Keys are stored after RoPE, so that one operand serves all positions. */
static void NAME(prepare)(const Decode *call, int64_t task, float *scratch) {
  make_operands(call, task, 0, 1, call->operands + task * call->group * call->operand_stride, scratch, MOST_ROWS);
}
