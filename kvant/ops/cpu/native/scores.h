/* S = Q K^T for the packed keys of a page. */

/* Returns |scale| of span i for LANE_COUNT tokens. Adds the part of S that does not depend on codes to `total`:
 * (scale * center + min) * sum(q), or with a zero point scale * (center - zero) * sum(q); and q . mean where the scale is negative. */
INLINE vf begin_span(const int QUERIES, const Stream *s, int i, const uint8_t *page_head, int page_tokens, int token, const QueryOperand *query,
                     vf *total) {
  const Span *span = &s->span[i];
  if (s->kind >= CHANNEL) {
    for (int g = 0; g < QUERIES; g++) total[g] += splat(query[g].sum[i]);
    return splat(1.0f);
  }
  const vf scale = meta_vector(s, page_head, page_tokens, span->meta, 0, token);
  const vf size = magnitude(scale);
  vf offset = size * splat(span->center);
  if (s->kind == SCALE_MIN) offset += meta_vector(s, page_head, page_tokens, span->meta, 1, token);
  if (s->kind == SCALE_ZERO) offset -= size * meta_vector(s, page_head, page_tokens, span->meta, 1, token);
  for (int g = 0; g < QUERIES; g++) {
    total[g] = fused(offset, splat(query[g].sum[i]), total[g]);
    if (s->mean && i == 0) total[g] += choose(scale < splat(0.0f), splat(query[g].mean_logit[1]), splat(0.0f));
  }
  return size;
}

/* Adds <query limbs, codes> of the four channels from `channel` on. A lane is a token. */
INLINE void add_products(const int QUERIES, const int VECTORS, const vu *codes, const QueryOperand *query, int channel, int wide,
                         vi (*high)[CHUNK], vi (*low)[CHUNK]) {
  for (int g = 0; g < QUERIES; g++) {
    for (int k = 0; k < VECTORS; k++) high[k][g] = dot4(high[k][g], codes[k], word(query[g].high + channel), wide);
    for (int k = 0; k < VECTORS; k++) low[k][g] = dot4(low[k][g], codes[k], word(query[g].low + channel), wide);
  }
}

#if !ARM
/* Adds the products of a whole section. Each byte is loaded once for all of its codes; the byte `ahead` of it, of the next page, is
 * prefetched. */
INLINE void section_products(const int QUERIES, const int VECTORS, const int BITS, int first, int bytes, const uint8_t *const *base,
                             int64_t ahead, const QueryOperand *query, vi (*high)[CHUNK], vi (*low)[CHUNK]) {
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
      add_products(QUERIES, VECTORS, codes, query, first + slot * bytes + c, BITS == 8, high, low);
    }
  }
}
#endif

/* Adds the products of the channels that a section and a span have in common. */
INLINE void part_products(const int QUERIES, const int VECTORS, const Section *section, const Span *span, const uint8_t *const *base,
                          int64_t ahead, const QueryOperand *query, vi (*high)[CHUNK], vi (*low)[CHUNK]) {
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
      add_products(QUERIES, VECTORS, codes, query, c, bits == 8, high, low);
    }
  }
}

