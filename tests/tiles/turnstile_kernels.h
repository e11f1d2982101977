// Sums of many CTAs in a fixed order.
#pragma once
#include "tile_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

// Integer 0: tiles, which CTAs take from the counter, tensor 0. Integer 1: places. Tile t visits the places from t / 2
// on, integer 2 of them where there are so many, and adds to two 64 x C sums of each, in tensor 2: its consumer w adds
// real 2 t + w of tensor 1, everywhere. Tensor 3: for each place how many visits have ended. The tiles of a place go in
// the order of their numbers.
template <class Real, int C> struct turnstile_kernel {
  static constexpr int warpgroups = 3, elected = 3;
  struct message {
    int tile, first, end;

    KITTENS_INLINE message() {}
    KITTENS_INLINE message(const arguments& a, int tile) : tile(tile), first(tile / 2), end(first + a.integers[2]) {
      if (end > a.integers[1]) end = a.integers[1];
    }
  };
  using params = registers_only;
  struct shared {
    mailbox<message> mail;
    turnstile stile;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.warpgroup == 0 && cta.elect()) {
      s.mail.init(2, 2);
      s.stile.init(2);
    }
    cta.publish_barriers();
    int32_t* ended = pointer<int32_t>(p.a, 3);
    if (cta.warpgroup == 0) {
      if (cta.elect()) hand_out(p, s, cta);
      if (cta.elect(1)) {
        opener turns(s.stile);
        each_visit(p, s, [&](const message& m, int place) {
          const int before = place - p.a.integers[2] + 1;  // the place at which the first tile to come here begins
          turns.open(ended + place, m.tile - (before > 0 ? 2 * before : 0));
        });
      }
      if (cta.elect(2)) {
        closer turns(s.stile);
        each_visit(p, s, [&](const message&, int place) { turns.close(ended + place); });
      }
      return;
    }
    const int wg = cta.warpgroup - 1;
    visitor turns(s.stile);
    each_visit(p, s, [&](const message& m, int place) {
      register_tile<Real, C> t;
      fill(t, pointer<Real>(p.a, 1)[2 * m.tile + wg]);
      tile_sums<Real, false> sums(pointer<Real>(p.a, 2) + (2 * place + wg) * 64 * C);
      turns.enter();
      sums.add(t);
      turns.leave();
    });
  }

 private:
  static KITTENS_KERNEL void hand_out(const params& p, shared& s, cta cta) {
    tile_counter* counter = pointer<tile_counter>(p.a, 0);
    sender mail(s.mail);
    for (;;) {
      const int tile = take_tile(counter, cta) - cta.count;
      if (tile >= p.a.integers[0]) break;
      mail.make(p.a, tile);
    }
    mail.make(p.a, -2);
    retire(counter, cta);
  }
  static KITTENS_KERNEL void each_visit(const params&, shared& s, auto visit) {
    receiver mail(s.mail);
    KITTENS_NO_UNROLL while (mail.wait().tile >= 0) {
      const message& m = mail.current();
      KITTENS_NO_UNROLL for (int place = m.first; place < m.end; place++) visit(m, place);
      mail.release();
    }
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
