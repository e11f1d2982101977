// The logsumexp and delta of a step's query rows, which travel with its Q and dO, and how they enter
// P = exp2(scale_log2 S - logsumexp2) and dS = P (dP - delta).
//
// As vectors: threads load the values of their columns from shared memory, behind the products. As terms: a product of depth 16 begins S at
// -logsumexp2 / scale_log2 and dP at -delta, so that nothing is loaded there, where the products keep shared memory busy.
#pragma once
#include "backward_shapes.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C, bool terms> struct backward_row_values {
  using real = typename C::real;
  using tile = kittens::register_tile<real, C::block_q>;
  struct operands {};  // of a step's products: registers that are in use until they are done
  kittens::shared_vector<real, C::block_q> logsumexp2[C::stages], delta[C::stages];

  // Producer: what is of the rows from `at` on, with Q and dO.
  KITTENS_INLINE auto with_query(const backward_key_params<C>& p, int at) { return kittens::vector_rider(logsumexp2, p.logsumexp2 + at); }
  KITTENS_INLINE void load_gradient(auto& ring, const backward_key_params<C>& p, kittens::place where, int at) {
    ring.load(p.grad_output, where, kittens::vector_rider(delta, p.delta + at));
  }
  // One group of products: S.
  KITTENS_INLINE void multiply_key(tile& scores, operands&, auto key, const auto& query, int) const {
    kittens::mma_begin(scores);
    kittens::mma_ABt(scores, key, query, 0);
    kittens::mma_commit();
  }
  // One group: dP.
  KITTENS_INLINE void multiply_value(tile& weight_gradient, operands&, auto value, const auto& gradient, int) const {
    kittens::mma_begin(weight_gradient);
    kittens::mma_ABt(weight_gradient, value, gradient, 0);
    kittens::mma_commit();
  }
  // S to P.
  KITTENS_INLINE void weigh(tile& scores, int stage, real scale_log2) const {
    kittens::column_vector<real, C::block_q> of_columns;
    kittens::load_columns(of_columns, logsumexp2[stage]);
    kittens::exp2_columns(scores, of_columns, scale_log2);
  }
  // dP to dS = f(dP, P, delta).
  KITTENS_INLINE void differentiate(tile& weight_gradient, const tile& weights, int stage, auto f) const {
    kittens::column_vector<real, C::block_q> of_columns;
    kittens::load_columns(of_columns, delta[stage]);
    kittens::map_columns(weight_gradient, weights, of_columns, f);
  }
};

template <class C> struct backward_row_values<C, true> {
  using real = typename C::real;
  using tile = kittens::register_tile<real, C::block_q>;
  struct operands {
    kittens::minus_terms<0> logsumexp;
    kittens::minus_terms<1> delta;
  };
  kittens::shared_vector<kittens::term_pair, C::block_q> pairs[C::stages];

  KITTENS_INLINE auto with_query(const backward_key_params<C>& p, int at) { return kittens::vector_rider(pairs, p.terms + at); }
  KITTENS_INLINE void load_gradient(auto& ring, const backward_key_params<C>& p, kittens::place where, int) { ring.load(p.grad_output, where); }
  KITTENS_INLINE void multiply_key(tile& scores, operands& minus, auto key, const auto& query, int stage) const {
    kittens::fill(minus.logsumexp);
    kittens::mma_begin(scores, minus.logsumexp);
    kittens::mma_minus_columns(scores, minus.logsumexp, pairs[stage]);
    kittens::mma_ABt(scores, key, query, 1);
    kittens::mma_commit();
  }
  KITTENS_INLINE void multiply_value(tile& weight_gradient, operands& minus, auto value, const auto& gradient, int stage) const {
    kittens::fill(minus.delta);
    kittens::mma_begin(weight_gradient, minus.delta);
    kittens::mma_minus_columns(weight_gradient, minus.delta, pairs[stage]);
    kittens::mma_ABt(weight_gradient, value, gradient, 1);
    kittens::mma_commit();
  }
  KITTENS_INLINE void weigh(tile& scores, int, real scale_log2) const {
    kittens::map(scores, [=](real x) { return kittens::exp2(x * scale_log2); });
  }
  KITTENS_INLINE void differentiate(tile& weight_gradient, const tile& weights, int, auto f) const {
    kittens::map_with(weight_gradient, weights, [=](real x, real weight) { return f(x, weight, real(0)); });
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
