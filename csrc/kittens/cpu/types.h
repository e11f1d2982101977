// Register tiles and vectors, shared tiles and vectors, and views of them.
#pragma once
#include "operands.h"
#if KITTENS_CHECKED
#include "checks.h"
#endif

namespace kittens {
inline namespace KITTENS_MACHINE {

// 64 x C, row after row. A 16-bit tile holds values of that type, widened so that a product can take them as they are
// (except on AMX).
template <class T> using register_element = operand_type<T>;

template <class T, int C> struct register_tile {
  static_assert(C % 8 == 0 && C <= 256, "register_tile: columns must be a multiple of 8, at most 256");
  static_assert(!is_16_bit<T> || C % 16 == 0, "register_tile: columns of a 16-bit tile must be a multiple of 16");
  using element = T;
  static constexpr int columns = C;
  alignas(64) register_element<T> d[warpgroup_rows * C];

#if KITTENS_CHECKED
  mutable runtime::register_state state;

  register_tile() {
    runtime::register_created(state, element_name<T>(), C);
    runtime::poison(d, sizeof d);
  }
  register_tile(const register_tile& other) {
    runtime::register_created(state, element_name<T>(), C);
    runtime::register_used(other.state, "copy");
    __builtin_memcpy(d, other.d, sizeof d);
  }
  register_tile& operator=(const register_tile& other) {
    runtime::register_used(state, "assignment");
    runtime::register_used(other.state, "copy");
    __builtin_memcpy(d, other.d, sizeof d);
    return *this;
  }
  ~register_tile() { runtime::register_destroyed(state); }
#endif
};

template <class T> struct row_vector {
  T d[warpgroup_rows];

#if KITTENS_CHECKED
  row_vector() { runtime::poison(d, sizeof d); }
#endif
};

template <class T, int C> struct column_vector {
  T d[C];

#if KITTENS_CHECKED
  column_vector() { runtime::poison(d, sizeof d); }
#endif
};

#if KITTENS_CHECKED
// Of the size, and so at the place, that it has on the GPU.
template <class T, int R, int C> struct alignas(1024) shared_tile {
  using element = T;
  using layout = tile_layout<T, R, C>;
  static constexpr int rows = R, columns = C, bytes = layout::bytes;
  T data[R * C];

  runtime::shared_id id() const { return {this, element_name<T>(), R, C}; }
};
#else
// A copy only notes where the tile comes from. The first product that uses the tile brings it into the order that it
// needs, and keeps that beside the tile for the other warpgroups. So no element is moved twice, and K, say, never
// exists as plain rows.
template <class T, int R, int C> struct alignas(64) shared_tile {
  using element = T;
  using layout = tile_layout<T, R, C>;
  static constexpr int rows = R, columns = C, bytes = layout::bytes;
  T data[R * C];
  mutable tile_panels<T, R, C> panels;
};
#endif

template <class T, int N> struct alignas(16) shared_vector {
  static constexpr int bytes = N * static_cast<int>(sizeof(T));
  static_assert(bytes % 16 == 0, "shared_vector: bulk copies move multiples of 16 bytes");
  T data[N];

#if KITTENS_CHECKED
  runtime::shared_id id() const { return {this, element_name<T>(), 1, N}; }
#endif
};

template <class Tile, bool present> struct optional_tile { Tile tile; };
template <class Tile> struct optional_tile<Tile, false> {};

// Views. Tile may be const.
template <class Tile> struct shared_rows {
  Tile& tile;
  int first;
};
template <class Tile> struct shared_columns {
  Tile& tile;
  int first;
};
// Rows begin at a swizzle atom, columns at a panel of the 16-bit tile that the GPU would have.
template <class Tile> KITTENS_INLINE shared_rows<Tile> rows_of(Tile& tile, int first) {
#if KITTENS_CHECKED
  runtime::require_multiple("rows_of: first row", first, 8);
#endif
  return {tile, first};
}
template <class Tile> KITTENS_INLINE shared_columns<Tile> columns_of(Tile& tile, int first) {
#if KITTENS_CHECKED
  runtime::require_multiple("columns_of: first column", first,
                            tile_layout<uint16_t, Tile::rows, Tile::columns>::panel_columns);
#endif
  return {tile, first};
}

// Says that an operation uses a register tile: checked, nothing otherwise.
template <class T, int C>
KITTENS_ALWAYS_INLINE void use([[maybe_unused]] const register_tile<T, C>& t, [[maybe_unused]] const char* operation) {
#if KITTENS_CHECKED
  runtime::register_used(t.state, operation);
#endif
}

// x, the same in the whole warpgroup: of use to the Hopper compiler only.
template <class T> KITTENS_INLINE T uniform(T x) { return x; }

}  // namespace KITTENS_MACHINE
}  // namespace kittens
