// What the modified class does to a tile of scores in the backward (modifiers.h has the formulas).
//
// One tile then holds all that the score gradients need: of each element the weight P, times the soft cap's derivative where the gradient goes on
// to the product q.k, and with a minus sign where dropout has dropped it:
//   dV += (z P)^T dO,  dS = P (z dP - delta),   z = keep_scale, or 0 where dropped
#pragma once
#include "backward_shapes.cuh"
#include "dropout.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// What the producer tells with a step, in the modified class.
struct backward_note {
  static constexpr unsigned is_last = 4;
  int head, block;
  unsigned flags;  // bit w: the mask may hide some of the pairs that consumer w has

  KITTENS_INLINE bool hides(int consumer) const { return flags >> consumer & 1; }
  KITTENS_INLINE bool hides_any() const { return flags & 3; }
  KITTENS_INLINE bool last() const { return flags & is_last; }  // of its tile
};
// Mask alone: also how far its sums lie behind those of the step that is visited before it; of the first, behind a step before the first.
struct backward_mask_note : backward_note {
  int jump;
  KITTENS_INLINE backward_mask_note() {}
  KITTENS_INLINE backward_mask_note(int head, int block, unsigned flags, int jump) : backward_note{head, block, flags}, jump(jump) {}
};
template <class C> using backward_note_of = std::conditional_t<C::mask_alone, backward_mask_note, backward_note>;
template <class Note, int Stages> struct backward_notes {
  Note note[Stages];
};

// What `weigh` makes of the soft cap's derivative 1 - tanh^2: nothing, a factor of the weights, or a tile of its own.
struct no_slope {};
struct slope_in_weights {};

// dS of a signed weight. A hidden NaN times a weight of 0 is NaN, so a weight of 0 gives 0.
template <class Real> struct backward_modified_gradient {
  Real keep_scale;
  KITTENS_INLINE Real operator()(Real grad_weight, Real weight, Real delta) const {
    const Real kept = weight < Real(0) ? Real(0) : keep_scale, gradient = (weight < Real(0) ? -weight : weight) * (grad_weight * kept - delta);
    return weight == Real(0) ? Real(0) : gradient;  // written so that the compiler selects: branches for each element took a third of the time
  }
};

// What a signed weight multiplies the values by.
template <class Real> struct backward_kept_weight {
  Real keep_scale;
  KITTENS_INLINE Real operator()(Real weight) const { return weight < Real(0) ? Real(0) : weight * keep_scale; }
};

