/* Decode attention. Codes are summed as integers against queries and weights that are split into two limbs of seven bits;
 * scales touch the sums alone. The same numbers are added in the same order whatever the number of threads. */

#define LIMIT 8128.0f /* 64 * 127: the largest number that two limbs of up to 64 hold, about */
#define CHUNK 4       /* queries that are attended from at once */
#define MOST_ROWS 8   /* that are multiplied by a matrix at once */
#define AHEAD 8       /* tokens that are fetched ahead of the one that is read from the window */

/* A function whose first argument is a constant of its own, for a number from 1 to CHUNK. */
#define FOR_COUNT(count, function, ...)          \
  switch (count) {                               \
    case 1: function(1, __VA_ARGS__); break;     \
    case 2: function(2, __VA_ARGS__); break;     \
    case 3: function(3, __VA_ARGS__); break;     \
    default: function(4, __VA_ARGS__);           \
  }

/* e^x for x up to 0, to 4e-6 of it; e^-64 below -64. */
INLINE vf exponential(vf x) {
  x = highest(x, splat(-64.0f));
  const vf rounded = fused(x, splat(1.44269504f), splat(12582912.0f)); /* its last bits are the power of two */
  const vf f = fused(rounded - splat(12582912.0f), splat(-0.693147181f), x);
  vf y = fused(splat(8.3333333e-3f), f, splat(4.1666667e-2f));
  y = fused(y, f, splat(1.6666667e-1f));
  y = fused(y, f, splat(0.5f));
  y = fused(y, f, splat(1.0f));
  y = fused(y, f, splat(1.0f));
  return (vf)((vi)y + ((vi)rounded << 23));
}

/* A query as the integer dot products read it. */
typedef struct {
  const float *vector;
  const int8_t *high, *low;
  const float *scale, *sum; /* of every span: what a unit of the integers is worth, and the sum of the query's numbers */
  const float *mean_logit;        /* what logits are short of, and what those of flagged tokens are */
} Pack;

INLINE Pack pack_at(const Decode *call, const float *p) {
  const int dim = call->dim, spans = call->key.spans;
  const int8_t *limbs = (const int8_t *)(p + dim + 2 + 2 * spans);
  return (Pack){p, limbs, limbs + dim, p + dim + 2, p + dim + 2 + spans, p + dim};
}

/* Numbers as two limbs: x ~ scale * (128 high + low). Returns the scale. `sum` is of the numbers as the limbs hold them, so that
 * what rounds them off meets elements about their middle and not about zero. */
INLINE float to_limbs(const float *x, int count, int8_t *high, int8_t *low, float *sum) {
  const int whole = count / LANE_COUNT * LANE_COUNT;
  vf tops = splat(0.0f);
  for (int i = 0; i < whole; i += LANE_COUNT) tops = highest(magnitude(load_floats(x + i)), tops);
  float most = top_of(tops);
  for (int i = whole; i < count; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  *sum = 0.0f;
  if (!(most > 0x1p-100f)) { /* nothing, or next to it */
    memset(high, 0, (size_t)count);
    memset(low, 0, (size_t)count);
    return 0.0f;
  }
  const float times = LIMIT / most;
  vi totals = {};
  for (int i = 0; i < whole; i += LANE_COUNT) {
    const vi v = __builtin_convertvector(fused(load_floats(x + i), splat(times), splat(16384.5f)), vi) - 16384;
    const vi h = (v + 64) >> 7;
    const vc upper = __builtin_convertvector(h, vc), lower = __builtin_convertvector(v - (h << 7), vc);
    memcpy(high + i, &upper, sizeof upper);
    memcpy(low + i, &lower, sizeof lower);
    totals += v;
  }
  float total = total_of(floats(totals)); /* less than 2^24, so it is exact */
  for (int i = whole; i < count; i++) {
    const int v = (int)(x[i] * times + 16384.5f) - 16384, h = (v + 64) >> 7;
    high[i] = (int8_t)h;
    low[i] = (int8_t)(v - 128 * h);
    total += (float)v;
  }
  *sum = total * (most / LIMIT);
  return most / LIMIT;
}

INLINE void fetch(const void *from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at);
}

/* Product of two vectors of floats. */
INLINE float product(const float *x, const float *y, int dim) {
  vf sum = splat(0.0f);
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT) sum = fused(load_floats(x + c), load_floats(y + c), sum);
  float out = total_of(sum);
  for (; c < dim; c++) out += x[c] * y[c];
  return out;
}

/* Products of a vector with ROWS rows that are 256 apart: to out[row]. */
INLINE void row_products(const int ROWS, const float *x, const float *rows, int dim, float *out) {
  vf sum[CHUNK];
  for (int r = 0; r < ROWS; r++) sum[r] = splat(0.0f);
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT)
    for (int r = 0; r < ROWS; r++) sum[r] = fused(load_floats(x + c), load_floats(rows + 256 * r + c), sum[r]);
  for (int r = 0; r < ROWS; r++) out[r] = total_of(sum[r]);
  for (; c < dim; c++)
    for (int r = 0; r < ROWS; r++) out[r] += x[c] * rows[256 * r + c];
}

/* y += the weighted sum of such rows. */
INLINE void add_rows(const int ROWS, float *y, const float *weight, const float *rows, int dim) {
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT) {
    vf sum = load_floats(y + c);
    for (int r = 0; r < ROWS; r++) sum = fused(splat(weight[r]), load_floats(rows + 256 * r + c), sum);
    store_floats(y + c, sum);
  }
  for (; c < dim; c++)
    for (int r = 0; r < ROWS; r++) y[c] += weight[r] * rows[256 * r + c];
}

/* y += factor * x. */
INLINE void add_times(float *y, float factor, const float *x, int dim) {
  int c = 0;
  for (; c + LANE_COUNT <= dim; c += LANE_COUNT)
    store_floats(y + c, fused(splat(factor), load_floats(x + c), load_floats(y + c)));
  for (; c < dim; c++) y[c] += factor * x[c];
}

/* Numbers of any type to floats. */
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

/* y = x M for up to MOST_ROWS rows x, a matrix [dim, dim], and VECTORS vectors of columns from `first` on; rows of y are `stride`
 * apart. */
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

