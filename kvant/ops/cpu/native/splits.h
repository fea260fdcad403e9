/* Decode attention of one split of a sequence, and the merge of splits. Queries and probabilities are split into two 8-bit limbs, so
 * that dot products with codes are sums of integers; scales are applied to the sums. The order of additions does not depend on the
 * number of threads. */

/* The tokens [begin, end) of sequence b that a task computes attention over. */
typedef struct {
  int64_t b, begin, end;
  int head, split, stride; /* stride: floats between the scores of two queries */
  int block;               /* first RoPE block of the split */
  const float *operands;   /* [RoPE blocks from `block` on, group, operand_stride] */
} SplitTokens;

INLINE const uint8_t *page_head_at(const Decode *call, const SplitTokens *part, int64_t position) {
  const int64_t page = call->batch->block_table[part->b * call->batch->width + (position - call->origin) / call->page_tokens];
  return call->pages + (page * call->heads + part->head) * call->page_head_bytes;
}

/* First position after the page that `position` is in. */
INLINE int64_t end_of_page(const Decode *call, int64_t position) {
  return ((position - call->origin) / call->page_tokens + 1) * call->page_tokens + call->origin;
}

/* Prefetches the page at `position`, if it is in this split, while `page_head` is read. For raw tokens, and for formats whose codes
 * are multiplied as integers, it prefetches only scales and returns the distance in bytes from `page_head` to the next page: the loop
 * over codes or tokens then prefetches them line by line, since too many prefetches at once would stall. Returns 0 otherwise. */
INLINE int64_t fetch_page(const Decode *call, const SplitTokens *part, const Stream *s, const uint8_t *page_head, int64_t position, int64_t recent) {
  const int size = call->page_tokens;
  if (position >= part->end || position >= recent) return 0;
  const uint8_t *next = page_head_at(call, part, position);
  if (s->kind <= SCALE_ALONE || s->kind == RAW) {
    fetch_scales(s, next, size);
    /* Neoverse-N1 drops the first prefetch of a virtual page whose address it has to look up: this one, and not one of the loop's */
    for (int j = 0; ARM && j < s->sections; j++) __builtin_prefetch(next + s->section[j].offset);
    return next - page_head;
  }
  for (int j = 0; j < s->sections; j++) fetch(next + s->section[j].offset, (int64_t)s->section[j].width * s->section[j].bits * size / 8);
  return 0;
}

/* S = Q K^T of a chunk of queries with the overlay tokens [position, to): scores[query * stride + token]. */
static void overlay_scores(const Decode *call, const SplitTokens *part, int64_t position, int64_t to, int queries, const QueryOperand *query, float *scores) {
  const int dim = call->dim, count = (int)(to - position), stride = part->stride;
  float rows[CHUNK * 256] __attribute__((aligned(64)));
  for (int i = 0, got; i < count; i += got) {
    got = load_overlay(call, &call->key, part->b, part->head, position + i, to, rows);
#if ARM
    if (got == CHUNK && dim % LANE_COUNT == 0) {
      FOR_COUNT(queries, block_products, query, rows, 256, dim, scores + i, stride)
      continue;
    }
#endif
    for (int g = 0; g < queries; g++) FOR_COUNT(got, row_products, query[g].vector, rows, 256, dim, scores + g * stride + i)
  }
}

