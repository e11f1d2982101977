// dK and dV where both gradients of 64 keys do not fit one warpgroup's registers: a CTA owns 64 keys of one head, one warpgroup makes the weights
// and sums dV, the other makes the score gradients and sums dK. See backward_keys.cuh for the formulas. A step is
//
//   warpgroup 1: S^T = K Q^T,   P^T (also to shared memory),      dV += P^T dO
//   warpgroup 2: dP^T = V dO^T, dS^T from P^T in shared memory,   dK += dS^T Q
// Both do the same products, and one's elementwise part runs under the other's products. dQ is made by its owner.
//
// Barriers: full/empty mbarriers per stage of the K, V, Q and dO rings; the mailbox; named barriers `weights_stored + b` and `weights_read + b`:
// P^T is in buffer b, and has been read from it; `met`: both are done with K and V.
#pragma once
#include "backward_keys.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C> struct backward_roles_shared {
  using shapes = backward_tiles<C>;
  typename shapes::key key[C::tile_stages];
  typename shapes::value value[C::tile_stages];
  typename shapes::query query[C::stages];
  typename shapes::gradient gradient[C::stages];
  kittens::shared_tile<typename C::element, 64, C::block_q> weights[2];
  backward_row_values<C, false> rows;
  kittens::optional_tile<backward_notes<backward_note, C::stages>, C::modified> notes;
  kittens::optional_tile<bias_stages<typename shapes::key_bias, C::stages>, C::modified> bias;
  kittens::ring_flags<C::tile_stages> key_flags, value_flags;
  kittens::ring_flags<C::stages, true> query_flags, gradient_flags;
  kittens::mailbox<backward_key_work<C>> mail;
};

