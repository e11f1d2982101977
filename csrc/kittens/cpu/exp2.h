// 2^x by a polynomial, for vectors and (written the same way, so that loops over it vectorise) for scalars.
//
// x = n + f with n the nearest integer and |f| <= 1/2; 2^f is a minimax polynomial (relative error 2e-9 in float, 3e-18
// in double, before rounding) and n is added to the exponent. Below the smallest normal number 2^-126 (2^-1022) the
// result is off by less than that; NaN stays NaN.
#pragma once
#include "simd.h"

namespace kittens {
inline namespace KITTENS_MACHINE {
namespace simd {

template <class W> struct exp2_constants;
template <> struct exp2_constants<float> {
  static constexpr float shift = 0x1.8p23f;  // adding it leaves the nearest integer in the lowest bits
  static constexpr float least = -127, most = 128;
  static constexpr int mantissa = 23;
  static constexpr float polynomial[] = {0.00015345813483817697f,
                                         0.0013399931249561188f,
                                         0.009618488958154831f,
                                         0.0555032877730832f,
                                         0.24022646890523403f,
                                         0.6931472057364716f,
                                         1.0f};
};
template <> struct exp2_constants<double> {
  static constexpr double shift = 0x1.8p52;
  static constexpr double least = -1023, most = 1024;
  static constexpr int mantissa = 52;
  static constexpr double polynomial[] = {
      4.4352784043382425176e-10,  7.0741055780738966997e-9,  1.0178198051625690395e-7, 1.3215433089953906409e-6,
      0.000015252733489912685374, 0.00015403530462513671296, 0.0013333558146790006325, 0.0096181291075883361107,
      0.055504108664819921209,    0.240226506959101562,      0.69314718055994533047,   1.0};
};

// x[i] = 2^x[i]. Step by step for all of them: one after the other their chains of operations would fill the
// processor's queues. The bounds are integers, so that there f = 0 and 2^f = 1: adding n to its exponent gives exactly
// 0 and infinity. Adding 0 * f brings back a NaN whose bits that addition has changed.
template <class W, class Integers, int Count, class V> KITTENS_ALWAYS_INLINE void exp2_each(V (&x)[Count]) {
  using c = exp2_constants<W>;
  V shifted[Count], y[Count];
  const V least = opaque(c::least - V{}), most = opaque(c::most - V{});
#pragma GCC unroll 4
  for (int i = 0; i < Count; i++) x[i] = x[i] < least ? least : x[i];
#pragma GCC unroll 4
  for (int i = 0; i < Count; i++) x[i] = x[i] > most ? most : x[i];
#pragma GCC unroll 4
  for (int i = 0; i < Count; i++) shifted[i] = x[i] + c::shift;
#pragma GCC unroll 4
  for (int i = 0; i < Count; i++) x[i] -= shifted[i] - c::shift;
#pragma GCC unroll 4
  for (int i = 0; i < Count; i++) y[i] = x[i] * c::polynomial[0] + c::polynomial[1];
#pragma GCC unroll 12
  for (int degree = 2; degree < static_cast<int>(sizeof c::polynomial / sizeof(W)); degree++)
#pragma GCC unroll 4
    for (int i = 0; i < Count; i++) y[i] = y[i] * x[i] + c::polynomial[degree];
#pragma GCC unroll 4
  for (int i = 0; i < Count; i++)
    x[i] = x[i] * W(0) + __builtin_bit_cast(V, __builtin_bit_cast(Integers, y[i]) +
                                                   (__builtin_bit_cast(Integers, shifted[i]) << c::mantissa));
}

template <class W> using unsigned_bits = std::conditional_t<sizeof(W) == 4, uint32_t, uint64_t>;
template <class W> KITTENS_ALWAYS_INLINE W exp2_one(W x) {
  W one[1] = {x};
  exp2_each<W, unsigned_bits<W>>(one);
  return one[0];
}

}  // namespace simd

KITTENS_INLINE float exp2(float x) { return simd::exp2_one(x); }
KITTENS_INLINE double exp2(double x) { return simd::exp2_one(x); }
KITTENS_INLINE float log(float x) { return __builtin_logf(x); }
KITTENS_INLINE double log(double x) { return __builtin_log(x); }
KITTENS_INLINE float tanh(float x) { return __builtin_tanhf(x); }
KITTENS_INLINE double tanh(double x) { return __builtin_tanh(x); }

}  // namespace KITTENS_MACHINE
}  // namespace kittens
