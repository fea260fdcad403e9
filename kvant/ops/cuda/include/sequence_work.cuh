// Which tokens of a sequence are in the overlay and which in pages, and how many units of work (scheduler.cuh) they are.

#pragma once
#include "include/decode_shapes.cuh"
#include "include/scheduler.cuh"

// Of one sequence: tokens [low, sink_end) and [recent_begin, n) are read from the overlay, [packed, packed_end) from pages. With several
// queries these are the tokens that any of them reads so, and the last two may overlap: RowLimits says which query reads a token from where.
struct SequenceWork {
  int n;    // tokens
  int low;  // first token inside the sliding window
  int sink_end, recent_begin;
  int packed, packed_end;
  int page, pages;  // first page that holds tokens to attend to, and how many do
  int sink_chunks;     // chunks of OVERLAY_TILES tiles of the overlay: of the sinks,
  int overlay_chunks;  // and of all its tokens
  int units;          // of work; a page counts one, a chunk of the overlay OVERLAY_UNITS
  int keys, values;   // packed tokens from here on have their keys, or their values, in the overlay; only with channel-wise keys. With several queries `keys` is the first token that the ring may hold
  int overlay_row;
  int mixed;          // pages at the end with some tokens in the overlay; they count MIXED_PAGE_UNITS each
  int weight;         // units of all pages
};

// The first of the last tokens of a stream that the overlay's ring holds, where the keys of a group are packed together.
// Groups are counted from ORIGIN on, which is SINK or 0.
DEV int ring_begin(int n, int ring_start, int recent, int flush) {
  return min(n, max(min(n, Config::ORIGIN) + max(0, n - Config::ORIGIN - recent) / flush * flush, max(ring_start, Config::SINK)));
}
// The same where tokens are packed one by one.
DEV int overlay_start(int n, int key_ring_start, int value_ring_start) {
  return min(n, max(min(n, Config::SINK) + max(0, n - Config::SINK - Key::RECENT), max(max(key_ring_start, value_ring_start), Config::SINK)));
}
// Tokens that the first query of a sequence of n tokens sees. Query i attends as decode would at its length, first_length(n) + i: to the same tokens, from
// the same places.
static_assert(QUERIES == 1 || !CHANNELWISE, "where groups of tokens are coded, the overlay has one beginning");
DEV int first_length(int n) { return QUERIES == 1 ? n : max(0, n - (QUERIES - 1)); }

template <class A> DEV SequenceWork sequence_work(const A& a, int b) {
  constexpr int PAGE = Config::PAGE_TOKENS, ORIGIN = Config::ORIGIN;
  SequenceWork w;
  w.n = (int)a.seq_lens[b];
  w.low = a.sliding_window > 0 ? max(0, first_length(w.n) - a.sliding_window) : 0;
  int sinks = 0, recent = w.n;
  w.overlay_row = OVERLAY ? (int)a.overlay_rows[b] : 0;
  if constexpr (CHANNELWISE) {
    sinks = min((int)a.sinks[b], w.n);
    w.keys = ring_begin(w.n, (int)a.key_ring_start[b], Key::RECENT, Key::FLUSH);
    w.values = ring_begin(w.n, (int)a.value_ring_start[b], Value::RECENT, Value::FLUSH);
    recent = max(w.keys, w.values);
  } else if constexpr (OVERLAY) {
    sinks = min((int)a.sinks[b], w.n);
    recent = overlay_start(w.n, (int)a.key_ring_start[b], (int)a.value_ring_start[b]);
  }
  int exact = recent;  // the first token after the sinks that any query reads from the overlay
  if constexpr (QUERIES > 1) {
    w.keys = OVERLAY ? max((int)a.key_ring_start[b], (int)a.value_ring_start[b]) : 0;
    if constexpr (OVERLAY) exact = min(w.n, max(overlay_start(first_length(w.n), w.keys, w.keys), Config::SINK));
  }
  w.packed = max(max(sinks, w.low), ORIGIN);
  w.packed_end = recent;
  w.page = (w.packed - ORIGIN) / PAGE;
  w.pages = w.packed < recent ? (recent - 1 - ORIGIN) / PAGE - w.page + 1 : 0;
  w.sink_end = sinks;
  w.recent_begin = max(exact, w.low);
  constexpr int TOKENS = 16 * OVERLAY_TILES;
  w.sink_chunks = (max(0, sinks - w.low) + TOKENS - 1) / TOKENS;
  w.overlay_chunks = w.sink_chunks + (w.n - w.recent_begin + TOKENS - 1) / TOKENS;
  w.mixed = 0;
  if constexpr (CHANNELWISE) {
    const int apart = max(w.packed, min(w.keys, w.values));
    if (w.pages && apart < recent) w.mixed = (recent - 1 - ORIGIN) / PAGE - (apart - ORIGIN) / PAGE + 1;
  }
  w.weight = w.pages + w.mixed * (Config::MIXED_PAGE_UNITS - 1);
  w.units = max(1, w.overlay_chunks * Config::OVERLAY_UNITS + w.weight);
  return w;
}
// The first page after so many units of pages.
DEV int page_at_unit(int units, int pages, int mixed) {
  const int plain = pages - mixed;
  return Config::MIXED_PAGE_UNITS == 1 || units <= plain ? units : plain + (units - plain + Config::MIXED_PAGE_UNITS - 1) / Config::MIXED_PAGE_UNITS;
}

