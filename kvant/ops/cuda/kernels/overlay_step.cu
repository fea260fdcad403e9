// Prepares a step of a server in one launch: the step's metadata as int64 tensors at fixed addresses, and the overlay row of every
// sequence. kvant/serving/overlay.py says what an overlay row is and how it is found; its torch code is the reference, line by line.
//
// Grid: 1 + any, or any where nothing has an overlay. CTAs take roles in the order in which they start. The first one finds the rows: its
// threads have ITEMS sequences each, b = item * THREADS + thread, in phases with barriers between them. All others copy the metadata, wait
// for the first one, and copy the overlay rows that it has chosen. Who waits, waits for a CTA that already runs, so any grid is safe.
//
// The result does not depend on the order of threads: where several sequences name the same page or row, the first or the last of them
// takes it (atomicMin and atomicMax of sequence numbers). A page is written by the tokens of one sequence only.

#pragma once
#include "include/tokens.cuh"

constexpr int OVERLAY_ROW_BITS = 20;  // of a row or a sequence in a 64-bit key; Python checks that there are fewer

// An integer of 4 or 8 bytes.
DEV s64 load_integer(const void* p, int bytes, s64 i) { return bytes == 8 ? ((const s64*)p)[i] : (s64)((const int*)p)[i]; }

// The number of flags before each of a CTA's sequences, and of all.
template <int ITEMS> DEV int flags_before(const bool* flag, int* before, int* warp_counts) {
  constexpr int WARPS = Config::THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = 0; i < ITEMS; i++) {
    const u32 ballot = __ballot_sync(FULL, flag[i]);
    before[i] = __popc(ballot & ((1u << lane) - 1));
    if (!lane) warp_counts[i * WARPS + warp] = __popc(ballot);
  }
  __syncthreads();
  int all = 0;
#pragma unroll 8
  for (int j = 0; j < ITEMS * WARPS; j++) {
    for (int i = 0; i < ITEMS; i++)
      if (j == i * WARPS + warp) before[i] += all;
    all += warp_counts[j];
  }
  __syncthreads();
  return all;
}

// Writes the pairs of rows of the flagged sequences in order; returns their number. There is at most one for each row.
template <int ITEMS, class A>
DEV int choose_copies(const A& a, const bool* flag, const int* source, const int* target, s64* sources, s64* targets, int* warp_counts) {
  int place[ITEMS];
  const int all = flags_before<ITEMS>(flag, place, warp_counts);
  for (int i = 0; i < ITEMS; i++)
    if (flag[i] && place[i] < a.rows) sources[place[i]] = source[i], targets[place[i]] = target[i];
  return min(all, a.rows);
}

// sink_row[first] = row of the last flagged sequence that begins with page `first`. Keys of an earlier step or phase are smaller. Page 0 is
// nobody's: it stands for a first page that the sliding window has left.
template <int ITEMS, class A> DEV void name_sink_rows(const A& a, int phase, const bool* flag, const int* first, const int* row) {
  const s64 tag = (2 * a.clock + phase) << OVERLAY_ROW_BITS;
  for (int i = 0; i < ITEMS; i++)
    if (flag[i] && first[i] > 0) atomicMax(a.claimed + first[i], tag | (s64)(i * Config::THREADS + threadIdx.x));
  __syncthreads();
  for (int i = 0; i < ITEMS; i++)
    if (flag[i] && first[i] > 0 && a.claimed[first[i]] == (tag | (s64)(i * Config::THREADS + threadIdx.x))) a.sink_row[first[i]] = row[i];
  __syncthreads();
}

// Late copies from number `from` on copy nothing.
template <class A> DEV void no_late_copies(const A& a, int from) {
#pragma unroll 1
  for (int i = from + threadIdx.x; i < min(a.batch, a.rows); i += Config::THREADS) a.late_source[i] = a.late_target[i] = a.rows;
}

