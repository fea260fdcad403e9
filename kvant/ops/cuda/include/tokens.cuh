// The sequence, position and RoPE block of a new token. New tokens lie one sequence after another: those of sequence b are
// query_start_loc[b] to query_start_loc[b + 1] - 1, and they are the last ones of its seq_lens[b] tokens.

#pragma once
#include "include/ptx.cuh"

// Binary search for the last sequence b < count with `begins(b)`; begins(0) holds. `half` is the largest power of two below count, or 0.
template <class F> DEV int last_sequence(int count, int half, F begins) {
  int b = 0;
  for (int step = half; step; step >>= 1)
    if (b + step < count && begins(b + step)) b += step;
  return b;
}
template <class A> DEV int sequence_of(const A& a, int token) {
  return last_sequence(a.batch, a.half_batch, [&](int b) { return a.query_start_loc[b] <= token; });
}

// The RoPE block of a new token, counted from the one of its sequence's first token; rope_first is that token's RoPE position. Padding
// tokens lie in no sequence, so the result is kept inside the table of blocks.
template <int ROPE_BLOCK, class A> DEV int new_token_rope_block(const A& a, int token) {
  constexpr int SIZE = ROPE_BLOCK ? ROPE_BLOCK : 1;
  const int b = sequence_of(a, token), position = (int)(a.seq_lens[b] - a.query_start_loc[b + 1]) + token;
  return min(max((position + a.rope_first) / SIZE - a.rope_first / SIZE, 0), a.rope_blocks - 1);
}
