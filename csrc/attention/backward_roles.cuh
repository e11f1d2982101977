// dK and dV where both gradients of 64 keys do not fit one warpgroup's registers: a CTA owns 64 keys of one head, one warpgroup makes the weights
// and sums dV, the other makes the score gradients and sums dK. See backward_keys.cuh for the formulas.
//
//   warpgroup 1: dV += P^T(n-1) dO(n-1), S^T(n) = K Q(n)^T   as one group, then P^T(n), which the other one gets through shared memory
//   warpgroup 2: dK += dS^T(n-1) Q(n-1), dP^T(n) = V dO(n)^T as one group, then dS^T(n)
// Both do the same products, and one's elementwise part runs under the other's products. SumsQuery: dS^T(n) goes through shared memory too, and
// each of them adds half of the columns of dQ(n) to the sums in memory, after its elementwise part of step n + 1.
//
// Barriers: full/empty mbarriers per stage of the K, V, Q and dO rings; the mailbox; named barriers `weights_stored + b` and `weights_read + b`:
// P^T is in buffer b, and has been read from it; `gradients_stored + b` and `gradients_read + b`: the same of dS^T; `own`: of warpgroup 2 alone;
// `met`: both are done with K and V.
#pragma once
#include "backward_keys.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C, bool SumsQuery> struct backward_roles_shared {
  using shapes = backward_tiles<C>;
  typename shapes::key key[C::tile_stages];
  typename shapes::value value[C::tile_stages];
  typename shapes::query query[C::stages];
  typename shapes::gradient gradient[C::stages];
  kittens::shared_tile<typename C::element, 64, C::block_q> weights[2];
  kittens::optional_tile<backward_score_gradients<C>, SumsQuery> score_gradients;
  kittens::shared_vector<typename C::real, C::block_q> logsumexp2[C::stages], delta[C::stages];
  kittens::ring_flags<C::tile_stages> key_flags, value_flags;
  kittens::ring_flags<C::stages> query_flags, gradient_flags;
  kittens::mailbox<backward_key_work<C>> mail;
};

// The steps of a tile: the query blocks that see it, of each head of the group in turn.
template <class C> struct backward_step_walk {
  backward_key_blocks<C> blocks;
  int i, heads_left, head;

  KITTENS_INLINE backward_step_walk(const backward_key_params<C>& p, const backward_key_work<C>& w)
      : blocks(p, w), i(blocks.first), heads_left(blocks.end > blocks.first ? p.group : 0),
        head(kittens::uniform((w.batch * p.heads + w.head * p.group) * p.steps)) {}
  KITTENS_INLINE bool more() const { return heads_left > 0; }
  KITTENS_INLINE int step() const { return head + i; }  // among all steps of all heads
  KITTENS_INLINE bool masked() const { return i < blocks.plain_first || i >= blocks.plain_end; }
  KITTENS_INLINE void advance(int steps) {
    if (++i == blocks.end) {
      i = blocks.first;
      heads_left--;
      head += steps;
    }
  }
};

