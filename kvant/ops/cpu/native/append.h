/* Storing new tokens: into the space they are stored in, then codes, then bytes. The arithmetic is the reference's, operation by
 * operation, so that the bytes are the same but where a sum of many numbers is rounded in another order. */

#define DOUBLES (LANE_COUNT / 2)

INLINE vd load_doubles(const double *p) { vd x; memcpy(&x, p, sizeof x); return x; }

typedef float vs __attribute__((vector_size(BYTES / 2)));
INLINE vd load_singles(const float *p) { vs x; memcpy(&x, p, sizeof x); return __builtin_convertvector(x, vd); }

/* out = in M for VECTORS vectors of columns from `first` on: row after row, as they lie in memory. */
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
static void enter_matrix(const FusedTransform *space, int head, int dim, float *x) {
  double in[256], out[256];
  const int64_t at = (int64_t)(head % space->matrix_heads) * dim * dim;
  for (int c = 0; c < dim; c++) in[c] = x[c];
  if (space->single)
    times_doubles(1, (const float *)space->matrix + at, dim, in, out);
  else
    times_doubles(0, (const double *)space->matrix + at, dim, in, out);
  const double *offset = space->offset ? space->offset + (int64_t)(head % space->offset_heads) * dim : NULL;
  for (int c = 0; c < dim; c++) x[c] = (float)(offset ? out[c] + offset[c] : out[c]);
}

/* Sums and differences, pass by pass, of every run of `order` numbers. */
static void enter_hadamard(const FusedTransform *space, int dim, float *x) {
  if (space->signs)
    for (int c = 0; c < dim; c++) x[c] *= space->signs[c];
  for (int half = 1; half < space->order; half *= 2)
    for (int start = 0; start < dim; start += 2 * half)
      for (int c = start; c < start + half; c++) {
        const float a = x[c], b = x[c + half];
        x[c] = a + b;
        x[c + half] = a - b;
      }
  const float scale = (float)(1.0 / sqrt((double)space->order));
  for (int c = 0; c < dim; c++) x[c] *= scale;
}

static void enter(const FusedTransform *space, int head, int64_t position, int dim, float *x) {
  if (space->block) {
    const int64_t block = (position + space->first) / space->block - space->first / space->block;
    const float *cosine = space->cosine + block * space->half, *sine = space->sine + block * space->half;
    for (int c = 0; c < space->half; c++) {
      const float u = x[c], v = x[c + space->half];
      x[c] = u * cosine[c] + v * sine[c];
      x[c + space->half] = v * cosine[c] - u * sine[c];
    }
  }
  if (space->mean)
    for (int c = 0; c < dim; c++) x[c] = (float)((double)x[c] - (double)space->mean[(int64_t)head * dim + c]);
  if (space->order > 1) enter_hadamard(space, dim, x);
  if (space->matrix) enter_matrix(space, head, dim, x);
}

/* --- codes ------------------------------------------------------------------------------------------------------- */

/* Writes a token's codes, one byte each, into the planes of its page. */
static void write_codes(const Stream *s, int keys, uint8_t *run, int token, const uint8_t *codes) {
  for (int i = 0; i < s->sections; i++) {
    const Section *section = &s->section[i];
    const int bits = section->bits, bytes = section->width * bits / 8, mask = (1 << bits) - 1;
    uint8_t *base = run + section->offset;
    for (int byte = 0; byte < bytes; byte++) {
      const uint8_t *c = codes + section->first + byte;
      int x = 0;
      for (int shift = 0; shift < 8; shift += bits, c += bytes) x |= (*c >> section->shift & mask) << shift;
      base[keys ? key_place(bytes, token, byte) : value_place(bytes, token, byte)] = (uint8_t)x;
    }
  }
}

INLINE void write_meta(const Stream *s, uint8_t *run, int page_tokens, int meta, int name, int token, float x) {
  ((uint16_t *)(run + s->meta_offset))[(int64_t)(meta * s->names + name) * page_tokens + token] = narrow_one(x, s->meta_type);
}

