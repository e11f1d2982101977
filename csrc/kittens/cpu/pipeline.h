// Rings of shared tiles between one producer and consumer warpgroups, and the mailbox that carries small structs the
// same way.
#pragma once
#include "memory.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

template <int Stages> struct ring_flags {
  barrier full[Stages], empty[Stages];

  void init(int consumers) {
    for (int i = 0; i < Stages; i++) {
      full[i].init(1);
      empty[i].init(consumers);
    }
  }
};

template <int Stages> struct ring_position {
  int stage = 0, phase;

  void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class Tile, int Stages>
KITTENS_INLINE void name_ring([[maybe_unused]] Tile (&tiles)[Stages], [[maybe_unused]] ring_flags<Stages>& flags) {
#if KITTENS_CHECKED
  runtime::ring_named(tiles[0].id(), sizeof(Tile), Stages, &flags.full[0].state, &flags.empty[0].state);
#endif
}

template <class Tile, int Stages> struct producer {
  Tile (&tiles)[Stages];
  ring_flags<Stages>& flags;
  ring_position<Stages> at{0, 1};  // every stage is empty at the start: waiting for phase 1 returns at once

  producer(Tile (&t)[Stages], ring_flags<Stages>& f) : tiles(t), flags(f) { name_ring(t, f); }

  // This ring is where `other` is: one of as many stages that moves together with it. Of use to the Hopper compiler
  // only.
  template <class Other> void follow(const Other&) {}

  void load(const tile_map<Tile>& map, place where) {
    flags.empty[at.stage].wait(at.phase);
    flags.full[at.stage].expect(Tile::bytes);
    copy(tiles[at.stage], map, where, flags.full[at.stage]);
    at.advance();
  }
  template <class T, int N>
  void load(const tile_map<Tile>& map, place where, shared_vector<T, N> (&vectors)[Stages], const T* source) {
    flags.empty[at.stage].wait(at.phase);
    flags.full[at.stage].expect(Tile::bytes + shared_vector<T, N>::bytes);
    copy(tiles[at.stage], map, where, flags.full[at.stage]);
    copy(vectors[at.stage], source, flags.full[at.stage]);
    at.advance();
  }
};

template <class Tile, int Stages> struct consumer {
  Tile (&tiles)[Stages];
  ring_flags<Stages>& flags;
  ring_position<Stages> at{0, 0};
  int oldest = 0;
#if KITTENS_CHECKED
  int held = 0;  // waited for and not released
#endif

  consumer(Tile (&t)[Stages], ring_flags<Stages>& f) : tiles(t), flags(f) { name_ring(t, f); }

  template <class Other> void follow(const Other&) {}

  Tile& wait() {
    flags.full[at.stage].wait(at.phase);
    Tile& tile = tiles[at.stage];
    at.advance();
#if KITTENS_CHECKED
    held++;
#endif
    return tile;
  }
  Tile& current() const { return tiles[oldest]; }
  int last() const { return at.stage == 0 ? Stages - 1 : at.stage - 1; }
  void release() { give_back(false); }
  // Passes over the next stage, with none held.
  void skip() {
    wait();
    give_back(true);
  }

 private:
  void give_back([[maybe_unused]] bool skipped) {
#if KITTENS_CHECKED
    runtime::ring_released(tiles[oldest].id(), held-- > 0, skipped);
#endif
    flags.empty[oldest].arrive();
    if (++oldest == Stages) oldest = 0;
  }
};

// Two slots of shared memory that carry messages from one producer to every consumer warpgroup, in order.
template <class Message> struct mailbox {
  Message slots[2];
  barrier full[2], empty[2];

  void init(int consumers) {
    for (int i = 0; i < 2; i++) {
      full[i].init(1);
      empty[i].init(consumers);
    }
#if KITTENS_CHECKED
    runtime::mailbox_named(this, &full[0].state, &empty[0].state, 2);
#endif
  }
};

template <class Message> struct sender {
  mailbox<Message>& box;
  ring_position<2> at{0, 1};

  sender(mailbox<Message>& b) : box(b) {}
  const Message& send(const Message& message) {  // returns the message in its slot, there until consumers release it
    box.empty[at.stage].wait(at.phase);
    Message& slot = box.slots[at.stage];
    slot = message;
    box.full[at.stage].arrive();
    at.advance();
    return slot;
  }
};

template <class Message> struct receiver {
  mailbox<Message>& box;
  ring_position<2> at{0, 0};
  int oldest = 0;
#if KITTENS_CHECKED
  int held = 0;  // waited for and not released
#endif

  receiver(mailbox<Message>& b) : box(b) {}
  const Message& wait() {
    box.full[at.stage].wait(at.phase);
    const Message& message = box.slots[at.stage];
    at.advance();
#if KITTENS_CHECKED
    held++;
#endif
    return message;
  }
  const Message& current() const { return box.slots[oldest]; }
  void release() {
#if KITTENS_CHECKED
    runtime::message_released(&box, held-- > 0);
#endif
    box.empty[oldest].arrive();
    oldest ^= 1;
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens
