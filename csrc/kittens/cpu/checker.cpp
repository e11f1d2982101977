// The rules of the vocabulary: register tiles and products, shared tiles, copies and sends, scheduling. Barriers:
// checker_barriers.cpp.
#include "checker.h"

#include <algorithm>
#include <cstring>

namespace kittens::runtime {
namespace {

bool overlap(const region& a, const region& b) {
  return a.row < b.row + b.rows && b.row < a.row + a.rows && a.column < b.column + b.columns &&
         b.column < a.column + a.columns;
}

bool covers(const region& a, const region& b) {
  return a.row <= b.row && a.row + a.rows >= b.row + b.rows && a.column <= b.column &&
         a.column + a.columns >= b.column + b.columns;
}

std::string warpgroup(int i) { return "warpgroup " + std::to_string(i); }

region whole(const shared_id& t) { return {0, t.rows, 0, t.columns}; }

checker& active() { return *cta_run::now->check; }

}  // namespace

void vector_clock::raise(size_t i, long value) {
  if (i >= counts_.size()) counts_.resize(i + 1);
  counts_[i] = std::max(counts_[i], value);
}

void vector_clock::join(const vector_clock& other) {
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); i++) counts_[i] = std::max(counts_[i], other.counts_[i]);
}

checker::checker(cta_run& run, uint32_t seed)
    : run_(run), random_(seed), next_clock_index_(run.fibers.size()), fibers_(run.fibers.size()) {
  // Late, mixed and early completion find different faults.
  constexpr int eagerness[] = {5, 50, 95};
  eagerness_ = eagerness[random_() % 3];
  for (size_t i = 0; i < fibers_.size(); i++) fibers_[i].clock.raise(i, 1);
  poison(run.shared, run.entry.shared_bytes);
}

checker::fiber_record& checker::me() {
  fiber_record& f = fibers_[run_.current];
  if (!f.late_fault.empty()) {
    const std::string text = f.late_fault;
    f.late_fault.clear();
    fail(text);
  }
  return f;
}

long checker::tick() { return fibers_[run_.current].clock[run_.current]; }

void checker::release_to(vector_clock& clock) {
  clock.join(fibers_[run_.current].clock);
  fibers_[run_.current].clock.raise(run_.current, tick() + 1);
}

// Names in error texts.

std::string checker::offset(const void* p) const {
  const auto at = static_cast<const char*>(p) - static_cast<const char*>(run_.shared);
  return at >= 0 && at < run_.entry.shared_bytes ? " at shared+" + std::to_string(at) : " outside the shared struct";
}

std::string checker::name(const shared_id& t) const {
  const std::string shape =
      t.rows == 1 ? std::to_string(t.columns) : std::to_string(t.rows) + ", " + std::to_string(t.columns);
  std::string text = (t.rows == 1 ? "shared_vector<" : "shared_tile<") + std::string(t.element) + ", " + shape + ">" +
                     offset(t.address);
  for (const ring_record& r : rings_) {
    const auto at = static_cast<const char*>(t.address) - static_cast<const char*>(r.first.address);
    if (at >= 0 && at < r.tile_bytes * r.stages && at % r.tile_bytes == 0)
      return text + " (ring stage " + std::to_string(at / r.tile_bytes) + ")";
  }
  return text;
}

std::string checker::name(const register_state& t) const {
  return "register_tile<" + std::string(t.element) + ", " + std::to_string(t.columns) + "> (number " +
         std::to_string(t.number) + " of warpgroup " + std::to_string(t.warpgroup) + ")";
}

// Scheduling.

