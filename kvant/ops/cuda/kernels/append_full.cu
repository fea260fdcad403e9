// Writes new tokens of 16-bit keys and values into their pages, as they come.
//
// Grid: (tokens, 2): keys, then values. The threads of a CTA copy the heads of one token, 16 bytes each at a time. A token whose slot is
// negative is padding, and is not written.

#pragma once
#include "include/ptx.cuh"

extern "C" __global__ void __launch_bounds__(Config::THREADS) kvant_append_full(const AppendFullArguments a) {
  constexpr int ROW_WORDS = Config::HEAD_DIM * 2 / 16;  // of a head
  const s64 slot = a.slot_mapping[blockIdx.x];
  if (slot < 0) return;
  const bool values = blockIdx.y != 0;
  const uint4* in = (values ? a.value : a.key) + blockIdx.x * (values ? a.value_stride : a.key_stride);
  const s64 page = slot / Config::PAGE_TOKENS, token = slot % Config::PAGE_TOKENS;
  u8* out = a.pages + page * Config::KV_HEADS * Config::PAGE_HEAD_BYTES + (values ? Config::VALUE_OFFSET : 0);
  for (int i = threadIdx.x; i < Config::KV_HEADS * ROW_WORDS; i += Config::THREADS) {
    const int head = i / ROW_WORDS, word = i % ROW_WORDS;
    *(uint4*)(out + (s64)head * Config::PAGE_HEAD_BYTES + (token * ROW_WORDS + word) * 16) = in[i];
  }
}
