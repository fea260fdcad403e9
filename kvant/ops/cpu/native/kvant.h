/* What Python hands to the compiled operations. The structures are mirrored, field by field, in ../structures.py. */
#ifndef KVANT_H
#define KVANT_H

#include <stdint.h>

#define MAX_SECTIONS 8
#define MAX_SPANS 64
#define CHECKED 64 /* tokens that a task of `check` looks at */
#define LANES 16 /* tokens of a tile of keys, see the order "lanes" in layout.py */

enum { FLOAT32, BFLOAT16, FLOAT16 };
/* How the elements of a stream are stored; structures.py says what each is. */
enum { SCALE_MIN, SCALE_ZERO, SCALE_ALONE, CHANNEL, BOOSTED, CENTROIDS, RAW, LEVELS };

/* One plane of the codes of some channels. A code adds alpha * code to an element's value over its scale. */
typedef struct {
  int64_t offset;                    /* bytes from the start of the page of a head */
  int32_t bits, first, width, shift; /* first channel, channels; shift: of this plane inside its code */
  float alpha;
} Section;

/* Channels [first, end) that share a scale and a width of codes: x = scale * (step * code + center). */
typedef struct {
  int32_t first, end, meta, bits; /* meta: which scale of a token */
  float step, center;
} Span;

/* Keys or values of one layer, as they are in pages and in overlays. */
typedef struct {
  int32_t kind, sections, spans, metas, names, meta_type; /* metas: scales of a token; names: 1, or 2 with minima or zeros */
  int32_t sink, ring, flush, recent;                      /* the recipe's window */
  int32_t overlay_tokens, group_tokens;                   /* full-precision tokens of a sequence; tokens that are coded together */
  int32_t extra, books_heads, books_spaces, book_bits;    /* boosted channels, or channels of a sub-vector; codebooks */
  int32_t centers, index_bits;                            /* centroids of whole head vectors, 0 where there are none; bits of their index */
  int64_t meta_offset, high_offset, index_offset;         /* bytes from the start of the page of a head */
  const float *mean;         /* [heads, dim], added to tokens whose scale is negative; or NULL */
  const float *books;        /* centroids, [heads or 1, spaces or 1, 2^bits, length]; or centers, [heads or 1, centers, dim] */
  const float *levels;       /* [16], kind LEVELS: x = scale * levels[code] */
  void *overlay;             /* [overlay rows, overlay_tokens, heads, dim] */
  const int64_t *ring_start; /* [sequences] */
  Section section[MAX_SECTIONS];
  Span span[MAX_SPANS];
} Stream;

/* A PagedBatch: the same for all layers of a step. */
typedef struct {
  const int64_t *table, *seq_lens, *overlay_rows, *sinks, *slot_mapping, *query_start_loc;
  const int64_t *ring_start[2]; /* of keys and values */
  int64_t width, count;         /* pages of a row of the table; sequences */
} Batch;

typedef struct {
  Stream key, value;
  const float *dual, *inverse, *inverse_offset, *mean_logit; /* [1 or heads, dim, dim] twice, [1 or heads, dim], [heads, dim] */
  int64_t page_head_bytes;
  int32_t heads, dim, page_tokens, origin, overlay_type; /* origin: position of the first token of the first page */
  int32_t dual_heads, inverse_heads, offset_heads;       /* 1, or heads */
  int32_t rope_half, rope_block, rope_first;             /* rotated pairs of channels; positions of a RoPE block, or 0; first position */
  int32_t split_tokens, longest_split;
  /* from here on, filled anew at every call */
  const Batch *batch;
  const void *query; /* [sequences, heads * group, dim] */
  void *out;         /* the same */
  float *lse;        /* [sequences, heads * group] */
  uint8_t *pages;    /* [pages, heads, page_head_bytes] */
  void *overlay[2];  /* of keys and values */
  const float *cosine, *sine; /* [RoPE blocks, rope_half] */
  float *operands;   /* query operands, operand_stride floats each; unused with RoPE blocks, where a split makes its own */
  float *tables;     /* products of queries with centroids, CHUNK queries side by side */
  float *partial;    /* [sequences * heads, splits, group, dim + 2]: O, then max and sum of the softmax */
  int64_t operand_stride;
  int32_t group, type, splits, sliding_window, use_mean_logit; /* group: query heads of a KV head; sliding_window: 0 is none */
  float scale, softcap; /* softcap: 0 is none */
} Decode;

/* How vectors are transformed before they are stored: unrotated, a mean off, then a Hadamard transform or a matrix; and how codes are
 * chosen. */
typedef struct {
  const float *mean;     /* [heads, dim] */
  const float *signs;    /* [dim], before the Hadamard */
  const void *matrix;    /* [1 or heads, dim, dim], of floats where those are exact, else of doubles */
  const double *offset;  /* [1 or heads, dim], added after the matrix */
  const float *cosine, *sine;
  const float *weights;   /* cost of a squared error in a channel, [heads, dim] */
  const float *flag_mean; /* a mean that a token may be coded without, [heads, dim]; its scale is then negative */
  const float *edges;     /* between neighbouring levels */
  const double *columns;  /* centroids, channel after channel, then -|c|^2 / 2: [.., length + 1, 2^bits] */
  const float *quick;     /* the same in single precision */
  float clip_share;       /* where the clip quantile is between the two magnitudes around it, 0 to 1 */
  int32_t order, matrix_heads, offset_heads, rope_half, rope_block, rope_first;
  int32_t rope_blocks;    /* rows of cosine and sine */
  int32_t clip_rank, search, unbiased, single; /* clip_rank: rank of the lower of the two magnitudes, or -1: nothing is clipped */
} FusedTransform;

typedef struct {
  Stream key, value;
  FusedTransform key_transform, value_transform;
  int64_t page_head_bytes;
  int32_t heads, dim, page_tokens, origin, overlay_type;
  int32_t refused; /* 1: a number is beyond the limit; 2: the RoPE table is too short. Nothing was written */
  /* from here on, filled anew at every call */
  const Batch *batch;
  uint8_t *pages;
  void *overlay[2];
  const void *source[2];             /* new keys and values, [tokens, heads, dim] each */
  int64_t stride[2], head_stride[2]; /* elements from token to token and from head to head */
  int32_t tokens, type[2];
  float limit; /* largest magnitude that is stored; infinite where numbers are not checked */
} Append;

typedef struct {
  Stream stream;
  uint8_t *pages;
  const int64_t *table; /* page ids of one sequence */
  float *out;           /* [tokens, heads, dim] */
  int64_t page_head_bytes;
  int32_t first, last, heads, dim, page_tokens, keys; /* tokens [first, last) of the pages are read; keys: whether in the order of keys */
} Read;

typedef struct {
  const char *name;
  void (*prepare)(const Decode *, int64_t task, float *scratch);
  void (*split)(const Decode *, int64_t task, float *scratch);
  void (*merge)(const Decode *, int64_t task, float *scratch);
  void (*check)(Append *, int64_t task, float *scratch);
  void (*append)(const Append *, int64_t task, float *scratch);
  void (*append_groups)(const Append *, int64_t task, float *scratch);
  void (*read)(const Read *, int64_t task, float *scratch);
} Isa;

extern const Isa KVANT_GENERIC;
#if defined(__x86_64__)
extern const Isa KVANT_AVX2, KVANT_AVX512;
#elif defined(__aarch64__)
extern const Isa KVANT_NEON;
#endif

#endif
