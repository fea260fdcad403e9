// Decode attention, 5 of 5: paged, over packed codes, in one launch, split along the sequence, windows and merge included. The
// text before it is common.cu, softmax.cu, queries.cu, groups.cu and attend.cu; for vector quantization, indices.cu and lookup.cu too.
//
// S^T = K Q^T and O^T = V^T P^T: tokens (then channels) fill the 16 rows of the tensor core's product, the query heads of a KV
// head its 8 columns. The page lies in the order of the lanes (kvant/layout.py), so a lane reads its own share and nothing is
// shuffled. Scales touch scores and probabilities, never elements.
//
// Scores: codes as bytes times queries as two signed bytes (128 high + low, in neighbouring columns), exact in integers. A lane
// then holds the scores of query head t (t + 4, ...) for tokens g and g + 8 of every tile of 16.
// Outputs: codes as fp16 times probabilities as fp16. Up to four query heads leave half of the columns idle, so two tiles share
// them: PAIRED.
//
// Work is cut into equal parts, one for each block, over all (sequence, head)s laid end to end; a unit is a page, or one or two
// tiles of the full-precision windows. Where a (sequence, head) is shared by several blocks, the last to finish merges.
//
// Constants beside those of common.cu: GROUP (query heads of a KV head), TILE_HEADS (of them, a block's), QUERY_TILES,
// KEY_PLANES and VALUE_CODES, KEY_META, VALUE_META (0 scale and minimum, 1 scale and integer zero, 2 scale), their types and
// offsets, VALUE_FLAG (a negative scale says that the mean was taken off a value), SINK, RECENT, WINDOW_TOKENS (full-precision tokens of a sequence), WINDOW_TYPE, UNIT (of windows,
// in pages), MIXED (what a page counts whose tokens are partly in windows), QUERY_TYPE, WARP_BYTES (of dynamic shared memory), DUAL and INVERSE (0 nothing, 1 Hadamard of order ..._ORDER,
// 2 a matrix, in kernels of their own before and after), TURNED (positions of a block to whose start keys are turned back, 0 where
// they are not; queries are then turned by kvant_turn before, of TURN_WARPS and TURN_BLOCKS, as TURN_PARTS numbers of fp16), SOFTCAP, STAGES, WARPS, MIN_BLOCKS, BULK,
// INDEXED (whether streams are indices of centroids, which have no scales: indices.cu), KEY_BOOK and VALUE_BOOK, KEY_BOOK_HEADS and VALUE_BOOK_HEADS
// (1 where heads share them).

// --- a block --------------------------------------------------------------------------------------------------------------

struct Shared {
  Prepared query;
  float m[WARPS][4 * OWN], l[WARPS][4 * OWN], flags[WARPS][4 * OWN];
  float total_m[4 * OWN], total_l[4 * OWN], total_flags[4 * OWN];
  u64 barrier[WARPS][STAGES];
  Work work;  // here, not in registers: it is needed again only at the end
  int last;
};
constexpr int PARTIAL = TILE_HEADS * (D + 4);  // floats of a block's part of a (sequence, head): outputs, their log-sum-exp, flags

// Units are dealt to blocks as evenly as can be: the first `more` blocks have `each` + 1, the others `each`.
struct Deal {
  int each, more;
  DEV int start(int block) const { return block * each + min(block, more); }
  DEV int block(int unit) const { return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each; }
};

// The parts of blocks first to last, weighted by their log-sum-exps, into sh.query.rows. A block's part lies in its second slot where
// it began before this (sequence, head), or with it: only the first one did.
DEV void merge_parts(const Arguments& a, Shared& sh, u8* room, int first, int last) {
  constexpr int THREADS = WARPS * 32, COUNT = (TILE_HEADS * D / 4 + THREADS - 1) / THREADS;
  constexpr int SLOT = COUNT > 1 ? THREADS : TILE_HEADS * D / 4;  // threads that have channels of a part, four each
  constexpr int AHEAD = WARPS * WARP_BYTES / (SLOT * 16 + TILE_HEADS * 8);
  static_assert(AHEAD > 0, "there is room for a part");
  float4 x[COUNT], *parts = (float4*)room + threadIdx.x;  // of the next parts
  float m[COUNT], total[COUNT], flags[COUNT], *weights = (float*)room + AHEAD * SLOT * 4, *marks = weights + AHEAD * TILE_HEADS;
  const auto part = [&](int block) { return a.partial + (s64)(block * 2 + (block == first)) * PARTIAL; };
  const auto ask = [&](int j, int base, int some) {  // for all at once: one after another, they would be most of a short attention's time
    const int i = threadIdx.x + j * THREADS;
    for (int k = 0; k < some && i < TILE_HEADS * D / 4; k++) copy16(parts + k * SLOT, (const float4*)part(base + k) + i);
  };
#pragma unroll
  for (int j = 0; j < COUNT; j++) x[j] = make_float4(0.f, 0.f, 0.f, 0.f), m[j] = minus_infinity(), total[j] = flags[j] = 0.f;
  for (int base = first; base <= last; base += AHEAD) {
    const int some = min(AHEAD, last + 1 - base);
    __syncthreads();
    ask(0, base, some);
    for (int i = threadIdx.x; i < some * TILE_HEADS; i += THREADS) {
      const float* end = part(base + i / TILE_HEADS) + TILE_HEADS * D + i % TILE_HEADS;
      weights[i] = __ldcg(end);
      if (VALUE_FLAG) marks[i] = __ldcg(end + TILE_HEADS);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      const int i = threadIdx.x + j * THREADS, h = min(i / (D / 4), TILE_HEADS - 1);
      if (j) ask(j, base, some);
      float top = m[j];
      for (int k = 0; k < some; k++) top = fmaxf(top, weights[k * TILE_HEADS + h]);
      const float fade = m[j] > -1e29f ? exp2_(m[j] - top) : 0.f;
      m[j] = top, total[j] *= fade, flags[j] *= fade;
      x[j].x *= fade, x[j].y *= fade, x[j].z *= fade, x[j].w *= fade;
      await_copies();
      if (i < TILE_HEADS * D / 4) {
#pragma unroll 4
        for (int k = 0; k < some; k++) {
          const float4 y = parts[k * SLOT];
          const float own = weights[k * TILE_HEADS + h], by = own > -1e29f ? exp2_(own - top) : 0.f;
          total[j] += by;
          if (VALUE_FLAG) flags[j] += by * marks[k * TILE_HEADS + h];
          x[j].x = fmaf(by, y.x, x[j].x), x[j].y = fmaf(by, y.y, x[j].y), x[j].z = fmaf(by, y.z, x[j].z), x[j].w = fmaf(by, y.w, x[j].w);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const int i = threadIdx.x + j * THREADS;
    if (i < TILE_HEADS * D / 4) {
      ((float4*)sh.query.rows)[i] = x[j];
      if (i % (D / 4) == 0) sh.total_m[i / (D / 4)] = m[j], sh.total_l[i / (D / 4)] = total[j], sh.total_flags[i / (D / 4)] = flags[j];
    }
  }
}

DEV int sum_of(int x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}
DEV int parts_of(int units, float share) { return max(1, (int)((float)units * share)); }

// The sequence b that a unit is of, and the units of all heads of the sequences before it.
DEV void find(const Arguments& a, int unit, bool split, float share, int lane, int& b, int& before) {
  b = before = 0;
  for (int base = 0; base < a.batch; base += 32) {
    int units = base + lane < a.batch ? work_of(a, base + lane).units : 0;
    if (split && base + lane < a.batch) units = parts_of(units, share);
    int sum = units;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int x = __shfl_up_sync(FULL, sum, o);
      if (lane >= o) sum += x;
    }
    const u32 beyond = __ballot_sync(FULL, before + sum * HEADS > unit);
    if (beyond) {
      const int found = __ffs(beyond) - 1;
      b = base + found;
      before += __shfl_sync(FULL, sum - units, found) * HEADS;
      return;
    }
    before += __shfl_sync(FULL, sum, 31) * HEADS;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) kvant_decode(const Arguments a) {
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ __align__(16) Shared sh;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u8* stages = dynamic + warp * WARP_BYTES;
  float* outputs = (float*)dynamic;  // [WARPS][TILE_HEADS, D], each warp's where its pages were
  constexpr int OUTPUT_STRIDE = WARP_BYTES / 4;
  static_assert(WARP_BYTES >= STAGES * RUN && WARP_BYTES >= 4 * OWN * D * 4, "a warp's bytes hold its pages, then its outputs");

  start_dependents();  // outputs by a matrix
  begin_copies(sh.barrier[warp], STAGES, lane);
  bool alone = DUAL != 2;  // whether no kernel before this one makes queries
  int booked = -1;  // whose codebooks are in shared memory

  // Which part of all units is this block's. Where there are several blocks for every (sequence, head), each of those is cut into
  // as many equal parts as fit, so that no block has two of them; a unit is then such a part.
  int all = 0;
  for (int i = lane; i < a.batch; i += 32) all += work_of(a, i).units;
  all = sum_of(all) * HEADS;
  int blocks = min((int)gridDim.x, max(1, all / (WARPS * 2)));  // two pages a warp, or it is not worth a block
  const bool split = blocks >= 3 * a.batch * HEADS;
  const float share = (float)blocks / (float)all;
  Deal deal = {all / blocks, all % blocks};
  if (split) {
    blocks = 0;
    for (int i = lane; i < a.batch; i += 32) blocks += parts_of(work_of(a, i).units, share);
    blocks = sum_of(blocks) * HEADS;
    deal = {1, 0};
  }
  int copied = 0, read = 0;  // runs of this warp
  for (int part = blockIdx.x; part < blocks; part += gridDim.x) {
  int now = deal.start(part), b, before;
  const int end = deal.start(part + 1);
  find(a, now, split, share, lane, b, before);
  while (now < end) {
    if (threadIdx.x == 0) sh.work = work_of(a, b);
    __syncthreads();
    const volatile Work& w = sh.work;
    const int units = split ? parts_of(w.units, share) : w.units;
    const int virtual_head = (now - before) / units, head = virtual_head / QUERY_TILES, query_tile = virtual_head % QUERY_TILES;
    const int start = before + virtual_head * units;
    const int from = now - start, to = min(end, start + units) - start;
    const int windows = w.units_windows, pages = w.weight;
    int page_from = max(from - windows * UNIT, 0), page_to = min(max(to - windows * UNIT, 0), pages);
    int window_from = (from + UNIT - 1) / UNIT, window_to = min(windows, (to + UNIT - 1) / UNIT);
    if (split) {  // the same share of both
      page_from = from * pages / units, page_to = to * pages / units;
      window_from = from * windows / units, window_to = to * windows / units;
    }
    // A warp's share of the block's windows and pages: pages in one stretch, fewer where it has more of the windows.
    const int own_windows = max(0, window_to - window_from), own_pages = max(0, page_to - page_from);
    int quota = (own_windows * UNIT + own_pages + WARPS - 1) / WARPS;
    for (int room = 0; room < own_pages; quota++) {
      room = 0;
      for (int i = 0; i < WARPS; i++) room += max(0, quota - (own_windows - i + WARPS - 1) / WARPS * UNIT);
      if (room >= own_pages) break;
    }
    for (int i = 0; i < warp; i++) page_from += max(0, quota - (own_windows - i + WARPS - 1) / WARPS * UNIT);
    page_to = min(page_to, page_from + max(0, quota - (own_windows - warp + WARPS - 1) / WARPS * UNIT));
    page_from = page_at(page_from, w.pages, w.mixed), page_to = page_at(page_to, w.pages, w.mixed);

    // the first copies are on their way while the query is prepared
    const s64* table = a.table + (s64)b * a.table_width + w.page;
    int ahead = page_from;  // the next page to be copied
    __syncwarp();
#pragma unroll
    for (int i = 0; i < STAGES; i++, ahead++) {
      if (ahead < page_to) {
        const int stage = copied++ % STAGES;
        copy_run(stages + stage * RUN, a.pages + (table[ahead] * KV_HEADS + head) * RUN, &sh.barrier[warp][stage], lane);
      } else no_copy();
    }
    s64 next = ahead < page_to ? table[ahead] : 0;
#if INDEXED
    if (booked < 0 || (KEY_BOOK_HEADS * VALUE_BOOK_HEADS > 1 && booked != head)) {
      KeyBook::load_book<WARPS * 32>(dynamic, a.key_books + (KEY_BOOK_HEADS > 1 ? head : 0) * KeyBook::ENTRIES * KeyBook::ENTRY);
      ValueBook::load_book<WARPS * 32>(dynamic, a.value_books + (VALUE_BOOK_HEADS > 1 ? head : 0) * ValueBook::ENTRIES * ValueBook::ENTRY);
      booked = head;
      __syncthreads();
    }
#endif
    if (!alone) await_kernel(), alone = true;  // what was read so far, the kernel of the queries does not write

    const int query_head = head * GROUP + query_tile * TILE_HEADS;
    const int count = min(TILE_HEADS, GROUP - query_tile * TILE_HEADS);
    const s64 query = (s64)b * KV_HEADS * GROUP + query_head, place = query * D;
#if TURNED
    constexpr int LAST_LINE = (sizeof(Turned) + 127) / 128;
    const Turned* turned = a.turned + ((s64)b * HEADS + virtual_head) * a.blocks;
#else
    prepare(sh.query, a, query, count);
#endif
    State st;
    st.clear();
#if WINDOW_TOKENS
    const s64 owner = a.owners[b];
    for (int i = window_from + warp; i < window_to; i += WARPS) {
      constexpr int TOKENS = 16 * WINDOW_TILES;
      const bool second = i >= w.units_first;
      const int at = second ? w.second + (i - w.units_first) * TOKENS : w.low + i * TOKENS;
      const int last = second ? w.n : w.first_end;
#if TURNED
      for (int some = at, end = min(at + TOKENS, last); some < end;) {  // tokens of one block of positions at a time
        const int until = min(end, block_end(a, some));
        const int block = block_of(a, some), slot = turned_slot(block, block_of(a, w.n - 1));
        const float* rows = a.turned_rows + (((s64)b * HEADS + virtual_head) * TURNED_SLOTS + slot) * TILE_HEADS * D;
        attend_window(a, some, until, owner, head, lane, turned[block], rows, st);
        some = until;
      }
#else
      attend_window(a, at, last, owner, head, lane, sh.query, sh.query.rows, st);
#endif
    }
    enter_pages(st);
#endif
    Query q;
#if TURNED
    int block = -1;
#else
    load_query(q, sh.query, lane, a.scale);
#endif
    const int packed = w.packed, packed_end = w.packed_end, first_page = w.page;
#if KEY_GROUP
    const int keys = w.keys, values = w.values;
#endif
    for (int page = page_from; page < page_to; page++) {
      const int stage = read % STAGES;
      await_run(&sh.barrier[warp][stage], read / STAGES & 1);
      read++;
      const u8* run = stages + stage * RUN;
#if KEY_GROUP
      q.entered = -1;
#endif
#pragma unroll 1
      for (int tile = 0; tile < TILES; tile += CHUNK) {
        const int at = ORIGIN + (first_page + page) * PAGE + tile * 16;
        if (TILES > CHUNK && (at + 16 * CHUNK <= packed || at >= packed_end)) continue;
#if TURNED
        for (int some = max(at, packed), end = min(at + 16 * CHUNK, packed_end); some < end;) {  // tokens of one block of positions at a time
          const int until = min(end, block_end(a, some));
          if (block_of(a, some) != block) {
            block = block_of(a, some);
            load_query(q, turned[block], lane, a.scale);
            if (block + 1 < a.blocks && lane <= LAST_LINE) prefetch((const u8*)(turned + block + 1) + min(lane * 128, (int)sizeof(Turned) - 4));
          }
          attend_page(run, tile, at, some, until, lane, q, st, a.cap, dynamic);
          some = until;
        }
#elif KEY_GROUP
        if (at + 16 * CHUNK <= min(keys, values) || keys == values) {
          attend_page(run, tile, at, packed, packed_end, lane, q, st, a.cap, dynamic);
        } else {
#pragma unroll 1
          for (int i = 0; i < CHUNK; i += MIXED_TILES)
            if (at + 16 * (i + MIXED_TILES) > packed && at + 16 * i < packed_end)
              attend_mixed(a, run, tile + i, at + 16 * i, packed, packed_end, keys, values, owner, head, lane, q, st);
        }
#else
        attend_page(run, tile, at, packed, packed_end, lane, q, st, a.cap, dynamic);
#endif
      }
      __syncwarp();
      if (ahead < page_to) {
        const int to_stage = copied++ % STAGES;
        copy_run(stages + to_stage * RUN, a.pages + (next * KV_HEADS + head) * RUN, &sh.barrier[warp][to_stage], lane);
        ahead++;
        next = ahead < page_to ? table[ahead] : 0;
      } else no_copy();
    }

    // a warp's lanes together
#pragma unroll
    for (int h = 0; h < OWN; h++)
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        st.l[h] += __shfl_xor_sync(FULL, st.l[h], o);
        st.z[h] += __shfl_xor_sync(FULL, st.z[h], o);
        if (VALUE_FLAG) st.flags[h] += __shfl_xor_sync(FULL, st.flags[h], o);
      }
#if INDEXED
#pragma unroll
    for (int n = 0; n < OWN; n++)
      if (4 * n + t < TILE_HEADS)
#pragma unroll
        for (int k = 0; k < ACC_STEPS; k++) {
          const float* x = st.acc[n][k];
          ((float4*)(outputs + warp * OUTPUT_STRIDE + (4 * n + t) * D + g * (D / 8)))[k] = make_float4(x[0], x[1], x[2], x[3]);
        }
#else
    const float back = 1.f / st.norm;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      float x[D / 16][4];
#pragma unroll
      for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float power = 1.f / Values::unit(2 * k + (i >> 1));
          if (VALUE_GROUPS > 1) {  // the minima's row of the channels' group
            const float least = __shfl_sync(FULL, st.riding[n][i & 1], 2 * k / SHARE * 4 + t);
            x[k][i] = (st.acc[n][k][i] * power + least) * back;
          } else {
            const float riding = st.riding[n][i & 1];
            x[k][i] = ((st.acc[n][k][i] - riding) * power - riding * (Values::TOP * 0.5f / 1024.f)) * back;
          }
        }
#pragma unroll
      for (int j = 0; j < (PAIRED ? 1 : 2); j++) {
        const int h = PAIRED ? 0 : (2 * n + j) % OWN;
        if (4 * h + t < TILE_HEADS) {
          float* o = outputs + warp * OUTPUT_STRIDE + (4 * h + t) * D;
#pragma unroll
          for (int k = 0; k < D / 16; k++) {
            o[value_channel(g, 2 * k)] = (PAIRED ? x[k][0] + x[k][1] : x[k][j]) + st.z[h];
            o[value_channel(g, 2 * k + 1)] = (PAIRED ? x[k][2] + x[k][3] : x[k][j + 2]) + st.z[h];
          }
        }
      }
    }
#endif
    if (g == 0)
#pragma unroll
      for (int h = 0; h < OWN; h++) sh.m[warp][4 * h + t] = st.m[h], sh.l[warp][4 * h + t] = st.l[h], sh.flags[warp][4 * h + t] = st.flags[h];
    __syncthreads();

    // a block's warps together
    const bool whole = from == 0 && to == units;
    float* mine = a.partial + ((s64)part * 2 + (from > 0 ? 0 : 1)) * PARTIAL;
    if (threadIdx.x < TILE_HEADS) {
      const int h = threadIdx.x;
      float m = minus_infinity(), l = 0.f, f = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++)
        if (sh.l[i][h] > 0.f) m = fmaxf(m, sh.m[i][h]);
#pragma unroll
      for (int i = 0; i < WARPS; i++) {
        const float by = sh.l[i][h] > 0.f ? exp2_(sh.m[i][h] - m) : 0.f;
        l += by * sh.l[i][h], f += by * sh.flags[i][h];
        sh.l[i][h] = by;  // the warp's weight
      }
      const float back = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sh.l[i][h] *= back;
      sh.total_m[h] = l > 0.f ? m + log2_(l) : minus_infinity(), sh.total_l[h] = 1.f, sh.total_flags[h] = f * back;
      if (!whole) mine[TILE_HEADS * D + h] = sh.total_m[h], mine[TILE_HEADS * (D + 1) + h] = sh.total_flags[h];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_HEADS * D; i += WARPS * 32) {
      float x = 0.f;
#pragma unroll
      for (int k = 0; k < WARPS; k++) {
        const float by = sh.l[k][i / D];
        x += by > 0.f ? by * outputs[k * OUTPUT_STRIDE + i] : 0.f;
      }
      if (whole) sh.query.rows[i] = x;
      else mine[i] = x;
    }

    // blocks together
    bool finish = whole;
    if (!whole) {
      const int first = deal.block(start), last = deal.block(start + units - 1);
      __syncthreads();
      if (threadIdx.x == 0) {
        int* counter = a.arrived + b * HEADS + virtual_head;
        sh.last = arrive(counter) == last - first;
        if (sh.last) *counter = 0;
      }
      __syncthreads();
      finish = sh.last;
      if (finish) merge_parts(a, sh, dynamic, first, last);
    }
    if (finish) {
      __syncthreads();
      for (int h = warp; h < count; h += WARPS) {
        const float by = sh.total_l[h] > 0.f ? 1.f / sh.total_l[h] : 0.f;
        float x[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
          const int e = lane + 32 * i;
          x[i] = e < D ? sh.query.rows[h * D + e] * by : 0.f;
          if (VALUE_FLAG && e < D) x[i] = fmaf(sh.total_flags[h] * by, a.mean[head * D + e], x[i]);
        }
        if constexpr (INVERSE == 1) hadamard<INVERSE_ORDER>(x, lane);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
          const int e = lane + 32 * i;
          if (e < D) store_number<INVERSE == 2 ? 2 : QUERY_TYPE>(a.out, place + h * D + e, INVERSE == 1 && a.inverse_signs ? x[i] * a.inverse_signs[e] : x[i]);
        }
      }
      if (a.lse && threadIdx.x < count) {
        const float l = sh.total_l[threadIdx.x], m = sh.total_m[threadIdx.x];
        a.lse[query + threadIdx.x] = l > 0.f ? (m + log2_(l)) * 0.69314718055994531f : minus_infinity();
      }
    }
    fence_copies();  // the stages were written as memory and will be copied to
    __syncthreads();
    now = start + to;
    if (now == before + units * HEADS) before = now, b++;
  }
  }
}
