// Elementwise operations, reductions and conversions on register tiles and row vectors.
#pragma once
#include "exp2.h"
#include "types.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// Registers <-> values: a 16-bit register tile is either widened already or, on AMX, still 16 bits wide.
namespace registers {
template <class T> KITTENS_ALWAYS_INLINE accumulator<T> get(const register_element<T>& x) {
  if constexpr (std::is_same_v<register_element<T>, accumulator<T>>)
    return x;
  else
    return float_of_bits(static_cast<uint32_t>(x.bits) << 16);
}
template <class T, class W> KITTENS_ALWAYS_INLINE void put(register_element<T>* out, simd::vector<W> x) {
  if constexpr (std::is_same_v<register_element<T>, W>)
    simd::store(out, simd::round_to(x, T{}));
  else
    simd::store(out, x);
}
template <class T, class W> KITTENS_ALWAYS_INLINE void put_weight(register_element<T>* out, simd::vector<W> x) {
  if constexpr (!std::is_same_v<T, bf16>) {
    put<T, W>(out, x);
  } else if constexpr (std::is_same_v<register_element<T>, W>) {
    simd::store(out, (simd::vector_float)simd::rounded_weight_bits(x));
  } else {
    const simd::vector_uint16 bits = __builtin_convertvector(simd::rounded_weight_bits(x) >> 16, simd::vector_uint16);
    __builtin_memcpy(out, &bits, sizeof bits);
  }
}
template <class T> KITTENS_ALWAYS_INLINE void put_one(register_element<T>& out, accumulator<T> x) {
  if constexpr (!is_16_bit<T>) {
    out = x;
  } else if constexpr (std::is_same_v<register_element<T>, float>) {
    out = simd::round_to(simd::broadcast<float>(x), T{})[0];
  } else {
    out.bits = static_cast<uint16_t>(simd::rounded_bits(simd::broadcast<float>(x), T{})[0] >> 16);
  }
}
}  // namespace registers

template <class T, int C> KITTENS_INLINE void fill(register_tile<T, C>& t, std::type_identity_t<accumulator<T>> x) {
  use(t, "fill");
  for (int i = 0; i < warpgroup_rows * C; i++) registers::put_one<T>(t.d[i], x);
}
template <class T> KITTENS_INLINE void fill(row_vector<T>& v, std::type_identity_t<T> x) {
  for (int r = 0; r < warpgroup_rows; r++) v.d[r] = x;
}

