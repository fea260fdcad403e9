/* Decode on ARM: products of the codes of a page with limbs, for sections whose channels share a scale. */

/* What the sums of a section start from. sdot multiplies signed bytes, so that a code c of eight bits is c - 128 (plane_codes), and
 * 128 times the sum of the limbs is to be added. */
INLINE int32x4_t first_sum(const int BITS, const int8_t *limbs, int count) {
  int sum = 0;
  if (BITS == 8 && !MATRIX)
    for (int i = 0; i < count; i++) sum += limbs[i];
  return vdupq_n_s32(128 * sum);
}

/* Keys of VECTORS * LANE_COUNT tokens: the codes of all planes of a section, where `base` are the first bytes of these tokens, times
 * limbs of QUERIES queries. `ahead`: where it is not 0, the bytes so far ahead, of the next page, are prefetched. */
INLINE void key_sums(const int QUERIES, const int VECTORS, const int BITS, const uint8_t *base, int bytes, int64_t ahead,
                     const int8_t *const *high, const int8_t *const *low, int32x4_t (*one)[CHUNK], int32x4_t (*two)[CHUNK]) {
#define WORDS(count, slot)                                                                                       \
  {                                                                                                              \
    const uint8_t *at[4];                                                                                        \
    for (int k = 0; k < VECTORS; k++) at[k] = base + c * LANES + k * BYTES;                                      \
    if (slot == 0 && ahead)                                                                                      \
      for (int i = 0; i < count; i++) __builtin_prefetch(at[0] + i * 4 * LANES + ahead);                         \
    add_words(QUERIES, VECTORS, count, BITS, slot, 0, at, 4 * LANES, high, low, slot * bytes + c, one, two);     \
  }
#define PLANE(slot)                                \
  if (slot < 8 / BITS) {                           \
    int c = 0;                                     \
    for (; c + 16 <= bytes; c += 16) WORDS(4, slot) \
    for (; c + 8 <= bytes; c += 8) WORDS(2, slot)  \
    for (; c < bytes; c += 4) WORDS(1, slot)       \
  }
  PLANE(0) PLANE(1) PLANE(2) PLANE(3) PLANE(4) PLANE(5) PLANE(6) PLANE(7)
#undef PLANE
#undef WORDS
}

/* Keys of tokens [from, to) of a page: 128 high + low sums of a section, sums[query * 128 + token]. */
INLINE void page_key_sums(const int QUERIES, const int BITS, const Section *section, const uint8_t *page_head, int64_t ahead, int from, int to,
                          const QueryOperand *query, int32_t *sums) {
  const int VECTORS = QUERIES > 2 ? 2 : 4, bytes = section->width * BITS / 8; /* as many as there are registers for their sums */
  const int8_t *high[CHUNK], *low[CHUNK];
  int32x4_t start[2][CHUNK];
  for (int g = 0; g < QUERIES; g++) {
    high[g] = query[g].high + section->first, low[g] = query[g].low + section->first;
    start[0][g] = first_sum(BITS, high[g], section->width), start[1][g] = first_sum(BITS, low[g], section->width);
  }
  for (int token = from / (4 * VECTORS) * 4 * VECTORS; token < to; token += 4 * VECTORS) {
    int32x4_t one[4][CHUNK], two[4][CHUNK];
    for (int k = 0; k < VECTORS; k++)
      for (int g = 0; g < QUERIES; g++) one[k][g] = start[0][g], two[k][g] = start[1][g];
    key_sums(QUERIES, VECTORS, BITS, page_head + section->offset + key_place(bytes, token, 0), bytes, token % LANES ? 0 : ahead, high, low,
             one, two);
    for (int g = 0; g < QUERIES; g++)
      for (int k = 0; k < VECTORS; k++) vst1q_s32(sums + g * 128 + token + 4 * k, joined(one[k][g], two[k][g]));
  }
}

/* Values: planes SLOT and SLOT + 1 of a section (the second of two planes of eight bits is not there), LANE_COUNT channels of each at a
 * time. out[query * dim + channel] += unit[query] * (128 high + low sums) over the tokens of quads [quad, quads). */
INLINE void value_planes(const int QUERIES, const int BITS, const int SLOT, const uint8_t *base, int bytes, int64_t ahead, int quad, int quads,
                         const int8_t (*high)[128], const int8_t (*low)[128], const float *unit, float *out, int dim) {
  const int PLANES = BITS == 8 ? 1 : 2;
  const int64_t stride = 4 * (int64_t)bytes;
  const int8_t *upper[CHUNK], *lower[CHUNK];
  int32x4_t start[2][CHUNK];
  for (int g = 0; g < QUERIES; g++) {
    upper[g] = high[g], lower[g] = low[g];
    start[0][g] = first_sum(BITS, upper[g] + 4 * quad, 4 * (quads - quad)), start[1][g] = first_sum(BITS, lower[g] + 4 * quad, 4 * (quads - quad));
  }
  for (int c = 0; c < bytes; c += LANE_COUNT, base += BYTES) {
    int32x4_t one[2][CHUNK], two[2][CHUNK];
    for (int k = 0; k < PLANES; k++)
      for (int g = 0; g < QUERIES; g++) one[k][g] = start[0][g], two[k][g] = start[1][g];
    const int fetched = SLOT == 0 && c % 16 == 0 && ahead; /* once for every cache line */
    int i = quad;
    for (; i + 4 <= quads; i += 4) {
      const uint8_t *at[2] = {base + i * stride, base + i * stride};
      if (fetched)
        for (int j = 0; j < 4; j++) __builtin_prefetch(at[0] + j * stride + ahead);
      add_words(QUERIES, PLANES, 4, BITS, SLOT, 1, at, stride, upper, lower, 4 * i, one, two);
    }
    for (; i < quads; i++) {
      const uint8_t *at[2] = {base + i * stride, base + i * stride};
      add_words(QUERIES, PLANES, 1, BITS, SLOT, 1, at, stride, upper, lower, 4 * i, one, two);
    }
    for (int g = 0; g < QUERIES; g++)
      for (int k = 0; k < PLANES; k++) {
        float *to = out + g * dim + (SLOT + k) * bytes + c;
        store_floats(to, fused(splat(unit[g]), floats((vi)joined(one[k][g], two[k][g])), load_floats(to)));
      }
  }
}

/* Whether all sections of a stream are such: the channels of each are in one span, and every span has one. */
INLINE int by_sections(const Stream *s) {
  uint64_t found = 0;
  for (int j = 0; j < s->sections; j++) {
    const Section *section = &s->section[j];
    int i = 0;
    while (i < s->spans && !(s->span[i].first <= section->first && section->first + section->width <= s->span[i].end)) i++;
    if (i == s->spans || section->width * section->bits / 8 % 4) return 0;
    found |= 1ull << i;
  }
  return s->spans < 64 && found == (1ull << s->spans) - 1;
}
