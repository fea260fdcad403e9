/* Encoding of one token. The arithmetic is that of the reference (codecs/), operation by operation, so that the bytes are the same
 * except where a sum over channels is rounded in another order. */

/* Writes a token's codes, one byte each, into the planes of its page. */
static void write_codes(const Stream *s, int keys, uint8_t *page_head, int token, const uint8_t *codes) {
  for (int i = 0; i < s->sections; i++) {
    const Section *section = &s->section[i];
    const int bits = section->bits, bytes = section->width * bits / 8, mask = (1 << bits) - 1;
    uint8_t *base = page_head + section->offset;
    for (int byte = 0; byte < bytes; byte++) {
      const uint8_t *c = codes + section->first + byte;
      int x = 0;
      for (int shift = 0; shift < 8; shift += bits, c += bytes) x |= (*c >> section->shift & mask) << shift;
      base[keys ? key_place(bytes, token, byte) : value_place(bytes, token, byte)] = (uint8_t)x;
    }
  }
}

INLINE void write_meta(const Stream *s, uint8_t *page_head, int page_tokens, int meta, int field, int token, float x) {
  ((uint16_t *)(page_head + s->meta_offset))[(int64_t)(meta * s->meta_fields + field) * page_tokens + token] = narrow_one(x, s->meta_type);
}

