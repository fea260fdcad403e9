/* Decodes stored tokens to floats: for prefill, and for decode attention over formats that have no integer dot products. */

/* Scale `meta` (field 0) or its min or zero (field 1) of LANE_COUNT tokens from `token` on; meta_one: of one token. */
INLINE vf meta_vector(const Stream *s, const uint8_t *page_head, int page_tokens, int meta, int field, int token) {
  return load_halves(page_head + s->meta_offset + 2 * ((int64_t)(meta * s->meta_fields + field) * page_tokens + token), s->meta_type);
}

INLINE float meta_one(const Stream *s, const uint8_t *page_head, int page_tokens, int meta, int field, int token) {
  return load_one(page_head + s->meta_offset, (int64_t)(meta * s->meta_fields + field) * page_tokens + token, s->meta_type);
}

/* Prefetches the scales of a page. */
INLINE void fetch_scales(const Stream *s, const uint8_t *page_head, int page_tokens) {
  fetch(page_head + s->meta_offset, (int64_t)s->metas * s->meta_fields * page_tokens * 2);
}

/* Offset in a section of byte `byte` of the `bytes` bytes of a token: the order "lanes" of layout.py. Keys: tiles of 16 tokens, four
 * bytes of each token in turn. Values: four tokens, one byte of each in turn. */
INLINE int64_t key_place(int bytes, int token, int byte) {
  return (int64_t)(token / LANES) * LANES * bytes + byte / 4 * (4 * LANES) + token % LANES * 4 + byte % 4;
}
INLINE int64_t value_place(int bytes, int token, int byte) {
  return (int64_t)(token / 4) * 4 * bytes + byte * 4 + token % 4;
}

/* sum over planes of alpha * code of one token, which is x / scale - center: [dim]. */
INLINE void token_codes(const Stream *s, int keys, const uint8_t *page_head, int token, int dim, float *out) {
  for (int c = 0; c < dim; c++) out[c] = 0.0f;
  for (int i = 0; i < s->sections; i++) {
    const Section *section = &s->section[i];
    const int bytes = section->width * section->bits / 8, mask = (1 << section->bits) - 1;
    const uint8_t *base = page_head + section->offset;
    for (int byte = 0; byte < bytes; byte++) {
      uint8_t x = base[keys ? key_place(bytes, token, byte) : value_place(bytes, token, byte)];
      int c = section->first + byte;
      for (int shift = 0; shift < 8; shift += section->bits, c += bytes)
        out[c] += section->alpha * (float)(x >> shift & mask);
    }
  }
}

/* Index of a sub-vector's centroid. Its bit planes are stored token after token. */
INLINE int centroid_of(const Stream *s, const uint8_t *page_head, int token, int subvectors, int subvector) {
  int found = 0, shift = 0;
  for (int i = 0; i < s->sections; i++) {
    const Section *section = &s->section[i];
    const uint8_t *row = page_head + section->offset + (int64_t)token * subvectors * section->bits / 8;
    int bit = subvector * section->bits;
    found |= (row[bit / 8] >> bit % 8 & ((1 << section->bits) - 1)) << shift;
    shift += section->bits;
  }
  return found;
}

/* Centroid indices of tokens [from, to) of a page, to out: [to - from, subvectors]. */
INLINE void centroids_of(const Stream *s, const uint8_t *page_head, int from, int to, int subvectors, uint16_t *out) {
  for (int i = 0, shift = 0; i < s->sections; shift += s->section[i++].bits) {
    const int bits = s->section[i].bits, count = (to - from) * subvectors;
    const uint8_t *row = page_head + s->section[i].offset + (int64_t)from * subvectors * bits / 8;
    if (i == 0) memset(out, 0, sizeof(uint16_t) * (size_t)count);
    if (bits == 8)
      for (int k = 0; k < count; k++) out[k] |= (uint16_t)(row[k] << shift);
    else
      for (int k = 0; k < count; k++) out[k] |= (uint16_t)((row[k * bits / 8] >> k * bits % 8 & ((1 << bits) - 1)) << shift);
  }
}

/* The codebook of a head's sub-vector: [2^book_bits, length]. */
INLINE const float *book_of(const Stream *s, int head, int subvector, int length) {
  int64_t book = (int64_t)(head % s->books_heads) * s->books_subvectors + subvector % s->books_subvectors;
  return s->books + (book * length << s->book_bits);
}

/* Index of the centroid (of whole head vectors) that was subtracted from a token before it was coded. */
INLINE int center_of(const Stream *s, const uint8_t *page_head, int token) {
  if (!s->index_bits) return 0;
  const int found = page_head[s->index_offset + token] | (s->index_bits > 8 ? page_head[s->high_offset + token] << 8 : 0);
  return found < s->centers ? found : s->centers - 1; /* the index of a token that was never written is undefined */
}
INLINE const float *center_at(const Stream *s, int head, int center, int dim) {
  return s->books + ((int64_t)(head % s->books_heads) * s->centers + center) * dim;
}