/* The same for columns up to `end`. */
INLINE void times_matrix_of(const int ROWS, const float *x, const float *matrix, int dim, int end, float *y, int64_t stride) {
  int e = 0;
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

/* The same for any number of rows: of eight at once, where registers hold their sums, the matrix is read less often. */
static void times_matrix(int rows, const float *x, const float *matrix, int dim, int end, float *y, int64_t stride) {
  for (int r = 0; r < rows;) {
    const int left = rows - r;
    if (LANE_COUNT != 8 && left >= MOST_ROWS) {
      times_matrix_of(MOST_ROWS, x + r * dim, matrix, dim, end, y + r * stride, stride);
      r += MOST_ROWS;
      continue;
    }
    FOR_COUNT(left, times_matrix_of, x + r * dim, matrix, dim, end, y + r * stride, stride)
    r += left < CHUNK ? left : CHUNK;
  }
}

/* Turns a vector back by a block's angles. */
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

/* Products of the queries of a chunk with every centroid, side by side: [spaces, 2^bits, CHUNK], or [centers, CHUNK]. */
INLINE float *lookup_tables(const Decode *call, int64_t row, int chunk) {
  const Stream *s = &call->key;
  const int64_t size = CHUNK * (s->centers ? s->centers : (int64_t)(call->dim / s->extra) << s->book_bits);
  return call->tables + (row * ((call->group + CHUNK - 1) / CHUNK) + chunk / CHUNK) * size;
}

/* Positions whose full-precision form is at hand: [0, sinks) and [recent, length); the others are in pages. */
INLINE void held(const Decode *call, const Stream *s, int64_t b, int64_t *sinks, int64_t *recent) {
  const int64_t n = call->batch->seq_lens[b];
  *sinks = 0;
  *recent = n;
  if (!s->rows) return;
  const int64_t waiting = n - s->sink - s->recent > 0 ? n - s->sink - s->recent : 0;
  int64_t from = (n < s->sink ? n : s->sink) + waiting / s->flush * s->flush;
  if (from < s->ring_start[b]) from = s->ring_start[b];
  if (from < s->sink) from = s->sink;
  *recent = from < n ? from : n;
  *sinks = call->batch->sinks[b] < n ? call->batch->sinks[b] : n;
}

/* Channels of queries that a block of positions reads: those that are stored, where none of its tokens is in the window. */
INLINE int channels_read(const Decode *call, int64_t b, int block) {
  const Stream *s = &call->key;
  if (!call->block || s->kind != SCALE_ALONE || s->mean) return call->dim;
  int64_t sinks, recent;
  held(call, s, b, &sinks, &recent);
  const int64_t begin = (call->first / call->block + block) * call->block - call->first;
  return begin < sinks || begin + call->block > recent ? call->dim : s->span[s->spans - 1].end;
}

/* What attention reads of a query's vector beside its numbers. */
INLINE void prepare_one(const Decode *call, int64_t row, int g, const float *rotated, float *p) {
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
    const int length = s->extra, spaces = dim / length;
    float *table = lookup_tables(call, row, g - lane);
    for (int space = 0; space < spaces; space++) {
      const float *book = book_of(s, head, space, length);
      for (int j = 0; j < 1 << s->book_bits; j++) {
        float dot = 0.0f;
        for (int i = 0; i < length; i++) dot += vector[space * length + i] * book[(int64_t)j * length + i];
        table[(((int64_t)space << s->book_bits) + j) * CHUNK + lane] = dot;
      }
    }
  }
}

/* All queries of a (sequence, head) for blocks of positions from `block` on: block after block, query after query, from `p` on. */
static void prepare_blocks(const Decode *call, int64_t row, int block, int blocks, float *p, float *scratch) {
  const int dim = call->dim, group = call->group, half = call->half;
  const int64_t b = row / call->heads, head = row % call->heads;
  for (int i = 0, rows; i < blocks * group; i += rows, p += rows * call->prepared_stride) {
    rows = blocks * group - i < MOST_ROWS ? blocks * group - i : MOST_ROWS;
    int end = 0;
    for (int r = 0; r < rows; r++) {
      const int own = block + (i + r) / group, read = channels_read(call, b, own);
      const int64_t turn = (int64_t)own * half;
      if (read > end) end = read;
      load_row(call->query, (row * group + (i + r) % group) * dim, call->type, dim, scratch + r * dim);
      if (call->block) unrotate(scratch + r * dim, call->cosine + turn, call->sine + turn, half);
      if (!call->dual) memcpy(p + r * call->prepared_stride, scratch + r * dim, sizeof(float) * (size_t)dim);
    }
    if (call->dual)
      times_matrix(rows, scratch, call->dual + (int64_t)(head % call->dual_heads) * dim * dim, dim, end, p, call->prepared_stride);
    for (int r = 0; r < rows; r++) prepare_one(call, row, (i + r) % group, scratch + r * dim, p + r * call->prepared_stride);
  }
}

/* Task: all queries of one (sequence, head), where they are the same for all positions. */
static void NAME(prepare)(const Decode *call, int64_t task, float *scratch) {
  prepare_blocks(call, task, 0, 1, call->prepared + task * call->group * call->prepared_stride, scratch);
}

/* --- keys ------------------------------------------------------------------------------------------------------- */

/* What codes of a span are multiplied by, of LANE_COUNT tokens; adds to their scores what does not depend on codes. */
INLINE vf begin_span(const int QUERIES, const Stream *s, int i, const uint8_t *run, int page_tokens, int token, const Pack *pack,
                     vf *total) {
  const Span *span = &s->span[i];
  if (s->kind >= CHANNEL) {
    for (int g = 0; g < QUERIES; g++) total[g] += splat(pack[g].sum[i]);
    return splat(1.0f);
  }
  const vf scale = meta_vector(s, run, page_tokens, span->meta, 0, token);
  const vf size = magnitude(scale);
  vf more = size * splat(span->center);
  if (s->kind == SCALE_MIN) more += meta_vector(s, run, page_tokens, span->meta, 1, token);
  if (s->kind == SCALE_ZERO) more -= size * meta_vector(s, run, page_tokens, span->meta, 1, token);
  for (int g = 0; g < QUERIES; g++) {
    total[g] = fused(more, splat(pack[g].sum[i]), total[g]);
    if (s->mean && i == 0) total[g] += choose(scale < splat(0.0f), splat(pack[g].mean_logit[1]), splat(0.0f));
  }
  return size;
}

/* Adds the products of vectors of codes, four channels of a token to a lane. */
INLINE void add_products(const int QUERIES, const int VECTORS, const vu *codes, const Pack *pack, int channel, int wide,
                         vi (*high)[CHUNK], vi (*low)[CHUNK]) {
  for (int g = 0; g < QUERIES; g++) {
    for (int k = 0; k < VECTORS; k++) high[k][g] = dot4(high[k][g], codes[k], word(pack[g].high + channel), wide);
    for (int k = 0; k < VECTORS; k++) low[k][g] = dot4(low[k][g], codes[k], word(pack[g].low + channel), wide);
  }
}

/* Adds the products of a whole section: a byte is read once for all of its codes, and the one `ahead` of it is fetched. */
INLINE void section_products(const int QUERIES, const int VECTORS, const int BITS, int first, int bytes, const uint8_t *const *base,
                             int64_t ahead, const Pack *pack, vi (*high)[CHUNK], vi (*low)[CHUNK]) {
  const vu mask = (vu){} + (uint32_t)(0x01010101u * ((1u << BITS) - 1));
  for (int c = 0; c < bytes; c += 4) {
    vu packed[4];
    for (int k = 0; k < VECTORS; k++) {
      packed[k] = load_bytes(base[k] + c * LANES);
      __builtin_prefetch(base[k] + c * LANES + ahead);
    }
    for (int slot = 0; slot < 8 / BITS; slot++) {
      vu codes[4];
      for (int k = 0; k < VECTORS; k++) codes[k] = packed[k] >> (uint32_t)(slot * BITS) & mask;
      add_products(QUERIES, VECTORS, codes, pack, first + slot * bytes + c, BITS == 8, high, low);
    }
  }
}

