/* O += P V for the packed values of a page. */

/* Probabilities of a page's tokens times the scales of their values, as limbs: [queries, tokens]. */
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

INLINE void columns(const int QUERIES, const Stream *s, const uint8_t *page_head, int64_t ahead, int quad, int quads, const Weights *w,
                    float *out, int dim) {
  const int most = LANE_COUNT == 8 && QUERIES > 2 ? 1 : 2;
  for (int j = 0; j < s->sections; j++) {
    const Section *section = &s->section[j];
    const int bytes = section->width * section->bits / 8;
    const uint8_t *base = page_head + section->offset;
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

static void code_values(int queries, const Stream *s, const uint8_t *page_head, int64_t ahead, int quad, int quads, const Weights *w, float *out,
                      int dim) {
  FOR_COUNT(queries, columns, s, page_head, ahead, quad, quads, w, out, dim)
}

/* Code-independent part of O over a split, per scale of a token and query, to be summed over lanes: sum P scale, sum P (min or
 * -scale * zero), and sum P of tokens whose scale is negative. */
typedef struct {
  vf scale[MAX_SPANS][CHUNK], more[MAX_SPANS][CHUNK], flagged[CHUNK];
} ValueSums;

/* Values with levels from a table: O += P norm level[code], of tokens [from, to). A lane is a channel. For one section of whole
 * vectors. */
INLINE void level_columns(const int QUERIES, const Stream *s, const uint8_t *page_head, int page_tokens, int from, int to, const float *weight,
                          int stride, float *out, int dim) {
  const Section *section = &s->section[0];
  const int bytes = section->width * section->bits / 8;
  float scaled[CHUNK][128];
  for (int token = from; token < to; token++)
    for (int g = 0; g < QUERIES; g++)
      scaled[g][token] = weight[g * stride + token] * meta_one(s, page_head, page_tokens, 0, 0, token);
  for (int c = 0; c < dim; c += LANE_COUNT) {
    const uint8_t *base = page_head + section->offset + c % bytes * 4;
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

static void level_values(int queries, const Stream *s, const uint8_t *page_head, int page_tokens, int from, int to, const float *weight, int stride,
                       float *out, int dim) {
  FOR_COUNT(queries, level_columns, s, page_head, page_tokens, from, to, weight, stride, out, dim)
}

/* O += P centroid, one sub-vector after another, so that its sums stay in registers. */
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

static void page_centroids(int queries, const Stream *s, const uint8_t *page_head, int head, int from, int to, int dim, const float *weight,
                           int stride, float *out) {
  uint16_t index[128 * 128];
  centroids_of(s, page_head, from, to, dim / s->extra, index);
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
INLINE void page_weights(const Stream *s, int queries, const uint8_t *page_head, int size, int from, int to, const float *weight, int stride,
                         Weights *w, ValueSums *sums) {
  const int first = from / LANE_COUNT * LANE_COUNT, last = (to + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT;
  float own[CHUNK][128] __attribute__((aligned(64)));
  const int ragged = first < from || to < last;
  if (ragged) { /* scales beside the tokens are undefined and may be NaN */
    memset(own, 0, sizeof own);
    for (int g = 0; g < queries; g++) memcpy(own[g] + from, weight + g * stride + from, sizeof(float) * (size_t)(to - from));
    weight = own[0], stride = 128;
  }
  for (int m = 0; m < s->metas; m++) {
    vf size_of[128 / LANE_COUNT], more_of[128 / LANE_COUNT], flag_of[128 / LANE_COUNT];
    for (int t = first, k = 0; t < last; t += LANE_COUNT, k++) {
      const vf scale = meta_vector(s, page_head, size, m, 0, t);
      vi there = magnitude(scale) > splat(0.0f);
      if (ragged) there &= within(t, from, to);
      size_of[k] = (vf)(there & (vi)magnitude(scale));
      if (s->kind == SCALE_MIN) more_of[k] = (vf)(there & (vi)(meta_vector(s, page_head, size, m, 1, t) / size_of[k]));
      if (s->kind == SCALE_ZERO) more_of[k] = (vf)(there & (vi)-meta_vector(s, page_head, size, m, 1, t));
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
static void page_values(const Decode *call, int queries, const uint8_t *page_head, int64_t ahead, int head, int from, int to, const float *weight, int stride,
                      float *out, ValueSums *sums) {
  const Stream *s = &call->value;
  const int dim = call->dim, size = call->page_tokens;
  if (s->kind == CENTROIDS) {
    page_centroids(queries, s, page_head, head, from, to, dim, weight, stride, out);
    return;
  }
  if (s->kind == LEVELS && s->sections == 1 && s->section[0].width * s->section[0].bits / 8 % LANE_COUNT == 0) {
    level_values(queries, s, page_head, size, from, to, weight, stride, out, dim);
    return;
  }
  if (s->kind > SCALE_ALONE) {
    float row[256];
    for (int token = from; token < to; token++) {
      token_row(s, 0, page_head, size, head, token, dim, row);
      for (int g = 0; g < queries; g++) {
        const float p = weight[g * stride + token];
        add_times(out + g * dim, p, row, dim);
      }
    }
    return;
  }
  Weights w[MAX_SPANS];
  page_weights(s, queries, page_head, size, from, to, weight, stride, w, sums);
  code_values(queries, s, page_head, ahead, from / LANE_COUNT * LANE_COUNT / 4, (to + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT / 4, w, out, dim);
  if (s->centers)
    for (int token = from; token < to; token++) {
      const float *center = center_at(s, head, center_of(s, page_head, token), dim);
      for (int g = 0; g < queries; g++) add_times(out + g * dim, weight[g * stride + token], center, dim);
    }
}
