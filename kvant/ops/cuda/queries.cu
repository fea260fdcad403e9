// Decode attention, 2 of 4: queries, from what comes in to the bytes that keys are multiplied by.

// --- queries ----------------------------------------------------------------------------------------------------------

struct Query {
  u32 f[OWN][Keys::REGISTERS];             // column g: head g / 2 (+ 4, ...), its high byte in even columns, its low one in odd
  float factor[OWN], bias[OWN], sum[OWN], lost[OWN];  // of the lane's heads t, t + 4, ...
};

// What all warps of a block have in common of a query.
struct Prepared {
  float rows[TILE_HEADS * D];  // queries in the space of the keys; at the end, outputs
  float top[4 * OWN], sum[4 * OWN], bias[4 * OWN];
  float lost[4 * OWN];  // what all scores of a query are short of before the soft cap, where a mean was taken off the keys
  u32 f[OWN][Keys::REGISTERS][32];
};

constexpr int PER_LANE = (D + 31) / 32;  // elements lane, lane + 32, ... of a row

DEV float row_sum(float x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}

template <int ORDER> DEV void hadamard(float* x, int lane) {  // of every run of ORDER elements of a warp's row
#pragma unroll
  for (int half = 1; half < ORDER; half *= 2) {
    if (half < 32) {
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        const float other = __shfl_xor_sync(FULL, x[i], half);
        x[i] = lane & half ? other - x[i] : x[i] + other;
      }
    } else {
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (!(i & half / 32) && i + half / 32 < PER_LANE) {
          const float first = x[i], second = x[(i + half / 32) % PER_LANE];
          x[i] = first + second, x[(i + half / 32) % PER_LANE] = first - second;
        }
    }
  }
  const float by = rsqrtf((float)ORDER);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) x[i] *= by;
}

template <class P> DEV float level_bias(const float* q, int lane) {  // levels are centred where keys have a scale alone
  float x = 0.f;
  for (int i = lane; i < P::WIDTH; i += 32) x -= q[P::FIRST + i] * (P::WEIGHT * P::TOP * 0.5f);
  return x;
}
template <class... P> DEV float level_biases(Planes<P...>, const float* q, int lane) { return (level_bias<P>(q, lane) + ...); }
template <class... P> DEV constexpr float heaviest(Planes<P...>) {
  float x = 0.f;
  ((x = P::WEIGHT > x ? P::WEIGHT : x), ...);
  return x;
}

template <int THREADS, class P> DEV void make_plane(Prepared& sh) {
  for (int j = threadIdx.x; j < OWN * P::REGISTERS * 32; j += THREADS) {
    const int lane = j % 32, i = j / 32 % P::REGISTERS, n = j / 32 / P::REGISTERS, g = lane >> 2, head = 4 * n + (g >> 1);
    u32 packed = 0;
    if (head < TILE_HEADS) {
      const float by = QUERY_TOP / (sh.top[head] * heaviest(Keys{})) * (P::WEIGHT / (float)(1 << P::raised(i)));
#pragma unroll
      for (int byte = 0; byte < 4; byte++) {
        const int channel = P::channel(i, byte, lane & 3);
        const int whole = channel >= 0 ? __float2int_rn(sh.rows[head * D + channel] * by) : 0, high = (whole + 64) >> 7;
        packed |= (u32)((g & 1 ? whole - high * 128 : high) & 255) << (8 * byte);
      }
    }
    sh.f[n][P::BEFORE + i][lane] = packed;
  }
}
template <int THREADS, class... P> DEV void make_planes(Planes<P...>, Prepared& sh) { (make_plane<THREADS, P>(sh), ...); }

// Reads TILE_HEADS queries, brings them into the space of the keys, and makes their bytes. Every query is brought to the same
// largest magnitude.
DEV void prepare(Prepared& sh, const Arguments& a, s64 query, int heads) {  // queries from the query-th on
  const s64 place = query * D;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int h = warp; h < TILE_HEADS; h += WARPS) {
    float x[PER_LANE], top = 1e-30f, sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int e = lane + 32 * i;
      x[i] = e < D && h < heads ? load_number<DUAL == 2 ? 2 : QUERY_TYPE>(a.query, place + h * D + e) : 0.f;
      if (DUAL == 1 && a.dual_signs && e < D) x[i] *= a.dual_signs[e];
    }
    if constexpr (DUAL == 1) hadamard<DUAL_ORDER>(x, lane);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      if (lane + 32 * i < D) sh.rows[h * D + lane + 32 * i] = x[i];
      top = fmaxf(top, fabsf(x[i])), sum += x[i];
    }
    sum = row_sum(sum);
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
    __syncwarp();
    const float bias = KEY_META == 2 ? row_sum(level_biases(Keys{}, sh.rows + h * D, lane)) : 0.f;
    if (lane == 0) sh.top[h] = top, sh.sum[h] = sum, sh.bias[h] = bias, sh.lost[h] = SOFTCAP && a.lost && h < heads ? a.lost[query + h] * a.scale : 0.f;
  }
  __syncthreads();
  make_planes<WARPS * 32>(Keys{}, sh);
  __syncthreads();
}

