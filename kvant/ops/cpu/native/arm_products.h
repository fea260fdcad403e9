/* Decode on ARM: products of the codes of a page with limbs, for sections whose channels share a scale. */

#define MOST_LIMBS 256 /* vectors of limbs: CHUNK queries, 256 channels in planes of which each may end with a single word */

/* What the sums of a section start from, for `joined`. sdot multiplies signed bytes, so that a code c of eight bits is c - 128
 * (plane_codes), and 128 times the sum of the limbs is to be added. */
INLINE int32x4_t first_sum(const int BITS, const int8_t *high, const int8_t *low, int count, int32x4_t *two) {
  int upper = 0, lower = 0;
  for (int i = 0; BITS == 8 && !MATRIX && i < count; i++) upper += high[i], lower += low[i];
  *two = vdupq_n_s32(ROUNDER_BITS + 128 * lower);
  return vdupq_n_s32(ROUNDER_BITS + 128 * upper);
}

/* Keys of VECTORS * LANE_COUNT tokens, whose first bytes are at `base`: codes of all planes of a section times limbs. Of the lines of the next page,
 * every other one from `next` on is prefetched, or with VECTORS = 4 every one. */
INLINE void key_sums(const int QUERIES, const int VECTORS, const int BITS, const uint8_t *base, int bytes, const uint8_t *next,
                     const int8x16_t *limbs, int32x4_t (*one)[CHUNK], int32x4_t (*two)[CHUNK]) {
#define PLANE(count, slot)                                                                  \
  {                                                                                         \
    add_words(QUERIES, VECTORS, count, BITS, slot, 0, 0, at, 4 * LANES, limbs, one, two);   \
    limbs += QUERIES;                                                                       \
  }
#define PLANES(count)                                                                       \
  if (BITS == 1) {                                                                          \
    for (int slot = 0; slot < 8; slot++) PLANE(count, slot)                                 \
  } else {                                                                                  \
    PLANE(count, 0)                                                                         \
    if (BITS < 8) PLANE(count, 1)                                                           \
    if (BITS < 4) PLANE(count, 2)                                                           \
    if (BITS < 4) PLANE(count, 3)                                                           \
  }
  for (int c = 0; c < bytes; c += 8) {
    const uint8_t *at[4];
    for (int k = 0; k < VECTORS; k++) at[k] = base + c * LANES + k * BYTES;
    __builtin_prefetch(next + c * LANES);
    if (VECTORS == 4) __builtin_prefetch(next + (c + 4) * LANES);
    if (c + 8 <= bytes)
      PLANES(2)
    else
      PLANES(1)
  }
#undef PLANES
#undef PLANE
}

/* Vectors of limbs of a section: for every eight bytes of a token and for each plane, two words of four channels of every query. */
INLINE int section_limbs(const Section *section, int queries) {
  return 8 / section->bits * ((section->width * section->bits / 8 + 7) / 8) * queries;
}

/* Limbs of a chunk of queries, section after section. */
static void pack_limbs(const Stream *s, int queries, const QueryOperand *query, int8x16_t *limbs) {
  for (int j = 0; j < s->sections; j++) {
    const Section *section = &s->section[j];
    const int bytes = section->width * section->bits / 8;
    for (int c = 0; c < bytes; c += 8)
      for (int slot = 0; slot < 8 / section->bits; slot++)
        for (int g = 0, channel = section->first + slot * bytes + c; g < queries; g++)
          *limbs++ = limb_pair(query[g].high + channel, query[g].low + channel, bytes - c < 8);
  }
}

/* Keys of tokens [from, to) of a page: 128 high + low sums of a section, sums[query * 128 + token]. Lines of the next page, `ahead` bytes
 * from this one, are prefetched between products, so that none waits for many others. */
