// Small kernels on the operations of attention's modified backward.
#pragma once
#include "mask_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

// Tensor 0: t, 64 x C. Tensor 1: a number for each element. Tensor 2: four times 64 x C: 1000 t + 2 t, the latter by way
// of T; t + 100 row + column, t with the signs that the numbers draw and t with those they draw transposed, all three in the groups of columns that begin below integer 0. Tensor 3: t / 3 in T.
template <class T, int C> struct signed_kernel {
  using real = accumulator<T>;
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta) {
    const real* source = pointer<real>(p.a, 0);
    const int32_t* numbers = pointer<int32_t>(p.a, 1);
    real* out = pointer<real>(p.a, 2);
    T* rounded = pointer<T>(p.a, 3);
    const int end = p.a.integers[0];
    register_tile<real, C> t;
    register_tile<T, C> u;
    read(t, source);
    map_into(u, t, [](real x) { return 2 * x; });
    map_with(t, u, [](real x, real y) { return 1000 * x + y; });
    write(out, t);
    read(t, source);
    map_below(t, end, [](int row, int column, real x) { return x + 100 * row + column; });
    write(out + 64 * C, t);
    read(t, source);
    negate_undrawn(t, end, [=](int row, int column) { return drawn_bits{static_cast<uint32_t>(numbers[row * C + column])}; }, drawn_verdict{});
    write(out + 2 * 64 * C, t);
    read(t, source);
    negate_undrawn_transposed(
        t, end, [=](int column, int row) { return drawn_bits{static_cast<uint32_t>(numbers[row * C + column])}; }, drawn_verdict{});
    write(out + 3 * 64 * C, t);
    read(t, source);
    map(t, [=](int row, int column, real x) {
      put(rounded + row * C + column, x / 3);
      return x;
    });
  }
};

// Tensor 0: 128 x C in T, copied. Both warpgroups look whether it has what is not finite; if so each clears half of it,
// and reads the other half. Tensor 1: what was read. Tensor 2: 2 x 64 x 8, what each of them found, before and after, in
// columns 0 and 1.
template <class T, int C> struct finite_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 128, C>;
  static constexpr int warpgroups = 2;
  struct params {
    arguments a;
    tile_map<tile> from;
    const char* prepare() { return make_tile_map(from, a.tensors[0]); }
  };
  struct shared {
    tile copied;
    barrier full;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    constexpr named_barrier both{first_free_barrier, 2};
    if (cta.warpgroup == 0 && cta.elect()) s.full.init(1);
    cta.publish_barriers();
    if (cta.warpgroup == 0 && cta.elect()) {
      s.full.expect(tile::bytes);
      copy(s.copied, p.from, {0, 0, 0}, s.full);
    }
    s.full.wait(0);
    const int mine = cta.warpgroup * 64, other = 64 - mine;
    const bool before = any_not_finite(s.copied);
    if (before) {
      both.sync();
      zero_not_finite<64>(rows_of(s.copied, mine));
      publish(both);
    }
    const bool after = any_not_finite(s.copied);
    register_tile<real, C> t;
    load(t, rows_of(s.copied, other));
    write(pointer<real>(p.a, 1) + other * C, t);
    register_tile<real, 8> found;
    map_found(found, before, after);
    write(pointer<real>(p.a, 2) + cta.warpgroup * 64 * 8, found);
  }

 private:
  static KITTENS_INLINE void map_found(register_tile<real, 8>& found, bool before, bool after) {
    fill(found, real(0));
    map(found, [=](int, int column, real) { return real(column == 0 ? before : column == 1 && after); });
  }
};

// Tensor 0: 64 x C. Tensor 1: its column sums in every row.
template <class Real, int C> struct column_sum_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  struct shared {
    shared_vector<Real, C> sums;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta) {
    register_tile<Real, C> t;
    read(t, pointer<Real>(p.a, 0));
    sum_columns(s.sums, t);
    named_barrier{first_free_barrier, 1}.sync();
    column_vector<Real, C> sums;
    load_columns(sums, s.sums);
    map_columns(t, sums, [](Real, Real x) { return x; });
    write(pointer<Real>(p.a, 1), t);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