template <class A> DEV void find_rows(const A& a) {
  // Long loops are not unrolled: most steps pass most of this code once, and have to fetch it.
  constexpr int THREADS = Config::THREADS, ITEMS = Config::ITEMS, SIZE = Config::PAGE_TOKENS, MOST = THREADS * ITEMS, NONE = MOST;
  DYNAMIC_SHARED(shared);
  s64* free_keys = (s64*)shared;              // [rows]: used << OVERLAY_ROW_BITS | row, of rows that no sequence finds
  s64* lease = free_keys + a.rows;            // [MOST]: of the sequences
  int* leader = (int*)(lease + MOST);         // [rows]: the first sequence that finds the row
  int* held_before = leader + a.rows;         // [rows]: sinks that the row holds before this step's tokens are written
  int* held_after = held_before + a.rows;     // [rows]: and before attention
  int* oldest = held_after + a.rows;          // [rows]: free rows, least recently used first
  int* start = oldest + a.rows;               // [MOST]: first new token
  __shared__ int warp_counts[ITEMS * THREADS / 32], free_count, sink_candidates, dropped, short_of_sinks;
  const int tid = threadIdx.x, width = a.table_width, sink = a.sink;
  const auto page_of = [&](int b, int i) { return (int)load_integer(a.table, a.table_bytes, (s64)b * a.table_stride + i); };

  // Of every page, the first place that this step writes: kept as a key that grows with the step and falls with the place.
#pragma unroll 1
  for (s64 t = tid; t < a.tokens; t += THREADS) {
    const s64 slot = load_integer(a.slot_mapping, a.slot_bytes, t);
    if (slot < 0) continue;
    const int place = (int)(slot % SIZE);
    atomicMax(a.written + slot / SIZE, a.clock * SIZE + (SIZE - 1 - place));
    if (!place) a.sink_row[slot / SIZE] = -1;
    if (place < sink) atomicMin(a.kept + slot / SIZE, (s64)place);
  }
#pragma unroll 1
  for (int r = tid; r < a.rows; r += THREADS) leader[r] = NONE, held_before[r] = held_after[r] = (int)a.held[r];
  if (!tid) free_count = sink_candidates = dropped = short_of_sinks = 0;
  int count[ITEMS], before[ITEMS], length[ITEMS];
  for (int i = 0; i < ITEMS; i++) {
    const int b = i * THREADS + tid;
    count[i] = before[i] = length[i] = 0;
    if (b >= a.batch) continue;
    start[b] = (int)load_integer(a.query_start_loc, a.query_start_bytes, b);
    count[i] = (int)load_integer(a.query_start_loc, a.query_start_bytes, b + 1) - start[b];
    length[i] = (int)load_integer(a.seq_lens, a.seq_lens_bytes, b);
    before[i] = length[i] - count[i];
  }
  __syncthreads();

  // The row that the page of a sequence's newest token names.
  int found[ITEMS];
  bool matched[ITEMS];
  for (int i = 0; i < ITEMS; i++) {
    const int b = i * THREADS + tid;
    found[i] = a.rows;
    matched[i] = false;
    if (count[i] <= 0 || before[i] <= 0) continue;
    const int newest = before[i] - 1, tail = page_of(b, newest / SIZE);
    const s64 named = a.writer[tail];
    if (named < 0) continue;
    const int row = (int)(named % (a.rows + 1));
    if (row == a.rows || a.lease[row] != named) continue;
    const s64 key = a.written[tail];
    if (key / SIZE == a.clock && SIZE - 1 - (int)(key % SIZE) <= newest % SIZE) continue;  // written anew in this step
    const int written = (int)a.length[row], end = min(max(written - 1, 0) / SIZE, width - 1), ahead = written - before[i];
    if (page_of(b, end) != (int)a.last[row]) continue;
    // A step keeps at least the first of its tokens. A sequence that begins before it was preempted, and has come again.
    if (ahead != 0 && !(ahead > 0 && ahead <= a.drafts && before[i] > (int)a.begun[row])) continue;
    found[i] = row;
    matched[i] = true;
    atomicMin(leader + row, b);
  }
  __syncthreads();

  // Several sequences that share a full page find the same row: the first one takes it, the others get a copy. Who has no row gets the
  // least recently used one.
  bool tied[ITEMS], fresh[ITEMS];
  int place[ITEMS], row[ITEMS];
  for (int i = 0; i < ITEMS; i++) {
    const bool leads = matched[i] && leader[found[i]] == i * THREADS + tid;
    tied[i] = matched[i] && !leads;
    matched[i] = leads;
    fresh[i] = count[i] > 0 && !leads;
  }
  bool any_fresh = false;
  for (int i = 0; i < ITEMS; i++) any_fresh |= fresh[i];
  // A quiet step is one in which every sequence goes on in its own row. It jumps over most of this code, which it would have to fetch from
  // memory first: between two steps the weights of a model pass through the caches.
  any_fresh = __syncthreads_or(any_fresh);
  if (any_fresh) {
    flags_before<ITEMS>(fresh, place, warp_counts);
#pragma unroll 1
    for (int r = tid; r < a.rows; r += THREADS)
      if (leader[r] == NONE) free_keys[atomicAdd(&free_count, 1)] = a.used[r] << OVERLAY_ROW_BITS | r;
    __syncthreads();
#pragma unroll 1
    for (int j = tid; j < free_count; j += THREADS) {
      const s64 key = free_keys[j];
      int rank = 0;
#pragma unroll 4
      for (int k = 0; k < free_count; k++) rank += free_keys[k] < key;
      oldest[rank] = (int)(key & ((1 << OVERLAY_ROW_BITS) - 1));
    }
    __syncthreads();
  }
  for (int i = 0; i < ITEMS; i++) {
    row[i] = matched[i] ? found[i] : a.rows;
    if (fresh[i] && free_count) row[i] = oldest[min(place[i], free_count - 1)];
    if (row[i] == a.rows) count[i] = 0;  // padding; a server has a row for every other sequence
  }

  // Sinks and ring of the row. Where the row is given to a sequence with another first page, the page's sinks are saved, unless its
  // sink row has them.
  int first[ITEMS], held[ITEMS], ring_start[ITEMS], wanted[ITEMS], after[ITEMS], saved[ITEMS], from[ITEMS];
  bool whole[ITEMS], saves[ITEMS], asked[ITEMS];
  const int copies = any_fresh ? choose_copies<ITEMS>(a, tied, found, row, a.row_source, a.row_target, warp_counts) : 0;
  bool needy = false;  // lacks sinks
  if (!tid) a.counts[0] = copies;
  for (int i = 0; i < ITEMS; i++) {
    const int b = i * THREADS + tid;
    first[i] = b < a.batch ? page_of(b, 0) : 0;
    // a page that the sliding window has left is another's: no sequence begins with it
    if (a.sliding_window > 0 && before[i] + 1 + a.drafts - a.sliding_window >= SIZE) first[i] = 0;
    held[i] = saved[i] = 0;
    whole[i] = saves[i] = asked[i] = false;
    ring_start[i] = before[i];
    wanted[i] = min(before[i], sink);
    after[i] = 0;
    if (count[i] <= 0) continue;
    // the least recently used row may be that of an earlier sequence with the same sinks
    const int old = (int)a.first[row[i]];
    const bool same = matched[i] || (old == first[i] && (int)a.sink_row[first[i]] == row[i]);
    if (same) held[i] = min((int)a.held[row[i]], before[i]);
    if (tied[i]) held[i] = min((int)a.held[found[i]], before[i]);
    if (matched[i] || tied[i]) ring_start[i] = (int)a.ring_start[found[i]];
    // A server that captures a step invents sequences: they write nothing, or lie in its first page.
    const bool written = load_integer(a.slot_mapping, a.slot_bytes, start[b]) >= 0;
    asked[i] = first[i] > 0 && written;
    const bool real = written && page_of(b, min(max(length[i] - 1, 0) / SIZE, width - 1)) > 0;
    if (a.unit && ring_start[i] > before[i] - before[i] % a.unit && real) *a.lost = 1;  // the tail of its group is nowhere
    whole[i] = held[i] == wanted[i];
    needy |= !whole[i];
    after[i] = whole[i] ? min(length[i], sink) : held[i];
    if (a.sink_rows && !same && old > 0 && (int)a.sink_row[old] == row[i]) {  // at most one row is named by a page
      const s64 key = a.written[old];
      const int kept = (int)a.kept[old], now = min((int)a.held[row[i]], key / SIZE == a.clock ? SIZE - 1 - (int)(key % SIZE) : SIZE);
      if (now > kept) {
        saves[i] = true;
        saved[i] = old;
        a.kept[old] = now;
        if (!kept) a.stored[old] = -1;
      }
    }
  }
  const bool quiet = !__syncthreads_or(any_fresh || needy);
  for (int i = 0; i < ITEMS; i++) {
    if (count[i] <= 0) continue;
    // where sinks are not written early, a chunk that continues a prompt writes them after attention
    const bool soon_written = before[i] == 0 || count[i] == 1 || a.early;
    held_before[row[i]] = held[i];
    held_after[row[i]] = soon_written ? after[i] : held[i];
    if (!matched[i] || first[i]) a.first[row[i]] = first[i];  // the row still has the sinks of a page that a sliding window has left
  }
  name_sink_rows<ITEMS>(a, 0, whole, first, row);

  // Who lacks sinks gets them from a row whose sequence begins with the same page: those that are there now; or from the page's sink row;
  // or from a row to which this step writes them before attention.
  if (sink && !quiet) {
    int giver[ITEMS], ready[ITEMS];
    bool known[ITEMS], asks[ITEMS], takes[ITEMS], unstored[ITEMS];
    for (int i = 0; i < ITEMS; i++) {
      const bool needy = count[i] > 0 && held[i] < wanted[i];
      giver[i] = needy ? (int)a.sink_row[first[i]] : -1;
      known[i] = giver[i] >= 0 && (int)a.first[giver[i]] == first[i];
      ready[i] = known[i] ? min(min(held_before[giver[i]], before[i]), sink) : 0;
      asks[i] = known[i] && ready[i] > held[i];
      if (asks[i]) held[i] = ready[i];
      takes[i] = needy && min((int)a.kept[first[i]], wanted[i]) > held[i];
      // sink rows that this step uses are not given away
      if (takes[i] && a.stored[first[i]] >= 0) a.sink_used[a.stored[first[i]]] = a.clock;
      unstored[i] = saves[i] && a.stored[saved[i]] < 0;
      if (saves[i] && !unstored[i]) a.sink_used[a.stored[saved[i]]] = a.clock;
    }
    const int ready_rows = choose_copies<ITEMS>(a, asks, giver, row, a.sink_source, a.sink_target, warp_counts);
    const int new_rows = flags_before<ITEMS>(unstored, place, warp_counts);
    if (new_rows) {
      // Sink rows in the order in which they are given away: those whose page has lost its sinks, or has them in a sequence's row, too;
      // then the least recently used.
#pragma unroll 1
      for (int s = tid; s < a.sink_rows; s += THREADS) {
        const int page = (int)a.owner[s], n = page < 0 ? 0 : (int)a.kept[page];
        const bool owned = n > 0 && (int)a.stored[page] == s;
        const int other = owned ? (int)a.sink_row[page] : -1;
        const bool busy = owned && !(other >= 0 && (int)a.first[other] == page && held_before[other] >= n);
        const bool free = !busy || a.sink_used[s] < a.clock;
        a.sink_keys[s] = free ? (busy ? a.sink_used[s] << OVERLAY_ROW_BITS : 0) | s : (s64)1 << 62;
        if (free) atomicAdd(&sink_candidates, 1);
      }
      __syncthreads();
#pragma unroll 1
      for (int s = tid; s < a.sink_rows; s += THREADS) {
        const s64 key = a.sink_keys[s];
        if (key >> 62) continue;
        int rank = 0;
#pragma unroll 4
        for (int k = 0; k < a.sink_rows; k++) rank += a.sink_keys[k] < key;
        if (rank < new_rows) a.sink_order[rank] = s;
      }
      __syncthreads();
      for (int i = 0; i < ITEMS; i++) {
        if (!unstored[i]) continue;
        if (place[i] >= sink_candidates) {
          saves[i] = false;
          a.kept[saved[i]] = 0;
          atomicAdd(&dropped, 1);
          continue;
        }
        const int s = (int)a.sink_order[place[i]], page = (int)a.owner[s];
        if (a.sink_keys[s] >> OVERLAY_ROW_BITS) atomicAdd(&dropped, 1);
        if (page >= 0 && (int)a.stored[page] == s) a.kept[page] = 0;
        a.owner[s] = saved[i];
        a.stored[saved[i]] = s;
        a.sink_used[s] = a.clock;
      }
      __syncthreads();
      if (!tid && dropped) a.missing[0] += dropped;
    }
    for (int i = 0; i < ITEMS; i++) from[i] = saves[i] ? (int)a.stored[saved[i]] : 0;
    const int saved_rows = choose_copies<ITEMS>(a, saves, row, from, a.save_source, a.save_target, warp_counts);
    for (int i = 0; i < ITEMS; i++) {
      const int kept = takes[i] ? min((int)a.kept[first[i]], wanted[i]) : 0;
      takes[i] = kept > held[i];
      from[i] = takes[i] ? (int)a.stored[first[i]] : 0;
      if (takes[i]) held[i] = kept;
    }
    const int taken_rows = choose_copies<ITEMS>(a, takes, from, row, a.take_source, a.take_target, warp_counts);
    if (!tid) a.counts[1] = saved_rows, a.counts[2] = ready_rows, a.counts[3] = taken_rows;
    if (a.late) {
      for (int i = 0; i < ITEMS; i++) {
        ready[i] = known[i] ? min(min(held_after[giver[i]], before[i]), sink) : 0;
        asks[i] = known[i] && ready[i] > held[i];
        if (asks[i]) held[i] = ready[i];
      }
      const int late_rows = choose_copies<ITEMS>(a, asks, giver, row, a.late_source, a.late_target, warp_counts);
      no_late_copies(a, late_rows);
    }
    for (int i = 0; i < ITEMS; i++) {
      whole[i] = count[i] > 0 && held[i] == wanted[i];
      after[i] = whole[i] ? min(length[i], sink) : held[i];
      if (asked[i] && !matched[i] && !whole[i]) atomicAdd(&short_of_sinks, 1);
    }
    name_sink_rows<ITEMS>(a, 1, whole, first, row);
    if (!tid && short_of_sinks) a.missing[1] += short_of_sinks;
  } else {
    if (!tid) a.counts[1] = a.counts[2] = a.counts[3] = 0;
    if (a.late) no_late_copies(a, 0);
  }

  // Records the step. Padding sequences have no row of their own, and nothing is recorded of them.
  for (int i = 0; i < ITEMS; i++) {
    const int b = i * THREADS + tid;
    if (b >= a.batch) continue;
    a.out_rows[b] = row[i];
    a.out_sinks[b] = after[i];
    a.out_ring_start[b] = ring_start[i];
    lease[b] = -1;
    if (count[i] <= 0) continue;
    lease[b] = matched[i] ? a.lease[row[i]] : a.clock * (a.rows + 1) + row[i];
    a.lease[row[i]] = lease[b];
    a.last[row[i]] = page_of(b, min(max(length[i] - 1, 0) / SIZE, width - 1));
    a.length[row[i]] = length[i];
    a.held[row[i]] = after[i];
    a.ring_start[row[i]] = ring_start[i];
    a.begun[row[i]] = before[i];
    a.used[row[i]] = a.clock;
  }
  __syncthreads();
#pragma unroll 1
  for (s64 t = tid; t < a.tokens; t += THREADS) {
    const s64 slot = load_integer(a.slot_mapping, a.slot_bytes, t);
    if (slot >= 0) a.writer[slot / SIZE] = lease[last_sequence(a.batch, a.half_batch, [&](int b) { return start[b] <= t; })];
  }
}

