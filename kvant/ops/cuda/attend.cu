// Decode attention, 3 of 4: a warp attends to a page, or to a part of the full-precision windows.

// --- pages --------------------------------------------------------------------------------------------------------------

#if !INDEXED
template <class P> DEV void key_products(const u8* run, int tile, int lane, const Query& q, int c[CHUNK][OWN][4]) {
  u32 w[CHUNK][P::WORDS];
#pragma unroll
  for (int i = 0; i < CHUNK; i++) load_words<P::WORDS>(w[i], run + P::OFFSET + ((tile + i) * 32 + lane) * P::WORDS * 4);
#pragma unroll
  for (int k = 0; k < P::REGISTERS; k += 2) {
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const u32 a0 = P::get(w[i], 0, k), a1 = P::get(w[i], 1, k), a2 = P::get(w[i], 0, k + 1), a3 = P::get(w[i], 1, k + 1);
#pragma unroll
      for (int n = 0; n < OWN; n++) mma_bytes(c[i][n], a0, a1, a2, a3, q.f[n][P::BEFORE + k], q.f[n][P::BEFORE + k + 1]);
    }
  }
}
template <class... P> DEV void all_products(Planes<P...>, const u8* run, int tile, int lane, const Query& q, int c[CHUNK][OWN][4]) {
  (key_products<P>(run, tile, lane, q, c), ...);
}

// One chunk of at most 64 tokens of a page. Tokens outside [first, last) of the sequence are not there.
DEV void attend_page(const u8* run, int tile, int at, int first, int last, int lane, const Query& q, State& st, float cap, const u8*) {
  const int g = lane >> 2;
  float s[CHUNK][OWN][2], scale[CHUNK][2], rest[CHUNK][2], flag[CHUNK][2], largest = 0.f;
  {
    int c[CHUNK][OWN][4];
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
#pragma unroll
      for (int n = 0; n < OWN; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0;
    all_products(Keys{}, run, tile, lane, q, c);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      Meta key[2];
      load_meta<KEY_META, KEY_META_TYPE>(key, run + KEY_META_OFFSET, g * (PAGE / 8) + (tile + i) * 2);
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < OWN; n++) {
          const float x = (float)(c[i][n][2 * r] * 128 + c[i][n][2 * r + 1]), less = SOFTCAP ? 0.f : TURNED ? st.m[n] - q.lost[n] : st.m[n];
          float y;
          if (KEY_META == 0) y = fmaf(x * key[r].scale, q.factor[n], fmaf(q.sum[n], key[r].zero, -less));
          if (KEY_META == 1) y = fmaf(fmaf(x, q.factor[n], -q.sum[n] * key[r].zero), key[r].scale, -less);
          if (KEY_META == 2) y = fmaf(fmaf(x, q.factor[n], q.bias[n]), key[r].scale, -less);
          s[i][n][r] = SOFTCAP ? capped(y + q.lost[n], st.m[n], cap) : y;
        }
    }
  }
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    Meta value[2];
    load_meta<VALUE_META, VALUE_META_TYPE>(value, run + VALUE_META_OFFSET, g * (PAGE / 8) + (tile + i) * 2);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float v = VALUE_META == 2 ? fabsf(value[r].scale) * Values::STEP : value[r].scale;
      scale[i][r] = v;
      if (VALUE_META == 0) rest[i][r] = fmaf(Values::TOP * 0.5f, v, value[r].zero);
      if (VALUE_META == 1) rest[i][r] = v * (Values::TOP * 0.5f - value[r].zero);
      flag[i][r] = VALUE_FLAG && __float_as_int(value[r].scale) < 0 ? 1.f : 0.f;
      largest = fmaxf(largest, v);
    }
  }
  if (at < first || at + 16 * CHUNK > last) {  // past the ends a page may hold anything
    largest = 0.f;
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = at + i * 16 + r * 8 + g;
        if (position < first || position >= last) {
          scale[i][r] = rest[i][r] = flag[i][r] = 0.f;
#pragma unroll
          for (int n = 0; n < OWN; n++) s[i][n][r] = minus_infinity();
        }
        largest = fmaxf(largest, scale[i][r]);
      }
  }
  st.settle<CHUNK>(s, largest);

  constexpr int STEPS = PAIRED ? (CHUNK + 1) / 2 : CHUNK;  // products that share a set of probabilities
  u32 p[STEPS][COLUMN_TILES][2];
