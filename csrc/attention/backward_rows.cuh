// Before and after the backward's main kernels: what each query row needs there, and dQ from the sums to its type.
#pragma once
#include "backward_shapes.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// delta = rowsum(dO * O) - the logsumexp's own gradient, and log2(e) * logsumexp. Rows past the end, and rows without a key, get +inf: their
// weights exp2(score - inf) are 0. One warpgroup for 64 rows; memory is read once.
// Folds: logsumexp / scale and delta as terms. An infinite logsumexp is 3e38 there: weights are 0 all the same. A delta that is NaN would reach the
// weights, since products take 0 times it: it counts as infinite, which dS is no better for.
template <class C> struct backward_prepare_params {
  using real = typename C::real;
  kittens::tile_map<typename backward_tiles<C>::value_rows> output, grad_output;
  const real *logsumexp, *grad_logsumexp;  // the gradient may be null
  real *logsumexp2, *delta;                // (batch, head, padded_q); null where all kernels fold
  int heads, length_q, padded_q;
  kittens::term_pair* terms;  // the same, folded; null where none does
  real per_scale;             // 1 / scale
};

template <class C> struct backward_prepare {
  using params = backward_prepare_params<C>;
  struct shared {
    typename backward_tiles<C>::value_rows output, gradient;
    kittens::barrier full;
  };
  static constexpr int warpgroups = 1;
  static constexpr bool starts_early = true;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using real = typename C::real;
    if (cta.elect()) s.full.init(1);
    cta.publish_barriers();
    cta.await_earlier_launches();
    const int tiles_per_head = p.padded_q / 64, rest = cta.index / tiles_per_head, row = (cta.index - rest * tiles_per_head) * 64;
    const int batch = rest / p.heads, head = rest - batch * p.heads, count = p.length_q - row;
    if (cta.elect()) {
      s.full.expect(2 * backward_tiles<C>::value_rows::bytes);
      copy(s.output, p.output, {row, head, batch}, s.full);
      copy(s.gradient, p.grad_output, {row, head, batch}, s.full);
    }
    const int64_t from = static_cast<int64_t>(rest) * p.length_q + row, to = static_cast<int64_t>(rest) * p.padded_q + row;
    row_vector<real> logsumexp, grad_logsumexp, delta;
    load_rows(logsumexp, p.logsumexp + from, count, -infinity<real>());
    if (p.grad_logsumexp)
      load_rows(grad_logsumexp, p.grad_logsumexp + from, count, real(0));
    else
      fill(grad_logsumexp, real(0));
    fill(delta, real(0));
    s.full.wait(0);
    row_dot(delta, rows_of(s.output, 0), rows_of(s.gradient, 0));
    row_sum_finish(delta);
    map(delta, delta, grad_logsumexp, [](real d, real g) { return d - g; });
    map(delta, delta, logsumexp, [](real d, real l) { return l == -infinity<real>() ? real(0) : d; });
    if constexpr (C::folds)
      if (p.terms) {
        constexpr real most = real(3e38);
        row_vector<real> folded_logsumexp, folded_delta;
        map(folded_logsumexp, logsumexp, [&](real l) {
          const real x = l * p.per_scale;
          return l == -infinity<real>() || x > most ? most : x < -most ? -most : x;
        });
        map(folded_delta, delta, [](real d) { return d == d ? d : infinity<real>(); });
        store_terms(p.terms + to, folded_logsumexp, folded_delta);
      }
    if (p.logsumexp2) {
      map(logsumexp, logsumexp, [](real l) { return l == -infinity<real>() ? infinity<real>() : l * real(1.4426950408889634); });
      store_rows(p.logsumexp2 + to, logsumexp, 64);
      store_rows(p.delta + to, delta, 64);
    }
  }
};

// dQ = scale * what the kernel that owns keys has summed. One warpgroup for each of its tiles.
template <class C> struct backward_finish_params {
  using real = typename C::real;
  kittens::tile_map<typename backward_tiles<C>::query_sum> grad_query;
  const real* query_sum;
  real scale;
  int heads, steps;
};

template <class C> struct backward_finish {
  using params = backward_finish_params<C>;
  struct shared {
    typename backward_tiles<C>::query_sum stage;
  };
  static constexpr int warpgroups = 1;
  static constexpr bool starts_early = true;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using real = typename C::real;
    const int part = cta.index & 1, step = cta.index / 2 % p.steps, rest = cta.index / 2 / p.steps;
    const int batch = rest / p.heads, head = rest - batch * p.heads;
    register_tile<real, C::query_sum_columns> sum;
    register_tile<typename C::element, C::query_sum_columns> rounded;
    cta.await_earlier_launches();
    take_from(sum, p.query_sum + static_cast<int64_t>(cta.index) * C::query_sum_tile);
    map(sum, [&](real x) { return x * p.scale; });
    convert(rounded, sum);
    store(rows_of(s.stage, 0), rounded);
    publish({first_free_barrier, 1});
    send(p.grad_query, rows_of(s.stage, 0),
         {step * C::block_q + (C::split_columns ? 0 : part * 64), head, batch, C::split_columns ? part * C::query_sum_columns : 0});
    store_wait_all();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
