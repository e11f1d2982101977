// An odd function of small numbers as a polynomial, in a form that shows at once which numbers are small enough.
#pragma once
#include "defines.h"

namespace kittens {

// f(x) = x P(x^2 + bias), for x^2 < bias. bias is a power of two, so that the sum has its exponent exactly there.
template <class Real> struct odd_function {
  static constexpr int degree = 4;
  Real bias;
  Real coefficient[degree + 1];

  KITTENS_HOST_DEVICE Real factor(Real w) const {
    Real sum = coefficient[degree];
    KITTENS_UNROLL for (int i = degree - 1; i >= 0; i--) sum = sum * w + coefficient[i];
    return sum;
  }
};

// factor tanh(scale x) for scale |x| below 0.5 at least; relative error below 4e-7 in exact arithmetic.
template <class Real> inline odd_function<Real> small_tanh(double factor, double scale) {
  constexpr int degree = odd_function<Real>::degree;
  constexpr double limit = 0.5;  // of (scale x)^2
  // tanh(x) / x in powers of x^2, by minimax.
  double p[degree + 1] = {0.999999668164485, -0.33329980353600197, 0.1327831581063395, -0.050731343945912555, 0.013653110060070275};
  odd_function<Real> f = {};
  if (!(scale * scale > 1e-30 && scale * scale < 1e30)) return f;  // bias 0: no number is small enough
  double bias = 1;
  while (bias * scale * scale > limit) bias /= 2;
  while (bias * scale * scale * 2 <= limit) bias *= 2;
  double power = factor * scale;
  for (int i = 0; i <= degree; i++, power *= scale * scale) p[i] *= power;
  for (int i = 0; i < degree; i++)  // in powers of x^2 + bias
    for (int k = degree - 1; k >= i; k--) p[k] -= bias * p[k + 1];
  for (const double x : p)  // beyond floats: bias 0 again
    if (!(x * x > 1e-72 && x * x < 1e72)) return f;
  f.bias = static_cast<Real>(bias);
  for (int i = 0; i <= degree; i++) f.coefficient[i] = static_cast<Real>(p[i]);
  return f;
}

}  // namespace kittens
