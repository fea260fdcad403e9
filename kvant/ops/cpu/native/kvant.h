/* What Python hands to the compiled operations. The structures are mirrored, field by field, in ../structures.py. */
#ifndef KVANT_H
#define KVANT_H

#include <stdint.h>

#define MAX_SECTIONS 8
#define MAX_SPANS 64
#define CHECKED 64 /* tokens that a task of `check` looks at */
#define LANES 16 /* tokens of a tile of keys, see the order "lanes" in layout.py */

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { SCALE_MIN, SCALE_ZERO, SCALE_ALONE, CHANNEL, BOOSTED, CENTROIDS, PLAIN, LEVELS };

/* Codes of some channels: one plane of a field. A code adds alpha times itself to an element's value over its scale. */
typedef struct {
  int64_t offset;
  int32_t bits, first, width, shift; /* shift: of this plane inside its code */
  float alpha;
} Section;

/* Channels that share a scale and a width of codes; the step between levels and what code zero is worth, over that scale. */
typedef struct {
  int32_t first, end, meta, bits;
  float step, center;
} Span;

/* Keys or values of one layer, as they lie in a run of bytes and in the full-precision windows. */
typedef struct {
  int32_t kind, sections, spans, metas, names, meta_type;
  int32_t sink, ring, flush, recent, rows, group_tokens; /* rows: full-precision tokens of a sequence */
  int32_t extra, books_heads, books_spaces, book_bits;   /* boosted channels, or channels of a sub-vector; codebooks */
  int32_t centers, index_bits;                           /* whole vectors that tokens are coded without */
  int64_t meta_offset, high_offset, index_offset;
  const float *mean;    /* what tokens whose scale is negative are short of, [heads, dim], or nothing */
  const float *books;   /* centroids, [heads or 1, spaces or 1, 2^bits, length]; or centers, [heads or 1, centers, dim] */
  const float *levels;  /* that codes stand for */
  void *window;         /* [overlay rows, rows, heads, dim] */
  const int64_t *ring_start; /* [sequences] */
  Section section[MAX_SECTIONS];
  Span span[MAX_SPANS];
} Stream;

/* Which sequences there are: the same for all layers of a step. */
typedef struct {
  const int64_t *table, *seq_lens, *overlay_rows, *sinks, *slot_mapping, *query_start_loc;
  const int64_t *ring_start[2]; /* of keys and values */
  int64_t width, count;    /* of the table; sequences */
} Batch;

typedef struct {
  Stream key, value;
  const float *dual, *inverse, *inverse_offset, *mean_logit; /* [1 or heads, dim, dim] twice, [1 or heads, dim], [heads, dim] */
  int64_t page_head_bytes;
  int32_t heads, dim, page_tokens, origin, window_type;
  int32_t dual_heads, inverse_heads, offset_heads, half, block, first, split_tokens, longest_split;
  /* from here on, what is another at every call */
  const Batch *batch;
  const void *query;
  void *out;
  float *lse;
  uint8_t *pages;
  void *window[2];            /* of keys and values */
  const float *cosine, *sine; /* [blocks, half]: RoPE table of the blocks of positions */
  float *prepared, *tables, *partial;
  int64_t prepared_stride;
  int32_t group, type, splits, visible, use_mean_logit;
  float scale, cap;
} Decode;

/* How vectors enter the space they are stored in: unrotated, a mean off, then a Hadamard transform or a matrix. */
typedef struct {
  const float *mean;     /* [heads, dim] */
  const float *signs;    /* [dim] */
  const void *matrix;    /* [1 or heads, dim, dim], of single numbers where those are exact, else of double ones */
  const double *offset;  /* [1 or heads, dim], added after the matrix */
  const float *cosine, *sine;
  const float *weights;  /* of an error in a channel, [heads, dim] */
  const float *taken;    /* a mean that a token may be coded without, [heads, dim] */
  const float *edges;    /* between levels */
  const double *columns; /* codebooks channel after channel, then minus half of the centroids' squares: [.., length + 1, 2^bits] */
  const float *quick;    /* the same in single precision */
  float clip_share;      /* how far between the two magnitudes that the quantile lies between */
  int32_t order, matrix_heads, offset_heads, half, block, first;
  int32_t rope_blocks; /* blocks that there are cosines for */
  int32_t clip_rank, search, unbiased, single; /* clip_rank: magnitudes below the lower of the two, or -1 where nothing is clipped */
} FusedTransform;

typedef struct {
  Stream key, value;
  FusedTransform key_transform, value_transform;
  int64_t page_head_bytes;
  int32_t heads, dim, page_tokens, origin, window_type;
  int32_t refused; /* 1: a number is beyond the limit; 2: the RoPE table is too short. Nothing was written */
  /* from here on, what is another at every call */
  const Batch *batch;
  uint8_t *pages;
  void *window[2];
  const void *source[2];             /* [tokens, heads, dim] each */
  int64_t stride[2], head_stride[2]; /* elements from token to token and from head to head */
  int32_t tokens, type[2];
  float limit; /* that numbers may reach; infinite where they are not looked at */
} Append;

typedef struct {
  Stream stream;
  uint8_t *pages;
  const int64_t *table; /* of one sequence */
  float *out;           /* [tokens, heads, dim] */
  int64_t page_head_bytes;
  int32_t first, last, heads, dim, page_tokens, keys; /* places in pages of the tokens that are read */
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
