// Rings of shared tiles between one producer and consumer warpgroups, and the mailbox that carries small structs the
// same way.
#pragma once
#include <new>

#include "memory.h"
#include "../core/riders.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// ReadByWarps: of use to the Hopper machine only.
template <int Stages, bool ReadByWarps = false> struct ring_flags {
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

template <class Tile, int Stages, bool ReadByWarps>
KITTENS_INLINE void name_ring([[maybe_unused]] Tile (&tiles)[Stages], [[maybe_unused]] ring_flags<Stages, ReadByWarps>& flags) {
#if KITTENS_CHECKED
  runtime::ring_named(tiles[0].id(), sizeof(Tile), Stages, &flags.full[0].state, &flags.empty[0].state);
#endif
}

template <class Tile, int Stages, bool ReadByWarps> struct producer {
  Tile (&tiles)[Stages];
  ring_flags<Stages, ReadByWarps>& flags;
  ring_position<Stages> at{0, 1};  // every stage is empty at the start: waiting for phase 1 returns at once

  producer(Tile (&t)[Stages], ring_flags<Stages, ReadByWarps>& f) : tiles(t), flags(f) { name_ring(t, f); }

  // This ring is where `other` is, which moves together with it: of as many stages, or of two where this one has one.
  // Of use to the Hopper compiler only.
  template <class Other> void follow(const Other&) {}

  // Fills the next stage once it is empty; riders travel with the tile.
  template <class... Riders> void load(const tile_map<Tile>& map, place where, const Riders&... riders) {
    flags.empty[at.stage].wait(at.phase);
    (riders.write(at.stage), ...);
    flags.full[at.stage].expect((Tile::bytes + ... + riders.bytes()));
    copy(tiles[at.stage], map, where, flags.full[at.stage]);
    (riders.copy_to(at.stage, flags.full[at.stage]), ...);
    at.advance();
  }
};

template <class Tile, int Stages, bool ReadByWarps> struct consumer {
  Tile (&tiles)[Stages];
  ring_flags<Stages, ReadByWarps>& flags;
  ring_position<Stages> at{0, 0};
  int oldest = 0;
#if KITTENS_CHECKED
  int held = 0;  // waited for and not released
#endif

  consumer(Tile (&t)[Stages], ring_flags<Stages, ReadByWarps>& f) : tiles(t), flags(f) { name_ring(t, f); }

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

// Slots of shared memory that carry messages from one producer to every consumer warpgroup, in order.
template <class Message, int Slots = 2> struct mailbox {
  static_assert((Slots & (Slots - 1)) == 0, "mailbox: slots must be a power of two");
  Message slots[Slots];
  barrier full[Slots], empty[Slots];

  void init(int consumers, int threads = 0) {  // threads: single ones that receive, too
    for (int i = 0; i < Slots; i++) {
      full[i].init(1);
      empty[i].init(consumers + threads);
    }
#if KITTENS_CHECKED
    runtime::mailbox_named(this, &full[0].state, &empty[0].state, Slots);
#endif
  }
};

template <class Message, int Slots> struct sender {
  mailbox<Message, Slots>& box;
  ring_position<Slots> at{0, 1};

  sender(mailbox<Message, Slots>& b) : box(b) {}
  const Message& send(const Message& message) { return make(message); }
  // Makes the message in its slot, where it is until consumers release it, and returns it there.
  template <class... Args> const Message& make(const Args&... args) {
    box.empty[at.stage].wait(at.phase);
    Message* slot = ::new (&box.slots[at.stage]) Message(args...);
    box.full[at.stage].arrive();
    at.advance();
    return *slot;
  }
};

template <class Message, int Slots> struct receiver {
  mailbox<Message, Slots>& box;
  ring_position<Slots> at{0, 0};
  int oldest = 0;
#if KITTENS_CHECKED
  int held = 0;  // waited for and not released
#endif

  receiver(mailbox<Message, Slots>& b) : box(b) {}
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
    if (++oldest == Slots) oldest = 0;
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens
