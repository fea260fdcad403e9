// Codes and scales of a token in its page, in the fragment order of kvant/layout.py: a tile of 16 tokens is 32 lanes of words, lane
// 4 g + t as the tensor cores number them.
//
//   keys    lane (g, t) has tokens g and g + 8 of the tile, the t-th quarter of the channels; in every word, even channels are in the low
//           half and odd channels in the high half
//   values  lane (g, t) has tokens 2t, 2t + 1, 2t + 8 and 2t + 9, the g-th eighth of the channels; in every word, token 2t (+ 8) is in the
//           low half and token 2t + 1 (+ 8) in the high half
//
// Codes of 3 bits are two planes: the two low bits, and the third bit. Every byte belongs to one token, so nothing is read before it is
// written; the two tokens of a pair of values share words, not bytes.

#pragma once
#include "codecs/tokenwise.cuh"

// The page of a head that holds a slot.
template <class A> DEV u8* page_head_of(const A& a, s64 slot, int head) {
  return a.pages + ((s64)((u64)slot / Config::PAGE_TOKENS) * Config::KV_HEADS + head) * Config::PAGE_HEAD_BYTES;
}

struct PagePlace {  // of a token: its tile in the page and its place in the tile
  int tile, inside;
  DEV PagePlace(s64 slot) : tile((int)((u64)slot % Config::PAGE_TOKENS) / 16), inside((int)((u64)slot % 16)) {}
};

// Stores the scale, and in the high half the minimum or zero, of a token. Scales lie in the order in which lanes need them: by token % 8,
// then by token / 8.
DEV void store_scale(u8* page_head, int offset, int scale_form, s64 slot, u32 scale) {
  const int in_page = (int)((u64)slot % Config::PAGE_TOKENS), place = in_page % 8 * (Config::PAGE_TOKENS / 8) + in_page / 16 * 2 + in_page % 16 / 8;
  if (scale_form == ScaleForm::SCALE) ((u16*)(page_head + offset))[place] = (u16)scale;
  else ((u32*)(page_head + offset))[place] = scale;
}

// --- words from codes, a byte each --------------------------------------------------------------------------------------------

// One plane of codes of ALL bits: BITS = 2 their two low bits, BITS = 1 their third bit, BITS = ALL the codes themselves.
template <int BITS, int ALL> DEV u32 plane(u32 codes) { return BITS == ALL ? codes : codes >> (BITS == 1 ? 2 : 0) & ((1 << BITS) - 1) * 0x01010101u; }
template <int BITS, int ALL> DEV uint2 plane(uint2 w) { return {plane<BITS, ALL>(w.x), plane<BITS, ALL>(w.y)}; }
template <int BITS, int ALL> DEV uint4 plane(uint4 w) { return {plane<BITS, ALL>(w.x), plane<BITS, ALL>(w.y), plane<BITS, ALL>(w.z), plane<BITS, ALL>(w.w)}; }

// Packs `count` codes, one from every `step`-th byte, from the lowest bit on.
template <int BITS, int ALL> DEV u32 pack_bytes(const u8* codes, int count, int step) {
  u32 x = 0;
#pragma unroll
  for (int i = 0; i < count; i++) x |= plane<BITS, ALL>(codes[i * step]) << (i * BITS);
  return x;
}
DEV u32 pack_four(u32 w) {  // the lowest bits of four bytes
  w |= w >> 7, w |= w >> 14;
  return w & 15u;
}
DEV u32 pack_sixteen(uint4 w) { return pack_four(w.x) | pack_four(w.y) << 4 | pack_four(w.z) << 8 | pack_four(w.w) << 12; }

// A word of key codes from 32 / BITS neighbouring channels.
template <int BITS, int ALL> DEV u32 key_word(const u8* codes) {
  if constexpr (BITS == 8) return __byte_perm(*(const u32*)codes, 0u, 0x3120);
  if constexpr (BITS == 4) {
    const uint2 w = *(const uint2*)codes;
    return __byte_perm(w.x | w.x >> 12, w.y | w.y >> 12, 0x5140);
  }
  if constexpr (BITS == 2) {
    const uint4 w = plane<BITS, ALL>(*(const uint4*)codes);
    const u32 x = ((w.x | w.x >> 14) & 0x0F0Fu) | ((w.y | w.y >> 14) & 0x0F0Fu) << 4;
    const u32 y = ((w.z | w.z >> 14) & 0x0F0Fu) | ((w.w | w.w >> 14) & 0x0F0Fu) << 4;
    return __byte_perm(x, y, 0x5140);
  }
  if constexpr (BITS == 1) {
    u32 x = 0u;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 w = plane<BITS, ALL>(((const u32*)codes)[i]), both = w | w >> 15;  // bytes 0 and 2; bytes 1 and 3 eight bits up
      x |= (both & 3u) << (2 * i) | (both >> 8 & 3u) << (16 + 2 * i);
    }
    return x;
  }
}

// A word of value codes from 16 / BITS neighbouring channels each of two tokens.
template <int BITS, int ALL> DEV u32 value_word(const u8* a, const u8* b) {
  if constexpr (BITS == 8) return *(const u16*)a | (u32) * (const u16*)b << 16;
  if constexpr (BITS == 4) {
    const u32 x = *(const u32*)a, y = *(const u32*)b;
    return __byte_perm(x | x >> 4, y | y >> 4, 0x6420);
  }
  if constexpr (BITS == 2) {
    uint2 x = plane<BITS, ALL>(*(const uint2*)a), y = plane<BITS, ALL>(*(const uint2*)b);
    x.x |= x.x >> 6, x.y |= x.y >> 6, y.x |= y.x >> 6, y.y |= y.y >> 6;
    x.x |= x.x >> 12, x.y |= x.y >> 12, y.x |= y.x >> 12, y.y |= y.y >> 12;
    return __byte_perm(__byte_perm(x.x, x.y, 0x0040), __byte_perm(y.x, y.y, 0x0040), 0x5410);
  }
  if constexpr (BITS == 1) return pack_sixteen(plane<BITS, ALL>(*(const uint4*)a)) | pack_sixteen(plane<BITS, ALL>(*(const uint4*)b)) << 16;
}

// --- codes of a token to its page ---------------------------------------------------------------------------------------------

// Stores the codes [WIDTH] of a band of keys, a byte each in shared memory, of one token. `lanes` lanes share the words.
template <int WIDTH, int BITS, int OFFSET, int HIGH_OFFSET, int ALL = BITS>
DEV void store_key_codes(u8* page_head, PagePlace p, const u8* codes, int lane, int lanes) {
  if constexpr (BITS == 3) {
    store_key_codes<WIDTH, 2, OFFSET, 0, 3>(page_head, p, codes, lane, lanes), store_key_codes<WIDTH, 1, HIGH_OFFSET, 0, 3>(page_head, p, codes, lane, lanes);
  } else if constexpr (WIDTH * BITS == 32) {  // a byte of each of four lanes: even channels, then odd ones
    const int row = p.inside / 8, g = p.inside % 8;
    for (int t = lane; t < 4; t += lanes) {
      const u8* own = codes + t * (WIDTH / 4);
      page_head[OFFSET + ((p.tile * 8 + g) * 4 + t) * 2 + row] = (u8)(pack_bytes<BITS, ALL>(own, WIDTH / 8, 2) | pack_bytes<BITS, ALL>(own + 1, WIDTH / 8, 2) << 4);
    }
  } else {
    // BYTES: of a token in each half of a lane's words. An odd number of bytes ends inside a word, which the other token of the lane shares.
    constexpr int BYTES = WIDTH * BITS / 64, WORDS = BYTES, PER = 8 / BITS;  // words of a lane; codes of a byte
    const int row = p.inside / 8, g = p.inside % 8;
    for (int i = lane; i < 4 * (BYTES % 2 ? 2 * BYTES : BYTES / 2); i += lanes) {
      if constexpr (BYTES % 2 == 0) {
        const int k = i % (BYTES / 2), t = i / (BYTES / 2);
        const u32 w = key_word<BITS, ALL>(codes + t * (WIDTH / 4) + k * (32 / BITS));
        ((u32*)(page_head + OFFSET))[((p.tile * 8 + g) * 4 + t) * WORDS + row * (BYTES / 2) + k] = w;
      } else {
        const int half = i % 2, k = i / 2 % BYTES, t = i / 2 / BYTES, byte = row * BYTES + k;
        const u32 w = pack_bytes<BITS, ALL>(codes + t * (WIDTH / 4) + k * 2 * PER + half, PER, 2);
        page_head[OFFSET + (((p.tile * 8 + g) * 4 + t) * WORDS + byte / 2) * 4 + byte % 2 + 2 * half] = (u8)w;
      }
    }
  }
}

// Stores the codes [HEAD_DIM] of values, a byte each in shared memory: `codes` and `next` of two neighbouring tokens, the first at an even
// place; where `next` is null, of one token at any place. The 32 lanes of a warp share the words.
template <int BITS, int OFFSET, int HIGH_OFFSET, int ALL = BITS>
DEV void store_value_codes(u8* page_head, PagePlace p, const u8* codes, const u8* next, int lane) {
  if constexpr (BITS == 3) {
    store_value_codes<2, OFFSET, 0, 3>(page_head, p, codes, next, lane), store_value_codes<1, HIGH_OFFSET, 0, 3>(page_head, p, codes, next, lane);
  } else {
    constexpr int D = Config::HEAD_DIM, BYTES = D * BITS / 64, WORDS = BYTES, PER = 8 / BITS;  // as above
    const int second = p.inside / 8, t = p.inside / 2 % 4, half = p.inside % 2;
    for (int i = lane; i < 8 * (BYTES % 2 ? BYTES : BYTES / 2); i += 32) {
      if constexpr (BYTES % 2 == 0) {
        const int k = i % (BYTES / 2), g = i / (BYTES / 2), from = g * (D / 8) + k * 2 * PER;
        u32* word = (u32*)(page_head + OFFSET) + ((p.tile * 8 + g) * 4 + t) * WORDS + second * (BYTES / 2) + k;
        const u32 w = value_word<BITS, ALL>(codes + from, (next ? next : codes) + from);
        if (next) *word = w;
        else ((u16*)word)[half] = (u16)w;
      } else {
        const int k = i % BYTES, g = i / BYTES, byte = second * BYTES + k, from = g * (D / 8) + k * PER;
        u8* word = page_head + OFFSET + (((p.tile * 8 + g) * 4 + t) * WORDS + byte / 2) * 4 + byte % 2;
        word[2 * half] = (u8)pack_bytes<BITS, ALL>(codes + from, PER, 1);
        if (next) word[2] = (u8)pack_bytes<BITS, ALL>(next + from, PER, 1);
      }
    }
  }
}
