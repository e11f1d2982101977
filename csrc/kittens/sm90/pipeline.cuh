// Rings of shared tiles between one producer thread and consumer warpgroups, and the mailbox that carries integers the same way.
#pragma once
#include "copies.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

template <int Stages> struct ring_flags {
  barrier full[Stages], empty[Stages];

  KITTENS_INLINE void init(int consumers) {
    for (int i = 0; i < Stages; i++) {
      full[i].init(1);
      empty[i].init(consumers);
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

template <class Tile, int Stages> struct producer {
  Tile (&tiles)[Stages];
  ring_flags<Stages>& flags;
  ring_position<Stages> at{0, 1};  // every stage is empty at the start: waiting for phase 1 returns at once

  KITTENS_INLINE producer(Tile (&t)[Stages], ring_flags<Stages>& f) : tiles(t), flags(f) {}

  // This ring is where `other` is: one of as many stages that moves together with it. The two then take the registers of one.
  template <class Other> KITTENS_INLINE void follow(const Other& other) { at = other.at; }

  KITTENS_INLINE void load(const tile_map<Tile>& map, place where) {
    flags.empty[at.stage].wait(at.phase);
    flags.full[at.stage].expect(Tile::bytes);
    copy(tiles[at.stage], map, where, flags.full[at.stage]);
    at.advance();
  }
  template <class T, int N> KITTENS_INLINE void load(const tile_map<Tile>& map, place where, shared_vector<T, N> (&vectors)[Stages], const T* source) {
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

  KITTENS_INLINE consumer(Tile (&t)[Stages], ring_flags<Stages>& f) : tiles(t), flags(f) {}

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
    if (thread::in_warpgroup() == 0) flags.empty[oldest].arrive();
    if (++oldest == Stages) oldest = 0;
  }
  // Passes over the next stage, with none held. All four warps have seen it full before it is given back: one that came later would find the
  // phase of the fill after, and wait for ever. (A product holds the warps together where a tile is read.)
  KITTENS_INLINE void skip() {
    wait();
    sync_warpgroup();
    release();
  }
};

// Two slots of shared memory that carry messages from one producer thread to every consumer warpgroup, in order.
template <class Message> struct mailbox {
  Message slots[2];
  barrier full[2], empty[2];

  KITTENS_INLINE void init(int consumers) {
    for (int i = 0; i < 2; i++) {
      full[i].init(1);
      empty[i].init(consumers * 128);
    }
  }
};

template <class Message> struct sender {
  mailbox<Message>& box;
  ring_position<2> at{0, 1};

  KITTENS_INLINE sender(mailbox<Message>& b) : box(b) {}
  KITTENS_INLINE const Message& send(const Message& message) {  // returns the message in its slot, there until consumers release it
    box.empty[at.stage].wait(at.phase);
    Message& slot = box.slots[at.stage];
    slot = message;
    box.full[at.stage].arrive();
    at.advance();
    return slot;
  }
};

// The message stays in shared memory, where it takes no registers, until it is released. Two counters, no positions and phases beside them:
// at head_dim 256 one register more spills.
template <class Message> struct receiver {
  mailbox<Message>& box;
  int received = 0, released = 0;

  KITTENS_INLINE receiver(mailbox<Message>& b) : box(b) {}
  KITTENS_INLINE const Message& wait() {
    const int slot = received & 1;
    box.full[slot].wait(received >> 1 & 1);
    received++;
    return box.slots[slot];
  }
  KITTENS_INLINE const Message& current() const { return box.slots[released & 1]; }
  KITTENS_INLINE void release() {
    box.empty[released & 1].arrive();
    released++;
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens
