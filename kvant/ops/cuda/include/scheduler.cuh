// Tile scheduler of a persistent grid: which work tiles a CTA attends to.
//
// The work of a batch is a line of units: of every sequence, of every head tile, the units that `sequence_work(a, b).units` counts, end to
// end; with HEADS_FIRST, of every head tile, of every sequence. The line is cut into equal parts, one for each CTA, so that a part may begin
// and end inside a (sequence, head tile): split-KV. Where several CTAs share one, the last of them to finish merges their partial outputs.
//
// A kernel gives its arguments (`batch` and what sequence_work reads) and a function sequence_work(arguments, sequence).

#pragma once
#include "include/math.cuh"

DEV int warp_sum_int(int x) { return __reduce_add_sync(FULL, x); }
DEV int warp_max_int(int x) { return __reduce_max_sync(FULL, x); }
// x / by, exact; an integer division takes several times as long.
DEV int quotient(int x, int by) {
  const int near = (int)__fdividef((float)x, (float)by), rest = x - near * by;
  return near + (rest >= by) - (rest < 0);
}

// Part of the line of units that a CTA works on, one (sequence, head tile) at a time.
struct WorkTile {
  int unit, end;  // the next unit of the line, and the end of this CTA's part
  int b, before;  // the sequence, and the units before it: of all head tiles of the sequences before; HEADS_FIRST: of all that comes before
  int units;      // of one (sequence, head tile)
  int head_tile;  // KV head * QUERY_TILES + tile of its query heads
  int start;      // first unit of the (sequence, head tile) on the line
  int from, to;   // this CTA's units of it: [from, to) of [0, units)

  DEV bool whole() const { return from == 0 && to == units; }  // no other CTA has a part of it
};

// HEADS head tiles a sequence; a CTA with fewer than MIN_UNITS units is not worth its merge. HEADS_FIRST: neighbours on the line are sequences of one head tile, for
// kernels that have something of a head in shared memory. WHOLE_TILES: CTAs take whole (sequence, head tile)s, or equal parts of one, wherever the longest of them is at
// most an eighth longer than a part of the line would be: otherwise most CTAs have the end of one and the beginning of another, and begin and merge twice. The lengths are
// looked through only where it would be so if all were equal: that takes 2 to 6 us of a batch of 128 or 256.
// CTA_TEAMS: teams of a CTA that take parts as CTAs do.
template <int HEADS, int MIN_UNITS, bool HEADS_FIRST = false, bool WHOLE_TILES = false, int CTA_TEAMS = 1> struct TileScheduler {
  static constexpr int AT_ONCE = HEADS_FIRST ? 1 : HEADS;  // head tiles of a sequence that are neighbours on the line
  int own;         // units of the lane-th sequence
  int parts;       // of the line: a CTA takes parts blockIdx.x, blockIdx.x + gridDim.x, ...
  bool split;      // a unit is not a page but one of the equal parts of a (sequence, head tile): where CTAs outnumber those three to one, or WHOLE_TILES
  float share;     // parts over units
  int each, more;  // the first `more` parts have each + 1 units, the others `each`

  template <class A> DEV TileScheduler(const A& a, int lane) {
    own = lane < a.batch ? sequence_work(a, lane).units : 0;
    int all = own;
    for (int i = lane + 32; i < a.batch; i += 32) all += sequence_work(a, i).units;
    all = warp_sum_int(all) * HEADS;
    parts = min((int)gridDim.x * CTA_TEAMS, max(1, all / MIN_UNITS));
    const int tiles = a.batch * HEADS, equal = max(tiles, parts / tiles * tiles);  // (sequence, head tile)s; parts of them, were all as long
    split = parts >= 3 * tiles;
    share = __fdividef((float)parts, (float)all);
    each = 1, more = 0;
    if (split) {
      parts = lane < a.batch ? split_units(own) : 0;
      for (int i = lane + 32; i < a.batch; i += 32) parts += split_units(sequence_work(a, i).units);
      parts = warp_sum_int(parts) * HEADS;
      return;
    }
    if (WHOLE_TILES && near_even((equal + parts - 1) / parts * parts, equal)) {
      int count = 0, longest = 0;  // parts, and units of the longest
      for (int i = lane; i < a.batch; i += 32) {
        const int units = i == lane ? own : sequence_work(a, i).units, cut = split_units(units);
        count += cut, longest = max(longest, (units + cut - 1) / cut);
      }
      count = warp_sum_int(count) * HEADS, longest = warp_max_int(longest);
      split = near_even((float)((count + parts - 1) / parts * longest) * (float)parts, (float)all);
      if (split) parts = min(parts, count), all = count;
    }
    each = all / parts, more = all % parts;
  }
  // Whether parts as long as the longest, `parts` in all, are at most an eighth more than `all`.
  DEV static bool near_even(float parts, float all) { return parts <= 1.125f * all; }
  DEV int split_units(int units) const { return max(1, (int)((float)units * share)); }
  DEV int begin_of(int part) const { return part * each + min(part, more); }
  // The part that a unit belongs to.
  DEV int part_of(int unit) const {
    return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each;
  }

  // The beginning of a part: finds its sequence by a prefix sum over the sequences' units, 32 at a time.
  template <class A> DEV WorkTile first_tile(const A& a, int part, int lane) const {
    WorkTile work;
    work.unit = begin_of(part);
    work.end = begin_of(part + 1);
    work.b = work.before = 0;
    if constexpr (HEADS_FIRST) {
      const int all = begin_of(parts) / HEADS;  // units of a head tile
      work.head_tile = quotient(work.unit, all), work.before = work.head_tile * all;
    }
    for (int base = 0; base < a.batch; base += 32) {
      int units = own;
      if (base) units = base + lane < a.batch ? sequence_work(a, base + lane).units : 0;
      if (split && base + lane < a.batch) units = split_units(units);
      int sum = units;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const int x = __shfl_up_sync(FULL, sum, o);
        if (lane >= o) sum += x;
      }
      const u32 beyond = __ballot_sync(FULL, work.before + sum * AT_ONCE > work.unit);
      if (beyond) {
        const int found = __ffs(beyond) - 1;
        work.b = base + found;
        work.before += __shfl_sync(FULL, sum - units, found) * AT_ONCE;
        break;
      }
      work.before += __shfl_sync(FULL, sum, 31) * AT_ONCE;
    }
    return work;
  }
  // The (sequence, head tile) at work.unit, of a sequence with so many units.
  DEV void enter(WorkTile& work, int sequence_units) const {
    work.units = split ? split_units(sequence_units) : sequence_units;
    if constexpr (HEADS_FIRST) {
      work.start = work.before;
    } else {
      work.head_tile = quotient(work.unit - work.before, work.units);
      work.start = work.before + work.head_tile * work.units;
    }
    work.from = work.unit - work.start, work.to = min(work.end, work.start + work.units) - work.start;
  }
  DEV void advance(WorkTile& work, [[maybe_unused]] int batch) const {
    work.unit = work.start + work.to;
    if (work.unit == work.before + work.units * AT_ONCE) work.before = work.unit, work.b++;
    if constexpr (HEADS_FIRST)
      if (work.b == batch) work.b = 0, work.head_tile++;
  }
  // Of a (sequence, head tile): the parts that share it, first to last.
  DEV int first_part(const WorkTile& work) const { return part_of(work.start); }
  DEV int last_part(const WorkTile& work) const { return part_of(work.start + work.units - 1); }
};
