// The bias's gradient by its owner: a CTA owns 128 query rows x block_n keys of it, and walks all that the bias is broadcast over (batches, heads,
// blocks of rows, blocks of keys) in a fixed order. So it needs no memory beside its result, and the result is the same at every run.
//
//   S = Q K^T   dP = dO V^T   dbias += P (z dP - delta)
//
// Barriers: full/empty mbarriers per stage of the Q, dO, K and V rings; named barrier `both`: of the two consumer warpgroups.
#pragma once
#include "backward_modifiers.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// Of each dimension either `tiles` or `steps` is 1: what is broadcast is walked, what is not has tiles of its own.
template <class C> struct backward_bias_params : backward_problem<C>, travelling_bias<typename backward_tiles<C>::query_bias, true> {
  using shapes = backward_tiles<C>;
  kittens::tile_map<typename shapes::owned_query> query;
  kittens::tile_map<typename shapes::owned_gradient> grad_output;
  kittens::tile_map<typename shapes::key_block> key;
  kittens::tile_map<typename shapes::value_block> value;
  void* grad_bias;
  int64_t stride[4];  // 0 where it is broadcast
  int tiles_of[4], steps_of[4];
  int steps;  // of a tile
};

template <class C> struct backward_bias_step {
  int batch, head, row, key;

  KITTENS_INLINE backward_bias_step(const backward_bias_params<C>& p, int tile, int step) {
    key = (take(tile, p.tiles_of[3]) + take(step, p.steps_of[3])) * C::block_n;
    row = (take(tile, p.tiles_of[2]) + take(step, p.steps_of[2])) * C::block_m;
    head = take(tile, p.tiles_of[1]) + take(step, p.steps_of[1]);
    batch = tile + step;
  }
  // Whether any of its rows sees any of its keys.
  KITTENS_INLINE bool visited(const backward_bias_params<C>& p) const {
    const int beyond = row + C::block_m, last_row = (beyond < p.length_q ? beyond : p.length_q) - 1;
    return key < p.keys_of(batch) && key < p.mask.end_key(last_row) && key + C::block_n > p.mask.first_key(row) &&
           ((backward_classes<C>(p, batch, head, row, key) | backward_classes<C>(p, batch, head, row + class_tile, key)) & tile_shows);
  }

 private:
  static KITTENS_INLINE int take(int& n, int count) {
    const int quotient = n / count, rest = n - quotient * count;
    n = quotient;
    return rest;
  }
};

template <class C> struct backward_bias_shared {
  using shapes = backward_tiles<C>;
  typename shapes::owned_query query[C::bias_stages];
  typename shapes::owned_gradient gradient[C::bias_stages];
  typename shapes::key_block key[C::bias_stages];
  typename shapes::value_block value[C::bias_stages];
  typename shapes::query_bias bias[C::bias_stages];
  kittens::shared_vector<typename C::real, C::block_n> columns[2];
  kittens::ring_flags<C::bias_stages, true> query_flags;
  kittens::ring_flags<C::bias_stages> gradient_flags, key_flags, value_flags;
};

