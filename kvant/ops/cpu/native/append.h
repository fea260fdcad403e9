/* Append: writes new tokens to pages and overlay. A token-wise stream is coded token by token, a group-wise stream group by group. */

/* Task: CHECKED tokens. Sets `refused` where a key or value that would be stored is NaN or larger than the limit. */
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

/* Writes the key or value x of a position of sequence b to the overlay. */
INLINE void store_overlay(const Append *call, const Stream *s, int64_t b, int head, int64_t position, const float *x) {
  const int64_t at = ((call->batch->overlay_rows[b] * s->overlay_tokens + overlay_index(s, position)) * call->heads + head) * call->dim;
  for (int c = 0; c < call->dim; c++) store_one(s->overlay, at + c, s->window_type, x[c]);
}

/* Task: the key or value of one head of one new token of a token-wise stream. */
static void NAME(append)(const Append *call, int64_t task, float *scratch) {
  const int dim = call->dim, side = (int)(task % 2), head = (int)(task / 2 % call->heads), size = call->page_tokens;
  const int64_t token = task / 2 / call->heads, slot = call->batch->slot_mapping[token];
  const Stream *s = side ? &call->value : &call->key;
  const FusedTransform *transform = side ? &call->value_transform : &call->key_transform;
  if (slot < 0 || call->refused || s->group_tokens > 1) return;
  int b = 0, above = (int)call->batch->count; /* bisection for the sequence that the token belongs to */
  while (above - b > 1) {
    const int middle = (b + above) / 2;
    if (call->batch->query_start_loc[middle] <= token)
      b = middle;
    else
      above = middle;
  }
  const int64_t n = call->batch->seq_lens[b], position = n - call->batch->query_start_loc[b + 1] + token;
  uint8_t *page_head = call->pages + (slot / size * call->heads + head) * call->page_head_bytes;
  float x[256];
  load_row(call->source[side], token * call->stride[side] + head * call->head_stride[side], call->type[side], dim, x);
  const int keep = s->overlay_tokens && (position < s->sink || position >= n - s->ring);
  if (keep && s->raw_window) store_overlay(call, s, b, head, position, x);
  apply_transform(transform, head, position, dim, x);
  if (keep && !s->raw_window) store_overlay(call, s, b, head, position, x);
  if (position < call->origin) return;
  const int place = (int)(slot % size);
  if (s->centers) {
    int found = 0;
    if (s->index_bits) {
      const int64_t book = (int64_t)(head % s->books_heads) * (dim + 1) * s->centers;
      all_nearest(transform->columns_f32 + book, transform->columns_f64 + book, dim, s->centers, 1, x, scratch, &found);
      page_head[s->index_offset + place] = (uint8_t)found;
      if (s->index_bits > 8) page_head[s->high_offset + place] = (uint8_t)(found >> 8);
    }
    const float *center = center_at(s, head, found, dim);
    for (int c = 0; c < dim; c++) x[c] -= center[c];
  }
  if (s->kind == RAW)
    for (int c = 0; c < dim; c++) store_one(page_head + s->section[0].offset, (int64_t)place * dim + c, s->meta_type, x[c]);
  else if (s->kind == CENTROIDS)
    encode_centroids(s, transform, page_head, head, place, dim, x, scratch);
  else if (s->kind == LEVELS)
    encode_levels(s, transform, !side, page_head, size, place, dim, x);
  else if (s->kind == SCALE_ALONE)
    encode_banded(s, transform, !side, page_head, size, head, place, dim, x);
  else
    encode_affine(s, transform, !side, page_head, size, place, dim, x);
}

/* --- groups of tokens ---------------------------------------------------------------------------------------------- */

/* Marks the channels that have four bits: those with the largest sum of magnitudes over the group; of equals the first. */
static void boosted_channels(const Stream *s, const float *x, int dim, uint8_t *chosen) {
  double strength[256];
  memset(chosen, 0, (size_t)dim);
  for (int c = 0; c < dim; c++) {
    strength[c] = 0.0;
    for (int t = 0; t < s->group_tokens; t++) strength[c] += fabs((double)x[(int64_t)t * dim + c]);
  }
  for (int i = 0; i < s->boosted; i++) {
    int best = -1;
    for (int c = 0; c < dim; c++)
      if (!chosen[c] && (best < 0 || strength[c] > strength[best])) best = c;
    chosen[best] = 1;
  }
}

