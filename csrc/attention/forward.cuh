// FlashAttention forward: output = softmax(scale * Q K^T, over the visible keys) V, and the natural logarithm of the softmax's denominator.
//
// One producer warpgroup streams tiles of Q, K and V into shared memory; each consumer warpgroup owns 64 query rows and keeps their output in
// registers. A step issues "output += weights * V" of the last key block and the scores of the next one as one group of products.
//
// The softmax measures against a fixed reference. The first block of keys sets each row's maximum; later blocks keep it as long as their
// weights cannot overflow, which the sums of the block show, and so need no maximum, no shuffles and no rescaling of the output. The result is
// the same for any reference; a block that would overflow (or holds a NaN) takes the running-maximum path from its scores, which still exist.
// Measured on an H200 at head_dim 128, 16k keys: 632 TFLOP/s with a running maximum, 736 with the fixed reference.
//
// Key blocks run from the last to the first, so the masked blocks of a causal tile come first. Every row that sees a key sees one in them, so it
// has a reference when the unmasked blocks start.
//
// Barriers: full/empty mbarriers per stage of the Q, K and V rings; a mailbox that carries tile numbers; named barriers `turn + w` pass the turn
// at the tensor cores to consumer w.
#pragma once
#include "forward_shapes.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C> struct forward_shared {
  typename forward_tiles<C>::query query[C::query_stages];
  typename forward_tiles<C>::key key[C::stages];
  typename forward_tiles<C>::value value[C::stages];
  kittens::optional_tile<typename forward_tiles<C>::output, !C::output_in_query && !C::split> output;
  kittens::optional_tile<block_notes<C>, C::modified> notes;
  kittens::ring_flags<C::query_stages> query_flags;
  kittens::ring_flags<C::stages, C::modified> key_flags;
  kittens::ring_flags<C::stages> value_flags;
  kittens::mailbox<forward_work<C>, 4> mail;  // the producer sends the next tile while consumers hold this one and the one before
};