#pragma unroll
  for (int i = 0; i < CHUNK; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float x[OWN];
#pragma unroll
      for (int n = 0; n < OWN; n++) {
        x[n] = exp2_(s[i][n][r]);
        st.l[n] += x[n];
        if (VALUE_META != 2) st.z[n] = fmaf(x[n], rest[i][r], st.z[n]);
        if (VALUE_FLAG) st.flags[n] = fmaf(x[n], flag[i][r], st.flags[n]);
        s[i][n][r] = x[n] * (scale[i][r] * st.norm);
      }
    }
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x = PAIRED ? s[2 * i * PAIRED + i * !PAIRED][0][r] : s[i][2 * n * !PAIRED][r];
        const float y = PAIRED ? (2 * i + 1 < CHUNK ? s[(2 * i + 1) % CHUNK][0][r] : 0.f) : s[i][(2 * n + 1) % OWN][r];
        p[i][n][r] = transpose8(fp16_pair(x, y));
      }
      mma(st.riding[n], 0xE4006400u, 0xE4006400u, 0xE4006400u, 0xE4006400u, p[i][n][0], p[i][n][1]);
    }
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    Values codes;
    codes.load(run, tile + i, lane);
    u32 b[COLUMN_TILES][2];
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) b[n][r] = only(p[PAIRED ? i / 2 : i][n][r], i, g);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      const u32 a0 = codes.get(0, 2 * k), a1 = codes.get(0, 2 * k + 1), a2 = codes.get(1, 2 * k), a3 = codes.get(1, 2 * k + 1);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) mma(st.acc[n][k], a0, a1, a2, a3, b[n][0], b[n][1]);
    }
  }
}
#endif

// --- full-precision windows -------------------------------------------------------------------------------------------

#if WINDOW_TOKENS
DEV s64 window_row(int position, s64 owner, int head) {
  const int place = position < SINK ? position : SINK + (position - SINK) % RING;
  return ((owner * WINDOW_TOKENS + place) * KV_HEADS + head) * D;
}

// WINDOW_TILES tiles of the tokens [from, to) of a sequence. Keys are multiplied by queries brought to a largest magnitude of
// 256, so that fp16 holds them.
template <class From>  // Prepared or Turned
DEV void attend_window(const Arguments& a, int from, int to, s64 owner, int head, int lane, const From& sh, const float* rows, State& st) {
  const int g = lane >> 2, t = lane & 3;
  float s[WINDOW_TILES][OWN][2];
#pragma unroll
  for (int i = 0; i < WINDOW_TILES; i++) {
    u32 k[2][D / 8];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int position = min(from + i * 16 + r * 8 + g, to - 1);
      load_words<D / 8>(k[r], (const u8*)a.window_key + (window_row(position, owner, head) + t * (D / 4)) * 2);
    }
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {  // column g: head g / 2 where two tiles share the columns, else g / 2 + 4 (g % 2)
      const int column = PAIRED ? g >> 1 : 8 * n + (g >> 1) + 4 * (g & 1);
      const float* row = rows + min(column, TILE_HEADS - 1) * D + t * (D / 4);
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      const float by = column < TILE_HEADS ? 256.f / peak_of(sh, column) : 0.f;
#pragma unroll
      for (int e = 0; e < D / 8; e += 2) {
        const float4 x = *(const float4*)(row + 2 * e);
        mma(c, to_fp16<WINDOW_TYPE>(k[0][e]), to_fp16<WINDOW_TYPE>(k[1][e]), to_fp16<WINDOW_TYPE>(k[0][e + 1]),
            to_fp16<WINDOW_TYPE>(k[1][e + 1]), fp16_pair(x.x * by, x.y * by), fp16_pair(x.z * by, x.w * by));
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const bool there = from + i * 16 + r * 8 + g < to;
#pragma unroll
        for (int j = 0; j < (PAIRED ? 1 : 2); j++) {
          const int h = PAIRED ? 0 : (2 * n + j) % OWN;
          const float back = peak_of(sh, min(4 * h + t, TILE_HEADS - 1)) * (a.scale / 256.f);
          const float x = capped(c[2 * r + j] * back + (SOFTCAP || TURNED ? sh.lost[min(4 * h + t, TILE_HEADS - 1)] : 0.f), st.m[h], a.cap);
          s[i][h][r] = there ? x : minus_infinity();
        }
      }
    }
  }
  u32 v[WINDOW_TILES][4][D / 16];  // asked for before the probabilities are there
