// dK and dV: a CTA owns 128 keys of one head, each of its two consumer warpgroups keeps both gradients of 64 of them in registers and walks the
// query blocks of every head of the group that see them.
//
// Scores are made transposed (keys x queries), so that weights and score gradients feed dV and dK straight from registers:
//   S^T = K Q^T    P^T = exp2(scale_log2 S^T - logsumexp2)    dV += P^T dO
//   dP^T = V dO^T  dS^T = P^T (dP^T - delta)                  dK += dS^T Q   (times scale at the end)
// SumsQuery: dS^T also goes through shared memory, where the keys of both warpgroups meet for dQ += dS K, which is added up in memory as floats.
// Otherwise the warpgroups do not meet at all. InOrder: tiles of keys take turns at adding, so that dQ is the same at every run (backward_turns.cuh).
// Late: a step makes dQ of the step before it, so that a warpgroup may be most of a step ahead of the other, and its exponentials run under the other's
// products (head_dim 128, full, 16k keys: 602 against 562 TFLOP/s).
//
// Barriers: full/empty mbarriers per stage of the K, V, Q and dO rings; the mailbox; named barriers `meet`: both have stored dS; late, `stored + 2 w + t`:
// warpgroup w has stored dS in buffer t, and has read the other buffer. InOrder: the turnstile.
#pragma once
#include "backward_modifiers.cuh"
#include "backward_row_values.cuh"
#include "backward_scout.cuh"
#include "backward_turns.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C> struct backward_score_gradients {
  kittens::shared_tile<typename C::element, C::block_k, C::block_q> tile[2];
};

template <class C, bool SumsQuery, bool Folds, bool InOrder> struct backward_keys_shared {
  using shapes = backward_tiles<C>;
  // First, with shared memory behind each stage: a product takes a row's eight columns twice, which compute-sanitizer counts as twice the bytes.
  backward_row_values<C, Folds> rows;
  typename shapes::key key[C::tile_stages];
  typename shapes::value value[C::tile_stages];
  typename shapes::query query[C::stages];
  typename shapes::gradient gradient[C::stages];
  kittens::optional_tile<backward_score_gradients<C>, SumsQuery> score_gradients;
  kittens::optional_tile<backward_notes<backward_note_of<C>, C::stages>, C::modified> notes;
  kittens::optional_tile<bias_stages<typename shapes::key_bias, C::stages>, C::modified && !C::mask_alone> bias;
  kittens::ring_flags<C::tile_stages> key_flags, value_flags;
  kittens::ring_flags<C::stages, !Folds || C::modified> query_flags;  // a note is read by threads
  kittens::ring_flags<C::stages, !Folds> gradient_flags;
  kittens::mailbox<backward_key_work<C>> mail;
  kittens::optional_tile<kittens::turnstile, InOrder> turnstile;
  kittens::optional_tile<kittens::mailbox<backward_mask_note>, C::mask_alone> found;
};

// How a step makes weights of scores: all are visible; the interval hides some; the bool mask does, and nothing else is to be done; whatever
// modifies scores.
enum class backward_block { plain, cut, masked, modified };
template <backward_block kind> using backward_kind = std::integral_constant<backward_block, kind>;

// dS of a weight. A hidden NaN times a weight of 0 is NaN, so a masked block says what a weight of 0 gives.
template <class Real, bool masked> struct backward_score_gradient {
  KITTENS_INLINE Real operator()(Real grad_weight, Real weight, Real delta) const {
    return masked && weight == Real(0) ? Real(0) : weight * (grad_weight - delta);
  }
};

