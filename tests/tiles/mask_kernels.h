// Small kernels on the operations by which attention hides keys and drops weights.
#pragma once
#include "tile_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

// Tensor 0: t, 64 x C. Tensor 1: 64 x C / 32 words. Tensor 2: five times 64 x C: t where the words' bits are set, each
// two neighbours as their sum and 1000 row + column, tanh(t), whether some row below 48 has the number integer 0 in its
// first column, and t + 2 (tensor 3's element of the row's half and the column), below column integer 1. Tensor 3: 32 x
// C x 2, of which the first of each two count.
template <class Real, int C> struct hide_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  using shared = nothing;

  static KITTENS_KERNEL void run(const params& p, shared&, cta) {
    const Real* source = pointer<Real>(p.a, 0);
    const uint32_t* words = pointer<uint32_t>(p.a, 1);
    Real* out = pointer<Real>(p.a, 2);
    register_tile<Real, C> t;
    read(t, source);
    keep_where(t, [=](int row, int column) { return words[row * (C / 32) + column / 32]; }, -infinity<Real>());
    write(out, t);
    read(t, source);
    map_pairs(t, [](int row, int column, Real& x, Real& y) {
      x += y;
      y = row * Real(1000) + column;
    });
    write(out + 64 * C, t);
    read(t, source);
    map(t, [](Real x) { return kittens::tanh(x); });
    write(out + 2 * 64 * C, t);
    const int wanted = p.a.integers[0];
    fill(t, any_of<48>([=](int row) { return source[row * C] == Real(wanted); }) ? Real(1) : Real(0));
    write(out + 3 * 64 * C, t);
    const Real* added = pointer<Real>(p.a, 3);
    read(t, source);
    map_with_elements(t, [=](int row) { return added + row / 2 * (2 * C); }, 2, p.a.integers[1], [](Real x, Real y) { return x + 2 * y; });
    write(out + 4 * 64 * C, t);
  }
};


// What decides on eight elements: the bits 4 a + 2 b + e of a number. A pair is handed over with its bits as they are,
// the verdict puts them where the operations look.
struct drawn_bits {
  uint32_t bits;
  KITTENS_INLINE uint32_t pair(int a, int b) const { return (bits >> (4 * a + 2 * b) & 1) | (bits >> (4 * a + 2 * b + 1) & 1) << 16; }
};
struct drawn_verdict {
  KITTENS_INLINE uint32_t operator()(uint32_t pair) const { return pair << 15; }
};

// Tensor 0: 64 x C. Tensor 1: a number for each of its elements, of which those of the rows and columns that are asked
// for count. Tensor 2: the first in T, where they are kept.
template <class T, int C> struct drop_kernel {
  using real = accumulator<T>;
  using tile = shared_tile<T, 64, C>;
  static constexpr int warpgroups = 1;
  struct params {
    arguments a;
    tile_map<tile> to;
    const char* prepare() { return make_tile_map(to, a.tensors[2]); }
  };
  struct shared {
    tile through;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta) {
    const int32_t* numbers = pointer<int32_t>(p.a, 1);
    register_tile<real, C> exact;
    register_tile<T, C> t;
    read(exact, pointer<real>(p.a, 0));
    convert(t, exact);
    keep_drawn(t, [=](int row, int column) { return drawn_bits{static_cast<uint32_t>(numbers[row * C + column])}; }, drawn_verdict{});
    store_async(p.to, rows_of(s.through, 0), t, {0, 0, 0});
    store_wait_all();
  }
};

// Tensor 0: 128 x C in T, copied; each of two warpgroups zeroes its half where tensor 1 has no 0 for the row, and reads
// the other half. Tensor 2: what was read. Tensor 3: 64 x 8, the first 64 elements of tensor 0, widened.
template <class T, int C> struct zero_kernel {
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
    if (cta.warpgroup == 0 && cta.elect()) s.full.init(1);
    cta.publish_barriers();
    if (cta.warpgroup == 0 && cta.elect()) {
      s.full.expect(tile::bytes);
      copy(s.copied, p.from, {0, 0, 0}, s.full);
    }
    s.full.wait(0);
    const int mine = cta.warpgroup * 64, other = 64 - mine;
    const int32_t* flags = pointer<int32_t>(p.a, 1);
    zero_rows<64>(rows_of(s.copied, mine), [=](int row) { return flags[mine + row] != 0; });
    publish({first_free_barrier, 2});
    register_tile<real, C> t;
    load(t, rows_of(s.copied, other));
    write(pointer<real>(p.a, 2) + other * C, t);
    register_tile<real, 8> widened;
    fill(widened, real(0));
    const T* elements = pointer<T>(p.a, 0);
    map(widened, [=](int row, int, real) { return widen(elements[row]); });
    if (cta.warpgroup == 0) write(pointer<real>(p.a, 3), widened);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
