// score_modifiers as tile operations: scores of 64 rows by a block of keys become what the softmax takes, in base 2; weights are dropped.
#pragma once
#include "../kittens/kittens.h"
#include "dropout.h"
#include "modifiers.h"
#include "tile_classes.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// 64 rows by some keys of one (batch, head).
struct score_place {
  int batch, head, row, key;
};

// `given`, with its numbers as accumulators. Element is that of the query: the bias has it, or is of accumulators.
template <class Element> struct score_rules {
  using real = kittens::accumulator<Element>;
  score_modifiers given;
  tile_classes classes;
  real scale_log2, cap_scale, cap_log2, keep_scale;  // log2(e) scale; scale / c; log2(e) c, 0 without a soft cap
  int rows, keys, first_key;                         // of the caller's keys, no row sees those before first_key under the interval

  static constexpr real log2_e = real(1.4426950408889634);

  score_rules() = default;
  score_rules(const score_modifiers& modifiers, const tile_classes& known, double scale, int length_q, int length_k, int first)
      : given(modifiers), classes(known), rows(length_q), keys(length_k), first_key(first) {
    scale_log2 = static_cast<real>(scale * 1.4426950408889634);
    cap_scale = modifiers.softcap != 0 ? static_cast<real>(scale / modifiers.softcap) : real(0);
    cap_log2 = static_cast<real>(modifiers.softcap * 1.4426950408889634);
    keep_scale = static_cast<real>(modifiers.keep_scale);
  }

  // Keys from here on are hidden in this batch.
  KITTENS_INLINE int end_key(int batch) const {
    if (!given.key_lengths) return keys;
    const int length = given.key_lengths[batch];
    return length < keys ? (length > 0 ? length : 0) : keys;
  }
  KITTENS_INLINE real sink(int head) const {
    return given.sinks ? static_cast<const real*>(given.sinks)[head * given.sink_stride] * log2_e : -kittens::infinity<real>();
  }

  // Whether no row sees the key: what is there, NaN included, must not reach a product with the weights.
  KITTENS_INLINE bool key_is_unseen(int batch, int head, int key, int end) const {
    return key < keys && (key < first_key || key >= end || (classes.seen && !classes.key_is_seen(batch, head, key)));
  }
  // False only if every key of `first` <= key < `last` is seen.
  KITTENS_INLINE bool may_hold_unseen(int first, int last, int end) const {
    return first < first_key || (last < keys ? last : keys) > end || classes.seen;
  }

  // What is known of 64 rows from `row` on and the keys first <= key < first + Keys.
  template <int Keys> KITTENS_INLINE bool is_empty(int batch, int head, int row, int first) const {
    bool empty = true;
    const unsigned char* tiles = classes.tiles + classes.row_of_tiles(batch, head, row) * classes.key_tiles;
    KITTENS_UNROLL for (int tile = first / class_tile; tile < (first + Keys) / class_tile; tile++)
      empty &= tile >= classes.key_tiles || tiles[tile] == tile_empty;
    return empty;
  }
  // Whether the mask may hide one of those keys.
  template <int Keys> KITTENS_INLINE bool mask_hides(score_place at) const {
    if (!given.mask || at.row >= rows) return false;  // rows beyond the tensor come to nothing
    bool full = classes.tiles != nullptr;
    const unsigned char* tiles = classes.tiles + classes.row_of_tiles(at.batch, at.head, at.row) * classes.key_tiles;
    KITTENS_UNROLL for (int tile = at.key / class_tile; tile < (at.key + Keys) / class_tile; tile++)
      full = full && (tile >= classes.key_tiles || tiles[tile] == tile_full);
    return !full;
  }

  // Whether the scores of a block of which every row sees all keys are scale q.k alone.
  KITTENS_INLINE bool scores_are_plain() const { return cap_log2 == real(0) && !given.bias && !given.alibi_slopes; }

  // The scores become those of the softmax, in base 2, masks aside.
  template <int Keys> KITTENS_INLINE void modify(kittens::register_tile<real, Keys>& scores, score_place at) const {
    if (cap_log2 != real(0))
      map(scores, [&](real x) { return cap_log2 * kittens::tanh(x * cap_scale); });
    else
      map(scores, [&](real x) { return x * scale_log2; });
    if (given.bias) {
      if (given.bias_is_real)
        add_bias(scores, static_cast<const real*>(given.bias), at);
      else
        add_bias(scores, static_cast<const Element*>(given.bias), at);
    }
    if (given.alibi_slopes) {
      const real slope = log2_e * static_cast<const real*>(given.alibi_slopes)[at.batch * given.alibi_stride[0] + at.head * given.alibi_stride[1]];
      const int diagonal = at.row + given.diagonal - at.key;
      map_pairs(scores, [&](int row, int key, real& x, real& y) {
        const int distance = row + diagonal - key;
        x -= slope * static_cast<real>(distance < 0 ? -distance : distance);
        y -= slope * static_cast<real>(distance < 1 ? 1 - distance : distance - 1);
      });
    }
    if (given.bias) map(scores, [](real x) { return raise_masked(x); });
  }

  // What the mask hides becomes -infinity.
  template <int Keys> KITTENS_INLINE void hide(kittens::register_tile<real, Keys>& scores, score_place at) const {
    const unsigned char* mask = given.mask + modifier_offset(given.mask_stride, at.batch, at.head, 0, 0);
    keep_where(scores, [&](int row, int key) {
      const unsigned char* from = mask + row_of(at.row + row) * given.mask_stride[2];
      const int first = at.key + key;
      uint32_t bits = 0;
      if (given.mask_stride[3] == 1 && first + 32 <= keys && reinterpret_cast<uintptr_t>(from + first) % 16 == 0) {
        uint32_t words[8];
        kittens::load_words(words, from + first);
        KITTENS_UNROLL for (int i = 0; i < 8; i++) bits |= first_bits(words[i]) << (4 * i);
      } else {
        KITTENS_NO_UNROLL for (int i = 0; i < 32; i++)
          bits |= static_cast<uint32_t>(from[key_of(first + i) * given.mask_stride[3]] != 0) << i;
      }
      return bits;
    });
  }

  // Weights that dropout does not keep become zero.
  template <int Keys> KITTENS_INLINE void drop(kittens::register_tile<Element, Keys>& weights, score_place at, int heads) const {
    const dropout_rule rule{static_cast<uint64_t>(given.dropout_state[0]), static_cast<uint32_t>(given.dropout_state[1]),
                            static_cast<uint32_t>(at.batch * heads + at.head), given.dropout_threshold};
    keep_drawn(weights, [&](int row, int key) { return rule.draw(at.row + row, at.key + key); });
  }

 private:
  // Rows and keys of a tile beyond the tensor's: any value does.
  KITTENS_INLINE int64_t row_of(int row) const { return row < rows ? row : rows - 1; }
  KITTENS_INLINE int64_t key_of(int key) const { return key < keys ? key : keys - 1; }

  // One bit for each of a word's four bytes, which are 0 or 1.
  KITTENS_INLINE static uint32_t first_bits(uint32_t bytes) { return (bytes * 0x01020408u) >> 24 & 0xF; }

  template <int Keys, class B>
  KITTENS_INLINE void add_bias(kittens::register_tile<real, Keys>& scores, const B* bias, score_place at) const {
    const B* from = bias + modifier_offset(given.bias_stride, at.batch, at.head, 0, at.key);
    const auto row_from = [&](int row) { return from + row_of(at.row + row) * given.bias_stride[2]; };
    const bool pairs = given.bias_stride[3] == 1 && given.bias_stride[2] % 2 == 0 && reinterpret_cast<uintptr_t>(from) % (2 * sizeof(B)) == 0;
    if (pairs && at.key + Keys <= keys)
      map_pairs(scores, [&](int row, int key, real& x, real& y) {
        real left, right;
        kittens::widen_pair(row_from(row) + key, left, right);
        x += in_base_two(left);
        y += in_base_two(right);
      });
    else
      add_from(scores, row_from, given.bias_stride[3], keys - at.key, [](real x) { return in_base_two(x); });
  }

  // The most negative finite number does not hide a key, so it must not become -infinity; -infinity does, and NaN stays NaN.
  KITTENS_INLINE static real in_base_two(real x) {
    constexpr real least = sizeof(real) == 8 ? real(least_bias_double) : real(least_bias_float);
    return (x < least && x > -kittens::infinity<real>() ? least : x) * log2_e;
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
