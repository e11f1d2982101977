// What changes the scores beyond a scale and a key interval. In natural-log units
//   x_ij = softcap(scale q.k) + bias_ij - slope |i + diagonal - j|,   softcap(x) = c tanh(x / c), without it where c is 0
// and key j is visible to row i if the interval, the mask and the key length all admit it. Dropout acts on the normalised weights (dropout.h).
//
// Tensors stay where they are: any strides, in elements and 0 where a dimension is broadcast; any alignment.
#pragma once
#include <cstdint>

#include "../kittens/core/defines.h"

namespace kittens_torch {

struct score_modifiers {
  const unsigned char* mask = nullptr;  // bytes of a bool tensor over (batch, head, row, key): not 0 where the key is visible
  int64_t mask_stride[4] = {};
  const void* bias = nullptr;  // over (batch, head, row, key), added to the scores
  int64_t bias_stride[4] = {};
  bool bias_is_real = false;           // its elements are accumulators (float; double for float64), else the query's
  const int* key_lengths = nullptr;    // (batch): keys from this one on are hidden. Contiguous
  const void* alibi_slopes = nullptr;  // accumulators over (batch, head)
  int64_t alibi_stride[2] = {};
  const void* sinks = nullptr;  // accumulators over (head): a score of every row that has no value
  int64_t sink_stride = 0;
  const int64_t* dropout_state = nullptr;  // (seed, offset) in the device's memory; null: no dropout
  uint32_t dropout_threshold = 0;          // dropout.h
  double keep_scale = 1;                   // what the kept weights are multiplied by
  double softcap = 0;
  int diagonal = 0;  // Lk - Lq of the caller's tensors
  int start = 0;     // the kernel's key 0 is this one of the caller's, whose keys all of the above counts

  // Whether any of it is more than sinks, which every class has.
  bool any() const { return mask || beyond_mask(); }
  bool beyond_mask() const { return bias || key_lengths || alibi_slopes || dropout_state || softcap != 0; }
  // Whether 16 keys of a row of the mask are one load, from a multiple of 16 on.
  bool mask_has_vectors() const {
    bool aligned = mask && mask_stride[3] == 1 && reinterpret_cast<uintptr_t>(mask) % 16 == 0;
    for (int d = 0; d < 3; d++) aligned = aligned && mask_stride[d] % 16 == 0;
    return aligned;
  }
};

// Where a (batch, head, row, key) lies, with the caller's key.
KITTENS_HOST_DEVICE int64_t modifier_offset(const int64_t (&stride)[4], int batch, int head, int row, int key) {
  return batch * stride[0] + head * stride[1] + row * stride[2] + key * stride[3];
}

// A finite bias below this counts as this, so that log2(e) times it is finite too: the most negative finite number does not hide a key.
inline constexpr double least_bias_float = -1.7e38;
inline constexpr double least_bias_double = -1.2e308;

// Finite scores, in base 2, below the first are a mask's: -1e9 or the most negative number of a bias has swallowed q.k. They count as the second,
// so that the logsumexp of a row that sees nothing else keeps the digits of its number of keys: without them its weights, exp2(score - logsumexp),
// would add up to that number in the backward. No closer to 0, since masks of -1e4 are in use and such a key counts before one that is swallowed.
inline constexpr double swallowed_score_float = -1e8;
inline constexpr double swallowed_score_double = -1e18;
inline constexpr double masked_score = -16384;
template <class Real> KITTENS_HOST_DEVICE Real raise_masked(Real score) {
  constexpr Real swallowed = sizeof(Real) == 8 ? Real(swallowed_score_double) : Real(swallowed_score_float);
  constexpr Real least = sizeof(Real) == 8 ? Real(-1.7976931348623157e308) : Real(-3.4028234e38f);
  return score < swallowed && score >= least ? Real(masked_score) : score;
}

}  // namespace kittens_torch