// The step's metadata, and padding up to the size of the tensors: a graph reads as many sequences and tokens as it was captured with.
template <class A> DEV void copy_metadata(const A& a, int cta, int ctas) {
  constexpr int THREADS = Config::THREADS, SIZE = Config::PAGE_TOKENS, ROW_THREADS = THREADS < 256 ? THREADS : 256;
  const s64 index = (s64)cta * THREADS + threadIdx.x, stride = (s64)ctas * THREADS;
#pragma unroll 1
  for (s64 t = index; t < a.token_room; t += stride) a.out_slot_mapping[t] = t < a.tokens ? load_integer(a.slot_mapping, a.slot_bytes, t) : -1;
#pragma unroll 1
  for (s64 b = index; b < a.batch_room; b += stride) {
    a.out_seq_lens[b] = b < a.batch ? load_integer(a.seq_lens, a.seq_lens_bytes, b) : 0;
    a.out_query_start_loc[b] = load_integer(a.query_start_loc, a.query_start_bytes, min(b, (s64)a.batch));
    if (b >= a.batch || !a.rows) a.out_rows[b] = a.out_sinks[b] = a.out_ring_start[b] = 0;
  }
  // Entries of the table past a sequence's last page are never read. Pages that the sliding window has left, which may be another's by now,
  // become -1. Groups of tokens are written by the table, not by slots: a sequence whose tokens have none, which a server invents to run an
  // empty step, gets the server's first page, which is nobody's.
#pragma unroll 1
  for (int b = (int)(index / ROW_THREADS); b < a.batch; b += (int)(stride / ROW_THREADS)) {
    const s64 length = load_integer(a.seq_lens, a.seq_lens_bytes, b), pages = min((length + SIZE - 1) / SIZE, (s64)a.table_width);
    const s64 first = load_integer(a.query_start_loc, a.query_start_bytes, b);
    const s64 before = length - (load_integer(a.query_start_loc, a.query_start_bytes, b + 1) - first);
    const s64 left = a.sliding_window > 0 ? (before + 1 - a.sliding_window) / SIZE : 0;  // pages; a negative number is none
    const bool invented = a.unit && first < a.tokens && load_integer(a.slot_mapping, a.slot_bytes, first) < 0;
    for (s64 i = threadIdx.x % ROW_THREADS; i < pages; i += ROW_THREADS)
      a.out_table[b * a.out_table_stride + i] = i < left ? -1 : invented ? 0 : load_integer(a.table, a.table_bytes, b * a.table_stride + i);
  }
}