template <class C> struct backward_bias_kernel {
  using params = backward_bias_params<C>;
  using shared = backward_bias_shared<C>;
  static constexpr int consumers = C::block_m / 64, warpgroups = consumers + 1;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using real = typename C::real;
    constexpr named_barrier both{first_free_barrier, consumers};
    if (cta.warpgroup == 0 && cta.elect()) {
      s.query_flags.init(consumers);
      s.gradient_flags.init(consumers);
      s.key_flags.init(consumers);
      s.value_flags.init(consumers);
    }
    cta.publish_barriers();

    if (cta.warpgroup == 0) {
      cta.template give_registers<C::producer_registers>();
      if (!cta.elect()) return;
      producer query(s.query, s.query_flags);
      producer gradient(s.gradient, s.gradient_flags);
      producer key(s.key, s.key_flags);
      producer value(s.value, s.value_flags);
      for (int tile = cta.index; tile < p.tiles; tile += cta.count)
        KITTENS_NO_UNROLL for (int n = 0; n < p.steps; n++) {
          const backward_bias_step<C> at(p, tile, n);
          if (!at.visited(p)) continue;
          gradient.follow(query);
          key.follow(query);
          value.follow(query);
          query.load(p.query, {at.row, at.head, at.batch}, tile_rider(s.bias, p.bias, p.bias_at(at.row, at.key, at.head, at.batch), p.bias_travels));
          key.load(p.key, {at.key, at.head / p.group, at.batch});
          gradient.load(p.grad_output, {at.row, at.head, at.batch});
          value.load(p.value, {at.key, at.head / p.group, at.batch});
        }
      return;
    }

    cta.template take_registers<C::consumer_registers>();
    const int wg = cta.warpgroup - 1;
    consumer query(s.query, s.query_flags);
    consumer gradient(s.gradient, s.gradient_flags);
    consumer key(s.key, s.key_flags);
    consumer value(s.value, s.value_flags);
    register_tile<real, C::block_n> scores, score_gradient, bias_gradient;
    row_vector<real> logsumexp2, delta;

    for (int tile = cta.index; tile < p.tiles; tile += cta.count) {
      fill(bias_gradient, real(0));
      KITTENS_NO_UNROLL for (int n = 0; n < p.steps; n++) {
        const backward_bias_step<C> at(p, tile, n);
        if (!at.visited(p)) continue;
        const int row = at.row + wg * 64;
        const int64_t vectors = (static_cast<int64_t>(at.batch) * p.heads + at.head) * p.padded_q + row;
        load_rows(logsumexp2, p.logsumexp2 + vectors, p.length_q - row, infinity<real>());
        load_rows(delta, p.delta + vectors, p.length_q - row, real(0));
        gradient.follow(query);
        key.follow(query);
        value.follow(query);
        auto& q = query.wait();
        auto& k = key.wait();
        auto& g = gradient.wait();
        auto& v = value.wait();
        mma_begin(scores, score_gradient);
        mma_ABt(scores, rows_of(q, wg * 64), k, 0);
        mma_ABt(score_gradient, rows_of(g, wg * 64), v, 0);
        mma_commit();
        mma_wait<0>();
        mma_done(scores, score_gradient);
        key.release();
        gradient.release();
        value.release();
        no_slope none;
        const bool hidden = backward_classes<C>(p, at.batch, at.head, row, at.key) & tile_hides;
        backward_scores<typename C::element, false, C::row.takes_softcap>(p, at.batch, at.head)
            .weigh(scores, none, row, at.key, hidden, rows_of(s.bias[query.last()], wg * 64),
                   [&](real factor) { exp2_rows(scores, logsumexp2, factor); });
        query.release();
        map_rows(score_gradient, scores, delta, backward_modified_gradient<real>{p.rules.keep_scale});
        map_rows(bias_gradient, score_gradient, delta, [](real sum, real x, real) { return sum + x; });
      }

      const bool one_row = p.stride[2] == 0, one_key = p.stride[3] == 0;
      if (one_row) {  // every row of the tile becomes the sum of all rows
        sum_columns(s.columns[wg], bias_gradient);
        both.sync();
        column_vector<real, C::block_n> sums[2];
        for (int i = 0; i < 2; i++) load_columns(sums[i], s.columns[i]);
        map_columns(bias_gradient, sums[0], [](real, real x) { return x; });
        map_columns(bias_gradient, sums[1], [](real sum, real x) { return sum + x; });
        both.sync();
      }
      if (one_key) {
        row_vector<real> sum;
        fill(sum, real(0));
        row_sum(sum, bias_gradient);
        row_sum_finish(sum);
        map_rows(bias_gradient, sum, [](real, real x) { return x; });
      }
      const backward_bias_step<C> at(p, tile, 0);
      const int64_t from = at.batch * p.stride[0] + at.head * p.stride[1] + int64_t(at.row + wg * 64) * p.stride[2] + at.key * p.stride[3];
      const int rows = one_row ? 1 - wg : p.length_q - at.row - wg * 64, keys = one_key ? 1 : p.mask.length_k - at.key;
      const auto write = [&](auto* to) {
        map(bias_gradient, [&](int r, int c, real x) {
          if (r < rows && c < keys) put(to + from + r * p.stride[2] + c * p.stride[3], x);
          return x;
        });
      };
      if (std::is_same_v<typename C::element, real> || p.rules.given.bias_is_real)
        write(static_cast<real*>(p.grad_bias));
      else
        write(static_cast<typename C::element*>(p.grad_bias));
    }
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
