// The operators' arguments that modify scores: what is allowed, and how a kernel sees them.
#pragma once
#include <optional>

#include "inputs.h"

namespace kittens_torch {

struct modifier_inputs {
  // Null where there is none.
  const Tensor *mask = nullptr, *bias = nullptr, *key_lengths = nullptr, *alibi_slopes = nullptr, *sinks = nullptr, *dropout_state = nullptr;
  double dropout_p = 0, softcap = 0;
  const Tensor *mask_tiles = nullptr, *mask_ranges = nullptr, *mask_seen = nullptr;  // what classify_mask made of the same mask before
};

inline const Tensor* pointer_to(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

// Checks them against query (batch, head, row, column) and key.
score_modifiers modifiers_of(const modifier_inputs& inputs, const Tensor& query, const Tensor& key);

// What the plans ask of them.
inline void describe(forward_problem& problem, const score_modifiers& modifiers) {
  problem.modified = modifiers.any();
  problem.sinks = modifiers.sinks != nullptr;
  problem.softcap = modifiers.softcap != 0;
}

// The classes of the mask's tiles, and the memory they are in where it is not the inputs'.
struct classified_mask {
  tile_classes classes;
  Tensor tiles, ranges, seen;
};

// Of modifiers.mask, where there is one: launched before the kernel that reads it, on the same stream, unless the inputs have it already.
// `visible`: by the caller's keys.
classified_mask classify_mask(const score_modifiers& modifiers, const modifier_inputs& inputs, const interval_mask& visible, const Tensor& query,
                              const Tensor& key, const kittens::execution& execution);

}  // namespace kittens_torch
