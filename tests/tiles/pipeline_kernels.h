// Kernels of several warpgroups: rings, the mailbox and the tile counter, barriers.
#pragma once
#include "tile_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

// The producer streams X, tensor 0, through a ring: (integer 0) tiles of 128 x 64, an even number. With each comes a
// vector of 64 reals of tensor 2. Two consumers own 64 rows each and hold two tiles at a time. With P_i = X_i B^T,
// where B is tensor 1 (64 x 64), tensor 3 becomes for each consumer twice 64 x 64: the sum of P_i v_i (by columns), and
// the sum of every second P_i.
template <class T, int Stages> struct ring_kernel {
  static_assert(Stages >= 2, "ring_kernel: a consumer holds two tiles");
  using real = accumulator<T>;
  using tile = shared_tile<T, 128, 64>;
  using right = shared_tile<T, 64, 64>;
  static constexpr int warpgroups = 3;
  struct params {
    arguments a;
    tile_map<tile> x;
    tile_map<right> b;
    const char* prepare() {
      const char* error = make_tile_map(x, a.tensors[0]);
      return error ? error : make_tile_map(b, a.tensors[1]);
    }
  };
  struct shared {
    tile x[Stages];
    right b[1];
    shared_vector<real, 64> vectors[Stages];
    ring_flags<Stages> x_flags;
    ring_flags<1> b_flags;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.warpgroup == 0 && cta.elect()) {
      s.x_flags.init(2);
      s.b_flags.init(2);
    }
    cta.publish_barriers();
    const int tiles = uniform(p.a.integers[0]);

    if (cta.warpgroup == 0) {
      cta.template give_registers<24>();
      if (!cta.elect()) return;
      producer(s.b, s.b_flags).load(p.b, {0, 0, 0});
      producer x(s.x, s.x_flags);
      const real* vector = pointer<real>(p.a, 2);
      KITTENS_NO_UNROLL for (int i = 0; i < tiles; i++) x.load(p.x, {i * 128, 0, 0}, vector_rider(s.vectors, vector + i * 64));
      return;
    }

    cta.template take_registers<240>();
    const int wg = cta.warpgroup - 1;
    const auto add_scaled = [](real sum, real x, real v) { return sum + x * v; };
    register_tile<real, 64> products[2], scaled, sum;
    column_vector<real, 64> vector;
    fill(scaled, real(0));
    consumer b(s.b, s.b_flags);
    consumer x(s.x, s.x_flags);
    right& all_b = b.wait();
    KITTENS_NO_UNROLL for (int i = 0; i < tiles; i += 2) {
      tile& first = x.wait();
      const int first_stage = x.last();
      mma_begin(products[0]);
      mma_ABt(products[0], rows_of(first, wg * 64), all_b, 0);
      mma_commit();
      tile& second = x.wait();
      const int second_stage = x.last();
      mma_begin(products[1]);
      mma_ABt(products[1], rows_of(second, wg * 64), all_b, 0);
      mma_commit();
      mma_wait<1>();
      mma_done(products[0]);
      load_columns(vector, s.vectors[first_stage]);
      map_columns(scaled, products[0], vector, add_scaled);
      x.release();
      mma_wait<0>();
      mma_done(products[1]);
      load_columns(vector, s.vectors[second_stage]);
      map_columns(scaled, products[1], vector, add_scaled);
      mma_begin(sum);
      mma_ABt(sum, rows_of(x.current(), wg * 64), all_b, i > 0);
      mma_commit();
      mma_wait<0>();
      mma_done(sum);
      x.release();
    }
    b.release();
    write(pointer<real>(p.a, 3) + wg * 2 * 64 * 64, scaled);
    write(pointer<real>(p.a, 3) + (wg * 2 + 1) * 64 * 64, sum);
  }
};

