// The part of the cpu machine that needs no instruction set: fibers and their scheduler, barriers, memory, the launch
// of a grid.

// Fortified longjmp refuses to jump to another stack, which is what a fiber does.
#undef _FORTIFY_SOURCE
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "checker.h"
#include "cta_run.h"
#include "turns.h"

namespace kittens::runtime {
namespace {

constexpr int64_t page = 4096, stack_bytes = int64_t(4)
                                             << 20;  // address space; what a kernel does not touch takes no memory

// Memory of one thread that grows and is kept until the thread ends. A guard page below it turns an overflowing stack
// into a fault.
class arena {
 public:
  arena() = default;
  arena(const arena&) = delete;
  ~arena() { drop(); }

  void* get(int64_t bytes) {
    if (bytes > size_) {
      drop();
      const int64_t size = (bytes + page - 1) / page * page;
      void* memory =
          mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED)
        throw fault("out of memory: the cpu machine needs " + std::to_string(size) + " bytes for a CTA");
      mprotect(memory, page, PROT_NONE);
      memory_ = static_cast<char*>(memory);
      size_ = size;
    }
    return memory_ + page;
  }

 private:
  void drop() {
    if (memory_) munmap(memory_, size_ + page);
    memory_ = nullptr;
    size_ = 0;
  }

  char* memory_ = nullptr;
  int64_t size_ = 0;
};

struct thread_memory {
  arena shared, stacks[8], scratch[static_cast<int>(scratch_slot::count)];
};
thread_local thread_memory memory;

// A launch: the CTAs share it; the error of the lowest CTA is kept.
struct grid_run {
  const kernel_entry& entry;
  const void* params;
  int count;
  uint32_t seed;
  std::atomic<bool> failed{false};
  launch_turns turns;
  std::mutex mutex;
  std::string error;
  int64_t error_index = 0;

  grid_run(const kernel_entry& entry, const void* params, int count, uint32_t seed)
      : entry(entry), params(params), count(count), seed(seed) {}

  void run_cta(int64_t index) {
    if (failed) return;
    turns.cta_begins();
    bool right = false;
    try {
      void* shared = memory.shared.get(entry.shared_bytes);
      cta_run run(entry, params, shared, static_cast<int>(index), count, seed, turns);
      if (entry.enter) entry.enter();
      try {
        run.run();
      } catch (...) {
        if (entry.leave) entry.leave();
        throw;
      }
      if (entry.leave) entry.leave();
      right = true;
    } catch (const abandoned&) {
    } catch (const std::exception& e) {
      std::string text = e.what();
      if (entry.checked) text = "CTA " + std::to_string(index) + ", seed " + std::to_string(seed) + ": " + text;
      const std::lock_guard lock(mutex);
      if (error.empty() || index < error_index) {
        error = text;
        error_index = index;
      }
      failed = true;
    }
    turns.cta_ends(!right);
  }
};

}  // namespace

thread_local cta_run* cta_run::now = nullptr;

void fail(const std::string& text) { throw fault(text); }

cta_run::cta_run(const kernel_entry& entry, const void* params, void* shared, int index, int count, uint32_t seed,
                 launch_turns& turns)
    : entry(entry),
      params(params),
      shared(shared),
      index(index),
      count(count),
      fibers(entry.warpgroups + entry.elected - 1),
      turns(turns) {
  if (entry.checked) check = std::make_unique<checker>(*this, seed + 7919u * static_cast<uint32_t>(index));
  entry.construct(shared);
  for (size_t i = 0; i < fibers.size(); i++) prepare(fibers[i], memory.stacks[i].get(stack_bytes));
}

cta_run::~cta_run() { now = nullptr; }

void cta_run::prepare(fiber& f, void* stack) {
  if (getcontext(&f.context) != 0) throw fault("getcontext failed");
  f.context.uc_stack.ss_sp = stack;
  f.context.uc_stack.ss_size = stack_bytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, &cta_run::start, 0);
}

void cta_run::start() { now->body(); }

// The last thing a fiber does is hand the thread on, to another fiber or back to run().
void cta_run::body() {
  const int me = current, beside = me < entry.warpgroups ? 0 : me - entry.warpgroups + 1;
  try {
    if (check) wait({});  // the first fiber to start is not always warpgroup 0
    entry.body(params, shared, beside ? 0 : me, beside, index, count);
    if (check) check->fiber_ends();
  } catch (const abandoned& e) {
    error = e.what();
    is_abandoned = true;
  } catch (const deadlock& e) {
    error = e.what();
  } catch (const std::exception& e) {
    error = who(me) + ": " + e.what();
  }
  fibers[me].done = true;
  if (error.empty()) {
    try {
      const int next = choose();
      if (next >= 0) hand_over(next);
      for (const fiber& f : fibers)
        if (!f.done) report_deadlock();
    } catch (const abandoned& e) {
      error = e.what();
      is_abandoned = true;
    } catch (const std::exception& e) {
      error = e.what();
    }
  }
  setcontext(&home);
}

