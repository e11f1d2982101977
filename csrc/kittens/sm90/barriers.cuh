// mbarriers, named barriers, and the CTA's own identity.
#pragma once
#include "../core/execution.h"
#include "types.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

// An mbarrier. Its phase turns when `count` arrivals and all expected bytes are in; wait(p) returns once the phase of parity p is over.
struct barrier {
  uint64_t state;

  KITTENS_INLINE void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count) : "memory");
  }
  KITTENS_INLINE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  KITTENS_INLINE void expect(int bytes) {  // arrives, and adds the bytes that copies will deliver
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes) : "memory");
  }
  KITTENS_INLINE void wait(int phase) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@complete bra done;\n"
        "bra again;\n"
        "done:\n"
        "}\n" ::"r"(shared_address(&state)),
        "r"(phase)
        : "memory");
  }
};

// Barriers 0 to 3 belong to the machine: 0 to the CTA, 1 + w to warpgroup w of the consumers.
inline constexpr int first_free_barrier = 4;

// Whole warpgroups meet at a hardware barrier.
struct named_barrier {
  int id, warpgroups;

  KITTENS_INLINE void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(warpgroups * 128) : "memory"); }
  KITTENS_INLINE void arrive() const { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(warpgroups * 128) : "memory"); }
};

// The threads of one consumer warpgroup meet.
KITTENS_INLINE void sync_warpgroup() { named_barrier{thread::warpgroup(), 1}.sync(); }

struct cta {
  int warpgroup, index, count;

  // One thread of the warpgroup, another one, in a warp of its own, for each `which` below 4.
  KITTENS_INLINE bool elect(int which = 0) const { return thread::in_warpgroup() == which * 32; }
  KITTENS_INLINE void publish_barriers() const {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
  }
  // A kernel with `starts_early` begins while the launch before it ends. Behind this, all that launch has written is there.
  KITTENS_INLINE void await_earlier_launches() const { asm volatile("griddepcontrol.wait;" ::: "memory"); }
  template <int N> KITTENS_INLINE void give_registers() const {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "give_registers: a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
  }
  template <int N> KITTENS_INLINE void take_registers() const {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "take_registers: a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
  }
};

// One thread. The next tile number that no CTA has taken, beyond the first `count`, which CTAs take by their index.
KITTENS_INLINE int take_tile(tile_counter* counter, cta cta) { return cta.count + atomicAdd(&counter->next, 1); }
// One thread of each CTA, once it takes no more. The counter clears itself for the next launch, so that no launch needs a memset before it.
KITTENS_INLINE void retire(tile_counter* counter, cta cta) {
  __threadfence();
  if (atomicAdd(&counter->retired, 1) == cta.count - 1) {
    counter->next = 0;
    counter->retired = 0;
  }
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
