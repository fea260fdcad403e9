// The subspace of SQuat: singular values times right singular vectors of what was fitted before (RANK rows) and the queries of the new tokens, of which
// the RANK largest are kept. Sequences of which a group of keys is packed keep theirs. float64, as kvant/correctors/subspace.py.
//
// One-sided Jacobi: columns are rotated in pairs until all are orthogonal. The columns are the rows R^T where there are at most D: they end as singular
// values times vectors. Else they are those of the Gram matrix R^T R: they end as squared singular values times vectors.

#pragma once
#include "include/math.cuh"
#include "include/subspace.cuh"
#include "include/tokens.cuh"

constexpr int D = Config::HEAD_DIM, RANK = Config::RANK, GROUP = Config::GROUP, THREADS = 4 * D;
constexpr int PAIR_LANES = 8, COLUMN = D + 8;       // lanes that rotate a pair of columns; doubles of a column, so that neighbours lie in other banks
constexpr int ROWS_AT_ONCE = 8;                     // rows that are added to a Gram matrix at a time
constexpr int HIGH = 8, WIDE = 4;                   // entries of a Gram matrix that a thread sums
constexpr int SWEEPS = 40;                          // at most; ten are usual
constexpr double ORTHOGONAL = 1e-14, NOTHING = 1e-34;  // cosines of columns, and squared norms over all, that count as zero

struct Fitted {  // what a sequence has new
  int start, count, before;
  bool wanted;  // no group is packed yet
  DEV Fitted(const FitSubspaceArguments& a, int b) {
    start = (int)a.query_start_loc[b], count = (int)a.query_start_loc[b + 1] - start, before = (int)a.seq_lens[b] - count;
    const int past = before - Config::ORIGIN - Config::KEY_RECENT;
    wanted = past < Config::KEY_FLUSH && (int)a.key_ring_start[b] <= Config::ORIGIN;
  }
  DEV bool as_rows() const { return RANK + count * GROUP <= D; }
};
// Channel c of a row: the i-th query of the new tokens of a KV head, in the space of the stored keys.
DEV double query_of(const FitSubspaceArguments& a, const Fitted& f, int head, int i, int c) {
  const int token = i / GROUP;
  return load_unrotated<Config::QUERY_TYPE>(a, a.query, ((s64)(f.start + token) * (Config::KV_HEADS * GROUP) + head * GROUP + i % GROUP) * D, f.before + token, c);
}
DEV float* subspace_of(const FitSubspaceArguments& a, int b, int head) { return a.subspace + (a.overlay_rows[b] * Config::KV_HEADS + head) * (RANK * D); }

// Entries of R^T R on and above the diagonal: a warp has a square of 32 x 32 of them, a thread HIGH x WIDE.
struct GramTile {
  static constexpr int SQUARES = D / 32;  // on a side
  double sum[HIGH][WIDE];
  int row, column;
  bool own, mirrored;  // whether the thread has entries, and whether they stand below the diagonal, too

  DEV GramTile() {
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31, across = warp / SQUARES, down = warp % SQUARES;
    row = across * 32 + lane / (32 / WIDE) * HIGH, column = down * 32 + lane % (32 / WIDE) * WIDE;
    own = across <= down && across < SQUARES, mirrored = across < down;
#pragma unroll
    for (int i = 0; i < HIGH; i++)
#pragma unroll
      for (int j = 0; j < WIDE; j++) sum[i][j] = 0.;
  }
  // Adds rows [0, count), of which row(i, c) is an element. `staged` [ROWS_AT_ONCE, D] is shared memory.
  template <class Row> DEV void add(int count, double* staged, Row row_of) {
    for (int first = 0; first < count; first += ROWS_AT_ONCE) {
      for (int i = threadIdx.x; i < ROWS_AT_ONCE * D; i += THREADS) staged[i] = first + i / D < count ? (double)row_of(first + i / D, i % D) : 0.;
      __syncthreads();
      if (own)
        for (int r = 0; r < ROWS_AT_ONCE; r++)
#pragma unroll
          for (int i = 0; i < HIGH; i++)
#pragma unroll
            for (int j = 0; j < WIDE; j++) sum[i][j] += staged[r * D + row + i] * staged[r * D + column + j];
      __syncthreads();
    }
  }
  // Stores the entries and their mirror images, each plus more(row, column).
  template <class More> DEV void store(double* to, int stride, More more) const {
    if (!own) return;
#pragma unroll
    for (int i = 0; i < HIGH; i++)
#pragma unroll
      for (int j = 0; j < WIDE; j++) {
        const double x = sum[i][j] + more(row + i, column + j);
        to[(row + i) * stride + column + j] = x;
        if (mirrored) to[(column + j) * stride + row + i] = x;
      }
  }
};

