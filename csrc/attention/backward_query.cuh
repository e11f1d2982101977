// dQ by its owner: a CTA owns 128 query rows of one head, each of its two consumer warpgroups keeps dQ of 64 of them in registers and walks the key
// blocks they see, as the forward does. Used where dQ must be the same bit for bit at every run, and where it alone is asked for.
//
//   S = Q K^T   P = exp2(scale_log2 S - logsumexp2)   dP = dO V^T   dS = P (dP - delta)   dQ += dS K   (times scale at the end)
//
// A step issues "dQ += dS K" of the last block and both scores of the next one as one group of products.
//
// Barriers: full/empty mbarriers per stage of the Q, dO, K and V rings; the mailbox; named barriers `turn + w` pass the turn at the tensor cores to
// consumer w; `both`, in the modified class: of the two consumers.
#pragma once
#include "backward_modifiers.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C> struct backward_query_shared {
  using shapes = backward_tiles<C>;
  typename shapes::owned_query query[1];
  typename shapes::owned_gradient gradient[1];
  typename shapes::key_block key[C::key_stages];
  typename shapes::value_block value[C::value_stages];
  kittens::optional_tile<backward_notes<backward_note, C::key_stages>, C::modified> notes;
  kittens::optional_tile<bias_stages<typename shapes::query_bias, C::key_stages>, C::modified> bias;
  kittens::ring_flags<1> query_flags, gradient_flags;
  kittens::ring_flags<C::key_stages, C::modified> key_flags;
  kittens::ring_flags<C::value_stages> value_flags;
  kittens::mailbox<backward_query_work<C>> mail;
};

