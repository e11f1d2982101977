// Sums in global memory to which many CTAs add, in an order that the kernel chooses: for each place an integer in global memory counts the visits
// that have ended, and a CTA enters when all that go before it have left.
//
// No warpgroup polls memory, which costs a step as much as its products: one thread of the CTA waits there for turns, a visit ahead of the warpgroups,
// and another one passes them on, so that neither keeps the other.
#pragma once
#include "pipeline.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

// Two visits may be open at once: the next one's turn is waited for while the last one's additions drain.
struct turnstile {
  static constexpr int visits = 2;
  barrier open[visits], left[visits], free[visits];

  KITTENS_INLINE void init(int warpgroups) {
    for (int i = 0; i < visits; i++) {
      open[i].init(1);
      left[i].init(warpgroups * 4);
      free[i].init(1);
    }
  }
};

// One thread.
struct opener {
  turnstile& stile;
  ring_position<turnstile::visits> at{0, 1};  // both are free at the start: waiting for phase 1 returns at once

  KITTENS_INLINE opener(turnstile& s) : stile(s) {}
  // Lets the CTA's warpgroups in for the next visit once `turn` visits of the place have ended.
  KITTENS_INLINE void open(const int* ended, int turn) {
    stile.free[at.stage].wait(at.phase);
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(ended) : "memory");
    while (found != turn);
    stile.open[at.stage].arrive();
    at.advance();
  }
};

// Another thread.
struct closer {
  turnstile& stile;
  ring_position<turnstile::visits> at{0, 0};

  KITTENS_INLINE closer(turnstile& s) : stile(s) {}
  // The next visit of the place ends when all warpgroups have left. The fence is cumulative: it orders what this thread has seen others add, too.
  KITTENS_INLINE void close(int* ended) {
    stile.left[at.stage].wait(at.phase);
    stile.free[at.stage].arrive();
    asm volatile(
        "fence.acq_rel.gpu;\n"
        "red.relaxed.gpu.global.add.s32 [%0], 1;\n" ::"l"(ended)
        : "memory");
    at.advance();
  }
};

// Every warpgroup that adds.
struct visitor {
  turnstile& stile;
  int visits = 0;  // one counter: a step has few registers to spare

  KITTENS_INLINE visitor(turnstile& s) : stile(s) {}
  KITTENS_INLINE void enter() { stile.open[visits & 1].wait(visits >> 1 & 1); }
  // Each warp for itself, since additions are under way when it goes.
  KITTENS_INLINE void leave() {
    __syncwarp();
    if (thread::lane() == 0) stile.left[visits & 1].arrive();
    visits++;
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens
