// Small kernels on the tile vocabulary, one for an operation or a family of them, written once for every machine:
// copies, stores, registers. product_kernels.h and pipeline_kernels.h hold the others, kernel_list.h names them all,
// and test_tiles.py holds what they write against torch.
#pragma once
#include <type_traits>

#include "../../csrc/kittens/kittens.h"

namespace kittens_tests {

// What a test gives to a kernel. Tensors are read and written through tile maps, or straight by their data pointers.
struct arguments {
  kittens::tensor_view tensors[6];
  int32_t integers[12];
  double reals[2];

  KITTENS_HOST_DEVICE kittens::place place_at(int first) const {
    return {integers[first], integers[first + 1], integers[first + 2], integers[first + 3]};
  }
};
template <class Real> KITTENS_INLINE Real* pointer(const arguments& a, int tensor) {
  return static_cast<Real*>(a.tensors[tensor].data);
}

inline namespace KITTENS_MACHINE {
using namespace kittens;

// A register tile or vector from contiguous memory, and back. A vector is written as 64 x 8, so that every thread shows
// its copy of it.
template <class Real, int C> KITTENS_INLINE void read(register_tile<Real, C>& t, const Real* from) {
  fill(t, Real(0));
  map(t, [=](int row, int column, Real) { return from[row * C + column]; });
}
template <class Real, int C> KITTENS_INLINE void write(Real* to, register_tile<Real, C>& t) {
  map(t, [=](int row, int column, Real x) {
    to[row * C + column] = x;
    return x;
  });
}
template <class Real> KITTENS_INLINE void read(row_vector<Real>& v, const Real* from) {
  register_tile<Real, 8> t;
  fill(t, Real(0));
  map(t, [=](int row, int column, Real x) { return column == 0 ? from[row] : x; });
  fill(v, Real(0));
  row_sum(v, t);
  row_sum_finish(v);
}
template <class Real> KITTENS_INLINE void write(Real* to, const row_vector<Real>& v) {
  register_tile<Real, 8> t;
  fill(t, Real(0));
  map_rows(t, v, [](Real, Real y) { return y; });
  write(to, t);
}

// A shared tile that one copy fills.
template <class Tile> struct loaded_tile {
  Tile tile;
  barrier full;

  KITTENS_INLINE void init() { full.init(1); }
  KITTENS_INLINE void load(const tile_map<Tile>& map, place where) {
    full.expect(Tile::bytes);
    copy(tile, map, where, full);
  }
  KITTENS_INLINE Tile& wait() {
    full.wait(0);
    return tile;
  }
};

struct nothing {};
struct registers_only {  // the parameters of a kernel without tile maps
  arguments a;
  const char* prepare() { return nullptr; }
};

// Tensor 0 -> one tile at place 0 -> tensor 1 at place 4, through shared memory alone.
template <class T, int R, int C> struct copy_kernel {
  using tile = shared_tile<T, R, C>;
  static constexpr int warpgroups = 1;
  struct params {
    arguments a;
    tile_map<tile> from;
    tile_map<shared_tile<T, 64, C>> to;
    const char* prepare() {
      const char* error = make_tile_map(from, a.tensors[0]);
      return error ? error : make_tile_map(to, a.tensors[1]);
    }
  };
  using shared = loaded_tile<tile>;

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.elect()) s.init();
    cta.publish_barriers();
    if (cta.elect()) s.load(p.from, p.a.place_at(0));
    tile& t = s.wait();
    place where = p.a.place_at(4);
    KITTENS_NO_UNROLL for (int first = 0; first < R; first += 64, where.row += 64) send(p.to, rows_of(t, first), where);
    store_wait_all();
  }
};

