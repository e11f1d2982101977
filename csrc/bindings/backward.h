// The backward operators, as library.cpp registers them.
#pragma once
#include <cstdint>
#include <optional>
#include <tuple>

#include "tensor.h"

namespace kittens_torch {

// The gradients of query, key and value; empty tensors where they are not asked for.
using backward_result = std::tuple<Tensor, Tensor, Tensor>;

backward_result backward_cpu(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration);
backward_result backward_cuda(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration);
backward_result checked_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration, int64_t seed);

// The same with what modifies scores (attention/modifiers.h; sinks are in the logsumexp). Also the gradient of the bias: contiguous, in its shape.
using modified_backward_result = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <bool on_gpu>
modified_backward_result modified_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& dropout_state, double dropout_p, double softcap, bool need_query,
    bool need_key, bool need_value, bool need_bias, bool deterministic, int64_t configuration,
    const std::optional<Tensor>& mask_tiles, const std::optional<Tensor>& mask_ranges, const std::optional<Tensor>& mask_seen);
modified_backward_result checked_modified_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& dropout_state, double dropout_p, double softcap, bool need_query,
    bool need_key, bool need_value, bool need_bias, bool deterministic, int64_t configuration, int64_t seed);

}  // namespace kittens_torch
