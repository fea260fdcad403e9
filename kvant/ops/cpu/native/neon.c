/* ARM with the dot-product instruction. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod,tune=neoverse-n1")
#endif
#define MATRIX 0
#define NAME(x) x##_neon
#include "arm.h"
#include "operations.h"
const Isa KVANT_NEON = {"NEON with dot products", NAME(prepare), NAME(split), NAME(merge), NAME(check), NAME(append), NAME(append_groups), NAME(read)};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kvant_not_arm;
#endif
