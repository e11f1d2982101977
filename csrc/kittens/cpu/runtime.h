// What machine.cpp gives to every flavour of the cpu machine: fibers that are warpgroups, barriers, memory, and the
// launch of a grid.
//
// A CTA runs on one thread. Each of its warpgroups is a fiber that runs the kernel's function; a fiber that must wait
// hands the thread to one that need not. Nothing here depends on an instruction set, and nothing is inline: see
// KITTENS_ALWAYS_INLINE in elements.h.
#pragma once
#include <cstdint>

#include "../core/execution.h"

namespace kittens::runtime {

// As large as an mbarrier. `phase` is the parity of the phase that is not over yet.
struct barrier_state {
  int32_t bytes;  // expected and not yet delivered
  uint8_t count, pending, phase, unused;
};

void barrier_init(barrier_state&, int count);
void barrier_arrive(barrier_state&);
void barrier_expect(barrier_state&, int bytes);    // arrives
void barrier_complete(barrier_state&, int bytes);  // a copy has delivered
void barrier_wait(barrier_state&, int phase);

void named_barrier_meet(int id, int warpgroups, bool wait);
void publish_barriers();  // every warpgroup of the CTA meets

// Memory of this thread's CTA, one block for each slot. It is not preserved when the slot is asked for again.
enum class scratch_slot : int { left, right, count };
void* scratch(scratch_slot, int64_t bytes);

// Sums into global memory by many CTAs: one lock for each of a few groups of addresses.
void lock_sums(const void* address);
void unlock_sums(const void* address);

// Waits until `turn` visits of a place in global memory have ended; one more has.
void await_turn(const int* ended, int turn);
void pass_turn(int* ended);

struct kernel_entry {
  void (*body)(const void* params, void* shared, int warpgroup, int thread, int index, int count);
  void (*construct)(void* shared);
  void (*enter)();  // on the CTA's thread before and after it runs; may be null
  void (*leave)();
  int warpgroups;
  int elected;  // threads of warpgroup 0 that run at the same time
  int64_t shared_bytes;
  bool checked;
  bool starts_early;  // the kernel promises to touch global memory only behind await_earlier_launches
};

// Runs the grid; returns null or an error text that lives until this thread's next launch.
const char* launch(const kernel_entry&, const void* params, int grid, const execution&);

}  // namespace kittens::runtime
