/* All operations, compiled for the instruction set of the including file. Each header uses the ones before it. */
#include "decode.h"
#include "transform.h" /* append: transforms of new tokens */
#include "search.h"    /* append: nearest centroids */
#include "encode.h"    /* append: codes of a token */
#include "append.h"    /* append: tokens, groups of tokens */
