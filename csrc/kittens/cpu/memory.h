// Between global and shared memory, and between registers and both.
#pragma once
#include "barriers.h"
#include "mma.h"
#include "ops.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// A (batch, head, row, column) tensor read and written in boxes of Tile. Any strides.
template <class Tile> struct tile_map {
  using tile = Tile;
  using element = typename Tile::element;
  tensor_view tensor;

  // The box at `where`: of its rows and columns only those inside the tensor exist.
  matrix_view<element> box(place where) const {
    const bool exists =
        where.batch >= 0 && where.batch < tensor.size[0] && where.head >= 0 && where.head < tensor.size[1];
    const int64_t origin = where.batch * tensor.stride[0] + where.head * tensor.stride[1] +
                           where.row * tensor.stride[2] + where.column * tensor.stride[3];
    return {static_cast<const element*>(tensor.data) + origin,
            tensor.stride[2],
            tensor.stride[3],
            where.row < 0 ? -where.row : 0,
            exists ? clip(tensor.size[2] - where.row, Tile::rows) : 0,
            where.column < 0 ? -where.column : 0,
            clip(tensor.size[3] - where.column, Tile::columns)};
  }

 private:
  static int clip(int64_t end, int most) { return end < 0 ? 0 : end < most ? static_cast<int>(end) : most; }
};

// Host. Returns null or what is wrong with the tensor.
template <class Tile> KITTENS_INLINE const char* make_tile_map(tile_map<Tile>& map, const tensor_view& tensor) {
  map.tensor = tensor;
  for (int i = 0; i < 4; i++) {
    if (tensor.size[i] < 0) return "make_tile_map: a size is negative";
    if (tensor.size[i] > INT32_MAX) return "make_tile_map: a size is above 2^31 - 1";
  }
  return nullptr;
}

// Fills the tile from `where` on; what lies outside the tensor becomes zero. Completes on `full`.
template <class T, int R, int C> KITTENS_INLINE void copy(shared_tile<T, R, C>& tile,
                                                          const tile_map<shared_tile<T, R, C>>& map, place where,
                                                          barrier& full) {
  const matrix_view<T> box = map.box(where);
#if KITTENS_CHECKED
  runtime::check_place(tile.id(), where, sizeof(T), false);
  runtime::copy_issue(make_task([&tile, box] { copy_rows(tile.data, box, R, C); }), tile.id(), tile.bytes, full.state);
#else
  tile.panels.copied_from(box);
  runtime::barrier_complete(full.state, tile.bytes);
#endif
}

template <class T, int N> KITTENS_INLINE void copy(shared_vector<T, N>& vector, const T* source, barrier& full) {
  const auto move = [&vector, source] { __builtin_memcpy(vector.data, source, sizeof vector.data); };
#if KITTENS_CHECKED
  runtime::copy_issue(make_task(move), vector.id(), vector.bytes, full.state);
#else
  move();
  runtime::barrier_complete(full.state, vector.bytes);
#endif
}

// Registers to 64 rows of a shared tile.
template <class T, int R, int C>
KITTENS_INLINE void store(shared_rows<shared_tile<T, R, C>> to, const register_tile<T, C>& t) {
  use(t, "store");
#if KITTENS_CHECKED
  runtime::store_issue(to.tile.id(), {to.first, warpgroup_rows, 0, C});
#else
  to.tile.panels.own(to.tile.data);
#endif
  simd::convert_elements(to.tile.data + to.first * C, t.d, warpgroup_rows * C);
}

// The N rows from `to` on with zero(row): row 0 is the first of them. Publish before products read them.
template <int N, class T, int R, int C, class F>
KITTENS_INLINE void zero_rows(shared_rows<shared_tile<T, R, C>> to, F zero) {
#if KITTENS_CHECKED
  runtime::store_issue(to.tile.id(), {to.first, N, 0, C});
#else
  to.tile.panels.own(to.tile.data);
#endif
  for (int r = 0; r < N; r++)
    if (zero(r)) __builtin_memset(to.tile.data + (to.first + r) * C, 0, C * sizeof(T));
}

// The rows of a shared tile, for ordinary instructions.
template <class T, int R, int C>
KITTENS_INLINE const T* rows_to_read(shared_rows<shared_tile<T, R, C>> from, [[maybe_unused]] const char* operation) {
#if KITTENS_CHECKED
  runtime::read_shared(from.tile.id(), {from.first, warpgroup_rows, 0, C}, operation);
#else
  from.tile.panels.own(from.tile.data);
#endif
  return from.tile.data + from.first * C;
}

// 64 rows of a shared tile to registers, widened.
template <class Real, class T, int R, int C>
KITTENS_INLINE void load(register_tile<Real, C>& t, shared_rows<shared_tile<T, R, C>> from) {
  static_assert(std::is_same_v<Real, accumulator<T>>, "load: registers must be of the tile's accumulator type");
  use(t, "load");
  simd::convert_elements(t.d, rows_to_read(from, "load"), warpgroup_rows * C);
}