INLINE void page_key_sums(const int QUERIES, const int BITS, const Section *section, const uint8_t *page_head, int64_t ahead, int from, int to,
                          const QueryOperand *query, const int8x16_t *limbs, float *sums) {
  const int VECTORS = QUERIES > 2 ? 2 : 4, bytes = section->width * BITS / 8; /* as many as there are registers for their sums */
  int32x4_t first[2][CHUNK];
  for (int g = 0; g < QUERIES; g++)
    first[0][g] = first_sum(BITS, query[g].high + section->first, query[g].low + section->first, section->width, &first[1][g]);
  for (int token = from / (4 * VECTORS) * 4 * VECTORS; token < to; token += 4 * VECTORS) {
    const uint8_t *base = page_head + section->offset + key_place(bytes, token, 0);
    const uint8_t *next = base - token % LANES * 4 + ahead + token % LANES / 8 * (4 * LANES);
    int32x4_t one[4][CHUNK], two[4][CHUNK];
    for (int k = 0; k < VECTORS; k++)
      for (int g = 0; g < QUERIES; g++) one[k][g] = first[0][g], two[k][g] = first[1][g];
    key_sums(QUERIES, VECTORS, BITS, base, bytes, next, limbs, one, two);
    for (int g = 0; g < QUERIES; g++)
      for (int k = 0; k < VECTORS; k++) store_floats(sums + g * 128 + token + 4 * k, joined(128.0f, one[k][g], two[k][g]));
  }
}

/* Pages whose values are multiplied together, with one scale of the weights of a query: a run. */
#define RUN_TOKENS 256 /* at most; so that |sum| <= 2^22 for `joined`: 256 limbs of at most 128 times codes in place of at most 64 */
#define BYTE_TOKENS 128 /* the same where codes have eight bits: 128 * 128 * 255 */
#define RUN_PAGES 16
typedef struct {
  const uint8_t *page_head[RUN_PAGES];
  int64_t ahead[RUN_PAGES]; /* bytes from each page to the one whose lines are prefetched meanwhile; 0: none */
  int pages;
} PageRun;

/* Values: planes SLOT and SLOT + 1 of a section, or the one plane of eight bits, LANE_COUNT channels of each at a time.
 * out[query * dim + channel] += unit[query] * (256 high + low sums) over the tokens of quads [quad, quads) of all pages, with their limbs.
 * Where there are several pages, their quads are a multiple of four. */
INLINE void value_planes(const int QUERIES, const int BITS, const int SLOT, const Section *section, const PageRun *run, int quad, int quads,
                         const int8x16_t *limbs, const int32x4_t (*first)[CHUNK], const float *unit, float *out, int dim) {
  const int PLANES = BITS == 8 ? 1 : 2, bytes = section->width * BITS / 8;
  const int64_t stride = 4 * (int64_t)bytes;
  float factor[2][CHUNK] = {{0.0f}};
  for (int k = 0; k < PLANES; k++)
    for (int g = 0; g < QUERIES; g++) factor[k][g] = unit[g] / (float)(1 << bits_above(BITS, SLOT + k));
  for (int c = 0; c < bytes; c += LANE_COUNT) {
    int32x4_t one[2][CHUNK], two[2][CHUNK];
    const int8x16_t *numbers = limbs;
    for (int k = 0; k < PLANES; k++)
      for (int g = 0; g < QUERIES; g++) one[k][g] = first[0][g], two[k][g] = first[1][g];
    for (int page = 0; page < run->pages; page++) {
      const uint8_t *base = run->page_head[page] + section->offset + quad * stride + 4 * c;
      const uint8_t *at[2] = {base, base}, *next = base + c / 4 % 4 * stride + (4 * c + 64 < stride ? 64 : run->ahead[page] - 4 * c / 64 * 64);
      int i = quad;
      for (; i + 4 <= quads; i += 4, numbers += 2 * QUERIES, at[0] += 4 * stride, at[1] = at[0], next += 4 * stride) {
        if (SLOT == 0) __builtin_prefetch(next);
        add_words(QUERIES, PLANES, 4, BITS, SLOT, 1, 1, at, stride, numbers, one, two);
      }
      for (; i + 2 <= quads; i += 2, numbers += QUERIES, at[0] += 2 * stride, at[1] = at[0])
        add_words(QUERIES, PLANES, 2, BITS, SLOT, 1, 1, at, stride, numbers, one, two);
      if (i < quads) add_words(QUERIES, PLANES, 1, BITS, SLOT, 1, 1, at, stride, numbers, one, two);
    }
    for (int g = 0; g < QUERIES; g++)
      for (int k = 0; k < PLANES; k++) {
        float *to = out + g * dim + (SLOT + k) * bytes + c;
        store_floats(to, fused(splat(factor[k][g]), joined(256.0f, one[k][g], two[k][g]), load_floats(to)));
      }
  }
}