template <class C> struct backward_roles_kernel {
  using params = backward_key_params<C>;
  using shared = backward_roles_shared<C>;
  static constexpr int consumers = 2, warpgroups = consumers + 1;
  static constexpr bool starts_early = true;
  static constexpr int weights_stored = kittens::first_free_barrier, weights_read = weights_stored + 2, met = weights_read + 2;
  static_assert(!C::row.sums_query(), "sums_query: where two warpgroups share the gradients of 64 keys the owner of queries makes dQ");

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    backward_barriers(s, cta, consumers);
    if (cta.warpgroup == 0) {
      cta.template give_registers<C::producer_registers>();
      if (cta.elect()) backward_keys_producer<C, shared>::run(p, s, cta);
      return;
    }
    cta.template take_registers<C::consumer_registers>();
    if (cta.warpgroup == 1)
      sum_values(p, s);
    else
      sum_keys(p, s);
    store_wait_all();
  }

 private:
  using T = typename C::element;
  using real = typename C::real;

  // Walks the steps of a tile: the query blocks that see it, of each head of the group in turn. A step tells whether it was the tile's last, which
  // counts in the modified class, where the producer leaves steps out and says so with the tiles of Q.
  template <class Step> static KITTENS_KERNEL void walk(const params& p, const backward_key_work<C>& w, Step step) {
    const backward_key_blocks<C> blocks(p, w);
    if constexpr (C::modified) {
      while (!step(blocks, 0, 0)) {
      }
    } else {
      for (int n = 0; n < p.group; n++)
        for (int i = blocks.first; i < blocks.end; i++) step(blocks, w.head * p.group + n, i);
    }
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
    column_vector<real, C::block_q> logsumexp2;
    int buffer = 0;

    while (mail.wait().key >= 0) {
      const backward_key_work<C>& w = mail.current();
      value.follow(key);
      auto& k = key.wait();
      auto& v = value.current();  // only a place for dV
      if (p.need_value) value.wait();
      fill(value_gradient, real(0));
      walk(p, w, [&](const backward_key_blocks<C>& blocks, [[maybe_unused]] int head, int i) {
        gradient.follow(query);
        auto& q = query.wait();
        [[maybe_unused]] backward_note note{};
        if constexpr (C::modified) {
          note = s.notes.tile.note[query.last()];
          head = uniform(note.head);
          i = uniform(note.block);
        }
        const bool masked = i < blocks.plain_first || i >= blocks.plain_end;
        mma_begin(scores);
        mma_ABt(scores, rows_of(k, 0), q, 0);
        mma_commit();
        if constexpr (!C::modified) load_columns(logsumexp2, s.rows.logsumexp2[query.last()]);
        mma_wait<0>();
        mma_done(scores);
        const auto exponentiate = [&](real factor) {
          if constexpr (C::modified) load_columns(logsumexp2, s.rows.logsumexp2[query.last()]);  // what modifies the scores takes the registers before
          exp2_columns(scores, logsumexp2, factor);
        };
        const auto hand_over = [&](const register_tile<T, C::block_q>& tile) {
          named_barrier{weights_read + buffer, consumers}.sync();
          store(rows_of(s.weights[buffer], 0), tile);
          named_barrier{weights_stored + buffer, consumers}.arrive();
        };
        if constexpr (C::modified) {
          const bool whole = p.rules.scores_are_plain() && !p.rules.given.dropout_state && w.key + C::block_k <= p.keys_of(w.batch);
          if (uniform(whole && !masked && !note.hides(0))) {
            exponentiate(p.scale_log2);
            query.release();
            convert(weights, scores);
            hand_over(weights);
          } else {
            const backward_scores<T, true, C::row.takes_softcap> tile(p, w.batch, head);
            register_tile<T, C::block_q> slope;
            tile.weigh(scores, slope, i * C::block_q, w.key, note.hides(0), columns_of(s.bias.tile.tile[query.last()], 0), exponentiate);
            query.release();
            map_into(weights, scores, backward_kept_weight<real>{p.rules.keep_scale});
            tile.differentiate_cap(scores, slope);
            convert(slope, scores);  // the signed weights: what the other makes score gradients of
            hand_over(slope);
          }
        } else {
          exponentiate(p.scale_log2);
          query.release();
          if (masked) zero_unless(scores, backward_visible(p.mask, w.key, i * C::block_q));
          convert(weights, scores);
          hand_over(weights);
        }

        auto& g = gradient.wait();
        mma_begin(value_gradient, weights);
        mma_AB(value_gradient, weights, g, 1);
        mma_commit();
        mma_wait<0>();
        mma_done(value_gradient);
        gradient.release();
        buffer ^= 1;
        if constexpr (C::modified)
          return uniform(note.last()) != 0;
        else
          return false;
      });

      named_barrier{met, consumers}.sync();
      if (p.need_value) {
        register_tile<T, C::value_dim> rounded;
        convert(rounded, value_gradient);
        store_async(p.grad_value, rows_of(v, 0), rounded, {w.key, w.head, w.batch});
      }
      store_wait_read();
      key.release();
      p.need_value ? value.release() : value.skip();
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
    column_vector<real, C::block_q> delta;
    int buffer = 0;
    for (int b = 0; b < 2; b++) named_barrier{weights_read + b, consumers}.arrive();  // both are free

    while (mail.wait().key >= 0) {
      const backward_key_work<C>& w = mail.current();
      value.follow(key);
      auto& k = key.current();  // only a place for dK
      if (p.need_key) key.wait();
      auto& v = value.wait();
      fill(key_gradient, real(0));
      walk(p, w, [&](const backward_key_blocks<C>& blocks, [[maybe_unused]] int head, int i) {
        [[maybe_unused]] bool last = false;
        gradient.follow(query);
        auto& g = gradient.wait();
        mma_begin(score_gradient);
        mma_ABt(score_gradient, rows_of(v, 0), g, 0);
        mma_commit();
        load_columns(delta, s.rows.delta[gradient.last()]);
        mma_wait<0>();
        mma_done(score_gradient);
        const bool masked = i < blocks.plain_first || i >= blocks.plain_end;
        named_barrier{weights_stored + buffer, consumers}.sync();
        load(weights, rows_of(s.weights[buffer], 0));
        named_barrier{weights_read + buffer, consumers}.arrive();
        if constexpr (C::modified)
          map_columns(score_gradient, weights, delta, backward_modified_gradient<real>{p.rules.keep_scale});
        else if (masked)
          map_columns(score_gradient, weights, delta, backward_score_gradient<real, true>{});
        else
          map_columns(score_gradient, weights, delta, backward_score_gradient<real, false>{});
        gradient.release();
        convert(rounded_gradient, score_gradient);

        auto& q = query.wait();
        if constexpr (C::modified) last = uniform(s.notes.tile.note[query.last()].last());
        mma_begin(key_gradient, rounded_gradient);
        mma_AB(key_gradient, rounded_gradient, q, 1);
        mma_commit();
        mma_wait<0>();
        mma_done(key_gradient);
        query.release();
        buffer ^= 1;
        return last;
      });

      named_barrier{met, consumers}.sync();
      if (p.need_key) {
        register_tile<T, C::head_dim> rounded;
        map(key_gradient, [&](real x) { return x * p.scale; });
        convert(rounded, key_gradient);
        store_async(p.grad_key, rows_of(k, 0), rounded, {w.key, w.head, w.batch});
      }
      store_wait_read();
      p.need_key ? key.release() : key.skip();
      value.release();
      mail.release();
    }
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