// The same, as they are.
template <class T, int R, int C>
  requires(!std::is_same_v<T, accumulator<T>>)
KITTENS_INLINE void load(register_tile<T, C>& t, shared_rows<shared_tile<T, R, C>> from) {
  use(t, "load");
  const T* data = rows_to_read(from, "load");
  for (int i = 0; i < warpgroup_rows * C; i++) registers::put_one<T>(t.d[i], widen(data[i]));
}
// The transpose of 64 columns.
template <class T, int R, int C>
KITTENS_INLINE void load_transposed(register_tile<T, R>& t, shared_columns<shared_tile<T, R, C>> from) {
  use(t, "load_transposed");
#if KITTENS_CHECKED
  runtime::read_shared(from.tile.id(), {0, R, from.first, warpgroup_rows}, "load_transposed");
#else
  from.tile.panels.own(from.tile.data);
#endif
  for (int r = 0; r < R; r++)
    for (int c = 0; c < warpgroup_rows; c++)
      registers::put_one<T>(t.d[c * R + r], widen(from.tile.data[r * C + from.first + c]));
}

// v += the dot products of the rows of a and b; a warpgroup is one thread here, so a share is the whole
template <class Real, class T, int R, int C> KITTENS_INLINE void row_dot(row_vector<Real>& v,
                                                                         shared_rows<shared_tile<T, R, C>> a,
                                                                         shared_rows<shared_tile<T, R, C>> b) {
  static_assert(std::is_same_v<Real, accumulator<T>>, "row_dot: sums must be of the tiles' accumulator type");
  const T *left = rows_to_read(a, "row_dot"), *right = rows_to_read(b, "row_dot");
  for (int r = 0; r < warpgroup_rows; r++) {
    Real x[C], y[C], sum = 0;
    simd::convert_elements(x, left + r * C, C);
    simd::convert_elements(y, right + r * C, C);
    for (int c = 0; c < C; c++) sum += x[c] * y[c];
    v.d[r] += sum;
  }
}

// Whether an element of a tile is infinite or NaN.
template <class T, int R, int C> KITTENS_INLINE bool any_not_finite(const shared_tile<T, R, C>& tile) {
#if KITTENS_CHECKED
  runtime::read_shared(tile.id(), {0, R, 0, C}, "any_not_finite");
  const matrix_view<T> view{tile.data, C, 1, 0, R, 0, C};
#else
  const matrix_view<T> view = tile.panels.elements(tile.data);
#endif
  accumulator<T> row[C];
  bool found = false;
  for (int r = 0; r < R; r++) {
    copy_row(row, view, r, C);
    accumulator<T> sum = 0;  // x - x is NaN where x is infinite or NaN, else 0
    for (int c = 0; c < C; c++) sum += row[c] - row[c];
    found |= sum != sum;
  }
  return found;
}

// N rows of a shared tile: what is infinite or NaN becomes zero. Publish before products read them.
template <int N, class T, int R, int C> KITTENS_INLINE void zero_not_finite(shared_rows<shared_tile<T, R, C>> rows) {
#if KITTENS_CHECKED
  runtime::store_issue(rows.tile.id(), {rows.first, N, 0, C});
#else
  rows.tile.panels.own(rows.tile.data);
#endif
  for (int i = rows.first * C; i < (rows.first + N) * C; i++) {
    const accumulator<T> x = widen(rows.tile.data[i]);
    if (!(x - x == 0)) rows.tile.data[i] = T{};
  }
}

// Makes stores visible to the products and copies of every warpgroup that meets at the barrier.
KITTENS_INLINE void publish(named_barrier where) {
#if KITTENS_CHECKED
  runtime::publish_stores();
#endif
  where.sync();
}

// The same, without waiting there: for warpgroups that sync at the barrier later.
KITTENS_INLINE void publish_arrive(named_barrier where) {
#if KITTENS_CHECKED
  runtime::publish_stores();
#endif
  where.arrive();
}

// 64 published rows to global memory; what lies outside the tensor is clipped. The source may be reused after
// store_wait_read().
template <class T, int R, int C> KITTENS_INLINE void send(const tile_map<shared_tile<T, warpgroup_rows, C>>& map,
                                                          shared_rows<shared_tile<T, R, C>> from, place where) {
  const matrix_view<T> box = map.box(where);
  const auto move = [box, data = from.tile.data + from.first * C] {
    T* base = const_cast<T*>(box.base);
    for (int r = box.row_begin; r < box.row_end; r++) {
      T* out = base + r * box.row_stride;
      const T* in = data + r * C;
      if (box.column_stride == 1)
        simd::convert_elements(out + box.column_begin, in + box.column_begin, box.column_end - box.column_begin);
      else
        for (int c = box.column_begin; c < box.column_end; c++) out[c * box.column_stride] = in[c];
    }
  };
#if KITTENS_CHECKED
  runtime::check_place(from.tile.id(), where, sizeof(T), true);
  runtime::send_issue(make_task(move), from.tile.id(), {from.first, warpgroup_rows, 0, C});
#else
  from.tile.panels.own(from.tile.data);
  move();
#endif
}