template <class C> struct backward_query_kernel {
  using params = backward_query_params<C>;
  using shared = backward_query_shared<C>;
  static constexpr int consumers = C::block_m / 64, warpgroups = consumers + 1;
  static constexpr bool starts_early = true;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using T = typename C::element;
    using real = typename C::real;
    backward_barriers(s, cta, consumers);

    if (cta.warpgroup == 0) {
      cta.template give_registers<C::producer_registers>();
      if (!cta.elect()) return;
      producer query(s.query, s.query_flags);
      producer gradient(s.gradient, s.gradient_flags);
      producer key(s.key, s.key_flags);
      producer value(s.value, s.value_flags);
      sender mail(s.mail);
      for (int tile = cta.index; tile < p.tiles; tile = p.counter ? take_tile(p.counter, cta) : tile + cta.count) {
        const backward_query_work<C>& w = mail.send(backward_query_work<C>(p, tile));
        query.load(p.query, {w.row, w.head, w.batch});
        gradient.load(p.grad_output, {w.row, w.head, w.batch});
        int j = p.next(w, w.first);
        if (j == w.end) j--;  // one is taken in any case: all warps of a warpgroup must meet
        KITTENS_NO_UNROLL while (j < w.end) {
          const int after = p.next(w, j + 1);
          const place where{j * C::block_n, w.head / p.group, w.batch};
          if constexpr (C::modified)
            key.load(p.key, where, note_rider(s.notes.tile.note, note(p, w, j, after == w.end)),
                     tile_rider(s.bias.tile.tile, p.bias, p.bias_at(w.row, j * C::block_n, w.head, w.batch), p.bias_travels));
          else
            key.load(p.key, where);
          value.load(p.value, where);
          j = after;
        }
      }
      mail.send({});
      if (p.counter) retire(p.counter, cta);
      return;
    }

    cta.template take_registers<C::consumer_registers>();
    const int wg = cta.warpgroup - 1;
    const named_barrier my_turn{first_free_barrier + wg, 2}, next_turn{first_free_barrier + (wg + 1) % consumers, 2};
    constexpr named_barrier both{first_free_barrier + consumers, consumers};
    consumer query(s.query, s.query_flags);
    consumer gradient(s.gradient, s.gradient_flags);
    consumer key(s.key, s.key_flags);
    consumer value(s.value, s.value_flags);
    receiver mail(s.mail);
    register_tile<real, C::head_dim> query_gradient;
    register_tile<real, C::block_n> scores, score_gradient;
    register_tile<T, C::block_n> rounded_gradient;
    row_vector<real> logsumexp2, delta;
    if (wg == consumers - 1) next_turn.arrive();

    while (mail.wait().end > 0) {
      const backward_query_work<C>& w = mail.current();
      const int row = w.row + wg * 64;
      const int64_t at = (static_cast<int64_t>(w.batch) * p.heads + w.head) * p.padded_q + row;
      load_rows(logsumexp2, p.logsumexp2 + at, p.length_q - row, infinity<real>());
      load_rows(delta, p.delta + at, p.length_q - row, real(0));
      auto& q = query.wait();
      auto& g = gradient.wait();

      [[maybe_unused]] backward_note block{};  // modified: whose scores there are
      [[maybe_unused]] register_bytes<C::block_n> seen;
      // Whether a block's scores are those of the plain class but for the bool mask, which then loads under the products.
      [[maybe_unused]] auto is_simple = [&](int column) -> bool {
        const bool cut = column + C::block_n > p.mask.end_key(row) || column < p.mask.first_key(row + 63);
        if constexpr (C::modified)
          return uniform(!cut && p.rules.scores_are_plain() && !p.rules.given.dropout_state && column + C::block_n <= p.keys_of(w.batch));
        return !cut;
      };
      [[maybe_unused]] auto load_mask = [&] {
        if constexpr (C::modified) {
          const int column = block.block * C::block_n;
          if (uniform(block.hides(wg) && p.rules.mask_has_vectors) && is_simple(column))
            load_bytes(seen, p.rules.mask_rows({w.batch, w.head, row, column}));
        }
      };
      auto make_plain_gradients = [&] {
        exp2_rows(scores, logsumexp2, p.scale_log2);
        map_rows(score_gradient, scores, delta, [](real dp, real x, real d) { return x * (dp - d); });
      };
      auto make_gradients = [&](int j) {
        const int column = j * C::block_n;
        const bool cut = column + C::block_n > p.mask.end_key(row) || column < p.mask.first_key(row + 63);
        if constexpr (C::modified) {
          const bool simple = is_simple(column), hides = uniform(block.hides(wg));
          if (simple && !hides) {
            make_plain_gradients();
          } else if (simple && p.rules.mask_has_vectors) {
            exp2_rows(scores, logsumexp2, p.scale_log2);
            keep_where(scores, seen, real(0));
            map_rows(score_gradient, scores, delta, [](real dp, real x, real d) { return x == real(0) ? real(0) : x * (dp - d); });
          } else {
            const backward_scores<T, false, C::row.takes_softcap> tile(p, w.batch, w.head);
            slope_in_weights slope;
            tile.weigh(scores, slope, row, column, block.hides(wg), rows_of(s.bias.tile.tile[key.last()], wg * 64),
                       [&](real factor) { exp2_rows(scores, logsumexp2, factor); });
            map_rows(score_gradient, scores, delta, backward_modified_gradient<real>{p.rules.keep_scale});
          }
          convert(rounded_gradient, score_gradient);
          // Hidden keys have score gradients of 0, and 0 times a NaN would be NaN. A row that sees a NaN has one without it.
          if (block.hides_any() || p.rules.given.bias || column + C::block_n > p.keys_of(w.batch)) {
            auto& k = key.current();
            if (any_not_finite(k)) {
              constexpr int half = C::block_n / consumers;
              both.sync();
              zero_not_finite<half>(rows_of(k, wg * half));
              publish(both);
            }
          }
        } else {
          make_plain_gradients();
          if (cut) {
            const backward_visible visible(p.mask, column, row);
            zero_unless(score_gradient, [&](int r, int c) { return visible(c, r); });
          }
          convert(rounded_gradient, score_gradient);
        }
      };

      {
        auto& k = key.wait();
        auto& v = value.wait();
        if constexpr (C::modified) {
          block = s.notes.tile.note[key.last()];
          load_mask();
        }
        mma_begin(scores, score_gradient);
        mma_ABt(scores, rows_of(q, wg * 64), k, 0);
        mma_ABt(score_gradient, rows_of(g, wg * 64), v, 0);
        mma_commit();
        mma_wait<0>();
        mma_done(scores, score_gradient);
        value.release();
      }
      make_gradients(C::modified ? block.block : w.first);
      fill(query_gradient, real(0));
      auto step = [&](int j) {
        const int mine = uniform(wg * 64);  // anew in each step: descriptors made from it would else be kept in registers
        auto& before = key.current();
        auto& k = key.wait();
        auto& v = value.wait();
        if constexpr (C::modified) {
          j = (block = s.notes.tile.note[key.last()]).block;
          load_mask();
        }
        my_turn.sync();
        mma_begin(query_gradient, rounded_gradient, scores, score_gradient);
        mma_AB(query_gradient, rounded_gradient, before, 1);
        mma_ABt(scores, rows_of(q, mine), k, 0);
        mma_ABt(score_gradient, rows_of(g, mine), v, 0);
        mma_commit();
        next_turn.arrive();
        mma_wait<0>();
        mma_done(query_gradient, scores, score_gradient);
        key.release();
        value.release();
        make_gradients(j);
      };
      if constexpr (C::modified)
        while (!uniform(block.last())) step(0);
      else
        for (int j = uniform(w.first) + 1, end = uniform(w.end); j < end; j++) step(j);
      mma_begin(query_gradient, rounded_gradient);
      mma_AB(query_gradient, rounded_gradient, key.current(), 1);
      mma_commit();
      mma_wait<0>();
      mma_done(query_gradient);
      key.release();
      gradient.release();

      map(query_gradient, [&](real x) { return x * p.scale; });
      register_tile<T, C::head_dim> rounded;
      convert(rounded, query_gradient);
      store_async(p.grad_query, rows_of(q, wg * 64), rounded, {row, w.head, w.batch});
      store_wait_read();
      query.release();
      mail.release();
    }
    if (wg == 0) my_turn.sync();  // takes the last turn that was passed on
    store_wait_all();
  }

 private:
  static KITTENS_INLINE backward_note note(const params& p, const backward_query_work<C>& w, int block, bool last) {
    unsigned flags = last ? backward_note::is_last : 0;
    KITTENS_NO_UNROLL for (int part = 0; part < consumers; part++)
      if (p.classes_of(w, block, part) & tile_hides) flags |= 1u << part;
    return {w.head, block, flags};
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
