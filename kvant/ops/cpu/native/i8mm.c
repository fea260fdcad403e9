/* ARM with the 8-bit matrix products (usmmla) beside the dot products: decode. Append has no integer products: it is that of neon.c. */
#include "kvant.h"
#if defined(KVANT_HAS_I8MM)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif
#define MATRIX 1
#define NAME(x) x##_i8mm
#include "arm.h"
#include "decode.h"
const Isa KVANT_I8MM = {"NEON with matrix products", NAME(prepare), NAME(split), NAME(merge), NULL, NULL, NULL, NAME(read)};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kvant_no_i8mm;
#endif
