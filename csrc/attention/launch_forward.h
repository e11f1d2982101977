// From the host's arguments to a running forward kernel. The same code for every machine.
#pragma once
#include <utility>

#include "forward.cuh"
#include "forward_combine.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// Heads whose K and V fit 32 of the H200's 60 MB second-level cache together: a power of two, so that heads divide evenly.
inline int heads_that_share_l2(const forward_arguments& a, int element_bytes) {
  const int64_t heads = a.query.size[0] * a.query.size[1], group = a.query.size[1] / a.key.size[1];
  const int64_t bytes = (a.key.size[3] + a.value.size[3]) * a.key.size[2] * element_bytes;
  int64_t count = 1;
  while (count * 2 <= heads && count * 2 * bytes <= (int64_t(32) << 20) * group) count *= 2;
  return static_cast<int>(count);
}

template <class C> const char* set_forward_params(forward_params<C>& p, const forward_arguments& a) {
  using real = typename C::real;
  // Class tiles and everything else that modifies scores count the caller's keys.
  p.mask = C::modified ? with_every_key(a.mask) : a.mask;
  // Views with fewer keys: what no row sees is outside the tensor, so it is never loaded.
  kittens::tensor_view key = a.key, value = a.value;
  for (kittens::tensor_view* view : {&key, &value}) {
    view->data = static_cast<typename C::element*>(view->data) + p.mask.start * view->stride[2];
    view->size[2] = p.mask.length_k > 0 ? p.mask.length_k : 1;
  }
  const char* error = nullptr;
  if ((error = kittens::make_tile_map(p.query, a.query)) || (error = kittens::make_tile_map(p.key, key)) ||
      (error = kittens::make_tile_map(p.value, value)) || (error = kittens::make_tile_map(p.output, a.output)))
    return error;
  p.logsumexp = static_cast<real*>(a.logsumexp);
  p.scale_log2 = static_cast<real>(a.scale * 1.4426950408889634);
  p.heads = static_cast<int>(a.query.size[1]);
  p.group = static_cast<int>(a.query.size[1] / a.key.size[1]);
  p.length_q = static_cast<int>(a.query.size[2]);
  p.row_tiles = (p.length_q + C::block_m - 1) / C::block_m;
  p.tiles = static_cast<int>(a.query.size[0] * p.heads * p.row_tiles);
  p.heads_in_l2 = heads_that_share_l2(a, sizeof(typename C::element));
  p.counter = a.counter;
  p.sinks = static_cast<const real*>(a.modifiers.sinks);
  p.sink_stride = a.modifiers.sink_stride;
  return nullptr;
}

template <class C> const char* launch_forward(const forward_arguments& a, const kittens::execution& execution) {
  forward_params<C> p;
  if (a.modifiers.mask && !a.classes.tiles) return "a mask needs the classes of its tiles";
  if (const char* error = set_forward_params<C>(p, a)) return error;
  if constexpr (C::modified)
    p.rules = {a.modifiers, a.classes, a.scale, p.length_q, static_cast<int>(p.mask.length_k), a.mask.start};
  return kittens::launch<forward_kernel<C>>(p, a.grid, execution);
}

// The kernel that leaves parts, and the one that puts them together.
template <class C> const char* launch_split_forward(const forward_arguments& a, const kittens::execution& execution) {
  using real = typename C::real;
  forward_params<C> p;
  if (const char* error = set_forward_params<C>(p, a)) return error;
  forward_combine_params<C> q;
  q.output = p.output;
  q.logsumexp = p.logsumexp;
  q.sinks = p.sinks;
  q.sink_stride = p.sink_stride;
  q.sinks_by_row = a.sinks_by_row;
  q.heads = p.heads;
  q.length_q = p.length_q;
  q.row_tiles = p.row_tiles;
  q.splits = p.splits = a.splits;
  const int tiles = p.tiles;
  p.tiles *= a.splits;
  p.sinks = nullptr;
  p.parts = static_cast<real*>(a.parts);
  p.part_logsumexp = p.parts + static_cast<int64_t>(p.tiles) * 64 * C::value_dim;
  q.parts = p.parts;
  q.part_logsumexp = p.part_logsumexp;
  if (const char* error = kittens::launch<forward_kernel<C>>(p, a.grid, execution)) return error;
  return kittens::launch<forward_combine<C>>(q, tiles * C::output_parts, execution);
}

template <class T, const auto& Rows, int... Row> forward_launcher forward_launcher_at(int configuration, bool interval, std::integer_sequence<int, Row...>) {
  static constexpr forward_launcher launchers[][2] = {
      {&launch_forward<forward_config<T, Rows, Row, mask_class::full>>, &launch_forward<forward_config<T, Rows, Row, mask_class::interval>>}...};
  return launchers[configuration][interval];
}

// The launcher of one row of a table, for one element type, without modifiers.
template <class T, const auto& Rows, int Count> forward_launcher find_forward_launcher(int configuration, bool interval) {
  return forward_launcher_at<T, Rows>(configuration, interval, std::make_integer_sequence<int, Count>{});
}

template <class T, const auto& Rows, int... Row> forward_launcher split_launcher_at(int configuration, std::integer_sequence<int, Row...>) {
  static constexpr forward_launcher launchers[] = {&launch_split_forward<forward_config<T, Rows, Row, mask_class::interval, true>>...};
  return configuration >= 0 && configuration < static_cast<int>(sizeof...(Row)) ? launchers[configuration] : nullptr;
}

// The same of a table of split rows. Null where it has no such row.
template <class T, const auto& Rows, int Count> forward_launcher find_split_launcher(int configuration) {
  return split_launcher_at<T, Rows>(configuration, std::make_integer_sequence<int, Count>{});
}

template <class T, const auto& Rows, int... Row> forward_launcher modified_launcher_at(int configuration, std::integer_sequence<int, Row...>) {
  static constexpr forward_launcher launchers[] = {&launch_forward<forward_config<T, Rows, Row, mask_class::modified>>...};
  return configuration >= 0 && configuration < static_cast<int>(sizeof...(Row)) ? launchers[configuration] : nullptr;
}

// The same with modifiers. Null where the table has no such row.
template <class T, const auto& Rows, int Count> forward_launcher find_modified_launcher(int configuration) {
  return modified_launcher_at<T, Rows>(configuration, std::make_integer_sequence<int, Count>{});
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