// The producer of both kernels that own keys: for each tile K and V, then Q and dO of every step, each with its vector.
// InOrder: every tile comes from the counter, so that each is begun after those whose turns come before its own.
template <class C, class Shared, bool InOrder = false> struct backward_keys_producer {
  static KITTENS_KERNEL void run(const backward_key_params<C>& p, Shared& s, kittens::cta cta) {
    using namespace kittens;
    producer key(s.key, s.key_flags);
    producer value(s.value, s.value_flags);
    producer query(s.query, s.query_flags);
    producer gradient(s.gradient, s.gradient_flags);
    sender mail(s.mail);
    [[maybe_unused]] backward_found<C> found(s);
    int tile = InOrder && p.counter ? take_tile(p.counter, cta) - cta.count : cta.index;
    while (tile < p.tiles) {
      const backward_key_work<C>& w = mail.make(p, begun_as(p, tile));
      key.follow(mail);  // registers are scarce here
      value.follow(key);
      key.load(p.key, {w.key, w.head, w.batch});
      value.load(p.value, {w.key, w.head, w.batch});
      auto load_step = [&](int head, int i, [[maybe_unused]] unsigned flags, [[maybe_unused]] int jump = 0) {
        const int row = i * C::block_q, at = (w.batch * p.heads + head) * p.padded_q + row;
        gradient.follow(query);
        if constexpr (C::mask_alone)
          query.load(p.query, {row, head, w.batch}, note_rider(s.notes.tile.note, backward_mask_note(head, i, flags, jump)), s.rows.with_query(p, at));
        else if constexpr (C::modified)
          query.load(p.query, {row, head, w.batch}, note_rider(s.notes.tile.note, note(p, w, head, i, flags != 0)),
                     s.rows.with_query(p, at),
                     tile_rider(s.bias.tile.tile, p.bias, p.bias_at(row, w.key, head, w.batch), p.bias_travels));
        else
          query.load(p.query, {row, head, w.batch}, s.rows.with_query(p, at));
        s.rows.load_gradient(gradient, p, {row, head, w.batch}, at);
      };
      if constexpr (C::mask_alone) {
        KITTENS_NO_UNROLL for (unsigned flags = 0; !(flags & backward_note::is_last);) {
          const backward_mask_note& step = found.wait();
          const int head = step.head, block = step.block, jump = step.jump;
          flags = step.flags;
          found.release();
          load_step(head, block, flags, jump);
        }
      } else if constexpr (C::modified) {
        const int end_head = (w.head + 1) * p.group;
        int head = w.head * p.group, block = w.first;
        p.seek(w, head, block);
        if (head == end_head) {  // one is taken in any case: all warps of a warpgroup must meet
          head--;
          block = w.end - 1;
        }
        KITTENS_NO_UNROLL while (head < end_head) {
          int next_head = head, next_block = block + 1;
          p.seek(w, next_head, next_block);
          load_step(head, block, next_head == end_head);
          head = next_head;
          block = next_block;
        }
      } else {
        KITTENS_NO_UNROLL for (int head = w.head * p.group; head < (w.head + 1) * p.group; head++)
          KITTENS_NO_UNROLL for (int i = w.first; i < w.end; i++) load_step(head, InOrder && w.tile >= p.rising ? w.first + w.end - 1 - i : i, false);
      }
      tile = p.counter ? take_tile(p.counter, cta) - (InOrder ? cta.count : 0) : w.tile + cta.count;
    }
    mail.send({});
    if (p.counter) retire(p.counter, cta);
  }

 private:
  static KITTENS_INLINE int begun_as(const backward_key_params<C>& p, int number) {
    if constexpr (InOrder) return backward_turns<C, Shared>::begun_as(p, number);
    return number;
  }
  static KITTENS_INLINE backward_note note(const backward_key_params<C>& p, const backward_key_work<C>& w, int head, int block, bool last) {
    unsigned flags = last ? backward_note::is_last : 0;
    KITTENS_NO_UNROLL for (int part = 0; part < C::block_k / class_tile; part++)
      if (p.classes_of(w, head, block, part) & tile_hides) flags |= 1u << part;
    return {head, block, flags};
  }
};