void cta_run::run() {
  now = this;
  current = 0;
  fibers[0].started = true;
  if (swapcontext(&home, &fibers[0].context) != 0) throw fault("swapcontext failed");
  if (error.empty() && check) {
    try {
      check->cta_ends();
    } catch (const std::exception& e) {
      error = e.what();
    }
  }
  now = nullptr;
  if (is_abandoned) throw abandoned(error);
  if (!error.empty()) throw fault(error);
}

std::string cta_run::who(int i) const {
  if (i < entry.warpgroups) return "warpgroup " + std::to_string(i);
  return "thread " + std::to_string(i - entry.warpgroups + 1) + " of warpgroup 0";
}

bool cta_run::is_ready(const fiber& f) const {
  if (f.done) return false;
  switch (f.waits_for.what) {
    case awaited::what::phase:
      return check ? check->is_over(*f.waits_for.barrier, f.waits_for.generation)
                   : f.waits_for.barrier->phase != f.waits_for.phase;
    case awaited::what::meeting:
      return meetings[f.waits_for.id].generation != f.waits_for.generation;
    case awaited::what::turn:
      return __atomic_load_n(f.waits_for.ended, __ATOMIC_ACQUIRE) >= f.waits_for.turn;
    default:
      return true;
  }
}

int cta_run::next_ready() const {
  const int n = static_cast<int>(fibers.size());
  for (int i = 1; i <= n; i++)
    if (is_ready(fibers[(current + i) % n])) return (current + i) % n;
  return -1;
}

int cta_run::choose() {
  const auto waits_for_others = [](const fiber& f) { return !f.done && f.waits_for.what == awaited::what::turn; };
  for (;;) {
    const long passed = turns.passed();
    const int next = check ? check->pick() : next_ready();
    if (next >= 0 || std::none_of(fibers.begin(), fibers.end(), waits_for_others)) return next;
    if (!turns.sleep(passed)) return -1;
  }
}

// A fiber starts through its context and is resumed by longjmp: swapcontext saves the signal mask, and those two system
// calls are 0.7 us, once the time of a row of keys. (QEMU's coroutines do the same.)
void cta_run::hand_over(int next) {
  if (next == current) return;
  fiber &from = fibers[current], &to = fibers[next];
  current = next;
  if (_setjmp(from.resume) != 0) return;
  if (to.started) _longjmp(to.resume, 1);
  to.started = true;
  setcontext(&to.context);
}

void cta_run::wait(awaited what) {
  fibers[current].waits_for = what;
  const int next = choose();
  if (next < 0) report_deadlock();
  hand_over(next);
  fibers[current].waits_for = {};
}

void cta_run::report_deadlock() const {
  std::string text = "deadlock: ", rule;
  for (size_t i = 0; i < fibers.size(); i++) {
    const awaited& w = fibers[i].waits_for;
    const std::string me = who(static_cast<int>(i));
    if (fibers[i].done) {
      text += me + " has ended; ";
    } else if (w.what == awaited::what::phase) {
      const barrier_state& b = *w.barrier;
      text += me + " waits for phase " + std::to_string(w.phase) + " of " + (check ? check->name(b) : "a barrier") +
              " (" + std::to_string(b.pending) + " of " + std::to_string(b.count) + " arrivals and " +
              std::to_string(b.bytes) + " bytes missing); ";
      if (check && rule.empty()) rule = check->why_stuck(b);
    } else if (w.what == awaited::what::meeting) {
      const meeting& m = meetings[w.id];
      text += me + " waits at named barrier " + std::to_string(w.id) + " (" + std::to_string(m.arrived) + " of " +
              std::to_string(m.expected) + " warpgroups are there); ";
    } else if (w.what == awaited::what::turn) {
      text += me + " waits for turn " + std::to_string(w.turn) + " of a place where " +
              std::to_string(__atomic_load_n(w.ended, __ATOMIC_ACQUIRE)) + " visits have ended; ";
    }
  }
  text.resize(text.size() - 2);
  throw deadlock(rule.empty() ? text : rule + "; " + text);
}

