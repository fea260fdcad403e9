// For kernels that read or write token-wise codes.

#pragma once
#include "include/math.cuh"
#include "codecs/affine.cuh"
