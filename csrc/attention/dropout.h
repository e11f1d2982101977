// Which weights dropout keeps: a function of the generator's state, batch, head, row and column alone, so that the forward and the backward agree
// whatever their tiles are. Plain host/device arithmetic.
//
// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3). One call serves eight weights, 16 bits each: the rows r and r + 8 of
// a group of 16 by the columns c, c + 8, c + 16 and c + 24 of a group of 32, which are one thread's in a tensor core's accumulator.
#pragma once
#include <cstdint>

#include "../kittens/core/defines.h"

namespace kittens_torch {

struct philox_words {
  uint32_t word[4];
};

KITTENS_HOST_DEVICE philox_words philox4x32(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  KITTENS_UNROLL for (int round = 0; round < 10; round++) {
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

// The eight weights of one call. rows: 0 for r, 1 for r + 8; columns: 0 to 3 for c, c + 8, c + 16, c + 24.
struct dropout_draw {
  philox_words bits;
  uint32_t threshold;

  KITTENS_HOST_DEVICE bool kept(int rows, int columns) const {
    const int e = rows * 4 + columns;
    return ((bits.word[e / 2] >> (e % 2 * 16)) & 0xFFFFu) >= threshold;
  }
};

struct dropout_rule {
  uint64_t seed;
  uint32_t offset;     // the low half of the state's
  uint32_t plane;      // batch * heads + head
  uint32_t threshold;  // of 65536: a weight is kept if its 16 bits are not below

  // The call that row and column are of; the eight weights are the same for all of them.
  KITTENS_HOST_DEVICE dropout_draw draw(int row, int column) const {
    const uint32_t row_group = static_cast<uint32_t>(row / 16 * 8 + row % 8), column_group = static_cast<uint32_t>(column / 32 * 8 + column % 8);
    return {philox4x32(seed, column_group, row_group, plane, offset), threshold};
  }
  KITTENS_HOST_DEVICE bool kept(int row, int column) const { return draw(row, column).kept(row / 8 % 2, column / 8 % 4); }
};

// What is dropped is a multiple of 1 / 65536 of the weights; what remains is scaled by the share that was kept.
inline uint32_t dropout_threshold(double p) {
  const double t = p * 65536 + 0.5;
  return t < 1 ? 0 : t > 65535 ? 65535 : static_cast<uint32_t>(t);
}
inline double dropout_keep_scale(uint32_t threshold) { return 65536.0 / (65536.0 - threshold); }

}  // namespace kittens_torch