void cta_run::meet(int id, int warpgroups, bool wait_too) {
  meeting& m = meetings[id];
  // Checked, a barrier's number is the same at every call: whoever arrives first must not decide whether the kernel is
  // right.
  if ((m.arrived > 0 || (check && m.expected > 0)) && m.expected != warpgroups)
    fail("named barrier " + std::to_string(id) + ": inconsistent participants, warpgroup " + std::to_string(current) +
         " names " + std::to_string(warpgroups) + " warpgroups, warpgroup " + std::to_string(m.last_to_arrive) +
         " named " + std::to_string(m.expected));
  const long generation = m.generation;
  m.expected = warpgroups;
  m.last_to_arrive = current;
  if (check) check->meeting_arrived(id);
  if (++m.arrived == warpgroups) {
    m.arrived = 0;
    m.generation++;
    if (check) check->meeting_complete(id);
  }
  if (!wait_too) return;
  if (check || m.generation == generation) wait({awaited::what::meeting, nullptr, 0, id, generation});
  if (check) check->meeting_left(id);
}

namespace {

void turn_if_complete(barrier_state& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.count;
  b.phase ^= 1;
  if (cta_run::now->check) cta_run::now->check->phase_complete(b);
}

void arrive(barrier_state& b) {
  checker* check = cta_run::now->check.get();
  if (check) check->arriving(b);
  if (b.pending == 0)
    fail((check ? check->name(b) : std::string("a barrier")) + ": more arrivals than its count of " +
         std::to_string(b.count));
  b.pending--;
  turn_if_complete(b);
}

}  // namespace

void barrier_init(barrier_state& b, int count) {
  if (count < 1 || count > 255) fail("barrier.init(" + std::to_string(count) + "): the count must lie in 1..255");
  b = {0, static_cast<uint8_t>(count), static_cast<uint8_t>(count), 0, 0};
  if (cta_run::now->check) cta_run::now->check->barrier_created(b);
}

void barrier_arrive(barrier_state& b) { arrive(b); }

void barrier_expect(barrier_state& b, int bytes) {
  if (cta_run::now->check) cta_run::now->check->expecting(b, bytes);
  b.bytes += bytes;
  arrive(b);
}

void barrier_complete(barrier_state& b, int bytes) {
  b.bytes -= bytes;
  turn_if_complete(b);
}

void barrier_wait(barrier_state& b, int phase) {
  cta_run& run = *cta_run::now;
  const long generation = run.check ? run.check->wait_begins(b, phase) : 0;
  if (run.check || b.phase == phase) run.wait({awaited::what::phase, &b, phase, 0, generation});
  if (run.check) run.check->wait_ends(b);
}

void named_barrier_meet(int id, int warpgroups, bool wait) {
  cta_run& run = *cta_run::now;
  if (run.check) run.check->meeting_named(id, warpgroups);
  run.meet(id, warpgroups, wait);
}

void await_turn(const int* ended, int turn) {
  cta_run& run = *cta_run::now;
  if (run.check) run.check->touch_memory("opener::open");
  if (run.check || __atomic_load_n(ended, __ATOMIC_ACQUIRE) < turn)
    run.wait({awaited::what::turn, nullptr, 0, 0, 0, ended, turn});
  const int found = __atomic_load_n(ended, __ATOMIC_ACQUIRE);
  if (found != turn)
    fail("opener::open for turn " + std::to_string(turn) + " of a place where " + std::to_string(found) +
         " visits have ended: that turn is over");
  if (run.check) run.check->turn_came(ended, turn);
}

void pass_turn(int* ended) {
  cta_run& run = *cta_run::now;
  if (run.check) run.check->passing_turn(ended);
  run.turns.pass(ended);
}

void publish_barriers() {
  cta_run& run = *cta_run::now;
  if (run.check) run.check->publishing_barriers();
  run.meet(0, static_cast<int>(run.fibers.size()), true);
}

void* scratch(scratch_slot slot, int64_t bytes) { return memory.scratch[static_cast<int>(slot)].get(bytes); }

namespace {
std::atomic_flag sum_locks[64];
std::atomic_flag& sum_lock(const void* address) { return sum_locks[(reinterpret_cast<uintptr_t>(address) >> 8) % 64]; }
}  // namespace

void lock_sums(const void* address) {
  std::atomic_flag& lock = sum_lock(address);
  while (lock.test_and_set(std::memory_order_acquire)) lock.wait(true, std::memory_order_relaxed);
}
void unlock_sums(const void* address) {
  sum_lock(address).clear(std::memory_order_release);
  sum_lock(address).notify_one();
}

const char* launch(const kernel_entry& entry, const void* params, int grid, const execution& execution) {
  static thread_local std::string error;
  grid_run run(entry, params, grid, execution.seed);
  const auto body = [](void* context, int64_t index) { static_cast<grid_run*>(context)->run_cta(index); };
  if (execution.parallel_for) {
    execution.parallel_for(grid, body, &run);
  } else {
    for (int64_t i = 0; i < grid; i++) body(&run, i);
  }
  if (!run.failed) return nullptr;
  error = run.error;
  return error.c_str();
}

}  // namespace kittens::runtime
