// The product behind every mma operation: D (64 x n) = or += A (64 x k) times B, register-blocked.
//
// B comes as a panel: columns in groups of two vectors, each group k rows of `group` values one after the other, so
// that the inner loop streams through memory that the first-level cache keeps over all 64 rows. A is broadcast element
// by element, so it may lie in memory either way round. Rows of D in registers at once: with 16 registers and fused
// multiply-add 6 x 2 accumulators, two vectors of B and the broadcast; with 32 registers 8 x 2; without fused
// multiply-add the product needs one more, so 4 x 2.
#pragma once
#include "simd.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// Where A's element (i, j) lies: a[i * row + j * column].
template <class W> struct left_operand {
  const W* a;
  int row, column;
};

namespace simd {

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int block_rows = 8;
#elif defined(__FMA__)
inline constexpr int block_rows = 6;
#else
inline constexpr int block_rows = 4;
#endif

template <class W> inline constexpr int group = 2 * lanes<W>;  // columns of a panel that lie together
template <class W> constexpr int64_t panel_elements(int columns, int rows) {
  return static_cast<int64_t>((columns + group<W> - 1) / group<W>) * group<W> * rows;
}

template <class W, int Rows> KITTENS_ALWAYS_INLINE void multiply_block(W* d, int row_stride, left_operand<W> left,
                                                                       const W* b, int k, bool accumulate) {
  // From zero, and added to D at the end: over many products rounding errors are those of their sums, not of every term.
  vector<W> sums[Rows][2] = {};
  const W* a = left.a;
  for (int j = 0; j < k; j++, a += left.column, b += group<W>) {
    const vector<W> b0 = load(b), b1 = load(b + lanes<W>);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; i++) {
      const vector<W> x = broadcast<W>(a[i * left.row]);
      sums[i][0] += x * b0;
      sums[i][1] += x * b1;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; i++) {
    W* out = d + i * row_stride;
    store(out, accumulate ? load(out) + sums[i][0] : sums[i][0]);
    store(out + lanes<W>, accumulate ? load(out + lanes<W>) + sums[i][1] : sums[i][1]);
  }
}

template <class W> KITTENS_ALWAYS_INLINE void multiply_group(W* d, int row_stride, left_operand<W> left, const W* b,
                                                             int k, bool accumulate) {
  constexpr int rest = warpgroup_rows % block_rows, blocks_end = warpgroup_rows - rest;
  int i = 0;
  for (; i < blocks_end; i += block_rows)
    multiply_block<W, block_rows>(d + i * row_stride, row_stride, {left.a + i * left.row, left.row, left.column}, b, k,
                                  accumulate);
  if constexpr (rest > 0)
    multiply_block<W, rest>(d + i * row_stride, row_stride, {left.a + i * left.row, left.row, left.column}, b, k,
                            accumulate);
}

// The groups outermost: a group of B stays in the first-level cache while the 64 rows of A pass by.
template <class W>
KITTENS_NO_INLINE void multiply(W* d, left_operand<W> left, const W* panel, int n, int k, bool accumulate) {
  int column = 0;
  for (; column + group<W> <= n; column += group<W>, panel += static_cast<int64_t>(group<W>) * k)
    multiply_group(d + column, n, left, panel, k, accumulate);
  if (column < n) {  // the last group is not full: it goes through memory of its own
    W part[warpgroup_rows * group<W>];
    for (int i = 0; i < warpgroup_rows; i++)
      for (int c = 0; c < group<W>; c++)
        part[i * group<W> + c] = accumulate && column + c < n ? d[i * n + column + c] : W(0);
    multiply_group(part, group<W>, left, panel, k, true);
    for (int i = 0; i < warpgroup_rows; i++)
      for (int c = 0; column + c < n; c++) d[i * n + column + c] = part[i * group<W> + c];
  }
}

}  // namespace simd
}  // namespace KITTENS_MACHINE
}  // namespace kittens
