// Register tiles and vectors, shared tiles and vectors, and views of them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#include "../core/defines.h"
#include "../core/shapes.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

using bf16 = __nv_bfloat16;
using fp16 = __half;

template <class T> using accumulator = float;
template <class T> inline constexpr bool is_16_bit = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;

// 64 x C, in the layout of a wgmma accumulator. Thread t of the warpgroup holds, for each group of 8 columns, two neighbouring columns
// 2 (t % 4) of row 16 (t / 32) + t % 32 / 4 and of the row 8 below. A 16-bit tile packs the pairs: it is then a wgmma A operand as it stands.
template <class T, int C> struct register_tile;
template <int C> struct register_tile<float, C> {
  static_assert(C % 8 == 0 && C <= 256, "register_tile: columns must be a multiple of 8, at most 256");
  float d[C / 2];
};
template <class T, int C>
  requires is_16_bit<T>
struct register_tile<T, C> {
  static_assert(C % 16 == 0 && C <= 256, "register_tile: columns of a 16-bit tile must be a multiple of 16, at most 256");
  uint32_t d[C / 4];
};

// One value for each of the thread's two rows; the four threads of a quad hold the same one (or a share of it, before row_sum_finish).
template <class T> struct row_vector {
  T d[2];
};

// One value for each column of a tile: of every 8, the thread's two.
template <class T, int C> struct column_vector {
  T d[C / 4];
};

template <class T, int R, int C> struct alignas(1024) shared_tile {
  using element = T;
  using layout = tile_layout<T, R, C>;
  static constexpr int rows = R, columns = C, bytes = layout::bytes;
  T data[R * C];
};

template <class T, int N> struct alignas(16) shared_vector {
  static constexpr int bytes = N * static_cast<int>(sizeof(T));
  static_assert(bytes % 16 == 0, "shared_vector: bulk copies move multiples of 16 bytes");
  T data[N];
};

template <class Tile, bool present> struct optional_tile {
  Tile tile;
};
template <class Tile> struct optional_tile<Tile, false> {};

template <class Tile> struct shared_rows {
  Tile& tile;
  int first;
};
template <class Tile> struct shared_columns {
  Tile& tile;
  int first;
};
template <class Tile> KITTENS_INLINE shared_rows<Tile> rows_of(Tile& tile, int first) { return {tile, first}; }
template <class Tile> KITTENS_INLINE shared_columns<Tile> columns_of(Tile& tile, int first) { return {tile, first}; }

// Who this thread is, as far as a kernel may know. Within a warpgroup: lane, warp, and the thread's first row and column.
namespace thread {
KITTENS_INLINE int in_warpgroup() { return threadIdx.x & 127; }
KITTENS_INLINE int lane() { return threadIdx.x & 31; }
KITTENS_INLINE int warp() { return (threadIdx.x >> 5) & 3; }
KITTENS_INLINE int warpgroup() { return __reduce_max_sync(~0u, threadIdx.x >> 7); }
KITTENS_INLINE int first_row() { return warp() * 16 + lane() / 4; }
KITTENS_INLINE int first_column() { return 2 * (lane() & 3); }
// The same as in_warpgroup, but read anew at each use: addresses made from it are not kept in registers across a kernel's loops.
KITTENS_INLINE uint32_t in_warpgroup_now() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x & 127;
}
KITTENS_INLINE int first_row_now() { return in_warpgroup_now() / 32 * 16 + in_warpgroup_now() % 32 / 4; }
KITTENS_INLINE int first_column_now() { return 2 * (in_warpgroup_now() & 3); }
}  // namespace thread

// x, the same in the whole warpgroup. A warp reduction yields a uniform register, so the compiler knows that a loop bounded by x does not diverge
// and keeps ring positions and descriptors in uniform registers too: 743 instead of 661 TFLOP/s at head_dim 128, causal, 16k.
KITTENS_INLINE int uniform(int x) { return __reduce_max_sync(~0u, x); }
KITTENS_INLINE float uniform(float x) { return __int_as_float(uniform(__float_as_int(x))); }

KITTENS_INLINE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

template <class T> KITTENS_INLINE constexpr T infinity() { return __builtin_huge_valf(); }

// Largest sum of one block's weights that neither the weights' type nor, times values of ordinary size, the output's sums overflow.
template <class T> KITTENS_INLINE constexpr float weight_limit() { return std::is_same_v<T, fp16> ? 0x1p15f : 0x1p16f; }

KITTENS_INLINE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KITTENS_INLINE float log(float x) { return __logf(x); }
// Where 1 - 2 / (e^2x + 1) would cancel, a polynomial: relative error below 1e-6 everywhere.
KITTENS_INLINE float tanh(float x) {
  const float s = x * x, small = x + x * s * (-0.33333333f + s * (0.13333333f + s * (-0.053968254f + s * (0.021869489f - s * 0.0088632355f))));
  const float large = 1 - __fdividef(2.f, kittens::exp2(x * 2.885390082f) + 1);
  return s < 0.16f ? small : large;
}

template <class T> KITTENS_INLINE uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <class T> KITTENS_INLINE float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>)
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// 4 N bytes of global memory that begin at a multiple of 16.
template <int N> KITTENS_INLINE void load_words(uint32_t (&words)[N], const void* from) {
  static_assert(N % 4 == 0, "load_words: 16 bytes at once");
  KITTENS_UNROLL for (int i = 0; i < N / 4; i++) {
    const uint4 part = __ldg(static_cast<const uint4*>(from) + i);
    words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
  }
}

// One bit for each of a word's four bytes, which are 0 or 1.
KITTENS_INLINE uint32_t bits_of_bytes(uint32_t bytes) { return (bytes * 0x01020408u) >> 24 & 0xF; }

// One element of global memory as an accumulator.
KITTENS_INLINE float widen(float x) { return x; }
KITTENS_INLINE float widen(bf16 x) { return __bfloat162float(x); }
KITTENS_INLINE float widen(fp16 x) { return __half2float(x); }
// Two neighbours, of which the first lies where both together are aligned.
KITTENS_INLINE void widen_pair(const float* from, float& x, float& y) {
  const float2 pair = __ldg(reinterpret_cast<const float2*>(from));
  x = pair.x, y = pair.y;
}
template <class T>
  requires is_16_bit<T>
KITTENS_INLINE void widen_pair(const T* from, float& x, float& y) {
  const float2 pair = unpack<T>(__ldg(reinterpret_cast<const uint32_t*>(from)));
  x = pair.x, y = pair.y;
}
// The other way, rounded.
KITTENS_INLINE void put(float* to, float x) { *to = x; }
KITTENS_INLINE void put(bf16* to, float x) { *to = __float2bfloat16_rn(x); }
KITTENS_INLINE void put(fp16* to, float x) { *to = __float2half_rn(x); }

}  // namespace KITTENS_MACHINE
}  // namespace kittens