// t = f(row, column, t) or f(t)
template <class T, int C, class F> KITTENS_INLINE void map(register_tile<T, C>& t, F f) {
  use(t, "map");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c++) {
      const accumulator<T> x = registers::get<T>(t.d[r * C + c]);
      if constexpr (std::is_invocable_v<F, int, int, accumulator<T>>)
        registers::put_one<T>(t.d[r * C + c], f(r, c, x));
      else
        registers::put_one<T>(t.d[r * C + c], f(x));
    }
}
// t = f(row, column) ? t : 0
// Of each row the columns first(row) <= column < end(row) keep their values, the others become -infinity.
template <class Real, int C, class First, class End>
KITTENS_INLINE void keep_columns(register_tile<Real, C>& t, First first, End end) {
  static_assert(C <= 128, "keep_columns: the GPU takes at most 128 columns");
  use(t, "keep_columns");
  for (int r = 0; r < warpgroup_rows; r++) {
    const int begin = first(r) < 0 ? 0 : first(r) < C ? first(r) : C, stop = end(r) > begin ? (end(r) < C ? end(r) : C) : begin;
    Real* row = t.d + r * C;
    for (int c = 0; c < begin; c++) row[c] = -infinity<Real>();
    for (int c = stop; c < C; c++) row[c] = -infinity<Real>();
  }
}
template <class Real, int C, class F> KITTENS_INLINE void zero_unless(register_tile<Real, C>& t, F f) {
  use(t, "zero_unless");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c++) t.d[r * C + c] = f(r, c) ? t.d[r * C + c] : Real(0);
}
// out = f(t), rounded
template <class T, class Real, int C, class F>
KITTENS_INLINE void map_into(register_tile<T, C>& out, const register_tile<Real, C>& t, F f) {
  use(out, "map_into");
  use(t, "map_into");
  for (int i = 0; i < warpgroup_rows * C; i++) registers::put_one<T>(out.d[i], f(t.d[i]));
}
// t = f(t, u)
template <class T, class Real, int C, class F>
KITTENS_INLINE void map_with(register_tile<Real, C>& t, const register_tile<T, C>& u, F f) {
  use(t, "map_with");
  use(u, "map_with");
  for (int i = 0; i < warpgroup_rows * C; i++) t.d[i] = f(t.d[i], registers::get<T>(u.d[i]));
}
// Takes the columns in groups of 32, as far as a group begins before `end`, and leaves the others as they
// are.
inline int end_of_groups(int end, int columns) {
  const int whole = end > 0 ? (end + 31) / 32 * 32 : 0;
  return whole < columns ? whole : columns;
}
// f(row, column, x), in place
template <class Real, int C, class F> KITTENS_INLINE void map_below(register_tile<Real, C>& t, int end, F f) {
  use(t, "map_below");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < end_of_groups(end, C); c++) t.d[r * C + c] = f(r, c, t.d[r * C + c]);
}
// Elements that are not drawn change their sign. draw(row, column) decides on eight: the rows row + 8 a by the columns
// column + 8 b + e; it is asked where row % 16 < 8, column % 16 < 8 and column is even, in the groups of 16 columns that
// begin below `end`. Its word pair(a, b), given to `verdict`, has bit 15 or 31 set where the element of e = 0 or 1 stays.
template <class Draw, class Verdict, class F> KITTENS_INLINE void each_undrawn(int rows, int columns, Draw draw, Verdict verdict, F f) {
  for (int r = 0; r < rows; r += r % 8 == 7 ? 9 : 1)
    for (int c = 0; c < columns; c += c % 8 == 6 ? 10 : 2) {
      const auto drawn = draw(r, c);
      for (int a = 0; a < 2; a++)
        for (int b = 0; b < 2; b++) {
          const uint32_t kept = verdict(drawn.pair(a, b));
          for (int e = 0; e < 2; e++)
            if (!(kept >> (16 * e + 15) & 1)) f(r + 8 * a, c + 8 * b + e);
        }
    }
}
inline int end_of_draws(int end, int columns) {
  const int whole = end > 0 ? (end + 15) / 16 * 16 : 0;
  return whole < columns ? whole : columns;
}
template <class Real, int C, class Draw, class Verdict>
KITTENS_INLINE void negate_undrawn(register_tile<Real, C>& t, int end, Draw draw, Verdict verdict) {
  use(t, "negate_undrawn");
  each_undrawn(warpgroup_rows, end_of_draws(end, C), draw, verdict, [&](int r, int c) { t.d[r * C + c] = -t.d[r * C + c]; });
}
// The same of a transposed tile: draw(column, row) decides on the columns column + 8 a by the rows row + 8 b + e.
template <class Real, int C, class Draw, class Verdict>
KITTENS_INLINE void negate_undrawn_transposed(register_tile<Real, C>& t, int end, Draw draw, Verdict verdict) {
  use(t, "negate_undrawn_transposed");
  each_undrawn(end_of_draws(end, C), warpgroup_rows, draw, verdict, [&](int c, int r) { t.d[r * C + c] = -t.d[r * C + c]; });
}
// f(row, column, x, y), in place, of each two neighbours: x of an even column, y of the next
template <class Real, int C, class F> KITTENS_INLINE void map_pairs(register_tile<Real, C>& t, F f) {
  use(t, "map_pairs");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c += 2) f(r, c, t.d[r * C + c], t.d[r * C + c + 1]);
}
// t = f(t, element), of the columns below `count`: a row's element c is from(row)[c * stride], widened
template <class Real, int C, class From, class F>
KITTENS_INLINE void map_with_elements(register_tile<Real, C>& t, From from, int64_t stride, int count, F f) {
  use(t, "map_with_elements");
  for (int r = 0; r < warpgroup_rows; r++) {
    const auto* row = from(r);
    for (int c = 0; c < C && c < count; c++) t.d[r * C + c] = f(t.d[r * C + c], widen(row[c * stride]));
  }
}
// t = from(row)[column]
template <class T, int C, class From> KITTENS_INLINE void load_pairs(register_tile<T, C>& t, From from) {
  use(t, "load_pairs");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c++) registers::put_one<T>(t.d[r * C + c], widen(from(r)[c]));
}
// t = f(t, from(row)[column])
template <class Real, int C, class From, class F> KITTENS_INLINE void map_with_pairs(register_tile<Real, C>& t, From from, F f) {
  use(t, "map_with_pairs");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c++) t.d[r * C + c] = f(t.d[r * C + c], widen(from(r)[c]));
}
// bits(row, column): a bit for each of 32 columns from `column` on. Elements without one become `otherwise`.
template <class Real, int C, class F>
KITTENS_INLINE void keep_where(register_tile<Real, C>& t, F bits, std::type_identity_t<Real> otherwise) {
  static_assert(C % 32 == 0, "keep_where: a word has the bits of 32 columns");
  use(t, "keep_where");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int from = 0; from < C; from += 32) {
      const uint32_t word = bits(r, from);
      Real* x = t.d + r * C + from;
      for (int c = 0; c < 32; c++) x[c] = word >> c & 1 ? x[c] : otherwise;
    }
}
// The same of a transposed tile: bits(column, row), a bit for each of 16 rows from `row` on.
template <class Real, int C, class F>
KITTENS_INLINE void keep_where_transposed(register_tile<Real, C>& t, F bits, std::type_identity_t<Real> otherwise) {
  static_assert(C % 64 == 0, "keep_where_transposed: the GPU takes multiples of 64 columns");
  use(t, "keep_where_transposed");
  for (int c = 0; c < C; c++)
    for (int from = 0; from < warpgroup_rows; from += 16) {
      const uint32_t word = bits(c, from);
      for (int r = 0; r < 16; r++)
        if (!(word >> r & 1)) t.d[(from + r) * C + c] = otherwise;
    }
}
// A byte, 0 or 1, for each element of a tile of C columns.
template <int C> struct register_bytes {
  unsigned char d[warpgroup_rows * C];
};
// from(row): the bytes of the tile's columns in that row
template <int C, class F> KITTENS_INLINE void load_bytes(register_bytes<C>& bytes, F from) {
  for (int r = 0; r < warpgroup_rows; r++) __builtin_memcpy(bytes.d + r * C, from(r), C);
}
template <class Real, int C>
KITTENS_INLINE void keep_where(register_tile<Real, C>& t, const register_bytes<C>& bytes, std::type_identity_t<Real> otherwise) {
  use(t, "keep_where");
  for (int i = 0; i < warpgroup_rows * C; i++) t.d[i] = bytes.d[i] ? t.d[i] : otherwise;
}
// The same of a transposed tile. from(column): the bytes of the tile's 64 rows in that column
template <int C, class F> KITTENS_INLINE void load_bytes_transposed(register_bytes<C>& bytes, F from) {
  for (int c = 0; c < C; c++)
    for (int r = 0; r < warpgroup_rows; r++) bytes.d[r * C + c] = from(c)[r];
}
template <class Real, int C>
KITTENS_INLINE void keep_where_transposed(register_tile<Real, C>& t, const register_bytes<C>& bytes, std::type_identity_t<Real> otherwise) {
  keep_where(t, bytes, otherwise);
}
// Elements that are not drawn become zero; draw and verdict as for negate_undrawn.
template <class T, int C, class Draw, class Verdict>
KITTENS_INLINE void keep_drawn(register_tile<T, C>& t, Draw draw, Verdict verdict) {
  static_assert(C % 16 == 0, "keep_drawn: a draw reaches over 16 columns");
  use(t, "keep_drawn");
  each_undrawn(warpgroup_rows, C, draw, verdict, [&](int r, int c) { registers::put_one<T>(t.d[r * C + c], accumulator<T>(0)); });
}
// Whether f(r) holds for some r < N
template <int N, class F> KITTENS_INLINE bool any_of(F f) {
  for (int r = 0; r < N; r++)
    if (f(r)) return true;
  return false;
}
template <class T, class U, class F> KITTENS_INLINE void map(row_vector<T>& out, const row_vector<U>& a, F f) {
  for (int r = 0; r < warpgroup_rows; r++) out.d[r] = f(a.d[r]);
}
template <class T, class U, class V, class F>
KITTENS_INLINE void map(row_vector<T>& out, const row_vector<U>& a, const row_vector<V>& b, F f) {
  for (int r = 0; r < warpgroup_rows; r++) out.d[r] = f(a.d[r], b.d[r]);
}

