// Values of columns that are folded into a product as bfloat16 terms.
#pragma once
#include "tile_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

// Tensor 0: X, C x 64 in T. Tensor 1: two values of each of C columns, floats. Tensor 2: C term_pairs. Integer 0 is 0: they are made of the values.
// Else tensor 3, three times 64 x C: X0 X^T - the first values with X0 the first 64 rows of X, the same with the second values, and
// the first of these plus ten times the second.
template <class T, int C> struct term_kernel {
  static_assert(C % 64 == 0);
  using tile = shared_tile<T, C, 64>;
  static constexpr int warpgroups = 1;
  struct params {
    arguments a;
    tile_map<tile> from;
    const char* prepare() { return make_tile_map(from, a.tensors[0]); }
  };
  struct shared {
    tile x;
    shared_vector<term_pair, C> pairs;
    barrier full;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.elect()) s.full.init(1);
    cta.publish_barriers();
    term_pair* pairs = pointer<term_pair>(p.a, 2);
    if (p.a.integers[0] == 0) {
      for (int row = 0; row < C; row += 64) {
        row_vector<float> first, second;
        load_rows(first, pointer<float>(p.a, 1) + row, 64, 0.f);
        load_rows(second, pointer<float>(p.a, 1) + C + row, 64, 0.f);
        store_terms(pairs + row, first, second);
      }
      return;
    }
    if (cta.elect()) {
      s.full.expect(tile::bytes + shared_vector<term_pair, C>::bytes);
      copy(s.x, p.from, {0, 0, 0}, s.full);
      copy(s.pairs, pairs, s.full);
    }
    s.full.wait(0);
    register_tile<float, C> first, second;
    minus_terms<0> minus_first;
    minus_terms<1> minus_second;
    fill(minus_first);
    fill(minus_second);
    mma_begin(first, second, minus_first, minus_second);
    mma_minus_columns(first, minus_first, s.pairs);
    mma_ABt(first, rows_of(s.x, 0), s.x, 1);
    mma_minus_columns(second, minus_second, s.pairs);
    mma_ABt(second, rows_of(s.x, 0), s.x, 1);
    mma_commit();
    mma_wait<0>();
    mma_done(first, second);
    write(pointer<float>(p.a, 3), first);
    write(pointer<float>(p.a, 3) + 64 * C, second);
    map_with(first, second, [](float x, float y) { return x + 10 * y; });
    write(pointer<float>(p.a, 3) + 2 * 64 * C, first);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
