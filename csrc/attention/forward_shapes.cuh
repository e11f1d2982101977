// What the forward kernel is made of: a configuration's shapes, the parameters, and which tile visits which blocks of keys.
#pragma once
#include <type_traits>

#include "../kittens/kittens.h"
#include "config.h"
#include "modifiers.cuh"
#include "params.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// Split: a tile is a range of its rows' keys, and forward_combine makes the output (forward_combine.cuh).
template <class T, const auto& Rows, int Row, mask_class Class, bool Split = false> struct forward_config {
  using element = T;
  using real = kittens::accumulator<T>;
  static constexpr forward_row row = Rows[Row];
  static constexpr int head_dim = row.head_dim, value_dim = row.value_dim, block_m = row.block_m, block_n = row.block_n;
  static constexpr int stages = row.stages, query_stages = row.query_stages, consumers = row.consumers();
  static constexpr bool output_in_query = row.output_parts == 0, take_turns = row.take_turns;
  static constexpr bool interval = Class != mask_class::full, modified = Class == mask_class::modified, split = Split;
  static constexpr int output_parts = output_in_query ? 1 : row.output_parts, output_columns = value_dim / output_parts;
  // A warpgroup skips the blocks behind its own rows. Not where the output leaves through the query's buffer, as on the cpu machine.
  static constexpr bool skips = Class == mask_class::interval && !output_in_query;
  static constexpr int producer_registers = consumers == 3 ? 32 : modified ? 40 : 24;
  static constexpr int consumer_registers = consumers == 3 ? 160 : modified ? 232 : 240;
  // Modified: a bias loads under the products that make the scores. With three consumers the registers do not hold it then.
  static constexpr bool bias_early = modified && consumers == 2;
  // Modified: a soft cap and the exponentials in one pass. With three consumers, or wider values, it spills.
  static constexpr bool one_pass = modified && row.takes_softcap && consumers == 2 && value_dim <= 128;
  static constexpr bool moves_registers = consumers > 1;  // a lone consumer has all that a thread may have from the launch on
  static_assert(producer_registers + consumers * consumer_registers <= kittens::registers_to_share(consumers + 1), "registers: a CTA has no more");
  static_assert(block_m % 64 == 0 && consumers >= 1 && consumers <= 3, "block_m: 64 query rows for each of 1 to 3 consumer warpgroups");
  static_assert(!skips || (block_m - 64 + block_n - 1) / block_n <= stages, "stages: a warpgroup may skip blocks whose values it has not released");
  static_assert(block_n % 16 == 0, "block_n: the second product takes keys 16 at a time");
  static_assert(!modified || block_n == class_tile || block_n == 2 * class_tile, "block_n: blocks of the modified class are one or two class tiles");
  static_assert(!split || (Class == mask_class::interval && consumers == 1 && !output_in_query), "split: 64 rows, and an interval covers all masks");
  static_assert(!output_in_query || value_dim == head_dim, "output_parts: an output that leaves through the query's buffer has its shape");
  static_assert((block_n + value_dim) / 2 + block_n / 4 + 24 <= consumer_registers, "scores, output and weights do not fit the registers");
};

template <class C> struct forward_tiles {
  using query = kittens::shared_tile<typename C::element, C::block_m, C::head_dim>;
  using key = kittens::shared_tile<typename C::element, C::block_n, C::head_dim>;
  using value = kittens::shared_tile<typename C::element, C::block_n, C::value_dim>;
  using output = kittens::shared_tile<typename C::element, C::block_m, C::output_columns>;
  using output_rows = kittens::shared_tile<typename C::element, 64, C::output_columns>;
};

template <class C> struct plain_forward_params {
  using real = typename C::real;
  kittens::tile_map<typename forward_tiles<C>::query> query;
  kittens::tile_map<typename forward_tiles<C>::key> key;
  kittens::tile_map<typename forward_tiles<C>::value> value;
  kittens::tile_map<typename forward_tiles<C>::output_rows> output;
  real* logsumexp;  // or null
  interval_mask mask;
  real scale_log2;  // log2(e) * scale: the softmax works in base 2
  int heads, group, length_q, row_tiles, tiles;
  int heads_in_l2;  // heads whose K and V stay in the second-level cache together
  kittens::tile_counter* counter;
  const real* sinks;  // over (head), or null: a score of every row that has no value
  int64_t sink_stride;
};
// A base and no empty member: nvcc lays out [[no_unique_address]] differently for the host and for the GPU.
template <class C> struct modified_forward_params : plain_forward_params<C> {
  score_rules<typename C::element> rules;
};
template <class C> struct split_forward_params : plain_forward_params<C> {
  int splits;                        // ranges of a tile's keys
  typename C::real* parts;           // of each range 64 x value_dim outputs, for take_from
  typename C::real* part_logsumexp;  // and 64 in base 2
};
template <class C>
using forward_params =
    std::conditional_t<C::modified, modified_forward_params<C>, std::conditional_t<C::split, split_forward_params<C>, plain_forward_params<C>>>;