// Tensor 0: 64 x C. Tensor 1: two vectors of C reals, copied one after the other into the same shared one. Tensor 2:
// twice 64 x C, tensor 0 times the first vector's and the second vector's value of the column, plus 1.
template <class Real, int C> struct column_kernel {
  static constexpr int warpgroups = 1;
  using params = registers_only;
  struct shared {
    shared_vector<Real, C> vector;
    barrier full;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.elect()) s.full.init(1);
    cta.publish_barriers();
    KITTENS_NO_UNROLL for (int i = 0; i < 2; i++) {
      if (cta.elect()) {
        s.full.expect(shared_vector<Real, C>::bytes);
        copy(s.vector, pointer<Real>(p.a, 1) + i * C, s.full);
      }
      s.full.wait(i);
      register_tile<Real, C> t;
      read(t, pointer<Real>(p.a, 0));
      column_vector<Real, C> vector;
      load_columns(vector, s.vector);
      map_columns(t, vector, [](Real x, Real v) { return x * v + Real(1); });
      write(pointer<Real>(p.a, 2) + i * 64 * C, t);
      named_barrier{first_free_barrier, 1}.sync();  // all have read the vector
    }
  }
};

// Tile numbers below integer 0 go from the producer to two consumers by mail; a consumer holds a message until the next
// one is there. Tensor 0: the tile counter, or null to walk the tiles by CTA index and count. Tensor 1: for each CTA
// and consumer, a log of (integer 0) pairs of 32-bit integers: the tile, and the number of its message, from 1 on.
// Tensor 2: for each CTA, what the producer has found in its messages' slots, summed.
struct mail_kernel {
  static constexpr int warpgroups = 3;
  struct message {
    int tile, number;
  };
  using params = registers_only;
  struct shared {
    mailbox<message> mail;
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.warpgroup == 0 && cta.elect()) s.mail.init(2);
    cta.publish_barriers();
    const int tiles = p.a.integers[0];

    if (cta.warpgroup == 0) {
      if (!cta.elect()) return;
      tile_counter* counter = pointer<tile_counter>(p.a, 0);
      sender mail(s.mail);
      int number = 0, sum = 0;
      for (int tile = cta.index; tile < tiles; tile = counter ? take_tile(counter, cta) : tile + cta.count)
        sum += mail.send({tile, ++number}).tile;
      mail.send({-1, 0});
      if (counter) retire(counter, cta);
      pointer<int32_t>(p.a, 2)[cta.index] = sum;
      return;
    }

    const int wg = cta.warpgroup - 1;
    receiver mail(s.mail);
    int32_t* log = pointer<int32_t>(p.a, 1) + (cta.index * 2 + wg) * tiles * 2;
    bool more = mail.wait().tile >= 0;
    while (more) {
      more = mail.wait().tile >= 0;
      if (cta.elect()) {
        log[0] = mail.current().tile;
        log[1] = mail.current().number;
      }
      log += 2;
      mail.release();
    }
  }
};

// Three warpgroups pass a turn round, (integer 0) times each, by named barriers or by mbarriers. Who has it appends its
// number to the list in tensor 0, whose first element counts the others. In the end all meet, and tensor 1 gets, from
// each warpgroup, the count that it then sees.
template <bool Named> struct turn_kernel {
  static constexpr int warpgroups = 3;
  using params = registers_only;
  struct shared {
    barrier turn[3];
  };

  static KITTENS_KERNEL void run(const params& p, shared& s, cta cta) {
    if (cta.warpgroup == 0 && cta.elect())
      for (int i = 0; i < 3; i++) s.turn[i].init(1);
    cta.publish_barriers();
    const int me = cta.warpgroup, next = (me + 1) % 3;
    const named_barrier mine{first_free_barrier + me, 2}, others{first_free_barrier + next, 2},
        everyone{first_free_barrier + 3, 3};
    const auto pass = [&] {
      if constexpr (Named)
        others.arrive();
      else if (cta.elect())
        s.turn[next].arrive();
    };
    volatile int32_t* list = pointer<int32_t>(p.a, 0);
    if (me == 2) pass();
    KITTENS_NO_UNROLL for (int i = 0; i < p.a.integers[0]; i++) {
      if constexpr (Named)
        mine.sync();
      else
        s.turn[me].wait(i & 1);
      if (cta.elect()) {
        const int count = list[0];
        list[1 + count] = me;
        list[0] = count + 1;
      }
      pass();
    }
    if (Named && me == 0) mine.sync();  // takes the last turn
    everyone.sync();
    if (cta.elect()) pointer<int32_t>(p.a, 1)[me] = list[0];
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