// Integer 4 times: the next 128 x C values of tensor 0 -> registers -> tensor 1, the first at place 0 and each 128 rows
// below the last. Two warpgroups do 64 rows each, always through the same shared tile.
template <class T, int C> struct store_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 128, C>;
  static constexpr int warpgroups = 2;
  struct params {
    arguments a;
    tile_map<shared_tile<T, 64, C>> to;
    const char* prepare() { return make_tile_map(to, a.tensors[1]); }
  };
  struct shared {
    optional_tile<tile, true> through;
  };
  static_assert(std::is_empty_v<optional_tile<tile, false>>);

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    place where = p.a.place_at(0);
    where.row += cta.warpgroup * 64;
    const real* from = pointer<real>(p.a, 0) + cta.warpgroup * 64 * C;
    KITTENS_NO_UNROLL for (int i = 0; i < p.a.integers[4]; i++, where.row += 128, from += 128 * C) {
      register_tile<real, C> exact;
      register_tile<T, C> rounded;
      read(exact, from);
      convert(rounded, exact);
      store_async(p.to, rows_of(s.through.tile, cta.warpgroup * 64), rounded, where);
    }
    store_wait_all();
  }
};

// The C columns from First on of 64 x From values of tensor 0 -> tensor 1 in T.
template <class T, int C, int From, int First> struct convert_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 64, C>;
  static constexpr int warpgroups = 1;
  struct params {
    arguments a;
    tile_map<tile> to;
    const char* prepare() { return make_tile_map(to, a.tensors[1]); }
  };
  struct shared {
    tile through;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta) {
    register_tile<real, From> exact;
    register_tile<T, C> rounded;
    read(exact, pointer<real>(p.a, 0));
    convert(rounded, exact, First);
    store_async(p.to, rows_of(s.through, 0), rounded, {0, 0, 0});
    store_wait_all();
  }
};

// Tensor 0: 64 x C. Tensor 1: three times 64 x C, for fill with real 0 and the two forms of map.
template <class Real, int C> struct map_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta) {
    Real* out = pointer<Real>(p.a, 1);
    register_tile<Real, C> t;
    fill(t, static_cast<Real>(p.a.reals[0]));
    write(out, t);
    read(t, pointer<Real>(p.a, 0));
    map(t, [](Real x) { return x * x - Real(3); });
    write(out + 64 * C, t);
    read(t, pointer<Real>(p.a, 0));
    map(t, [](int row, int column, Real x) { return x + row * Real(1000) - column; });
    write(out + 2 * 64 * C, t);
  }
};

// Tensor 0: 64 x C -> tensor 1, where of row r the columns from r * integer 0 + integer 1 on, up to r * integer 2 +
// integer 3, keep their values.
template <class Real, int C> struct keep_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta) {
    register_tile<Real, C> t;
    read(t, pointer<Real>(p.a, 0));
    const int32_t* i = p.a.integers;
    keep_columns(t, [=](int row) { return row * i[0] + i[1]; }, [=](int row) { return row * i[2] + i[3]; });
    write(pointer<Real>(p.a, 1), t);
  }
};

// Tensor 0: two tiles of 64 x C. Tensor 1: 64 values. Tensor 2: twice 64 x 8, the maximum of the vector and the first
// tile's rows, and the sum of both tiles' rows. Tensor 3: 64 x C, the first tile's values times the vector's, plus 1.
template <class Real, int C> struct row_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta) {
    register_tile<Real, C> t;
    row_vector<Real> vector, most, sum;
    read(t, pointer<Real>(p.a, 0));
    read(vector, pointer<Real>(p.a, 1));
    most = vector;
    row_max(most, t);
    write(pointer<Real>(p.a, 2), most);
    fill(sum, Real(0));
    row_sum(sum, t);
    map_rows(t, vector, [](Real x, Real y) { return x * y + Real(1); });
    write(pointer<Real>(p.a, 3), t);
    read(t, pointer<Real>(p.a, 0) + 64 * C);
    row_sum(sum, t);
    row_sum_finish(sum);
    write(pointer<Real>(p.a, 2) + 64 * 8, sum);
  }
};

