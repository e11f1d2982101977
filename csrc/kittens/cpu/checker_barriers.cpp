// The rules of the vocabulary: mbarriers and named barriers, turnstiles, and what a kernel may leave behind.
#include <algorithm>

#include "checker.h"

namespace kittens::runtime {
namespace {

constexpr int first_free_barrier = 4;

std::string phases(long n) { return std::to_string(n) + (n == 1 ? " phase" : " phases"); }

}  // namespace

std::string checker::name(const barrier_state& b) const {
  const auto found = barriers_.find(&b);
  return found == barriers_.end() ? "the barrier" + offset(&b) : found->second.name;
}

checker::barrier_record& checker::record(const barrier_state& b, const char* operation) {
  const auto found = barriers_.find(&b);
  if (found == barriers_.end()) fail(std::string(operation) + " on " + name(b) + " before its init");
  barrier_record& r = found->second;
  if (!r.fenced || me().clock[r.owner] < r.owner_tick)
    fail(std::string(operation) + " on " + r.name + " before publish_barriers");
  return r;
}

void checker::barrier_created(const barrier_state& b) {
  me();
  barrier_record r;
  r.name = "the barrier" + offset(&b);
  r.clock_index = next_clock_index_++;
  r.owner = run_.current;
  r.owner_tick = tick();
  barriers_[&b] = r;
}

void checker::publishing_barriers() {
  me();
  for (auto& [address, r] : barriers_)
    if (r.owner == run_.current) r.fenced = true;
}

void checker::arriving(const barrier_state& b) { release_to(record(b, "arrive").arrived); }

void checker::expecting(const barrier_state& b, int bytes) {
  barrier_record& r = record(b, "expect");
  if (bytes < 0) fail("wrong transaction bytes: expect(" + std::to_string(bytes) + ") on " + r.name);
  r.promised += bytes;
}

void checker::phase_complete(const barrier_state& b) {
  barrier_record& r = barriers_.at(&b);
  r.generation++;
  r.released.join(r.arrived);
  r.released.raise(r.clock_index, r.generation);
}

// A phase is known by its parity alone, so a warpgroup that does not wait for every phase in turn cannot tell which one
// it has waited for.
long checker::wait_begins(const barrier_state& b, int phase) {
  barrier_record& r = record(b, "wait");
  if (phase != 0 && phase != 1)
    fail("wrong phase: wait(" + std::to_string(phase) + ") on " + r.name + "; a phase is 0 or 1");
  const long target = (r.generation & 1) == phase ? r.generation : r.generation - 1;
  const auto last = r.last_waited.find(run_.current);
  const long expected = last != r.last_waited.end() ? last->second + 1 : phase == 1 ? -1 : 0;
  if (target < expected)
    fail("wrong phase: wait(" + std::to_string(phase) + ") on " + r.name +
         ", for the phase this warpgroup has waited for already; the next one is " + std::to_string(1 - phase));
  if (target > expected)
    fail("wrong phase: wait(" + std::to_string(phase) + ") on " + r.name + ", which has gone through " +
         phases(r.generation - std::max(expected, 0L)) + " that this warpgroup has not waited for");
  r.last_waited[run_.current] = target;
  return target;
}

bool checker::is_over(const barrier_state& b, long generation) const {
  return barriers_.at(&b).generation > generation;
}

void checker::wait_ends(const barrier_state& b) {
  const barrier_record& r = barriers_.at(&b);
  me().clock.join(r.released);
  std::erase_if(copies_,
                [&](const copy_record& c) { return c.full == &b && c.complete && c.generation < r.generation; });
}

std::string checker::why_stuck(const barrier_state& b) const {
  if (b.pending != 0 || b.bytes == 0) return "";
  return "wrong transaction bytes: " + name(b) + " expects " + std::to_string(b.bytes) +
         " bytes more than its copies deliver";
}

void checker::meeting_named(int id, int warpgroups) const {
  if (id < first_free_barrier || id >= named_barriers)
    fail("named barrier " + std::to_string(id) + " is reserved: a kernel's are " + std::to_string(first_free_barrier) +
         " to " + std::to_string(named_barriers - 1));
  if (run_.current >= run_.entry.warpgroups)
    fail("named barrier " + std::to_string(id) + " is for whole warpgroups");
  if (warpgroups < 1 || warpgroups > run_.entry.warpgroups)
    fail("named barrier " + std::to_string(id) + ": " + std::to_string(warpgroups) + " participants in a CTA of " +
         std::to_string(run_.entry.warpgroups) + " warpgroups");
}

void checker::meeting_arrived(int id) { release_to(meetings_[id].arrived); }

void checker::meeting_complete(int id) { meetings_[id].released.join(meetings_[id].arrived); }

void checker::meeting_left(int id) { me().clock.join(meetings_[id].released); }

// The barriers see to it that a visit is opened, entered, left and closed in this order.

void checker::name_turnstile(const void* turnstile, const barrier_state* open, const barrier_state* left,
                             const barrier_state* free, int visits) {
  turnstile_ = "the turnstile" + offset(turnstile);
  for (int i = 0; i < visits; i++) {
    barriers_.at(&open[i]).name = "the open barrier " + std::to_string(i) + " of " + turnstile_;
    barriers_.at(&left[i]).name = "the left barrier " + std::to_string(i) + " of " + turnstile_;
    barriers_.at(&free[i]).name = "the free barrier " + std::to_string(i) + " of " + turnstile_;
  }
}

void checker::turn_came(const int* ended, int turn) {
  me();
  turns_.emplace_back(ended, turn);
}

void checker::passing_turn(const int* ended) {
  me();
  if (turns_.empty() || turns_.front().first != ended)
    fail("closer::close of a place whose turn is not the one opened first");
  const int turn = turns_.front().second, found = __atomic_load_n(ended, __ATOMIC_ACQUIRE);
  if (found != turn)
    fail("closer::close in turn " + std::to_string(turn) + " of a place where " + std::to_string(found) +
         " visits have ended: it was passed on by others");
  turns_.pop_front();
}

void checker::visiting(bool begins) {
  fiber_record& f = me();
  if (f.visits == begins)
    fail(begins ? "enter of " + turnstile_ + ", which this warpgroup has not left"
                : "leave of " + turnstile_ + ", which this warpgroup has not entered");
  f.visits = begins;
}

void checker::adding() {
  touch_memory("tile_sums::add");
  if (!turnstile_.empty() && !me().visits)
    fail("tile_sums::add by a warpgroup that has not entered " + turnstile_);
}

void checker::cta_ends() {
  if (!turns_.empty())
    fail("the kernel ends with turn " + std::to_string(turns_.front().second) + " of a place opened and not closed");
  for (const copy_record& c : copies_)
    fail("the kernel ends while the copy into " + c.tile + " may be in flight: nobody has waited for " + name(*c.full));
  for (const auto& [address, r] : barriers_)
    if (r.promised > 0)
      fail("wrong transaction bytes: the kernel ends while " + r.name + " expects " + std::to_string(r.promised) +
           " bytes that no copy delivers");
  for (int id = 0; id < named_barriers; id++)
    if (run_.meetings[id].arrived > 0)
      fail("the kernel ends with " + std::to_string(run_.meetings[id].arrived) + " of " +
           std::to_string(run_.meetings[id].expected) + " warpgroups at named barrier " + std::to_string(id));
}

}  // namespace kittens::runtime