int checker::pick() {
  for (;;) {
    std::vector<int> ready;
    for (size_t i = 0; i < run_.fibers.size(); i++)
      if (run_.is_ready(run_.fibers[i])) ready.push_back(static_cast<int>(i));
    std::vector<copy_record*> copies;
    for (copy_record& c : copies_)
      if (!c.complete) copies.push_back(&c);
    std::vector<product_group*> products;  // a warpgroup's products complete in order
    std::vector<send_record*> sends;
    for (fiber_record& f : fibers_) {
      const auto group =
          std::find_if(f.groups.begin(), f.groups.end(), [](const product_group& g) { return !g.executed; });
      if (group != f.groups.end()) products.push_back(&*group);
      for (send_record& s : f.sends)
        if (!s.executed) sends.push_back(&s);
    }
    const size_t events = copies.size() + products.size() + sends.size();
    if (ready.empty() && events == 0) return -1;
    if (events == 0 || (!ready.empty() && static_cast<int>(random_() % 100) >= eagerness_))
      return ready[random_() % ready.size()];
    size_t which = random_() % events;
    if (which < copies.size()) {
      complete(*copies[which]);
      continue;
    }
    which -= copies.size();
    if (which < products.size())
      execute(*products[which]);
    else
      execute(*sends[which - products.size()]);
  }
}

void checker::execute(product_group& group) {
  if (group.executed) return;
  for (const product& p : group.products) p.work.run(p.work.payload);
  group.executed = true;
}

void checker::execute(send_record& send) {
  if (!send.executed) send.work.run(send.work.payload);
  send.executed = true;
}

void checker::complete(copy_record& copy) {
  copy.work.run(copy.work.payload);
  copy.complete = true;
  barrier_complete(*copy.full, copy.bytes);
}

void checker::fiber_ends() {
  const fiber_record& f = me();
  if (!f.open.products.empty())
    fail("the kernel ends with a product on " + name(*f.open.products[0].accumulator) +
         " that mma_commit has not closed");
  if (!f.groups.empty()) fail("the kernel ends with a group of products in flight (mma_wait<0> is missing)");
  if (!f.sends.empty())
    fail("the kernel ends with the send from " + f.sends[0].name + " in flight (store_wait_all is missing)");
  if (f.visits) fail("the kernel ends inside " + turnstile_ + " (leave is missing)");
}

// Register tiles and products.

void checker::created(register_state& t, const char* element, int columns) {
  t.element = element;
  t.columns = columns;
  t.warpgroup = run_.current;
  t.number = ++fibers_[run_.current].registers;
}

void checker::destroyed(const register_state& t) {
  fiber_record& f = fibers_[t.warpgroup];
  f.registers--;
  if (t.accumulates + t.is_read == 0) return;
  if (f.late_fault.empty())
    f.late_fault =
        name(t) + " goes out of scope, or the kernel ends, while a product on it is in flight (mma_wait is missing)";
  f.groups.clear();  // they would write to memory that is gone
  f.open.products.clear();
}

const char* checker::what_is_missing(const register_state& t) const {
  for (const product& p : fibers_[run_.current].open.products)
    if (p.accumulator == &t || p.left == &t) return "its group is still open: mma_commit, then mma_wait come first";
  return "mma_wait comes first";
}

void checker::used(register_state& t, const char* operation) {
  me();
  if (t.accumulates + t.is_read > 0)
    fail(std::string(operation) + " uses " + name(t) + " while a product on it is in flight (" + what_is_missing(t) +
         ")");
  if (t.unfinished)
    fail(std::string(operation) + " uses " + name(t) +
         ", whose product has been waited for, before mma_done has named it");
  t.begun = 0;
}

void checker::begin(register_state& t) { t.begun = me().waits; }

void checker::issue(const task& work, register_state& accumulator, register_state* left, const shared_operand* shared,
                    int shared_count) {
  fiber_record& f = me();
  for (register_state* t : {&accumulator, left})
    if (t && t->begun != f.waits)
      fail("product on " + name(*t) + ", which mma_begin has not named since its last other use or the last mma_wait");
  if (accumulator.is_read > 0) fail("product into " + name(accumulator) + " while another product reads it");
  if (left && left->accumulates > 0)
    fail("product reads " + name(*left) + " while another product sums into it (mma_wait comes first)");
  if (left && left->unfinished) fail("product reads " + name(*left) + " before mma_done has named it");
  product p{work, &accumulator, left, {}};
  for (int i = 0; i < shared_count; i++) {
    check_readable(shared[i].tile, shared[i].part, "product", true);
    p.reads.emplace_back(shared[i].tile.address, add_reader(shared[i].tile, shared[i].part, true, false));
  }
  accumulator.accumulates++;
  if (left) left->is_read++;
  f.open.products.push_back(p);
}

