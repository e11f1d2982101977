// FlashAttention forward: output = softmax(scale * Q K^T, over the visible keys) V, and the natural logarithm of the softmax's denominator.
//
// One producer warpgroup streams tiles of Q, K and V into shared memory; each consumer warpgroup owns 64 query rows and keeps their output in
// registers. A step issues "output += weights * V" of the last key block and the scores of the next one as one group of products.
//
// The softmax measures against a fixed reference. The first block of keys sets each row's maximum; later blocks keep it as long as their
// weights cannot overflow, which the sums of the block show, and so need no maximum, no shuffles and no rescaling of the output. The result is
// the same for any reference; a block that would overflow (or holds a NaN) takes the running-maximum path from its scores, which still exist.
// Measured on an H200 at head_dim 128, 16k keys: 632 TFLOP/s with a running maximum, 736 with the fixed reference.
//
// Key blocks run from the last to the first, so the masked blocks of a causal tile come first. Every row that sees a key sees one in them, so it
// has a reference when the unmasked blocks start.
//
// Barriers: full/empty mbarriers per stage of the Q, K and V rings; a mailbox that carries tile numbers; named barriers `turn + w` pass the turn
// at the tensor cores to consumer w.
#pragma once
#include <type_traits>

#include "../kittens/kittens.h"
#include "config.h"
#include "modifiers.cuh"
#include "params.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class T, const auto& Rows, int Row, mask_class Class> struct forward_config {
  using element = T;
  static constexpr forward_row row = Rows[Row];
  static constexpr int head_dim = row.head_dim, value_dim = row.value_dim, block_m = row.block_m, block_n = row.block_n;
  static constexpr int stages = row.stages, query_stages = row.query_stages, consumers = row.consumers();
  static constexpr bool output_in_query = row.output_parts == 0, take_turns = row.take_turns;
  static constexpr bool interval = Class != mask_class::full, modified = Class == mask_class::modified;
  static constexpr int output_parts = output_in_query ? 1 : row.output_parts, output_columns = value_dim / output_parts;
  // A warpgroup skips the blocks behind its own rows; at head_dim 256 with 80 keys that costs more registers than it saves work (causal, 4k keys:
  // 661 against 709 TFLOP/s).
  static constexpr bool skips = Class == mask_class::interval && !output_in_query;
  static constexpr int producer_registers = consumers == 3 ? 32 : modified ? 40 : 24;
  static constexpr int consumer_registers = consumers == 3 ? 160 : modified ? 232 : 240;
  static_assert(producer_registers + consumers * consumer_registers <= kittens::registers_to_share(consumers + 1), "registers: a CTA has no more");
  static_assert(block_m % 64 == 0 && consumers >= 1 && consumers <= 3, "block_m: 64 query rows for each of 1 to 3 consumer warpgroups");
  static_assert(!skips || (block_m - 64 + block_n - 1) / block_n <= stages, "stages: a warpgroup may skip blocks whose values it has not released");
  static_assert(block_n % 16 == 0, "block_n: the second product takes keys 16 at a time");
  static_assert(!modified || block_n == class_tile || block_n == 2 * class_tile, "block_n: blocks of the modified class are one or two class tiles");
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
  using real = kittens::accumulator<typename C::element>;
  kittens::tile_map<typename forward_tiles<C>::query> query;
  kittens::tile_map<typename forward_tiles<C>::key> key;
  kittens::tile_map<typename forward_tiles<C>::value> value;
  kittens::tile_map<typename forward_tiles<C>::output_rows> output;
  real* logsumexp;
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
template <class C> using forward_params = std::conditional_t<C::modified, modified_forward_params<C>, plain_forward_params<C>>;

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

// What a tile is: its rows, head and batch, and the key blocks it visits. The producer works it out and sends it to the consumers.
// Full: row tiles of one head follow each other. Interval: longest rows first, over as many heads as the second-level cache holds.
template <class C> struct forward_work {
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
    if constexpr (C::interval) {
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
    }
  }
};

