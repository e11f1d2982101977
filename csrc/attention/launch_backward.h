// From the host's arguments to the backward's kernels, one after the other. The same code for every machine.
#pragma once
#include <algorithm>
#include <utility>

#include "backward.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// Heads whose streamed tensors fit 32 of the H200's 60 MB second-level cache together, and more where their tiles are too few for the CTAs: then the
// longest tiles of the last heads would begin late (8 heads of 64 tiles, causal: 1.00 in pairs, 1.22 one by one). A power of two, so that heads
// divide evenly.
inline int heads_that_share_l2(int64_t heads, int64_t bytes_per_head, int64_t tiles_per_head, int64_t ctas) {
  int64_t count = 1;
  while (count * 2 <= heads && (count * 2 * bytes_per_head <= int64_t(32) << 20 || count * tiles_per_head * 4 < ctas * 3)) count *= 2;
  return static_cast<int>(count);
}

template <class C> struct backward_launch {
  using real = typename C::real;
  const backward_arguments& a;
  const kittens::execution& execution;
  const int batch = static_cast<int>(a.query.size[0]), heads = static_cast<int>(a.query.size[1]), heads_k = static_cast<int>(a.key.size[1]);
  const int length_q = static_cast<int>(a.query.size[2]);
  const int64_t columns = a.query.size[3] + a.value.size[3];

  template <bool SumsQuery, bool Folds, bool InOrder = false>
  using keys_kernel = std::conditional_t<C::row.roles, backward_roles_kernel<C>, backward_keys_kernel<C, SumsQuery, Folds, InOrder>>;

  // A view with fewer keys: what no row sees is outside the tensor, so it is neither loaded nor written.
  kittens::tensor_view seen(kittens::tensor_view view) const {
    view.data = static_cast<typename C::element*>(view.data) + a.mask.start * view.stride[2];
    view.size[2] = a.mask.length_k > 0 ? a.mask.length_k : 1;
    return view;
  }

  void set(backward_problem<C>& p, int tiles_per_head, int tile_heads, int64_t bytes_per_head, int ctas, kittens::tile_counter* counter) const {
    p.logsumexp2 = static_cast<const real*>(a.logsumexp2);
    p.delta = static_cast<const real*>(a.delta);
    p.mask = a.mask;
    p.scale = static_cast<real>(a.scale);
    p.scale_log2 = static_cast<real>(a.scale * 1.4426950408889634);
    p.heads = heads;
    p.group = heads / heads_k;
    p.length_q = length_q;
    p.padded_q = a.padded_q;
    p.tiles_per_head = tiles_per_head;
    p.tiles = tiles_per_head * tile_heads * batch;
    // Tiles of one length start side by side, unless they take turns: then neighbours had better be steps apart, and most heads rise.
    const bool mixes_heads = !is_open(a.mask) || a.query_turns;
    const int64_t all_heads = static_cast<int64_t>(batch) * tile_heads, neighbours = a.query_turns ? std::max<int64_t>(all_heads / 2, 1) : all_heads;
    p.heads_in_l2 = mixes_heads ? heads_that_share_l2(neighbours, bytes_per_head, tiles_per_head, ctas) : 1;
    p.counter = counter;
    if constexpr (C::modified) {
      p.rules = score_rules<typename C::element>(a.modifiers, a.classes, a.scale, length_q, a.mask.length_k, 0);
      p.bias_travels = bias_travels();
      p.bias_has_heads = a.modifiers.bias_stride[1] != 0;
      p.bias_has_batches = a.modifiers.bias_stride[0] != 0;
    }
  }

  // Whether a copy can read the bias: of the query's type, its rows where tensor maps take them.
  bool bias_travels() const {
    const score_modifiers& m = a.modifiers;
    constexpr int64_t aligned = 16 / sizeof(typename C::element);
    const bool strides = m.bias_stride[0] % aligned == 0 && m.bias_stride[1] % aligned == 0 && m.bias_stride[2] % aligned == 0;
    return m.bias && !m.bias_is_real && m.bias_stride[3] == 1 && m.bias_stride[2] != 0 && strides && reinterpret_cast<uintptr_t>(m.bias) % 16 == 0;
  }
  template <class Tile> const char* map_bias(kittens::tile_map<Tile>& map) const {
    const int64_t* stride = a.modifiers.bias_stride;
    if (!bias_travels()) return nullptr;
    const auto planes = [](int64_t apart, int count) { return apart == 0 ? 1 : count; };  // a broadcast dimension has one
    return kittens::make_tile_map(map, {const_cast<void*>(a.modifiers.bias),
                                        {planes(stride[0], batch), planes(stride[1], heads), length_q, a.mask.length_k},
                                        {stride[0], stride[1], stride[2], 1}});
  }

  const char* prepare() const {
    backward_prepare_params<C> p;
    const char* error = nullptr;
    if ((error = kittens::make_tile_map(p.output, a.output)) || (error = kittens::make_tile_map(p.grad_output, a.grad_output))) return error;
    p.logsumexp = static_cast<const real*>(a.logsumexp);
    p.grad_logsumexp = static_cast<const real*>(a.grad_logsumexp);
    p.logsumexp2 = static_cast<real*>(a.logsumexp2);
    p.delta = static_cast<real*>(a.delta);
    p.heads = heads;
    p.length_q = length_q;
    p.padded_q = a.padded_q;
    p.terms = static_cast<kittens::term_pair*>(a.terms);
    p.per_scale = static_cast<real>(1 / a.scale);
    return kittens::launch<backward_prepare<C>>(p, batch * heads * (a.padded_q / 64), execution);
  }

  template <class Kernel> const char* keys() const {
    backward_key_params<C> p;
    const kittens::tensor_view key = seen(a.key), value = seen(a.value);
    const char* error = nullptr;
    if ((error = kittens::make_tile_map(p.query, a.query)) || (error = kittens::make_tile_map(p.grad_output, a.grad_output)) ||
        (error = kittens::make_tile_map(p.key, key)) || (error = kittens::make_tile_map(p.value, value)))
      return error;
    p.need_key = a.grad_key.data != nullptr;
    p.need_value = a.grad_value.data != nullptr;
    if (p.need_key && (error = kittens::make_tile_map(p.grad_key, seen(a.grad_key)))) return error;
    if (p.need_value && (error = kittens::make_tile_map(p.grad_value, seen(a.grad_value)))) return error;
    // With their sums the heads of a group take twice the memory (1k keys, causal: 128 heads of 64 take 1.09 of the time of 64).
    const int64_t row_bytes = columns * sizeof(typename C::element) + (a.query_sum ? C::head_dim * sizeof(real) : 0);
    set(p, (a.mask.length_k + C::block_k - 1) / C::block_k, heads_k, row_bytes * length_q * (heads / heads_k), a.key_grid, a.key_counter);
    if constexpr (C::modified && !C::mask_alone)
      if ((error = map_bias(p.bias))) return error;
    p.query_sum = static_cast<real*>(a.query_sum);
    p.steps = a.padded_q / C::block_q;
    p.sum_step = 2 * C::query_sum_tile;
    p.terms = static_cast<const kittens::term_pair*>(a.terms);
    p.turns = a.query_turns;
    p.rising = a.query_turns ? (batch * heads_k - 1) / p.heads_in_l2 * p.heads_in_l2 * p.tiles_per_head : 0;
    return kittens::launch<Kernel>(p, a.key_grid, execution);
  }

  const char* query() const {
    backward_query_params<C> p;
    const kittens::tensor_view key = seen(a.key), value = seen(a.value);
    const char* error = nullptr;
    if ((error = kittens::make_tile_map(p.query, a.query)) || (error = kittens::make_tile_map(p.grad_output, a.grad_output)) ||
        (error = kittens::make_tile_map(p.key, key)) || (error = kittens::make_tile_map(p.value, value)) ||
        (error = kittens::make_tile_map(p.grad_query, a.grad_query)))
      return error;
    if constexpr (C::modified)
      if ((error = map_bias(p.bias))) return error;
    set(p, (length_q + C::block_m - 1) / C::block_m, heads, columns * a.mask.length_k * heads_k / heads * sizeof(typename C::element),
        a.query_grid, a.query_counter);
    return kittens::launch<backward_query_kernel<C>>(p, a.query_grid, execution);
  }

  const char* bias() const {
    backward_bias_params<C> p;
    const char* error = nullptr;
    if ((error = kittens::make_tile_map(p.query, a.query)) || (error = kittens::make_tile_map(p.grad_output, a.grad_output)) ||
        (error = kittens::make_tile_map(p.key, seen(a.key))) || (error = kittens::make_tile_map(p.value, seen(a.value))) || (error = map_bias(p.bias)))
      return error;
    p.grad_bias = a.grad_bias.data;
    const int full[4] = {batch, heads, (length_q + C::block_m - 1) / C::block_m, (a.mask.length_k + C::block_n - 1) / C::block_n};
    p.steps = 1;
    int tiles = 1;
    for (int d = 0; d < 4; d++) {
      const bool broadcast = a.grad_bias.size[d] == 1;
      p.stride[d] = broadcast ? 0 : a.grad_bias.stride[d];
      p.tiles_of[d] = broadcast ? 1 : full[d];
      p.steps_of[d] = broadcast ? full[d] : 1;
      p.steps *= p.steps_of[d];
      tiles *= p.tiles_of[d];
    }
    set(p, 1, 1, 0, 1, nullptr);
    p.tiles = tiles;
    return kittens::launch<backward_bias_kernel<C>>(p, a.bias_grid, execution);
  }

  const char* finish() const {
    backward_finish_params<C> p;
    if (const char* error = kittens::make_tile_map(p.grad_query, a.grad_query)) return error;
    p.query_sum = static_cast<const real*>(a.query_sum);
    p.scale = static_cast<real>(a.scale);
    p.heads = heads;
    p.steps = a.padded_q / C::block_q;
    return kittens::launch<backward_finish<C>>(p, batch * heads * p.steps * 2, execution);
  }

  const char* run() const {
    if (const char* error = prepare()) return error;
    if constexpr (C::mask_alone) {
      const char* error = keys<keys_kernel<true, C::folds>>();
      return error ? error : finish();
    } else {
      return run_kernels();
    }
  }

 private:
  const char* run_kernels() const {
    if constexpr (C::row.sums_query())
      if (a.query_sum) {
        const char* error = a.query_turns ? keys<keys_kernel<true, C::folds, true>>() : keys<keys_kernel<true, C::folds>>();
        return error ? error : finish();
      }
    if (a.grad_key.data || a.grad_value.data)
      if (const char* error = a.terms ? keys<keys_kernel<false, C::folds>>() : keys<keys_kernel<false, false>>()) return error;
    if constexpr (C::modified)
      if (a.grad_bias.data)
        if (const char* error = bias()) return error;
    return a.grad_query.data ? query() : nullptr;
  }
};

template <class C> const char* launch_backward(const backward_arguments& a, const kittens::execution& execution) {
  return backward_launch<C>{a, execution}.run();
}

template <class T, const auto& Rows, bool Modified, int... Row>
backward_launcher backward_launcher_at(int configuration, std::integer_sequence<int, Row...>) {
  static constexpr backward_launcher launchers[] = {&launch_backward<backward_config<T, Rows, Row, Modified>>...};
  return launchers[configuration];
}

// The launcher of one row of a table, for one element type.
template <class T, const auto& Rows, int Count> backward_launcher find_backward_launcher(int configuration) {
  return backward_launcher_at<T, Rows, false>(configuration, std::make_integer_sequence<int, Count>{});
}
// The same of the modified class.
template <class T, const auto& Rows, int Count> backward_launcher find_modified_backward_launcher(int configuration) {
  return backward_launcher_at<T, Rows, true>(configuration, std::make_integer_sequence<int, Count>{});
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
