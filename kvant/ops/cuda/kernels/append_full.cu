// Appends new tokens to pages of 16-bit numbers, the recipe `full`: a page of a head is [tokens, head_dim], keys and values apart.
//
// Grid: (any number of CTAs, 2): keys and values. A thread copies four channels of a token at a time.

#pragma once
#include "include/math.cuh"

constexpr int D = Config::HEAD_DIM, ROW = Config::KV_HEADS * D;

template <int TYPE> DEV void append_rows(const AppendFullArguments& a, const void* rows, s64 stride, int offset) {
  const s64 count = (s64)a.tokens * (ROW / 4);
  for (s64 i = (s64)blockIdx.x * Config::THREADS + threadIdx.x; i < count; i += (s64)gridDim.x * Config::THREADS) {
    const int token = (int)(i / (ROW / 4)), at = (int)(i % (ROW / 4)) * 4;
    const s64 slot = a.slot_mapping[token];
    if (slot < 0) continue;  // padding
    const s64 page = slot / Config::PAGE_TOKENS;
    u8* to = a.pages + (page * Config::KV_HEADS + at / D) * Config::PAGE_HEAD_BYTES + offset;
    float x[4];
    load_four<TYPE>(x, rows, token * stride + at);
    store_four<Config::ELEMENT_TYPE>(to, (slot - page * Config::PAGE_TOKENS) * D + at % D, x);
  }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS) kvant_append_full(const AppendFullArguments a) {
  if (blockIdx.y == 0) append_rows<Config::Key::IN_TYPE>(a, a.key, a.key_stride, 0);
  else append_rows<Config::Value::IN_TYPE>(a, a.value, a.value_stride, Config::VALUE_OFFSET);
}
