// What travels with a tile of a ring, and its reading by ordinary instructions.
#pragma once
#include "gradient_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

// Tensor 0: three tiles of 64 x C in T. With the tiles 0 and 1 travel a note and, with the first alone, tile 2. Tensor 1: a
// word for each (row of a tile, 16 columns). Of tile 2 as a rider, then of tile 1, tensor 2 becomes the transpose of the 64
// columns from integer 0 on, and the same with 7 where the bit of the row and the column is 0, four times 64 x 64, and
// 64 x 64 of the notes' sum. Tensor 3: tiles 0 and 1 as they are, and from global memory tile 0 and ten times tile 0 plus
// tile 1: 64 x C each.
template <class T, int C> struct rider_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 64, C>;
  static constexpr int warpgroups = 2;
  struct note {
    int number;
    bool brings;
  };
  struct params {
    arguments a;
    tile_map<tile> from;
    const char* prepare() { return make_tile_map(from, a.tensors[0]); }
  };
  struct shared {
    tile main[2], rider[2];
    note notes[2];
    ring_flags<2, true> flags;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.warpgroup == 0 && cta.elect()) s.flags.init(1);
    cta.publish_barriers();
    if (cta.warpgroup == 0) {
      if (!cta.elect()) return;
      producer ring(s.main, s.flags);
      for (int i = 0; i < 2; i++)
        ring.load(p.from, {64 * i, 0, 0}, note_rider(s.notes, note{10 + i, i == 0}), tile_rider(s.rider, p.from, {128, 0, 0}, i == 0));
      return;
    }
    const int first = p.a.integers[0];
    const int32_t* words = pointer<int32_t>(p.a, 1);
    consumer ring(s.main, s.flags);
    int sum = 0;
    for (int i = 0; i < 2; i++) {
      tile& main = ring.wait();
      const note with = s.notes[ring.last()];
      sum += with.number;
      tile& read_from = with.brings ? s.rider[ring.last()] : main;
      register_tile<T, 64> turned;
      load_transposed(turned, columns_of(read_from, first));
      register_tile<T, C> whole;
      load(whole, rows_of(main, 0));
      ring.release();
      register_tile<real, 64> t;
      fill(t, real(0));
      map_with(t, turned, [](real, real x) { return x; });
      write(pointer<real>(p.a, 2) + 2 * i * 64 * 64, t);
      keep_where_transposed(t, [=](int column, int row) { return static_cast<uint32_t>(words[column * (C / 16) + (first + row) / 16]); }, real(7));
      write(pointer<real>(p.a, 2) + (2 * i + 1) * 64 * 64, t);
      // The same by bytes.
      const unsigned char* given = pointer<unsigned char>(p.a, 4);
      register_bytes<64> bytes;
      load_bytes_transposed(bytes, [=](int column) { return given + column * C + first; });
      map_with(t, turned, [](real, real x) { return x; });
      keep_where_transposed(t, bytes, real(7));
      write(pointer<real>(p.a, 5) + i * 64 * 64, t);
      register_tile<real, C> widened;
      fill(widened, real(0));
      map_with(widened, whole, [](real, real x) { return x; });
      write(pointer<real>(p.a, 3) + i * 64 * C, widened);
    }
    const T* global = pointer<T>(p.a, 0);
    register_tile<T, C> pairs;
    load_pairs(pairs, [=](int row) { return global + row * C; });
    register_tile<real, C> from_pairs;
    fill(from_pairs, real(0));
    map_with(from_pairs, pairs, [](real, real x) { return x; });
    write(pointer<real>(p.a, 3) + 2 * 64 * C, from_pairs);
    register_bytes<C> all;
    const unsigned char* given = pointer<unsigned char>(p.a, 4);
    load_bytes(all, [=](int row) { return given + row * C; });
    register_tile<real, C> kept = from_pairs;
    keep_where(kept, all, real(9));
    write(pointer<real>(p.a, 3) + 4 * 64 * C, kept);
    map_with_pairs(from_pairs, [=](int row) { return global + (64 + row) * C; }, [](real x, real y) { return 10 * x + y; });
    write(pointer<real>(p.a, 3) + 3 * 64 * C, from_pairs);
    register_tile<real, 64> notes;
    fill(notes, real(sum));
    write(pointer<real>(p.a, 2) + 4 * 64 * 64, notes);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