/* Scores of VECTORS * LANE_COUNT tokens of a page from `token` on: scores[query * stride + token]. */
INLINE void tile(const int QUERIES, const int VECTORS, const Stream *s, const uint8_t *page_head, int64_t ahead, int page_tokens,
                 int token, const QueryOperand *query, float *scores, int stride) {
  vf total[4][CHUNK];
  for (int k = 0; k < VECTORS; k++)
    for (int g = 0; g < QUERIES; g++) total[k][g] = splat(ARM ? query[g].mean_logit[0] : 0.0f);
  for (int i = 0; i < s->spans; i++) {
    const Span *span = &s->span[i];
    vf size[4];
    for (int k = 0; k < VECTORS; k++) size[k] = begin_span(QUERIES, s, i, page_head, page_tokens, token + k * LANE_COUNT, query, total[k]);
    for (int j = 0; j < s->sections; j++) {
      const Section *section = &s->section[j];
      const int first = section->first, end = first + section->width, bytes = section->width * section->bits / 8;
      if (end <= span->first || span->end <= first) continue;
      const uint8_t *base[4];
      vi high[4][CHUNK], low[4][CHUNK];
      for (int k = 0; k < VECTORS; k++) {
        base[k] = page_head + section->offset + key_place(bytes, token + k * LANE_COUNT, 0);
        for (int g = 0; g < QUERIES; g++) high[k][g] = low[k][g] = (vi){};
      }
      switch (span->first <= first && end <= span->end ? section->bits : 0) {
#if !ARM /* there section_scores serves whole sections */
        case 2: section_products(QUERIES, VECTORS, 2, first, bytes, base, ahead, query, high, low); break;
        case 4: section_products(QUERIES, VECTORS, 4, first, bytes, base, ahead, query, high, low); break;
#endif
        default: part_products(QUERIES, VECTORS, section, span, base, ahead, query, high, low);
      }
      for (int g = 0; g < QUERIES; g++) {
        const vf unit = splat(section->alpha * query[g].scale[i]);
        for (int k = 0; k < VECTORS; k++)
          total[k][g] = fused(size[k] * unit, floats((high[k][g] << 7) + low[k][g]), total[k][g]);
      }
    }
  }
  for (int k = 0; k < VECTORS; k++)
    for (int g = 0; g < QUERIES; g++) store_floats(scores + g * stride + token + k * LANE_COUNT, total[k][g]);
}

/* Scores of tokens [from, to), as many vectors of tokens at a time as there are registers for. */
INLINE void tiles(const int QUERIES, const Stream *s, const uint8_t *page_head, int64_t ahead, int page_tokens, int from, int to, const QueryOperand *query,
                  float *scores, int stride) {
  const int most = LANE_COUNT == 8 ? (QUERIES == 1 ? 2 : 1) : QUERIES == 1 ? 4 : 2;
  int token = from / LANE_COUNT * LANE_COUNT;
  for (; token + most * LANE_COUNT <= page_tokens && token < to; token += most * LANE_COUNT)
    tile(QUERIES, most, s, page_head, ahead, page_tokens, token, query, scores, stride);
  for (; token < to; token += LANE_COUNT) tile(QUERIES, 1, s, page_head, ahead, page_tokens, token, query, scores, stride);
}

#if ARM
/* Scores from the sums of the first section of span i: begin_span, and its products. What depends on the query alone is in registers.
 * FIRST: span 0, whose scores start from q . mu. */
INLINE void span_scores(const int QUERIES, const int KIND, const int FIRST, const Stream *s, int i, const uint8_t *page_head, int page_tokens,
                        int from, int to, const QueryOperand *query, const float *unit, const float *sums, float *scores, int stride) {
  const Span *span = &s->span[i];
  const uint16_t *scales = (const uint16_t *)(page_head + s->meta_offset) + (int64_t)span->meta * s->meta_fields * page_tokens;
  const vf center = splat(span->center);
  vf factor[CHUNK], sum[CHUNK], start[CHUNK];
  for (int g = 0; g < QUERIES; g++) {
    factor[g] = splat(unit[g]), sum[g] = splat(KIND == SCALE_ALONE ? query[g].sum[i] * span->center : query[g].sum[i]);
    start[g] = splat(query[g].mean_logit[0]);
  }
  for (int token = from / LANE_COUNT * LANE_COUNT; token < to; token += LANE_COUNT) {
    const vf size = magnitude(load_halves(scales + token, BFLOAT16));
    vf offset = center;
    if (KIND == SCALE_MIN) offset = size * center + load_halves(scales + page_tokens + token, BFLOAT16);
    if (KIND == SCALE_ZERO) offset -= load_halves(scales + page_tokens + token, BFLOAT16);
    for (int g = 0; g < QUERIES; g++) {
      float *at = scores + g * stride + token;
      const vf products = load_floats(sums + g * 128 + token), total = FIRST ? start[g] : load_floats(at);
      if (KIND == SCALE_MIN)
        store_floats(at, fused(size * factor[g], products, fused(offset, sum[g], total)));
      else
        store_floats(at, fused(size, fused(products, factor[g], KIND == SCALE_ALONE ? sum[g] : offset * sum[g]), total));
    }
  }
}

