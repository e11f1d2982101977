// Elementwise operations, reductions along rows, and conversion.
#pragma once
#include "../core/odd.h"
#include "types.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

template <int C> KITTENS_INLINE void fill(register_tile<float, C>& t, float x) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = x;
}
KITTENS_INLINE void fill(row_vector<float>& v, float x) { v.d[0] = v.d[1] = x; }

// f(row, column, x) or f(x), in place
template <int C, class F> KITTENS_INLINE void map(register_tile<float, C>& t, F f) {
  if constexpr (std::is_invocable_v<F, float>) {
    KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = f(t.d[i]);
  } else {
    const int row = thread::first_row(), column = thread::first_column();
    KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = f(row + 8 * ((i >> 1) & 1), 8 * (i / 4) + column + (i & 1), t.d[i]);
  }
}
// t = f(row, column) ? t : 0. Rows and columns are worked out anew: kept across a kernel's loops they would take a register for each element.
template <int C, class F> KITTENS_INLINE void zero_unless(register_tile<float, C>& t, F f) {
  const int row = thread::first_row_now(), column = thread::first_column_now();
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++)
    if (!f(row + 8 * ((i >> 1) & 1), 8 * (i / 4) + column + (i & 1))) t.d[i] = 0;
}
// out = f(t), rounded
template <class T, int C, class F> KITTENS_INLINE void map_into(register_tile<T, C>& out, const register_tile<float, C>& t, F f) {
  KITTENS_UNROLL for (int i = 0; i < C / 4; i++) out.d[i] = pack<T>(f(t.d[2 * i]), f(t.d[2 * i + 1]));
}
// t = f(t, u)
template <int C, class F> KITTENS_INLINE void map_with(register_tile<float, C>& t, const register_tile<float, C>& u, F f) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = f(t.d[i], u.d[i]);
}
// The same with u of a 16-bit type
template <class T, int C, class F> KITTENS_INLINE void map_with(register_tile<float, C>& t, const register_tile<T, C>& u, F f) {
  KITTENS_UNROLL for (int i = 0; i < C / 4; i++) {
    const float2 y = unpack<T>(u.d[i]);
    t.d[2 * i] = f(t.d[2 * i], y.x);
    t.d[2 * i + 1] = f(t.d[2 * i + 1], y.y);
  }
}
// Takes the columns in groups of 32, as far as a group begins before `end`, and leave the others as they are. What the groups load is
// not in flight at once: that of a whole tile would take all registers. Rows and columns are worked out anew, as above.
//
// f(row, column, x), in place
template <int C, class F> KITTENS_INLINE void map_below(register_tile<float, C>& t, int end, F f) {
  const int row = thread::first_row_now(), column = thread::first_column_now();
  KITTENS_UNROLL for (int g = 0; g < C / 2; g += 16)
    if (2 * g < end)
      KITTENS_UNROLL for (int i = g; i < g + 16 && i < C / 2; i++)
        t.d[i] = f(row + 8 * ((i >> 1) & 1), 8 * (i / 4) + column + (i & 1), t.d[i]);
}
// Each half is its top bit, 16 times over.
KITTENS_INLINE uint32_t halves_of_signs(uint32_t x) {
  uint32_t r;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(r) : "r"(x));
  return r;
}
// x changes its sign where bit 15 of the verdict is 0, y where bit 31 is.
KITTENS_INLINE void negate_pair(float& x, float& y, uint32_t verdict) {
  x = __uint_as_float(__float_as_uint(x) ^ (~(verdict << 16) & 0x80000000u));
  y = __uint_as_float(__float_as_uint(y) ^ (~verdict & 0x80000000u));
}
// Elements that are not drawn change their sign. draw(row, column) decides on eight: the rows row + 8 a by the columns column + 8 b + e; it is
// asked where row % 16 < 8, column % 16 < 8 and column is even, in the groups of 16 columns that begin below `end`. Its word pair(a, b), given to
// `verdict`, has bit 15 or 31 set where the element of e = 0 or 1 stays.
template <int C, class Draw, class Verdict> KITTENS_INLINE void negate_undrawn(register_tile<float, C>& t, int end, Draw draw, Verdict verdict) {
  const int row = thread::first_row_now(), column = thread::first_column_now();
  KITTENS_UNROLL for (int from = 0; from < C; from += 16)
    if (from < end) {
      const auto drawn = draw(row, from + column);
      KITTENS_UNROLL for (int a = 0; a < 2; a++)
        KITTENS_UNROLL for (int b = 0; b < 2; b++)
          negate_pair(t.d[from / 2 + 4 * b + 2 * a], t.d[from / 2 + 4 * b + 2 * a + 1], verdict(drawn.pair(a, b)));
    }
}
// The same of a transposed tile: draw(column, row), asked where row % 16 < 8, column % 16 < 8 and row is even, decides on the columns column + 8 a
// by the rows row + 8 b + e. Two lanes hold what two draws decide, half of either each: they make one each and exchange halves.
template <int C, class Draw, class Verdict>
KITTENS_INLINE void negate_undrawn_transposed(register_tile<float, C>& t, int end, Draw draw, Verdict verdict) {
  const int row = thread::first_row_now(), column = thread::first_column_now(), odd = row & 1;
  const uint32_t own_half = odd ? 0x7632 : 0x5410, other_half = odd ? 0x5410 : 0x7632;
  KITTENS_UNROLL for (int from = 0; from < C; from += 16)
    if (from < end) {
      const auto drawn = draw(from + column + odd, row & ~1);
      KITTENS_UNROLL for (int a = 0; a < 2; a++) {
        const uint32_t own = __byte_perm(drawn.pair(a, 0), drawn.pair(a, 1), own_half);
        const uint32_t other = __shfl_xor_sync(~0u, __byte_perm(drawn.pair(a, 0), drawn.pair(a, 1), other_half), 4);
        const uint32_t left = verdict(odd ? other : own), right = verdict(odd ? own : other);  // columns of e = 0 and 1
        KITTENS_UNROLL for (int b = 0; b < 2; b++) {
          float &x = t.d[from / 2 + 4 * a + 2 * b], &y = t.d[from / 2 + 4 * a + 2 * b + 1];
          negate_pair(x, y, b == 0 ? __byte_perm(left, right, 0x5410) : __byte_perm(left, right, 0x7632));
        }
      }
    }
}
// f(row, column, x, y), in place, of each two neighbours: x of an even column, y of the next. Rows and columns are worked out anew, as above.
template <int C, class F> KITTENS_INLINE void map_pairs(register_tile<float, C>& t, F f) {
  const int row = thread::first_row_now(), column = thread::first_column_now();
  KITTENS_UNROLL for (int i = 0; i < C / 2; i += 2) f(row + 8 * ((i >> 1) & 1), 8 * (i / 4) + column, t.d[i], t.d[i + 1]);
}
// t = f(t, element), of the columns below `count`: a row's element c is from(row)[c * stride], widened. Addresses follow from each other, since all
// of them at once would not fit the registers.
template <int C, class From, class F> KITTENS_INLINE void map_with_elements(register_tile<float, C>& t, From from, int64_t stride, int count, F f) {
  const int row = thread::first_row_now(), column = thread::first_column_now();
  auto upper = from(row) + column * stride, lower = from(row + 8) + column * stride;
  KITTENS_UNROLL for (int j = 0; j < C / 8; j++) {
    KITTENS_UNROLL for (int e = 0; e < 2; e++) {
      if (8 * j + column + e < count) {
        t.d[4 * j + e] = f(t.d[4 * j + e], widen(upper[e * stride]));
        t.d[4 * j + 2 + e] = f(t.d[4 * j + 2 + e], widen(lower[e * stride]));
      }
    }
    upper += 8 * stride, lower += 8 * stride;
    asm volatile("" : "+l"(upper), "+l"(lower));
  }
}
// t = from(row)[column], of a 16-bit type and global memory, two neighbours lying where both together are aligned. Loads are issued where this stands
// and arrive under what follows.
template <class T, int C, class From>
  requires is_16_bit<T>