void checker::commit() {
  fiber_record& f = me();
  f.groups.push_back(std::move(f.open));
  f.open = {};
}

void checker::wait_products(int groups) {
  me();
  run_.wait({});
  fiber_record& f = me();
  while (static_cast<int>(f.groups.size()) > groups) {
    execute(f.groups.front());
    for (const product& p : f.groups.front().products) {
      p.accumulator->accumulates--;
      p.accumulator->unfinished = true;
      if (p.left) p.left->is_read--;
      for (const auto& [tile, serial] : p.reads) end_reader(tile, serial);
    }
    f.groups.pop_front();
  }
  f.waits++;
}

void checker::done(register_state& t) {
  me();
  if (t.accumulates > 0)
    fail("mma_done names " + name(t) + " while a product on it is in flight (" + what_is_missing(t) + ")");
  t.unfinished = false;
  t.begun = 0;
}

// Shared tiles.

checker::tile_record& checker::record(const shared_id& t) {
  tile_record& r = tiles_[t.address];
  if (r.rows.empty()) {
    r.id = t;
    r.rows.resize(t.rows);
    r.released.resize(fibers_.size());
    r.seen.resize(fibers_.size());
  }
  return r;
}

void checker::check_readable(const shared_id& t, const region& part, const char* operation, bool asynchronous) {
  const vector_clock& clock = me().clock;
  tile_record& tile = record(t);
  tile.seen[run_.current] = true;
  if (part.row < 0 || part.column < 0 || part.row + part.rows > t.rows || part.column + part.columns > t.columns)
    fail(std::string(operation) + " reads rows " + std::to_string(part.row) + ".." +
         std::to_string(part.row + part.rows) + ", columns " + std::to_string(part.column) + ".." +
         std::to_string(part.column + part.columns) + " of " + name(t) + ", which has no such part");
  const std::string what = std::string(operation) + " reads ";
  if (tile.released[run_.current]) fail(what + name(t) + ", which this warpgroup has released");
  for (int r = part.row; r < part.row + part.rows; r++) {
    const writer& w = tile.rows[r];
    if (w.kind == writer::kind::nobody)
      fail(what + name(t) + ", which has never been filled (row " + std::to_string(r) + ")");
    if (w.kind == writer::kind::copy) {
      const barrier_record& b = barriers_.at(w.barrier);
      if (clock[b.clock_index] <= w.generation)
        fail(what + name(t) + " before its copy has completed: this warpgroup has not waited for " + b.name);
    } else {
      if (clock[w.warpgroup] < w.tick)
        fail(what + name(t) + ", which " + warpgroup(w.warpgroup) + " stores, without having met it since");
      if (asynchronous && !w.published)
        fail(what + name(t) + ", which " + warpgroup(w.warpgroup) + " has stored and not published");
    }
  }
}

void checker::check_writable(const shared_id& t, const region& part, const char* operation) {
  const vector_clock& clock = me().clock;
  tile_record& tile = record(t);
  for (const reader& r : tile.readers) {
    if (!overlap(r.part, part)) continue;
    const std::string who = (r.is_send ? "a send of " : "a product of ") + warpgroup(r.warpgroup);
    if (r.in_flight || clock[r.warpgroup] < r.tick)
      fail(std::string(operation) + " into " + name(t) + " while " + who + " may still read it");
  }
  for (int r = part.row; r < part.row + part.rows; r++) {
    const writer& w = tile.rows[r];
    if (w.kind == writer::kind::copy && clock[barriers_.at(w.barrier).clock_index] <= w.generation)
      fail(std::string(operation) + " into " + name(t) +
           " while an earlier copy may still fill it: nobody it has met has waited for " +
           barriers_.at(w.barrier).name);
    if (w.kind == writer::kind::store && clock[w.warpgroup] < w.tick)
      fail(std::string(operation) + " into " + name(t) + " while " + warpgroup(w.warpgroup) + " may still store to it");
  }
  std::erase_if(tile.readers, [&](const reader& r) { return covers(part, r.part); });
}

long checker::add_reader(const shared_id& t, const region& part, bool in_flight, bool is_send) {
  record(t).readers.push_back({run_.current, part, in_flight, is_send, tick(), next_serial_});
  return next_serial_++;
}

