// SIMD vectors of the translation unit's instruction set, through the compiler's vector extensions: one code for SSE2,
// AVX2, AVX-512 and Neon. Only the conversions of float16 have instructions of their own.
#pragma once
#include <utility>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "elements.h"

namespace kittens {
inline namespace KITTENS_MACHINE {
namespace simd {

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
inline constexpr int vector_bytes = 32;
#else
inline constexpr int vector_bytes = 16;
#endif

typedef float vector_float __attribute__((vector_size(vector_bytes)));
typedef double vector_double __attribute__((vector_size(vector_bytes)));
typedef uint32_t vector_uint32 __attribute__((vector_size(vector_bytes)));
typedef uint64_t vector_uint64 __attribute__((vector_size(vector_bytes)));
typedef uint16_t vector_uint16 __attribute__((vector_size(vector_bytes / 2)));  // as many lanes as vector_uint32

template <class W> struct vector_of;
template <> struct vector_of<float> {
  using type = vector_float;
  using bits = vector_uint32;
};
template <> struct vector_of<double> {
  using type = vector_double;
  using bits = vector_uint64;
};
template <class W> using vector = typename vector_of<W>::type;
template <class W> using vector_bits = typename vector_of<W>::bits;
template <class W> inline constexpr int lanes = vector_bytes / static_cast<int>(sizeof(W));

template <class W> KITTENS_ALWAYS_INLINE vector<W> broadcast(W x) { return x - vector<W>{}; }

// A constant that the compiler does not know: with a known one GCC misses that `a < b ? b : a` is one instruction.
template <class V> KITTENS_ALWAYS_INLINE V opaque(V v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#endif
  return v;
}

template <class V, class P> KITTENS_ALWAYS_INLINE V load_bits(const P* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class W> KITTENS_ALWAYS_INLINE vector<W> maximum(vector<W> a, vector<W> b) { return a > b ? a : b; }

// bf16 is the upper half of a float; rounding is to nearest, ties to even.
KITTENS_ALWAYS_INLINE vector_uint32 rounded_bits(vector_float x, bf16) {
  const vector_uint32 bits = (vector_uint32)x;
  const vector_uint32 rounded = bits + 0x7fff + (bits >> 16 & 1);
  return ((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded) & 0xffff0000;
}

// The same for a weight: positive, and if it is NaN, its lower half is clear, because it comes from 16-bit elements or
// an operation made it.
KITTENS_ALWAYS_INLINE vector_uint32 rounded_weight_bits(vector_float x) {
  const vector_uint32 bits = (vector_uint32)x;
  return (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
}

#if defined(__AVX512F__)
// The masked forms with every lane on: GCC 12 warns that the plain ones read an uninitialised vector.
KITTENS_ALWAYS_INLINE vector_float widen(vector_uint16 x, fp16) {
  return (vector_float)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
}
KITTENS_ALWAYS_INLINE vector_uint16 narrow(vector_float x, fp16) {
  return (vector_uint16)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
KITTENS_ALWAYS_INLINE vector_float round_to(vector_float x, fp16) { return widen(narrow(x, fp16{}), fp16{}); }
#elif defined(__F16C__)
KITTENS_ALWAYS_INLINE vector_float widen(vector_uint16 x, fp16) { return (vector_float)_mm256_cvtph_ps((__m128i)x); }
KITTENS_ALWAYS_INLINE vector_uint16 narrow(vector_float x, fp16) {
  return (vector_uint16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
KITTENS_ALWAYS_INLINE vector_float round_to(vector_float x, fp16) { return widen(narrow(x, fp16{}), fp16{}); }
#else
// A float16's exponent and mantissa, moved into a float's place, are too small by 2^112; multiplying makes subnormals
// right as well.
KITTENS_ALWAYS_INLINE vector_float widen(vector_uint16 x, fp16) {
  const vector_uint32 bits = __builtin_convertvector(x, vector_uint32), magnitude = (bits & 0x7fff) << 13;
  const vector_uint32 finite = (vector_uint32)((vector_float)magnitude * 0x1p112f);
  return (vector_float)(((bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite) | (bits & 0x8000) << 16);
}
// The nearest float16, as a float. Below 2^-14 the steps are 2^-24: adding 0.5 leaves exactly these bits.
KITTENS_ALWAYS_INLINE vector_float round_to(vector_float x, fp16) {
  const vector_uint32 bits = (vector_uint32)x, magnitude = bits & 0x7fffffff;
  const vector_uint32 normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fffu;
  const vector_uint32 subnormal = (vector_uint32)((vector_float)magnitude + 0.5f - 0.5f);
  const vector_uint32 finite = magnitude < 0x38800000 ? subnormal : normal;
  const vector_uint32 infinite = 0x7f800000 - vector_uint32{};
  const vector_uint32 rounded = magnitude > 0x7f800000    ? magnitude | 0x400000
                                : magnitude >= 0x477ff000 ? infinite
                                                          : finite;
  return (vector_float)(rounded | (bits & 0x80000000));
}
KITTENS_ALWAYS_INLINE vector_uint16 narrow(vector_float x, fp16) {
  const vector_uint32 bits = (vector_uint32)round_to(x, fp16{}), magnitude = bits & 0x7fffffff;
  const vector_uint32 subnormal = (vector_uint32)((vector_float)magnitude + 0.5f) & 0x7ff;
  const vector_uint32 finite = magnitude < 0x38800000 ? subnormal : (magnitude - 0x38000000) >> 13;
  const vector_uint32 all = magnitude >= 0x7f800000 ? 0x7c00 | (magnitude >> 13 & 0x3ff) : finite;
  return __builtin_convertvector(all | (bits >> 16 & 0x8000), vector_uint16);
}
#endif

KITTENS_ALWAYS_INLINE vector_float round_to(vector_float x, bf16) { return (vector_float)rounded_bits(x, bf16{}); }
KITTENS_ALWAYS_INLINE vector_float round_to(vector_float x, float) { return x; }
KITTENS_ALWAYS_INLINE vector_double round_to(vector_double x, double) { return x; }

// Memory of any element type, as vectors of what it is summed in.
KITTENS_ALWAYS_INLINE vector_float load(const float* p) { return load_bits<vector_float>(p); }
KITTENS_ALWAYS_INLINE vector_double load(const double* p) { return load_bits<vector_double>(p); }
KITTENS_ALWAYS_INLINE vector_float load(const fp16* p) { return widen(load_bits<vector_uint16>(p), fp16{}); }
KITTENS_ALWAYS_INLINE vector_float load(const bf16* p) {
  return (vector_float)(__builtin_convertvector(load_bits<vector_uint16>(p), vector_uint32) << 16);
}
KITTENS_ALWAYS_INLINE void store(float* p, vector_float v) { __builtin_memcpy(p, &v, sizeof v); }
KITTENS_ALWAYS_INLINE void store(double* p, vector_double v) { __builtin_memcpy(p, &v, sizeof v); }
KITTENS_ALWAYS_INLINE void store(fp16* p, vector_float v) {
  const vector_uint16 bits = narrow(v, fp16{});
  __builtin_memcpy(p, &bits, sizeof bits);
}
KITTENS_ALWAYS_INLINE void store(bf16* p, vector_float v) {
  const vector_uint16 bits = __builtin_convertvector(rounded_bits(v, bf16{}) >> 16, vector_uint16);
  __builtin_memcpy(p, &bits, sizeof bits);
}

// out[i] = in[i] for i < count, between any two element types. The tail goes through one vector.
template <class Out, class In> KITTENS_ALWAYS_INLINE void convert_elements(Out* out, const In* in, int count) {
  if constexpr (std::is_same_v<Out, In>) {
    __builtin_memcpy(out, in, count * sizeof(In));
    return;
  }
  using W = accumulator<In>;
  int i = 0;
  for (; i + lanes<W> <= count; i += lanes<W>) store(out + i, load(in + i));
  if (i < count) {
    In tail_in[lanes<W>] = {};
    Out tail_out[lanes<W>];
    for (int j = 0; i + j < count; j++) tail_in[j] = in[i + j];
    store(tail_out, load(tail_in));
    for (int j = 0; i + j < count; j++) out[i + j] = tail_out[j];
  }
}

// Lanes of two vectors taken in turn, from their lower or their upper half.
template <bool upper, class V, int... I>
KITTENS_ALWAYS_INLINE V interleave(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I), from = upper ? n / 2 : 0;
  return __builtin_shufflevector(a, b, (from + I / 2 + (I % 2) * n)...);
}

// Interleaving v[i] with v[i + n/2] log2(n) times transposes n vectors of n lanes.
template <class W> KITTENS_ALWAYS_INLINE void transpose(vector<W> (&v)[lanes<W>]) {
  constexpr int n = lanes<W>;
  constexpr auto sequence = std::make_integer_sequence<int, n>{};
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
    vector<W> next[n];
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; i++) {
      next[2 * i] = interleave<false>(v[i], v[i + n / 2], sequence);
      next[2 * i + 1] = interleave<true>(v[i], v[i + n / 2], sequence);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) v[i] = next[i];
  }
}

template <int distance, class V, int... I> KITTENS_ALWAYS_INLINE V swap_lanes(V v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ distance)...);
}
template <class W, int distance = lanes<W> / 2, class F> KITTENS_ALWAYS_INLINE W reduce(vector<W> v, F f) {
  v = f(v, swap_lanes<distance>(v, std::make_integer_sequence<int, lanes<W>>{}));
  if constexpr (distance > 1)
    return reduce<W, distance / 2>(v, f);
  else
    return v[0];
}
template <class W> KITTENS_ALWAYS_INLINE W sum_of(vector<W> v) {
  return reduce<W>(
      v, [](vector<W> a, vector<W> b) __attribute__((always_inline)) { return a + b; });
}
template <class W> KITTENS_ALWAYS_INLINE W maximum_of(vector<W> v) {
  return reduce<W>(
      v, [](vector<W> a, vector<W> b) __attribute__((always_inline)) { return maximum<W>(a, b); });
}

}  // namespace simd

// 32 bytes of memory.
template <int N> KITTENS_INLINE void load_words(uint32_t (&words)[N], const void* from) { __builtin_memcpy(words, from, sizeof words); }

// One bit for each of a word's four bytes, which are 0 or 1.
KITTENS_INLINE uint32_t bits_of_bytes(uint32_t bytes) { return (bytes * 0x01020408u) >> 24 & 0xF; }

// One element of memory as an accumulator, and two neighbours.
KITTENS_INLINE float widen(float x) { return x; }
KITTENS_INLINE double widen(double x) { return x; }
KITTENS_INLINE float widen(bf16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }
KITTENS_INLINE float widen(fp16 x) {
  const uint32_t bits = x.bits, sign = (bits & 0x8000) << 16, magnitude = (bits & 0x7fff) << 13;
  const float finite = float_of_bits(magnitude) * 0x1p112f;
  return float_of_bits((magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : bits_of_float(finite)) | sign);
}
template <class T, class Real> KITTENS_INLINE void widen_pair(const T* from, Real& x, Real& y) {
  x = widen(from[0]);
  y = widen(from[1]);
}
// The other way, rounded.
template <class T> KITTENS_INLINE void put(T* to, accumulator<T> x) { simd::convert_elements(to, &x, 1); }

}  // namespace KITTENS_MACHINE
}  // namespace kittens