KITTENS_INLINE void load_pairs(register_tile<T, C>& t, From from) {
  const int row = thread::first_row_now(), column = thread::first_column_now();
  const T *upper = from(row) + column, *lower = from(row + 8) + column;
  KITTENS_UNROLL for (int i = 0; i < C / 4; i++)
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(t.d[i]) : "l"((i & 1 ? lower : upper) + i / 2 * 8));
}
// t = f(t, from(row)[column]), of memory as above
template <int C, class From, class F> KITTENS_INLINE void map_with_pairs(register_tile<float, C>& t, From from, F f) {
  const int row = thread::first_row_now(), column = thread::first_column_now();
  const auto *upper = from(row) + column, *lower = from(row + 8) + column;
  KITTENS_UNROLL for (int i = 0; i < C / 2; i += 2) {
    float x, y;
    widen_pair((i & 2 ? lower : upper) + i / 4 * 8, x, y);
    t.d[i] = f(t.d[i], x), t.d[i + 1] = f(t.d[i + 1], y);
  }
}
template <class F> KITTENS_INLINE void map(row_vector<float>& out, const row_vector<float>& a, F f) {
  KITTENS_UNROLL for (int r = 0; r < 2; r++) out.d[r] = f(a.d[r]);
}
template <class F> KITTENS_INLINE void map(row_vector<float>& out, const row_vector<float>& a, const row_vector<float>& b, F f) {
  KITTENS_UNROLL for (int r = 0; r < 2; r++) out.d[r] = f(a.d[r], b.d[r]);
}
template <int C, class F> KITTENS_INLINE void map_rows(register_tile<float, C>& t, const row_vector<float>& v, F f) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = f(t.d[i], v.d[(i >> 1) & 1]);
}
template <int C, class F>
KITTENS_INLINE void map_rows(register_tile<float, C>& t, const register_tile<float, C>& u, const row_vector<float>& v, F f) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = f(t.d[i], u.d[i], v.d[(i >> 1) & 1]);
}
template <int C> KITTENS_INLINE void load_columns(column_vector<float, C>& v, const shared_vector<float, C>& from) {
  KITTENS_UNROLL for (int j = 0; j < C / 8; j++) {
    const float2 x = *reinterpret_cast<const float2*>(from.data + 8 * j + thread::first_column());
    v.d[2 * j] = x.x, v.d[2 * j + 1] = x.y;
  }
}
template <int C, class F> KITTENS_INLINE void map_columns(register_tile<float, C>& t, const column_vector<float, C>& v, F f) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = f(t.d[i], v.d[i / 4 * 2 + (i & 1)]);
}
template <int C, class F>
KITTENS_INLINE void map_columns(register_tile<float, C>& t, const register_tile<float, C>& u, const column_vector<float, C>& v, F f) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] = f(t.d[i], u.d[i], v.d[i / 4 * 2 + (i & 1)]);
}