/* Adds the products of those channels of a section that are in a span. */
INLINE void part_products(const int QUERIES, const int VECTORS, const Section *section, const Span *span, const uint8_t *const *base,
                          int64_t ahead, const Pack *pack, vi (*high)[CHUNK], vi (*low)[CHUNK]) {
  const int bits = section->bits, bytes = section->width * bits / 8;
  const vu mask = (vu){} + (uint32_t)(0x01010101u * ((1u << bits) - 1));
  for (int shift = 0, start = section->first; shift < 8; shift += bits, start += bytes) {
    const vu by = (vu){} + (uint32_t)shift;
    const int from = start > span->first ? start : span->first;
    const int to = start + bytes < span->end ? start + bytes : span->end;
    for (int c = from; c < to; c += 4) {
      vu codes[4];
      for (int k = 0; k < VECTORS; k++) {
        codes[k] = load_bytes(base[k] + (c - start) * LANES) >> by & mask;
        if (!shift) __builtin_prefetch(base[k] + (c - start) * LANES + ahead);
      }
      add_products(QUERIES, VECTORS, codes, pack, c, bits == 8, high, low);
    }
  }
}

/* Scores of VECTORS * LANE_COUNT tokens of a page from `token` on: scores[query * stride + token]. */
INLINE void tile(const int QUERIES, const int VECTORS, const Stream *s, const uint8_t *run, int64_t ahead, int page_tokens,
                 int token, const Pack *pack, float *scores, int stride) {
  vf total[4][CHUNK];
  for (int k = 0; k < VECTORS; k++)
    for (int g = 0; g < QUERIES; g++) total[k][g] = splat(0.0f);
  for (int i = 0; i < s->spans; i++) {
    const Span *span = &s->span[i];
    vf size[4];
    for (int k = 0; k < VECTORS; k++) size[k] = begin_span(QUERIES, s, i, run, page_tokens, token + k * LANE_COUNT, pack, total[k]);
    for (int j = 0; j < s->sections; j++) {
      const Section *section = &s->section[j];
      const int first = section->first, end = first + section->width, bytes = section->width * section->bits / 8;
      if (end <= span->first || span->end <= first) continue;
      const uint8_t *base[4];
      vi high[4][CHUNK], low[4][CHUNK];
      for (int k = 0; k < VECTORS; k++) {
        base[k] = run + section->offset + key_place(bytes, token + k * LANE_COUNT, 0);
        for (int g = 0; g < QUERIES; g++) high[k][g] = low[k][g] = (vi){};
      }
      switch (span->first <= first && end <= span->end ? section->bits : 0) {
        case 2: section_products(QUERIES, VECTORS, 2, first, bytes, base, ahead, pack, high, low); break;
        case 4: section_products(QUERIES, VECTORS, 4, first, bytes, base, ahead, pack, high, low); break;
        default: part_products(QUERIES, VECTORS, section, span, base, ahead, pack, high, low);
      }
      for (int g = 0; g < QUERIES; g++) {
        const vf unit = splat(section->alpha * pack[g].scale[i]);
        for (int k = 0; k < VECTORS; k++)
          total[k][g] = fused(size[k] * unit, floats((high[k][g] << 7) + low[k][g]), total[k][g]);
      }
    }
  }
  for (int k = 0; k < VECTORS; k++)
    for (int g = 0; g < QUERIES; g++) store_floats(scores + g * stride + token + k * LANE_COUNT, total[k][g]);
}

/* As many vectors at a time as registers allow. */
INLINE void tiles(const int QUERIES, const Stream *s, const uint8_t *run, int64_t ahead, int page_tokens, int from, int to, const Pack *pack,
                  float *scores, int stride) {
  const int most = LANE_COUNT == 8 ? (QUERIES == 1 ? 2 : 1) : QUERIES == 1 ? 4 : 2;
  int token = from / LANE_COUNT * LANE_COUNT;
  for (; token + most * LANE_COUNT <= page_tokens && token < to; token += most * LANE_COUNT)
    tile(QUERIES, most, s, run, ahead, page_tokens, token, pack, scores, stride);
  for (; token < to; token += LANE_COUNT) tile(QUERIES, 1, s, run, ahead, page_tokens, token, pack, scores, stride);
}

static void code_scores(int queries, const Stream *s, const uint8_t *run, int64_t ahead, int page_tokens, int from, int to,
                        const Pack *pack, float *scores, int stride) {
  FOR_COUNT(queries, tiles, s, run, ahead, page_tokens, from, to, pack, scores, stride)
}

/* Adds what the high bits of boosted channels are worth: four channels of a token to a byte, tokens one after another. */
static void boosted_scores(int queries, const Stream *s, const uint8_t *run, int dim, int group, int from, int to, const Pack *pack,
                           const float *scales, float *scores, int stride) {
  const int words = (s->extra + 15) / 16, bytes = s->extra / 4;
  const uint8_t *index = run + s->index_offset + (int64_t)group * dim;
  int8_t high[CHUNK][256], low[CHUNK][256];
  float unit[CHUNK], unused;
  for (int g = 0; g < queries; g++) {
    float numbers[256] = {0};
    for (int c = 0; c < dim; c++) {
      const int i = index[c], j = i % 16;
      if (i < s->extra) numbers[i / 16 * 16 + j % 4 * 4 + j / 4] = 4.0f * pack[g].vector[c] * scales[c];
    }
    unit[g] = to_limbs(numbers, 16 * words, high[g], low[g], &unused);
  }
  const vu mask = (vu){} + 0x03030303u;
  for (int token = from / LANE_COUNT * LANE_COUNT; token < to; token += LANE_COUNT)
    for (int w = 0; w < words; w++) {
      uint32_t lanes[LANE_COUNT] = {0};
      const int count = bytes - 4 * w < 4 ? bytes - 4 * w : 4;
      for (int lane = 0; lane < LANE_COUNT; lane++)
        memcpy(&lanes[lane], run + s->high_offset + (int64_t)(token + lane) * bytes + 4 * w, (size_t)count);
      vu packed;
      memcpy(&packed, lanes, sizeof packed);
      for (int g = 0; g < queries; g++) {
        vi up = {}, down = {};
        for (int slot = 0; slot < 4; slot++) {
          const vu codes = packed >> (uint32_t)(2 * slot) & mask;
          up = dot4(up, codes, word(high[g] + 16 * w + 4 * slot), 0);
          down = dot4(down, codes, word(low[g] + 16 * w + 4 * slot), 0);
        }
        float *at = scores + g * stride + token;
        store_floats(at, fused(splat(unit[g]), floats((up << 7) + down), load_floats(at)));
      }
    }
}

/* Keys whose channels have their own scales: the scales go into the query, a group of tokens at a time. */
static void channel_scores(int queries, const Stream *s, const uint8_t *run, int page_tokens, int dim, int from, int to,
                           const Pack *pack, float *scores, int stride) {
  const int size = s->group_tokens;
  for (int group = from / size; group * size < to; group++) {
    int8_t limbs[CHUNK][2 * 256];
    float metas[512], scales[256], least[256], numbers[256], scale[CHUNK], sum[CHUNK];
    Pack own[CHUNK];
    load_row(run + s->meta_offset, 2 * (int64_t)group * dim, s->meta_type, 2 * dim, metas);
    for (int c = 0; c < dim; c++) {
      scales[c] = metas[2 * c];
      least[c] = metas[2 * c + 1];
    }
    for (int g = 0; g < queries; g++) {
      for (int c = 0; c < dim; c++) numbers[c] = pack[g].vector[c] * scales[c];
      sum[g] = product(pack[g].vector, least, dim);
      float unused;
      scale[g] = to_limbs(numbers, dim, limbs[g], limbs[g] + dim, &unused);
      own[g] = (Pack){pack[g].vector, limbs[g], limbs[g] + dim, &scale[g], &sum[g], pack[g].mean_logit};
    }
    const int first = group * size > from ? group * size : from, last = (group + 1) * size < to ? (group + 1) * size : to;
    code_scores(queries, s, run, 0, page_tokens, first, last, own, scores, stride);
    if (s->kind == BOOSTED) boosted_scores(queries, s, run, dim, group, first, last, pack, scales, scores, stride);
  }
}