// t = f(t, v of the row)
template <class T, int C, class U, class F>
KITTENS_INLINE void map_rows(register_tile<T, C>& t, const row_vector<U>& v, F f) {
  use(t, "map_rows");
  for (int r = 0; r < warpgroup_rows; r++) {
    const U y = v.d[r];
    for (int c = 0; c < C; c++) registers::put_one<T>(t.d[r * C + c], f(registers::get<T>(t.d[r * C + c]), y));
  }
}
// t = f(t, u, v of the row)
template <class T, class S, int C, class U, class F>
KITTENS_INLINE void map_rows(register_tile<T, C>& t, const register_tile<S, C>& u, const row_vector<U>& v, F f) {
  use(t, "map_rows");
  use(u, "map_rows");
  for (int r = 0; r < warpgroup_rows; r++) {
    const U y = v.d[r];
    for (int c = 0; c < C; c++)
      registers::put_one<T>(t.d[r * C + c], f(registers::get<T>(t.d[r * C + c]), registers::get<S>(u.d[r * C + c]), y));
  }
}
template <class U, int C>
KITTENS_ALWAYS_INLINE void use([[maybe_unused]] const shared_vector<U, C>& v, [[maybe_unused]] const char* operation) {
#if KITTENS_CHECKED
  runtime::read_shared(v.id(), {0, 1, 0, C}, operation);
#endif
}
template <class T, int C> KITTENS_INLINE void load_columns(column_vector<T, C>& v, const shared_vector<T, C>& from) {
  use(from, "load_columns");
  __builtin_memcpy(v.d, from.data, sizeof v.d);
}
// t = f(t, v of the column)
template <class T, int C, class U, class F>
KITTENS_INLINE void map_columns(register_tile<T, C>& t, const column_vector<U, C>& v, F f) {
  use(t, "map_columns");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c++) registers::put_one<T>(t.d[r * C + c], f(registers::get<T>(t.d[r * C + c]), v.d[c]));
}
// t = f(t, u, v of the column)
template <class T, class S, int C, class U, class F>
KITTENS_INLINE void map_columns(register_tile<T, C>& t, const register_tile<S, C>& u, const column_vector<U, C>& v,
                                F f) {
  use(t, "map_columns");
  use(u, "map_columns");
  for (int r = 0; r < warpgroup_rows; r++)
    for (int c = 0; c < C; c++)
      registers::put_one<T>(t.d[r * C + c],
                            f(registers::get<T>(t.d[r * C + c]), registers::get<S>(u.d[r * C + c]), v.d[c]));
}

