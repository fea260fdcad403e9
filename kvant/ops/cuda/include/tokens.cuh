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

// Where a token's sequence would be if all had equally many new tokens.
template <class A> DEV int likely_sequence(const A& a, int token) { return min((int)((float)token * a.sequence_rate), a.batch - 1); }

// A new token among the tokens of its sequence, found with as few loads after each other as there can be: `load` begins to load what is right in a
// decode step, where every sequence has one new token, `load_of` what belongs to some sequence; `find` waits for it and, where it is another
// sequence's, searches.
struct NewToken {
  s64 begin, end, length, overlay_row;  // of the sequence: its first new token and the one after its last, its tokens, its row of the overlays

  template <class A> DEV void load(const A& a, int token) { load_of(a, min(token, a.batch - 1)); }
  template <class A> DEV static void prefetch(const A& a, int token) {  // to L2: what `load` loads
    const int b = min(token, a.batch - 1);
    prefetch_l2(a.query_start_loc + b), prefetch_l2(a.seq_lens + b), prefetch_l2(a.overlay_rows + b);
  }
  template <class A> DEV void load_of(const A& a, int b) {  // of sequence b
    begin = a.query_start_loc[b], end = a.query_start_loc[b + 1], length = a.seq_lens[b], overlay_row = a.overlay_rows[b];
  }
  // Padding, a token that is not `wanted`, may stay with any sequence.
  template <class A> DEV void find(const A& a, int token, bool wanted) {
    if (!wanted | token >= begin & token < end) return;
    const int b = search_sequence(a, token);
    end = a.query_start_loc[b + 1], length = a.seq_lens[b], overlay_row = a.overlay_rows[b];
  }
  DEV s64 position(int token) const { return length - (end - token); }
};

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