/* Decodes one token of a page: [dim], still transformed as it was for storage. */
static void token_row(const Stream *s, int keys, const uint8_t *page_head, int page_tokens, int head, int token, int dim, float *out) {
  if (s->kind == RAW) {
    load_row(page_head + s->section[0].offset, (int64_t)token * dim, s->meta_type, dim, out);
    return;
  }
  if (s->kind == CENTROIDS) {
    const int length = s->subvector_dim, subvectors = dim / length;
    for (int subvector = 0; subvector < subvectors; subvector++) {
      const float *centroid = book_of(s, head, subvector, length) + (int64_t)centroid_of(s, page_head, token, subvectors, subvector) * length;
      for (int i = 0; i < length; i++) out[subvector * length + i] = centroid[i];
    }
    return;
  }
  token_codes(s, keys, page_head, token, dim, out);
  if (s->kind == CHANNEL || s->kind == BOOSTED) {
    const int group = token / s->group_tokens;
    if (s->kind == BOOSTED) {
      const uint8_t *index = page_head + s->index_offset + (int64_t)group * dim;
      const uint8_t *high = page_head + s->high_offset + (int64_t)token * s->boosted / 4;
      for (int c = 0; c < dim; c++)
        if (index[c] < s->boosted) out[c] += (float)(4 * (high[index[c] / 4] >> index[c] % 4 * 2 & 3));
    }
    for (int c = 0; c < dim; c++) {
      const int64_t at = 2 * ((int64_t)group * dim + c);
      out[c] = out[c] * load_one(page_head + s->meta_offset, at, s->meta_type) + load_one(page_head + s->meta_offset, at + 1, s->meta_type);
    }
    return;
  }
  if (s->kind == LEVELS) {
    const float norm = meta_one(s, page_head, page_tokens, 0, 0, token);
    for (int c = 0; c < dim; c++) out[c] = s->levels[(int)out[c]] * norm;
    return;
  }
  for (int i = 0; i < s->spans; i++) {
    const Span *span = &s->span[i];
    float scale = meta_one(s, page_head, page_tokens, span->meta, 0, token), size = scale < 0 ? -scale : scale;
    float offset = 0.0f, center = span->center;
    if (s->kind == SCALE_MIN) offset = meta_one(s, page_head, page_tokens, span->meta, 1, token);
    if (s->kind == SCALE_ZERO) center -= meta_one(s, page_head, page_tokens, span->meta, 1, token);
    for (int c = span->first; c < span->end; c++) out[c] = (out[c] + center) * size + offset;
    if (s->mean && scale < 0)
      for (int c = span->first; c < span->end; c++) out[c] += s->mean[(int64_t)head * dim + c];
  }
  if (s->centers) {
    const float *center = center_at(s, head, center_of(s, page_head, token), dim);
    for (int c = 0; c < dim; c++) out[c] += center[c];
  }
}

/* `count` tokens of a page from `token` on as floats, `stride` floats apart. Raw float32 tokens are returned where they lie, others are
 * decoded to `room`: [CHUNK, 256]. Of raw tokens, the bytes `ahead`, of the next page, are prefetched. */
INLINE const float *token_rows(const Stream *s, int keys, const uint8_t *page_head, int64_t ahead, int page_tokens, int head, int token,
                               int count, int dim, float *room, int *stride) {
  if (s->kind == RAW) {
    const int64_t bytes = (int64_t)dim * (s->meta_type == FLOAT32 ? 4 : 2);
    const uint8_t *raw = page_head + s->section[0].offset + token * bytes;
    fetch(raw + ahead, count * bytes);
    if (s->meta_type == FLOAT32) {
      *stride = dim;
      return (const float *)raw;
    }
  }
  *stride = 256;
  for (int r = 0; r < count; r++) token_row(s, keys, page_head, page_tokens, head, token + r, dim, room + 256 * r);
  return room;
}

/* Task: decodes one head of one page. */
static void NAME(read)(const Read *call, int64_t task, float *scratch) {
  (void)scratch;
  const int size = call->page_tokens, head = (int)(task % call->heads);
  const int64_t page = call->first / size + task / call->heads;
  const uint8_t *page_head = call->pages + (call->block_table[page] * call->heads + head) * call->page_head_bytes;
  for (int token = 0; token < size; token++) {
    int64_t at = page * size + token - call->first;
    if (page * size + token < call->first || page * size + token >= call->last) continue;
    token_row(&call->stream, call->keys, page_head, size, head, token, call->dim,
              call->out + (at * call->heads + head) * call->dim);
  }
}
