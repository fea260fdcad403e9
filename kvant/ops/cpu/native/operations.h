/* All operations, for the machine whose vectors the including file has set up. */
#include "rows.h"
#include "attend.h"
#include "append.h"
