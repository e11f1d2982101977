// The forward operators, as library.cpp registers them.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace kittens_torch {

using forward_result = std::tuple<torch::stable::Tensor, torch::stable::Tensor>;  // output, logsumexp

forward_result forward_cpu(torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale, int64_t corner,
                           int64_t window_left, int64_t window_right, int64_t configuration, int64_t splits);
forward_result forward_cuda(torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale, int64_t corner,
                            int64_t window_left, int64_t window_right, int64_t configuration, int64_t splits);
forward_result checked_forward(torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale,
                               int64_t corner, int64_t window_left, int64_t window_right, int64_t configuration, int64_t seed,
                               int64_t splits);

// The same with what modifies scores; see attention/modifiers.h.
forward_result modified_forward_cpu(
    torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale, int64_t corner,
    int64_t window_left, int64_t window_right, std::optional<torch::stable::Tensor> mask, std::optional<torch::stable::Tensor> bias,
    std::optional<torch::stable::Tensor> key_lengths, std::optional<torch::stable::Tensor> alibi_slopes,
    std::optional<torch::stable::Tensor> sinks, std::optional<torch::stable::Tensor> dropout_state, double dropout_p, double softcap,
    int64_t configuration, std::optional<torch::stable::Tensor> mask_tiles, std::optional<torch::stable::Tensor> mask_ranges,
    std::optional<torch::stable::Tensor> mask_seen);
forward_result modified_forward_cuda(
    torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale, int64_t corner,
    int64_t window_left, int64_t window_right, std::optional<torch::stable::Tensor> mask, std::optional<torch::stable::Tensor> bias,
    std::optional<torch::stable::Tensor> key_lengths, std::optional<torch::stable::Tensor> alibi_slopes,
    std::optional<torch::stable::Tensor> sinks, std::optional<torch::stable::Tensor> dropout_state, double dropout_p, double softcap,
    int64_t configuration, std::optional<torch::stable::Tensor> mask_tiles, std::optional<torch::stable::Tensor> mask_ranges,
    std::optional<torch::stable::Tensor> mask_seen);
forward_result checked_modified_forward(
    torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale, int64_t corner,
    int64_t window_left, int64_t window_right, std::optional<torch::stable::Tensor> mask, std::optional<torch::stable::Tensor> bias,
    std::optional<torch::stable::Tensor> key_lengths, std::optional<torch::stable::Tensor> alibi_slopes,
    std::optional<torch::stable::Tensor> sinks, std::optional<torch::stable::Tensor> dropout_state, double dropout_p, double softcap,
    int64_t configuration, int64_t seed);

// What is known of a bool mask: bytes of tiles, ranges of rows of tiles, bytes of keys; see attention/tile_classes.h.
using mask_classes = std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>;
mask_classes classify_mask_cpu(torch::stable::Tensor mask, torch::stable::Tensor query, torch::stable::Tensor key, int64_t corner,
                               int64_t window_left, int64_t window_right);
mask_classes classify_mask_cuda(torch::stable::Tensor mask, torch::stable::Tensor query, torch::stable::Tensor key, int64_t corner,
                                int64_t window_left, int64_t window_right);

}  // namespace kittens_torch
