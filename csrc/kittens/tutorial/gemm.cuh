// C (M x N) = A (M x K) B (K x N): a matrix product on tiles, the smallest kernel that uses the whole vocabulary. README.md walks through it.
//
// A CTA makes 128 x 256 tiles of C. The producer streams 64-wide slices of A and B through a ring of three stages; each of two consumer
// warpgroups owns 64 rows of the tile and sums them in registers.
#pragma once
#include "../kittens.h"

namespace kittens_tutorial {
inline namespace KITTENS_MACHINE {

template <class T> struct gemm {
  static constexpr int block_m = 128, block_n = 256, block_k = 64, stages = 3, consumers = block_m / 64, warpgroups = consumers + 1;
  static constexpr int rows_in_l2 = 16;  // row tiles that walk the columns together, so that A and B are read from the second-level cache
  using real = kittens::accumulator<T>;
  using a_tile = kittens::shared_tile<T, block_m, block_k>;
  using b_tile = kittens::shared_tile<T, block_k, block_n>;
  using c_tile = kittens::shared_tile<T, block_m, block_n>;
  using c_rows = kittens::shared_tile<T, 64, block_n>;

  struct params {
    kittens::tile_map<a_tile> a;
    kittens::tile_map<b_tile> b;
    kittens::tile_map<c_rows> c;
    int row_tiles, column_tiles, slices;
  };
  struct shared {
    a_tile a[stages];
    b_tile b[stages];
    c_tile c;
    kittens::ring_flags<stages> a_flags, b_flags;
  };
  struct work {
    int row, column;
    KITTENS_INLINE work(const params& p, int tile) {
      const int per_group = rows_in_l2 * p.column_tiles, group = tile / per_group, within = tile - group * per_group;
      const int left = p.row_tiles - group * rows_in_l2, rows = left < rows_in_l2 ? left : rows_in_l2;
      row = (group * rows_in_l2 + within % rows) * block_m;
      column = within / rows * block_n;
    }
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    if (cta.warpgroup == 0 && cta.elect()) {
      s.a_flags.init(consumers);
      s.b_flags.init(consumers);
    }
    cta.publish_barriers();
    const int tiles = p.row_tiles * p.column_tiles;

    if (cta.warpgroup == 0) {
      cta.template give_registers<24>();
      if (!cta.elect()) return;
      producer a(s.a, s.a_flags);
      producer b(s.b, s.b_flags);
      for (int tile = cta.index; tile < tiles; tile += cta.count) {
        const work w(p, tile);
        KITTENS_NO_UNROLL for (int k = 0; k < p.slices; k++) {
          a.load(p.a, {w.row, 0, 0, k * block_k});
          b.load(p.b, {k * block_k, 0, 0, w.column});
        }
      }
      return;
    }

    cta.template take_registers<240>();
    const int wg = cta.warpgroup - 1;
    consumer a(s.a, s.a_flags);
    consumer b(s.b, s.b_flags);
    register_tile<real, block_n> sum;
    register_tile<T, block_n> rounded;
    for (int tile = cta.index; tile < tiles; tile += cta.count) {
      const work w(p, tile);
      KITTENS_NO_UNROLL for (int k = 0; k < p.slices; k++) {
        auto& a_slice = a.wait();
        auto& b_slice = b.wait();
        mma_begin(sum);
        mma_AB(sum, rows_of(a_slice, wg * 64), b_slice, k > 0);
        mma_commit();
        mma_wait<0>();
        mma_done(sum);
        a.release();
        b.release();
      }
      convert(rounded, sum);
      store_async(p.c, rows_of(s.c, wg * 64), rounded, {w.row + wg * 64, 0, 0, w.column});
    }
    store_wait_all();
  }
};

// Row-major matrices with rows that start on 16 bytes. Returns an error text or null.
template <class T> const char* launch_gemm(void* a, void* b, void* c, int m, int n, int k, int processors, const kittens::execution& execution) {
  using kernel = gemm<T>;
  typename kernel::params p;
  const auto matrix = [](void* data, int64_t rows, int64_t columns) {
    return kittens::tensor_view{data, {1, 1, rows, columns}, {rows * columns, rows * columns, columns, 1}};
  };
  const char* error = nullptr;
  if ((error = kittens::make_tile_map(p.a, matrix(a, m, k))) || (error = kittens::make_tile_map(p.b, matrix(b, k, n))) ||
      (error = kittens::make_tile_map(p.c, matrix(c, m, n))))
    return error;
  p.row_tiles = (m + kernel::block_m - 1) / kernel::block_m;
  p.column_tiles = (n + kernel::block_n - 1) / kernel::block_n;
  p.slices = (k + kernel::block_k - 1) / kernel::block_k;
  const int tiles = p.row_tiles * p.column_tiles;
  return kittens::launch<kernel>(p, tiles < processors ? tiles : processors, execution);
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tutorial