// x[i] = exp2(x[i] * scale - y[i]) for i < count, y[0] for all where `same`
template <bool same, class Real> KITTENS_NO_INLINE void exp2_values(Real* x, const Real* y, Real scale, int count) {
  constexpr int n = simd::lanes<Real>, at_once = 2;
  int i = 0;
  for (; i + at_once * n <= count; i += at_once * n) {
    simd::vector<Real> w[at_once];
    for (int k = 0; k < at_once; k++)
      w[k] = simd::load(x + i + k * n) * scale - (same ? simd::broadcast<Real>(y[0]) : simd::load(y + i + k * n));
    simd::exp2_each<Real, simd::vector_bits<Real>>(w);
    for (int k = 0; k < at_once; k++) simd::store(x + i + k * n, w[k]);
  }
  for (; i < count; i++) x[i] = exp2(x[i] * scale - y[same ? 0 : i]);
}
// t = exp2(t * scale - v of the row or column)
template <class Real, int C>
KITTENS_INLINE void exp2_rows(register_tile<Real, C>& t, const row_vector<Real>& v, std::type_identity_t<Real> scale) {
  use(t, "exp2_rows");
  for (int r = 0; r < warpgroup_rows; r++) exp2_values<true>(t.d + r * C, v.d + r, scale, C);
}
template <class Real, int C> KITTENS_INLINE void exp2_columns(register_tile<Real, C>& t, const column_vector<Real, C>& v,
                                                              std::type_identity_t<Real> scale) {
  use(t, "exp2_columns");
  for (int r = 0; r < warpgroup_rows; r++) exp2_values<false>(t.d + r * C, v.d, scale, C);
}