INLINE float smallest_of(int type) { return type == FLOAT16 ? 0x1p-14f : 0x1p-126f; }
INLINE float largest_of(int type) { return type == FLOAT16 ? 65504.0f : 0x1.fep127f; }
INLINE float between(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* Clips numbers at a quantile of their magnitudes. */
static void clip(const FusedTransform *space, int dim, float *x) {
  if (space->clip_rank < 0) return;
  float top[256]; /* the largest magnitudes, descending */
  const int kept = dim - space->clip_rank;
  int count = 0;
  for (int c = 0; c < dim; c++) {
    const float size = fabsf(x[c]);
    if (count == kept && !(size > top[count - 1])) continue;
    int at = count < kept ? count++ : count - 1;
    for (; at > 0 && top[at - 1] < size; at--) top[at] = top[at - 1];
    top[at] = size;
  }
  const float below = top[kept - 1], above = top[kept > 1 ? kept - 2 : 0], share = space->clip_share;
  const float limit = share < 0.5f ? below + share * (above - below) : above - (above - below) * (1.0f - share);
  for (int c = 0; c < dim; c++) x[c] = between(x[c], -limit, limit);
}

/* Codes of a group for a range; the scale and the minimum or zero as they are stored. */
INLINE void affine_range(const Stream *s, const float *x, int count, int top, float low, float high, float *codes, float *scale,
                         float *more) {
  const float last = (float)top;
  const int type = s->meta_type;
  if (s->kind == SCALE_MIN) low = rounded_one(low, type);
  float step = (high - low) / last;
  step = rounded_one(step < smallest_of(type) ? smallest_of(type) : step, type);
  *scale = step;
  if (s->kind == SCALE_MIN) {
    *more = low;
    for (int c = 0; c < count; c++) codes[c] = between(rintf((x[c] - low) / step), 0.0f, last);
  } else {
    const float zero = rounded_one(between(rintf(-low / step), -32768.0f, 32768.0f), type);
    *more = zero;
    for (int c = 0; c < count; c++) codes[c] = between(rintf(x[c] / step) + zero, 0.0f, last);
  }
}

INLINE float affine_error(const Stream *s, const float *x, const float *codes, int count, float scale, float more) {
  float sum = 0.0f;
  for (int c = 0; c < count; c++) {
    const float missed = (s->kind == SCALE_MIN ? codes[c] * scale + more : (codes[c] - more) * scale) - x[c];
    sum += missed * missed;
  }
  return sum;
}

static void encode_affine(const Stream *s, const FusedTransform *space, int keys, uint8_t *run, int page_tokens, int token, int dim, float *x) {
  float best[256], tried[256];
  uint8_t codes[256];
  clip(space, dim, x);
  for (int i = 0; i < s->spans; i++) {
    const Span *span = &s->span[i];
    const int first = span->first, count = span->end - first, top = (1 << span->bits) - 1;
    const float *own = x + first;
    float low = own[0], high = own[0], scale, more;
    for (int c = 1; c < count; c++) {
      low = own[c] < low ? own[c] : low;
      high = own[c] > high ? own[c] : high;
    }
    affine_range(s, own, count, top, low, high, best, &scale, &more);
    if (space->search > 1) {
      const float middle = (high + low) / 2, half = (high - low) / 2;
      float least = affine_error(s, own, best, count, scale, more);
      for (int j = 1; j < space->search; j++) {
        const float reach = half * (float)(1.0 - (1.0 - 0.7) * j / (space->search - 1));
        float other, offset;
        affine_range(s, own, count, top, middle - reach, middle + reach, tried, &other, &offset);
        const float error = affine_error(s, own, tried, count, other, offset);
        if (!(error < least)) continue;
        least = error, scale = other, more = offset;
        memcpy(best, tried, sizeof(float) * (size_t)count);
      }
    }
    for (int c = 0; c < count; c++) codes[first + c] = (uint8_t)best[c];
    write_meta(s, run, page_tokens, span->meta, 0, token, scale);
    write_meta(s, run, page_tokens, span->meta, 1, token, more);
  }
  write_codes(s, keys, run, token, codes);
}

INLINE float banded_code(float x, float scale, const Span *span, float top) {
  return between(rintf(x / scale / span->step + top / 2), 0.0f, top);
}

/* The best scale of a token; the weighted squared error that it leaves goes to `least`. */
static float banded_scale(const Stream *s, const FusedTransform *space, int head, int dim, const float *x, float *least) {
  const float *weights = space->weights ? space->weights + (int64_t)head * dim : NULL;
  float squares = 0.0f, chosen = 1.0f;
  int count = 0;
  for (int i = 0; i < s->spans; i++)
    for (int c = s->span[i].first; c < s->span[i].end; c++, count++) squares += x[c] * x[c];
  const float rms = sqrtf(squares / (float)count);
  *least = INFINITY;
  for (int j = 0; j < space->search; j++) {
    const float factor = space->search == 1 ? 1.0f : (float)(0.6 + (1.4 - 0.6) * j / (space->search - 1));
    const float scale = rounded_one(between(rms * factor, smallest_of(s->meta_type), largest_of(s->meta_type)), s->meta_type);
    float error = 0.0f;
    for (int i = 0; i < s->spans; i++) {
      const Span *span = &s->span[i];
      const float top = (float)((1 << span->bits) - 1);
      float own = 0.0f;
      for (int c = span->first; c < span->end; c++) {
        const float missed = x[c] - scale * (span->step * (banded_code(x[c], scale, span, top) - top / 2));
        own += missed * missed * (weights ? weights[c] : 1.0f);
      }
      error += own;
    }
    if (error < *least) *least = error, chosen = scale;
  }
  return chosen;
}

static void encode_banded(const Stream *s, const FusedTransform *space, int keys, uint8_t *run, int page_tokens, int head, int token, int dim,
                          float *x) {
  const float *weights = space->weights ? space->weights + (int64_t)head * dim : NULL;
  float error, sign = 1.0f, scale = banded_scale(s, space, head, dim, x, &error);
  if (space->taken) {
    float centred[256], less;
    for (int c = 0; c < dim; c++) centred[c] = x[c] - space->taken[(int64_t)head * dim + c];
    const float other = banded_scale(s, space, head, dim, centred, &less);
    if (less < error) {
      memcpy(x, centred, sizeof(float) * (size_t)dim);
      scale = other, sign = -1.0f;
    }
  }
  uint8_t codes[256];
  float reached = 0.0f, wanted = 0.0f;
  for (int i = 0; i < s->spans; i++) {
    const Span *span = &s->span[i];
    const float top = (float)((1 << span->bits) - 1);
    float own = 0.0f;
    for (int c = span->first; c < span->end; c++) {
      const float code = banded_code(x[c], scale, span, top);
      codes[c] = (uint8_t)code;
      own += (weights ? weights[c] : 1.0f) * x[c] * (span->step * (code - top / 2));
    }
    reached += own;
  }
  if (space->unbiased) {
    for (int c = 0; c < dim; c++) wanted += (weights ? weights[c] : 1.0f) * (x[c] * x[c]);
    const float product = reached * scale;
    scale *= between(wanted / (product < 0x1p-126f ? 0x1p-126f : product), 0.8f, 1.6f);
  }
  scale = between(scale, smallest_of(s->meta_type), largest_of(s->meta_type));
  write_meta(s, run, page_tokens, 0, 0, token, scale * sign);
  write_codes(s, keys, run, token, codes);
}

static void encode_levels(const Stream *s, const FusedTransform *space, int keys, uint8_t *run, int page_tokens, int token, int dim,
                          const float *x) {
  uint8_t codes[256];
  double squares = 0.0;
  for (int c = 0; c < dim; c++) squares += (double)x[c] * (double)x[c];
  const double length = sqrt(squares), most = largest_of(s->meta_type);
  const float norm = rounded_one((float)(length < most ? length : most), s->meta_type);
  const float unit = norm < smallest_of(s->meta_type) ? smallest_of(s->meta_type) : norm;
  const int edges = (1 << s->span[0].bits) - 1;
  for (int c = 0; c < dim; c++) {
    const float number = x[c] / unit;
    int code = 0;
    for (int i = 0; i < edges; i++) code += space->edges[i] < number;
    codes[c] = (uint8_t)code;
  }
  write_meta(s, run, page_tokens, 0, 0, token, norm);
  write_codes(s, keys, run, token, codes);
}

#define STRETCH (8 * LANE_COUNT) /* centroids that are looked through together */
#define SIDE_BY_SIDE 8           /* sub-vectors for which centroids are read once */

/* What a centroid must reach to be the best in double precision, where `most` is the best in single. One that is as good is not
 * much longer than x; what rounding takes is some last places of the terms. */
INLINE float close_to(float most, const float *x, int length) {
  float size = 0.0f;
  for (int i = 0; i < length; i++) size += x[i] * x[i];
  return most - (0x1p-18f * (size + fabsf(most)) + 0x1p-120f);
}

/* x.c - |c|^2 / 2 of LANE_COUNT centroids, for MANY vectors x that are side by side. */
INLINE void likeness(const int MANY, const int LENGTH, const float *quick, int count, int from, const float *x, vf *sum) {
  for (int k = 0; k < MANY; k++) sum[k] = load_floats(quick + (int64_t)LENGTH * count + from);
  for (int i = 0; i < LENGTH; i++) {
    const vf row = load_floats(quick + (int64_t)i * count + from);
    for (int k = 0; k < MANY; k++) sum[k] = fused(splat(x[k * LENGTH + i]), row, sum[k]);
  }
}

INLINE double exact_likeness(const double *columns, int length, int count, int centroid, const float *x) {
  double sum = 0.0;
  for (int i = 0; i < length; i++) sum += (double)x[i] * columns[(int64_t)i * count + centroid];
  return sum + columns[(int64_t)length * count + centroid];
}

/* The centroid with the largest x.c - |c|^2 / 2, the first of equals. Single precision, of which `tops` are the best of every lane in
 * every stretch, MANY vectors apart, finds those that come close to `most`; double precision decides where they are several. */
INLINE int nearest_of(const int MANY, const int LENGTH, const float *quick, const double *columns, int count, const float *x,
                      const float *tops, float most) {
  const float least = close_to(most, x, LENGTH);
  double best = -INFINITY;
  int found = -1, several = 0;
  for (int start = 0; start < count; start += STRETCH, tops += MANY * LANE_COUNT) {
    if (!reaching(load_floats(tops), least)) continue;
    for (int from = start; from < start + STRETCH && from < count; from += LANE_COUNT) {
      vf sum;
      likeness(1, LENGTH, quick, count, from, x, &sum);
      for (unsigned lanes = reaching(sum, least); lanes; lanes &= lanes - 1) {
        const int centroid = from + __builtin_ctz(lanes);
        if (found >= 0) {
          if (!several) best = exact_likeness(columns, LENGTH, count, found, x);
          several = 1;
          const double other = exact_likeness(columns, LENGTH, count, centroid, x);
          if (!(other > best)) continue;
          best = other;
        }
        found = centroid;
      }
    }
  }
  return found < 0 ? 0 : found;
}

/* The nearest centroids of MANY vectors that lie side by side. */
INLINE void nearest(const int MANY, const int LENGTH, const float *quick, const double *columns, int count, const float *x, float *tops,
                    int *out) {
  vf most[SIDE_BY_SIDE];
  for (int k = 0; k < MANY; k++) most[k] = splat(-INFINITY);
  for (int start = 0; start < count; start += STRETCH) {
    vf best[SIDE_BY_SIDE], sum[SIDE_BY_SIDE];
    for (int k = 0; k < MANY; k++) best[k] = splat(-INFINITY);
    for (int from = start; from < start + STRETCH && from < count; from += LANE_COUNT) {
      likeness(MANY, LENGTH, quick, count, from, x, sum);
      for (int k = 0; k < MANY; k++) best[k] = highest(sum[k], best[k]);
    }
    for (int k = 0; k < MANY; k++) {
      store_floats(tops + (start / STRETCH * MANY + k) * LANE_COUNT, best[k]);
      most[k] = highest(best[k], most[k]);
    }
  }
  for (int k = 0; k < MANY; k++)
    out[k] = nearest_of(MANY, LENGTH, quick, columns, count, x + k * LENGTH, tops + k * LANE_COUNT, top_of(most[k]));
}

/* The same for `many` vectors. */
static void all_nearest(const float *quick, const double *columns, int length, int count, int many, const float *x, float *tops, int *out) {
  for (int now; many; many -= now, x += now * length, out += now) {
    now = many >= SIDE_BY_SIDE && (length == 2 || length == 4 || length == 8) ? SIDE_BY_SIDE : 1;
    if (count % LANE_COUNT) { /* no whole vectors */
      double best = -INFINITY;
      *out = 0, now = 1;
      for (int j = 0; j < count; j++) {
        const double own = exact_likeness(columns, length, count, j, x);
        if (own > best) best = own, *out = j;
      }
    } else {
      switch (now == 1 ? 0 : length) {
        case 2: nearest(SIDE_BY_SIDE, 2, quick, columns, count, x, tops, out); break;
        case 4: nearest(SIDE_BY_SIDE, 4, quick, columns, count, x, tops, out); break;
        case 8: nearest(SIDE_BY_SIDE, 8, quick, columns, count, x, tops, out); break;
        default: nearest(1, length, quick, columns, count, x, tops, out);
      }
    }
  }
}

static void encode_centroids(const Stream *s, const FusedTransform *space, uint8_t *run, int head, int token, int dim, const float *x,
                             float *scratch) {
  const int length = s->extra, spaces = dim / length, count = 1 << s->book_bits, shared = s->books_spaces == 1;
  int found[128];
  for (int at = 0; at < (shared ? 1 : spaces); at++) {
    const int64_t start = ((int64_t)(head % s->books_heads) * s->books_spaces + at) * (length + 1) * count;
    all_nearest(space->quick + start, space->columns + start, length, count, shared ? spaces : 1, x + at * length, scratch, found + at);
  }
  for (int i = 0, shift = 0; i < s->sections; shift += s->section[i++].bits) {
    const int bits = s->section[i].bits;
    uint8_t *row = run + s->section[i].offset + (int64_t)token * spaces * bits / 8;
    memset(row, 0, (size_t)(spaces * bits / 8));
    for (int at = 0, bit = 0; at < spaces; at++, bit += bits)
      row[bit / 8] |= (uint8_t)((found[at] >> shift & ((1 << bits) - 1)) << bit % 8);
  }
}

/* --- tokens ------------------------------------------------------------------------------------------------------- */

/* Task: CHECKED tokens. Says where a key or value that will be stored is no number, or beyond the limit. */
static void NAME(check)(Append *call, int64_t task, float *scratch) {
  (void)scratch;
  const int dim = call->dim;
  const int64_t first = task * CHECKED, end = first + CHECKED < call->tokens ? first + CHECKED : call->tokens;
  for (int64_t token = first; token < end; token++) {
    if (call->batch->slot_mapping[token] < 0) continue;
    for (int side = 0; side < 2; side++)
      for (int head = 0; head < call->heads; head++) {
        float x[256];
        load_row(call->source[side], token * call->stride[side] + head * call->head_stride[side], call->type[side], dim, x);
        int beyond = 0;
        for (int c = 0; c < dim; c++) beyond |= !(fabsf(x[c]) <= call->limit);
        if (beyond) __atomic_store_n(&call->refused, 1, __ATOMIC_RELAXED);
      }
  }
}

/* Task: keys or values of one head of one new token. */
static void NAME(append)(const Append *call, int64_t task, float *scratch) {
  const int dim = call->dim, side = (int)(task % 2), head = (int)(task / 2 % call->heads), size = call->page_tokens;
  const int64_t token = task / 2 / call->heads, slot = call->batch->slot_mapping[token];
  const Stream *s = side ? &call->value : &call->key;
  const FusedTransform *space = side ? &call->value_transform : &call->key_transform;
  if (slot < 0 || call->refused || s->group_tokens > 1) return;
  int b = 0, above = (int)call->batch->count; /* the sequence that the token belongs to */
  while (above - b > 1) {
    const int middle = (b + above) / 2;
    if (call->batch->query_start_loc[middle] <= token)
      b = middle;
    else
      above = middle;
  }
  const int64_t n = call->batch->seq_lens[b], position = n - call->batch->query_start_loc[b + 1] + token;
  uint8_t *run = call->pages + (slot / size * call->heads + head) * call->page_head_bytes;
  float x[256];
  load_row(call->source[side], token * call->stride[side] + head * call->head_stride[side], call->type[side], dim, x);
  enter(space, head, position, dim, x);
  if (s->rows && (position < s->sink || position >= n - s->ring)) {
    const int64_t at = ((call->batch->overlay_rows[b] * s->rows + window_row(s, position)) * call->heads + head) * dim;
    for (int c = 0; c < dim; c++) store_one(s->window, at + c, call->window_type, x[c]);
  }
  if (position < call->origin) return;
  const int place = (int)(slot % size);
  if (s->centers) {
    int found = 0;
    if (s->index_bits) {
      const int64_t book = (int64_t)(head % s->books_heads) * (dim + 1) * s->centers;
      all_nearest(space->quick + book, space->columns + book, dim, s->centers, 1, x, scratch, &found);
      run[s->index_offset + place] = (uint8_t)found;
      if (s->index_bits > 8) run[s->high_offset + place] = (uint8_t)(found >> 8);
    }
    const float *center = center_at(s, head, found, dim);
    for (int c = 0; c < dim; c++) x[c] -= center[c];
  }
  if (s->kind == PLAIN)
    for (int c = 0; c < dim; c++) store_one(run + s->section[0].offset, (int64_t)place * dim + c, s->meta_type, x[c]);
  else if (s->kind == CENTROIDS)
    encode_centroids(s, space, run, head, place, dim, x, scratch);
  else if (s->kind == LEVELS)
    encode_levels(s, space, !side, run, size, place, dim, x);
  else if (s->kind == SCALE_ALONE)
    encode_banded(s, space, !side, run, size, head, place, dim, x);
  else
    encode_affine(s, space, !side, run, size, place, dim, x);
}

/* --- groups of tokens ---------------------------------------------------------------------------------------------- */

INLINE int64_t packed_end(const Stream *s, int64_t n) {
  const int64_t waiting = n - s->sink - s->recent;
  return (n < s->sink ? n : s->sink) + (waiting > 0 ? waiting / s->flush * s->flush : 0);
}

/* Which channels have four bits: those with the largest sums of magnitudes, the first of equals. */
static void boosted_channels(const Stream *s, const float *x, int dim, uint8_t *chosen) {
  double strength[256];
  memset(chosen, 0, (size_t)dim);
  for (int c = 0; c < dim; c++) {
    strength[c] = 0.0;
    for (int t = 0; t < s->group_tokens; t++) strength[c] += fabs((double)x[(int64_t)t * dim + c]);
  }
  for (int i = 0; i < s->extra; i++) {
    int best = -1;
    for (int c = 0; c < dim; c++)
      if (!chosen[c] && (best < 0 || strength[c] > strength[best])) best = c;
    chosen[best] = 1;
  }
}

/* Codes a whole group of tokens, [group_tokens, dim], that starts at a place of a page: a scale and a minimum per channel. */
static void encode_group(const Stream *s, int keys, uint8_t *run, int place, int dim, const float *x) {
  const int size = s->group_tokens, group = place / size, type = s->meta_type, boosted = s->kind == BOOSTED;
  const float most = largest_of(type);
  uint16_t *meta = (uint16_t *)(run + s->meta_offset) + 2 * (int64_t)group * dim;
  uint8_t chosen[256] = {0}, rows[256];
  float low[256], scale[256], top[256];
  if (boosted) boosted_channels(s, x, dim, chosen);
  for (int c = 0, count = 0; c < dim; c++) {
    float least = x[c], high = x[c];
    for (int t = 1; t < size; t++) {
      const float number = x[(int64_t)t * dim + c];
      least = number < least ? number : least;
      high = number > high ? number : high;
    }
    top[c] = boosted ? (chosen[c] ? 15.0f : 3.0f) : (float)((1 << s->span[0].bits) - 1);
    low[c] = rounded_one(between(least, -most, most), type);
    scale[c] = rounded_one(between((high - low[c]) / top[c], smallest_of(type), most), type);
    meta[2 * c] = narrow_one(scale[c], type);
    meta[2 * c + 1] = narrow_one(low[c], type);
    if (boosted) {
      run[s->index_offset + (int64_t)group * dim + c] = (uint8_t)(chosen[c] ? count : s->extra < 255 ? s->extra : 255);
      if (chosen[c]) rows[count++] = (uint8_t)c;
    }
  }
  for (int t = 0; t < size; t++) {
    uint8_t codes[256];
    for (int c = 0; c < dim; c++)
      codes[c] = (uint8_t)between(rintf((x[(int64_t)t * dim + c] - low[c]) / scale[c]), 0.0f, top[c]);
    if (boosted) {
      uint8_t *high = run + s->high_offset + (int64_t)(place + t) * s->extra / 4;
      for (int i = 0; i < s->extra; i += 4)
        high[i / 4] = (uint8_t)(codes[rows[i]] >> 2 | codes[rows[i + 1]] >> 2 << 2 | codes[rows[i + 2]] >> 2 << 4 |
                                codes[rows[i + 3]] >> 2 << 6);
      for (int c = 0; c < dim; c++) codes[c] &= 3;
    }
    write_codes(s, keys, run, place + t, codes);
  }
}

/* Task: one head and side of one sequence: codes the groups that its new tokens complete, then keeps the tokens of its window. */
static void NAME(append_groups)(const Append *call, int64_t task, float *scratch) {
  const int dim = call->dim, side = (int)(task % 2), head = (int)(task / 2 % call->heads);
  const int64_t b = task / 2 / call->heads, n = call->batch->seq_lens[b], start = call->batch->query_start_loc[b], before = n - (call->batch->query_start_loc[b + 1] - start);
  const Stream *s = side ? &call->value : &call->key;
  const FusedTransform *space = side ? &call->value_transform : &call->key_transform;
  if (s->group_tokens <= 1 || call->refused) return;
  int64_t first = packed_end(s, before);
  if (first < s->ring_start[b]) first = s->ring_start[b];
  if (first < s->sink) first = s->sink;
  const int64_t window = call->batch->overlay_rows[b] * s->rows, last = packed_end(s, n);
  for (; first < last; first += s->group_tokens) {
    for (int t = 0; t < s->group_tokens; t++) {
      float *x = scratch + (int64_t)t * dim;
      const int64_t position = first + t;
      if (position < before) { /* from the tail */
        load_row(s->window, ((window + window_row(s, position)) * call->heads + head) * dim, call->window_type, dim, x);
        continue;
      }
      load_row(call->source[side], (start + position - before) * call->stride[side] + head * call->head_stride[side],
               call->type[side], dim, x);
      enter(space, head, position, dim, x);
      for (int c = 0; c < dim; c++) x[c] = rounded_one(x[c], call->window_type); /* as if it had waited in the tail */
    }
    const int64_t at = first - call->origin, page = call->batch->table[b * call->batch->width + at / call->page_tokens];
    encode_group(s, !side, call->pages + (page * call->heads + head) * call->page_head_bytes, (int)(at % call->page_tokens), dim, scratch);
  }
  for (int64_t position = before; position < n; position++) {
    if (position >= s->sink && position < n - s->ring) continue;
    load_row(call->source[side], (start + position - before) * call->stride[side] + head * call->head_stride[side], call->type[side],
             dim, scratch);
    enter(space, head, position, dim, scratch);
    const int64_t at = ((window + window_row(s, position)) * call->heads + head) * dim;
    for (int c = 0; c < dim; c++) store_one(s->window, at + c, call->window_type, scratch[c]);
  }
}
