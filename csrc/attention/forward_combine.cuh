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
  real* logsumexp;        // or null
  const real* sinks;      // over (head), or over (head, row) and contiguous; or null
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
    constexpr int at_once = 8;  // ranges whose loads are in flight together: their latency is most of the time
    const int tile = cta.index / C::output_parts, part = cta.index - tile * C::output_parts, rest = tile / p.row_tiles;
    const int row = (tile - rest * p.row_tiles) * 64, batch = rest / p.heads, head = rest - batch * p.heads, count = p.length_q - row;
    const int64_t range = static_cast<int64_t>(tile) * p.splits;
    const real *from = p.parts + (range * C::value_dim + part * columns) * 64, *from_logsumexp = p.part_logsumexp + range * 64;
    row_vector<real> logsumexp[at_once], most, shift, weight, sum;
    register_tile<real, columns> output, one;
    fill(most, -infinity<real>());
    fill(output, real(0));
    cta.await_earlier_launches();
    if (p.sinks && p.sinks_by_row)
      load_rows(most, p.sinks + static_cast<int64_t>(head) * p.length_q + row, count, -infinity<real>());
    else if (p.sinks)
      fill(most, p.sinks[head * p.sink_stride]);
    map(most, most, [](real sink) { return sink * real(1.4426950408889634); });
    map(sum, most, [](real sink) { return sink == -infinity<real>() ? real(0) : kittens::exp2(sink - sink); });
    KITTENS_NO_UNROLL for (int first = 0; first < p.splits; first += at_once) {
      KITTENS_UNROLL for (int i = 0; i < at_once; i++)
        load_rows(logsumexp[i], from_logsumexp + (first + i) * 64, first + i < p.splits ? count : 0, -infinity<real>());
      weight = most;
      KITTENS_UNROLL for (int i = 0; i < at_once; i++) map(most, most, logsumexp[i], [](real m, real l) { return l > m ? l : m; });
      map(shift, most, [](real m) { return m == -infinity<real>() ? real(0) : m; });
      map(weight, weight, shift, [](real m, real s) { return kittens::exp2(m - s); });
      map(sum, sum, weight, [](real l, real f) { return l * f; });
      map_rows(output, weight, [](real x, real f) { return x * f; });
      KITTENS_UNROLL for (int i = 0; i < at_once; i++) {
        take_from(one, from + static_cast<int64_t>(first + i) * 64 * C::value_dim, first + i < p.splits ? count : 0);
        map(weight, logsumexp[i], shift, [](real l, real s) { return kittens::exp2(l - s); });
        map(sum, sum, weight, [](real l, real w) { return l + w; });
        map_rows(output, one, weight, [](real x, real y, real w) { return x + w * y; });
      }
    }
    map(weight, sum, [](real l) { return l == real(0) ? real(0) : real(1) / l; });
    map_rows(output, weight, [](real x, real f) { return x * f; });
    if (part == 0 && p.logsumexp) {
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