// t = exp2(t * scale - v of the row or column)
template <int C> KITTENS_INLINE void exp2_rows(register_tile<float, C>& t, const row_vector<float>& v, float scale) {
  map_rows(t, v, [=](float x, float y) { return kittens::exp2(fmaf(x, scale, -y)); });
}
template <int C> KITTENS_INLINE void exp2_columns(register_tile<float, C>& t, const column_vector<float, C>& v, float scale) {
  map_columns(t, v, [=](float x, float y) { return kittens::exp2(fmaf(x, scale, -y)); });
}

// Of each row the columns first(row) <= column < end(row) keep their values, the others become -infinity. The visible columns of a thread are the
// bits of a word, which the compiler moves to predicates seven at a time: a comparison less for each value.
template <int C, class First, class End> KITTENS_INLINE void keep_columns(register_tile<float, C>& t, First first, End end) {
  static_assert(C <= 128, "keep_columns: a thread's columns of a row must fit 32 bits");
  const auto below = [](int column) {  // one bit for each of this thread's columns below `column`: of every 8, it has two neighbours
    const int x = column - thread::first_column_now(), own = x <= 0 ? 0 : 2 * (x / 8) + (x % 8 < 2 ? x % 8 : 2);
    return own >= 32 ? ~0u : (1u << own) - 1;
  };
  KITTENS_UNROLL for (int r = 0; r < 2; r++) {
    const int row = thread::first_row_now() + 8 * r;
    const uint32_t visible = below(end(row)) & ~below(first(row));
    KITTENS_UNROLL for (int k = 0; k < C / 4; k++) {
      float& x = t.d[4 * (k / 2) + 2 * r + k % 2];
      x = visible >> k & 1 ? x : -infinity<float>();
    }
  }
}

