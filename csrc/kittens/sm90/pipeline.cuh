// Rings of shared tiles between one producer thread and consumer warpgroups, and the mailbox that carries integers the same way.
#pragma once
#include <new>

#include "copies.cuh"
#include "../core/riders.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// ReadByWarps: warps read what is in a stage, or travels with it, by ordinary instructions, and each gives the stage back for itself. Otherwise
// products alone read it, which hold the four warps of a warpgroup together, so one thread gives it back for all.
template <int Stages, bool ReadByWarps = false> struct ring_flags {
  static constexpr int arrivals = ReadByWarps ? 4 : 1;  // of a warpgroup
  barrier full[Stages], empty[Stages];

  KITTENS_INLINE void init(int consumers) {
    for (int i = 0; i < Stages; i++) {
      full[i].init(1);
      empty[i].init(consumers * arrivals);
    }
  }
};

template <int Stages> struct ring_position {
  int stage = 0, phase;

  KITTENS_INLINE void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class Tile, int Stages, bool ReadByWarps> struct producer {
  static constexpr int stages = Stages;
  Tile (&tiles)[Stages];
  ring_flags<Stages, ReadByWarps>& flags;
  ring_position<Stages> at{0, 1};  // every stage is empty at the start: waiting for phase 1 returns at once

  KITTENS_INLINE producer(Tile (&t)[Stages], ring_flags<Stages, ReadByWarps>& f) : tiles(t), flags(f) {}

  // This ring is where `other` is, which moves together with it: of as many stages, or of two where this one has one. The two then take the
  // registers of one.
  template <class Other> KITTENS_INLINE void follow(const Other& other) {
    static_assert(Other::stages == Stages || (Stages == 1 && Other::stages == 2), "follow: the other ring has another number of stages");
    if constexpr (Other::stages == Stages)
      at = other.position();
    else
      at = {0, other.position().stage ^ 1};
  }
  KITTENS_INLINE ring_position<Stages> position() const { return at; }

  // Fills the next stage once it is empty; riders travel with the tile.
  template <class... Riders> KITTENS_INLINE void load(const tile_map<Tile>& map, place where, const Riders&... riders) {
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

  KITTENS_INLINE consumer(Tile (&t)[Stages], ring_flags<Stages, ReadByWarps>& f) : tiles(t), flags(f) {}

  template <class Other> KITTENS_INLINE void follow(const Other& other) {
    at = other.at;
    oldest = other.oldest;
  }

  KITTENS_INLINE Tile& wait() {
    flags.full[at.stage].wait(at.phase);
    Tile& tile = tiles[at.stage];
    at.advance();
    return tile;
  }
  KITTENS_INLINE Tile& current() const { return tiles[oldest]; }
  KITTENS_INLINE int last() const { return at.stage == 0 ? Stages - 1 : at.stage - 1; }
  KITTENS_INLINE void release() {
    if constexpr (ReadByWarps) {
      __syncwarp();
      if (thread::lane() == 0) flags.empty[oldest].arrive();
    } else {
      if (thread::in_warpgroup() == 0) flags.empty[oldest].arrive();
    }
    if (++oldest == Stages) oldest = 0;
  }
  // Passes over the next stage, with none held. All four warps have seen it full before it is given back: one that came later would find the
  // phase of the fill after, and wait for ever. (A product holds the warps together where a tile is read.)
  KITTENS_INLINE void skip() {
    wait();
    if constexpr (!ReadByWarps) sync_warpgroup();
    release();
  }
};

// Slots of shared memory that carry messages from one producer thread to every consumer warpgroup, in order.
template <class Message, int Slots = 2> struct mailbox {
  static_assert((Slots & (Slots - 1)) == 0, "mailbox: slots must be a power of two");
  Message slots[Slots];
  barrier full[Slots], empty[Slots];

  KITTENS_INLINE void init(int consumers, int threads = 0) {  // threads: single ones that receive, too
    for (int i = 0; i < Slots; i++) {
      full[i].init(1);
      empty[i].init(consumers * 128 + threads);
    }
  }
};

template <class Message, int Slots> struct sender {
  static constexpr int stages = Slots;
  mailbox<Message, Slots>& box;
  int sent = 0;  // one counter: a producer has few registers

  KITTENS_INLINE sender(mailbox<Message, Slots>& b) : box(b) {}
  KITTENS_INLINE ring_position<Slots> position() const {  // of the message sent last
    return {(sent - 1) & (Slots - 1), ((sent - 1) / Slots & 1) ^ 1};
  }
  KITTENS_INLINE const Message& send(const Message& message) { return make(message); }
  // Makes the message in its slot, where it is until consumers release it, and returns it there.
  template <class... Args> KITTENS_INLINE const Message& make(const Args&... args) {
    sent++;
    const ring_position<Slots> at = position();
    box.empty[at.stage].wait(at.phase);
    Message* slot = ::new (&box.slots[at.stage]) Message(args...);
    box.full[at.stage].arrive();
    return *slot;
  }
};

// The message stays in shared memory, where it takes no registers, until it is released. Two counters, no positions and phases beside them:
// at head_dim 256 one register more spills.
template <class Message, int Slots> struct receiver {
  mailbox<Message, Slots>& box;
  int received = 0, released = 0;

  KITTENS_INLINE receiver(mailbox<Message, Slots>& b) : box(b) {}
  KITTENS_INLINE const Message& wait() {
    const int slot = received & (Slots - 1);
    box.full[slot].wait(received / Slots & 1);
    received++;
    return box.slots[slot];
  }
  KITTENS_INLINE const Message& current() const { return box.slots[released & (Slots - 1)]; }
  KITTENS_INLINE void release() {
    box.empty[released & (Slots - 1)].arrive();
    released++;
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens
