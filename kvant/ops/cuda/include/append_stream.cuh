// One of the two streams of the append kernels: its constants, from Config::Key or Config::Value, and its arguments.

#pragma once
#include "codecs/encode_affine.cuh"
#include "include/bands.cuh"
#include "include/ptx.cuh"

template <bool KEY> struct StreamConfig : Config::Key {};
template <> struct StreamConfig<false> : Config::Value {};

template <bool KEY_> struct AppendStream : StreamConfig<KEY_> {
  static constexpr bool KEY = KEY_, VALUES = !KEY_;  // KEY: how tiles are held, too
  static constexpr int WINDOW_TYPE = KEY_ ? (int)Config::OVERLAY_TYPE : (int)Config::VALUE_WINDOW_TYPE;
  DEV static const void* rows(const AppendArguments& a) { return KEY_ ? a.key : a.value; }
  DEV static int stride(const AppendArguments& a) { return KEY_ ? a.key_stride : a.value_stride; }
  DEV static const float* mean(const AppendArguments& a) { return KEY_ ? a.key_mean : a.value_mean; }
  DEV static const float* signs(const AppendArguments& a) { return KEY_ ? a.key_signs : a.value_signs; }
  DEV static const float* weights(const AppendArguments& a) { return KEY_ ? a.key_weights : a.value_weights; }
  DEV static const float* flag_mean(const AppendArguments& a) { return KEY_ ? a.key_flag_mean : a.value_flag_mean; }
  DEV static void* overlay(const AppendArguments& a) { return KEY_ ? a.overlay_key : a.overlay_value; }
  DEV static const u8* books(const AppendArguments& a) { return KEY_ ? a.key_books : a.value_books; }
  DEV static const u8* indices(const AppendArguments& a) { return KEY_ ? a.key_indices : a.value_indices; }
  DEV static float matrix_unit(const AppendArguments& a) { return KEY_ ? a.key_matrix_unit : a.value_matrix_unit; }
  DEV static Clip clip(const AppendArguments& a) {
    if (KEY_) return {a.key_clip_drop, a.key_clip_share, a.key_clip_start, a.key_clip_gap};
    return {a.value_clip_drop, a.value_clip_share, a.value_clip_start, a.value_clip_gap};
  }
  // The matrix of a head, in the order in which the kernel multiplies by it.
  DEV static const uint4* matrix(const AppendArguments& a, int head) {
    return (const uint4*)(KEY_ ? a.key_matrix : a.value_matrix) + head * (KEY_ ? a.key_matrix_stride : a.value_matrix_stride);
  }
};
using KeyStream = AppendStream<true>;
using ValueStream = AppendStream<false>;
// Values whose tiles are held as those of keys: a row in four lanes (token_tile.cuh).
struct ValueRows : ValueStream {
  static constexpr bool KEY = true, VALUES = true;
};

// Subtracts N channels, from `channel` on, of the centroid of a new token from x: its residual is coded.
template <class S, int N> DEV void subtract_centroid(const AppendArguments& a, float* x, int token, int head, int channel) {
  static_assert(N % 2 == 0, "pairs of channels");
  const int row = S::CENTROIDS > 1 ? S::indices(a)[(s64)min(token, a.tokens - 1) * Config::KV_HEADS + head] : 0;
  u32 c[N / 2];
  load_words<N / 2>(c, S::books(a) + (((s64)(S::BOOK_HEADS > 1 ? head : 0) * S::CENTROIDS + row) * Config::HEAD_DIM + channel) * 2);
#pragma unroll
  for (int i = 0; i < N / 2; i++) x[2 * i] -= fp16_low(c[i]), x[2 * i + 1] -= fp16_high(c[i]);
}