// bits(row, column): a bit for each of 32 columns from `column` on. Elements without one become `otherwise`. The lanes of a quad, which share two
// rows, ask for a part of the words each and exchange them.
// The four lanes that share two rows have the words of both, in turns: row, then columns.
template <int C> struct words_of_lanes {
  static_assert(C % 32 == 0, "keep_where: a word has the bits of 32 columns");
  static constexpr int in_row = C / 32, own = (in_row + 1) / 2;
  template <class F> static KITTENS_INLINE void each(F f) {  // f(i, row, column) of the lane's own words
    const int lane = thread::in_warpgroup_now() & 31, row = thread::first_row_now();
    KITTENS_UNROLL for (int i = 0; i < own; i++) {
      const int at = (4 * i + (lane & 3)) % (2 * in_row);
      f(i, row + 8 * (at / in_row), 32 * (at % in_row));
    }
  }
  static KITTENS_INLINE void keep(register_tile<float, C>& t, const uint32_t (&words)[own], float otherwise) {
    const int lane = thread::in_warpgroup_now() & 31;
    KITTENS_UNROLL for (int at = 0; at < 2 * in_row; at++) {
      const uint32_t word = __shfl_sync(~0u, words[at / 4], (lane & 28) + at % 4) >> thread::first_column_now();
      KITTENS_UNROLL for (int k = 0; k < 8; k++) {
        float& x = t.d[4 * (4 * (at % in_row) + k / 2) + 2 * (at / in_row) + k % 2];
        x = word >> (8 * (k / 2) + k % 2) & 1 ? x : otherwise;
      }
    }
  }
};
template <int C, class F> KITTENS_INLINE void keep_where(register_tile<float, C>& t, F bits, float otherwise) {
  uint32_t words[words_of_lanes<C>::own];
  words_of_lanes<C>::each([&](int i, int row, int column) { words[i] = bits(row, column); });
  words_of_lanes<C>::keep(t, words, otherwise);
}
// A transposed tile. Each lane has bits of 16 rows of the columns `from + lane` and, in its upper half, `from + lane + 32`.
template <int C> KITTENS_INLINE void keep_of_lanes(register_tile<float, C>& t, int from, uint32_t own, float otherwise) {
  KITTENS_UNROLL for (int i = 0; i < 4; i++)
    KITTENS_UNROLL for (int e = 0; e < 2; e++) {
      const uint32_t word = __shfl_sync(~0u, own, 8 * i + thread::first_column_now() + e) >> ((thread::in_warpgroup_now() & 31) / 4);
      KITTENS_UNROLL for (int k = 0; k < 4; k++) {  // rows 8 apart by columns 32 apart
        float& x = t.d[from / 2 + 16 * (k / 2) + 4 * i + 2 * (k % 2) + e];
        x = word >> (8 * k) & 1 ? x : otherwise;
      }
    }
}
// The same of a transposed tile: bits(column, row), a bit for each of 16 rows from `row` on. A lane asks for two columns, 32 apart.
template <int C, class F> KITTENS_INLINE void keep_where_transposed(register_tile<float, C>& t, F bits, float otherwise) {
  static_assert(C % 64 == 0, "keep_where_transposed: a warp's lanes take 64 columns");
  const int me = thread::in_warpgroup_now(), lane = me & 31, row = me / 32 * 16;
  KITTENS_UNROLL for (int from = 0; from < C; from += 64)
    keep_of_lanes(t, from, bits(from + lane, row) | bits(from + lane + 32, row) << 16, otherwise);
}

