// Decode attention, 2 of 5: queries, from what comes in to the bytes that keys are multiplied by.

// --- queries ----------------------------------------------------------------------------------------------------------

#if KEY_GROUP
#if BOOSTED
constexpr int HIGH_STEPS = (BOOSTED / 4 + 3) / 4;  // bytes of a lane and token: four channels each
#else
constexpr int HIGH_STEPS = 1;
#endif

// Keys that are coded per channel over groups of tokens: queries times the scales of the group at hand. See groups.cu.
struct Prepared {
  float rows[TILE_HEADS * D];  // queries in the space of the keys; at the end, outputs
  float top[4 * OWN], lost[4 * OWN];
  // pairs of channels as fp16, four registers of a lane side by side: for the minima, and times 2^-p for codes at bit p
  u32 pairs[COLUMN_TILES][D / 32][32][4], scaled[COLUMN_TILES][D / 32][32][4];
  u8 boosted[WARPS][16 * HIGH_STEPS];  // channels that have two more bits
};
struct Query {
  u32 k[COLUMN_TILES][D / 8], high[COLUMN_TILES][2 * HIGH_STEPS];
  float factor[OWN], back[OWN], base[OWN], lost[OWN];
  int entered;  // the group of the page that they are for
  Prepared* prepared;
};
// Queries are brought to a largest magnitude from 2 to 4 by a power of two, so that 16-bit queries lose nothing and times any scale are fp16 numbers.
DEV float query_power(float top) { return __uint_as_float((255u - (__float_as_uint(top) >> 23)) << 23); }
// The query head of column g of the first product, in lane g, t. Where columns are left, odd ones have what fp16 leaves of the even ones.
DEV int query_column(int n, int g) { return PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1); }
DEV float limb(float x, int g) { return PAIRED && (g & 1) ? x - fp16_low(fp16_pair(x, 0.f)) : x; }
#else
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
#endif

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

#if KEY_GROUP
DEV void make_pairs(Prepared& sh) {
  using Codes = KEY_CODES;
  for (int j = threadIdx.x; j < COLUMN_TILES * D / 8 * 32; j += WARPS * 32) {
    const int i = j % (D / 8), lane = j / (D / 8) % 32, n = j / (D / 8) / 32, g = lane >> 2, head = query_column(n, g);
    float x = 0.f, y = 0.f;
    if (head < TILE_HEADS) {
      const float* row = sh.rows + head * D + (lane & 3) * (D / 4) + 2 * i;
      const float by = query_power(sh.top[head]);
      x = limb(row[0] * by, g), y = limb(row[1] * by, g);
    }
    const float less = 1.f / (float)(1 << Codes::power(i));
    sh.pairs[n][i / 4][lane][i % 4] = fp16_pair(x, y);
    sh.scaled[n][i / 4][lane][i % 4] = fp16_pair(x * less, y * less);
  }
}
#else
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

// Bytes of TILE_HEADS queries, whose largest magnitudes are `tops`, for a plane of the keys' codes.
template <int THREADS, class P> DEV void make_plane(const float* rows, const float* tops, u32 (*f)[Keys::REGISTERS][32]) {
  for (int j = threadIdx.x; j < OWN * P::REGISTERS * 32; j += THREADS) {
    const int lane = j % 32, i = j / 32 % P::REGISTERS, n = j / 32 / P::REGISTERS, g = lane >> 2, head = 4 * n + (g >> 1);
    u32 packed = 0;
    if (head < TILE_HEADS) {
      const float by = QUERY_TOP / (tops[head] * heaviest(Keys{})) * (P::WEIGHT / (float)(1 << P::raised(i)));
#pragma unroll
      for (int byte = 0; byte < 4; byte++) {
        const int channel = P::channel(i, byte, lane & 3);
        const int whole = channel >= 0 ? __float2int_rn(rows[head * D + channel] * by) : 0, high = (whole + 64) >> 7;
        packed |= (u32)((g & 1 ? whole - high * 128 : high) & 255) << (8 * byte);
      }
    }
    f[n][P::BEFORE + i][lane] = packed;
  }
}
template <int THREADS, class... P> DEV void make_planes(Planes<P...>, const float* rows, const float* tops, u32 (*f)[Keys::REGISTERS][32]) {
  (make_plane<THREADS, P>(rows, tops, f), ...);
}