// v = max(v, the rows' maxima). Four vectors side by side hide the latency.
template <class T, int C> KITTENS_NO_INLINE void row_max(row_vector<T>& v, const register_tile<T, C>& t) {
  use(t, "row_max");
  constexpr int n = simd::lanes<T>, whole = C / (4 * n) * (4 * n);
  for (int r = 0; r < warpgroup_rows; r++) {
    const T* x = t.d + r * C;
    T most = v.d[r];
    if constexpr (whole > 0) {
      simd::vector<T> a = simd::load(x), b = simd::load(x + n), c = simd::load(x + 2 * n), d = simd::load(x + 3 * n);
      for (int i = 4 * n; i < whole; i += 4 * n) {
        a = simd::maximum<T>(a, simd::load(x + i));
        b = simd::maximum<T>(b, simd::load(x + i + n));
        c = simd::maximum<T>(c, simd::load(x + i + 2 * n));
        d = simd::maximum<T>(d, simd::load(x + i + 3 * n));
      }
      const T part = simd::maximum_of<T>(simd::maximum<T>(simd::maximum<T>(a, b), simd::maximum<T>(c, d)));
      most = part > most ? part : most;
    }
    for (int i = whole; i < C; i++) most = x[i] > most ? x[i] : most;
    v.d[r] = most;
  }
}

// v += the rows' sums; a warpgroup is one thread here, so a share is the whole
template <class T, int C> KITTENS_NO_INLINE void row_sum(row_vector<T>& v, const register_tile<T, C>& t) {
  use(t, "row_sum");
  constexpr int n = simd::lanes<T>, whole = C / n * n;
  for (int r = 0; r < warpgroup_rows; r++) {
    const T* x = t.d + r * C;
    simd::vector<T> sums{};
    for (int i = 0; i < whole; i += n) sums += simd::load(x + i);
    T sum = simd::sum_of<T>(sums);
    for (int i = whole; i < C; i++) sum += x[i];
    v.d[r] += sum;
  }
}
template <class T> KITTENS_INLINE void row_sum_finish(row_vector<T>&) {}