void checker::end_reader(const void* tile, long serial) {
  auto& readers = tiles_.at(tile).readers;
  const auto r = std::find_if(readers.begin(), readers.end(), [&](const reader& x) { return x.serial == serial; });
  r->in_flight = false;
  r->tick = tick();
  // A later read of the same part by the same warpgroup says all that an earlier one did.
  const reader last = *r;
  std::erase_if(readers, [&](const reader& x) {
    return x.serial != serial && !x.in_flight && x.warpgroup == last.warpgroup && covers(last.part, x.part);
  });
}

void checker::place(const shared_id& t, const kittens::place& where, int element_bytes, bool is_send) {
  const std::string operation = is_send ? "send from " : "copy into ";
  if (where.column * element_bytes % 16 != 0)
    fail(operation + name(t) + " at column " + std::to_string(where.column) + ", which is not a multiple of 16 bytes");
  if (is_send && (where.row < 0 || where.head < 0 || where.batch < 0 || where.column < 0))
    fail(operation + name(t) + " to a place before the tensor");
}

void checker::copy(const task& work, const shared_id& to, int bytes, barrier_state& full) {
  me();
  barrier_record& b = record(full, "copy");
  if (bytes > b.promised)
    fail("wrong transaction bytes: the copy of " + std::to_string(bytes) + " bytes into " + name(to) +
         " completes on " + b.name + ", which expects only " + std::to_string(b.promised) + " more");
  check_writable(to, whole(to), "copy");
  b.promised -= bytes;
  record(to).released.assign(fibers_.size(), false);
  record(to).seen.assign(fibers_.size(), false);
  for (writer& w : record(to).rows) w = {writer::kind::copy, &full, b.generation, 0, 0, false};
  poison(const_cast<void*>(to.address), bytes);
  copies_.push_back({work, &full, bytes, b.generation, name(to)});
}

void checker::store(const shared_id& to, const region& part) {
  check_writable(to, part, "store");
  for (int r = part.row; r < part.row + part.rows; r++)
    record(to).rows[r] = {writer::kind::store, nullptr, 0, run_.current, tick(), false};
}

void checker::read(const shared_id& t, const region& part, const char* operation) {
  check_readable(t, part, operation, false);
  end_reader(t.address, add_reader(t, part, false, false));
}

void checker::touch_memory(const char* operation) {
  if (run_.entry.starts_early && !me().awaited_launches)
    fail(std::string(operation) + " touches global memory before await_earlier_launches, and the kernel starts early");
}

void checker::publish() {
  me();
  for (auto& [address, tile] : tiles_)
    for (writer& w : tile.rows)
      if (w.kind == writer::kind::store && w.warpgroup == run_.current && !w.published) {
        w.published = true;
        w.tick = tick();
      }
}

void checker::send(const task& work, const shared_id& from, const region& part) {
  check_readable(from, part, "send", true);
  me().sends.push_back({work, from.address, add_reader(from, part, true, true), name(from)});
}

void checker::wait_sends(bool complete) {
  me();
  run_.wait({});
  fiber_record& f = me();
  for (send_record& s : f.sends) {
    execute(s);
    if (!s.read) end_reader(s.tile, s.serial);
    s.read = true;
  }
  if (complete) f.sends.clear();
}

void checker::name_ring(const shared_id& first, int64_t tile_bytes, int stages, const barrier_state* full,
                        const barrier_state* empty) {
  const bool known =
      std::any_of(rings_.begin(), rings_.end(), [&](const ring_record& r) { return r.first.address == first.address; });
  if (!known) rings_.push_back({first, tile_bytes, stages});
  const std::string ring = " of stage ", tiles = " of the ring of shared_tile<" + std::string(first.element) + ", " +
                                                 std::to_string(first.rows) + ", " + std::to_string(first.columns) +
                                                 ">" + offset(first.address);
  for (int i = 0; i < stages; i++) {
    const auto f = barriers_.find(&full[i]), e = barriers_.find(&empty[i]);
    if (f != barriers_.end()) f->second.name = "the full barrier" + ring + std::to_string(i) + tiles;
    if (e != barriers_.end()) e->second.name = "the empty barrier" + ring + std::to_string(i) + tiles;
  }
}