// What the producer tells with a block of keys, in the modified class.
struct block_note {
  static constexpr unsigned holds_unseen = 8, is_first = 16, is_last = 32;
  int block;
  unsigned flags;  // bit w: the mask may hide keys from rows of consumer w

  // What is decided by it is decided by all threads alike; the compiler must know, or it keeps ring positions in vector registers.
  KITTENS_INLINE block_note uniform() const { return {kittens::uniform(block), static_cast<unsigned>(kittens::uniform(static_cast<int>(flags)))}; }
  KITTENS_INLINE bool hides(int consumer) const { return flags >> consumer & 1; }
  KITTENS_INLINE bool may_hold_unseen() const { return flags & holds_unseen; }  // keys that no row sees
  KITTENS_INLINE bool first() const { return flags & is_first; }                // of its tile
  KITTENS_INLINE bool last() const { return flags & is_last; }
};
template <class C> struct block_notes {
  block_note note[C::stages];
};

struct key_range {
  int range;  // its number among those of all tiles
};
struct no_range {};

// What a tile is: its rows, head and batch, and the key blocks it visits. The producer works it out and sends it to the consumers.
// Full: row tiles of one head follow each other. Interval: longest rows first, over as many heads as the second-level cache holds. Split: ranges of
// one row tile follow each other.
template <class C> struct forward_work : std::conditional_t<C::split, key_range, no_range> {
  using real = typename forward_params<C>::real;
  int row, head, batch;
  int first, end = 0;  // key blocks first <= j < end; end 0: no more tiles
  int end_key;         // modified: keys from here on are hidden
  int class_step;      // and the classes of its rows, from one consumer's to the next; null without a mask
  const unsigned char* classes;
  real sink;           // in base 2; -infinity where there is none

  KITTENS_INLINE forward_work() {}
  KITTENS_INLINE forward_work(const forward_params<C>& p, int tile) {
    if (tile >= p.tiles) return;
    int row_tile, rest;
    if constexpr (C::split) {
      this->range = tile;
      tile /= p.splits;
      rest = tile / p.row_tiles;
      row_tile = tile - rest * p.row_tiles;
    } else if constexpr (C::interval) {
      const int per_group = p.heads_in_l2 * p.row_tiles, group = tile / per_group, within = tile - group * per_group;
      const int left = p.tiles / p.row_tiles - group * p.heads_in_l2, heads = left < p.heads_in_l2 ? left : p.heads_in_l2;
      row_tile = p.row_tiles - 1 - within / heads;
      rest = group * p.heads_in_l2 + within % heads;
    } else {
      row_tile = tile % p.row_tiles;
      rest = tile / p.row_tiles;
    }
    row = row_tile * C::block_m;
    batch = rest / p.heads;
    head = rest - batch * p.heads;
    sink = p.sinks ? p.sinks[head * p.sink_stride] * real(1.4426950408889634) : -kittens::infinity<real>();
    if constexpr (C::interval) {
      const int last_row = (row + C::block_m < p.length_q ? row + C::block_m : p.length_q) - 1;
      int last_end = p.mask.end_key(last_row), first_key = p.mask.first_key(row);
      if constexpr (C::modified) narrow(p, first_key, last_end);
      first = first_key / C::block_n;
      end = last_end > 0 ? (last_end + C::block_n - 1) / C::block_n : 0;
      if (end <= first) end = first + 1;  // rows without a key visit one block, wholly masked
      if constexpr (C::split) take_range(p, this->range - tile * p.splits);
    } else {
      first = 0;
      end = (p.mask.length_k + C::block_n - 1) / C::block_n;
    }
  }

  // The message in registers, the same for all: what is read where it is needed takes as long as the products leave shared memory busy.
  KITTENS_INLINE forward_work uniform() const {
    forward_work w = *this;
    for (int* number : {&w.row, &w.head, &w.batch, &w.first, &w.end}) *number = kittens::uniform(*number);
    w.sink = kittens::uniform(sink);
    if constexpr (C::split) w.range = kittens::uniform(this->range);
    if constexpr (C::modified) w.end_key = kittens::uniform(end_key);
    return w;
  }

  // The block to visit after block j, of those before it: of the modified class the first and the last are visited and the empty ones between
  // them are not.
  KITTENS_INLINE int before(int j) const {
    j--;
    if constexpr (C::modified)
      if (classes) KITTENS_NO_UNROLL while (j > first && !(shown(j, 0) & shows) && is_empty(j)) j--;
    return j;
  }

  // What consumers must know of block j (modified): found out here, since the producer has the time to wait for it.
  KITTENS_INLINE block_note note(const forward_params<C>& p, int j) const {
    const int key = j * C::block_n, end = key + C::block_n < p.rules.keys ? key + C::block_n : p.rules.keys;
    unsigned flags = (j == this->end - 1 ? block_note::is_first : 0) | (j == first ? block_note::is_last : 0);
    bool all_seen = !classes;
    if (classes)
      KITTENS_UNROLL for (int w = 0; w < C::consumers; w++) {
        const unsigned what = shown(j, w);
        if (what & hides) flags |= 1u << w;
        if (!(what & hides) && (what & shows)) {  // all of them, where the last of these rows sees every key of the block
          const int last = row + (w + 1) * class_tile - 1;
          all_seen |= last < p.length_q && p.mask.first_key(last) <= key && p.mask.end_key(last) >= end;
        }
      }
    if (!all_seen || p.rules.lies_beyond(key, end, end_key)) flags |= block_note::holds_unseen;
    return {j, flags};
  }

 private:
  // Of the tile's blocks those of one range. Without any it visits the block behind all keys, which hides them all and costs no traffic.
  KITTENS_INLINE void take_range(const forward_params<C>& p, int split) {
    const int blocks = end - first, step = blocks / p.splits, more = blocks % p.splits;
    first += split * step + (split < more ? split : more);
    end = first + step + (split < more ? 1 : 0);
    if (end > first) return;
    first = (p.mask.length_k + C::block_n - 1) / C::block_n;
    end = first + 1;
  }
  using block_classes = std::conditional_t<C::block_n == 2 * class_tile, uint16_t, uint8_t>;
  static constexpr unsigned shows = tile_shows * 0x0101, hides = tile_hides * 0x0101;

  // The classes of block j in the rows of consumer w.
  KITTENS_INLINE unsigned shown(int j, int w) const { return reinterpret_cast<const block_classes*>(classes + w * class_step)[j]; }
  KITTENS_INLINE bool is_empty(int j) const {
    unsigned what = 0;
    KITTENS_UNROLL for (int w = 0; w < C::consumers; w++) what |= shown(j, w);
    return !(what & shows);
  }
  // The keys that the key length and the classes of the tile's rows leave.
  KITTENS_INLINE void narrow(const forward_params<C>& p, int& first_key, int& last_end) {
    end_key = p.rules.end_key(batch);
    if (last_end > end_key) last_end = end_key;
    classes = nullptr;
    if (!p.rules.classes.tiles) return;
    classes = p.rules.classes.of_rows(batch, head, row);
    class_step = p.rules.classes.row_step();
    int begin = last_end, stop = 0;
    for (int part = 0; part < C::block_m && row + part < p.length_q; part += class_tile) {
      const tile_range range = p.rules.classes.range(batch, head, row + part);
      if (range.end > 0 && range.first * class_tile < begin) begin = range.first * class_tile;
      if (range.end * class_tile > stop) stop = range.end * class_tile;
    }
    if (begin > first_key) first_key = begin;
    if (stop < last_end) last_end = stop;
  }
};

// The blocks of one warpgroup's 64 rows, from `row` on, among those of its tile.
template <class C> struct forward_blocks {
  int end;                           // it skips the blocks behind, which none of its rows sees
  int unmasked_first, unmasked_end;  // of unmasked_first <= j < unmasked_end its rows see every key

  KITTENS_INLINE forward_blocks(const forward_params<C>& p, const forward_work<C>& w, int row) {
    end = w.end;
    unmasked_end = end - 1;
    unmasked_first = 0;
    if constexpr (C::skips) {
      const int last_end = p.mask.end_key(row + 63), seen = last_end > 0 ? (last_end + C::block_n - 1) / C::block_n : 0;
      end = seen > w.first ? (seen < w.end ? seen : w.end) : w.first + 1;
    }
    if constexpr (C::interval) {
      // The block that holds the first row's last key counts as masked although it may be full: it gives every row its reference.
      const int first_end = p.mask.end_key(row);
      unmasked_end = kittens::uniform(first_end > 0 ? (first_end - 1) / C::block_n : 0);
      unmasked_first = kittens::uniform((p.mask.first_key(row + 63) + C::block_n - 1) / C::block_n);
      if constexpr (C::split)
        if (unmasked_first < w.first) unmasked_first = w.first;
    }
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