// Tensor 0: 64 values x, tensor 1: 64 values y, the limit: real 0. Tensor 2: three times 64 x 8, x * x + 1, x - 2 y,
// and 1 where x has a value above the limit. Tensor 3: x, of which only the first (integer 0) values may be stored.
template <class Real> struct vector_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta) {
    row_vector<Real> x, y, out;
    read(x, pointer<Real>(p.a, 0));
    read(y, pointer<Real>(p.a, 1));
    map(out, x, [](Real a) { return a * a + Real(1); });
    write(pointer<Real>(p.a, 2), out);
    map(out, x, y, [](Real a, Real b) { return a - Real(2) * b; });
    write(pointer<Real>(p.a, 2) + 64 * 8, out);
    fill(out, any_above(x, static_cast<Real>(p.a.reals[0])) ? Real(1) : Real(0));
    write(pointer<Real>(p.a, 2) + 2 * 64 * 8, out);
    store_rows(pointer<Real>(p.a, 3), x, p.a.integers[0]);
  }
};

// Weights = exp2(t * real 0 - shift). Tensor 0: t, 64 x C; tensor 1: 64 shifts. Tensor 2: the sums as 64 x 8, then t
// again. Tensor 3: the weights.
template <class T, int C> struct exp2_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 64, C>;
  static constexpr int warpgroups = 1;
  struct params {
    arguments a;
    tile_map<tile> to;
    const char* prepare() { return make_tile_map(to, a.tensors[3]); }
  };
  struct shared {
    tile through;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta) {
    register_tile<real, C> t;
    register_tile<T, C> weights;
    row_vector<real> shift, sums;
    read(t, pointer<real>(p.a, 0));
    read(shift, pointer<real>(p.a, 1));
    exp2_into(weights, t, shift, static_cast<real>(p.a.reals[0]), sums);
    row_sum_finish(sums);
    write(pointer<real>(p.a, 2), sums);
    write(pointer<real>(p.a, 2) + 64 * 8, t);
    store_async(p.to, rows_of(s.through, 0), weights, {0, 0, 0});
    store_wait_all();
  }
};

// Tensor 0: 64 x 16. Tensor 1: three times 64 x 16, exp2 of it, log of it, and infinity everywhere but in the first
// column: weight_limit there.
template <class T> struct scalar_kernel {
  using real = accumulator<T>;
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta) {
    real* out = pointer<real>(p.a, 1);
    register_tile<real, 16> t;
    read(t, pointer<real>(p.a, 0));
    map(t, [](real x) { return kittens::exp2(x); });
    write(out, t);
    read(t, pointer<real>(p.a, 0));
    map(t, [](real x) { return kittens::log(x); });
    write(out + 64 * 16, t);
    map(t, [](int, int column, real) { return column == 0 ? weight_limit<T>() : infinity<real>(); });
    write(out + 2 * 64 * 16, t);
  }
};

// Integer 0 is 0: every CTA adds its 64 x C of tensor 0 to tensor 1. It is 1: tensor 1 -> tensor 2.
template <class Real, int C> struct sum_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta cta) {
    register_tile<Real, C> t;
    if (p.a.integers[0] == 0) {
      read(t, pointer<Real>(p.a, 0) + cta.index * 64 * C);
      tile_sums<Real, C == 64> sums(pointer<Real>(p.a, 1) - 64 * C);
      sums.advance(64 * C);
      sums.add(t);
    } else {
      take_from(t, pointer<Real>(p.a, 1));
      write(pointer<Real>(p.a, 2), t);
    }
  }
};

// The rows of tensor 0 below integer 0 as parts of P columns. Integer 1 is 0: tensor 0 -> tensor 1. It is 1: tensor 1 ->
// tensor 2, a CTA for each part.
template <class Real, int C, int P> struct part_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta cta) {
    Real* between = pointer<Real>(p.a, 1);
    if (p.a.integers[1] == 0) {
      register_tile<Real, C> t;
      read(t, pointer<Real>(p.a, 0));
      put_parts<P>(between, t, p.a.integers[0]);
    } else {
      register_tile<Real, P> part;
      take_from(part, between + cta.index * 64 * P, p.a.integers[0]);
      write(pointer<Real>(p.a, 2) + cta.index * 64 * P, part);
    }
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
