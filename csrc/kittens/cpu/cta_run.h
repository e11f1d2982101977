// One CTA of the cpu machine while it runs: its fibers and barriers. Internal to machine.cpp and checker.cpp.
//
// A fiber is a warpgroup, or, behind them, a thread of warpgroup 0 that the kernel runs beside its first one.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime.h"

namespace kittens::runtime {

class checker;
class launch_turns;

// What ends a CTA with an error text.
struct fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct deadlock : fault {
  using fault::fault;
};

// What a fiber waits for: nothing, an mbarrier's phase, a generation of a named barrier, or its turn at a place in
// global memory.
struct awaited {
  enum class what { nothing, phase, meeting, turn } what = what::nothing;
  const barrier_state* barrier = nullptr;
  int phase = 0;
  int id = 0;
  long generation = 0;  // of the meeting; checked, also of the phase
  const int* ended = nullptr;
  int turn = 0;
};

struct fiber {
  ucontext_t context;  // where it starts
  jmp_buf resume;      // where it goes on
  awaited waits_for;
  bool started = false, done = false;
};

struct meeting {  // a named barrier
  int expected = 0, arrived = 0;
  long generation = 0;
  int last_to_arrive = 0;
};

inline constexpr int named_barriers = 16;

struct cta_run {
  static thread_local cta_run* now;

  const kernel_entry& entry;
  const void* params;
  void* shared;
  int index, count;
  std::vector<fiber> fibers;
  meeting meetings[named_barriers];
  std::unique_ptr<checker> check;  // null in the fast flavour
  ucontext_t home;
  int current = 0;
  std::string error;
  launch_turns& turns;
  bool is_abandoned = false;  // the error is another CTA's

  cta_run(const kernel_entry&, const void* params, void* shared, int index, int count, uint32_t seed, launch_turns&);
  ~cta_run();

  void run();          // throws fault
  void wait(awaited);  // returns when what the current fiber waits for has happened
  bool is_ready(const fiber&) const;
  void meet(int id, int warpgroups, bool wait);
  std::string who(int fiber) const;
  [[noreturn]] void report_deadlock() const;

 private:
  static void prepare(fiber&, void* stack);
  void hand_over(int next);
  int next_ready() const;  // the next fiber that can run after the current one, or -1
  int choose();            // the fiber to run next, or -1: none ever can
  void body();
  static void start();
};

// The running fiber's faults; the text says which warpgroup it is.
[[noreturn]] void fail(const std::string& text);

}  // namespace kittens::runtime
