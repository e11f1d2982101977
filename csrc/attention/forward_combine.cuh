// The output of rows whose keys were divided among CTAs, from the parts.
//
// Few query rows against many keys are too few tiles for the multiprocessors. A split forward kernel takes a range of a tile's keys, and leaves
// the softmax of these alone times V, and their logsumexp in base 2, l. With w = exp2(l - max l) the output is sum(w part) / sum(w): ranges are
// added in their order, so that it is the same at every run. A range without a key has l = -inf and a part of zeros.
#pragma once
#include "forward_shapes.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class C> struct forward_combine_params {
  using real = typename C::real;
  kittens::tile_map<typename forward_tiles<C>::output_rows> output;
  const real *parts, *part_logsumexp;
  real* logsumexp;
  const real* sinks;      // over (head), or over (head, row); or null
  int64_t sink_stride;
  bool sinks_by_row;
  int heads, length_q, row_tiles, splits;
};

// One warpgroup for 64 rows of one column part.
template <class C> struct forward_combine {
  using params = forward_combine_params<C>;
  struct shared {
    typename forward_tiles<C>::output_rows stage;
  };
  static constexpr int warpgroups = 1;
  static constexpr bool starts_early = true;

  static KITTENS_KERNEL void run(const params& p, shared& s, kittens::cta cta) {
    using namespace kittens;
    using real = typename C::real;
    constexpr int columns = C::output_columns;
    const int tile = cta.index / C::output_parts, part = cta.index - tile * C::output_parts, rest = tile / p.row_tiles;
    const int row = (tile - rest * p.row_tiles) * 64, batch = rest / p.heads, head = rest - batch * p.heads, count = p.length_q - row;
    const int64_t range = static_cast<int64_t>(tile) * p.splits;
    const real *from = p.parts + (range * C::value_dim + part * columns) * 64, *from_logsumexp = p.part_logsumexp + range * 64;
    row_vector<real> logsumexp, sink, shift, weight, sum;
    register_tile<real, columns> output, one;
    fill(sink, -infinity<real>());
    fill(output, real(0));
    cta.await_earlier_launches();
    if (p.sinks && p.sinks_by_row)
      load_rows(sink, p.sinks + (static_cast<int64_t>(head) * p.length_q + row) * p.sink_stride, count, -infinity<real>());
    else if (p.sinks)
      fill(sink, p.sinks[head * p.sink_stride]);
    map(sink, sink, [](real x) { return x * real(1.4426950408889634); });
    shift = sink;
    for (int i = 0; i < p.splits; i++) {
      load_rows(logsumexp, from_logsumexp + i * 64, count, -infinity<real>());
      map(shift, shift, logsumexp, [](real m, real l) { return l > m ? l : m; });
    }
    map(shift, shift, [](real m) { return m == -infinity<real>() ? real(0) : m; });
    map(sum, sink, shift, [](real x, real m) { return kittens::exp2(x - m); });
    for (int i = 0; i < p.splits; i++) {
      load_rows(logsumexp, from_logsumexp + i * 64, count, -infinity<real>());
      take_from(one, from + static_cast<int64_t>(i) * 64 * C::value_dim, count);
      map(weight, logsumexp, shift, [](real l, real m) { return kittens::exp2(l - m); });
      map(sum, sum, weight, [](real a, real b) { return a + b; });
      map_rows(output, one, weight, [](real x, real y, real w) { return x + w * y; });
    }
    map(weight, sum, [](real l) { return l == real(0) ? real(0) : real(1) / l; });
    map_rows(output, weight, [](real x, real f) { return x * f; });
    if (part == 0) {
      map(sum, sum, shift, [](real l, real m) { return l == real(0) ? -infinity<real>() : m * real(0.6931471805599453) + kittens::log(l); });
      store_rows(p.logsumexp + static_cast<int64_t>(rest) * p.length_q + row, sum, count);
    }
    register_tile<typename C::element, columns> rounded;
    convert(rounded, output);
    store(rows_of(s.stage, 0), rounded);
    publish({first_free_barrier, 1});
    send(p.output, rows_of(s.stage, 0), {row, head, batch, part * columns});
    store_wait_all();
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
