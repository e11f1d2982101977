// Turnstiles: see sm90/turnstile.cuh. Who waits for a turn lets the other fibers and CTAs run.
#pragma once
#include "pipeline.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

struct turnstile {
  static constexpr int visits = 2;
  barrier open[visits], left[visits], free[visits];

  void init(int warpgroups) {
    for (int i = 0; i < visits; i++) {
      open[i].init(1);
      left[i].init(warpgroups);
      free[i].init(1);
    }
#if KITTENS_CHECKED
    runtime::turnstile_named(this, &open[0].state, &left[0].state, &free[0].state, visits);
#endif
  }
};

// One thread.
struct opener {
  turnstile& stile;
  ring_position<turnstile::visits> at{0, 1};  // both are free at the start: waiting for phase 1 returns at once

  opener(turnstile& s) : stile(s) {}
  // Lets the CTA's warpgroups in for the next visit once `turn` visits of the place have ended.
  void open(const int* ended, int turn) {
    stile.free[at.stage].wait(at.phase);
    runtime::await_turn(ended, turn);
    stile.open[at.stage].arrive();
    at.advance();
  }
};

// Another thread.
struct closer {
  turnstile& stile;
  ring_position<turnstile::visits> at{0, 0};

  closer(turnstile& s) : stile(s) {}
  // The next visit of the place ends when all warpgroups have left.
  void close(int* ended) {
    stile.left[at.stage].wait(at.phase);
    stile.free[at.stage].arrive();
    runtime::pass_turn(ended);
    at.advance();
  }
};

// Every warpgroup that adds.
struct visitor {
  turnstile& stile;
  ring_position<turnstile::visits> at{0, 0};

  visitor(turnstile& s) : stile(s) {}
  void enter() {
#if KITTENS_CHECKED
    runtime::visit_begins();
#endif
    stile.open[at.stage].wait(at.phase);
  }
  void leave() {
#if KITTENS_CHECKED
    runtime::visit_ends();
#endif
    stile.left[at.stage].arrive();
    at.advance();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens
