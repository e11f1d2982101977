// Products of tiles: both majors of both operands, A in shared memory or in registers, tiles that a copy or a store has
// filled.
#pragma once
#include "tile_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

enum class product { ABt, AB, AtB };
enum class left { shared, registers };

// D = or += the product of A, tensor 0, and B, tensor 1. Tensor 2: what D is before (64 x N reals); tensor 3: D.
// Integer 0: whether D is added to. Integer 1: the first of the 64 rows (of the columns for AtB) that are taken of A;
// integer 2: for AtB with a B wider than N, the first of the N columns that are taken of it. A shared A is 128 x K, or
// K x WidthA for AtB; a register A 64 x K reals.
template <product P, left L, class T, int N, int K, int WidthA = 128, int WidthB = N> struct product_kernel {
  using real = accumulator<T>;
  using a_tile = std::conditional_t<P == product::AtB, shared_tile<T, K, WidthA>, shared_tile<T, 128, K>>;
  using b_tile = std::conditional_t<P == product::ABt, shared_tile<T, N, K>, shared_tile<T, K, WidthB>>;
  static constexpr int warpgroups = 1;
  struct params {
    arguments a;
    tile_map<a_tile> a_map;
    tile_map<b_tile> b_map;
    const char* prepare() {
      const char* error = L == left::shared ? make_tile_map(a_map, a.tensors[0]) : nullptr;
      return error ? error : make_tile_map(b_map, a.tensors[1]);
    }
  };
  struct shared {
    loaded_tile<b_tile> b;
    std::conditional_t<L == left::shared, loaded_tile<a_tile>, nothing> a;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.elect()) {
      s.b.init();
      if constexpr (L == left::shared) s.a.init();
    }
    cta.publish_barriers();
    if (cta.elect()) {
      s.b.load(p.b_map, {0, 0, 0});
      if constexpr (L == left::shared) s.a.load(p.a_map, {0, 0, 0});
    }
    const int accumulate = p.a.integers[0], first = p.a.integers[1];
    register_tile<real, N> d;
    register_tile<T, L == left::registers ? K : 16> a_registers;
    if constexpr (L == left::registers) {
      register_tile<real, K> exact;
      read(exact, pointer<real>(p.a, 0));
      convert(a_registers, exact);
    }
    if (accumulate)
      read(d, pointer<real>(p.a, 2));
    else
      fill(d, infinity<real>() - infinity<real>());
    b_tile& b = s.b.wait();
    if constexpr (L == left::registers) {
      mma_begin(d, a_registers);
      if constexpr (P == product::ABt)
        mma_ABt(d, a_registers, b, accumulate);
      else
        mma_AB(d, a_registers, b, accumulate);
    } else {
      a_tile& a = s.a.wait();
      mma_begin(d);
      if constexpr (P == product::ABt)
        mma_ABt(d, rows_of(a, first), b, accumulate);
      else if constexpr (P == product::AB)
        mma_AB(d, rows_of(a, first), b, accumulate);
      else if constexpr (WidthB == N)
        mma_AtB(d, columns_of(a, first), b, accumulate);
      else
        mma_AtB(d, columns_of(a, first), columns_of(b, p.a.integers[2]), accumulate);
    }
    mma_commit();
    mma_wait<0>();
    mma_done(d);
    write(pointer<real>(p.a, 3), d);
  }
};

// Two warpgroups store 64 rows each of X, 128 x C reals of tensor 0, publish them and meet. Then each sends the other's
// rows to tensor 1 and multiplies what was stored, in every role. Tensor 2, for each warpgroup twice 64 x 64: other's
// rows * own rows^T, and L^T * L with L the first 64 columns of X. Tensor 3, for each warpgroup 64 x C: the first 64
// columns of its own rows, in registers, times the other's rows.
template <class T, int C> struct exchange_kernel {
  static_assert(C >= 64);
  using real = accumulator<T>;
  using rows = shared_tile<T, 64, C>;
  static constexpr int warpgroups = 2;
  struct params {
    arguments a;
    tile_map<rows> to;
    const char* prepare() { return make_tile_map(to, a.tensors[1]); }
  };
  struct shared {
    shared_tile<T, 128, C> both;
    rows mine[2];
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    const int me = cta.warpgroup, other = 1 - me;
    register_tile<real, C> exact;
    register_tile<T, C> rounded;
    read(exact, pointer<real>(p.a, 0) + me * 64 * C);
    convert(rounded, exact);
    store(rows_of(s.both, me * 64), rounded);
    store(rows_of(s.mine[me], 0), rounded);
    publish({first_free_barrier, 2});
    send(p.to, rows_of(s.both, other * 64), {other * 64, 0, 0});

    register_tile<real, 64> scores, square;
    register_tile<real, C> wide;
    register_tile<T, 64> own;
    convert(own, exact);
    mma_begin(scores, square);
    mma_ABt(scores, rows_of(s.both, other * 64), s.mine[me], 0);
    mma_AtB(square, columns_of(s.both, 0), columns_of(s.both, 0), 0);
    mma_commit();
    mma_wait<0>();
    mma_done(scores, square);
    write(pointer<real>(p.a, 2) + me * 2 * 64 * 64, scores);
    write(pointer<real>(p.a, 2) + (me * 2 + 1) * 64 * 64, square);
    mma_begin(wide, own);
    mma_AB(wide, own, s.mine[other], 0);
    mma_commit();
    mma_wait<0>();
    mma_done(wide);
    write(pointer<real>(p.a, 3) + me * 64 * C, wide);
    store_wait_all();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
