// The backward operators, as library.cpp registers them.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace kittens_torch {

// The gradients of query, key and value; empty tensors where they are not asked for.
using backward_result = std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>;

backward_result backward_cpu(std::optional<torch::stable::Tensor> grad_output, std::optional<torch::stable::Tensor> grad_logsumexp,
                             torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, torch::stable::Tensor output,
                             torch::stable::Tensor logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
                             bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration);
backward_result backward_cuda(std::optional<torch::stable::Tensor> grad_output, std::optional<torch::stable::Tensor> grad_logsumexp,
                              torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, torch::stable::Tensor output,
                              torch::stable::Tensor logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
                              bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration);
backward_result checked_backward(std::optional<torch::stable::Tensor> grad_output, std::optional<torch::stable::Tensor> grad_logsumexp,
                                 torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, torch::stable::Tensor output,
                                 torch::stable::Tensor logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
                                 bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration, int64_t seed);

// The same with what modifies scores (attention/modifiers.h; sinks are in the logsumexp). Also the gradient of the bias: contiguous, in its shape.
using modified_backward_result = std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>;

modified_backward_result modified_backward_cpu(
    std::optional<torch::stable::Tensor> grad_output, std::optional<torch::stable::Tensor> grad_logsumexp, torch::stable::Tensor query,
    torch::stable::Tensor key, torch::stable::Tensor value, torch::stable::Tensor output, torch::stable::Tensor logsumexp, double scale,
    int64_t corner, int64_t window_left, int64_t window_right, std::optional<torch::stable::Tensor> mask,
    std::optional<torch::stable::Tensor> bias, std::optional<torch::stable::Tensor> key_lengths,
    std::optional<torch::stable::Tensor> alibi_slopes, std::optional<torch::stable::Tensor> dropout_state, double dropout_p, double softcap,
    bool need_query, bool need_key, bool need_value, bool need_bias, bool deterministic, int64_t configuration,
    std::optional<torch::stable::Tensor> mask_tiles, std::optional<torch::stable::Tensor> mask_ranges,
    std::optional<torch::stable::Tensor> mask_seen);
modified_backward_result modified_backward_cuda(
    std::optional<torch::stable::Tensor> grad_output, std::optional<torch::stable::Tensor> grad_logsumexp, torch::stable::Tensor query,
    torch::stable::Tensor key, torch::stable::Tensor value, torch::stable::Tensor output, torch::stable::Tensor logsumexp, double scale,
    int64_t corner, int64_t window_left, int64_t window_right, std::optional<torch::stable::Tensor> mask,
    std::optional<torch::stable::Tensor> bias, std::optional<torch::stable::Tensor> key_lengths,
    std::optional<torch::stable::Tensor> alibi_slopes, std::optional<torch::stable::Tensor> dropout_state, double dropout_p, double softcap,
    bool need_query, bool need_key, bool need_value, bool need_bias, bool deterministic, int64_t configuration,
    std::optional<torch::stable::Tensor> mask_tiles, std::optional<torch::stable::Tensor> mask_ranges,
    std::optional<torch::stable::Tensor> mask_seen);
modified_backward_result checked_modified_backward(
    std::optional<torch::stable::Tensor> grad_output, std::optional<torch::stable::Tensor> grad_logsumexp, torch::stable::Tensor query,
    torch::stable::Tensor key, torch::stable::Tensor value, torch::stable::Tensor output, torch::stable::Tensor logsumexp, double scale,
    int64_t corner, int64_t window_left, int64_t window_right, std::optional<torch::stable::Tensor> mask,
    std::optional<torch::stable::Tensor> bias, std::optional<torch::stable::Tensor> key_lengths,
    std::optional<torch::stable::Tensor> alibi_slopes, std::optional<torch::stable::Tensor> dropout_state, double dropout_p, double softcap,
    bool need_query, bool need_key, bool need_value, bool need_bias, bool deterministic, int64_t configuration, int64_t seed);

}  // namespace kittens_torch
