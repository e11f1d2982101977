// Products of bf16 on AMX tiles: A (64 x k) from plain rows, B from a panel, 32 x 32 blocks of D in four tiles.
//
// A tile holds 16 rows of 64 bytes. The panel keeps, for each 16 columns of B, the pairs (row 2i, row 2i + 1) of every
// column side by side: 16 pairs of rows are one tile, one kilobyte without gaps.
#pragma once
#include "panels.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace kittens {
inline namespace KITTENS_MACHINE {
namespace amx {

inline constexpr int group = 16;  // columns of a panel that lie together
constexpr int64_t panel_elements(int columns, int rows) {
  return static_cast<int64_t>((columns + group - 1) / group) * group * rows;
}

struct alignas(64) tile_configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Static: compilers see the intrinsic read a pointer's worth of it only, and drop the stores that would fill the rest
// of a local one.
KITTENS_INLINE void enter() {
  static constexpr tile_configuration configuration;
  _tile_loadconfig(&configuration);
}
KITTENS_INLINE void leave() { _tile_release(); }

// 32 rows of D and 32 (or the last 16) columns. Tiles 0 to 3: D; 4 and 5: A; 6 and 7: B.
template <bool two> KITTENS_ALWAYS_INLINE void multiply_block(float* d, int n, const bf16* a, int a_row, const bf16* b,
                                                              int k, bool accumulate) {
  const int64_t d_bytes = n * 4, a_bytes = a_row * 2, next_group = static_cast<int64_t>(group) * k;
  if (accumulate) {
    _tile_loadd(0, d, d_bytes);
    _tile_loadd(2, d + 16 * n, d_bytes);
    if constexpr (two) {
      _tile_loadd(1, d + 16, d_bytes);
      _tile_loadd(3, d + 16 * n + 16, d_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int j = 0; j < k; j += 32) {
    _tile_loadd(4, a + j, a_bytes);
    _tile_loadd(6, b + j * group, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (two) {
      _tile_loadd(7, b + next_group + j * group, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_loadd(5, a + 16 * a_row + j, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (two) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, d, d_bytes);
  _tile_stored(2, d + 16 * n, d_bytes);
  if constexpr (two) {
    _tile_stored(1, d + 16, d_bytes);
    _tile_stored(3, d + 16 * n + 16, d_bytes);
  }
}

KITTENS_NO_INLINE void multiply(float* d, const bf16* a, int a_row, const bf16* panel, int n, int k, bool accumulate) {
  int column = 0;
  for (; column + 32 <= n; column += 32)
    for (int i = 0; i < warpgroup_rows; i += 32)
      multiply_block<true>(d + i * n + column, n, a + i * a_row, a_row, panel + static_cast<int64_t>(column) * k, k,
                           accumulate);
  if (column < n)
    for (int i = 0; i < warpgroup_rows; i += 32)
      multiply_block<false>(d + i * n + column, n, a + i * a_row, a_row, panel + static_cast<int64_t>(column) * k, k,
                            accumulate);
}

// The panel of a K x N matrix.
template <int K, int N> KITTENS_NO_INLINE void pack_by_rows(bf16* panel, const matrix_view<bf16>& view) {
  bf16 even[N], odd[N];
  for (int k = 0; k < K; k += 2) {
    copy_row(even, view, k, N);
    copy_row(odd, view, k + 1, N);
    for (int n = 0; n < N; n += group) {
      uint32_t pairs[group];
      for (int i = 0; i < group; i++) pairs[i] = even[n + i].bits | static_cast<uint32_t>(odd[n + i].bits) << 16;
      __builtin_memcpy(panel + static_cast<int64_t>(n) * K + k * group, pairs, sizeof pairs);
    }
  }
}

// The panel of the transpose of an N x K matrix: its rows hold the pairs already, so 32-bit elements are transposed.
// Their bits pass through float vectors untouched.
template <int N, int K> KITTENS_NO_INLINE void pack_by_columns(bf16* panel, const matrix_view<bf16>& view) {
  constexpr int lanes = simd::lanes<float>;
  static_assert(group % lanes == 0 && K / 2 % lanes == 0);
  bf16 lines[lanes][K];
  for (int n = 0; n < N; n += lanes) {
    for (int i = 0; i < lanes; i++) copy_row(lines[i], view, n + i, K);
    bf16* out = panel + static_cast<int64_t>(n / group) * group * K + n % group * 2;
    for (int k = 0; k < K; k += 2 * lanes) {
      simd::vector_float block[lanes];
      for (int i = 0; i < lanes; i++) block[i] = simd::load_bits<simd::vector_float>(lines[i] + k);
      simd::transpose<float>(block);
      for (int i = 0; i < lanes; i++)
        __builtin_memcpy(out + static_cast<int64_t>(k / 2 + i) * group * 2, &block[i], sizeof block[i]);
    }
  }
}

}  // namespace amx
}  // namespace KITTENS_MACHINE
}  // namespace kittens
#endif
