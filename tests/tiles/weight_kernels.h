// Small kernels on the operations that make a backward pass of attention: weights from scores, and tiles that one
// warpgroup stores and another one loads.
#pragma once
#include "tile_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

// Tensor 0: 64 x C, rounded and stored by warpgroup 0, loaded by warpgroup 1. Tensor 1: 64 x C in T, copied. Tensor 2:
// what was loaded. Tensor 3: 64 x 8, the dot products of the rows of both plus those of the first with themselves.
template <class T, int C> struct load_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 64, C>;
  static constexpr int warpgroups = 2;
  struct params {
    arguments a;
    tile_map<tile> from;
    const char* prepare() { return make_tile_map(from, a.tensors[1]); }
  };
  struct shared {
    tile stored, copied;
    barrier full;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    constexpr named_barrier is_stored{first_free_barrier, 2};
    if (cta.warpgroup == 0 && cta.elect()) s.full.init(1);
    cta.publish_barriers();
    if (cta.warpgroup == 0) {
      register_tile<real, C> exact;
      register_tile<T, C> rounded;
      read(exact, pointer<real>(p.a, 0));
      convert(rounded, exact);
      store(rows_of(s.stored, 0), rounded);
      publish_arrive(is_stored);
    } else {
      if (cta.elect()) {
        s.full.expect(tile::bytes);
        copy(s.copied, p.from, {0, 0, 0}, s.full);
      }
      register_tile<real, C> t;
      row_vector<real> sums;
      is_stored.sync();
      load(t, rows_of(s.stored, 0));
      write(pointer<real>(p.a, 2), t);
      s.full.wait(0);
      fill(sums, real(0));
      row_dot(sums, rows_of(s.stored, 0), rows_of(s.copied, 0));
      row_dot(sums, rows_of(s.stored, 0), rows_of(s.stored, 0));
      row_sum_finish(sums);
      write(pointer<real>(p.a, 3), sums);
    }
  }
};

// Tensor 0: t, 64 x C, then u, 64 x C. Tensor 1: 64 values of rows, then C of columns. Tensor 2: four times 64 x C:
// exp2(t * real 0 - the row's), exp2(t * real 0 - the column's), t where row + integer 0 >= column and else 0, and
// t * (u - the row's). Tensor 3: 64 x 8, the first (integer 1) values of rows, and 7 beyond.
template <class Real, int C> struct weight_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  struct shared {
    shared_vector<Real, C> columns;
    barrier full;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.elect()) s.full.init(1);
    cta.publish_barriers();
    if (cta.elect()) {
      s.full.expect(shared_vector<Real, C>::bytes);
      copy(s.columns, pointer<Real>(p.a, 1) + 64, s.full);
    }
    const Real scale = static_cast<Real>(p.a.reals[0]);
    const int offset = p.a.integers[0];
    Real* out = pointer<Real>(p.a, 2);
    register_tile<Real, C> t, u;
    row_vector<Real> rows;
    load_rows(rows, pointer<Real>(p.a, 1), 64, Real(0));
    read(t, pointer<Real>(p.a, 0));
    exp2_rows(t, rows, scale);
    write(out, t);
    s.full.wait(0);
    read(t, pointer<Real>(p.a, 0));
    column_vector<Real, C> columns;
    load_columns(columns, s.columns);
    exp2_columns(t, columns, scale);
    write(out + 64 * C, t);
    read(t, pointer<Real>(p.a, 0));
    zero_unless(t, [=](int row, int column) { return row + offset >= column; });
    write(out + 2 * 64 * C, t);
    read(t, pointer<Real>(p.a, 0));
    read(u, pointer<Real>(p.a, 0) + 64 * C);
    map_rows(t, u, rows, [](Real x, Real y, Real z) { return x * (y - z); });
    write(out + 3 * 64 * C, t);
    load_rows(rows, pointer<Real>(p.a, 1), p.a.integers[1], Real(7));
    write(pointer<Real>(p.a, 3), rows);
  }
};

// With f(x) = real 0 tanh(real 1 x): weights = exp2(f(t) - shift), then t = f(t), where t is small enough. Tensor 0: t, 64 x C; tensor 1: 64
// shifts. Tensor 2: as 64 x 8 each the sums and whether t was small enough, to either; then t before and t after the second. Tensor 3: the weights.
template <class T, int C> struct odd_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 64, C>;
  static constexpr int warpgroups = 1;
  struct params {
    arguments a;
    tile_map<tile> to;
    odd_function<real> f;
    const char* prepare() {
      f = small_tanh<real>(a.reals[0], a.reals[1]);
      return make_tile_map(to, a.tensors[3]);
    }
  };
  struct shared {
    tile through;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta) {
    real* out = pointer<real>(p.a, 2);
    register_tile<real, C> t;
    register_tile<T, C> weights;
    row_vector<real> shift, sums, small;
    read(t, pointer<real>(p.a, 0));
    read(shift, pointer<real>(p.a, 1));
    fill(sums, real(0));
    map_into(weights, t, [](real) { return real(0); });  // stays where t is too large
    fill(small, exp2_odd_into(weights, t, shift, p.f, sums) ? real(1) : real(0));
    row_sum_finish(sums);
    write(out, sums);
    write(out + 64 * 8, small);
    write(out + 3 * 64 * 8, t);
    fill(small, map_odd(t, p.f) ? real(1) : real(0));
    write(out + 2 * 64 * 8, small);
    write(out + 3 * 64 * 8 + 64 * C, t);
    store_async(p.to, rows_of(s.through, 0), weights, {0, 0, 0});
    store_wait_all();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