void checker::name_mailbox(const void* mailbox, const barrier_state* full, const barrier_state* empty, int slots) {
  for (int i = 0; i < slots; i++) {
    const std::string slot = " barrier of slot " + std::to_string(i) + " of the mailbox" + offset(mailbox);
    barriers_.at(&full[i]).name = "the full" + slot;
    barriers_.at(&empty[i]).name = "the empty" + slot;
  }
}

void checker::released(const shared_id& t, bool waited_for, bool skipped) {
  me();
  if (!waited_for) fail("release of " + name(t) + ", which this warpgroup has not waited for");
  for (const reader& r : record(t).readers)
    if (r.warpgroup == run_.current && r.in_flight)
      fail("release of " + name(t) + " while this warpgroup's own " + (r.is_send ? "send" : "product") +
           " may still read it");
  // On the GPU a warp that has not begun to wait would miss the phase.
  if (!skipped && !record(t).seen[run_.current])
    fail("release of " + name(t) + ", which this warpgroup has not read (skip() passes over a stage)");
  record(t).released[run_.current] = true;
}

void checker::message_released(const void* mailbox, bool waited_for) {
  me();
  if (!waited_for)
    fail("release of a message in the mailbox" + offset(mailbox) + ", which this warpgroup has not waited for");
}

// What the checked flavour calls.

void turnstile_named(const void* turnstile, const barrier_state* open, const barrier_state* left,
                     const barrier_state* free, int visits) {
  active().name_turnstile(turnstile, open, left, free, visits);
}
void visit_begins() { active().visiting(true); }
void visit_ends() { active().visiting(false); }
void add_to_sums() { active().adding(); }

void require_multiple(const char* what, int value, int of) {
  if (value % of != 0) fail(std::string(what) + " " + std::to_string(value) + " is not a multiple of " + std::to_string(of));
}
void poison(void* memory, int64_t bytes) { memset(memory, 0xff, bytes); }
void register_created(register_state& t, const char* element, int columns) { active().created(t, element, columns); }
void register_destroyed(register_state& t) { active().destroyed(t); }
void register_used(register_state& t, const char* operation) { active().used(t, operation); }
void product_begin(register_state& t) { active().begin(t); }
void product_issue(const task& work, register_state& accumulator, register_state* left, const shared_operand* shared,
                   int shared_count) {
  active().issue(work, accumulator, left, shared, shared_count);
}
void product_commit() { active().commit(); }
void product_wait(int groups) { active().wait_products(groups); }
void product_done(register_state& t) { active().done(t); }
void check_place(const shared_id& t, const place& where, int element_bytes, bool is_send) {
  active().place(t, where, element_bytes, is_send);
}
void copy_issue(const task& work, const shared_id& to, int bytes, barrier_state& full) {
  active().touch_memory("copy");
  active().copy(work, to, bytes, full);
}
void store_issue(const shared_id& to, const region& part) { active().store(to, part); }
void read_shared(const shared_id& t, const region& part, const char* operation) { active().read(t, part, operation); }
void await_earlier_launches() { active().await_earlier_launches(); }
void touch_memory(const char* operation) { active().touch_memory(operation); }
void publish_stores() { active().publish(); }
void send_issue(const task& work, const shared_id& from, const region& part) {
  active().touch_memory("send");
  active().send(work, from, part);
}
void send_wait(bool complete) { active().wait_sends(complete); }
void ring_named(const shared_id& first, int64_t tile_bytes, int stages, const barrier_state* full,
                const barrier_state* empty) {
  active().name_ring(first, tile_bytes, stages, full, empty);
}
void mailbox_named(const void* mailbox, const barrier_state* full, const barrier_state* empty, int slots) {
  active().name_mailbox(mailbox, full, empty, slots);
}
void message_released(const void* mailbox, bool waited_for) { active().message_released(mailbox, waited_for); }
void ring_released(const shared_id& tile, bool waited_for, bool skipped) {
  active().released(tile, waited_for, skipped);
}

}  // namespace kittens::runtime