// Copies rows of one stream and layer to others.
DEV void copy_overlay(const uint4* in, s64 in_words, uint4* out, s64 out_words, s64 words, const s64* source, const s64* target, int count) {
#pragma unroll 1  // a step that copies nothing fetches less code
  for (int i = 0; i < count; i++) {
    const uint4* x = in + source[i] * in_words;
    uint4* to = out + target[i] * out_words;
    if (x == to) continue;
    for (s64 w = threadIdx.x; w < words; w += 4 * Config::THREADS) {  // four loads at a time
      uint4 y[4];
      for (int j = 0; j < 4; j++)
        if (w + j * Config::THREADS < words) y[j] = x[w + j * Config::THREADS];
      for (int j = 0; j < 4; j++)
        if (w + j * Config::THREADS < words) to[w + j * Config::THREADS] = y[j];
    }
  }
  __syncthreads();  // a row may be read by one list and written by the next
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) kvant_overlay_step(const OverlayStepArguments a) {
  __shared__ int ticket;
  if (!threadIdx.x) ticket = atomic_add_acq_rel(a.counters);
  __syncthreads();
  const int finders = a.rows ? 1 : 0;
  if (ticket < finders) {
    find_rows(a);
    __syncthreads();
    if (!threadIdx.x) atomic_add_acq_rel(a.counters + 1);  // the rows are found
  } else {
    const int cta = ticket - finders, ctas = gridDim.x - finders;
    copy_metadata(a, cta, ctas);
    if (a.rows) {
      if (!threadIdx.x)
        while (!load_acquire(a.counters + 1)) pause_thread();
      __syncthreads();
#pragma unroll 1
      for (int unit = cta; unit < 2 * a.layers; unit += ctas) {
        const bool values = unit >= a.layers;
        const s64 row_words = values ? a.value_row_words : a.key_row_words, layer = values ? unit - a.layers : unit;
        const s64 words = values ? a.value_words : a.key_words, sink_words = values ? a.value_sink_words : a.key_sink_words;
        uint4* x = (values ? a.value : a.key) + layer * (values ? a.value_layer_words : a.key_layer_words);
        uint4* sinks = (values ? a.value_sinks : a.key_sinks) + layer * a.sink_rows * sink_words;
        copy_overlay(x, row_words, sinks, sink_words, sink_words, a.save_source, a.save_target, a.counts[1]);  // before the rows are others'
        copy_overlay(x, row_words, x, row_words, words, a.row_source, a.row_target, a.counts[0]);
        copy_overlay(x, row_words, x, row_words, sink_words, a.sink_source, a.sink_target, a.counts[2]);
        copy_overlay(sinks, sink_words, x, row_words, sink_words, a.take_source, a.take_target, a.counts[3]);
      }
    }
  }
  __syncthreads();
  if (!threadIdx.x && atomic_add_acq_rel(a.counters + 2) == gridDim.x - 1)  // the last CTA leaves the counters as they were
    a.counters[0] = a.counters[1] = a.counters[2] = 0;
}
