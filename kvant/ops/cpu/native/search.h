/* Search for the nearest centroid: product quantization, and k-means of whole head vectors. */

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
INLINE void similarity(const int MANY, const int LENGTH, const float *quick, int count, int from, const float *x, vf *sum) {
  for (int k = 0; k < MANY; k++) sum[k] = load_floats(quick + (int64_t)LENGTH * count + from);
  for (int i = 0; i < LENGTH; i++) {
    const vf row = load_floats(quick + (int64_t)i * count + from);
    for (int k = 0; k < MANY; k++) sum[k] = fused(splat(x[k * LENGTH + i]), row, sum[k]);
  }
}

INLINE double exact_similarity(const double *columns, int length, int count, int centroid, const float *x) {
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
      similarity(1, LENGTH, quick, count, from, x, &sum);
      for (unsigned lanes = reaching(sum, least); lanes; lanes &= lanes - 1) {
        const int centroid = from + __builtin_ctz(lanes);
        if (found >= 0) {
          if (!several) best = exact_similarity(columns, LENGTH, count, found, x);
          several = 1;
          const double other = exact_similarity(columns, LENGTH, count, centroid, x);
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
      similarity(MANY, LENGTH, quick, count, from, x, sum);
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
        const double own = exact_similarity(columns, length, count, j, x);
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

static void encode_centroids(const Stream *s, const FusedTransform *transform, uint8_t *page_head, int head, int token, int dim, const float *x,
                             float *scratch) {
  const int length = s->extra, spaces = dim / length, count = 1 << s->book_bits, shared = s->books_spaces == 1;
  int found[128];
  for (int at = 0; at < (shared ? 1 : spaces); at++) {
    const int64_t start = ((int64_t)(head % s->books_heads) * s->books_spaces + at) * (length + 1) * count;
    all_nearest(transform->quick + start, transform->columns + start, length, count, shared ? spaces : 1, x + at * length, scratch, found + at);
  }
  for (int i = 0, shift = 0; i < s->sections; shift += s->section[i++].bits) {
    const int bits = s->section[i].bits;
    uint8_t *row = page_head + s->section[i].offset + (int64_t)token * spaces * bits / 8;
    memset(row, 0, (size_t)(spaces * bits / 8));
    for (int at = 0, bit = 0; at < spaces; at++, bit += bits)
      row[bit / 8] |= (uint8_t)((found[at] >> shift & ((1 << bits) - 1)) << bit % 8);
  }
}
