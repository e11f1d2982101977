// The operators' arguments that modify scores: what is allowed, and how a kernel sees them.
#pragma once
#include <optional>

#include "inputs.h"

namespace kittens_torch {

struct modifier_inputs {
  std::optional<Tensor> mask, bias, key_lengths, alibi_slopes, sinks, dropout_state;
  double dropout_p, softcap;
  std::optional<Tensor> mask_tiles, mask_ranges, mask_seen;  // what classify_mask made of the same mask before
};

// Checks them against query (batch, head, row, column) and key.
score_modifiers modifiers_of(const modifier_inputs& inputs, const Tensor& query, const Tensor& key);

// The classes of the mask's tiles, and the memory they are in.
struct classified_mask {
  tile_classes classes;
  std::optional<Tensor> tiles, ranges, seen;
};

// Of modifiers.mask, where there is one: launched before the kernel that reads it, on the same stream, unless the inputs have it already.
// `visible`: by the caller's keys.
classified_mask classify_mask(const score_modifiers& modifiers, const modifier_inputs& inputs, const interval_mask& visible, const Tensor& query,
                              const Tensor& key, const kittens::execution& execution);

}  // namespace kittens_torch