/* The same section by section: the sums of a page first, then the scores from them. */
INLINE void section_scores(const int QUERIES, const Stream *s, const uint8_t *page_head, int64_t ahead, int page_tokens, int from, int to,
                           const QueryOperand *query, float *scores, int stride) {
  float sums[CHUNK * 128] __attribute__((aligned(64)));
  if (s->kind <= SCALE_ALONE) fetch_scales(s, page_head, page_tokens); /* again: the prefetch of fetch_page may have been dropped */
  for (int i = 0; i < s->spans; i++) {
    int more = 0; /* whether a section of this span came before */
    const int8x16_t *limbs = query[0].limbs;
    for (int j = 0; j < s->sections; limbs += section_limbs(&s->section[j++], QUERIES)) {
      const Section *section = &s->section[j];
      if (section->first < s->span[i].first || section->first >= s->span[i].end) continue;
      KEY_SUMS[QUERIES - 1][__builtin_ctz((unsigned)section->bits)](section, page_head, ahead, from, to, query, limbs, sums);
      float unit[CHUNK];
      for (int g = 0; g < QUERIES; g++) unit[g] = section->alpha * query[g].scale[i];
#define SPAN(kind, first) span_scores(QUERIES, kind, first, s, i, page_head, page_tokens, from, to, query, unit, sums, scores, stride)
      switch (more || s->mean || s->meta_type != BFLOAT16 ? -1 : s->kind) {
        case SCALE_MIN: if (i) SPAN(SCALE_MIN, 0); else SPAN(SCALE_MIN, 1); break;
        case SCALE_ZERO: if (i) SPAN(SCALE_ZERO, 0); else SPAN(SCALE_ZERO, 1); break;
        case SCALE_ALONE: if (i) SPAN(SCALE_ALONE, 0); else SPAN(SCALE_ALONE, 1); break;
#undef SPAN
        default:
          for (int token = from / LANE_COUNT * LANE_COUNT; token < to; token += LANE_COUNT) {
            vf total[CHUNK], size;
            for (int g = 0; g < QUERIES; g++) total[g] = i || more ? load_floats(scores + g * stride + token) : splat(query[g].mean_logit[0]);
            if (more)
              size = s->kind >= CHANNEL ? splat(1.0f) : magnitude(meta_vector(s, page_head, page_tokens, s->span[i].meta, 0, token));
            else
              size = begin_span(QUERIES, s, i, page_head, page_tokens, token, query, total);
            for (int g = 0; g < QUERIES; g++)
              store_floats(scores + g * stride + token, fused(size * splat(unit[g]), load_floats(sums + g * 128 + token), total[g]));
          }
      }
      more = 1;
    }
  }
}
#endif

/* S = Q K^T of tokens [from, to) from codes. On ARM q . mu is the first term: vectors of four lanes would take long to add it afterwards. */
static void code_scores(int queries, const Stream *s, const uint8_t *page_head, int64_t ahead, int page_tokens, int from, int to,
                        const QueryOperand *query, float *scores, int stride) {
#if ARM
  if (query[0].limbs) {
    FOR_COUNT(queries, section_scores, s, page_head, ahead, page_tokens, from, to, query, scores, stride)
    return;
  }
#endif
  FOR_COUNT(queries, tiles, s, page_head, ahead, page_tokens, from, to, query, scores, stride)
}

/* S += sum over boosted channels of 4 * q * scale * high bits. A byte holds the high bits of four channels of a token. The queries
 * of the boosted channels are gathered by the page's index, in the order of the high bits. */
