/* Search for the nearest centroid: product quantization, and k-means of whole head vectors.
 *
 * argmin |x - c|^2 = argmax x . c - |c|^2 / 2. Centroids are stored transposed, [length + 1, count], where the last row is
 * -|c|^2 / 2, so that a lane is a centroid. The search is in float; near ties are decided in double. */

#define CENTROID_TILE (8 * LANE_COUNT) /* centroids of which the maximum is stored per lane */
#define VECTORS_AT_ONCE 8           /* sub-vectors that are searched together, so that centroids are loaded once */

/* Lower bound of the float similarity of the centroid that is best in double, where `most` is the largest float similarity. The
 * rounding error is a few units in the last place of the terms, which are of the size of |x|^2 and |most|. */
INLINE float near_tie_bound(float most, const float *x, int length) {
  float size = 0.0f;
  for (int i = 0; i < length; i++) size += x[i] * x[i];
  return most - (0x1p-18f * (size + fabsf(most)) + 0x1p-120f);
}

/* sum[k][lane] = x_k . c - |c|^2 / 2 of LANE_COUNT centroids from `from` on, for vectors x: [VECTORS, LENGTH]. */
INLINE void similarity(const int VECTORS, const int LENGTH, const float *columns_f32, int count, int from, const float *x, vf *sum) {
  for (int k = 0; k < VECTORS; k++) sum[k] = load_floats(columns_f32 + (int64_t)LENGTH * count + from);
  for (int i = 0; i < LENGTH; i++) {
    const vf row = load_floats(columns_f32 + (int64_t)i * count + from);
    for (int k = 0; k < VECTORS; k++) sum[k] = fused(splat(x[k * LENGTH + i]), row, sum[k]);
  }
}

INLINE double exact_similarity(const double *columns_f64, int length, int count, int centroid, const float *x) {
  double sum = 0.0;
  for (int i = 0; i < length; i++) sum += (double)x[i] * columns_f64[(int64_t)i * count + centroid];
  return sum + columns_f64[(int64_t)length * count + centroid];
}

/* Index of the centroid with the largest x . c - |c|^2 / 2; the lowest index of equals. `tile_max` [tiles, VECTORS, LANE_COUNT]
 * starts at this vector's row: the float maximum of every lane of every tile. Tiles below the near-tie bound are skipped; where
 * several centroids reach the bound, double decides. */
INLINE int nearest_of(const int VECTORS, const int LENGTH, const float *columns_f32, const double *columns_f64, int count, const float *x,
                      const float *tile_max, float most) {
  const float least = near_tie_bound(most, x, LENGTH);
  double best = -INFINITY;
  int found = -1, several = 0;
  for (int start = 0; start < count; start += CENTROID_TILE, tile_max += VECTORS * LANE_COUNT) {
    if (!lanes_at_least(load_floats(tile_max), least)) continue;
    for (int from = start; from < start + CENTROID_TILE && from < count; from += LANE_COUNT) {
      vf sum;
      similarity(1, LENGTH, columns_f32, count, from, x, &sum);
      for (unsigned lanes = lanes_at_least(sum, least); lanes; lanes &= lanes - 1) {
        const int centroid = from + __builtin_ctz(lanes);
        if (found >= 0) {
          if (!several) best = exact_similarity(columns_f64, LENGTH, count, found, x);
          several = 1;
          const double other = exact_similarity(columns_f64, LENGTH, count, centroid, x);
          if (!(other > best)) continue;
          best = other;
        }
        found = centroid;
      }
    }
  }
  return found < 0 ? 0 : found;
}

/* Indices of the nearest centroids of vectors x: [VECTORS, LENGTH]. `tile_max` is scratch, [tiles, VECTORS, LANE_COUNT]. */
INLINE void nearest(const int VECTORS, const int LENGTH, const float *columns_f32, const double *columns_f64, int count, const float *x, float *tile_max,
                    int *out) {
  vf most[VECTORS_AT_ONCE];
  for (int k = 0; k < VECTORS; k++) most[k] = splat(-INFINITY);
  for (int start = 0; start < count; start += CENTROID_TILE) {
    vf best[VECTORS_AT_ONCE], sum[VECTORS_AT_ONCE];
    for (int k = 0; k < VECTORS; k++) best[k] = splat(-INFINITY);
    for (int from = start; from < start + CENTROID_TILE && from < count; from += LANE_COUNT) {
      similarity(VECTORS, LENGTH, columns_f32, count, from, x, sum);
      for (int k = 0; k < VECTORS; k++) best[k] = highest(sum[k], best[k]);
    }
    for (int k = 0; k < VECTORS; k++) {
      store_floats(tile_max + (start / CENTROID_TILE * VECTORS + k) * LANE_COUNT, best[k]);
      most[k] = highest(best[k], most[k]);
    }
  }
  for (int k = 0; k < VECTORS; k++)
    out[k] = nearest_of(VECTORS, LENGTH, columns_f32, columns_f64, count, x + k * LENGTH, tile_max + k * LANE_COUNT, max_of(most[k]));
}

/* The same for any number of vectors, x: [vectors, length]. */
static void all_nearest(const float *columns_f32, const double *columns_f64, int length, int count, int vectors, const float *x, float *tile_max, int *out) {
  for (int now; vectors; vectors -= now, x += now * length, out += now) {
    now = vectors >= VECTORS_AT_ONCE && (length == 2 || length == 4 || length == 8) ? VECTORS_AT_ONCE : 1;
    if (count % LANE_COUNT) { /* a codebook that does not fill whole vectors of lanes */
      double best = -INFINITY;
      *out = 0, now = 1;
      for (int j = 0; j < count; j++) {
        const double found = exact_similarity(columns_f64, length, count, j, x);
        if (found > best) best = found, *out = j;
      }
    } else {
      switch (now == 1 ? 0 : length) {
        case 2: nearest(VECTORS_AT_ONCE, 2, columns_f32, columns_f64, count, x, tile_max, out); break;
        case 4: nearest(VECTORS_AT_ONCE, 4, columns_f32, columns_f64, count, x, tile_max, out); break;
        case 8: nearest(VECTORS_AT_ONCE, 8, columns_f32, columns_f64, count, x, tile_max, out); break;
        default: nearest(1, length, columns_f32, columns_f64, count, x, tile_max, out);
      }
    }
  }
}

/* Writes the indices of a token's nearest centroids, [dim / subvector_dim], into the planes of its page. */
static void encode_centroids(const Stream *s, const FusedTransform *transform, uint8_t *page_head, int head, int token, int dim, const float *x,
                             float *scratch) {
  const int length = s->subvector_dim, subvectors = dim / length, count = 1 << s->book_bits, shared = s->books_subvectors == 1;
  int found[128];
  for (int at = 0; at < (shared ? 1 : subvectors); at++) {
    const int64_t start = ((int64_t)(head % s->books_heads) * s->books_subvectors + at) * (length + 1) * count;
    all_nearest(transform->columns_f32 + start, transform->columns_f64 + start, length, count, shared ? subvectors : 1, x + at * length, scratch, found + at);
  }
  for (int i = 0, shift = 0; i < s->sections; shift += s->section[i++].bits) {
    const int bits = s->section[i].bits;
    uint8_t *row = page_head + s->section[i].offset + (int64_t)token * subvectors * bits / 8;
    memset(row, 0, (size_t)(subvectors * bits / 8));
    for (int at = 0, bit = 0; at < subvectors; at++, bit += bits)
      row[bit / 8] |= (uint8_t)((found[at] >> shift & ((1 << bits) - 1)) << bit % 8);
  }
}