/* Codes that stand for levels: lanes are tokens, channel after channel. */
INLINE void level_tiles(const int QUERIES, const Stream *s, const uint8_t *run, int page_tokens, int dim, int from, int to,
                        const Pack *pack, float *scores, int stride) {
  for (int token = from / LANE_COUNT * LANE_COUNT; token < to; token += LANE_COUNT) {
    vf sum[CHUNK];
    for (int g = 0; g < QUERIES; g++) sum[g] = splat(0.0f);
    for (int c = 0; c < dim; c++) {
      vu index = {};
      for (int j = 0; j < s->sections; j++) {
        const Section *section = &s->section[j];
        const int bytes = section->width * section->bits / 8, byte = c % bytes;
        const vu packed = load_bytes(run + section->offset + key_place(bytes, token, byte / 4 * 4));
        const uint32_t shift = (uint32_t)(byte % 4 * 8 + c / bytes * section->bits);
        index |= (packed >> shift & (uint32_t)((1 << section->bits) - 1)) << (uint32_t)section->shift;
      }
      const vf level = lookup(s->levels, (vi)index);
      for (int g = 0; g < QUERIES; g++) sum[g] = fused(splat(pack[g].vector[c]), level, sum[g]);
    }
    const vf norm = meta_vector(s, run, page_tokens, 0, 0, token);
    for (int g = 0; g < QUERIES; g++) store_floats(scores + g * stride + token, sum[g] * norm);
  }
}

static void level_scores(int queries, const Stream *s, const uint8_t *run, int page_tokens, int dim, int from, int to, const Pack *pack,
                         float *scores, int stride) {
  FOR_COUNT(queries, level_tiles, s, run, page_tokens, dim, from, to, pack, scores, stride)
}

/* Scores of tokens [from, to) of a page. */
static void page_scores(const Decode *call, int queries, const uint8_t *run, int64_t ahead, int64_t row, int chunk, int from,
                        int to, const Pack *pack, float *scores, int stride) {
  const Stream *s = &call->key;
  const int head = (int)(row % call->heads);
  const int dim = call->dim;
  if (s->kind <= SCALE_ALONE) {
    code_scores(queries, s, run, ahead, call->page_tokens, from, to, pack, scores, stride);
    if (s->centers) {
      const float *table = lookup_tables(call, row, chunk);
      for (int token = from; token < to; token++) {
        const float *own = table + (int64_t)center_of(s, run, token) * CHUNK;
        for (int g = 0; g < queries; g++) scores[g * stride + token] += own[g];
      }
    }
  } else if (s->kind == CHANNEL || s->kind == BOOSTED) {
    channel_scores(queries, s, run, call->page_tokens, dim, from, to, pack, scores, stride);
  } else if (s->kind == LEVELS) {
    level_scores(queries, s, run, call->page_tokens, dim, from, to, pack, scores, stride);
  } else if (s->kind == CENTROIDS) {
    const float *table = lookup_tables(call, row, chunk);
    const int spaces = dim / s->extra;
    uint16_t index[128 * 128];
    centroids_of(s, run, from, to, spaces, index);
    for (int token = from; token < to; token++) {
      const uint16_t *own = index + (token - from) * spaces;
      v4 sum = {};
      for (int space = 0; space < spaces; space++) {
        v4 products;
        memcpy(&products, table + (((int64_t)space << s->book_bits) + own[space]) * CHUNK, sizeof products);
        sum += products;
      }
      for (int g = 0; g < queries; g++) scores[g * stride + token] = sum[g];
    }
  } else {
    float key[256];
    for (int token = from; token < to; token++) {
      token_row(s, 1, run, call->page_tokens, head, token, dim, key);
      for (int g = 0; g < queries; g++) scores[g * stride + token] = product(pack[g].vector, key, dim);
    }
  }
}

/* --- values ----------------------------------------------------------------------------------------------------- */

/* Weights of a page's tokens as the integer dot products read them. */
typedef struct {
  int8_t high[CHUNK][128], low[CHUNK][128];
  float scale[CHUNK];
} Weights;

INLINE vu part_bytes(const uint8_t *p, int lanes) {
  vu x = {};
  memcpy(&x, p, 4 * (size_t)lanes);
  return x;
}

/* Codes of one plane of bytes, where unsigned bytes are multiplied as they lie in the byte, which is plane_unit times too much. */
INLINE vu plane(vu packed, int bits, int shift) {
  const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  return SIGNED_CODES ? packed >> ((vu){} + (uint32_t)shift) & mask : packed & mask << shift;
}
INLINE float plane_unit(int shift) { return SIGNED_CODES ? 1.0f : 1.0f / (float)(1 << shift); }

/* out[query][channel + lane] += the weighted sum of codes of VECTORS * LANE_COUNT channels, or of `lanes` of one vector. What lies
 * `ahead` of the bytes is fetched. */
INLINE void column(const int QUERIES, const int VECTORS, const Section *section, int bytes, const uint8_t *base, int64_t ahead,
                   int shift, int lanes, int quad, int quads, const Weights *w, float *out, int dim) {
  vi high[2][CHUNK], low[2][CHUNK];
  for (int k = 0; k < VECTORS; k++)
    for (int g = 0; g < QUERIES; g++) high[k][g] = low[k][g] = (vi){};
  for (int i = quad; i < quads; i++) {
    vu codes[2];
    for (int k = 0; k < VECTORS; k++) {
      const uint8_t *p = base + (int64_t)i * 4 * bytes + k * BYTES;
      codes[k] = plane(lanes ? part_bytes(p, lanes) : load_bytes(p), section->bits, shift);
      if (!shift) __builtin_prefetch(p + ahead);
    }
    for (int g = 0; g < QUERIES; g++) {
      for (int k = 0; k < VECTORS; k++) high[k][g] = dot4(high[k][g], codes[k], word(w->high[g] + 4 * i), section->bits == 8);
      for (int k = 0; k < VECTORS; k++) low[k][g] = dot4(low[k][g], codes[k], word(w->low[g] + 4 * i), section->bits == 8);
    }
  }
  for (int g = 0; g < QUERIES; g++)
    for (int k = 0; k < VECTORS; k++) {
      const vf unit = splat(section->alpha * plane_unit(shift) * w->scale[g]), sum = floats((high[k][g] << 7) + low[k][g]);
      float *at = out + g * dim + k * LANE_COUNT;
      if (!lanes)
        store_floats(at, fused(unit, sum, load_floats(at)));
      else
        for (int lane = 0; lane < lanes; lane++) at[lane] += unit[lane] * sum[lane];
    }
}

