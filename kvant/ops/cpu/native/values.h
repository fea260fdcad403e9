/* O += P V for the packed values of a page. Tokens are multiplied four at a time (a `quad`): the four bytes of a 32-bit lane are
 * codes of one channel of four tokens. */

/* P * scale of a page's tokens, for one scale of a token, as limbs: [queries, tokens]. */
typedef struct {
  int8_t high[CHUNK][128], low[CHUNK][128];
  float scale[CHUNK];
#if ARM
  int8x16_t pairs[CHUNK * RUN_TOKENS / 8]; /* where all of a stream's sections are multiplied by arm_products.h: limb_pairs, of a run of pages */
#endif
} Weights;

/* Loads only the first `lanes` lanes; the others are 0. */
INLINE vu part_bytes(const uint8_t *p, int lanes) {
  vu x = {};
  memcpy(&x, p, 4 * (size_t)lanes);
  return x;
}

/* Codes at bit `shift` of every byte. Where dot4 multiplies unsigned bytes they are masked but not shifted down, which makes them
 * 2^shift times too large: plane_unit is the factor that undoes it. */
INLINE vu plane(vu packed, int bits, int shift) {
  const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  return SIGNED_CODES ? packed >> ((vu){} + (uint32_t)shift) & mask : packed & mask << shift;
}
INLINE float plane_unit(int shift) { return SIGNED_CODES ? 1.0f : 1.0f / (float)(1 << shift); }

/* out[query][lane] += sum over tokens of P * scale * alpha * code, for VECTORS * LANE_COUNT channels, or for `lanes` channels where
 * that is not 0. Tokens are those of quads [quad, quads). The bytes `ahead`, of the next page, are prefetched. */
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

/* The same for LANE_COUNT channels in each of two neighbouring planes of the same bytes, which are loaded once. */
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

/* Index of the span that contains a channel; the search starts at span i. */
INLINE int span_of(const Stream *s, int channel, int i) {
  while (s->span[i].end <= channel || s->span[i].first > channel) i = (i + 1) % s->spans;
  return i;
}

/* The same for all channels: every section, plane and span. */
INLINE void columns(const int QUERIES, const Stream *s, const uint8_t *page_head, int64_t ahead, int quad, int quads, const Weights *w,
                    float *out, int dim) {
  const int most = LANE_COUNT == 8 && QUERIES > 2 ? 1 : 2;
  for (int j = 0; j < s->sections; j++) {
    const Section *section = &s->section[j];
    const int bytes = section->width * section->bits / 8;
    const uint8_t *base = page_head + section->offset;
    int start = section->first, i = 0;
    for (int shift = 0; shift < 8; shift += section->bits, start += bytes) {
      if (bytes == LANE_COUNT && most == 2 && section->bits < 8) { /* a plane is one vector wide: two planes at a time */
        i = span_of(s, start, i);
        const int k = span_of(s, start + bytes, i);
        if (s->span[i].end >= start + bytes && s->span[k].end >= start + 2 * bytes) {
          const Weights *weights[2] = {&w[s->span[i].meta], &w[s->span[k].meta]};
          float *to[2] = {out + start, out + start + bytes};
          two_planes(QUERIES, section, bytes, base, ahead, shift, quad, quads, weights, to, dim);
          shift += section->bits, start += bytes;
          continue;
        }
      }
      for (int c = start; c < start + bytes;) {
        i = span_of(s, c, i);
        const int end = s->span[i].end < start + bytes ? s->span[i].end : start + bytes;
        const Weights *weights = &w[s->span[i].meta];
        const uint8_t *p = base + (c - start) * 4;
        if (end - c >= most * LANE_COUNT) {
          column(QUERIES, most, section, bytes, p, ahead, shift, 0, quad, quads, weights, out + c, dim);
          c += most * LANE_COUNT;
        } else if (end - c >= LANE_COUNT) {
          column(QUERIES, 1, section, bytes, p, ahead, shift, 0, quad, quads, weights, out + c, dim);
          c += LANE_COUNT;
        } else {
          column(QUERIES, 1, section, bytes, p, ahead, shift, end - c, quad, quads, weights, out + c, dim);
          c = end;
        }
      }
    }
  }
}

#if ARM
/* The same section by section, two planes at a time, of a run of pages. */
static void section_columns(int queries, const Stream *s, const PageRun *run, int quad, int quads, const Weights *w, float *out, int dim) {
  for (int j = 0; j < s->sections; j++) {
    const Section *section = &s->section[j];
    const Weights *weights = &w[s->span[span_of(s, section->first, 0)].meta];
    float unit[CHUNK];
    for (int g = 0; g < queries; g++) unit[g] = section->alpha * weights->scale[g];
    VALUE_SUMS[queries - 1][__builtin_ctz((unsigned)section->bits)](section, run, quad, quads, weights->pairs, unit,
                                                                    out + section->first, dim);
  }
}
#endif

/* The part of O over a split that does not depend on codes, for every scale of a token and query; lanes are still to be summed.
 * scale: sum P scale; offset: sum P min, or sum P (-scale * zero); flagged: sum P of tokens whose scale is negative.
 *
 * P scale is rounded to limbs, and so is P in the offset: what rounding takes of a number that decodes to nearly 0 cancels. That holds
 * for offsets as large as a code. The rest of a larger one, of a token whose numbers are all far from 0, is multiplied by P itself. */
typedef struct {
  vf scale[MAX_SPANS][CHUNK], offset[MAX_SPANS][CHUNK], flagged[CHUNK];
#if ARM
  int sections; /* whether arm_products.h multiplies all of the stream's sections: by_sections */
#endif
} ValueSums;

/* Bits by which the high limb of a weight is above the low one: weights are wide limbs where arm_products.h multiplies them. */
INLINE int limb_bits(const ValueSums *sums) {
#if ARM
  if (sums->sections) return 8;
#endif
  (void)sums;
  return 7;
}

static void code_values(int queries, const Stream *s, const uint8_t *page_head, int64_t ahead, int quad, int quads, const Weights *w,
                        const ValueSums *sums, float *out, int dim) {
#if ARM
  if (sums->sections) {
    const PageRun run = {{page_head}, {ahead}, 1};
    section_columns(queries, s, &run, quad, quads, w, out, dim);
    return;
  }
#endif
  FOR_COUNT(queries, columns, s, page_head, ahead, quad, quads, w, out, dim)
}

/* Values with levels from a table: O += P norm level[code], of tokens [from, to). A lane is a channel. There is one section, whose
 * bytes per token fill whole vectors. */
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

/* O += P centroid, for sub-vectors of 4 * PARTS channels, one sub-vector after another, so that its sums stay in registers. */
INLINE void centroid_sums(const int QUERIES, const int PARTS, const Stream *s, const uint16_t *index, int head, int from, int to, int dim,
                          const float *weight, int stride, float *out) {
  const int length = 4 * PARTS, subvectors = dim / length;
  for (int subvector = 0; subvector < subvectors; subvector++) {
    const float *book = book_of(s, head, subvector, length);
    v4 sum[CHUNK][2];
    for (int g = 0; g < QUERIES; g++) sum[g][0] = sum[g][1] = (v4){};
    for (int token = from; token < to; token++) {
      const float *centroid = book + (int64_t)index[(token - from) * subvectors + subvector] * length;
      for (int part = 0; part < PARTS; part++) {
        v4 numbers;
        memcpy(&numbers, centroid + 4 * part, sizeof numbers);
        for (int g = 0; g < QUERIES; g++) sum[g][part] += numbers * weight[g * stride + token];
      }
    }
    for (int g = 0; g < QUERIES; g++)
      for (int i = 0; i < length; i++) out[g * dim + subvector * length + i] += sum[g][i / 4][i % 4];
  }
}

