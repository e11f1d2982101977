// Shapes and layouts that every machine agrees on.
#pragma once
#include <cstdint>

namespace kittens {

inline constexpr int warpgroup_rows = 64;  // rows of a register tile: what one warpgroup's tensor-core product yields

// Registers a thread of each warpgroup, together, when a CTA has so many warpgroups: what they have at the launch, which give_registers and
// take_registers only move about. A take_registers beyond it waits for ever on the H200.
constexpr int registers_to_share(int warpgroups) { return 65536 / (128 * warpgroups) / 8 * 8 * warpgroups; }

// A shared tile is stored as panels of `panel_columns` columns, each row of a panel one swizzle span. The widest span that divides the row is
// taken: 128 bytes whenever the columns allow it (64 columns of a 16-bit type), else 64, else 32.
enum class swizzle : int { bytes128 = 128, bytes64 = 64, bytes32 = 32 };

constexpr swizzle widest_swizzle(int row_bytes) {
  return row_bytes % 128 == 0 ? swizzle::bytes128 : row_bytes % 64 == 0 ? swizzle::bytes64 : swizzle::bytes32;
}

template <class T, int Rows, int Columns> struct tile_layout {
  static_assert(Rows % 8 == 0, "shared_tile: rows must be a multiple of 8, the height of a swizzle atom");
  static_assert(Columns * sizeof(T) % 32 == 0, "shared_tile: a row must be a multiple of 32 bytes, the narrowest swizzle");
  static constexpr swizzle mode = widest_swizzle(Columns * sizeof(T));
  static constexpr int span_bytes = static_cast<int>(mode);
  static constexpr int panel_columns = span_bytes / static_cast<int>(sizeof(T));
  static constexpr int panels = Columns / panel_columns;
  static constexpr int panel_bytes = Rows * span_bytes;
  static constexpr int bytes = Rows * Columns * static_cast<int>(sizeof(T));
};

// Where a tile lies in a (batch, head, row, column) tensor.
struct place {
  int row, head, batch, column = 0;
};

// A (batch, head, row, column) tensor in memory. Sizes and strides in elements, in that order.
struct tensor_view {
  void* data;
  int64_t size[4];
  int64_t stride[4];
};

}  // namespace kittens
