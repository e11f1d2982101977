// dQ summed in an order that no run changes: at each step of a head the tiles of keys that see it add one after the other, the first keys first.
//
// Beside the thread that loads, two threads of the producer's warpgroup walk the steps that the consumers walk: one waits for the tile's turn at each
// and opens the turnstile, the other one passes the turn on when both consumers have left. A tile waits for tiles of lower numbers alone, and numbers
// come from the counter in the order in which CTAs begin tiles, so that the lowest tile at work never waits.
//
// Steps are visited from the last one to the first. Upwards, under a causal mask, a tile would begin a step or two before the first one of the tile
// behind it, which would wait meanwhile, and so would all in a row of tiles that begin together.
#pragma once
#include "backward_shapes.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C, class Shared> struct backward_turns {
  static constexpr int threads = 2;

  static KITTENS_KERNEL void run(const backward_key_params<C>& p, Shared& s, kittens::cta cta) {
    using namespace kittens;
    if (cta.elect(1)) {
      opener turns(s.turnstile.tile);
      each_step(p, s, [&](const int* ended, int turn) { turns.open(ended, turn); });
    }
    if (cta.elect(2)) {
      closer turns(s.turnstile.tile);
      each_step(p, s, [&](int* ended, int) { turns.close(ended); });
    }
  }

 private:
  static KITTENS_KERNEL void each_step(const backward_key_params<C>& p, Shared& s, auto visit) {
    kittens::receiver mail(s.mail);
    KITTENS_NO_UNROLL while (mail.wait().key >= 0) {
      const backward_key_work<C>& w = mail.current();
      const int first = w.first, end = w.end, tile = w.key / C::block_k, left = p.mask.left;
      int* of_head = p.turns + (w.batch * p.heads + w.head * p.group) * p.steps;
      KITTENS_NO_UNROLL for (int n = 0; n < p.group; n++) {
        KITTENS_NO_UNROLL for (int i = end - 1; i >= first; i--) {
          // The first row of a step sees the first keys that any of its rows does, and each tile from theirs on to this one visits the step.
          const int first_key = i * C::block_q - left;
          visit(of_head + i, tile - (first_key > 0 ? first_key / C::block_k : 0));
        }
        of_head += p.steps;
      }
      mail.release();
    }
  }
};

// What the consumers do of it: nothing where the sums' order is free.
template <bool in_order> struct backward_visits {
  KITTENS_INLINE backward_visits(auto&) {}
  KITTENS_INLINE void enter() {}
  KITTENS_INLINE void leave() {}
};
template <> struct backward_visits<true> {
  kittens::visitor turns;

  KITTENS_INLINE backward_visits(auto& s) : turns(s.turnstile.tile) {}
  KITTENS_INLINE void enter() { turns.enter(); }
  KITTENS_INLINE void leave() { turns.leave(); }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
