// The rules of the vocabulary, checked while one CTA runs. Internal to machine.cpp and checker.cpp.
#pragma once
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "checks.h"
#include "cta_run.h"

namespace kittens::runtime {

// What a fiber knows of the others: their count of releases up to which everything has happened for it. Behind the
// fibers, the barriers: how many of their phases are over, which is how a fiber knows that copies are complete.
class vector_clock {
 public:
  long operator[](size_t i) const { return i < counts_.size() ? counts_[i] : 0; }
  void raise(size_t i, long value);
  void join(const vector_clock&);

 private:
  std::vector<long> counts_;
};

class checker {
 public:
  checker(cta_run&, uint32_t seed);

  // Scheduling: completes outstanding work or picks a fiber that can run, in an order drawn from the seed; -1 when
  // there is neither.
  int pick();
  void fiber_ends();
  void cta_ends();

  // mbarriers
  std::string name(const barrier_state&) const;
  std::string why_stuck(const barrier_state&) const;
  void barrier_created(const barrier_state&);
  void arriving(const barrier_state&);
  void expecting(const barrier_state&, int bytes);
  void phase_complete(const barrier_state&);
  long wait_begins(const barrier_state&, int phase);  // returns how many phases were over before the one waited for
  bool is_over(const barrier_state&, long generation) const;
  void wait_ends(const barrier_state&);

  // named barriers
  void publishing_barriers();
  void meeting_named(int id, int warpgroups) const;
  void meeting_arrived(int id);
  void meeting_complete(int id);
  void meeting_left(int id);

  // register tiles and products
  void created(register_state&, const char* element, int columns);
  void destroyed(const register_state&);
  void used(register_state&, const char* operation);
  void begin(register_state&);
  void issue(const task&, register_state& accumulator, register_state* left, const shared_operand* shared,
             int shared_count);
  void commit();
  void wait_products(int groups);
  void done(register_state&);

  // shared tiles
  void place(const shared_id& t, const kittens::place& where, int element_bytes, bool is_send);
  void copy(const task&, const shared_id& to, int bytes, barrier_state& full);
  void store(const shared_id& to, const region& part);
  void read(const shared_id&, const region&, const char* operation);
  void await_earlier_launches() { me().awaited_launches = true; }
  void touch_memory(const char* operation);
  void publish();
  void send(const task&, const shared_id& from, const region& part);
  void wait_sends(bool complete);
  void name_ring(const shared_id& first, int64_t tile_bytes, int stages, const barrier_state* full,
                 const barrier_state* empty);
  void name_mailbox(const void* mailbox, const barrier_state* full, const barrier_state* empty, int slots);
  void message_released(const void* mailbox, bool waited_for);
  void released(const shared_id& tile, bool waited_for, bool skipped);

  // turnstiles
  void name_turnstile(const void* turnstile, const barrier_state* open, const barrier_state* left,
                      const barrier_state* free, int visits);
  void turn_came(const int* ended, int turn);
  void passing_turn(const int* ended);
  void visiting(bool begins);
  void adding();

 private:
  struct barrier_record {
    std::string name;
    size_t clock_index;
    int owner;            // the warpgroup that initialised it
    bool fenced = false;  // the owner has passed publish_barriers
    long owner_tick;
    long generation = 0;  // phases that are over
    long promised = 0;    // bytes expected and not yet given to a copy
    vector_clock arrived, released;
    std::map<int, long> last_waited;  // by warpgroup: the generation it waited for last
  };
  struct writer {  // of one row of a shared tile
    enum class kind { nobody, copy, store } kind = kind::nobody;
    const barrier_state* barrier = nullptr;  // copy: completes with this generation of it
    long generation = 0;
    int warpgroup = 0;  // store
    long tick = 0;
    bool published = false;
  };
  struct reader {
    int warpgroup;
    region part;
    bool in_flight;  // a product or send that has not been waited for
    bool is_send;
    long tick = 0;  // when it was over
    long serial;
  };
  struct tile_record {
    shared_id id;
    std::vector<writer> rows;
    std::vector<reader> readers;
    std::vector<bool> released;  // by warpgroup: it has released what the last copy brought
    std::vector<bool> seen;      // by warpgroup: it has read what the last copy brought
  };
  struct product {
    task work;
    register_state *accumulator, *left;
    std::vector<std::pair<const void*, long>> reads;  // tile, reader's serial
  };
  struct product_group {
    std::vector<product> products;
    bool executed = false;
  };
  struct copy_record {
    task work;
    barrier_state* full;
    int bytes;
    long generation;
    std::string tile;
    bool complete = false;
  };
  struct send_record {
    task work;
    const void* tile;
    long serial;
    std::string name;
    bool executed = false, read = false;
  };
  struct fiber_record {
    vector_clock clock;
    bool awaited_launches = false;     // global memory may be touched
    bool visits = false;               // inside the turnstile
    int registers = 0;                 // register tiles created
    long waits = 1;                    // mma_waits so far
    std::deque<product_group> groups;  // committed and in flight
    product_group open;
    std::deque<send_record> sends;
    std::string late_fault;  // found where nothing may be thrown
  };
  struct ring_record {
    shared_id first;
    int64_t tile_bytes;
    int stages;
  };

  fiber_record& me();
  long tick();  // the current fiber's count of releases
  void release_to(vector_clock&);
  barrier_record& record(const barrier_state&, const char* operation);
  tile_record& record(const shared_id&);
  std::string name(const shared_id&) const;
  std::string name(const register_state&) const;
  std::string offset(const void*) const;
  void check_readable(const shared_id&, const region&, const char* operation, bool asynchronous);
  void check_writable(const shared_id&, const region&, const char* operation);
  long add_reader(const shared_id&, const region&, bool in_flight, bool is_send);
  void end_reader(const void* tile, long serial);
  const char* what_is_missing(const register_state&) const;  // between a product and a use of its tile
  void execute(product_group&);
  void execute(send_record&);
  void complete(copy_record&);

  cta_run& run_;
  std::mt19937 random_;
  int eagerness_;  // percent of the picks that complete outstanding work while a fiber could run
  size_t next_clock_index_;
  long next_serial_ = 1;
  std::vector<fiber_record> fibers_;
  std::map<const barrier_state*, barrier_record> barriers_;
  std::map<const void*, tile_record> tiles_;
  std::vector<ring_record> rings_;
  std::string turnstile_;                         // empty: the kernel has none
  std::deque<std::pair<const int*, int>> turns_;  // place, turn: what has come and is not passed on
  std::deque<copy_record> copies_;
  struct {
    vector_clock arrived, released;
  } meetings_[named_barriers];
};

}  // namespace kittens::runtime
