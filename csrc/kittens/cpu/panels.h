// The orders in which products want a matrix: plain rows, or a panel (gemm.h, amx.h) of the matrix or of its transpose.
#pragma once
#include "gemm.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// A matrix somewhere in memory, of which only the elements of [row_begin, row_end) x [column_begin, column_end) exist;
// the others are zero.
template <class T> struct matrix_view {
  const T* base;  // element (0, 0), whether it exists or not
  int64_t row_stride, column_stride;
  int row_begin, row_end, column_begin, column_end;

  bool row_exists(int row) const { return row >= row_begin && row < row_end; }
  bool row_is_whole(int row, int columns) const {
    return column_stride == 1 && row_exists(row) && column_begin <= 0 && column_end >= columns;
  }
};

// out[c] = view(row, c) for c < columns
template <class Out, class T>
KITTENS_NO_INLINE void copy_row(Out* out, const matrix_view<T>& view, int row, int columns) {
  int begin = 0, end = 0;
  if (view.row_exists(row)) {
    begin = view.column_begin < columns ? view.column_begin : columns;
    end = view.column_end < columns ? view.column_end : columns;
    if (end < begin) end = begin;
    const T* in = view.base + row * view.row_stride;
    if (view.column_stride == 1) {
      simd::convert_elements(out + begin, in + begin, end - begin);
    } else {
      for (int c = begin; c < end; c++) simd::convert_elements(out + c, in + c * view.column_stride, 1);
    }
  }
  for (int c = 0; c < begin; c++) out[c] = Out{};
  for (int c = end; c < columns; c++) out[c] = Out{};
}

template <class Out, class T>
KITTENS_NO_INLINE void copy_rows(Out* out, const matrix_view<T>& view, int rows, int columns) {
  for (int r = 0; r < rows; r++) copy_row(out + static_cast<int64_t>(r) * columns, view, r, columns);
}

namespace simd {

// The panel of a `K` x `N` matrix: groups of columns, each K rows of group<W> values.
template <int K, int N, class W, class T> KITTENS_NO_INLINE void pack_by_rows(W* panel, const matrix_view<T>& view) {
  constexpr int groups = (N + group<W> - 1) / group<W>;
  W line[groups * group<W>] = {};
  for (int k = 0; k < K; k++) {
    W* out = panel + static_cast<int64_t>(k) * group<W>;
    const bool direct = N % group<W> == 0 && view.row_is_whole(k, N);
    if (!direct) copy_row(line, view, k, N);
    const T* in = view.base + k * view.row_stride;
    for (int g = 0; g < groups; g++, out += static_cast<int64_t>(K) * group<W>)
      for (int c = 0; c < group<W>; c += lanes<W>)
        store(out + c, direct ? load(in + g * group<W> + c) : load(line + g * group<W> + c));
  }
}

// The panel of the transpose of an `N` x `K` matrix.
template <int N, int K, class W, class T> KITTENS_NO_INLINE void pack_by_columns(W* panel, const matrix_view<T>& view) {
  constexpr int n_padded = (N + group<W> - 1) / group<W> * group<W>,
                k_padded = (K + lanes<W> - 1) / lanes<W> * lanes<W>;
  W lines[lanes<W>][k_padded];
  for (int n = 0; n < n_padded; n += lanes<W>) {
    bool direct = K % lanes<W> == 0 && n + lanes<W> <= N;
    for (int i = 0; direct && i < lanes<W>; i++) direct = view.row_is_whole(n + i, K);
    if (!direct)
      for (int i = 0; i < lanes<W>; i++) {
        copy_row(lines[i], view, n + i < N ? n + i : view.row_end, K);
        for (int k = K; k < k_padded; k++) lines[i][k] = W(0);
      }
    W* out = panel + static_cast<int64_t>(n / group<W>) * group<W> * K + n % group<W>;
    for (int k = 0; k < K; k += lanes<W>) {
      vector<W> block[lanes<W>];
#pragma GCC unroll 16
      for (int i = 0; i < lanes<W>; i++)
        block[i] = direct ? load(view.base + (n + i) * view.row_stride + k) : load(lines[i] + k);
      transpose<W>(block);
#pragma GCC unroll 16
      for (int i = 0; i < lanes<W>; i++)
        if (K % lanes<W> == 0 || k + i < K) store(out + static_cast<int64_t>(k + i) * group<W>, block[i]);
    }
  }
}

}  // namespace simd
}  // namespace KITTENS_MACHINE
}  // namespace kittens