template <class C, bool SumsQuery, bool Folds, bool InOrder = false> struct backward_keys_kernel {
  using params = backward_key_params<C>;
  using shared = backward_keys_shared<C, SumsQuery, Folds, InOrder>;
  using turns = backward_turns<C, shared>;
  static constexpr int consumers = 2, warpgroups = consumers + 1, elected = InOrder ? 1 + turns::threads : C::mask_alone ? 2 : 1;
  static constexpr bool starts_early = true;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using T = typename C::element;
    using real = typename C::real;
    constexpr named_barrier meet{first_free_barrier, consumers};
    constexpr int stored = first_free_barrier + 1;
    // At 128 queries a step dQ in its own step is the faster one (head_dim 64, full, 16k keys: 548 against 521 TFLOP/s).
    constexpr bool late = SumsQuery && C::block_q == 64;
    static_assert(!SumsQuery || !C::modified || C::mask_alone, "sums_query: the modified class makes dQ by its owner, but for a bool mask alone");
    static_assert(!InOrder || SumsQuery, "in order: there are sums");
    if constexpr (InOrder)
      if (cta.warpgroup == 0 && cta.elect()) s.turnstile.tile.init(consumers);
    if constexpr (C::mask_alone)
      if (cta.warpgroup == 0 && cta.elect()) s.found.tile.init(0, 1);
    backward_barriers(s, cta, consumers, elected - 1);

    if (cta.warpgroup == 0) {
      cta.template give_registers<C::producer_registers>();
      if (cta.elect()) backward_keys_producer<C, shared, InOrder>::run(p, s, cta);
      if constexpr (InOrder) turns::run(p, s, cta);
      if constexpr (C::mask_alone)
        if (cta.elect(1)) backward_scout<C, shared>::run(p, s);
      return;
    }

    cta.template take_registers<C::consumer_registers>();
    const int wg = cta.warpgroup - 1;
    consumer key(s.key, s.key_flags);
    consumer value(s.value, s.value_flags);
    consumer query(s.query, s.query_flags);
    consumer gradient(s.gradient, s.gradient_flags);
    receiver mail(s.mail);
    register_tile<real, C::head_dim> key_gradient;
    register_tile<real, C::value_dim> value_gradient;
    register_tile<real, C::block_q> scores, score_gradient;
    register_tile<T, C::block_q> weights, rounded_gradient;
    // Held: the first product of a step would else wait 400 cycles for the address register of the last step's additions (head_dim 128). With 128
    // queries the register is worth more (head_dim 64, full, 16k keys: 478 against 512 TFLOP/s).
    using sums_of_query = tile_sums<real, C::block_q == 64>;
    int turn = 0;  // which of the two buffers dS goes through
    backward_visits<InOrder> visits(s);

    while (mail.wait().key >= 0) {
      const backward_key_work<C>& w = mail.current();
      value.follow(key);
      auto& k = key.wait();
      auto& v = value.wait();
      // Zero times NaN is NaN: keys that no row sees become zero before dQ meets them.
      if constexpr (C::mask_alone) {
        const auto unseen = [&](int r) { return p.key_is_unseen(w, w.key + r); };
        if (any_of<C::block_k>(unseen)) {
          zero_rows<64>(rows_of(k, wg * 64), [&](int r) { return unseen(wg * 64 + r); });
          publish(meet);
        }
      }
      fill(key_gradient, real(0));
      fill(value_gradient, real(0));

      const backward_key_blocks<C, InOrder> blocks(p, w);
      const auto sums_at = [&](int head, int i) {
        return sums_of_query(p.query_sum + (((static_cast<int64_t>(w.batch) * p.heads + head) * p.steps + i) * 2 + wg) * C::query_sum_tile);
      };
      const int first_head = uniform(w.head * p.group);
      sums_of_query sums = sums_at(first_head, blocks.first - blocks.way);
      [[maybe_unused]] int ahead = blocks.way * p.sum_step;  // late: from the sums added last to those of the step whose dQ is still to make
      register_tile<real, C::query_sum_columns> query_gradient;
      auto make_query_gradient = [&](auto& ds) {
        const int mine = uniform(wg * 64);
        mma_AtB(query_gradient, columns_of(ds, C::split_columns ? 0 : mine),
                columns_of(k, C::split_columns ? mine / 64 * C::query_sum_columns : 0), 0);
        mma_commit();
      };

      auto add_query_gradient = [&] {
        visits.enter();
        sums.add(query_gradient);
        visits.leave();
      };

      [[maybe_unused]] const real keep_scale = p.keep_scale();
      auto next_query = [&]() -> auto& {
        gradient.follow(query);
        return query.wait();
      };
      auto step = [&](const auto& q, int head, int i, auto kind, [[maybe_unused]] auto first) {
        constexpr bool modified = kind == backward_block::modified, by_mask = kind == backward_block::masked;
        constexpr bool masked = kind == backward_block::cut || by_mask;
        // Anew in each step: descriptors made from it would else be kept in registers across the loop, and spilled.
        const int mine = uniform(wg * 64);
        const backward_visible visible(p.mask, w.key + mine, i * C::block_q);
        [[maybe_unused]] register_bytes<C::block_q> seen;
        if constexpr (C::modified) if constexpr (by_mask) load_bytes_transposed(seen, p.rules.mask_rows({w.batch, head, i * C::block_q, w.key + mine}));
        typename backward_row_values<C, Folds>::operands operands;
        s.rows.multiply_key(scores, operands, rows_of(k, mine), q, query.last());
        // Branches, under which no product is in flight; dP waits for the registers that they take.
        if constexpr (C::modified && !C::mask_alone) if constexpr (modified) {
          mma_wait<0>();
          mma_done(scores);
          const backward_scores<T, true, C::row.takes_softcap> tile(p, w.batch, head);
          register_tile<T, C::block_q> slope;
          const bool hidden = s.notes.tile.note[query.last()].hides(wg);
          tile.weigh(scores, slope, i * C::block_q, w.key + mine, hidden, columns_of(s.bias.tile.tile[query.last()], mine),
                     [&](real factor) { s.rows.weigh(scores, query.last(), factor); });
          map_into(weights, scores, backward_kept_weight<real>{keep_scale});
          tile.differentiate_cap(scores, slope);
        }
        const auto& g = gradient.wait();
        s.rows.multiply_value(score_gradient, operands, rows_of(v, mine), g, gradient.last());
        if constexpr (!modified) {
          mma_wait<1>();
          mma_done(scores);
          s.rows.weigh(scores, query.last(), p.scale_log2);
          if constexpr (kind == backward_block::cut) zero_unless(scores, visible);
          if constexpr (by_mask) keep_where_transposed(scores, seen, real(0));
        }
        auto add_values = [&] {
          if constexpr (!modified) convert(weights, scores);
          mma_begin(value_gradient, weights);
          mma_AB(value_gradient, weights, g, 1);
          mma_commit();
        };
        if constexpr (C::values_early) {
          add_values();
          mma_wait<1>();
        } else {
          mma_wait<0>();
        }
        mma_done(score_gradient);
        if constexpr (modified)
          s.rows.differentiate(score_gradient, scores, gradient.last(), backward_modified_gradient<real>{keep_scale});
        else
          s.rows.differentiate(score_gradient, scores, gradient.last(), backward_score_gradient<real, masked>{});
        convert(rounded_gradient, score_gradient);
        if constexpr (SumsQuery) {
          auto& ds = s.score_gradients.tile.tile[turn];
          if constexpr (late && !first) named_barrier{stored + 2 * (1 - wg) + (turn ^ 1), consumers}.sync();
          store(rows_of(ds, mine), rounded_gradient);
          if constexpr (!C::values_early) add_values();
          if constexpr (!late) publish(meet);
          if constexpr (late && first) {
            mma_begin(key_gradient, rounded_gradient);
          } else {
            mma_begin(query_gradient, key_gradient, rounded_gradient);
            make_query_gradient(late ? s.score_gradients.tile.tile[turn ^ 1] : ds);
          }
          mma_AB(key_gradient, rounded_gradient, q, 1);
          mma_commit();
          mma_wait<1>();
          mma_done(value_gradient);
          gradient.release();
          if constexpr (late) publish_arrive({stored + 2 * wg + turn, consumers});
          turn ^= 1;
          if constexpr (!late || !first) {
            mma_done(query_gradient);
            if constexpr (late)
              sums.advance(ahead);
            else if constexpr (C::mask_alone)
              sums.advance(s.notes.tile.note[query.last()].jump);
            else
              sums.advance(blocks.way * p.sum_step);
            add_query_gradient();
          }
          if constexpr (late && C::mask_alone)
            ahead = s.notes.tile.note[query.last()].jump;
          else if constexpr (late)
            ahead = i == blocks.first && head != first_head ? blocks.to_next_head(p.steps) * p.sum_step : blocks.way * p.sum_step;
        } else {
          if constexpr (!C::values_early) add_values();
          mma_begin(key_gradient, rounded_gradient);
          mma_AB(key_gradient, rounded_gradient, q, 1);
          mma_commit();
          mma_wait<1>();
          mma_done(value_gradient);
          gradient.release();
        }
        mma_wait<0>();
        mma_done(key_gradient);
        query.release();
      };
      constexpr std::true_type yes;
      constexpr std::false_type no;
      constexpr backward_kind<backward_block::plain> plain;
      constexpr backward_kind<backward_block::cut> cut;
      constexpr backward_kind<backward_block::masked> by_mask;
      const bool any = C::mask_alone || blocks.before(blocks.first, blocks.end);
      if constexpr (C::mask_alone) {
        auto noted_step = [&](auto first) {
          const auto& q = next_query();
          const backward_note note = s.notes.tile.note[query.last()];
          const int head = uniform(note.head), i = uniform(note.block);
          const bool last = uniform(note.last());
          if (uniform(note.hides(wg)))
            step(q, head, i, by_mask, first);
          else
            step(q, head, i, plain, first);
          return last;
        };
        bool last = false;
        if constexpr (late) last = noted_step(yes);
        while (!last) last = noted_step(no);
      } else if constexpr (C::modified) {
        const int beyond = w.key + C::block_k;
        const bool whole = p.rules.scores_are_plain() && !p.rules.given.dropout_state && beyond <= p.keys_of(w.batch);
        for (bool last = false; !last;) {
          const auto& q = next_query();
          const backward_note note = s.notes.tile.note[query.last()];
          const int head = uniform(note.head), i = uniform(note.block);
          last = uniform(note.last());
          const bool simple = whole && i >= blocks.plain_first && i < blocks.plain_end;
          if (uniform(simple && !note.hides(wg)))
            step(q, head, i, plain, no);
          else if (uniform(simple && p.rules.mask_has_vectors))
            step(q, head, i, by_mask, no);
          else
            step(q, head, i, backward_kind<backward_block::modified>{}, no);
        }
      } else {
        if constexpr (late)
          if (any) {
            if (blocks.before(blocks.first, blocks.plain_first) || !blocks.before(blocks.first, blocks.plain_end))
              step(next_query(), first_head, blocks.first, cut, yes);
            else
              step(next_query(), first_head, blocks.first, plain, yes);
          }
        for (int n = 0; n < p.group; n++) {
          const int head = first_head + n;
          int i = blocks.first;
          if constexpr (!late)
            if (n > 0) sums = sums_at(head, i - blocks.way);
          if (late && n == 0 && any) i += blocks.way;
          for (; blocks.before(i, blocks.plain_first); i += blocks.way) step(next_query(), head, i, cut, no);
          for (; blocks.before(i, blocks.plain_end); i += blocks.way) step(next_query(), head, i, plain, no);
          for (; blocks.before(i, blocks.end); i += blocks.way) step(next_query(), head, i, cut, no);
        }
      }
      if constexpr (late)
        if (any) {  // dQ of the last step
          named_barrier{stored + 2 * (1 - wg) + (turn ^ 1), consumers}.sync();
          mma_begin(query_gradient);
          make_query_gradient(s.score_gradients.tile.tile[turn ^ 1]);
          mma_wait<0>();
          mma_done(query_gradient);
          sums.advance(ahead);
          add_query_gradient();
        }

      if constexpr (SumsQuery) meet.sync();  // the other warpgroup, too, is done with K: the gradients leave through the buffers of K and V
      const place where{w.key + wg * 64, w.head, w.batch};
      if (p.need_value) {
        register_tile<T, C::value_dim> rounded;
        convert(rounded, value_gradient);
        store_async(p.grad_value, rows_of(v, wg * 64), rounded, where);
      }
      if (p.need_key) {
        register_tile<T, C::head_dim> rounded;
        map(key_gradient, [&](real x) { return x * p.scale; });
        convert(rounded, key_gradient);
        store_async(p.grad_key, rows_of(k, wg * 64), rounded, where);
      }
      store_wait_read();
      key.release();
      value.release();
      mail.release();
    }
    store_wait_all();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