/* The same for sub-vectors of two channels, two sub-vectors at a time. */
INLINE void pair_sums(const int QUERIES, const Stream *s, const uint16_t *index, int head, int from, int to, int dim, const float *weight,
                      int stride, float *out) {
  const int subvectors = dim / 2;
  for (int subvector = 0; subvector < subvectors; subvector += 2) {
    const float *book = book_of(s, head, subvector, 2), *next = book_of(s, head, subvector + 1, 2);
    v4 sum[CHUNK];
    for (int g = 0; g < QUERIES; g++) sum[g] = (v4){};
    for (int token = from; token < to; token++) {
      const uint16_t *pair = index + (token - from) * subvectors + subvector;
      const float *a = book + 2 * pair[0], *b = next + 2 * pair[1];
      const v4 numbers = {a[0], a[1], b[0], b[1]};
      for (int g = 0; g < QUERIES; g++) sum[g] += numbers * weight[g * stride + token];
    }
    for (int g = 0; g < QUERIES; g++)
      for (int i = 0; i < 4; i++) out[g * dim + 2 * subvector + i] += sum[g][i];
  }
}

/* O += P V of tokens [from, to) of a page of product quantization. */
static void page_centroids(int queries, const Stream *s, const uint8_t *page_head, int head, int from, int to, int dim, const float *weight,
                           int stride, float *out) {
  uint16_t index[128 * 128];
  centroids_of(s, page_head, from, to, dim / s->subvector_dim, index);
  switch (s->subvector_dim == 8 ? 4 + queries : s->subvector_dim == 2 ? 8 + queries : queries) {
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

#define SMALLEST_TOP 0x1p-110f /* of P * scale of a page: below it they count as 0, since their unit is no normal number */

/* Splits min, or -scale * zero, into scale * offset, with the offset returned, and *rest. `last` is the largest code. */
INLINE vf split_offset(const int kind, float last, vf scale, vf min_or_zero, vf *rest) {
  const vf whole = kind == SCALE_MIN ? min_or_zero / scale : -min_or_zero; /* may be infinite */
  const vf offset = -highest(lowest(-whole, splat(last)), splat(0.0f));
  const vf more = kind == SCALE_MIN ? min_or_zero - scale * offset : scale * (whole - offset);
  *rest = (vf)((whole != offset) & (vi)more);
  return offset;
}

INLINE float largest_code(const Stream *s) { return (float)((1 << s->span[0].bits) - 1); }

/* offset[query] += sum P rest of so many tokens, a multiple of LANE_COUNT. */
static void add_rests(int queries, const float *rest, int tokens, const float *weight, int stride, vf *offset) {
  for (int g = 0; g < queries; g++)
    for (int t = 0; t < tokens; t += LANE_COUNT) offset[g] = fused(load_floats(weight + g * stride + t), load_floats(rest + t), offset[g]);
}

/* Mask of the lanes whose tokens, token + lane, are in [from, to). */
INLINE vi within(int token, int from, int to) {
  vi at;
  for (int lane = 0; lane < LANE_COUNT; lane++) at[lane] = token + lane;
  return (at >= from) & (at < to);
}

#if ARM
/* page_weights of tokens [first, last), a multiple of 16, of each page of a run, with scales in bfloat16. There is one scale of the
 * weights of a query for all pages. MEAN: tokens whose scale is negative are counted. */
INLINE void whole_weights(const int KIND, const int MEAN, const Stream *s, int queries, const PageRun *run, int page_tokens, int first,
                          int last, const float *weight, int stride, Weights *w, ValueSums *sums) {
  const vf rounder = splat(ROUNDER);
  const float limit = limb_bits(sums) == 8 ? WIDE_LIMIT : LIMIT, inverse = 1.0f / limit, top_code = largest_code(s);
  const int tokens = (last - first) * run->pages; /* index 0 is token `first` of the first page */
  weight += first;
  for (int m = 0; m < s->metas; m++) {
    float size_of[RUN_TOKENS] __attribute__((aligned(64))), offset_of[RUN_TOKENS] __attribute__((aligned(64)));
    float scaled[CHUNK][RUN_TOKENS] __attribute__((aligned(64))), flag_of[RUN_TOKENS] __attribute__((aligned(64))), tops[CHUNK];
    float rest_of[RUN_TOKENS] __attribute__((aligned(64)));
    vf most_rest = splat(0.0f);
    for (int page = 0, i = 0; page < run->pages; page++) {
      const uint16_t *scales = (const uint16_t *)(run->page_head[page] + s->meta_offset) + (int64_t)m * s->meta_fields * page_tokens;
      for (int t = first; t < last; t += LANE_COUNT, i += LANE_COUNT) {
        const vf scale = load_halves(scales + t, BFLOAT16), size = magnitude(scale);
        const vi there = size > splat(0.0f); /* false for NaN */
        if (MEAN && m == 0) store_floats(flag_of + i, (vf)((scale < splat(0.0f)) & (vi)splat(1.0f)));
        store_floats(size_of + i, (vf)(there & (vi)size));
        if (KIND != SCALE_ALONE) {
          vf rest, offset = split_offset(KIND, top_code, size, load_halves(scales + page_tokens + t, BFLOAT16), &rest);
          rest = (vf)(there & (vi)rest);
          store_floats(offset_of + i, (vf)(there & (vi)offset));
          store_floats(rest_of + i, rest);
          most_rest = highest(magnitude(rest), most_rest);
        }
      }
    }
    for (int g = 0; g < queries; g++) {
      vf most[4];
      for (int i = 0; i < 4; i++) most[i] = splat(0.0f);
      for (int t = 0; t < tokens; t += 4 * LANE_COUNT)
        for (int i = 0; i < 4; i++) {
          const vf x = load_floats(weight + g * stride + t + i * LANE_COUNT) * load_floats(size_of + t + i * LANE_COUNT);
          store_floats(scaled[g] + t + i * LANE_COUNT, x);
          most[i] = highest(x, most[i]);
        }
      tops[g] = max_of(highest(highest(most[0], most[1]), highest(most[2], most[3])));
      if (MEAN && m == 0) {
        vf flagged[4] = {sums->flagged[g], splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int t = 0; t < tokens; t += 4 * LANE_COUNT)
          for (int i = 0; i < 4; i++)
            flagged[i] = fused(load_floats(weight + g * stride + t + i * LANE_COUNT), load_floats(flag_of + t + i * LANE_COUNT), flagged[i]);
        sums->flagged[g] = (flagged[0] + flagged[1]) + (flagged[2] + flagged[3]);
      }
    }
    if (KIND != SCALE_ALONE && max_of(most_rest) > 0.0f) add_rests(queries, rest_of, tokens, weight, stride, sums->offset[m]);
    for (int g = 0; g < queries; g++) { /* not in the loop before: it would wait for the maximum and the division */
      const float top = tops[g], unit = top * inverse;
      const vf times = splat(top > SMALLEST_TOP ? limit / top : 0.0f);
      vf offset[2];
      vu total[4];
      for (int i = 0; i < 4; i++) offset[i / 2] = splat(0.0f), total[i] = (vu){};
      w[m].scale[g] = unit;
      for (int t = 0; t < tokens; t += 4 * LANE_COUNT) {
        vi v[4]; /* the bits of ROUNDER + v: those of ROUNDER are above the lower 16, of which limbs are made */
        for (int i = 0; i < 4; i++) {
          const vf rounded = fused(load_floats(scaled[g] + t + i * LANE_COUNT), times, rounder);
          v[i] = (vi)rounded;
          total[i] += (vu)rounded;
          if (KIND != SCALE_ALONE) offset[i / 2] = fused(rounded - rounder, load_floats(offset_of + t + i * LANE_COUNT), offset[i / 2]);
        }
        if (limb_bits(sums) == 8)
          store_limb_pairs(v, w[m].pairs + t / 8 * queries + g, queries);
        else
          store_limbs(v, w[m].high[g] + first + t, w[m].low[g] + first + t);
      }
      const vu excess = (vu)rounder * ((uint32_t)tokens / LANE_COUNT); /* in 32 bits, as `total` wrapped around */
      sums->scale[m][g] += floats((vi)((total[0] + total[1]) + (total[2] + total[3]) - excess)) * unit;
      if (KIND != SCALE_ALONE) sums->offset[m][g] += (offset[0] + offset[1]) * unit;
    }
  }
}

/* The same for every kind. */
static void run_weights(const Stream *s, int queries, const PageRun *run, int page_tokens, int from, int to, const float *weight, int stride,
                        Weights *w, ValueSums *sums) {
#define WHOLE(kind, mean) whole_weights(kind, mean, s, queries, run, page_tokens, from, to, weight, stride, w, sums)
  switch (s->kind) {
    case SCALE_MIN: if (s->mean) WHOLE(SCALE_MIN, 1); else WHOLE(SCALE_MIN, 0); break;
    case SCALE_ZERO: if (s->mean) WHOLE(SCALE_ZERO, 1); else WHOLE(SCALE_ZERO, 0); break;
    default: if (s->mean) WHOLE(SCALE_ALONE, 1); else WHOLE(SCALE_ALONE, 0);
  }
#undef WHOLE
}
#endif

/* P * scale of tokens [from, to) of a page as limbs, rounded out to whole vectors of tokens, with zeros outside of [from, to). Adds the
 * part of O that does not depend on codes to `sums`. */
INLINE void page_weights(const Stream *s, int queries, const uint8_t *page_head, int size, int from, int to, const float *weight, int stride,
                         Weights *w, ValueSums *sums) {
  const int first = from / LANE_COUNT * LANE_COUNT, last = (to + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT;
  float padded[CHUNK][128] __attribute__((aligned(64)));
  const int ragged = first < from || to < last, bits = limb_bits(sums);
  const float limit = bits == 8 ? WIDE_LIMIT : LIMIT, inverse = 1.0f / limit, top_code = largest_code(s);
#if ARM
  if (from % LANE_COUNT == 0 && (to - from) % (4 * LANE_COUNT) == 0 && s->meta_type == BFLOAT16) {
    const PageRun run = {{page_head}, {0}, 1};
    run_weights(s, queries, &run, size, from, to, weight, stride, w, sums);
    return;
  }
#endif
  if (ragged) { /* scales outside of [from, to) are undefined and may be NaN */
    memset(padded, 0, sizeof padded);
    for (int g = 0; g < queries; g++) memcpy(padded[g] + from, weight + g * stride + from, sizeof(float) * (size_t)(to - from));
    weight = padded[0], stride = 128;
  }
  for (int m = 0; m < s->metas; m++) {
    vf size_of[128 / LANE_COUNT], offset_of[128 / LANE_COUNT], flag_of[128 / LANE_COUNT], most_rest = splat(0.0f);
    float rest_of[128] __attribute__((aligned(64)));
    for (int t = first, k = 0; t < last; t += LANE_COUNT, k++) {
      const vf scale = meta_vector(s, page_head, size, m, 0, t);
      vi there = magnitude(scale) > splat(0.0f);
      if (ragged) there &= within(t, from, to);
      size_of[k] = (vf)(there & (vi)magnitude(scale));
      if (s->kind != SCALE_ALONE) {
        vf rest, offset = split_offset(s->kind, top_code, size_of[k], meta_vector(s, page_head, size, m, 1, t), &rest);
        rest = (vf)(there & (vi)rest);
        offset_of[k] = (vf)(there & (vi)offset);
        store_floats(rest_of + t - first, rest);
        most_rest = highest(magnitude(rest), most_rest);
      }
      if (s->mean) flag_of[k] = choose(there & (scale < splat(0.0f)), splat(1.0f), splat(0.0f));
    }
    if (s->kind != SCALE_ALONE && max_of(most_rest) > 0.0f) add_rests(queries, rest_of, last - first, weight + first, stride, sums->offset[m]);
    for (int g = 0; g < queries; g++) {
      const float *probs = weight + g * stride;
      vf most = splat(0.0f), offset = splat(0.0f), scaled[128 / LANE_COUNT];
      vi total = {};
      for (int t = first, k = 0; t < last; t += LANE_COUNT, k++) {
        scaled[k] = load_floats(probs + t) * size_of[k];
        most = highest(scaled[k], most);
      }
      if (s->mean && m == 0)
        for (int t = first, k = 0; t < last; t += LANE_COUNT, k++)
          sums->flagged[g] = fused(load_floats(probs + t), flag_of[k], sums->flagged[g]);
      const float top = max_of(most);
      const vf times = splat(top > SMALLEST_TOP ? limit / top : 0.0f);
      const float unit = top * inverse;
      w[m].scale[g] = unit;
      int t = first, k = 0;
#if ARM
      for (; bits == 7 && t + 4 * LANE_COUNT <= last; t += 4 * LANE_COUNT, k += 4) {
        vi v[4];
        for (int i = 0; i < 4; i++) {
          v[i] = __builtin_convertvector(fused(scaled[k + i], times, splat(0.5f)), vi);
          total += v[i];
          if (s->kind != SCALE_ALONE) offset = fused(floats(v[i]), offset_of[k + i], offset);
        }
        store_limbs(v, w[m].high[g] + t, w[m].low[g] + t);
      }
#endif
      for (; t < last; t += LANE_COUNT, k++) {
        const vi v = __builtin_convertvector(fused(scaled[k], times, splat(0.5f)), vi);
        const vi h = (v + (1 << (bits - 1))) >> bits;
        const vc high = __builtin_convertvector(h, vc), low = __builtin_convertvector(v - (h << bits), vc);
        memcpy(w[m].high[g] + t, &high, sizeof high);
        memcpy(w[m].low[g] + t, &low, sizeof low);
        total += v;
        if (s->kind != SCALE_ALONE) offset = fused(floats(v), offset_of[k], offset);
      }
      sums->scale[m][g] += floats(total) * unit;
      if (s->kind != SCALE_ALONE) sums->offset[m][g] += offset * unit;
    }
#if ARM
    int8x16_t *pair = w[m].pairs;
    for (int t = first; bits == 8 && t < last; t += 8)
      for (int g = 0; g < queries; g++) *pair++ = limb_pair(w[m].high[g] + t, w[m].low[g] + t, last - t < 8);
#endif
  }
}

/* O += P V of tokens [from, to) of a page: out [queries, dim], P = weight[query * stride + token]. */
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
    float rows[CHUNK * 256] __attribute__((aligned(64)));
    for (int token = from, step; token < to; token += CHUNK) {
      const int count = to - token < CHUNK ? to - token : CHUNK;
      const float *values = token_rows(s, 0, page_head, ahead, size, head, token, count, dim, rows, &step);
      for (int g = 0; g < queries; g++) FOR_COUNT(count, add_rows, out + g * dim, weight + g * stride + token, values, step, dim)
    }
    return;
  }
  Weights w[MAX_SPANS];
  page_weights(s, queries, page_head, size, from, to, weight, stride, w, sums);
  code_values(queries, s, page_head, ahead, from / LANE_COUNT * LANE_COUNT / 4, (to + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT / 4, w, sums, out, dim);
  if (s->centers)
    for (int token = from; token < to; token++) {
      const float *center = center_at(s, head, center_of(s, page_head, token), dim);
      for (int g = 0; g < queries; g++) add_times(out + g * dim, weight[g * stride + token], center, dim);
    }
}

#if ARM
/* Whether the whole pages of a stream are multiplied in runs. */
INLINE int takes_runs(const Stream *s, int page_tokens) {
  return s->kind <= SCALE_ALONE && !s->centers && s->meta_type == BFLOAT16 && page_tokens % 16 == 0 && by_sections(s);
}

/* Tokens of a run, at most. */
INLINE int most_tokens(const Stream *s) {
  int bits = 0;
  for (int j = 0; j < s->sections; j++) bits |= s->section[j].bits;
  return bits & 8 ? BYTE_TOKENS : RUN_TOKENS;
}

/* O += P V of all tokens of a run of pages. */
static void run_values(const Decode *call, int queries, const PageRun *run, const float *weight, int stride, float *out, ValueSums *sums) {
  Weights w[MAX_SPANS];
  run_weights(&call->value, queries, run, call->page_tokens, 0, call->page_tokens, weight, stride, w, sums);
  section_columns(queries, &call->value, run, 0, call->page_tokens / 4, w, out, call->dim);
}
#endif