/* The same for one vector of channels in each of two planes of the same bytes. */
INLINE void two_planes(const int QUERIES, const Section *section, int bytes, const uint8_t *base, int64_t ahead, int shift, int quad,
                       int quads, const Weights *const *w, float *const *out, int dim) {
  vi high[2][CHUNK], low[2][CHUNK];
  for (int k = 0; k < 2; k++)
    for (int g = 0; g < QUERIES; g++) high[k][g] = low[k][g] = (vi){};
  for (int i = quad; i < quads; i++) {
    const vu packed = load_bytes(base + (int64_t)i * 4 * bytes);
    const vu codes[2] = {plane(packed, section->bits, shift), plane(packed, section->bits, shift + section->bits)};
    if (!shift) __builtin_prefetch(base + (int64_t)i * 4 * bytes + ahead);
    for (int k = 0; k < 2; k++)
      for (int g = 0; g < QUERIES; g++) {
        high[k][g] = dot4(high[k][g], codes[k], word(w[k]->high[g] + 4 * i), 0);
        low[k][g] = dot4(low[k][g], codes[k], word(w[k]->low[g] + 4 * i), 0);
      }
  }
  for (int k = 0; k < 2; k++)
    for (int g = 0; g < QUERIES; g++) {
      const vf unit = splat(section->alpha * plane_unit(shift + k * section->bits) * w[k]->scale[g]), sum = floats((high[k][g] << 7) + low[k][g]);
      store_floats(out[k] + g * dim, fused(unit, sum, load_floats(out[k] + g * dim)));
    }
}

/* The span that a channel is in, looked for from the last one found. */
INLINE int span_of(const Stream *s, int channel, int i) {
  while (s->span[i].end <= channel || s->span[i].first > channel) i = (i + 1) % s->spans;
  return i;
}

INLINE void columns(const int QUERIES, const Stream *s, const uint8_t *run, int64_t ahead, int quad, int quads, const Weights *w,
                    float *out, int dim) {
  const int most = LANE_COUNT == 8 && QUERIES > 2 ? 1 : 2;
  for (int j = 0; j < s->sections; j++) {
    const Section *section = &s->section[j];
    const int bytes = section->width * section->bits / 8;
    const uint8_t *base = run + section->offset;
    int start = section->first, i = 0;
    for (int shift = 0; shift < 8; shift += section->bits, start += bytes) {
      if (bytes == LANE_COUNT && most == 2 && section->bits < 8) { /* one vector a plane: two planes at once */
        i = span_of(s, start, i);
        const int k = span_of(s, start + bytes, i);
        if (s->span[i].end >= start + bytes && s->span[k].end >= start + 2 * bytes) {
          const Weights *own[2] = {&w[s->span[i].meta], &w[s->span[k].meta]};
          float *to[2] = {out + start, out + start + bytes};
          two_planes(QUERIES, section, bytes, base, ahead, shift, quad, quads, own, to, dim);
          shift += section->bits, start += bytes;
          continue;
        }
      }
      for (int c = start; c < start + bytes;) {
        i = span_of(s, c, i);
        const int end = s->span[i].end < start + bytes ? s->span[i].end : start + bytes;
        const Weights *own = &w[s->span[i].meta];
        const uint8_t *p = base + (c - start) * 4;
        if (end - c >= most * LANE_COUNT) {
          column(QUERIES, most, section, bytes, p, ahead, shift, 0, quad, quads, own, out + c, dim);
          c += most * LANE_COUNT;
        } else if (end - c >= LANE_COUNT) {
          column(QUERIES, 1, section, bytes, p, ahead, shift, 0, quad, quads, own, out + c, dim);
          c += LANE_COUNT;
        } else {
          column(QUERIES, 1, section, bytes, p, ahead, shift, end - c, quad, quads, own, out + c, dim);
          c = end;
        }
      }
    }
  }
}

static void code_sums(int queries, const Stream *s, const uint8_t *run, int64_t ahead, int quad, int quads, const Weights *w, float *out,
                      int dim) {
  FOR_COUNT(queries, columns, s, run, ahead, quad, quads, w, out, dim)
}

/* What tokens add to all channels of a span: sums over the whole split, by span's scale and query; still to be added over lanes. */
typedef struct {
  vf scale[MAX_SPANS][CHUNK], more[MAX_SPANS][CHUNK], flagged[CHUNK];
} Sums;

/* Adds codes that stand for levels, of tokens [from, to): lanes are channels, token after token. One section of whole vectors. */
INLINE void level_columns(const int QUERIES, const Stream *s, const uint8_t *run, int page_tokens, int from, int to, const float *weight,
                          int stride, float *out, int dim) {
  const Section *section = &s->section[0];
  const int bytes = section->width * section->bits / 8;
  float scaled[CHUNK][128];
  for (int token = from; token < to; token++)
    for (int g = 0; g < QUERIES; g++)
      scaled[g][token] = weight[g * stride + token] * meta_one(s, run, page_tokens, 0, 0, token);
  for (int c = 0; c < dim; c += LANE_COUNT) {
    const uint8_t *base = run + section->offset + c % bytes * 4;
    const uint32_t shift = (uint32_t)(c / bytes * section->bits);
    vf sum[CHUNK];
    for (int g = 0; g < QUERIES; g++) sum[g] = load_floats(out + g * dim + c);
    for (int token = from; token < to; token++) {
      const vu packed = load_bytes(base + (int64_t)(token / 4) * 4 * bytes);
      const vi index = (vi)(packed >> (shift + (uint32_t)(token % 4 * 8)) & (uint32_t)((1 << section->bits) - 1));
      const vf level = lookup(s->levels, index);
      for (int g = 0; g < QUERIES; g++) sum[g] = fused(splat(scaled[g][token]), level, sum[g]);
    }
    for (int g = 0; g < QUERIES; g++) store_floats(out + g * dim + c, sum[g]);
  }
}

static void level_sums(int queries, const Stream *s, const uint8_t *run, int page_tokens, int from, int to, const float *weight, int stride,
                       float *out, int dim) {
  FOR_COUNT(queries, level_columns, s, run, page_tokens, from, to, weight, stride, out, dim)
}

/* Adds centroids: of one sub-vector after another, so that its sums stay in registers. */
INLINE void centroid_sums(const int QUERIES, const int PARTS, const Stream *s, const uint16_t *index, int head, int from, int to, int dim,
                          const float *weight, int stride, float *out) {
  const int length = 4 * PARTS, spaces = dim / length;
  for (int space = 0; space < spaces; space++) {
    const float *book = book_of(s, head, space, length);
    v4 sum[CHUNK][2];
    for (int g = 0; g < QUERIES; g++) sum[g][0] = sum[g][1] = (v4){};
    for (int token = from; token < to; token++) {
      const float *centroid = book + (int64_t)index[(token - from) * spaces + space] * length;
      for (int part = 0; part < PARTS; part++) {
        v4 numbers;
        memcpy(&numbers, centroid + 4 * part, sizeof numbers);
        for (int g = 0; g < QUERIES; g++) sum[g][part] += numbers * weight[g * stride + token];
      }
    }
    for (int g = 0; g < QUERIES; g++)
      for (int i = 0; i < length; i++) out[g * dim + space * length + i] += sum[g][i / 4][i % 4];
  }
}