// weights = exp2(t * scale - shift of the row), rounded to their type; sums = the sums of the rows before rounding
template <class T, class Real, int C>
KITTENS_NO_INLINE void exp2_into(register_tile<T, C>& weights, const register_tile<Real, C>& t,
                                 const row_vector<Real>& shift, std::type_identity_t<Real> scale,
                                 row_vector<Real>& sums) {
  use(weights, "exp2_into");
  use(t, "exp2_into");
  constexpr int n = simd::lanes<Real>, vectors = C / n,
                at_once = vectors % 4 == 0                  ? 4
                          : vectors % 2 == 0 && vectors > 0 ? 2
                                                            : 1;
  for (int r = 0; r < warpgroup_rows; r++) {
    const Real* x = t.d + r * C;
    register_element<T>* out = weights.d + r * C;
    const Real m = shift.d[r];
    simd::vector<Real> sum[at_once] = {};
    for (int c = 0; c < vectors * n; c += at_once * n) {
      simd::vector<Real> w[at_once];
#pragma GCC unroll 4
      for (int i = 0; i < at_once; i++) w[i] = simd::load(x + c + i * n) * scale - m;
      simd::exp2_each<Real, simd::vector_bits<Real>>(w);
#pragma GCC unroll 4
      for (int i = 0; i < at_once; i++) {
        sum[i] += w[i];
        registers::put_weight<T, Real>(out + c + i * n, w[i]);
      }
    }
    for (int i = 1; i < at_once; i++) sum[0] += sum[i];
    Real total = simd::sum_of<Real>(sum[0]);
    for (int c = vectors * n; c < C; c++) {
      const Real w = exp2(x[c] * scale - m);
      total += w;
      registers::put_one<T>(out[c], w);
    }
    sums.d[r] = total;
  }
}
// t = f(t) where all of t are small enough for it; else, and with double, for which it is not accurate, t stays as it is.
template <class Real, int C> KITTENS_INLINE bool map_odd(register_tile<Real, C>& t, const odd_function<Real>& f) {
  use(t, "map_odd");
  if (sizeof(Real) == 8) return false;
  for (int i = 0; i < warpgroup_rows * C; i++)
    if (!(t.d[i] * t.d[i] < f.bias)) return false;
  for (int i = 0; i < warpgroup_rows * C; i++) t.d[i] *= f.factor(t.d[i] * t.d[i] + f.bias);
  return true;
}
// weights = exp2(f(t) - shift of the row), where all of t are small enough for f.
template <class T, class Real, int C>
KITTENS_INLINE bool exp2_odd_into(register_tile<T, C>& weights, const register_tile<Real, C>& t, const row_vector<Real>& shift,
                                  const odd_function<Real>& f, row_vector<Real>& sums) {
  register_tile<Real, C> small = t;
  if (!map_odd(small, f)) return false;
  exp2_into(weights, small, shift, Real(1), sums);
  return true;
}

// Whether a value is above the limit or NaN
template <class T> KITTENS_INLINE bool any_above(const row_vector<T>& v, std::type_identity_t<T> limit) {
  bool above = false;
  for (int r = 0; r < warpgroup_rows; r++) above |= !(v.d[r] <= limit);
  return above;
}

// out = the columns of t from `first` on, in the type of out
template <class Out, class In, int C, int From>
KITTENS_NO_INLINE void convert(register_tile<Out, C>& out, const register_tile<In, From>& t, int first = 0) {
  static_assert(C <= From, "convert: the source has fewer columns");
  use(out, "convert");
  use(t, "convert");
#if KITTENS_CHECKED
  runtime::require_multiple("convert: first column", first, 8);
#endif
  constexpr int n = simd::lanes<accumulator<In>>, whole = C / n * n;
  for (int r = 0; r < warpgroup_rows; r++) {
    const register_element<In>* in = t.d + r * From + first;
    register_element<Out>* to = out.d + r * C;
    for (int c = 0; c < whole; c += n) registers::put<Out, accumulator<Out>>(to + c, simd::load(in + c));
    for (int c = whole; c < C; c++) registers::put_one<Out>(to[c], registers::get<In>(in[c]));
  }
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
