// The forward operators, as library.cpp registers them.
#pragma once
#include <cstdint>
#include <optional>
#include <tuple>

#include "tensor.h"

namespace kittens_torch {

// Without a scale: that of torch, 1 / sqrt(head_dim).
using forward_result = std::tuple<Tensor, Tensor>;  // output, logsumexp

forward_result forward_cpu(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<double> scale, int64_t corner,
                           int64_t window_left, int64_t window_right, int64_t configuration, int64_t splits);
forward_result forward_cuda(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<double> scale, int64_t corner,
                            int64_t window_left, int64_t window_right, int64_t configuration, int64_t splits);
forward_result checked_forward(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left,
                               int64_t window_right, int64_t configuration, int64_t seed, int64_t splits);

// Into an output that the caller has made, without a logsumexp, upper-left corner or none. False where that cannot be: nothing to compute, or
// memory that would have to be copied.
bool forward_in_place(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output, std::optional<double> scale, int64_t corner);

// The same with what modifies scores; see attention/modifiers.h.
template <bool on_gpu>
forward_result modified_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, const std::optional<Tensor>& dropout_state, double dropout_p,
    double softcap, int64_t configuration, const std::optional<Tensor>& mask_tiles, const std::optional<Tensor>& mask_ranges,
    const std::optional<Tensor>& mask_seen);
forward_result checked_modified_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, const std::optional<Tensor>& dropout_state, double dropout_p,
    double softcap, int64_t configuration, int64_t seed);

// What is known of a bool mask: bytes of tiles, ranges of rows of tiles, bytes of keys; see attention/tile_classes.h.
using mask_classes = std::tuple<Tensor, Tensor, Tensor>;
mask_classes classify_mask_cpu(const Tensor& mask, const Tensor& query, const Tensor& key, int64_t corner, int64_t window_left, int64_t window_right);
mask_classes classify_mask_cuda(const Tensor& mask, const Tensor& query, const Tensor& key, int64_t corner, int64_t window_left,
                                int64_t window_right);

}  // namespace kittens_torch
