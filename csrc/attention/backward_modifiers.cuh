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

// What `weigh` makes of the soft cap's derivative 1 - tanh^2: nothing, a factor of the weights, or a tile of its own.
struct no_slope {};
struct slope_in_weights {};

// dS of a signed weight. A hidden NaN times a weight of 0 is NaN, so a weight of 0 gives 0.
template <class Real> struct backward_modified_gradient {
  Real keep_scale;
  KITTENS_INLINE Real operator()(Real grad_weight, Real weight, Real delta) const {
    return weight == Real(0) ? Real(0) : weight < Real(0) ? weight * delta : weight * (grad_weight * keep_scale - delta);
  }
};

// What a signed weight multiplies the values by.
template <class Real> struct backward_kept_weight {
  Real keep_scale;
  KITTENS_INLINE Real operator()(Real weight) const { return weight < Real(0) ? Real(0) : weight * keep_scale; }
};

// The draw of four elements: rows are keys, columns are queries.
struct backward_draw {
  uint32_t word[2], threshold;
  KITTENS_HOST_DEVICE bool kept(int keys, int queries) const { return (word[queries] >> (16 * keys) & 0xFFFFu) >= threshold; }
};

// A tile of scores: 64 query rows x N keys, or transposed, 64 keys x N query rows.
template <class T, bool transposed> struct backward_scores {
  using real = kittens::accumulator<T>;
  const score_rules<T>& rules;
  const interval_mask& mask;
  int heads;
  int batch, head, row, key;  // row and key: the tile's first

  template <class Problem>
  KITTENS_INLINE backward_scores(const Problem& p, int batch, int head, int row, int key)
      : rules(p.rules), mask(p.mask), heads(p.heads), batch(batch), head(head), row(row), key(key) {}

  // Products to signed weights. exponentiate(factor) makes scores = exp2(factor * scores - logsumexp2); a tile `slope` becomes the soft cap's
  // derivative, and stays as it is without one.
  template <int N, class Slope, class Exponentiate>
  KITTENS_INLINE void weigh(kittens::register_tile<real, N>& scores, Slope& slope, Exponentiate exponentiate) const {
    real factor = rules.scale_log2;
    if (rules.cap_log2 != real(0)) {
      cap(scores);
      factor = rules.cap_log2;
      if constexpr (std::is_same_v<Slope, slope_in_weights>) {  // as an addend of the scores: no tile is needed beside them
        kittens::map(scores, [factor](real t) { return t * factor + kittens::log(real(1) - t * t) * log2e; });
        factor = real(1);
      } else if constexpr (!std::is_same_v<Slope, no_slope>) {
        kittens::map_into(slope, scores, [](real t) { return real(1) - t * t; });
      }
    }
    if (rules.given.bias) {
      if (std::is_same_v<T, real> || rules.given.bias_is_real)
        add_bias(scores, static_cast<const real*>(rules.given.bias), factor);
      else
        add_bias(scores, static_cast<const T*>(rules.given.bias), factor);
      factor = real(1);
    }
    if (rules.given.alibi_slopes) {
      add_distances(scores, factor);
      factor = real(1);
    }
    if (rules.given.bias) kittens::map(scores, [](real x) { return raise_masked(x); });
    exponentiate(factor);
    // A weight is at most 1. That of a score so large that the logsumexp has lost its last digits may come out as infinite.
    if (rules.given.bias) kittens::map(scores, [](real x) { return x > real(1) ? real(1) : x; });
    hide(scores);
    if (rules.given.dropout_state) drop(scores);
  }

  // On from the scores to the products.
  template <int N> KITTENS_INLINE void differentiate_cap(kittens::register_tile<real, N>& weights, const kittens::register_tile<T, N>& slope) const {
    if (rules.cap_log2 != real(0)) kittens::map_with(weights, slope, [](real x, real d) { return x == real(0) ? x : x * d; });
  }

 private:
  static constexpr real log2e = real(1.4426950408889634);

  // The tile's columns that exist: the others are hidden whatever their scores.
  KITTENS_INLINE int columns() const { return kittens::uniform(transposed ? rules.rows - row : rules.keys - key); }

  // x = f(row, key, x)
  template <int N, class F> KITTENS_INLINE void each(kittens::register_tile<real, N>& t, F f) const {
    kittens::map_below(t, columns(), [=](int r, int c, real x) { return transposed ? f(c, r, x) : f(r, c, x); });
  }

  template <int N> KITTENS_LONG void cap(kittens::register_tile<real, N>& scores) const {
    kittens::map(scores, [in = rules.cap_scale](real x) { return kittens::tanh(x * in); });
  }

  template <int N, class Bias> KITTENS_LONG void add_bias(kittens::register_tile<real, N>& scores, const Bias* bias, real factor) const {
    const score_modifiers& m = rules.given;
    const Bias* at = bias + modifier_offset(m.bias_stride, batch, head, row, key);
    const int row_stride = static_cast<int>(m.bias_stride[2]), key_stride = static_cast<int>(m.bias_stride[3]);
    const int rows = rules.rows - row, keys = rules.keys - key;
    constexpr real least = sizeof(real) == 8 ? real(least_bias_double) : real(least_bias_float);
    each(scores, [=](int i, int j, real x) {
      const real b = i < rows && j < keys ? kittens::widen(at[int64_t(i) * row_stride + int64_t(j) * key_stride]) : real(0);
      if (b == -kittens::infinity<real>()) return b;  // it hides what x is, NaN included
      return x * factor + log2e * (b < least ? least : b);
    });
  }

  template <int N> KITTENS_LONG void add_distances(kittens::register_tile<real, N>& scores, real factor) const {
    const score_modifiers& m = rules.given;
    const real steep = static_cast<const real*>(m.alibi_slopes)[batch * m.alibi_stride[0] + head * m.alibi_stride[1]] * log2e;
    each(scores, [=, apart = m.diagonal + row - key](int i, int j, real x) {
      const int distance = apart + i - j;
      return x * factor - steep * static_cast<real>(distance < 0 ? -distance : distance);
    });
  }

  template <int N> KITTENS_LONG void hide(kittens::register_tile<real, N>& weights) const {
    const score_modifiers& m = rules.given;
    constexpr int tile_rows = transposed ? N : 64, tile_keys = transposed ? 64 : N;
    const int rows = rules.rows - row, keys = rules.end_key(batch) - key;
    if (rows < tile_rows || keys < tile_keys || key + tile_keys > mask.end_key(row) || key < mask.first_key(row + tile_rows - 1)) {
      const backward_visible visible(mask, key, row);
      kittens::zero_unless(weights, [=](int r, int c) {
        const int i = transposed ? c : r, j = transposed ? r : c;
        return i < rows && j < keys && visible(j, i);
      });
    }
    if (m.mask) {
      const unsigned char* at = m.mask + modifier_offset(m.mask_stride, batch, head, row, key);
      const int row_stride = static_cast<int>(m.mask_stride[2]), key_stride = static_cast<int>(m.mask_stride[3]);
      kittens::zero_unless_below(weights, columns(), [=](int r, int c) {
        const int i = transposed ? c : r, j = transposed ? r : c;
        return i < rows && j < keys && at[int64_t(i) * row_stride + int64_t(j) * key_stride] != 0;
      });
    }
  }

  template <int N> KITTENS_LONG void drop(kittens::register_tile<real, N>& weights) const {
    const score_modifiers& m = rules.given;
    const dropout_rule rule{static_cast<uint64_t>(m.dropout_state[0]), static_cast<uint32_t>(m.dropout_state[1]),
                            static_cast<uint32_t>(batch * heads + head), m.dropout_threshold};
    const auto sign = [](real x, const auto& draw, int a, int b) { return draw.kept(a, b) ? x : -x; };
    if constexpr (transposed)
      kittens::map_fours(
          weights, columns(),
          [&](int r, int c) {
            const int column = key + r;
            const philox_words bits = rule.draw(row + c, column).bits;
            const bool upper = column / 16 % 2;
            return backward_draw{{upper ? bits.word[1] : bits.word[0], upper ? bits.word[3] : bits.word[2]}, rule.threshold};
          },
          sign);
    else
      kittens::map_eights(weights, columns(), [&](int r, int c) { return rule.draw(row + r, key + c); }, sign);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