// This warpgroup's sends have read shared memory.
KITTENS_INLINE void store_wait_read() {
#if KITTENS_CHECKED
  runtime::send_wait(false);
#endif
}
// This warpgroup's sends are complete.
KITTENS_INLINE void store_wait_all() {
#if KITTENS_CHECKED
  runtime::send_wait(true);
#endif
}

template <class T, int R, int C> KITTENS_INLINE void store_async(const tile_map<shared_tile<T, warpgroup_rows, C>>& map,
                                                                 shared_rows<shared_tile<T, R, C>> through,
                                                                 const register_tile<T, C>& t, place where) {
  store_wait_read();
  store(through, t);
#if KITTENS_CHECKED
  runtime::publish_stores();
#endif
  send(map, through, where);
}

// pointer[row] = v[row] for row < count
template <class T> KITTENS_INLINE void store_rows(T* pointer, const row_vector<T>& v, int count) {
#if KITTENS_CHECKED
  runtime::touch_memory("store_rows");
#endif
  for (int r = 0; r < warpgroup_rows && r < count; r++) pointer[r] = v.d[r];
}

// v[row] = pointer[row] for row < count, else `otherwise`
template <class T> KITTENS_INLINE void load_rows(row_vector<T>& v, const T* pointer, int count,
                                                 std::type_identity_t<T> otherwise) {
#if KITTENS_CHECKED
  runtime::touch_memory("load_rows");
#endif
  for (int r = 0; r < warpgroup_rows; r++) v.d[r] = r < count ? pointer[r] : otherwise;
}

// v = the column sums of t, in a fixed order. v may be read once the warpgroup has met others.
template <class T, int C> KITTENS_INLINE void sum_columns(shared_vector<T, C>& v, const register_tile<T, C>& t) {
  use(t, "sum_columns");
#if KITTENS_CHECKED
  runtime::store_issue(v.id(), {0, 1, 0, C});
#endif
  for (int c = 0; c < C; c++) v.data[c] = 0;
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c++) v.data[c] += t.d[r * C + c];
}

// 64 x C tiles in global memory, one after the other, summed into by many; the order of their elements is private to
// these two.
template <class T, bool Held> struct tile_sums {
  T* mine;

  explicit tile_sums(T* first) : mine(first) {}
  template <int C> KITTENS_INLINE void add(const register_tile<T, C>& t) {
    use(t, "tile_sums::add");
#if KITTENS_CHECKED
    runtime::add_to_sums();
#endif
    runtime::lock_sums(mine);
    for (int i = 0; i < warpgroup_rows * C; i++) mine[i] += t.d[i];
    runtime::unlock_sums(mine);
  }
  KITTENS_INLINE void advance(int64_t values) { mine += values; }
};
template <class T, int C> KITTENS_INLINE void take_from(register_tile<T, C>& t, const T* sums) {
  use(t, "take_from");
#if KITTENS_CHECKED
  runtime::touch_memory("take_from");
#endif
  __builtin_memcpy(t.d, sums, sizeof t.d);
}
// The same of the rows below `rows`; the others become zero.
template <class T, int C> KITTENS_INLINE void take_from(register_tile<T, C>& t, const T* from, int rows) {
  use(t, "take_from");
#if KITTENS_CHECKED
  runtime::touch_memory("take_from");
#endif
  const int count = rows < 0 ? 0 : rows < warpgroup_rows ? rows : warpgroup_rows;
  for (int i = 0; i < count * C; i++) t.d[i] = from[i];
  for (int i = count * C; i < warpgroup_rows * C; i++) t.d[i] = 0;
}
// The rows of t below `rows`, as tiles of `Columns` columns one after the other, each of which take_from reads. What
// takes their place beyond is not to be read.
template <int Columns, class T, int C> KITTENS_INLINE void put_parts(T* to, const register_tile<T, C>& t, int rows) {
  static_assert(C % Columns == 0 && Columns % 8 == 0,
                "put_parts: parts must be multiples of 8 columns that divide the tile's");
  use(t, "put_parts");
#if KITTENS_CHECKED
  runtime::touch_memory("put_parts");
#endif
  for (int part = 0; part < C / Columns; part++)
    for (int r = 0; r < warpgroup_rows && r < rows; r++)
      for (int c = 0; c < Columns; c++)
        to[(part * warpgroup_rows + r) * Columns + c] = t.d[r * C + part * Columns + c];
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