/* The same for sub-vectors of two channels, two of them at a time. */
INLINE void pair_sums(const int QUERIES, const Stream *s, const uint16_t *index, int head, int from, int to, int dim, const float *weight,
                      int stride, float *out) {
  const int spaces = dim / 2;
  for (int space = 0; space < spaces; space += 2) {
    const float *book = book_of(s, head, space, 2), *next = book_of(s, head, space + 1, 2);
    v4 sum[CHUNK];
    for (int g = 0; g < QUERIES; g++) sum[g] = (v4){};
    for (int token = from; token < to; token++) {
      const uint16_t *own = index + (token - from) * spaces + space;
      const float *a = book + 2 * own[0], *b = next + 2 * own[1];
      const v4 numbers = {a[0], a[1], b[0], b[1]};
      for (int g = 0; g < QUERIES; g++) sum[g] += numbers * weight[g * stride + token];
    }
    for (int g = 0; g < QUERIES; g++)
      for (int i = 0; i < 4; i++) out[g * dim + 2 * space + i] += sum[g][i];
  }
}

static void page_centroids(int queries, const Stream *s, const uint8_t *run, int head, int from, int to, int dim, const float *weight,
                           int stride, float *out) {
  uint16_t index[128 * 128];
  centroids_of(s, run, from, to, dim / s->extra, index);
  switch (s->extra == 8 ? 4 + queries : s->extra == 2 ? 8 + queries : queries) {
    case 1: centroid_sums(1, 1, s, index, head, from, to, dim, weight, stride, out); break;
    case 2: centroid_sums(2, 1, s, index, head, from, to, dim, weight, stride, out); break;
    case 3: centroid_sums(3, 1, s, index, head, from, to, dim, weight, stride, out); break;
    case 4: centroid_sums(4, 1, s, index, head, from, to, dim, weight, stride, out); break;
    case 5: centroid_sums(1, 2, s, index, head, from, to, dim, weight, stride, out); break;
    case 6: centroid_sums(2, 2, s, index, head, from, to, dim, weight, stride, out); break;
    case 7: centroid_sums(3, 2, s, index, head, from, to, dim, weight, stride, out); break;
    case 8: centroid_sums(4, 2, s, index, head, from, to, dim, weight, stride, out); break;
    case 9: pair_sums(1, s, index, head, from, to, dim, weight, stride, out); break;
    case 10: pair_sums(2, s, index, head, from, to, dim, weight, stride, out); break;
    case 11: pair_sums(3, s, index, head, from, to, dim, weight, stride, out); break;
    default: pair_sums(4, s, index, head, from, to, dim, weight, stride, out);
  }
}

/* Which lanes of tokens from `token` on are in [from, to). */
INLINE vi within(int token, int from, int to) {
  vi at;
  for (int lane = 0; lane < LANE_COUNT; lane++) at[lane] = token + lane;
  return (at >= from) & (at < to);
}

