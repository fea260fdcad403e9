/* All operations, compiled for the instruction set of the including file. Each header uses the ones before it. */
#include "dense.h"     /* float arithmetic */
#include "rows.h"      /* decoding of stored tokens */
#include "overlay.h"   /* reading of full-precision tokens */
#include "query.h"     /* decode: query operands */
#if ARM
#include "arm_products.h" /* decode: integer products */
#endif
#include "scores.h"    /* decode: S = Q K^T */
#include "values.h"    /* decode: O += P V */
#include "splits.h"    /* decode: splits of a sequence and their merge */
#include "transform.h" /* append: transforms of new tokens */
#include "search.h"    /* append: nearest centroids */
#include "encode.h"    /* append: codes of a token */
#include "append.h"    /* append: tokens, groups of tokens */