/* S = q . mu + Q K^T of a chunk of queries: scores[query * stride + position - begin]. */
static void split_scores(const Decode *call, const SplitTokens *part, int chunk, int queries, float *scores) {
  const int group = call->group, size = call->page_tokens, stride = part->stride, raw_window = call->key.raw_window;
  const int64_t b = part->b, row = b * call->heads + part->head;
  float vectors[CHUNK * 256] __attribute__((aligned(64)));
  int64_t sinks, recent, held = -1;
  QueryOperand query[CHUNK], raw[CHUNK]; /* those of index `held`; queries as they are */
#if ARM
  const int packs = call->key.kind <= SCALE_ALONE && by_sections(&call->key);
  int8x16_t limbs[MOST_LIMBS];
#endif
  overlay_bounds(call, &call->key, b, &sinks, &recent);
  if (raw_window && (part->begin < sinks || part->end > recent)) load_raw_queries(call, row, chunk, queries, vectors, raw);
  for (int64_t position = part->begin; position < part->end;) {
    /* positions [position, to) of one RoPE block, in one page or in the overlay */
    int64_t to = part->end, index = chunk;
    if (raw_window && (position < sinks || position >= recent)) {
      if (position < sinks && sinks < to) to = sinks;
      overlay_scores(call, part, position, to, queries, raw, scores + (position - part->begin));
      position = to;
      continue;
    }
    if (call->rope_block) {
      const int64_t block = (position + call->rope_first) / call->rope_block;
      index += (block - call->rope_first / call->rope_block - part->block) * group;
      if ((block + 1) * call->rope_block - call->rope_first < to) to = (block + 1) * call->rope_block - call->rope_first;
    }
    if (index != held) {
      for (int g = 0; g < queries; g++) query[g] = operand_at(call, part->operands + (index + g) * call->operand_stride);
#if ARM
      if (packs) pack_limbs(&call->key, queries, query, limbs), query[0].limbs = limbs;
#endif
      held = index;
    }
    float *at = scores + (position - part->begin);
    if (position < sinks || position >= recent) {
      if (position < sinks && sinks < to) to = sinks;
      overlay_scores(call, part, position, to, queries, query, at);
      add_mean_logit(call, queries, query, (int)(to - position), at, stride);
      position = to;
      continue;
    }
    if (recent < to) to = recent;
    if (end_of_page(call, position) < to) to = end_of_page(call, position);
    const int from = (int)((position - call->origin) % size), count = (int)(to - position);
    const uint8_t *page_head = page_head_at(call, part, position);
    const int64_t ahead = chunk ? 0 : fetch_page(call, part, &call->key, page_head, to, recent);
    position = to;
    if (count == size) { /* a whole page: its scores are written in place */
      page_scores(call, queries, page_head, ahead, row, chunk, 0, size, query, at, stride);
      continue;
    }
    float page[CHUNK * 128] __attribute__((aligned(64)));
    page_scores(call, queries, page_head, ahead, row, chunk, from, from + count, query, page, 128);
    for (int g = 0; g < queries; g++) memcpy(at + g * stride, page + g * 128 + from, sizeof(float) * (size_t)count);
  }
}

