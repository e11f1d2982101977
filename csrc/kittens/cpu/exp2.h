// 2^x by a polynomial, for vectors and (written the same way, so that loops over it vectorise) for scalars.
//
// x = n + f with n the nearest integer and |f| <= 1/2; 2^f is a minimax polynomial (relative error 2e-9 in float, 3e-18 in double, before rounding)
// and n is added to the exponent. Below the smallest normal number the result is 0, as on the GPU; NaN stays NaN.
#pragma once
#include "simd.h"

namespace kittens {
inline namespace KITTENS_MACHINE {
namespace simd {

template <class V, class C> KITTENS_ALWAYS_INLINE V constant(C x) { return x - V{}; }

template <class V, class Integers> KITTENS_ALWAYS_INLINE V exp2_of_floats(V x) {
  constexpr float shift = 0x1.8p23f;  // adding it leaves the nearest integer in the lowest bits
  V in_range = x < -126.0f ? constant<V>(-126.0f) : x;
  in_range = in_range > 128.0f ? constant<V>(128.0f) : in_range;
  const V shifted = in_range + shift, f = in_range - (shifted - shift);
  V y = constant<V>(0.00015345813483817697f);
  y = y * f + 0.0013399931249561188f;
  y = y * f + 0.009618488958154831f;
  y = y * f + 0.0555032877730832f;
  y = y * f + 0.24022646890523403f;
  y = y * f + 0.6931472057364716f;
  y = y * f + 1.0f;
  const V scaled = __builtin_bit_cast(V, __builtin_bit_cast(Integers, y) + (__builtin_bit_cast(Integers, shifted) << 23));
  const V finite = x < -126.0f ? constant<V>(0.0f) : scaled;
  return x >= 128.0f ? constant<V>(__builtin_huge_valf()) : finite;
}

template <class V, class Integers> KITTENS_ALWAYS_INLINE V exp2_of_doubles(V x) {
  constexpr double shift = 0x1.8p52;
  V in_range = x < -1022.0 ? constant<V>(-1022.0) : x;
  in_range = in_range > 1024.0 ? constant<V>(1024.0) : in_range;
  const V shifted = in_range + shift, f = in_range - (shifted - shift);
  V y = constant<V>(4.4352784043382425176e-10);
  y = y * f + 7.0741055780738966997e-9;
  y = y * f + 1.0178198051625690395e-7;
  y = y * f + 1.3215433089953906409e-6;
  y = y * f + 0.000015252733489912685374;
  y = y * f + 0.00015403530462513671296;
  y = y * f + 0.0013333558146790006325;
  y = y * f + 0.0096181291075883361107;
  y = y * f + 0.055504108664819921209;
  y = y * f + 0.240226506959101562;
  y = y * f + 0.69314718055994533047;
  y = y * f + 1.0;
  const V scaled = __builtin_bit_cast(V, __builtin_bit_cast(Integers, y) + (__builtin_bit_cast(Integers, shifted) << 52));
  const V finite = x < -1022.0 ? constant<V>(0.0) : scaled;
  return x >= 1024.0 ? constant<V>(__builtin_huge_val()) : finite;
}

KITTENS_ALWAYS_INLINE vector_float exp2(vector_float x) { return exp2_of_floats<vector_float, vector_uint32>(x); }
KITTENS_ALWAYS_INLINE vector_double exp2(vector_double x) { return exp2_of_doubles<vector_double, vector_int64>(x); }
}  // namespace simd

KITTENS_INLINE float exp2(float x) { return simd::exp2_of_floats<float, uint32_t>(x); }
KITTENS_INLINE double exp2(double x) { return simd::exp2_of_doubles<double, uint64_t>(x); }
KITTENS_INLINE float log(float x) { return __builtin_logf(x); }
KITTENS_INLINE double log(double x) { return __builtin_log(x); }

}  // namespace KITTENS_MACHINE
}  // namespace kittens