/* Weights of tokens [from, to) of a page times the scales of values, as limbs from a whole vector of tokens to a whole one. */
INLINE void page_weights(const Stream *s, int queries, const uint8_t *run, int size, int from, int to, const float *weight, int stride,
                         Weights *w, Sums *sums) {
  const int first = from / LANE_COUNT * LANE_COUNT, last = (to + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT;
  float own[CHUNK][128] __attribute__((aligned(64)));
  const int ragged = first < from || to < last;
  if (ragged) { /* beside the tokens lies anything, also what is no number */
    memset(own, 0, sizeof own);
    for (int g = 0; g < queries; g++) memcpy(own[g] + from, weight + g * stride + from, sizeof(float) * (size_t)(to - from));
    weight = own[0], stride = 128;
  }
  for (int m = 0; m < s->metas; m++) {
    vf size_of[128 / LANE_COUNT], more_of[128 / LANE_COUNT], flag_of[128 / LANE_COUNT];
    for (int t = first, k = 0; t < last; t += LANE_COUNT, k++) {
      const vf scale = meta_vector(s, run, size, m, 0, t);
      vi there = magnitude(scale) > splat(0.0f);
      if (ragged) there &= within(t, from, to);
      size_of[k] = (vf)(there & (vi)magnitude(scale));
      if (s->kind == SCALE_MIN) more_of[k] = (vf)(there & (vi)(meta_vector(s, run, size, m, 1, t) / size_of[k]));
      if (s->kind == SCALE_ZERO) more_of[k] = (vf)(there & (vi)-meta_vector(s, run, size, m, 1, t));
      if (s->mean) flag_of[k] = choose(there & (scale < splat(0.0f)), splat(1.0f), splat(0.0f));
    }
    for (int g = 0; g < queries; g++) {
      const float *own_weight = weight + g * stride;
      vf most = splat(0.0f), more = splat(0.0f), scaled[128 / LANE_COUNT];
      vi total = {};
      for (int t = first, k = 0; t < last; t += LANE_COUNT, k++) {
        scaled[k] = load_floats(own_weight + t) * size_of[k];
        most = highest(scaled[k], most);
      }
      if (s->mean && m == 0)
        for (int t = first, k = 0; t < last; t += LANE_COUNT, k++)
          sums->flagged[g] = fused(load_floats(own_weight + t), flag_of[k], sums->flagged[g]);
      const float top = top_of(most);
      const vf times = splat(top > 0x1p-100f ? LIMIT / top : 0.0f);
      const float unit = top * (1.0f / LIMIT);
      w[m].scale[g] = unit;
      for (int t = first, k = 0; t < last; t += LANE_COUNT, k++) {
        const vi v = __builtin_convertvector(fused(scaled[k], times, splat(0.5f)), vi);
        const vi h = (v + 64) >> 7;
        const vc high = __builtin_convertvector(h, vc), low = __builtin_convertvector(v - (h << 7), vc);
        memcpy(w[m].high[g] + t, &high, sizeof high);
        memcpy(w[m].low[g] + t, &low, sizeof low);
        total += v;
        if (s->kind != SCALE_ALONE) more = fused(floats(v), more_of[k], more);
      }
      sums->scale[m][g] += floats(total) * unit;
      if (s->kind != SCALE_ALONE) sums->more[m][g] += more * unit;
    }
  }
}

/* Adds tokens [from, to) of a page: weight[query * stride + token]. */
static void page_sums(const Decode *call, int queries, const uint8_t *run, int64_t ahead, int head, int from, int to, const float *weight, int stride,
                      float *out, Sums *sums) {
  const Stream *s = &call->value;
  const int dim = call->dim, size = call->page_tokens;
  if (s->kind == CENTROIDS) {
    page_centroids(queries, s, run, head, from, to, dim, weight, stride, out);
    return;
  }
  if (s->kind == LEVELS && s->sections == 1 && s->section[0].width * s->section[0].bits / 8 % LANE_COUNT == 0) {
    level_sums(queries, s, run, size, from, to, weight, stride, out, dim);
    return;
  }
  if (s->kind > SCALE_ALONE) {
    float row[256];
    for (int token = from; token < to; token++) {
      token_row(s, 0, run, size, head, token, dim, row);
      for (int g = 0; g < queries; g++) {
        const float p = weight[g * stride + token];
        add_times(out + g * dim, p, row, dim);
      }
    }
    return;
  }
  Weights w[MAX_SPANS];
  page_weights(s, queries, run, size, from, to, weight, stride, w, sums);
  code_sums(queries, s, run, ahead, from / LANE_COUNT * LANE_COUNT / 4, (to + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT / 4, w, out, dim);
  if (s->centers)
    for (int token = from; token < to; token++) {
      const float *center = center_at(s, head, center_of(s, run, token), dim);
      for (int g = 0; g < queries; g++) add_times(out + g * dim, weight[g * stride + token], center, dim);
    }
}

/* Adds to scores what logits are short of. */
INLINE void add_lost(const Decode *call, int queries, const Pack *pack, int count, float *at, int stride) {
  for (int g = 0; call->use_mean_logit && g < queries; g++, at += stride) {
    const float mean_logit = pack[g].mean_logit[0];
    int t = 0;
    for (; t + LANE_COUNT <= count; t += LANE_COUNT) store_floats(at + t, load_floats(at + t) + splat(mean_logit));
    for (; t < count; t++) at[t] += mean_logit;
  }
}

/* --- a split of a sequence ---------------------------------------------------------------------------------------- */

INLINE int64_t window_row(const Stream *s, int64_t position) {
  return position < s->sink || !s->ring ? position : s->sink + (position - s->sink) % s->ring;
}

INLINE int64_t window_place(const Decode *call, const Stream *s, int64_t b, int head, int64_t position) {
  return ((call->batch->overlay_rows[b] * s->rows + window_row(s, position)) * call->heads + head) * call->dim;
}

/* Tokens of the window, up to CHUNK of them, to rows that are 256 apart; those AHEAD of them and before `end` are fetched. Returns
 * how many. */
INLINE int window_rows(const Decode *call, const Stream *s, int64_t b, int head, int64_t position, int64_t end, float *out) {
  const int width = call->window_type == FLOAT32 ? 4 : 2, count = end - position < CHUNK ? (int)(end - position) : CHUNK;
  for (int r = 0; r < count; r++) {
    if (position + r + AHEAD < end)
      fetch((const char *)s->window + window_place(call, s, b, head, position + r + AHEAD) * width, (int64_t)call->dim * width);
    load_row(s->window, window_place(call, s, b, head, position + r), call->window_type, call->dim, out + 256 * r);
  }
  return count;
}

/* The part of a sequence that a task attends to. */
typedef struct {
  int64_t b, begin, end;
  int head, split, stride; /* stride: from a query's scores to the next one's */
  int block;               /* the first block of positions that queries are unrotated to */
  const float *prepared;   /* the queries, of that block and the next ones */
} Part;

INLINE const uint8_t *run_of(const Decode *call, const Part *part, int64_t position) {
  const int64_t page = call->batch->table[part->b * call->batch->width + (position - call->origin) / call->page_tokens];
  return call->pages + (page * call->heads + part->head) * call->page_head_bytes;
}

/* Of positions from `position` on that lie in one page, the last one and one. */
INLINE int64_t end_of_page(const Decode *call, int64_t position) {
  return ((position - call->origin) / call->page_tokens + 1) * call->page_tokens + call->origin;
}

/* Has the page at `position`, if one of this part is there, come while another one, `run`, is summed. Returns how far ahead of `run`
 * its codes are, where whoever reads codes is to fetch them one by one: all at once would wait for each other. */
INLINE int64_t fetch_page(const Decode *call, const Part *part, const Stream *s, const uint8_t *run, int64_t position, int64_t recent) {
  const int size = call->page_tokens;
  if (position >= part->end || position >= recent) return 0;
  const uint8_t *next = run_of(call, part, position);
  if (s->kind <= SCALE_ALONE) {
    fetch(next + s->meta_offset, (int64_t)s->metas * s->names * size * 2);
    return next - run;
  }
  for (int j = 0; j < s->sections; j++) fetch(next + s->section[j].offset, (int64_t)s->section[j].width * s->section[j].bits * size / 8);
  return 0;
}

/* Scores of a chunk of queries: scores[query * stride + position - begin]. */
static void part_scores(const Decode *call, const Part *part, int chunk, int queries, float *scores) {
  const int dim = call->dim, group = call->group, size = call->page_tokens, stride = part->stride;
  const int64_t b = part->b, row = b * call->heads + part->head;
  float rows[CHUNK * 256] __attribute__((aligned(64)));
  int64_t sinks, recent;
  held(call, &call->key, b, &sinks, &recent);
  for (int64_t position = part->begin; position < part->end;) {
    /* a run of positions with the same queries, and in one page or in the window */
    int64_t to = part->end, index = chunk;
    if (call->block) {
      const int64_t block = (position + call->first) / call->block;
      index += (block - call->first / call->block - part->block) * group;
      if ((block + 1) * call->block - call->first < to) to = (block + 1) * call->block - call->first;
    }
    Pack pack[CHUNK];
    for (int g = 0; g < queries; g++) pack[g] = pack_at(call, part->prepared + (index + g) * call->prepared_stride);
    float *at = scores + (position - part->begin);
    if (position < sinks || position >= recent) {
      if (position < sinks && sinks < to) to = sinks;
      const int count = (int)(to - position);
      for (int i = 0, got; i < count; i += got) {
        got = window_rows(call, &call->key, b, part->head, position + i, to, rows);
        for (int g = 0; g < queries; g++) FOR_COUNT(got, row_products, pack[g].vector, rows, dim, at + g * stride + i)
      }
      add_lost(call, queries, pack, count, at, stride);
      position = to;
      continue;
    }
    if (recent < to) to = recent;
    if (end_of_page(call, position) < to) to = end_of_page(call, position);
    const int from = (int)((position - call->origin) % size), count = (int)(to - position);
    const uint8_t *run = run_of(call, part, position);
    const int64_t ahead = chunk ? 0 : fetch_page(call, part, &call->key, run, to, recent);
    position = to;
    if (count == size) { /* where they belong, and not by way of `own` */
      page_scores(call, queries, run, ahead, row, chunk, 0, size, pack, at, stride);
      add_lost(call, queries, pack, count, at, stride);
      continue;
    }
    float own[CHUNK * 128] __attribute__((aligned(64)));
    page_scores(call, queries, run, ahead, row, chunk, from, from + count, pack, own, 128);
    for (int g = 0; g < queries; g++) memcpy(at + g * stride, own + g * 128 + from, sizeof(float) * (size_t)count);
    add_lost(call, queries, pack, count, at, stride);
  }
}

/* Scores to weights, of the largest score as one. Leaves that score and the sum of weights. */
INLINE void to_weights(const Decode *call, float *x, int count, float *top, float *sum) {
  const int whole = (count + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT;
  if (call->cap > 0.0f)
    for (int t = 0; t < count; t++) x[t] = call->cap * tanhf(x[t] * call->scale / call->cap);
  for (int t = count; t < whole; t++) x[t] = -INFINITY;
  const vf scale = splat(call->cap > 0.0f ? 1.0f : call->scale);
  vf most = splat(-INFINITY), total = splat(0.0f);
  for (int t = 0; t < whole; t += LANE_COUNT) most = highest(load_floats(x + t) * scale, most);
  *top = top_of(most);
  for (int t = 0; t < whole; t += LANE_COUNT) {
    const vf p = exponential(fused(load_floats(x + t), scale, splat(-*top)));
    store_floats(x + t, p);
    total += p;
  }
  *sum = total_of(total);
}

/* Sums of values: out[query * dim + channel]. */
static void part_sums(const Decode *call, const Part *part, int queries, const float *weights, float *out) {
  const Stream *s = &call->value;
  const int dim = call->dim, size = call->page_tokens, stride = part->stride;
  float rows[CHUNK * 256] __attribute__((aligned(64)));
  int64_t sinks, recent;
  held(call, s, part->b, &sinks, &recent);
  Sums sums;
  for (int g = 0; g < queries; g++) {
    memset(out + g * dim, 0, sizeof(float) * (size_t)dim);
    for (int m = 0; m < s->metas; m++) sums.scale[m][g] = sums.more[m][g] = splat(0.0f);
    sums.flagged[g] = splat(0.0f);
  }
  for (int64_t position = part->begin; position < part->end;) {
    int64_t to = part->end;
    const float *weight = weights + (position - part->begin);
    if (position < sinks || position >= recent) {
      if (position < sinks && sinks < to) to = sinks;
      for (int got; position < to; position += got, weight += got) {
        got = window_rows(call, s, part->b, part->head, position, to, rows);
        for (int g = 0; g < queries; g++) FOR_COUNT(got, add_rows, out + g * dim, weight + g * stride, rows, dim)
      }
      continue;
    }
    if (recent < to) to = recent;
    if (end_of_page(call, position) < to) to = end_of_page(call, position);
    const int from = (int)((position - call->origin) % size), last = from + (int)(to - position);
    const uint8_t *run = run_of(call, part, position);
    const int64_t ahead = fetch_page(call, part, s, run, to, recent);
    position = to;
    page_sums(call, queries, run, ahead, part->head, from, last, weight - from, stride, out, &sums);
  }
  for (int g = 0; g < queries; g++) {
    float *x = out + g * dim;
    if (s->kind <= SCALE_ALONE)
      for (int i = 0; i < s->spans; i++) {
        const Span *span = &s->span[i];
        const float add = total_of(sums.scale[span->meta][g] * span->center + sums.more[span->meta][g]);
        int c = span->first;
        for (; c + LANE_COUNT <= span->end; c += LANE_COUNT) store_floats(x + c, load_floats(x + c) + splat(add));
        for (; c < span->end; c++) x[c] += add;
      }
    if (s->mean) add_times(x, total_of(sums.flagged[g]), s->mean + (int64_t)part->head * dim, dim);
  }
}

/* Tokens of a split of a sequence of n: more where there are splits enough for all threads. */
INLINE int64_t split_tokens(const Decode *call, int64_t n) {
  int64_t tokens = call->split_tokens;
  while (tokens < call->longest_split && n - call->origin >= 16 * tokens) tokens *= 2;
  return tokens;
}

/* Task: one (sequence, head, split). Leaves the weighted sum, the largest score and the sum of weights of every query. */
static void NAME(split)(const Decode *call, int64_t task, float *scratch) {
  const int dim = call->dim, group = call->group;
  Part part = {.split = (int)(task % call->splits), .head = (int)(task / call->splits % call->heads)};
  part.b = task / call->splits / call->heads;
  const int64_t n = call->batch->seq_lens[part.b], size = split_tokens(call, n);
  part.begin = part.split ? call->origin + part.split * size : 0;
  part.end = call->origin + (part.split + 1) * size;
  if (part.end > n) part.end = n;
  if (call->visible && part.begin < n - call->visible) part.begin = n - call->visible;
  part.stride = (int)size + call->origin + 128;
  float *scores = scratch + 64, *out = scores + (int64_t)CHUNK * part.stride, *own = out + CHUNK * 2 * dim;
  const int64_t row = part.b * call->heads + part.head;
  part.prepared = call->prepared + row * group * call->prepared_stride;
  if (call->block && part.begin < part.end) {
    part.block = (int)((part.begin + call->first) / call->block - call->first / call->block);
    const int last = (int)((part.end - 1 + call->first) / call->block - call->first / call->block);
    prepare_blocks(call, row, part.block, last - part.block + 1, own, scores);
    part.prepared = own;
  }
  for (int chunk = 0; chunk < group; chunk += CHUNK) {
    const int queries = group - chunk < CHUNK ? group - chunk : CHUNK;
    float *partial = call->partial + ((row * call->splits + part.split) * group + chunk) * (dim + 2);
    for (int g = 0; g < queries; g++) { /* of no tokens */
      partial[g * (dim + 2) + dim] = -INFINITY;
      partial[g * (dim + 2) + dim + 1] = 0.0f;
    }
    if (part.begin >= part.end) continue;
    part_scores(call, &part, chunk, queries, scores);
    for (int g = 0; g < queries; g++) {
      float *own = partial + g * (dim + 2) + dim;
      to_weights(call, scores + g * part.stride, (int)(part.end - part.begin), own, own + 1);
    }
    part_sums(call, &part, queries, scores, out);
    for (int g = 0; g < queries; g++) memcpy(partial + g * (dim + 2), out + g * dim, sizeof(float) * (size_t)dim);
  }
}

/* Task: one (sequence, head). Splits are added in their order. */
static void NAME(merge)(const Decode *call, int64_t task, float *scratch) {
  const int dim = call->dim, group = call->group, head = (int)(task % call->heads);
  for (int chunk = 0; chunk < group; chunk += CHUNK) {
    const int queries = group - chunk < CHUNK ? group - chunk : CHUNK;
    float *out = scratch, *back = scratch + CHUNK * dim;
    for (int g = 0; g < queries; g++) {
      const float *first = call->partial + (task * call->splits * group + chunk + g) * (dim + 2);
      float *sum = out + g * dim, top = -INFINITY, total = 0.0f;
      for (int i = 0; i < call->splits; i++) top = fmaxf(top, first[(int64_t)i * group * (dim + 2) + dim]);
      memset(sum, 0, sizeof(float) * (size_t)dim);
      for (int i = 0; i < call->splits; i++) {
        const float *part = first + (int64_t)i * group * (dim + 2);
        if (!(part[dim + 1] > 0.0f)) continue;
        const float times = expf(part[dim] - top);
        total += times * part[dim + 1];
        add_times(sum, times, part, dim);
      }
      const float times = total > 0.0f ? 1.0f / total : 0.0f;
      for (int c = 0; c < dim; c++) sum[c] *= times;
      if (call->lse) call->lse[task * group + chunk + g] = total > 0.0f ? top + logf(total) : -INFINITY;
    }
    if (call->inverse) {
      times_matrix(queries, out, call->inverse + (int64_t)(head % call->inverse_heads) * dim * dim, dim, dim, back, dim);
      out = back;
    }
    for (int g = 0; g < queries; g++)
      for (int c = 0; c < dim; c++) {
        const float offset = call->inverse_offset ? call->inverse_offset[(int64_t)(head % call->offset_heads) * dim + c] : 0.0f;
        store_one(call->out, (task * group + chunk + g) * dim + c, call->type, out[g * dim + c] + offset);
      }
  }
}