/* P = exp(S - max S) in place, with S = x * scale, capped where the model caps logits. Also returns max S and sum P. */
INLINE void softmax_weights(const Decode *call, float *x, int count, float *top, float *sum) {
  const int whole = (count + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT;
  if (call->softcap > 0.0f)
    for (int t = 0; t < count; t++) x[t] = call->softcap * tanhf(x[t] * call->scale / call->softcap);
  for (int t = count; t < whole; t++) x[t] = -INFINITY;
  const vf scale = splat(call->softcap > 0.0f ? 1.0f : call->scale);
  vf most = splat(-INFINITY), total = splat(0.0f);
  int t = 0;
#if ARM /* four at a time: the constants stay in registers, and one waits less for another */
  if (scale[0] > 0.0f) { /* then max(x * scale) is max(x) * scale */
    vf tops[4] = {most, most, most, most};
    for (; t + 4 * LANE_COUNT <= whole; t += 4 * LANE_COUNT)
      for (int i = 0; i < 4; i++) tops[i] = highest(load_floats(x + t + i * LANE_COUNT), tops[i]);
    most = highest(highest(tops[0], tops[1]), highest(tops[2], tops[3])) * scale;
  }
#endif
  for (; t < whole; t += LANE_COUNT) most = highest(load_floats(x + t) * scale, most);
  *top = max_of(most);
  t = 0;
#if ARM
  const vf times = scale * splat(1.44269504f), less = splat(*top * -1.44269504f); /* e^x = 2^(x / ln 2) */
  vf totals[4] = {total, total, total, total};
  for (; t + 4 * LANE_COUNT <= whole; t += 4 * LANE_COUNT) {
    vf p[4];
    for (int i = 0; i < 4; i++) p[i] = fused(load_floats(x + t + i * LANE_COUNT), times, less);
    powers_of_two(p);
    for (int i = 0; i < 4; i++) {
      store_floats(x + t + i * LANE_COUNT, p[i]);
      totals[i] += p[i];
    }
  }
  total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
#endif
  for (; t < whole; t += LANE_COUNT) {
    const vf p = exponential(fused(load_floats(x + t), scale, splat(-*top)));
    store_floats(x + t, p);
    total += p;
  }
  *sum = sum_of(total);
}

#if ARM
/* The whole pages from `position` on that are in this split and before `recent`, as a run; none where a page begins before `position`.
 * Prefetches their scales. */
INLINE void next_run(const Decode *call, const SplitTokens *part, const Stream *s, int64_t position, int64_t recent, PageRun *run) {
  const int size = call->page_tokens, tokens = most_tokens(s), most = size * RUN_PAGES < tokens ? RUN_PAGES : tokens / size;
  const int64_t end = part->end < recent ? part->end : recent;
  for (run->pages = 0; run->pages < most && (position - call->origin) % size == 0 && position + size <= end; position += size) {
    const uint8_t *page_head = page_head_at(call, part, position);
    run->page_head[run->pages++] = page_head;
    fetch_scales(s, page_head, size);
  }
}
#endif

/* O = P V over a split: out[query * dim + channel]. */
static void split_values(const Decode *call, const SplitTokens *part, int queries, const float *weights, float *out) {
  const Stream *s = &call->value;
  const int dim = call->dim, size = call->page_tokens, stride = part->stride;
  float rows[CHUNK * 256] __attribute__((aligned(64)));
  int64_t sinks, recent;
  overlay_bounds(call, s, part->b, &sinks, &recent);
  ValueSums sums;
#if ARM
  sums.sections = s->kind <= SCALE_ALONE && by_sections(s);
  const int runs = takes_runs(s, size);
  PageRun run = {.pages = 0}, later; /* `run` is what was found last, from this position on */
#endif
  for (int g = 0; g < queries; g++) {
    memset(out + g * dim, 0, sizeof(float) * (size_t)dim);
    for (int m = 0; m < s->metas; m++) sums.scale[m][g] = sums.offset[m][g] = splat(0.0f);
    sums.flagged[g] = splat(0.0f);
  }
  for (int64_t position = part->begin; position < part->end;) {
    int64_t to = part->end;
    const float *weight = weights + (position - part->begin);
    if (position < sinks || position >= recent) {
      if (position < sinks && sinks < to) to = sinks;
      for (int got; position < to; position += got, weight += got) {
        got = load_overlay(call, s, part->b, part->head, position, to, rows);
#if ARM
        if (got == CHUNK && dim % LANE_COUNT == 0) {
          FOR_COUNT(queries, add_block, out, weight, stride, rows, 256, dim)
          continue;
        }
#endif
        for (int g = 0; g < queries; g++) FOR_COUNT(got, add_rows, out + g * dim, weight + g * stride, rows, 256, dim)
      }
      continue;
    }
    if (recent < to) to = recent;
#if ARM
    if (runs && !run.pages) next_run(call, part, s, position, recent, &run);
    if (run.pages) {
      position += run.pages * size;
      next_run(call, part, s, position, recent, &later);
      for (int i = 0; i < run.pages; i++) run.ahead[i] = i < later.pages ? later.page_head[i] - run.page_head[i] : 0;
      run_values(call, queries, &run, weight, stride, out, &sums);
      run = later;
      continue;
    }
#endif
    if (end_of_page(call, position) < to) to = end_of_page(call, position);
    const int from = (int)((position - call->origin) % size), last = from + (int)(to - position);
    const uint8_t *page_head = page_head_at(call, part, position);
    const int64_t ahead = fetch_page(call, part, s, page_head, to, recent);
    position = to;
    page_values(call, queries, page_head, ahead, part->head, from, last, weight - from, stride, out, &sums);
  }
  for (int g = 0; g < queries; g++) {
    float *x = out + g * dim;
    if (s->kind <= SCALE_ALONE)
      for (int i = 0; i < s->spans; i++) {
        const Span *span = &s->span[i];
        const float add = sum_of(sums.scale[span->meta][g] * span->center + sums.offset[span->meta][g]);
        int c = span->first;
        for (; c + LANE_COUNT <= span->end; c += LANE_COUNT) store_floats(x + c, load_floats(x + c) + splat(add));
        for (; c < span->end; c++) x[c] += add;
      }
    if (s->mean) add_times(x, sum_of(sums.flagged[g]), s->mean + (int64_t)part->head * dim, dim);
  }
}

/* Tokens of a split of a sequence of n tokens. Longer sequences have longer splits; the number of threads does not matter. */
INLINE int64_t split_tokens(const Decode *call, int64_t n) {
  int64_t tokens = call->split_tokens;
  while (tokens < call->longest_split && n - call->origin >= 16 * tokens) tokens *= 2;
  return tokens;
}

/* Task: one (sequence, KV head, split). Writes O = P V, max S and sum P of every query to `partial`. The last split of a sequence, whose
 * recent tokens take the longest, comes first: a thread that began with it at the end would be waited for. */
static void NAME(split)(const Decode *call, int64_t task, float *scratch) {
  const int dim = call->dim, group = call->group;
  SplitTokens part = {.split = call->splits - 1 - (int)(task % call->splits), .head = (int)(task / call->splits % call->heads)};
  part.b = task / call->splits / call->heads;
  const int64_t n = call->batch->seq_lens[part.b], size = split_tokens(call, n);
  part.begin = part.split ? call->origin + part.split * size : 0;
  part.end = call->origin + (part.split + 1) * size;
  if (part.end > n) part.end = n;
  if (call->sliding_window && part.begin < n - call->sliding_window) part.begin = n - call->sliding_window;
  part.stride = (int)size + call->origin + 128;
  float *scores = scratch + 64, *out = scores + (int64_t)CHUNK * part.stride, *operands = out + CHUNK * 2 * dim;
  const int64_t row = part.b * call->heads + part.head;
  part.operands = call->operands + row * group * call->operand_stride;
  if (call->rope_block && part.begin < part.end) {
    part.block = (int)((part.begin + call->rope_first) / call->rope_block - call->rope_first / call->rope_block);
    int64_t sinks, recent, end = part.end;
    overlay_bounds(call, &call->key, part.b, &sinks, &recent);
    if (call->key.raw_window && recent < end) end = recent; /* no operand meets the overlay */
    const int last = (int)((end - 1 + call->rope_first) / call->rope_block - call->rope_first / call->rope_block);
    const int room = CHUNK * part.stride / dim, most = ARM ? 4 * MOST_ROWS : MOST_ROWS;
    make_operands(call, row, part.block, last - part.block + 1, operands, scores, room < most ? room : most);
    part.operands = operands;
  }
  for (int chunk = 0; chunk < group; chunk += CHUNK) {
    const int queries = group - chunk < CHUNK ? group - chunk : CHUNK;
    float *partial = call->partial + ((row * call->splits + part.split) * group + chunk) * (dim + 2);
    for (int g = 0; g < queries; g++) { /* a split without tokens: max S = -inf, sum P = 0 */
      partial[g * (dim + 2) + dim] = -INFINITY;
      partial[g * (dim + 2) + dim + 1] = 0.0f;
    }
    if (part.begin >= part.end) continue;
    split_scores(call, &part, chunk, queries, scores);
    for (int g = 0; g < queries; g++) {
      float *statistics = partial + g * (dim + 2) + dim;
      softmax_weights(call, scores + g * part.stride, (int)(part.end - part.begin), statistics, statistics + 1);
    }
    split_values(call, &part, queries, scores, out);
    for (int g = 0; g < queries; g++) memcpy(partial + g * (dim + 2), out + g * dim, sizeof(float) * (size_t)dim);
  }
}

/* Task: one (sequence, KV head). O = sum_i exp(m_i - m) O_i / sum_i exp(m_i - m) l_i over the splits i in order, with m_i = max S,
 * m = max_i m_i and l_i = sum P; then the inverse transform of the values, O A^-1 + mu. A sink logit s multiplies the result by the
 * share that tokens have of the softmax, exp(lse) / (exp(s) + exp(lse)): last, since mu belongs to weights that sum to one. */
static void NAME(merge)(const Decode *call, int64_t task, float *scratch) {
  const int dim = call->dim, group = call->group, head = (int)(task % call->heads);
  for (int chunk = 0; chunk < group; chunk += CHUNK) {
    const int queries = group - chunk < CHUNK ? group - chunk : CHUNK;
    float *out = scratch, *back = scratch + CHUNK * dim, share[CHUNK];
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
      float lse = total > 0.0f ? top + logf(total) : -INFINITY;
      share[g] = 1.0f;
      if (call->sink_logits) {
        const float sink = call->sink_logits[(int64_t)head * group + chunk + g];
        share[g] = total > 0.0f ? 1.0f / (1.0f + expf(sink - lse)) : 0.0f;
        if (sink > -INFINITY) lse = fmaxf(lse, sink) + log1pf(expf(-fabsf(lse - sink)));
      }
      if (call->lse) call->lse[task * group + chunk + g] = lse;
    }
    if (call->inverse) {
      times_matrix(queries, out, call->inverse + (int64_t)(head % call->inverse_heads) * dim * dim, dim, dim, back, dim);
      out = back;
    }
    for (int g = 0; g < queries; g++)
      for (int c = 0; c < dim; c++) {
        const float offset = call->inverse_offset ? call->inverse_offset[(int64_t)(head % call->offset_heads) * dim + c] : 0.0f;
        store_one(call->out, (task * group + chunk + g) * dim + c, call->type, (out[g * dim + c] + offset) * share[g]);
      }
  }
}
