// Turns that the CTAs of a launch wait for and pass on: who has nothing else to do sleeps, and when all do they wait
// for ever. Internal to machine.cpp.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "cta_run.h"

namespace kittens::runtime {

// Another CTA has failed: nobody will pass on what this one waits for.
struct abandoned : fault {
  using fault::fault;
};

class launch_turns {
 public:
  void cta_begins() {
    const std::lock_guard lock(mutex_);
    running_++;
  }
  void cta_ends(bool failed) {
    const std::lock_guard lock(mutex_);
    running_--;
    failed_ |= failed;
    look_for_deadlock();
    changed_.notify_all();
  }
  void pass(int* ended) {
    const std::lock_guard lock(mutex_);
    __atomic_fetch_add(ended, 1, __ATOMIC_RELEASE);
    passed_++;
    asleep_ = 0;
    changed_.notify_all();
  }
  // How many turns have been passed on so far.
  long passed() const { return passed_; }
  // Returns true once a turn has been passed on after the first `seen`, false if none ever will: every CTA that runs
  // sleeps, and in a right kernel one that has not begun has nobody wait for it.
  bool sleep(long seen) {
    std::unique_lock lock(mutex_);
    if (passed_ == seen) {
      asleep_++;
      look_for_deadlock();
      // Not wait(): its symbol is of g++ 12's libstdc++, and the library runs with that of g++ 11.
      while (!changed_.wait_for(lock, std::chrono::hours(1), [&] { return passed_ != seen || dead_ || failed_; })) {
      }
    }
    if (passed_ != seen) return true;
    if (!dead_) throw abandoned("another CTA has failed");
    return false;
  }

 private:
  void look_for_deadlock() {
    if (failed_ || asleep_ == 0 || asleep_ < running_) return;
    dead_ = true;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0, asleep_ = 0;
  std::atomic<long> passed_{0};
  bool dead_ = false, failed_ = false;
};

}  // namespace kittens::runtime