// A warp's part of a work tile.
struct WarpRange {
  int page, page_end;        // pages, counted from SequenceWork::page
  int overlay, overlay_end;  // chunks of the overlay of the whole CTA: a warp takes overlay + warp, overlay + warp + WARPS, ...
};
// A CTA's warps take the chunks of the overlay in turn, so that the first `more` of them have one more than the others, which have `each`. Pages
// are one stretch for each warp, shorter where it has more of the overlay.
template <class Work> DEV WarpRange warp_range(const SequenceWork& w, const Work& work, bool split, int warp) {
  constexpr int UNITS = Config::OVERLAY_UNITS;
  const int from = work.from, to = work.to;
  WarpRange range;
  range.page = max(from - w.overlay_chunks * UNITS, 0), range.page_end = min(max(to - w.overlay_chunks * UNITS, 0), w.weight);
  range.overlay = (from + UNITS - 1) / UNITS, range.overlay_end = min(w.overlay_chunks, (to + UNITS - 1) / UNITS);
  if (split) {  // every part has the same share of both
    const float each = __fdividef(1.f, (float)work.units);
    const auto portion = [&](int i, int whole) { return i == work.units ? whole : (int)((float)(i * whole) * each); };
    range.page = portion(from, w.weight), range.page_end = portion(to, w.weight);
    range.overlay = portion(from, w.overlay_chunks), range.overlay_end = portion(to, w.overlay_chunks);
  }
  const int overlay = max(0, range.overlay_end - range.overlay), pages = max(0, range.page_end - range.page);
  const int each = overlay / WARPS, more = overlay % WARPS, level = overlay * UNITS;
  int quota = (level + pages + WARPS - 1) / WARPS;  // units of a warp
  if (pages <= (WARPS - more) * UNITS) quota = each * UNITS + quotient(pages + WARPS - more - 1, WARPS - more);
  const int less = max(0, quota - (each + 1) * UNITS), usual = quota - each * UNITS;  // pages of warps with one more chunk, and of the others
  range.page += min(warp, more) * less + max(0, warp - more) * usual;
  range.page_end = min(range.page_end, range.page + (warp < more ? less : usual));
  range.page = page_at_unit(range.page, w.pages, w.mixed), range.page_end = page_at_unit(range.page_end, w.pages, w.mixed);
  return range;
}

// The first packed token of a page of a sequence, which are counted from its first with packed tokens.
DEV int first_packed(const SequenceWork& w, int page) { return max(w.packed, Config::ORIGIN + (w.page + page) * Config::PAGE_TOKENS); }

// Which tokens each row of a head tile sees, where a sequence has several queries.
struct RowLimits {
  int n, window, ring, row;  // tokens of the sequence; the sliding window, or 0; SequenceWork::keys; first row of the tile

  DEV RowLimits(const volatile SequenceWork& w, int sliding_window, int tile_row) : n(w.n), window(sliding_window), ring(w.keys), row(tile_row) {}
  DEV int length(int h) const { return n - (QUERIES - 1) + min((row + h) / QUERY_HEADS, QUERIES - 1); }
  DEV int low(int length) const { return window > 0 ? length - window : 0; }
  DEV int packed_end(int length) const { return OVERLAY ? overlay_start(length, ring, ring) : length; }
  DEV bool packed(int h, int position) const {
    const int own = length(h);
    return position >= low(own) && position < packed_end(own);
  }
  DEV bool overlay(int h, int position) const {
    const int own = length(h);
    return position >= low(own) && position < own && (position < Config::SINK || position >= packed_end(own));
  }
};

// The packed tokens of a sequence, in registers while a warp attends to its pages.
struct PackedRange {
  const volatile SequenceWork& work;
  int row;           // first row of the head tile
  int all_begin, all_end;  // tokens that all queries read from pages
  int begin, end;    // tokens
  int page;          // the first page
  int keys, values;  // as SequenceWork's, with channel-wise keys
  int overlay_row;

  template <class A> DEV PackedRange(const A& a, const volatile SequenceWork& w, int tile_row, int overlay) : work(w), row(tile_row) {
    if constexpr (QUERIES > 1) {
      const int first = first_length(w.n);
      all_begin = a.sliding_window > 0 ? w.n - a.sliding_window : 0, all_end = OVERLAY ? overlay_start(first, w.keys, w.keys) : first;
    }
    begin = w.packed, end = w.packed_end, page = w.page;
    if constexpr (CHANNELWISE) keys = w.keys, values = w.values;
    overlay_row = overlay;
  }
  // Whether queries read different tokens of the chunk that begins with token `at` from pages.
  DEV bool uneven(int at) const { return at < all_begin || at + 16 * CHUNK_TILES > all_end; }
};