template <class C, bool SumsQuery> struct backward_roles_kernel {
  using params = backward_key_params<C>;
  using shared = backward_roles_shared<C, SumsQuery>;
  static constexpr int consumers = 2, warpgroups = consumers + 1;
  static constexpr int weights_stored = kittens::first_free_barrier, weights_read = weights_stored + 2;
  static constexpr int gradients_stored = weights_read + 2, gradients_read = gradients_stored + 2, own = gradients_read + 2, met = own + 1;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    if (cta.warpgroup == 0 && cta.elect()) {
      s.key_flags.init(consumers);
      s.value_flags.init(consumers);
      s.query_flags.init(consumers);
      s.gradient_flags.init(consumers);
      s.mail.init(consumers);
    }
    cta.publish_barriers();
    if (cta.warpgroup == 0) {
      cta.template give_registers<C::roles_producer_registers>();
      if (cta.elect()) backward_keys_producer<C, shared>::run(p, s, cta);
      return;
    }
    cta.template take_registers<C::roles_consumer_registers>();
    if (cta.warpgroup == 1)
      sum_values(p, s);
    else
      sum_keys(p, s);
    store_wait_all();
  }

 private:
  using T = typename C::element;
  using real = typename C::real;

  // Half of the columns of dQ of a step, from dS^T in a buffer and K.
  static KITTENS_KERNEL void sum_query(const params& p, shared& s, const typename shared::shapes::key& k, int part, int buffer, int step) {
    using namespace kittens;
    auto& ds = s.score_gradients.tile.tile[buffer];
    register_tile<real, C::query_sum_columns> query_gradient;
    mma_begin(query_gradient);
    mma_AtB(query_gradient, columns_of(ds, 0), columns_of(k, part * C::query_sum_columns), 0);
    mma_commit();
    mma_wait<0>();
    mma_done(query_gradient);
    add_to(p.query_sum + (static_cast<int64_t>(step) * 2 + part) * C::query_sum_tile, query_gradient);
  }

  static KITTENS_KERNEL void sum_values(const params& p, shared& s) {
    using namespace kittens;
    consumer key(s.key, s.key_flags);
    consumer value(s.value, s.value_flags);
    consumer query(s.query, s.query_flags);
    consumer gradient(s.gradient, s.gradient_flags);
    receiver mail(s.mail);
    register_tile<real, C::value_dim> value_gradient;
    register_tile<real, C::block_q> scores;
    register_tile<T, C::block_q> weights;
    int buffer = 0;
    if constexpr (SumsQuery)
      for (int b = 0; b < 2; b++) named_barrier{gradients_read + b, consumers}.arrive();  // both are free

    while (mail.wait().key >= 0) {
      const backward_key_work<C>& w = mail.current();
      value.follow(key);
      auto& k = key.wait();
      auto& v = value.wait();
      auto make_weights = [&](const backward_step_walk<C>& at) {  // of the query block that was waited for last
        exp2_columns(scores, s.logsumexp2[query.last()], p.scale_log2);
        query.release();
        if (at.masked()) {
          const backward_visible<C> visible(p.mask, w.key, at.i * C::block_q);
          zero_unless(scores, visible);
        }
        convert(weights, scores);
        named_barrier{weights_read + buffer, consumers}.sync();
        store(rows_of(s.weights[buffer], 0), weights);
        named_barrier{weights_stored + buffer, consumers}.arrive();
        buffer ^= 1;
      };

      auto sum_query_of = [&](int step, int from) {
        if constexpr (SumsQuery) {
          named_barrier{gradients_stored + from, consumers}.sync();
          sum_query(p, s, k, 0, from, step);
          named_barrier{gradients_read + from, consumers}.arrive();
        }
      };

      fill(value_gradient, real(0));
      backward_step_walk<C> at(p, w);
      if (at.more()) {
        auto& q = query.wait();
        mma_begin(scores);
        mma_ABt(scores, rows_of(k, 0), q, 0);
        mma_commit();
        mma_wait<0>();
        mma_done(scores);
        make_weights(at);
        int before = at.step();
        for (at.advance(p.steps); at.more(); at.advance(p.steps)) {
          auto& g = gradient.wait();
          auto& q = query.wait();
          mma_begin(value_gradient, weights, scores);
          mma_AB(value_gradient, weights, g, 1);
          mma_ABt(scores, rows_of(k, 0), q, 0);
          mma_commit();
          mma_wait<0>();
          mma_done(value_gradient, scores);
          gradient.release();
          make_weights(at);
          sum_query_of(before, buffer);  // the buffer before the one just filled
          before = at.step();
        }
        auto& g = gradient.wait();
        mma_begin(value_gradient, weights);
        mma_AB(value_gradient, weights, g, 1);
        mma_commit();
        mma_wait<0>();
        mma_done(value_gradient);
        gradient.release();
        sum_query_of(before, buffer ^ 1);
      }

      named_barrier{met, consumers}.sync();
      if (p.need_value) {
        register_tile<T, C::value_dim> rounded;
        convert(rounded, value_gradient);
        store_async(p.grad_value, rows_of(v, 0), rounded, {w.key, w.head, w.batch});
      }
      store_wait_read();
      key.release();
      value.release();
      mail.release();
    }
    for (int b = 0; b < 2; b++) named_barrier{weights_read + b, consumers}.sync();  // takes what was passed on
  }

  static KITTENS_KERNEL void sum_keys(const params& p, shared& s) {
    using namespace kittens;
    consumer key(s.key, s.key_flags);
    consumer value(s.value, s.value_flags);
    consumer query(s.query, s.query_flags);
    consumer gradient(s.gradient, s.gradient_flags);
    receiver mail(s.mail);
    register_tile<real, C::head_dim> key_gradient;
    register_tile<real, C::block_q> score_gradient, weights;
    register_tile<T, C::block_q> rounded_gradient;
    int buffer = 0;
    for (int b = 0; b < 2; b++) named_barrier{weights_read + b, consumers}.arrive();  // both are free

    while (mail.wait().key >= 0) {
      const backward_key_work<C>& w = mail.current();
      value.follow(key);
      auto& k = key.wait();
      auto& v = value.wait();
      auto make_gradients = [&](const backward_step_walk<C>& at) {  // of the block of dO that was waited for last
        named_barrier{weights_stored + buffer, consumers}.sync();
        load(weights, rows_of(s.weights[buffer], 0));
        named_barrier{weights_read + buffer, consumers}.arrive();
        const auto& delta = s.delta[gradient.last()];
        if (at.masked())
          map_columns(score_gradient, weights, delta, backward_score_gradient<real, true>{});
        else
          map_columns(score_gradient, weights, delta, backward_score_gradient<real, false>{});
        convert(rounded_gradient, score_gradient);
        gradient.release();
        if constexpr (SumsQuery) {
          named_barrier{gradients_read + buffer, consumers}.sync();
          store(rows_of(s.score_gradients.tile.tile[buffer], 0), rounded_gradient);
          publish({own, 1});
          named_barrier{gradients_stored + buffer, consumers}.arrive();
        }
        buffer ^= 1;
      };

      fill(key_gradient, real(0));
      backward_step_walk<C> at(p, w);
      if (at.more()) {
        auto& g = gradient.wait();
        mma_begin(score_gradient);
        mma_ABt(score_gradient, rows_of(v, 0), g, 0);
        mma_commit();
        mma_wait<0>();
        mma_done(score_gradient);
        make_gradients(at);
        int before = at.step();
        for (at.advance(p.steps); at.more(); at.advance(p.steps)) {
          auto& q = query.wait();
          auto& g = gradient.wait();
          mma_begin(key_gradient, rounded_gradient, score_gradient);
          mma_AB(key_gradient, rounded_gradient, q, 1);
          mma_ABt(score_gradient, rows_of(v, 0), g, 0);
          mma_commit();
          mma_wait<0>();
          mma_done(key_gradient, score_gradient);
          query.release();
          make_gradients(at);
          if constexpr (SumsQuery) sum_query(p, s, k, 1, buffer, before);  // the buffer before the one just filled
          before = at.step();
        }
        auto& q = query.wait();
        mma_begin(key_gradient, rounded_gradient);
        mma_AB(key_gradient, rounded_gradient, q, 1);
        mma_commit();
        mma_wait<0>();
        mma_done(key_gradient);
        query.release();
        if constexpr (SumsQuery) sum_query(p, s, k, 1, buffer ^ 1, before);
      }

      named_barrier{met, consumers}.sync();
      if (p.need_key) {
        register_tile<T, C::head_dim> rounded;
        map(key_gradient, [&](real x) { return x * p.scale; });
        convert(rounded, key_gradient);
        store_async(p.grad_key, rows_of(k, 0), rounded, {w.key, w.head, w.batch});
      }
      store_wait_read();
      key.release();
      value.release();
      mail.release();
    }
    if constexpr (SumsQuery)
      for (int b = 0; b < 2; b++) named_barrier{gradients_read + b, consumers}.sync();  // takes what was passed on
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
