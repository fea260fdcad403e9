/* All operations, for the machine whose vectors the including file has set up. The order is that of use: each header needs the ones
 * before it. */
#include "rows.h"      /* stored tokens to numbers */
#include "dense.h"     /* float arithmetic */
#include "overlay.h"   /* full-precision tokens */
#include "query.h"     /* decode: query operands */
#include "scores.h"    /* decode: S = Q K^T */
#include "values.h"    /* decode: O += P V */
#include "splits.h"    /* decode: splits of a sequence, merged */
#include "transform.h" /* append: transforms of new tokens */
#include "search.h"    /* append: nearest centroids */
#include "encode.h"    /* append: codes of a token */
#include "append.h"    /* append: tokens, groups of tokens */
