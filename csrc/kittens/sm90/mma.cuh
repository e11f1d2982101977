// Tensor-core products. They are asynchronous: mma_begin names the registers involved, mma_commit closes a group, mma_wait waits for groups,
// mma_done gives the accumulators back. Issue and wait in one structured piece of code: a product in flight across a loop's back edge makes the
// compiler serialise all of them (ptxas C7514, C7515).
#pragma once
#include "wgmma.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

// An empty assembly that reads and writes each register: the compiler may not move other uses of it across.
template <int C> KITTENS_INLINE void pin(register_tile<float, C>& t) {
  KITTENS_UNROLL for (int i = 0; i < C / 2; i++) asm volatile("" : "+f"(t.d[i])::"memory");
}
template <class T, int C>
  requires is_16_bit<T>
KITTENS_INLINE void pin(register_tile<T, C>& t) {
  KITTENS_UNROLL for (int i = 0; i < C / 4; i++) asm volatile("" : "+r"(t.d[i])::"memory");
}

template <class... Tiles> KITTENS_INLINE void mma_begin(Tiles&... tiles) {
  (pin(tiles), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
KITTENS_INLINE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> KITTENS_INLINE void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <class... Tiles> KITTENS_INLINE void mma_done(Tiles&... tiles) { (pin(tiles), ...); }

// How the tensor core finds a shared tile. Offsets in bytes are encoded in units of 16.
// K-major (rows are the M or N of the product, columns its K): 8 rows follow each other after 8 spans; a step of 16 columns is 32 bytes.
// MN-major (columns are the M or N): a step of 16 rows is 16 spans; panels follow each other after panel_bytes.
template <class Tile> struct operand {
  using layout = typename Tile::layout;
  static constexpr uint64_t mode = layout::mode == swizzle::bytes128 ? 1 : layout::mode == swizzle::bytes64 ? 2 : 3;
  static constexpr uint64_t eight_rows = (8 * layout::span_bytes) >> 4;
  static constexpr uint64_t panel = layout::panel_bytes >> 4;
  static_assert(sizeof(typename Tile::element) == 2, "wgmma: operands are 16-bit types");

  KITTENS_INLINE static uint64_t descriptor(uint32_t address, uint64_t leading) {
    return (static_cast<uint64_t>(address & 0x3FFFF) >> 4) | (leading << 16) | (eight_rows << 32) | (mode << 62);
  }
  KITTENS_INLINE static uint64_t k_major(const Tile& t, int first_row) {
    return descriptor(shared_address(t.data) + first_row * layout::span_bytes, 1);
  }
  KITTENS_INLINE static uint64_t mn_major(const Tile& t, int first_column) {
    return descriptor(shared_address(t.data) + first_column / layout::panel_columns * layout::panel_bytes, panel);
  }
  static constexpr uint64_t k_step(int k) {  // from the descriptor's start to columns 16 k
    constexpr int steps = layout::panel_columns / 16;
    return k / steps * panel + k % steps * 2;
  }
  static constexpr uint64_t mn_step(int k) { return static_cast<uint64_t>(k) * 16 * layout::span_bytes >> 4; }  // to rows 16 k
};

// D (64 x N) = or += A (64 x K) B (N x K)^T
template <int N, class T, int R, int K>
KITTENS_INLINE void mma_ABt(register_tile<float, N>& D, shared_rows<shared_tile<T, R, K>> A, const shared_tile<T, N, K>& B, int accumulate) {
  using a_operand = operand<shared_tile<T, R, K>>;
  using b_operand = operand<shared_tile<T, N, K>>;
  const uint64_t a = a_operand::k_major(A.tile, A.first), b = b_operand::k_major(B, 0);
  KITTENS_UNROLL for (int k = 0; k < K / 16; k++)
    wgmma<N, T>::template ss<0, 0>(D.d, a + a_operand::k_step(k), b + b_operand::k_step(k), k ? 1 : accumulate);
}
template <int N, class T, int K>
KITTENS_INLINE void mma_ABt(register_tile<float, N>& D, const register_tile<T, K>& A, const shared_tile<T, N, K>& B, int accumulate) {
  using b_operand = operand<shared_tile<T, N, K>>;
  const uint64_t b = b_operand::k_major(B, 0);
  KITTENS_UNROLL for (int k = 0; k < K / 16; k++) wgmma<N, T>::template rs<0>(D.d, A.d + 4 * k, b + b_operand::k_step(k), k ? 1 : accumulate);
}

// D (64 x N) = or += A (64 x K) B (K x N)
template <int N, class T, int K>
KITTENS_INLINE void mma_AB(register_tile<float, N>& D, const register_tile<T, K>& A, const shared_tile<T, K, N>& B, int accumulate) {
  using b_operand = operand<shared_tile<T, K, N>>;
  const uint64_t b = b_operand::mn_major(B, 0);
  KITTENS_UNROLL for (int k = 0; k < K / 16; k++) wgmma<N, T>::template rs<1>(D.d, A.d + 4 * k, b + b_operand::mn_step(k), k ? 1 : accumulate);
}
template <int N, class T, int R, int K>
KITTENS_INLINE void mma_AB(register_tile<float, N>& D, shared_rows<shared_tile<T, R, K>> A, const shared_tile<T, K, N>& B, int accumulate) {
  using a_operand = operand<shared_tile<T, R, K>>;
  using b_operand = operand<shared_tile<T, K, N>>;
  const uint64_t a = a_operand::k_major(A.tile, A.first), b = b_operand::mn_major(B, 0);
  KITTENS_UNROLL for (int k = 0; k < K / 16; k++)
    wgmma<N, T>::template ss<0, 1>(D.d, a + a_operand::k_step(k), b + b_operand::mn_step(k), k ? 1 : accumulate);
}

// D (64 x N) = or += A (K x 64 columns)^T B (K x N columns)
template <int N, class T, int K, int CA, class Tile>
KITTENS_INLINE void mma_AtB(register_tile<float, N>& D, shared_columns<shared_tile<T, K, CA>> A, shared_columns<Tile> B, int accumulate) {
  static_assert(Tile::rows == K, "mma_AtB: the operands do not agree in the dimension that is summed over");
  static_assert(K % 16 == 0, "mma_AtB: the dimension that is summed over must be a multiple of 16");
  using a_operand = operand<shared_tile<T, K, CA>>;
  using b_operand = operand<std::remove_const_t<Tile>>;
  const uint64_t a = a_operand::mn_major(A.tile, A.first), b = b_operand::mn_major(B.tile, B.first);
  KITTENS_UNROLL for (int k = 0; k < K / 16; k++)
    wgmma<N, T>::template ss<1, 1>(D.d, a + a_operand::mn_step(k), b + b_operand::mn_step(k), k ? 1 : accumulate);
}
template <int N, class T, int K, int CA>
KITTENS_INLINE void mma_AtB(register_tile<float, N>& D, shared_columns<shared_tile<T, K, CA>> A, const shared_tile<T, K, N>& B, int accumulate) {
  mma_AtB(D, A, columns_of(B, 0), accumulate);
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