static void boosted_scores(int queries, const Stream *s, const uint8_t *page_head, int dim, int group, int from, int to, const QueryOperand *query,
                           const float *scales, float *scores, int stride) {
  const int words = (s->boosted + 15) / 16, bytes = s->boosted / 4;
  const uint8_t *index = page_head + s->index_offset + (int64_t)group * dim;
  int8_t high[CHUNK][256], low[CHUNK][256];
  float unit[CHUNK], unused;
  for (int g = 0; g < queries; g++) {
    float numbers[256] = {0};
    for (int c = 0; c < dim; c++) {
      const int i = index[c], j = i % 16;
      if (i < s->boosted) numbers[i / 16 * 16 + j % 4 * 4 + j / 4] = 4.0f * query[g].vector[c] * scales[c];
    }
    unit[g] = to_limbs(numbers, 16 * words, high[g], low[g], &unused);
  }
  const vu mask = (vu){} + 0x03030303u;
  for (int token = from / LANE_COUNT * LANE_COUNT; token < to; token += LANE_COUNT)
    for (int w = 0; w < words; w++) {
      uint32_t lanes[LANE_COUNT] = {0};
      const int count = bytes - 4 * w < 4 ? bytes - 4 * w : 4;
      for (int lane = 0; lane < LANE_COUNT; lane++)
        memcpy(&lanes[lane], page_head + s->high_offset + (int64_t)(token + lane) * bytes + 4 * w, (size_t)count);
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

/* Keys with scales per channel: S = sum_c (q_c scale_c) code_c + q . min, with the scales of a group of tokens multiplied into the
 * query. */
static void channel_scores(int queries, const Stream *s, const uint8_t *page_head, int page_tokens, int dim, int from, int to,
                           const QueryOperand *query, float *scores, int stride) {
  const int size = s->group_tokens;
  for (int group = from / size; group * size < to; group++) {
    int8_t limbs[CHUNK][2 * 256];
    float metas[512], scales[256], least[256], numbers[256], scale[CHUNK], sum[CHUNK];
    QueryOperand scaled[CHUNK];
    load_row(page_head + s->meta_offset, 2 * (int64_t)group * dim, s->meta_type, 2 * dim, metas);
    for (int c = 0; c < dim; c++) {
      scales[c] = metas[2 * c];
      least[c] = metas[2 * c + 1];
    }
    for (int g = 0; g < queries; g++) {
      for (int c = 0; c < dim; c++) numbers[c] = query[g].vector[c] * scales[c];
      sum[g] = product(query[g].vector, least, dim);
      float unused;
      scale[g] = to_limbs(numbers, dim, limbs[g], limbs[g] + dim, &unused);
      scaled[g] = (QueryOperand){query[g].vector, limbs[g], limbs[g] + dim, &scale[g], &sum[g], query[g].mean_logit};
    }
#if ARM
    int8x16_t packed[MOST_LIMBS];
    if (by_sections(s)) pack_limbs(s, queries, scaled, packed), scaled[0].limbs = packed;
#endif
    const int first = group * size > from ? group * size : from, last = (group + 1) * size < to ? (group + 1) * size : to;
    code_scores(queries, s, page_head, 0, page_tokens, first, last, scaled, scores, stride);
    if (s->kind == BOOSTED) boosted_scores(queries, s, page_head, dim, group, first, last, query, scales, scores, stride);
  }
}

/* Keys with levels from a table: S = norm * sum_c q_c level[code_c]. A lane is a token. */
INLINE void level_tiles(const int QUERIES, const Stream *s, const uint8_t *page_head, int page_tokens, int dim, int from, int to,
                        const QueryOperand *query, float *scores, int stride) {
  for (int token = from / LANE_COUNT * LANE_COUNT; token < to; token += LANE_COUNT) {
    vf sum[CHUNK];
    for (int g = 0; g < QUERIES; g++) sum[g] = splat(0.0f);
    for (int c = 0; c < dim; c++) {
      vu index = {};
      for (int j = 0; j < s->sections; j++) {
        const Section *section = &s->section[j];
        const int bytes = section->width * section->bits / 8, byte = c % bytes;
        const vu packed = load_bytes(page_head + section->offset + key_place(bytes, token, byte / 4 * 4));
        const uint32_t shift = (uint32_t)(byte % 4 * 8 + c / bytes * section->bits);
        index |= (packed >> shift & (uint32_t)((1 << section->bits) - 1)) << (uint32_t)section->shift;
      }
      const vf level = lookup(s->levels, (vi)index);
      for (int g = 0; g < QUERIES; g++) sum[g] = fused(splat(query[g].vector[c]), level, sum[g]);
    }
    const vf norm = meta_vector(s, page_head, page_tokens, 0, 0, token);
    for (int g = 0; g < QUERIES; g++) store_floats(scores + g * stride + token, sum[g] * norm);
  }
}

static void level_scores(int queries, const Stream *s, const uint8_t *page_head, int page_tokens, int dim, int from, int to, const QueryOperand *query,
                         float *scores, int stride) {
  FOR_COUNT(queries, level_tiles, s, page_head, page_tokens, dim, from, to, query, scores, stride)
}

/* S += q . mu, which removing the key mean took off every logit; at[query * stride + token]. */
INLINE void add_mean_logit(const Decode *call, int queries, const QueryOperand *query, int count, float *at, int stride) {
  for (int g = 0; call->use_mean_logit && g < queries; g++, at += stride) {
    const float mean_logit = query[g].mean_logit[0];
    int t = 0;
    for (; t + LANE_COUNT <= count; t += LANE_COUNT) store_floats(at + t, load_floats(at + t) + splat(mean_logit));
    for (; t < count; t++) at[t] += mean_logit;
  }
}

/* S = q . mu + Q K^T of tokens [from, to) of a page: scores[query * stride + token]. */
static void page_scores(const Decode *call, int queries, const uint8_t *page_head, int64_t ahead, int64_t row, int chunk, int from,
                        int to, const QueryOperand *query, float *scores, int stride) {
  const Stream *s = &call->key;
  const int head = (int)(row % call->heads);
  const int dim = call->dim;
  if (s->kind <= SCALE_ALONE) {
    code_scores(queries, s, page_head, ahead, call->page_tokens, from, to, query, scores, stride);
    if (s->centers) {
      const float *table = lookup_tables(call, row, chunk);
      for (int token = from; token < to; token++) {
        const float *products = table + (int64_t)center_of(s, page_head, token) * CHUNK;
        for (int g = 0; g < queries; g++) scores[g * stride + token] += products[g];
      }
    }
  } else if (s->kind == CHANNEL || s->kind == BOOSTED) {
    channel_scores(queries, s, page_head, call->page_tokens, dim, from, to, query, scores, stride);
  } else if (s->kind == LEVELS) {
    level_scores(queries, s, page_head, call->page_tokens, dim, from, to, query, scores, stride);
  } else if (s->kind == CENTROIDS) {
    const float *table = lookup_tables(call, row, chunk);
    const int subvectors = dim / s->subvector_dim;
    uint16_t index[128 * 128];
    centroids_of(s, page_head, from, to, subvectors, index);
    for (int token = from; token < to; token++) {
      const uint16_t *row = index + (token - from) * subvectors;
      v4 sum = {};
      for (int subvector = 0; subvector < subvectors; subvector++) {
        v4 products;
        memcpy(&products, table + (((int64_t)subvector << s->book_bits) + row[subvector]) * CHUNK, sizeof products);
        sum += products;
      }
      for (int g = 0; g < queries; g++) scores[g * stride + token] = sum[g];
    }
  } else {
    float rows[CHUNK * 256] __attribute__((aligned(64)));
    for (int token = from, step; token < to; token += CHUNK) {
      const int count = to - token < CHUNK ? to - token : CHUNK;
      const float *keys = token_rows(s, 1, page_head, ahead, call->page_tokens, head, token, count, dim, rows, &step);
      for (int g = 0; g < queries; g++) FOR_COUNT(count, row_products, query[g].vector, keys, step, dim, scores + g * stride + token)
    }
  }
  if (!ARM || s->kind > BOOSTED) add_mean_logit(call, queries, query, to - from, scores + from, stride);
}
