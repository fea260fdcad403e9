/* Compares the decode of neon.c with attention in double precision, and that of i8mm.c with neon.c bit by bit, on random pages.
 * test_i8mm.py compiles and runs it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvant.h"

#define TOKENS 300 /* more than four pages, the last one ragged */
#define PAGE 64
#define PAGES 5

static uint32_t state = 1;
static uint32_t random_bits(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static float random_float(void) { return (float)random_bits() / 0x1p23f - 1.0f; }
static uint16_t bfloat16(float x) { uint32_t bits; return memcpy(&bits, &x, 4), (uint16_t)(bits >> 16); }

typedef struct { int bits, first, width, shift; float alpha; } Plane;
typedef struct { int kind, planes, spans; Plane plane[4]; Span span[4]; } Form; /* of keys and of values */

/* Fills a stream, from byte `at` of a page on; returns the first byte after it. */
static int64_t place(Stream *s, const Form *form, int64_t at) {
  s->kind = form->kind, s->sections = form->planes, s->spans = form->spans;
  s->metas = 1, s->meta_fields = form->kind == SCALE_ALONE ? 1 : 2, s->meta_type = BFLOAT16, s->group_tokens = 1;
  for (int j = 0; j < form->planes; j++) {
    const Plane *plane = &form->plane[j];
    s->section[j] = (Section){at, plane->bits, plane->first, plane->width, plane->shift, plane->alpha};
    at += (int64_t)PAGE * plane->width * plane->bits / 8;
  }
  memcpy(s->span, form->span, sizeof form->span);
  s->meta_offset = at;
  return at + PAGE * 2 * s->meta_fields;
}

/* A matrix [dim, dim] as arm_matrix.h reads it, to limbs [2 dim dim] and scales [2, dim]: decode.py's matrix_limbs. */
static void split_matrix(const float *matrix, int dim, int8_t *limbs, float *scales) {
  double row[128] = {0}, column[128] = {0};
  for (int i = 0; i < dim * dim; i++) column[i % dim] = fmax(column[i % dim], fabs(matrix[i]));
  for (int i = 0; i < dim * dim; i++) row[i / dim] = fmax(row[i / dim], fabs(matrix[i]) / column[i % dim]);
  for (int i = 0; i < dim * dim; i++) {
    const int r = i / dim, c = i % dim, v = (int)lrint(matrix[i] / column[c] / row[r] * 32639.0), high = (v + 128) >> 8;
    int8_t *at = limbs + ((c / 8 * (dim / 4) + r / 4) * 2 * 8 + c % 8) * 4 + r % 4;
    at[0] = (int8_t)high, at[32] = (int8_t)(v - 256 * high);
  }
  for (int i = 0; i < dim; i++) scales[i] = (float)row[i], scales[dim + i] = (float)(column[i] / 32639.0);
}

/* Attention over the stored keys and values in double precision: out [heads * group, dim]. */
static void exact_decode(const Decode *call, int tokens, double *out) {
  const int dim = call->dim, heads = call->heads, half = call->rope_half;
  const size_t size = (size_t)tokens * heads * dim;
  float *rows[2];
  for (int side = 0; side < 2; side++) {
    Read read = {.stream = side ? call->value : call->key, .pages = call->pages, .block_table = call->batch->block_table, .last = tokens,
                 .page_head_bytes = call->page_head_bytes, .heads = heads, .dim = dim, .page_tokens = PAGE, .keys = !side};
    read.out = rows[side] = calloc(size, 4);
    for (int64_t task = 0; task < (tokens + PAGE - 1) / PAGE * heads; task++) KVANT_GENERIC.read(&read, task, NULL);
  }
  for (int i = 0; i < heads * call->group; i++) {
    const int head = i / call->group;
    double score[TOKENS], operand[256], offset = 0.0, top = -INFINITY, sum = 0.0;
    for (int t = 0; t < tokens; t++) {
      if (!call->rope_block ? !t : t % call->rope_block == 0) { /* the query as the keys of a RoPE block are stored, times the matrix */
        double q[256];
        offset = 0.0;
        for (int c = 0; c < dim; c++) q[c] = ((const float *)call->query)[i * dim + c];
        for (int c = 0; call->rope_block && c < half; c++) {
          const double a = call->cosine[t / call->rope_block * half + c], b = call->sine[t / call->rope_block * half + c];
          const double u = q[c], v = q[c + half];
          q[c] = u * a + v * b, q[c + half] = v * a - u * b;
        }
        for (int c = 0; c < dim; c++) {
          operand[c] = call->dual ? 0.0 : q[c];
          for (int d = 0; call->dual && d < dim; d++) operand[c] += q[d] * call->dual[(head * dim + d) * dim + c];
          if (call->use_mean_logit) offset += q[c] * call->mean_logit[head * dim + c];
        }
      }
      score[t] = offset;
      for (int c = 0; c < dim; c++) score[t] += operand[c] * rows[0][((size_t)t * heads + head) * dim + c];
      score[t] *= call->scale;
      top = fmax(top, score[t]);
    }
    for (int t = 0; t < tokens; t++) sum += exp(score[t] - top);
    for (int c = 0; c < dim; c++) out[i * dim + c] = 0.0;
    for (int t = 0; t < tokens; t++)
      for (int c = 0; c < dim; c++) out[i * dim + c] += exp(score[t] - top) / sum * rows[1][((size_t)t * heads + head) * dim + c];
  }
  free(rows[0]), free(rows[1]);
}

/* `stored`: channels of a head that have codes; the others are 0. `rotated`: keys are relative to RoPE blocks of 32 positions, behind a
 * matrix and with a mean removed; tokens of values whose scale is negative have a mean added. */
static int compare(const char *name, const Form *form, int dim, int stored, int group, int tokens, int rotated) {
  const int heads = 2, blocks = (tokens + 31) / 32;
  static Decode call;
  memset(&call, 0, sizeof call);
  call.page_head_bytes = place(&call.value, form, place(&call.key, form, 0));
  call.heads = heads, call.dim = dim, call.page_tokens = PAGE, call.split_tokens = rotated ? 512 : 128, call.longest_split = call.split_tokens;
  call.group = group, call.type = FLOAT32, call.scale = 0.01f, call.splits = (tokens + call.split_tokens - 1) / call.split_tokens;
  call.operand_stride = (dim + 2 + 2 * call.key.spans + dim / 2 + 15) / 16 * 16;
  const size_t bytes = (size_t)call.page_head_bytes * heads * PAGES, size = (size_t)heads * group * dim;
  call.pages = malloc(bytes);
  for (size_t i = 0; i < bytes; i++) call.pages[i] = (uint8_t)random_bits();
  for (int page = 0; page < PAGES * heads; page++) /* scales that are numbers */
    for (int side = 0; side < 2; side++) {
      const Stream *s = side ? &call.value : &call.key;
      uint16_t *meta = (uint16_t *)(call.pages + page * call.page_head_bytes + s->meta_offset);
      for (int i = 0; i < PAGE * s->meta_fields; i++) meta[i] = bfloat16(i < PAGE ? 0.05f + fabsf(random_float()) : 3.0f * random_float());
      for (int i = 0; rotated && side && i < PAGE; i += 3) meta[i] |= 0x8000;
    }
  const int64_t table[PAGES] = {3, 0, 4, 1, 2}, length = tokens, zero = 0;
  Batch batch = {.block_table = table, .seq_lens = &length, .overlay_rows = &zero, .sinks = &zero, .width = PAGES, .count = 1};
  float *query = malloc(size * 4), *out[2], *scratch = calloc(1 << 18, 4);
  float *tables = malloc((size_t)(heads * dim * (dim + 2) + blocks * dim) * 4), *at = tables;
  for (int i = 0; i < heads * dim * (dim + 2); i++) tables[i] = random_float() * (i < heads * dim * dim ? 0.2f : 1.0f);
  int8_t *limbs = malloc((size_t)(heads * 2 * dim * dim));
  float *scales = malloc((size_t)(heads * 2 * dim) * 4);
  if (rotated) {
    call.dual = at, at += heads * dim * dim, call.dual_heads = heads;
    call.mean_logit = at, at += heads * dim, call.use_mean_logit = 1;
    for (int i = 0; i < heads * dim; i++) at[i] = i % dim < stored ? at[i] : 0.0f; /* a mean has the channels that are stored */
    call.value.mean = at, at += heads * dim;
    call.cosine = at, call.sine = at + blocks * dim / 2, call.rope_block = 32, call.rope_half = dim / 2;
    call.dual_limbs = limbs, call.dual_scales = scales;
    for (int head = 0; head < heads; head++)
      split_matrix(call.dual + head * dim * dim, dim, limbs + head * 2 * dim * dim, scales + head * 2 * dim);
    for (int i = 0; i < blocks * dim / 2; i++) {
      const double angle = i / (dim / 2) * 32 * pow(10000.0, -2.0 * (i % (dim / 2)) / dim);
      at[i] = (float)cos(angle), at[blocks * dim / 2 + i] = (float)sin(angle);
    }
  }
  for (size_t i = 0; i < size; i++) query[i] = random_float();
  call.batch = &batch, call.query = query;
  call.operands = calloc((size_t)(heads * group * call.operand_stride), 4);
  call.partial = calloc((size_t)(heads * call.splits * group * (dim + 2)), 4);
  double *exact = malloc(size * 8);
  exact_decode(&call, tokens, exact);
  const Isa *isa[2] = {&KVANT_NEON, &KVANT_I8MM};
  for (int i = 0; i < 2; i++) {
    call.out = out[i] = calloc(size, 4);
    for (int64_t task = 0; task < heads && !rotated; task++) isa[i]->prepare(&call, task, scratch);
    for (int64_t task = 0; task < heads * call.splits; task++) isa[i]->split(&call, task, scratch);
    for (int64_t task = 0; task < heads; task++) isa[i]->merge(&call, task, scratch);
  }
  int differ = 0, numbers = 0;
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < size; i++) {
    differ += memcmp(out[0] + i, out[1] + i, 4) != 0, numbers += isfinite(out[0][i]) && out[0][i] != 0.0f;
    error += pow(out[0][i] - exact[i], 2), norm += pow(exact[i], 2);
  }
  error = sqrt(error / norm);
  const int right = !differ && error < 2e-4 && numbers == heads * group * stored;
  printf("%s%s, head dim %d, %d queries, %d tokens: %d of %d differ, %d are numbers other than 0, error %.1e\n", name,
         rotated ? " in RoPE blocks" : "", dim, group, tokens, differ, (int)size, numbers, error);
  free(call.pages), free(query), free(out[0]), free(out[1]), free(tables), free(limbs), free(scales), free(exact), free(scratch), free(call.operands), free(call.partial);
  return right;
}

