/* The overlay: full-precision tokens beside the pages. A row holds the sinks of one sequence, then a ring of its recent tokens. */

/* First position that a sequence of n tokens keeps in full precision behind its sinks: recipe.py's Window.packed_end. */
INLINE int64_t packed_end(const Stream *s, int64_t n) {
  const int64_t waiting = n - s->first - s->recent;
  return (n < s->first ? n : s->first) + (waiting > 0 ? waiting / s->flush * s->flush : 0);
}

/* Positions that are read from the overlay: [0, sinks) and [recent, length); the others are read from pages. */
INLINE void overlay_bounds(const Decode *call, const Stream *s, int64_t b, int64_t *sinks, int64_t *recent) {
  const int64_t n = call->batch->seq_lens[b];
  *sinks = 0;
  *recent = n;
  if (!s->overlay_tokens) return;
  int64_t from = packed_end(s, n);
  if (from < s->ring_start[b]) from = s->ring_start[b];
  if (from < s->sink) from = s->sink;
  *recent = from < n ? from : n;
  *sinks = call->batch->sinks[b] < n ? call->batch->sinks[b] : n;
}

/* Index of a position in an overlay row. */
INLINE int64_t overlay_index(const Stream *s, int64_t position) {
  return position < s->sink || !s->ring ? position : s->sink + (position - s->sink) % s->ring;
}

/* Element offset of a position in the overlay, [rows, overlay_tokens, heads, dim]. */
INLINE int64_t overlay_offset(const Decode *call, const Stream *s, int64_t b, int head, int64_t position) {
  return ((call->batch->overlay_rows[b] * s->overlay_tokens + overlay_index(s, position)) * call->heads + head) * call->dim;
}

/* Loads up to CHUNK overlay tokens from `position` on, as floats, to out: [CHUNK, 256]. Prefetches the tokens AHEAD positions later,
 * if they are before `end`. Returns the number of tokens loaded. */
INLINE int load_overlay(const Decode *call, const Stream *s, int64_t b, int head, int64_t position, int64_t end, float *out) {
  const int width = type_bytes(s->window_type), count = end - position < CHUNK ? (int)(end - position) : CHUNK;
  for (int r = 0; r < count; r++) {
    if (position + r + AHEAD < end)
      fetch((const char *)s->overlay + overlay_offset(call, s, b, head, position + r + AHEAD) * width, (int64_t)call->dim * width);
    load_row(s->overlay, overlay_offset(call, s, b, head, position + r), s->window_type, call->dim, out + 256 * r);
  }
  return count;
}