#endif

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
    if (lane == 0) sh.top[h] = top, sh.lost[h] = SOFTCAP && a.lost && h < heads ? a.lost[query + h] * a.scale : 0.f;
#if !KEY_GROUP
    const float bias = KEY_META == 2 ? row_sum(level_biases(Keys{}, sh.rows + h * D, lane)) : 0.f;
    if (lane == 0) sh.sum[h] = sum, sh.bias[h] = bias;
#endif
  }
  __syncthreads();
#if KEY_GROUP
  make_pairs(sh);
#else
  make_planes<WARPS * 32>(Keys{}, sh.rows, sh.top, sh.f);
#endif
  __syncthreads();
}

#if !KEY_GROUP
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

#endif

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

constexpr int TURN_WARPS = D > 128 ? 16 : 4, TURN_THREADS = TURN_WARPS * 32, COLUMNS = D / TURN_WARPS;  // columns of a warp
constexpr int AT_ONCE = 16 / TILE_HEADS, TURN_ROWS = AT_ONCE * TILE_HEADS;  // blocks of positions, and queries, that a product has
static_assert(COLUMNS % 8 == 0, "a warp has whole tiles of columns");

struct TurnShared {
  u32 high[16][D / 2 + 4], low[16][D / 2 + 4];  // turned queries as fp16, and what that leaves; rows start in different banks
  float rows[16 * D], top[16];
};

// What fp16 leaves of two numbers, as fp16.
DEV u32 rest_of(float x, float y, u32 pair) { return fp16_pair(x - fp16_low(pair), y - fp16_high(pair)); }

