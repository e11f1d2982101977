// Two values of each column folded into products, as sums of three bfloat16 terms each.
#pragma once
#include "memory.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

// The terms of two values: 0 to 2 of the first, 3 to 5 of the second.
struct alignas(16) term_pair {
  static constexpr const char* name = "term_pair";
  bf16 terms[8];
};

// pointer[row] = the terms of u[row] and v[row]
KITTENS_INLINE void store_terms(term_pair* pointer, const row_vector<float>& u, const row_vector<float>& v) {
#if KITTENS_CHECKED
  runtime::touch_memory("store_terms");
#endif
  const auto split = [](bf16* terms, float x) {
    constexpr float most = 3e38f;  // what is beyond, as three such terms, overflows in the product
    const bool beyond = x > most || x < -most;
    float rest = x;
    for (int i = 0; i < 3; i++) {
      put(terms + i, beyond ? x > 0 ? most : -most : rest);
      rest -= widen(terms[i]);
    }
  };
  for (int r = 0; r < warpgroup_rows; r++) {
    split(pointer[r].terms, u.d[r]);
    split(pointer[r].terms + 3, v.d[r]);
    pointer[r].terms[6] = pointer[r].terms[7] = {};
  }
}

// A left operand, 64 x 16: -1 in the columns of the terms of the pairs' first or second value, else 0.
template <int Which> struct minus_terms {
  static_assert(Which == 0 || Which == 1, "minus_terms: a term_pair has two values");
#if KITTENS_CHECKED
  mutable runtime::register_state state;

  minus_terms() { runtime::register_created(state, "minus_terms", 16); }
  minus_terms(const minus_terms&) = delete;
  ~minus_terms() { runtime::register_destroyed(state); }
#endif
};
template <int Which> KITTENS_INLINE void fill([[maybe_unused]] minus_terms<Which>& a) {
#if KITTENS_CHECKED
  runtime::register_used(a.state, "fill");
#endif
}

// D (64 x N) = minus the columns' values. A product takes zero times the other value's terms as well: what is NaN in one is NaN in both.
template <int N, int Which> KITTENS_INLINE void mma_minus_columns(register_tile<float, N>& d, [[maybe_unused]] const minus_terms<Which>& which,
                                                                  const shared_vector<term_pair, N>& pairs) {
  const auto run = [out = d.d, from = pairs.data] {
    for (int c = 0; c < N; c++) {
      float sum = 0;
      for (int i = 0; i < 8; i++) sum += (i / 3 == Which ? -1.f : 0.f) * widen(from[c].terms[i]);
      for (int r = 0; r < warpgroup_rows; r++) out[r * N + c] = sum;
    }
  };
#if KITTENS_CHECKED
  const runtime::shared_operand shared[] = {{pairs.id(), {0, 1, 0, N}}};
  runtime::product_issue(make_task(run), d.state, &which.state, shared, 1);
#else
  run();
#endif
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
