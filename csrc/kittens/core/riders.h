// What travels with a tile through a ring: a producer's `load` takes any number of riders. Each has an array of as many stages, whose element last()
// a consumer may read once it has waited for the tile. Included by the machines' pipelines.
#pragma once

namespace kittens {
inline namespace KITTENS_MACHINE {

// A struct that the producer makes.
template <class Note, int Stages> struct note_rider {
  Note (&notes)[Stages];
  const Note& note;

  KITTENS_INLINE note_rider(Note (&notes)[Stages], const Note& note) : notes(notes), note(note) {}
  KITTENS_INLINE int bytes() const { return 0; }
  KITTENS_INLINE void write(int stage) const { notes[stage] = note; }
  KITTENS_INLINE void copy_to(int, barrier&) const {}
};

// Neighbours in global memory, from a multiple of 16 bytes on.
template <class T, int N, int Stages> struct vector_rider {
  shared_vector<T, N> (&vectors)[Stages];
  const T* source;

  KITTENS_INLINE vector_rider(shared_vector<T, N> (&vectors)[Stages], const T* source) : vectors(vectors), source(source) {}
  KITTENS_INLINE int bytes() const { return shared_vector<T, N>::bytes; }
  KITTENS_INLINE void write(int) const {}
  KITTENS_INLINE void copy_to(int stage, barrier& full) const { copy(vectors[stage], source, full); }
};

// Another tile, or nothing.
template <class Tile, int Stages> struct tile_rider {
  Tile (&tiles)[Stages];
  const tile_map<Tile>& map;
  place where;
  bool travels;

  KITTENS_INLINE tile_rider(Tile (&tiles)[Stages], const tile_map<Tile>& map, place where, bool travels)
      : tiles(tiles), map(map), where(where), travels(travels) {}
  KITTENS_INLINE int bytes() const { return travels ? Tile::bytes : 0; }
  KITTENS_INLINE void write(int) const {}
  KITTENS_INLINE void copy_to(int stage, barrier& full) const {
    if (travels) copy(tiles[stage], map, where, full);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens
