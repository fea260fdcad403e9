/* The structures that Python passes to the compiled operations. ../structures.py declares the same fields in the same order. */
#ifndef KVANT_H
#define KVANT_H

#include <stdint.h>

#define MAX_SECTIONS 8
#define MAX_SPANS 64
#define CHECKED 64 /* tokens that a task of `check` checks */
#define LANES 16 /* tokens of a tile of keys; layout.py describes the order "lanes" */

enum { FLOAT32, BFLOAT16, FLOAT16, FP8 }; /* types of numbers; FP8: e4m3 without infinities, in overlays alone */
/* How the elements of a stream are stored; structures.py says what each is. */
enum { SCALE_MIN, SCALE_ZERO, SCALE_ALONE, CHANNEL, BOOSTED, CENTROIDS, RAW, LEVELS };

/* One bit plane of the codes of some channels. It adds alpha * code to x / scale, where x is the decoded element. */
typedef struct {
  int64_t offset;                    /* bytes from the start of the page of a head */
  int32_t bits, first, width, shift; /* first channel, number of channels; shift: lowest bit of the code that this plane holds */
  float alpha;
} Section;

/* Channels [first, end) that share a scale and a code width: x = scale * (step * code + center). */
typedef struct {
  int32_t first, end, meta, bits; /* meta: index of their scale among the scales of a token */
  float step, center;
} Span;

/* Keys or values of one layer: where their codes, scales and overlay are, and how they are decoded. */
typedef struct {
  int32_t kind, sections, spans;        /* kind: see the enum; entries used of `section` and `span` */
  int32_t metas, meta_fields, meta_type; /* scales of a token; 1: scale alone, 2: scale and min or zero; their 16-bit type */
  int32_t sink, ring, flush, recent, first; /* the recipe's window; ring: tokens of the recent ring; first: Window.first */
  int32_t overlay_tokens, group_tokens; /* full-precision tokens of an overlay row; tokens that are coded together */
  int32_t raw_window; /* 1: the overlay holds keys as the model gave them, not as they are coded */
  int32_t window_type; /* of the overlay's numbers */
  int32_t boosted, subvector_dim;       /* channels with two more bits (BOOSTED); channels of a sub-vector (CENTROIDS) */
  int32_t books_heads, books_subvectors, book_bits; /* shape of `books`: heads or 1, sub-vectors or 1; bits of an index */
  int32_t centers, index_bits;                      /* centroids of whole head vectors, 0: none; bits of their index */
  int64_t meta_offset, high_offset, index_offset;   /* bytes from the start of the page of a head */
  const float *mean;         /* [heads, dim], added to a decoded token whose scale is negative; or NULL */
  const float *books;        /* PQ: [books_heads, books_subvectors, 2^book_bits, subvector_dim]; else [books_heads, centers, dim] */
  const float *levels;       /* [16], kind LEVELS: x = scale * levels[code] */
  void *overlay;             /* [overlay rows, overlay_tokens, heads, dim] */
  const int64_t *ring_start; /* [sequences] */
  Section section[MAX_SECTIONS];
  Span span[MAX_SPANS];
} Stream;

/* The tensors of a PagedBatch. All layers of a step use the same one. */
typedef struct {
  const int64_t *block_table, *seq_lens, *overlay_rows, *sinks, *slot_mapping, *query_start_loc;
  const int64_t *ring_start[2]; /* of keys and values */
  int64_t width, count;         /* page ids in a row of the block table; number of sequences */
} Batch;

typedef struct {
  Stream key, value;
  const float *dual, *inverse, *inverse_offset, *mean_logit; /* [1 or heads, dim, dim] twice, [1 or heads, dim], [heads, dim] */
  const int8_t *dual_limbs; /* `dual` as arm_matrix.h reads it: [1 or heads, 2 dim dim], and scales [1 or heads, 2, dim]; or NULL */
  const float *dual_scales;
  int64_t page_head_bytes;
  int32_t heads, dim, page_tokens, origin; /* origin: position of the first token of the first page */
  int32_t dual_heads, inverse_heads, offset_heads;       /* 1, or heads */
  int32_t rope_half;  /* channel pairs that RoPE rotates */
  int32_t rope_block; /* positions of a RoPE block; 0: keys are stored after RoPE */
  int32_t rope_first; /* position of token 0 */
  int32_t split_tokens, longest_split; /* tokens of a split: at least, at most */
  /* the fields below are set by every call */
  const Batch *batch;
  const void *query; /* [sequences, heads * group, dim] */
  void *out;         /* same shape as query */
  float *lse;        /* [sequences, heads * group] */
  const float *sink_logits; /* [heads * group]: logits in the softmax's denominator alone; or NULL */
  uint8_t *pages;    /* [pages, heads, page_head_bytes] */
  void *overlay[2];  /* of keys and values */
  const float *cosine, *sine; /* [RoPE blocks, rope_half] */
  float *operands;   /* query operands, operand_stride floats each; unused with RoPE blocks, where each split computes its operands */
  float *tables;     /* dot products of queries with centroids, CHUNK queries interleaved */
  float *partial;    /* [sequences * heads, splits, group, dim + 2]: O [dim], max S, sum P */
  int64_t operand_stride;
  int32_t group, type, splits, sliding_window, use_mean_logit; /* group: query heads of a KV head; sliding_window: 0 is none */
  float scale, softcap; /* softcap: 0 is none */
} Decode;

/* What append does to a vector before it is coded: undo RoPE, subtract the mean, then a Hadamard transform or a matrix. Also the
 * parameters by which codes are chosen. */
typedef struct {
  const float *mean;     /* [heads, dim] */
  const float *signs;    /* [dim], before the Hadamard */
  const void *matrix;    /* [1 or heads, dim, dim], float where that is exact (`single`), else double */
  const double *offset;  /* [1 or heads, dim], added after the matrix */
  const float *cosine, *sine;
  const float *weights;   /* [heads, dim]: weight of a channel's squared error */
  const float *flag_mean; /* [heads, dim]: mean that may be subtracted from a token; the token's scale is then stored negative */
  const float *edges;     /* midpoints between neighbouring levels */
  const double *columns_f64; /* transposed centroids and -|c|^2 / 2: [.., length + 1, centroids] */
  const float *columns_f32;  /* the same in float */
  float clip_share;       /* the clip quantile lies this far, 0 to 1, from the magnitude of rank clip_rank to the next */
  int32_t order, matrix_heads, offset_heads, rope_half, rope_block, rope_first;
  int32_t rope_blocks;    /* rows of cosine and sine */
  int32_t clip_rank, search, unbiased, single; /* clip_rank: -1: nothing is clipped; search: ranges or scales that are tried */
} FusedTransform;

typedef struct {
  Stream key, value;
  FusedTransform key_transform, value_transform;
  int64_t page_head_bytes;
  int32_t heads, dim, page_tokens, origin;
  int32_t refused; /* result, 0: written. Nothing was written: 1: a number is beyond `limit`; 2: the RoPE table is too short */
  /* the fields below are set by every call */
  const Batch *batch;
  uint8_t *pages;
  void *overlay[2];
  const void *source[2];             /* new keys and values, [tokens, heads, dim] each */
  int64_t stride[2], head_stride[2]; /* elements between tokens and between heads */
  int32_t tokens, type[2];
  float limit; /* largest magnitude that may be stored; infinity: numbers are not checked */
} Append;

typedef struct {
  Stream stream;
  uint8_t *pages;
  const int64_t *block_table; /* page ids of one sequence */
  float *out;           /* [tokens, heads, dim] */
  int64_t page_head_bytes;
  int32_t first, last; /* tokens of the pages that are decoded: [first, last) */
  int32_t heads, dim, page_tokens;
  int32_t keys; /* 1 for keys, 0 for values: the order of codes differs */
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
#if defined(__clang__) || __GNUC__ >= 10 /* compilers that know the instructions */
#define KVANT_HAS_I8MM
extern const Isa KVANT_I8MM; /* without the operations of append, which are those of KVANT_NEON */
#endif
#endif

#endif