template <class From> DEV void load_query(Query& q, const From& sh, int lane, float scale) {  // From: Prepared or Turned
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int head = min(4 * n + (lane & 3), TILE_HEADS - 1);
    q.factor[n] = scale * sh.top[head] * (heaviest(Keys{}) / QUERY_TOP);
    q.bias[n] = sh.bias[head] * scale, q.sum[n] = sh.sum[head] * scale, q.lost[n] = SOFTCAP || TURNED ? sh.lost[head] : 0.f;
#pragma unroll
    for (int i = 0; i < Keys::REGISTERS; i++) q.f[n][i] = sh.f[n][i][lane];
  }
}

DEV float capped(float x, float m, float cap) {  // a score in powers of two, less m
#if SOFTCAP
  return fmaf(cap, 1.f - __fdividef(2.f, 1.f + exp2_(fminf(x, 80.f))), -m);  // x is 2 log2(e) / cap times the product
#else
  return x - m;
#endif
}

// --- rows by a matrix ---------------------------------------------------------------------------------------------------------

struct RowArguments {
  const void* in;
  void* out;
  const float *matrix, *offset;  // [heads, D, D] and [heads, D]
  int batch, heads, rows;        // rows of a head and sequence
};

// x A + offset for queries on their way in and outputs on their way out. A block has a matrix (in registers, a quarter of a
// column a thread) and gridDim.x-th of the rows that it is for.
template <int IN, int OUT> DEV void multiply_rows(const RowArguments& a) {
  constexpr int AT_ONCE = 8;
  __shared__ float x[AT_ONCE][D], part[4][AT_ONCE][D];
  const int i = threadIdx.x % D, slice = threadIdx.x / D, head = blockIdx.y;
  float m[D / 4];
#pragma unroll
  for (int e = 0; e < D / 4; e++) m[e] = __ldg(a.matrix + ((s64)head * D + slice * (D / 4) + e) * D + i);
  const int all = a.batch * a.rows, each = (all + gridDim.x - 1) / gridDim.x, end = min(all, (int)(blockIdx.x + 1) * each);
  for (int first = blockIdx.x * each; first < end; first += AT_ONCE) {
    const int count = min(AT_ONCE, end - first);
    for (int j = threadIdx.x; j < count * D; j += 4 * D) {
      const int row = first + j / D;
      x[j / D][j % D] = load_number<IN>(a.in, (((s64)(row / a.rows) * a.heads + head) * a.rows + row % a.rows) * D + j % D);
    }
    __syncthreads();
    for (int h = 0; h < count; h++) {
      float y = 0.f;
#pragma unroll
      for (int e = 0; e < D / 4; e++) y = fmaf(x[h][slice * (D / 4) + e], m[e], y);
      part[slice][h][i] = y;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < count * D; j += 4 * D) {
      const int row = first + j / D, h = j / D, e = j % D;
      const float y = part[0][h][e] + part[1][h][e] + part[2][h][e] + part[3][h][e] + (a.offset ? a.offset[head * D + e] : 0.f);
      store_number<OUT>(a.out, (((s64)(row / a.rows) * a.heads + head) * a.rows + row % a.rows) * D + e, y);
    }
    __syncthreads();
  }
}
extern "C" __global__ void __launch_bounds__(4 * D) kvant_dual(const RowArguments a) { multiply_rows<QUERY_TYPE, 2>(a); }
extern "C" __global__ void __launch_bounds__(4 * D) kvant_inverse(const RowArguments a) { multiply_rows<2, QUERY_TYPE>(a); }

// --- queries turned back ------------------------------------------------------------------------------------------------------

#if TURNED
struct TurnArguments {
  const void* query;
  const float *matrix, *lost, *cosine, *sine;  // [1 or KV_HEADS, D, D], [KV_HEADS, D] or nothing, [blocks, half] twice
  Turned* out;
  float* rows;
  const s64 *lengths, *sinks, *exact_key, *exact_value;
  float scale;
  int batch, blocks, first, half, matrix_heads, window;
};

