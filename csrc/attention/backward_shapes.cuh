// What the backward kernels share: a configuration's shapes, the parameters, and which tile is whose.
#pragma once
#include <type_traits>

#include "../kittens/kittens.h"
#include "backward_config.h"
#include "backward_params.h"
#include "modifiers.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

#if KITTENS_SM90 || KITTENS_CHECKED
inline constexpr bool registers_are_scarce = true;
#else
inline constexpr bool registers_are_scarce = false;
#endif

template <class T, const auto& Rows, int Row, bool Modified = false> struct backward_config {
  using element = T;
  using real = kittens::accumulator<T>;
  static constexpr backward_row row = Rows[Row];
  static constexpr int head_dim = row.head_dim, value_dim = row.value_dim;
  static constexpr int block_q = row.block_q, block_k = row.block_k(), stages = row.stages, tile_stages = row.tile_stages;
  static constexpr int block_m = row.block_m, block_n = row.block_n, key_stages = row.key_stages, value_stages = row.value_stages;
  static constexpr bool modified = Modified, mask_alone = row.mask_alone;
  static constexpr int bias_stages = backward_bias_stages(row);
  // The producer of the modified class looks up which blocks are empty; where a bool mask is alone, a thread beside it (backward_scout.cuh).
  static constexpr int producer_registers = !modified || mask_alone ? 24 : head_dim > 64 ? 40 : 56;
  static constexpr int consumer_registers = !modified || mask_alone ? 240 : head_dim > 64 ? 232 : 224;
  static_assert(producer_registers + 2 * consumer_registers <= kittens::registers_to_share(3), "registers: a CTA has no more");
  // How two warpgroups share dQ of a step: columns of one 64-row tile, or a 64-row tile each.
  static constexpr bool split_columns = block_q == 64;
  static constexpr int query_sum_columns = split_columns ? head_dim / 2 : head_dim, query_sum_tile = 64 * query_sum_columns;

  // dV's product runs under the making of dS; with 128 queries a step the registers do not hold what is then alive.
  static constexpr bool values_early = block_q == 64;
  static constexpr bool folds = row.folds;

  static_assert(block_q == 64 || block_q == 128, "block_q: one or two tiles of 64 rows");
  static_assert(!row.sums_query() || head_dim % 128 == 0 || !split_columns, "sums_query: half of head_dim must be whole panels");
  static_assert(!row.roles || block_q == 64, "block_q: the kernel with roles takes 64 queries a step");
  static_assert(tile_stages == 1 || tile_stages == 2, "tile_stages: K and V move with the mailbox, which has two slots");
  static_assert(key_stages >= 2, "key_stages: a step of the kernel that owns queries holds two blocks of keys");
  static_assert(block_n % 16 == 0, "block_n: products take keys 16 at a time");
  static constexpr int key_registers = row.roles ? (head_dim > value_dim ? head_dim : value_dim) / 2 + block_q
                                                 : (head_dim + value_dim) / 2 + block_q + block_q / 4;
  static constexpr int query_registers = head_dim / 2 + block_n + block_n / 4;
  static_assert(!registers_are_scarce || (key_registers <= consumer_registers - 16 && query_registers <= consumer_registers - 16),
                "accumulators do not fit the registers");
};

template <class C> struct backward_tiles {
  using T = typename C::element;
  using query = kittens::shared_tile<T, C::block_q, C::head_dim>;
  using gradient = kittens::shared_tile<T, C::block_q, C::value_dim>;
  using key = kittens::shared_tile<T, C::block_k, C::head_dim>;
  using value = kittens::shared_tile<T, C::block_k, C::value_dim>;
  using key_rows = kittens::shared_tile<T, 64, C::head_dim>;
  using value_rows = kittens::shared_tile<T, 64, C::value_dim>;
  using query_sum = kittens::shared_tile<T, 64, C::query_sum_columns>;
  // of the kernel that owns queries
  using owned_query = kittens::shared_tile<T, C::block_m, C::head_dim>;
  using owned_gradient = kittens::shared_tile<T, C::block_m, C::value_dim>;
  using key_block = kittens::shared_tile<T, C::block_n, C::head_dim>;
  using value_block = kittens::shared_tile<T, C::block_n, C::value_dim>;
  // the bias of a step, of either kernel
  using key_bias = kittens::shared_tile<T, C::block_q, C::block_k>;
  using query_bias = kittens::shared_tile<T, C::block_m, C::block_n>;
};

// The barriers of a kernel's four rings and its mailbox, whose messages `threads` receive too, ready for all.
template <class Shared> KITTENS_INLINE void backward_barriers(Shared& s, kittens::cta cta, int consumers, int threads = 0) {
  if (cta.warpgroup == 0 && cta.elect()) {
    s.query_flags.init(consumers);
    s.gradient_flags.init(consumers);
    s.key_flags.init(consumers);
    s.value_flags.init(consumers);
    s.mail.init(consumers, threads);
  }
  cta.publish_barriers();
  cta.await_earlier_launches();
}

// What the modified class adds to it.
template <class C, bool modified = C::modified> struct backward_modification {};
template <class C> struct backward_modification<C, true> {
  score_rules<typename C::element> rules;
  bool bias_travels;  // to shared memory, with the tiles of a step: a copy can read it. Otherwise it is read where it is
  bool bias_has_heads, bias_has_batches;

  KITTENS_INLINE kittens::place bias_at(int row, int key, int head, int batch) const {
    return {row, bias_has_heads ? head : 0, bias_has_batches ? batch : 0, key};
  }
};
template <class Tile, bool modified> struct travelling_bias {};
template <class Tile> struct travelling_bias<Tile, true> {
  kittens::tile_map<Tile> bias;
};
template <class Tile, int Stages> struct bias_stages {
  Tile tile[Stages];
};

// Eight classes of tiles at once, from a multiple of 8 on: whether one of them shows a pair.
KITTENS_INLINE bool eight_show(const unsigned char* classes) {
  return *reinterpret_cast<const uint64_t*>(classes) & tile_shows * 0x0101010101010101u;
}

// What every kernel of a pass knows of the problem.
template <class C> struct backward_problem : backward_modification<C> {
  using real = typename C::real;
  const real *logsumexp2, *delta;
  interval_mask mask;
  real scale, scale_log2;  // scale_log2 = log2(e) * scale: weights are made in base 2
  int heads, group, length_q, padded_q;
  int tiles, tiles_per_head;
  int heads_in_l2;  // heads whose streamed tensors stay in the second-level cache together
  kittens::tile_counter* counter;

  // Tile number -> tile of a head, and head of the batch. Heads in groups that fit the second-level cache; in a group tile by tile, so that the
  // longest ones, which the kernels number first, start first.
  KITTENS_INLINE void locate(int tile, int& tile_of_head, int& head_of_batch) const {
    const int per_group = heads_in_l2 * tiles_per_head, group_of_heads = tile / per_group, within = tile - group_of_heads * per_group;
    const int left = tiles / tiles_per_head - group_of_heads * heads_in_l2, count = left < heads_in_l2 ? left : heads_in_l2;
    tile_of_head = within / count;
    head_of_batch = group_of_heads * heads_in_l2 + within % count;
  }
  KITTENS_INLINE real keep_scale() const {
    if constexpr (C::modified) return this->rules.keep_scale;
    return real(1);
  }
  // The keys of a batch.
  KITTENS_INLINE int keys_of(int batch) const {
    if constexpr (C::modified) return this->rules.end_key(batch);
    return mask.length_k;
  }
};

// The kernels that own keys: parameters, and a tile's work.
template <class C> struct backward_key_params : backward_problem<C>, travelling_bias<typename backward_tiles<C>::key_bias, C::modified> {
  using typename backward_problem<C>::real;
  using shapes = backward_tiles<C>;
  kittens::tile_map<typename shapes::query> query;
  kittens::tile_map<typename shapes::gradient> grad_output;
  kittens::tile_map<typename shapes::key> key;
  kittens::tile_map<typename shapes::value> value;
  kittens::tile_map<typename shapes::key_rows> grad_key;
  kittens::tile_map<typename shapes::value_rows> grad_value;
  bool need_key, need_value;
  real* query_sum;  // (batch, head, step, 64-row tile or half of its columns) in private order
  int steps;        // query blocks of a head
  int sum_step;     // values of query_sum from a step to the next one: the two warpgroups' tiles
  const kittens::term_pair* terms;  // in the place of logsumexp2 and delta, where a kernel folds
  int* turns;                       // (batch, head, step): how many tiles of keys have added their dQ; null where they add in any order
  int rising;                       // in order: so many tiles are those of heads that are walked upwards (backward_turns.cuh)

  // Modified: the classes of the keys of consumer `part` by the rows of a step.
  template <class Work> KITTENS_INLINE unsigned classes_of(const Work& w, int head, int block, int part) const {
    const tile_classes& classes = this->rules.classes;
    if (!classes.tiles) return this->rules.given.mask ? tile_shows | tile_hides : tile_shows;
    const unsigned char* of = classes.of_keys(w.batch, head, w.key) + part * classes.key_step() + classes.row_tile(block * C::block_q);
    unsigned what = of[0];
    if constexpr (C::block_q > class_tile)
      if (classes.row_tiles > 1) what |= of[1];
    return what;
  }
  // Whether no row of any head that has the keys of w sees a key.
  template <class Work> KITTENS_INLINE bool key_is_unseen(const Work& w, int key) const {
    bool seen = false;
    KITTENS_NO_UNROLL for (int head = w.head * this->group; head < (w.head + 1) * this->group; head++)
      seen = seen || this->rules.classes.key_is_seen(w.batch, head, key);
    return !seen;
  }
  // The first step from (head, block) on that the mask does not hide as a whole; the head after the group's last where there is none.
  template <class Work> KITTENS_INLINE void seek(const Work& w, int& head, int& block) const {
    const int end_head = (w.head + 1) * this->group;
    const tile_classes& classes = this->rules.classes;
    for (; head < end_head; head++, block = w.first) {
      if (!classes.tiles && block < w.end) return;
      KITTENS_NO_UNROLL while (block < w.end) {
        unsigned what = 0;
        KITTENS_UNROLL for (int part = 0; part < C::block_k / class_tile; part++) what |= classes_of(w, head, block, part);
        if (what & tile_shows) return;
        if (classes.row_tiles == 1) break;
        block++;
        if constexpr (C::block_q == class_tile)
          KITTENS_NO_UNROLL for (; block % 8 == 0 && block + 8 <= w.end; block += 8) {
            const unsigned char* of = classes.of_keys(w.batch, head, w.key) + block;
            if (eight_show(of) || (C::block_k > class_tile && eight_show(of + classes.key_step()))) break;
          }
      }
    }
  }
};

// A block of keys of one head, and the query blocks first <= i < end that see any of it.
template <class C> struct backward_key_work {
  int key = -1, head, batch;  // key -1: no more tiles; head: of the keys
  int first, end;
  int tile;

  KITTENS_INLINE backward_key_work() {}
  KITTENS_INLINE backward_key_work(const backward_key_params<C>& p, int tile) : tile(tile) {
    int block, rest;
    p.locate(tile, block, rest);
    key = block * C::block_k;
    const int heads_k = p.heads / p.group;
    batch = rest / heads_k;
    head = rest - batch * heads_k;
    // Key j is seen by the rows j - right <= i <= j + left.
    const int beyond = key + C::block_k, last = (beyond < p.mask.length_k ? beyond : p.mask.length_k) - 1;
    const int first_row = key - p.mask.right, end_row = last + p.mask.left + 1;
    first = first_row > 0 ? first_row / C::block_q : 0;
    end = end_row <= 0 ? 0 : end_row < p.length_q ? (end_row + C::block_q - 1) / C::block_q : p.steps;
    if (end < first) end = first;
    if (C::modified && (end == first || key >= p.keys_of(batch))) {  // keys that no row sees visit one block, wholly hidden
      first = 0;
      end = 1;
    }
  }
};

// The way of a tile through its steps: upwards, or, where tiles add in order, upwards or downwards (backward_turns.cuh).
template <bool InOrder> struct backward_way {
  static constexpr int way = 1;
  template <class Params> KITTENS_INLINE backward_way(const Params&, int) {}
  static KITTENS_INLINE bool before(int i, int stop) { return i < stop; }
};
template <> struct backward_way<true> {
  int way;
  template <class Params> KITTENS_INLINE backward_way(const Params& p, int tile) : way(kittens::uniform(tile < p.rising ? 1 : -1)) {}
  KITTENS_INLINE bool before(int i, int stop) const { return way > 0 ? i < stop : i > stop; }
};

// Of the query blocks that see a tile of keys, those of plain_first <= i < plain_end see all of it. Walked downwards, the four are where such a walk
// comes to first, or no more.
template <class C, bool InOrder = false> struct backward_key_blocks : backward_way<InOrder> {
  using backward_way<InOrder>::way;
  int first, end, plain_first, plain_end;

  KITTENS_INLINE backward_key_blocks(const backward_key_params<C>& p, const backward_key_work<C>& w)
      : backward_way<InOrder>(p, w.tile), first(kittens::uniform(w.first)), end(kittens::uniform(w.end)) {
    // All keys of the tile are seen by the rows beyond - 1 - right <= i <= key + left. Keys past the end count as unseen.
    const int key = kittens::uniform(w.key), beyond = key + C::block_k;
    const int plain_row = beyond - 1 - p.mask.right, plain_end_row = key + p.mask.left + 1;
    plain_first = plain_row > 0 ? (plain_row + C::block_q - 1) / C::block_q : 0;
    plain_end = plain_end_row <= 0 ? 0 : plain_end_row < p.length_q ? plain_end_row / C::block_q : p.steps;
    if (beyond > p.mask.length_k) plain_first = plain_end = end;
    plain_first = plain_first < first ? first : plain_first > end ? end : plain_first;
    plain_end = plain_end > end ? end : plain_end < plain_first ? plain_first : plain_end;
    if constexpr (InOrder)
      if (way < 0) {
        const int from = end - 1, plain_from = plain_end - 1;
        end = first - 1;
        plain_end = plain_first - 1;
        first = from;
        plain_first = plain_from;
      }
  }
  // From the step that is visited last to the first one of the next head, where a head has `steps`.
  KITTENS_INLINE int to_next_head(int steps) const { return steps - (end - way - first); }
};

// Whether row i sees key j, for a tile of keys x queries that starts at (key, row).
struct backward_visible {
  int right, left, keys;

  KITTENS_INLINE backward_visible(const interval_mask& mask, int key, int row)
      : right(mask.right + row - key), left(mask.left - row + key), keys(mask.length_k - key) {}
  KITTENS_INLINE bool operator()(int r, int c) const { return r - c <= right && c - r <= left && r < keys; }
};

// The classes of 64 rows by up to 128 keys that begin in one tile, or in whole tiles.
template <class C, class Problem> KITTENS_INLINE unsigned backward_classes(const Problem& p, int batch, int head, int row, int key) {
  const tile_classes& classes = p.rules.classes;
  if (!classes.tiles) return p.rules.given.mask ? tile_shows | tile_hides : tile_shows;
  const unsigned char* of = classes.of_rows(batch, head, row) + key / class_tile;
  unsigned what = of[0];
  if constexpr (C::block_n > class_tile) what |= of[1];
  return what;
}

// The kernel that owns queries.
template <class C> struct backward_query_params : backward_problem<C>, travelling_bias<typename backward_tiles<C>::query_bias, C::modified> {
  using shapes = backward_tiles<C>;
  kittens::tile_map<typename shapes::owned_query> query;
  kittens::tile_map<typename shapes::owned_gradient> grad_output;
  kittens::tile_map<typename shapes::key_block> key;
  kittens::tile_map<typename shapes::value_block> value;
  kittens::tile_map<typename shapes::key_rows> grad_query;

  // Modified: the classes of the rows of consumer `part` by the keys of a block.
  template <class Work> KITTENS_INLINE unsigned classes_of(const Work& w, int j, int part) const {
    return backward_classes<C>(*this, w.batch, w.head, w.row + part * class_tile, j * C::block_n);
  }
  // The first block of keys from j on that the mask does not hide as a whole.
  template <class Work> KITTENS_INLINE int next(const Work& w, int j) const {
    if constexpr (C::modified) {
      const tile_classes& classes = this->rules.classes;
      if (!classes.tiles) return j;
      KITTENS_NO_UNROLL while (j < w.end && !((classes_of(w, j, 0) | classes_of(w, j, 1)) & tile_shows)) {
        j++;
        if constexpr (C::block_n == class_tile)
          KITTENS_NO_UNROLL for (; j % 8 == 0 && j + 8 <= w.end; j += 8) {
            const unsigned char* of = classes.of_rows(w.batch, w.head, w.row) + j;
            if (eight_show(of) || eight_show(of + classes.row_step())) break;
          }
      }
    }
    return j;
  }
};

// A block of rows of one head, and the key blocks first <= j < end that any of them sees.
template <class C> struct backward_query_work {
  int row, head, batch;
  int first, end = 0;  // end 0: no more tiles

  KITTENS_INLINE backward_query_work() {}
  KITTENS_INLINE backward_query_work(const backward_query_params<C>& p, int tile) {
    int block, rest;
    p.locate(tile, block, rest);
    row = (p.tiles_per_head - 1 - block) * C::block_m;
    batch = rest / p.heads;
    head = rest - batch * p.heads;
    const int last_row = (row + C::block_m < p.length_q ? row + C::block_m : p.length_q) - 1, last_end = p.mask.end_key(last_row);
    first = p.mask.first_key(row) / C::block_n;
    end = last_end > 0 ? (last_end + C::block_n - 1) / C::block_n : 0;
    if constexpr (C::modified) {
      const int keys = p.keys_of(batch), beyond = keys > 0 ? (keys + C::block_n - 1) / C::block_n : 0;
      end = beyond < end ? beyond : end;
    }
    if (end <= first) end = first + 1;  // rows without a key visit one block, wholly masked
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
