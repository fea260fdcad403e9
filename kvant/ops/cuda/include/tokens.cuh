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
template <class A> DEV int search_sequence(const A& a, int token) {
  return last_sequence(a.batch, a.half_batch, [&](int b) { return a.query_start_loc[b] <= token; });
}
// In a decode step every sequence has one new token: then nothing is searched.
template <class A> DEV int sequence_of(const A& a, int token) {
  if (token < a.batch && (a.query_start_loc[token] == token & a.query_start_loc[token + 1] == token + 1)) return token;
  return search_sequence(a, token);
}

// A new token among the tokens of its sequence, and the sequence's row of the overlays.
struct NewToken {
  s64 length, position, overlay_row;
};
// The same, with as few loads after each other as there can be: for a decode step, one. A token that is not `wanted`, padding, is not searched
// for, and may get any sequence.
template <class A> DEV NewToken new_token(const A& a, int token, bool wanted) {
  int b = min(token, a.batch - 1);
  s64 begin = a.query_start_loc[b], end = a.query_start_loc[b + 1], length = a.seq_lens[b], row = a.overlay_rows[b];
  if (wanted & (token < begin | token >= end)) {
    b = search_sequence(a, token);
    end = a.query_start_loc[b + 1], length = a.seq_lens[b], row = a.overlay_rows[b];
  }
  return {length, length - (end - token), row};
}

// The RoPE block of a position, counted from the one of its sequence's first token; rope_first is that token's RoPE position. Padding
// tokens lie in no sequence, so the result is kept inside the table of blocks.
template <int ROPE_BLOCK, class A> DEV int rope_block_of(const A& a, int position) {
  constexpr int SIZE = ROPE_BLOCK ? ROPE_BLOCK : 1;
  return min(max((position + a.rope_first) / SIZE - a.rope_first / SIZE, 0), a.rope_blocks - 1);
}
template <int ROPE_BLOCK, class A> DEV int new_token_rope_block(const A& a, int token) {
  const int b = sequence_of(a, token);
  return rope_block_of<ROPE_BLOCK>(a, (int)(a.seq_lens[b] - a.query_start_loc[b + 1]) + token);
}