// Tiles of scores of one (batch, head): 64 query rows x N keys, or transposed, 64 keys x N query rows.
// capped: a soft cap is allowed for.
template <class T, bool transposed, bool capped> struct backward_scores {
  using real = kittens::accumulator<T>;
  const score_rules<T>& rules;
  const interval_mask& mask;
  int batch, head;
  int end_key;  // keys from here on are hidden
  real steep;   // of ALiBi, in base 2
  int heads;    // of a batch
  bool bias_travels;

  template <class Problem>
  KITTENS_INLINE backward_scores(const Problem& p, int batch, int head)
      : rules(p.rules), mask(p.mask), batch(batch), head(head), end_key(p.rules.end_key(batch)), steep(p.rules.steep(batch, head)),
        heads(p.heads), bias_travels(p.bias_travels) {}

  // Products to signed weights. exponentiate(factor) makes scores = exp2(factor * scores - logsumexp2); a tile `slope` becomes the soft cap's
  // derivative, and stays as it is without one. row and key: the tile's first; masked: whether the bool mask may hide some of it; bias: the bias
  // that travels, where it is.
  template <int N, class Slope, class Bias, class Exponentiate>
  KITTENS_INLINE void weigh(kittens::register_tile<real, N>& scores, Slope& slope, int row, int key, bool masked, Bias bias,
                            Exponentiate exponentiate) const {
    real factor = rules.scale_log2;
    if (capped && rules.cap_log2 != real(0)) {
      rules.cap(scores);
      factor = rules.cap_log2;
      if constexpr (std::is_same_v<Slope, slope_in_weights>) {  // as an addend of the scores: no tile is needed beside them
        kittens::map(scores, [factor](real t) { return t * factor + kittens::log(real(1) - t * t) * log2e; });
        factor = real(1);
      } else if constexpr (!std::is_same_v<Slope, no_slope>) {
        kittens::map_into(slope, scores, [](real t) { return real(1) - t * t; });
      }
    }
    if (rules.given.bias) {
      if (bias_travels)
        add_travelling(scores, bias, factor);
      else if (std::is_same_v<T, real> || rules.given.bias_is_real)
        add_bias(scores, static_cast<const real*>(rules.given.bias), row, key, factor);
      else
        add_bias(scores, static_cast<const T*>(rules.given.bias), row, key, factor);
      factor = real(1);
    }
    if (rules.given.alibi_slopes) {
      add_distances(scores, row, key, factor);
      factor = real(1);
    }
    if (rules.given.bias) kittens::map(scores, [](real x) { return raise_masked(x); });
    exponentiate(factor);
    // A weight is at most 1. That of a score so large that the logsumexp has lost its last digits may come out as infinite.
    if (rules.given.bias) kittens::map(scores, [](real x) { return x > real(1) ? real(1) : x; });
    hide_outside(scores, row, key);
    if (masked) hide(scores, row, key);
    if (rules.given.dropout_state) drop(scores, row, key);
  }

  // On from the scores to the products.
  template <int N> KITTENS_INLINE void differentiate_cap(kittens::register_tile<real, N>& weights, const kittens::register_tile<T, N>& slope) const {
    if (capped && rules.cap_log2 != real(0)) kittens::map_with(weights, slope, [](real x, real d) { return x == real(0) ? x : x * d; });
  }

 private:
  static constexpr real log2e = real(1.4426950408889634);

  // The tile's columns that exist: the others are hidden whatever their scores.
  KITTENS_INLINE int columns(int row, int key) const { return kittens::uniform(transposed ? rules.rows - row : rules.keys - key); }

  // x = f(row, key, x)
  template <int N, class F> KITTENS_INLINE void each(kittens::register_tile<real, N>& t, int columns, F f) const {
    kittens::map_below(t, columns, [=](int r, int c, real x) { return transposed ? f(c, r, x) : f(r, c, x); });
  }

  // Rows and keys beyond the tensor's read its last: any value does, and loads that depend on nothing are in flight together (with a branch for each
  // a step took 14000 clocks, most of them waits).
  template <int N, class Bias> KITTENS_LONG void add_bias(kittens::register_tile<real, N>& scores, const Bias* bias, int row, int key, real factor) const {
    const score_modifiers& m = rules.given;
    const Bias* at = bias + modifier_offset(m.bias_stride, batch, head, row, key);
    const int row_stride = static_cast<int>(m.bias_stride[2]), key_stride = static_cast<int>(m.bias_stride[3]);
    const int last_row = rules.rows - 1 - row, last_key = rules.keys - 1 - key;
    each(scores, columns(row, key), [=](int i, int j, real x) {
      const int64_t element = int64_t(i < last_row ? i : last_row) * row_stride + int64_t(j < last_key ? j : last_key) * key_stride;
      return biased(x, factor, kittens::widen(at[element]));
    });
  }
  template <int N, class Bias> KITTENS_LONG void add_travelling(kittens::register_tile<real, N>& scores, Bias bias, real factor) const {
    kittens::register_tile<T, N> tile;
    if constexpr (transposed)
      load_transposed(tile, bias);
    else
      load(tile, bias);
    kittens::map_with(scores, tile, [=](real x, real b) { return biased(x, factor, b); });
  }
  static KITTENS_INLINE real biased(real x, real factor, real b) {
    constexpr real least = sizeof(real) == 8 ? real(least_bias_double) : real(least_bias_float);
    const real sum = x * factor + log2e * (b < least ? least : b);
    return b == -kittens::infinity<real>() ? b : sum;  // it hides what x is, NaN included
  }

  template <int N> KITTENS_LONG void add_distances(kittens::register_tile<real, N>& scores, int row, int key, real factor) const {
    each(scores, columns(row, key), [=, steep = steep, apart = rules.given.diagonal + row - key](int i, int j, real x) {
      const int distance = apart + i - j;
      return x * factor - steep * static_cast<real>(distance < 0 ? -distance : distance);
    });
  }

  // What the interval, the key length and the tensor's end hide.
  template <int N> KITTENS_LONG void hide_outside(kittens::register_tile<real, N>& weights, int row, int key) const {
    constexpr int tile_rows = transposed ? N : 64, tile_keys = transposed ? 64 : N;
    const int rows = rules.rows - row, keys = end_key - key;
    if (rows < tile_rows || keys < tile_keys || key + tile_keys > mask.end_key(row) || key < mask.first_key(row + tile_rows - 1)) {
      const backward_visible visible(mask, key, row);
      kittens::zero_unless(weights, [=](int r, int c) {
        const int i = transposed ? c : r, j = transposed ? r : c;
        return i < rows && j < keys && visible(j, i);
      });
    }
  }

  template <int N> KITTENS_LONG void hide(kittens::register_tile<real, N>& weights, int row, int key) const {
    const unsigned char* mask = rules.given.mask + modifier_offset(rules.given.mask_stride, batch, head, 0, 0);
    const auto from = [&](int i) { return mask + rules.row_of(row + i) * rules.given.mask_stride[2]; };
    if constexpr (transposed)
      kittens::keep_where_transposed(weights, [&](int i, int j) { return rules.template mask_bits<16>(from(i), key + j); }, real(0));
    else
      kittens::keep_where(weights, [&](int i, int j) { return rules.template mask_bits<32>(from(i), key + j); }, real(0));
  }

  template <int N> KITTENS_LONG void drop(kittens::register_tile<real, N>& weights, int row, int key) const {
    const dropout_rule drawn = rules.dropout(batch, head, heads);
    const auto verdict = [&](uint32_t pair) { return dropout_verdict(pair, drawn.complement); };
    const auto draw = [&](int r, int c) { return drawn.draw(row + r, key + c); };
    if constexpr (transposed)
      kittens::negate_undrawn_transposed(weights, columns(row, key), draw, verdict);
    else
      kittens::negate_undrawn(weights, columns(row, key), draw, verdict);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
