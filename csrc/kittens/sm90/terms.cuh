// Two values of each column folded into products. A float is the sum of three bfloat16 terms, so a product of depth 16 subtracts it from an
// accumulator, exact to a float's last bit or so, and no thread loads it.
#pragma once
#include "mma.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

// The terms of two values: 0 to 2 of the first, 3 to 5 of the second. Neighbours are rows of a K-major operand without swizzle.
struct alignas(16) term_pair {
  uint32_t words[4];
};

// pointer[row] = the terms of u[row] and v[row]
KITTENS_INLINE void store_terms(term_pair* pointer, const row_vector<float>& u, const row_vector<float>& v) {
  constexpr float most = 3e38f;  // what is beyond, as three such terms, overflows in the product
  struct terms {
    float d[3];
    KITTENS_INLINE explicit terms(float x) {
      const float high = widen(__float2bfloat16_rn(x)), rest = x - high, middle = widen(__float2bfloat16_rn(rest));
      d[0] = high, d[1] = middle, d[2] = rest - middle;
      if (fabsf(x) > most) d[0] = d[1] = d[2] = copysignf(most, x);
    }
  };
  if ((thread::lane() & 3) == 0) KITTENS_UNROLL for (int i = 0; i < 2; i++) {
      const terms a(u.d[i]), b(v.d[i]);
      const uint4 all{pack<bf16>(a.d[0], a.d[1]), pack<bf16>(a.d[2], b.d[0]), pack<bf16>(b.d[1], b.d[2]), 0};
      *reinterpret_cast<uint4*>(pointer + thread::first_row() + 8 * i) = all;
    }
}

// A left operand, 64 x 16: -1 in the columns of the terms of the pairs' first or second value, else 0.
template <int Which> struct minus_terms {
  static_assert(Which == 0 || Which == 1, "minus_terms: a term_pair has two values");
  uint32_t d[4];
};
template <int Which> KITTENS_INLINE void fill(minus_terms<Which>& a) {
  const int lane = thread::in_warpgroup_now() & 3;  // it has columns 2 lane and 2 lane + 1, and those 8 beyond
  constexpr uint32_t low = 0xBF80, high = low << 16;
  a.d[0] = a.d[1] = Which == 0 ? (lane == 0 ? high | low : lane == 1 ? low : 0) : (lane == 1 ? high : lane == 2 ? high | low : 0);
  a.d[2] = a.d[3] = 0;
}
template <int Which> KITTENS_INLINE void pin(minus_terms<Which>& a) {
  KITTENS_UNROLL for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a.d[i])::"memory");
}

// D (64 x N) = minus the columns' values. A product takes zero times the other value's terms as well: what is NaN in one is NaN in both. Columns 8 to
// 15 of the left operand are 0, so the right one has the same eight again there.
template <int N, int Which>
KITTENS_INLINE void mma_minus_columns(register_tile<float, N>& D, const minus_terms<Which>& which, const shared_vector<term_pair, N>& pairs) {
  constexpr uint64_t eight_rows = 8 * sizeof(term_pair) >> 4;
  const uint64_t b = (static_cast<uint64_t>(shared_address(pairs.data) & 0x3FFFF) >> 4) | (eight_rows << 32);
  wgmma<N, bf16>::template rs<0>(D.d, which.d, b, 0);
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
