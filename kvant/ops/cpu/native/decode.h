/* Decode and reading, compiled for the instruction set of the including file. Each header uses the ones before it. */
#include "dense.h"   /* float arithmetic */
#include "rows.h"    /* decoding of stored tokens */
#include "overlay.h" /* reading of full-precision tokens */
#if ARM
#include "arm_matrix.h" /* queries times a matrix by integer products */
#endif
#include "query.h"   /* query operands */
#if ARM
#include "arm_products.h" /* integer products of a page */
#endif
#include "scores.h" /* S = Q K^T */
#include "values.h" /* O += P V */
#include "splits.h" /* splits of a sequence and their merge */