// A byte, 0 or 1, for each element of a tile of C columns: loaded where no product is in flight, asked for when the tile is there.
template <int C> struct register_bytes {
  static constexpr int own = (C + 63) / 64;
  uint32_t words[own][8];
  KITTENS_INLINE uint32_t bits(int i) {
    uint32_t bits = 0;
    KITTENS_UNROLL for (int k = 0; k < 8; k++) {
      asm volatile("" : "+r"(words[i][k]));  // else its arithmetic, and with it the wait for the loads, goes before the product
      bits |= bits_of_bytes(words[i][k]) << (4 * k);
    }
    return bits;
  }
};
// from(row): the bytes of the tile's columns in that row, at a multiple of 16 bytes
template <int C, class F> KITTENS_INLINE void load_bytes(register_bytes<C>& bytes, F from) {
  words_of_lanes<C>::each([&](int i, int row, int column) { load_words(bytes.words[i], from(row) + column); });
}
template <int C> KITTENS_INLINE void keep_where(register_tile<float, C>& t, register_bytes<C>& bytes, float otherwise) {
  uint32_t words[words_of_lanes<C>::own];
  KITTENS_UNROLL for (int i = 0; i < words_of_lanes<C>::own; i++) words[i] = bytes.bits(i);
  words_of_lanes<C>::keep(t, words, otherwise);
}
// The same of a transposed tile. from(column): the bytes of the tile's 64 rows in that column
template <int C, class F> KITTENS_INLINE void load_bytes_transposed(register_bytes<C>& bytes, F from) {
  static_assert(C % 64 == 0, "load_bytes_transposed: a warp's lanes take 64 columns");
  const int me = thread::in_warpgroup_now(), lane = me & 31, row = me / 32 * 16;
  KITTENS_UNROLL for (int i = 0; i < C / 64; i++)
    KITTENS_UNROLL for (int half = 0; half < 2; half++)
      load_words(reinterpret_cast<uint32_t(&)[4]>(bytes.words[i][4 * half]), from(64 * i + 32 * half + lane) + row);
}
template <int C> KITTENS_INLINE void keep_where_transposed(register_tile<float, C>& t, register_bytes<C>& bytes, float otherwise) {
  KITTENS_UNROLL for (int i = 0; i < C / 64; i++) keep_of_lanes(t, 64 * i, bytes.bits(i), otherwise);
}

// Elements that are not drawn become zero; draw and verdict as for negate_undrawn.
template <class T, int C, class Draw, class Verdict>
  requires is_16_bit<T>
KITTENS_INLINE void keep_drawn(register_tile<T, C>& t, Draw draw, Verdict verdict) {
  static_assert(C % 16 == 0, "keep_drawn: a draw reaches over 16 columns");
  const int row = thread::first_row_now(), column = thread::first_column_now();
  KITTENS_UNROLL for (int from = 0; from < C; from += 16) {
    const auto drawn = draw(row, from + column);
    KITTENS_UNROLL for (int a = 0; a < 2; a++)
      KITTENS_UNROLL for (int b = 0; b < 2; b++) t.d[from / 4 + 2 * b + a] &= halves_of_signs(verdict(drawn.pair(a, b)));
  }
}

// Whether f(r) holds for some r < N: every warp asks for all of them, so that all agree.
template <int N, class F> KITTENS_INLINE bool any_of(F f) {
  bool any = false;
  KITTENS_NO_UNROLL for (int r = thread::lane(); r < N; r += 32) any |= f(r);
  return __any_sync(~0u, any);
}

// v = max(v, row maxima of t). A NaN does not survive a maximum; it does survive the exponential that follows.
template <int C> KITTENS_INLINE void row_max(row_vector<float>& v, const register_tile<float, C>& t) {
  float m[2] = {v.d[0], v.d[1]};
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) m[(i >> 1) & 1] = fmaxf(m[(i >> 1) & 1], t.d[i]);
  KITTENS_UNROLL for (int r = 0; r < 2; r++) {
    m[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 1));
    v.d[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 2));
  }
}