// Every query turned back to the start of every block of positions that its sequence reaches, brought into the space of the keys and
// made into bytes. A block of threads has the matrix of a head, each warp some columns in its registers, and gridDim.x-th of the
// sequences' blocks. Products are of fp16 in two parts each, less the smallest of the four.
extern "C" __global__ void __launch_bounds__(TURN_THREADS) kvant_turn(const TurnArguments a) {
  __shared__ __align__(16) TurnShared sh;
  const int tile = blockIdx.y, head = tile / QUERY_TILES, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int heads = min(TILE_HEADS, GROUP - tile % QUERY_TILES * TILE_HEADS), column = warp * COLUMNS;
  const float* matrix = a.matrix + (s64)(head % a.matrix_heads) * D * D;
  u32 high[COLUMNS / 8][D / 16][2], low[COLUMNS / 8][D / 16][2];
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float* p = matrix + (16 * k + 8 * i + 2 * t) * D + column + 8 * n + g;
        const float x = __ldg(p), y = __ldg(p + D);
        high[n][k][i] = fp16_pair(x, y), low[n][k][i] = rest_of(x, y, high[n][k][i]);
      }
  const int all = a.batch * a.blocks;
  for (int first = blockIdx.x * AT_ONCE; first < all; first += gridDim.x * AT_ONCE) {
    for (int j = threadIdx.x; j < 16 * D / 2; j += TURN_THREADS) {  // two neighbouring channels
      const int row = j / (D / 2), e = j % (D / 2) * 2, unit = first + row / TILE_HEADS, h = row % TILE_HEADS;
      float x[2] = {0.f, 0.f};
      if (row < TURN_ROWS && unit < all && h < heads) {
        const s64 query = (s64)(unit / a.blocks) * KV_HEADS * GROUP + head * GROUP + tile % QUERY_TILES * TILE_HEADS + h;
        const int block = unit % a.blocks;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          x[i] = load_number<QUERY_TYPE>(a.query, query * D + e + i);
          if (e + i >= 2 * a.half) continue;
          const int c = (e + i) % a.half, other = e + i < a.half ? c + a.half : c;
          const float y = load_number<QUERY_TYPE>(a.query, query * D + other);
          const float by = a.cosine[(s64)block * a.half + c], across = a.sine[(s64)block * a.half + c];
          x[i] = e + i < a.half ? x[i] * by + y * across : x[i] * by - y * across;
        }
      }
      const u32 pair = fp16_pair(x[0], x[1]);
      sh.high[row][e / 2] = pair, sh.low[row][e / 2] = rest_of(x[0], x[1], pair);
    }
    __syncthreads();
    float sum[COLUMNS / 8][4];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = sh.high[g + i % 2 * 8][8 * k + t + i / 2 * 4], y[i] = sh.low[g + i % 2 * 8][8 * k + t + i / 2 * 4];
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        mma(sum[n], x[0], x[1], x[2], x[3], high[n][k][0], high[n][k][1]);
        mma(sum[n], y[0], y[1], y[2], y[3], high[n][k][0], high[n][k][1]);
        mma(sum[n], x[0], x[1], x[2], x[3], low[n][k][0], low[n][k][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sh.rows[(g + i / 2 * 8) * D + column + 8 * n + 2 * t + i % 2] = sum[n][i];
    __syncthreads();
    for (int row = warp; row < TURN_ROWS; row += TURN_WARPS) {
      const int unit = first + row / TILE_HEADS;
      float top = 1e-30f, total = 0.f, lost = 0.f;
      for (int e = lane; e < D; e += 32) {
        const float x = sh.rows[row * D + e];
        top = fmaxf(top, fabsf(x)), total += x;
        if (a.lost) {
          const u32 up = sh.high[row][e / 2], down = sh.low[row][e / 2];
          const float turned = e % 2 ? fp16_high(up) + fp16_high(down) : fp16_low(up) + fp16_low(down);
          lost = fmaf(turned, a.lost[head * D + e], lost);
        }
      }
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
      total = row_sum(total), lost = row_sum(lost);
      const float bias = KEY_META == 2 ? row_sum(level_biases(Keys{}, sh.rows + row * D, lane)) : 0.f;
      if (lane == 0) {
        sh.top[row] = top;
        if (unit < all) {
          Turned& out = a.out[((s64)(unit / a.blocks) * HEADS + tile) * a.blocks + unit % a.blocks];
          const int h = row % TILE_HEADS;
          out.top[h] = top, out.sum[h] = total, out.bias[h] = bias, out.lost[h] = lost * a.scale;
        }
      }
    }
    __syncthreads();
    for (int i = 0; i < AT_ONCE && first + i < all; i++) {
      const int b = (first + i) / a.blocks, block = (first + i) % a.blocks, n = (int)a.lengths[b];
      const int begin = (a.first / TURNED_BY + block) * TURNED_BY - a.first, end = begin + TURNED_BY;  // tokens of the block
      if (begin >= n || (a.window > 0 && end <= n - a.window)) continue;
      const s64 place = ((s64)b * HEADS + tile) * a.blocks + block;
      make_planes<TURN_THREADS>(Keys{}, sh.rows + i * TILE_HEADS * D, sh.top + i * TILE_HEADS, a.out[place].f);
#if WINDOW_TOKENS
      const int recent = recent_of(n, (int)a.exact_key[b], (int)a.exact_value[b]);
      if (begin < min((int)a.sinks[b], n) || end > recent) {
        const int slot = turned_slot(block, (n - 1 + a.first) / TURNED_BY - a.first / TURNED_BY);
        float* rows = a.rows + (((s64)b * HEADS + tile) * TURNED_SLOTS + slot) * TILE_HEADS * D;
        for (int j = threadIdx.x; j < TILE_HEADS * D; j += TURN_THREADS) rows[j] = sh.rows[i * TILE_HEADS * D + j];
      }
#endif
    }
    __syncthreads();
  }
}
#endif
