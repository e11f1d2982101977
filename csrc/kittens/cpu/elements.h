// Element types of tiles, and what they are summed in. 16-bit types are storage only: arithmetic happens in float.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../core/defines.h"
#include "../core/shapes.h"

// Every function of an instruction set's translation unit must be inlined or carry the machine's inline namespace in
// its symbol: the linker keeps one copy of a weak symbol, and a copy compiled for a newer instruction set would crash
// an older processor.
#define KITTENS_ALWAYS_INLINE [[gnu::always_inline]] inline
// Loops that take long enough for a call not to matter: one copy each keeps compile times down.
#define KITTENS_NO_INLINE [[gnu::noinline]] inline

namespace kittens {
inline namespace KITTENS_MACHINE {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class T> inline constexpr bool is_16_bit = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;
template <class T> using accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T> constexpr const char* element_name() {
  if constexpr (std::is_same_v<T, bf16>)
    return "bf16";
  else if constexpr (std::is_same_v<T, fp16>)
    return "fp16";
  else if constexpr (std::is_same_v<T, float>)
    return "float";
  else if constexpr (std::is_same_v<T, double>)
    return "double";
  else if constexpr (requires { T::name; })
    return T::name;
  else
    return "int";
}

// AMX multiplies bf16 as it is; everywhere else 16-bit operands are widened to float first.
#if defined(__AMX_BF16__)
template <class T> inline constexpr bool on_amx = std::is_same_v<T, bf16>;
#else
template <class T> inline constexpr bool on_amx = false;
#endif
template <class T> using operand_type = std::conditional_t<on_amx<T>, T, accumulator<T>>;

template <class T> KITTENS_INLINE constexpr T infinity() { return static_cast<T>(__builtin_huge_val()); }

// Largest sum of one block's weights that neither the weights' type nor, times values of ordinary size, the output's
// sums overflow.
template <class T> KITTENS_INLINE constexpr accumulator<T> weight_limit() {
  return std::is_same_v<T, fp16> ? 0x1p15f : 0x1p16f;
}

// One element at a time; simd.h has the same for vectors.
KITTENS_ALWAYS_INLINE float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
KITTENS_ALWAYS_INLINE uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }

}  // namespace KITTENS_MACHINE
}  // namespace kittens
