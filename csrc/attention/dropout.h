// Which weights dropout keeps: a function of the generator's state, batch, head, row and column alone, so that the forward and the backward agree
// whatever their tiles are. Plain host/device arithmetic.
//
// Philox4x32-7 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3): seven rounds are the fewest that pass every test of BigCrush. One
// call serves eight weights, 15 bits each: the rows r and r + 8 of a group of 16 by the columns c, c + 1, c + 8 and c + 9 of a group of 16, which
// are one thread's in a tensor core's accumulator, and of which each two neighbours share a register of 16-bit weights.
#pragma once
#include <cstdint>

#include "../kittens/core/defines.h"

namespace kittens_torch {

inline constexpr int philox_rounds = 7;

struct philox_words {
  uint32_t word[4];
};

KITTENS_HOST_DEVICE philox_words philox4x32(uint32_t k0, uint32_t k1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  KITTENS_UNROLL for (int round = 0; round < philox_rounds; round++) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Of the two weights of a word bits 15 and 31 are set where they are kept: their 15 bits are not below the threshold.
KITTENS_HOST_DEVICE uint32_t dropout_verdict(uint32_t word, uint32_t complement) { return (word & 0x7FFF7FFFu) + complement; }

// The eight weights of one call. rows: 0 for r, 1 for r + 8; columns: 0 for c and c + 1, 1 for c + 8 and c + 9; odd: the second of the two.
struct dropout_draw {
  philox_words bits;
  uint32_t complement;  // dropout_rule

  KITTENS_HOST_DEVICE uint32_t pair(int rows, int columns) const { return bits.word[2 * rows + columns]; }
  KITTENS_HOST_DEVICE bool kept(int rows, int columns, int odd) const { return dropout_verdict(pair(rows, columns), complement) >> (16 * odd + 15) & 1; }
};

struct dropout_rule {
  uint32_t seed_low, seed_high;
  uint32_t offset;      // the low half of the state's
  uint32_t plane;       // batch * heads + head
  uint32_t complement;  // 32768 - threshold, in both halves

  KITTENS_HOST_DEVICE dropout_rule(uint32_t seed_low, uint32_t seed_high, uint32_t offset, uint32_t plane, uint32_t threshold)
      : seed_low(seed_low), seed_high(seed_high), offset(offset), plane(plane), complement((32768u - threshold) * 0x10001u) {}

  // The call that row and column are of; the eight weights are the same for all of them.
  KITTENS_HOST_DEVICE dropout_draw draw(int row, int column) const {
    const uint32_t row_group = static_cast<uint32_t>(row / 16 * 8 + row % 8), column_group = static_cast<uint32_t>(column / 16 * 4 + column % 8 / 2);
    return {philox4x32(seed_low, seed_high, column_group, row_group, plane, offset), complement};
  }
  KITTENS_HOST_DEVICE bool kept(int row, int column) const { return draw(row, column).kept(row / 8 % 2, column / 8 % 2, column % 2); }
};

// What is dropped is a multiple of 1 / 32768 of the weights; what remains is scaled by the share that was kept.
inline uint32_t dropout_threshold(double p) {
  const double t = p * 32768 + 0.5;
  return t < 1 ? 0 : t > 32767 ? 32767 : static_cast<uint32_t>(t);
}
inline double dropout_keep_scale(uint32_t threshold) { return 32768.0 / (32768.0 - threshold); }

}  // namespace kittens_torch