int main(void) {
  int right = 1;
  for (int dim = 32; dim <= 128; dim += 32)
    for (int group = 1; group <= 5; group++) {
      const int q = dim / 4;
      const Form int4 = {SCALE_ZERO, 1, 1, {{4, 0, dim, 0, 1.0f}}, {{0, dim, 0, 4, 1.0f, 0.0f}}};
      const Form int2 = {SCALE_MIN, 1, 1, {{2, 0, dim, 0, 1.0f}}, {{0, dim, 0, 2, 1.0f, 0.0f}}};
      const Form int8 = {SCALE_MIN, 1, 1, {{8, 0, dim, 0, 1.0f}}, {{0, dim, 0, 8, 1.0f, 0.0f}}};
      const Form int3 = {SCALE_ZERO, 2, 1, {{2, 0, dim, 0, 1.0f}, {1, 0, dim, 2, 4.0f}}, {{0, dim, 0, 3, 1.0f, 0.0f}}};
      const Form bands = {SCALE_ALONE, 2, 2, {{4, 0, q, 0, 0.3f}, {2, q, 2 * q, 0, 1.0f}}, {{0, q, 0, 4, 0.3f, -2.5f}, {q, 3 * q, 0, 2, 1.0f, -1.5f}}};
      right &= compare("int4", &int4, dim, dim, group, TOKENS, 0) & compare("int2", &int2, dim, dim, group, TOKENS - 7, 0);
      right &= compare("int8", &int8, dim, dim, group, TOKENS - 63, 0) & compare("int3", &int3, dim, dim, group, 70, 0);
      right &= compare("bands", &bands, dim, 3 * q, group, TOKENS, 0) & compare("bands", &bands, dim, 3 * q, group, TOKENS, 1);
      right &= compare("int4", &int4, dim, dim, group, TOKENS - 44, 1);
    }
  puts(right ? "the same bits" : "DIFFERENT");
  return !right;
}