template <class C> struct forward_kernel {
  using params = forward_params<C>;
  using shared = forward_shared<C>;
  static constexpr int warpgroups = C::consumers + 1;
  static constexpr bool starts_early = true;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using T = typename C::element;
    using real = typename params::real;
    constexpr int first_turn = first_free_barrier;
    if (cta.warpgroup == 0 && cta.elect()) {
      s.query_flags.init(C::consumers);
      s.key_flags.init(C::consumers);
      s.value_flags.init(C::consumers);
      s.mail.init(C::consumers);
    }
    cta.publish_barriers();
    cta.await_earlier_launches();

    if (cta.warpgroup == 0) {
      if constexpr (C::moves_registers) cta.template give_registers<C::producer_registers>();
      if (!cta.elect()) return;
      producer query(s.query, s.query_flags);
      producer key(s.key, s.key_flags);
      producer value(s.value, s.value_flags);
      sender mail(s.mail);
      auto load_query = [&](const forward_work<C>& w) {
        if (w.end > 0) query.load(p.query, {w.row, w.head, w.batch});
      };
      auto load_block = [&](const forward_work<C>& w, int j) {
        value.follow(key);
        const place where{j * C::block_n, w.head / p.group, w.batch};
        if constexpr (C::modified)
          key.load(p.key, where, note_rider(s.notes.tile.note, w.note(p, j)));
        else
          key.load(p.key, where);
        value.load(p.value, where);
      };
      int tile = cta.index;
      const forward_work<C>* w = &mail.make(p, tile);
      load_query(*w);
      while (w->end > 0) {
        int j = w->end - 1;
        KITTENS_NO_UNROLL for (; j > w->first + 1; j = w->before(j)) load_block(*w, j);
        // A tile number takes a microsecond to come: it is asked for before this tile's last blocks, and no earlier, so that long tiles keep nobody
        // waiting.
        tile = p.counter ? take_tile(p.counter, cta) : tile + cta.count;
        if (j > w->first) load_block(*w, j);
        const forward_work<C>& next = mail.make(p, tile);
        load_block(*w, w->first);
        load_query(next);  // behind the last block, which it would hold up: 96 against 101 us at head_dim 128, causal, 512 keys
        w = &next;
      }
      if (p.counter) retire(p.counter, cta);
      return;
    }

    if constexpr (C::moves_registers) cta.template take_registers<C::consumer_registers>();
    const int wg = cta.warpgroup - 1;
    const named_barrier my_turn{first_turn + wg, 2}, next_turn{first_turn + (wg + 1) % C::consumers, 2};
    consumer query(s.query, s.query_flags);
    consumer key(s.key, s.key_flags);
    consumer value(s.value, s.value_flags);
    receiver mail(s.mail);
    register_tile<real, C::block_n> scores;
    register_tile<T, C::block_n> weights;
    register_tile<real, C::value_dim> output;
    row_vector<real> maximum, sum, shift, rescale, block_sum;
    [[maybe_unused]] block_note block{};  // modified: whose scores there are
    [[maybe_unused]] register_tile<T, C::block_n> bias;
    // A block's bias comes under its scores' product where the registers allow it, but the first block's. Before the product: it is a branch.
    auto load_bias = [&](const forward_work<C>& w) {
      if constexpr (C::modified) p.rules.load_bias(bias, {w.batch, w.head, w.row + wg * 64, block.block * C::block_n});
    };

    if (C::take_turns && wg == C::consumers - 1) next_turn.arrive();
    auto skipped = [&](const forward_work<C>& w) { return C::skips ? uniform(w.end - forward_blocks<C>(p, w, w.row + wg * 64).end) : 0; };
    auto issue_first_scores = [&](const forward_work<C>& w) {
      auto& q = query.wait();
      KITTENS_NO_UNROLL for (int skip = skipped(w); skip > 0; skip--) key.skip();
      auto& k = key.wait();
      if constexpr (C::modified) block = s.notes.tile.note[key.last()].uniform();
      mma_begin(scores);
      mma_ABt(scores, rows_of(q, wg * 64), k, 0);
      mma_commit();
    };
    bool more = mail.wait().end > 0;
    if (more) {
      issue_first_scores(mail.current());
      mma_wait<0>();
      mma_done(scores);
    }
    while (more) {  // the first scores of this tile are there
      const forward_work<C> w = mail.current().uniform();
      mail.release();
      const int row = w.row + wg * 64;
      const forward_blocks<C> blocks(p, w, row);
      auto& q = query.current();
      const auto scale = [&] {  // of the scores, and of the maximum that is taken from them
        if constexpr (C::modified)
          return real(1);
        else
          return p.scale_log2;
      };
      fill(maximum, -infinity<real>());
      fill(sum, real(0));

      auto mask = [&](int j) {
        const int column = j * C::block_n;
        const auto first = [&](int r) { return C::interval ? p.mask.first_key(row + r) - column : 0; };
        const auto end = [&](int r) { return (C::interval ? p.mask.end_key(row + r) : p.mask.length_k) - column; };
        if (first(63) > 0 || end(0) < C::block_n) keep_columns(scores, first, end);
      };
      // The running maximum becomes the reference; what was summed before is rescaled to it. No product is in flight.
      auto renew_reference = [&](bool first_block) {
        const row_vector<real> before = maximum;
        row_max(maximum, scores);
        map(shift, maximum, [&](real m) { return m == -infinity<real>() ? real(0) : m * scale(); });
        map(rescale, before, shift, [&](real m, real s) { return kittens::exp2(m * scale() - s); });
        exp2_into(weights, scores, shift, scale(), block_sum);
        map(sum, sum, rescale, [](real a, real f) { return a * f; });
        map(sum, sum, block_sum, [](real a, real b) { return a + b; });
        if (!first_block) map_rows(output, rescale, [](real x, real f) { return x * f; });
      };
      auto keep_reference = [&] {
        exp2_into(weights, scores, shift, p.scale_log2, block_sum);
        if (any_above(block_sum, weight_limit<T>())) {
          renew_reference(false);
        } else {
          map(sum, sum, block_sum, [](real a, real b) { return a + b; });
        }
      };
      [[maybe_unused]] auto weigh = [&] {  // modified: the weights of the block from its scores
        if constexpr (C::modified) {
          const score_place at{w.batch, w.head, row, block.block * C::block_n};
          const auto first = [&](int r) { return p.mask.first_key(row + r) - at.key; };
          const auto end = [&](int r) {
            const int last = p.mask.end_key(row + r);
            return (last < w.end_key ? last : w.end_key) - at.key;
          };
          const bool cut = first(63) > 0 || end(0) < C::block_n, masked = block.hides(wg);
          // A row without a reference has seen no key yet.
          const auto lacks_reference = [&] {
            map(rescale, maximum, [](real m) { return -m; });
            return block.first() || any_above(rescale, real(3.4e38));
          };
          const auto add_sums = [&] { map(sum, sum, block_sum, [](real a, real b) { return a + b; }); };
          if constexpr (C::one_pass)  // a soft cap alone, of small scores: from the scores to the weights at once
            if (p.rules.only_capped() && !cut && !masked && !lacks_reference() &&
                exp2_odd_into(weights, scores, maximum, p.rules.cap_score, block_sum) && !any_above(block_sum, weight_limit<T>())) {
              add_sums();
              return;
            }
          real factor = p.scale_log2;
          if (!p.rules.scores_are_plain()) {
            if (C::bias_early && block.first()) load_bias(w);
            factor = p.rules.template modify<C::row.takes_softcap, C::bias_early>(scores, bias, at);
          }
          if (cut) keep_columns(scores, first, end);
          if (masked) p.rules.hide(scores, at);
          bool renew = lacks_reference();
          if (!renew) {
            exp2_into(weights, scores, maximum, factor, block_sum);
            renew = any_above(block_sum, weight_limit<T>());
          }
          if (renew) {
            map(scores, [=](real x) { return x * factor; });
            renew_reference(block.first());
          } else {
            add_sums();
          }
          if (p.rules.given.dropout_state) p.rules.drop(weights, p.rules.dropout(w.batch, w.head, p.heads), at);
        }
      };
      // Zero times NaN is NaN: the values of keys that no row sees become zero, two warpgroups take half of the rows each.
      auto clear_unseen = [&](auto& v) {
        if constexpr (C::modified) {
          constexpr int half = C::block_n / 2;
          const int key = block.block * C::block_n;
          const auto unseen = [&](int r) { return p.rules.key_is_unseen(w.batch, w.head, key + r, w.end_key); };
          if (block.may_hold_unseen() && any_of<C::block_n>(unseen)) {
            if (wg < 2) zero_rows<half>(rows_of(v, wg * half), [&](int r) { return unseen(wg * half + r); });
            publish({first_turn + C::consumers, C::consumers});
          }
        }
      };
      auto step = [&](int j, auto masked) {  // output += weights * V of block j + 1, then the weights of block j
        auto& v = value.wait();
        clear_unseen(v);
        auto& k = key.wait();
        const bool more_than_first = C::modified ? !block.first() : j < blocks.end - 2;
        if constexpr (C::modified) block = s.notes.tile.note[key.last()].uniform();
        if constexpr (C::bias_early) load_bias(w);
        if constexpr (C::take_turns) my_turn.sync();
        mma_begin(scores, output, weights);
        mma_AB(output, weights, v, more_than_first);
        mma_ABt(scores, rows_of(q, wg * 64), k, 0);
        mma_commit();
        if constexpr (C::take_turns) next_turn.arrive();
        mma_wait<0>();
        mma_done(scores, output);
        value.release();
        key.release();
        if constexpr (C::modified) return;  // the weights come from weigh()
        if constexpr (masked) {
          mask(j);
          renew_reference(false);
        } else {
          keep_reference();
        }
      };

      key.release();
      KITTENS_NO_UNROLL for (int skip = skipped(w); skip > 0; skip--) {
        value.skip();
        if constexpr (C::take_turns) {
          my_turn.sync();
          next_turn.arrive();
        }
      }
      int j = blocks.end - 1;
      if constexpr (C::modified) {
        KITTENS_NO_UNROLL for (;;) {  // weigh() is long: it stands here once
          weigh();
          if (block.last()) break;
          step(j, std::true_type{});
        }
      } else {
        mask(j--);
        renew_reference(true);
        if constexpr (C::interval)
          for (; j >= w.first && j >= blocks.unmasked_end; j--) step(j, std::true_type{});
        for (; j >= blocks.unmasked_first; j--) step(j, std::false_type{});
        if constexpr (C::interval)
          for (; j >= w.first; j--) step(j, std::true_type{});
      }
      if constexpr (!C::output_in_query) query.release();

      auto& v = value.wait();
      clear_unseen(v);
      mma_begin(output, weights);
      mma_AB(output, weights, v, blocks.end - w.first > 1);
      mma_commit();
      auto leave_part = [&] {  // split: of these keys alone, forward_combine does the rest
        if constexpr (C::split) {
          map(rescale, sum, [](real l) { return l == real(0) ? real(0) : real(1) / l; });
          map_rows(output, rescale, [](real x, real f) { return f == real(0) ? real(0) : x * f; });
          map(sum, sum, shift, [](real l, real s) { return l == real(0) ? -infinity<real>() : s + kittens::log(l) * real(1.4426950408889634); });
          const int64_t at = static_cast<int64_t>(w.range) * 64;
          store_rows(p.part_logsumexp + at, sum, p.length_q - row);
          put_parts<C::output_columns>(p.parts + at * C::value_dim, output, p.length_q - row);
        }
      };
      auto write_output = [&] {
        // The sink joins the sum, against the larger of it and the reference.
        const real sink = w.sink;
        map(shift, maximum, [&](real m) { return m * scale() > sink ? m * scale() : sink == -infinity<real>() ? real(0) : sink; });
        map(rescale, maximum, shift, [&](real m, real s) { return kittens::exp2(m * scale() - s); });
        map(sum, sum, rescale, [](real l, real f) { return l * f; });
        map(sum, sum, shift, [&](real l, real s) { return l + kittens::exp2(sink - s); });
        map(rescale, rescale, sum, [&](real f, real l) {
          if constexpr (C::modified) f *= p.rules.keep_scale;
          return l == real(0) ? real(0) : f / l;
        });
        map_rows(output, rescale, [](real x, real f) { return f == real(0) ? real(0) : x * f; });
        if (p.logsumexp) {
          map(sum, sum, shift, [](real l, real s) { return l == real(0) ? -infinity<real>() : s * real(0.6931471805599453) + kittens::log(l); });
          store_rows(p.logsumexp + (static_cast<int64_t>(w.batch) * p.heads + w.head) * p.length_q + row, sum, p.length_q - row);
        }
        register_tile<T, C::output_columns> rounded;
        if constexpr (C::output_in_query) {
          convert(rounded, output, 0);
          store_async(p.output, rows_of(query.current(), wg * 64), rounded, {row, w.head, w.batch});
          store_wait_read();
          query.release();
        } else if constexpr (!C::split) {
          KITTENS_UNROLL for (int column = 0; column < C::value_dim; column += C::output_columns) {
            convert(rounded, output, column);
            store_async(p.output, rows_of(s.output.tile, wg * 64), rounded, {row, w.head, w.batch, column});
          }
        }
      };
      auto finish = [&] {
        mma_done(output);
        value.release();
        row_sum_finish(sum);
        if constexpr (C::split)
          leave_part();
        else
          write_output();
      };
      const forward_work<C>& next = mail.wait();
      more = next.end > 0;
      // The next tile's first scores run under this tile's epilogue, where there is a buffer for its query, and where this warpgroup does not
      // wait for keys that load only after it has released this tile's last values.
      if (!C::output_in_query && more && skipped(next) < C::stages) {
        issue_first_scores(next);
        mma_wait<1>();
        finish();
        mma_wait<0>();
        mma_done(scores);
      } else {
        mma_wait<0>();
        finish();
        if (more) {
          issue_first_scores(next);
          mma_wait<0>();
          mma_done(scores);
        }
      }
    }
    if (C::take_turns && wg == 0) my_turn.sync();  // takes the last turn that was passed on
    store_wait_all();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