/* Codes a complete group of tokens x: [group_tokens, dim], with a scale and a minimum per channel; `place` is its first token's index
 * in the page. */
static void encode_group(const Stream *s, int keys, uint8_t *page_head, int place, int dim, const float *x) {
  const int size = s->group_tokens, group = place / size, type = s->meta_type, boosted = s->kind == BOOSTED;
  const float most = largest_of(type);
  uint16_t *meta = (uint16_t *)(page_head + s->meta_offset) + 2 * (int64_t)group * dim;
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
      page_head[s->index_offset + (int64_t)group * dim + c] = (uint8_t)(chosen[c] ? count : s->boosted < 255 ? s->boosted : 255);
      if (chosen[c]) rows[count++] = (uint8_t)c;
    }
  }
  for (int t = 0; t < size; t++) {
    uint8_t codes[256];
    for (int c = 0; c < dim; c++)
      codes[c] = (uint8_t)between(rintf((x[(int64_t)t * dim + c] - low[c]) / scale[c]), 0.0f, top[c]);
    if (boosted) {
      uint8_t *high = page_head + s->high_offset + (int64_t)(place + t) * s->boosted / 4;
      for (int i = 0; i < s->boosted; i += 4)
        high[i / 4] = (uint8_t)(codes[rows[i]] >> 2 | codes[rows[i + 1]] >> 2 << 2 | codes[rows[i + 2]] >> 2 << 4 |
                                codes[rows[i + 3]] >> 2 << 6);
      for (int c = 0; c < dim; c++) codes[c] &= 3;
    }
    write_codes(s, keys, page_head, place + t, codes);
  }
}

/* Task: keys or values of one head of one sequence, of a group-wise stream. Codes the groups that the new tokens complete, then writes
 * the new tokens of the window to the overlay, which may overwrite tokens of those groups. */
static void NAME(append_groups)(const Append *call, int64_t task, float *scratch) {
  const int dim = call->dim, side = (int)(task % 2), head = (int)(task / 2 % call->heads);
  const int64_t b = task / 2 / call->heads, n = call->batch->seq_lens[b], start = call->batch->query_start_loc[b], before = n - (call->batch->query_start_loc[b + 1] - start);
  const Stream *s = side ? &call->value : &call->key;
  const FusedTransform *transform = side ? &call->value_transform : &call->key_transform;
  if (s->group_tokens <= 1 || call->refused) return;
  int64_t first = packed_end(s, before);
  if (first < s->ring_start[b]) first = s->ring_start[b];
  if (first < s->first) first = s->first;
  const int64_t overlay = call->batch->overlay_rows[b] * s->overlay_tokens, last = packed_end(s, n);
  for (; first < last; first += s->group_tokens) {
    for (int t = 0; t < s->group_tokens; t++) {
      float *x = scratch + (int64_t)t * dim;
      const int64_t position = first + t;
      if (position < before) { /* an earlier token: the overlay holds the unfinished group */
        load_row(s->overlay, ((overlay + overlay_index(s, position)) * call->heads + head) * dim, s->window_type, dim, x);
        continue;
      }
      load_row(call->source[side], (start + position - before) * call->stride[side] + head * call->head_stride[side],
               call->type[side], dim, x);
      apply_transform(transform, head, position, dim, x);
      for (int c = 0; c < dim; c++) x[c] = rounded_one(x[c], s->window_type); /* as tokens in the overlay are */
    }
    const int64_t at = first - call->origin, page = call->batch->block_table[b * call->batch->width + at / call->page_tokens];
    encode_group(s, !side, call->pages + (page * call->heads + head) * call->page_head_bytes, (int)(at % call->page_tokens), dim, scratch);
  }
  for (int64_t position = before; position < n; position++) {
    if (position >= s->sink && position < n - s->ring) continue;
    load_row(call->source[side], (start + position - before) * call->stride[side] + head * call->head_stride[side], call->type[side],
             dim, scratch);
    apply_transform(transform, head, position, dim, scratch);
    store_overlay(call, s, b, head, position, scratch);
  }
}
