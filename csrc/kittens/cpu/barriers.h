// mbarriers, named barriers, and the CTA's own identity.
#pragma once
#include "checks.h"
#include "elements.h"
#include "runtime.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// Its phase turns when `count` arrivals and all expected bytes are in; wait(p) returns once the phase of parity p is
// over. A warpgroup waits for the phases one after the other.
struct barrier {
  runtime::barrier_state state;

  void init(int count) { runtime::barrier_init(state, count); }
  void arrive() { runtime::barrier_arrive(state); }
  void expect(int bytes) {
    runtime::barrier_expect(state, bytes);
  }  // arrives, and adds the bytes that copies will deliver
  KITTENS_ALWAYS_INLINE void wait(int phase) {
    if (KITTENS_CHECKED || state.phase == phase) runtime::barrier_wait(state, phase);
  }
};

// Barriers 0 to 3 belong to the machine, as on the GPU.
inline constexpr int first_free_barrier = 4;

// Whole warpgroups meet.
struct named_barrier {
  int id, warpgroups;

  void sync() const { runtime::named_barrier_meet(id, warpgroups, true); }
  void arrive() const { runtime::named_barrier_meet(id, warpgroups, false); }
};

struct cta {
  int warpgroup, index, count;
  int thread = 0;

  // A warpgroup is one thread, but for the threads of warpgroup 0 that a kernel's `elected` counts.
  bool elect(int which = 0) const { return thread == which; }
  void publish_barriers() const { runtime::publish_barriers(); }
  // A launch begins here when the one before it has ended; checked, a kernel that promises `starts_early` must call it.
  void await_earlier_launches() const {
#if KITTENS_CHECKED
    runtime::await_earlier_launches();
#endif
  }
  template <int N> void give_registers() const {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "give_registers: a multiple of 8 from 24 to 256");
  }
  template <int N> void take_registers() const {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "take_registers: a multiple of 8 from 24 to 256");
  }
};

// The next tile number that no CTA has taken, beyond the first `count`, which CTAs take by their index.
KITTENS_INLINE int take_tile(tile_counter* counter, cta cta) {
#if KITTENS_CHECKED
  runtime::touch_memory("take_tile");
#endif
  return cta.count + __atomic_fetch_add(&counter->next, 1, __ATOMIC_RELAXED);
}
// By each CTA, once it takes no more: the last one clears the counter for the next launch.
KITTENS_INLINE void retire(tile_counter* counter, cta cta) {
  if (__atomic_fetch_add(&counter->retired, 1, __ATOMIC_ACQ_REL) != cta.count - 1) return;
  __atomic_store_n(&counter->next, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&counter->retired, 0, __ATOMIC_RELAXED);
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
