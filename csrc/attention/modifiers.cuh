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
  kittens::odd_function<real> cap_score, cap_tanh;   // cap_log2 tanh(cap_scale x), tanh(cap_scale x)
  int rows, keys, first_key;                         // of the caller's keys, no row sees those before first_key under the interval
  bool bias_has_pairs, mask_has_vectors;

  static constexpr real log2_e = real(1.4426950408889634);

  score_rules() = default;
  score_rules(const score_modifiers& modifiers, const tile_classes& known, double scale, int length_q, int length_k, int first)
      : given(modifiers), classes(known), rows(length_q), keys(length_k), first_key(first) {
    scale_log2 = static_cast<real>(scale * 1.4426950408889634);
    cap_scale = modifiers.softcap != 0 ? static_cast<real>(scale / modifiers.softcap) : real(0);
    cap_log2 = static_cast<real>(modifiers.softcap * 1.4426950408889634);
    keep_scale = static_cast<real>(modifiers.keep_scale);
    cap_score = kittens::small_tanh<real>(modifiers.softcap * 1.4426950408889634, cap_scale);
    cap_tanh = kittens::small_tanh<real>(1, cap_scale);
    bias_has_pairs = modifiers.bias && !modifiers.bias_is_real && modifiers.bias_stride[3] == 1 &&
                     reinterpret_cast<uintptr_t>(modifiers.bias) % (2 * sizeof(Element)) == 0;
    for (int d = 0; d < 3; d++) bias_has_pairs = bias_has_pairs && modifiers.bias_stride[d] % 2 == 0;
    mask_has_vectors = modifiers.mask_has_vectors();
  }

  // Keys from here on are hidden in this batch.
  KITTENS_INLINE int end_key(int batch) const {
    if (!given.key_lengths) return keys;
    const int length = given.key_lengths[batch];
    return length < keys ? (length > 0 ? length : 0) : keys;
  }

  // Whether no row sees the key: what is there, NaN included, must not reach a product with the weights.
  KITTENS_INLINE bool key_is_unseen(int batch, int head, int key, int end) const {
    return key < keys && (key < first_key || key >= end || (classes.seen && !classes.key_is_seen(batch, head, key)));
  }
  // Whether some of the caller's keys first <= key < last lie where no row sees them, whatever the mask.
  KITTENS_INLINE bool lies_beyond(int first, int last, int end) const { return first < first_key || (last < keys ? last : keys) > end; }

  KITTENS_INLINE real steep(int batch, int head) const {
    if (!given.alibi_slopes) return real(0);
    return static_cast<const real*>(given.alibi_slopes)[batch * given.alibi_stride[0] + head * given.alibi_stride[1]] * log2_e;
  }

  // Whether a soft cap is all that makes the scores of such a block something else, and nothing is dropped.
  KITTENS_INLINE bool only_capped() const { return cap_log2 != real(0) && !given.bias && !given.alibi_slopes && !given.dropout_state; }

  // Whether the scores of a block of which every row sees all keys are scale q.k alone.
  KITTENS_INLINE bool scores_are_plain() const { return cap_log2 == real(0) && !given.bias && !given.alibi_slopes; }

  // The bias of a place comes as pairs of its own type: all of the keys exist, two neighbours lie where both together are aligned.
  template <int Keys> KITTENS_INLINE bool bias_in_pairs(score_place at) const { return bias_has_pairs && at.key + Keys <= keys; }
  // Pairs of the bias to registers, where it has them.
  template <int Keys> KITTENS_INLINE void load_bias(kittens::register_tile<Element, Keys>& bias, score_place at) const {
    if (bias_in_pairs<Keys>(at)) load_pairs(bias, bias_rows(static_cast<const Element*>(given.bias), at));
  }

  // The scores become those of the softmax, in base 2 but for the factor that is returned, masks aside. Caps: there may be a soft cap. Loads: pairs of
  // the bias are what load_bias has brought.
  template <bool Caps, bool Loads, int Keys>
  KITTENS_INLINE real modify(kittens::register_tile<real, Keys>& scores, const kittens::register_tile<Element, Keys>& bias, score_place at) const {
    real factor = scale_log2;
    if constexpr (Caps)
      if (cap_log2 != real(0)) {
        cap(scores);
        factor = cap_log2;
      }
    if (given.bias) {
      const auto add = [=](real x, real b) { return x * factor + in_base_two(b); };
      const Element* same_type = static_cast<const Element*>(given.bias);
      if (!bias_in_pairs<Keys>(at)) {
        if (given.bias_is_real)
          map_with_elements(scores, bias_rows(static_cast<const real*>(given.bias), at), given.bias_stride[3], keys - at.key, add);
        else
          map_with_elements(scores, bias_rows(same_type, at), given.bias_stride[3], keys - at.key, add);
      } else if constexpr (Loads) {
        map_with(scores, bias, add);
      } else {
        map_with_pairs(scores, bias_rows(same_type, at), add);
      }
      factor = real(1);
    }
    if (given.alibi_slopes) {
      const real slope = steep(at.batch, at.head);
      const int diagonal = at.row + given.diagonal - at.key;
      map_pairs(scores, [&](int row, int key, real& x, real& y) {
        const int distance = row + diagonal - key;
        x = x * factor - slope * static_cast<real>(distance < 0 ? -distance : distance);
        y = y * factor - slope * static_cast<real>(distance < 1 ? 1 - distance : distance - 1);
      });
      factor = real(1);
    }
    if (given.bias) map(scores, [](real x) { return raise_masked(x); });
    return factor;
  }
  // Scores become tanh(scale / c scores).
  template <int Keys> KITTENS_INLINE void cap(kittens::register_tile<real, Keys>& scores) const {
    if (!map_odd(scores, cap_tanh)) map(scores, [&](real x) { return kittens::tanh(x * cap_scale); });
  }

  // What the mask hides becomes -infinity.
  template <int Keys> KITTENS_INLINE void hide(kittens::register_tile<real, Keys>& scores, score_place at) const {
    const unsigned char* mask = given.mask + modifier_offset(given.mask_stride, at.batch, at.head, 0, 0);
    keep_where(scores, [&](int row, int key) {
      const unsigned char* from = mask + row_of(at.row + row) * given.mask_stride[2];
      return mask_bits<32>(from, at.key + key);
    }, -kittens::infinity<real>());
  }

  // The mask's bytes for one (batch, head) and a key, by row.
  KITTENS_INLINE auto mask_rows(score_place at) const {
    const unsigned char* from = given.mask + modifier_offset(given.mask_stride, at.batch, at.head, 0, at.key);
    return [this, from, first = at.row](int row) { return from + row_of(first + row) * given.mask_stride[2]; };
  }

  // A bit for each of Count keys from `first` on, set where a row of the mask shows it: all that the row has lies at `row`.
  template <int Count> KITTENS_INLINE uint32_t mask_bits(const unsigned char* row, int first) const {
    uint32_t bits = 0;
    if (given.mask_stride[3] == 1 && first + Count <= keys && reinterpret_cast<uintptr_t>(row + first) % 16 == 0) {
      uint32_t words[Count / 4];
      kittens::load_words(words, row + first);
      KITTENS_UNROLL for (int i = 0; i < Count / 4; i++) bits |= kittens::bits_of_bytes(words[i]) << (4 * i);
    } else {
      KITTENS_NO_UNROLL for (int from = 0; from < Count; from += 4)  // four loads in flight together: eight spill
        KITTENS_UNROLL for (int i = from; i < from + 4; i++)
          bits |= static_cast<uint32_t>(row[key_of(first + i) * given.mask_stride[3]] != 0) << i;
    }
    return bits;
  }

  // Rows and keys of a tile beyond the tensor's: any value does.
  KITTENS_INLINE int64_t row_of(int row) const { return row < rows ? row : rows - 1; }
  KITTENS_INLINE int64_t key_of(int key) const { return key < keys ? key : keys - 1; }

  // What dropout says in one (batch, head), or nothing of interest without it.
  KITTENS_INLINE dropout_rule dropout(int batch, int head, int heads) const {
    const int64_t* state = given.dropout_state;
    const uint64_t seed = state ? static_cast<uint64_t>(state[0]) : 0, offset = state ? static_cast<uint64_t>(state[1]) : 0;
    const auto word = [](uint64_t x) { return static_cast<uint32_t>(kittens::uniform(static_cast<int>(x))); };
    return {word(seed), word(seed >> 32), word(offset), word(batch * heads + head), given.dropout_threshold};
  }
  // Weights that dropout does not keep become zero.
  template <int Keys> KITTENS_INLINE void drop(kittens::register_tile<Element, Keys>& weights, const dropout_rule& rule, score_place at) const {
    keep_drawn(weights, [&](int row, int key) { return rule.draw(at.row + row, at.key + key); },
               [&](uint32_t pair) { return dropout_verdict(pair, rule.complement); });
  }

 private:
  // Where the rows of a place lie in the bias.
  template <class B> KITTENS_INLINE auto bias_rows(const B* bias, score_place at) const {
    const B* from = bias + modifier_offset(given.bias_stride, at.batch, at.head, 0, at.key);
    return [this, from, first = at.row](int row) { return from + row_of(first + row) * given.bias_stride[2]; };
  }

  // The most negative finite number does not hide a key, so it must not become -infinity; -infinity does, and NaN stays NaN.
  KITTENS_INLINE static real in_base_two(real x) {
    constexpr real least = sizeof(real) == 8 ? real(least_bias_double) : real(least_bias_float);
    return (x < least && x > -kittens::infinity<real>() ? least : x) * log2_e;
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