// Chunks of tokens of a sequence, whose Gram matrices are sums of their own. The numbers of two sequences do not meet.
DEV int first_chunk(const FitSubspaceArguments& a, int b) { return (int)(a.query_start_loc[b] / a.chunk_tokens) + b; }

// Grid: (chunks, KV_HEADS).
extern "C" __global__ void __launch_bounds__(THREADS) kvant_subspace_gram(const FitSubspaceArguments a) {
  __shared__ double staged[ROWS_AT_ONCE * D];
  const int chunk = blockIdx.x, head = blockIdx.y;
  const int b = last_sequence(a.batch, a.half_batch, [&](int i) { return first_chunk(a, i) <= chunk; });
  const Fitted f(a, b);
  const int first = (chunk - first_chunk(a, b)) * a.chunk_tokens;
  if (!f.wanted || f.as_rows() || first >= f.count) return;
  GramTile gram;
  gram.add((min(f.count, first + a.chunk_tokens) - first) * GROUP, staged, [&](int i, int c) { return query_of(a, f, head, first * GROUP + i, c); });
  double* to = a.grams + ((s64)chunk * Config::KV_HEADS + head) * (D * D);
  gram.store(to, D, [](int, int) { return 0.; });
}

DEV double pair_sum(double x) {  // over the lanes of a pair
#pragma unroll
  for (int o = 1; o < PAIR_LANES; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}

struct FitShared {
  double norms[D];
  int place[D];  // of a column among those of all lengths, longest first
  int rotated[D / 2];  // of every place of a pair: 1 where a sweep rotated the pairs there
};

// Fits the subspace of a head of sequence b, by all threads of the CTA. x: [columns, COLUMN] and [ROWS_AT_ONCE, D] doubles.
DEV void fit_head(const FitSubspaceArguments& a, const Fitted& f, FitShared& sh, double* x, int b, int head) {
  float* subspace = subspace_of(a, b, head);
  const auto seen = [&](int i, int c) { return f.before == 0 ? 0.f : subspace[i * D + c]; };
  const int columns = f.as_rows() ? (RANK + f.count * GROUP + 1) / 2 * 2 : D;
  if (f.as_rows()) {
    for (int i = threadIdx.x; i < columns * D; i += THREADS) {
      const int row = i / D, c = i % D;
      x[row * COLUMN + c] = row < RANK ? (double)seen(row, c) : row < RANK + f.count * GROUP ? query_of(a, f, head, row - RANK, c) : 0.;
    }
  } else {
    GramTile gram;
    double* staged = x + a.most_columns * COLUMN;
    gram.add(RANK, staged, seen);
    if (!a.grams) gram.add(f.count * GROUP, staged, [&](int i, int c) { return query_of(a, f, head, i, c); });
    const double* grams = a.grams ? a.grams + ((s64)first_chunk(a, b) * Config::KV_HEADS + head) * (D * D) : nullptr;
    gram.store(x, COLUMN, [&](int row, int column) {
      double sum = 0.;
      for (int chunk = 0; grams && chunk * a.chunk_tokens < f.count; chunk++) sum += grams[(s64)chunk * (Config::KV_HEADS * D * D) + row * D + column];
      return sum;
    });
  }
  __syncthreads();

  const int lane = (int)threadIdx.x % PAIR_LANES, pair = (int)threadIdx.x / PAIR_LANES;
  const auto squared_norm = [&](int i) {
    double sum = 0.;
    for (int c = lane; c < D; c += PAIR_LANES) sum += x[i * COLUMN + c] * x[i * COLUMN + c];
    return pair_sum(sum);
  };
  double total = 0.;
  for (int i = pair; i - pair < columns; i += THREADS / PAIR_LANES) {  // every lane takes part in every sum
    const double norm = squared_norm(min(i, columns - 1));
    if (lane == 0 && i < columns) sh.norms[i] = norm;
  }
  __syncthreads();
  for (int i = 0; i < columns; i++) total += sh.norms[i];

  for (int sweep = 0; sweep < SWEEPS; sweep++) {
    const bool own = pair < columns / 2;
    bool rotated = false;
    // a round robin: column 0 stays, the others go round; every two meet once
    for (int round = 0; round < columns - 1; round++) {
      const int i = !own || pair == 0 ? 0 : 1 + (pair - 1 + round) % (columns - 1), j = own ? 1 + (columns - 2 - pair + round) % (columns - 1) : 0;
      double u[D / PAIR_LANES], v[D / PAIR_LANES], uu = 0., vv = 0., uv = 0.;
#pragma unroll
      for (int k = 0; k < D / PAIR_LANES; k++) {
        u[k] = v[k] = 0.;
        if (own) u[k] = x[i * COLUMN + lane + k * PAIR_LANES], v[k] = x[j * COLUMN + lane + k * PAIR_LANES];
        uu += u[k] * u[k], vv += v[k] * v[k], uv += u[k] * v[k];
      }
      uu = pair_sum(uu), vv = pair_sum(vv), uv = pair_sum(uv);
      const double size = sqrt(uu * vv);
      if (own && size > NOTHING * total && fabs(uv) > ORTHOGONAL * size) {
        const double zeta = (vv - uu) / (2. * uv), t = (zeta < 0. ? -1. : 1.) / (fabs(zeta) + sqrt(1. + zeta * zeta)), cosine = 1. / sqrt(1. + t * t), sine = cosine * t;
#pragma unroll
        for (int k = 0; k < D / PAIR_LANES; k++) {
          x[i * COLUMN + lane + k * PAIR_LANES] = cosine * u[k] - sine * v[k];
          x[j * COLUMN + lane + k * PAIR_LANES] = sine * u[k] + cosine * v[k];
        }
        rotated = true;
      }
      __syncthreads();
    }
    if (own && lane == 0) sh.rotated[pair] = rotated;
    __syncthreads();
    bool again = false;
    for (int i = 0; i < columns / 2; i++) again = again || sh.rotated[i];
    __syncthreads();
    if (!again) break;
  }

  // the RANK longest columns, longest first
  for (int i = pair; i - pair < columns; i += THREADS / PAIR_LANES) {
    const double norm = squared_norm(min(i, columns - 1));
    if (lane == 0 && i < columns) sh.norms[i] = norm;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    int before = 0;
    for (int k = 0; k < columns; k++) before += sh.norms[k] > sh.norms[i] || (sh.norms[k] == sh.norms[i] && k < i);
    sh.place[i] = before;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    if (sh.place[i] >= RANK) continue;
    const double* column = x + i * COLUMN;
    int largest = 0;
    for (int c = 1; c < D; c++)
      if (fabs(column[c]) > fabs(column[largest])) largest = c;
    const double length = sqrt(sh.norms[i]), by = (column[largest] < 0. ? -1. : 1.) * (f.as_rows() ? 1. : length > 0. ? 1. / sqrt(length) : 0.);
    for (int c = 0; c < D; c++) subspace[sh.place[i] * D + c] = (float)(column[c] * by);
  }
}

// Grid: (batch, CTAs that share the KV heads of a sequence). Dynamic shared memory: what fit_head takes.
extern "C" __global__ void __launch_bounds__(THREADS) kvant_fit_subspace(const FitSubspaceArguments a) {
  DYNAMIC_SHARED(dynamic);
  __shared__ FitShared sh;
  const int b = blockIdx.x;
  const Fitted f(a, b);
  if (!f.wanted) return;
  for (int head = blockIdx.y; head < Config::KV_HEADS; head += gridDim.y) {
    if (f.count > 0) fit_head(a, f, sh, (double*)dynamic, b, head);
    else if (f.before == 0)
      for (int i = threadIdx.x; i < RANK * D; i += THREADS) subspace_of(a, b, head)[i] = 0.f;
    __syncthreads();
  }
}
