// What checker.cpp gives to the checked flavour: asynchronous work that completes late and in a seeded order, and the
// rules of the vocabulary.
//
// Who may see what is decided by vector clocks, not by the order in which things happened to run: a fiber knows an
// event if a chain of arrivals and waits leads from the event to the fiber. A tile may be read by those who know that
// it is full, and overwritten by those who know that its readers are done. So a missing wait is found with every seed,
// also where the copy happened to be early.
#pragma once
#include "../core/shapes.h"
#include "runtime.h"

namespace kittens::runtime {

// A shared tile as error texts name it. A vector has one row.
struct shared_id {
  const void* address;
  const char* element;
  int rows, columns;
};
struct region {
  int row, rows, column, columns;
};

// The state of one register tile.
struct register_state {
  const char* element;
  int columns;
  int warpgroup, number;    // the number-th of its warpgroup's register tiles, in the order of declaration
  int accumulates = 0;      // products in flight that sum into it
  int is_read = 0;          // products in flight whose left operand it is
  bool unfinished = false;  // summed into and waited for, and not yet named by mma_done
  int64_t begun = 0;  // the warpgroup's count of waits when mma_begin named it; 0: not named since its last other use
};

// Work to be done later. The function gets the payload.
struct task {
  void (*run)(const void* payload);
  alignas(8) unsigned char payload[112];
};

void require_multiple(const char* what, int value, int of);  // of an offset that the hardware counts in larger steps
void poison(void* memory, int64_t bytes);  // NaN in every element type

void register_created(register_state&, const char* element, int columns);
void register_destroyed(register_state&);
void register_used(register_state&, const char* operation);

struct shared_operand {
  shared_id tile;
  region part;
};
void product_begin(register_state&);
void product_issue(const task&, register_state& accumulator, register_state* left, const shared_operand* shared,
                   int shared_count);
void product_commit();
void product_wait(int groups);
void product_done(register_state&);

// A box that the H200 answers with an illegal instruction: a column that is not a multiple of 16 bytes; for a send also
// a box that begins before the tensor.
void check_place(const shared_id&, const place&, int element_bytes, bool is_send);
void copy_issue(const task&, const shared_id& to, int bytes, barrier_state& full);
void store_issue(const shared_id& to, const region& part);                 // before registers are stored
void read_shared(const shared_id&, const region&, const char* operation);  // by ordinary instructions
void await_earlier_launches();
void touch_memory(const char* operation);  // global memory, by an operation that no other check sees
void publish_stores();
void send_issue(const task&, const shared_id& from, const region& part);
void send_wait(bool complete);

void ring_named(const shared_id& first, int64_t tile_bytes, int stages, const barrier_state* full,
                const barrier_state* empty);
void mailbox_named(const void* mailbox, const barrier_state* full, const barrier_state* empty, int slots);
void message_released(const void* mailbox, bool waited_for);
void turnstile_named(const void* turnstile, const barrier_state* open, const barrier_state* left,
                     const barrier_state* free, int visits);
void visit_begins();
void visit_ends();
void add_to_sums();  // before tile_sums::add
void ring_released(const shared_id& tile, bool waited_for, bool skipped);

}  // namespace kittens::runtime