/* All planes of a section. limbs: pairs of the tokens of quads [quad, quads) of all pages, those of every query. */
INLINE void run_value_sums(const int QUERIES, const int BITS, const Section *section, const PageRun *run, int quad, int quads,
                           const int8x16_t *limbs, const float *unit, float *out, int dim) {
  int32x4_t first[2][CHUNK];
  for (int g = 0; g < QUERIES; g++) {
    int8_t pair[16], high[RUN_TOKENS], low[RUN_TOKENS];
    int count = 0;
    for (int i = 0; BITS == 8 && i < (quads - quad) * run->pages; i += 2, count += 8) {
      vst1q_s8(pair, limbs[i / 2 * QUERIES + g]);
      memcpy(high + count, pair, 8), memcpy(low + count, pair + 8, 8);
    }
    first[0][g] = first_sum(BITS, high, low, count, &first[1][g]);
  }
  if (BITS == 1)
    for (int slot = 0; slot < 8; slot += 2) value_planes(QUERIES, BITS, slot, section, run, quad, quads, limbs, first, unit, out, dim);
  else
    value_planes(QUERIES, BITS, 0, section, run, quad, quads, limbs, first, unit, out, dim);
  if (BITS == 2) value_planes(QUERIES, BITS, 2, section, run, quad, quads, limbs, first, unit, out, dim);
}

/* The two of them for every number of queries and of bits, each a function of its own, for which GCC finds enough registers. */
#define SUMS(queries, bits)                                                                                                         \
  static __attribute__((noinline)) void key_sums_##queries##_##bits(const Section *section, const uint8_t *page_head, int64_t ahead, \
                                                                    int from, int to, const QueryOperand *query,                    \
                                                                    const int8x16_t *limbs, float *sums) {                          \
    page_key_sums(queries, bits, section, page_head, ahead, from, to, query, limbs, sums);                                          \
  }                                                                                                                                 \
  static __attribute__((noinline)) void value_sums_##queries##_##bits(const Section *section, const PageRun *run, int quad, int quads, \
                                                                      const int8x16_t *limbs, const float *unit, float *out, int dim) { \
    run_value_sums(queries, bits, section, run, quad, quads, limbs, unit, out, dim);                                                \
  }
#define ALL_SUMS(queries) SUMS(queries, 1) SUMS(queries, 2) SUMS(queries, 4) SUMS(queries, 8)
ALL_SUMS(1) ALL_SUMS(2) ALL_SUMS(3) ALL_SUMS(4)
#define NAMES(kind, queries) {kind##queries##_1, kind##queries##_2, kind##queries##_4, kind##queries##_8}
typedef void (*KeySums)(const Section *, const uint8_t *, int64_t, int, int, const QueryOperand *, const int8x16_t *, float *);
typedef void (*ValueSumsOf)(const Section *, const PageRun *, int, int, const int8x16_t *, const float *, float *, int);
static const KeySums KEY_SUMS[CHUNK][4] = {NAMES(key_sums_, 1), NAMES(key_sums_, 2), NAMES(key_sums_, 3), NAMES(key_sums_, 4)};
static const ValueSumsOf VALUE_SUMS[CHUNK][4] = {NAMES(value_sums_, 1), NAMES(value_sums_, 2), NAMES(value_sums_, 3), NAMES(value_sums_, 4)};
#undef NAMES
#undef ALL_SUMS
#undef SUMS

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
  return s->spans < MAX_SPANS && found == (1ull << s->spans) - 1;
}
