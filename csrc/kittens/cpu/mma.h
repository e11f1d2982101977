// Products of tiles. The fast flavour multiplies at once; in the checked flavour a product is in flight until mma_wait.
#pragma once
#include "types.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

#if KITTENS_CHECKED
// A function object with plain captures as work for later.
template <class F> KITTENS_INLINE runtime::task make_task(F f) {
  static_assert(sizeof(F) <= sizeof(runtime::task::payload) && std::is_trivially_copyable_v<F>);
  runtime::task task{[](const void* payload) { (*static_cast<const F*>(payload))(); }, {}};
  __builtin_memcpy(task.payload, &f, sizeof f);
  return task;
}
#endif

// The operands of a product: the left one as rows in memory, the right one as a panel. `reads()` says of which shared
// tile it takes what.
namespace operands {

template <class T, int K> struct left_registers {
  using element = T;
  static constexpr int k = K;
  const register_tile<T, K>* tile;
  left_operand<operand_type<T>> operand() const { return {tile->d, K, 1}; }
};
template <class Tile> struct left_rows {
  using element = typename Tile::element;
  static constexpr int k = Tile::columns;
  const Tile* tile;
  int first;
  left_operand<operand_type<element>> operand() const { return {rows(*tile) + first * k, k, 1}; }
#if KITTENS_CHECKED
  runtime::shared_operand reads() const { return {tile->id(), {first, warpgroup_rows, 0, k}}; }
#endif
};
template <class Tile> struct left_columns {
  using element = typename Tile::element;
  static constexpr int k = Tile::rows;
  const Tile* tile;
  int first;
  left_operand<operand_type<element>> operand() const { return {rows(*tile) + first, 1, Tile::columns}; }
#if KITTENS_CHECKED
  runtime::shared_operand reads() const { return {tile->id(), {0, k, first, warpgroup_rows}}; }
#endif
};
template <class Tile, int N> struct right_rows {
  using element = typename Tile::element;
  static constexpr int k = Tile::rows;
  const Tile* tile;
  int first;
  const operand_type<element>* panel() const { return panel_by_rows<N>(*tile, first); }
#if KITTENS_CHECKED
  runtime::shared_operand reads() const { return {tile->id(), {0, k, first, N}}; }
#endif
};
template <class Tile> struct right_columns {
  using element = typename Tile::element;
  static constexpr int k = Tile::columns;
  const Tile* tile;
  const operand_type<element>* panel() const { return panel_by_columns(*tile); }
#if KITTENS_CHECKED
  runtime::shared_operand reads() const { return {tile->id(), {0, Tile::rows, 0, k}}; }
#endif
};

template <class T, int K> KITTENS_INLINE left_registers<T, K> left(const register_tile<T, K>& a) { return {&a}; }
template <class Tile> KITTENS_INLINE left_rows<std::remove_const_t<Tile>> left(shared_rows<Tile> a) {
  return {&a.tile, a.first};
}
template <class Tile> KITTENS_INLINE left_columns<std::remove_const_t<Tile>> left(shared_columns<Tile> a) {
  return {&a.tile, a.first};
}

template <int N, class T, int K>
KITTENS_INLINE right_rows<shared_tile<T, K, N>, N> right(const shared_tile<T, K, N>& b) {
  return {&b, 0};
}
template <int N, class Tile> KITTENS_INLINE right_rows<std::remove_const_t<Tile>, N> right(shared_columns<Tile> b) {
  return {&b.tile, b.first};
}

template <class W, class Real>
KITTENS_INLINE void multiply(Real* d, left_operand<W> a, const W* panel, int n, int k, bool accumulate) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<W, bf16>) {
    if (a.column != 1) {  // columns of a shared tile: AMX takes rows only
      bf16* rows = static_cast<bf16*>(runtime::scratch(runtime::scratch_slot::left, sizeof(bf16) * warpgroup_rows * k));
      for (int i = 0; i < warpgroup_rows; i++)
        for (int j = 0; j < k; j++) rows[i * k + j] = a.a[i * a.row + j * a.column];
      a = {rows, k, 1};
    }
    return amx::multiply(d, a.a, a.row, panel, n, k, accumulate);
  }
#endif
  if constexpr (std::is_same_v<W, Real>) simd::multiply<W>(d, a, panel, n, k, accumulate);
}

template <class Real, int N, class Left, class Right>
KITTENS_INLINE void product(register_tile<Real, N>& d, Left left, Right right, bool accumulate) {
  static_assert(std::is_same_v<typename Left::element, typename Right::element>,
                "product: the operands must have the same element type");
  static_assert(std::is_same_v<Real, accumulator<typename Left::element>>,
                "product: D must be of the operands' accumulator type");
  static_assert(Left::k == Right::k, "product: the operands do not agree in the dimension that is summed over");
  const auto run = [out = d.d, left, right, accumulate] {
    multiply(out, left.operand(), right.panel(), N, Left::k, accumulate);
  };
#if KITTENS_CHECKED
  if constexpr (requires { left.reads(); }) {
    const runtime::shared_operand shared[] = {left.reads(), right.reads()};
    runtime::product_issue(make_task(run), d.state, nullptr, shared, 2);
  } else {
    const runtime::shared_operand shared[] = {right.reads()};
    runtime::product_issue(make_task(run), d.state, &left.tile->state, shared, 1);
  }
#else
  run();
#endif
}

}  // namespace operands

// D = or += A B^T. A: a register tile or rows_of a shared one (64 x K); B: N x K.
template <class Real, int N, class A, class T, int K>
KITTENS_INLINE void mma_ABt(register_tile<Real, N>& d, const A& a, const shared_tile<T, N, K>& b, bool accumulate) {
  operands::product(d, operands::left(a), operands::right_columns<shared_tile<T, N, K>>{&b}, accumulate);
}
// D = or += A B. A as above; B: K x N, or columns_of a wider tile.
template <class Real, int N, class A, class B>
KITTENS_INLINE void mma_AB(register_tile<Real, N>& d, const A& a, const B& b, bool accumulate) {
  operands::product(d, operands::left(a), operands::right<N>(b), accumulate);
}
// D = or += A^T B. A: 64 columns_of a shared tile (K rows); B as above.
template <class Real, int N, class Tile, class B>
KITTENS_INLINE void mma_AtB(register_tile<Real, N>& d, shared_columns<Tile> a, const B& b, bool accumulate) {
  operands::product(d, operands::left(a), operands::right<N>(b), accumulate);
}

// Names the register tiles that the following products use; required after any other use of them and after every wait.
template <class... Tiles> KITTENS_INLINE void mma_begin([[maybe_unused]] const Tiles&... tiles) {
#if KITTENS_CHECKED
  (runtime::product_begin(tiles.state), ...);
#endif
}
// Closes a group of products.
KITTENS_INLINE void mma_commit() {
#if KITTENS_CHECKED
  runtime::product_commit();
#endif
}
// Waits until at most N groups are in flight.
template <int N> KITTENS_INLINE void mma_wait() {
  static_assert(N >= 0 && N <= 7, "mma_wait: 0 to 7 groups may stay in flight");
#if KITTENS_CHECKED
  runtime::product_wait(N);
#endif
}
// After a wait: these accumulators are complete.
template <class... Tiles> KITTENS_INLINE void mma_done([[maybe_unused]] const Tiles&... tiles) {
#if KITTENS_CHECKED
  (runtime::product_done(tiles.state), ...);
#endif
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