template <class C> struct forward_shared {
  typename forward_tiles<C>::query query[C::query_stages];
  typename forward_tiles<C>::key key[C::stages];
  typename forward_tiles<C>::value value[C::stages];
  kittens::optional_tile<typename forward_tiles<C>::output, !C::output_in_query> output;
  kittens::optional_tile<block_notes<C>, C::modified> notes;
  kittens::ring_flags<C::query_stages> query_flags;
  kittens::ring_flags<C::stages> key_flags, value_flags;
  kittens::mailbox<forward_work<C>, 4> mail;  // the producer sends the next tile while consumers hold this one and the one before
};

template <class C> struct forward_kernel {
  using params = forward_params<C>;
  using shared = forward_shared<C>;
  static constexpr int warpgroups = C::consumers + 1;
  static constexpr bool starts_early = true;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using T = typename C::element;
    using real = typename params::real;
    constexpr int first_turn = first_free_barrier;
    if (cta.warpgroup == 0 && cta.elect()) {
      s.query_flags.init(C::consumers);
      s.key_flags.init(C::consumers);
      s.value_flags.init(C::consumers);
      s.mail.init(C::consumers);
    }
    cta.publish_barriers();
    cta.await_earlier_launches();

    if (cta.warpgroup == 0) {
      cta.template give_registers<C::producer_registers>();
      if (!cta.elect()) return;
      producer query(s.query, s.query_flags);
      producer key(s.key, s.key_flags);
      producer value(s.value, s.value_flags);
      sender mail(s.mail);
      auto load_query = [&](const forward_work<C>& w) {
        if (w.end > 0) query.load(p.query, {w.row, w.head, w.batch});
      };
      auto load_block = [&](const forward_work<C>& w, int j) {
        value.follow(key);
        const place where{j * C::block_n, w.head / p.group, w.batch};
        if constexpr (C::modified)
          key.load_with(s.notes.tile.note, w.note(p, j), p.key, where);
        else
          key.load(p.key, where);
        value.load(p.value, where);
      };
      int tile = cta.index;
      const forward_work<C>* w = &mail.make(p, tile);
      load_query(*w);
      while (w->end > 0) {
        int j = w->end - 1;
        KITTENS_NO_UNROLL for (; j > w->first + 1; j = w->before(j)) load_block(*w, j);
        // A tile number takes a microsecond to come and a query another: both are asked for before this tile's last blocks, and no earlier, so
        // that long tiles keep nobody waiting.
        tile = p.counter ? take_tile(p.counter, cta) : tile + cta.count;
        if (j > w->first) load_block(*w, j);
        const forward_work<C>& next = mail.make(p, tile);
        if constexpr (C::query_stages > 1) load_query(next);
        load_block(*w, w->first);
        if constexpr (C::query_stages == 1) load_query(next);
        w = &next;
      }
      if (p.counter) retire(p.counter, cta);
      return;
    }

    cta.template take_registers<C::consumer_registers>();
    const int wg = cta.warpgroup - 1;
    const named_barrier my_turn{first_turn + wg, 2}, next_turn{first_turn + (wg + 1) % C::consumers, 2};
    consumer query(s.query, s.query_flags);
    consumer key(s.key, s.key_flags);
    consumer value(s.value, s.value_flags);
    receiver mail(s.mail);
    register_tile<real, C::block_n> scores;
    register_tile<T, C::block_n> weights;
    register_tile<real, C::value_dim> output;
    row_vector<real> maximum, sum, shift, rescale, block_sum;
    [[maybe_unused]] block_note block{};  // modified: whose scores there are

    if (C::take_turns && wg == C::consumers - 1) next_turn.arrive();
    auto skipped = [&](const forward_work<C>& w) { return C::skips ? uniform(w.end - forward_blocks<C>(p, w, w.row + wg * 64).end) : 0; };
    auto issue_first_scores = [&](const forward_work<C>& w) {
      auto& q = query.wait();
      KITTENS_NO_UNROLL for (int skip = skipped(w); skip > 0; skip--) key.skip();
      auto& k = key.wait();
      if constexpr (C::modified) block = s.notes.tile.note[key.last()].uniform();
      mma_begin(scores);
      mma_ABt(scores, rows_of(q, wg * 64), k, 0);
      mma_commit();
    };
    bool more = mail.wait().end > 0;
    if (more) {
      issue_first_scores(mail.current());
      mma_wait<0>();
      mma_done(scores);
    }
    while (more) {  // the first scores of this tile are there
      const forward_work<C> w = mail.current().uniform();
      mail.release();
      const int row = w.row + wg * 64;
      const forward_blocks<C> blocks(p, w, row);
      auto& q = query.current();
      const auto scale = [&] {  // of the scores, and of the maximum that is taken from them
        if constexpr (C::modified)
          return real(1);
        else
          return p.scale_log2;
      };
      fill(maximum, -infinity<real>());
      fill(sum, real(0));

      auto mask = [&](int j) {
        const int column = j * C::block_n;
        const auto first = [&](int r) { return C::interval ? p.mask.first_key(row + r) - column : 0; };
        const auto end = [&](int r) { return (C::interval ? p.mask.end_key(row + r) : p.mask.length_k) - column; };
        if (first(63) > 0 || end(0) < C::block_n) keep_columns(scores, first, end);
      };
      // The running maximum becomes the reference; what was summed before is rescaled to it. No product is in flight.
      auto renew_reference = [&](bool first_block) {
        const row_vector<real> before = maximum;
        row_max(maximum, scores);
        map(shift, maximum, [&](real m) { return m == -infinity<real>() ? real(0) : m * scale(); });
        map(rescale, before, shift, [&](real m, real s) { return kittens::exp2(m * scale() - s); });
        exp2_into(weights, scores, shift, scale(), block_sum);
        map(sum, sum, rescale, [](real a, real f) { return a * f; });
        map(sum, sum, block_sum, [](real a, real b) { return a + b; });
        if (!first_block) map_rows(output, rescale, [](real x, real f) { return x * f; });
      };
      auto keep_reference = [&] {
        exp2_into(weights, scores, shift, p.scale_log2, block_sum);
        if (any_above(block_sum, weight_limit<T>())) {
          renew_reference(false);
        } else {
          map(sum, sum, block_sum, [](real a, real b) { return a + b; });
        }
      };
      [[maybe_unused]] auto weigh = [&] {  // modified: the weights of the block from its scores
        if constexpr (C::modified) {
          const score_place at{w.batch, w.head, row, block.block * C::block_n};
          const auto first = [&](int r) { return p.mask.first_key(row + r) - at.key; };
          const auto end = [&](int r) {
            const int last = p.mask.end_key(row + r);
            return (last < w.end_key ? last : w.end_key) - at.key;
          };
          const bool cut = first(63) > 0 || end(0) < C::block_n, masked = block.hides(wg);
          const bool plain = !cut && !masked && p.rules.scores_are_plain();  // the scores may stay as they are
          if (!plain) p.rules.modify(scores, at);
          if (cut) keep_columns(scores, first, end);
          if (masked) p.rules.hide(scores, at);
          // A row without a reference has seen no key yet.
          map(rescale, maximum, [](real m) { return -m; });
          bool renew = block.first() || any_above(rescale, real(3.4e38));
          if (!renew) {
            exp2_into(weights, scores, maximum, plain ? p.scale_log2 : real(1), block_sum);
            renew = any_above(block_sum, weight_limit<T>());
          }
          if (renew) {
            if (plain) map(scores, [&](real x) { return x * p.scale_log2; });
            renew_reference(block.first());
          } else {
            map(sum, sum, block_sum, [](real a, real b) { return a + b; });
          }
          if (p.rules.given.dropout_state) p.rules.drop(weights, p.rules.dropout(w.batch, w.head, p.heads), at);
        }
      };
      // Zero times NaN is NaN: the values of keys that no row sees become zero, two warpgroups take half of the rows each.
      auto clear_unseen = [&](auto& v) {
        if constexpr (C::modified) {
          constexpr int half = C::block_n / 2;
          const int key = block.block * C::block_n;
          const auto unseen = [&](int r) { return p.rules.key_is_unseen(w.batch, w.head, key + r, w.end_key); };
          if (block.may_hold_unseen() && any_of<C::block_n>(unseen)) {
            if (wg < 2) zero_rows<half>(rows_of(v, wg * half), [&](int r) { return unseen(wg * half + r); });
            publish({first_turn + C::consumers, C::consumers});
          }
        }
      };
      auto step = [&](int j, auto masked) {  // output += weights * V of block j + 1, then the weights of block j
        auto& v = value.wait();
        clear_unseen(v);
        auto& k = key.wait();
        const bool more_than_first = C::modified ? !block.first() : j < blocks.end - 2;
        if constexpr (C::modified) block = s.notes.tile.note[key.last()].uniform();
        if constexpr (C::take_turns) my_turn.sync();
        mma_begin(scores, output, weights);
        mma_AB(output, weights, v, more_than_first);
        mma_ABt(scores, rows_of(q, wg * 64), k, 0);
        mma_commit();
        if constexpr (C::take_turns) next_turn.arrive();
        mma_wait<0>();
        mma_done(scores, output);
        value.release();
        key.release();
        if constexpr (C::modified) return;  // the weights come from weigh()
        if constexpr (masked) {
          mask(j);
          renew_reference(false);
        } else {
          keep_reference();
        }
      };

      key.release();
      KITTENS_NO_UNROLL for (int skip = skipped(w); skip > 0; skip--) {
        value.skip();
        if constexpr (C::take_turns) {
          my_turn.sync();
          next_turn.arrive();
        }
      }
      int j = blocks.end - 1;
      if constexpr (C::modified) {
        KITTENS_NO_UNROLL for (;;) {  // weigh() is long: it stands here once
          weigh();
          if (block.last()) break;
          step(j, std::true_type{});
        }
      } else {
        mask(j--);
        renew_reference(true);
        if constexpr (C::interval)
          for (; j >= w.first && j >= blocks.unmasked_end; j--) step(j, std::true_type{});
        for (; j >= blocks.unmasked_first; j--) step(j, std::false_type{});
        if constexpr (C::interval)
          for (; j >= w.first; j--) step(j, std::true_type{});
      }
      if constexpr (!C::output_in_query) query.release();

      auto& v = value.wait();
      clear_unseen(v);
      mma_begin(output, weights);
      mma_AB(output, weights, v, blocks.end - w.first > 1);
      mma_commit();
      auto finish = [&] {
        mma_done(output);
        value.release();
        row_sum_finish(sum);
        // The sink joins the sum, against the larger of it and the reference.
        const real sink = w.sink;
        map(shift, maximum, [&](real m) { return m * scale() > sink ? m * scale() : sink == -infinity<real>() ? real(0) : sink; });
        map(rescale, maximum, shift, [&](real m, real s) { return kittens::exp2(m * scale() - s); });
        map(sum, sum, rescale, [](real l, real f) { return l * f; });
        map(sum, sum, shift, [&](real l, real s) { return l + kittens::exp2(sink - s); });
        map(rescale, rescale, sum, [&](real f, real l) {
          if constexpr (C::modified) f *= p.rules.keep_scale;
          return l == real(0) ? real(0) : f / l;
        });
        map_rows(output, rescale, [](real x, real f) { return f == real(0) ? real(0) : x * f; });
        map(sum, sum, shift, [&](real l, real s) { return l == real(0) ? -infinity<real>() : s * real(0.6931471805599453) + kittens::log(l); });
        store_rows(p.logsumexp + (static_cast<int64_t>(w.batch) * p.heads + w.head) * p.length_q + row, sum, p.length_q - row);
        register_tile<T, C::output_columns> rounded;
        if constexpr (C::output_in_query) {
          convert(rounded, output, 0);
          store_async(p.output, rows_of(query.current(), wg * 64), rounded, {row, w.head, w.batch});
          store_wait_read();
          query.release();
        } else {
          KITTENS_UNROLL for (int column = 0; column < C::value_dim; column += C::output_columns) {
            convert(rounded, output, column);
            store_async(p.output, rows_of(s.output.tile, wg * 64), rounded, {row, w.head, w.batch, column});
          }
        }
      };
      const forward_work<C>& next = mail.wait();
      more = next.end > 0;
      // The next tile's first scores run under this tile's epilogue, where there is a buffer for its query, and where this warpgroup does not
      // wait for keys that load only after it has released this tile's last values.
      if (!C::output_in_query && more && skipped(next) < C::stages) {
        issue_first_scores(next);
        mma_wait<1>();
        finish();
        mma_wait<0>();
        mma_done(scores);
      } else {
        mma_wait<0>();
        finish();
        if (more) {
          issue_first_scores(next);
          mma_wait<0>();
          mma_done(scores);
        }
      }
    }
    if (C::take_turns && wg == 0) my_turn.sync();  // takes the last turn that was passed on
    store_wait_all();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