// Every query turned back to the start of every block of positions that its sequence reaches, brought into the space of the keys and
// made into bytes. A block of threads has the matrix of a head, as in `multiply_rows`, and gridDim.x-th of the sequences' blocks.
extern "C" __global__ void __launch_bounds__(4 * D) kvant_turn(const TurnArguments a) {
  __shared__ __align__(16) Prepared sh;
  constexpr int AT_ONCE = 4;
  __shared__ float x[TILE_HEADS][D], part[4][AT_ONCE][D];
  const int i = threadIdx.x % D, slice = threadIdx.x / D, tile = blockIdx.y, head = tile / QUERY_TILES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int heads = min(TILE_HEADS, GROUP - tile % QUERY_TILES * TILE_HEADS);
  float m[D / 4];
#pragma unroll
  for (int e = 0; e < D / 4; e++) m[e] = __ldg(a.matrix + ((s64)(head % a.matrix_heads) * D + slice * (D / 4) + e) * D + i);
  for (int unit = blockIdx.x; unit < a.batch * a.blocks; unit += gridDim.x) {
    const int b = unit / a.blocks, block = unit % a.blocks, n = (int)a.lengths[b];
    const int begin = (a.first / TURNED_BY + block) * TURNED_BY - a.first, end = begin + TURNED_BY;  // tokens of the block
    if (begin >= n || (a.window > 0 && end <= n - a.window)) continue;
    const s64 query = (s64)b * KV_HEADS * GROUP + head * GROUP + tile % QUERY_TILES * TILE_HEADS;
    for (int j = threadIdx.x; j < TILE_HEADS * D; j += 4 * D) {
      const int h = j / D, e = j % D;
      float y = 0.f;
      if (h < heads) {
        y = load_number<QUERY_TYPE>(a.query, (query + h) * D + e);
        if (e < 2 * a.half) {
          const int c = e % a.half;
          const float other = load_number<QUERY_TYPE>(a.query, (query + h) * D + (e < a.half ? e + a.half : c));
          const float by = a.cosine[(s64)block * a.half + c], across = a.sine[(s64)block * a.half + c];
          y = e < a.half ? y * by + other * across : y * by - other * across;
        }
      }
      x[h][e] = y;
    }
    __syncthreads();
    for (int some = 0; some < TILE_HEADS; some += AT_ONCE) {
      for (int h = 0; h < AT_ONCE && some + h < TILE_HEADS; h++) {
        float y = 0.f;
#pragma unroll
        for (int e = 0; e < D / 4; e++) y = fmaf(x[some + h][slice * (D / 4) + e], m[e], y);
        part[slice][h][i] = y;
      }
      __syncthreads();
      if (some + slice < TILE_HEADS)
        sh.rows[(some + slice) * D + i] = part[0][slice][i] + part[1][slice][i] + part[2][slice][i] + part[3][slice][i];
      __syncthreads();
    }
    for (int h = warp; h < TILE_HEADS; h += 4 * D / 32) {
      float top = 1e-30f, sum = 0.f, lost = 0.f;
      for (int e = lane; e < D; e += 32) {
        top = fmaxf(top, fabsf(sh.rows[h * D + e])), sum += sh.rows[h * D + e];
        if (a.lost) lost = fmaf(x[h][e], a.lost[head * D + e], lost);
      }
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
      sum = row_sum(sum), lost = row_sum(lost);
      const float bias = KEY_META == 2 ? row_sum(level_biases(Keys{}, sh.rows + h * D, lane)) : 0.f;
      if (lane == 0) sh.top[h] = top, sh.sum[h] = sum, sh.bias[h] = bias, sh.lost[h] = lost * a.scale;
    }
    __syncthreads();
    make_planes<4 * D>(Keys{}, sh);
    __syncthreads();
    const s64 place = ((s64)b * HEADS + tile) * a.blocks + block;
    Turned& out = a.out[place];
    for (int j = threadIdx.x; j < OWN * Keys::REGISTERS * 32; j += 4 * D) (&out.f[0][0][0])[j] = (&sh.f[0][0][0])[j];
    for (int j = threadIdx.x; j < TILE_HEADS; j += 4 * D) out.top[j] = sh.top[j], out.sum[j] = sh.sum[j], out.bias[j] = sh.bias[j], out.lost[j] = sh.lost[j];
#if WINDOW_TOKENS
    const int recent = recent_of(n, (int)a.exact_key[b], (int)a.exact_value[b]);
    if (begin < min((int)a.sinks[b], n) || end > recent)
      for (int j = threadIdx.x; j < TILE_HEADS * D; j += 4 * D) a.rows[place * TILE_HEADS * D + j] = sh.rows[j];
#endif
    __syncthreads();
  }
}
#endif
