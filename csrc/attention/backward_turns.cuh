// dQ summed in an order that no run changes: at each step of a head the tiles of keys that see it add one after the other.
//
// Beside the thread that loads, two threads of the producer's warpgroup walk the steps that the consumers walk: one waits for the tile's turn at each
// and opens the turnstile, the other one passes the turn on when both consumers have left. A tile waits for tiles of its head that were begun before
// it, since CTAs take tiles from a counter and each head's tiles have their turns in that order: the tile begun first never waits.
//
// Passing a turn on takes longer than a step (about 3 us against 2.2 at head_dim 128). Under a causal mask a tile sees a step or two more than the next
// one, and the order is such that this helps:
//   rising: all heads but those of the last group   last keys first, steps upwards from the diagonal: the tile before is always a step or two
//                                                   ahead. The longest tiles come last, which would leave CTAs idle at the end
//   falling: the last group                         first keys first, as without an order, so that the work ends evenly; steps downwards. Tiles
//                                                   begun together follow each other at the distance of a turn
// Falling alone took 1.08 to 1.15 times as long as without an order; the other two ways through the steps leave each tile waiting for a step.
#pragma once
#include "backward_shapes.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C, class Shared> struct backward_turns {
  static constexpr int threads = 2;

  // The tile that is begun as the number-th one.
  static KITTENS_INLINE int begun_as(const backward_key_params<C>& p, int number) {
    if (number >= p.rising) return number;
    const int per_group = p.heads_in_l2 * p.tiles_per_head, group = number / per_group;
    return (2 * group + 1) * per_group - 1 - number;  // of its group the last one first
  }
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
      const int first = w.first, end = w.end, tile = w.key / C::block_k;
      const bool rises = w.tile < p.rising;
      int* of_head = p.turns + (w.batch * p.heads + w.head * p.group) * p.steps;
      KITTENS_NO_UNROLL for (int n = 0; n < p.group; n++) {
        KITTENS_NO_UNROLL for (int k = 0; k < end - first; k++) {
          const int i = rises ? first + k : end - 1 - k;
          visit(of_head + i, rises ? last_tile(p, i) - tile : tile - first_tile(p, i));
        }
        of_head += p.steps;
      }
      mail.release();
    }
  }
  // The tiles of the first and of the last key that any row of a step sees. Every tile between them visits the step.
  static KITTENS_INLINE int first_tile(const backward_key_params<C>& p, int i) {
    const int key = i * C::block_q - p.mask.left;
    return key > 0 ? key / C::block_k : 0;
  }
  static KITTENS_INLINE int last_tile(const backward_key_params<C>& p, int i) {
    const int key = i * C::block_q + C::block_q - 1 + p.mask.right;
    return (key < p.mask.length_k ? key : p.mask.length_k - 1) / C::block_k;
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