INLINE float smallest_of(int type) { return type == FLOAT16 ? 0x1p-14f : 0x1p-126f; }
INLINE float largest_of(int type) { return type == FLOAT16 ? 65504.0f : 0x1.fep127f; }
INLINE float between(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* Clips a token's numbers at the clip quantile of their magnitudes, linear between ranks, as torch.quantile computes it. */
static void clip(const FusedTransform *transform, int dim, float *x) {
  if (transform->clip_rank < 0) return;
  float top[256]; /* the largest magnitudes, descending */
  const int kept = dim - transform->clip_rank;
  int count = 0;
  for (int c = 0; c < dim; c++) {
    const float size = fabsf(x[c]);
    if (count == kept && !(size > top[count - 1])) continue;
    int at = count < kept ? count++ : count - 1;
    for (; at > 0 && top[at - 1] < size; at--) top[at] = top[at - 1];
    top[at] = size;
  }
  const float below = top[kept - 1], above = top[kept > 1 ? kept - 2 : 0], share = transform->clip_share;
  const float limit = share < 0.5f ? below + share * (above - below) : above - (above - below) * (1.0f - share);
  for (int c = 0; c < dim; c++) x[c] = between(x[c], -limit, limit);
}

#define LARGEST_ZERO 32768.0f /* magnitude of an integer zero point */

/* Codes of `count` channels for the range [low, high], and the scale and min (or zero) rounded to the stored type. */
INLINE void affine_range(const Stream *s, const float *x, int count, int top, float low, float high, float *codes, float *scale,
                         float *min_or_zero) {
  const float last = (float)top;
  const int type = s->meta_type;
  if (s->kind == SCALE_MIN) low = rounded_one(low, type);
  float step = (high - low) / last, least = s->kind == SCALE_MIN ? 0.0f : fabsf(low) / LARGEST_ZERO;
  least = least < smallest_of(type) ? smallest_of(type) : least;
  step = rounded_one(step < least ? least : step, type);
  *scale = step;
  if (s->kind == SCALE_MIN) {
    *min_or_zero = low;
    for (int c = 0; c < count; c++) codes[c] = between(rintf((x[c] - low) / step), 0.0f, last);
  } else {
    const float zero = rounded_one(between(rintf(-low / step), -LARGEST_ZERO, LARGEST_ZERO), type);
    *min_or_zero = zero;
    for (int c = 0; c < count; c++) codes[c] = between(rintf(x[c] / step) + zero, 0.0f, last);
  }
}

/* Squared error of decoded codes. */
INLINE float affine_error(const Stream *s, const float *x, const float *codes, int count, float scale, float min_or_zero) {
  float sum = 0.0f;
  for (int c = 0; c < count; c++) {
    const float missed = (s->kind == SCALE_MIN ? codes[c] * scale + min_or_zero : (codes[c] - min_or_zero) * scale) - x[c];
    sum += missed * missed;
  }
  return sum;
}

/* Affine codes (codecs/affine.py): x ~ scale * code + min, or scale * (code - zero). `search` ranges about the middle are tried, from
 * the whole range down to 0.7 of it. */
static void encode_affine(const Stream *s, const FusedTransform *transform, int keys, uint8_t *page_head, int page_tokens, int token, int dim, float *x) {
  float best[256], tried[256];
  uint8_t codes[256];
  clip(transform, dim, x);
  for (int i = 0; i < s->spans; i++) {
    const Span *span = &s->span[i];
    const int first = span->first, count = span->end - first, top = (1 << span->bits) - 1;
    const float *group = x + first;
    float low = group[0], high = group[0], scale, min_or_zero;
    for (int c = 1; c < count; c++) {
      low = group[c] < low ? group[c] : low;
      high = group[c] > high ? group[c] : high;
    }
    affine_range(s, group, count, top, low, high, best, &scale, &min_or_zero);
    if (transform->search > 1) {
      const float middle = (high + low) / 2, half = (high - low) / 2;
      float least = affine_error(s, group, best, count, scale, min_or_zero);
      for (int j = 1; j < transform->search; j++) {
        const float reach = half * (float)(1.0 - (1.0 - 0.7) * j / (transform->search - 1));
        float other_scale, other_min_or_zero;
        affine_range(s, group, count, top, middle - reach, middle + reach, tried, &other_scale, &other_min_or_zero);
        const float error = affine_error(s, group, tried, count, other_scale, other_min_or_zero);
        if (!(error < least)) continue;
        least = error, scale = other_scale, min_or_zero = other_min_or_zero;
        memcpy(best, tried, sizeof(float) * (size_t)count);
      }
    }
    for (int c = 0; c < count; c++) codes[first + c] = (uint8_t)best[c];
    write_meta(s, page_head, page_tokens, span->meta, 0, token, scale);
    write_meta(s, page_head, page_tokens, span->meta, 1, token, min_or_zero);
  }
  write_codes(s, keys, page_head, token, codes);
}

/* Nearest uniform level of x / scale: level(code) = step * (code - top / 2). */
INLINE float banded_code(float x, float scale, const Span *span, float top) {
  return between(rintf(x / scale / span->step + top / 2), 0.0f, top);
}

/* Of `search` multiples, 0.6 to 1.4, of the root mean square, the scale with the least weighted squared error. Stores that error in
 * `least`. */
static float banded_scale(const Stream *s, const FusedTransform *transform, int head, int dim, const float *x, float *least) {
  const float *weights = transform->weights ? transform->weights + (int64_t)head * dim : NULL;
  float squares = 0.0f, chosen = 1.0f;
  int count = 0;
  for (int i = 0; i < s->spans; i++)
    for (int c = s->span[i].first; c < s->span[i].end; c++, count++) squares += x[c] * x[c];
  const float rms = sqrtf(squares / (float)count);
  *least = INFINITY;
  for (int j = 0; j < transform->search; j++) {
    const float factor = transform->search == 1 ? 1.0f : (float)(0.6 + (1.4 - 0.6) * j / (transform->search - 1));
    const float scale = rounded_one(between(rms * factor, smallest_of(s->meta_type), largest_of(s->meta_type)), s->meta_type);
    float error = 0.0f;
    for (int i = 0; i < s->spans; i++) {
      const Span *span = &s->span[i];
      const float top = (float)((1 << span->bits) - 1);
      float span_error = 0.0f;
      for (int c = span->first; c < span->end; c++) {
        const float missed = x[c] - scale * (span->step * (banded_code(x[c], scale, span, top) - top / 2));
        span_error += missed * missed * (weights ? weights[c] : 1.0f);
      }
      error += span_error;
    }
    if (error < *least) *least = error, chosen = scale;
  }
  return chosen;
}

/* Banded codes (codecs/banded.py): x ~ scale * level(code). With `flag_mean` the token is coded with or without the mean, whichever has
 * the smaller error; a negative scale marks the former. With `unbiased` the stored scale is multiplied by <x, x> / <x, decoded x>. */
static void encode_banded(const Stream *s, const FusedTransform *transform, int keys, uint8_t *page_head, int page_tokens, int head, int token, int dim,
                          float *x) {
  const float *weights = transform->weights ? transform->weights + (int64_t)head * dim : NULL;
  float error, sign = 1.0f, scale = banded_scale(s, transform, head, dim, x, &error);
  if (transform->flag_mean) {
    float centred[256], less;
    for (int c = 0; c < dim; c++) centred[c] = x[c] - transform->flag_mean[(int64_t)head * dim + c];
    const float other = banded_scale(s, transform, head, dim, centred, &less);
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
    float span_product = 0.0f;
    for (int c = span->first; c < span->end; c++) {
      const float code = banded_code(x[c], scale, span, top);
      codes[c] = (uint8_t)code;
      span_product += (weights ? weights[c] : 1.0f) * x[c] * (span->step * (code - top / 2));
    }
    reached += span_product;
  }
  if (transform->unbiased) {
    for (int c = 0; c < dim; c++) wanted += (weights ? weights[c] : 1.0f) * (x[c] * x[c]);
    const float product = reached * scale;
    scale *= between(wanted / (product < 0x1p-126f ? 0x1p-126f : product), 0.8f, 1.6f);
  }
  scale = between(scale, smallest_of(s->meta_type), largest_of(s->meta_type));
  write_meta(s, page_head, page_tokens, 0, 0, token, scale * sign);
  write_codes(s, keys, page_head, token, codes);
}

/* Lloyd-Max codes (codecs/lloyd_max.py): x ~ norm * level[code], the nearest level of x / norm. */
static void encode_levels(const Stream *s, const FusedTransform *transform, int keys, uint8_t *page_head, int page_tokens, int token, int dim,
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
    for (int i = 0; i < edges; i++) code += transform->edges[i] < number;
    codes[c] = (uint8_t)code;
  }
  write_meta(s, page_head, page_tokens, 0, 0, token, norm);
  write_codes(s, keys, page_head, token, codes);
}