// Row sums stay a share in each thread of a quad until row_sum_finish: one exchange per tile of rows instead of one per block.
template <int C> KITTENS_INLINE void row_sum(row_vector<float>& v, const register_tile<float, C>& t) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) v.d[(i >> 1) & 1] += t.d[i];
}
KITTENS_INLINE void row_sum_finish(row_vector<float>& v) {
  KITTENS_UNROLL for (int r = 0; r < 2; r++) {
    v.d[r] += __shfl_xor_sync(~0u, v.d[r], 1);
    v.d[r] += __shfl_xor_sync(~0u, v.d[r], 2);
  }
}

// weights = exp2(exponent(r, x)), rounded; sums = this thread's share of the row sums. r: which of the thread's two rows.
template <class T, int C, class Exponent>
KITTENS_INLINE void exp2_of(register_tile<T, C>& weights, const register_tile<float, C>& t, row_vector<float>& sums, Exponent exponent) {
  float share[4] = {0, 0, 0, 0};
  KITTENS_UNROLL for (int i = 0; i < C / 2; i += 4) {
    float e[4];
    KITTENS_UNROLL for (int k = 0; k < 4; k++) {
      e[k] = kittens::exp2(exponent(k / 2, t.d[i + k]));
      share[k] += e[k];
    }
    weights.d[i / 2] = pack<T>(e[0], e[1]);
    weights.d[i / 2 + 1] = pack<T>(e[2], e[3]);
  }
  sums.d[0] = share[0] + share[1];
  sums.d[1] = share[2] + share[3];
}
// weights = exp2(t * scale - shift), rounded; sums = this thread's share of the row sums. t stays as it was.
template <class T, int C>
KITTENS_INLINE void exp2_into(register_tile<T, C>& weights, const register_tile<float, C>& t, const row_vector<float>& shift, float scale,
                              row_vector<float>& sums) {
  exp2_of(weights, t, sums, [&](int r, float x) { return fmaf(x, scale, -shift.d[r]); });
}
// weights = exp2(f(t) - shift) with the odd function f, where all of t are small enough for it; the same in the whole warp. f(x) = x P(x^2 + bias):
// x^2 + bias has the exponent of bias, a power of two, exactly where x^2 < bias, so the bits of all sums together show whether all are.
template <class T, int C>
KITTENS_INLINE bool exp2_odd_into(register_tile<T, C>& weights, const register_tile<float, C>& t, const row_vector<float>& shift,
                                  const odd_function<float>& f, row_vector<float>& sums) {
  uint32_t bits = 0;
  exp2_of(weights, t, sums, [&](int r, float x) {
    const float w = fmaf(x, x, f.bias);
    bits |= __float_as_uint(w);
    return fmaf(x, f.factor(w), -shift.d[r]);
  });
  return __all_sync(~0u, bits < __float_as_uint(f.bias + f.bias));
}
// t = f(t) where all of t are small enough for it, as above; else t stays as it is. By their maximum: sums that were made to look at would be kept,
// in a register for each element, to be used again. A NaN is not in a maximum, and stays one.
template <int C> KITTENS_INLINE bool map_odd(register_tile<float, C>& t, const odd_function<float>& f) {
  float largest = 0;
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) largest = fmaxf(largest, fabsf(t.d[i]));
  const bool small = __all_sync(~0u, largest * largest < f.bias);
  if (small) KITTENS_UNROLL for (int i = 0; i < C / 2; i++) t.d[i] *= f.factor(fmaf(t.d[i], t.d[i], f.bias));
  return small;
}

// True where a value of this warp's rows is above the limit or NaN: warps decide one by one.
KITTENS_INLINE bool any_above(const row_vector<float>& v, float limit) {
  return __any_sync(~0u, !(v.d[0] <= limit && v.d[1] <= limit));
}

// out = the columns of t from `first` on, rounded
template <class T, int C, int From> KITTENS_INLINE void convert(register_tile<T, C>& out, const register_tile<float, From>& t, int first = 0) {
  KITTENS_UNROLL for (int i = 0; i < C / 4; i++) out.d[i] = pack<T>(t.d[first / 2 + 2 * i], t.d[first / 2 + 2 * i + 1]);
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
