// The forward operators, as library.cpp registers them.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

namespace kittens_torch {

using forward_result = std::tuple<torch::stable::Tensor, torch::stable::Tensor>;  // output, logsumexp

forward_result forward_cpu(torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale, int64_t corner,
                           int64_t window_left, int64_t window_right, int64_t configuration);
forward_result forward_cuda(torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale, int64_t corner,
                            int64_t window_left, int64_t window_right, int64_t configuration);
forward_result checked_forward(torch::stable::Tensor query, torch::stable::Tensor key, torch::stable::Tensor value, double scale,
                               int64_t corner, int64_t window_left, int64_t window_right, int64_t configuration, int64_t seed);

}  // namespace kittens_torch