#pragma unroll
  for (int i = 0; i < WINDOW_TILES; i++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int position = min(from + i * 16 + (r >> 1) * 8 + 2 * t + (r & 1), to - 1);
      load_words<D / 16>(v[i][r], (const u8*)a.window_value + (window_row(position, owner, head) + g * (D / 8)) * 2);
    }
  st.settle<WINDOW_TILES>(s, 0.f);
#pragma unroll
  for (int i = 0; i < WINDOW_TILES; i++)
#pragma unroll
    for (int h = 0; h < OWN; h++)
#pragma unroll
      for (int r = 0; r < 2; r++) st.l[h] += s[i][h][r] = exp2_(s[i][h][r]);
#if INDEXED
#pragma unroll
  for (int i = 0; i < WINDOW_TILES; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < OWN; n++) {
        u32 b[2];
        spread(b, s[i][n][r], g);
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
          const u32 *x = v[i][2 * r] + 2 * k, *y = v[i][2 * r + 1] + 2 * k;
          mma(st.acc[n][k], to_fp16<WINDOW_TYPE>(x[0]), to_fp16<WINDOW_TYPE>(x[1]), to_fp16<WINDOW_TYPE>(y[0]), to_fp16<WINDOW_TYPE>(y[1]), b[0], b[1]);
        }
      }
#else
  u32 p[COLUMN_TILES][2];
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      p[n][r] = transpose8(PAIRED ? fp16_pair(s[0][0][r], s[WINDOW_TILES - 1][0][r]) : fp16_pair(s[0][(2 * n) % OWN][r], s[0][(2 * n + 1) % OWN][r]));
#pragma unroll
  for (int i = 0; i < WINDOW_TILES; i++) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      const u32 v0 = to_fp16<WINDOW_TYPE>(v[i][0][k]), v1 = to_fp16<WINDOW_TYPE>(v[i][1][k]);
      const u32 v2 = to_fp16<WINDOW_TYPE>(v[i][2][k]), v3 = to_fp16<WINDOW_TYPE>(v[i][3][k]);
      const u32 a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
      const u32 a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) mma(st.acc[n][k], a0, a1, a2, a3, only(p[n][0], i, g), only(p[n][1], i, g));
    }
  }
#endif
}
#endif

// Brings what the windows gave to the scale of packed values: rows times 2^p, all times the norm.
DEV void enter_pages(State& st) {
#pragma unroll
  for (int n = 0; n < ACC_TILES * !INDEXED; n++)
#pragma unroll
    for (int k = 0; k < ACC_STEPS; k++) {
      const float x = st.norm * (float)(1 << Values::power(2 * k)), y = st.norm * (float)(1 << Values::power(2 * k + 1));
      st.acc[n][k][0] *= x, st.acc[n][k][1] *= x, st.acc[n][k][2] *= y, st.acc[n][k][3] *= y;
    }
}
