// A shared tile as an operand of a product: its rows, or its panel, in memory.
//
// The fast flavour brings the tile from where its copy comes from into the order asked for, once, and keeps that. The
// checked flavour reads nothing but the tile's own memory, which holds NaN until the copy has completed.
#pragma once
#include "amx.h"
#include "panels.h"
#include "runtime.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

template <class T> inline constexpr int panel_group = simd::group<accumulator<T>>;
#if defined(__AMX_BF16__)
template <> inline constexpr int panel_group<bf16> = amx::group;
#endif
template <class T> constexpr int64_t panel_elements(int columns, int rows) {
  return static_cast<int64_t>((columns + panel_group<T> - 1) / panel_group<T>) * panel_group<T> * rows;
}

template <int K, int N, class T> KITTENS_INLINE void pack_by_rows(operand_type<T>* panel, const matrix_view<T>& view) {
#if defined(__AMX_BF16__)
  if constexpr (on_amx<T>) {
    static_assert(K % 32 == 0,
                  "AMX: products of bf16 sum over multiples of 32, so block_n and head_dim must be multiples of 32");
    return amx::pack_by_rows<K, N>(panel, view);
  }
#endif
  if constexpr (!on_amx<T>) simd::pack_by_rows<K, N, operand_type<T>>(panel, view);
}
template <int N, int K, class T>
KITTENS_INLINE void pack_by_columns(operand_type<T>* panel, const matrix_view<T>& view) {
#if defined(__AMX_BF16__)
  if constexpr (on_amx<T>) {
    static_assert(K % 32 == 0,
                  "AMX: products of bf16 sum over multiples of 32, so block_n and head_dim must be multiples of 32");
    return amx::pack_by_columns<N, K>(panel, view);
  }
#endif
  if constexpr (!on_amx<T>) simd::pack_by_columns<N, K, operand_type<T>>(panel, view);
}

// Beside each shared tile of the fast flavour: what is known about it.
template <class T, int R, int C> struct tile_panels {
  using W = operand_type<T>;
  static constexpr bool rows_are_data = std::is_same_v<T, W>;
  bool deferred = false;  // the elements are still at the source; else in the tile's memory
  bool has_rows = false, has_by_rows = false, has_by_columns = false;
  matrix_view<T> source;
  alignas(64) W rows[rows_are_data ? 1 : R * C];
  alignas(64) W by_rows[panel_elements<T>(C, R)];
  alignas(64) W by_columns[panel_elements<T>(R, C)];

  void copied_from(const matrix_view<T>& view) {
    source = view;
    deferred = true;
    has_rows = has_by_rows = has_by_columns = false;
  }
  // The tile's own memory holds every element, and may be written to.
  void own(T* data) {
    if (deferred && !(rows_are_data && has_rows)) copy_rows(data, source, R, C);
    deferred = has_rows = has_by_rows = has_by_columns = false;
  }
  matrix_view<T> elements(const T* data) const { return deferred ? source : matrix_view<T>{data, C, 1, 0, R, 0, C}; }
};

template <class T, int R, int C> struct shared_tile;

namespace operands {

// A tile's rows in its operand type.
template <class T, int R, int C> KITTENS_INLINE const operand_type<T>* rows(const shared_tile<T, R, C>& tile) {
  using W = operand_type<T>;
#if KITTENS_CHECKED
  if constexpr (std::is_same_v<T, W>) {
    return tile.data;
  } else {
    W* rows = static_cast<W*>(runtime::scratch(runtime::scratch_slot::left, sizeof(W) * R * C));
    copy_rows(rows, matrix_view<T>{tile.data, C, 1, 0, R, 0, C}, R, C);
    return rows;
  }
#else
  auto& panels = tile.panels;
  if constexpr (std::is_same_v<T, W>) {
    if (panels.deferred && !panels.has_rows) copy_rows(const_cast<T*>(tile.data), panels.source, R, C);
    panels.has_rows = true;
    return tile.data;
  } else {
    if (!panels.has_rows) copy_rows(panels.rows, panels.elements(tile.data), R, C);
    panels.has_rows = true;
    return panels.rows;
  }
#endif
}

// `N` columns of a K x C tile, from column `first` on, as a panel.
template <int N, class T, int K, int C>
KITTENS_INLINE const operand_type<T>* panel_by_rows(const shared_tile<T, K, C>& tile, int first) {
  using W = operand_type<T>;
#if KITTENS_CHECKED
  matrix_view<T> view{tile.data, C, 1, 0, K, 0, C};
#else
  auto& panels = tile.panels;
  matrix_view<T> view = panels.elements(tile.data);
  if (first % panel_group<T> == 0) {
    if (!panels.has_by_rows) pack_by_rows<K, C>(panels.by_rows, view);
    panels.has_by_rows = true;
    return panels.by_rows + static_cast<int64_t>(first) * K;
  }
#endif
  view.base += first * view.column_stride;
  view.column_begin -= first;
  view.column_end -= first;
  W* panel = static_cast<W*>(runtime::scratch(runtime::scratch_slot::right, sizeof(W) * panel_elements<T>(N, K)));
  pack_by_rows<K, N>(panel, view);
  return panel;
}

// An N x K tile, transposed, as a panel.
template <class T, int N, int K>
KITTENS_INLINE const operand_type<T>* panel_by_columns(const shared_tile<T, N, K>& tile) {
#if KITTENS_CHECKED
  using W = operand_type<T>;
  W* panel = static_cast<W*>(runtime::scratch(runtime::scratch_slot::right, sizeof(W) * panel_elements<T>(N, K)));
  pack_by_columns<N, K>(panel, matrix_view<T>{tile.data, K, 1, 0, N, 0, K});
  return panel;
#else
  auto& panels = tile.panels;
  if (!panels.has_by_columns) pack_by_columns<N, K>(panels.by_columns, panels.elements(tile.data));
  panels.has_by_columns = true;
  return panels.by_columns;
#endif
}

}  // namespace operands
}  // namespace KITTENS_MACHINE
}  // namespace kittens
